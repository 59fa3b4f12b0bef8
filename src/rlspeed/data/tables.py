"""Rows of parquet and JSONL files, streamed in chunks of bounded size and named by file and row in every message."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlspeed.data.files import DataFile, FaultLog
from rlspeed.data.jsonl import read_lines
from rlspeed.data.schema import Unified, cast_batch, unify
from rlspeed.errors import DataError, Fault

CHUNK_BYTES = 32 << 20
MAX_CHUNK_ROWS = 16384
LINE_SCHEMA = pa.schema([pa.field("line", pa.large_binary(), nullable=False)])
_PROBE_ROWS = 64
_STREAM_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive rows of one file.

    first: number of the first row in the file, from 0. batch: the rows; of a JSONL file its lines as bytes, one column
    `line`. lines, records: line numbers and parsed objects of a JSONL file. file_bytes: the rows' share of the file,
    for progress.
    """

    file: DataFile
    first: int
    batch: pa.RecordBatch
    lines: tuple[int, ...] = ()
    records: list[dict[str, Any]] = field(default_factory=list)
    file_bytes: int = 0

    @property
    def num_rows(self) -> int:
        """Rows in this chunk."""
        return int(self.batch.num_rows)

    def column(self, name: str) -> list[Any]:
        """One column as plain Python values; None where a JSON object lacks the key."""
        if self.file.format == "jsonl":
            return [record.get(name) for record in self.records]
        return list(self.batch.column(name).to_pylist())

    def name(self, index: int) -> str:
        """How messages name a row of this chunk, `3` or `3 (line 4)`."""
        return f"{self.first + index} (line {self.lines[index]})" if self.lines else str(self.first + index)


