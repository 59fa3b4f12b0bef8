from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlspeed.errors import ConfigError, RunError
from rlspeed.training.loggers import JsonLines, Loggers


def test_numbers_come_back_bit_for_bit(tmp_path: Path):
    file = JsonLines(tmp_path / "m.jsonl")
    file.write(1, {"a": 0.1 + 0.2, "b": 1e-300, "c": math.nan, "d": math.inf})
    file.write(2, {"a": 3.0})
    assert file.rows() == [{"step": 1, "a": 0.1 + 0.2, "b": 1e-300, "c": None, "d": None}, {"step": 2, "a": 3.0}]


def test_resume_leaves_the_file_of_an_uninterrupted_run(tmp_path: Path):
    """Steps 1..5, checkpoint at 3, a line cut by a crash: after resume the bytes are those of one run of 5 steps."""
    whole, broken = JsonLines(tmp_path / "whole"), JsonLines(tmp_path / "broken")
    for step in range(1, 6):
        whole.write(step, {"a": step / 3})
        broken.write(step, {"a": step / 3})
    with broken.path.open("a") as file:
        file.write('{"step": 6, "a": 2.')
    assert len(broken.rows()) == 5
    assert broken.truncate_after(3) == 3
    for step in (4, 5):
        broken.write(step, {"a": step / 3})
    assert broken.path.read_bytes() == whole.path.read_bytes()
    assert whole.truncate_after(5) == 0
    assert JsonLines(tmp_path / "none").truncate_after(3) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken", "whole"]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path):
    file = JsonLines(tmp_path / "m.jsonl")
    file.write(1, {"a": 1.0})
    with file.path.open("a") as handle:
        handle.write("oops\n")
    file.write(2, {"a": 1.0})
    with pytest.raises(RunError, match=r"m.jsonl, line 2"):
        file.truncate_after(1)
    assert len(file.path.read_text().splitlines()) == 3


def test_clock_and_memory_go_to_their_own_file(tmp_path: Path):
    loggers = Loggers(tmp_path)
    loggers.log(1, {"actor/pg_loss": 1.0, "timing_s/gen": 2.0})
    loggers.log(2, {"actor/pg_loss": 0.5})
    loggers.close()
    assert [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"step": 1, "actor/pg_loss": 1.0},
        {"step": 2, "actor/pg_loss": 0.5},
    ]
    assert json.loads((tmp_path / "timings.jsonl").read_text()) == {"step": 1, "timing_s/gen": 2.0}
    with pytest.raises(LookupError, match="actor/loss"):
        loggers.log(3, {"actor/loss": 1.0})
    again = Loggers(tmp_path, resume_step=1)
    again.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_other_ranks_write_nothing(tmp_path: Path):
    loggers = Loggers(tmp_path, ["tensorboard"], enabled=False, resume_step=3)
    loggers.log(1, {"actor/pg_loss": 1.0})
    loggers.close()
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_named_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError) as caught:
        Loggers(tmp_path, ["tensorboard", "wandb"])
    assert [f.fix for f in caught.value.faults] == [
        "pip install 'rlspeed[tensorboard]'",
        "pip install 'rlspeed[wandb]'",
    ]


def test_tensorboard_reads_the_numbers_back(tmp_path: Path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resume, steps in ((None, (1, 2, 3)), (1, (2,))):
        loggers = Loggers(tmp_path, ["tensorboard"], resume_step=resume)
        for step in steps:
            loggers.log(step, {"actor/pg_loss": step * (0.5 if resume is None else 10.0)})
        loggers.close()
    read = events.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("actor/pg_loss")] == [(1, 0.5), (2, 20.0)]


class FakeWandb(SimpleNamespace):
    """Records how it was called."""

    def init(self, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        run = SimpleNamespace(id=kwargs["id"] or "abc", finished=False)
        run.log = lambda values, step: self.rows.append((step, values))
        run.finish = lambda: self.ended.append(run.id)
        return run


def test_wandb_is_offline_unless_told_and_resumes_under_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = FakeWandb(calls=[], rows=[], ended=[])
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    loggers = Loggers(tmp_path, ["wandb"], run_name="night", config={"seed": 1})
    loggers.log(4, {"actor/pg_loss": 1.0, "timing_s/gen": 2.0})
    loggers.close()
    loggers.close()
    monkeypatch.setenv("WANDB_MODE", "online")
    Loggers(tmp_path, ["wandb"], run_name="night", resume_step=4).close()
    first, second = fake.calls
    assert (first["mode"], first["id"], first["config"], first["name"]) == ("offline", None, {"seed": 1}, "night")
    assert (second["mode"], second["id"], second["resume"]) == ("online", "abc", "allow")
    assert fake.rows == [(4, {"actor/pg_loss": 1.0, "timing_s/gen": 2.0})]
    assert fake.ended == ["abc", "abc"]
