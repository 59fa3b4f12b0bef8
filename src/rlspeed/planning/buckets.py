"""A reshard plan cut into buckets: what travels together, how, and what lies where in the flat buffers. Pure.

A bucket is one collective. Its size is bounded by what the busiest rank sends or receives in it, so a matrix larger
than a bucket travels in several, by rows. Every rank computes the same buckets.

Tensors that share their moves (`ReshardPlan`) share what is computed of them: a plan over 1,024 ranks has millions of
pieces, and only those of one rank are ever listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from rlspeed.errors import LayoutError
from rlspeed.planning.layout import Region
from rlspeed.planning.reshard import DTYPE_BYTES, Move, ReshardPlan, TensorPlan

How = Literal["all_gather", "all_to_all", "pairs"]
Loads = dict[tuple[str, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of tensor `name` on its way from rank `src` to rank `dst`."""

    name: str
    src: int
    dst: int
    region: Region


class Unit:
    """Moves over the wire that travel together: those of one tensor, or the same part of each of them.

    loads: bytes by ("out" or "in", rank). Tensors of one kind share a unit.
    """

    def __init__(self, moves: Iterable[Move], width: int) -> None:
        self.moves = tuple(moves)
        self.leaving: dict[int, list[Move]] = {}
        self.coming: dict[int, list[Move]] = {}
        self.loads: Loads = {}
        for move in self.moves:
            self.leaving.setdefault(move.src, []).append(move)
            self.coming.setdefault(move.dst, []).append(move)
            count = move.region.num_elements * width
            for end in (("out", move.src), ("in", move.dst)):
                self.loads[end] = self.loads.get(end, 0) + count

    def is_gather(self, group: set[int]) -> bool:
        """True when each rank of the group gives all others the same boxes, and all give equally many elements."""
        if set(self.leaving) != group or len(group) < 2:
            return False
        sizes = set()
        for src, moves in self.leaving.items():
            given: dict[int, list[Region]] = {}
            for move in moves:
                given.setdefault(move.dst, []).append(move.region)
            boxes = next(iter(given.values()))
            if set(given) != group - {src} or any(b != boxes for b in given.values()):
                return False
            sizes.add(sum(r.num_elements for r in boxes))
        return len(sizes) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What travels in one collective, of one wire dtype: units with the names of the tensors that they are of.

    how: all_gather when every rank gives the same, equally many elements to all others; all_to_all when senders and
    receivers are the same ranks; pairs (grouped send and receive) otherwise.
    """

    how: How
    wire_dtype: str
    units: tuple[tuple[str, Unit], ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All of it, by sender and receiver."""
        found = [_piece(name, m) for name, unit in self.units for m in unit.moves]
        return tuple(sorted(found, key=lambda p: (p.src, p.dst)))

    def leaving(self, rank: int) -> list[Piece]:
        """What comes from `rank`, by receiver."""
        found = [_piece(name, m) for name, unit in self.units for m in unit.leaving.get(rank, ())]
        return sorted(found, key=lambda p: p.dst)

    def sent_by(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` puts into its send buffer, in order: once for all receivers in an all_gather."""
        mine = self.leaving(rank)
        if self.how == "all_gather" and mine:
            mine = [p for p in mine if p.dst == mine[0].dst]
        return tuple(mine)

    def received_by(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` finds in its receive buffer, in order, by sender."""
        found = [_piece(name, m) for name, unit in self.units for m in unit.coming.get(rank, ())]
        return tuple(sorted(found, key=lambda p: p.src))


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """All buckets, in the order in which they travel, of `plan`."""

    plan: ReshardPlan
    buckets: tuple[Bucket, ...]

    def copies(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that `rank` takes from itself."""
        own: dict[int, list[Move]] = {}
        out = []
        for tensor in self.plan.tensors:
            key = id(tensor.moves)
            if key not in own:
                own[key] = [m for m in tensor.moves if m.dst == rank and m.is_local]
            out += [_piece(tensor.name, m) for m in own[key]]
        return tuple(out)


def plan_buckets(plan: ReshardPlan, bucket_bytes: int) -> BucketPlan:
    """Fill buckets with the plan's moves, in the plan's order.

    bucket_bytes: most bytes that a rank sends or receives in a bucket; a single row that is larger still makes one.

    Raises:
        LayoutError: bucket_bytes below 1.
    """
    if bucket_bytes < 1:
        raise LayoutError(f"buckets of {bucket_bytes} bytes")
    alike = {id(t.moves): t.moves for t in plan.tensors}
    senders = {m.src for moves in alike.values() for m in moves}
    receivers = {m.dst for moves in alike.values() for m in moves}
    rest: How = "all_to_all" if senders == receivers else "pairs"
    group = senders | receivers
    known: dict[tuple[int, int], list[tuple[How, Unit]]] = {}
    open_buckets: dict[tuple[How, str], _Open] = {}
    done: list[Bucket] = []
    for tensor in plan.tensors:
        kind = (id(tensor.moves), tensor.element_bytes)
        if kind not in known:
            units = _units(tensor, bucket_bytes)
            known[kind] = [("all_gather" if u.is_gather(group) else rest, u) for u in units]
        for how, unit in known[kind]:
            key = (how, tensor.wire_dtype)
            bucket = open_buckets.get(key)
            if bucket is not None and not bucket.fits(unit.loads, bucket_bytes):
                done.append(bucket.close(*key))
                bucket = None
            if bucket is None:
                bucket = open_buckets[key] = _Open()
            bucket.add(tensor.name, unit)
    done.extend(bucket.close(*key) for key, bucket in open_buckets.items())
    return BucketPlan(plan=plan, buckets=tuple(done))


class _Open:
    """A bucket that is being filled."""

    def __init__(self) -> None:
        self.units: list[tuple[str, Unit]] = []
        self.loads: Loads = {}

    def fits(self, loads: Loads, limit: int) -> bool:
        return all(self.loads.get(end, 0) + count <= limit for end, count in loads.items())

    def add(self, name: str, unit: Unit) -> None:
        self.units.append((name, unit))
        for end, count in unit.loads.items():
            self.loads[end] = self.loads.get(end, 0) + count

    def close(self, how: How, wire_dtype: str) -> Bucket:
        return Bucket(how=how, wire_dtype=wire_dtype, units=tuple(self.units))


def _piece(name: str, move: Move) -> Piece:
    return Piece(name=name, src=move.src, dst=move.dst, region=move.region)


def _units(tensor: TensorPlan, limit: int) -> Iterator[Unit]:
    """The tensor's wire moves as groups that each fit a bucket: group i has the i-th part of every move."""
    moves = [m for m in tensor.moves if not m.is_local]
    if not moves:
        return
    whole = Unit(moves, tensor.element_bytes)
    parts = max(1, -(-max(whole.loads.values()) // limit))
    if parts == 1:
        yield whole
        return
    regions: dict[Region, list[Region]] = {}  # receivers of one box share its parts
    for move in moves:
        if move.region not in regions:
            regions[move.region] = _split(move.region, parts)
    for i in range(parts):
        cut = [Move(src=m.src, dst=m.dst, region=regions[m.region][i]) for m in moves if i < len(regions[m.region])]
        if cut:
            yield Unit(cut, tensor.element_bytes)


def _split(region: Region, parts: int) -> list[Region]:
    """The box in at most `parts` nearly equal parts along its longest dimension."""
    dim = max(range(len(region.shape)), key=lambda d: (region.shape[d], -d))
    length = region.shape[dim]
    bounds = [length * i // parts for i in range(parts + 1)]
    out = []
    for start, end in pairwise(bounds):
        if end > start:
            offset, shape = list(region.offset), list(region.shape)
            offset[dim], shape[dim] = offset[dim] + start, end - start
            out.append(Region(offset=tuple(offset), shape=tuple(shape)))
    return out


def wire_bytes(bucket: Bucket, rank: int) -> tuple[int, int]:
    """Bytes that `rank` sends and receives in the bucket, over the wire."""
    width = DTYPE_BYTES[bucket.wire_dtype]
    out = sum(p.region.num_elements for p in bucket.leaving(rank))
    into = sum(p.region.num_elements for p in bucket.received_by(rank))
    return out * width, into * width
