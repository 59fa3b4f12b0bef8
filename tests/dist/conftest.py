"""Lets the children of a spawn import the test modules by name, however pytest was started; starts runs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from tests.dist.started import Started


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    """Start `python -m WORDS run.dir=tmp_path/NAME`."""
    runs: list[Started] = []

    def start(name: str, *words: str, node: str = "") -> Started:
        runs.append(Started(words, tmp_path / name, node))
        return runs[-1]

    yield start
    for run in runs:
        try:
            os.killpg(run.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
