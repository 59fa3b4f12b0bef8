"""docs/known-faults.toml: every fault has a test or a reason why not, and every id in a test is in the table."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return tomllib.loads((ROOT / "docs" / "known-faults.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """docs/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_generate_faults", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_each_fault_has_a_test_or_a_reason(table: dict[str, Any], generate: ModuleType) -> None:
    tests = generate.fault_tests(table["kinds"])
    assert len(table["faults"]) >= 88
    assert all(fault.partition("-")[0] in table["kinds"] for fault in table["faults"])
    assert set(tests) <= set(table["faults"])
    assert set(tests) | set(table["open"]) == set(table["faults"])
    assert not set(tests) & set(table["open"])
    assert set(table["refused"]) <= set(tests)


def test_a_docstring_is_what_carries_an_id(table: dict[str, Any]) -> None:
    """An id in a test's name alone would look guarded in the code and be missing from the page."""
    pattern = re.compile(rf"(?<![a-z])({'|'.join(table['kinds'])})_(\d\d)(?!\d)")
    named, silent = 0, []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                ids = [f"{kind}-{number}" for kind, number in pattern.findall(node.name)]
                named += len(ids)
                silent += [f"{file}::{node.name}" for i in ids if i not in (ast.get_docstring(node) or "")]
    assert named > 20
    assert silent == []
