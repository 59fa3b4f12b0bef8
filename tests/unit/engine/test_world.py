"""A rank picks its device by number; nothing here changes which devices are visible."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from rlspeed.engine.world import start_world
from rlspeed.errors import DeviceError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Devices that were made current, on a machine that seems to have two; CUDA is up already."""
    seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return seen


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_rank_picks_its_device_by_number(taken: list[int], local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """dev-05: a variable set after CUDA was started would be ignored; the number of the local rank is not."""
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    world = start_world(use_cpu=False, hang_timeout_seconds=10.0)
    assert taken == [local_rank]
    assert world.device == torch.device("cuda", local_rank)


def test_a_rank_without_a_device_of_its_own_is_refused(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """dev-05, dev-16: never quietly on GPU 0."""
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(DeviceError, match="local rank 2: 2 visible"):
        start_world(use_cpu=False, hang_timeout_seconds=10.0)
    assert taken == []


def test_nothing_sets_the_visible_devices() -> None:
    """dev-05: whether it would still be in time depends on who imported what before."""
    wrong = []
    for file in [*(ROOT / "src").rglob("*.py"), *(ROOT / "commands").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            targets = [*getattr(node, "targets", ()), *getattr(node, "keys", ())]
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("putenv", "setdefault"):
                targets += node.args
            if isinstance(node, (ast.Assign, ast.Dict, ast.Call)):
                wrong += [f"{file.name}:{node.lineno}" for t in targets if t and "VISIBLE_DEVICES" in ast.unparse(t)]
    assert wrong == []
