"""Rows of token ids packed into bins, file to file: whole rows, each once, with a manifest of where they came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rlspeed import __version__
from rlspeed.data.atomic import Scratch, check_output, write_text
from rlspeed.data.bins import packed_schema, packed_tables, sources
from rlspeed.data.files import DataFile, FaultLog, RowFaults
from rlspeed.data.measure import Measured, Progress, measure, no_progress
from rlspeed.data.payload import payload
from rlspeed.data.permute import MEMORY_BYTES, Cut, cut_evenly, permute
from rlspeed.data.render import PromptRenderer, tokenizer_digest
from rlspeed.data.sort import decoded_bytes
from rlspeed.data.tables import Tables, open_tables
from rlspeed.data.token_rows import columns_of, has_ids, lists, loss_column, measure_ids
from rlspeed.data.write import GROUP_ROWS, table_writer
from rlspeed.errors import DataError, Fault
from rlspeed.planning.balance import deal, workload
from rlspeed.planning.packing import equal_bins, pack

MANIFEST_VERSION = 1
Overlong = Literal["error", "drop", "truncate_left"]
BadRows = Literal["error", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """How rows are packed.

    capacity: most tokens in a bin, a multiple of `multiple` (sp * tp). ranks: deal the rows to so many ranks by work
    first; every rank gets the same number of bins. overlong: what happens to rows over max_length (the capacity when
    None). keep_columns: carry the rows' other columns along, so that rewards find their answers. plan_only: write the
    bins as row numbers, without tokens.
    """

    capacity: int
    prompt_key: str = "prompt"
    multiple: int = 1
    ranks: int = 1
    max_length: int | None = None
    overlong: Overlong = "error"
    bad_rows: BadRows = "error"
    keep_columns: bool = False
    plan_only: bool = False
    compression: str = "zstd"
    overwrite: bool = False
    memory_bytes: int = MEMORY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """What was done. tokens_in = tokens_out + tokens_dropped. lower_bound: no packing has fewer bins (over all ranks).
    rank_work: largest over mean of the ranks' work."""

    output: str
    manifest: str
    rows_in: int
    rows_out: int
    dropped_overlong: int
    dropped_bad: int
    truncated: int
    tokens_in: int
    tokens_out: int
    tokens_dropped: int
    capacity: int
    bins: int
    empty_bins: int
    lower_bound: int
    fill: float
    ranks: int
    rank_work: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """Bins in the order of the output. rows: input rows of each; rank: whose it is."""

    rows: tuple[tuple[int, ...], ...]
    rank: tuple[int, ...]
    lower_bound: int
    rank_work: float


def plan_bins(
    lengths: npt.NDArray[np.int32], kept: npt.NDArray[np.int64], capacity: int, *, multiple: int = 1, ranks: int = 1
) -> Bins:
    """Pack the rows `kept`; with ranks, deal them by work first and pack each rank's share.

    Bin j of rank r is number j * ranks + r, so that a reader that takes every ranks-th bin gets its own; ranks with
    fewer bins get empty ones.

    Raises:
        LayoutError: a row over the capacity, or a capacity that is no multiple.
    """
    sizes = lengths[kept].tolist()
    shares = deal(sizes, ranks) if ranks > 1 else (tuple(range(len(sizes))),)
    plans = equal_bins([pack([sizes[i] for i in share], capacity, multiple=multiple) for share in shares])
    numbers = kept.tolist()
    work = [sum(workload([sizes[i] for i in share])) for share in shares]
    mean = sum(work) / ranks
    return Bins(
        rows=tuple(
            tuple(numbers[share[i]] for i in plan.bins[j])
            for j in range(len(plans[0].bins))
            for share, plan in zip(shares, plans)
        ),
        rank=tuple(range(ranks)) * len(plans[0].bins),
        lower_bound=sum(p.lower_bound for p in plans),
        rank_work=max(work) / mean if mean else 1.0,
    )


