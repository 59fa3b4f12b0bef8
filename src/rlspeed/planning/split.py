"""Roles together on all devices, or apart: the least time of a step either way, by the floors of each role's phases.

Roles on the same rank work one after the other, on others at the same time; generation is before and an update after
all scores. What sharded weights cost on the links is in it: it does not shrink with more ranks, so it is what a split
saves. A role that waits is what a split pays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rlspeed.planning.devices import DeviceMap, Placement, Role
from rlspeed.planning.fit import forecast
from rlspeed.planning.floor import floor_times
from rlspeed.planning.machine import Machine
from rlspeed.planning.memory import RunSize, state_shards
from rlspeed.planning.shape import ModelShape

MODELS = (Role.ACTOR, Role.CRITIC, Role.REFERENCE)
CLOSE = 0.03  # two floors nearer than this share of the larger say nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One map. seconds: least time of a step; busy: share of it in which a device works, mean over devices."""

    devices: DeviceMap
    seconds: float
    busy: float
    fits: bool

    @property
    def text(self) -> str:
        """Roles with their ranks."""
        places = [(role, self.devices.roles[role].ranks) for role in MODELS if role in self.devices.roles]
        return "; ".join(f"{role} on {', '.join(map(str, ranks))}" for role, ranks in places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """together: all models on all devices. apart: as the map has it, or the best cut into actor's and critic's."""

    together: Way
    apart: Way
    given_apart: bool

    @property
    def winner(self) -> str:
        """`together`, `apart` or `neither`: what does not fit loses, what is close is undecided."""
        a, b = self.together, self.apart
        if a.fits != b.fits:
            return "together" if a.fits else "apart"
        if abs(a.seconds - b.seconds) <= CLOSE * max(a.seconds, b.seconds):
            return "neither"
        return "together" if a.seconds < b.seconds else "apart"

    def lines(self) -> list[str]:
        """What `check-devices` prints."""
        both = (("together", self.together), ("apart, as mapped" if self.given_apart else "apart", self.apart))
        said = [
            f"split: {name}: at least {way.seconds:.3g} s a step, devices busy {way.busy:.0%}, "
            f"{'fits' if way.fits else 'does not fit'} ({way.text})"
            for name, way in both
        ]
        verdict = {
            "neither": f"the two are within {CLOSE:.0%}: measure both",
            "together": "all models on all devices win",
            "apart": "models on devices of their own win",
        }[self.winner]
        return [*said, f"split: {verdict}"]


def compare_split(
    devices: DeviceMap, shapes: Mapping[Role, ModelShape], size: RunSize, machine: Machine
) -> Comparison | None:
    """Both ways on the devices of the map; None without a critic or reference, on one device, or on unknown ones."""
    roles = [role for role in MODELS if role in devices.roles and role in shapes]
    ranks = tuple(sorted({r for role in roles for r in devices.roles[role].ranks}))
    if len(roles) < 2 or len(ranks) < 2 or any(devices.roles[role].device != "cuda" for role in roles):
        return None
    given_apart = len({devices.roles[role].ranks for role in roles}) > 1
    together = _way(_moved(devices, dict.fromkeys(roles, ranks)), shapes, size, machine)
    if given_apart:
        apart = _way(devices, shapes, size, machine)
    else:
        cuts = [_way(_cut(devices, roles, ranks, n), shapes, size, machine) for n in range(1, len(ranks))]
        known = [way for way in cuts if way is not None]
        apart = min(known, key=lambda way: (not way.fits, way.seconds)) if known else None
    if together is None or apart is None:
        return None
    return Comparison(together=together, apart=apart, given_apart=given_apart)


def step_seconds(
    devices: DeviceMap, shapes: Mapping[Role, ModelShape], size: RunSize, machine: Machine
) -> tuple[float, float] | None:
    """Least seconds of a step, and the mean share of them in which a device works; None for unknown devices."""
    actor = devices.roles[Role.ACTOR]
    generation = _floors(devices, shapes, size, machine, (Role.ROLLOUT,)).get("generation")
    if generation is None:
        return None
    scores: list[tuple[tuple[int, ...], float]] = []
    updates: list[tuple[tuple[int, ...], float]] = []
    for role in MODELS:
        place, shape = devices.roles.get(role), shapes.get(role)
        if place is None or shape is None:
            continue
        found = _floors(devices, shapes, replace(size, reuses_generation=False), machine, (role,))
        gather = _gather_seconds(role, place, shape, size, machine)
        if role is not Role.ACTOR or not size.reuses_generation:
            scores.append((place.ranks, max(found.get("log-probs", 0.0), gather)))
        if role is not Role.REFERENCE:
            # gathered for the forward and the backward pass; gradients are twice as large at the most
            update = found.get(f"update {role}", 0.0)
            updates.append((place.ranks, max(update, 4 * gather * size.epochs)))
    total = generation + _longest(scores) + _longest(updates)
    worked = generation * len(actor.ranks) + sum(len(r) * s for r, s in (*scores, *updates))
    everyone = {r for place in devices.roles.values() if place.device == "cuda" for r in place.ranks}
    return total, worked / (total * len(everyone))


def _longest(works: Iterable[tuple[tuple[int, ...], float]]) -> float:
    """Seconds of the busiest rank."""
    load: dict[int, float] = {}
    for ranks, seconds in works:
        for rank in ranks:
            load[rank] = load.get(rank, 0.0) + seconds
    return max(load.values(), default=0.0)


def _gather_seconds(role: Role, place: Placement, shape: ModelShape, size: RunSize, machine: Machine) -> float:
    """One pass over all bins: FSDP2 brings every rank the weights that it lacks, once per bin."""
    shards = state_shards(role, place) // place.tp
    kinds = [d.kind for d in (machine.device(r) for r in place.ranks) if d is not None and d.kind is not None]
    if shards < 2 or not kinds:
        return 0.0
    bins = -(-size.sequences * size.longest // (size.micro_tokens * max(place.dp, 1)))
    lacking = size.element_bytes * shape.num_params / place.tp * (1.0 - 1.0 / shards)
    return bins * lacking / min(k.link_bytes_per_second for k in kinds)


def _floors(
    devices: DeviceMap, shapes: Mapping[Role, ModelShape], size: RunSize, machine: Machine, roles: tuple[Role, ...]
) -> dict[str, float]:
    """Floors of phases as if these roles alone were there."""
    alone = DeviceMap(world_size=devices.world_size, roles={r: devices.roles[r] for r in roles if r in devices.roles})
    return {f.phase: f.seconds for f in floor_times(alone, shapes, size, machine)}


def _way(devices: DeviceMap, shapes: Mapping[Role, ModelShape], size: RunSize, machine: Machine) -> Way | None:
    known = step_seconds(devices, shapes, size, machine)
    if known is None:
        return None
    fits = all(f.fits for f in forecast(devices, shapes, size, machine))
    return Way(devices=devices, seconds=known[0], busy=known[1], fits=fits)


def _cut(devices: DeviceMap, roles: list[Role], ranks: tuple[int, ...], first: int) -> DeviceMap:
    """The actor on the first ranks; critic, or without one the reference, on the others."""
    other = Role.CRITIC if Role.CRITIC in roles else Role.REFERENCE
    return _moved(devices, {role: ranks[first:] if role is other else ranks[:first] for role in roles})


def _moved(devices: DeviceMap, to: Mapping[Role, tuple[int, ...]]) -> DeviceMap:
    """Roles on other ranks: degrees stay where they divide them, sharding and copies as they were."""
    out = dict(devices.roles)
    for role, ranks in to.items():
        out[role] = _on(devices.roles[role], ranks)
    if Role.ROLLOUT in out:
        out[Role.ROLLOUT] = _on(out[Role.ROLLOUT], out[Role.ACTOR].ranks)
    return DeviceMap(world_size=devices.world_size, roles=out)


def _on(place: Placement, ranks: tuple[int, ...]) -> Placement:
    keeps = len(ranks) % (place.tp * place.sp) == 0
    tp, sp = (place.tp, place.sp) if keeps else (1, 1)
    per_copy = len(ranks) // (tp * sp)
    whole = place.replicas > 1 and place.replicas == place.dp
    copies = per_copy if whole else place.replicas if per_copy % place.replicas == 0 else 1
    return replace(place, ranks=ranks, tp=tp, sp=sp, replicas=copies)
