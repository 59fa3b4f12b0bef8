"""Sequences onto ranks by cost: Karmarkar-Karp partition and the cost of a sequence."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence

from rlspeed.errors import Fault, LayoutError

# 12 h^2 L + 2 h L^2 FLOPs of a layer, divided by 2 h at h = 4096 (a 7B model): linear 24576, quadratic 1
PROXY_LINEAR = 24576.0
PROXY_QUADRATIC = 1.0

Part = tuple[float, int]  # (sum, node of the tree of items)


def workload(
    lengths: Sequence[int], linear: float = PROXY_LINEAR, quadratic: float = PROXY_QUADRATIC
) -> tuple[float, ...]:
    """Cost of each sequence: linear * L + quadratic * L^2, in whatever unit the two factors have.

    The default is a proxy for a model of hidden size 4096; `ModelShape.workload` gives the factors of a given model
    in FLOPs.
    """
    return tuple(linear * n + quadratic * n * n for n in lengths)


def deal(
    lengths: Sequence[int],
    ranks: int,
    *,
    linear: float = PROXY_LINEAR,
    quadratic: float = PROXY_QUADRATIC,
    equal_size: bool = False,
) -> tuple[tuple[int, ...], ...]:
    """Indices of the sequences of each rank, so that all ranks have nearly the same work.

    Every index comes once, ascending within its rank; with fewer sequences than ranks some shares are empty.
    equal_size: shares also have the same number of sequences, to within one.
    """
    return partition(workload(lengths, linear, quadratic), ranks, equal_size=equal_size)


def partition(values: Sequence[float], k: int, equal_size: bool = False) -> tuple[tuple[int, ...], ...]:
    """Cut `values` into k parts with nearly equal sums, by the largest differencing method (Karmarkar-Karp).

    A state is k partial sums. The two states with the widest spread are merged, the largest part of one with the
    smallest of the other, until one state is left. equal_size: begin with states of k values each, so that each part
    gets one of every state and the parts' sizes differ by at most one.

    Returns k tuples of ascending indices, the part with the largest sum first (ties: the smaller first index); each
    index is in exactly one. The result depends on `values` and `k` alone. About n log n steps.

    Raises:
        LayoutError: k < 1, or a negative value.

    Source: Karmarkar and Karp, The differencing method of set partitioning (1982).
    """
    if k < 1:
        raise LayoutError(Fault(where="partition", found=f"{k} parts", allowed="at least 1"))
    negative = [i for i, v in enumerate(values) if v < 0]
    if negative:
        raise LayoutError(Fault(where=f"value {negative[0]}", found=str(values[negative[0]]), allowed="costs from 0"))
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    step = k if equal_size else 1
    # a state lists its parts ascending; parts that are missing up to k are empty, so many small states cost little
    states = [sorted((float(values[i]), i) for i in order[at : at + step]) for at in range(0, len(order), step)]
    pairs: list[tuple[int, int]] = []  # node len(values) + j joins two nodes
    heap = [(-_spread(s, k), number, s) for number, s in enumerate(states)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        wide = heapq.heappop(heap)[2]
        other = heapq.heappop(heap)[2]
        merged = _merge(wide, other, k, pairs, len(values))
        heapq.heappush(heap, (-_spread(merged, k), number, merged))
        number += 1
    parts = [tuple(sorted(_items(node, pairs, len(values)))) for _, node in heap[0][2]] if heap else []
    sums = {part: sum(values[i] for i in part) for part in parts}
    parts.sort(key=lambda part: (-sums[part], part[0]))
    return tuple(parts) + ((),) * (k - len(parts))


def _spread(state: list[Part], k: int) -> float:
    """Largest minus smallest part."""
    return state[-1][0] - (state[0][0] if len(state) == k else 0.0)


def _merge(a: list[Part], b: list[Part], k: int, pairs: list[tuple[int, int]], num_values: int) -> list[Part]:
    """One state of two: the largest parts of one beside the smallest of the other (missing ones are empty)."""
    if len(b) > len(a):
        a, b = b, a
    if len(b) == 1 and len(a) < k:
        insort(a, b[0])
        return a
    alone = min(k - len(a), len(b))  # the largest of b go beside nothing
    out = b[len(b) - alone :] + a[len(b) - alone :]
    for small, large in zip(a, reversed(b[: len(b) - alone])):
        pairs.append((small[1], large[1]))
        out.append((small[0] + large[0], num_values + len(pairs) - 1))
    out.sort()
    return out


def _items(node: int, pairs: list[tuple[int, int]], num_values: int) -> list[int]:
    """Indices of the values below a node."""
    found, stack = [], [node]
    while stack:
        at = stack.pop()
        if at < num_values:
            found.append(at)
        else:
            stack.extend(pairs[at - num_values])
    return found
