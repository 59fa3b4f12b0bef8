"""Actor, critic, reference and reward: each holds a model and offers two or three verbs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from rlspeed.config.schema import Optimizer, Profile
from rlspeed.engine.attention import choose_attention
from rlspeed.engine.packed import PackedBatch
from rlspeed.engine.parallelize import full_tensor, rest
from rlspeed.engine.precision import Precision
from rlspeed.engine.reshard import local_part
from rlspeed.engine.room import HostStay, storages
from rlspeed.engine.world import World
from rlspeed.errors import ConfigError, Fault
from rlspeed.models.build import PolicyModel, ValueModel, load_model_config
from rlspeed.models.weights import live_weights
from rlspeed.planning.devices import Role
from rlspeed.planning.probe import probe_machine
from rlspeed.planning.report import inspect_profile
from rlspeed.training.clock import UPDATE_RANGE
from rlspeed.training.grid import Grid
from rlspeed.training.optim import MasterAdamW
from rlspeed.training.place import Placing

# more than any model has: nothing is computed again
MOST_BLOCKS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What one optimizer step did: norm before clipping, learning rate used, whether there was anything to learn
    from.
    """

    grad_norm: float
    lr: float
    empty: bool


def _freely(what: str) -> None:
    """Nothing to be done before `what`."""


def _at_once() -> None:
    """Nothing to wait for."""


class Resting:
    """A model whose weights are in host memory while it is idle, where `rests` says so (use_cpu_offload).

    entering: called before any work, with what it is (`Handover`).
    """

    def __init__(self, model: nn.Module, *, rests: bool = False) -> None:
        self.model = model
        self.rests = rests
        self.entering: Callable[[str], None] = _freely
        self._stay = HostStay()

    def wake(self) -> None:
        """The weights are on the device again; by itself before any work."""
        self._stay.come_back()
        self._stay.settle()

    def leave(self) -> None:
        """Nothing to do for a while: the device's memory is given back."""
        if self.rests:
            rest(self.model)
            self._stay.leave(storages(local_part(p) for p in self.model.parameters()))

    def begin(self, what: str) -> None:
        """Before the work `what`."""
        self.entering(what)
        self.wake()


class Trainable(Resting):
    """A model with its optimizer; the base of actor and critic is this one method, not a class tree.

    settled: called before the optimizer's state is read (`Handover`).
    """

    def __init__(self, model: nn.Module, optimizer: MasterAdamW, *, rests: bool = False) -> None:
        super().__init__(model, rests=rests)
        self.optimizer = optimizer
        self.settled: Callable[[], None] = _at_once

    def update(
        self, batches: Sequence[PackedBatch], loss_of: Callable[[PackedBatch], torch.Tensor], *, global_tokens: int
    ) -> Updated:
        """One optimizer step over all bins of a mini-batch.

        loss_of: forward of one bin to a loss that is already weighted by global counts, so that the gradient is the
        plain sum over bins and ranks. global_tokens: training tokens of the mini-batch over all ranks; with 0 nothing
        is changed.
        """
        self.begin("an update")
        lr = self.optimizer.lr
        self.optimizer.zero_grad()
        if global_tokens == 0:
            return Updated(grad_norm=0.0, lr=lr, empty=True)
        for batch in batches:
            with record_function(f"{UPDATE_RANGE}forward"):
                # `parallelize` sums gradients over ranks: the loss is weighted by global counts and by nothing else
                loss = loss_of(batch) * self.optimizer.scale.value
            with record_function(f"{UPDATE_RANGE}backward"):
                loss.backward()
        with record_function(f"{UPDATE_RANGE}optimizer"):
            self.settled()
            grad_norm = self.optimizer.step()
        return Updated(grad_norm=grad_norm, lr=lr, empty=False)


