"""Settings that this version understands and cannot do: accepted by the schema, refused before a run, never ignored."""

from __future__ import annotations

from collections.abc import Iterator

from rlspeed.config.device_schema import DeviceMapping, RolePlacement
from rlspeed.config.load import LoadedProfile
from rlspeed.config.schema import Profile
from rlspeed.errors import Fault


def cannot_be_done_yet(loaded: LoadedProfile, world_size: int) -> Iterator[Fault]:
    """One fault for each such key."""
    p = loaded.profile
    found: list[Finding] = []
    for role, place in roles_in_use(p).items():
        found.extend(_placement(f"devices.{role}", place))
    found.extend([*_apart(p, world_size), *_degrees(p), *_untried(p)])
    for key, is_set_to, allowed, fix in found:
        yield Fault(
            where=loaded.where(key),
            found=f"{key} is {is_set_to}, which this version cannot do yet",
            allowed=allowed,
            fix=fix,
        )


Finding = tuple[str, str, str, str]


def roles_in_use(p: Profile) -> dict[str, RolePlacement]:
    """The sections of the device mapping whose role this run has."""
    has = {
        "actor": True,
        "critic": p.algorithm.kind == "ppo",
        "reference": p.algorithm.kl.where != "none",
        "reward_model": p.reward.model.path is not None,
    }
    places = {role: getattr(p.devices, role) for role in DeviceMapping.model_fields}
    return {role: place for role, place in places.items() if place is not None and has[role]}


def _placement(key: str, place: RolePlacement) -> Iterator[Finding]:
    """Offload of one role."""
    if place.fsdp_config.cpu_offload:
        yield f"{key}.fsdp_config.cpu_offload", "true", "false", f"leave {key}.fsdp_config.cpu_offload out"
    if place.use_cpu_offload and place.device_mesh != ["cpu"]:
        yield f"{key}.use_cpu_offload", "true", "false, or device_mesh: [cpu]", f"leave {key}.use_cpu_offload out"


def _degrees(p: Profile) -> Iterator[Finding]:
    """Roles that would cut tokens and matrices otherwise than the actor; a reward model is whole on every rank."""
    places = roles_in_use(p)
    actor = places.get("actor")
    for role, place in places.items():
        for degree in ("tensor_parallel_size", "sequence_parallel_size"):
            own, actors = getattr(place, degree), getattr(actor, degree, 1)
            key, wanted = f"devices.{role}.{degree}", 1 if role == "reward_model" else actors
            if own != wanted:
                why = "" if role == "reward_model" else f" and the actor's is {actors}"
                yield key, f"{own}{why}", str(wanted), f"{key}={wanted}"


def _untried(p: Profile) -> Iterator[Finding]:
    """Combinations with tensor and sequence parallel that are not known to work."""
    actor = p.devices.actor
    if actor is None:
        return
    tp, sp = actor.tensor_parallel_size, actor.sequence_parallel_size
    if p.model.compile and tp * sp > 1:
        found = f"true with tensor parallel {tp} x sequence parallel {sp}"
        yield "model.compile", found, "false, or degrees of 1", "model.compile=false"
    if sp > 1 and not p.model.use_remove_padding:
        found = f"{sp} with padded rows"
        yield "devices.actor.sequence_parallel_size", found, "1, or packed rows", "model.use_remove_padding=true"


def _apart(p: Profile, world_size: int) -> Iterator[Finding]:
    """Roles on devices of their own; a reward model on the host can be done."""
    places = roles_in_use(p)
    own = places["actor"].device_mesh if "actor" in places else None
    actors = own if own is not None else list(range(world_size))
    for role, place in places.items():
        mesh = place.device_mesh
        if role == "actor" or mesh is None or (role == "reward_model" and mesh == ["cpu"]):
            continue
        if sorted(map(str, mesh)) != sorted(map(str, actors)):
            shown = ", ".join(map(str, actors))
            fix = f"give {role} the actor's devices: devices.{role}.device_mesh=null devices.{role}.shares_with=actor"
            found = f"[{', '.join(map(str, mesh))}] and the actor is on [{shown}]"
            yield f"devices.{role}.device_mesh", found, f"the actor's devices [{shown}]", fix
