"""Which files a specification means."""

from __future__ import annotations

import pytest

from rlspeed.data.files import FaultLog, RowFaults, expand
from rlspeed.errors import DataError


def test_a_directory_is_searched_in_a_fixed_order_without_hidden_files(tmp_path, kit):
    for name in ("b.parquet", "a.parquet", ".hidden.parquet", "_tmp.parquet"):
        kit.write_parquet(tmp_path / name, [{"prompt": "a"}])
    (tmp_path / "sub").mkdir()
    kit.write_jsonl(tmp_path / "sub" / "c.jsonl", [{"prompt": "a"}])
    (tmp_path / "README.md").write_text("text")
    found = expand(str(tmp_path), "data.train_files")
    assert [f.path.relative_to(tmp_path).as_posix() for f in found] == ["a.parquet", "b.parquet", "sub/c.jsonl"]
    assert [f.format for f in found] == ["parquet", "parquet", "jsonl"]


def test_a_glob_is_sorted_and_a_list_keeps_its_order(tmp_path, kit):
    for name in ("x-2.jsonl", "x-1.jsonl", "y.jsonl"):
        kit.write_jsonl(tmp_path / name, [{"prompt": "a"}])
    globbed = expand(str(tmp_path / "x-*.jsonl"), "in")
    assert [f.path.name for f in globbed] == ["x-1.jsonl", "x-2.jsonl"]
    listed = expand([str(tmp_path / "y.jsonl"), str(tmp_path / "x-1.jsonl")], "in")
    assert [f.path.name for f in listed] == ["y.jsonl", "x-1.jsonl"]


def test_parquet_is_known_by_its_first_bytes_when_its_name_says_nothing(tmp_path, kit):
    path = kit.write_parquet(tmp_path / "train", [{"prompt": "a"}])
    assert expand(path, "in")[0].format == "parquet"


def test_everything_that_is_missing_is_named_at_once(tmp_path):
    """data-11: a directory without matching files is an error of its own, not an empty run."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    spec = [str(tmp_path / "empty"), str(tmp_path / "no.parquet"), str(tmp_path / "*.csv"), str(tmp_path / "notes.txt")]
    with pytest.raises(DataError) as caught:
        expand([*spec, "quickstart:test"], "data.train_files")
    text = str(caught.value)
    assert len(caught.value.faults) == 5
    for part in ("empty", "no.parquet", "*.csv", "notes.txt", "quickstart:train or quickstart:val"):
        assert part in text
    assert "data.train_files" in text


def test_rows_with_the_same_fault_share_a_message(tmp_path, kit):
    file = expand(kit.write_jsonl(tmp_path / "a.jsonl", []), "in")[0]
    rows, log = RowFaults(), FaultLog()
    for i in range(14):
        rows.add(file, str(i), "no tokens")
    rows.report(log)
    assert len(log.faults) == 1
    assert "rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 4 more" in log.faults[0].where
