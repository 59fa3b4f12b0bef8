"""The actor's update on one GPU: packed against padded and length-sorted padded, blocks compiled or not.

    python benchmarks/update.py OUT.json [--size 1.5b] [--answers 256] [--variants packed,packed+compile,sorted,padded]

A random-weight model of a Qwen2 shape, prompts of 32-200 tokens, answers with an end probability of 401/151,936 per
token and at most 1,024 tokens (what random weights with 401 end tokens sample). One update is forward, loss, backward
of all answers and one AdamW step with fp32 masters. Reported per variant: seconds (n, min, median, max), processed and
trained tokens per second (never padding), model FLOP utilisation against --peak, peak memory. FLOPs per token: 6 N (N:
matmul parameters with the head, the head only for answer tokens) + 6 L n d s for causal attention; recomputation does
not count.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlspeed.algorithms import loss
from rlspeed.bench.record import code_state, write_json
from rlspeed.config.schema import Optimizer
from rlspeed.engine.attention import choose_attention
from rlspeed.engine.packed import PackedBatch, pack_sequences
from rlspeed.engine.parallelize import checkpoint_blocks, compile_blocks
from rlspeed.models.attention_hook import PACKED_ATTENTION, register_attention
from rlspeed.models.build import PolicyModel
from rlspeed.planning.packing import pack
from rlspeed.training.optim import MasterAdamW
from rlspeed.training.roles import Actor

# width, layers, heads, KV heads, width of the MLP; all with tied embeddings
SHAPES = {
    "tiny": (64, 2, 4, 2, 128),
    "0.5b": (896, 24, 14, 2, 4864),
    "1.5b": (1536, 28, 12, 2, 8960),
    "3b": (2048, 36, 16, 2, 11008),
}
SHAPE_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)
VOCABULARY = 151936
STOP = 401 / VOCABULARY
CLIPS = {"clip_low": 0.2}


def make_answers(count: int) -> list[tuple[int, int]]:
    """(prompt tokens, answer tokens) of each sequence."""
    rng = random.Random(0)
    out = []
    for _ in range(count):
        length = 1
        while length < 1024 and rng.random() > STOP:
            length += 1
        out.append((rng.randint(32, 200), length))
    return out


def make_batches(
    answers: list[tuple[int, int]], variant: str, capacity: int, micro: int, device: str
) -> list[PackedBatch]:
    """Micro-batches: packed by tokens, or rows of `micro` sequences (sorted by length or as they come)."""
    lengths = [p + a for p, a in answers]
    order = list(range(len(answers)))
    if variant.startswith("packed"):
        bins = [list(b) for b in pack(lengths, capacity).bins]
    else:
        if variant.startswith("sorted"):
            order.sort(key=lambda i: -lengths[i])
        bins = [order[i : i + micro] for i in range(0, len(order), micro)]
    generator = torch.Generator().manual_seed(0)
    out = []
    for numbers in bins:
        rows = [torch.randint(300, 49_000, (lengths[n],), generator=generator).tolist() for n in numbers]
        batch = pack_sequences(rows, [answers[n][0] for n in numbers], sequence_ids=numbers).to(device)
        batch.put("advantages", torch.randn(int(batch.loss_mask.sum()), device=device))
        out.append(batch)
    return out


def model_flops(config: Qwen2Config, answers: list[tuple[int, int]]) -> float:
    """Forward and backward of one update, without recomputation."""
    width = config.hidden_size // config.num_attention_heads
    kv = config.num_key_value_heads * width
    block = 2 * config.hidden_size**2 + 2 * config.hidden_size * kv + 3 * config.hidden_size * config.intermediate_size
    tokens = sum(p + a for p, a in answers)
    trained = sum(a for _, a in answers)
    attention = sum((p + a) ** 2 for p, a in answers) * config.num_hidden_layers * config.hidden_size * 6
    return 6.0 * block * config.num_hidden_layers * tokens + 6.0 * VOCABULARY * config.hidden_size * trained + attention


def make_actor(options: argparse.Namespace, variant: str) -> tuple[Actor, str]:
    """A fresh model with its optimizer, and the attention with its reason."""
    device = torch.device(options.device)
    padded = not variant.startswith("packed")
    torch.manual_seed(0)
    register_attention()
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
        use_cache=False,
        **dict(zip(SHAPE_KEYS, SHAPES[options.size])),
    )
    config._attn_implementation = "sdpa" if padded else PACKED_ATTENTION
    with device:
        lm = Qwen2ForCausalLM(config).to(torch.bfloat16)
    head_dim = config.hidden_size // config.num_attention_heads
    backend, reason = ("sdpa", "padded") if padded else choose_attention("auto", device, torch.bfloat16, head_dim)
    policy = PolicyModel(lm, backend=backend, padded=padded).train()
    if "compile" in variant:
        compile_blocks([*lm.model.layers, lm.model.norm])
    if "recompute" in variant or padded:
        checkpoint_blocks(lm.model.layers)
    optimizer = MasterAdamW(policy, Optimizer(lr=1e-6, kind=options.optimizer), total_steps=100)
    return Actor(policy, optimizer, 1.0), f"{backend}: {reason}"


def make_loss(actor: Actor, counts: loss.GlobalCounts) -> Callable[[PackedBatch], torch.Tensor]:
    """PPO's clipped loss of one micro-batch."""

    def loss_of(batch: PackedBatch) -> torch.Tensor:
        logprobs, entropy = actor.forward(batch, with_entropy=True)
        old = batch.get("old_logprobs") if "old_logprobs" in batch.streams else logprobs.detach()
        weights = loss.token_weights("token-mean", batch.segment_ids(), batch.num_sequences, counts)
        out = loss.ppo_policy_loss(logprobs, old, batch.get("advantages"), weights, **CLIPS)
        assert entropy is not None
        return out.plus(loss.entropy_bonus(entropy, weights, coef=0.0)).loss

    return loss_of


