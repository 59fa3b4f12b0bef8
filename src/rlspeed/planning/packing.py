"""Sequences into bins of at most `capacity` tokens: whole sequences, each once, never over the capacity.

The packer is best-fit decreasing over the histogram of free space: the longest sequence first, each into the fullest
bin that still takes it. Bins with the same free space are interchangeable, so the search is one bisection in the
short list of distinct free spaces, not a walk over bins.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rlspeed.errors import Fault, LayoutError

Algorithm = Literal["best_fit", "first_fit"]
_NAMED = 10  # indices named in an error before "and N more"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """Which sequences share a bin.

    lengths: tokens of each sequence, all at least 1. capacity: most tokens in a bin, a multiple of `multiple` (sp *
    tp).
    bins: indices into `lengths`, each once; empty bins are spare ones that keep ranks in step.

    Raises:
        LayoutError: an index missing or twice, a bin over the capacity, or impossible lengths.
    """

    lengths: tuple[int, ...]
    capacity: int
    multiple: int
    bins: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        faults = length_faults(self.lengths, self.capacity, self.multiple)
        if faults:
            raise LayoutError(faults)
        lengths = np.asarray(self.lengths, dtype=np.int64)
        flat = np.fromiter((i for b in self.bins for i in b), dtype=np.int64)
        if flat.size and (flat.min() < 0 or flat.max() >= lengths.size):
            raise LayoutError(f"pack plan: an index outside 0..{lengths.size - 1}")
        seen = np.bincount(flat, minlength=lengths.size)
        if (seen != 1).any():
            wrong = np.flatnonzero(seen != 1)
            raise LayoutError(f"pack plan: sequences {name_indices(wrong.tolist())} are not in exactly one bin")
        owner = np.repeat(np.arange(len(self.bins)), [len(b) for b in self.bins])
        tokens = np.bincount(owner, weights=lengths[flat], minlength=len(self.bins))
        if tokens.size and tokens.max() > self.capacity:
            raise LayoutError(
                f"pack plan: bin {int(tokens.argmax())} has {int(tokens.max())} tokens, over {self.capacity}"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    @property
    def bin_tokens(self) -> tuple[int, ...]:
        """Tokens in each bin, without the filling up to `multiple`."""
        return tuple(sum(self.lengths[i] for i in b) for b in self.bins)

    @property
    def bin_rows(self) -> tuple[int, ...]:
        """Length of each bin's row: its tokens filled up to a multiple of `multiple`; at most the capacity."""
        return tuple(-(-t // self.multiple) * self.multiple for t in self.bin_tokens)

    @property
    def fill(self) -> float:
        """Tokens as a share of the capacity of the bins in use; 1.0 when there is nothing to pack."""
        used = sum(1 for b in self.bins if b)
        return self.num_tokens / (used * self.capacity) if used else 1.0

    @property
    def lower_bound(self) -> int:
        """No plan whatever can have fewer bins (Martello and Toth's L2)."""
        return lower_bound(self.lengths, self.capacity)


def pack(
    lengths: Sequence[int], capacity: int, *, multiple: int = 1, min_bins: int = 0, algorithm: Algorithm = "best_fit"
) -> PackPlan:
    """Fill bins of `capacity` tokens, near-optimally and always in the same way.

    min_bins: append empty bins up to this number, so that all ranks of a group run the same number of micro-batches.
    algorithm: best_fit puts a sequence into the fullest bin that takes it, first_fit into the oldest; both longest
    first.

    Bins come heaviest first by sum of squared lengths (the work of attention), so ranks that run their bins in step
    meet bins of similar work, and the most memory is needed at once; inside a bin, indices ascend.

    Raises:
        LayoutError: a sequence longer than the capacity or without tokens (all are named), or a capacity that is not a
            positive multiple of `multiple`.
    """
    sizes = tuple(int(n) for n in lengths)
    faults = length_faults(sizes, capacity, multiple)
    if faults:
        raise LayoutError(faults)
    order = np.argsort(-np.asarray(sizes, dtype=np.int64), kind="stable").tolist()
    filled = _best_fit(sizes, order, capacity) if algorithm == "best_fit" else _first_fit(sizes, order, capacity)
    bins = [tuple(sorted(b)) for b in filled]
    bins.sort(key=lambda b: (-sum(sizes[i] ** 2 for i in b), b[0]))
    bins.extend([()] * (min_bins - len(bins)))
    return PackPlan(lengths=sizes, capacity=capacity, multiple=multiple, bins=tuple(bins))


def equal_bins(plans: Sequence[PackPlan]) -> tuple[PackPlan, ...]:
    """The same plans, one per rank, filled up with empty bins to the number of bins of the longest."""
    most = max((len(p.bins) for p in plans), default=0)
    return tuple(replace(p, bins=p.bins + ((),) * (most - len(p.bins))) for p in plans)


def lower_bound(lengths: Sequence[int], capacity: int) -> int:
    """Fewest bins that any packing needs, by the bound L2; never below ceil(tokens / capacity).

    For a threshold k the sequences above capacity - k need a bin each, so do those above capacity / 2; what is left
    between k and capacity / 2 has to fit beside the latter or into further bins. The best k counts.

    Source: Martello and Toth, Knapsack Problems (1990), section 8.3.
    """
    sizes = np.sort(np.asarray(lengths, dtype=np.int64))
    if not sizes.size:
        return 0
    total = np.concatenate([[0], np.cumsum(sizes)])
    half = int(np.searchsorted(sizes, capacity // 2, side="right"))  # first above capacity / 2
    thresholds = np.unique(np.concatenate([[0], sizes[:half]]))
    first = np.searchsorted(sizes, thresholds, side="left")
    alone = np.maximum(np.searchsorted(sizes, capacity - thresholds, side="right"), half)
    room = (alone - half) * capacity - (total[alone] - total[half])
    rest = np.maximum(total[half] - total[first] - room, 0)
    return int((sizes.size - half + -(-rest // capacity)).max())


def length_faults(lengths: Sequence[int], capacity: int, multiple: int) -> list[Fault]:
    """What makes `lengths` impossible to pack; empty when nothing does."""
    faults = []
    if multiple < 1 or capacity < 1 or capacity % multiple:
        found = f"capacity {capacity} with multiple {multiple}"
        fix = f"use {max(1, -(-capacity // multiple)) * multiple}" if multiple >= 1 else ""
        faults.append(Fault(where="packing", found=found, allowed="a positive multiple of sp * tp", fix=fix))
    long = [i for i, n in enumerate(lengths) if n > capacity]
    if long:
        longest = max(lengths[i] for i in long)
        text = f"length {lengths[long[0]]}" if len(long) == 1 else f"lengths up to {longest}"
        faults.append(
            Fault(
                where=f"sequence {name_indices(long)}",
                found=f"{text}, over the capacity of {capacity} tokens",
                fix=f"a capacity of at least {longest}, or shorter sequences (nothing is cut or dropped here)",
            )
        )
    empty = [i for i, n in enumerate(lengths) if n < 1]
    if empty:
        faults.append(Fault(where=f"sequence {name_indices(empty)}", found="no tokens", allowed="at least 1 token"))
    return faults


def name_indices(indices: Sequence[int]) -> str:
    """`3, 7, 12`, the tail of a long list counted."""
    text = ", ".join(str(i) for i in indices[:_NAMED])
    return text if len(indices) <= _NAMED else f"{text} and {len(indices) - _NAMED} more"


def _best_fit(sizes: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices; `order` is longest first."""
    bins: list[list[int]] = []
    open_bins: dict[int, list[int]] = {}  # free space -> bins that have it
    spaces: list[int] = []  # the keys of open_bins, ascending
    for index in order:
        size = sizes[index]
        at = bisect_left(spaces, size)
        if at < len(spaces):
            space = spaces[at]
            place = open_bins[space].pop()
            if not open_bins[space]:
                del open_bins[space], spaces[at]
        else:
            space, place = capacity, len(bins)
            bins.append([])
        bins[place].append(index)
        left = space - size
        if left:
            if left in open_bins:
                open_bins[left].append(place)
            else:
                open_bins[left] = [place]
                insort(spaces, left)
    return bins


def _first_fit(sizes: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices by a tree of maxima over the bins' free space; `order` is longest first."""
    width = 1 << max(len(order) - 1, 0).bit_length()
    free = [capacity] * (2 * width)
    bins: list[list[int]] = []
    for index in order:
        size, node = sizes[index], 1
        while node < width:
            node *= 2
            if free[node] < size:
                node += 1
        place = node - width
        if place == len(bins):
            bins.append([])
        bins[place].append(index)
        free[node] -= size
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return bins
