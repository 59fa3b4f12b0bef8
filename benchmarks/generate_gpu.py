"""Generation on one GPU: the built-in generator beside vLLM, same model, same prompts, runs in turn.

    python benchmarks/generate_gpu.py OUT.json --tokenizer DIR [--size 1.5b] [--engines builtin,vllm] [--repeats 5]

A random-weight model of a Qwen2 shape with 401 end tokens (answers end after about 380 tokens, with the variance that
brings), 256 prompts of 32 to 256 tokens, at most 1,024 new tokens, temperature 1, the log-prob of each sampled token.
Reported per engine: answer tokens per second (n, min, median, max), seconds, steps' latency, the tail. Then, for the
built-in one, seconds per decode step at fixed batches of 1, 32 and 256 against the floor: the weights and the keys and
values read once at --bandwidth. And the distance of both engines' log-probs from the trainer's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from rlspeed.rollout.builtin import BuiltinGenerator
from rlspeed.rollout.types import Prompt, SamplingParams

# width, layers, heads, KV heads, width of the MLP, tied
SHAPES = {
    "tiny": (256, 2, 4, 2, 512, True),
    "0.5b": (896, 24, 14, 2, 4864, True),
    "1.5b": (1536, 28, 12, 2, 8960, True),
    "3b": (2048, 36, 16, 2, 11008, True),
    "7b": (3584, 28, 28, 4, 18944, False),
}
VOCABULARY = 151936
PROMPTS, LONGEST = 256, 1024


def make_model(size: str) -> Any:
    """A model of the shape on the device, bf16."""
    width, layers, heads, kv_heads, inner, tied = SHAPES[size]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    ends = torch.randint(50_000, 151_000, (400,), generator=torch.Generator().manual_seed(3)).tolist()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [2, *ends], 0
    return model.eval()


def make_prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randint(3, 49000) for _ in range(draw.randint(32, 256))] for _ in range(PROMPTS)]


class Builtin:
    """Our generator over the module's own weights."""

    def __init__(self, model: Any, stops: tuple[int, ...]) -> None:
        self.generator = BuiltinGenerator(model, max_concurrent=PROMPTS, max_length=2048)
        self.sampling = SamplingParams(max_new_tokens=LONGEST, temperature=1.0, stop_token_ids=stops)

    def run(self, prompts: list[list[int]], seed: int) -> dict[str, Any]:
        jobs = [
            Prompt(prompt_id=i, sample_id=0, token_ids=tuple(p), seed=1000 * seed + i) for i, p in enumerate(prompts)
        ]
        torch.cuda.synchronize()
        start = time.perf_counter()
        rollouts = self.generator.generate(jobs, self.sampling)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        stats = self.generator.stats
        return {
            "seconds": seconds,
            "tokens": stats.tokens,
            "longest": max(len(r.response_ids) for r in rollouts),
            "latency_mean_ms": stats.latency_mean * 1e3,
            "latency_std_ms": stats.latency_std * 1e3,
            "latency_p99_ms": stats.latency_p99 * 1e3,
            "tail_seconds": stats.tail_seconds,
            "answers": [(r.prompt_ids, r.response_ids, r.logprobs) for r in rollouts[:16]],
        }


class Vllm:
    """vLLM in this process, at its defaults but for memory and length."""

    def __init__(self, model: Any, stops: tuple[int, ...], tokenizer: str) -> None:
        from vllm import LLM

        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
            start = time.perf_counter()
            self.engine = LLM(
                folder,
                dtype="bfloat16",
                gpu_memory_utilization=0.45,
                max_model_len=2048,
                max_num_seqs=PROMPTS,
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                seed=0,
            )
            self.start_seconds = time.perf_counter() - start
        self.stops = list(stops)

    def run(self, prompts: list[list[int]], seed: int) -> dict[str, Any]:
        from vllm import SamplingParams as Params

        params = Params(temperature=1.0, max_tokens=LONGEST, logprobs=0, stop_token_ids=self.stops)
        self.engine.reset_prefix_cache()
        torch.cuda.synchronize()
        start = time.perf_counter()
        outputs = self.engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        answers = [o.outputs[0] for o in outputs]
        return {
            "seconds": seconds,
            "tokens": sum(len(a.token_ids) for a in answers),
            "longest": max(len(a.token_ids) for a in answers),
            "answers": [
                (tuple(p), tuple(a.token_ids), tuple(d[t].logprob for d, t in zip(a.logprobs, a.token_ids)))
                for p, a in zip(prompts[:16], answers[:16])
            ],
        }


