"""One schema out of many shards: types that say the same are unified, real conflicts are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.types as pt

from rlspeed.data.files import DataFile, FaultLog

_SIGNED = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_FLOATS = (pa.float16(), pa.float32(), pa.float64())
_UNITS = ("s", "ms", "us", "ns")


class _Conflict(Exception):
    """Two types that have no common one."""


@dataclass(frozen=True, slots=True)
class Unified:
    """The schema of all files together. notes: one sentence for each column that some file stores differently."""

    schema: pa.Schema
    notes: tuple[str, ...]


def unify(files: Sequence[DataFile], schemas: Sequence[pa.Schema]) -> Unified:
    """One schema that every file can be cast to without loss.

    Columns stand in the order of the first file, further ones after them; a column that a file lacks is null there.
    string, large_string and dictionary of strings become one text type, list and large_list become large_list,
    integers and floats widen among themselves, null goes with anything, nullable wins. Schema metadata is that of the
    first file.

    Raises:
        DataError: for each column with types that have nothing in common, naming it and both files.
    """
    log, notes = FaultLog(), []
    names = list(dict.fromkeys(name for schema in schemas for name in schema.names))
    fields = []
    for schema, file in zip(schemas, files):
        twice = sorted({n for n in schema.names if schema.names.count(n) > 1})
        if twice:
            log.add(str(file), f"two columns named {twice[0]!r}", allowed="column names that differ")
    log.raise_if_any()
    for name in names:
        held = [(f, s.field(name)) for f, s in zip(files, schemas) if name in s.names]
        merged = held[0][1]
        for file, field in held[1:]:
            try:
                merged = _merge_fields(merged, field)
            except _Conflict as error:
                first = next(f for f, other in held if not _compatible(other, field))
                log.add(
                    f"column {name!r}",
                    f"{error} in {file}, but not so in {first}: {field.type} against "
                    f"{next(o for f, o in held if f is first).type}",
                    fix="write the shards with one schema",
                )
                break
        if len(held) < len(files):
            merged = merged.with_nullable(True)
            lacking = next(f for f, s in zip(files, schemas) if name not in s.names)
            notes.append(f"column {name!r}: missing in {lacking}, null there")
        elif any(f.type != merged.type for _, f in held):
            kinds = ", ".join(sorted({str(f.type) for _, f in held}))
            notes.append(f"column {name!r}: {kinds} read as {merged.type}")
        fields.append(merged)
    log.raise_if_any()
    return Unified(pa.schema(fields, metadata=schemas[0].metadata), tuple(notes))


def cast_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """`batch` with the columns, types and metadata of a unified schema; missing columns are null."""
    if batch.schema.equals(schema, check_metadata=True):
        return batch
    columns = []
    for field in schema:
        at = batch.schema.get_field_index(field.name)
        if at < 0:
            columns.append(pa.nulls(batch.num_rows, field.type))
        else:
            column = batch.column(at)
            columns.append(column if column.type == field.type else _cast(column, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class Kinds:
    """Which kinds of values each top-level column holds in each file, as JSON names them.

    A JSONL column may mix kinds, as JSON may; files that have no kind in common do not go together.
    """

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, set[str]]] = {}

    def add_schema(self, file: DataFile, schema: pa.Schema) -> None:
        """Note a parquet file's columns."""
        for field in schema:
            self._of(field.name, file).add(kind_of(field.type))

    def add_record(self, file: DataFile, record: dict[str, object]) -> None:
        """Note one JSON object."""
        for name, value in record.items():
            self._of(name, file).add(_KINDS.get(type(value), "other"))

    def check(self, log: FaultLog) -> None:
        """Note a fault for each column that is of one kind in one file and of another kind in another."""
        for name, files in self.seen.items():
            kinds = [(file, found - {"null"}) for file, found in files.items() if found - {"null"}]
            for file, found in kinds[1:]:
                if not found & kinds[0][1] and "other" not in found | kinds[0][1]:
                    first, here = " or ".join(sorted(kinds[0][1])), " or ".join(sorted(found))
                    log.add(
                        f"column {name!r}",
                        f"{first} in {kinds[0][0]}, but {here} in {file}",
                        fix="write the files with one schema",
                    )
                    break

    def _of(self, name: str, file: DataFile) -> set[str]:
        return self.seen.setdefault(name, {}).setdefault(str(file), set())


_KINDS = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "list",
    dict: "object",
}


def _cast(column: pa.Array, target: pa.DataType) -> pa.Array:
    if pt.is_dictionary(target) and column.type == target.value_type:
        return column.dictionary_encode().cast(target)
    return column.cast(target)


def dense(schema: pa.Schema) -> pa.Schema:
    """The same columns without dictionaries and views at any depth, for files and functions that cannot hold them."""
    return pa.schema([f.with_type(_dense_type(f.type)) for f in schema], metadata=schema.metadata)


