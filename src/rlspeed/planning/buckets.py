"""A reshard plan cut into buckets: what travels together, how, and what lies where in the flat buffers. Pure.

A bucket is one collective. Its size is bounded by what the busiest rank sends or receives in it, so a matrix larger
than a bucket travels in several, by rows. Every rank computes the same buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from rlspeed.errors import LayoutError
from rlspeed.planning.layout import Region
from rlspeed.planning.reshard import DTYPE_BYTES, Move, ReshardPlan, TensorPlan

How = Literal["all_gather", "all_to_all", "pairs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of tensor `name` on its way from rank `src` to rank `dst`."""

    name: str
    src: int
    dst: int
    region: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Pieces of one wire dtype that travel in one collective.

    how: all_gather when every rank gives the same, equally many elements to all others; all_to_all when senders and
    receivers are the same ranks; pairs (grouped send and receive) otherwise.
    """

    how: How
    wire_dtype: str
    pieces: tuple[Piece, ...]

    def sent_by(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` puts into its send buffer, in order: once for all receivers in an all_gather."""
        mine = [p for p in self.pieces if p.src == rank]
        if self.how == "all_gather" and mine:
            mine = [p for p in mine if p.dst == mine[0].dst]
        return tuple(mine)

    def received_by(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` finds in its receive buffer, in order, by sender."""
        return tuple(p for p in self.pieces if p.dst == rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """All buckets, in the order in which they travel; copies: the pieces that a rank takes from itself."""

    buckets: tuple[Bucket, ...]
    copies: tuple[Piece, ...]


def plan_buckets(plan: ReshardPlan, bucket_bytes: int) -> BucketPlan:
    """Fill buckets with the plan's moves, in the plan's order.

    bucket_bytes: most bytes that a rank sends or receives in a bucket; a single row that is larger still makes one.

    Raises:
        LayoutError: bucket_bytes below 1.
    """
    if bucket_bytes < 1:
        raise LayoutError(f"buckets of {bucket_bytes} bytes")
    senders = {m.src for t in plan.tensors for m in t.moves}
    receivers = {m.dst for t in plan.tensors for m in t.moves}
    rest: How = "all_to_all" if senders == receivers else "pairs"
    group = senders | receivers
    open_buckets: dict[tuple[How, str], _Open] = {}
    done: list[Bucket] = []
    for tensor in plan.tensors:
        for unit in _units(tensor, bucket_bytes):
            how: How = "all_gather" if _is_gather(unit, group) else rest
            key = (how, tensor.wire_dtype)
            loads = _loads(unit, tensor.element_bytes)
            bucket = open_buckets.get(key)
            if bucket is not None and not bucket.fits(loads, bucket_bytes):
                done.append(bucket.close(*key))
                bucket = None
            if bucket is None:
                bucket = open_buckets[key] = _Open()
            bucket.add(unit, loads)
    done.extend(bucket.close(*key) for key, bucket in open_buckets.items())
    copies = [
        Piece(name=t.name, src=m.src, dst=m.dst, region=m.region) for t in plan.tensors for m in t.moves if m.is_local
    ]
    return BucketPlan(buckets=tuple(done), copies=tuple(copies))


class _Open:
    """A bucket that is being filled."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.loads: dict[tuple[str, int], int] = {}

    def fits(self, loads: dict[tuple[str, int], int], limit: int) -> bool:
        return all(self.loads.get(end, 0) + count <= limit for end, count in loads.items())

    def add(self, pieces: list[Piece], loads: dict[tuple[str, int], int]) -> None:
        self.pieces.extend(pieces)
        for end, count in loads.items():
            self.loads[end] = self.loads.get(end, 0) + count

    def close(self, how: How, wire_dtype: str) -> Bucket:
        return Bucket(how=how, wire_dtype=wire_dtype, pieces=tuple(sorted(self.pieces, key=lambda p: (p.src, p.dst))))


def _loads(pieces: list[Piece], width: int) -> dict[tuple[str, int], int]:
    """Bytes sent and received by each rank."""
    out: dict[tuple[str, int], int] = {}
    for piece in pieces:
        for end in (("out", piece.src), ("in", piece.dst)):
            out[end] = out.get(end, 0) + piece.region.num_elements * width
    return out


def _units(tensor: TensorPlan, limit: int) -> Iterator[list[Piece]]:
    """The tensor's wire moves as groups that each fit a bucket: group i has the i-th part of every move."""
    moves = [m for m in tensor.moves if not m.is_local]
    if not moves:
        return
    pieces = [Piece(name=tensor.name, src=m.src, dst=m.dst, region=m.region) for m in moves]
    parts = max(1, -(-max(_loads(pieces, tensor.element_bytes).values()) // limit))
    if parts == 1:
        yield pieces
        return
    cut = [_split(m, parts) for m in moves]
    for i in range(parts):
        unit = [
            Piece(name=tensor.name, src=m.src, dst=m.dst, region=regions[i])
            for m, regions in zip(moves, cut)
            if i < len(regions)
        ]
        if unit:
            yield unit


def _split(move: Move, parts: int) -> list[Region]:
    """The move's box in at most `parts` nearly equal parts along its longest dimension."""
    region = move.region
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


def _is_gather(unit: list[Piece], group: set[int]) -> bool:
    """True when each rank of the group gives all others the same boxes, and all give equally many elements."""
    given: dict[int, dict[int, list[Region]]] = {}
    for piece in unit:
        given.setdefault(piece.src, {}).setdefault(piece.dst, []).append(piece.region)
    if set(given) != group or len(group) < 2:
        return False
    sizes = set()
    for src, by_receiver in given.items():
        boxes = list(by_receiver.values())
        if set(by_receiver) != group - {src} or any(b != boxes[0] for b in boxes):
            return False
        sizes.add(sum(r.num_elements for r in boxes[0]))
    return len(sizes) == 1


def wire_bytes(bucket: Bucket, rank: int) -> tuple[int, int]:
    """Bytes that `rank` sends and receives in the bucket, over the wire."""
    width = DTYPE_BYTES[bucket.wire_dtype]
    out = sum(p.region.num_elements for p in bucket.pieces if p.src == rank)
    into = sum(p.region.num_elements for p in bucket.pieces if p.dst == rank)
    return out * width, into * width
