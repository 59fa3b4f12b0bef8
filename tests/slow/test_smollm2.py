"""GRPO on a real pretrained model through the command line, as docs/how-to/smollm2-grpo.md tells; run with -m slow."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "benchmarks" / "smollm2"
STEPS = 10


def run(*words: str) -> str:
    """Run a command in its own process; its output when it ends with 0."""
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_steps_of_grpo_on_a_real_model(tmp_path: Path) -> None:
    """Model and prompts are made by the scripts (SMOLLM2_DIR names a model that is there already)."""
    pytest.importorskip("reasoning_gym")
    model = Path(os.environ.get("SMOLLM2_DIR", str(tmp_path / "model")))
    run(sys.executable, str(BENCH / "get_model.py"), str(model))
    run(sys.executable, str(BENCH / "make_prompts.py"), str(tmp_path / "data"), "--train", "256", "--val", "64")
    folder = tmp_path / "run"
    run(
        *(sys.executable, "-m", "rlspeed", "train", str(BENCH / "grpo.yaml"), f"model.path={model}"),
        f"data.train_files={tmp_path / 'data' / 'train.parquet'}",
        f"data.val_files={tmp_path / 'data' / 'val.parquet'}",
        *("data.batch_size=4", "data.max_val_samples=8", "rollout.max_new_tokens=16", f"run.steps={STEPS}"),
        f"run.dir={folder}",
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "critic/score/mean" in r]
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    assert all(0.0 <= r["critic/score/mean"] <= 1.0 and math.isfinite(r["actor/grad_norm"]) for r in steps)
    # fp32 on both sides: the generator has the trainer's weights in every step
    assert all(r["rollout_corr/logprob_diff_mean"] < 1e-3 for r in steps)
    assert any(r["actor/grad_norm"] > 0 for r in steps), "some group had two different rewards"
    assert any(k.startswith("val-core/reasoning_gym/chain_sum/acc") for r in rows for k in r)
    assert (folder / "plots" / "reward.png").stat().st_size > 0
    assert (folder / "hf" / "model.safetensors").exists()
