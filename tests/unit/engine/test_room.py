"""Memory that comes and goes: tensors keep their identity and their contents where that is promised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlspeed.engine import room as module
from rlspeed.engine.room import HostStay, Room, peak_of, run_peak


def test_a_room_gives_its_memory_back_and_keeps_its_tensors() -> None:
    """Neighbours lie behind one another, as what a generator fuses has to."""
    room = Room({"q": (64, 8), "k": (32, 8), "odd": (3,)}, torch.bfloat16, torch.device("cpu"))
    q, k = room.tensors["q"], room.tensors["k"]
    assert q.data_ptr() + q.nbytes == k.data_ptr()
    assert room.tensors["odd"].data_ptr() % 2 == 0
    room.free()
    assert not room.is_open
    assert q.untyped_storage().nbytes() == 0
    room.open()
    room.open()
    q.fill_(1.0)
    k.fill_(2.0)
    assert room.is_open
    assert room.tensors["q"] is q
    assert float(q.sum() + k.sum()) == 64 * 8 + 2 * 32 * 8


def test_tensors_come_back_from_the_host_as_they_left() -> None:
    """Also a second time, with other contents, into the same host buffers."""
    stay = HostStay()
    tensors = [torch.arange(12.0).view(3, 4), torch.arange(5, dtype=torch.uint8)]
    for change in (0, 1):
        for t in tensors:
            t.add_(change)
        kept = [t.clone() for t in tensors]
        stay.leave(tensors)
        assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
        assert stay.num_bytes == sum(t.nbytes for t in kept)
        stay.leave(())  # all are away already
        assert stay.num_bytes == sum(t.nbytes for t in kept)
        stay.come_back()
        stay.settle()
        assert stay.num_bytes == 0
        assert all(torch.equal(a, b) for a, b in zip(tensors, kept))
    stay.come_back()  # nothing is away


def test_the_run_s_peak_survives_the_peak_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps one peak: resetting it for a transition must not lower what the run reports."""
    now = SimpleNamespace(peak=700, held=100)
    fakes: dict[str, Any] = {
        "max_memory_allocated": lambda _: now.peak,
        "max_memory_reserved": lambda _: now.peak + 50,
        "memory_allocated": lambda _: now.held,
        "reset_peak_memory_stats": lambda _: setattr(now, "peak", now.held),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(module, "_before", {})
    device = torch.device("cuda", 0)
    with peak_of(device) as peak:
        now.peak = 300
    assert (peak.before, peak.num_bytes) == (100, 300)
    assert run_peak(device) == (700, 750)
    now.peak = 900
    assert run_peak(device) == (900, 950)
