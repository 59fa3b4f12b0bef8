"""YAML with line numbers, YAML 1.2 numbers and no silent duplicates."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlspeed.errors import ConfigError, Fault

Path_ = tuple[str, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-6 as a number, as YAML 1.2 does and every user expects."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML file: its mapping, and the line of each key path."""

    path: Path
    data: dict[str, Any]
    lines: dict[Path_, int] = field(default_factory=dict)

    def where(self, key: Path_) -> str:
        """`file:line` of a key, or of the nearest key above it."""
        while key and key not in self.lines:
            key = key[:-1]
        return f"{self.path}:{self.lines[key]}" if key in self.lines else str(self.path)


def read_document(path: Path) -> Document:
    """Read one YAML file.

    Raises:
        ConfigError: not there, not readable, not YAML, not a mapping, or keys that stand twice (all of them).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            Fault(where=str(path), found=f"cannot be read: {error}", fix="give the path of a YAML file")
        ) from error
    lines: dict[Path_, int] = {}
    faults: list[Fault] = []
    try:
        node = yaml.compose(text, Loader=_Loader)
        _walk(node, (), path, lines, faults)
        if faults:
            raise ConfigError(faults)
        data = {} if node is None else yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(Fault(where=where, found=f"not YAML: {problem}", fix="mend the line")) from error
    if not isinstance(data, dict):
        raise ConfigError(Fault(where=str(path), found=f"a {type(data).__name__}", allowed="a mapping of keys"))
    return Document(path, data, lines)


def _walk(node: Any, key: Path_, path: Path, lines: dict[Path_, int], faults: list[Fault]) -> None:
    """Note the line of each key and each key that stands twice."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for name_node, value_node in node.value:
            name = str(name_node.value) if isinstance(name_node, yaml.ScalarNode) else "?"
            line = name_node.start_mark.line + 1
            if name in seen:
                dotted = ".".join((*key, name))
                found = f"{dotted} stands twice, first on line {seen[name]}"
                faults.append(Fault(where=f"{path}:{line}", found=found, fix="keep one of them"))
            seen[name] = line
            lines[(*key, name)] = line
            _walk(value_node, (*key, name), path, lines, faults)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            lines[(*key, str(i))] = item.start_mark.line + 1
            _walk(item, (*key, str(i)), path, lines, faults)


def read_value(text: str) -> Any:
    """The value of one word after `key=`, read as YAML.

    Raises:
        ValueError: not YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(getattr(error, "problem", None) or str(error)) from error
