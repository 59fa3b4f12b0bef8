"""What the user calls data becomes a list of files: a file, several, a directory, a glob, or a packaged name."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files as resource_files
from pathlib import Path
from typing import Literal

from rlspeed.errors import DataError, Fault

Format = Literal["parquet", "jsonl"]
PARQUET_ENDINGS = (".parquet", ".pq")
JSONL_ENDINGS = (".jsonl", ".ndjson", ".json")
COMPRESSED_ENDINGS = ("", ".gz", ".zst", ".bz2")
ALLOWED = "a .parquet or .jsonl file, a list of them, a directory or a glob"
QUICKSTART = "quickstart:"
_PACKAGED = ("train", "val")
_SHOWN_FAULTS = 20
_SHOWN_ROWS = 10


@dataclass(frozen=True, slots=True)
class DataFile:
    """One input file; `str()` is how messages name it."""

    path: Path
    format: Format

    def __str__(self) -> str:
        return str(self.path)


class FaultLog:
    """Collects faults, keeps the first ones and counts the rest."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.count = 0

    def add(self, where: str, found: str, *, allowed: str = "", fix: str = "") -> None:
        """Note one fault."""
        self.count += 1
        if len(self.faults) < _SHOWN_FAULTS:
            self.faults.append(Fault(where=where, found=found, allowed=allowed, fix=fix))

    def raise_if_any(self) -> None:
        """Raises: DataError with all faults, when there are some."""
        if not self.faults:
            return
        more = self.count - len(self.faults)
        tail = [Fault(where="data", found=f"and {more:,} more faults like these")] if more else []
        raise DataError(self.faults + tail)


class RowFaults:
    """Faults of rows, one message for all rows of a file that have the same one."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], list[str]] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, file: DataFile, row: str, found: str) -> None:
        """Note a row. row: how it is named, `3` or `3 (line 4)`."""
        key = (str(file), found)
        self._counts[key] = self._counts.get(key, 0) + 1
        rows = self._rows.setdefault(key, [])
        if len(rows) < _SHOWN_ROWS:
            rows.append(row)

    def count(self) -> int:
        """Rows noted."""
        return sum(self._counts.values())

    def report(self, log: FaultLog, *, allowed: str = "", fix: str = "") -> None:
        """Put everything into `log`."""
        for (file, found), rows in self._rows.items():
            log.add(f"{file}: {name_rows(rows, self._counts[file, found])}", found, allowed=allowed, fix=fix)


def name_rows(rows: Sequence[object], count: int | None = None) -> str:
    """`row 3` or `rows 3, 7, 12`, the tail of a long list counted. count: how many there are in all."""
    total = len(rows) if count is None else count
    text = ", ".join(str(i) for i in rows[:_SHOWN_ROWS])
    more = f" and {total - _SHOWN_ROWS:,} more" if total > _SHOWN_ROWS else ""
    return f"{'row' if total == 1 else 'rows'} {text}{more}"


def format_of(name: str) -> Format | None:
    """The format that a file's name promises, None when it promises nothing."""
    low = name.lower()
    if low.endswith(PARQUET_ENDINGS):
        return "parquet"
    if low.endswith(tuple(a + b for a in JSONL_ENDINGS for b in COMPRESSED_ENDINGS)):
        return "jsonl"
    return None


def expand(spec: str | Path | Iterable[str | Path], where: str) -> tuple[DataFile, ...]:
    """The files that `spec` means, in a fixed order: as listed; inside a directory or a glob by path.

    Directories are searched with their subdirectories for files whose name ends like parquet or JSONL; names that
    begin with `.` or `_` are left out. `quickstart:train` and `quickstart:val` are the packaged prompts.
    where: the configuration key or argument that messages name.

    Raises:
        DataError: something does not exist, matches nothing, or is of another format; all such items are named.
    """
    items = [spec] if isinstance(spec, (str, Path)) else list(spec)
    log, found = FaultLog(), []
    if not items:
        log.add(where, "no files", allowed=ALLOWED)
    for item in items:
        try:
            found.extend(_expand_one(str(item), where))
        except DataError as error:
            for fault in error.faults:
                log.add(fault.where, fault.found, allowed=fault.allowed, fix=fault.fix)
    log.raise_if_any()
    return tuple(found)


def _expand_one(item: str, where: str) -> list[DataFile]:
    if item.startswith(QUICKSTART):
        return [_packaged(item, where)]
    path = Path(item).expanduser()
    if path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if p.is_file() and _is_data(p.relative_to(path))]
        if not found:
            raise DataError(Fault(where=where, found=f"no data files in the directory {item!r}", allowed=ALLOWED))
        return [DataFile(p, format_of(p.name) or "jsonl") for p in found]
    if path.exists():
        return [_one_file(path, where)]
    if glob.has_magic(str(path)):
        matches = [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
        found = [p for p in matches if p.is_file() and not p.name.startswith((".", "_"))]
        if not found:
            raise DataError(Fault(where=where, found=f"no file matches {item!r}", allowed=ALLOWED))
        return [_one_file(p, where) for p in found]
    raise DataError(
        Fault(where=where, found=f"{item!r} does not exist", allowed=ALLOWED, fix=f"looked at {path.absolute()}")
    )


def _is_data(relative: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in relative.parts)
    return not hidden and format_of(relative.name) is not None


def _one_file(path: Path, where: str) -> DataFile:
    """A file by its name's ending; without a known ending, parquet when it begins like one."""
    kind = format_of(path.name)
    if kind is None:
        with path.open("rb") as handle:
            if handle.read(4) != b"PAR1":
                raise DataError(Fault(where=where, found=f"{str(path)!r}: unknown kind of file", allowed=ALLOWED))
        kind = "parquet"
    return DataFile(path, kind)


def _packaged(item: str, where: str) -> DataFile:
    name = item.removeprefix(QUICKSTART)
    if name not in _PACKAGED:
        allowed = " or ".join(QUICKSTART + n for n in _PACKAGED)
        raise DataError(Fault(where=where, found=repr(item), allowed=allowed))
    path = Path(str(resource_files("rlspeed.profiles") / "quickstart" / f"{name}.parquet"))
    if not path.is_file():
        raise DataError(Fault(where=where, found=f"the packaged file {path} is missing", fix="install rlspeed again"))
    return DataFile(path, "parquet")
