"""Steps to values: warm-up apart, no padding in a rate, phases that sum to the step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rlspeed.bench.flops import step_flops
from rlspeed.bench.runlog import read_steps, values_of
from rlspeed.bench.sources import run_record
from rlspeed.config.load import load_profile
from rlspeed.errors import DataError
from rlspeed.planning.probe import read_shape

MakeRun = Callable[[Path, Sequence[float]], Path]


def test_rep_03_warm_up_is_listed_apart(tmp_path: Path, make_run: MakeRun) -> None:
    """rep-03: 10, 1, 1, 1 s with 1000 tokens each: 1000 tokens/s; the plain average would say 307.7."""
    record = run_record(make_run(tmp_path / "run", [10.0, 1.0, 1.0, 1.0]), warm_up=1)
    assert statistics.median(record.values["tokens_per_second"].samples) == 1000.0
    assert record.values["step_seconds"].samples == (1.0, 1.0, 1.0)
    assert record.extra["warm_up_step_seconds"] == [[10.0]]
    assert statistics.median(record.values["answer_tokens_per_second"].samples) == 400.0


def test_phases_sum_to_the_step(tmp_path: Path, make_run: MakeRun) -> None:
    steps = read_steps(make_run(tmp_path / "run", [4.0, 2.0, 8.0]), 1)
    values = values_of(steps.measured)
    phases = {n: v.samples for n, v in values.items() if n.startswith("phase/")}
    assert phases["phase/generation"] == (1.0, 4.0)
    assert phases["phase/other"] == (0.5, 2.0)
    assert [sum(p) for p in zip(*phases.values())] == [2.0, 8.0]
    assert "critic_step_seconds" not in values
    assert values["padding_tokens"].samples == (7.0, 7.0)
    assert values["peak_host_memory"].unit == "GiB"


def test_a_folder_without_steps_is_no_run(tmp_path: Path, make_run: MakeRun) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_steps(tmp_path, 0)
    with pytest.raises(DataError, match="no training step"):
        read_steps(make_run(tmp_path / "none", []), 0)
    with pytest.raises(DataError, match="2 of warm-up"):
        run_record(make_run(tmp_path / "short", [1.0, 1.0]), warm_up=2)


def test_flops_are_those_of_the_formulae(tmp_path: Path, make_run: MakeRun) -> None:
    """Actor and critic of the quickstart: 2 epochs of training each, three passes without gradient, generation."""
    profile = load_profile("quickstart").profile
    shape = read_shape("quickstart")
    assert shape is not None
    row = {"tokens/prompt": 600.0, "tokens/response": 400.0, "tokens/squares": 5e4, "gen/prefill_tokens": 150.0}
    row |= {f"timing_s/{p}": 1.0 for p in ("old_log_prob", "ref", "values", "update_critic", "update_actor")}
    found = step_flops(row, profile)
    assert found is not None
    n, critic = shape.matmul_params, shape.with_head("value").matmul_params
    attention = shape.layers * shape.heads * shape.head_dim * 5e4
    assert found.update == pytest.approx(2 * (6 * (n + critic) * 1000 + 2 * 7 * attention))
    assert found.scoring == pytest.approx(2 * 1000 * (2 * n + critic) + 3 * 2 * attention)
    body = shape.layers * shape.layer_matmul_params
    assert found.generation == pytest.approx(2 * body * 550 + 2 * shape.head_params * 400 + 2 * attention)
    rows = [{**row, "timing_s/step": 10.0}]
    values = values_of(rows, profile=profile, devices=2, peak=1e12)
    assert values["mfu_step"].samples[0] == pytest.approx(found.total / 10.0 / 2 / 1e12)
    assert values["mfu_update"].samples[0] == pytest.approx(found.update / 2.0 / 2 / 1e12)
    assert "mfu_step" not in values_of(rows, profile=profile), "a CPU has no peak in the table"
