"""Seconds of each phase, with the device finished at both ends, so that no phase pays for another's kernels."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function

# ranges of a trace: phase/gen, phase/update_actor, ...; update/forward, update/backward, update/optimizer inside
PHASE_RANGE, UPDATE_RANGE = "phase/", "update/"
IDLE, OUTSIDE = "idle", "start"


class Clock:
    """Sums wall-clock seconds by phase name.

    idled: of them, seconds in which this rank waited for others. spans: (phase, start, end) in the order of their ends,
    by time.perf_counter; `IDLE` where it waited.

    step, current and moves (phases begun and ended so far) are read by the watchdog's thread; broken: the phase that
    an error ended first.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.idled: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        self.current = OUTSIDE
        self.step = 0
        self.moves = 0
        self.broken = ""

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as `name`; the same name twice adds up. A profiler sees it as the range phase/`name`."""
        outer, self.current = self.current, name
        self.moves += 1
        with record_function(f"{PHASE_RANGE}{name}"):
            start = self._now()
            try:
                yield
            except BaseException:
                self.broken = self.broken or name
                raise
            finally:
                end = self._now()
                self.seconds[name] = self.seconds.get(name, 0.0) + end - start
                self.spans.append((name, start, end))
                self.current = outer
                self.moves += 1

    @contextmanager
    def idle(self) -> Iterator[None]:
        """The block meets other ranks and does no work of its own; counted inside of a phase."""
        if self.current == OUTSIDE:
            yield
            return
        start = self._now()
        try:
            yield
        finally:
            end = self._now()
            self.idled[self.current] = self.idled.get(self.current, 0.0) + end - start
            self.spans.append((IDLE, start, end))

    def take(self) -> dict[str, float]:
        """Seconds since the last call, by phase; forgets what was idle and the spans, too."""
        out, self.seconds = self.seconds, {}
        self.idled, self.spans = {}, []
        return out
