"""How long every row is in tokens: the first pass of sort, pack and stats."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlspeed.data.files import DataFile, FaultLog, RowFaults
from rlspeed.data.render import PromptRenderer, Rendered
from rlspeed.data.tables import Chunk, Tables

Progress = Callable[[str, int, int], None]
_AHEAD = 2  # chunks rendered while one is tokenised


def no_progress(phase: str, done: int, total: int) -> None:
    """A Progress that says nothing. done, total: bytes of input."""


@dataclass(slots=True)
class Measured:
    """lengths [N] int32: tokens of each row over all files, 0 where the prompt cannot be used.

    bad: those rows, with reasons; bad_index: their numbers over all files. blank: rows whose prompt has no content of
    its own but renders to tokens. starts: first row of each file over all files.
    """

    lengths: npt.NDArray[np.int32]
    bad: RowFaults
    bad_index: list[int]
    blank: RowFaults
    starts: list[tuple[int, DataFile]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return len(self.lengths)

    def name(self, index: int) -> tuple[DataFile, str]:
        """The file and the name of a row."""
        start, file = next((s, f) for s, f in reversed(self.starts) if s <= index)
        return file, str(index - start)


def measure(
    tables: Tables,
    renderer: PromptRenderer,
    prompt_key: str,
    log: FaultLog,
    progress: Progress = no_progress,
    *,
    phase: str = "tokenise",
    keep: Callable[[list[list[int]]], None] | None = None,
) -> Measured:
    """Render and tokenise the prompt of every row; only the lengths stay in memory.

    Rendering runs while the chunk before it is tokenised (which needs no lock of the interpreter). keep: gets the token
    ids of each chunk, in order.

    Raises:
        DataError: a file that cannot be read, or without the column.
    """
    tables.require_column(prompt_key, "name the column with --prompt-key")
    out = Measured(np.zeros(0, np.int32), RowFaults(), [], RowFaults())
    parts: list[npt.NDArray[np.int32]] = []
    rows = done = 0
    total = tables.num_bytes
    with ThreadPoolExecutor(1, thread_name_prefix="tokenise") as pool:
        for chunk, rendered, result in _pipeline(tables, renderer, prompt_key, log, pool, keep is not None):
            lengths, ids = result
            if keep is not None:
                keep(ids)
            if chunk.first == 0:
                out.starts.append((rows, chunk.file))
            _note(out, chunk, rendered, lengths, prompt_key, rows)
            parts.append(np.asarray(lengths, dtype=np.int32))
            rows += chunk.num_rows
            done += chunk.file_bytes
            progress(phase, done, total)
    out.lengths = np.concatenate(parts) if parts else out.lengths
    return out


_Result = tuple[list[int], list[list[int]]]


def _pipeline(
    tables: Tables,
    renderer: PromptRenderer,
    prompt_key: str,
    log: FaultLog,
    pool: ThreadPoolExecutor,
    want_ids: bool,
) -> Iterator[tuple[Chunk, list[Rendered], _Result]]:
    """Chunks with their rendered prompts and token counts, in order, a few chunks ahead."""

    def count(rendered: list[Rendered]) -> _Result:
        if not want_ids:
            return renderer.lengths(rendered), []
        ids = renderer.token_ids(rendered)
        return [len(x) for x in ids], ids

    waiting: deque[tuple[Chunk, list[Rendered], Future[_Result]]] = deque()
    for chunk in tables.chunks(log, [prompt_key]):
        rendered = renderer.render(chunk.column(prompt_key))
        waiting.append((chunk, rendered, pool.submit(count, rendered)))
        if len(waiting) > _AHEAD:
            first, texts, future = waiting.popleft()
            yield first, texts, future.result()
    while waiting:
        first, texts, future = waiting.popleft()
        yield first, texts, future.result()


def _note(
    out: Measured, chunk: Chunk, rendered: list[Rendered], lengths: list[int], prompt_key: str, start: int
) -> None:
    """What is odd about a chunk's rows."""
    for i, (text, length) in enumerate(zip(rendered, lengths)):
        if length and not text.blank:
            continue
        if length:
            out.blank.add(chunk.file, chunk.name(i), "the prompt has no content of its own")
            continue
        missing = chunk.records and prompt_key not in chunk.records[i]
        reason = f"no key {prompt_key!r}" if missing else text.fault or "the prompt has no tokens"
        out.bad.add(chunk.file, chunk.name(i), reason)
        out.bad_index.append(start + i)
