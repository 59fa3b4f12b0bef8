"""Timing on a device: warm-up first, events around each call, one synchronisation at the end."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def device_ms(run: Callable[[], object], *, budget_seconds: float) -> dict[str, float]:
    """n, min, median and max in ms of `run` on the CUDA device.

    Three calls warm up and are not counted; 5 to 30 follow, as many as `budget_seconds` holds.
    """
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    count = max(5, min(30, int(budget_seconds / (time.perf_counter() - start))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for before, after in events:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    times = sorted(before.elapsed_time(after) for before, after in events)
    return {"n": count, "min": times[0], "median": times[count // 2], "max": times[-1]}
