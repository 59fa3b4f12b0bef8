"""`rlspeed preprocess sort | pack | stats`: files of prompts before a run. Torch is never imported."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .console import out, talk
from .preprocess_options import (
    BatchSize,
    Bucket,
    BucketRows,
    Capacity,
    ChatTemplate,
    Codec,
    Compression,
    Descending,
    Inputs,
    Json,
    KeepColumns,
    LengthColumn,
    LongestFirst,
    MaxLength,
    MaybeTokenizer,
    MemoryMiB,
    Multiple,
    NewTokens,
    Output,
    Overwrite,
    PackBad,
    PackBadRows,
    PackCodec,
    PackLong,
    PackOverlong,
    PlanOnly,
    Png,
    PromptKey,
    Ranks,
    Seed,
    SortBad,
    SortBadRows,
    SortLong,
    SortOverlong,
    SystemPrompt,
    Template,
    TemplateKwargs,
    Tokenizer,
    TrustCode,
)

if TYPE_CHECKING:
    from rlspeed.data.measure import Progress
    from rlspeed.data.pack import PackReport
    from rlspeed.data.render import PromptRenderer
    from rlspeed.data.sort import Order, SortReport
    from rlspeed.data.stats import Stats

app = typer.Typer(
    no_args_is_help=True,
    help="Sort, pack and measure files of prompts.",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def sort(
    inputs: Inputs,
    output: Output,
    tokenizer: Tokenizer,
    prompt_key: PromptKey = "prompt",
    descending: Descending = False,
    bucket: Bucket = False,
    bucket_rows: BucketRows = 32,
    seed: Seed = 0,
    longest_first: LongestFirst = False,
    max_length: MaxLength = None,
    overlong: SortLong = SortOverlong.error,
    bad_rows: SortBad = SortBadRows.error,
    length_column: LengthColumn = None,
    compression: Compression = None,
    apply_chat_template: ChatTemplate = Template.auto,
    system_prompt: SystemPrompt = None,
    chat_template_kwargs: TemplateKwargs = "{}",
    trust_remote_code: TrustCode = False,
    memory: MemoryMiB = 256,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Order rows by the token length of their prompts.

    Lengths are those that training sees. Equal lengths keep their order; columns, types and metadata stay as they are.
    """
    from rlspeed.data.files import expand
    from rlspeed.data.sort import SortOptions, sort_files

    options = SortOptions(
        prompt_key=prompt_key,
        order=_order(bucket, descending),
        bucket_rows=bucket_rows,
        seed=seed,
        longest_first=longest_first,
        max_length=max_length,
        overlong=overlong.value,
        bad_rows=bad_rows.value,
        length_column=length_column,
        compression=compression.value if compression else None,
        overwrite=overwrite,
        memory_bytes=memory << 20,
    )
    files = expand(inputs, "IN")
    renderer = _renderer(tokenizer, trust_remote_code, apply_chat_template, system_prompt, chat_template_kwargs)
    with _terminated_like_interrupted(), _progress(quiet=as_json) as progress:
        report = sort_files(files, output, renderer, options, progress)
    _show_json(report) if as_json else _show_sort(report)


