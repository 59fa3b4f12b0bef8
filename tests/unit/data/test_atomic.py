"""Files appear whole or not at all, on systems with and without files that have no name."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from rlspeed.data import atomic
from rlspeed.data.atomic import Scratch, atomic_file, check_output, write_text
from rlspeed.errors import DataError


@pytest.fixture(params=["unnamed", "named"])
def system(request, monkeypatch):
    if request.param == "named":
        monkeypatch.setattr(atomic, "_unnamed", lambda folder: None)
    return request.param


def test_a_block_that_ends_well_leaves_the_file(tmp_path, system):
    target = tmp_path / "a.txt"
    with atomic_file(target) as path:
        Path(path).write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]
    assert oct(target.stat().st_mode & 0o777) == oct(0o666 & ~atomic._umask())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_what_was_there(tmp_path, system, error):
    target = tmp_path / "a.txt"
    target.write_text("old")

    def half() -> None:
        with atomic_file(target) as path:
            Path(path).write_text("new")
            raise error

    with pytest.raises(error):
        half()
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_an_old_file_is_replaced(tmp_path, system):
    target = tmp_path / "a.txt"
    target.write_text("old")
    write_text(target, "new")
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_an_error_of_the_system_names_the_target(tmp_path, system, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError, match=r"a\.txt: cannot be written: No space left"):
        write_text(tmp_path / "a.txt", "new")
    assert os.listdir(tmp_path) == []


def test_scratch_has_no_name_and_gives_back_what_was_written(tmp_path):
    scratch = Scratch.create(tmp_path)
    assert os.listdir(tmp_path) == []
    written = [pa.record_batch({"a": [1, 2]}), pa.record_batch({"a": [3]})]
    for batch in written:
        scratch.write(batch)
    assert list(scratch.batches()) == written
    assert list(Scratch.create(tmp_path).batches()) == []


def test_folders_that_cannot_be_written_to_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(DataError, match="cannot be written to"):
        check_output(tmp_path / "a", overwrite=False)
