"""Settings that this version understands and cannot do: accepted by the schema, refused before a run, never ignored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
    if place.use_cpu_offload and place.device_mesh != ["cpu"] and key == "devices.actor":
        allowed = "false: the generator reads the actor's weights; critic, reference and reward model can rest"
        yield f"{key}.use_cpu_offload", "true", allowed, f"leave {key}.use_cpu_offload out"


def _degrees(p: Profile) -> Iterator[Finding]:
    """A reward model is whole on every rank."""
    place = roles_in_use(p).get("reward_model")
    for degree in ("tensor_parallel_size", "sequence_parallel_size"):
        if place is not None and getattr(place, degree) != 1:
            key = f"devices.reward_model.{degree}"
            yield key, str(getattr(place, degree)), "1", f"{key}=1"


def _untried(p: Profile) -> Iterator[Finding]:
    """Combinations with tensor and sequence parallel that are not known to work."""
    told = False
    for role, place in roles_in_use(p).items():
        tp, sp = place.tensor_parallel_size, place.sequence_parallel_size
        if role == "reward_model":
            continue
        if p.model.compile and tp * sp > 1 and not told:
            told = True
            found = f"true with tensor parallel {tp} x sequence parallel {sp} of the {role}"
            yield "model.compile", found, "false, or degrees of 1", "model.compile=false"
        if sp > 1 and not p.model.use_remove_padding:
            found = f"{sp} with padded rows"
            yield f"devices.{role}.sequence_parallel_size", found, "1, or packed rows", "model.use_remove_padding=true"


def _apart(p: Profile, world_size: int) -> Iterator[Finding]:
    """Critic and reference may have devices of their own; what scores answers is where they are, or on the host."""
    places = roles_in_use(p)
    own = _written(p, "actor")
    for role, place in places.items():
        mesh = place.device_mesh
        mixed = mesh is not None and (mesh == ["cpu"]) != (own == ["cpu"]) and p.run.device != "cpu"
        if role in ("critic", "reference") and mesh is not None and mixed:
            found = f"[{_names(mesh)}] and the actor is on [{_shown(own, world_size)}]"
            fix = f"leave devices.{role}.device_mesh out, or set run.device=cpu for all"
            yield f"devices.{role}.device_mesh", found, "models on one kind of device", fix
        if role == "reward_model" and mesh != ["cpu"]:
            beside, actors = _shown(_written(p, role), world_size), _shown(own, world_size)
            if sorted(beside.split(", ")) != sorted(actors.split(", ")):
                fix = "devices.reward_model.device_mesh=null devices.reward_model.shares_with=actor"
                found = f"[{beside}] and the actor is on [{actors}]"
                allowed = f"the actor's devices [{actors}], or [cpu]"
                yield "devices.reward_model.device_mesh", found, allowed, f"give it the actor's devices: {fix}"
    if own in (None, ["cpu"]) or not vllm_generates(p) or len(own) >= world_size:
        return
    found = f"[{_names(own)}] of {world_size} ranks while vLLM generates"
    fix = "model.actor.use_vllm_for_generation=false devices.actor.use_vllm=false"
    yield "devices.actor.device_mesh", found, "all ranks, or the built-in generator", fix


def vllm_generates(p: Profile) -> bool:
    """False also where ranks on the host stand in for GPUs: the built-in generator answers in vLLM's place."""
    said = p.devices.actor.use_vllm if p.devices.actor else None
    return p.run.device != "cpu" and (p.model.actor.use_vllm_for_generation if said is None else said)


def _written(p: Profile, role: str) -> list[int | str] | None:
    """The device_mesh that counts for a role: its own, that of the role it shares with, or the actor's."""
    seen: set[str] = set()
    while role not in seen:
        seen.add(role)
        place = getattr(p.devices, role, None)
        if place is None:
            role = "actor"
        elif place.device_mesh is not None or place.shares_with is None:
            return None if place.device_mesh is None else list(place.device_mesh)
        else:
            role = place.shares_with
    return None


def _shown(mesh: list[int | str] | None, world_size: int) -> str:
    return _names(range(world_size) if mesh is None else mesh)


def _names(mesh: Iterable[int | str]) -> str:
    return ", ".join(map(str, mesh))
