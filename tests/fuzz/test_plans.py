"""Packer and planners: a plan that keeps its promises, or a LayoutError."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from rlspeed.errors import LayoutError
from rlspeed.planning.balance import deal
from rlspeed.planning.buckets import plan_buckets
from rlspeed.planning.layout import Mesh
from rlspeed.planning.packing import equal_bins, pack
from rlspeed.planning.reshard import plan_reshard
from rlspeed.planning.shape import ModelShape
from rlspeed.planning.transition import interval_generation, own_generation, transition_requests

SIZES = st.one_of(st.integers(1, 40), st.integers(-2, 2), st.sampled_from([2**31, 2**40, 10**18]))


def test_packer(attempt: Any) -> None:
    """Each sequence in one bin, no bin over the capacity, never fewer bins than the bound."""

    def body(case: tuple[list[int], int, int, int, str]) -> None:
        lengths, capacity, multiple, min_bins, algorithm = case
        try:
            plan = pack(lengths, capacity, multiple=multiple, min_bins=min_bins, algorithm=algorithm)  # type: ignore[arg-type]
        except LayoutError:
            assert capacity < 1 or multiple < 1 or capacity % multiple or any(not 0 < n <= capacity for n in lengths)
            return
        assert sorted(i for b in plan.bins for i in b) == list(range(len(lengths)))
        assert all(t <= capacity for t in plan.bin_rows)
        assert len(plan.bins) >= max(plan.lower_bound, min_bins)
        assert len({len(p.bins) for p in equal_bins([plan, pack([1], 1)])}) == 1

    algorithms = st.sampled_from(["best_fit", "first_fit"])
    lengths = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 40), SIZES), max_size=60)
    attempt(st.tuples(lengths, st.one_of(SIZES, st.just(64)), st.integers(-1, 8), st.integers(0, 9), algorithms), body)


def test_dealing(attempt: Any) -> None:
    """Each sequence on one rank; with equal sizes the shares differ by one sequence at most."""

    def body(case: tuple[list[int], int, bool]) -> None:
        lengths, ranks, equal = case
        try:
            shares = deal(lengths, ranks, equal_size=equal)
        except LayoutError:
            assert ranks < 1 or any(n < 0 for n in lengths)
            return
        assert len(shares) == ranks
        assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
        if equal:
            sizes = [len(share) for share in shares]
            assert max(sizes) - min(sizes) <= 1

    attempt(st.tuples(st.lists(SIZES, max_size=60), st.integers(-1, 12), st.booleans()), body)


def test_transitions(attempt: Any) -> None:
    """From any training layout to any generation layout: every rank gets all it needs, in buckets of the given size."""
    degree = st.sampled_from([1, 1, 2, 3, 4])

    def body(case: tuple[int, ...]) -> None:
        copies, shards, tp, generation, heads, kv_heads, width, vocab, own, bucket = case
        shape = ModelShape(
            family="llama",
            hidden=width,
            layers=1,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=2,
            intermediate=width + 1,
            vocab=vocab,
            tied=bool(own % 2),
        )
        ranks = tuple(range(copies * shards * tp))
        try:
            train = Mesh.of(ranks, dp_replicate=copies, dp_shard=shards, tp=tp)
            mesh = own_generation(ranks, generation) if own > 1 else interval_generation(train, generation)
            plan = plan_reshard(transition_requests(shape, train, mesh, aligned=bool(own % 2)), ranks_per_node=None)
            buckets = plan_buckets(plan, bucket)
        except LayoutError:
            return
        assert len(plan.tensors) == len(shape.weights())
        moved = sum(move.region.num_elements for tensor in plan.tensors for move in tensor.moves)
        pieces = [p for rank in plan.ranks for p in buckets.copies(rank)]
        pieces += [p for b in buckets.buckets for p in b.pieces]
        assert sum(p.region.num_elements for p in pieces) == moved

    attempt(
        st.tuples(
            degree,
            degree,
            degree,
            degree,
            st.integers(1, 8),
            st.integers(1, 8),
            st.integers(1, 12),
            st.integers(1, 61),
            st.integers(0, 3),
            st.sampled_from([0, 1, 16, 64, 1 << 20]),
        ),
        body,
    )
