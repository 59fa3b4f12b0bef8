"""Bins of rows as parquet: what `preprocess pack` writes and what `train` reads back.

One row of the file is one bin: `input_ids` list<int32> of several rows back to back, `cu_seqlens` list<int32> with
their boundaries (0 first, the number of tokens last), `row_ids` list<int64> with the number of each row in the input.
`loss_mask` list<bool>, `rows` list<struct> (the other columns of each row) and `rank` int32 are there when asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rlspeed.data.files import DataFile, FaultLog
from rlspeed.data.tables import Chunk, Tables
from rlspeed.errors import DataError, Fault

METADATA_KEY = b"rlspeed.pack"
PACKED_COLUMNS = ("input_ids", "cu_seqlens", "row_ids")


def packed_schema(*, loss: bool, row: pa.StructType | None, ranks: bool, header: dict[str, Any]) -> pa.Schema:
    """Schema of a packed file; `header` goes into its metadata as JSON."""
    fields = [
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("cu_seqlens", pa.list_(pa.int32()), nullable=False),
        pa.field("row_ids", pa.list_(pa.int64()), nullable=False),
    ]
    if loss:
        fields.append(pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False))
    if row is not None:
        fields.append(pa.field("rows", pa.list_(row), nullable=False))
    if ranks:
        fields.append(pa.field("rank", pa.int32(), nullable=False))
    return pa.schema(fields, metadata={METADATA_KEY: json.dumps(header, ensure_ascii=False).encode("utf-8")})


def packed_tables(
    rows: Iterable[pa.Table], bins: Sequence[Sequence[int]], rank: Sequence[int], schema: pa.Schema
) -> Iterator[pa.Table]:
    """Bins out of rows that come in the order of the bins.

    rows: tables with `input_ids` and, as the schema has them, `loss_mask` and `row`. bins: row numbers of each bin.
    """
    ends = np.cumsum([len(b) for b in bins], dtype=np.int64)
    pending: list[pa.Table] = []
    held = taken = first = 0
    for table in rows:
        pending.append(table)
        held += table.num_rows
        complete = int(np.searchsorted(ends, taken + held, side="right"))
        if complete == first:
            continue
        whole = pa.concat_tables(pending).combine_chunks()
        used = int(ends[complete - 1]) - taken
        yield _packed(whole.slice(0, used), bins[first:complete], rank[first:complete], schema)
        pending = [whole.slice(used)]
        held, taken, first = held - used, taken + used, complete
    if first < len(bins):  # nothing but empty ones can be left
        empty = schema.empty_table() if not pending else pending[0]
        yield _packed(empty.slice(0, 0), bins[first:], rank[first:], schema)


def _packed(table: pa.Table, bins: Sequence[Sequence[int]], rank: Sequence[int], schema: pa.Schema) -> pa.Table:
    """One row per bin."""
    counts = np.array([len(b) for b in bins], dtype=np.int64)
    row_ends = np.concatenate([[0], np.cumsum(counts)])
    columns: list[pa.Array] = []
    sizes = np.zeros(table.num_rows, np.int64)
    if table.num_rows:
        sizes = table.column("input_ids").combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
    token_ends = np.concatenate([[0], np.cumsum(sizes)])
    boundaries = [token_ends[a : b + 1] - token_ends[a] for a, b in pairwise(row_ends)]
    for field in schema:
        if field.name in ("input_ids", "loss_mask"):
            values = _values(table, field.name, field.type.value_type)
            columns.append(_lists(token_ends[row_ends], values, field.type))
        elif field.name == "cu_seqlens":
            offsets = np.concatenate([[0], np.cumsum(counts + 1)])
            flat = np.concatenate(boundaries) if boundaries else np.zeros(0)
            columns.append(_lists(offsets, pa.array(flat.astype(np.int32)), field.type))
        elif field.name == "row_ids":
            flat = np.fromiter((i for b in bins for i in b), dtype=np.int64, count=int(row_ends[-1]))
            columns.append(_lists(row_ends, pa.array(flat), field.type))
        elif field.name == "rows":
            columns.append(_lists(row_ends, _whole(table, "row", field.type.value_type), field.type))
        else:
            columns.append(pa.array(rank, pa.int32()))
    return pa.Table.from_arrays(columns, schema=schema)


def _lists(offsets: npt.NDArray[np.int64], values: pa.Array, kind: pa.DataType) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values, type=kind)


def _values(table: pa.Table, name: str, kind: pa.DataType) -> pa.Array:
    return table.column(name).combine_chunks().flatten() if table.num_rows else pa.array([], kind)


def _whole(table: pa.Table, name: str, kind: pa.DataType) -> pa.Array:
    return table.column(name).combine_chunks() if table.num_rows else pa.array([], kind)


def is_packed(tables: Tables) -> bool:
    """Whether the files are packed ones.

    Raises:
        DataError: some are and some are not.
    """
    packed = [all(n in schema.names for n in PACKED_COLUMNS) for _, schema in tables.schemas]
    if not any(packed):
        return False
    others = [f for (f, _), p in zip(tables.schemas, packed) if not p]
    others += [f for f in tables.files if f.format == "jsonl"]
    if others:
        found = f"not packed, while {tables.schemas[packed.index(True)][0]} is"
        raise DataError(Fault(where=str(others[0]), found=found, fix="pack all files together, or none"))
    return True


def check_tokenizer(tables: Tables, digest: str) -> None:
    """Raises: DataError for each packed file whose ids are another tokenizer's."""
    log = FaultLog()
    for file, schema in tables.schemas:
        header = json.loads((schema.metadata or {}).get(METADATA_KEY, b"{}"))
        theirs = (header.get("tokenizer") or {}).get("digest")
        if theirs is not None and theirs != digest:
            found = f"packed with another tokenizer ({header['tokenizer'].get('name')})"
            log.add(str(file), found, fix="pack the data again with this model's tokenizer")
    log.raise_if_any()


