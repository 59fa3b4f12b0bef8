"""One transition under way: cast, send, receive, load, for a Resharder that says what and where.

Views of weights and their order in the buffers are made once (`Lanes`); a push only fills and empties buffers. Two
send buffers are used in turn. Receive buffers too, unless the old weights must stay usable until everything has
arrived: then each bucket has its own, and all are loaded at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlspeed.engine.checksum import compare, sum_bits
from rlspeed.engine.mover import Freight, Transfer, start
from rlspeed.errors import LayoutError
from rlspeed.planning.buckets import Bucket, BucketPlan, Piece
from rlspeed.planning.layout import Region

WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What stays the same from push to push on this rank.

    members: global ranks of the group in its order; rank: this one. held, wanted: this rank's regions by name before
    and after. wire: dtype by name.
    """

    cut: BucketPlan
    rank: int
    group: dist.ProcessGroup | None
    members: tuple[int, ...]
    device: torch.device
    held: Mapping[str, Region]
    wanted: Mapping[str, Region]
    wire: Mapping[str, torch.dtype]

    def freight(self, bucket: Bucket) -> Freight:
        """Bytes from and to each rank of the group."""
        width = WIRE_DTYPES[bucket.wire_dtype].itemsize
        give, get = dict.fromkeys(self.members, 0), dict.fromkeys(self.members, 0)
        for piece in bucket.leaving(self.rank):
            give[piece.dst] += piece.region.num_elements * width
        for piece in bucket.received_by(self.rank):
            get[piece.src] += piece.region.num_elements * width
        return Freight(bucket.how, tuple(give.values()), tuple(get.values()))

    def outgoing(self, bucket: Bucket) -> list[Piece]:
        """This rank's pieces in the order of the send buffer."""
        return sorted(bucket.sent_by(self.rank), key=lambda p: self.places[p.dst])

    def incoming(self, bucket: Bucket) -> list[Piece]:
        """Pieces for this rank in the order of the receive buffer."""
        return sorted(bucket.received_by(self.rank), key=lambda p: self.places[p.src])

    @property
    def places(self) -> dict[int, int]:
        """Place in the group by rank."""
        return {rank: place for place, rank in enumerate(self.members)}


class Lanes:
    """Views of this rank's weights, one for each piece, in the order of the buffers.

    gives[i], takes[i]: of bucket i. senders[i]: (place in the group, number of takes) of each sender, in order.
    copies: (target, source, through) for what the rank has itself; through: the wire dtype where neither side has it,
    so that every element is rounded alike.
    """

    def __init__(self, route: Route, sources: Tensors, targets: Tensors) -> None:
        self.places = _places(sources, targets)
        self.copied = list(route.cut.copies(route.rank))
        shared = {n for n, t in targets.items() if n in sources and _same_memory(t, sources[n])}
        self.aliased = [p for p in self.copied if p.name in shared]
        self.copied = [p for p in self.copied if p.name not in shared]

        def source(piece: Piece) -> torch.Tensor:
            return sources[piece.name][piece.region.slices(route.held[piece.name])]

        def target(piece: Piece) -> torch.Tensor:
            return targets[piece.name][piece.region.slices(route.wanted[piece.name])]

        self.gives = [[source(p) for p in route.outgoing(b)] for b in route.cut.buckets]
        self.takes = [[target(p) for p in route.incoming(b)] for b in route.cut.buckets]
        self.senders = [
            list(Counter(route.places[p.src] for p in route.incoming(b)).items()) for b in route.cut.buckets
        ]
        self.copies: list[tuple[torch.Tensor, torch.Tensor, torch.dtype | None]] = []
        for piece in self.copied:
            here, there, wire = source(piece), target(piece), route.wire[piece.name]
            self.copies.append((there, here, None if wire in (here.dtype, there.dtype) else wire))

    def stale(self, sources: Tensors, targets: Tensors) -> bool:
        """True when a weight has moved in memory since."""
        return self.places != _places(sources, targets)


