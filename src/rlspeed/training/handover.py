"""Between training and generation: which of the two the actor's memory is laid out for, and the way to the other.

```
               to_generation: optimizer state to the host, weights to the generator
   training  ---------------------------------------------------------------------->  generation
             <----------------------------------------------------------------------
               to_training: the generator's weights are let go of, optimizer state comes back
```

Generating asks for `to_generation`; it does nothing when the generator has the present weights already. Whatever uses
the models of the training side goes through `entering`: it changes over by itself, or refuses where that is switched
off (`enable_auto_repartition_for_training: false`) and `to_training` was not called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from rlspeed.config.schema import Profile
from rlspeed.engine.precision import Precision
from rlspeed.engine.room import HostStay, Peak, peak_of
from rlspeed.engine.transit import WIRE_DTYPES
from rlspeed.engine.world import World
from rlspeed.errors import Fault, RunError
from rlspeed.models.weights import WeightSpec, reshard_requests, weight_specs
from rlspeed.planning.devices import uses_vllm
from rlspeed.planning.reshard import ReshardPlan, plan_reshard
from rlspeed.planning.shape import ModelShape
from rlspeed.planning.transition import Way, actor_way
from rlspeed.rollout.generator import Generator
from rlspeed.rollout.vllm import VllmGenerator
from rlspeed.training.carriers import Carrier, Copied, Moved, Nowhere, Resharded, Shared
from rlspeed.training.grid import Grid
from rlspeed.training.roles import Roles

WIRE_NAMES = {dtype: name for name, dtype in WIRE_DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One way to generation. seconds: all of it; peak: of the device; offloaded_bytes: state that went to the host."""

    seconds: float
    moved: Moved
    peak: Peak
    offloaded_bytes: int


class Handover:
    """The actor's weights between its optimizer and a generator.

    resting: optimizer state that leaves the device during generation; () where it stays. automatic: `entering` changes
    over by itself. version: updates of the weights so far; the generator is brought to it before it generates.
    """

    def __init__(
        self,
        carrier: Carrier,
        device: torch.device,
        *,
        resting: Callable[[], Iterable[torch.Tensor]] = tuple,
        automatic: bool = True,
    ) -> None:
        self.carrier = carrier
        self.device = device
        self.automatic = automatic
        self.version = 0
        self.generating = False
        self.last: Transition | None = None
        self._generator: Generator | None = None
        self._brought: int | None = None
        self._resting = resting
        self._host = HostStay()

    def attach(self, generator: Generator) -> None:
        """The generator that is brought to each version; vLLM loads what it is given into tensors of its own."""
        self._generator = generator
        self._brought = self.version if self.carrier.shares else None

    def updated(self) -> None:
        """Count an update of the weights."""
        self.version += 1

    def restored(self, version: int) -> None:
        """Other weights were loaded, which are of `version`."""
        self.to_training()
        self.version = version
        self._brought = None  # whatever the generator has is out of date

    def to_generation(self) -> None:
        """Ready to generate with the present weights; every rank calls it.

        Raises:
            RunError: the weights did not arrive; the trainer's are as before, and so is the generator's version.
        """
        generator = self._generator
        assert generator is not None
        if self.generating:
            return
        began = time.perf_counter()
        try:
            with peak_of(self.device) as peak:
                self._host.leave(self._resting())
                moved = Moved(seconds=0.0) if self._has_them() else self._bring(generator)
        except RunError:
            self.carrier.drop()
            self._host.come_back()
            raise
        self.generating = True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - began
        self.last = Transition(seconds=seconds, moved=moved, peak=peak, offloaded_bytes=self._host.num_bytes)

    def _has_them(self) -> bool:
        """The generator has the present weights, and they are still in its memory."""
        kept = not self._generator.asleep if isinstance(self._generator, VllmGenerator) else self.carrier.stays
        return self._brought == self.version and kept

    def _bring(self, generator: Generator) -> Moved:
        self._brought = None
        moved = self.carrier.bring(self.version)
        generator.load(None if self.carrier.shares else self.carrier.tensors().items(), self.version)
        if isinstance(generator, VllmGenerator):
            self.carrier.drop()
        self._brought = self.version
        return moved

    def to_training(self) -> None:
        """The training layout again: the explicit call, where `entering` does not do it."""
        if self.generating:
            self.generating = False
            if isinstance(self._generator, VllmGenerator):
                self._generator.sleep()  # when it may
            self.carrier.drop()
            self._host.come_back()

    def entering(self, what: str) -> None:
        """Called by everything that trains or scores, before it begins.

        Raises:
            RunError: the generator's layout is in force and changing over was left to an explicit call.
        """
        if not self.generating:
            return
        if not self.automatic:
            raise RunError(
                Fault(
                    where="model.actor.enable_auto_repartition_for_training",
                    found=f"false, and {what} began while the actor is laid out for generation",
                    allowed="a call of Handover.to_training() between generating and training",
                    fix="call it, or set model.actor.enable_auto_repartition_for_training: true",
                )
            )
        self.to_training()

    def settle(self) -> None:
        """Optimizer state that is on its way back has arrived: called before it is read."""
        self._host.settle()

    def take(self) -> Transition | None:
        """The last transition, once."""
        last, self.last = self.last, None
        return last


def make_handover(profile: Profile, precision: Precision, world: World, grid: Grid, roles: Roles) -> Handover:
    """The way that the three switches under `model.actor` ask for; every rank calls it.

    From then on the roles ask it before they work.
    """
    own = profile.model.actor
    lightweight = own.use_lightweight_sharding_for_generation
    actor = roles.actor_or_none
    offloads = lightweight and world.device.type == "cuda" and actor is not None
    handover = Handover(
        _carrier(profile, precision, world, grid, roles),
        world.device,
        resting=roles.actor.optimizer.device_state if offloads else tuple,
        automatic=own.enable_auto_repartition_for_training,
    )
    if actor is not None:
        actor.settled = handover.settle
    for role in (actor, roles.critic, roles.reference):
        if role is not None:
            role.entering = handover.entering
    return handover


def transition_plan(specs: Sequence[WeightSpec], way: Way, wire: str, ranks_per_node: int | None) -> ReshardPlan:
    """From the actor's training layout to the generator's; `check-devices --plan` prints the same one."""
    requests = reshard_requests(specs, way.train, way.generation, aligned=way.aligned, wire_dtype=wire)
    return plan_reshard(requests, ranks_per_node=ranks_per_node)


def _carrier(profile: Profile, precision: Precision, world: World, grid: Grid, roles: Roles) -> Carrier:
    members = grid.home.members
    if members is None:
        return Nowhere()
    own, model = profile.model.actor, roles.actor.model
    vllm = uses_vllm(profile.devices, own.use_vllm_for_generation)
    if not own.use_3d_hybrid_engine:
        return Copied(model, world.device, precision.compute, second=not vllm)
    if members.size == 1:
        return Shared(model)
    config = roles.causal_lm.config
    specs, wire = weight_specs(model, config), WIRE_NAMES[precision.wire]
    way = actor_way(profile, grid.actor, ModelShape.from_config(config.to_dict(), where="model config"))
    return Resharded(
        model,
        transition_plan(specs, way, wire, grid.ranks_per_node),
        members,
        rank=world.rank,
        stays=not vllm and not own.use_lightweight_sharding_for_generation,
        bucket_bytes=own.sync_bucket_mb << 20,
        verify=own.verify_sync,
    )