def _dense_type(t: pa.DataType) -> pa.DataType:
    if pt.is_dictionary(t):
        return _dense_type(t.value_type)
    if pt.is_list(t):
        return pa.list_(_dense_field(t.value_field))
    if pt.is_large_list(t):
        return pa.large_list(_dense_field(t.value_field))
    if pt.is_fixed_size_list(t):
        return pa.list_(_dense_field(t.value_field), t.list_size)
    if pt.is_struct(t):
        return pa.struct([_dense_field(f) for f in t])
    if pt.is_map(t):
        return pa.map_(_dense_field(t.key_field), _dense_field(t.item_field), t.keys_sorted)
    return {"string_view": pa.string(), "binary_view": pa.binary()}.get(str(t), t)


def _dense_field(field: pa.Field) -> pa.Field:
    return field.with_type(_dense_type(field.type))


def kind_of(data_type: pa.DataType) -> str:
    """JSON's name for a type: null, boolean, number, string, list, object or other."""
    if pt.is_dictionary(data_type):
        return kind_of(data_type.value_type)
    table: list[tuple[Callable[[pa.DataType], bool], str]] = [
        (pt.is_null, "null"),
        (pt.is_boolean, "boolean"),
        (lambda t: pt.is_integer(t) or pt.is_floating(t) or pt.is_decimal(t), "number"),
        (_is_text, "string"),
        (_is_list, "list"),
        (lambda t: pt.is_struct(t) or pt.is_map(t), "object"),
    ]
    return next((name for test, name in table if test(data_type)), "other")


def _compatible(a: pa.Field, b: pa.Field) -> bool:
    try:
        _merge_fields(a, b)
    except _Conflict:
        return False
    return True


def _merge_fields(a: pa.Field, b: pa.Field) -> pa.Field:
    kept = a if not pt.is_null(a.type) else b
    return pa.field(a.name, _merge(a.type, b.type), a.nullable or b.nullable, kept.metadata)


def _merge(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    """The type that holds both; raises _Conflict."""
    if a == b or pt.is_null(b):
        return a
    if pt.is_null(a):
        return b
    if pt.is_dictionary(a) or pt.is_dictionary(b):
        return _merge(a.value_type if pt.is_dictionary(a) else a, b.value_type if pt.is_dictionary(b) else b)
    for test, small, large in (
        (_is_text, pa.string(), pa.large_string()),
        (_is_binary, pa.binary(), pa.large_binary()),
    ):
        if test(a) and test(b):
            return large if large in (a, b) else small
    if _is_list(a) and _is_list(b):
        inner = _merge_fields(a.value_field, b.value_field.with_name(a.value_field.name))
        return pa.large_list(inner) if pt.is_large_list(a) or pt.is_large_list(b) else pa.list_(inner)
    if pt.is_struct(a) and pt.is_struct(b):
        return _merge_structs(a, b)
    if pt.is_map(a) and pt.is_map(b):
        return pa.map_(_merge(a.key_type, b.key_type), _merge(a.item_type, b.item_type))
    return _merge_scalars(a, b)


def _merge_structs(a: pa.StructType, b: pa.StructType) -> pa.DataType:
    fields = []
    names = list(dict.fromkeys([f.name for f in a] + [f.name for f in b]))
    for name in names:
        at, bt = a.get_field_index(name), b.get_field_index(name)
        if at >= 0 and bt >= 0:
            try:
                fields.append(_merge_fields(a.field(at), b.field(bt)))
            except _Conflict as error:
                raise _Conflict(f"{error} (field {name!r})") from error
        else:
            fields.append((a.field(at) if at >= 0 else b.field(bt)).with_nullable(True))
    return pa.struct(fields)


def _merge_scalars(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    if pt.is_integer(a) and pt.is_integer(b):
        wide = max(a.bit_width * (2 if pt.is_unsigned_integer(a) else 1), b.bit_width * (2 if _unsigned(b) else 1))
        if _unsigned(a) and _unsigned(b):
            return a if a.bit_width >= b.bit_width else b
        if wide <= 64:
            return next(t for t in _SIGNED if t.bit_width == wide)
    if a in _FLOATS and b in _FLOATS:
        return max(a, b, key=_FLOATS.index)
    if pt.is_timestamp(a) and pt.is_timestamp(b) and a.tz == b.tz:
        return max(a, b, key=lambda t: _UNITS.index(t.unit))
    if pt.is_decimal(a) and pt.is_decimal(b) and a.scale == b.scale and a.bit_width == b.bit_width:
        return a if a.precision >= b.precision else b
    raise _Conflict(f"{b} does not go with {a}")


def _unsigned(t: pa.DataType) -> bool:
    return bool(pt.is_unsigned_integer(t))


def _is_text(t: pa.DataType) -> bool:
    return pt.is_string(t) or pt.is_large_string(t) or str(t) == "string_view"


def _is_binary(t: pa.DataType) -> bool:
    return pt.is_binary(t) or pt.is_large_binary(t) or str(t) == "binary_view"


def _is_list(t: pa.DataType) -> bool:
    return bool(pt.is_list(t) or pt.is_large_list(t) or pt.is_fixed_size_list(t))
