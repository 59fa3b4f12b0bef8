"""Buckets: every wire move once and no other, none fuller than asked, the collective that the pieces allow."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rlspeed.errors import LayoutError
from rlspeed.planning.buckets import Bucket, BucketPlan, plan_buckets, wire_bytes
from rlspeed.planning.layout import Layout, Mesh
from rlspeed.planning.reshard import DTYPE_BYTES, ReshardPlan, TensorRequest, plan_reshard
from rlspeed.planning.shape import ModelShape
from rlspeed.planning.transition import interval_generation, transition_requests


def random_layout(rng: random.Random, ranks: list[int], dims: int) -> Layout:
    """Any mesh over `ranks` with up to two axes, each cutting some dimension or none."""
    a = rng.choice([d for d in range(1, len(ranks) + 1) if len(ranks) % d == 0])
    mesh = Mesh.of(ranks, x=a, y=len(ranks) // a)
    cuts: list[tuple[str, ...]] = [()] * dims
    for axis in rng.sample(["x", "y"], 2):
        dim = rng.randrange(dims + 1)
        if dim < dims:
            cuts[dim] = (*cuts[dim], axis)
    return Layout(mesh=mesh, cuts=tuple(cuts))


def random_plan(rng: random.Random, *, same_ranks: bool) -> ReshardPlan:
    everyone = list(range(rng.randint(1, 6)))
    src = rng.sample(everyone, len(everyone) if same_ranks else rng.randint(1, len(everyone)))
    dst = list(src) if same_ranks else rng.sample(everyone, rng.randint(1, len(everyone)))
    requests = []
    for i in range(rng.randint(1, 4)):
        shape = tuple(rng.randint(0, 9) for _ in range(rng.randint(1, 2)))
        requests.append(
            TensorRequest(
                name=f"w{i}",
                shape=shape,
                wire_dtype=rng.choice(["bf16", "bf16", "fp32"]),
                src=random_layout(rng, src, len(shape)),
                dst=random_layout(rng, dst, len(shape)),
            )
        )
    return plan_reshard(requests)


def elements(plan: ReshardPlan, cut: BucketPlan) -> tuple[set[tuple], set[tuple], int]:
    """(sender, receiver, name, index) of every element: of the plan's wire moves and of the buckets, and how many."""

    def spell(name: str, src: int, dst: int, region) -> list[tuple]:
        rows = [()]
        for start, count in zip(region.offset, region.shape):
            rows = [(*r, i) for r in rows for i in range(start, start + count)]
        return [(src, dst, name, *r) for r in rows]

    planned = [
        e for t in plan.tensors for m in t.moves if not m.is_local for e in spell(t.name, m.src, m.dst, m.region)
    ]
    carried = [e for b in cut.buckets for p in b.pieces for e in spell(p.name, p.src, p.dst, p.region)]
    return set(planned), set(carried), len(carried)


@pytest.mark.parametrize("seed", range(8))
def test_buckets_carry_each_wire_move_once(seed: int) -> None:
    """300 random plans: the buckets' elements are the plan's, and no bucket is fuller than it may be."""
    rng = random.Random(seed)
    for _ in range(300):
        plan = random_plan(rng, same_ranks=rng.random() < 0.5)
        limit = rng.choice([8, 64, 10_000])
        cut = plan_buckets(plan, limit)
        planned, carried, count = elements(plan, cut)
        assert carried == planned
        assert count == len(planned)
        assert sum(p.region.num_elements for rank in plan.ranks for p in cut.copies(rank)) == sum(
            m.region.num_elements for t in plan.tensors for m in t.moves if m.is_local
        )
        for bucket in cut.buckets:
            for rank in plan.ranks:
                check_load(plan, bucket, rank, limit)
                sent = [(p.name, p.region) for p in bucket.sent_by(rank)]
                assert bucket.how != "all_gather" or len(set(sent)) == len(sent)


