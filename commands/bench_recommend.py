"""`rlspeed bench recommend`: which profile to take, predicted and measured."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from .bench_run import Lengths, finish, measure
from .console import out, talk

if TYPE_CHECKING:
    from rlspeed.bench.recommend import Advice


def recommend(
    config: Annotated[str, typer.Argument(help="The run: a profile, a YAML file or a run folder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values that win over the file's.")
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="Devices of the run; left out: all that are here.")] = None,
    assume: Annotated[str | None, typer.Option(help="Advise for a machine that is not here: '8x H100'.")] = None,
    answers: Annotated[
        Path | None, typer.Option(help="A run folder whose sampled answers tell how long answers are.")
    ] = None,
    take_measure: Annotated[
        bool, typer.Option("--measure", help="Measure baseline and the recommended profile here.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Measured steps of --measure.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Say which profile to take and why: from lengths, devices, memory and model."""
    from rlspeed.bench.lengths import step_lengths
    from rlspeed.bench.recommend import recommend as advise
    from rlspeed.config.load import load_profile
    from rlspeed.errors import ConfigError
    from rlspeed.planning.machine import assume as assume_machine
    from rlspeed.planning.probe import probe_machine

    if assume and take_measure:
        raise ConfigError("--measure runs on this machine, and --assume speaks of another")
    words = list(overrides or [])
    machine = assume_machine(assume) if assume else probe_machine()
    ranks = devices or max(machine.num_devices * machine.nodes, 1)
    lengths, told = step_lengths(load_profile(config, words).profile, answers)
    advice = advise(config, words, machine, ranks=ranks, lengths=lengths, lengths_from=told)
    if not as_json:
        show(advice)
    measured: dict[str, Any] | None = None
    if take_measure:
        measured = _measure(config, words, advice.profile, ranks, steps, quiet=as_json)
    if as_json:
        print(json.dumps({**advice.as_json(), "measured": measured}, indent=1))


def show(advice: Advice) -> None:
    """The profile, why, and what each needs."""
    out.print(f"take [bold]{advice.profile}[/bold]")
    for reason in advice.reasons:
        out.print(f"- {reason}", soft_wrap=True)
    out.print(f"predicted: updates x{advice.gain:.2f} beside baseline, without what bf16 brings", soft_wrap=True)
    if all(n.peak_gib is None for n in advice.needs.values()):
        return
    table = Table("profile", "peak memory, GiB", "fits", "shortest step at full lengths, s")
    for name, n in advice.needs.items():
        memory = "-" if n.peak_gib is None else f"{n.peak_gib:.1f}"
        fits = {True: "yes", False: "no", None: "-"}[n.fits]
        table.add_row(name, memory, fits, "-" if n.floor_seconds is None else f"{n.floor_seconds:.2f}")
    out.print(table)


def _measure(config: str, words: list[str], chosen: str, ranks: int, steps: int, *, quiet: bool) -> dict[str, Any]:
    """Baseline and the chosen profile, one after the other; the ratio of their tokens per second."""
    from rlspeed.bench.compare import compare
    from rlspeed.errors import RunError

    folder = Path("bench") / f"{datetime.now():%Y%m%d-%H%M%S}"
    names = ["baseline", chosen]
    records, failed = measure(
        names,
        words,
        folder,
        on=config,
        warm_up=2,
        steps=steps,
        repeats=1,
        processes=str(ranks),
        lengths=Lengths.long_tail,
        quiet=quiet,
    )
    if failed:
        raise RunError(failed)
    found = compare(records, names)
    if not quiet:
        finish(found, html=None, as_json=False)
    row = found.row("tokens_per_second")
    verdict = None if row is None else row.verdicts[1]
    gain = None if verdict is None else verdict.ratio
    if not quiet and gain is not None and row is not None:
        talk.print(f"measured: x{gain:.2f} tokens per second beside baseline ({row.words(1)}); records: {folder}")
    return {"tokens_per_second": gain, "verdict": None if row is None else row.words(1), "records": str(folder)}
