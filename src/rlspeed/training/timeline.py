"""One step as a picture: which phase ran when, and what host and device did meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlspeed.training.clock import IDLE, PHASE_RANGE, UPDATE_RANGE
from rlspeed.training.plots import FAINT, GRID, OTHER_PHASES, PHASES, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UPDATE_COLOURS = {"forward": "#52606d", "backward": "#9c6644", "optimizer": "#b5179e"}
BUSY_BINS = 400
# share of the picture that a letter of a bar's text takes
LETTER = 0.0056


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A range of the trace; seconds from the start of the step."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Work on the device. launch: number that its launch on the host bears too; seconds from the start of the step."""

    start: float
    end: float
    launch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A traced step: ranges on the host, kernels on the device, when each launch happened on the host."""

    ranges: tuple[Span, ...]
    kernels: tuple[Kernel, ...]
    launches: Mapping[int, float]

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return max((s.end for s in self.ranges), default=0.0)

    def phases(self) -> list[Span]:
        """Ranges of the clock, without the one around them all."""
        found = [s for s in self.ranges if s.name.startswith(PHASE_RANGE) and s.name != f"{PHASE_RANGE}step"]
        return [Span(name=s.name.removeprefix(PHASE_RANGE), start=s.start, end=s.end) for s in found]

    def updates(self) -> list[Span]:
        """Ranges inside the updates, on the host."""
        found = [s for s in self.ranges if s.name.startswith(UPDATE_RANGE)]
        return [Span(name=s.name.removeprefix(UPDATE_RANGE), start=s.start, end=s.end) for s in found]


def device_spans(ranges: Sequence[Span], kernels: Iterable[Kernel], launches: Mapping[int, float]) -> list[Span]:
    """For each range of the host, from the first to the last kernel that was launched during it, on whatever thread.

    The backward pass launches from threads of its own, so the threads say nothing; the ranges must not overlap. Ranges
    without kernels are left out.
    """
    order = sorted(range(len(ranges)), key=lambda i: ranges[i].start)
    starts = np.array([ranges[i].start for i in order])
    found: dict[int, tuple[float, float]] = {}
    for kernel in kernels:
        moment = launches.get(kernel.launch)
        if moment is None:
            continue
        place = int(np.searchsorted(starts, moment, side="right")) - 1
        if place < 0 or moment > ranges[order[place]].end:
            continue
        low, high = found.get(order[place], (kernel.start, kernel.end))
        found[order[place]] = (min(low, kernel.start), max(high, kernel.end))
    return [Span(name=ranges[i].name, start=low, end=high) for i, (low, high) in sorted(found.items())]


def busy_share(kernels: Sequence[Kernel], seconds: float, bins: int) -> np.ndarray:
    """Share [bins] of each part of the step in which the device ran at least one kernel."""
    busy = np.zeros(bins)
    if seconds <= 0:
        return busy
    width, reached = seconds / bins, 0.0
    for kernel in sorted(kernels, key=lambda k: k.start):
        start, reached = max(kernel.start, reached), max(reached, kernel.end)
        while start < reached:
            place = min(int(start / width), bins - 1)
            edge = reached if place == bins - 1 else min((place + 1) * width, reached)
            if edge <= start:  # rounding: the next bin begins here
                break
            busy[place] += edge - start
            start = edge
    return np.minimum(busy / width, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row of the picture of all ranks; spans in the order in which they are drawn, `IDLE` over what it is part of."""

    label: str
    spans: Sequence[Span]

    def before(self, end: float) -> Lane:
        """The same in seconds before `end`, which are negative."""
        return replace(self, spans=[replace(s, start=s.start - end, end=s.end - end) for s in self.spans])


def draw_lanes(lanes: Sequence[Lane], path: Path, title: str) -> Path:
    """Write the picture of a step on all ranks to `path` (PNG), whole or not at all."""
    start = min((s.start for lane in lanes for s in lane.spans), default=0.0)
    rows, seconds = [], -start
    for lane in lanes:
        moved = lane.before(start).spans
        # phases as they began, and what was idle over them
        spans = sorted((s for s in moved if not _waited(s, moved)), key=lambda s: (s.name == IDLE, s.start))
        rows.append((lane.label, spans, {**_phase_colours(spans), IDLE: GRID}))
    return _draw(rows, path, title, seconds, None)


