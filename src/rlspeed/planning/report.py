"""All that can be known about a run before it starts, in one value, for `check-devices` and `train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlspeed.config.device_schema import ActorPlacement, DeviceMapping
from rlspeed.config.schema import Profile
from rlspeed.errors import Fault, RlspeedError
from rlspeed.planning.device_rules import Situation, check_run, notes
from rlspeed.planning.devices import ALL_ROLES, DeviceMap, Role, build_device_map, uses_vllm
from rlspeed.planning.fit import Forecast, forecast, memory_faults
from rlspeed.planning.floor import Floor, floor_times
from rlspeed.planning.machine import Machine
from rlspeed.planning.memory import RunSize, run_size
from rlspeed.planning.probe import read_shape
from rlspeed.planning.recompute import keep_what_fits
from rlspeed.planning.reshard import DTYPE_BYTES, ReshardPlan, plan_reshard
from rlspeed.planning.shape import ModelShape
from rlspeed.planning.split import Comparison, compare_split
from rlspeed.planning.transition import actor_way, received_bytes, transition_requests

MOST_PLANNED_RANKS = 64  # more are only counted: a list of millions of moves helps nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """devices and machine as they were looked at, and what follows.

    faults: what has to be mended; memory_faults: devices whose predicted peak does not fit. plan: of the transition,
    None when no model is known or the map cannot work. kept_blocks: with activation_checkpointing: auto, blocks of each
    model that do not compute their activations again; None without it, or when nothing is known of device or model.
    comparison: of the models together and apart, None where there is nothing to compare.
    """

    devices: DeviceMap
    machine: Machine
    faults: tuple[Fault, ...]
    memory_faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    forecasts: tuple[Forecast, ...]
    floors: tuple[Floor, ...]
    received: Mapping[int, int]
    plan: ReshardPlan | None
    vllm: bool
    kept_blocks: int | None = None
    comparison: Comparison | None = None

    @property
    def problems(self) -> tuple[Fault, ...]:
        """Every fault, those of memory last."""
        return self.faults + self.memory_faults

    def as_json(self) -> dict[str, Any]:
        """The report in plain values: bytes and seconds, ranks as numbers."""
        return {
            "ok": not self.problems,
            "problems": [_fault(f) for f in self.problems],
            "notes": list(self.notes),
            "world_size": self.devices.world_size,
            "roles": {str(role): _placement(place) for role, place in self.devices.roles.items()},
            "devices": [
                {
                    "rank": i,
                    "entry": d.entry,
                    "name": d.name,
                    "memory_bytes": d.memory_bytes,
                    "free_bytes": d.free_bytes,
                }
                for i, d in enumerate(self.machine.devices)
            ],
            "memory": [_forecast(f) for f in self.forecasts],
            "floors": [{"phase": f.phase, "seconds": f.seconds, "bound": f.bound} for f in self.floors],
            "split": None if self.comparison is None else _comparison(self.comparison),
            "transition": {"received": dict(self.received), **_plan(self.plan)},
        }


def inspect_run(
    mapping: DeviceMapping,
    machine: Machine,
    *,
    profile: Profile | None = None,
    shapes: Mapping[Role, ModelShape] | None = None,
    world_size: int | None = None,
) -> Report:
    """Check and predict everything.

    profile: None when only the mapping is known; then all roles count and nothing is said about models. shapes: of the
    models that could be read. world_size: of the run; None: what the mapping needs, or one rank per device.
    """
    roles = ALL_ROLES if profile is None else used_roles(profile)
    vllm = uses_vllm(mapping, profile is not None and profile.model.actor.use_vllm_for_generation)
    if world_size is None and not names_devices(mapping):
        world_size = max(machine.num_devices * machine.nodes, 1)
    devices = build_device_map(
        mapping,
        world_size=world_size,
        use_vllm=vllm,
        default_device="cuda" if machine.num_devices else "cpu",
        use_cpu=profile is not None and on_host(profile),
        roles=roles,
        ranks_per_node=machine.num_devices if machine.nodes > 1 else None,
    )
    known = {role: shape for role, shape in (shapes or {}).items() if role in devices.roles}
    now = Situation(devices=devices, machine=machine, profile=profile, shapes=known, vllm=vllm)
    faults = tuple(check_run(now))
    said = [*notes(now), *_unused(mapping, roles, profile)]
    forecasts: tuple[Forecast, ...] = ()
    floors: tuple[Floor, ...] = ()
    received: dict[int, int] = {}
    plan: ReshardPlan | None = None
    auto: RunSize | None = None
    comparison: Comparison | None = None
    if known and profile is not None and not devices.check():
        received, plan = _transition(profile, devices, known, machine)
        size = run_size(profile, element_bytes=element_bytes(profile, machine), vllm=vllm)
        if profile.model.activation_checkpointing == "auto":
            auto = keep_what_fits(devices, known, size, machine)
            size = auto or size
        forecasts = forecast(devices, known, size, machine)
        floors = floor_times(devices, known, size, machine, received)
        comparison = compare_split(devices, known, size, machine)
    return Report(
        devices=devices,
        machine=machine,
        faults=faults,
        memory_faults=tuple(memory_faults(forecasts)),
        notes=tuple(said),
        forecasts=forecasts,
        floors=floors,
        received=received,
        plan=plan,
        vllm=vllm,
        kept_blocks=None if auto is None else auto.kept_blocks,
        comparison=comparison,
    )


def inspect_profile(profile: Profile, machine: Machine, *, world_size: int | None = None) -> Report:
    """`inspect_run` of a profile with its own device mapping, after reading the config.json of each model.

    Raises:
        ConfigError: a config.json of an unknown family.
    """
    profile, stands_in = as_it_runs(profile)
    found: dict[str, ModelShape | None] = {}
    shapes: dict[Role, ModelShape] = {}
    for role, path in model_paths(profile).items():
        if path not in found:
            found[path] = read_shape(path)
        shape = found[path]
        if shape is not None:
            shapes[role] = shape.with_head("value" if role is Role.CRITIC else "score" if role is Role.REWARD else "lm")
    report = inspect_run(profile.devices, machine, profile=profile, shapes=shapes, world_size=world_size)
    absent = [path for path, shape in found.items() if shape is None]
    said = [f"no config.json of {path} here: heads, memory and time are not checked" for path in absent]
    return replace(report, notes=(*said, *stands_in, *report.notes))


def used_roles(profile: Profile) -> tuple[Role, ...]:
    """Roles that the algorithm of the profile needs."""
    roles = [Role.ACTOR, Role.ROLLOUT]
    if profile.algorithm.kind == "ppo":
        roles.append(Role.CRITIC)
    if profile.algorithm.kl.where != "none":
        roles.append(Role.REFERENCE)
    if profile.reward.model.path is not None:
        roles.append(Role.REWARD)
    return tuple(role for role in ALL_ROLES if role in roles)


def model_paths(profile: Profile) -> dict[Role, str]:
    """Where each role's model is to be found."""
    own = profile.model
    paths = {
        Role.ACTOR: own.path,
        Role.ROLLOUT: own.path,
        Role.CRITIC: own.critic.path or own.path,
        Role.REFERENCE: own.reference.path or own.path,
        Role.REWARD: profile.reward.model.path or own.path,
    }
    return {role: paths[role] for role in used_roles(profile)}


