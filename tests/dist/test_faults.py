"""A rank that dies or hangs ends the run for all, with the rank and the phase named, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from rlspeed.engine.launch import children, first_to_fail, how
from tests.dist.started import Started, alive

# the ranks' own numbers in files, then what rank 1 does
REWARD = """
import os, pathlib, re, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    pathlib.Path({folder!r}, 'rank' + os.environ['RANK']).write_text(str({pid}))
    if os.environ['RANK'] in {who!r}:
        {does}
    return 0.0
"""
ENDS_WITHIN_SECONDS = 30  # what users are promised


def run_of(
    start, folder: Path, ranks: int, does: str, *words: str, pid: str = "os.getpid()", who: str = "1"
) -> Started:
    """A run whose reward function does something on rank 1 (the digits of `who`)."""
    reward = folder / "reward.py"
    reward.write_text(REWARD.format(folder=str(folder), does=does, pid=pid, who=who))
    function = f"reward.functions=[{{path: '{reward}:compute_score'}}]"
    quiet = ("run.startup_checks=false", "run.steps=3", "reward.timeout_seconds=1000")
    return start("run", "rlspeed", "train", "quickstart", "--nproc-per-node", str(ranks), function, *quiet, *words)


def below(pid: int) -> list[int]:
    """All processes below one."""
    found = children(pid)
    return found + [p for child in found for p in below(child)]


@pytest.mark.parametrize(("ranks", "busy"), [(2, "01"), (4, "1")])
def test_life_20_a_killed_rank_ends_all(start, tmp_path: Path, ranks: int, busy: str) -> None:
    """life-20: SIGKILL inside of a step, with worker processes of the rewards on each rank. Of two ranks the other one
    is at its own work, and only the watchdog can end it; of four the others stand in a collective. No process and no
    half file stays.
    """
    run = run_of(start, tmp_path, ranks, "time.sleep(1000)", "reward.workers=1", pid="os.getppid()", who=busy)
    asked = [tmp_path / f"rank{r}" for r in range(ranks)]
    run.until(lambda: all(a.exists() and a.read_text() for a in asked), "rewards on all ranks")
    processes = below(run.process.pid)
    assert len(processes) >= 2 * ranks
    os.kill(int(asked[1].read_text()), signal.SIGKILL)
    assert run.process.wait(ENDS_WITHIN_SECONDS) == 128 + signal.SIGKILL, run.text()
    text = run.text()
    assert "rank 1 ended first, killed by SIGKILL" in text.splitlines()[-1], text
    assert "rank 1 is gone without a word" in text
    assert re.search("step 1, phase (gen|exchange|old_log_prob|ref|values|reward)", text), (
        "functions run while others are generated"
    )
    assert "Traceback" not in text
    end = time.monotonic() + 10
    while any(map(alive, processes)):
        assert time.monotonic() < end, [p for p in processes if alive(p)]
        time.sleep(0.05)
    names = [p.name for p in run.folder.rglob("*") if p.is_file()]
    assert sorted(names) == ["resolved.yaml"], names


@pytest.mark.parametrize("hang", ["sleeps", "holds the interpreter"])
def test_life_21_a_hang_is_reported_with_phase_and_rank(start, tmp_path: Path, hang: str) -> None:
    """life-21: rank 1 never comes back from its reward; also when no thread of it can run any more, as in a hopeless
    pattern: then its own timer prints where it stands.
    """
    does = "time.sleep(1000)" if hang == "sleeps" else "re.match('(a+)+b', 'a' * 60)"
    run = run_of(start, tmp_path, 2, does, "run.hang_timeout_seconds=8")
    end = time.monotonic() + 120
    while "run.hang_timeout_seconds is 8" not in run.text() and time.monotonic() < end:
        time.sleep(0.1)
    if hang == "sleeps":
        assert run.process.wait(ENDS_WITHIN_SECONDS) == 1, run.text()
    text = run.text()
    phase = (
        "reward" if hang == "sleeps" else "(gen|exchange|old_log_prob|ref|values|reward)"
    )  # the pattern begins beside generation
    assert re.search(f"hang in step 1, phase {phase}: rank 1 has not come where rank 0 waits", text)
    assert "reward.py" in text, "the stack of the late rank"
    assert "in compute_score" in text or "in match" in text


def test_the_rank_that_a_signal_killed_is_named_before_those_that_followed() -> None:
    """Rank 0 lost its neighbour and left in the same second; rank 2 was ended by the agent."""
    failures = {0: (100, 1), 1: (100, -signal.SIGSEGV), 2: (100, -signal.SIGTERM), 3: (130, -signal.SIGKILL)}
    assert first_to_fail(failures) == (1, -signal.SIGSEGV)
    assert first_to_fail({0: (102, 1), 2: (100, 2), 1: (100, -signal.SIGTERM)}) == (2, 2)
    assert how(-signal.SIGKILL).startswith("killed by SIGKILL (")
    assert how(3) == "with exit code 3"
