"""More prompts than a step needs: the step goes on with the first that are complete."""

from __future__ import annotations

import json
from pathlib import Path

from rlspeed.config.load import load_profile
from rlspeed.config.rules import check
from rlspeed.training.loop import train

SETTINGS = [
    "algorithm.kind=grpo",
    "algorithm.kl.where=none",
    "rollout.n=4",
    "rollout.max_new_tokens=6",
    "data.batch_size=4",
    "data.val_files=null",
    "run.save_hf=false",
    "run.plots=false",
]


def rows_and_metrics(folder: Path, *words: str) -> tuple[list[dict[str, float]], list[set[str]]]:
    """The steps' metrics, and the data rows that trained in each."""
    settings = [*SETTINGS, f"run.dir={folder}", "run.steps=3", "run.log_rollouts=64", *words]
    assert train(load_profile("quickstart", settings)) == 0
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = sorted((folder / "rollouts").glob("*.jsonl"), key=lambda f: int(f.stem.split("_")[-1]))
    rows = [{json.loads(line)["uid"].split("_")[0] for line in f.read_text().splitlines()} for f in files]
    return [m for m in metrics if "group/total" in m], rows


def test_a_step_trains_on_as_many_prompts_as_it_wants(tmp_path: Path) -> None:
    metrics, rows = rows_and_metrics(tmp_path / "run", "rollout.overprovision=2.0")
    assert [m["group/total"] for m in metrics] == [4.0, 4.0, 4.0]
    assert [len(r) for r in rows] == [4, 4, 4]
    again, same = rows_and_metrics(tmp_path / "again", "rollout.overprovision=2.0")
    assert again == metrics, "what is complete first does not depend on the clock"
    assert same == rows
    plain, others = rows_and_metrics(tmp_path / "plain")
    assert [m["group/total"] for m in plain] == [4.0, 4.0, 4.0]
    assert others != rows


def test_with_vllm_it_is_refused() -> None:
    loaded = load_profile("quickstart", ["rollout.overprovision=1.5", "model.actor.use_vllm_for_generation=true"])
    assert ["rollout.overprovision" in str(f) for f in check(loaded)] == [True]
