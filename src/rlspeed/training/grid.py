"""Where the roles of a run work: each on a site, the ranks that cut the step's tokens alike; made in one place.

Several roles may have one site. The ranks of a share differ in sp and tp only: they are given the same bins and return
the same numbers. Each rank of the actor generates for itself, so answers are held by ranks and trained by shares.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.device_mesh import DeviceMesh

from rlspeed.config.schema import Profile
from rlspeed.engine.world import World, data_world, device_mesh, part_world
from rlspeed.errors import ConfigError, Fault
from rlspeed.planning.devices import Placement, Role, build_device_map, uses_vllm
from rlspeed.planning.report import used_roles

SPREAD = (Role.ACTOR, Role.CRITIC, Role.REFERENCE)


# no slots: `ranks` lives in the instance
@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """Ranks that cut the tokens of a step alike.

    shares: ranks of each share of the data; share: this rank's, None where it does not work here. members: all ranks of
    the site as a World; data: those that work on other tokens than this one, over which sums over tokens go; both None
    on other ranks. sp: sequence parallel degree. rank: this one.
    """

    shares: tuple[tuple[int, ...], ...]
    share: int | None
    members: World | None
    data: World | None
    sp: int
    rank: int

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the site, ascending."""
        return tuple(sorted(r for ranks in self.shares for r in ranks))

    @property
    def first(self) -> int:
        """The rank that speaks for all of them."""
        return self.ranks[0]

    @property
    def here(self) -> bool:
        """This rank works at the site."""
        return self.share is not None

    @property
    def leads(self) -> bool:
        """This rank counts its share's tokens."""
        return self.share is not None and self.rank == self.shares[self.share][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The ranks of a run as its models see them.

    places, sites: of every role whose model is spread. meshes: of the roles on more than one rank, for `parallelize`.
    ranks_per_node: None on one node.
    """

    places: Mapping[Role, Placement]
    sites: Mapping[Role, Site]
    meshes: Mapping[Role, DeviceMesh]
    ranks_per_node: int | None = None

    @property
    def actor(self) -> Placement:
        """Where the actor trains."""
        return self.places[Role.ACTOR]

    @property
    def home(self) -> Site:
        """Where the actor works: there answers are generated, scored and held."""
        return self.sites[Role.ACTOR]

    @property
    def multiple(self) -> int:
        """Every packed row can be cut by each site's sequence parallel degree when it is a multiple of this."""
        return math.lcm(*(site.sp for site in self.sites.values()))


def make_grid(profile: Profile, world: World) -> Grid:
    """The grid that the device mapping asks for. Makes process groups: every rank calls it.

    Raises:
        DeviceError: a mapping that these ranks cannot follow.
        ConfigError: bins that sequence parallel cannot cut evenly.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    per_node = local if world.size > local else None
    places = _places(profile, world, per_node)
    meshes: dict[Role, DeviceMesh] = {}
    made: dict[tuple[object, ...], DeviceMesh] = {}
    for role, place in places.items():
        if len(place.ranks) > 1:
            key = (place.ranks, place.tp, place.sp, place.replicas)
            made[key] = meshes[role] = made.get(key) or device_mesh(place.mesh(), world.device.type)
    sites: dict[tuple[object, ...], Site] = {}
    for role, place in places.items():
        cut = (place.ranks, place.tp, place.sp)
        if cut not in sites:
            sites[cut] = _site(world, place, meshes.get(role))
    grid = Grid(
        places=places,
        sites={role: sites[p.ranks, p.tp, p.sp] for role, p in places.items()},
        meshes=meshes,
        ranks_per_node=per_node,
    )
    capacity = profile.packing.capacity
    if profile.model.use_remove_padding and capacity is not None and capacity % grid.multiple:
        found = f"{capacity} with sequence parallel {grid.multiple}"
        fix = f"use {-(-capacity // grid.multiple) * grid.multiple}"
        allowed = f"a multiple of {grid.multiple}"
        raise ConfigError(Fault(where="packing.capacity", found=found, allowed=allowed, fix=fix))
    return grid


def _site(world: World, place: Placement, mesh: DeviceMesh | None) -> Site:
    """The site of a placement. Makes a process group: every rank calls it."""
    members = part_world(world, place.ranks)
    shares = place.mesh().groups("sp", "tp")
    data = members
    if members is not None and mesh is not None:
        data = data_world(world, mesh)
    return Site(
        shares=shares,
        share=next((i for i, ranks in enumerate(shares) if world.rank in ranks), None),
        members=members,
        data=data,
        sp=place.sp,
        rank=world.rank,
    )


def _places(profile: Profile, world: World, ranks_per_node: int | None) -> dict[Role, Placement]:
    """Placements of the models that are spread."""
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
    return {role: devices.roles[role] for role in SPREAD if role in devices.roles}
