"""A whole GRPO step on one GPU: `rlspeed train` beside TRL with vLLM colocated, same model, prompts and lengths.

    python benchmarks/peers/grpo_step.py OUT.json --tokenizer DIR [--size 1.5b] [--peers liger-fp32]

A random-weight model of a Qwen2 shape with 401 end tokens, 32 prompts of 32-200 tokens and 8 answers each a step, at
most 1,024 new tokens, random rewards, AdamW with fp32 master weights (`liger-bf16`: TRL with pure bf16 weights). Each
runs in a process of its own, one after the other in this call. The first two steps of each warm up. Reported: seconds
of a step and of its generation (n, min, median, max), answer tokens, peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
WARM_UP = 2
PEERS = {
    "liger-fp32": ["--liger", "--micro", "16", "--dtype", "float32"],
    "liger-bf16": ["--liger", "--micro", "32", "--dtype", "bfloat16"],
    "default": ["--micro", "16", "--dtype", "float32"],
}
RUNS = {"rlspeed": ["packing.capacity=16384"], "rlspeed-small": ["packing.capacity=8192"]}


def make_inputs(folder: Path, size: str, tokenizer_dir: str) -> None:
    """folder/m: the model; folder/prompts.parquet: 512 prompts of decoded random tokens."""
    sys.path.insert(0, str(HERE.parent))
    from generate_gpu import make_model
    from transformers import AutoTokenizer

    make_model(size).save_pretrained(folder / "m")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.save_pretrained(folder / "m")
    draw = random.Random(0)
    texts = [tokenizer.decode([draw.randint(300, 49_000) for _ in range(draw.randint(32, 200))]) for _ in range(512)]
    rows = {"prompt": texts, "data_source": ["random"] * 512, "reward_model": [{"ground_truth": ""}] * 512}
    pq.write_table(pa.table(rows), folder / "prompts.parquet")


def spread(values: list[float]) -> dict[str, float]:
    return {"n": len(values), "min": min(values), "median": statistics.median(values), "max": max(values)}


def run_rlspeed(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """A run of `rlspeed train`, read from its own metrics."""
    out = Path(tempfile.gettempdir()) / f"grpo-step-{name}"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "rlspeed", "train", str(HERE / "grpo.yaml"), f"model.path={folder / 'm'}"]
    command += [f"data.train_files={folder / 'prompts.parquet'}", f"run.dir={out}", f"run.steps={steps}", *RUNS[name]]
    command += [f"reward.functions=[{{path: {HERE / 'reward.py'}:noise}}]"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (out / "timings.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "perf/time_per_step" in line][WARM_UP:]
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    tokens = [m["tokens/response"] for m in metrics if "tokens/response" in m][WARM_UP:]
    phases = {k for line in lines for k in line if k.startswith("timing_s/")}
    shutil.rmtree(out)  # its checkpoint is 24 GB
    return {
        "step_seconds": spread([line["perf/time_per_step"] for line in lines]),
        "generation_seconds": spread([line["timing_s/gen"] for line in lines]),
        "phases": {p.removeprefix("timing_s/"): statistics.median(line.get(p, 0.0) for line in lines) for p in phases},
        "answer_tokens": tokens,
        "peak_gb": max(line["perf/max_memory_allocated_gb"] for line in lines) * 2**30 / 1e9,
    }


def run_trl(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """A run of TRL."""
    command = [sys.executable, str(HERE / "trl_grpo.py"), str(folder / "m"), str(folder / "prompts.parquet")]
    done = subprocess.run(
        [*command, "--steps", str(steps), *PEERS[name]], stdout=subprocess.PIPE, text=True, check=True
    )
    line = json.loads(next(x for x in reversed(done.stdout.splitlines()) if x.startswith('{"step_seconds"')))
    return {
        "step_seconds": spread(line["step_seconds"][WARM_UP:]),
        "generation_seconds": spread(line["generation_seconds"][WARM_UP:]),
        "answer_tokens": line["answer_tokens"][WARM_UP:],
        "peak_gb": line["peak_bytes"] / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--runs", default="rlspeed,rlspeed-small")
    parser.add_argument("--peers", default="liger-fp32")
    args = parser.parse_args()
    result: dict[str, Any] = {"name": "grpo_step", "size": args.size, "answers": 256, "runs": {}}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        subprocess.run([sys.executable, __file__, "inputs", "--inputs", name, args.size, args.tokenizer], check=True)
        for run in [*args.runs.split(","), *[p for p in args.peers.split(",") if p]]:
            start = time.perf_counter()
            measure = run_rlspeed if run in RUNS else run_trl
            try:
                result["runs"][run] = measure(folder, run, args.steps)
            except (subprocess.CalledProcessError, OSError, StopIteration, KeyError) as error:
                result["runs"][run] = {"failed": repr(error)}
            result["runs"][run]["wall_seconds"] = time.perf_counter() - start
            print(run, json.dumps(result["runs"][run]), flush=True)
            result |= {"machine": machine(), "commit": os.environ.get("RLSPEED_COMMIT", "unknown")}
            args.out.write_text(json.dumps(result, indent=1) + "\n")


def machine() -> dict[str, str]:
    """Device and versions."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"device": torch.cuda.get_device_name()}
    for name in ("torch", "transformers", "vllm", "trl", "liger-kernel", "flash-attn-4"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


if __name__ == "__main__":
    if "--inputs" in sys.argv:
        make_inputs(Path(sys.argv[-3]), sys.argv[-2], sys.argv[-1])
    else:
        main()