class Transit:
    """One push. `failures` collects what went wrong on this rank: the others wait in collectives, so it goes on."""

    def __init__(self, route: Route, freights: Sequence[Freight], lanes: Lanes, *, keep_old: bool) -> None:
        self.route = route
        self.freights = freights
        self.lanes = lanes
        self.keep_old = keep_old
        self.failures: list[str] = []
        slots = min(2, len(freights))
        self.send = [self._buffer(f.send_bytes for f in freights[i::2]) for i in range(slots)]
        if keep_old:
            self.receive = [self._buffer([f.receive_bytes]) for f in freights]
        else:
            self.receive = [self._buffer(f.receive_bytes for f in freights[i::2]) for i in range(slots)]

    def move(self) -> None:
        """All buckets, each under way while the one before it is loaded.

        Raises:
            RuntimeError: a peer or the network failed.
        """
        under_way = self._start(0) if self.freights else None
        if not self.keep_old:
            self._guard(self._copy)
        for i in range(len(self.freights)):
            following = self._start(i + 1) if i + 1 < len(self.freights) else None
            assert under_way is not None
            under_way.wait()
            if not self.keep_old:
                self._guard(self._load, i)
            under_way = following

    def commit(self) -> None:
        """Put what has arrived into place, where that was held back."""
        if self.keep_old:
            self._copy()
            for i in range(len(self.freights)):
                self._load(i)

    def check(self) -> None:
        """Compare checksums of both ends of every piece; what differs is a failure."""
        route, lanes = self.route, self.lanes
        sent, got, pieces = [], [], []
        for i, bucket in enumerate(route.cut.buckets):
            wire = WIRE_DTYPES[bucket.wire_dtype]
            sums = [sum_bits(t.to(wire)) for t in lanes.gives[i]]
            if bucket.how == "all_gather":
                sent += [(peer, s) for peer in route.members if peer != route.rank for s in sums]
            else:
                sent += [(p.dst, s) for p, s in zip(route.outgoing(bucket), sums)]
            incoming = route.incoming(bucket)
            pieces += incoming
            arrived = self._received(i) if self.keep_old else lanes.takes[i]
            got += [(p.src, sum_bits(t.to(wire))) for p, t in zip(incoming, arrived)]
        wrong = compare(sent, got, group=route.group, members=route.members, device=route.device)
        bad = [pieces[i] for i in wrong]
        if not self.keep_old:
            for piece, (there, here, _) in zip(lanes.copied, lanes.copies):
                wire = route.wire[piece.name]
                if int(sum_bits(here.to(wire))) != int(sum_bits(there.to(wire))):
                    bad.append(piece)
        self.failures += [f"{p.name}: what rank {p.src} sent is not what arrived, {text_of(p.region)}" for p in bad]

    @property
    def held_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(t.numel() for t in (*self.send, *self.receive))

    def _buffer(self, sizes: object) -> torch.Tensor:
        largest = max(sizes, default=0)  # type: ignore[call-overload]
        return torch.empty(-(-largest // 8) * 8, dtype=torch.uint8, device=self.route.device)

    def _guard(self, work: Callable[..., None], *args: int) -> None:
        try:
            work(*args)
        except (RuntimeError, LayoutError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    def _start(self, number: int) -> Transfer:
        self._guard(self._pack, number)
        route, freight = self.route, self.freights[number]
        send = self.send[number % 2][: freight.send_bytes]
        receive = self.receive[self._slot(number)][: freight.receive_bytes]
        return start(freight, send, receive, route.group, route.members.index(route.rank))

    def _slot(self, number: int) -> int:
        return number if self.keep_old else number % 2

    def _pack(self, number: int) -> None:
        """Cast this rank's pieces into the send buffer."""
        gives = self.lanes.gives[number]
        if gives:
            flat = self.send[number % 2].view(WIRE_DTYPES[self.route.cut.buckets[number].wire_dtype])
            torch._foreach_copy_(_shaped(flat, gives), gives)

    def _load(self, number: int) -> None:
        takes = self.lanes.takes[number]
        if takes:
            torch._foreach_copy_(takes, self._received(number))

    def _received(self, number: int) -> list[torch.Tensor]:
        """The pieces in the receive buffer, in order."""
        flat = self.receive[self._slot(number)].view(WIRE_DTYPES[self.route.cut.buckets[number].wire_dtype])
        starts, takes = self.freights[number].starts(), self.lanes.takes[number]
        out: list[torch.Tensor] = []
        for member, count in self.lanes.senders[number]:
            begin = starts[member] // flat.element_size()
            out += _shaped(flat[begin:], takes[len(out) : len(out) + count])
        return out

    def _copy(self) -> None:
        """What this rank has already."""
        direct = [(there, here) for there, here, through in self.lanes.copies if through is None]
        if direct:
            torch._foreach_copy_([there for there, _ in direct], [here for _, here in direct])
        for there, here, through in self.lanes.copies:
            if through is not None:
                there.copy_(here.to(through))


def text_of(region: Region) -> str:
    """A region as an index, `[0:4, 8:16]`."""
    return f"[{', '.join(f'{o}:{o + n}' for o, n in zip(region.offset, region.shape))}]"


def _shaped(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Consecutive parts of `flat` in the shapes of `like`."""
    sizes = [t.numel() for t in like]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(t.shape) for part, t in zip(parts, like)]


def _places(sources: Tensors, targets: Tensors) -> tuple[tuple[int, torch.dtype], ...]:
    return tuple((t.data_ptr(), t.dtype) for side in (sources, targets) for t in side.values())


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True when two tensors are the same numbers in the same place."""
    return (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())
