"""SIGTERM as a request: noticed in every phase, agreed on by all ranks, answered with a checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

from rlspeed.engine.world import World


class StopRequested(Exception):
    """All ranks agreed to stop; the step in progress is given up before it changed any weight."""


class StopFlag:
    """Set by SIGTERM (and a first SIGUSR1, as Slurm sends before the time limit); asked between and inside phases.

    waiting: around every moment in which this rank waits for the others' answer.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.requested = False
        self.asked = 0
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def __call__(self) -> bool:
        """True when this rank was asked to stop; no collective, cheap enough for every token.

        A rank that asks is alive: the watchdog counts it.
        """
        self.asked += 1
        return self.requested

    def agree(self) -> None:
        """Meet all ranks.

        Raises:
            StopRequested: on every rank, when any rank was asked to stop.
        """
        with self.waiting():
            asked = self.world.any(self.requested)
        if asked:
            raise StopRequested
