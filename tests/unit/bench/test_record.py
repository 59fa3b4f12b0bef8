"""Benchmark records: what they say about code and machine, written whole, read back equal, old forms readable."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from rlspeed.bench.record import (
    SCHEMA,
    Value,
    code_state,
    digest,
    digest_files,
    environment,
    new_record,
    read_record,
    write_record,
)
from rlspeed.errors import DataError

RECORDS = Path(__file__).parents[3] / "benchmarks" / "records"


def test_a_record_is_read_back_equal(tmp_path: Path) -> None:
    values = {"step_seconds": Value(unit="s", samples=(2.0, 1.0, 4.0)), "once": Value(unit="", samples=(7.0,))}
    record = new_record("step", values, profile=digest({"a": 1}), data="d", extra={"note": "x"})
    path = tmp_path / "new" / "r.json"
    write_record(path, record)
    assert read_record(path) == record
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]
    shown = json.loads(path.read_text())["values"]
    assert {k: shown["step_seconds"][k] for k in ("n", "min", "median", "max")} == {
        "n": 3,
        "min": 1.0,
        "median": 2.0,
        "max": 4.0,
    }
    assert shown["step_seconds"]["stdev"] == pytest.approx(1.5275252)
    assert shown["once"]["stdev"] is None
    assert record.machine["cores"] >= 1
    assert {"python", "torch", "transformers"} <= set(record.versions)


def test_values_are_finite_and_there() -> None:
    for samples in ((), (1.0, float("nan")), (float("inf"),)):
        with pytest.raises(ValueError, match="at least one sample"):
            Value(unit="s", samples=samples)


def test_the_state_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLSPEED_COMMIT", raising=False)
    assert code_state(tmp_path) == ("unknown", None)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "f").write_text("1")
    for words in (["init", "-q"], ["add", "f"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    commit, dirty = code_state(tmp_path)
    assert len(commit) == 40
    assert dirty is False
    (tmp_path / "f").write_text("2")
    assert code_state(tmp_path) == (commit, True)
    monkeypatch.setenv("RLSPEED_COMMIT", "abc123")
    assert code_state(tmp_path) == ("abc123", False)
    monkeypatch.setenv("RLSPEED_COMMIT", "abc123+")
    assert code_state(tmp_path) == ("abc123", True)


def test_digests_follow_the_content(tmp_path: Path) -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}) != digest({"a": 1, "b": [3]})
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_text("x")
    two.write_text("y")
    assert digest_files([one, two]) == digest_files([one, two]) != digest_files([two, one])


@pytest.mark.parametrize("path", sorted(RECORDS.rglob("*.json")), ids=lambda p: p.name)
def test_every_record_of_the_repository_is_read(path: Path) -> None:
    record = read_record(path)
    assert record.name
    assert record.schema <= SCHEMA
    assert record.extra or record.values


def test_a_head_with_results_of_its_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(environment("own") | {"rows": [1]}))
    assert read_record(path).extra == {"rows": [1]}


@pytest.mark.parametrize("text", ["{", "[1]", '{"schema": 99}', '{"schema": 2, "values": {"a": {}}}'])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"r\.json"):
        read_record(path)
