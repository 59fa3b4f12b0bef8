"""Which ranks each role runs on: the users' device mapping as placements, and every fault that the mapping itself has.

A position in the mapping is a rank of the run: rank r works on the r-th visible device of its node. A role on [cpu]
takes no device; the process of each rank computes it on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from rlspeed.config.device_schema import ActorPlacement, DeviceMapping, RolePlacement
from rlspeed.errors import DeviceError, Fault
from rlspeed.planning.layout import Mesh


class Role(StrEnum):
    """What a group of ranks does."""

    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD = "reward_model"
    ROLLOUT = "rollout"


ALL_ROLES = tuple(Role)
DeviceType = Literal["cuda", "cpu"]
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one role runs and how it is spread there.

    ranks: global ranks, ascending, each once. written: device_mesh as the user wrote it, None where it was
    left out.
    tp, sp: tensor and sequence parallel degree. replicas: full copies (1 where everything is sharded). rests_on_host:
    weights live in host memory while the role is idle. host_params: parameters and optimizer live there always
    (FSDP's cpu_offload).
    """

    device: DeviceType
    ranks: tuple[int, ...]
    written: tuple[int | str, ...] | None = None
    tp: int = 1
    sp: int = 1
    replicas: int = 1
    shares_with: str | None = None
    rests_on_host: bool = False
    host_params: bool = False

    @property
    def backend(self) -> str:
        """Process group backend; a CUDA group has gloo too, for tensors that rest on the host."""
        return BACKENDS[self.device]

    @property
    def on_host(self) -> bool:
        """True when the user wrote [cpu]: the role takes no position of the mapping."""
        return self.written is not None and "cpu" in self.written

    @property
    def dp(self) -> int:
        """Data parallel degree: ranks / (tp * sp)."""
        return len(self.ranks) // (self.tp * self.sp)

    @property
    def dp_shard(self) -> int:
        """Over how many ranks parameters, gradients and optimizer state are cut, tensor parallel aside."""
        return len(self.ranks) // (self.tp * self.replicas)

    def mesh(self) -> Mesh:
        """Ranks as (dp_replicate, dp_shard, sp, tp), tensor parallel between neighbours.

        Raises:
            LayoutError: the degrees do not multiply to the number of ranks.
        """
        shards = len(self.ranks) // (self.replicas * self.sp * self.tp)
        return Mesh.of(self.ranks, dp_replicate=self.replicas, dp_shard=shards, sp=self.sp, tp=self.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMap:
    """All roles of a run on its ranks.

    Building one never fails: `check` lists what is wrong with it, `require` raises that.
    """

    world_size: int
    roles: Mapping[Role, Placement]

    def roles_on(self, rank: int) -> tuple[Role, ...]:
        """Roles whose work `rank` takes part in, roles on the host included."""
        return tuple(role for role, place in self.roles.items() if rank in place.ranks)

    @property
    def device_ranks(self) -> tuple[int, ...]:
        """Ranks that a role takes, ascending; roles on [cpu] take none."""
        return tuple(sorted({r for p in self.roles.values() if not p.on_host for r in p.ranks}))

    @property
    def needed_world_size(self) -> int:
        """Processes that the map needs: up to the highest rank taken."""
        return max(self.device_ranks, default=0) + 1

    def groups(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Every process group of the run, by a name for messages: the world, each role, its tp and sp groups."""
        out = [("world", tuple(range(self.world_size)))]
        for role, place in self.roles.items():
            out.append((str(role), place.ranks))
            mesh = place.mesh()
            for axis in ("tp", "sp", "dp_shard", "dp_replicate"):
                if 1 < mesh.size(axis) < len(place.ranks):
                    out.extend((f"{role} {axis} {i}", group) for i, group in enumerate(mesh.groups(axis)))
        return tuple(out)

    def check(self) -> list[Fault]:
        """Everything that is wrong with the map itself, whatever the machine and the model are."""
        faults: list[Fault] = []
        for role, place in self.roles.items():
            faults.extend(_mesh_faults(role, place, self.world_size))
            faults.extend(_degree_faults(role, place))
        faults.extend(_sharing_faults(self.roles))
        faults.extend(_world_faults(self))
        return faults

    def require(self) -> None:
        """Raise what `check` finds.

        Raises:
            DeviceError: with all faults.
        """
        faults = self.check()
        if faults:
            raise DeviceError(faults)


def build_device_map(
    mapping: DeviceMapping,
    *,
    world_size: int | None,
    use_vllm: bool = False,
    default_device: DeviceType = "cuda",
    use_cpu: bool = False,
    roles: Collection[Role] = ALL_ROLES,
    ranks_per_node: int | None = None,
) -> DeviceMap:
    """Placements of `roles` from the users' mapping.

    world_size: number of processes; None: as many as the mapping names. use_vllm: vLLM generates unless the mapping
    says otherwise. default_device: what roles without a device_mesh use (cpu on a machine without GPU). use_cpu:
    positions are ranks on the host, no GPU anywhere (run.device: cpu, tests, `--smoke` on a laptop). A role that is
    not in the mapping runs where the actor runs; the generator always does. One that names no devices but a role to
    share with has that role's.
    """
    sections: dict[Role, RolePlacement | None] = {
        Role.ACTOR: mapping.actor or ActorPlacement(),
        Role.CRITIC: mapping.critic,
        Role.REFERENCE: mapping.reference,
        Role.REWARD: mapping.reward_model,
    }
    if world_size is None:
        named = [p for s in sections.values() if s and s.device_mesh for p in s.device_mesh if isinstance(p, int)]
        world_size = max((*named, 0)) + 1
    spread = _Spread(world_size, "cpu" if use_cpu else default_device, use_cpu, ranks_per_node)
    actor = _placement(sections[Role.ACTOR] or ActorPlacement(), spread)
    out: dict[Role, Placement] = {}
    for role, section in sections.items():
        if role not in roles:
            continue
        if role is Role.ACTOR:
            out[role] = actor
        elif section is None:
            out[role] = _beside(actor)
        else:
            host = _host(role, sections)
            out[role] = _placement(section, spread, beside=actor if host is None else _placement(host, spread))
    if Role.ROLLOUT in roles:
        out[Role.ROLLOUT] = generator_placement(mapping, actor, use_vllm)
    return DeviceMap(world_size=world_size, roles=out)


def _host(role: Role, sections: Mapping[Role, RolePlacement | None]) -> RolePlacement | None:
    """The section whose devices `role` has: its own, or at the end of its chain of shares_with; None: the actor's."""
    own = at = sections[role]
    seen = {str(role)}
    while at is not None and at.device_mesh is None and at.shares_with not in (None, *seen):
        name = str(at.shares_with)
        if name not in set(map(str, sections)):
            return own
        seen.add(name)
        at = sections[Role(name)]
    return at


def uses_vllm(mapping: DeviceMapping, model_says: bool) -> bool:
    """Whether vLLM generates: the mapping's `use_vllm` where it is given, else model.actor.use_vllm_for_generation."""
    said = mapping.actor.use_vllm if mapping.actor else None
    return model_says if said is None else said


def _beside(actor: Placement) -> Placement:
    """A role that is not in the mapping: on the actor's ranks, spread like it."""
    return Placement(
        device=actor.device,
        ranks=actor.ranks,
        tp=actor.tp,
        sp=actor.sp,
        replicas=actor.replicas,
        shares_with=str(Role.ACTOR),
    )


def generator_placement(mapping: DeviceMapping, actor: Placement, use_vllm: bool) -> Placement:
    """The generator: on the actor's ranks, vLLM with its own tensor parallel degree."""
    section = mapping.actor or ActorPlacement()
    tp = section.vllm_config.tensor_parallel_size if uses_vllm(mapping, use_vllm) else 1
    host = actor.host_params  # then it needs a copy on the device
    return Placement(device=actor.device, ranks=actor.ranks, tp=tp, shares_with=str(Role.ACTOR), host_params=host)


@dataclass(frozen=True, slots=True)
class _Spread:
    """What all placements of a run have in common; see build_device_map."""

    world_size: int
    default_device: DeviceType
    use_cpu: bool
    ranks_per_node: int | None


def _placement(section: RolePlacement, spread: _Spread, beside: Placement | None = None) -> Placement:
    """One section of the mapping; beside: the role whose devices it takes over."""
    written = None if section.device_mesh is None else tuple(section.device_mesh)
    device: DeviceType = spread.default_device
    ranks = tuple(range(spread.world_size))
    if beside is not None:
        device, ranks = beside.device, beside.ranks
    elif written is not None and "cpu" in written:
        device = "cpu"
    elif written is not None:
        device = "cpu" if spread.use_cpu else "cuda"
        # ascending, whatever the order written: torch numbers the ranks of a group so, and cuts by that number
        ranks = tuple(sorted({p for p in written if isinstance(p, int) and p >= 0}))
    per_copy = section.tensor_parallel_size * section.sequence_parallel_size
    per_node = spread.ranks_per_node
    sharding = section.fsdp_config.sharding_strategy
    replicas = 1
    if section.strategy == "none" or sharding == "NO_SHARD":
        replicas = max(len(ranks) // per_copy, 1)
    elif sharding == "HYBRID_SHARD" and per_node and len(ranks) % per_node == 0:
        replicas = len(ranks) // per_node
    return Placement(
        device=device,
        ranks=ranks,
        written=written,
        tp=section.tensor_parallel_size,
        sp=section.sequence_parallel_size,
        replicas=replicas,
        shares_with=section.shares_with,
        rests_on_host=section.use_cpu_offload,
        host_params=section.fsdp_config.cpu_offload,
    )


def _mesh_faults(role: Role, place: Placement, world_size: int) -> list[Fault]:
    """Faults of one device_mesh as written."""
    if place.written is None:
        return []
    where, written = f"{role}.device_mesh", list(place.written)
    shown = "[" + ", ".join(map(str, written)) + "]"
    if not written:
        fix = "name its devices, or leave device_mesh out to use all"
        return [Fault(where=where, found="[]: no device", allowed="indices, or [cpu]", fix=fix)]
    faults = []
    numbers = [p for p in written if isinstance(p, int)]
    if "cpu" in written and numbers:
        faults.append(
            Fault(
                where=where,
                found=f"{shown} mixes cpu with indices",
                allowed="either indices or [cpu]",
                fix="drop one of the two; fsdp_config.cpu_offload keeps a GPU role's parameters on the host",
            )
        )
    for position, value in enumerate(written):
        if value in written[:position]:
            first = written.index(value)
            found = f"{shown}: {value} at position {position}, as at {first}"
            faults.append(Fault(where=where, found=found, fix="name each device once"))
        elif isinstance(value, int) and not 0 <= value < world_size:
            faults.append(
                Fault(
                    where=where,
                    found=f"{shown}: {value} at position {position}",
                    allowed=f"0..{world_size - 1} (the run has {world_size} rank(s))",
                    fix=f"start {value + 1} ranks or more, or name another device" if value >= 0 else "count from 0",
                )
            )
    return faults


def _degree_faults(role: Role, place: Placement) -> list[Fault]:
    """tp and sp against the number of devices."""
    if not place.ranks:
        return []
    count, per_copy = len(place.ranks), place.tp * place.sp
    if count % per_copy == 0:
        return []
    if role is Role.ROLLOUT:
        where = "actor.vllm_config.tensor_parallel_size"
        found = f"{place.tp} on {count} device(s) of the actor"
        why = "more than there are" if place.tp > count else f"{count} / {place.tp} leaves {count % place.tp} over"
        allowed = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        return [Fault(where=where, found=f"{found}: {why}", allowed=allowed, fix="take a degree that divides them")]
    return [
        Fault(
            where=f"{role}.device_mesh",
            found=f"{count} device(s) for tensor_parallel_size {place.tp} x sequence_parallel_size {place.sp}",
            allowed=f"a multiple of {per_copy}: dp x sp x tp must be the number of devices",
            fix="change the degrees or the number of devices",
        )
    ]


def _sharing_faults(roles: Mapping[Role, Placement]) -> list[Fault]:
    """Devices that two roles use without saying so, and shares_with that cannot hold."""
    faults = []
    for role, place in roles.items():
        other = place.shares_with
        if other is None:
            continue
        where = f"{role}.shares_with"
        if other == role or other not in set(map(str, roles)):
            names = ", ".join(str(r) for r in roles if r not in (role, Role.ROLLOUT))
            fix = "name another role of this run"
            faults.append(Fault(where=where, found=repr(other), allowed=names, fix=fix))
        elif set(place.ranks) - set(roles[Role(other)].ranks) and place.device == roles[Role(other)].device:
            alone = sorted(set(place.ranks) - set(roles[Role(other)].ranks))
            found = f"{other}, which is not on {_names(alone)}"
            fix = f"give both the same device_mesh, or leave {role}.device_mesh out"
            faults.append(Fault(where=where, found=found, fix=fix))
    on_device = [(r, p) for r, p in roles.items() if not p.on_host and r is not Role.ROLLOUT]
    told: set[tuple[str, str]] = set()
    for i, (role, place) in enumerate(on_device):
        for other_role, other_place in on_device[i + 1 :]:
            both = sorted(set(place.ranks) & set(other_place.ranks))
            everywhere = place.written is None and other_place.written is None
            ends = (_root(role, roles), _root(other_role, roles))
            if both and not everywhere and ends[0] != ends[1] and not told & {ends, ends[::-1]}:
                told.add(ends)
                faults.append(
                    Fault(
                        where=f"{role}.device_mesh and {other_role}.device_mesh",
                        found=f"both use {_names(both)}",
                        allowed="devices of their own",
                        fix=f"move one of them, or write {other_role}.shares_with: {role} when they are to share",
                    )
                )
    return faults


def _root(role: Role, roles: Mapping[Role, Placement]) -> str:
    """The role that a chain of shares_with ends at."""
    seen, at = {str(role)}, str(role)
    while at in set(map(str, roles)) and (target := roles[Role(at)].shares_with) and target not in seen:
        seen.add(target)
        at = target
    return at


def _world_faults(devices: DeviceMap) -> list[Fault]:
    """More or fewer processes than the map names."""
    used = devices.device_ranks or tuple(range(devices.world_size))
    wants = "; ".join(f"{r} {_names(p.ranks)}" for r, p in devices.roles.items() if p.written and not p.on_host)
    faults = []
    if devices.needed_world_size > devices.world_size:
        found = f"{devices.world_size} rank(s), the mapping needs {devices.needed_world_size} ({wants})"
        fix = f"start with --nproc-per-node {devices.needed_world_size}, or shrink the mapping"
        faults.append(Fault(where="world size", found=found, fix=fix))
    idle = sorted(set(range(devices.world_size)) - set(used))
    if idle:
        found = f"{devices.world_size} rank(s), but no role uses {_names(idle)} ({wants})"
        fix = f"start with --nproc-per-node {devices.needed_world_size}, or give these ranks to a role"
        faults.append(Fault(where="world size", found=found, fix=fix))
    return faults


def _names(ranks: Iterable[int]) -> str:
    """`device 3` or `devices 2, 3`."""
    text = [str(r) for r in ranks]
    return f"device {text[0]}" if len(text) == 1 else f"devices {', '.join(text)}"
