"""The processes of a run: torchrun's environment to one `World`, the only place that starts and ends process groups."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlspeed.errors import DeviceError, Fault
from rlspeed.planning.device_rules import fingerprint_faults
from rlspeed.planning.layout import Mesh

T = TypeVar("T")

# longest wait for all ranks to start, whatever a collective may take later
START_SECONDS = 120.0
# what a collective waits beyond twice the watchdog's limit
GRACE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All ranks of the run and this process's place among them.

    One process without torchrun is a world of one without any process group; every method then returns at once.
    group: of a part of the run's ranks, which rank and size then count (`data_world`); None: all of them. store: where
    the ranks met, for notes between them beside the collectives; None in a world of one, or of a part.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh | None
    group: dist.ProcessGroup | None = None
    store: dist.Store | None = None

    @property
    def members(self) -> dist.ProcessGroup | None:
        """The process group of these ranks; None in a world of one."""
        return None if self.size == 1 else self.group or dist.group.WORLD

    @property
    def is_main(self) -> bool:
        """True on the rank that prints and writes files."""
        return self.rank == 0

    def gather_objects(self, value: T) -> list[T]:
        """`value` of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.group)
        return out

    def broadcast_object(self, value: T) -> T:
        """Rank 0's `value` on every rank."""
        return self.told_by(0, value)

    def told_by(self, rank: int, value: T) -> T:
        """`value` of `rank`, a place in this World, on every rank."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=rank)
        return box[0]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Maxima over ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        if self.size == 1 or not values:
            return [float(v) for v in values]
        tensor = torch.tensor([float(v) for v in values], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op, group=self.group)
        return tensor.tolist()

    def any(self, flag: bool) -> bool:
        """True on every rank when `flag` is true on one."""
        return self.max([float(flag)])[0] > 0.0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(group=self.group)

    def close(self) -> None:
        """End the process group; safe to call twice."""
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def start_world(*, use_cpu: bool, hang_timeout_seconds: float) -> World:
    """Join torchrun's processes, or be a world of one.

    use_cpu: run on CPU although a GPU is there. hang_timeout_seconds: of the watchdog, which
    speaks first; a collective itself gives up after twice as long. 0: after PyTorch's own time.

    Raises:
        DeviceError: fewer GPUs than local ranks, or ranks that did not arrive at the rendezvous.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available() and not use_cpu
    if cuda:
        visible = torch.cuda.device_count()
        if local_rank >= visible:
            raise DeviceError(
                Fault(
                    where=f"local rank {local_rank}",
                    found=f"{visible} visible GPU(s)",
                    allowed="one GPU per local rank",
                    fix="start fewer processes per node, or widen CUDA_VISIBLE_DEVICES",
                )
            )
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if size == 1:
        return World(rank=0, size=1, local_rank=local_rank, device=device, mesh=None)
    try:
        wait = min(START_SECONDS, hang_timeout_seconds or START_SECONDS)
        store, _, _ = next(iter(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=wait))))
        uuid = str(torch.cuda.get_device_properties(device).uuid) if cuda else ""
        meet(store, rank, size, uuid, wait)
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if cuda else "gloo",
            timeout=timedelta(seconds=2 * hang_timeout_seconds + GRACE_SECONDS) if hang_timeout_seconds else None,
            store=store,
            rank=rank,
            world_size=size,
            device_id=device if cuda else None,
        )
    except (dist.DistStoreError, dist.DistNetworkError, RuntimeError) as error:
        raise DeviceError(
            Fault(
                where=f"rank {rank} of {size}",
                found=f"the ranks did not meet: {error}",
                fix="check that all ranks started and that MASTER_ADDR and MASTER_PORT are reachable and free",
            )
        ) from error
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("dp_shard",))
    return World(rank=rank, size=size, local_rank=local_rank, device=device, mesh=mesh, store=store)