def pack_files(
    files: Sequence[DataFile],
    output: Path,
    renderer: PromptRenderer | None,
    options: PackOptions,
    progress: Progress = no_progress,
    *,
    tokenizer_name: str | None = None,
) -> PackReport:
    """Pack the rows of `files`: parquet with `input_ids`, or prompts that `renderer` tokenises.

    Writes packed parquet and, beside it, `NAME.manifest.json`; with plan_only `output` is the manifest itself, with
    the rows of each bin.

    Raises:
        DataError: input that cannot be used, or an output that cannot be written. Then nothing is left behind.
        LayoutError: an impossible capacity.
    """
    manifest = output if options.plan_only else output.with_name(output.name + ".manifest.json")
    for path in {output, manifest}:
        check_output(path, overwrite=options.overwrite)
    if not options.plan_only and not output.name.endswith(".parquet"):
        raise DataError(Fault(where="--output", found=repr(str(output)), allowed="a name that ends in .parquet"))
    work = _Work(open_tables(files), renderer, options, output.parent, progress)
    try:
        measured, kept = work.measure()
        bins = plan_bins(work.lengths, kept, options.capacity, multiple=options.multiple, ranks=options.ranks)
        report = _report(work, measured, kept, bins, output, manifest)
        header = _header(work, measured, tokenizer_name, report)
        if options.plan_only:
            header["bins"], header["ranks_of_bins"] = [list(b) for b in bins.rows], list(bins.rank)
        else:
            work.write(bins, output, header)
        write_text(manifest, json.dumps(header, indent=None if options.plan_only else 2, ensure_ascii=False) + "\n")
    finally:
        work.close()
    return report


class _Work:
    """The two passes over the input: token ids into a scratch file, then the rows in the order of the bins."""

    def __init__(
        self, tables: Tables, renderer: PromptRenderer | None, options: PackOptions, folder: Path, progress: Progress
    ) -> None:
        self.tables = tables
        self.options = options
        self.folder = folder
        self.progress = progress
        self.renderer = None if has_ids(tables) else renderer
        if self.renderer is None and not has_ids(tables):
            found = "the files hold no input_ids, and there is no tokenizer to make them"
            raise DataError(Fault(where="--tokenizer", found=found, fix="name the tokenizer's directory"))
        self.loss = loss_column(tables) if self.renderer is None else None
        self.scratch = Scratch.create(folder)
        self.lengths = np.zeros(0, np.int32)
        self.truncated = self.dropped = 0

    def close(self) -> None:
        """Give scratch space back."""
        self.scratch.close()

    def measure(self) -> tuple[Measured, npt.NDArray[np.int64]]:
        """The rows as they are, and the numbers of those that go on; sets `lengths` to what they will be.

        Raises:
            DataError: every row that a policy refuses.
        """
        log, plan_only = FaultLog(), self.options.plan_only
        if self.renderer is None:
            measured = measure_ids(self.tables, log, self.progress, keep=None if plan_only else self.scratch.write)
        else:
            keep = None if plan_only else self._keep
            measured = measure(self.tables, self.renderer, self.options.prompt_key, log, self.progress, keep=keep)
        limit = min(self.options.max_length or self.options.capacity, self.options.capacity)
        over = np.flatnonzero(measured.lengths > limit)
        if self.options.bad_rows == "error":
            measured.bad.report(log, fix="mend or remove the rows, or use --bad-rows drop")
        if len(over) and self.options.overlong == "error":
            rows = RowFaults()
            for index in over.tolist():
                rows.add(*measured.name(index), f"length {int(measured.lengths[index]):,} > {limit:,} tokens")
            rows.report(log, fix="raise --capacity, or use --overlong drop or truncate_left")
        log.raise_if_any()
        self.lengths, usable = measured.lengths.copy(), measured.lengths > 0
        if self.options.overlong == "drop":
            usable[over], self.dropped = False, len(over)
        else:
            self.lengths[over], self.truncated = limit, len(over)
        return measured, np.flatnonzero(usable)

    def _keep(self, ids: list[list[int]]) -> None:
        self.scratch.write(pa.RecordBatch.from_arrays([lists(ids, np.int32)], ["input_ids"]))

    def write(self, bins: Bins, output: Path, header: dict[str, Any]) -> None:
        """Move the rows into their bins."""
        row_schema = self._row_schema()
        row = row_schema.field("row").type if self.options.keep_columns else None
        schema = packed_schema(
            loss=self.loss is not None, row=row, ranks=self.options.ranks > 1, header=_metadata(header)
        )
        order = np.fromiter((i for b in bins.rows for i in b), dtype=np.int64)
        cut = _cut_at_bins(bins, self.lengths, self.scratch.num_bytes + decoded_bytes(self.tables))
        with table_writer(output, schema, self.options.compression, GROUP_ROWS) as writer:
            ordered = permute(
                self._batches(row_schema),
                row_schema,
                order,
                len(self.lengths),
                cut,
                self.folder,
                self.options.memory_bytes,
            )
            for table in packed_tables(ordered, bins.rows, bins.rank, schema):
                writer.write(table)
                self.progress("write", writer.rows, len(bins.rows))

    def _row_schema(self) -> pa.Schema:
        """Of the rows before they are packed: input_ids, loss_mask, and the other columns as `row`."""
        fields = [pa.field("input_ids", pa.large_list(pa.int32()))]
        if self.loss is not None:
            fields.append(pa.field("loss_mask", pa.large_list(pa.bool_())))
        if self.options.keep_columns:
            log = FaultLog()
            self.plan = payload(self.tables, "parquet", self.options.prompt_key, None, log)
            log.raise_if_any()
            own = set(columns_of(self.tables, self.loss)) if self.renderer is None else set()
            self.kept = [f for f in self.plan.schema if f.name not in own]
            if not self.kept:
                raise DataError(Fault(where="--keep-columns", found="there are no other columns", fix="leave it out"))
            fields.append(pa.field("row", pa.struct(self.kept)))
        return pa.schema(fields)

    def _batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        start = done = 0
        chunks = self.plan.chunks(self.lengths) if self.options.keep_columns else None
        for tokens in self.scratch.batches():
            span = self.lengths[start : start + tokens.num_rows]
            start += tokens.num_rows
            columns = [_tails(column, span) for column in tokens.columns]
            if chunks is not None:
                chunk, batch = next(chunks)
                arrays = [batch.column(f.name) for f in self.kept]
                columns.append(pa.StructArray.from_arrays(arrays, fields=self.kept))
                done += chunk.file_bytes
                self.progress("read", done, self.tables.num_bytes)
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _tails(column: pa.LargeListArray, lengths: npt.NDArray[np.int32]) -> pa.LargeListArray:
    """The last `lengths[i]` items of each list."""
    sizes = column.value_lengths().to_numpy(zero_copy_only=False)
    if (sizes <= lengths).all():
        return column
    flat = column.flatten().to_numpy(zero_copy_only=False)
    ends = np.cumsum(sizes)
    return lists([flat[e - min(n, s) : e] for e, n, s in zip(ends, lengths, sizes)], flat.dtype)


