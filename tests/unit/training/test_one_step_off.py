"""Answers one step ahead: of the weights before the last update, corrected, and never older."""

from __future__ import annotations

import json
from pathlib import Path

from rlspeed.config.load import load_profile
from rlspeed.config.rules import check
from rlspeed.training.loop import train

SETTINGS = [
    *("rollout.n=2", "rollout.max_new_tokens=6", "data.batch_size=6", "algorithm.mini_batch_size=3"),
    *("data.val_files=null", "run.save_hf=false", "run.plots=false", "run.log_rollouts=64"),
]
AHEAD = ("rollout.one_step_off=true", "rollout.correction=token_tis")


def steps(folder: Path, *words: str) -> list[dict[str, float]]:
    assert train(load_profile("quickstart", [*SETTINGS, f"run.dir={folder}", "run.steps=4", *words])) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def versions(folder: Path) -> list[set[int]]:
    files = [folder / "rollouts" / f"{n}.jsonl" for n in range(1, 5)]
    return [{json.loads(line)["policy_version"] for line in f.read_text().splitlines()} for f in files]


def test_answers_are_one_update_old_and_say_so(tmp_path: Path) -> None:
    got = steps(tmp_path / "ahead", *AHEAD)
    assert [m["rollout_corr/staleness"] for m in got] == [0.0, 1.0, 1.0, 1.0]
    assert [m["rollout_corr/policy_version"] for m in got] == [0.0, 0.0, 1.0, 2.0]
    assert versions(tmp_path / "ahead") == [{0}, {0}, {1}, {2}]
    assert got[1]["rollout_corr/logprob_diff_mean"] > 10 * got[0]["rollout_corr/logprob_diff_mean"]
    assert got[1]["rollout_corr/weight_mean"] != 1.0, "what older weights sampled is weighted"
    plain = steps(tmp_path / "plain", AHEAD[1])
    assert versions(tmp_path / "plain") == [{0}, {1}, {2}, {3}]
    assert "rollout_corr/staleness" not in plain[0]
    both = [{k: v for k, v in m.items() if "staleness" not in k} for m in (got[0], plain[0])]
    assert both[0] == both[1], "the first step has nothing ahead of it"
    assert steps(tmp_path / "again", *AHEAD) == got


def test_without_a_correction_it_is_refused() -> None:
    (fault,) = check(load_profile("quickstart", [AHEAD[0]]))
    assert "rollout.one_step_off" in fault.found
    assert check(load_profile("quickstart", list(AHEAD))) == []
