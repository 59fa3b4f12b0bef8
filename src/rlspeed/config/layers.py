"""Layers of configuration laid over each other, and where each value comes from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlspeed.config.keys import section_keys

KeyPath = tuple[str, ...]
Label = Callable[[KeyPath], str]


class Origins(dict[str, str]):
    """Dotted key of a value -> the layer that it comes from."""

    def replace(self, key: KeyPath, value: Any, label: Label) -> None:
        """`value` now stands at `key`, whatever stood there or below."""
        self.forget(key)
        for leaf, inner in leaves(value, key):
            if not (isinstance(inner, Mapping) and ".".join(leaf) in section_keys()):
                self[".".join(leaf)] = label(leaf)

    def forget(self, key: KeyPath) -> None:
        """Nothing stands at `key` or below any more."""
        dotted = ".".join(key)
        for stale in [k for k in self if k == dotted or k.startswith(f"{dotted}.")]:
            del self[stale]

    def where(self, dotted: str) -> str:
        """The layer of a key, of the first key below it, or of the nearest above it; else `default`."""
        if dotted in self:
            return self[dotted]
        below = next((o for k, o in self.items() if k.startswith(f"{dotted}.")), None)
        return below if below is not None else self.of_value(dotted)

    def of_value(self, dotted: str) -> str:
        """The layer that the value at `dotted` came with: its own, or that of the value which holds it."""
        while dotted:
            if dotted in self:
                return self[dotted]
            dotted = dotted.rpartition(".")[0]
        return "default"


def merge(into: dict[str, Any], new: Mapping[str, Any], key: KeyPath, origins: Origins, label: Label) -> None:
    """Lay `new` over `into`: mappings are merged, everything else replaces what was there.

    A section with nothing under it (null or {} in YAML) changes nothing.
    """
    for name, value in new.items():
        here = (*key, name)
        before = into.get(name)
        if value is None and ".".join(here) in section_keys():
            continue
        if isinstance(value, Mapping) and (before is None or isinstance(before, dict)) and (value or before):
            if before is None:
                origins.forget(here)
                into[name] = before = {}
            merge(before, value, here, origins, label)
        else:
            into[name] = copy.deepcopy(value)
            origins.replace(here, value, label)


def leaves(value: Any, key: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """(key path, value) of every value; lists are one value unless they hold mappings."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(inner, (*key, name))
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        for i, item in enumerate(value):
            yield from leaves(item, (*key, str(i)))
    else:
        yield key, value
