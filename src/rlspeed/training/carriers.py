"""The ways of the actor's weights to a generator that wants them whole on every rank.

| way | when | what moves |
| --- | --- | --- |
| Shared | hybrid engine, one rank | nothing: the generator reads the live parameters |
| Resharded | hybrid engine, several ranks | what each rank lacks, by plan, in the wire dtype |
| Copied | no hybrid engine | full tensors are gathered and copied into a second model |
| Nowhere | a rank outside of the actor | nothing |
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlspeed.engine.parallelize import full_tensor
from rlspeed.engine.reshard import Resharder, Verify
from rlspeed.engine.room import Room
from rlspeed.engine.transit import WIRE_DTYPES
from rlspeed.engine.world import World
from rlspeed.models.weights import fused_order, live_weights, weights_of
from rlspeed.planning.reshard import ReshardPlan

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One transition as this rank saw it.

    received_bytes: over the wire. copied_bytes: on the spot. shared_bytes: read where they lie. buffer_bytes: memory
    beyond the weights of both sides.
    """

    seconds: float
    received_bytes: int = 0
    copied_bytes: int = 0
    shared_bytes: int = 0
    buffer_bytes: int = 0


class Carrier(Protocol):
    """shares: the generator reads the trainer's own memory, nothing has to be loaded. stays: `drop` frees nothing."""

    shares: bool
    stays: bool

    def tensors(self) -> Tensors:
        """What the generator reads, by checkpoint name; of undefined contents until `bring`."""
        ...

    def bring(self, version: int) -> Moved:
        """Make the generator's tensors those of the trainer, which are of `version`; every rank calls it.

        Raises:
            RunError: a transfer that failed or, with checksums, arrived changed; every rank raises.
        """
        ...

    def drop(self) -> None:
        """Give back the memory that only generation needs."""
        ...


class Shared:
    """One rank: the live parameters."""

    shares = stays = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def tensors(self) -> Tensors:
        """The parameters themselves."""
        return {name: p.detach() for name, p in live_weights(self.model).items()}

    def bring(self, version: int) -> Moved:
        """Nothing moves."""
        began = time.perf_counter()
        size = sum(t.nbytes for t in self.tensors().values())
        return Moved(seconds=time.perf_counter() - began, shared_bytes=size)

    def drop(self) -> None:
        """There is nothing that only generation needs."""


class Nowhere:
    """A rank that the actor does not work on."""

    shares = stays = True

    def tensors(self) -> Tensors:
        """None."""
        return {}

    def bring(self, version: int) -> Moved:
        """Nothing moves."""
        return Moved(seconds=0.0)

    def drop(self) -> None:
        """There is nothing."""


class Resharded:
    """Several ranks: by `plan` from the training layout into tensors that live while generation does.

    stays: the generator's weights stay in memory beside the training; then a failed transfer leaves the old ones in
    force. members: the actor's ranks; rank: this one in the run. bucket_bytes, verify: see `Resharder`.
    """

    shares = False

    def __init__(
        self,
        model: nn.Module,
        plan: ReshardPlan,
        members: World,
        *,
        rank: int,
        stays: bool,
        bucket_bytes: int,
        verify: Verify,
    ) -> None:
        shapes = {t.name: t.dst.region(t.shape, rank).shape for t in plan.tensors}
        (wire,) = {t.wire_dtype for t in plan.tensors}
        # what the generator fuses lies together, so that it is one matrix without a copy
        self.room = Room({n: shapes[n] for n in fused_order(shapes)}, WIRE_DTYPES[wire], members.device)
        self.stays = stays
        self.mover = Resharder(
            plan,
            rank=rank,
            sources=weights_of(model),
            targets=self.room.tensors,
            group=members.members,
            device=members.device,
            bucket_bytes=bucket_bytes,
            verify=verify,
            keep_old=stays,
        )

    def tensors(self) -> Tensors:
        """The generator's own, whole tensors."""
        self.room.open()
        return self.room.tensors

    def bring(self, version: int) -> Moved:
        """Push by plan."""
        self.room.open()
        pushed = self.mover.push(version)
        return Moved(
            seconds=pushed.seconds,
            received_bytes=pushed.received_bytes,
            copied_bytes=pushed.copied_bytes,
            shared_bytes=pushed.aliased_bytes,
            buffer_bytes=pushed.held_bytes,
        )

    def drop(self) -> None:
        """Free the tensors, unless they stay."""
        if not self.stays:
            self.room.free()


class Copied:
    """The classic way: gather every parameter whole, copy all into a second model, and let go of both each phase.

    second: False where the generator is a second model itself and takes what was gathered (vLLM).
    """

    shares = stays = False

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype, *, second: bool = True) -> None:
        self.model = model
        self.device = device
        self._whole: Tensors | None = None if second else {}
        shapes = {name: tuple(p.shape) for name, p in live_weights(model).items()} if second else {}
        self.room = Room({n: shapes[n] for n in fused_order(shapes)}, dtype, device)

    def tensors(self) -> Tensors:
        """The second model's, or what was gathered."""
        if self._whole is not None:
            return self._whole
        self.room.open()
        return self.room.tensors

    @torch.no_grad()
    def bring(self, version: int) -> Moved:
        """Gather, copy, drop what was gathered."""
        began = time.perf_counter()
        live = live_weights(self.model)
        whole = {name: full_tensor(p.detach()) for name, p in live.items()}
        if self._whole is None:
            self.room.open()
            for name, tensor in whole.items():
                self.room.tensors[name].copy_(tensor)
        else:
            self._whole = whole
        gathered = _own_bytes(whole, live)
        received = sum(t.nbytes - _local_bytes(live[name]) for name, t in whole.items())
        del whole
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return Moved(
            seconds=time.perf_counter() - began,
            received_bytes=received,
            copied_bytes=self.room.num_bytes,
            buffer_bytes=gathered,
        )

    def drop(self) -> None:
        """Free the second model, or what was gathered."""
        self.room.free()
        if self._whole is not None:
            self._whole = {}


def _local_bytes(tensor: torch.Tensor) -> int:
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def _own_bytes(whole: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> int:
    """Bytes of gathered tensors that are not the parameters themselves."""
    return sum(t.nbytes for n, t in whole.items() if isinstance(live[n], DTensor))
