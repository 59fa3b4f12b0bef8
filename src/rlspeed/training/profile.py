"""Traces of single training steps by torch's profiler: a file for Perfetto and a picture of each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from rlspeed.engine.world import World
from rlspeed.errors import ConfigError, Fault
from rlspeed.training.clock import PHASE_RANGE, UPDATE_RANGE
from rlspeed.training.timeline import Kernel, Lane, Span, Timeline, draw_lanes, draw_timeline

FOLDER = "profile"


class StepProfiler:
    """Traces the steps that run.profile_steps names; the others run as if it were not there."""

    def __init__(self, run_dir: Path, steps: Sequence[int], total_steps: int, world: World) -> None:
        """total_steps: steps of the run.

        Raises:
            ConfigError: a step that the run does not have.
        """
        late = sorted(n for n in steps if n > total_steps)
        if late:
            found = f"{', '.join(map(str, late))}, the run has {total_steps} steps"
            fix = "name steps that there are, counted from 1; the second or third is a good one"
            raise ConfigError(Fault(where="run.profile_steps", found=found, allowed=f"1 to {total_steps}", fix=fix))
        self.folder = run_dir / FOLDER
        self.steps = frozenset(steps)
        self.world = world
        self.written: list[Path] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run training step `number`; afterwards `written` lists this rank's files of it."""
        self.written = []
        if number not in self.steps:
            yield
            return
        cuda = self.world.device.type == "cuda"
        profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])])
        profiler.start()
        try:
            yield
            if cuda:
                torch.cuda.synchronize(self.world.device)
        finally:
            profiler.stop()
        self._write(profiler, number)

    def draw_ranks(self, number: int, lanes: Sequence[Lane]) -> None:
        """The picture of a traced step on all ranks: what each did, and when it waited. Every rank calls it.

        lanes: of this rank, in seconds before the common end of the step.
        """
        if number not in self.steps or self.world.size == 1:
            return
        every = [lane for part in self.world.gather_objects(list(lanes)) for lane in part]
        if self.world.is_main:
            picture = self.folder / f"step_{number}_ranks.png"
            self.written.append(draw_lanes(every, picture, f"Step {number}, all ranks"))

    def _write(self, profiler: Any, number: int) -> None:
        """The trace of each rank, and rank 0's picture."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"step_{number}_rank_{self.world.rank}"
        target = self.folder / f"{name}.json.gz"
        temporary = self.folder / f".{name}.{os.getpid()}.json.gz"  # the ending tells the profiler to compress
        try:
            profiler.export_chrome_trace(str(temporary))
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        self.written.append(target)
        if self.world.is_main:
            picture = self.folder / f"{name}.png"
            title = f"Step {number}, rank {self.world.rank}"
            self.written.append(draw_timeline(read_timeline(profiler), picture, title))


def read_timeline(profiler: Any) -> Timeline:
    """What the picture needs of a finished torch.profiler.profile; its full event tree would take minutes to build."""
    events = profiler.profiler.kineto_results.events()
    host, kernels, launches = [], [], {}
    for event in events:
        name = event.name()
        if event.device_type() != torch.autograd.DeviceType.CPU:
            # ranges are shown on the device too; they are no work
            if not event.is_user_annotation() and not name.startswith((PHASE_RANGE, UPDATE_RANGE)):
                kernels.append((event.start_ns(), event.end_ns(), event.correlation_id()))
        elif name.startswith((PHASE_RANGE, UPDATE_RANGE)):
            host.append((name, event.start_ns(), event.end_ns()))
        elif name.startswith(("cuda", "cu", "hip")):
            launches[event.correlation_id()] = event.start_ns()
    origin = min((start for _, start, _ in host), default=0)

    def seconds(moment: int) -> float:
        return (moment - origin) / 1e9

    return Timeline(
        ranges=tuple(Span(name=n, start=seconds(a), end=seconds(b)) for n, a, b in sorted(host, key=lambda h: h[1])),
        kernels=tuple(Kernel(start=seconds(a), end=seconds(b), launch=c) for a, b, c in kernels),
        launches={c: seconds(moment) for c, moment in launches.items()},
    )
