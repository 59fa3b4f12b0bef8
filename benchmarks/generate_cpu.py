"""Generation on CPU: the built-in generator beside transformers' `generate`, batch 16, uneven lengths, runs in turn.

    python benchmarks/generate_cpu.py OUT.json --model DIR [--requests 32] [--repeats 5] [--threads 2]

Greedy, fp32. Every request has its own answer length (log-normal, median 28, 4 to 128 tokens) and ends there in both;
no end token ends it earlier. transformers gets left-padded batches of 16 in the order of the requests, and a stopping
criterion that ends each row at its length, so its finished rows ride along until the batch is done; the built-in
generator takes 16 at a time and fills a place as soon as it is free. Answer tokens per second: n, min, median, max. The
tokens of both must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from rlspeed.models.build import load_causal_lm
from rlspeed.rollout.builtin import BuiltinGenerator
from rlspeed.rollout.types import Prompt, SamplingParams

BATCH = 16
LONGEST = 128
Request = tuple[list[int], int]  # prompt, answer length


def make_requests(count: int, words: int, seed: int) -> list[Request]:
    """Prompts of 16 to 96 random tokens with answer lengths of a long tail."""
    draw = random.Random(seed)
    return [
        (
            [draw.randrange(10, words) for _ in range(draw.randint(16, 96))],
            min(LONGEST, max(4, int(draw.lognormvariate(3.33, 0.8)))),
        )
        for _ in range(count)
    ]


class RowLimits(StoppingCriteria):
    """Ends each row of a batch at its own length."""

    def __init__(self, prompt_length: int, limits: list[int]) -> None:
        self.ends = torch.tensor(limits) + prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def run_transformers(model: Any, requests: list[Request]) -> list[list[int]]:
    """Answers by `generate`, batch by batch."""
    answers = []
    for start in range(0, len(requests), BATCH):
        part = requests[start : start + BATCH]
        longest = max(len(p) for p, _ in part)
        ids = torch.zeros(len(part), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(part):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        limits = [n for _, n in part]
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(limits),
            do_sample=False,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([RowLimits(longest, limits)]),
        )
        answers += [out[row, longest : longest + n].tolist() for row, n in enumerate(limits)]
    return answers


def run_builtin(generator: BuiltinGenerator, requests: list[Request]) -> list[list[int]]:
    """Answers by the built-in generator."""
    jobs = [
        Prompt(prompt_id=i, sample_id=0, token_ids=tuple(p), seed=i, max_new_tokens=n)
        for i, (p, n) in enumerate(requests)
    ]
    return [
        list(r.response_ids) for r in generator.generate(jobs, SamplingParams(max_new_tokens=LONGEST, temperature=0.0))
    ]


def measure(
    model: Any, generator: BuiltinGenerator, requests: list[Request], repeats: int
) -> tuple[dict[str, list[float]], int]:
    """Tokens per second of both, in turn, after one warm-up each; and how many answers were not the same."""
    engines = {
        "transformers": lambda: run_transformers(model, requests),
        "builtin": lambda: run_builtin(generator, requests),
    }
    tokens = sum(n for _, n in requests)
    answers = {name: run() for name, run in engines.items()}
    unlike = sum(a != b for a, b in zip(answers["transformers"], answers["builtin"]))
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, run in engines.items():
            start = time.perf_counter()
            run()
            speeds[name].append(tokens / (time.perf_counter() - start))
            print(name, round(speeds[name][-1], 1), "tokens/s", flush=True)
    return speeds, unlike


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    load = [os.getloadavg()[0]]
    model = load_causal_lm(args.model, dtype=torch.float32, attention="sdpa").eval()
    requests = make_requests(args.requests, model.config.vocab_size, 0)
    generator = BuiltinGenerator(model, max_concurrent=BATCH, max_length=512)
    speeds, unlike = measure(model, generator, requests, args.repeats)
    load.append(os.getloadavg()[0])
    median = {name: statistics.median(values) for name, values in speeds.items()}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    record = {
        "name": "generate_cpu",
        "model": Path(args.model).name,
        "batch": BATCH,
        "requests": len(requests),
        "answer_tokens": sum(n for _, n in requests),
        "longest_answer": max(n for _, n in requests),
        "unlike_answers": unlike,
        "tokens_per_second": {
            name: {"n": len(v), "min": min(v), "median": median[name], "max": max(v)} for name, v in speeds.items()
        },
        "ratio": median["builtin"] / median["transformers"],
        "load": load,
        "threads": args.threads,
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
        "versions": versions(),
        "commit": commit.stdout.strip(),
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers")}


if __name__ == "__main__":
    main()