class Actor(Trainable):
    """The policy: log-probs, updates, and its weights for a generator."""

    def __init__(self, model: PolicyModel, optimizer: MasterAdamW, temperature: float) -> None:
        super().__init__(model, optimizer)
        self.temperature = temperature

    def forward(self, batch: PackedBatch, *, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs [N] and entropies [N] of the tokens that train, with a graph."""
        return self.model(batch, self.temperature, with_entropy)

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """Log-probs [N] of the tokens that train under the present weights."""
        self.begin("a scoring pass")
        return self.model(batch, self.temperature, False)[0]

    def whole_weights(self, *, keep: bool) -> dict[str, torch.Tensor]:
        """Hugging Face name to whole tensor in host memory, gathered one by one; {} where this rank keeps none.

        Every rank calls it.
        """
        out = {}
        for name, parameter in live_weights(self.model).items():
            whole = full_tensor(parameter.detach())
            if keep:
                out[name] = whole.cpu()
        return out


class Critic(Trainable):
    """The value model."""

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Values [N] with a graph."""
        return self.model(batch)

    @torch.no_grad()
    def values(self, batch: PackedBatch) -> torch.Tensor:
        """Values [N] under the present weights."""
        self.begin("a scoring pass")
        return self.model(batch)


class Reference(Resting):
    """The frozen policy that the KL term is measured against."""

    def __init__(self, model: PolicyModel, temperature: float, *, rests: bool = False) -> None:
        super().__init__(model, rests=rests)
        self.temperature = temperature

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """Log-probs [N] of the tokens that train under the reference."""
        self.begin("a scoring pass")
        return self.model(batch, self.temperature, False)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The models of a run on this rank: None where the role works on other ranks or the algorithm has no use for it."""

    actor_or_none: Actor | None
    critic: Critic | None
    reference: Reference | None
    attention_reason: str
    memory_reason: str = ""

    @property
    def actor(self) -> Actor:
        """The actor, asked for on its own ranks alone."""
        assert self.actor_or_none is not None, "the actor works on other ranks"
        return self.actor_or_none

    @property
    def causal_lm(self) -> Any:
        """The transformers model inside the actor."""
        model: Any = self.actor.model
        return model.causal_lm


def actor_waits(profile: Profile) -> int:
    """First steps in which the critic alone learns; the actor's course of the learning rate begins after them."""
    return profile.algorithm.critic_warmup_steps if profile.algorithm.kind == "ppo" else 0


def kept_blocks(profile: Profile, world: World) -> tuple[int, str]:
    """Blocks of each model that keep their activations under activation_checkpointing, the same on all ranks, and why.

    auto: as many as the memory that is free now holds beside everything else of an update.
    """
    if profile.model.activation_checkpointing != "auto":
        return 0, ""
    found = None
    if world.device.type == "cuda":
        found = inspect_profile(profile, probe_machine(), world_size=world.size).kept_blocks
    numbers = world.gather_objects(found)
    known = [n for n in numbers if n is not None]
    if len(known) < len(numbers):
        what = "a CPU" if world.device.type == "cpu" else "sizes of models or devices that are not known"
        kept = MOST_BLOCKS if world.device.type == "cpu" else 0
        return kept, f"activation checkpointing: {'no' if kept else 'every'} block, on {what}"
    kept = min(known)
    return kept, f"activation checkpointing: all blocks but {kept} of each model, by the memory that is free"


def _attention(profile: Profile, config: Any, precision: Precision, world: World) -> tuple[str, str]:
    """The kernel of training, and why.

    Raises:
        ConfigError: shared prefixes in a model with sliding windows.
    """
    if not profile.model.use_remove_padding:
        return "sdpa", "padded training (use_remove_padding: false)"
    shared = profile.model.shared_prefixes
    if shared and "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(
            Fault(
                where="model.shared_prefixes",
                found=f"true, and {profile.model.path!r} has layers with a sliding window of {config.sliding_window}",
                allowed="a model whose layers see the whole sequence",
                fix="set model.shared_prefixes=false",
            )
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return choose_attention(profile.model.attention, world.device, precision.compute, head_dim, shared=shared)


def build_roles(
    profile: Profile, precision: Precision, world: World, grid: Grid, steps: int, updates_per_step: int
) -> Roles:
    """Load and spread the models that the algorithm needs; each of `steps` has updates_per_step updates.

    Every rank calls it.
    """
    model, optim = profile.model, profile.optim
    padded = not model.use_remove_padding
    config = load_model_config(model.path, trust_remote_code=model.trust_remote_code)
    backend, reason = _attention(profile, config, precision, world)
    kept, memory_reason = kept_blocks(profile, world)
    placing = Placing(profile=profile, precision=precision, world=world, grid=grid, kept_blocks=kept)

    def optimizer(module: Any, cfg: Optimizer, learns: int) -> MasterAdamW:
        scaled = precision.needs_loss_scaling
        return MasterAdamW(module, cfg, total_steps=learns * updates_per_step, loss_scaling=scaled)

    def policy(lm: Any) -> PolicyModel:
        return PolicyModel(lm, backend=backend, padded=padded)

    def rests(role: Role) -> bool:
        return grid.places[role].rests_on_host and world.device.type == "cuda"

    def value(lm: Any) -> ValueModel:
        return ValueModel(lm, backend=backend, padded=padded)

    own = placing.model(Role.ACTOR, model.path, policy, train=True)
    actor = critic = reference = None
    if own is not None:
        learns = steps - actor_waits(profile)
        actor = Actor(own, optimizer(own, optim.actor, learns), profile.rollout.temperature)
    if profile.algorithm.kind == "ppo":
        judge = placing.model(Role.CRITIC, model.critic.path or model.path, value, train=True)
        critic = (
            None if judge is None else Critic(judge, optimizer(judge, optim.critic, steps), rests=rests(Role.CRITIC))
        )
    if profile.algorithm.kl.where != "none":
        frozen = placing.model(Role.REFERENCE, model.reference.path or model.path, policy, train=False)
        if frozen is not None:
            reference = Reference(frozen, profile.rollout.temperature, rests=rests(Role.REFERENCE))
    for idle in (critic, reference):
        if idle is not None:
            idle.leave()
    return Roles(
        actor_or_none=actor,
        critic=critic,
        reference=reference,
        attention_reason=reason,
        memory_reason=memory_reason,
    )