def _waited(span: Span, spans: Sequence[Span]) -> bool:
    """A phase of which this rank only waited for the end."""
    covered = sum(max(0.0, min(s.end, span.end) - max(s.start, span.start)) for s in spans if s.name == IDLE)
    return span.name != IDLE and covered > 0.9 * (span.end - span.start)


def draw_timeline(timeline: Timeline, path: Path, title: str) -> Path:
    """Write the picture to `path` (PNG), whole or not at all."""
    phases, updates = timeline.phases(), timeline.updates()
    lanes: list[tuple[str, Sequence[Span], Mapping[str, str]]] = [("phases", phases, _phase_colours(phases))]
    if updates:
        lanes.append(("update, host", updates, UPDATE_COLOURS))
    on_device = device_spans(updates, timeline.kernels, timeline.launches)
    if on_device:
        lanes.append(("update, device", on_device, UPDATE_COLOURS))
    return _draw(lanes, path, title, timeline.seconds, timeline if timeline.kernels else None)


Rows = Sequence[tuple[str, Sequence[Span], Mapping[str, str]]]


def _draw(lanes: Rows, path: Path, title: str, seconds: float, device: Timeline | None) -> Path:
    """Rows of bars over `seconds`; device: whose kernels get a row below them."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 1.4 + 0.75 * (len(lanes) + (device is not None))), layout="constrained")
        axes = figure.add_subplot()
        for row, (_, spans, colours) in enumerate(lanes):
            _lane(axes, row, spans, colours, seconds)
        labels = [name for name, _, _ in lanes]
        if device is not None:
            _busy_lane(axes, len(lanes), device)
            labels.append("device busy")
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlim(0, seconds or 1.0)
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("seconds")
        axes.set_title(title)
        _legend(axes, lanes)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        FigureCanvasAgg(figure).print_figure(str(temporary), format="png", dpi=130, facecolor="white")
    os.replace(temporary, path)
    return path


def _phase_colours(phases: Sequence[Span]) -> dict[str, str]:
    """The colours of the other pictures."""
    others = sorted({s.name for s in phases} - set(PHASES))
    return {**PHASES, **{name: OTHER_PHASES[i % len(OTHER_PHASES)] for i, name in enumerate(others)}}


def _lane(axes: Axes, row: int, spans: Sequence[Span], colours: Mapping[str, str], seconds: float) -> None:
    """Bars of one row, with name and seconds where there is room."""
    for span in spans:
        length = span.end - span.start
        axes.barh(row, length, left=span.start, height=0.62, color=colours[span.name], linewidth=0)
        if span.name != IDLE and seconds and length / seconds >= LETTER * max(len(span.name), 7):
            text = f"{span.name}\n{length:.3g} s"
            options: Any = {"ha": "center", "va": "center", "fontsize": 7.5, "color": "white", "clip_on": True}
            axes.text(span.start + length / 2, row, text, **options)


def _busy_lane(axes: Axes, row: int, timeline: Timeline) -> None:
    """How busy the device was, as an area; its mean over the step at the right end."""
    share = busy_share(timeline.kernels, timeline.seconds, BUSY_BINS)
    edges = np.linspace(0, timeline.seconds, BUSY_BINS + 1)
    base = row + 0.31
    axes.stairs(base - 0.62 * share, edges, baseline=base, fill=True, color=FAINT, alpha=0.8)
    axes.text(timeline.seconds, row, f" {share.mean():.0%}", ha="left", va="center", fontsize=9, color=FAINT)


def _legend(axes: Axes, lanes: Rows) -> None:
    """Each name once, in the order of the rows."""
    from matplotlib.patches import Patch

    colours: dict[str, str] = {}
    for _, spans, table in lanes:
        for span in spans:
            colours.setdefault(span.name, table[span.name])
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.04, 1.0), handlelength=1)
