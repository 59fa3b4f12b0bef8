"""Training spread over ranks gives what one rank gives: loss, gradients, their norm and the weights after a step.

One world of four gloo ranks works through all cases; those on two ranks run on either half of it at the same time.

Tolerances, in fp32. Loss and norm: sums of some hundred numbers in another order, about 1e-6 of the value, with room
for 10. A gradient: the same, measured against the largest element of the whole tensor (elements may cancel). A weight
after one AdamW step of size lr: the step is lr g / (|g| + eps); with eps at a thousandth of the largest gradient,
rounding of g moves it by less than a thousandth of lr. What a wrong reduction does to any of these is far above: a
factor of 2, a head or a slice that is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlspeed.config.schema import Optimizer
from rlspeed.engine.parallelize import full_tensor, parallelize
from rlspeed.engine.world import device_mesh
from rlspeed.models.tp_rules import rules_for
from rlspeed.planning.layout import Mesh
from rlspeed.training.optim import MasterAdamW
from tests.dist.spawn import run_ranks
from tests.dist.tiny import tiny_batch, tiny_loss, tiny_module

WORLD, BATCHES, LR = 4, 4, 1e-2
AXES = ("dp_replicate", "dp_shard", "sp", "tp")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how it is spread."""

    family: str = "llama"
    kind: str = "policy"
    tied: bool = False
    kv_heads: int = 4
    dp: int = 1
    sp: int = 1
    tp: int = 1
    copies: int = 1
    aligned: bool = False
    checkpointing: bool = False

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        return self.copies, self.dp, self.sp, self.tp

    @property
    def num_ranks(self) -> int:
        return self.copies * self.dp * self.sp * self.tp

    def __str__(self) -> str:
        cuts = [f"{n}{d}" for n, d in zip(("copies", "dp", "sp", "tp"), self.degrees) if d > 1] or ["one"]
        flags = [n for n in ("tied", "aligned", "checkpointing") if getattr(self, n)]
        return "-".join([*cuts, self.family, self.kind, f"kv{self.kv_heads}", *flags])


LAYOUTS: tuple[dict[str, int], ...] = (
    {"dp": 2},
    {"tp": 2},
    {"sp": 2},
    {"dp": 2, "tp": 2},
    {"dp": 2, "sp": 2},
    {"tp": 2, "sp": 2},
    {"dp": 4},
    {"tp": 4},
    {"sp": 4},
)
CASES = (
    *(Case(family="qwen2", tied=True, **layout) for layout in LAYOUTS),
    *(Case(family="qwen3", tied=False, **layout) for layout in LAYOUTS),
    *(Case(family="llama", kind="value", **layout) for layout in LAYOUTS),
    # fewer KV heads than ranks that share them
    Case(family="qwen2", kv_heads=2, tp=4, tied=True),
    Case(family="qwen3", kv_heads=1, tp=2, dp=2),
    Case(family="qwen3", kv_heads=2, sp=4),
    Case(family="llama", kv_heads=1, sp=2, tp=2, tied=True),
    Case(family="qwen2", kv_heads=1, sp=2, dp=2),
    # FSDP2 along the dimension of tensor parallel, norms whole
    Case(family="qwen2", aligned=True, dp=4, tied=True),
    Case(family="qwen3", aligned=True, dp=2, tp=2),
    Case(family="qwen3", aligned=True, dp=2, sp=2),
    Case(family="llama", aligned=True, copies=2, dp=2, checkpointing=True),
    # one rank is spread over nothing; copies, and activations computed twice
    Case(family="llama", tied=True, checkpointing=True),
    Case(family="llama", copies=2, dp=2, tied=True),
    Case(family="llama", copies=2, sp=2),
    Case(family="qwen3", checkpointing=True, dp=2, tp=2),
    Case(family="qwen2", checkpointing=True, sp=2, tp=2, tied=True),
)


def make(case: Case) -> nn.Module:
    return tiny_module(case.kind, case.family, tied=case.tied, kv_heads=case.kv_heads).train()


def optimizer_of(module: nn.Module, eps: float) -> MasterAdamW:
    cfg = Optimizer(lr=LR, eps=eps, weight_decay=0.1, max_grad_norm=0.5)
    return MasterAdamW(module, cfg, total_steps=1)


