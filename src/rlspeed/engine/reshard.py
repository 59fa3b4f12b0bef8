"""Resharder: a reshard plan bound to live tensors, carried out once per update.

Bound once, used every step:

```
bind   plan + this rank's shards + the generator's tensors  ->  copies, buckets, flat buffers
       live shapes and offsets are compared with the plan's regions
push   cast into send buffer 0, start 0 . cast into 1, start 1 . wait 0, load 0 . cast into 0, start 2 . ...
       copies on the spot meanwhile; checksums; all ranks agree; the new version is in force
```

Weights are cast to the wire dtype before they travel. Two buffers in each direction: bucket i + 1 is under way while
bucket i is loaded.

Source: the walk of a weight is in docs/design/resharding.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rlspeed.engine.transit import WIRE_DTYPES, Lanes, Route, Tensors, Transit, text_of
from rlspeed.errors import Fault, LayoutError, RunError
from rlspeed.planning.buckets import Piece, plan_buckets
from rlspeed.planning.layout import Region
from rlspeed.planning.reshard import ReshardPlan

Verify = Literal["none", "checksum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """One transition as this rank saw it.

    sent_bytes, received_bytes: over the wire. copied_bytes: on the spot, in wire dtype; aliased_bytes: the generator
    reads the trainer's own memory. held_bytes: buffers and staging beyond the weights, at the peak.
    """

    version: int
    seconds: float
    sent_bytes: int
    received_bytes: int
    copied_bytes: int
    aliased_bytes: int
    held_bytes: int
    buckets: int


class Resharder:
    """Moves weights by `plan` from the ranks that train to the ranks that generate.

    sources: called at each push; this rank's shards by name (DTensors or plain tensors), {} on a rank outside of
    training. targets: the generator's tensors by name, each exactly this rank's region, {} outside of generation;
    views into fused tensors will do. group: ranks of the plan, none else; None: one process. bucket_bytes: of each of
    the four buffers. verify: "checksum" compares both ends of every transfer. keep_old: receive into a second copy and
    put it in force when everything has arrived on all ranks, so that a failed push leaves the old weights; False writes
    into place with no more memory than the buffers, and a failed push leaves no version in force.

    `version` is that of the targets: None before the first push, and after a push that failed half-way in place.

    Raises:
        LayoutError: tensors that are missing, too many, of another shape, place or dtype than the plan's, on any rank;
        ranks with different plans. All faults at once, before anything moves.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        *,
        rank: int,
        sources: Callable[[], Tensors],
        targets: Tensors,
        group: dist.ProcessGroup | None,
        device: torch.device,
        bucket_bytes: int,
        verify: Verify = "none",
        keep_old: bool = True,
    ) -> None:
        self.plan = plan
        self.verify = verify
        self.keep_old = keep_old
        self.version: int | None = None
        self._sources = sources
        self._targets = {name: t.detach() for name, t in targets.items()}
        self._route = Route(
            cut=plan_buckets(plan, bucket_bytes),
            rank=rank,
            group=group,
            members=tuple(dist.get_process_group_ranks(group)) if group is not None else (rank,),
            device=device,
            held={t.name: t.src.region(t.shape, rank) for t in plan.tensors if rank in t.src.mesh.ranks},
            wanted={t.name: t.dst.region(t.shape, rank) for t in plan.tensors if rank in t.dst.mesh.ranks},
            wire={t.name: WIRE_DTYPES[t.wire_dtype] for t in plan.tensors if t.wire_dtype in WIRE_DTYPES},
        )
        self._bind()
        self._freights = [self._route.freight(b) for b in self._route.cut.buckets]
        self._lanes: Lanes | None = None

    def require_version(self) -> int:
        """The version in force.

        Raises:
            RunError: there is none: nothing was pushed yet, or a push failed half-way.
        """
        if self.version is None:
            found = "weights of no version: nothing was pushed yet, or a push failed half-way"
            raise RunError(Fault(where="generator", found=found, fix="push weights before generating"))
        return self.version

    @torch.no_grad()
    def push(self, version: int) -> Pushed:
        """Bring the generator's tensors to the trainer's present weights and call them `version`.

        Every rank of the group calls it.

        Raises:
            RunError: the transfer failed or, with checksums, came out different, on any rank; every rank raises. With
            keep_old the targets and `version` are as before.
        """
        began = time.perf_counter()
        transit, untouched, failures = None, True, []
        try:
            transit = Transit(self._route, self._freights, self._fresh_lanes(), keep_old=self.keep_old)
        except (RuntimeError, LayoutError) as error:
            failures = [f"{type(error).__name__}: {error}"]
        try:
            failures = self._agree(failures)  # nothing is touched before every rank has its buffers
            if transit is not None and not failures:
                untouched = self.keep_old
                self.version = self.version if untouched else None
                transit.move()
                if self.verify == "checksum":
                    transit.check()
                failures = self._agree(transit.failures)
        except RuntimeError as error:  # a peer or the network is gone: no way to ask the others
            raise self._failed([f"the transfer broke off: {error}"], untouched=untouched) from error
        if failures or transit is None:
            raise self._failed(failures, untouched=untouched)
        transit.commit()
        self.version = version
        if self._route.device.type == "cuda":
            torch.cuda.synchronize(self._route.device)
        return self._report(transit, version, time.perf_counter() - began)

    def _fresh_lanes(self) -> Lanes:
        """Views of the weights where they lie now; made again only when one has moved.

        Raises:
            LayoutError: a weight has changed its shape since it was bound.
        """
        sources = {name: local_part(t) for name, t in self._sources().items()}
        for name, region in self._route.held.items():
            if name not in sources or sources[name].numel() != region.num_elements:
                raise LayoutError(Fault(where=name, found="gone or of another shape than when it was bound"))
        if self._lanes is None or self._lanes.stale(sources, self._targets):
            self._lanes = Lanes(self._route, sources, self._targets)
        return self._lanes

    def _report(self, transit: Transit, version: int, seconds: float) -> Pushed:
        route, lanes = self._route, transit.lanes

        def in_wire(pieces: Iterable[Piece]) -> int:
            return sum(p.region.num_elements * route.wire[p.name].itemsize for p in pieces)

        return Pushed(
            version=version,
            seconds=seconds,
            sent_bytes=sum(sum(f.give) for f in self._freights),
            received_bytes=sum(sum(f.get) for f in self._freights),
            copied_bytes=in_wire(lanes.copied),
            aliased_bytes=in_wire(lanes.aliased),
            held_bytes=transit.held_bytes,
            buckets=len(self._freights),
        )

    def _failed(self, failures: list[str], *, untouched: bool) -> RunError:
        state = "the old weights stay in force" if untouched else "the generator has no usable weights now"
        fix = f"{state}; push again, or restart from a checkpoint"
        return RunError([Fault(where="weights to the generator", found=f, fix=fix) for f in failures])

    def _agree(self, failures: list[str]) -> list[str]:
        """The failures of all ranks; nothing but one small sum where there are none."""
        members, group = self._route.members, self._route.group
        if len(members) == 1:
            return failures
        count = torch.tensor([len(failures)], dtype=torch.int64, device=self._route.device)
        dist.all_reduce(count, group=group)
        if not int(count):
            return []
        told: list[list[str]] = [[] for _ in members]
        dist.all_gather_object(told, failures[:10], group=group)
        return [f"rank {rank}: {f}" for rank, part in zip(members, told) for f in part]

    def _bind(self) -> None:
        """Check everything that the plan takes for granted, on all ranks together."""
        try:
            faults = [str(f) for f in self._faults()]
        except (RuntimeError, LayoutError) as error:
            faults = [f"{type(error).__name__}: {error}"]
        members = self._route.members
        if len(members) > 1:
            told: list[tuple[str, list[str]]] = [("", [])] * len(members)
            dist.all_gather_object(told, (self.plan.digest(), faults), group=self._route.group)
            faults = [f"rank {rank}: {f}" for rank, (_, part) in zip(members, told) for f in part]
            if len({d for d, _ in told}) > 1:
                faults.append("the ranks have computed different plans")
        if faults:
            raise LayoutError([Fault(where="reshard plan", found=f) for f in faults])

    def _faults(self) -> Iterable[Fault]:
        """What of this rank does not fit the plan."""
        members = self._route.members
        if set(self.plan.ranks) != set(members):
            yield Fault(where="ranks", found=f"group {members}", allowed=f"the plan's {list(self.plan.ranks)}")
        for tensor in self.plan.tensors:
            if tensor.wire_dtype not in WIRE_DTYPES:
                yield Fault(where=tensor.name, found=f"wire dtype {tensor.wire_dtype}", allowed=", ".join(WIRE_DTYPES))
        sources, held, wanted = self._sources(), self._route.held, self._route.wanted
        for side, have, want in (("training", sources, held), ("generation", self._targets, wanted)):
            for name in sorted(set(want) - set(have)):
                yield Fault(where=name, found=f"{side} has no such tensor")
            for name in sorted(set(have) - set(want)):
                yield Fault(where=name, found=f"{side} has it and the plan does not know it")
        for name in sorted(set(sources) & set(held)):
            live, planned = live_region(sources[name]), held[name]
            if (live.num_elements or planned.num_elements) and live != planned:
                yield Fault(where=name, found=f"training holds {text_of(live)}", allowed=f"planned {text_of(planned)}")
        for name in sorted(set(self._targets) & set(wanted)):
            target, shape, wire = self._targets[name], wanted[name].shape, self._route.wire.get(name)
            if tuple(target.shape) != shape and (target.numel() or wanted[name].num_elements):
                yield Fault(where=name, found=f"generation shape {tuple(target.shape)}", allowed=f"{shape}")
            if wire is not None and target.dtype not in (wire, torch.float32):
                found = f"generation holds {target.dtype}, the wire carries {wire}"
                yield Fault(where=name, found=found, allowed="the wire's dtype, or float32")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's numbers, without a graph."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def live_region(tensor: torch.Tensor) -> Region:
    """What of the global tensor a live tensor holds; a plain tensor is the whole of it."""
    if not isinstance(tensor, DTensor):
        return Region(offset=(0,) * tensor.ndim, shape=tuple(tensor.shape))
    (chunk,) = tensor.__create_chunk_list__()
    local = tuple(tensor.to_local().shape)
    if local != tuple(chunk.sizes):
        raise LayoutError(f"a DTensor says {tuple(chunk.sizes)} and holds {local}")
    return Region(offset=tuple(chunk.offsets), shape=local)


def empty_targets(plan: ReshardPlan, rank: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Uninitialised tensors for what `rank` is to have after the transition, by name."""
    return {
        t.name: torch.empty(t.dst.region(t.shape, rank).shape, dtype=dtype, device=device)
        for t in plan.tensors
        if rank in t.dst.mesh.ranks
    }
