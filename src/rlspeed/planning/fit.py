"""Does the run fit on its devices, and if not, which change is the cheapest that makes it fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rlspeed.errors import Fault
from rlspeed.planning.device_rules import CONTEXT_BYTES
from rlspeed.planning.devices import DeviceMap, Placement, Role
from rlspeed.planning.machine import GIB, Device, Machine
from rlspeed.planning.memory import Memory, RunSize, predict_memory
from rlspeed.planning.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Predicted memory of one rank's device.

    usable_bytes: of the device, without what CUDA and NCCL need beside torch. advice: the change that makes it fit;
    empty when it fits, or when no change that is known does.
    """

    rank: int
    device: Device
    usable_bytes: int
    phases: tuple[Memory, ...]
    advice: str = ""

    @property
    def peak(self) -> Memory:
        """The phase that needs most."""
        return max(self.phases, key=lambda m: m.peak)

    @property
    def fits(self) -> bool:
        """True when every phase does."""
        return self.peak.peak <= self.usable_bytes


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a change may change."""

    devices: DeviceMap
    size: RunSize


def forecast(
    devices: DeviceMap, shapes: Mapping[Role, ModelShape], size: RunSize, machine: Machine
) -> tuple[Forecast, ...]:
    """One forecast for each rank that has a GPU and a role whose model is known."""
    out: list[Forecast] = []
    for rank in devices.device_ranks:
        device = machine.device(rank)
        if device is None:
            continue
        phases = predict_memory(devices, shapes, size, rank, device_bytes=device.memory_bytes)
        if not phases:
            continue
        usable = min(device.memory_bytes, device.free_bytes) - CONTEXT_BYTES
        same = [f for f in out if (f.usable_bytes, f.phases) == (usable, phases)]
        now = Forecast(rank=rank, device=device, usable_bytes=usable, phases=phases)
        if same:
            now = replace(now, advice=same[0].advice)
        elif not now.fits:
            now = replace(now, advice=cheapest_change(devices, shapes, size, rank, device, usable))
        out.append(now)
    return tuple(out)


def memory_faults(forecasts: tuple[Forecast, ...]) -> list[Fault]:
    """Devices whose memory does not suffice, the same finding of several ranks together."""
    by_text: dict[tuple[str, str], list[int]] = {}
    for f in forecasts:
        if not f.fits:
            need, have = f.peak.peak / GIB, f.usable_bytes / GIB
            found = f"{f.peak.phase} needs {need:.1f} GiB, {f.device.name} has {have:.1f} GiB for it"
            by_text.setdefault((found, f.advice), []).append(f.rank)
    return [
        Fault(
            where=f"memory of rank {', '.join(map(str, ranks))}",
            found=found,
            fix=advice or "a smaller model, or more and larger devices",
        )
        for (found, advice), ranks in by_text.items()
    ]


def cheapest_change(
    devices: DeviceMap, shapes: Mapping[Role, ModelShape], size: RunSize, rank: int, device: Device, usable: int
) -> str:
    """The first change, cheapest in time first, with which the rank fits; else a series of them; else nothing."""

    def fits(plan: _Plan) -> bool:
        phases = predict_memory(plan.devices, shapes, plan.size, rank, device_bytes=device.memory_bytes)
        return max(m.peak for m in phases) <= usable

    start = _Plan(devices, size)
    changes = [(text, change) for text, change in _CHANGES if change(start) != start]
    for text, change in changes:
        if fits(change(start)):
            return text.format(size=change(start).size)
    plan, texts = start, []
    for text, change in changes:
        plan = change(plan)
        texts.append(text.format(size=plan.size))
        if fits(plan):
            return "all of: " + "; ".join(texts)
    return ""


def _fewer_tokens(plan: _Plan) -> _Plan:
    """Micro-batches of one sequence of full length."""
    return replace(plan, size=replace(plan.size, micro_tokens=min(plan.size.micro_tokens, plan.size.longest)))


def _packed(plan: _Plan) -> _Plan:
    if not plan.size.padded:
        return plan
    return replace(plan, size=replace(plan.size, padded=False, micro_tokens=max(4096, plan.size.longest)))


def _fewer_answers(plan: _Plan) -> _Plan:
    return replace(plan, size=replace(plan.size, concurrent=min(plan.size.concurrent, 32)))


def _recompute(plan: _Plan) -> _Plan:
    return replace(plan, size=replace(plan.size, recompute=True))


def _half_precision(plan: _Plan) -> _Plan:
    return replace(plan, size=replace(plan.size, element_bytes=2))


def _idle_on_host(plan: _Plan) -> _Plan:
    idle = (Role.REFERENCE, Role.REWARD, Role.CRITIC)
    return _for_roles(plan, idle, lambda place: replace(place, rests_on_host=True))


def _all_on_host(plan: _Plan) -> _Plan:
    return _for_roles(plan, (Role.ACTOR, Role.CRITIC, Role.ROLLOUT), lambda place: replace(place, host_params=True))


def _for_roles(plan: _Plan, roles: tuple[Role, ...], change: Callable[[Placement], Placement]) -> _Plan:
    found = {r: change(p) if r in roles and p.device == "cuda" else p for r, p in plan.devices.roles.items()}
    return replace(plan, devices=replace(plan.devices, roles=found))


_CHANGES: tuple[tuple[str, Callable[[_Plan], _Plan]], ...] = (
    ("model.use_remove_padding: true", _packed),
    ("packing.capacity: {size.micro_tokens} (smaller micro-batches)", _fewer_tokens),
    ("rollout.max_concurrent: {size.concurrent}", _fewer_answers),
    ("model.model_dtype: bf16", _half_precision),
    ("use_cpu_offload: true for critic, reference and reward_model", _idle_on_host),
    ("model.activation_checkpointing: true (about a third more time in updates)", _recompute),
    ("fsdp_config.cpu_offload: true for actor and critic (slow)", _all_on_host),
)
