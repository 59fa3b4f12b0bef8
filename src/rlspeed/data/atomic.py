"""Files that appear whole or not at all, and scratch files that no crash can leave behind."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlspeed.errors import DataError, Fault

_FD_FOLDER = "/proc/self/fd"


def check_output(path: Path, *, overwrite: bool, where: str = "--output") -> None:
    """Look at where a result is to go, before any work.

    Raises:
        DataError: the folder is missing or not writable, or something is there already.
    """
    if path.is_dir():
        raise DataError(Fault(where=where, found=f"{str(path)!r} is a directory", allowed="the name of a file"))
    if path.exists() and not overwrite:
        raise DataError(Fault(where=where, found=f"{str(path)!r} exists", fix="another name, or --overwrite"))
    if not path.parent.is_dir():
        raise DataError(Fault(where=where, found=f"the folder {str(path.parent)!r} does not exist", fix="make it"))
    if not os.access(path.parent, os.W_OK):
        raise DataError(Fault(where=where, found=f"the folder {str(path.parent)!r} cannot be written to"))


@contextmanager
def atomic_file(target: Path) -> Iterator[str]:
    """A path to write to; what is there becomes `target` when the block ends well, and is gone otherwise.

    Where the system can, the file has no name until it is complete, so even a killed process leaves nothing.

    Raises:
        DataError: the system refuses to write (disk full, say).
    """
    try:
        handle = _unnamed(target.parent)
        if handle is None:
            yield from _named(target)
            return
        try:
            yield f"{_FD_FOLDER}/{handle}"
            os.fchmod(handle, 0o666 & ~_umask())
            os.fsync(handle)
            with _removed_on_failure(_hidden_name(target)) as name:
                _give_name(handle, name)
                os.replace(name, target)
        finally:
            os.close(handle)
    except OSError as error:
        raise write_error(target, error) from error


def write_error(target: Path, error: BaseException) -> DataError:
    """The user's message for a write that failed."""
    text = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return DataError(Fault(where=str(target), found=f"cannot be written: {text}", fix="nothing was left there"))


def write_text(target: Path, text: str) -> None:
    """A small text file, whole or not at all."""
    with atomic_file(target) as path:
        Path(path).write_text(text, encoding="utf-8")


@dataclass(slots=True)
class Scratch:
    """An Arrow stream in a file without a name, in a given folder: written once, then read."""

    sink: Any
    source: Any
    writer: Any = None
    num_bytes: int = 0

    @staticmethod
    def create(folder: Path) -> Scratch:
        """A new, empty one; its disk space is free again when the process ends, however it ends."""
        path = folder / f".rlspeed-{secrets.token_hex(8)}.tmp"
        sink = pa.OSFile(str(path), "wb")
        try:
            source = pa.OSFile(str(path), "rb")
        finally:
            os.unlink(path)
        return Scratch(sink, source)

    def write(self, batch: pa.RecordBatch) -> None:
        """Add a batch; all have one schema, without dictionaries inside lists (the format garbles those)."""
        if self.writer is None:
            self.writer = pa.ipc.new_stream(self.sink, batch.schema)
        self.writer.write_batch(batch)
        self.num_bytes += batch.nbytes

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Everything that was written, once; then the file is closed."""
        if self.writer is not None:
            self.writer.close()
            self.sink.close()
            with pa.ipc.open_stream(self.source) as reader:
                yield from reader
        self.close()

    def close(self) -> None:
        """Give the space back."""
        self.sink.close()
        self.source.close()


def _unnamed(folder: Path) -> int | None:
    """A file without a name in `folder`, None where the system has no such thing."""
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir(_FD_FOLDER):
        return None
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError:
        return None


def _give_name(handle: int, name: str) -> None:
    """Link the open file to a name (Python follows the link in /proc only when a folder handle is given)."""
    folder = os.open(os.path.dirname(name) or ".", os.O_RDONLY)
    try:
        os.link(f"{_FD_FOLDER}/{handle}", name, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _named(target: Path) -> Iterator[str]:
    with _removed_on_failure(_hidden_name(target)) as name:
        yield name
        with open(name, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(name, target)


@contextmanager
def _removed_on_failure(name: str) -> Iterator[str]:
    try:
        yield name
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _hidden_name(target: Path) -> str:
    return str(target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp"))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
