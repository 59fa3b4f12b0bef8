"""A run of rlspeed as users start it, in processes of its own, watched by a test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

OURS = ("rlspeed", "train", "quickstart", "--nproc-per-node", "2")
SMALL = (
    "run.plots=false",
    "run.save_hf=false",
    "data.batch_size=8",
    "algorithm.mini_batch_size=8",
    "data.val_files=null",
)
WAIT_SECONDS = 120


class Started:
    """A run in its own process group, ended with everything below it when the test ends.

    node: of several launchers of one run, which share its folder.
    """

    def __init__(self, words: Sequence[str], folder: Path, node: str = "") -> None:
        self.log = folder.with_name(f"{folder.name}{node}.log")
        named = {word.partition("=")[0] for word in words}
        small = [word for word in SMALL if word.partition("=")[0] not in named]
        kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words, *small, f"run.dir={folder}"],
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=kept | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def text(self) -> str:
        return self.log.read_text()

    def until(self, happened: object, what: str) -> None:
        """Wait for a callable to be true while the run goes on."""
        assert callable(happened)
        end = time.monotonic() + WAIT_SECONDS
        while not happened():
            assert self.process.poll() is None, f"ended before {what}:\n{self.text()}"
            assert time.monotonic() < end, f"no {what}:\n{self.text()}"
            time.sleep(0.05)

    def steps(self) -> int:
        file = self.folder / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0


def alive(pid: int) -> bool:
    """False for a process that is gone or only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
