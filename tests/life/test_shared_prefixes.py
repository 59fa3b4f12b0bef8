"""A run whose answers share their prompts learns what the plain run learns, on one rank and on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

# bins of 64 tokens: a group of four answers is split over bins, too; GRPO has the reference in the loss, PPO a critic
WORDS = ("quickstart", "run.steps=2", "run.plots=false", "data.batch_size=8", "data.max_val_samples=4", "rollout.n=4")
SIZES = ("packing.capacity=41", "algorithm.mini_batch_size=4")
KINDS = {
    "ppo": (),
    "grpo": ("algorithm.kind=grpo", "algorithm.kl.where=loss", "algorithm.policy_loss=gspo"),
}
SAVED = "pack/shared_tokens_saved"


def run(folder: Path, *words: str) -> tuple[dict[tuple[int, str], float], str]:
    """Metrics by step and name, and what the run says."""
    command = [sys.executable, "-m", "rlspeed", "train", *WORDS, *SIZES, f"run.dir={folder}", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = {(r["step"], k): v for r in rows for k, v in r.items() if not k.startswith("global_seqlen/")}
    return values, done.stderr + done.stdout


@pytest.mark.parametrize(("kind", "ranks"), [("ppo", 1), ("grpo", 1), ("grpo", 2)])
def test_shared_equals_plain(tmp_path: Path, kind: str, ranks: int) -> None:
    """Two steps of two updates. fp32, sums in another order: the room that test_ranks.py gives."""
    plain, _ = run(tmp_path / "plain", *KINDS[kind])
    shared, said = run(tmp_path / "shared", *KINDS[kind], "model.shared_prefixes=true", "--nproc-per-node", str(ranks))
    assert "checked: shared prompts = plain packs" in said
    saved = {key: value for key, value in shared.items() if key[1] == SAVED}
    assert len(saved) == 2
    assert all(value > 0 for value in saved.values())
    assert shared.keys() - saved.keys() == plain.keys()
    for key, value in plain.items():
        assert shared[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
    wanted, got = (load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("plain", "shared"))
    for name, weight in wanted.items():
        gaps = (weight - got[name]).abs()
        assert float(gaps.max()) < 1e-4, name
        assert float(gaps.mean()) < 1e-6, name
