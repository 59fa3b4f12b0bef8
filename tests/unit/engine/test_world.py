"""A rank picks its device by number; nothing here changes which devices are visible."""

from __future__ import annotations

import ast
import socket
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlspeed.engine import world
from rlspeed.engine.world import meet, start_world
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


def met(uuids: list[str], missing: int | None = None) -> list[str]:
    """What each rank says after meeting the others, each in a thread of its own."""
    store, said = dist.HashStore(), [""] * len(uuids)

    def rank(number: int) -> None:
        try:
            meet(store, number, len(uuids), uuids[number], 1.0)
        except DeviceError as error:
            said[number] = str(error)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(len(uuids)) if i != missing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    return said


def test_ranks_on_one_gpu_are_named_by_all() -> None:
    """dev-17, dev-07: other CUDA_VISIBLE_DEVICES in their shells: said before there is a group, not by NCCL."""
    assert met(["GPU-1", "GPU-2", "GPU-3"]) == ["", "", ""]
    assert met(["", ""]) == ["", ""]
    for text in met(["GPU-1", "GPU-2", "GPU-1"]):
        assert text.startswith("ranks 0, 2: ")
        assert "GPU-1 of" in text


def test_ranks_that_do_not_come_are_named() -> None:
    """dev-08: by those that came, after the start's own wait."""
    first, _, last = met(["", "", ""], missing=1)
    assert first.startswith("rank 0: rank 1 of 3 did not start within 1 s")
    assert last.startswith("rank 2: rank 1 of 3 did not start within 1 s")


def test_the_start_of_a_run_has_its_own_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """dev-08: hang_timeout_seconds is for collectives; a rank that never starts is missed long before."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    monkeypatch.setattr(world, "START_SECONDS", 1.0)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DeviceError, match="rank 0 of 2: the ranks did not meet"):
        start_world(use_cpu=True, hang_timeout_seconds=600.0)


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
