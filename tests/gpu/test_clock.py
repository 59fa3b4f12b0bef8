"""Time and memory of phases on a real device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rlspeed.training.clock import Clock
from rlspeed.training.metrics import StepMetrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_equal_work_takes_equal_time() -> None:
    """rep-05: the second phase ends with .item(); the first one's kernels are not billed to it, and the sum is the
    step's (2 %).
    """
    device = torch.device("cuda", 0)
    clock = Clock(device)
    matrix = torch.randn(4096, 4096, device=device)

    def work() -> torch.Tensor:
        out = matrix
        for _ in range(40):
            out = (out @ matrix) * 1e-2
        return out

    work()
    with clock.phase("step"):
        with clock.phase("gen"):
            work()
        with clock.phase("update_actor"):
            work().sum().item()
    seconds = clock.take()
    assert 0.5 < seconds["gen"] / seconds["update_actor"] < 2.0
    assert seconds["gen"] + seconds["update_actor"] == pytest.approx(seconds["step"], rel=0.02)


def test_memory_that_was_freed_is_in_the_peak() -> None:
    """rep-06: a step that takes 1 GiB and frees it reports what was there plus 1 GiB; a later step not less."""
    device = torch.device("cuda", 0)
    resident = torch.cuda.memory_allocated(device) / (1 << 30)
    peaks = []
    for size in (1 << 30, 1):
        block = torch.empty(size, dtype=torch.uint8, device=device)
        del block
        metrics = StepMetrics()
        metrics.add_memory(device)
        peaks.append(metrics.reduce(lambda value: [value])["perf/max_memory_allocated_gb"])
    assert peaks[0] >= resident + 1.0
    assert peaks[1] == peaks[0]


def test_cuda_was_up_before_the_rank_chose() -> None:
    """dev-05: a child that counted the devices first still lands on the device with its number."""
    last = torch.cuda.device_count() - 1
    script = (
        "import torch; torch.cuda.device_count(); torch.zeros(1, device='cuda:0')\n"
        "from rlspeed.engine.world import start_world\n"
        "world = start_world(use_cpu=False, hang_timeout_seconds=10.0)\n"
        "print(world.device.index, torch.cuda.current_device(), torch.zeros(1, device='cuda').device.index)\n"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"LOCAL_RANK": str(last)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(last)] * 3
