"""JSON lines, one at a time: byte order mark, CRLF and a missing last newline are read as if plain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rlspeed.data.files import DataFile, FaultLog

_BLOCK_BYTES = 4 << 20
_MAX_LINE_BYTES = 1 << 30
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a JSONL file. number: its line, from 1; raw: its bytes without the line end; record: what it says."""

    number: int
    raw: bytes
    record: dict[str, Any]


def read_lines(file: DataFile, log: FaultLog) -> Iterator[Line]:
    """The rows of a JSONL file (also .gz, .zst, .bz2); blank lines are skipped.

    Lines that are not UTF-8, not JSON or not an object go to `log`, and reading goes on. Memory is one block and the
    longest line.
    """
    try:
        for number, raw in _raw_lines(file):
            if not raw or raw.isspace():
                continue
            record = _parse(file, number, raw, log)
            if record is not None:
                yield Line(number, raw, record)
    except _TooLong as error:
        log.add(f"{file}: line {error}", f"longer than {_MAX_LINE_BYTES:,} bytes", allowed="one JSON object per line")
    except (OSError, pa.ArrowException, EOFError) as error:
        log.add(str(file), f"cannot be read: {error}")


class _TooLong(Exception):
    """A line beyond the limit; the message is its number."""


def _raw_lines(file: DataFile) -> Iterator[tuple[int, bytes]]:
    """Numbered lines without their ends."""
    number, parts, held = 0, [], 0
    with pa.input_stream(str(file.path), compression="detect") as stream:
        first = True
        while block := stream.read(_BLOCK_BYTES):
            if first:
                block, first = block.removeprefix(_BOM), False
            head, *rest = block.split(b"\n")
            parts.append(head)
            held += len(head)
            for piece in rest:
                number += 1
                yield number, b"".join(parts).removesuffix(b"\r")
                parts, held = [piece], len(piece)
            if held > _MAX_LINE_BYTES:
                raise _TooLong(number + 1)
    if held:
        yield number + 1, b"".join(parts).removesuffix(b"\r")


def _parse(file: DataFile, number: int, raw: bytes, log: FaultLog) -> dict[str, Any] | None:
    where = f"{file}: line {number}"
    try:
        text = raw.decode("utf-8")
        record = json.loads(text)
        if b"\\ud" in raw or b"\\uD" in raw:  # half of a surrogate pair is no character
            json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        log.add(where, f"byte {error.start} is not UTF-8 ({error.reason})", fix="save the file as UTF-8")
    except UnicodeEncodeError as error:
        log.add(where, f"half of a surrogate pair in a string ({error.reason})")
    except (ValueError, RecursionError) as error:
        if number == 1 and raw.lstrip().startswith(b"["):
            fix = "write one object per line, for instance: jq -c '.[]' FILE"
            log.add(where, "begins a JSON array", allowed="one JSON object per line", fix=fix)
        else:
            log.add(where, f"not JSON: {error}", allowed="one JSON object per line")
    else:
        if isinstance(record, dict):
            return record
        fix = "write one object per line, for instance: jq -c '.[]' FILE" if isinstance(record, list) else ""
        log.add(where, f"a JSON {_name(record)}", allowed="one JSON object per line", fix=fix)
    return None


def _name(value: Any) -> str:
    """JSON's name for the kind of a value."""
    return {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}.get(
        type(value), "number"
    )
