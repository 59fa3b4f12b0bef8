"""Phases pay for their own work, and the peak of memory is that of the run."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest
import torch

from rlspeed.training.clock import Clock
from rlspeed.training.metrics import GIB, StepMetrics

SOURCES = Path(__file__).parents[3] / "src" / "rlspeed"


class Device:
    """A GPU that works after the call that asked for it: its queue is waited for by synchronize and by .item()."""

    def __init__(self) -> None:
        self.now = self.queue = 0.0

    def launch(self, seconds: float) -> None:
        self.queue += seconds

    def wait(self, *_: object) -> None:
        self.now, self.queue = self.now + self.queue, 0.0


def test_a_phase_pays_for_what_it_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """rep-05: two phases with equal work, the second ends with .item(); the parts sum to the step."""
    gpu = Device()
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.wait)
    monkeypatch.setattr(time, "perf_counter", lambda: gpu.now)
    clock = Clock(torch.device("cuda", 0))
    with clock.phase("step"):
        with clock.phase("gen"):
            gpu.launch(2.0)
        with clock.phase("update_actor"):
            gpu.launch(2.0)
            gpu.wait()
    assert clock.take() == {"gen": 2.0, "update_actor": 2.0, "step": 4.0}
    assert clock.take() == {}


def test_the_peak_of_memory_is_never_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """rep-06: what is reported is the allocator's own peak since the start, so a step that frees what it took shows it,
    a later step does not start from 0, and no other user of the counter loses its peak. `room.peak_of` alone resets it,
    and keeps what it was (test_room.py).
    """
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 6 << 30)
    metrics = StepMetrics()
    metrics.add_memory(torch.device("cuda", 0))
    out = metrics.reduce(lambda value: [value])
    assert out["perf/max_memory_allocated_gb"] == (5 << 30) / GIB
    assert out["perf/max_memory_reserved_gb"] == (6 << 30) / GIB
    calls = {
        f"{file.name}: {node.attr}"
        for file in SOURCES.rglob("*.py")
        if "bench" not in file.relative_to(SOURCES).parts  # measures in a process of its own
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr.startswith("reset_") and node.attr.endswith("memory_stats")
    }
    assert calls == {"room.py: reset_peak_memory_stats"}


def test_waiting_for_others_is_counted_by_rank_and_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of ten seconds are busy; what is waited for outside of the step is nobody's."""
    gpu = Device()
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.wait)
    monkeypatch.setattr(time, "perf_counter", lambda: gpu.now)
    clock, metrics = Clock(torch.device("cuda", 0)), StepMetrics()
    with clock.idle():
        gpu.launch(5.0)
    with clock.phase("step"):
        with clock.phase("gen"):
            gpu.launch(7.0)
            with clock.idle():
                gpu.launch(2.0)
        gpu.launch(6.0)
    assert clock.spans == [("idle", 12.0, 14.0), ("gen", 5.0, 14.0), ("step", 5.0, 20.0)]
    idled = clock.idled
    seconds = clock.take()
    metrics.add_idle(3, seconds, idled)
    metrics.add_idle(4, {"testing": 1.0}, {"testing": 1.0})
    got = metrics.reduce(lambda value: [value])
    assert got == {"busy/3": pytest.approx(13.0 / 15.0), "idle_s/3/gen": pytest.approx(2.0)}
    assert clock.spans == []
    assert clock.idled == {}
