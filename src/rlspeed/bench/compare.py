"""Records side by side: which values, in which direction, what each is beside the first, and what forbids comparing."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlspeed.bench.record import Record, Value
from rlspeed.bench.runlog import PHASE
from rlspeed.bench.verdict import LEAST_SAMPLES, Verdict, judge
from rlspeed.errors import ConfigError, Fault

# values in the order of the table, and whether more is better; None: neither, a number to be known
DIRECTIONS: Mapping[str, bool | None] = {
    "tokens_per_second": True,
    "answer_tokens_per_second": True,
    "step_seconds": False,
    "critic_step_seconds": False,
    "transition_seconds": False,
    "transition_bytes_received": False,
    "transition_bytes_copied": False,
    "token_latency_mean": False,
    "token_latency_std": False,
    "token_latency_p99": False,
    "token_latency_deviation": False,
    "tail_seconds": False,
    "peak_device_memory": False,
    "peak_host_memory": False,
    "padding_tokens": False,
    "gpu_utilisation": None,
    "step_tflops": True,
    "update_tflops": True,
    "mfu_step": True,
    "mfu_update": True,
    "seconds": False,
    "answer_tokens": None,
}
RATES = ("tokens_per_second", "answer_tokens_per_second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One value of all records. cells: None where a record lacks it. verdicts: of each beside the first, whose own is
    None.
    """

    name: str
    unit: str
    more_is_better: bool | None
    cells: tuple[Value | None, ...]
    verdicts: tuple[Verdict | None, ...]

    def words(self, place: int) -> str:
        """The verdict of a record in words; empty where there is none."""
        verdict = self.verdicts[place]
        if verdict is None:
            return ""
        if verdict.call in ("better", "worse"):
            return words_for(self.name, better=verdict.call == "better")
        return {"too few steps": "no verdict", "same": "same"}.get(verdict.call, verdict.call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """records beside the first of them, under `names` that differ. notes: what to know when reading it."""

    names: tuple[str, ...]
    records: tuple[Record, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def row(self, name: str) -> Row | None:
        """The row of a value."""
        return next((row for row in self.rows if row.name == name), None)

    def regressions(self, fail_under: float) -> tuple[list[str], list[str]]:
        """(regressions, what cannot be told): records whose speed is under `fail_under` of the first's.

        Speed is tokens/s, else answer tokens/s, else steps per second. Only a difference that the spread can tell is
        a regression.

        Raises:
            ConfigError: a record without speed or with fewer than three measured steps.
        """
        told: list[str] = []
        untold: list[str] = []
        faults: list[Fault] = []
        for place in range(1, len(self.records)):
            row = self._speed(place)
            verdict = None if row is None else row.verdicts[place]
            if row is None or verdict is None or verdict.ratio is None or verdict.call == "too few steps":
                found = "no speed in common with the first" if row is None else "fewer than 3 measured steps"
                faults.append(Fault(where=self.names[place], found=found, fix="measure more steps: --steps 5"))
                continue
            ratio = verdict.ratio if row.more_is_better else 1.0 / verdict.ratio
            if ratio < fail_under:
                text = f"{self.names[place]}: {row.name} at {ratio:.3f} of {self.names[0]}, under {fail_under:g}"
                (told if verdict.call == "worse" else untold).append(text)
        if faults:
            raise ConfigError(faults)
        return told, untold

    def _speed(self, place: int) -> Row | None:
        for name in (*RATES, "step_seconds", "seconds"):
            row = self.row(name)
            if row is not None and row.cells[0] is not None and row.cells[place] is not None:
                return row
        return None

    def as_json(self) -> dict[str, Any]:
        """Plain values, for --json."""
        return {
            "records": [{"as": n, **r.as_json()} for n, r in zip(self.names, self.records)],
            "notes": list(self.notes),
            "rows": [
                {
                    "name": row.name,
                    "unit": row.unit,
                    "medians": [None if c is None else statistics.median(c.samples) for c in row.cells],
                    "ratios": [None if v is None else v.ratio for v in row.verdicts],
                    "intervals": [None if v is None or v.low is None else [v.low, v.high] for v in row.verdicts],
                    "verdicts": [row.words(place) for place in range(len(row.cells))],
                }
                for row in self.rows
            ],
        }


def words_for(name: str, *, better: bool) -> str:
    """`faster`, `slower` for times and rates, `less`, `more` for the rest; more FLOP/s is `more`."""
    timed = name.endswith(("seconds", "latency_mean", "latency_p99")) or name.startswith(PHASE) or name in RATES
    if timed:
        return "faster" if better else "slower"
    rises = DIRECTIONS.get(name) is True
    return "more" if better == rises else "less"


def compare(
    records: Sequence[Record], names: Sequence[str], *, any_device: bool = False, any_data: bool = False
) -> Comparison:
    """Put records beside the first.

    any_device, any_data: compare although devices or the work differ; a note says so.

    Raises:
        ConfigError: fewer than two records, or unlike ones.
    """
    if len(records) < 2:
        raise ConfigError(Fault(where="bench compare", found=f"{len(records)} record(s)", allowed="at least 2"))
    faults, notes = [], []
    for name, record in zip(names[1:], records[1:]):
        for fault, allowed in (
            (unlike_devices(names[0], records[0], name, record), any_device),
            (unlike_data(names[0], records[0], name, record), any_data),
        ):
            if fault is not None and not allowed:
                faults.append(fault)
            elif fault is not None:
                notes.append(f"{fault.where}: {fault.found}")
    if faults:
        raise ConfigError(faults)
    notes += _notes(records, names)
    rows = tuple(_row(name, records) for name in _names(records))
    return Comparison(names=tuple(names), records=tuple(records), rows=rows, notes=tuple(notes))


def device_of(record: Record) -> tuple[Any, ...]:
    """What has to be the same for a comparison: GPUs by name, else the CPU and its cores."""
    gpus = [g["name"] for g in record.machine.get("gpus", ())]
    used = max(int(record.extra.get("processes", 1)), 1)
    if gpus:
        return tuple(sorted(set(gpus[:used])))
    return (record.machine.get("cpu", "unknown"), record.machine.get("cores"))


def unlike_devices(first: str, a: Record, other: str, b: Record) -> Fault | None:
    """The fault of comparing measurements of different devices."""
    one, two = device_of(a), device_of(b)
    if one == two:
        return None
    found = f"measured on {_said(two)}, {first} on {_said(one)}"
    return Fault(where=other, found=found, allowed="the same device", fix="--any-device compares them all the same")


def unlike_data(first: str, a: Record, other: str, b: Record) -> Fault | None:
    """The fault of comparing measurements of different work: data, model's shape, seeds, lengths, algorithm."""
    fix = "--any-data compares them all the same"
    if a.data is None or b.data is None:
        which = first if a.data is None else other
        if a.data is None and b.data is None and a.name == b.name:
            return None
        return Fault(
            where=other, found=f"what {which} worked on is not in its record", allowed="the same work", fix=fix
        )
    if a.data != b.data:
        one, two = a.extra.get("work") or {}, b.extra.get("work") or {}
        keys = [f"{k} {one[k]} and {two[k]}" for k in one if k in two and one[k] != two[k]]
        found = "other work than " + first + ": " + ("; ".join(keys) or "other files, model or options")
        return Fault(where=other, found=found, allowed="the same work", fix=fix)
    if _cycle(a) != _cycle(b):
        found = f"its steps had other numbers of tokens than those of {first}"
        return Fault(where=other, found=found, allowed="the same lengths (rollout.fix_lengths)", fix=fix)
    return None


def _cycle(record: Record) -> Any:
    """Tokens of the measured steps of one process; None where they are not recorded."""
    tokens = record.extra.get("tokens")
    return None if tokens is None else tuple(map(tuple, tokens[: int(record.extra.get("steps", len(tokens)))]))


def _said(device: tuple[Any, ...]) -> str:
    return ", ".join(str(d) for d in device if d is not None)


def _names(records: Sequence[Record]) -> list[str]:
    """Values of any record, those of `DIRECTIONS` in its order, then phases, then the rest."""
    found = list(dict.fromkeys(name for r in records for name in r.values))
    known = [name for name in DIRECTIONS if name in found]
    phases = [name for name in found if name.startswith(PHASE)]
    return [*known, *phases, *[n for n in found if n not in known and n not in phases]]


def _row(name: str, records: Sequence[Record]) -> Row:
    cells = tuple(r.values.get(name) for r in records)
    direction = False if name.startswith(PHASE) else DIRECTIONS.get(name)
    first = cells[0]
    verdicts: list[Verdict | None] = [None]
    for cell in cells[1:]:
        usable = first is not None and cell is not None and direction is not None and first.unit == cell.unit
        verdicts.append(judge(first, cell, more_is_better=direction) if usable else None)  # type: ignore[arg-type]
    unit = next(c.unit for c in cells if c is not None)
    return Row(name=name, unit=unit, more_is_better=direction, cells=cells, verdicts=tuple(verdicts))


def _oddities(record: Record) -> Iterator[str]:
    """What makes one record's numbers less sure."""
    if record.dirty:
        yield "measured with changes that are not committed"
    steps = [len(v.samples) for v in record.values.values()]
    if steps and min(steps) < LEAST_SAMPLES:
        yield f"{min(steps)} measured step(s), no verdict under {LEAST_SAMPLES}"
    cores = record.machine.get("cores") or 1
    if float(record.extra.get("load_before", 0.0)) > 0.5 * cores:
        yield f"the machine was busy before (load {record.extra['load_before']} on {cores} cores)"


def _notes(records: Sequence[Record], names: Sequence[str]) -> Iterator[str]:
    """Oddities of records, other commits and versions, profiles that are the same."""
    of_each: dict[str, list[str]] = {}
    for name, record in zip(names, records):
        for text in _oddities(record):
            of_each.setdefault(text, []).append(name)
    yield from (f"{', '.join(who)}: {text}" for text, who in of_each.items())
    commits = {r.commit for r in records}
    if len(commits) > 1:
        yield "other commits: " + ", ".join(f"{n} {r.commit[:10]}" for n, r in zip(names, records))
    for package in sorted({p for r in records for p in r.versions}):
        seen = {r.versions.get(package) for r in records}
        if len(seen) > 1:
            yield f"other {package}: " + ", ".join(f"{n} {r.versions.get(package)}" for n, r in zip(names, records))
    for place, record in enumerate(records):
        for before in range(place):
            same = record.profile is not None and record.profile == records[before].profile
            if same and record.extra.get("processes") == records[before].extra.get("processes"):
                yield f"{names[place]} is {names[before]} here: all their settings are the same"