@app.command()
def pack(
    inputs: Inputs,
    output: Output,
    capacity: Capacity,
    tokenizer: MaybeTokenizer = None,
    prompt_key: PromptKey = "prompt",
    multiple: Multiple = 1,
    ranks: Ranks = 1,
    max_length: MaxLength = None,
    overlong: PackLong = PackOverlong.error,
    bad_rows: PackBad = PackBadRows.error,
    keep_columns: KeepColumns = False,
    plan_only: PlanOnly = False,
    compression: PackCodec = Codec.zstd,
    apply_chat_template: ChatTemplate = Template.auto,
    system_prompt: SystemPrompt = None,
    chat_template_kwargs: TemplateKwargs = "{}",
    trust_remote_code: TrustCode = False,
    memory: MemoryMiB = 256,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Pack whole rows into bins of tokens: parquet with input_ids, cu_seqlens and row_ids, and a manifest beside it.

    Rows are prompts (with --tokenizer) or hold input_ids already; tokens that their attention_mask hides are left out.
    """
    from rlspeed.data.files import expand
    from rlspeed.data.pack import PackOptions, pack_files

    options = PackOptions(
        capacity=capacity,
        prompt_key=prompt_key,
        multiple=multiple,
        ranks=ranks,
        max_length=max_length,
        overlong=overlong.value,
        bad_rows=bad_rows.value,
        keep_columns=keep_columns,
        plan_only=plan_only,
        compression=compression.value,
        overwrite=overwrite,
        memory_bytes=memory << 20,
    )
    files = expand(inputs, "IN")
    words = (trust_remote_code, apply_chat_template, system_prompt, chat_template_kwargs)
    renderer = None if tokenizer is None else _renderer(tokenizer, *words)
    with _terminated_like_interrupted(), _progress(quiet=as_json) as progress:
        report = pack_files(files, output, renderer, options, progress, tokenizer_name=tokenizer)
    _show_json(report) if as_json else _show_pack(report)


@app.command()
def stats(
    inputs: Inputs,
    tokenizer: MaybeTokenizer = None,
    prompt_key: PromptKey = "prompt",
    max_new_tokens: NewTokens = None,
    batch_size: BatchSize = 32,
    png: Png = None,
    bad_rows: PackBad = PackBadRows.error,
    apply_chat_template: ChatTemplate = Template.auto,
    system_prompt: SystemPrompt = None,
    chat_template_kwargs: TemplateKwargs = "{}",
    trust_remote_code: TrustCode = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Lengths in tokens, what padding and packing waste, and which max_length and capacity to choose.

    max_length is the 95th percentile of the prompts and room for the answer; of rows of input_ids it is the percentile.
    """
    from rlspeed.config.schema import Rollout
    from rlspeed.data.atomic import check_output
    from rlspeed.data.files import expand
    from rlspeed.data.stats import draw, histogram, measure_files, summarise

    files = expand(inputs, "IN")
    if png is not None:
        check_output(png, overwrite=overwrite, where="--png")
    words = (trust_remote_code, apply_chat_template, system_prompt, chat_template_kwargs)
    renderer = None if tokenizer is None else _renderer(tokenizer, *words)
    with _progress(quiet=as_json) as progress:
        lengths, whole, notes = measure_files(files, renderer, prompt_key, bad_rows.value, progress)
    room = max_new_tokens if max_new_tokens is not None else 0 if whole else Rollout().max_new_tokens
    found = summarise(lengths, batch_size=batch_size, response_tokens=room, notes=notes)
    if png is not None and found.rows:
        draw(lengths, found, png)
    if as_json:
        counts, edges = histogram(lengths) if found.rows else ([], [])
        _show_json(found, histogram={"counts": counts, "edges": edges})
    else:
        _show_stats(found, lengths, room, png)


def _show_json(report: Any, **more: Any) -> None:
    typer.echo(json.dumps({**asdict(report), **more}, indent=2))


def _show_sort(report: SortReport) -> None:
    """Counts of `sort`."""
    _notes(report.notes)
    counts = {"in": report.rows_in, "out": report.rows_out, "dropped, too long": report.dropped_overlong}
    counts |= {
        "dropped, no prompt": report.dropped_bad,
        "cut": report.truncated,
        "too long, kept": report.kept_overlong,
    }
    _table("rows", {name: f"{n:,}" for name, n in counts.items() if n or name in ("in", "out")})
    out.print(f"{report.tokens:,} tokens, {report.shortest:,} to {report.longest:,} a row", highlight=False)
    out.print(report.output, soft_wrap=True, highlight=False)


def _show_pack(report: PackReport) -> None:
    """Counts of `pack`."""
    rows = {"in": report.rows_in, "out": report.rows_out, "dropped, too long": report.dropped_overlong}
    rows |= {"dropped, no tokens": report.dropped_bad, "cut": report.truncated}
    _table("rows", {name: f"{n:,}" for name, n in rows.items() if n or name in ("in", "out")})
    tokens = {"in": report.tokens_in, "out": report.tokens_out, "dropped": report.tokens_dropped}
    _table("tokens", {name: f"{n:,}" for name, n in tokens.items()})
    bins = {f"of {report.capacity:,} tokens": f"{report.bins:,}", "fewest possible": f"{report.lower_bound:,}"}
    bins |= {"filled": f"{report.fill:.2%}"}
    if report.ranks > 1:
        bins |= {"empty": f"{report.empty_bins:,}", "largest rank / mean work": f"{report.rank_work:.4f}"}
    _table("bins", bins)
    for path in dict.fromkeys((report.output, report.manifest)):
        out.print(path, soft_wrap=True, highlight=False)


def _show_stats(found: Stats, lengths: Any, room: int, png: Path | None) -> None:
    """The tables of `stats`, and the histogram."""
    from rlspeed.data.stats import bars

    _notes(found.notes)
    if not found.rows:
        out.print("0 rows")
        return
    names = ("min", "median", "p95", "p99", "max")
    head = {"rows": f"{found.rows:,}", "tokens": f"{found.tokens:,}", "mean": f"{found.mean:,.1f}"}
    _table("lengths in tokens", head | {name: f"{getattr(found, name):,}" for name in names})
    for line in bars(lengths):
        out.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    _table("tokens wasted", {w.name: f"{w.tokens:,} ({w.share:.1%})" for w in found.waste})
    over = f"{found.over:,} of {found.rows:,} rows are longer" if found.over else "no row is longer"
    what = f"{found.max_prompt_length:,} for the prompt, {room:,} for the answer; {over}" if room else over
    packing = f"{found.capacity}" + (" (from a sample of the rows)" if found.sampled else "")
    _table("suggested", {"data.max_length": f"{found.max_length} ({what})", "packing.capacity": packing})
    if png is not None:
        out.print(str(png), soft_wrap=True, highlight=False)


def _order(bucket: bool, descending: bool) -> Order:
    from rlspeed.errors import ConfigError, Fault

    if bucket and descending:
        raise ConfigError(Fault(where="--bucket", found="together with --descending", fix="give one of them"))
    return "bucket" if bucket else "descending" if descending else "ascending"


def _renderer(path: str, trust: bool, mode: Template, system_prompt: str | None, kwargs: str) -> PromptRenderer:
    """The tokenizer with the same options that `data.*` has in a run's configuration."""
    from rlspeed.data.render import PromptRenderer, load_tokenizer
    from rlspeed.errors import ConfigError, Fault

    try:
        further = json.loads(kwargs)
    except ValueError:
        further = None
    if not isinstance(further, dict):
        raise ConfigError(Fault(where="--chat-template-kwargs", found=repr(kwargs), allowed="a JSON object"))
    tokenizer = load_tokenizer(path, trust_remote_code=trust, without_torch=True, where="--tokenizer")
    return PromptRenderer(
        tokenizer, apply_chat_template=mode.value, system_prompt=system_prompt, chat_template_kwargs=further
    )


def _notes(notes: tuple[str, ...]) -> None:
    for note in notes:
        talk.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)


def _table(title: str, values: dict[str, Any]) -> None:
    """Names and numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 3, 0, 2))
    table.add_column()
    table.add_column(justify="right", overflow="fold")
    for name, value in values.items():
        table.add_row(name, str(value))
    out.print(table)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Progress]:
    """A bar with the time left for each phase, on a terminal; nothing otherwise."""
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from rlspeed.data.measure import no_progress

    if quiet or not talk.is_terminal:
        yield no_progress
        return
    columns = (TextColumn("{task.description:>9}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=talk, transient=True) as shown:
        tasks: dict[str, TaskID] = {}

        def update(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = shown.add_task(phase, total=max(total, 1))
            shown.update(tasks[phase], completed=min(done, total))

        yield update


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends the work as Ctrl-C does, so that unfinished files are removed."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
