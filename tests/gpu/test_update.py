"""A whole update on a GPU: the host waits for nothing before the end of each optimizer step."""

from __future__ import annotations

import math

import pytest
import torch

from rlspeed.training.optim import MasterAdamW
from tests.whole_update import WholeUpdate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_GPU = ("model.model_dtype=bf16", "packing.capacity=512", "algorithm.mini_batch_size=8")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("algorithm.kind=grpo", "algorithm.policy_loss=gspo", "rollout.correction=sequence_tis"),
        ("algorithm.kind=grpo", "algorithm.kl.where=loss", "algorithm.loss_agg=seq-mean-token-mean"),
    ],
    ids=["ppo", "gspo", "kl in the loss"],
)
def test_the_host_waits_only_for_the_norm(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first update builds kernels and caches; in the second CUDA raises where the host would wait."""
    step = WholeUpdate("cuda", *ON_GPU, *words, groups=16, longest=100)
    step.score()
    step.update()
    reads = 0
    finish, now = MasterAdamW.finish, step.parts.clock._now

    def may_wait(call):  # type: ignore[no-untyped-def]
        def wrapped(*args):  # type: ignore[no-untyped-def]
            torch.cuda.set_sync_debug_mode("default")
            try:
                return call(*args)
            finally:
                torch.cuda.set_sync_debug_mode("error")

        return wrapped

    def count(optimizer: MasterAdamW, norm: torch.Tensor) -> float:
        nonlocal reads
        reads += 1
        return finish(optimizer, norm)

    monkeypatch.setattr(MasterAdamW, "finish", may_wait(count))
    monkeypatch.setattr(step.parts.clock, "_now", may_wait(now))  # the clock waits at the ends of phases, on purpose
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    roles = 1 + (step.roles.critic is not None)
    assert reads == roles * len(step.plans) * step.parts.profile.algorithm.epochs
    assert math.isfinite(step.numbers()["actor/grad_norm"])
