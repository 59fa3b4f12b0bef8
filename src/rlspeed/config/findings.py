"""pydantic's findings as faults in the words of a user: where, which key, what is there, what may be there."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from rlspeed.config.keys import all_keys, section_keys
from rlspeed.config.names import nearest, suggestion
from rlspeed.errors import Fault

Where = Callable[[str], str]
ALLOWED = {
    "model_type": "a section: keys with values",
    "model_attributes_type": "a section: keys with values",
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "invalid-json-value": "plain values: strings, numbers, true, false, null, lists, mappings",
    "recursion_loop": "values that do not hold themselves",
}


def faults_of(
    error: ValidationError, data: Mapping[str, Any], where: Where, *, tell_missing: bool = True
) -> list[Fault]:
    """One fault for each key that is wrong; several reasons for one key (members of a union) are joined."""
    out: dict[str, Fault] = {}
    for item in error.errors(include_url=False):
        kind = item["type"]
        path = _written(item["loc"], data, keep_last=kind == "missing")
        dotted = ".".join(map(str, path))
        if kind == "extra_forbidden":
            for fault in _unknown(dotted, item["input"], where):
                out.setdefault(f"{dotted} {fault.found}", fault)
        elif kind == "missing" and not tell_missing:
            continue
        elif kind == "missing":
            fix = f"set it: {dotted}=..."
            place = where(dotted)
            place = "configuration" if place == "default" else place
            out[dotted] = Fault(where=place, found=f"{dotted} is required and not set", fix=fix)
        else:
            out[dotted] = _wrong_value(dotted, _at(path, data), item, where, out.get(dotted))
    return list(out.values())


def _unknown(dotted: str, value: Any, where: Where) -> Iterator[Fault]:
    """An unknown key; of an unknown section whose name resembles no other, each key below it."""
    near = difflib.get_close_matches(dotted, sorted(section_keys()), n=1, cutoff=0.75)
    if isinstance(value, Mapping) and value and not near:
        for name, inner in value.items():
            yield from _unknown(f"{dotted}.{name}", inner, where)
        return
    if isinstance(value, Mapping) and near:
        fix = f"did you mean {near[0]}?"
    elif dotted in all_keys():
        fix = "in a file each part is a key of its own, one inside the other"
    else:
        fix = suggestion(dotted, all_keys())
    shown = "" if isinstance(value, Mapping) else f" (set to {shorten(value)})"
    yield Fault(where=where(dotted), found=f"unknown key {dotted}{shown}", fix=fix)


def _wrong_value(dotted: str, value: Any, item: Any, where: Where, before: Fault | None) -> Fault:
    allowed = ALLOWED.get(item["type"]) or _plain(item["msg"])
    if before is not None and before.allowed and allowed not in before.allowed:
        allowed = f"{before.allowed}, or {allowed}"
    return Fault(
        where=where(dotted),
        found=f"{dotted} is {shorten(value)}",
        allowed=allowed,
        fix=_fix(value, item) or (before.fix if before else ""),
    )


def _fix(value: Any, item: Any) -> str:
    """What probably went wrong: a near miss of a choice, or a word that YAML takes for something else."""
    kind = item["type"]
    if kind == "literal_error" and isinstance(value, str):
        near = nearest(value, _choices(item["ctx"]["expected"]))
        return f"did you mean {near}?" if near else ""
    if kind == "string_type" and isinstance(value, (bool, int, float)):
        return "put it in quotes; on a command line both kinds: key='\"value\"'"
    if isinstance(value, str) and value in ("None", "none", "nil"):
        return "write null for no value"
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type"):
        return "take the quotes away" if _looks(kind, value) else ""
    return ""


def _choices(expected: str) -> list[str]:
    """The values in pydantic's sentence `'a', 'b' or 'c'`."""
    parts = expected.replace("' or '", "', '").split(", ")
    return [str(ast.literal_eval(p)) for p in parts if p[:1] == p[-1:] == "'"]


def _looks(kind: str, text: str) -> bool:
    """True when the string reads as what is wanted."""
    if kind == "bool_type":
        return text.lower() in ("true", "false")
    try:
        float(text)
    except ValueError:
        return False
    return True


def _written(loc: tuple[int | str, ...], data: Any, *, keep_last: bool) -> list[int | str]:
    """The key path as the user wrote it, without the names that pydantic adds for the members of a union."""
    kept: list[int | str] = []
    for i, part in enumerate(loc):
        inside = isinstance(data, Mapping) and part in data
        if inside or (isinstance(data, list) and isinstance(part, int) and part < len(data)):
            kept.append(part)
            data = data[part]
        elif keep_last and i == len(loc) - 1:
            kept.append(part)
    return kept


def _at(path: list[int | str], data: Any) -> Any:
    for part in path:
        data = data[part]
    return data


def _plain(message: str) -> str:
    text = message.removeprefix("Input should be ").removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def shorten(value: Any) -> str:
    """A value in at most 80 characters."""
    try:
        text = repr(value)
    except RecursionError:
        text = "..."
    return text if len(text) <= 80 else f"{text[:77]}..."
