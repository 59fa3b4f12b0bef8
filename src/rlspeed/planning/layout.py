"""How a tensor is cut over ranks: a mesh of ranks, the axes that cut each dimension, the region that each rank holds.

The rule of a cut is `torch.chunk`'s: a length of n over k parts gives parts of ceil(n / k), the last ones shorter or
empty. DTensor shards and FSDP2 follow it. Where several axes cut one dimension they are named outermost first, which
need not be
the order of the mesh: FSDP2 over tensor parallel cuts by ("tp", "dp_shard") on a mesh (dp_shard, tp).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from rlspeed.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Global ranks as a grid with named axes.

    axes: (name, size) outermost first. ranks: row-major, the last axis runs fastest.

    Raises:
        LayoutError: sizes that do not multiply to the number of ranks, or a name or rank twice.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        sizes = [size for _, size in self.axes]
        if any(s < 1 for s in sizes) or math.prod(sizes) != len(self.ranks):
            raise LayoutError(f"mesh {self.axes}: the sizes do not make {len(self.ranks)} ranks")
        if len(set(names)) != len(names):
            raise LayoutError(f"mesh {self.axes}: an axis name comes twice")
        if len(set(self.ranks)) != len(self.ranks) or any(r < 0 for r in self.ranks):
            raise LayoutError(f"mesh over ranks {self.ranks}: each rank once, from 0")

    @staticmethod
    def of(ranks: Sequence[int], **axes: int) -> Mesh:
        """`Mesh.of(range(8), dp_shard=4, tp=2)`."""
        return Mesh(axes=tuple(axes.items()), ranks=tuple(ranks))

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        for name, size in self.axes:
            if name == axis:
                return size
        raise LayoutError(f"mesh {self.axes} has no axis {axis!r}")

    def coordinate(self, rank: int) -> dict[str, int]:
        """Position of `rank` along each axis."""
        if rank not in self.ranks:
            raise LayoutError(f"rank {rank} is not in the mesh over {self.ranks}")
        left, out = self.ranks.index(rank), {}
        for name, size in reversed(self.axes):
            left, out[name] = divmod(left, size)
        return out

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Ranks that differ along `axes` only, ordered along them, the first outermost."""
        for axis in axes:
            self.size(axis)
        others = [name for name, _ in self.axes if name not in axes]
        found: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for rank in self.ranks:
            at = self.coordinate(rank)
            key = tuple(at[name] for name in others)
            found.setdefault(key, []).append((tuple(at[name] for name in axes), rank))
        return tuple(tuple(rank for _, rank in sorted(members)) for members in found.values())

    def split(self, axis: str, outer: int, inner_name: str) -> Mesh:
        """The same ranks with `axis` as two: `axis` of size `outer`, and `inner_name` directly inside it."""
        size = self.size(axis)
        if outer < 1 or size % outer:
            raise LayoutError(f"mesh axis {axis!r} of {size} ranks cannot be split into {outer} equal parts")
        axes: list[tuple[str, int]] = []
        for name, length in self.axes:
            axes.extend([(name, outer), (inner_name, size // outer)] if name == axis else [(name, length)])
        return Mesh(axes=tuple(axes), ranks=self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A box of a tensor in global coordinates; a dimension of length 0 makes it empty.

    Raises:
        LayoutError: offset and shape of different length, or a negative number.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape) or any(n < 0 for n in self.offset + self.shape):
            raise LayoutError(f"region at {self.offset} of shape {self.shape}: equally many numbers, from 0")

    @property
    def num_elements(self) -> int:
        """Elements inside."""
        return math.prod(self.shape)

    def meet(self, other: Region) -> Region | None:
        """What both hold; None when that is empty."""
        low = tuple(map(max, self.offset, other.offset))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape)]
        shape = tuple(end - start for start, end in zip(low, ends))
        return Region(offset=low, shape=shape) if all(n > 0 for n in shape) else None

    def slices(self, whole: Region) -> tuple[slice, ...]:
        """Index of this region inside a local tensor that holds `whole`.

        Raises:
            LayoutError: the region reaches out of `whole`.
        """
        if not self.within(whole):
            raise LayoutError(f"region {self} is not inside {whole}")
        starts = [a - b for a, b in zip(self.offset, whole.offset)]
        return tuple(slice(s, s + n) for s, n in zip(starts, self.shape))

    def within(self, whole: Region) -> bool:
        """True when every element is in `whole`; an empty region is within any other."""
        if not self.num_elements:
            return True
        return all(b <= a and a + n <= b + m for a, n, b, m in zip(self.offset, self.shape, whole.offset, whole.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one tensor lies on a mesh.

    cuts: for each tensor dimension the axes that cut it, outermost first. Axes that cut nothing replicate.

    Raises:
        LayoutError: an unknown axis, or one that cuts twice.
    """

    mesh: Mesh
    cuts: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        used = [axis for cut in self.cuts for axis in cut]
        for axis in used:
            self.mesh.size(axis)
        if len(set(used)) != len(used):
            raise LayoutError(f"layout {self.cuts}: an axis cuts at most one dimension, once")

    def region(self, shape: Sequence[int], rank: int) -> Region:
        """What `rank` holds of a tensor of global `shape`; a missing part lies at the end with length 0.

        Raises:
            LayoutError: another number of dimensions than the layout's, or a rank outside the mesh.
        """
        if len(shape) != len(self.cuts):
            raise LayoutError(f"shape {tuple(shape)} has {len(shape)} dimensions, the layout {len(self.cuts)}")
        at = self.mesh.coordinate(rank)
        spans = [self._span(n, cut, [at[axis] for axis in cut]) for n, cut in zip(shape, self.cuts)]
        return Region(offset=tuple(s for s, _ in spans), shape=tuple(n for _, n in spans))

    def cells(self, shape: Sequence[int]) -> tuple[tuple[Region, tuple[int, ...]], ...]:
        """The distinct non-empty regions with the ranks that hold each, in order of their offsets.

        Together they are the whole tensor, and no two overlap.
        """
        holders: dict[Region, list[int]] = {}
        for rank, region in self.regions(shape).items():
            if region.num_elements:
                holders.setdefault(region, []).append(rank)
        return tuple((r, tuple(holders[r])) for r in sorted(holders, key=lambda r: r.offset))

    def regions(self, shape: Sequence[int]) -> dict[int, Region]:
        """Region of every rank, in the order of the mesh."""
        if len(shape) != len(self.cuts):
            raise LayoutError(f"shape {tuple(shape)} has {len(shape)} dimensions, the layout {len(self.cuts)}")
        names = [name for name, _ in self.mesh.axes]
        where = [[names.index(axis) for axis in cut] for cut in self.cuts]
        out, known = {}, {}
        for rank, at in zip(self.mesh.ranks, product(*(range(size) for _, size in self.mesh.axes))):
            key = tuple(at[i] for dim in where for i in dim)
            if key not in known:
                spans = [self._span(n, cut, [at[i] for i in dim]) for n, cut, dim in zip(shape, self.cuts, where)]
                known[key] = Region(offset=tuple(s for s, _ in spans), shape=tuple(n for _, n in spans))
            out[rank] = known[key]
        return out

    def _span(self, length: int, cut: tuple[str, ...], at: list[int]) -> tuple[int, int]:
        """(start, length) along one dimension."""
        start = 0
        for axis, position in zip(cut, at):
            chunk = -(-length // self.mesh.size(axis)) if length else 0
            first = min(position * chunk, length)
            start, length = start + first, min(chunk, length - first)
        return start, length
