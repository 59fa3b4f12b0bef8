"""`rlspeed bench run`: what is composed, and a real measurement of two profiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rlspeed.commands import app
from typer.testing import CliRunner

from rlspeed.bench.compare import compare
from rlspeed.bench.compose import compose_all, write_config
from rlspeed.bench.record import read_record
from rlspeed.bench.run import RunOptions, run_profiles
from rlspeed.bench.watch import Seen, run_watched
from rlspeed.config.load import own_words
from rlspeed.errors import ConfigError, RunError

SMALL = ("data.batch_size=4", "rollout.n=2", "rollout.max_new_tokens=10", "algorithm.mini_batch_size=4")
COMPOSED = {"on": "quickstart", "lengths": "long_tail", "steps": 3, "world_size": 1}


def test_a_profile_lies_over_the_work() -> None:
    words = (*SMALL, "packed:packing.capacity=512", "baseline:packing.micro_batch_size=2")
    base, packed = compose_all(["baseline", "packed"], words, **COMPOSED)  # type: ignore[arg-type]
    assert base.profile.algorithm.kind == packed.profile.algorithm.kind == "ppo"
    assert [c.profile.model.use_remove_padding for c in (base, packed)] == [False, True]
    assert packed.profile.packing.capacity == 512
    assert base.profile.packing.micro_batch_size == 2
    assert base.profile.data.val_files is None
    assert base.profile.run.save_last is False
    assert base.profile.rollout.fix_lengths == "long_tail"
    assert base.data == packed.data
    assert base.digest != packed.digest
    other, _ = compose_all(["baseline", "packed"], (*SMALL, "rollout.temperature=0.5", "rollout.n=3"), **COMPOSED)  # type: ignore[arg-type]
    assert other.data != base.data


def test_full_is_packed_where_there_is_no_reward_model() -> None:
    packed, full = compose_all(["packed", "full"], SMALL, **COMPOSED)  # type: ignore[arg-type]
    assert packed.digest == full.digest


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    for candidate in compose_all(["baseline", "hybrid", "packed", "full"], SMALL, **COMPOSED):  # type: ignore[arg-type]
        (tmp_path / candidate.name).mkdir()
        text = write_config(candidate, tmp_path / candidate.name).read_text()
        assert f"name: {candidate.name}" in text


def test_faults_come_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run_profiles(
            RunOptions(profiles=("packed", "packed"), words=("hybrid:a.b=1",), on="quickstart", folder=tmp_path)
        )
    assert {f.where for f in caught.value.faults} == {"hybrid:a.b=1", "PROFILE"}
    with pytest.raises(ConfigError, match="baseline: "):
        compose_all(["baseline"], ["rollout.m=1"], **COMPOSED)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--steps"):
        run_profiles(RunOptions(profiles=("packed",), steps=0, folder=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_profiles_own_words() -> None:
    assert "model.use_remove_padding=false" in own_words("baseline")
    assert 'devices.reward_model.device_mesh=["cpu"]' in own_words("full")
    with pytest.raises(ConfigError, match="no profile"):
        own_words("nothing")


def test_two_profiles_are_measured_on_the_same_lengths(tmp_path: Path) -> None:
    said: list[str] = []
    options = RunOptions(
        profiles=("baseline", "packed"), words=SMALL, on="quickstart", folder=tmp_path, warm_up=1, steps=3, repeats=2
    )
    records, failed = run_profiles(options, said.append)
    assert failed == []
    assert [r.name for r in records] == ["baseline", "packed"]
    for record in records:
        assert all(len(v.samples) == 6 for v in record.values.values())
        assert [len(w) for w in record.extra["warm_up_step_seconds"]] == [1, 1]
        assert read_record(tmp_path / f"{record.name}.json") == record
        seconds = sum(v.samples[0] for n, v in record.values.items() if n.startswith("phase/"))
        assert seconds == pytest.approx(record.values["step_seconds"].samples[0])
    base, packed = records
    assert base.extra["tokens"] == packed.extra["tokens"]
    assert base.extra["tokens"][:3] == base.extra["tokens"][3:], "each process has the same work"
    assert min(base.values["padding_tokens"].samples) > 0
    assert max(packed.values["padding_tokens"].samples) == 0
    assert base.values["transition_bytes_copied"].samples[0] > 0
    assert packed.values["transition_bytes_copied"].samples[0] == 0
    found = compare(records, ["baseline", "packed"])
    assert found.row("tokens_per_second") is not None
    assert sum("warm-up" in s for s in said) == 4
    assert not list(tmp_path.rglob("*.safetensors")), "no checkpoint, no model"


def test_one_that_fails_leaves_the_others_their_records(tmp_path: Path) -> None:
    """The reward function of one profile raises in its first step."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n    raise ValueError('bad day')\n"
    )
    words = (*SMALL, f"baseline:reward.functions.0.path={reward}:score")
    command = ["bench", "run", "baseline", "packed", *words, "--on", "quickstart", "--steps", "1", "--warm-up", "0"]
    done = CliRunner().invoke(app, [*command, "--repeats", "2", "-o", str(tmp_path / "out"), "--json"])
    assert isinstance(done.exception, RunError)
    assert "bad day" in str(done.exception)
    assert "log.txt" in str(done.exception)
    record = json.loads(done.stdout)
    assert record["name"] == "packed"
    assert record["values"]["step_seconds"]["n"] == 2
    assert [f.name for f in (tmp_path / "out").glob("*.json")] == ["packed.json"]
    assert len(list((tmp_path / "out" / "runs").glob("baseline-*"))) == 1, "no second try"


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such thing"):
        run_watched(["bash", "-c", "echo no such thing >&2; exit 3"], tmp_path, lambda *_: None)


def test_utilisation_is_that_of_the_step(tmp_path: Path) -> None:
    seen = Seen(ends={0: 1.0, 1: 3.0, 2: 4.0}, utilisation=[(0.5, 10.0), (1.5, 50.0), (2.5, 70.0), (3.5, 90.0)])
    assert [seen.of_step(n) for n in (1, 2, 3)] == [60.0, 90.0, None]
    (tmp_path / "run").mkdir()
    lines = [{"step": 0, "timing_s/checks": 1.0}, {"step": 1, "timing_s/step": 2.0}]
    (tmp_path / "run" / "timings.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"step": 2')
    steps: list[tuple[int, float]] = []
    watched = run_watched(["sleep", "0.7"], tmp_path, lambda n, s: steps.append((n, s)), lambda: 40.0)
    assert set(watched.ends) == {0, 1}
    assert {share for _, share in watched.utilisation} == {40.0}
    assert steps == [(1, 2.0)]