def meet(store: dist.Store, rank: int, size: int, uuid: str, seconds: float) -> None:
    """Before any process group: wait for all ranks, and see that no two took the same GPU (NCCL hangs or fails late).

    uuid: of this rank's GPU, empty on CPU.

    Raises:
        DeviceError: ranks that did not come in time, or ranks on one GPU; all are named.
    """
    store.set(f"rlspeed/{rank}", json.dumps([platform.node(), uuid]))
    end = time.monotonic() + seconds
    seen: list[tuple[int, str, str]] = []
    missing: list[int] = []
    for other in range(size):
        try:
            store.wait([f"rlspeed/{other}"], timedelta(seconds=max(end - time.monotonic(), 0.05)))
        except RuntimeError:
            missing.append(other)
            continue
        host, gpu = json.loads(store.get(f"rlspeed/{other}"))
        if gpu:
            seen.append((other, host, gpu))
    if missing:
        names = ", ".join(map(str, missing))
        found = f"{'rank' if len(missing) == 1 else 'ranks'} {names} of {size} did not start within {seconds:.0f} s"
        raise DeviceError(
            Fault(
                where=f"rank {rank}", found=found, fix="look at their own output; every node starts its share of ranks"
            )
        )
    faults = fingerprint_faults(seen)
    if faults:
        raise DeviceError(faults)


def part_world(world: World, ranks: Sequence[int]) -> World | None:
    """The given ranks of the run as a World: rank is the place among them in ascending order. None on all others.

    Makes a process group: every rank of the run calls it in the same order. All ranks are `world` itself; one rank has
    no group.
    """
    chosen = sorted(set(ranks))
    if chosen == list(range(world.size)):
        return world
    group = dist.new_group(chosen) if len(chosen) > 1 else None
    if world.rank not in chosen:
        return None
    return World(
        rank=chosen.index(world.rank),
        size=len(chosen),
        local_rank=world.local_rank,
        device=world.device,
        mesh=None,
        group=group,
    )


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """torch's DeviceMesh of a role's ranks, `Placement.mesh()`: axes (dp_replicate, dp_shard, sp, tp).

    Makes process groups: every rank of the run calls it in the same order, also ranks outside of the mesh.
    """
    names = tuple(name for name, _ in mesh.axes)
    grid = torch.tensor(mesh.ranks).view([size for _, size in mesh.axes])
    out = DeviceMesh(device_type, grid, mesh_dim_names=names)
    # axes joined here are kept by the mesh: `shard_mesh` and `data_world` find them
    if "sp" in names and mesh.size("sp") > 1:
        out["dp_shard", "sp"]._flatten("shards")
    if "dp_replicate" in names and mesh.size("dp_replicate") > 1:
        out["dp_replicate", "dp_shard"]._flatten("data")
    return out


def data_world(world: World, mesh: DeviceMesh) -> World:
    """The ranks that work on other tokens than this one, as a World: what sums over tokens goes over.

    mesh: of `device_mesh`, this process in it. The ranks of a tensor or sequence parallel group hold the same tokens;
    each of them finds its own line of data parallel ranks here, so every token is counted once.
    """
    size = _sizes(mesh)
    data = mesh["dp_replicate", "dp_shard"]._flatten("data") if size.get("dp_replicate", 1) > 1 else mesh["dp_shard"]
    return World(
        rank=data.get_local_rank(),
        size=data.size(),
        local_rank=world.local_rank,
        device=world.device,
        mesh=None,
        group=data.get_group(),
    )


def shard_mesh(mesh: DeviceMesh) -> tuple[DeviceMesh, list[dist.ProcessGroup]]:
    """What FSDP2 cuts over: dp_shard and sp as one axis, with dp_replicate before it where there are copies.

    Returns it with the groups over which a gradient of a whole parameter is summed, one after the other.
    """
    size = _sizes(mesh)
    over = mesh["dp_shard", "sp"]._flatten("shards") if size.get("sp", 1) > 1 else mesh["dp_shard"]
    groups = [over.get_group()]
    if size.get("dp_replicate", 1) > 1:
        copies = mesh["dp_replicate"]
        groups.append(copies.get_group())
        over = DeviceMesh._concatenate([copies, over])
    return over, groups


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    return {name: mesh.size(i) for i, name in enumerate(mesh.mesh_dim_names or ())}


def broadcast_tensor(tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    """Overwrite `tensor` with global rank `source`'s; nothing to do in a world of one (group None)."""
    if group is not None:
        dist.broadcast(tensor, src=source, group=group)
