"""The report of check-devices on a terminal (tables in colour) or in a pipe (one line per fact)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlspeed.planning.devices import Placement, Role
from rlspeed.planning.fit import Forecast
from rlspeed.planning.machine import GIB
from rlspeed.planning.report import Report

COLOURS = {
    Role.ACTOR: "green",
    Role.ROLLOUT: "cyan",
    Role.CRITIC: "magenta",
    Role.REFERENCE: "yellow",
    Role.REWARD: "blue",
}
PARTS = ("weights", "gradients", "optimizer", "activations", "kv_cache", "logits", "buffers", "peak")
MOST_COLUMNS = 16  # ranks in the table of bytes per pair; more are listed


def show_report(out: Console, report: Report, *, with_plan: bool, smoke: dict[str, Any] | None) -> None:
    """Print everything; problems last, where they are seen."""
    if out.is_terminal:
        out.print(_picture(report))
        if report.forecasts:
            out.print(_memory_table(report.forecasts))
        if report.floors:
            out.print(_floor_table(report))
    else:
        for line in (*_role_lines(report), *_memory_lines(report.forecasts), *_floor_lines(report)):
            out.print(line, highlight=False, soft_wrap=True, markup=False)
    for line in report.comparison.lines() if report.comparison is not None else ():
        out.print(line, highlight=False, soft_wrap=True, markup=False)
    if with_plan:
        _show_plan(out, report)
    if smoke is not None:
        _show_smoke(out, smoke)
    for note in report.notes:
        out.print(f"note: {note}", style="dim", highlight=False, soft_wrap=True, markup=False)
    for fault in report.problems:
        out.print(f"problem: {fault}", style="red", highlight=False, soft_wrap=True, markup=False)
    if not report.problems:
        out.print("no problems", style="green", highlight=False, soft_wrap=True)


def _picture(report: Report) -> Table:
    """Devices x roles."""
    devices, machine = report.devices, report.machine
    table = Table(title="roles on devices")
    table.add_column("rank")
    table.add_column("device")
    for role in devices.roles:
        table.add_column(str(role), style=COLOURS[role])
    for rank in range(devices.world_size):
        device = machine.device(rank)
        name = f"{device.entry}: {device.name}, {device.memory_bytes / GIB:.0f} GiB" if device else "host"
        cells = [_cell(place, rank) for place in devices.roles.values()]
        table.add_row(str(rank), name, *cells)
    return table


def _cell(place: Placement, rank: int) -> str:
    """What a rank is in a role's mesh."""
    if rank not in place.ranks:
        return ""
    if place.device == "cpu":
        return "on the host"
    if len(place.ranks) % (place.tp * place.sp):
        return "#"
    at = place.mesh().coordinate(rank)
    parts = [f"dp {at['dp_replicate'] * place.mesh().size('dp_shard') + at['dp_shard']}"]
    parts += [f"{axis} {at[axis]}" for axis in ("sp", "tp") if place.mesh().size(axis) > 1]
    return "# " + " ".join(parts)


def _role_lines(report: Report) -> list[str]:
    """One line per role."""
    lines = []
    for role, place in report.devices.roles.items():
        ranks = " ".join(map(str, place.ranks))
        shared = f", shares with {place.shares_with}" if place.shares_with else ""
        where = f"{place.device} ranks {ranks}" if place.ranks else f"{place.device}, no rank"
        lines.append(f"{role}: {where}; dp {place.dp} x sp {place.sp} x tp {place.tp}; {place.backend}{shared}")
    return lines


def _grouped(forecasts: Sequence[Forecast]) -> list[tuple[str, Forecast]]:
    """Forecasts of ranks with the same numbers, once, with the ranks that they hold for."""
    groups: list[tuple[list[int], Forecast]] = []
    for found in forecasts:
        for ranks, first in groups:
            if (first.phases, first.usable_bytes) == (found.phases, found.usable_bytes):
                ranks.append(found.rank)
                break
        else:
            groups.append(([found.rank], found))
    return [(_spans(ranks), first) for ranks, first in groups]


