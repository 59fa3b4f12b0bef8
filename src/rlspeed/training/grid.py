"""How the ranks of a run share its work: one grid (dp_replicate, dp_shard, sp, tp) for all models, made in one place.

The ranks of a share differ in sp and tp only: they are given the same bins and return the same numbers. Each rank
generates for itself, so answers are held by ranks and trained by shares.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.distributed.device_mesh import DeviceMesh

from rlspeed.config.schema import Profile
from rlspeed.engine.world import World, data_world, device_mesh
from rlspeed.errors import ConfigError, Fault
from rlspeed.planning.devices import Placement, Role, build_device_map, uses_vllm
from rlspeed.planning.report import used_roles

SPREAD = (Role.ACTOR, Role.CRITIC, Role.REFERENCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The ranks of a run as its models see them.

    places: of every role. meshes: of the models that `parallelize` spreads; empty in a world of one. data: the ranks
    that work on other tokens than this one: what is summed over tokens is summed over them. shares: ranks of each share
    of the data; share: this rank's. leads: this rank counts its share's tokens. sp: a packed row is a multiple of it.
    ranks_per_node: None on one node.
    """

    places: Mapping[Role, Placement]
    meshes: Mapping[Role, DeviceMesh]
    data: World
    shares: tuple[tuple[int, ...], ...]
    share: int
    leads: bool
    sp: int
    ranks_per_node: int | None = None

    @property
    def actor(self) -> Placement:
        """Where the actor trains."""
        return self.places[Role.ACTOR]


def make_grid(profile: Profile, world: World) -> Grid:
    """The grid that the device mapping asks for. Makes process groups: every rank calls it.

    Raises:
        DeviceError: a mapping that these ranks cannot follow.
        ConfigError: bins that sequence parallel cannot cut evenly.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    per_node = local if world.size > local else None
    places = _places(profile, world, per_node)
    actor = places[Role.ACTOR]
    capacity = profile.packing.capacity
    if profile.model.use_remove_padding and capacity is not None and capacity % actor.sp:
        found = f"{capacity} with sequence parallel {actor.sp}"
        fix = f"use {-(-capacity // actor.sp) * actor.sp}"
        raise ConfigError(Fault(where="packing.capacity", found=found, allowed=f"a multiple of {actor.sp}", fix=fix))
    shares = actor.mesh().groups("sp", "tp")
    share = next(i for i, ranks in enumerate(shares) if world.rank in ranks)
    made: dict[int, DeviceMesh] = {}
    if world.size > 1:
        for replicas in sorted({p.replicas for p in places.values()}):
            made[replicas] = device_mesh(replace(actor, replicas=replicas).mesh(), world.device.type)
    return Grid(
        places=places,
        meshes={role: made[p.replicas] for role, p in places.items()} if made else {},
        data=data_world(world, made[actor.replicas]) if made else world,
        shares=shares,
        share=share,
        leads=world.rank == shares[share][0],
        sp=actor.sp,
        ranks_per_node=per_node,
    )


def _places(profile: Profile, world: World, ranks_per_node: int | None) -> dict[Role, Placement]:
    """Placements of the models that are spread, all on the actor's ranks in the actor's order."""
    devices = build_device_map(
        profile.devices,
        world_size=world.size,
        use_vllm=uses_vllm(profile.devices, profile.model.actor.use_vllm_for_generation),
        default_device="cuda" if world.device.type == "cuda" else "cpu",
        use_cpu=world.device.type == "cpu",
        roles=used_roles(profile),
        ranks_per_node=ranks_per_node,
    )
    devices.require()
    actor = devices.roles[Role.ACTOR]
    return {role: replace(p, ranks=actor.ranks) for role, p in devices.roles.items() if role in SPREAD}
