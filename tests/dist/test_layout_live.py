"""Layouts of plans against the shards that torch really makes: FSDP2 over tensor parallel, default and aligned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rlspeed.planning.layout import Mesh, Region
from rlspeed.planning.shape import WeightShape
from rlspeed.planning.transition import training_layout
from tests.dist.spawn import run_ranks

# (dp_shard, tp), aligned, inner width: 9 over four ranks is 3, 3, 3, 0
CASES = (((2, 2), False, 12), ((2, 2), True, 12), ((4, 1), True, 12), ((4, 1), False, 9), ((2, 2), False, 9))
WORLD = 4


class Block(nn.Module):
    """One column-wise, one row-wise product and a norm, with known numbers as weights."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(8, inner, bias=False)
        self.down = nn.Linear(inner, 8, bias=False)
        self.norm = nn.RMSNorm(8)
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(torch.arange(float(parameter.numel())).reshape(parameter.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(self.norm(x)))


def local_values(sizes: tuple[int, int], aligned: bool, inner: int) -> dict[str, list[Any]]:
    """This rank's part of every weight."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "tp"))
    block = Block(inner)
    if sizes[1] > 1:
        parallelize_module(block, mesh["tp"], {"gate": ColwiseParallel(), "down": RowwiseParallel()})
    row_wise, norm = block.down.weight, block.norm.weight
    kwargs: dict[str, Any] = {"mesh": mesh["dp_shard"]}
    if aligned:
        kwargs["shard_placement_fn"] = lambda p: Shard(1) if p is row_wise else None
        kwargs["ignored_params"] = {norm}
    fully_shard(block, **kwargs)
    found = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in block.named_parameters()}
    return {n: t.detach().reshape(-1).tolist() for n, t in found.items()}


def all_cases(rank: int) -> list[dict[str, Any]]:
    """All cases on one rank."""
    return [local_values(*case) for case in CASES]


def test_planned_regions_are_the_live_shards(tmp_path: Path) -> None:
    """Each rank's numbers are those of its region, uneven and empty parts included.

    It catches a torch release that cuts in another order, and a layout that puts tensor parallel inside of FSDP2.
    """
    live = run_ranks(all_cases, WORLD, tmp_path)
    for number, (sizes, aligned, inner) in enumerate(CASES):
        mesh = Mesh.of(range(WORLD), dp_shard=sizes[0], tp=sizes[1])
        for name, shape, tp_dim in (("gate", (inner, 8), 0), ("down", (8, inner), 1), ("norm", (8,), None)):
            layout = training_layout(WeightShape(name=name, shape=shape, tp_dim=tp_dim), mesh, aligned=aligned)
            whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
            everything = Region(offset=(0,) * len(shape), shape=shape)
            for rank, region in layout.regions(shape).items():
                expected = whole[region.slices(everything)].reshape(-1).tolist() if region.num_elements else []
                assert live[rank][number][f"{name}.weight"] == expected, (CASES[number], name, rank, region)
