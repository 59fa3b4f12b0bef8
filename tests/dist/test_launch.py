"""`--nproc-per-node` on the shipped quickstart: the same run as torchrun's, and no process outlives its launcher."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from rlspeed.engine.launch import children
from tests.dist.started import OURS, WAIT_SECONDS, alive


def test_dev_15_two_runs_at_once_and_torchrun_does_the_same(start) -> None:
    """dev-15: no fixed port and no shared file between the two; and both ways to start give the same numbers."""
    runs = [
        start("ours", *OURS, "run.steps=2"),
        start(
            "torchrun",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "rlspeed",
            "train",
            "quickstart",
            "run.steps=2",
        ),
    ]
    for run in runs:
        assert run.process.wait(WAIT_SECONDS) == 0, run.text()
    ours, theirs = ((run.folder / "metrics.jsonl").read_text() for run in runs)
    assert len(ours.splitlines()) == 2
    assert ours == theirs


@pytest.mark.parametrize("moment", ["start-up", "training"])
def test_life_10_no_process_outlives_its_launcher(start, moment: str) -> None:
    """life-10: kill -9 of the launcher gives it no chance to say goodbye."""
    run = start("run", *OURS, "run.steps=100000")
    run.until(lambda: len(children(run.process.pid)) == 2, "two processes")
    if moment == "training":
        run.until(lambda: run.steps() >= 1, "first step")
    ranks = children(run.process.pid)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(10)
    end = time.monotonic() + 10
    while any(map(alive, ranks)):
        assert time.monotonic() < end, f"alive after 10 s: {[p for p in ranks if alive(p)]}"
        time.sleep(0.05)


def test_sigterm_to_the_launcher_saves_and_leaves_with_0(start) -> None:
    run = start("run", *OURS, "run.steps=100000")
    run.until(lambda: run.steps() >= 1, "first step")
    run.process.terminate()
    assert run.process.wait(60) == 0, run.text()
    assert "stopped on request" in run.text()
    assert "Traceback" not in run.text()
    assert list((run.folder / "checkpoints").glob("step_*"))


def test_a_rank_without_a_sample_takes_part(start) -> None:
    """life-16, life-15: one prompt in a step and three in the validation, two ranks: both end, each prompt once."""
    words = ("run.steps=2", "data.batch_size=1", "algorithm.mini_batch_size=1", "rollout.n=1")
    run = start("run", *OURS, *words, "data.val_files=quickstart:val", "data.max_val_samples=3")
    assert run.process.wait(WAIT_SECONDS) == 0, run.text()
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [0, 1, 2, 2]
    trained = [r for r in rows if "actor/lr" in r]
    assert [r["tokens/prompt"] for r in trained] == [17.0, 17.0]
    assert len((run.folder / "validation" / "0.jsonl").read_text().splitlines()) <= 3


@pytest.mark.parametrize("moment", ["validation", "training"])
def test_one_rank_that_is_asked_stops_all(start, moment: str, tmp_path: Path) -> None:
    """life-09: SIGTERM to rank 1 alone, before any step and inside one: all ranks leave together, with one complete
    checkpoint of the last finished step; the exit code is 0 by declaration, and the last words say that it was a stop.
    """
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os, pathlib, time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'rank' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "    time.sleep(0.05)\n"
        "    return float(len(solution_str) % 2)\n"
    )
    words = [f"reward.functions=[{{path: '{reward}:compute_score'}}]", "run.steps=100000"]
    words += ["data.val_files=quickstart:val", "data.max_val_samples=8"] if moment == "validation" else []
    asked = tmp_path / "rank1"
    run = start("run", *OURS, *words)
    run.until(lambda: asked.exists() and asked.read_text(), "first reward on rank 1")
    if moment == "training":
        run.until(lambda: run.steps() >= 1, "first step")
    ranks = children(run.process.pid)
    os.kill(int(asked.read_text()), signal.SIGTERM)
    assert run.process.wait(60) == 0, run.text()
    assert not any(map(alive, ranks))
    assert "stopped on request after step" in run.text()
    assert "Traceback" not in run.text()
    (saved,) = (run.folder / "checkpoints").glob("step_*")
    assert (saved / "manifest.json").exists()
    state = json.loads((saved / "state.json").read_text())
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert state["step"] == (json.loads(lines[-1])["step"] if lines else 0)
    assert (state["step"] >= 1) == (moment == "training")


def test_life_17_the_first_error_is_shown_and_ends_all_ranks(start, tmp_path: Path) -> None:
    """life-17: rank 1 alone fails; rank 0 must not wait in a collective, and its own trouble must not hide the
    cause.
    """
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise ValueError('the word of rank 1')\n"
        "    return 0.0\n"
    )
    words = (f"reward.functions=[{{path: '{reward}:compute_score'}}]", "run.steps=3")
    run = start("run", *OURS, *words)
    assert run.process.wait(WAIT_SECONDS) != 0
    text = run.text()
    assert "rank 1: error" in text
    assert "the word of rank 1" in text
    assert "rank 1 ended first" in text.splitlines()[-1], text
