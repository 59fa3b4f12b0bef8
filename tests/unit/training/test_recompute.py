"""Blocks that compute their activations again give the same gradients, bit for bit, however many they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlspeed.config.load import load_profile
from rlspeed.training import roles
from tests.whole_update import WholeUpdate


def gradients(step: WholeUpdate) -> tuple[list[torch.Tensor], int]:
    """Gradients of one pack, and how often a block was computed."""
    model, calls = step.roles.actor.model, 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    for block in model.causal_lm.model.layers:
        block.self_attn.register_forward_pre_hook(count)
    logprobs, entropy = step.roles.actor.forward(step.per_minibatch[0][0], with_entropy=True)
    assert entropy is not None
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], calls


@pytest.mark.parametrize("kept", [0, 1, 3, 4])
def test_gradients_are_the_same(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart's model has four blocks; those that are not kept are computed twice."""
    plain, calls = gradients(WholeUpdate("cpu", "algorithm.kl.where=none"))
    assert calls == 4
    monkeypatch.setattr(roles, "kept_blocks", lambda *_: (kept, ""))
    words = ("algorithm.kl.where=none", "model.activation_checkpointing=auto")
    again, calls = gradients(WholeUpdate("cpu", *words))
    assert calls == 4 + (4 - kept)
    assert len(plain) == len(again)
    assert all(torch.equal(a, b) for a, b in zip(plain, again))


@pytest.mark.parametrize(
    ("found", "kept", "text"),
    [([7, 5], 5, "all blocks but 5"), ([7, None], 0, "every block"), ([28, 28], 28, "all blocks but 28")],
)
def test_all_ranks_keep_as_many_as_the_tightest(
    found: list[int | None], kept: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = load_profile("quickstart", ["model.activation_checkpointing=auto"]).profile
    monkeypatch.setattr(roles, "probe_machine", lambda: None)
    monkeypatch.setattr(roles, "inspect_profile", lambda *_, **__: SimpleNamespace(kept_blocks=found[0]))
    world = SimpleNamespace(device=torch.device("cuda"), size=2, gather_objects=lambda mine: found)
    number, reason = roles.kept_blocks(profile, world)  # type: ignore[arg-type]
    assert number == kept
    assert text in reason


def test_a_cpu_computes_nothing_again() -> None:
    step = WholeUpdate("cpu", "model.activation_checkpointing=auto", "algorithm.kl.where=none")
    assert gradients(step)[1] == 4
    assert step.roles.memory_reason == "activation checkpointing: no block, on a CPU"
