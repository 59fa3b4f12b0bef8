"""YAML with line numbers, YAML 1.2 numbers, no dates, keys that are strings, and no silent duplicates."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlspeed.errors import Fault

KeyPath = tuple[str, ...]
MOST_NODES = 100_000  # a file of anchors inside anchors would unfold for ever
# explicit tags (`!!int ""`) make PyYAML fail in many ways
YAML_FAILURES = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads numbers as YAML 1.2 does: 1e-6 is one; 010, 1:30 and 2026-12-01 are strings."""


STR_TAG, MERGE_TAG = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
_RESOLVERS = {"tag:yaml.org,2002:null", "tag:yaml.org,2002:bool", MERGE_TAG}
_Loader.yaml_implicit_resolvers = {
    first: kept
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    if (kept := [pair for pair in pairs if pair[0] in _RESOLVERS])
}


class _Dumper(yaml.SafeDumper):
    """SafeDumper whose strings read back equal: PyYAML writes some line ends of Unicode as they are and folds them."""


_QUOTED = re.compile(r"[\x00-\x1f\x7f-\xa0\u2028\u2029\ufeff]")
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(STR_TAG, text, style='"' if _QUOTED.search(text) else None),
)

# the dumper has them beside its own, so that a string that looks like a number for either is quoted
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"), list("-+0123456789")
    )
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^([-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|"
            r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    )


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML file: its mapping, and the line of each key path; readable: False when it is not YAML or not there."""

    path: Path
    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    readable: bool = True

    @property
    def name(self) -> str:
        """What a run of this file is called."""
        return self.path.resolve().stem

    def where(self, key: KeyPath) -> str:
        """`file:line` of a key, or of the nearest key above it."""
        while key and key not in self.lines:
            key = key[:-1]
        return f"{self.path}:{self.lines[key]}" if key in self.lines else str(self.path)


def read_document(path: Path, faults: list[Fault]) -> Document:
    """Read one YAML file; what is wrong with it is added to `faults`, what can be read of it is returned.

    Faults: not there, not readable, not YAML (with the line), not a mapping, keys that stand twice (all of them).
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        faults.append(Fault(where=str(path), found=f"cannot be read: {why}", fix="give the path of a YAML file"))
        return Document(path, {}, readable=False)
    lines: dict[KeyPath, int] = {}
    try:
        data = _read(text, str(path), lines, faults)
    except YAML_FAILURES as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        faults.append(Fault(where=where, found=f"not YAML: {_problem(error)}", fix="mend the line"))
        return Document(path, {}, readable=False)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        faults.append(Fault(where=str(path), found=f"a {type(data).__name__}", allowed="a mapping of keys"))
        return Document(path, {}, readable=False)
    return Document(path, data, lines)


def dump_yaml(data: object) -> str:
    """YAML text of plain values, keys in order, that `read_document` reads back equal."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def read_value(text: str) -> Any:
    """The value of one word after `key=`, read as YAML.

    Raises:
        ValueError: not YAML, or a key that stands twice.
    """
    faults: list[Fault] = []
    try:
        value = _read(text, "", {}, faults)
    except YAML_FAILURES as error:
        raise ValueError(_problem(error)) from error
    if faults:
        raise ValueError(faults[0].found)
    return value


def _problem(error: BaseException) -> str:
    """PyYAML's own words, or the kind of failure when it has none."""
    problem = getattr(error, "problem", None)
    if problem:
        return str(problem)
    first = str(error).strip().splitlines()
    return first[0] if first and isinstance(error, (yaml.YAMLError, ValueError)) else type(error).__name__


def _read(text: str, path: str, lines: dict[KeyPath, int], faults: list[Fault]) -> Any:
    """The value of a YAML text, with the lines of its keys and the keys that stand twice."""
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    _Walk(path, lines, faults).visit(node, ())
    return loader.construct_document(node)


@dataclass(slots=True)
class _Walk:
    """Notes the line of each key and each key that stands twice; makes every key the string that is written.

    Without the latter `on:` would be True, and True the same key as `1:`.
    """

    path: str
    lines: dict[KeyPath, int]
    faults: list[Fault]
    count: int = 0

    def visit(self, node: Any, key: KeyPath) -> None:
        self.count += 1
        if self.count > MOST_NODES:
            raise ValueError(f"more than {MOST_NODES} values, or anchors that hold themselves")
        if isinstance(node, yaml.MappingNode):
            self._mapping(node, key)
        elif isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                self.lines[(*key, str(i))] = item.start_mark.line + 1
                self.visit(item, (*key, str(i)))

    def _mapping(self, node: yaml.MappingNode, key: KeyPath) -> None:
        seen: dict[str, int] = {}
        for i, (name_node, value_node) in enumerate(node.value):
            if isinstance(name_node, yaml.ScalarNode) and name_node.tag != MERGE_TAG:
                text_node = yaml.ScalarNode(STR_TAG, name_node.value, name_node.start_mark, name_node.end_mark)
                node.value[i] = (text_node, value_node)
            name = str(name_node.value) if isinstance(name_node, yaml.ScalarNode) else "?"
            line = name_node.start_mark.line + 1
            if name in seen:
                dotted = ".".join((*key, name))
                found = f"{dotted} stands twice, first on line {seen[name]}"
                self.faults.append(Fault(where=f"{self.path}:{line}", found=found, fix="keep one of them"))
            seen[name] = line
            self.lines[(*key, name)] = line
            self.visit(value_node, (*key, name))


def is_file(path: Path) -> bool:
    """False also for names that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
