"""`key.path=value` words on top of the files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlspeed.config.layers import Origins, merge
from rlspeed.config.yaml_lines import read_value
from rlspeed.errors import Fault

OVERRIDE = "override"


def apply_overrides(words: Sequence[str], data: dict[str, Any], origins: Origins) -> list[Fault]:
    """Set the value of each word in order; returns a fault for each word that cannot be read or placed."""
    faults: list[Fault] = []
    for word in words:
        dotted, equals, text = word.partition("=")
        keys = dotted.split(".")
        if not equals or "" in keys:
            fix = "write each word as key.path=value, without blanks around the ="
            faults.append(Fault(where=OVERRIDE, found=repr(word), allowed="key.path=value", fix=fix))
            continue
        try:
            value = read_value(text)
        except ValueError as error:
            found = f"{dotted}: {text!r} is not YAML: {error}"
            faults.append(Fault(where=OVERRIDE, found=found, fix=f"put it in quotes: {dotted}='\"...\"'"))
            continue
        problem = _put(data, keys, value, origins)
        if problem:
            faults.append(Fault(where=OVERRIDE, found=f"{dotted}: {problem}"))
    return faults


def _put(data: Any, keys: list[str], value: Any, origins: Origins) -> str | None:
    """Set one value; items of lists by their number. Returns what is wrong, None when done."""
    for i, name in enumerate(keys[:-1]):
        above = ".".join(keys[:i])
        if isinstance(data, list):
            place = _index(name, len(data) - 1)
            if place is None:
                return f"{above} has {len(data)} item(s), no {name!r}"
            data = data[place]
        else:
            if data.get(name) is None:
                data[name] = {}
            data = data[name]
        if not isinstance(data, (dict, list)):
            return f"{'.'.join(keys[: i + 1])} is a plain value and has no {keys[i + 1]!r}"
    if isinstance(data, dict):
        merge(data, {keys[-1]: value}, tuple(keys[:-1]), origins, lambda _: OVERRIDE)
        return None
    place = _index(keys[-1], len(data))
    if place is None:
        return f"{'.'.join(keys[:-1])} has {len(data)} item(s), no {keys[-1]!r}"
    data[place : place + 1] = [value]
    origins.replace(tuple(keys), value, lambda _: OVERRIDE)
    return None


def _index(name: str, most: int) -> int | None:
    """A position in a list, None when it is no number or more than `most`."""
    if not (name.isascii() and name.isdigit() and len(name) < 6):
        return None
    return int(name) if int(name) <= most else None
