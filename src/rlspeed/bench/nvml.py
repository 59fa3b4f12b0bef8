"""How busy GPUs are, asked from NVML itself: a call takes microseconds, where nvidia-smi takes long."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

LIBRARY = "libnvidia-ml.so.1"


class _Utilisation(ctypes.Structure):
    """nvmlUtilization_t: shares of the last 1/6 to 1 s in which kernels ran, and memory was used, in %."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuWatch:
    """Utilisation of some GPUs. uuids: as `Device.uuid` names them; those that NVML does not know are left out."""

    def __init__(self, uuids: Sequence[str], library: Any = None) -> None:
        self._library = library
        self._handles: list[ctypes.c_void_p] = []
        if not uuids:
            return
        try:
            self._library = library or ctypes.CDLL(LIBRARY)
            ready = self._library.nvmlInit_v2() == 0
        except (OSError, AttributeError):  # no driver here
            return
        for uuid in uuids if ready else ():
            handle = ctypes.c_void_p()
            if self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) == 0:
                self._handles.append(handle)

    def sample(self) -> float | None:
        """Mean over the GPUs of the share of time with any kernel running, in %; None where nothing can be asked."""
        shares = []
        for handle in self._handles:
            found = _Utilisation()
            if self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(found)) == 0:
                shares.append(float(found.gpu))
        return sum(shares) / len(shares) if shares else None
