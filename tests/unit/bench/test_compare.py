"""Records side by side: what may be compared, the table's words, regressions, --json, the door."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rlspeed.commands import app
from typer.testing import CliRunner

from rlspeed.bench.compare import compare
from rlspeed.bench.record import Record, Value, write_record
from rlspeed.bench.sources import load_all
from rlspeed.errors import ConfigError, DataError

Make = Callable[..., Record]
CLI = CliRunner()


def test_ratios_and_words(make_record: Make) -> None:
    memory = {"peak_host_memory": Value(unit="GiB", samples=(2.0, 2.0, 2.0))}
    more = {
        "peak_host_memory": Value(unit="GiB", samples=(3.0, 3.0, 3.0)),
        "phase/reward": Value(unit="s", samples=(1.0,)),
    }
    found = compare(
        [make_record("a", (100, 101, 99), values=memory), make_record("b", (200, 201, 199), values=more)], ["a", "b"]
    )
    speed, room, reward = (found.row(n) for n in ("tokens_per_second", "peak_host_memory", "phase/reward"))
    assert speed is not None
    assert room is not None
    assert reward is not None
    assert speed.verdicts[0] is None
    assert speed.verdicts[1] is not None
    assert speed.verdicts[1].ratio == 2.0
    assert [speed.words(0), speed.words(1), room.words(1), reward.words(1)] == ["", "faster", "more", ""]
    assert any("no verdict under 3" in n for n in found.notes)


def test_unlike_devices_and_data_are_refused(make_record: Make) -> None:
    a = make_record("a", (1, 1, 1), extra={"work": {"rollout.n": 4}})
    gpu = {"cpu": "x", "cores": 2, "gpus": [{"name": "NVIDIA H200", "memory_bytes": 1}]}
    b = make_record("b", (2, 2, 2), machine=gpu, data="other", extra={"work": {"rollout.n": 8}})
    with pytest.raises(ConfigError) as caught:
        compare([a, b], ["a", "b"])
    assert [f.fix.split()[0] for f in caught.value.faults] == ["--any-device", "--any-data"]
    assert "rollout.n 4 and 8" in str(caught.value)
    found = compare([a, b], ["a", "b"], any_device=True, any_data=True)
    assert any("NVIDIA H200" in n for n in found.notes), "what was told to be allowed is still said"
    other = replace(a, extra={"work": {"rollout.n": 4}, "tokens": [[1, 2]]})
    with pytest.raises(ConfigError, match="other numbers of tokens"):
        compare([replace(other, extra={**other.extra, "tokens": [[1, 3]]}), other], ["a", "b"])
    with pytest.raises(ConfigError, match="at least 2"):
        compare([a], ["a"])


def test_only_what_the_spread_can_tell_is_a_regression(make_record: Make) -> None:
    a = make_record("a", (100, 101, 99))
    slow, noisy, near = ((90, 91, 89), (60, 110, 90), (96, 97, 96.5))
    found = compare([a, *(make_record(n, r) for n, r in zip("bcd", (slow, noisy, near)))], list("abcd"))
    told, untold = found.regressions(0.95)
    assert [t.split(":")[0] for t in told] == ["b"]
    assert [t.split(":")[0] for t in untold] == ["c"]
    with pytest.raises(ConfigError, match="fewer than 3"):
        compare([a, make_record("b", (1, 1))], ["a", "b"]).regressions(0.95)


def test_step_seconds_stand_in_for_a_rate(make_record: Make) -> None:
    def timed(name: str, *seconds: float) -> Record:
        return replace(make_record(name, (1,)), values={"step_seconds": Value(unit="s", samples=seconds)})

    found = compare([timed("a", 1.0, 1.01, 0.99), timed("b", 2.0, 2.01, 1.99)], ["a", "b"])
    told, _ = found.regressions(0.95)
    assert told == ["b: step_seconds at 0.500 of a, under 0.95"]


def test_the_door(make_record: Make, tmp_path: Path) -> None:
    for name, rates in (("baseline", (100, 101, 99)), ("packed", (50, 51, 49))):
        write_record(tmp_path / f"{name}.json", make_record(name, rates))
    files = [str(tmp_path / "baseline.json"), str(tmp_path / "packed.json")]
    plain = CLI.invoke(app, ["bench", "compare", *files])
    assert plain.exit_code == 0
    assert "slower" in plain.stdout
    as_json = CLI.invoke(app, ["bench", "compare", str(tmp_path), "--json", "--html", str(tmp_path / "page.html")])
    content = json.loads(as_json.stdout)
    assert content["rows"][0]["ratios"] == [None, 0.5]
    assert content["rows"][0]["verdicts"] == ["", "slower"]
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    failed = CLI.invoke(app, ["bench", "compare", *files, "--fail-under", "0.95"])
    assert failed.exit_code == 1
    assert CLI.invoke(app, ["bench", "compare", *files[::-1], "--fail-under", "0.95"]).exit_code == 0


def test_records_of_a_folder_stand_in_the_order_of_the_profiles(make_record: Make, tmp_path: Path) -> None:
    for name in ("zebra", "packed", "baseline"):
        write_record(tmp_path / f"{name}.json", make_record(name, (1,)))
    write_record(tmp_path / "packed-x2.json", make_record("packed", (1,), extra={"processes": 2}))
    _, names = load_all([str(tmp_path)], warm_up=0)
    assert names == ["baseline", "packed", "packed-x2", "zebra"]
    _, names = load_all([str(tmp_path / "zebra.json")] * 2, warm_up=0)
    assert len(set(names)) == 2
    with pytest.raises(DataError) as caught:
        load_all([str(tmp_path / "gone.json"), str(tmp_path / "none")], warm_up=0)
    assert len(caught.value.faults) == 2
