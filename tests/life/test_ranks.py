"""Two data-parallel ranks do what one process does: same answers, same rewards, same updates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORDS = (
    *("quickstart", "run.steps=2", "run.plots=false", "run.save_hf=false", "data.batch_size=10"),
    *("data.max_val_samples=9", "rollout.n=2", "algorithm.mini_batch_size=5", "packing.capacity=64"),
)
# loads of ranks are about ranks, policy_version and counts are equal anyway
ABOUT_RANKS = "global_seqlen/"


def run(folder: Path, *words: str) -> dict[tuple[int, str], float]:
    """All metrics of a run by step and name."""
    command = [sys.executable, "-m", "rlspeed", "train", *WORDS, f"run.dir={folder}", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(r["step"], k): v for r in rows for k, v in r.items() if not k.startswith(ABOUT_RANKS)}


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """life-15: 10 prompts and 9 validation prompts over 2 ranks, bins of 64 tokens, so that ranks have several.

    fp32: sums over tokens in another order, 1e-6 relative; two updates with Adam, which divides by small numbers, leave
    1e-3 of room on norms and clip fractions. Answers, rewards and lengths are equal exactly.
    """
    one = run(tmp_path / "one")
    two = run(tmp_path / "two", "--nproc-per-node", "2")
    assert one.keys() == two.keys()
    for key, value in one.items():
        if key[1].startswith(("critic/score", "response_length", "prompt_length", "tokens/", "group/", "val-")):
            assert two[key] == value, key
        else:
            assert two[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
