"""Rows that hold token ids already: lengths and ids from the data's own masks, never guessed from the ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rlspeed.data.files import FaultLog, RowFaults
from rlspeed.data.measure import Measured, Progress, no_progress
from rlspeed.data.tables import Chunk, Tables
from rlspeed.errors import DataError, Fault

IDS_COLUMN = "input_ids"
MASK_COLUMN = "attention_mask"
LOSS_COLUMNS = ("loss_mask", "labels")
IGNORED_LABEL = -100


def has_ids(tables: Tables) -> bool:
    """Whether the parquet files among `tables` hold token ids."""
    return tables.unified is not None and IDS_COLUMN in tables.unified.schema.names


def loss_column(tables: Tables) -> str | None:
    """The column that says which tokens train, when there is one."""
    names = tables.unified.schema.names if tables.unified is not None else []
    return next((n for n in LOSS_COLUMNS if n in names), None)


class TokenRow:
    """One row: ids int32 and loss bool (or None), without the tokens that its attention mask hides."""

    def __init__(self, ids: Any, mask: Any, loss: Any, from_labels: bool) -> None:
        if ids is None or not len(ids):
            raise ValueError(f"{IDS_COLUMN} is {'null' if ids is None else 'empty'}")
        found = _integers(ids, IDS_COLUMN)
        if found.min() < 0 or found.max() > np.iinfo(np.int32).max:
            raise ValueError(f"{IDS_COLUMN} holds {int(found.min())}, which is no token id")
        shown = np.ones(len(found), dtype=bool)
        if mask is not None:
            shown = _integers(mask, MASK_COLUMN) != 0
            if len(shown) != len(found):
                raise ValueError(f"{len(found)} {IDS_COLUMN}, but {len(shown)} values of {MASK_COLUMN}")
        self.ids = found[shown].astype(np.int32)
        if not len(self.ids):
            raise ValueError(f"{MASK_COLUMN} hides every token")
        self.loss: npt.NDArray[np.bool_] | None = None
        if loss is not None:
            values = _integers(loss, "the loss column")
            if len(values) != len(found):
                raise ValueError(f"{len(found)} {IDS_COLUMN}, but {len(values)} values of the loss column")
            self.loss = (values != IGNORED_LABEL if from_labels else values != 0)[shown]
            self.loss[0] = False  # nothing predicts the first token


def read_token_rows(chunk: Chunk, loss: str | None) -> list[TokenRow | str]:
    """The rows of a chunk, or why not."""
    names = chunk.batch.schema.names if chunk.file.format == "parquet" else chunk.records[0] if chunk.records else {}
    ids = chunk.column(IDS_COLUMN)
    masks: Sequence[Any] = chunk.column(MASK_COLUMN) if MASK_COLUMN in names else [None] * len(ids)
    losses: Sequence[Any] = chunk.column(loss) if loss is not None and loss in names else [None] * len(ids)
    out: list[TokenRow | str] = []
    for one, mask, train in zip(ids, masks, losses):
        try:
            out.append(TokenRow(one, mask, train, loss == "labels"))
        except (ValueError, TypeError) as error:
            out.append(str(error))
    return out


def columns_of(tables: Tables, loss: str | None) -> list[str]:
    """The columns that `read_token_rows` looks at."""
    names = tables.unified.schema.names if tables.unified is not None else []
    return [n for n in (IDS_COLUMN, MASK_COLUMN, loss) if n is not None and n in names]


def measure_ids(
    tables: Tables,
    log: FaultLog,
    progress: Progress = no_progress,
    *,
    keep: Callable[[pa.RecordBatch], None] | None = None,
) -> Measured:
    """Lengths of rows of token ids, masked tokens not counted.

    keep: gets the rows of each chunk as `token_batch` makes them, in order.

    Raises:
        DataError: a file that cannot be read, or some file without the ids.
    """
    if any(f.format != "parquet" for f in tables.files):
        raise DataError(Fault(where=IDS_COLUMN, found="token ids are read from parquet files only"))
    tables.require_column(IDS_COLUMN, "all files hold token ids, or none does")
    out = Measured(np.zeros(0, np.int32), RowFaults(), [], RowFaults())
    parts: list[npt.NDArray[np.int32]] = []
    rows = done = 0
    loss = loss_column(tables)
    for chunk in tables.chunks(log, columns_of(tables, loss)):
        if chunk.first == 0:
            out.starts.append((rows, chunk.file))
        lengths = np.zeros(chunk.num_rows, dtype=np.int32)
        found = read_token_rows(chunk, loss)
        if keep is not None:
            keep(token_batch(found, with_loss=loss is not None))
        for i, row in enumerate(found):
            if isinstance(row, str):
                out.bad.add(chunk.file, chunk.name(i), row)
                out.bad_index.append(rows + i)
            else:
                lengths[i] = len(row.ids)
        parts.append(lengths)
        rows += chunk.num_rows
        done += chunk.file_bytes
        progress("measure", done, tables.num_bytes)
    out.lengths = np.concatenate(parts) if parts else out.lengths
    return out


def token_batch(rows: Sequence[TokenRow | str], *, with_loss: bool) -> pa.RecordBatch:
    """Columns `input_ids` large_list<int32> and, on request, `loss_mask` large_list<bool>; bad rows are empty."""
    good = [r if isinstance(r, TokenRow) else None for r in rows]
    columns = [lists([np.zeros(0, np.int32) if r is None else r.ids for r in good], np.int32)]
    if with_loss:
        none = np.zeros(0, np.bool_)
        columns.append(lists([none if r is None else _trains(r) for r in good], np.bool_))
    return pa.RecordBatch.from_arrays(columns, names=[IDS_COLUMN, "loss_mask"][: len(columns)])


def lists(rows: Sequence[Any], dtype: Any) -> pa.LargeListArray:
    """Rows of numbers as one Arrow list array."""
    ends = np.cumsum([len(r) for r in rows], dtype=np.int64)
    flat = np.concatenate([np.asarray(r, dtype=dtype) for r in rows]) if len(rows) else np.zeros(0, dtype)
    return pa.LargeListArray.from_arrays(pa.array(np.concatenate([[0], ends]), pa.int64()), pa.array(flat))


def _trains(row: TokenRow) -> npt.NDArray[np.bool_]:
    """The row's loss mask; a row whose mask is null trains nowhere."""
    return np.zeros(len(row.ids), np.bool_) if row.loss is None else row.loss


def _integers(values: Any, name: str) -> npt.NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise ValueError(f"{name} is not a list of integers")
    return array.astype(np.int64)
