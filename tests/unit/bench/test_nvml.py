"""NVML through a library that answers as the driver's does."""

from __future__ import annotations

import ctypes
from typing import Any

from rlspeed.bench.nvml import GpuWatch


class Library:
    """Three GPUs; the third one, a MIG slice, tells no utilisation."""

    def __init__(self, init: int = 0) -> None:
        self.init = init
        self.shares = {b"GPU-a": 90, b"GPU-b": 30}
        self.names: list[bytes] = []

    def nvmlInit_v2(self) -> int:
        return self.init

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        if not uuid.startswith((b"GPU", b"MIG")):
            return 6
        self.names.append(uuid)
        handle._obj.value = len(self.names)
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, out: Any) -> int:
        name = self.names[(handle.value or 0) - 1]
        if name not in self.shares:
            return 3
        out._obj.gpu, out._obj.memory = self.shares[name], 1
        return 0


def test_the_mean_of_those_that_answer() -> None:
    assert GpuWatch(["GPU-a", "GPU-b", "MIG-c", "gone"], Library()).sample() == 60.0
    assert GpuWatch(["GPU-b"], Library()).sample() == 30.0
    assert GpuWatch(["MIG-c"], Library()).sample() is None


def test_without_a_driver_there_is_no_number() -> None:
    assert GpuWatch([]).sample() is None
    assert GpuWatch(["GPU-a"], Library(init=9)).sample() is None
    assert GpuWatch(["GPU-a"]).sample() is None