def element_bytes(profile: Profile, machine: Machine) -> int:
    """Bytes of a weight in the profile's precision; auto is bf16 where all devices have it, else fp32."""
    dtype = profile.model.model_dtype
    if dtype == "auto":
        return 2 if machine.devices and all(d.capability >= (8, 0) for d in machine.devices) else 4
    return 4 if dtype == "fp32" else 2


def on_host(profile: Profile) -> bool:
    """Whether ranks on the host stand in for all devices, whatever the machine has."""
    return profile.run.device == "cpu"


def as_it_runs(profile: Profile) -> tuple[Profile, tuple[str, ...]]:
    """The profile as its device lets it run, and a sentence on what that changes.

    Ranks on the host have no GPU that vLLM's engine could take: the built-in generator answers in its place.
    """
    if not on_host(profile) or not uses_vllm(profile.devices, profile.model.actor.use_vllm_for_generation):
        return profile, ()
    actor = (profile.devices.actor or ActorPlacement()).model_copy(update={"use_vllm": False})
    devices = profile.devices.model_copy(update={"actor": actor})
    said = "run.device is cpu: the built-in generator answers in vLLM's place, and vllm_config has no say"
    return profile.model_copy(update={"devices": devices}), (said,)


def names_devices(mapping: DeviceMapping) -> bool:
    """True when some role names positions."""
    sections = (mapping.actor, mapping.critic, mapping.reference, mapping.reward_model)
    return any(isinstance(p, int) for s in sections if s is not None for p in s.device_mesh or ())


