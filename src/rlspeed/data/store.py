"""Rows kept for random access in Arrow form: in memory while they are few, in an unlinked mapped file beyond that."""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_right
from typing import Any

import pyarrow as pa

from rlspeed.data.schema import cast_batch, dense
from rlspeed.data.tables import Chunk, to_rows

MEMORY_BYTES = 1 << 30
_FD_FOLDER = "/proc/self/fd"


class RowStore:
    """Append chunks, then read single rows as fresh Python dicts.

    The first `memory_bytes` stay in memory; what comes after goes to a temporary file that is mapped and unlinked, so
    its pages belong to the page cache and nothing is left behind, whatever ends the process.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self.memory_bytes = memory_bytes
        self.held_bytes = 0
        self._batches: list[pa.RecordBatch | tuple[pa.Schema, int]] = []
        self._starts: list[int] = []
        self._rows = 0
        self._writers: dict[pa.Schema, _Spill] = {}

    def __len__(self) -> int:
        return self._rows

    @property
    def spilled(self) -> bool:
        """Whether some rows are in a file."""
        return bool(self._writers)

    def append(self, chunk: Chunk) -> None:
        """Keep the rows of a chunk."""
        self._starts.append(self._rows)
        self._rows += chunk.num_rows
        if self.held_bytes + chunk.batch.nbytes <= self.memory_bytes:
            self.held_bytes += chunk.batch.nbytes
            self._batches.append(chunk.batch)
            return
        schema = dense(chunk.batch.schema)
        if schema not in self._writers:
            self._writers[schema] = _Spill(schema)
        self._batches.append((schema, self._writers[schema].write(cast_batch(chunk.batch, schema))))

    def close(self) -> None:
        """No more rows: map what was written."""
        opened = {schema: writer.finish() for schema, writer in self._writers.items()}
        self._batches = [b if isinstance(b, pa.RecordBatch) else opened[b[0]][b[1]] for b in self._batches]

    def row(self, index: int) -> dict[str, Any]:
        """One row; the caller may change what it gets."""
        at = bisect_right(self._starts, index) - 1
        batch = self._batches[at]
        assert isinstance(batch, pa.RecordBatch), "close() comes before row()"
        return to_rows(batch.slice(index - self._starts[at], 1))[0]


class _Spill:
    """Batches of one schema in an Arrow stream on disk."""

    def __init__(self, schema: pa.Schema) -> None:
        self.handle, path = tempfile.mkstemp(prefix="rlspeed-rows-", suffix=".arrow")
        self.path = path
        self.count = 0
        self.writer = pa.ipc.new_stream(path, schema)
        if os.path.isdir(_FD_FOLDER):  # the open handle is a path of its own here
            self.path = f"{_FD_FOLDER}/{self.handle}"
            os.unlink(path)

    def write(self, batch: pa.RecordBatch) -> int:
        """Add a batch; returns its number."""
        self.writer.write_batch(batch)
        self.count += 1
        return self.count - 1

    def finish(self) -> list[pa.RecordBatch]:
        """All batches, mapped; the file has no name any more."""
        self.writer.close()
        source = pa.memory_map(self.path)
        if not self.path.startswith(_FD_FOLDER):
            os.unlink(self.path)
        os.close(self.handle)
        return list(pa.ipc.open_stream(source))