def unpack(chunk: Chunk, first: int, prompt_key: str) -> tuple[Chunk, list[list[int]]]:
    """The rows in the bins of a chunk, one by one, with their token ids.

    first: number of the chunk's first row over the file. A prompt column is made when the rows have none.

    Raises:
        DataError: boundaries that do not fit the ids.
    """
    ids: list[list[int]] = []
    batch = chunk.batch
    columns = [batch.column(n).to_pylist() for n in PACKED_COLUMNS]
    for i, (tokens, ends, row_ids) in enumerate(zip(*columns)):
        if not _fits(tokens, ends, row_ids):
            raise DataError(Fault(where=f"{chunk.file}: row {chunk.first + i}", found="cu_seqlens do not fit"))
        ids.extend(tokens[a:b] for a, b in pairwise(ends))
    if "rows" in batch.schema.names:
        rows = pa.RecordBatch.from_struct_array(batch.column("rows").flatten())
    else:
        rows = pa.RecordBatch.from_arrays([batch.column("row_ids").flatten()], ["row_id"])
    if prompt_key not in rows.schema.names:
        rows = rows.append_column(prompt_key, pa.nulls(rows.num_rows))
    return Chunk(file=chunk.file, first=first, batch=rows, file_bytes=chunk.file_bytes), ids


def _fits(tokens: list[int], ends: list[int], row_ids: list[int]) -> bool:
    rising = all(a < b for a, b in pairwise(ends))
    return bool(ends) and ends[0] == 0 and ends[-1] == len(tokens) and rising and len(row_ids) == len(ends) - 1


def sources(files: Sequence[DataFile], digests: Sequence[str], starts: Sequence[tuple[int, DataFile]]) -> list[Any]:
    """The input files for a manifest: path, bytes, sha256 and the number of each one's first row."""
    first = {str(f): start for start, f in starts}
    return [
        {"path": str(f), "bytes": f.path.stat().st_size, "sha256": digest, "first_row": first.get(str(f))}
        for f, digest in zip(files, digests)
    ]
