"""Traced steps: ranges of clock and update in the file, the picture, kernels put to the ranges that launched them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch import nn
from torch.profiler import profile

from rlspeed.config.schema import Optimizer
from rlspeed.engine.packed import pack_sequences
from rlspeed.engine.world import World
from rlspeed.errors import ConfigError
from rlspeed.training import timeline
from rlspeed.training.clock import Clock
from rlspeed.training.optim import MasterAdamW
from rlspeed.training.profile import StepProfiler, read_timeline
from rlspeed.training.roles import Trainable
from rlspeed.training.timeline import Kernel, Lane, Span, Timeline, busy_share, device_spans, draw_lanes, draw_timeline

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), mesh=None)


def one_step(clock: Clock) -> None:
    """Two phases, the second with an update over two micro-batches."""
    model = nn.Linear(3, 1)
    role = Trainable(model, MasterAdamW(model, Optimizer(), total_steps=9))
    with clock.phase("step"):
        with clock.phase("gen"):
            model(torch.ones(2, 3))
        with clock.phase("update_actor"):
            batch = pack_sequences([[1, 2, 3]], [1])
            role.update([batch, batch], lambda _: model(torch.ones(2, 3)).sum(), global_tokens=4)


def test_a_named_step_is_traced_and_no_other(tmp_path: Path) -> None:
    profiler, clock = StepProfiler(tmp_path, [2], 3, WORLD), Clock(WORLD.device)
    with profiler.step(1):
        one_step(clock)
    assert profiler.written == []
    with profiler.step(2):
        one_step(clock)
    trace, picture = profiler.written
    assert sorted(p.name for p in (tmp_path / "profile").iterdir()) == ["step_2_rank_0.json.gz", "step_2_rank_0.png"]
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    assert names.count("phase/gen") == names.count("phase/update_actor") == names.count("update/optimizer") == 1
    assert names.count("update/forward") == names.count("update/backward") == 2
    pixels = imread(picture)
    assert pixels.shape[1] > 1000
    assert pixels[..., :3].std() > 0.05
    with profiler.step(3):
        pass
    assert profiler.written == []


def test_the_timeline_holds_the_ranges_in_order() -> None:
    with profile() as profiler:
        one_step(Clock(WORLD.device))
    timeline = read_timeline(profiler)
    assert [s.name for s in timeline.phases()] == ["gen", "update_actor"]
    assert [s.name for s in timeline.updates()] == ["forward", "backward", "forward", "backward", "optimizer"]
    gen, update = timeline.phases()
    assert 0.0 <= gen.start < gen.end <= update.start < update.end <= timeline.seconds
    assert all(update.start <= s.start < s.end <= update.end for s in timeline.updates())


def test_a_failing_step_leaves_the_profiler_off_and_no_file(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, [1], 1, WORLD)
    with pytest.raises(KeyError), profiler.step(1):
        raise KeyError
    assert not (tmp_path / "profile").exists()
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_step_that_the_run_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        StepProfiler(tmp_path, [2, 9], 4, WORLD)
    assert "run.profile_steps: 9, the run has 4 steps" in str(caught.value)


def test_kernels_belong_to_the_range_that_launched_them() -> None:
    """The device runs late: kernels of the forward run while the host is in the backward pass."""
    ranges = [Span(name="forward", start=0.0, end=1.0), Span(name="backward", start=1.0, end=2.0)]
    ranges.append(Span(name="optimizer", start=5.0, end=6.0))
    kernels = [Kernel(start=0.5, end=1.5, launch=1), Kernel(start=1.5, end=1.8, launch=2)]
    kernels += [Kernel(start=1.8, end=4.0, launch=3), Kernel(start=4.0, end=4.5, launch=4)]
    kernels += [Kernel(start=4.5, end=4.6, launch=9)]  # no launch known
    launches = {1: 0.1, 2: 0.9, 3: 1.2, 4: 3.0}  # 4: between the ranges
    assert device_spans(ranges, kernels, launches) == [
        Span(name="forward", start=0.5, end=1.8),
        Span(name="backward", start=1.8, end=4.0),
    ]


def test_busy_counts_overlapping_kernels_once() -> None:
    kernels = [Kernel(start=0.0, end=2.5, launch=0), Kernel(start=1.0, end=2.0, launch=0)]
    kernels.append(Kernel(start=3.5, end=4.0, launch=0))
    assert busy_share(kernels, 4.0, 4) == pytest.approx([1.0, 1.0, 0.5, 0.5])
    assert busy_share([], 4.0, 2) == pytest.approx([0.0, 0.0])
    assert float(np.mean(busy_share([Kernel(start=0.1, end=0.4, launch=0)], 1.0, 7))) == pytest.approx(0.3)


def test_a_timeline_with_a_device_is_drawn(tmp_path: Path) -> None:
    names = ("phase/step", "phase/gen", "phase/odd", "update/forward")
    ranges = tuple(Span(name=n, start=0.1 * i, end=1.0) for i, n in enumerate(names))
    timeline = Timeline(ranges=ranges, kernels=(Kernel(start=0.4, end=0.9, launch=1),), launches={1: 0.35})
    picture = draw_timeline(timeline, tmp_path / "a" / "b.png", "one")
    assert imread(picture).shape[1] > 1000
    assert [p.name for p in picture.parent.iterdir()] == ["b.png"]
    assert draw_timeline(Timeline(ranges=(), kernels=(), launches={}), tmp_path / "c.png", "empty").exists()


def test_all_ranks_are_drawn_in_one_picture(tmp_path: Path) -> None:
    """A phase of which a rank waited for the end alone is idle; seconds count from the first move of any rank."""
    spans = [Span(name="gen", start=-9.0, end=-5.0), Span(name="idle", start=-8.9, end=-5.0)]
    works = [Span(name="values", start=-5.0, end=-1.0), Span(name="idle", start=-1.5, end=-1.0)]
    lanes = [Lane(label="rank 0", spans=works), Lane(label="rank 1", spans=[*spans, *works])]
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "_lane", lambda axes, row, own, colours, seconds: drawn.append((own, seconds)))
        assert draw_lanes(lanes, tmp_path / "ranks.png", "all").exists()
    assert [[s.name for s in own] for own, _ in drawn] == [["values", "idle"], ["values", "idle", "idle"]]
    assert {seconds for _, seconds in drawn} == {9.0}
    assert drawn[1][0][0].start == 4.0
    assert draw_lanes(lanes, tmp_path / "again.png", "all").exists()
    assert lanes[0].before(1.0).spans[0].end == -2.0
