"""The numeric cases, by id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def conformance() -> dict[str, dict]:
    """Cases of tests/conformance/cases.json by id."""
    path = Path(__file__).parents[2] / "conformance" / "cases.json"
    return {c["id"]: c for c in json.loads(path.read_text())["cases"]}
