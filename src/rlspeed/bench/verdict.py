"""Whether one measurement is better than another, from their spreads; fewer than three steps are not judged.

The ratio of two values is that of their medians. What it may be is a 95 % interval of the difference of the logarithms:
where it holds 1, nothing can be told. The interval is that of Hodges and Lehmann (1963), from the ranks alone, so one
slow step among many decides nothing; samples too few for ranks to reach 95 % (three beside three or four) take
Welch's (1947). Samples of one process are not independent of each other (a slow minute meets all of them), so
differences under `LEAST` are never told.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rlspeed.bench.record import Value

LEAST_SAMPLES = 3
LEAST = 0.02
# 97.5 % quantiles of Student's t by degrees of freedom; between them 1/df is interpolated (Abramowitz and Stegun 26.10)
T_TABLE = (
    (1, 12.706),
    (2, 4.303),
    (3, 3.182),
    (4, 2.776),
    (5, 2.571),
    (6, 2.447),
    (8, 2.306),
    (10, 2.228),
    (15, 2.131),
    (20, 2.086),
    (30, 2.042),
    (60, 2.000),
    (120, 1.980),
)
T_INFINITE = 1.960

Call = Literal["better", "worse", "cannot tell", "same", "too few steps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """ratio: other median / first median. low, high: what the ratio may be (None: not judged). better says nothing of
    direction: of seconds less is better, of tokens/s more.
    """

    ratio: float | None
    low: float | None
    high: float | None
    call: Call


def judge(first: Value, other: Value, *, more_is_better: bool) -> Verdict:
    """`other` beside `first`."""
    a, b = statistics.median(first.samples), statistics.median(other.samples)
    ratio = b / a if a > 0 else None
    call: Call
    if min(len(first.samples), len(other.samples)) < LEAST_SAMPLES:
        return Verdict(ratio=ratio, low=None, high=None, call="too few steps")
    if a == b and max(first.samples) == min(first.samples) and max(other.samples) == min(other.samples):
        return Verdict(ratio=ratio, low=1.0, high=1.0, call="same")
    if max(first.samples) <= 0 < min(other.samples) or max(other.samples) <= 0 < min(first.samples):
        call = "better" if (b > a) == more_is_better else "worse"
        return Verdict(ratio=ratio, low=None, high=None, call=call)
    if min(first.samples) <= 0 or min(other.samples) <= 0:
        return Verdict(ratio=ratio, low=None, high=None, call="cannot tell")
    low, high = ratio_interval(first.samples, other.samples)
    call = "cannot tell"
    assert ratio is not None
    if (low > 1.0 and ratio >= 1.0 + LEAST) or (high < 1.0 and ratio <= 1.0 - LEAST):
        call = "better" if (ratio > 1.0) == more_is_better else "worse"
    return Verdict(ratio=ratio, low=low, high=high, call=call)


def ratio_interval(first: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the ratio other / first; all samples above 0, at least two of each."""
    a, b = [math.log(x) for x in first], [math.log(x) for x in other]
    rank = rank_quantile(len(a), len(b))
    if rank == 0:
        return welch_interval(a, b)
    differences = sorted(y - x for x in a for y in b)
    return math.exp(differences[rank - 1]), math.exp(differences[-rank])


def welch_interval(first: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """exp of Welch's 95 % interval of the difference of the means of these logarithms."""
    shares = [statistics.variance(x) / len(x) for x in (first, other)]
    total = sum(shares)
    middle = statistics.fmean(other) - statistics.fmean(first)
    if total == 0.0:
        return math.exp(middle), math.exp(middle)
    freedom = total**2 / sum(s**2 / (len(x) - 1) for s, x in zip(shares, (first, other)))
    half = student_t(freedom) * math.sqrt(total)
    return math.exp(middle - half), math.exp(middle + half)


@cache
def rank_quantile(n: int, m: int) -> int:
    """Smallest u with P(U <= u) >= 2.5 % for Mann and Whitney's U of n and m samples; exact up to 40 in all.

    Counted by how many of the n-subsets of 1..n+m have each sum of ranks.
    """
    if n + m > 40:
        return max(0, math.ceil(n * m / 2 - T_INFINITE * math.sqrt(n * m * (n + m + 1) / 12)))
    ways: list[dict[int, int]] = [{0: 1}, *({} for _ in range(n))]
    for rank in range(1, n + m + 1):
        for size in range(n, 0, -1):
            for total, count in ways[size - 1].items():
                ways[size][total + rank] = ways[size].get(total + rank, 0) + count
    least, wanted, seen = n * (n + 1) // 2, 0.025 * math.comb(n + m, n), 0
    for u in range(n * m + 1):
        seen += ways[n].get(least + u, 0)
        if seen >= wanted:
            return u
    return 0


def student_t(freedom: float) -> float:
    """97.5 % quantile of Student's t."""
    points = [*T_TABLE, (math.inf, T_INFINITE)]
    if freedom <= 1:
        return T_TABLE[0][1]
    for (low, above), (high, below) in itertools.pairwise(points):
        if freedom <= high:
            share = (1 / freedom - 1 / high) / (1 / low - 1 / high)
            return below + (above - below) * share
    return T_INFINITE
