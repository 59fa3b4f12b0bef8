from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from rlspeed.training import plots
from rlspeed.training.loggers import Loggers


def run(folder: Path, steps: int) -> Path:
    """Files of a run with validation at step 0 and at the end, written without waiting for the disk."""
    metrics, timings = [{"step": 0, "val-core/openai/gsm8k/acc/mean@1": 0.2}], [{"step": 0, "timing_s/testing": 9.0}]
    for s in range(1, steps + 1):
        metrics.append(
            {
                "step": s,
                "critic/score/mean": s / steps,
                "critic/rewards/mean": s / steps,
                "actor/kl": None if s == 1 else 0.001 * s,
                "actor/entropy": 1.0,
                "response_length/mean": 20.0,
                "response_length/min": 10.0,
                "response_length/max": 30.0,
            }
        )
        times = {"timing_s/step": 3.0, "timing_s/gen": 2.0, "timing_s/update_actor": 0.9, "timing_s/odd": 0.1}
        timings.append({"step": s, **times, "perf/processed_tokens_per_s": 1000.0 * s})
    metrics[-1]["val-core/openai/gsm8k/acc/mean@1"] = 0.7
    for name, rows in (("metrics.jsonl", metrics), ("timings.jsonl", timings)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("steps", [1, 5, 80])
def test_every_picture_is_written_and_shows_something(tmp_path: Path, steps):
    written = plots.write_plots(run(tmp_path, steps))
    names = ["overview", "reward", "kl", "lengths", "throughput", "phases"]
    assert written == [tmp_path / "plots" / f"{n}.png" for n in names]
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == sorted(f"{n}.png" for n in names)
    for path in written:
        pixels = imread(path)[..., :3]
        assert min(pixels.shape[:2]) > 300
        assert 0.005 < float((pixels.min(axis=2) < 0.97).mean()) < 0.9


def test_drawing_changes_no_global_setting(tmp_path: Path):
    before = dict(matplotlib.rcParams)
    plots.write_plots(run(tmp_path, 3))
    assert dict(matplotlib.rcParams) == before


def test_what_is_not_there_is_not_drawn(tmp_path: Path):
    assert plots.write_plots(tmp_path) == []
    Loggers(tmp_path).log(1, {"critic/score/mean": 1.0})
    assert [p.name for p in plots.write_plots(tmp_path)] == ["overview.png", "reward.png"]


def test_rows_of_both_files_meet_by_step(tmp_path: Path):
    rows = plots.read_run(run(tmp_path, 3))
    assert list(rows) == [0, 1, 2, 3]
    assert "actor/kl" not in rows[1], "what was not finite is left out"
    assert (rows[3]["actor/kl"], rows[3]["timing_s/gen"]) == (0.003, 2.0)


def test_phases_stack_up_to_their_sum(tmp_path: Path):
    """Step 0 has no training step, so its validation is not among the bars; phases without a colour come last."""
    axes = Figure().add_subplot()
    assert plots.FIGURES["phases"][0](axes, plots.read_run(run(tmp_path, 4)))
    tops = [bar.get_y() + bar.get_height() for bar in axes.patches]
    assert max(tops) == pytest.approx(3.0)
    assert len(axes.patches) == 3 * 4
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["odd", "update_actor", "gen"]


def test_many_steps_are_smoothed_over_the_raw_values(tmp_path: Path):
    axes = Figure().add_subplot()
    plots.FIGURES["reward"][0](axes, plots.read_run(run(tmp_path, 80)))
    raw, line = (np.asarray(x.get_ydata()) for x in axes.lines)
    np.testing.assert_allclose(raw, np.arange(1, 81) / 80)
    np.testing.assert_allclose(line[10:70], raw[10:70])


def test_smooth():
    np.testing.assert_allclose(plots.smooth(np.array([0.0, 3.0, 6.0, 0.0]), 3), [1.5, 3.0, 3.0, 3.0])
