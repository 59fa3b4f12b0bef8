"""Memory that comes and goes while the tensors in it stay: for weights that only one phase of a step needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_ALIGNED = 256  # bytes; what kernels that load by blocks ask for


class Room:
    """Tensors side by side in one piece of memory, which `free` gives back and `open` takes anew (undefined contents).

    The tensors keep their identity; their address may change with each `open`.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
        starts, end = {}, 0
        for name, size in sizes.items():
            starts[name], end = end, end + -(-size // _ALIGNED) * _ALIGNED
        self._flat = torch.empty(end, dtype=torch.uint8, device=device)
        self.num_bytes = end
        self.tensors: dict[str, torch.Tensor] = {
            name: self._flat[starts[name] : starts[name] + sizes[name]].view(dtype).view(shape)
            for name, shape in shapes.items()
        }

    @property
    def is_open(self) -> bool:
        """True while the tensors have memory."""
        return self._flat.untyped_storage().nbytes() == self.num_bytes

    def open(self) -> None:
        """Take memory, unless it is there."""
        if not self.is_open:
            self._flat.untyped_storage().resize_(self.num_bytes)

    def free(self) -> None:
        """Give the memory back; nobody may read the tensors until the next `open`."""
        self._flat.untyped_storage().resize_(0)


class HostStay:
    """Tensors that spend a while in host memory: `leave` moves their contents there and frees the device's.

    The tensors keep their identity, each has a storage of its own. The host buffers (page-locked for a GPU) are made
    once. Coming back is started by `come_back` on a stream of its own and has ended when `settle` returns.
    """

    def __init__(self) -> None:
        self._away: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._buffers: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._arriving = False

    @property
    def num_bytes(self) -> int:
        """What is away now."""
        return sum(host.nbytes for _, host in self._away)

    def leave(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move `tensors` to the host; returns when their device memory is free. Nothing to do for those away."""
        self.settle()
        if self._away:
            return
        for number, tensor in enumerate(tensors):
            key = (number, tensor.shape, tensor.dtype)
            if key not in self._buffers:
                pinned = tensor.device.type == "cuda"
                self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[key].copy_(tensor, non_blocking=True)
            self._away.append((tensor, self._buffers[key]))
        for device in {t.device for t, _ in self._away if t.device.type == "cuda"}:
            torch.cuda.synchronize(device)
        for tensor, _ in self._away:
            tensor.untyped_storage().resize_(0)

    def come_back(self) -> None:
        """Start to fill the tensors again."""
        if not self._away:
            return
        device = self._away[0][0].device
        for tensor, host in self._away:
            tensor.untyped_storage().resize_(host.nbytes)
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))  # what the new memory held before is done with
            with torch.cuda.stream(self._stream):
                self._fill()
        else:
            self._fill()
        self._arriving, self._away = True, []

    def settle(self) -> None:
        """Everything that comes back is there before what is done next."""
        if self._arriving and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._arriving = False

    def _fill(self) -> None:
        for tensor, host in self._away:
            tensor.copy_(host, non_blocking=True)


def storages(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The whole storage behind each tensor as bytes, each once: what `HostStay` moves where tensors are views."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in found:
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return list(found.values())


@dataclass(slots=True)
class Peak:
    """Most memory in tensors during a `peak_of`, and what was there when it began; 0 where nobody counts it."""

    num_bytes: int = 0
    before: int = 0


_before: dict[torch.device, tuple[int, int]] = {}


def run_peak(device: torch.device) -> tuple[int, int]:
    """(allocated, reserved) bytes of the CUDA device, peaks of the whole run: torch forgets them in a `peak_of`."""
    then = _before.get(device, (0, 0))
    now = (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    return max(then[0], now[0]), max(then[1], now[1])


@contextmanager
def peak_of(device: torch.device) -> Iterator[Peak]:
    """Memory peak of the block, on a CUDA device."""
    peak = Peak()
    if device.type != "cuda":
        yield peak
        return
    _before[device] = run_peak(device)
    torch.cuda.reset_peak_memory_stats(device)
    peak.before = torch.cuda.memory_allocated(device)
    try:
        yield peak
    finally:
        peak.num_bytes = torch.cuda.max_memory_allocated(device)