def check_load(plan: ReshardPlan, bucket: Bucket, rank: int, limit: int) -> None:
    """No rank's load is over the limit; one tensor cut by whole lines may pass it by a line for each of its pieces."""
    width = DTYPE_BYTES[bucket.wire_dtype]
    for end, load in zip(("src", "dst"), wire_bytes(bucket, rank)):
        pieces = [p for p in bucket.pieces if getattr(p, end) == rank]
        names = {p.name for p in pieces}
        regions = [m.region for t in plan.tensors if t.name in names for m in t.moves]
        line = max((r.num_elements // max(r.shape) for r in regions), default=0) * width
        assert load <= limit + (len(pieces) * line if len(names) == 1 else 0)


def test_a_replica_comes_by_all_gather_and_uneven_parts_do_not() -> None:
    """FSDP over four ranks to whole copies: even matrices gather; 9 rows over 4 (3, 3, 3, 0) go all-to-all."""
    mesh = Mesh.of(range(4), dp_shard=4)
    whole = Layout(mesh=mesh, cuts=((), ()))
    cut = Layout(mesh=mesh, cuts=(("dp_shard",), ()))
    requests = [
        TensorRequest(name=n, shape=(rows, 2), wire_dtype="bf16", src=cut, dst=whole)
        for n, rows in (("a", 8), ("b", 9), ("c", 16))
    ]
    plan = plan_reshard(requests)
    buckets = plan_buckets(plan, 1 << 20).buckets
    assert {b.how: sorted({p.name for p in b.pieces}) for b in buckets} == {
        "all_gather": ["a", "c"],
        "all_to_all": ["b"],
    }
    gather = next(b for b in buckets if b.how == "all_gather")
    # a shard leaves once for all three others
    assert sum(p.region.num_elements for p in gather.sent_by(1)) == 2 * 2 + 4 * 2
    assert sum(p.region.num_elements for p in gather.received_by(1)) == 3 * (2 * 2 + 4 * 2)


def test_disjoint_ranks_exchange_in_pairs_and_large_matrices_are_cut() -> None:
    """Ranks 0, 1 to rank 2: grouped send and receive; 64 rows of 32 bytes in buckets of 256 bytes per rank."""
    src = Layout(mesh=Mesh.of((0, 1), tp=2), cuts=(("tp",), ()))
    dst = Layout(mesh=Mesh.of((2,), tp=1), cuts=((), ()))
    plan = plan_reshard([TensorRequest(name="w", shape=(64, 16), wire_dtype="bf16", src=src, dst=dst)])
    buckets = plan_buckets(plan, 256).buckets
    assert {b.how for b in buckets} == {"pairs"}
    assert len(buckets) == 8
    assert all(wire_bytes(b, 2) == (0, 256) for b in buckets)


def test_a_bucket_holds_at_least_a_byte() -> None:
    plan = plan_reshard([])
    assert plan_buckets(plan, 1).buckets == ()
    with pytest.raises(LayoutError, match="buckets of 0 bytes"):
        plan_buckets(plan, 0)


@pytest.mark.parametrize("seed", range(6))
def test_what_tensors_share_changes_nothing(seed: int) -> None:
    """Tensors of few kinds, which share moves and what is computed of them, against the same plan sharing nothing."""
    rng = random.Random(seed)
    for _ in range(40):
        kinds = [t for _ in range(3) for t in random_plan(rng, same_ranks=rng.random() < 0.5).tensors]
        named = [rng.choice(kinds).renamed(f"t{i:02d}") for i in range(12)]
        plan = ReshardPlan(tensors=tuple(named))
        alone = ReshardPlan(tensors=tuple(replace(t, moves=(*t.moves,)) for t in named))
        assert len({id(t.moves) for t in alone.tensors if t.moves}) == sum(bool(t.moves) for t in alone.tensors)
        limit = rng.choice([8, 64, 400, 10_000])
        ours, expected = plan_buckets(plan, limit), plan_buckets(alone, limit)
        assert [(b.how, b.wire_dtype, b.pieces) for b in ours.buckets] == [
            (b.how, b.wire_dtype, b.pieces) for b in expected.buckets
        ]
        for rank in plan.ranks:
            assert ours.copies(rank) == expected.copies(rank)
            for ours_now, theirs in zip(ours.buckets, expected.buckets):
                listed = [p for p in theirs.pieces if p.dst == rank]
                assert list(ours_now.received_by(rank)) == listed
                assert ours_now.leaving(rank) == [p for p in theirs.pieces if p.src == rank]


def test_units_are_made_once_for_each_kind_of_tensor() -> None:
    """7B over 64 ranks to whole copies: 1.4 million pieces in the buckets, 48 thousand of them made."""
    shape = ModelShape(
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
    train = Mesh.of(range(64), dp_shard=64, tp=1)
    cut = plan_buckets(
        plan_reshard(transition_requests(shape, train, interval_generation(train, 1), aligned=False)), 1 << 28
    )
    units = [u for b in cut.buckets for _, u in b.units]
    made = {id(u): len(u.moves) for u in units}
    assert sum(len(u.moves) for u in units) > 25 * sum(made.values())
    assert sum(wire_bytes(b, 5)[1] for b in cut.buckets) == 2 * shape.num_params * 63 // 64
