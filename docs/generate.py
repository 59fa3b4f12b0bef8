"""Write the pages of docs/reference from what they describe: schema, command tree, metric declarations, tests.

python docs/generate.py --write     # write them
python docs/generate.py --check     # exit code 1 and the names of those that are out of date
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import typer
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo, OptionInfo

DOCS = Path(__file__).resolve().parent
REFERENCE = DOCS / "reference"
TESTS = DOCS.parent / "tests"
BOUNDS = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}
PLAIN = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true, false",
    types.NoneType: "null",
    Any: "any value",
}


def config_reference() -> str:
    """The text of docs/reference/config.md."""
    from rlspeed.config.schema import Profile

    lines = [
        "# Configuration",
        "",
        "Generated from `src/rlspeed/config/schema.py` and `device_schema.py` by `docs/generate.py --write`.",
        "",
        "A run is described by a YAML file with these keys or by a packaged profile, with words after it that win:",
        "`rlspeed train NAME|FILE key.path=value ...`. Later layers win: defaults, the profile (`profile: NAME` in the",
        "file puts one below it), the file, the words. `--dry-run` prints every value and where it comes from.",
        "",
        "Words are read as YAML: `optim.actor.lr=1e-6`, `rollout.stop=['###', END]`, `algorithm.kl={where: loss}`. A",
        "mapping is merged into what is there, a list replaces it, an item of a list is reached by its number",
        "(`reward.functions.0.weight=2`). An unknown key, a wrong type or an impossible combination ends the command",
        "with exit code 2; all faults of all files and words are told at once, with file and line.",
    ]
    lines += _table("Top level", Profile, "")
    for key, model in _sections(Profile, ""):
        lines += _table(f"`{key}`", model, key)
    return "\n".join(lines) + "\n"


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted key, model) of every section below `model`, each model once, in the order of the file."""
    for name, field in model.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is not None:
            key = f"{prefix}{name}" + ("[]" if typing.get_origin(field.annotation) is list else "")
            yield key, inner
            yield from _sections(inner, f"{key}.")


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The model in `Model`, `Model | None` or `list[Model]`."""
    for part in (annotation, *typing.get_args(annotation)):
        if inspect.isclass(part) and issubclass(part, BaseModel):
            return part
    return None


def _table(title: str, model: type[BaseModel], prefix: str) -> list[str]:
    """A heading, the section's sentence and its keys."""
    lines = ["", f"## {title}", "", _cell(inspect.getdoc(model) or ""), ""]
    lines += ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        inner = _section_of(field.annotation)
        meaning = field.description or (inspect.getdoc(inner) if inner else "") or ""
        key = f"{prefix}.{name}" if prefix else name
        lines.append(f"| `{key}` | {_type(field)} | {_default(field)} | {_cell(meaning)} |")
    return lines


def _type(field: FieldInfo) -> str:
    """What may stand there, in words."""
    bounds = [f"{BOUNDS[type(m)][0]} {getattr(m, BOUNDS[type(m)][1]):g}" for m in _metadata(field)]
    return _cell(", ".join([_words(field.annotation), *bounds]))


def _metadata(field: FieldInfo) -> list[Any]:
    """Bounds on the field itself, or on the one alternative that has some (`Annotated[int, ...] | None`)."""
    found = list(field.metadata)
    for part in typing.get_args(field.annotation):
        for extra in getattr(part, "__metadata__", ()):
            found += extra.metadata if isinstance(extra, FieldInfo) else [extra]
    return [m for m in found if type(m) in BOUNDS]


def _words(annotation: Any) -> str:
    """A type in words."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _words(args[0])
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(a) for a in args)
    if origin is list:
        return f"list of: {_words(args[0])}"
    if origin is tuple:
        return f"list of {len(args)}: {_words(args[0])}"
    if origin is dict:
        return "mapping"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "section"
    return PLAIN.get(annotation, str(annotation))


def _default(field: FieldInfo) -> str:
    """The default as YAML shows it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        changed = value.model_dump(exclude_defaults=True)
        return _cell(", ".join(f"`{k}: {_yaml(v)}`" for k, v in changed.items()))
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_yaml(v) for v in value) + "]"
    return str(value)


