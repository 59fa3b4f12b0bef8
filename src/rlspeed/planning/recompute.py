"""How many blocks must compute their activations again in the backward pass for a run to fit its devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlspeed.planning.devices import DeviceMap, Role
from rlspeed.planning.fit import forecast
from rlspeed.planning.machine import Machine
from rlspeed.planning.memory import RunSize
from rlspeed.planning.shape import ModelShape

# of the memory that is free, for what the forecast does not see: fragmentation, kernels' workspaces
SPARE_SHARE = 0.08


def keep_what_fits(
    devices: DeviceMap, shapes: Mapping[Role, ModelShape], size: RunSize, machine: Machine
) -> RunSize | None:
    """`size` with as many kept blocks as every device's memory holds, the same number for actor and critic.

    All blocks when they fit (then recompute is False), none when not even that helps. None when nothing is known: no
    GPU, or models whose sizes cannot be read.
    """
    trained = [shapes[r] for r in (Role.ACTOR, Role.CRITIC) if r in shapes]
    if not trained:
        return None
    layers = max(shape.layers for shape in trained)
    fewest, most = 0, layers
    if not forecast(devices, shapes, size, machine):
        return None
    # more kept blocks never need less memory
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if _fits(devices, shapes, _keeping(size, middle, layers), machine):
            fewest = middle
        else:
            most = middle - 1
    return _keeping(size, fewest, layers)


def _keeping(size: RunSize, kept: int, layers: int) -> RunSize:
    return replace(size, recompute=kept < layers, kept_blocks=kept)


def _fits(devices: DeviceMap, shapes: Mapping[Role, ModelShape], size: RunSize, machine: Machine) -> bool:
    """Whether the updates fit; other phases do not depend on recomputation."""
    for found in forecast(devices, shapes, size, machine):
        updates = [m.peak for m in found.phases if m.phase.startswith("update")]
        if max(updates, default=0) > (1 - SPARE_SHARE) * found.usable_bytes:
            return False
    return True
