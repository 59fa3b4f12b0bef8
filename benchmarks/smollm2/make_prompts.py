"""Prompts with verifiable answers from reasoning-gym, as parquet files in verl's columns.

    python -m pip install reasoning-gym
    python benchmarks/smollm2/make_prompts.py OUT_DIR [--train 4096] [--val 256]

Writes OUT_DIR/train.parquet and OUT_DIR/val.parquet. The tasks are sums and differences of two numbers (`chain_sum`,
one or two digits) and products of one-digit numbers (`products`): SmolLM2-135M-Instruct answers a fifth of them at
first. No question of the validation file occurs in the training file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import reasoning_gym

TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
SHARE = {"chain_sum": 0.85, "products": 0.15}
INSTRUCTION = "Answer with one number."


def questions(task: str, count: int, seed: int, avoid: set[str]) -> list[dict[str, object]]:
    """`count` rows of one task whose questions are not in `avoid`; the task's own repetitions are kept."""
    rows: list[dict[str, object]] = []
    data = reasoning_gym.create_dataset(task, size=20 * count, seed=seed, **TASKS[task])
    for item in data:
        if item["question"] in avoid:
            continue
        rows.append(
            {
                "data_source": f"reasoning_gym/{task}",
                "prompt": [{"role": "user", "content": f"{item['question']} {INSTRUCTION}"}],
                "ability": "arithmetic",
                "reward_model": {"style": "rule", "ground_truth": str(item["answer"])},
                "extra_info": {"question": item["question"], "index": len(rows)},
            }
        )
        if len(rows) == count:
            return rows
    raise SystemExit(f"{task}: only {len(rows)} of {count} questions")


def main() -> None:
    """Validation first, so that training can avoid its questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=4096)
    parser.add_argument("--val", type=int, default=256)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    avoid: set[str] = set()
    for split, count, seed in (("val", options.val, 1), ("train", options.train, 2)):
        rows = []
        for task, share in SHARE.items():
            # a one-digit product has 100 questions in all: about a third of them is held out
            rows += questions(task, round(share * count), seed, avoid)
        if split == "val":
            avoid = {str(r["extra_info"]["question"]) for r in rows}  # type: ignore[index]
        pq.write_table(pa.Table.from_pylist(rows), options.out / f"{split}.parquet", compression="zstd")
        print(f"{options.out / split}.parquet: {len(rows)} rows")


if __name__ == "__main__":
    main()
