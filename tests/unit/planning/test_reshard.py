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
from rlspeed.planning.shape import ModelShape
from rlspeed.planning.transition import interval_generation, own_generation, received_bytes, transition_requests

SEVEN_B = ModelShape(
    family="qwen2",
    hidden=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    intermediate=18944,
    vocab=152064,
    qkv_bias=True,
)


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


@pytest.mark.parametrize("per_node", [None, 2, 4])
def test_senders_are_the_least_loaded_of_those_that_may(per_node: int | None) -> None:
    """Against the rule as it reads, over many tensors of few kinds: the receiver itself, its node, the least bytes."""
    for seed in range(30):
        rng = random.Random(seed)
        kinds = [random_request(rng, "w") for _ in range(6)]
        sent: Counter[int] = Counter()
        requests = [replace(rng.choice(kinds), name=f"w{i:02d}") for i in range(40)]
        for tensor in plan_reshard(requests, ranks_per_node=per_node).tensors:
            held = tensor.src.regions(tensor.shape)
            for move in tensor.moves:
                holders = [r for r, g in held.items() if move.region.within(g)]
                if per_node:
                    holders = [r for r in holders if r // per_node == move.dst // per_node] or holders
                expected = move.dst if move.dst in holders else min(holders, key=lambda r: (sent[r], r))
                assert move.src == expected
                sent[move.src] += move.region.num_elements * tensor.element_bytes * (not move.is_local)


def test_tensors_of_one_kind_share_their_moves() -> None:
    """7B on 1,024 ranks has 636 thousand moves and 3 thousand of them are made: that is what makes it quick.

    Copies on each node of 8, so each box has one sender. Where several ranks may send, no moves are shared.
    """
    train = Mesh.of(range(1024), dp_replicate=128, dp_shard=8, tp=1)
    requests = transition_requests(SEVEN_B, train, interval_generation(train, 4), aligned=True)
    plan = plan_reshard(requests, ranks_per_node=8)
    kinds = {(r.shape, r.src, r.dst) for r in requests}
    assert len(plan.tensors) == 339
    assert len({id(t.moves) for t in plan.tensors}) == len(kinds) == 9
    assert plan.bytes_received() == received_bytes(SEVEN_B, train, interval_generation(train, 4), aligned=True)
    copies = Mesh.of(range(8), dp_replicate=4, dp_shard=2, tp=1)
    two = transition_requests(SEVEN_B, copies, own_generation((8,), 1), aligned=True)
    many = plan_reshard(two)
    assert len({id(t.moves) for t in many.tensors}) == 339
    assert max(many.bytes_sent().values()) < 1.1 * many.num_bytes / 8


def test_a_digest_is_equal_for_equal_plans_alone() -> None:
    src = Layout(mesh=Mesh.of(range(2), dp=2), cuts=((), ()))
    dst = Layout(mesh=Mesh.of([2], dp=1), cuts=((), ()))
    requests = [TensorRequest(name=n, shape=(2, 3), wire_dtype="bf16", src=src, dst=dst) for n in "ab"]
    plan = plan_reshard(requests)
    first, last = plan.tensors
    assert plan.digest() == plan_reshard(requests[::-1]).digest()
    others = (
        replace(last, moves=tuple(replace(m, src=1 - m.src) for m in last.moves)),
        replace(last, wire_dtype="fp16"),
        replace(last, name="c"),
    )
    digests = {ReshardPlan(tensors=(first, other)).digest() for other in others}
    assert len({plan.digest(), ReshardPlan(tensors=(first,)).digest(), *digests}) == 5


@pytest.mark.parametrize("seed", range(4))
def test_holes_and_overlaps_are_seen_in_any_arrangement(seed: int) -> None:
    """Boxes that a block is sawn into, then one moved, doubled or dropped: only the untouched ones are a plan."""
    rng = random.Random(seed)
    whole = (4, 6)
    layout = Layout(mesh=Mesh.of([0], x=1), cuts=((), ()))
    for _ in range(200):
        boxes = [Region(offset=(0, 0), shape=whole)]
        for _ in range(rng.randint(1, 6)):
            box = boxes.pop(rng.randrange(len(boxes)))
            boxes += sawn(box, rng.randrange(2), rng)
        good = tuple(Move(src=0, dst=0, region=r) for r in sorted(boxes, key=lambda r: r.offset))
        plan = TensorPlan(name="w", shape=whole, wire_dtype="bf16", src=layout, dst=layout, moves=good)
        victim = rng.choice(boxes)
        shifted = replace(victim, offset=(rng.randrange(5), rng.randrange(7)))
        spoiled = [shifted if b is victim else b for b in boxes]
        covered = Counter(cell for b in spoiled for cell in cells_of(b))
        right = covered == Counter(cells_of(Region(offset=(0, 0), shape=whole)))
        moves = tuple(Move(src=0, dst=0, region=r) for r in sorted(spoiled, key=lambda r: r.offset))
        if right:
            assert replace(plan, moves=moves) == plan
        else:
            with pytest.raises(LayoutError):
                replace(plan, moves=moves)


def sawn(box: Region, dim: int, rng: random.Random) -> list[Region]:
    """The box in two along `dim`, or as it is where that is one element thick."""
    if box.shape[dim] < 2:
        return [box]
    at = rng.randrange(1, box.shape[dim])
    low, high, far = list(box.shape), list(box.shape), list(box.offset)
    low[dim], high[dim], far[dim] = at, box.shape[dim] - at, box.offset[dim] + at
    return [Region(offset=box.offset, shape=tuple(low)), Region(offset=tuple(far), shape=tuple(high))]


def cells_of(box: Region) -> list[tuple[int, int]]:
    """Every element of a box with two dimensions."""
    (a, b), (n, m) = box.offset, box.shape
    return [(i, j) for i in range(a, a + n) for j in range(b, b + m)]


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
