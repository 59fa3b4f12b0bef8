"""A comparison as one HTML page that needs nothing beside itself: table, plots, and where the numbers come from."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from html import escape
from pathlib import Path

from rlspeed.bench.charts import bars, lines, short, stacked
from rlspeed.bench.compare import RATES, Comparison, Row, device_of
from rlspeed.bench.record import Record
from rlspeed.bench.runlog import PHASE
from rlspeed.data.atomic import write_text

MEMORY = ("peak_device_memory", "peak_host_memory")
STYLE = """
:root{color-scheme:light dark;--back:#fff;--ink:#1d2433;--soft:#5f6b80;--line:#d9dee7;--good:#0a7a3f;--bad:#b3261e;
--c0:#33658a;--c1:#f26419;--c2:#55a630;--c3:#8e6bbf;--c4:#e0a100;--c5:#00a5a5;--c6:#c2437d;--c7:#7d8597;--c8:#2f4b26;
--c9:#9c5c2e}
@media(prefers-color-scheme:dark){:root{--back:#151a23;--ink:#e6eaf2;--soft:#9aa5b8;--line:#323a49;--good:#63d297;
--bad:#ff8a80;--c0:#7fb2dd;--c1:#ff9a5c;--c2:#8fd16a;--c3:#bda0e8;--c4:#f3c545;--c5:#4fd0d0;--c6:#f08ab8;--c7:#aab2c0;
--c8:#8fb083;--c9:#d39a6a}}
body{background:var(--back);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin-top:2rem}.soft,figcaption{color:var(--soft)}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.3rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
th:first-child,td:first-child{text-align:left}td small{display:block;color:var(--soft)}
.better{color:var(--good)!important}.worse{color:var(--bad)!important}
figure{margin:1rem 0}svg{width:100%;height:auto;font-size:12px}svg text{fill:var(--ink)}
.spread,.axis{stroke:var(--ink);fill:none}.line{fill:none;stroke-width:2}
.perfect{fill:none;stroke:var(--soft);stroke-dasharray:5 4}code{word-break:break-all}
"""


def write_page(path: Path, found: Comparison) -> None:
    """Write the page, whole or not at all; its folder is made.

    Raises:
        DataError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page(found))


def page(found: Comparison) -> str:
    """The page's text."""
    title = "rlspeed bench: " + ", ".join(found.names)
    notes = "".join(f"<li>{escape(n)}</li>" for n in found.notes)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(_device(found.records[0]))}. Medians of the measured steps; ratios are to '
        f"{escape(found.names[0])}, verdicts from the spread (95 %, at least three steps).</p>",
        f"<ul>{notes}</ul>" if notes else "",
        "<h2>Plots</h2>",
        *_charts(found),
        "<h2>Table</h2>",
        _table(found),
        "<h2>Where it comes from</h2>",
        *map(_origin, found.names, found.records),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    head += f"<style>{STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _charts(found: Comparison) -> Iterator[str]:
    """Throughput, phases, memory, and scaling where a profile ran on several numbers of devices."""
    yield from _bars(found, found.row(RATES[0]), "Tokens per second and device, padding not counted")
    yield from _bars(found, found.row(RATES[1]), "Answer tokens per second and device")
    phases = [row for row in found.rows if row.name.startswith(PHASE)]
    if phases:
        items = []
        for place, name in enumerate(found.names):
            cells = {row.name.removeprefix(PHASE): row.cells[place] for row in phases}
            parts = {n: statistics.median(v.samples) for n, v in cells.items() if v is not None}
            if parts:
                items.append((name, parts))
        yield stacked("Phases of a step, medians", "s", items)
    for name in MEMORY:
        what = "device" if name == MEMORY[0] else "the process's resident"
        yield from _bars(found, found.row(name), f"Peak of {what} memory, largest rank")
    series = scaling(found)
    if series:
        yield lines("Scaling: all tokens per second over all devices", "tokens/s", series)


def scaling(found: Comparison) -> dict[str, list[tuple[int, float]]]:
    """(devices, tokens/s over all of them) of every profile that ran on at least two numbers of devices."""
    out: dict[str, list[tuple[int, float]]] = {}
    for record in found.records:
        value, ranks = record.values.get(RATES[0]), int(record.extra.get("processes", 1))
        if value is not None:
            out.setdefault(record.name, []).append((ranks, ranks * statistics.median(value.samples)))
    return {name: points for name, points in out.items() if len({n for n, _ in points}) > 1}


def _bars(found: Comparison, row: Row | None, title: str) -> Iterator[str]:
    if row is None:
        return
    items = [(name, cell) for name, cell in zip(found.names, row.cells) if cell is not None]
    yield bars(title, row.unit, items)


def _table(found: Comparison) -> str:
    head = "".join(f"<th>{escape(n)}</th>" for n in ("value", *found.names))
    rows = "".join(f"<tr>{_cells(row)}</tr>" for row in found.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cells(row: Row) -> str:
    out = [f"<td>{escape(row.name)}<small>{escape(row.unit)}</small></td>"]
    for place, cell in enumerate(row.cells):
        if cell is None:
            out.append("<td>-</td>")
            continue
        verdict, text = row.verdicts[place], short(statistics.median(cell.samples))
        if verdict is not None:
            ratio = "" if verdict.ratio is None else f"&#215;{verdict.ratio:.2f} "
            text += f'<small class="{verdict.call.replace(" ", "-")}">{ratio}{escape(row.words(place))}</small>'
        out.append(f"<td>{text}</td>")
    return "".join(out)


def _device(record: Record) -> str:
    known = [str(d) for d in device_of(record) if d is not None]
    cores = record.machine.get("cores")
    return " with ".join(known[:1]) + (f", {cores} cores" if cores and not record.machine.get("gpus") else "")


def _origin(name: str, record: Record) -> str:
    dirty = {True: " with changes", False: "", None: ""}[record.dirty]
    versions = ", ".join(f"{k} {v}" for k, v in record.versions.items()) or "versions not known"
    warm = [s for part in record.extra.get("warm_up_step_seconds", ()) for s in part]
    lines_ = [
        f"commit {record.commit[:12]}{dirty}; {versions}",
        f"profile {record.profile or 'not known'}, work {record.data or 'not known'}",
        "warm-up, not counted: " + (", ".join(f"{s:.2f} s" for s in warm) or "none"),
    ]
    switches = record.extra.get("switches") or ()
    if switches:
        lines_.append("switches: " + " ".join(switches))
    items = "".join(f"<li><code>{escape(line)}</code></li>" for line in lines_)
    return f"<h3>{escape(name)}</h3><ul>{items}</ul>"
