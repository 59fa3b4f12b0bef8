"""Reshard plans: carried out on arrays, counted against the lower bound, and the published volumes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rlspeed.errors import LayoutError
from rlspeed.planning.layout import Layout, Mesh, Region
from rlspeed.planning.reshard import Move, ReshardPlan, TensorPlan, TensorRequest, least_bytes, plan_reshard


def random_layout(rng: random.Random, ranks: list[int], num_dims: int) -> Layout:
    """Any cut order, any axes left to replicate."""
    count = len(ranks)
    outer = rng.choice([n for n in range(1, count + 1) if count % n == 0])
    middle = rng.choice([n for n in range(1, count // outer + 1) if (count // outer) % n == 0])
    mesh = Mesh.of(ranks, x=outer, y=middle, z=count // outer // middle)
    cuts: list[list[str]] = [[] for _ in range(num_dims)]
    for axis in rng.sample(["x", "y", "z"], 3):
        place = rng.randint(-1, num_dims - 1)
        if place >= 0:
            cuts[place].append(axis)
    return Layout(mesh=mesh, cuts=tuple(map(tuple, cuts)))


def random_request(rng: random.Random, name: str) -> TensorRequest:
    """Overlapping, disjoint, equal and single rank sets; lengths from 0."""
    shape = tuple(rng.choice([0, 1, 2, 3, 5, 8, 13]) for _ in range(rng.randint(0, 3)))
    src = rng.sample(range(12), rng.randint(1, 8))
    kind = rng.choice(["same", "disjoint", "any"])
    if kind == "same":
        dst = rng.sample(src, len(src))
    else:
        pool = [r for r in range(16) if kind == "any" or r not in src]
        dst = rng.sample(pool, rng.randint(1, min(8, len(pool))))
    return TensorRequest(
        name=name,
        shape=shape,
        wire_dtype=rng.choice(["fp32", "bf16"]),
        src=random_layout(rng, src, len(shape)),
        dst=random_layout(rng, dst, len(shape)),
    )


def carry_out(tensor: TensorPlan, whole: np.ndarray) -> dict[int, np.ndarray]:
    """What each destination rank holds after the moves; -1 where nothing came."""
    everything = Region(offset=(0,) * whole.ndim, shape=whole.shape)
    held = {r: (g, whole[g.slices(everything)]) for r, g in tensor.src.regions(tensor.shape).items()}
    wanted = tensor.dst.regions(tensor.shape)
    out = {r: np.full(g.shape, -1) for r, g in wanted.items()}
    for move in tensor.moves:
        region, local = held[move.src]
        out[move.dst][move.region.slices(wanted[move.dst])] = local[move.region.slices(region)]
    return out


@pytest.mark.parametrize("seed", range(8))
def test_random_transitions(seed: int) -> None:
    """4,000 random pairs of layouts: right values everywhere, bytes at the lower bound, own elements never travel."""
    rng = random.Random(seed)
    for _ in range(500):
        request = random_request(rng, "w")
        (tensor,) = plan_reshard([request]).tensors
        whole = np.arange(int(np.prod(request.shape))).reshape(request.shape)
        everything = Region(offset=(0,) * whole.ndim, shape=whole.shape)
        for rank, local in carry_out(tensor, whole).items():
            region = request.dst.region(request.shape, rank)
            if region.num_elements:
                assert np.array_equal(local, whole[region.slices(everything)])
        received = ReshardPlan(tensors=(tensor,)).bytes_received()
        least = least_bytes(request.shape, request.src, request.dst, tensor.element_bytes)
        assert {r: received[r] for r in least} == least
        assert tensor == plan_reshard([request]).tensors[0]


def test_replicas_share_the_load() -> None:
    """Four holders of everything, four receivers elsewhere: each holder sends to one."""
    src = Layout(mesh=Mesh.of(range(4), dp=4), cuts=((), ()))
    dst = Layout(mesh=Mesh.of(range(4, 8), dp=4), cuts=((), ()))
    plan = plan_reshard([TensorRequest(name="w", shape=(8, 8), wire_dtype="bf16", src=src, dst=dst)])
    assert plan.bytes_sent() == {0: 128, 1: 128, 2: 128, 3: 128, 4: 0, 5: 0, 6: 0, 7: 0}
    assert plan.bytes_by_pair() == {(0, 4): 128, (1, 5): 128, (2, 6): 128, (3, 7): 128}


def test_load_is_shared_over_tensors() -> None:
    """One small receiver: without memory of earlier tensors rank 0 would send everything."""
    src = Layout(mesh=Mesh.of(range(3), dp=3), cuts=((),))
    dst = Layout(mesh=Mesh.of([9], dp=1), cuts=((),))
    names = [f"w{i}" for i in range(6)]
    plan = plan_reshard(TensorRequest(name=n, shape=(4,), wire_dtype="fp32", src=src, dst=dst) for n in names)
    assert Counter(m.src for t in plan.tensors for m in t.moves) == {0: 2, 1: 2, 2: 2}


def test_own_node_first() -> None:
    """Replicas on two nodes: no byte crosses between them, and each rank sends as much as any other."""
    src = Layout(mesh=Mesh.of(range(8), replicate=2, dp_shard=4), cuts=(("dp_shard",), ()))
    dst = Layout(mesh=Mesh.of(range(8), dp=8), cuts=((), ()))
    request = TensorRequest(name="w", shape=(8, 4), wire_dtype="bf16", src=src, dst=dst)
    pairs = plan_reshard([request], ranks_per_node=4).bytes_by_pair()
    assert all(a // 4 == b // 4 for a, b in pairs)
    assert set(plan_reshard([request], ranks_per_node=4).bytes_sent().values()) == {48}
    # a node without any holder is still served
    far = replace(request, dst=Layout(mesh=Mesh.of([8, 9], dp=2), cuts=((), ())))
    assert plan_reshard([far], ranks_per_node=4).bytes_received()[9] == 64


def test_order_is_fixed_by_name_rank_and_offset() -> None:
    rng = random.Random(7)
    requests = [random_request(rng, f"w{i}") for i in range(20)]
    plan = plan_reshard(requests)
    rng.shuffle(requests)
    assert plan == plan_reshard(requests)
    assert [t.name for t in plan.tensors] == sorted(f"w{i}" for i in range(20))


def test_sync_14_bytes_are_known_before_a_run() -> None:
    """sync-14: sent, received and copied bytes add up to what the destinations hold."""
    rng = random.Random(11)
    plan = plan_reshard([random_request(rng, f"w{i}") for i in range(30)])
    held = sum(r.num_elements * t.element_bytes for t in plan.tensors for r in t.dst.regions(t.shape).values())
    assert sum(plan.bytes_received().values()) == sum(plan.bytes_sent().values()) == plan.num_bytes
    assert plan.num_bytes + sum(plan.bytes_copied().values()) == held


def test_a_wrong_plan_cannot_exist() -> None:
    """Dropped, doubled, reordered and stolen moves, as a bug in the planner would make them."""
    src = Layout(mesh=Mesh.of([0, 1], dp=2), cuts=(("dp",),))
    dst = Layout(mesh=Mesh.of([0, 1], tp=2), cuts=((),))
    (good,) = plan_reshard([TensorRequest(name="w", shape=(6,), wire_dtype="bf16", src=src, dst=dst)]).tensors
    moves = good.moves
    other = Move(src=1, dst=0, region=Region(offset=(0,), shape=(3,)))
    outside = Move(src=0, dst=5, region=Region(offset=(0,), shape=(3,)))
    for wrong in (moves[1:], (moves[0], *moves), moves[::-1], (other, *moves[1:]), (*moves, outside)):
        with pytest.raises(LayoutError):
            replace(good, moves=wrong)
    with pytest.raises(LayoutError, match="wire dtype"):
        replace(good, wire_dtype="bf17")
    with pytest.raises(LayoutError, match="twice"):
        ReshardPlan(tensors=(good, good))
    assert replace(good, moves=moves) == good
