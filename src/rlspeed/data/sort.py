"""Rows ordered by token length, file to file and out of core.

Three steps: measure every row (data/measure.py), plan the order from the lengths alone, move the rows
(data/permute.py) into a file that appears when it is complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rlspeed.data.atomic import check_output
from rlspeed.data.cut import find_cuts
from rlspeed.data.files import DataFile, FaultLog, RowFaults
from rlspeed.data.measure import Measured, Progress, measure, no_progress
from rlspeed.data.payload import Payload, payload
from rlspeed.data.permute import MEMORY_BYTES, cut_evenly, permute
from rlspeed.data.render import PromptRenderer
from rlspeed.data.tables import Tables, open_parquet, open_tables
from rlspeed.data.write import GROUP_ROWS, output_format, table_writer

Order = Literal["ascending", "descending", "bucket"]
Overlong = Literal["error", "drop", "truncate_left", "keep"]
BadRows = Literal["error", "drop", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SortOptions:
    """What to do with the rows.

    order: by length, equal lengths in the input's order; or in buckets of `bucket_rows` rows of similar length,
    shuffled inside, the buckets shuffled among themselves, by `seed`. longest_first: the bucket with the longest row
    comes first, so that a lack of memory shows in the first step.
    max_length: limit in tokens; overlong: what happens to rows above it. bad_rows: what happens to rows whose prompt
    is null, malformed, or has no tokens (kept ones count 0 tokens). compression: None takes the input's.
    """

    prompt_key: str = "prompt"
    order: Order = "ascending"
    bucket_rows: int = 32
    seed: int = 0
    longest_first: bool = False
    max_length: int | None = None
    overlong: Overlong = "error"
    bad_rows: BadRows = "error"
    length_column: str | None = None
    compression: str | None = None
    overwrite: bool = False
    memory_bytes: int = MEMORY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which rows go on, after the policies for bad and overlong rows.

    lengths [N] int32: as they will be. kept [K] int64: row numbers. cuts: characters to cut from the left, by row.
    counts: rows in, dropped for which reason, cut.
    """

    lengths: npt.NDArray[np.int32]
    kept: npt.NDArray[np.int64]
    cuts: dict[int, int]
    counts: dict[str, int]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SortReport:
    """What was done. tokens: of the rows written; shortest, longest: 0 without rows."""

    output: str
    rows_in: int
    rows_out: int
    dropped_overlong: int
    dropped_bad: int
    truncated: int
    kept_overlong: int
    tokens: int
    shortest: int
    longest: int
    order: str
    notes: tuple[str, ...]


def plan_order(
    lengths: npt.NDArray[np.int32],
    order: Order,
    *,
    bucket_rows: int = 32,
    seed: int = 0,
    longest_first: bool = False,
) -> npt.NDArray[np.int64]:
    """Indices into `lengths` in the order of the output; equal lengths keep the input's order, unless shuffled.

    In buckets: consecutive `bucket_rows` of the ascending order make a bucket; the shortest rows, which do not fill
    one, come last, so that buckets stay aligned with batches of that size.
    """
    if order == "descending":
        return np.argsort(-lengths.astype(np.int64), kind="stable").astype(np.int64)
    ascending = np.argsort(lengths, kind="stable").astype(np.int64)
    if order == "ascending" or not len(lengths):
        return ascending
    digest = hashlib.blake2b(f"bucket/{seed}".encode(), digest_size=4).digest()
    draw = np.random.RandomState(int.from_bytes(digest, "little"))
    rest = len(lengths) % bucket_rows
    buckets = ascending[rest:].reshape(-1, bucket_rows)
    inside = np.argsort(draw.random_sample(buckets.shape), axis=1, kind="stable")
    among = draw.permutation(len(buckets))
    if longest_first and len(buckets):
        among = np.concatenate([[len(buckets) - 1], among[among != len(buckets) - 1]])
    shuffled = np.take_along_axis(buckets, inside, axis=1)[among]
    return np.concatenate([shuffled.ravel(), draw.permutation(ascending[:rest])])


def sort_files(
    files: Sequence[DataFile],
    output: Path,
    renderer: PromptRenderer,
    options: SortOptions,
    progress: Progress = no_progress,
) -> SortReport:
    """Write the rows of `files` to `output`, ordered by the token length of their prompts.

    Parquet and JSONL may be mixed; the output's name says its format. Columns, types and schema metadata stay; JSONL
    to JSONL moves the lines' bytes.

    Raises:
        DataError: input that cannot be used (all of it is named), or an output that cannot be written. Then nothing
            is left behind.
    """
    check_output(output, overwrite=options.overwrite)
    kind = output_format(output)
    tables, log = open_tables(files), FaultLog()
    tables.require_column(options.prompt_key, "name the column with --prompt-key")
    plan = payload(tables, kind, options.prompt_key, options.length_column, log)
    measured = measure(tables, renderer, options.prompt_key, log, progress)
    chosen = select(tables, renderer, measured, log, options)
    plan.cuts = chosen.cuts
    lengths = chosen.lengths[chosen.kept]
    order = plan_order(
        lengths,
        options.order,
        bucket_rows=options.bucket_rows,
        seed=options.seed,
        longest_first=options.longest_first,
    )
    _write(plan, chosen, chosen.kept[order], output, options, progress)
    return SortReport(
        output=str(output),
        rows_in=measured.num_rows,
        rows_out=len(lengths),
        dropped_overlong=chosen.counts["dropped_overlong"],
        dropped_bad=chosen.counts["dropped_bad"],
        truncated=chosen.counts["truncated"],
        kept_overlong=chosen.counts["kept_overlong"],
        tokens=int(lengths.sum(dtype=np.int64)),
        shortest=int(lengths.min()) if len(lengths) else 0,
        longest=int(lengths.max()) if len(lengths) else 0,
        order=options.order,
        notes=(*plan.notes, *chosen.notes),
    )


