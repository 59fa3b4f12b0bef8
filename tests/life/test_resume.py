"""A run that is killed or stopped at any moment and resumed writes what an uninterrupted run writes, byte for byte."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlspeed.config.load import load_profile
from rlspeed.training.optim import lr_factor

# two data-parallel cuts, a critic that learns alone for two steps, a moving KL coefficient: everything with a state
WORDS = (
    *("quickstart", "run.steps=5", "run.save_every=2", "run.validate_every=2", "run.plots=false"),
    *("data.batch_size=8", "data.max_val_samples=8", "rollout.n=2", "algorithm.mini_batch_size=4"),
    *("algorithm.kl.controller=adaptive", "algorithm.kl.horizon=100", "algorithm.critic_warmup_steps=2"),
    *("optim.actor.schedule=cosine", "optim.actor.min_lr_ratio=0.1", "optim.critic.schedule=linear"),
)


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """`rlspeed train` in a process of its own."""
    command = [sys.executable, "-m", "rlspeed", "train", *WORDS, f"run.dir={folder}", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)


def finish(process: subprocess.Popen[bytes]) -> str:
    """Its output, when it ends with 0."""
    text = process.communicate(timeout=240)[0].decode()
    assert process.returncode == 0, text[-3000:]
    return text


def lines(folder: Path) -> int:
    """Lines of metrics.jsonl so far."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def interrupt(folder: Path, moment: Callable[[Path], bool], number: int, *words: str) -> int:
    """Start a run, send it a signal when `moment` comes; its exit code."""
    process = start(folder, *words)
    end = time.monotonic() + 240
    while not moment(folder) and process.poll() is None:
        assert time.monotonic() < end, "the moment never came"
        time.sleep(0.005)
    process.send_signal(number)
    process.communicate(timeout=120)
    return process.returncode


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(start(folder))
    return folder


def same(a: Path, b: Path) -> None:
    """Metrics and trained weights are equal, each step's line is there once."""
    assert (a / "metrics.jsonl").read_bytes() == (b / "metrics.jsonl").read_bytes()
    assert (a / "hf" / "model.safetensors").read_bytes() == (b / "hf" / "model.safetensors").read_bytes()
    steps = [json.loads(line) for line in (b / "timings.jsonl").read_text().splitlines()]
    trained = [row["step"] for row in steps if "timing_s/step" in row]
    assert trained == [1, 2, 3, 4, 5]


def writing(folder: Path) -> bool:
    """A checkpoint is being written."""
    return any((folder / "checkpoints").glob(".writing-*"))


def test_each_model_has_the_declared_course(whole: Path) -> None:
    """life-18: the actor's begins when it begins to learn, and both end with the run."""
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    trained = {row["step"]: row for row in rows if "critic/lr" in row}
    assert list(trained) == [1, 2, 3, 4, 5]
    profile = load_profile(str(whole)).profile
    per_step = 2 * profile.algorithm.epochs  # mini-batches of 4 of 8 prompts
    for role, cfg, steps in (("actor", profile.optim.actor, (3, 4, 5)), ("critic", profile.optim.critic, range(1, 6))):
        updates = len(steps) * per_step
        rates = [cfg.lr * lr_factor(i, cfg, updates) for i in range(updates)]
        means = {s: sum(rates[i * per_step : (i + 1) * per_step]) / per_step for i, s in enumerate(steps)}
        assert {s: row[f"{role}/lr"] for s, row in trained.items() if f"{role}/lr" in row} == pytest.approx(means), role


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(lambda f: lines(f) >= 1, id="after the first validation"),
        pytest.param(lambda f: lines(f) >= 3, id="after step 2"),
        pytest.param(writing, id="while saving"),
        pytest.param(lambda f: lines(f) >= 6, id="after step 4"),
    ],
)
def test_kill_and_resume(whole: Path, tmp_path: Path, moment: Callable[[Path], bool]) -> None:
    """life-01, life-04, life-06, life-18: kill -9, then --resume; also across the end of the critic's warm-up."""
    folder = tmp_path / "run"
    assert interrupt(folder, moment, signal.SIGKILL) == -signal.SIGKILL
    finish(start(folder, "--resume"))
    same(whole, folder)


@pytest.mark.parametrize("count", [1, 4])
def test_stop_and_resume(whole: Path, tmp_path: Path, count: int) -> None:
    """SIGTERM: exit code 0, a complete checkpoint of the last finished step, and the rest by resuming the folder."""
    folder = tmp_path / "run"
    assert interrupt(folder, lambda f: lines(f) >= count, signal.SIGTERM) == 0
    last = (folder / "checkpoints" / "last").resolve()
    assert (last / "manifest.json").exists()
    done = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert json.loads((last / "state.json").read_text())["step"] == done
    process = subprocess.run(
        [sys.executable, "-m", "rlspeed", "train", str(folder), "--resume"],
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert process.returncode == 0, process.stderr.decode()[-3000:]
    same(whole, folder)


def test_a_folder_with_a_run_is_not_written_over(whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    process = start(whole)
    text = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 2
    assert "already holds a run" in text
    assert "Traceback" not in text
    assert (whole / "metrics.jsonl").read_bytes() == before