def _cell(text: str) -> str:
    """Text for one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def cli_reference() -> str:
    """The text of docs/reference/cli.md."""
    lines = [
        "# Command line",
        "",
        "Generated from the command tree in `commands/` by `docs/generate.py --write`.",
        "",
        "Results go to stdout, talk and errors to stderr. Exit codes: 0 ok; 1 a check failed or a run had to stop;",
        "2 bad usage or configuration; 130 interrupted.",
    ]
    for words, text, function in command_tree():
        rows = [p.row() for p in parameters(function)]
        usage = " ".join([words, *(p.usage() for p in parameters(function))])
        lines += ["", f"## `{words}`", "", inspect.cleandoc(text), "", "```text", usage, "```"]
        lines += ["", "| word | value | default | meaning |", "| --- | --- | --- | --- |", *rows] if rows else []
    return "\n".join(lines) + "\n"


Command = tuple[str, str, Callable[..., Any]]


def command_tree() -> Iterator[Command]:
    """(words, help, function) of every command; `rlspeed` itself, with its options, is the first."""
    from rlspeed.commands import app

    assert app.registered_callback is not None
    assert app.registered_callback.callback is not None
    yield "rlspeed", str(app.info.help), app.registered_callback.callback
    yield from _below(app, "rlspeed")


def _below(app: typer.Typer, path: str) -> Iterator[Command]:
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        yield f"{path} {name}", command.help or command.callback.__doc__ or "", command.callback
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from _below(group.typer_instance, f"{path} {group.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """An argument (without spellings) or an option of a command."""

    name: str
    spellings: tuple[str, ...]
    value: str
    default: Any
    help: str

    @property
    def required(self) -> bool:
        """It has no default."""
        return self.default is inspect.Parameter.empty

    def usage(self) -> str:
        """As in a usage line."""
        if self.spellings:
            word = self.spellings[0] + (" VALUE" if self.value else "")
        else:
            word = self.name
        return word if self.required or word.startswith("[") else f"[{word}]"

    def row(self) -> str:
        """As a line of a table."""
        words = ", ".join(f"`{w}`" for w in self.spellings or (self.name,))
        shown = "required" if self.required else f"`{_plain(self.default)}`"
        shown = "" if self.default is None or self.default is False else shown
        return f"| {words} | {_cell(self.value)} | {shown} | {_cell(self.help)} |"


def parameters(function: Callable[..., Any]) -> list[Parameter]:
    """Arguments and options of a command, in order."""
    hints = typing.get_type_hints(function, include_extras=True)
    return [_parameter(p, hints[p.name]) for p in inspect.signature(function).parameters.values()]


def _parameter(parameter: inspect.Parameter, hint: Any) -> Parameter:
    kind, info = hint.__origin__, next(m for m in hint.__metadata__ if isinstance(m, ArgumentInfo | OptionInfo))
    least = f", >= {info.min}" if info.min is not None else ""
    dashed = parameter.name.replace("_", "-")
    spellings: tuple[str, ...] = ()
    if isinstance(info, OptionInfo):
        # the first positional argument of typer.Option is its default, or in Annotated a spelling
        given = [info.default] if isinstance(info.default, str) else []
        negated = [f"--no-{dashed}"] if kind is bool else []
        spellings = tuple([*given, *(info.param_decls or [])] or [f"--{dashed}", *negated])
    return Parameter(
        name=info.metavar or dashed.upper(),
        spellings=spellings,
        value="" if kind is bool else _kind(kind) + least,
        default=parameter.default,
        help=info.help or "",
    )


def _kind(kind: Any) -> str:
    """The type of a command's value, in words; an optional one is named by what it holds."""
    args = [a for a in typing.get_args(kind) if a is not types.NoneType]
    if typing.get_origin(kind) is list:
        return f"{_kind(args[0])}, any number"
    if args:
        return _kind(args[0])
    if inspect.isclass(kind) and issubclass(kind, StrEnum):
        return ", ".join(f"`{v.value}`" for v in kind)
    return {int: "whole number", float: "number", str: "text", Path: "path"}[kind]


def _plain(value: object) -> str:
    return str(getattr(value, "value", value))


def metrics_reference() -> str:
    """The text of docs/reference/metrics.md."""
    from rlspeed.training.declared import metrics_reference

    return metrics_reference()


def faults_reference() -> str:
    """The text of docs/reference/known-faults.md."""
    table = tomllib.loads((DOCS / "known-faults.toml").read_text(encoding="utf-8"))
    tests = fault_tests(table["kinds"])
    lines = [
        "# Known faults",
        "",
        "Generated from `docs/known-faults.toml` and the docstrings of the tests by `docs/generate.py --write`.",
        "",
        "What went wrong for users of other trainers and libraries, and the tests that keep it from going wrong here.",
        "Where what would have the fault is not offered, the tests show that asking for it is refused.",
    ]
    for kind, title in table["kinds"].items():
        lines += ["", f"## {title.capitalize()}", "", "| id | fault | guarded by |", "| --- | --- | --- |"]
        for fault, text in table["faults"].items():
            if fault.partition("-")[0] != kind:
                continue
            guards = [f"`{t}`" for t in tests.get(fault, ())]
            notes = [f"refused: {table['refused'][fault]}"] if fault in table["refused"] else []
            notes += [f"open: {table['open'][fault]}"] if fault in table["open"] else []
            lines.append(f"| {fault} | {_cell(text)} | {'<br>'.join([*notes, *guards])} |")
    fuzz = table["fuzz"]
    lines += [
        "",
        "## Fuzz",
        "",
        "`tests/fuzz` damages files, configurations and plans: what comes back is a result or an error with exit code",
    ]
    lines += ["2, in time and without a half-written file. The test suite tries a few examples of each;"]
    lines += ["`RLSPEED_FUZZ_SECONDS=600 pytest -n 0 -o timeout=0 tests/fuzz` goes on for ten minutes."]
    lines += [f"It ran {fuzz['ran']}: {fuzz['examples']}. Found and mended, also in the runs before it:", ""]
    lines += [f"- {found}" for found in fuzz["found"]]
    return "\n".join(lines) + "\n"


def fault_tests(kinds: typing.Iterable[str]) -> dict[str, list[str]]:
    """The tests, as `FILE::NAME` below tests/, whose docstring names a fault's id, by id."""
    pattern = re.compile(rf"\b(?:{'|'.join(kinds)})-\d\d\b")
    found: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for fault in sorted(set(pattern.findall(ast.get_docstring(node) or ""))):
                    found.setdefault(fault, []).append(f"{file.relative_to(TESTS).as_posix()}::{node.name}")
    return found


PAGES: dict[str, Callable[[], str]] = {
    "config.md": config_reference,
    "cli.md": cli_reference,
    "metrics.md": metrics_reference,
    "known-faults.md": faults_reference,
}


def main() -> None:
    """Write or compare the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--check", action="store_true")
    write = parser.parse_args().write
    stale = []
    for name, page in PAGES.items():
        path, text = REFERENCE / name, page()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if write:
            path.write_text(text, encoding="utf-8")
    if stale and not write:
        sys.exit(f"out of date: {', '.join(stale)}; write them with python docs/generate.py --write")


if __name__ == "__main__":
    main()
