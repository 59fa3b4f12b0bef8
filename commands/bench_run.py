"""`rlspeed bench run` and `rlspeed bench compare`: measure profiles, put records side by side."""

from __future__ import annotations

import json
import statistics
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from .console import out, talk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlspeed.bench.compare import Comparison, Row
    from rlspeed.bench.record import Record
    from rlspeed.errors import Fault

STYLES = {"better": "green", "worse": "red"}


class Lengths(StrEnum):
    """As rollout.fix_lengths."""

    long_tail = "long_tail"
    uniform = "uniform"
    whole = "whole"
    none = "none"


Words = Annotated[
    list[str],
    typer.Argument(
        metavar="PROFILE|[PROFILE:]KEY=VALUE...",
        help="Profiles or YAML files; values for all of them, or after a profile's name for it alone.",
    ),
]
On = Annotated[
    str | None,
    typer.Option(help="A profile, YAML file or run folder with model, data and algorithm, under all profiles."),
]
WarmUp = Annotated[int, typer.Option(help="First steps of each process or log that do not count.")]
Steps = Annotated[int, typer.Option(help="Measured steps of each process; no verdict under 3.")]
Repeats = Annotated[int, typer.Option(help="Processes of each profile, in turn.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]
Html = Annotated[Path | None, typer.Option(help="Write the table and plots as one page without scripts or links.")]
AnyDevice = Annotated[bool, typer.Option("--any-device", help="Compare measurements of unlike devices.")]
AnyData = Annotated[bool, typer.Option("--any-data", help="Compare measurements of unlike work.")]


def run(
    words: Words,
    on: On = None,
    warm_up: WarmUp = 2,
    steps: Steps = 5,
    repeats: Repeats = 1,
    processes: Annotated[str, typer.Option(help="Ranks to try each profile with: 1,2,4.")] = "1",
    lengths: Annotated[
        Lengths, typer.Option(help="Answer lengths, drawn from the seed; none: as the model ends them.")
    ] = Lengths.long_tail,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder of the records; left out: bench/DATE-TIME.")
    ] = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Measure training steps of profiles, each in a process of its own, on the same prompts, seeds and lengths."""
    folder = output or Path("bench") / f"{datetime.now():%Y%m%d-%H%M%S}"
    names, values = split_words(words)
    records, failed = measure(
        names,
        values,
        folder,
        on=on,
        warm_up=warm_up,
        steps=steps,
        repeats=repeats,
        processes=processes,
        lengths=lengths,
        quiet=as_json,
    )
    from rlspeed.bench.run import label
    from rlspeed.errors import RunError

    shown = [label(r.name, int(r.extra["processes"])) for r in records]
    if not as_json:
        talk.print(f"records: {folder}")
    if len(records) > 1:
        from rlspeed.bench.compare import compare

        finish(compare(records, shown), html=html, as_json=as_json)
    elif records:
        print(json.dumps(records[0].as_json())) if as_json else show_record(records[0])
    if failed:
        raise RunError(failed)


def measure(
    names: Sequence[str],
    values: Sequence[str],
    folder: Path,
    *,
    on: str | None,
    warm_up: int,
    steps: int,
    repeats: int,
    processes: str,
    lengths: Lengths,
    quiet: bool,
) -> tuple[list[Record], list[Fault]]:
    """Run and record; what failed beside it."""
    from rlspeed.bench.run import RunOptions, run_profiles
    from rlspeed.errors import ConfigError, Fault

    parts = [p.strip() for p in processes.split(",")]
    if not all(p.isdigit() for p in parts):
        raise ConfigError(Fault(where="--processes", found=repr(processes), allowed="numbers: 1,2,4"))
    options = RunOptions(
        profiles=tuple(names),
        words=tuple(values),
        on=on,
        folder=folder,
        warm_up=warm_up,
        steps=steps,
        repeats=repeats,
        processes=tuple(map(int, parts)),
        lengths=lengths.value,
    )
    return run_profiles(options, (lambda _: None) if quiet else talk.print)


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(profiles, values)."""
    return [w for w in words if "=" not in w], [w for w in words if "=" in w]


def compare(
    items: Annotated[
        list[str],
        typer.Argument(
            metavar="A B...",
            help="Records, folders of records, run folders, verl's or TRL's logs; or profiles, measured now.",
        ),
    ],
    on: On = None,
    warm_up: WarmUp = 2,
    steps: Steps = 5,
    repeats: Repeats = 1,
    fail_under: Annotated[
        float | None, typer.Option(help="Exit code 1 when a speed is told to be under this share of the first.")
    ] = None,
    any_device: AnyDevice = False,
    any_data: AnyData = False,
    peer_devices: Annotated[int, typer.Option(min=1, help="Devices of TRL's run; its log does not say.")] = 1,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Put measurements side by side: ratios to the first, and what their spread can tell."""
    from rlspeed.bench.compare import compare as put_together
    from rlspeed.bench.sources import load_all
    from rlspeed.config.load import packaged_profiles
    from rlspeed.errors import RunError

    known = packaged_profiles()
    names, values = split_words(items)
    profiles = [n for n in names if n in known or (n.endswith((".yaml", ".yml")) and Path(n).is_file())]
    files = [n for n in names if n not in profiles]
    records: list[Record] = []
    shown: list[str] = []
    if profiles:
        folder = Path("bench") / f"{datetime.now():%Y%m%d-%H%M%S}"
        records, failed = measure(
            profiles,
            values,
            folder,
            on=on,
            warm_up=warm_up,
            steps=steps,
            repeats=repeats,
            processes="1",
            lengths=Lengths.long_tail,
            quiet=as_json,
        )
        if failed:
            raise RunError(failed)
        shown = [r.name for r in records]
    if files:
        more, said = load_all(files, warm_up=warm_up, peer_devices=peer_devices)
        records, shown = records + more, shown + [f"{s} (file)" if s in shown else s for s in said]
    found = put_together(records, shown, any_device=any_device, any_data=any_data)
    finish(found, html=html, as_json=as_json)
    if fail_under is not None:
        _gate(found, fail_under)


def _gate(found: Comparison, fail_under: float) -> None:
    """Exit code 1 when a regression can be told."""
    told, untold = found.regressions(fail_under)
    for text in told:
        talk.print(f"regression: {text}")
    for text in untold:
        talk.print(f"cannot tell: {text}, but not by more than the spread; measure more steps")
    if told:
        raise typer.Exit(1)


def finish(found: Comparison, *, html: Path | None, as_json: bool) -> None:
    """Print, and write the page."""
    if html is not None:
        from rlspeed.bench.page import write_page

        write_page(html, found)
    if as_json:
        print(json.dumps(found.as_json()))
        return
    show(found)
    if html is not None:
        talk.print(f"page: {html}")


def show(found: Comparison) -> None:
    """The table, then what to know about it."""
    table = Table(title=f"beside {found.names[0]}: median, ratio, verdict")
    table.add_column("value", no_wrap=True)
    for name in found.names:
        table.add_column(name, justify="right")
    for row in found.rows:
        table.add_row(f"{row.name}\n[dim]{row.unit}[/dim]", *(_cell(row, place) for place in range(len(found.names))))
    out.print(table)
    for note in found.notes:
        talk.print(f"note: {note}")


def _cell(row: Row, place: int) -> Text:
    value = row.cells[place]
    if value is None:
        return Text("-", style="dim")
    text = Text(number(statistics.median(value.samples)))
    verdict = row.verdicts[place]
    if verdict is not None:
        ratio = "" if verdict.ratio is None else f"x{verdict.ratio:.2f} "
        text.append(f"\n{ratio}{row.words(place)}", style=STYLES.get(verdict.call, "dim"))
    return text


def number(value: float) -> str:
    """Four digits that count."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show_record(record: Record) -> None:
    """The values of one record."""
    table = Table(title=record.name)
    for column in ("value", "median", "min", "max", "n", "unit"):
        table.add_column(column, justify="left" if column in ("value", "unit") else "right")
    for name, value in record.values.items():
        v = value.as_json()
        table.add_row(name, *(f"{v[k]:,.4g}" for k in ("median", "min", "max")), str(v["n"]), value.unit)
    out.print(table)
