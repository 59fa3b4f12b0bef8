"""Between training and generation: what the three switches do, on one process; test_ranks.py has several."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlspeed.config.load import load_profile
from rlspeed.config.schema import Optimizer
from rlspeed.engine.packed import pack_sequences
from rlspeed.errors import RunError
from rlspeed.models.build import PolicyModel, load_causal_lm
from rlspeed.models.weights import weight_specs
from rlspeed.planning.devices import Role, build_device_map
from rlspeed.planning.machine import Machine
from rlspeed.planning.report import inspect_profile
from rlspeed.planning.shape import ModelShape
from rlspeed.planning.transition import actor_way
from rlspeed.training.carriers import Carrier, Copied, Moved, Shared
from rlspeed.training.handover import Handover, transition_plan
from rlspeed.training.optim import MasterAdamW
from rlspeed.training.roles import Actor

CPU = torch.device("cpu")
CLASSIC = "model.actor.use_3d_hybrid_engine=false"


class Recorder:
    """A generator that writes down what it is given."""

    def __init__(self) -> None:
        self.version = 0
        self.given: list[dict[str, torch.Tensor] | None] = []

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> None:
        self.given.append(None if weights is None else {n: t.clone() for n, t in weights})
        self.version = version


class Broken:
    """A carrier whose transfers fail."""

    shares = stays = False
    dropped = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def bring(self, version: int) -> Moved:
        raise RunError("the transfer broke off")

    def drop(self) -> None:
        self.dropped += 1


@pytest.fixture
def actor(tiny_models: dict[str, Path]) -> Actor:
    """A tiny policy in bf16, so that its optimizer has masters."""
    lm = load_causal_lm(str(tiny_models["qwen2"]), dtype=torch.bfloat16, attention="packed")
    policy = PolicyModel(lm, backend="sdpa", padded=False)
    return Actor(policy, MasterAdamW(policy, Optimizer(lr=1e-2), total_steps=9), 1.0)


def handover_of(actor: Actor, carrier: Carrier, **how: Any) -> tuple[Handover, Recorder]:
    handover, generator = Handover(carrier, CPU, **how), Recorder()
    handover.attach(generator)  # type: ignore[arg-type]
    actor.entering, actor.settled = handover.entering, handover.settle
    return handover, generator


def learn(actor: Actor) -> None:
    batch = pack_sequences([[5, 6, 7, 8], [9, 10, 11]], [1, 1])
    actor.update([batch], lambda b: -actor.forward(b, with_entropy=False)[0].mean(), global_tokens=5)


VLLM = ("devices.actor.use_vllm=true", "devices.actor.vllm_config.tensor_parallel_size=2")


@pytest.mark.parametrize("words", [(), ("devices.actor.tensor_parallel_size=2",), VLLM, (CLASSIC,)])
def test_check_devices_prints_the_plan_that_train_binds(words: tuple[str, ...]) -> None:
    """The same moves of the same bytes, from the config alone and from the live model.

    Whole weights on every rank in each of these, vLLM at tensor parallel 2 included: it is given whole tensors.
    """
    profile = load_profile("quickstart", words).profile
    machine = Machine(devices=(), host_free_bytes=None, shm_bytes=None)
    printed = inspect_profile(profile, machine, world_size=4).plan
    lm = load_causal_lm("quickstart", dtype=torch.float32, attention="packed")
    specs = weight_specs(PolicyModel(lm, backend="sdpa", padded=False), lm.config)
    place = build_device_map(profile.devices, world_size=4, use_cpu=True).roles[Role.ACTOR]
    way = actor_way(profile, place, ModelShape.from_config(lm.config.to_dict()))
    assert printed == transition_plan(specs, way, "fp32", None)
    assert printed is not None
    assert set(printed.bytes_received()) == set(range(4))
    size = 4 * sum(p.numel() for p in lm.parameters())
    held = size // 4 if words in ((), VLLM, (CLASSIC,)) else None
    if held is not None:
        assert printed.num_bytes == pytest.approx(4 * (size - held), rel=1e-3)


def test_on_one_rank_nothing_moves(actor: Actor) -> None:
    """The generator reads the parameters that the optimizer writes."""
    carrier = Shared(actor.model)
    handover, generator = handover_of(actor, carrier)
    seen = carrier.tensors()
    learn(actor)
    handover.updated()
    handover.to_generation()
    done = handover.take()
    assert done is not None
    assert (done.moved.received_bytes, done.moved.copied_bytes) == (0, 0)
    assert done.moved.shared_bytes == sum(p.nbytes for p in actor.model.parameters())
    assert (generator.given, generator.version) == ([None], 1)
    live = dict(actor.model.causal_lm.named_parameters())
    assert all(t.data_ptr() == live[name].data_ptr() for name, t in seen.items())
    handover.to_generation()  # it has them
    assert handover.take() is None
    assert len(generator.given) == 1


def test_the_classic_way_copies_and_lets_go(actor: Actor) -> None:
    carrier = Copied(actor.model, CPU, torch.bfloat16)
    handover, generator = handover_of(actor, carrier)
    learn(actor)
    handover.updated()
    handover.to_generation()
    (given,) = generator.given
    live = dict(actor.model.causal_lm.named_parameters())
    assert given is not None
    assert set(given) == set(live)
    assert all(torch.equal(given[name], live[name]) for name in live)
    done = handover.take()
    assert done is not None
    assert done.moved.copied_bytes >= sum(p.nbytes for p in live.values())
    assert carrier.room.is_open
    learn(actor)
    assert not carrier.room.is_open


def test_a_forgotten_call_is_an_error_that_names_it(actor: Actor) -> None:
    """enable_auto_repartition_for_training: false; nothing is learned in the generator's layout."""
    handover, _ = handover_of(actor, Copied(actor.model, CPU, torch.bfloat16), automatic=False)
    handover.to_generation()
    before = [p.clone() for p in actor.model.parameters()]
    with pytest.raises(RunError, match=r"(?s)enable_auto_repartition_for_training.*to_training\(\)"):
        learn(actor)
    with pytest.raises(RunError, match="to_training"):
        actor.logprobs(pack_sequences([[1, 2, 3]], [1]))
    assert all(torch.equal(a, b) for a, b in zip(before, actor.model.parameters()))
    assert actor.optimizer.steps_done == 0
    handover.to_training()
    learn(actor)
    assert actor.optimizer.steps_done == 1