def compile_counts() -> dict[str, int]:
    """Frames that torch.compile made code for since the process started, and graphs in them; each size of pack that
    needs code of its own adds to both."""
    frames, stats = (torch._dynamo.utils.counters[n] for n in ("frames", "stats"))
    return {"frames": int(frames["ok"]), "graphs": int(stats["unique_graphs"])}


def measure(options: argparse.Namespace, variant: str, answers: list[tuple[int, int]]) -> dict[str, Any]:
    """One variant in a fresh model."""
    device = torch.device(options.device)
    padded = not variant.startswith("packed")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    actor, attention = make_actor(options, variant)
    config = actor.model.causal_lm.config
    batches = make_batches(answers, variant, options.capacity, options.micro, options.device)
    counts = loss.GlobalCounts(tokens=sum(a for _, a in answers), sequences=len(answers))
    loss_of = make_loss(actor, counts)
    compiled: list[dict[str, int]] = []
    seconds: list[float] = []
    cuda = device.type == "cuda"
    for i in range(options.warmup + options.repeats):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        actor.update(batches, loss_of, global_tokens=counts.tokens)
        if cuda:
            torch.cuda.synchronize()
        if i >= options.warmup:
            seconds.append(time.perf_counter() - start)
        compiled.append(compile_counts())
    if options.profile and cuda:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            actor.update(batches, loss_of, global_tokens=counts.tokens)
            torch.cuda.synchronize()
        table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90)
        options.out.with_name(f"profile_{variant.replace('+', '_')}.txt").write_text(table)
    middle = statistics.median(seconds)
    tokens = sum(p + a for p, a in answers)
    computed = sum(b.num_sequences * b.max_seqlen if padded else b.num_tokens for b in batches)
    return {
        "seconds": {"n": len(seconds), "min": min(seconds), "median": middle, "max": max(seconds)},
        "tokens": tokens,
        "tokens_computed": computed,
        "micro_batches": len(batches),
        "tokens_per_second": tokens / middle,
        "trained_tokens_per_second": counts.tokens / middle,
        "model_flops": model_flops(config, answers),
        "mfu": model_flops(config, answers) / middle / options.peak,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        "attention": attention,
        "compiled_after_each_update": compiled if "compile" in variant else None,
        "pack_tokens": [b.num_tokens for b in batches],
    }


def main() -> None:
    """All variants, one record; a variant that fails is recorded with its message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="1.5b", choices=SHAPES)
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--capacity", type=int, default=16384)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak", type=float, default=790e12, help="FLOP/s of a large bf16 product on this device")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--variants", default="packed,packed+compile,packed+recompute,sorted,padded")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "adamw8bit", "adamw_offload"))
    parser.add_argument("--profile", action="store_true", help="also write the kernels of one update by time")
    options = parser.parse_args()
    answers = make_answers(options.answers)
    record: dict[str, Any] = {
        "schema": 1,
        "benchmark": "update",
        "commit": code_state()[0],
        "dirty": code_state()[1],
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "options": {k: v for k, v in vars(options).items() if k != "out"},
        "variants": {},
    }
    for variant in options.variants.split(","):
        try:
            result = measure(options, variant, answers)
        except Exception as error:  # one variant out of memory must not lose the others
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        record["variants"][variant] = result
        print(variant, json.dumps(result), flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()
        write_json(options.out, record)


if __name__ == "__main__":
    main()
