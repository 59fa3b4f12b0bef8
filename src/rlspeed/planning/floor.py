"""The shortest time that each phase can take on a machine: FLOPs, bytes of memory and bytes on links, nothing else.

A measured time is never below its floor; how far above says where to look.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlspeed.planning.devices import DeviceMap, Placement, Role
from rlspeed.planning.machine import DeviceKind, Machine
from rlspeed.planning.memory import Phase, RunSize
from rlspeed.planning.shape import ModelShape

# what an Adam step reads and writes per parameter: gradient, master, two moments read; three written; the weight
# written
ADAM_BYTES = 4 * 4 + 3 * 4 + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Seconds of one phase of one step, and what bounds it."""

    phase: Phase
    seconds: float
    bound: Literal["compute", "memory", "link"]


def floor_times(
    devices: DeviceMap,
    shapes: Mapping[Role, ModelShape],
    size: RunSize,
    machine: Machine,
    received: Mapping[int, int] | None = None,
) -> tuple[Floor, ...]:
    """Floors of the phases of one step in which every sequence has its full length.

    Phases on devices that are not in the table of device data, or on the host, are left out. received: bytes of the
    transition into each rank.
    """
    out = []
    actor = _on_device(devices, shapes, Role.ACTOR, machine)
    rollout = _on_device(devices, shapes, Role.ROLLOUT, machine)
    critic = _on_device(devices, shapes, Role.CRITIC, machine)
    if rollout is not None:
        out.append(generation_floor(*rollout, size))
    scoring = [_on_device(devices, shapes, r, machine) for r in (Role.REFERENCE, Role.CRITIC, Role.REWARD)]
    passes = [p for p in (*scoring, None if size.reuses_generation else actor) if p is not None]
    if passes:
        seconds = sum(_flops(shape, size) / (kind.flops * len(place.ranks)) for place, shape, kind in passes)
        out.append(Floor(phase="log-probs", seconds=seconds, bound="compute"))
    if critic is not None:
        out.append(_update_floor("update critic", *critic, size))
    if actor is not None:
        out.append(_update_floor("update actor", *actor, size))
        if received:
            out.append(transition_floor(received, actor[1], actor[2], size, tp=devices.roles[Role.ROLLOUT].tp))
    return tuple(out)


def generation_floor(place: Placement, shape: ModelShape, kind: DeviceKind, size: RunSize) -> Floor:
    """Prefill and decoding of all answers.

    One decoding step of B answers takes at least max(weights / bandwidth, 2 N B / F) and B * context * kv / bandwidth.
    """
    replicas = max(len(place.ranks) // place.tp, 1)
    flops, bandwidth = kind.flops * place.tp, kind.memory_bytes_per_second * place.tp
    answers = math.ceil(size.sequences / replicas)
    batch = answers if size.vllm else min(size.concurrent, answers)
    context = size.prompt_tokens + size.new_tokens / 2
    weights = size.element_bytes * shape.matmul_params
    read = weights / bandwidth
    compute = 2.0 * shape.matmul_params * batch / flops
    cache = batch * context * shape.kv_elements_per_token * size.element_bytes / bandwidth
    steps = size.new_tokens * answers / batch
    prefill = shape.forward_flops(answers * size.prompt_tokens, answers * size.prompt_tokens**2, answers) / flops
    seconds = prefill + steps * (max(read, compute) + cache)
    in_compute = prefill + (steps * compute if compute > read else 0.0)
    return Floor(phase="generation", seconds=seconds, bound="compute" if in_compute > seconds / 2 else "memory")


def transition_floor(
    received: Mapping[int, int], shape: ModelShape, kind: DeviceKind, size: RunSize, *, tp: int = 1
) -> Floor:
    """The busiest rank's bytes over its link, or the copies of what it keeps, whichever takes longer."""
    busiest = max(received.values(), default=0)
    link = busiest / kind.link_bytes_per_second
    kept = max(size.element_bytes * shape.num_params // tp - busiest, 0)
    # a read and a write; on one rank the generator reads the actor's weights
    copied = 2.0 * kept / kind.memory_bytes_per_second if len(received) > 1 else 0.0
    return Floor(phase="transition", seconds=max(link, copied), bound="link" if link > copied else "memory")


def _update_floor(phase: Phase, place: Placement, shape: ModelShape, kind: DeviceKind, size: RunSize) -> Floor:
    """Forward and backward (three times the forward, one more with recomputation), then the optimizer's traffic."""
    ranks = len(place.ranks)
    linear, quadratic = shape.workload()
    tokens = size.sequences * size.longest
    flops = linear * tokens + quadratic * tokens * size.longest
    if size.recompute:
        flops += _flops(shape, size) * max(shape.layers - size.kept_blocks, 0) / shape.layers
    compute = size.epochs * flops / (kind.flops * ranks)
    adam = size.epochs * ADAM_BYTES * shape.num_params / ranks / kind.memory_bytes_per_second
    return Floor(phase=phase, seconds=compute + adam, bound="compute" if compute > adam else "memory")


def _flops(shape: ModelShape, size: RunSize) -> float:
    """One forward pass over the step."""
    return shape.forward_flops(size.sequences * size.longest, size.sequences * size.longest**2)


def _on_device(
    devices: DeviceMap, shapes: Mapping[Role, ModelShape], role: Role, machine: Machine
) -> tuple[Placement, ModelShape, DeviceKind] | None:
    """The role's placement, model and the slowest of its devices' data."""
    place, shape = devices.roles.get(role), shapes.get(role)
    if place is None or shape is None or place.device != "cuda" or not place.ranks:
        return None
    found = [d.kind for d in (machine.device(r) for r in place.ranks) if d is not None]
    kinds = [k for k in found if k is not None]
    if not kinds or len(kinds) != len(place.ranks):
        return None
    return place, shape, min(kinds, key=lambda k: k.flops)