def test_resting_state_is_away_while_generating_and_back_in_an_update(actor: Actor) -> None:
    """use_lightweight_sharding_for_generation: an update afterwards is the one that would have been."""
    state = lambda: [t for t in actor.optimizer.state_tensors().values() if t.ndim]  # noqa: E731
    learn(actor)
    kept = [t.clone() for t in state()]
    handover, _ = handover_of(actor, Shared(actor.model), resting=state)
    handover.to_generation()
    assert all(t.untyped_storage().nbytes() == 0 for t in state())
    done = handover.take()
    assert done is not None
    assert done.offloaded_bytes == sum(t.nbytes for t in kept) > 0
    assert all(p.grad is None for p in (*actor.optimizer.params, *actor.optimizer.masters))
    handover.entering("an update")
    handover.settle()
    assert all(torch.equal(a, b) for a, b in zip(state(), kept))
    assert actor.optimizer.device_state() == []  # nothing of it lies on a GPU here


def test_a_failed_transfer_leaves_the_old_version_in_force(actor: Actor) -> None:
    carrier = Broken()
    state = [torch.ones(3)]
    handover, generator = handover_of(actor, carrier, resting=lambda: state)
    handover.updated()
    with pytest.raises(RunError, match="broke off"):
        handover.to_generation()
    assert (generator.version, generator.given, carrier.dropped) == (0, [], 1)
    assert not handover.generating
    handover.settle()
    assert torch.equal(state[0], torch.ones(3))
    learn(actor)


def test_restored_weights_are_brought_before_anything_is_generated(actor: Actor) -> None:
    handover, generator = handover_of(actor, Shared(actor.model))
    handover.to_generation()
    assert (generator.version, generator.given) == (0, [])  # they share from the start
    handover.restored(0)
    handover.to_generation()
    assert generator.given == [None]
    handover.restored(7)
    handover.to_generation()
    assert (generator.version, generator.given) == (7, [None, None])
