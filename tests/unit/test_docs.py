"""What the documents say is so: commands, options and keys that they show exist; public code says what it does."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted(f for folder in ("src/rlspeed", "commands") for f in (ROOT / folder).rglob("*.py"))
CONFIG_PAGE = ROOT / "docs" / "reference" / "config.md"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """docs/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of each `rlspeed ...` command in the code blocks of a page."""
    for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.search(r"(?:^|/|-m )(rlspeed \S.*)", line)
            if match:
                yield shlex.split(match[1], comments=True)


SHOWN = [(page, words) for page in PAGES for words in commands_of(page)]


def test_pages_show_commands() -> None:
    """A search that finds nothing would let everything pass."""
    assert len(SHOWN) > 15
    assert {words[1] for _, words in SHOWN} >= {"train", "preprocess", "check-devices"}


@pytest.mark.parametrize(("page", "words"), SHOWN, ids=lambda v: v.name if isinstance(v, Path) else " ".join(v)[:60])
def test_shown_commands_exist(generate: ModuleType, page: Path, words: list[str]) -> None:
    """The command is in the tree, its options are its own, its `key.path=value` words are in the schema."""
    tree = {name: function for name, _, function in generate.command_tree()}
    name = max((n for n in tree if f"{' '.join(words)} ".startswith(f"{n} ")), key=len)
    assert name != "rlspeed"
    known = {spelling for p in generate.parameters(tree[name]) for spelling in p.spellings}
    assert {w.split("=")[0] for w in words if w.startswith("-")} <= known | {"--help", "-h"}
    if name == "rlspeed train":
        keys = {w.split("=")[0] for w in words[2:] if "=" in w and not w.startswith("-")}
        reference = CONFIG_PAGE.read_text(encoding="utf-8")
        assert {k for k in keys if f"| `{k}` |" not in reference} <= {"profile"}


def test_the_reference_explains_every_key() -> None:
    """A key without a sentence would be a row with an empty last cell."""
    rows = [r for r in CONFIG_PAGE.read_text(encoding="utf-8").splitlines() if r.startswith("| `")]
    assert len(rows) > 100
    assert [r for r in rows if r.endswith("|  |")] == []


def test_public_code_says_what_it_does() -> None:
    """Functions and classes of modules, and methods of classes, unless their name begins with _."""
    silent = []
    for file in SOURCES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        classes = [c for c in tree.body if isinstance(c, ast.ClassDef) and not c.name.startswith("_")]
        for node in (*tree.body, *(m for c in classes for m in c.body)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if not node.name.startswith("_") and ast.get_docstring(node) is None:
                silent.append(f"{file.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert silent == []
