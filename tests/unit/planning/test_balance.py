"""Partition and deal: every index once, sums close together, the published cases."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rlspeed.errors import LayoutError
from rlspeed.planning.balance import deal, partition, workload


@pytest.mark.parametrize("name", ["textbook", "equal_size", "lengths"])
def test_karmarkar_karp_cases(conformance: dict[str, dict], name: str) -> None:
    case = conformance[f"balance/karmarkar_karp_{name}"]
    given, expected = case["input"], case["expected"]
    parts = partition(given["values"], given["k"], given["equal_size"])
    sums = [sum(given["values"][i] for i in p) for p in parts]
    assert sums == expected["sums_desc"]
    assert max(sums) - min(sums) == expected["spread"]
    if given["equal_size"]:
        assert len({len(p) for p in parts}) == 1


def test_workload_case(conformance: dict[str, dict]) -> None:
    case = conformance["balance/workload"]
    assert list(workload(case["input"]["lengths"])) == case["expected"]["workload"]


@pytest.mark.parametrize("equal_size", [False, True])
def test_every_index_once(equal_size: bool) -> None:
    rng = random.Random(3)
    for _ in range(400):
        k = rng.randint(1, 12)
        values = [rng.choice([0, 1, 5, rng.randint(1, 4000), rng.random()]) for _ in range(rng.randint(0, 60))]
        parts = partition(values, k, equal_size)
        assert len(parts) == k
        assert sorted(i for p in parts for i in p) == list(range(len(values)))
        assert all(list(p) == sorted(p) for p in parts)
        assert parts == partition(list(values), k, equal_size)
        if equal_size:
            counts = [len(p) for p in parts]
            assert max(counts) - min(counts) <= 1


def test_never_worse_than_greedy_on_lengths_of_a_step() -> None:
    """The bound that matters to a step is the busiest rank; longest-first greedy is what one would write by hand."""
    rng = np.random.default_rng(4)
    for _ in range(50):
        lengths = np.clip(rng.lognormal(5.7, 1.0, 256), 1, 4096).astype(int).tolist()
        costs = workload(lengths)
        busiest = max(sum(costs[i] for i in part) for part in deal(lengths, 8))
        ranks = [0.0] * 8
        for cost in sorted(costs, reverse=True):
            ranks[ranks.index(min(ranks))] += cost
        assert busiest <= max(ranks) * (1 + 1e-9)
        assert busiest <= sum(costs) / 8 * 1.001


def test_ten_thousand_sequences_come_out_even() -> None:
    lengths = np.clip(np.random.default_rng(5).lognormal(5.7, 1.0, 10_000), 1, 4096).astype(int).tolist()
    costs = workload(lengths)
    for equal_size in (False, True):
        sums = [sum(costs[i] for i in part) for part in deal(lengths, 64, equal_size=equal_size)]
        assert max(sums) / (sum(sums) / 64) < 1.0001


def test_more_ranks_than_sequences_leaves_empty_shares() -> None:
    """life-16: one prompt left, two ranks."""
    assert deal([7], 2) == ((0,), ())
    assert deal([], 3) == ((), (), ())
    assert deal([5, 9, 5], 4) == ((1,), (0,), (2,), ())


@pytest.mark.parametrize(("values", "k"), [([1, 2], 0), ([1, -2], 2)])
def test_refused(values: list[int], k: int) -> None:
    with pytest.raises(LayoutError):
        partition(values, k)
