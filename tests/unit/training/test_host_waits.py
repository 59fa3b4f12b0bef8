"""Inside an update the host asks the device for nothing until the end: one number, the norm, per optimizer step.

On a CPU nothing waits, so the operations that would make it wait on a GPU are counted. Three checks look at values on
CPU only and are not counted; tests/gpu/test_update.py lets CUDA itself look.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.whole_update import WholeUpdate

aten = torch.ops.aten
# of the dispatcher: their result, or its size, depends on values
READS = {aten._local_scalar_dense, aten.item, aten.nonzero, aten.is_nonzero, aten.equal, aten.masked_select}
READS |= {aten._unique2, aten.unique_consecutive, aten.repeat_interleave, aten.bincount}
READ_METHODS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
# of segments.py, attention.py and head.py; each asks for the device first
CPU_ONLY_CHECKS = {"check_stream", "check_segments", "_check"}


# the made-up log-probs of the generator are far from the model's
ALL_KEPT = ("rollout.correction_lower=0", "rollout.correction_threshold=1e9")


def _uncounted() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in CPU_ONLY_CHECKS:
            return True
        frame = frame.f_back
    return False


class CountDispatched(TorchDispatchMode):
    """Operations that read values of tensors."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        by_mask = packet in (aten.index, aten.index_put, aten.index_put_) and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1]
        )
        if (packet in READS or by_mask) and not _uncounted():
            self.seen.append(str(packet))
        return func(*args, **(kwargs or {}))


class CountCalled(TorchFunctionMode):
    """Methods that read a tensor past the dispatcher."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READ_METHODS and not _uncounted():
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def reads_of(run: Any) -> list[str]:
    seen: list[str] = []
    with CountCalled(seen), CountDispatched(seen):
        run()
    return seen


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: float(t[0]),
        lambda t: bool((t > 0).any()),
        lambda t: t.tolist(),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: torch.repeat_interleave(t, torch.tensor([1, 2, 0])),
    ],
)
def test_the_count_sees_reads(read: Any) -> None:
    """A count that sees nothing would let everything pass."""
    assert len(reads_of(lambda: read(torch.arange(3.0)))) >= 1


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("algorithm.epochs=1", "algorithm.kl.where=none", "algorithm.dual_clip=3.0", "algorithm.loss_agg=token-sum"),
        ("algorithm.kind=grpo", "algorithm.policy_loss=gspo", "rollout.correction=sequence_tis"),
        (
            "algorithm.kind=grpo",
            "algorithm.policy_loss=cispo",
            "rollout.correction=token_mask",
            "rollout.correction_lower=0",
            "rollout.correction_threshold=1e9",
        ),
        ("algorithm.kind=grpo", "algorithm.kl.where=loss", "algorithm.loss_agg=seq-mean-token-mean"),
        ("algorithm.kind=dr_grpo", "algorithm.loss_agg=seq-mean-token-sum-norm", "algorithm.entropy_coef=0.01"),
    ],
    ids=lambda w: " ".join(x.split(".")[-1] for x in w) or "ppo",
)
def test_one_read_per_optimizer_step(words: tuple[str, ...]) -> None:
    """Several micro-batches and mini-batches, so that a read per micro-batch shows."""
    step = WholeUpdate("cpu", "packing.capacity=40", "algorithm.mini_batch_size=2", *words)
    assert all(len(part) > 1 for part in step.per_minibatch)
    step.score()
    roles = 1 + (step.roles.critic is not None)
    steps = roles * len(step.plans) * step.parts.profile.algorithm.epochs
    assert reads_of(step.update) == ["aten._local_scalar_dense"] * steps
    numbers = step.numbers()
    assert numbers["actor/grad_norm"] > 0
    assert step.roles.actor.optimizer.steps_done == steps // roles


def test_indices_travel_with_the_batch() -> None:
    """On the device they would have to be counted there."""
    step = WholeUpdate("cpu", "packing.capacity=40")
    (batch, *_), *_ = step.per_minibatch
    moved = batch.to("meta")
    assert moved.response_index().device.type == moved.segment_ids().device.type == "meta"
    assert moved.response_index().shape == batch.response_index().shape
    assert torch.equal(batch.to("cpu").segment_ids(), batch.segment_ids())
