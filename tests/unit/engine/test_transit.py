"""Transitions without processes: buffers of all ranks are filled, carried by hand and emptied, for random plans."""

from __future__ import annotations

import random

import pytest
import torch

from rlspeed.engine.checksum import sum_bits
from rlspeed.engine.mover import Freight
from rlspeed.engine.transit import WIRE_DTYPES, Lanes, Route, Transit
from rlspeed.planning.buckets import plan_buckets
from rlspeed.planning.layout import Layout, Mesh, Region
from rlspeed.planning.reshard import ReshardPlan, TensorRequest, plan_reshard

CPU = torch.device("cpu")


def random_plan(rng: random.Random) -> ReshardPlan:
    everyone = rng.sample(range(8), rng.randint(1, 5))
    src = rng.sample(everyone, rng.randint(1, len(everyone)))
    dst = list(src) if rng.random() < 0.5 else rng.sample(everyone, rng.randint(1, len(everyone)))

    def layout(ranks: list[int]) -> Layout:
        width = rng.choice([d for d in range(1, len(ranks) + 1) if len(ranks) % d == 0])
        cuts: list[tuple[str, ...]] = [(), ()]
        for axis in rng.sample(["x", "y"], rng.randint(0, 2)):
            dim = rng.randrange(2)
            cuts[dim] = (*cuts[dim], axis)
        return Layout(mesh=Mesh.of(ranks, x=width, y=len(ranks) // width), cuts=tuple(cuts))

    return plan_reshard(
        TensorRequest(
            name=f"w{i}",
            shape=(rng.randint(1, 9), rng.randint(1, 9)),
            wire_dtype=rng.choice(["bf16", "bf16", "fp32"]),
            src=layout(src),
            dst=layout(dst),
        )
        for i in range(rng.randint(1, 4))
    )


def deliver(transits: dict[int, Transit], members: tuple[int, ...], number: int) -> None:
    """What the collective of bucket `number` does, by its definition."""
    parts: dict[tuple[int, int], torch.Tensor] = {}
    for rank, transit in transits.items():
        freight = transit.freights[number]
        send = transit.send[number % 2][: freight.send_bytes]
        if freight.how == "all_gather":
            parts.update({(rank, other): send for other in members})
        else:
            parts.update({(rank, other): p for other, p in zip(members, send.split(list(freight.give)))})
    for rank, transit in transits.items():
        freight = transit.freights[number]
        got = torch.cat([parts[sender, rank] for sender in members])
        assert got.numel() == freight.receive_bytes
        transit.receive[transit._slot(number)][: got.numel()].copy_(got)


def wire_values(whole: torch.Tensor, region: Region, wire: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    part = tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape))
    return whole[part].to(wire).to(dtype)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("keep_old", [True, False])
def test_every_element_arrives_as_rounded_by_the_wire(seed: int, keep_old: bool) -> None:
    """40 random plans each: fp32 shards to bf16 or fp32 targets, both rounded once, whoever holds the element.

    It catches a piece at a wrong place in a buffer, an own copy that skips the rounding, and a bucket that writes into
    a buffer which is still to be read.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(40):
        plan = random_plan(rng)
        members = tuple(rng.sample(plan.ranks, len(plan.ranks)))
        cut = plan_buckets(plan, rng.choice([32, 200, 10_000]))
        dtype = rng.choice([torch.bfloat16, torch.float32])
        whole = {t.name: torch.randn(t.shape) for t in plan.tensors}
        held_types = {t.name: torch.float32 if t.wire_dtype == "fp32" else dtype for t in plan.tensors}
        transits, targets = {}, {}
        for rank in members:
            route = Route(
                cut=cut,
                rank=rank,
                group=None,
                members=members,
                device=CPU,
                held={t.name: t.src.region(t.shape, rank) for t in plan.tensors if rank in t.src.mesh.ranks},
                wanted={t.name: t.dst.region(t.shape, rank) for t in plan.tensors if rank in t.dst.mesh.ranks},
                wire={t.name: WIRE_DTYPES[t.wire_dtype] for t in plan.tensors},
            )
            sources = {n: wire_values(whole[n], r, torch.float32, torch.float32) for n, r in route.held.items()}
            targets[rank] = {n: torch.full(r.shape, 99.0, dtype=held_types[n]) for n, r in route.wanted.items()}
            lanes = Lanes(route, sources, targets[rank])
            freights = [route.freight(b) for b in cut.buckets]
            transits[rank] = Transit(route, freights, lanes, keep_old=keep_old)
        for number in range(len(cut.buckets)):
            for transit in transits.values():
                transit._pack(number)
            deliver(transits, members, number)
            for transit in transits.values():
                if not keep_old:
                    transit._load(number)
        for rank, transit in transits.items():
            if keep_old:
                assert all(bool((t == 99.0).all()) for t in targets[rank].values())
                transit.commit()
            else:
                transit._copy()
            for tensor in plan.tensors:
                if rank in tensor.dst.mesh.ranks:
                    region = tensor.dst.region(tensor.shape, rank)
                    wire = WIRE_DTYPES[tensor.wire_dtype]
                    expected = wire_values(whole[tensor.name], region, wire, held_types[tensor.name])
                    assert torch.equal(targets[rank][tensor.name], expected)


def test_in_place_two_buffers_serve_all_buckets() -> None:
    """sync-14: what a transition holds beside the weights is two buckets in each direction, however many there are."""
    mesh = Mesh.of(range(2), dp_shard=2)
    cut = Layout(mesh=mesh, cuts=(("dp_shard",), ()))
    whole = Layout(mesh=mesh, cuts=((), ()))
    plan = plan_reshard([TensorRequest(name="w", shape=(64, 16), wire_dtype="bf16", src=cut, dst=whole)])
    buckets = plan_buckets(plan, 128)
    assert len(buckets.buckets) == 8
    route = Route(
        cut=buckets,
        rank=0,
        group=None,
        members=(0, 1),
        device=CPU,
        held={"w": cut.region((64, 16), 0)},
        wanted={"w": whole.region((64, 16), 0)},
        wire={"w": torch.bfloat16},
    )
    lanes = Lanes(route, {"w": torch.zeros(32, 16)}, {"w": torch.zeros(64, 16, dtype=torch.bfloat16)})
    freights = [route.freight(b) for b in buckets.buckets]
    # an all_gather's receive buffer has the own part as well
    assert Transit(route, freights, lanes, keep_old=False).held_bytes == 2 * 128 + 2 * 256
    assert Transit(route, freights, lanes, keep_old=True).held_bytes == 2 * 128 + 8 * 256


def test_freight_of_a_gather_is_sent_once() -> None:
    freight = Freight("all_gather", (24, 0, 24), (24, 0, 24))
    assert (freight.send_bytes, freight.receive_bytes, freight.starts()) == (24, 72, (0, 24, 48))
    exchange = Freight("all_to_all", (8, 0, 4), (2, 0, 6))
    assert (exchange.send_bytes, exchange.receive_bytes, exchange.starts()) == (12, 8, (0, 2, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_checksums_see_changes_and_exchanges(dtype: torch.dtype) -> None:
    """A plain sum would miss two elements that changed places; blocks and strides make no difference."""
    torch.manual_seed(0)
    x = torch.randn(1100, 1000).to(dtype)  # more than one block
    sum_x = int(sum_bits(x))
    assert int(sum_bits(x.T.contiguous().T)) == sum_x
    swapped = x.clone()
    swapped[0, 0], swapped[0, 1] = x[0, 1], x[0, 0]
    assert not torch.equal(swapped, x)
    assert int(sum_bits(swapped)) != sum_x
    changed = x.clone()
    changed[1099, 999] += 1.0
    assert int(sum_bits(changed)) != sum_x
    assert int(sum_bits(x[:0])) == 0
