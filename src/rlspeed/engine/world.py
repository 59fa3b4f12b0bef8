"""The processes of a run: torchrun's environment to one `World`, the only place that starts and ends process groups."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlspeed.errors import DeviceError, Fault

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All ranks of the run and this process's place among them.

    One process without torchrun is a world of one without any process group; every method then returns at once.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh | None

    @property
    def is_main(self) -> bool:
        """True on the rank that prints and writes files."""
        return self.rank == 0

    def gather_objects(self, value: T) -> list[T]:
        """`value` of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value)
        return out

    def broadcast_object(self, value: T) -> T:
        """Rank 0's `value` on every rank."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
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
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()

    def any(self, flag: bool) -> bool:
        """True on every rank when `flag` is true on one."""
        return self.max([float(flag)])[0] > 0.0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """End the process group; safe to call twice."""
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def start_world(*, use_cpu: bool, hang_timeout_seconds: float) -> World:
    """Join torchrun's processes, or be a world of one.

    use_cpu: run on CPU although a GPU is there. hang_timeout_seconds: longest wait in one collective.

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
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if cuda else "gloo",
            timeout=timedelta(seconds=hang_timeout_seconds),
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
    return World(rank=rank, size=size, local_rank=local_rank, device=device, mesh=mesh)