def select(
    tables: Tables, renderer: PromptRenderer, measured: Measured, log: FaultLog, options: SortOptions
) -> Selection:
    """Apply the policies for bad and overlong rows.

    Raises:
        DataError: what `log` holds already, and every row that a policy refuses.
    """
    if options.bad_rows == "error":
        measured.bad.report(log, fix="mend or remove the rows, or use --bad-rows drop or keep")
    lengths, limit = measured.lengths, options.max_length
    over = np.flatnonzero(lengths > limit) if limit is not None else np.zeros(0, np.int64)
    if len(over) and options.overlong == "error":
        rows = RowFaults()
        for index in over:
            file, name = measured.name(int(index))
            rows.add(file, name, f"over the limit of {limit:,} tokens")
        rows.report(log, fix=f"longest has {int(lengths.max()):,}; raise --max-length, or set --overlong")
    log.raise_if_any()
    cuts: dict[int, int] = {}
    if len(over) and options.overlong == "truncate_left" and limit is not None:
        lengths = lengths.copy()
        cuts = _find_all_cuts(tables, renderer, options.prompt_key, over, limit, lengths)
    keep = np.ones(len(lengths), dtype=bool)
    bad = np.asarray(measured.bad_index, dtype=np.int64)
    if options.bad_rows == "drop":
        keep[bad] = False
    if options.overlong == "drop":
        keep[over] = False
    blank = measured.blank.count()
    notes = [f"{blank:,} prompts have no content of their own, but render to tokens"] if blank else []
    if len(bad):
        notes.append(f"{len(bad):,} rows without a usable prompt {'dropped' if options.bad_rows == 'drop' else 'kept'}")
    counts = {
        "dropped_overlong": len(over) if options.overlong == "drop" else 0,
        "dropped_bad": len(bad) if options.bad_rows == "drop" else 0,
        "truncated": len(cuts),
        "kept_overlong": len(over) if options.overlong == "keep" else 0,
    }
    return Selection(lengths=lengths, kept=np.flatnonzero(keep), cuts=cuts, counts=counts, notes=tuple(notes))


def _find_all_cuts(
    tables: Tables,
    renderer: PromptRenderer,
    prompt_key: str,
    over: npt.NDArray[np.int64],
    limit: int,
    lengths: npt.NDArray[np.int32],
) -> dict[int, int]:
    """Characters to cut from each row in `over`; `lengths` gets what is left.

    Raises:
        DataError: rows whose template alone is over the limit.
    """
    cuts: dict[int, int] = {}
    start, bad, log = 0, RowFaults(), FaultLog()
    for chunk in tables.chunks(FaultLog(), [prompt_key]):
        mine = over[(over >= start) & (over < start + chunk.num_rows)]
        if len(mine):
            prompts: list[Any] = chunk.column(prompt_key)
            found = find_cuts(renderer, [prompts[i - start] for i in mine.tolist()], limit)
            for index, (count, tokens) in zip(mine.tolist(), found):
                if count < 0:
                    bad.add(chunk.file, chunk.name(index - start), f"{tokens:,} tokens without any text of its own")
                cuts[index], lengths[index] = count, tokens
        start += chunk.num_rows
    bad.report(log, fix="raise --max-length, or use --overlong drop")
    log.raise_if_any()
    return cuts


def _write(
    plan: Payload,
    chosen: Selection,
    order: npt.NDArray[np.int64],
    output: Path,
    options: SortOptions,
    progress: Progress,
) -> None:
    """Move the rows."""
    total = plan.tables.num_bytes
    done = 0

    def batches() -> Any:
        nonlocal done
        for chunk, batch in plan.chunks(chosen.lengths):
            yield batch
            done += chunk.file_bytes
            progress("read", done, total)

    weights = chosen.lengths[order].astype(np.int64) + 16
    cut = cut_evenly(weights, decoded_bytes(plan.tables))
    with table_writer(output, plan.schema, *_form(plan, options)) as writer:
        for table in permute(
            batches(), plan.schema, order, len(chosen.lengths), cut, output.parent, options.memory_bytes
        ):
            writer.write(table)
            progress("write", writer.rows, len(order))


def decoded_bytes(tables: Tables) -> int:
    """About how large the rows are in memory."""
    total = 0
    for file in tables.files:
        if file.format == "parquet":
            with open_parquet(file) as handle:
                meta = handle.metadata
                total += sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
        else:
            size = file.path.stat().st_size
            total += size if file.path.suffix in (".jsonl", ".json", ".ndjson") else 6 * size
    return total


def _form(plan: Payload, options: SortOptions) -> tuple[str, int]:
    """Compression and rows per group of the output: as asked, else as in the first parquet file."""
    first = next((f for f in plan.tables.files if f.format == "parquet"), None)
    codec, rows = "zstd", 0
    if first is not None:
        with open_parquet(first) as handle:
            meta = handle.metadata
            groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
            rows = max((g.num_rows for g in groups), default=0)
            if groups and groups[0].num_columns:
                codec = {"UNCOMPRESSED": "none"}.get(
                    groups[0].column(0).compression, groups[0].column(0).compression.lower()
                )
    return options.compression or codec, rows or GROUP_ROWS
