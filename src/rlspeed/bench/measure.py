"""Timing on a device: warm-up first, events around each call, one synchronisation at the end; and traces."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


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


def trace_events(run: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Run once under torch's profiler with shapes; the events of its trace file, for `kernels.classify`."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        run()
        if cuda:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events