def _spans(ranks: Sequence[int]) -> str:
    """`0-3, 6`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _memory_table(forecasts: Sequence[Forecast]) -> Table:
    table = Table(title="predicted memory, GiB")
    for name in ("ranks", "phase", *PARTS, "of"):
        table.add_column(name.replace("_", " "), justify="left" if name in ("ranks", "phase") else "right")
    for ranks, found in _grouped(forecasts):
        for memory in found.phases:
            fits = memory.peak <= found.usable_bytes
            numbers = [f"{getattr(memory, part) / GIB:.1f}" for part in PARTS]
            table.add_row(
                ranks, memory.phase, *numbers, f"{found.usable_bytes / GIB:.0f}", style=None if fits else "bold red"
            )
    return table


def _memory_lines(forecasts: Sequence[Forecast]) -> list[str]:
    lines = []
    for ranks, found in _grouped(forecasts):
        for memory in found.phases:
            parts = ", ".join(
                f"{p.replace('_', ' ')} {getattr(memory, p) / GIB:.1f}" for p in PARTS if getattr(memory, p)
            )
            verdict = "fits" if memory.peak <= found.usable_bytes else "does not fit"
            lines.append(
                f"memory: ranks {ranks}, {memory.phase}: {parts} of {found.usable_bytes / GIB:.1f} GiB, {verdict}"
            )
    return lines


def _floor_table(report: Report) -> Table:
    table = Table(title="floor of each phase's time, all sequences at full length")
    for name in ("phase", "seconds", "bound by"):
        table.add_column(name, justify="right" if name == "seconds" else "left")
    for floor in report.floors:
        table.add_row(floor.phase, f"{floor.seconds:.3g}", floor.bound)
    return table


def _floor_lines(report: Report) -> list[str]:
    return [f"floor: {f.phase}: at least {f.seconds:.3g} s, bound by {f.bound}" for f in report.floors]


def _show_plan(out: Console, report: Report) -> None:
    """Bytes of the transition per pair of ranks."""
    plan = report.plan
    if not report.received:
        out.print(
            "transition: no plan (give the trainer's YAML with a model that is here)", highlight=False, soft_wrap=True
        )
        return
    if plan is None:
        most = max(report.received.values())
        out.print(
            f"transition: at most {most / 1e9:.3f} GB into a rank; too many ranks to list pairs",
            highlight=False,
            soft_wrap=True,
        )
        return
    received, sent, copied = plan.bytes_received(), plan.bytes_sent(), plan.bytes_copied()
    pairs = plan.bytes_by_pair()
    summary = (
        f"transition: {plan.num_bytes / 1e9:.3f} GB over links, at most {max(received.values()) / 1e9:.3f} GB into and "
        f"{max(sent.values()) / 1e9:.3f} GB out of a rank; at most {max(copied.values()) / 1e9:.3f} GB kept on the spot"
    )
    out.print(summary, highlight=False, soft_wrap=True)
    ranks = plan.ranks
    if not out.is_terminal or len(ranks) > MOST_COLUMNS:
        for (a, b), count in pairs.items():
            out.print(f"transition: rank {a} -> rank {b}: {count} bytes", highlight=False, soft_wrap=True)
        return
    table = Table(title="bytes from rank (row) to rank (column), MB")
    table.add_column("")
    for rank in ranks:
        table.add_column(str(rank), justify="right")
    for a in ranks:
        cells = [f"{pairs[(a, b)] / 1e6:.1f}" if (a, b) in pairs else Text(".", style="dim") for b in ranks]
        table.add_row(str(a), *cells)
    out.print(table)


def _show_smoke(out: Console, smoke: dict[str, Any]) -> None:
    if smoke["ok"]:
        groups = "; ".join(smoke["groups"]) or "one rank, no group"
        text = f"smoke: {smoke['backend']}, {groups}: every group answered, {smoke['moved_bytes']} bytes resharded"
        out.print(f"{text}, {smoke['seconds']} s", style="green", highlight=False, soft_wrap=True, markup=False)
        return
    for fault in smoke["problems"]:
        text = f"problem: smoke ({smoke['backend']}): {fault['where']}: {fault['found']}\n    fix: {fault['fix']}"
        out.print(text, style="red", highlight=False, soft_wrap=True, markup=False)
