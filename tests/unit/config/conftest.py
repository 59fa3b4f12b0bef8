"""A file in an empty working directory, and the users' two files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlspeed.config.load import load_profile
from rlspeed.errors import ConfigError, Fault

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write a YAML file into the working directory; returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "run.yaml") -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return name

    return write


@pytest.fixture
def seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the users' own two files."""
    for name in ("ppo_trainer.yaml", "device_mapping.yaml"):
        shutil.copy(DATA / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def faults() -> Callable[..., list[Fault]]:
    """What loading says when it refuses."""

    def faults(name: str, *words: str) -> list[Fault]:
        with pytest.raises(ConfigError) as caught:
            load_profile(name, words)
        assert caught.value.exit_code == 2
        return list(caught.value.faults)

    return faults


@pytest.fixture(scope="session")
def fault_of(faults: Callable[..., list[Fault]]) -> Callable[..., Fault]:
    """The one fault that speaks of a key."""

    def fault_of(key: str, name: str, *words: str) -> Fault:
        found = [f for f in faults(name, *words) if key in f.found]
        assert len(found) == 1, found
        return found[0]

    return fault_of
