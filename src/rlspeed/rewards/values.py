"""Values across the border to the user's functions: private plain copies in, checked numbers out."""

from __future__ import annotations

import copy
import itertools
import math
import numbers
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_TEXT = 200
MAX_TRACE = 6000
MAX_ENTRIES = 100_000
_HERE = Path(__file__).parent
_HIDDEN = {str(_HERE / name) for name in ("load.py", "call.py", "lanes.py", "worker.py")}
ATOMS = (str, int, float, bool, bytes, type(None))


class BadValue(Exception):
    """A function returned something that is not a reward; the message says what."""


def plain(value: Any) -> Any:
    """A private copy of a data value, numpy and pyarrow values (nested too) as Python ones.

    Functions get these, so that a function that edits its `extra_info` changes neither the data nor another call.
    """
    if type(value) in ATOMS:
        return value
    if isinstance(value, Mapping):
        return {plain(k): plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    if type(value) is tuple:
        return tuple(plain(v) for v in value)
    if hasattr(value, "as_py"):
        return plain(value.as_py())
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return copy.deepcopy(value)


def loggable(value: Any, depth: int = 8) -> Any:
    """`value` as JSON and another process can hold it; what cannot be, or lies too deep, is kept as short text."""
    if type(value) in (str, int, bool, type(None)):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    if depth == 0:
        return short(value)
    try:
        if isinstance(value, Mapping):
            return {str(k): loggable(v, depth - 1) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            entries = list(itertools.islice(value, MAX_ENTRIES + 1))
            return short(value) if len(entries) > MAX_ENTRIES else [loggable(v, depth - 1) for v in entries]
        if hasattr(value, "tolist"):
            return loggable(value.tolist(), depth - 1)
    except Exception:
        return f"<{type(value).__name__} that cannot be read>"
    return short(value)


def short(value: Any) -> str:
    """repr of at most 200 characters; never raises."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def trace(error: BaseException) -> str:
    """The user's part of a traceback: frames of this package and of the import system are left out."""
    try:
        report = traceback.TracebackException.from_exception(error)
        part: traceback.TracebackException | None = report
        while part is not None:
            own = [
                f for f in part.stack if f.filename not in _HIDDEN and not f.filename.startswith("<frozen importlib")
            ]
            part.stack = traceback.StackSummary.from_list(own)
            part = part.__cause__ or part.__context__
        text = "".join(report.format()).rstrip()
    except Exception:
        text = f"{type(error).__name__} (its traceback cannot be printed)"
    if len(text) > MAX_TRACE:
        text = text[: MAX_TRACE // 2] + "\n...\n" + text[-MAX_TRACE // 2 :]
    return text


def number(value: Any, *, none_allowed: bool = False) -> float | None:
    """A finite float from bool, int, float, numpy or torch scalar.

    Raises:
        BadValue: anything else: strings, None where it has no meaning, nan, inf, arrays, dictionaries.
    """
    if value is None:
        if none_allowed:
            return None
        raise BadValue("got None, expected a number")
    if not isinstance(value, (bool, int, float)) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (bool, int, float)) and not isinstance(value, numbers.Real):
        raise BadValue(f"got {short(value)} of type {type(value).__name__}, expected a number")
    try:
        out = float(value)
    except (OverflowError, ValueError, TypeError) as error:
        raise BadValue(f"got {short(value)}, which is no float: {error}") from error
    if not math.isfinite(out):
        raise BadValue(f"got {out}, expected a finite number")
    return out


def number_or_dict(value: Any) -> tuple[float, dict[str, Any]]:
    """verl's single result: a number, or a dictionary with `score` and further values to log.

    Raises:
        BadValue: no number, or a dictionary without `score`.
    """
    if not isinstance(value, Mapping):
        return _number(value), {}
    if "score" not in value:
        raise BadValue(f"got a dict without 'score' (keys: {short(list(value))}), expected 'score' in it")
    extra = {str(k): loggable(v) for k, v in value.items() if k != "score"}
    return _number(value["score"]), extra


def items(value: Any, expected: int, what: str = "a list") -> list[Any]:
    """The entries of a list, tuple or one-dimensional array that must hold one entry for each sample.

    Raises:
        BadValue: no list, or another length (life-13: one number for many answers is not spread over them).
    """
    shape = getattr(value, "shape", None)
    if hasattr(value, "tolist") and isinstance(shape, tuple):
        if len(shape) != 1:
            raise BadValue(f"got an array of shape {tuple(shape)}, expected {what} of {expected}")
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise BadValue(f"got {short(value)} of type {type(value).__name__}, expected {what} of {expected} numbers")
    entries = list(itertools.islice(value, expected + 1))  # a subclass may lie about its length
    if len(value) != expected or len(entries) != expected:
        raise BadValue(f"got {len(value)}, expected {expected}: one for each answer")
    return entries


def _number(value: Any) -> float:
    out = number(value)
    assert out is not None
    return out