def one_rank(case: Case) -> dict[str, Any]:
    """Loss, gradients, norm and new weights of one process on all batches."""
    module = make(case)
    total = torch.zeros(())
    for number in range(BATCHES):
        loss = tiny_loss(module, tiny_batch(number))
        loss.backward()
        total += loss.detach()
    grads = {n: p.grad.clone() for n, p in module.named_parameters()}
    eps = 1e-3 * max(float(g.abs().max()) for g in grads.values())
    norm = optimizer_of(module, eps).step()
    new = {n: p.detach().clone() for n, p in module.named_parameters()}
    return {"loss": float(total), "grads": grads, "norm": norm, "new": new, "eps": eps}


def own_part(live: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's numbers of `live`, and the same part of `whole`."""
    if not isinstance(live, DTensor):
        return live, whole
    (chunk,) = live.__create_chunk_list__()
    part = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes))
    return live.to_local(), whole[part]


def furthest(pairs: list[tuple[torch.Tensor, torch.Tensor]], scale: float) -> float:
    gaps = [float((a - b).abs().max()) for a, b in pairs if a.numel()]
    return max(gaps, default=0.0) / scale


def spread_over(case: Case, mesh: DeviceMesh, expected: dict[str, Any]) -> dict[str, Any]:
    """The largest differences to one rank, on this rank."""
    module = make(case)
    spread = parallelize(
        module,
        mesh,
        rules_for(module),
        compute=torch.float32,
        reduce=torch.float32,
        aligned=case.aligned,
        checkpointing=case.checkpointing,
    )
    optimizer = optimizer_of(module, expected["eps"])
    share, ways = spread.data
    total = torch.zeros(())
    for number in range(share, BATCHES, ways):
        loss = tiny_loss(module, tiny_batch(number))
        loss.backward()
        total += loss.detach()
    live = dict(module.named_parameters())
    grad_gaps = {
        name: furthest([own_part(p.grad, expected["grads"][name])], float(expected["grads"][name].abs().max()))
        for name, p in live.items()
    }
    norm = optimizer.step()
    new = {n: p.detach() for n, p in module.named_parameters()}
    gathered = furthest([(full_tensor(p), expected["new"][n]) for n, p in new.items()], LR)
    ends = module.causal_lm if case.kind == "policy" else None
    return {
        "names": sorted(live) == sorted(expected["grads"]),
        "share": share,
        "loss": float(total),
        "grads": grad_gaps,
        "norm": norm,
        "new": furthest([own_part(p, expected["new"][n]) for n, p in new.items()], LR),
        "gathered": gathered,
        "tied": None if ends is None else ends.lm_head.weight is ends.model.embed_tokens.weight,
    }


def all_cases(rank: int) -> dict[str, Any]:
    """Every case on the ranks that it needs; meshes first, since all ranks make them together."""
    places, meshes = {}, {}
    for number, case in enumerate(CASES):
        ranks = {1: (0,), 2: ((0, 1), (2, 3))[number % 2], 4: (0, 1, 2, 3)}[case.num_ranks]
        places[str(case)] = ranks
        key = (case.degrees, ranks)
        if key not in meshes:
            meshes[key] = device_mesh(Mesh.of(ranks, **dict(zip(AXES, case.degrees))), "cpu")
    references: dict[Any, Any] = {}
    found = {}
    for case in CASES:
        ranks = places[str(case)]
        if rank not in ranks:
            continue
        model = (case.kind, case.family, case.tied, case.kv_heads)
        if model not in references:
            references[model] = one_rank(case)
        expected = references[model]
        try:
            result = spread_over(case, meshes[case.degrees, ranks], expected)
        except Exception as error:
            raise RuntimeError(f"case {case}") from error
        found[str(case)] = result | {"expected_loss": expected["loss"], "expected_norm": expected["norm"]}
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """For each case what its ranks found."""
    by_rank = run_ranks(all_cases, WORLD, tmp_path_factory.mktemp("parallel"))
    return {str(case): [found[str(case)] for found in by_rank if str(case) in found] for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_spread_equals_one_rank(results: dict[str, list[dict[str, Any]]], case: Case) -> None:
    ranks = results[str(case)]
    assert len(ranks) == case.num_ranks
    wanted = ranks[0]["expected_loss"]
    by_share = {found["share"]: found["loss"] for found in ranks}
    assert len(by_share) == case.copies * case.dp
    for found in ranks:
        assert found["names"]
        assert found["loss"] == by_share[found["share"]]  # ranks that share a row agree to the bit
        assert found["grads"] == {name: pytest.approx(0.0, abs=2e-5) for name in found["grads"]}
        assert found["norm"] == pytest.approx(found["expected_norm"], rel=1e-6)
        assert found["new"] < 1e-3
        assert found["gathered"] < 1e-3
        assert found["tied"] in (None, case.tied)
    assert sum(by_share.values()) == pytest.approx(wanted, rel=1e-5)
