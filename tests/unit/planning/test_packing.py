"""Packing: every sequence once, no bin over the capacity, close to the lower bound, the same on every rank."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from rlspeed.errors import LayoutError
from rlspeed.planning.packing import PackPlan, equal_bins, lower_bound, pack


def log_normal(count: int, longest: int, seed: int) -> list[int]:
    """Lengths with median 300 and P95 1,536, cut at `longest`."""
    sigma = np.log(1536 / 300) / 1.6448536
    drawn = np.random.default_rng(seed).lognormal(np.log(300), sigma, count)
    return [int(n) for n in np.clip(drawn.round(), 1, longest)]


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """The true optimum by exhaustive assignment; only for a handful of sequences."""

    def fits(left: list[int], free: list[int]) -> bool:
        if not left:
            return True
        for space in set(free):
            if space >= left[0]:
                rest = free.copy()
                rest[rest.index(space)] -= left[0]
                if fits(left[1:], rest):
                    return True
        return False

    ordered = sorted(lengths, reverse=True)
    return next(n for n in itertools.count() if fits(ordered, [capacity] * n))


@pytest.mark.parametrize("algorithm", ["best_fit", "first_fit"])
def test_random_lengths_keep_every_invariant(algorithm: str) -> None:
    """PackPlan checks itself (each index once, no bin over); here also determinism, order and the bound."""
    rng = random.Random(1)
    for _ in range(300):
        multiple = rng.choice([1, 2, 4, 8])
        capacity = multiple * rng.randint(1, 300)
        lengths = [rng.randint(1, capacity) for _ in range(rng.randint(0, 60))]
        plan = pack(lengths, capacity, multiple=multiple, algorithm=algorithm)
        assert plan == pack(list(lengths), capacity, multiple=multiple, algorithm=algorithm)
        assert all(list(b) == sorted(b) for b in plan.bins)
        weights = [sum(lengths[i] ** 2 for i in b) for b in plan.bins]
        assert weights == sorted(weights, reverse=True)
        assert plan.lower_bound <= len(plan.bins)
        assert all(row % multiple == 0 and t <= row <= capacity for t, row in zip(plan.bin_tokens, plan.bin_rows))
        # both decreasing methods stay within 11/9 of the optimum plus one bin
        assert len(plan.bins) <= 11 / 9 * max(plan.lower_bound, 1) * 1.5 + 1


def test_small_cases_reach_the_optimum_and_the_bound_never_exceeds_it() -> None:
    rng = random.Random(2)
    gap = 0
    for _ in range(150):
        capacity = rng.randint(6, 30)
        lengths = [rng.randint(1, capacity) for _ in range(rng.randint(1, 8))]
        best = fewest_bins(lengths, capacity)
        assert lower_bound(lengths, capacity) <= best
        gap += len(pack(lengths, capacity).bins) - best
    assert gap <= 2


@pytest.mark.parametrize("capacity", [1536, 4096, 8192])
def test_log_normal_lengths_fill_the_bins(capacity: int) -> None:
    plan = pack(log_normal(100_000, capacity, seed=0), capacity)
    assert plan.fill >= 0.99
    assert len(plan.bins) <= plan.lower_bound * 1.001


def test_hard_token_cap(conformance: dict[str, dict]) -> None:
    """balance/hard_token_cap: ceil(tokens / cap) is 7, yet 8 bins are needed and none may hold two sequences."""
    case = conformance["balance/hard_token_cap"]
    lengths, cap, expected = case["input"]["lengths"], case["input"]["cap"], case["expected"]
    plan = pack(lengths, cap)
    assert -(-sum(lengths) // cap) == expected["ceil_bound"]
    assert len(plan.bins) == plan.lower_bound == expected["required_micro_batches"]
    assert max(plan.bin_tokens) == expected["max_tokens_in_a_micro_batch"]


def test_pack_14_overlong_sequences_are_named_and_nothing_is_cut() -> None:
    """pack-14: capacity 3, lengths 4, 2, 3, 1."""
    with pytest.raises(LayoutError) as caught:
        pack([4, 2, 3, 1], 3)
    assert "sequence 0" in str(caught.value)
    assert "length 4" in str(caught.value)
    assert "capacity of 3" in str(caught.value)
    with pytest.raises(LayoutError, match=r"sequence 0, 2: lengths up to 9"):
        pack([9, 1, 8], 4)
    with pytest.raises(LayoutError, match=r"and 90 more"):
        pack([5] * 100, 4)


def test_all_faults_at_once() -> None:
    with pytest.raises(LayoutError) as caught:
        pack([9, 0, -1, 3], 7, multiple=2)
    assert len(caught.value.faults) == 3
    text = str(caught.value)
    assert "use 8" in text
    assert "sequence 1, 2: no tokens" in text
    assert "sequence 0" in text


def test_pack_22_ranks_get_equally_many_bins() -> None:
    """pack-22: rank 0 has five sequences of 95 tokens, rank 1 five of 20, cap 100: both run five micro-batches."""
    plans = equal_bins([pack([95] * 5, 100), pack([20] * 5, 100)])
    assert [len(p.bins) for p in plans] == [5, 5]
    assert [sum(1 for b in p.bins if not b) for p in plans] == [0, 4]
    assert plans[1] == pack([20] * 5, 100, min_bins=5)
    assert plans[1].fill == 1.0


def test_nothing_to_pack() -> None:
    plan = pack([], 16)
    assert (plan.bins, plan.fill, plan.lower_bound) == ((), 1.0, 0)
    assert pack([], 16, min_bins=2).bins == ((), ())
    assert equal_bins([]) == ()


@pytest.mark.parametrize(
    ("bins", "message"),
    [
        (((0, 1),), "2 are not in exactly one"),
        (((0, 1), (1, 2)), "sequences 1 are not"),
        (((0, 1, 2),), "has 9 tokens"),
        (((0, 1), (2, 3)), "outside 0..2"),
        (((0, 1), (2, -1)), "outside 0..2"),
    ],
)
def test_a_wrong_plan_cannot_exist(bins: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        PackPlan(lengths=(3, 3, 3), capacity=6, multiple=1, bins=bins)
