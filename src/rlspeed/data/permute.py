"""Rows of a stream of batches in another order, out of core.

The output is cut into parts of about PART_BYTES. One pass over the input deals its rows to the parts, in memory as
long as they fit the budget and in scratch files beyond; then each part is put in order by itself. So memory holds the
budget, one part and the orders, whatever the size of the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rlspeed.data.atomic import Scratch
from rlspeed.data.schema import cast_batch, dense

MEMORY_BYTES = 256 << 20
PART_BYTES = 64 << 20
MAX_PARTS = 256  # two open files each
_LARGE_TABLE_BYTES = 1 << 30
_SMALL_ROWS = 4096

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cut:
    """The output, cut into parts. bounds: first output row of each part, and the end."""

    bounds: Rows

    @property
    def num_parts(self) -> int:
        """How many parts."""
        return len(self.bounds) - 1


def cut_evenly(weights: npt.NDArray[np.int64], total_bytes: int, part_bytes: int = PART_BYTES) -> Cut:
    """Parts of about `part_bytes`, given each output row's share of `total_bytes` by weight."""
    count = len(weights)
    parts = int(min(MAX_PARTS, max(1, -(-total_bytes // part_bytes)), max(1, count)))
    ends = np.cumsum(weights, dtype=np.float64)
    marks = np.searchsorted(ends, ends[-1] * np.arange(1, parts) / parts) if count else np.zeros(0, np.int64)
    return Cut(np.unique(np.concatenate([[0], marks, [count]])).astype(np.int64) if count else np.zeros(2, np.int64))


def permute(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    order: Rows,
    num_rows: int,
    cut: Cut,
    folder: Path,
    memory_bytes: int = MEMORY_BYTES,
) -> Iterator[pa.Table]:
    """The rows of `batches` with numbers `order[0], order[1], ...`, as tables; rows not in `order` are left out.

    order [N_out] int64: input row of each output row, none twice. num_rows: rows of all batches. folder: where scratch
    files go; they have no names.
    """
    part_of = np.full(num_rows, -1, dtype=np.int16)
    for number in range(cut.num_parts):
        part_of[order[cut.bounds[number] : cut.bounds[number + 1]]] = number
    flat = dense(schema)
    parts = [_Part() for _ in range(cut.num_parts)]
    try:
        _deal(batches, flat, part_of, parts, folder, memory_bytes)
        for number, part in enumerate(parts):
            wanted = order[cut.bounds[number] : cut.bounds[number + 1]]
            for table in _in_order(part.take_all(), wanted):
                yield _cast_table(table, schema)
    finally:
        for part in parts:
            part.close()


@dataclass(slots=True)
class _Part:
    """Rows of one part in input order: first what is on disk, then what is in memory."""

    scratch: Scratch | None = None
    held: list[pa.RecordBatch] = field(default_factory=list)

    def flush(self, folder: Path) -> None:
        if self.held and self.scratch is None:
            self.scratch = Scratch.create(folder)
        for batch in self.held:
            assert self.scratch is not None
            self.scratch.write(batch)
        self.held = []

    def take_all(self) -> list[pa.RecordBatch]:
        stored = list(self.scratch.batches()) if self.scratch is not None else []
        out, self.scratch, self.held = stored + self.held, None, []
        return out

    def close(self) -> None:
        if self.scratch is not None:
            self.scratch.close()


def _deal(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    part_of: npt.NDArray[np.int16],
    parts: list[_Part],
    folder: Path,
    memory_bytes: int,
) -> None:
    """Every row to its part; within a part rows keep the input's order."""
    first = held = 0
    for whole in batches:
        batch = cast_batch(whole, schema)
        mine = part_of[first : first + batch.num_rows]
        first += batch.num_rows
        index = np.argsort(mine, kind="stable")
        index = index[np.searchsorted(mine[index], 0) :]
        if not index.size:
            continue
        if index.size != batch.num_rows or (np.diff(index) != 1).any():
            batch = batch.take(pa.array(index))
        numbers, starts = np.unique(mine[index], return_index=True)
        for number, start, end in zip(numbers, starts, [*starts[1:], index.size]):
            parts[number].held.append(batch.slice(start, end - start))
        held += batch.nbytes
        if held > memory_bytes:
            for part in parts:
                part.flush(folder)
            held = 0


def _in_order(batches: list[pa.RecordBatch], wanted: Rows) -> Iterator[pa.Table]:
    """One part: its rows stand in input order and are `wanted` in this one."""
    if not batches:
        return
    places = np.empty(len(wanted), dtype=np.int64)
    places[np.argsort(wanted, kind="stable")] = np.arange(len(wanted))
    table = pa.Table.from_batches(batches)
    if table.nbytes <= _LARGE_TABLE_BYTES:
        yield table.combine_chunks().take(pa.array(places))
        return
    starts = np.cumsum([0] + [b.num_rows for b in batches])
    for at in range(0, len(places), _SMALL_ROWS):  # never more in one array than 32-bit offsets reach
        yield from _picked(batches, starts, places[at : at + _SMALL_ROWS])


def _picked(batches: list[pa.RecordBatch], starts: npt.NDArray[np.int64], places: Rows) -> Iterator[pa.Table]:
    """Single rows out of many batches, in tables of bounded size."""
    rows: list[pa.RecordBatch] = []
    held = 0
    for place in places:
        at = int(np.searchsorted(starts, place, side="right")) - 1
        row = batches[at].slice(int(place - starts[at]), 1)
        rows.append(row)
        held += row.nbytes
        if held > PART_BYTES:
            yield pa.Table.from_batches(rows).combine_chunks()
            rows, held = [], 0
    if rows:
        yield pa.Table.from_batches(rows).combine_chunks()


def _cast_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Back to dictionaries and views."""
    return pa.Table.from_batches([cast_batch(b, schema) for b in table.to_batches()], schema=schema)
