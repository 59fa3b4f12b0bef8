"""Tables to parquet or JSONL, in row groups of bounded size."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from rlspeed.data.atomic import atomic_file, write_error
from rlspeed.data.files import COMPRESSED_ENDINGS, Format, format_of
from rlspeed.data.tables import LINE_SCHEMA
from rlspeed.errors import DataError, Fault

Compression = Literal["zstd", "snappy", "gzip", "lz4", "none"]
GROUP_BYTES = 64 << 20
GROUP_ROWS = 1 << 20
_STREAM_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


def output_format(path: Path) -> Format:
    """The format that the name of an output asks for.

    Raises:
        DataError: neither parquet nor JSONL.
    """
    kind = format_of(path.name)
    if kind is None:
        raise DataError(
            Fault(where="--output", found=repr(str(path)), allowed="a name that ends in .parquet or .jsonl")
        )
    return kind


class TableWriter:
    """Collects rows into row groups and writes them."""

    def __init__(self, path: str, name: Path, schema: pa.Schema, compression: str, group_rows: int) -> None:
        self.schema = schema
        self.group_rows = min(group_rows, GROUP_ROWS)
        self.rows = 0
        self._held: list[pa.RecordBatch] = []
        self._held_rows = self._held_bytes = 0
        self._parquet: pq.ParquetWriter | None = None
        self._lines: Any = None
        if output_format(name) == "parquet":
            self._parquet = pq.ParquetWriter(path, schema, compression=compression)
        else:
            ending = next(e for e in reversed(COMPRESSED_ENDINGS) if name.name.lower().endswith(e))
            self._lines = pa.output_stream(path, compression=_STREAM_CODECS.get(ending))

    def write(self, table: pa.Table) -> None:
        """Add rows."""
        self.rows += table.num_rows
        if self._lines is not None:
            for batch in table.to_batches():
                if batch.num_rows:
                    self._lines.write(b"\n".join(batch.column(0).to_pylist()) + b"\n")
            return
        for batch in table.to_batches():
            at = 0
            while at < batch.num_rows:
                piece = batch.slice(at, self.group_rows - self._held_rows)
                at += piece.num_rows
                self._held.append(piece)
                self._held_rows += piece.num_rows
                self._held_bytes += piece.nbytes
                if self._held_rows >= self.group_rows or self._held_bytes >= GROUP_BYTES:
                    self._flush()

    def close(self) -> None:
        """Write what is left and the footer."""
        if self._lines is not None:
            self._lines.close()
        elif self._parquet is not None:
            self._flush()
            self._parquet.close()

    def _flush(self) -> None:
        if self._held and self._parquet is not None:
            table = pa.Table.from_batches(self._held, schema=self.schema)
            self._parquet.write_table(table, row_group_size=self._held_rows)
        self._held, self._held_rows, self._held_bytes = [], 0, 0


@contextmanager
def table_writer(target: Path, schema: pa.Schema, compression: str, group_rows: int) -> Iterator[TableWriter]:
    """A writer whose file appears as `target` when the block ends well.

    Raises:
        DataError: the system refuses to write.
    """
    with atomic_file(target) as path:
        try:
            writer = TableWriter(path, target, schema, compression, group_rows)
        except pa.ArrowException as error:
            raise write_error(target, error) from error
        try:
            yield writer
            writer.close()
        except pa.ArrowException as error:
            _abandon(writer)
            raise write_error(target, error) from error
        except BaseException:
            _abandon(writer)
            raise


def _abandon(writer: TableWriter) -> None:
    """Close the file below a writer that failed, whatever it says about it."""
    try:
        writer.close()
    except (OSError, pa.ArrowException):
        return


def json_faults(schema: pa.Schema) -> tuple[list[Fault], list[str]]:
    """What of a parquet schema JSON cannot hold, and what it holds as text."""
    faults, notes = [], []
    for field in schema:
        kinds = list(_leaves(field.type))
        if any(pt.is_binary(t) or pt.is_large_binary(t) or pt.is_fixed_size_binary(t) for t in kinds):
            found = f"{field.type} cannot be written as JSON"
            faults.append(Fault(where=f"column {field.name!r}", found=found, fix="write the output as .parquet"))
        elif any(pt.is_temporal(t) or pt.is_decimal(t) for t in kinds):
            notes.append(f"column {field.name!r}: {field.type} written as text")
    return faults, notes


def _leaves(t: pa.DataType) -> Iterator[pa.DataType]:
    if t.num_fields == 0:
        yield t.value_type if pt.is_dictionary(t) else t
    for i in range(t.num_fields):
        yield from _leaves(t.field(i).type)


def json_lines(rows: list[dict[str, Any]], first: int, where: str) -> pa.RecordBatch:
    """Rows as a batch of JSON lines.

    Raises:
        DataError: a value that JSON has no form for (NaN, infinity), by row.
    """
    lines = []
    for i, row in enumerate(rows):
        try:
            lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False, default=_plain).encode("utf-8"))
        except ValueError as error:
            found = f"{error}: JSON has no form for it"
            raise DataError(Fault(where=f"{where}: row {first + i}", found=found, fix="write .parquet")) from error
    return pa.RecordBatch.from_arrays([pa.array(lines, pa.large_binary())], schema=LINE_SCHEMA)


def _plain(value: Any) -> Any:
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (decimal.Decimal, datetime.timedelta)):
        return str(value)
    raise ValueError(f"a value of type {type(value).__name__}")