@dataclass(frozen=True, slots=True)
class Tables:
    """Files that are read as one table.

    schemas: of the parquet files among them. unified: the schema of these together, None without any.
    """

    files: tuple[DataFile, ...]
    schemas: tuple[tuple[DataFile, pa.Schema], ...]
    unified: Unified | None

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(f.path.stat().st_size for f in self.files)

    def require_column(self, name: str, fix: str) -> None:
        """Raises: DataError for each parquet file without the column (JSONL rows are looked at one by one)."""
        log = FaultLog()
        for file, schema in self.schemas:
            if name not in schema.names:
                log.add(str(file), f"no column {name!r}", allowed=", ".join(schema.names) or "no columns", fix=fix)
        log.raise_if_any()

    def chunks(self, log: FaultLog, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        """All rows in order; bad JSONL lines go to `log`, at the end of whose reading the caller looks.

        columns: read only these of parquet files. Batches have the unified types.

        Raises:
            DataError: a parquet file that cannot be decoded, named with its row group and column.
        """
        for file in self.files:
            if file.format == "parquet":
                assert self.unified is not None
                yield from _parquet_chunks(file, self.unified.schema, columns)
            else:
                yield from _jsonl_chunks(file, log)


def open_tables(files: Sequence[DataFile]) -> Tables:
    """Look at every file's schema.

    Raises:
        DataError: files that are no parquet, or are cut off, or whose columns have types that do not go together.
    """
    log, schemas = FaultLog(), []
    for file in files:
        if file.format != "parquet":
            continue
        try:
            with open_parquet(file) as handle:
                schemas.append((file, handle.schema_arrow))
        except DataError as error:
            log.add(error.faults[0].where, error.faults[0].found, fix=error.faults[0].fix)
    log.raise_if_any()
    unified = unify([f for f, _ in schemas], [s for _, s in schemas]) if schemas else None
    return Tables(tuple(files), tuple(schemas), unified)


def open_parquet(file: DataFile) -> pq.ParquetFile:
    """A parquet file opened for streaming: nothing is read ahead.

    Raises:
        DataError: missing, empty, cut off or not parquet at all.
    """
    try:
        size = file.path.stat().st_size
        if size == 0:
            raise DataError(Fault(where=str(file), found="an empty file (0 bytes)", allowed="a parquet file"))
        handle = pq.ParquetFile(file.path, buffer_size=_STREAM_BUFFER_BYTES, pre_buffer=False)
        return handle
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:  # the last: column names
        raise DataError(
            Fault(
                where=str(file),
                found=f"not a readable parquet file: {str(error).splitlines()[0]}",
                fix="it may be cut off or of another format; write it again",
            )
        ) from error


def to_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows of a chunk's batch as fresh Python dicts, of whichever format.

    Raises:
        DataError: a text column that holds bytes which are no UTF-8.
    """
    if batch.schema.equals(LINE_SCHEMA):
        return [json.loads(line) for line in batch.column(0).to_pylist()]
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError as error:
        bad = [name for name, column in zip(batch.schema.names, batch.columns) if not _is_text(column)]
        fix = "write the file again in UTF-8"
        raise DataError(Fault(where=f"column {', '.join(bad)}", found=f"no text: {error}", fix=fix)) from error


def _is_text(column: pa.Array) -> bool:
    try:
        column.to_pylist()
    except UnicodeDecodeError:
        return False
    return True


def _jsonl_chunks(file: DataFile, log: FaultLog) -> Iterator[Chunk]:
    raw: list[bytes] = []
    lines: list[int] = []
    records: list[dict[str, Any]] = []
    first = held = 0

    def chunk() -> Chunk:
        batch = pa.RecordBatch.from_arrays([pa.array(raw, pa.large_binary())], schema=LINE_SCHEMA)
        share = held + len(raw)
        return Chunk(file=file, first=first, batch=batch, lines=tuple(lines), records=records, file_bytes=share)

    for line in read_lines(file, log):
        raw.append(line.raw)
        lines.append(line.number)
        records.append(line.record)
        held += len(line.raw)
        if held >= CHUNK_BYTES or len(raw) >= MAX_CHUNK_ROWS:
            yield chunk()
            first, held = first + len(raw), 0
            raw, lines, records = [], [], []
    if raw:
        yield chunk()


def _parquet_chunks(file: DataFile, schema: pa.Schema, columns: Sequence[str] | None) -> Iterator[Chunk]:
    with open_parquet(file) as handle:
        names = [n for n in handle.schema_arrow.names if columns is None or n in columns]
        target = schema if columns is None else pa.schema([schema.field(n) for n in columns], metadata=schema.metadata)
        first, size, rows = 0, file.path.stat().st_size, handle.metadata.num_rows
        for group in range(handle.num_row_groups):
            for batch in _group_batches(file, handle, group, names):
                share = size * batch.num_rows // rows
                yield Chunk(file=file, first=first, batch=cast_batch(batch, target), file_bytes=share)
                first += batch.num_rows


def _group_batches(file: DataFile, handle: pq.ParquetFile, group: int, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Batches of one row group, about CHUNK_BYTES each.

    Rows per batch follow from the group's size and its first rows. A batch that turns out far larger, or nested texts
    that do not fit Arrow's 32-bit offsets, make the rest of the group come in smaller batches.

    Raises:
        DataError: naming the row group and the columns that cannot be decoded.
    """
    total, done = handle.metadata.row_group(group).num_rows, 0
    size = 0
    while done < total:
        try:
            size = size or _first_size(handle, group, names)
            at = 0
            for batch in handle.iter_batches(size, row_groups=[group], columns=names):
                at += batch.num_rows
                if at <= done:
                    continue
                fresh = batch.slice(max(0, batch.num_rows - (at - done)))
                done += fresh.num_rows
                yield fresh
                if fresh.nbytes > 4 * CHUNK_BYTES and size > 1:
                    size = _rows_per_chunk(fresh.nbytes, fresh.num_rows)
                    break
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            if not isinstance(error, pa.ArrowNotImplementedError) or size <= 1:
                raise _group_error(file, handle, group, names, error) from error
            size = max(1, size // 8)


def _first_size(handle: pq.ParquetFile, group: int, names: list[str]) -> int:
    """Rows per batch for a row group: by its bytes and by its first rows (dictionary pages hide long texts)."""
    meta = handle.metadata.row_group(group)
    if not names:
        return MAX_CHUNK_ROWS
    probe = next(handle.iter_batches(_PROBE_ROWS, row_groups=[group], columns=names))
    columns = [meta.column(i) for i in range(meta.num_columns)]
    encoded = sum(c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] in names)
    return min(_rows_per_chunk(probe.nbytes, probe.num_rows), _rows_per_chunk(encoded, meta.num_rows))


def _rows_per_chunk(num_bytes: int, rows: int) -> int:
    """How many rows like these make CHUNK_BYTES."""
    return max(1, min(MAX_CHUNK_ROWS, CHUNK_BYTES * rows // max(1, num_bytes)))


def _group_error(
    file: DataFile, handle: pq.ParquetFile, group: int, names: list[str], error: BaseException
) -> DataError:
    """Which columns of a row group are to blame."""
    bad = []
    for name in names:
        try:
            for _ in handle.iter_batches(_PROBE_ROWS, row_groups=[group], columns=[name]):
                pass
        except (OSError, pa.ArrowException, UnicodeDecodeError):
            bad.append(name)
    return DataError(
        Fault(
            where=f"{file}: row group {group}, column {', '.join(bad) or '?'}",
            found=f"cannot be decoded: {str(error).splitlines()[0]}",
            fix="the file is damaged; write it again",
        )
    )
