"""Types for the columns of JSONL files: strict, so that no value changes when it becomes parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from rlspeed.data.files import FaultLog
from rlspeed.data.jsonl import read_lines
from rlspeed.data.tables import Tables

_INT64 = range(-(1 << 63), 1 << 63)
_SCALARS = {"boolean": pa.bool_(), "integer": pa.int64(), "number": pa.float64(), "string": pa.string()}
_NULL = "null"


class _Mixed(Exception):
    """Values of two kinds in one column; the message says which and where in the row."""


class _Shape:
    """What has been seen at one place of the rows: a kind, the fields of objects, the items of lists."""

    def __init__(self) -> None:
        self.kind = _NULL
        self.fields: dict[str, _Shape] = {}
        self.items: _Shape | None = None

    def see(self, value: Any, path: str) -> None:
        """Take in one more value; raises _Mixed when it does not go with the others."""
        kind = _kind(value, path)
        if kind == _NULL:
            return
        if self.kind not in (_NULL, kind):
            raise _Mixed(f"{kind} at {path}, where it was {self.kind} before ({json.dumps(value)[:40]})")
        self.kind = kind
        if kind == "object":
            for name, item in value.items():
                self.fields.setdefault(name, _Shape()).see(item, f"{path}.{name}")
        elif kind == "list":
            if self.items is None:
                self.items = _Shape()
            for item in value:
                self.items.see(item, f"{path}[]")

    def arrow(self) -> pa.DataType:
        """The Arrow type."""
        if self.kind == "object":
            return pa.struct([pa.field(n, s.arrow()) for n, s in self.fields.items()])
        if self.kind == "list":
            return pa.list_(self.items.arrow() if self.items is not None else pa.null())
        return _SCALARS.get(self.kind, pa.null())

    def empty_objects(self, path: str) -> Iterator[str]:
        """Places where there are objects, but none with a field: parquet has no such thing."""
        if self.kind == "object" and not self.fields:
            yield path
        for name, shape in self.fields.items():
            yield from shape.empty_objects(f"{path}.{name}")
        if self.items is not None:
            yield from self.items.empty_objects(f"{path}[]")


def infer_schema(tables: Tables, log: FaultLog) -> pa.Schema:
    """Schema of all JSONL rows of `tables`: int64, double, bool, string, lists and structs of these, null.

    Integers stay integers: 7 and 7.5, or 7 and "7 apples", in one column are a fault that names the column and the
    first such line; one per column.
    """
    shapes: dict[str, _Shape] = {}
    broken: set[str] = set()
    for file in tables.files:
        if file.format != "jsonl":
            continue
        for line in read_lines(file, FaultLog()):
            for name, value in line.record.items():
                if name in broken:
                    continue
                try:
                    shapes.setdefault(name, _Shape()).see(value, name)
                except _Mixed as error:
                    broken.add(name)
                    fix = "write the output as .jsonl, which keeps values as they are, or give the column one type"
                    log.add(f"{file}: line {line.number}, column {name!r}", str(error), fix=fix)
    for name, shape in shapes.items():
        for path in shape.empty_objects(name):
            log.add(f"column {name!r}", f"only empty objects at {path}", fix="parquet cannot hold them; write .jsonl")
    return pa.schema([pa.field(name, shape.arrow()) for name, shape in shapes.items()])


def _kind(value: Any, path: str) -> str:
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        if value not in _INT64:
            raise _Mixed(f"an integer beyond 64 bits at {path} ({str(value)[:40]})")
        return "integer"
    return {float: "number", str: "string", list: "list", dict: "object"}[type(value)]