def _cut_at_bins(bins: Bins, lengths: npt.NDArray[np.int32], total_bytes: int) -> Cut:
    """Parts of the output that end where a bin ends."""
    tokens = np.array([int(lengths[list(b)].sum()) + 16 for b in bins.rows], dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum([len(b) for b in bins.rows], dtype=np.int64)])
    return Cut(np.unique(ends[cut_evenly(tokens, total_bytes).bounds])) if bins.rows else cut_evenly(tokens, 0)


def _report(
    work: _Work, measured: Measured, kept: npt.NDArray[np.int64], bins: Bins, output: Path, manifest: Path
) -> PackReport:
    tokens_in = int(measured.lengths.sum(dtype=np.int64))
    tokens_out = int(work.lengths[kept].sum(dtype=np.int64))
    empty = sum(1 for b in bins.rows if not b)
    room = (len(bins.rows) - empty) * work.options.capacity
    return PackReport(
        output=str(output),
        manifest=str(manifest),
        rows_in=measured.num_rows,
        rows_out=len(kept),
        dropped_overlong=work.dropped,
        dropped_bad=len(measured.bad_index),
        truncated=work.truncated,
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        tokens_dropped=tokens_in - tokens_out,
        capacity=work.options.capacity,
        bins=len(bins.rows),
        empty_bins=empty,
        lower_bound=bins.lower_bound,
        fill=tokens_out / room if room else 1.0,
        ranks=work.options.ranks,
        rank_work=bins.rank_work,
    )


def _header(work: _Work, measured: Measured, tokenizer_name: str | None, report: PackReport) -> dict[str, Any]:
    """The manifest: where the rows came from, with which settings, and what came out."""
    renderer, files = work.renderer, work.tables.files
    settings = asdict(work.options)
    for name in ("overwrite", "memory_bytes", "plan_only"):
        del settings[name]
    tokenizer = None
    if renderer is not None:
        tokenizer = {"name": tokenizer_name, "digest": tokenizer_digest(renderer.tokenizer)}
        settings |= {
            "apply_chat_template": renderer.mode,
            "system_prompt": renderer.system_prompt,
            "chat_template_kwargs": renderer.kwargs,
        }
    return {
        "manifest_version": MANIFEST_VERSION,
        "rlspeed": __version__,
        "tokenizer": tokenizer,
        "settings": settings,
        "files": sources(files, [file_digest(f.path) for f in files], measured.starts),
        "result": asdict(report),
    }


def _metadata(header: dict[str, Any]) -> dict[str, Any]:
    """The part of the manifest that travels inside the file."""
    return {name: header[name] for name in ("manifest_version", "rlspeed", "tokenizer", "settings")}


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