def wire_dtype(profile: Profile, machine: Machine) -> str:
    """Weights travel in the precision that the run computes in."""
    half = "fp16" if profile.model.model_dtype == "fp16" else "bf16"
    return half if element_bytes(profile, machine) == 2 else "fp32"


def _transition(
    profile: Profile, devices: DeviceMap, shapes: Mapping[Role, ModelShape], machine: Machine
) -> tuple[dict[int, int], ReshardPlan | None]:
    """Bytes into each rank, and the plan between training and generation."""
    shape, actor = shapes.get(Role.ACTOR), devices.roles.get(Role.ACTOR)
    if shape is None or actor is None or Role.ROLLOUT not in devices.roles:
        return {}, None
    wire = wire_dtype(profile, machine)
    try:
        way = actor_way(profile, actor, shape)
        received = received_bytes(
            shape, way.train, way.generation, aligned=way.aligned, element_bytes=DTYPE_BYTES[wire]
        )
        if len(actor.ranks) > MOST_PLANNED_RANKS:
            return received, None
        requests = transition_requests(shape, way.train, way.generation, aligned=way.aligned, wire_dtype=wire)
        per_node = machine.num_devices if machine.nodes > 1 else None
        return received, plan_reshard(requests, ranks_per_node=per_node)
    except RlspeedError:  # degrees that do not fit the heads are among the faults already
        return {}, None


def _unused(mapping: DeviceMapping, roles: tuple[Role, ...], profile: Profile | None) -> list[str]:
    """Sections of the mapping that this run does not need."""
    if profile is None:
        return []
    why = {
        Role.CRITIC: f"algorithm.kind {profile.algorithm.kind} has no critic",
        Role.REFERENCE: "algorithm.kl.where is none",
        Role.REWARD: "reward.model.path is not set; reward functions run in every rank's process",
    }
    return [
        f"{role}: not used, {reason}"
        for role, reason in why.items()
        if role not in roles and getattr(mapping, str(role)) is not None
    ]


def _fault(fault: Fault) -> dict[str, str]:
    return {"where": fault.where, "found": fault.found, "allowed": fault.allowed, "fix": fault.fix}


def _placement(place: Any) -> dict[str, Any]:
    return {
        "device": place.device,
        "ranks": list(place.ranks),
        "dp": place.dp,
        "dp_shard": place.dp_shard,
        "sp": place.sp,
        "tp": place.tp,
        "backend": place.backend,
    }


def _comparison(found: Comparison) -> dict[str, Any]:
    ways = {"together": found.together, "apart": found.apart}
    return {
        "winner": found.winner,
        **{n: {"seconds": w.seconds, "busy": w.busy, "fits": w.fits, "roles": w.text} for n, w in ways.items()},
    }


def _forecast(found: Forecast) -> dict[str, Any]:
    parts = ("weights", "gradients", "optimizer", "activations", "kv_cache", "logits", "buffers", "peak")
    return {
        "rank": found.rank,
        "device": found.device.name,
        "usable_bytes": found.usable_bytes,
        "fits": found.fits,
        "advice": found.advice,
        "phases": {m.phase: {p: getattr(m, p) for p in parts} for m in found.phases},
    }


def _plan(plan: ReshardPlan | None) -> dict[str, Any]:
    if plan is None:
        return {}
    return {
        "bytes": plan.num_bytes,
        "sent": plan.bytes_sent(),
        "copied": plan.bytes_copied(),
        "pairs": [{"src": a, "dst": b, "bytes": n} for (a, b), n in plan.bytes_by_pair().items()],
    }
