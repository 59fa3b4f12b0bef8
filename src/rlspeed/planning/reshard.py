"""From one layout to another: which rank sends which box of which tensor to whom. Pure, and the same on every rank.

Every element that a rank needs and does not hold already comes to it exactly once, so the bytes on the wire are at
their lower bound. What a rank holds already it copies from itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapreplace
from itertools import pairwise

from rlspeed.errors import LayoutError
from rlspeed.planning.layout import Layout, Region

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRequest:
    """One tensor that is to go from layout `src` to layout `dst`, travelling as `wire_dtype`."""

    name: str
    shape: tuple[int, ...]
    wire_dtype: str
    src: Layout
    dst: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Rank `src` gives `region` to rank `dst`; a copy on the spot when they are one."""

    src: int
    dst: int
    region: Region

    @property
    def is_local(self) -> bool:
        """True when nothing goes over a wire."""
        return self.src == self.dst


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """All moves of one tensor, by (dst, offset).

    Raises:
        LayoutError: an element of a destination that comes never or twice, a move from a rank that does not hold it,
        or an unknown wire dtype.
    """

    name: str
    shape: tuple[int, ...]
    wire_dtype: str
    src: Layout
    dst: Layout
    moves: tuple[Move, ...]

    def __post_init__(self) -> None:
        if self.wire_dtype not in DTYPE_BYTES:
            raise LayoutError(f"{self.name}: wire dtype {self.wire_dtype!r}; known are {', '.join(DTYPE_BYTES)}")
        order = [(m.dst, m.region.offset) for m in self.moves]
        if any(a > b for a, b in pairwise(order)):
            raise LayoutError(f"{self.name}: moves are not in the order (dst, offset)")
        held, wanted = self.src.regions(self.shape), self.dst.regions(self.shape)
        pieces: dict[int, list[Region]] = {rank: [] for rank in wanted}
        inside: set[tuple[int, int]] = set()  # many receivers share a box: each is looked at once for each sender
        for move in self.moves:
            seen = (move.src, id(move.region))
            if seen not in inside:
                if move.src not in held or not move.region.within(held[move.src]):
                    raise LayoutError(f"{self.name}: rank {move.src} does not hold {move.region}")
                inside.add(seen)
            if move.dst not in wanted:
                raise LayoutError(f"{self.name}: rank {move.dst} is not in the destination")
            pieces[move.dst].append(move.region)
        covered: set[tuple[int, tuple[int, ...]]] = set()
        for rank, region in wanted.items():
            same = (id(region), tuple(map(id, pieces[rank])))
            if same not in covered and not _covers(region, tuple(pieces[rank])):
                raise LayoutError(f"{self.name}: rank {rank} does not get each element of {region} exactly once")
            covered.add(same)

    def renamed(self, name: str) -> TensorPlan:
        """The same plan for another tensor of this shape, dtype and layouts. It shares the moves; they are checked."""
        out = copy(self)
        object.__setattr__(out, "name", name)
        return out

    @property
    def element_bytes(self) -> int:
        """Bytes of one element on the wire."""
        return DTYPE_BYTES[self.wire_dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPlan:
    """The transition of a whole model.

    tensors: by name. Every rank computes the same plan and takes from it what it sends and receives.
    """

    tensors: tuple[TensorPlan, ...]

    def __post_init__(self) -> None:
        names = [t.name for t in self.tensors]
        if names != sorted(set(names)):
            raise LayoutError("reshard plan: tensors are not in the order of their names, or a name comes twice")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold or want something, ascending."""
        meshes = {id(m): m for t in self.tensors for m in (t.src.mesh, t.dst.mesh)}
        return tuple(sorted({r for m in meshes.values() for r in m.ranks}))

    def digest(self) -> str:
        """SHA-256 of all of it, in hex: equal plans have equal ones, so ranks can compare theirs."""
        total = hashlib.sha256()
        alike: dict[int, bytes] = {}
        for t in self.tensors:
            if id(t.moves) not in alike:
                boxes = [(m.src, m.dst, m.region.offset, m.region.shape) for m in t.moves]
                alike[id(t.moves)] = hashlib.sha256(repr(boxes).encode()).digest()
            total.update(repr((t.name, t.shape, t.wire_dtype, t.src.cuts, t.dst.cuts)).encode())
            total.update(alike[id(t.moves)])
        return total.hexdigest()

    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """(src, dst) -> bytes on the wire, for the pairs that exchange anything; own copies are not in it."""
        out: dict[tuple[int, int], int] = {}
        for move, size in self._sizes():
            if move.src != move.dst:
                pair = (move.src, move.dst)
                out[pair] = out.get(pair, 0) + size
        return dict(sorted(out.items()))

    def bytes_received(self) -> dict[int, int]:
        """Bytes over the wire into each rank."""
        out = dict.fromkeys(self.ranks, 0)
        for move, size in self._sizes():
            if move.src != move.dst:
                out[move.dst] += size
        return out

    def bytes_sent(self) -> dict[int, int]:
        """Bytes over the wire out of each rank."""
        out = dict.fromkeys(self.ranks, 0)
        for move, size in self._sizes():
            if move.src != move.dst:
                out[move.src] += size
        return out

    def bytes_copied(self) -> dict[int, int]:
        """Bytes that each rank copies from itself, in wire dtype."""
        out = dict.fromkeys(self.ranks, 0)
        for move, size in self._sizes():
            if move.src == move.dst:
                out[move.dst] += size
        return out

    @property
    def num_bytes(self) -> int:
        """Bytes over the wire, all ranks together."""
        return sum(size for move, size in self._sizes() if move.src != move.dst)

    def _sizes(self) -> Iterator[tuple[Move, int]]:
        """(move, its bytes); tensors that share their moves are counted together."""
        alike: dict[tuple[int, int], tuple[tuple[Move, ...], int]] = {}
        for tensor in self.tensors:
            key = (id(tensor.moves), tensor.element_bytes)
            alike[key] = (tensor.moves, alike.get(key, ((), 0))[1] + tensor.element_bytes)
        for moves, width in alike.values():
            for move in moves:
                yield move, move.region.num_elements * width


def plan_reshard(requests: Iterable[TensorRequest], *, ranks_per_node: int | None = None) -> ReshardPlan:
    """The moves that bring every tensor from its source layout to its destination layout.

    A rank takes what it holds already from itself. What is left comes from the holder that has sent the fewest bytes
    so far (ties: the lower rank), so replicas share the load. ranks_per_node: prefer holders on the receiver's node
    (rank // that number) and go to another node only for what no rank of the own node holds.

    Raises:
        LayoutError: a name twice, an unknown wire dtype, or a layout that does not fit its tensor.
    """
    kinds: dict[tuple[tuple[int, ...], Layout, Layout], _Kind] = {}
    loads = _Loads()
    tensors = []
    for request in sorted(requests, key=lambda r: r.name):
        key = (request.shape, request.src, request.dst)
        if key not in kinds:
            kinds[key] = _Kind(*key, ranks_per_node)
        tensors.append(_plan_tensor(request, kinds[key], loads))
    return ReshardPlan(tensors=tuple(tensors))


def least_bytes(shape: Sequence[int], src: Layout, dst: Layout, element_bytes: int) -> dict[int, int]:
    """Bytes that each destination rank has to receive at least: what it wants and does not hold. No plan is made."""
    held = src.regions(shape)
    out = {}
    for rank, region in dst.regions(shape).items():
        own = region.meet(held[rank]) if rank in held else None
        out[rank] = (region.num_elements - (own.num_elements if own else 0)) * element_bytes
    return out


class _Kind:
    """Tensors of one shape and one pair of layouts.

    first: by wire dtype, the plan of the first of them, kept where each box has one possible sender: then the moves of
    the others are the same ones. sent: elements that each rank sends for one of them.
    """

    def __init__(self, shape: tuple[int, ...], src: Layout, dst: Layout, ranks_per_node: int | None) -> None:
        cells = src.cells(shape)
        givers = {ranks: _Givers(ranks, ranks_per_node) for _, ranks in cells}
        self.wanted = sorted(dst.regions(shape).items())
        self.pieces: dict[Region, list[tuple[Region, _Givers]]] = {}
        for region in {r for _, r in self.wanted}:
            met = [(region.meet(cell), givers[ranks]) for cell, ranks in cells]
            self.pieces[region] = sorted(((p, g) for p, g in met if p is not None), key=lambda item: item[0].offset)
        self.first: dict[str, TensorPlan] = {}
        self.sent: dict[int, int] = {}

    def needs(self) -> Iterator[tuple[int, Region, tuple[int, ...]]]:
        """(receiver, box, ranks that may give it), by (receiver, offset)."""
        for rank, region in self.wanted:
            for piece, givers in self.pieces[region]:
                yield rank, piece, givers.to(rank)


class _Loads:
    """Bytes that each rank has sent, and the least loaded rank of a set of holders.

    A heap for each set; its entries may be out of date, never too high, so one on top that is up to date is the least.
    """

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def least(self, holders: tuple[int, ...]) -> int:
        """The holder that has sent the fewest bytes; the lowest rank of several."""
        heap = self._heaps.get(holders)
        if heap is None:
            heap = self._heaps[holders] = [(0, rank) for rank in sorted(holders)]
        while heap[0][0] != self.sent.get(heap[0][1], 0):
            rank = heap[0][1]
            heapreplace(heap, (self.sent[rank], rank))
        return heap[0][1]

    def add(self, rank: int, count: int) -> None:
        """`rank` sends `count` bytes more."""
        self.sent[rank] = self.sent.get(rank, 0) + count


def _plan_tensor(request: TensorRequest, kind: _Kind, loads: _Loads) -> TensorPlan:
    """Choose a sender for each need and count what it sends."""
    width = DTYPE_BYTES.get(request.wire_dtype, 0)
    first = kind.first.get(request.wire_dtype)
    if first is not None:
        for rank, elements in kind.sent.items():
            loads.add(rank, elements * width)
        return first.renamed(request.name)
    moves: list[Move] = []
    sent: dict[int, int] = {}
    decided = True
    for dst, region, givers in kind.needs():
        source = givers[0]
        if len(givers) > 1:
            source, decided = loads.least(givers), False
        if source != dst:
            elements = region.num_elements
            sent[source] = sent.get(source, 0) + elements
            loads.add(source, elements * width)
        moves.append(Move(src=source, dst=dst, region=region))
    plan = TensorPlan(
        name=request.name,
        shape=request.shape,
        wire_dtype=request.wire_dtype,
        src=request.src,
        dst=request.dst,
        moves=tuple(moves),
    )
    if decided:
        kind.first[request.wire_dtype], kind.sent = plan, sent
    return plan


class _Givers:
    """Ranks that hold one cell, and which of them may give it to whom."""

    def __init__(self, ranks: tuple[int, ...], ranks_per_node: int | None) -> None:
        self.ranks = ranks
        self.own = {r: (r,) for r in ranks}
        self.per_node = ranks_per_node
        self.by_node: dict[int, tuple[int, ...]] = {}
        if ranks_per_node:
            for rank in ranks:
                node = rank // ranks_per_node
                self.by_node[node] = (*self.by_node.get(node, ()), rank)

    def to(self, rank: int) -> tuple[int, ...]:
        """The receiver itself, else the holders on its node, else all."""
        if rank in self.own:
            return self.own[rank]
        return self.by_node.get(rank // self.per_node, self.ranks) if self.per_node else self.ranks


@lru_cache(maxsize=4096)
def _covers(whole: Region, pieces: tuple[Region, ...]) -> bool:
    """True when `pieces` make up `whole` without overlap (many ranks and layers ask the same question)."""
    if sum(p.num_elements for p in pieces) != whole.num_elements or not all(p.within(whole) for p in pieces):
        return False
    # along the dimension with the most cuts a piece is compared with those alone that begin before it ends
    dim = max(range(len(whole.shape)), key=lambda d: len({p.offset[d] for p in pieces}), default=None)
    if dim is None:
        return True
    ordered = sorted(pieces, key=lambda p: p.offset[dim])
    for i, piece in enumerate(ordered):
        end = piece.offset[dim] + piece.shape[dim]
        for other in ordered[i + 1 :]:
            if other.offset[dim] >= end:
                break
            if piece.meet(other):
                return False
    return True
