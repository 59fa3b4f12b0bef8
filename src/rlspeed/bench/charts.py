"""Charts of a comparison as inline SVG: bars with their spread, stacked phases, lines over devices. No scripts.

Colours come from the page's style sheet (`--c0` ...), so that a dark page has its own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape

from rlspeed.bench.record import Value

WIDTH, LABEL, ROW, BAR = 760, 150, 34, 20
COLOURS = 10


def bars(title: str, unit: str, items: Sequence[tuple[str, Value]]) -> str:
    """A bar for each item at its median, with a line from its smallest to its largest sample."""
    most = max(max(v.samples) for _, v in items) or 1.0
    scale = (WIDTH - LABEL - 60 - 7 * len(unit)) / most
    parts = []
    for i, (name, value) in enumerate(items):
        y = 8 + i * ROW
        median = statistics.median(value.samples)
        parts.append(_text(LABEL - 8, y + 15, name, "end"))
        tip = f"{name}: median {short(median)} {unit}, {short(min(value.samples))} to {short(max(value.samples))}"
        parts.append(_rect(LABEL, y, median * scale, f"var(--c{i % COLOURS})", tip))
        low, high = LABEL + min(value.samples) * scale, LABEL + max(value.samples) * scale
        parts.append(
            f'<path class="spread" d="M{low:.1f} {y + 10}H{high:.1f}M{low:.1f} {y + 5}v10M{high:.1f} {y + 5}v10"/>'
        )
        parts.append(_text(high + 8, y + 15, f"{short(median)} {unit}", "start"))
    return _figure(title, 16 + len(items) * ROW, parts)


def stacked(title: str, unit: str, items: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """A bar for each item, made of parts one after the other, with a legend of the parts."""
    names = list(dict.fromkeys(name for _, parts in items for name in parts))
    most = max(sum(parts.values()) for _, parts in items) or 1.0
    scale = (WIDTH - LABEL - 90) / most
    out = []
    for i, (label, parts) in enumerate(items):
        y, x = 8 + i * ROW, float(LABEL)
        out.append(_text(LABEL - 8, y + 15, label, "end"))
        for name, size in parts.items():
            colour = f"var(--c{names.index(name) % COLOURS})"
            out.append(_rect(x, y, size * scale, colour, f"{label}: {name} {short(size)} {unit}"))
            x += size * scale
        out.append(_text(x + 8, y + 15, f"{short(sum(parts.values()))} {unit}", "start"))
    top = 20 + len(items) * ROW
    per_row, step = 5, (WIDTH - 20) // 5
    for k, name in enumerate(names):
        x, y = 10 + k % per_row * step, top + k // per_row * 22
        out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="var(--c{k % COLOURS})"/>')
        out.append(_text(x + 18, y + 11, name, "start"))
    return _figure(title, top + 22 * math.ceil(len(names) / per_row) + 6, out)


def lines(title: str, unit: str, series: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Values over the number of devices, a line for each name; dashed: perfect scaling of the first one."""
    height, left, right, top = 280, 70, WIDTH - 150, 16
    counts = sorted({n for points in series.values() for n, _ in points})
    first = min(next(iter(series.values())))
    perfect = [(n, first[1] * n / first[0]) for n in counts]
    most = max([y for points in series.values() for _, y in points] + [y for _, y in perfect]) or 1.0
    span = math.log2(counts[-1] / counts[0]) or 1.0

    def place(point: tuple[int, float]) -> tuple[float, float]:
        x = left + (right - left) * math.log2(point[0] / counts[0]) / span
        return x, top + (height - 60) * (1.0 - point[1] / most)

    out = [f'<path class="axis" d="M{left} {top}V{height - 44}H{right}"/>']
    for n in counts:
        out.append(_text(place((n, 0.0))[0], height - 24, str(n), "middle"))
    out.append(_text((left + right) / 2, height - 6, "devices", "middle"))
    for share in (0.0, 0.5, 1.0):
        out.append(_text(left - 6, place((counts[0], share * most))[1] + 4, short(share * most), "end"))
    out.append(f'<path class="perfect" d="{_path([place(p) for p in perfect])}"/>')
    for i, (name, points) in enumerate(series.items()):
        where = [place(p) for p in sorted(points)]
        colour = f"var(--c{i % COLOURS})"
        out.append(f'<path class="line" stroke="{colour}" d="{_path(where)}"/>')
        for (x, y), (n, value) in zip(where, sorted(points)):
            tip = escape(f"{name} on {n}: {short(value)} {unit}")
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{tip}</title></circle>')
        out.append(_text(where[-1][0] + 10, where[-1][1] + 4, name, "start"))
    return _figure(f"{title}, {unit}", height, out)


def short(value: float) -> str:
    """Three digits that count, with a letter for thousands and more."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            divisor = 1e3 if letter == "k" else size
            return f"{value / divisor:.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _figure(title: str, height: float, parts: Sequence[str]) -> str:
    name = escape(title)
    svg = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{name}">' + "".join(parts) + "</svg>"
    return f"<figure><figcaption>{name}</figcaption>{svg}</figure>"


def _rect(x: float, y: float, width: float, colour: str, tip: str) -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{BAR}"'
    return f'<rect {box} fill="{colour}"><title>{escape(tip)}</title></rect>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
