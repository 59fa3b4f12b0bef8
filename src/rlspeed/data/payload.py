"""The rows of the input as they will stand in the output: one schema, cut prompts, a length column on request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rlspeed.data.cut import cut_left
from rlspeed.data.files import FaultLog, Format
from rlspeed.data.infer import infer_schema
from rlspeed.data.schema import cast_batch, dense, unify
from rlspeed.data.tables import LINE_SCHEMA, Chunk, Tables, to_rows
from rlspeed.data.write import json_faults, json_lines
from rlspeed.errors import DataError, Fault


@dataclass(slots=True)
class Payload:
    """What is to be written.

    kind: format of the output. schema: of the batches; JSONL is one column of lines. cuts: characters to take from the
    left of a row's prompt, by row number over all files. length_column: name of the column to add, or None. notes:
    what changes its form.
    """

    tables: Tables
    kind: Format
    schema: pa.Schema
    prompt_key: str
    length_column: str | None = None
    cuts: Mapping[int, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def chunks(self, lengths: npt.NDArray[np.int32]) -> Iterator[tuple[Chunk, pa.RecordBatch]]:
        """Each chunk of the input with its rows in the output's form. lengths [N]: tokens of each row."""
        start = 0
        for chunk in self.tables.chunks(FaultLog()):
            mine = {i - start: n for i, n in self.cuts.items() if start <= i < start + chunk.num_rows}
            span = lengths[start : start + chunk.num_rows]
            start += chunk.num_rows
            yield chunk, self._convert(chunk, mine, span)

    def _convert(self, chunk: Chunk, cuts: Mapping[int, int], lengths: npt.NDArray[np.int32]) -> pa.RecordBatch:
        if self.kind == "parquet":
            return self._columns(chunk, cuts, lengths)
        if chunk.file.format == "jsonl":
            lines = chunk.batch.column(0).to_pylist()
            for i, count in cuts.items():
                record = {**chunk.records[i], self.prompt_key: cut_left(chunk.records[i][self.prompt_key], count)}
                lines[i] = json.dumps(record, ensure_ascii=False).encode("utf-8")
            batch = pa.RecordBatch.from_arrays([pa.array(lines, pa.large_binary())], schema=LINE_SCHEMA)
        else:
            rows = to_rows(chunk.batch)
            for i, count in cuts.items():
                rows[i][self.prompt_key] = cut_left(rows[i][self.prompt_key], count)
            batch = json_lines(rows, chunk.first, str(chunk.file))
        if self.length_column is None:
            return batch
        if any(self.length_column in r for r in chunk.records) or self.length_column in chunk.batch.schema.names:
            raise _has_length_column(self.length_column)
        return _with_length(batch, self.length_column, lengths)

    def _columns(self, chunk: Chunk, cuts: Mapping[int, int], lengths: npt.NDArray[np.int32]) -> pa.RecordBatch:
        bare = self.schema if self.length_column is None else self.schema.remove(len(self.schema) - 1)
        if chunk.file.format == "jsonl":
            batch = pa.RecordBatch.from_pylist(chunk.records, schema=bare)
        else:
            batch = cast_batch(chunk.batch, bare)
        if cuts:
            at = batch.schema.get_field_index(self.prompt_key)
            prompts: list[Any] = batch.column(at).to_pylist()
            for i, count in cuts.items():
                prompts[i] = cut_left(prompts[i], count)
            flat = dense(pa.schema([bare.field(at)])).field(0).type
            columns = [*batch.columns[:at], pa.array(prompts, flat), *batch.columns[at + 1 :]]
            mixed = pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
            batch = cast_batch(mixed, bare)
        if self.length_column is None:
            return batch
        return pa.RecordBatch.from_arrays([*batch.columns, pa.array(lengths, pa.int32())], schema=self.schema)


def payload(tables: Tables, kind: Format, prompt_key: str, length_column: str | None, log: FaultLog) -> Payload:
    """How the rows of `tables` become an output of format `kind`; faults of JSONL columns go to `log`.

    Raises:
        DataError: types that the output cannot hold, or a length column that is there already.
    """
    if kind == "jsonl":
        faults, notes = json_faults(tables.unified.schema) if tables.unified is not None else ([], [])
        if faults:
            raise DataError(faults)
        return Payload(tables, kind, LINE_SCHEMA, prompt_key, length_column, notes=tuple(notes))
    files, schemas = [f for f, _ in tables.schemas], [s for _, s in tables.schemas]
    lines = [f for f in tables.files if f.format == "jsonl"]
    if lines:
        schemas.append(infer_schema(tables, log))
        files.append(lines[0])
    unified = unify(files, schemas)
    schema = unified.schema
    if length_column is not None:
        if length_column in schema.names:
            raise _has_length_column(length_column)
        schema = schema.append(pa.field(length_column, pa.int32(), nullable=False))
    return Payload(tables, kind, schema, prompt_key, length_column, notes=unified.notes)


def _has_length_column(name: str) -> DataError:
    return DataError(Fault(where="--length-column", found=f"the data has a column {name!r} already"))


def _with_length(batch: pa.RecordBatch, name: str, lengths: npt.NDArray[np.int32]) -> pa.RecordBatch:
    """JSON lines with one more key; the rest of each line stays as it is."""
    key = json.dumps(name).encode()
    lines = [
        line.rstrip()[:-1].rstrip() + b", " + key + b": " + str(int(n)).encode() + b"}"
        for line, n in zip(batch.column(0).to_pylist(), lengths)
    ]
    return pa.RecordBatch.from_arrays([pa.array(lines, pa.large_binary())], schema=LINE_SCHEMA)