@torch.no_grad()
def trainer_gap(model: Any, answers: list[Any]) -> dict[str, float]:
    """Mean and largest |difference| to transformers' own forward in bf16 with fp32 log-softmax."""
    gaps = []
    for prompt, response, logprobs in answers:
        ids = torch.tensor([list(prompt) + list(response)], device="cuda")
        hidden = model.model(ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
        logp = torch.mm(hidden, model.lm_head.weight.T, out_dtype=torch.float32).log_softmax(-1)
        want = logp.gather(1, torch.tensor(response, device="cuda")[:, None])[:, 0]
        gaps.append((want - torch.tensor(logprobs, device="cuda")).abs())
    gap = torch.cat(gaps)
    return {"mean": float(gap.mean()), "max": float(gap.max()), "tokens": gap.numel()}


def spread(values: list[float]) -> dict[str, float]:
    return {"n": len(values), "min": min(values), "median": statistics.median(values), "max": max(values)}


def step_floor(model: Any, size: str, batch: int, bandwidth: float) -> dict[str, float]:
    """Seconds per decode step at a fixed batch: prompts of 128 tokens, 256 new ones, no stops."""
    _, layers, heads, kv_heads, _, _ = SHAPES[size]
    width = model.config.hidden_size // heads
    generator = BuiltinGenerator(model, max_concurrent=batch, max_length=512)
    draw = random.Random(5)
    jobs = [
        Prompt(prompt_id=i, sample_id=0, token_ids=tuple(draw.randint(3, 49000) for _ in range(128)), seed=i)
        for i in range(batch)
    ]
    times = []
    for new in (8, 264, 264, 264, 264, 264):
        torch.cuda.synchronize()
        start = time.perf_counter()
        generator.generate(jobs, SamplingParams(max_new_tokens=new))
        torch.cuda.synchronize()
        times.append((new, time.perf_counter() - start))
    short = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        generator.generate(jobs, SamplingParams(max_new_tokens=8))
        torch.cuda.synchronize()
        short.append(time.perf_counter() - start)
    step = (statistics.median(t for n, t in times if n == 264) - statistics.median(short)) / 256
    embed = model.model.embed_tokens.weight
    weights = sum(p.numel() for p in model.parameters()) - (0 if model.config.tie_word_embeddings else embed.numel())
    read = 2 * (weights + layers * 2 * kv_heads * width * batch * (128 + 132))
    generator.close()
    return {"batch": batch, "step_ms": step * 1e3, "floor_ms": read / bandwidth * 1e3, "share": read / bandwidth / step}


def profile(builtin: Builtin, prompts: list[list[int]], path: Path) -> None:
    """Kernel table of one run."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        builtin.run(prompts, 99)
    path.write_text(seen.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="1.5b", choices=SHAPES)
    parser.add_argument("--engines", default="builtin,vllm")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second that a copy reaches")
    parser.add_argument("--profile", type=Path, help="write a kernel table of one built-in run here")
    parser.add_argument("--no-floor", action="store_true")
    args = parser.parse_args()
    model = make_model(args.size)
    stops = tuple(model.generation_config.eos_token_id)
    engines: dict[str, Any] = {}
    for name in args.engines.split(","):
        start = time.perf_counter()
        engines[name] = Builtin(model, stops) if name == "builtin" else Vllm(model, stops, args.tokenizer)
        engines[name].run(make_prompts(1), 0)  # warm-up: compiles, captures
        print(name, "ready after", round(time.perf_counter() - start, 1), "s", flush=True)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for repeat in range(args.repeats):
        for name, engine in engines.items():
            runs[name].append(engine.run(make_prompts(100 + repeat), repeat + 1))
            print(name, {k: v for k, v in runs[name][-1].items() if k != "answers"}, flush=True)
    gaps = {name: trainer_gap(model, got[-1]["answers"]) for name, got in runs.items()}
    if args.profile and "builtin" in engines:
        profile(engines["builtin"], make_prompts(100), args.profile)
    engines.clear()
    gc.collect()
    torch.cuda.empty_cache()
    floors = []
    if not args.no_floor:
        floors = [step_floor(model, args.size, batch, args.bandwidth) for batch in (1, 32, 256)]
    result = {
        "name": "generate_gpu",
        "size": args.size,
        "prompts": PROMPTS,
        "max_new_tokens": LONGEST,
        "engines": {
            name: {
                "tokens_per_second": spread([r["tokens"] / r["seconds"] for r in got]),
                "seconds": spread([r["seconds"] for r in got]),
                "trainer_gap": gaps[name],
                "runs": [{k: v for k, v in r.items() if k != "answers"} for r in got],
            }
            for name, got in runs.items()
        },
        "decode_floor": floors,
        "bandwidth": args.bandwidth,
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "commit": os.environ.get("RLSPEED_COMMIT", "unknown"),
        "python": platform.python_version(),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    json.dump({k: v for k, v in result.items() if k not in ("engines",)}, sys.stdout)
    for name, got in result["engines"].items():
        print(name, got["tokens_per_second"], got["trainer_gap"])


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "transformers", "triton", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
