"""From one layout to another: which rank sends which box of which tensor to whom. Pure, and the same on every rank.

Every element that a rank needs and does not hold already comes to it exactly once, so the bytes on the wire are at
their lower bound. What a rank holds already it copies from itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

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
        or an
            unknown wire dtype.
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
        if list(self.moves) != sorted(self.moves, key=lambda m: (m.dst, m.region.offset)):
            raise LayoutError(f"{self.name}: moves are not in the order (dst, offset)")
        held, wanted = self.src.regions(self.shape), self.dst.regions(self.shape)
        pieces: dict[int, list[Region]] = {rank: [] for rank in wanted}
        for move in self.moves:
            if move.src not in held or not move.region.within(held[move.src]):
                raise LayoutError(f"{self.name}: rank {move.src} does not hold {move.region}")
            if move.dst not in wanted:
                raise LayoutError(f"{self.name}: rank {move.dst} is not in the destination")
            pieces[move.dst].append(move.region)
        for rank, region in wanted.items():
            if not _covers(region, tuple(pieces[rank])):
                raise LayoutError(f"{self.name}: rank {rank} does not get each element of {region} exactly once")

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
        return tuple(sorted({r for t in self.tensors for r in (*t.src.mesh.ranks, *t.dst.mesh.ranks)}))

    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """(src, dst) -> bytes on the wire, for the pairs that exchange anything; own copies are not in it."""
        out: dict[tuple[int, int], int] = {}
        for tensor in self.tensors:
            for move in tensor.moves:
                if not move.is_local:
                    pair = (move.src, move.dst)
                    out[pair] = out.get(pair, 0) + move.region.num_elements * tensor.element_bytes
        return dict(sorted(out.items()))

    def bytes_received(self) -> dict[int, int]:
        """Bytes over the wire into each rank."""
        return self._totals(1)

    def bytes_sent(self) -> dict[int, int]:
        """Bytes over the wire out of each rank."""
        return self._totals(0)

    def bytes_copied(self) -> dict[int, int]:
        """Bytes that each rank copies from itself, in wire dtype."""
        out = dict.fromkeys(self.ranks, 0)
        for tensor in self.tensors:
            for move in tensor.moves:
                if move.is_local:
                    out[move.dst] += move.region.num_elements * tensor.element_bytes
        return out

    @property
    def num_bytes(self) -> int:
        """Bytes over the wire, all ranks together."""
        return sum(self.bytes_by_pair().values())

    def _totals(self, end: int) -> dict[int, int]:
        out = dict.fromkeys(self.ranks, 0)
        for pair, count in self.bytes_by_pair().items():
            out[pair[end]] += count
        return out


def plan_reshard(requests: Iterable[TensorRequest], *, ranks_per_node: int | None = None) -> ReshardPlan:
    """The moves that bring every tensor from its source layout to its destination layout.

    A rank takes what it holds already from itself. What is left comes from the holder that has sent the fewest bytes
    so far (ties: the lower rank), so replicas share the load. ranks_per_node: prefer holders on the receiver's node
    (rank // that number) and go to another node only for what no rank of the own node holds.

    Raises:
        LayoutError: a name twice, an unknown wire dtype, or a layout that does not fit its tensor.
    """
    ordered = sorted(requests, key=lambda r: r.name)
    sent: dict[int, int] = {}
    known: dict[tuple[tuple[int, ...], Layout, Layout], list[_Need]] = {}
    tensors = []
    for request in ordered:
        key = (request.shape, request.src, request.dst)
        if key not in known:
            known[key] = _needs(*key)
        width = DTYPE_BYTES.get(request.wire_dtype, 0)
        moves = []
        for need in known[key]:
            source = _source(need, sent, ranks_per_node)
            if source != need.dst:
                sent[source] = sent.get(source, 0) + need.region.num_elements * width
            moves.append(Move(src=source, dst=need.dst, region=need.region))
        tensors.append(
            TensorPlan(
                name=request.name,
                shape=request.shape,
                wire_dtype=request.wire_dtype,
                src=request.src,
                dst=request.dst,
                moves=tuple(moves),
            )
        )
    return ReshardPlan(tensors=tuple(tensors))


def least_bytes(shape: Sequence[int], src: Layout, dst: Layout, element_bytes: int) -> dict[int, int]:
    """Bytes that each destination rank has to receive at least: what it wants and does not hold. No plan is made."""
    held = src.regions(shape)
    out = {}
    for rank, region in dst.regions(shape).items():
        own = region.meet(held[rank]) if rank in held else None
        out[rank] = (region.num_elements - (own.num_elements if own else 0)) * element_bytes
    return out


@dataclass(frozen=True, slots=True)
class _Need:
    """A box that `dst` needs, with all ranks that hold it whole."""

    dst: int
    region: Region
    holders: tuple[int, ...]


def _needs(shape: tuple[int, ...], src: Layout, dst: Layout) -> list[_Need]:
    """Each destination's region cut along the source's cells, by (dst, offset)."""
    cells = src.cells(shape)
    wanted = dst.regions(shape)
    pieces: dict[Region, list[tuple[Region, tuple[int, ...]]]] = {}
    for region in set(wanted.values()):
        met = [(region.meet(cell), holders) for cell, holders in cells]
        pieces[region] = sorted(((p, h) for p, h in met if p is not None), key=lambda item: item[0].offset)
    return [_Need(rank, piece, holders) for rank in sorted(wanted) for piece, holders in pieces[wanted[rank]]]


def _source(need: _Need, sent: dict[int, int], ranks_per_node: int | None) -> int:
    """Who gives it: the receiver itself, else the least loaded holder, the own node first."""
    if need.dst in need.holders:
        return need.dst
    holders = need.holders
    if ranks_per_node:
        node = need.dst // ranks_per_node
        holders = tuple(r for r in holders if r // ranks_per_node == node) or holders
    return min(holders, key=lambda r: (sent.get(r, 0), r))


@lru_cache(maxsize=4096)
def _covers(whole: Region, pieces: tuple[Region, ...]) -> bool:
    """True when `pieces` make up `whole` without overlap (many ranks and layers ask the same question)."""
    if sum(p.num_elements for p in pieces) != whole.num_elements or not all(p.within(whole) for p in pieces):
        return False
    return not any(a.meet(b) for i, a in enumerate(pieces) for b in pieces[i + 1 :])
