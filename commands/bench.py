"""`rlspeed bench`: measurements on this machine, as records."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .bench_recommend import recommend
from .bench_run import compare, run, show_record
from .console import out, talk

if TYPE_CHECKING:
    from rlspeed.bench.record import Record

app = typer.Typer(
    no_args_is_help=True,
    help="Measure on this machine; results are records.",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command()(compare)
app.command()(recommend)


@app.callback()
def _root() -> None:
    pass


class Engine(StrEnum):
    """What generates."""

    builtin = "builtin"
    vllm = "vllm"


class Precision(StrEnum):
    """As model.model_dtype."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


@app.command()
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory, a hub name, or `quickstart`.")],
    prompts: Annotated[
        list[str],
        typer.Argument(metavar="PROMPTS...", help="Parquet or JSONL files, `quickstart:train`, or .txt files."),
    ],
    generator: Annotated[Engine, typer.Option(help="What generates.")] = Engine.builtin,
    prompt_key: Annotated[str, typer.Option(help="Column with the prompt.")] = "prompt",
    limit: Annotated[int | None, typer.Option(help="Use the first so many prompts.")] = None,
    n: Annotated[int, typer.Option("--n", help="Answers to each prompt.")] = 1,
    concurrent: Annotated[int, typer.Option(help="Most sequences in flight.")] = 256,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.")] = 1.0,
    dtype: Annotated[Precision, typer.Option(help="Precision; auto picks by device.")] = Precision.auto,
    repeats: Annotated[int, typer.Option(help="Measured runs, after one that warms up.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the answers.")] = 0,
    whole: Annotated[bool, typer.Option("--whole", help="No end token: every answer has its full length.")] = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Let a model directory run its own code.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the record here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record, and nothing else.")] = False,
) -> None:
    """Measure how fast a generator answers a file of prompts."""
    from rlspeed.bench.generate import GenerateOptions, measure_generate
    from rlspeed.bench.record import write_record

    options = GenerateOptions(
        model=model,
        prompts=tuple(prompts),
        engine=generator.value,
        prompt_key=prompt_key,
        limit=limit,
        n=n,
        concurrent=concurrent,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        dtype=dtype.value,
        repeats=repeats,
        seed=seed,
        whole=whole,
        trust_remote_code=trust_remote_code,
    )

    def progress(number: int, total: int, speed: float) -> None:
        name = f"run {number} of {total}" if number else "warm-up"
        talk.print(f"{name}: {speed:,.0f} tokens/s")

    record = measure_generate(options, (lambda *_: None) if as_json else progress)
    if output is not None:
        write_record(output, record)
    if as_json:
        print(json.dumps(record.as_json()))
    else:
        _show(record)


def _show(record: Record) -> None:
    show_record(record)
    share = record.extra.get("share_of_decode_floor")
    if share is not None:
        out.print(f"share of the decode floor (weights, keys and values at the device's bandwidth): {share:.0%}")
