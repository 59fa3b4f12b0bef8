"""The Resharder in one process: nothing moves where trainer and generator share memory; bind and versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlspeed.engine.reshard import Resharder, empty_targets
from rlspeed.errors import LayoutError, RunError
from rlspeed.planning.layout import Layout, Mesh
from rlspeed.planning.reshard import ReshardPlan, TensorRequest, plan_reshard

CPU = torch.device("cpu")


def one_rank_plan(wire: str = "bf16") -> ReshardPlan:
    layout = Layout(mesh=Mesh.of((0,), one=1), cuts=((), ()))
    return plan_reshard(
        TensorRequest(name=n, shape=s, wire_dtype=wire, src=layout, dst=layout)
        for n, s in (("a", (4, 3)), ("b", (2, 5)))
    )


def bind(sources: dict[str, torch.Tensor], targets: dict[str, torch.Tensor], **changes: Any) -> Resharder:
    given: dict[str, Any] = {"rank": 0, "group": None, "device": CPU, "bucket_bytes": 1024} | changes
    return Resharder(one_rank_plan(given.pop("wire", "bf16")), sources=lambda: sources, targets=targets, **given)


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(4, 3).to(dtype), "b": torch.randn(2, 5).to(dtype)}


def test_shared_memory_is_not_copied() -> None:
    """On one device the generator reads what the optimizer writes: no bytes on the wire, none copied."""
    live = weights(torch.bfloat16)
    pushed = bind(live, dict(live)).push(3)
    assert (pushed.sent_bytes, pushed.received_bytes, pushed.copied_bytes, pushed.held_bytes) == (0, 0, 0, 0)
    assert pushed.aliased_bytes == 2 * 22
    assert pushed.version == 3


def test_a_copy_is_rounded_to_the_wire() -> None:
    """fp32 trainer and fp32 generator with bf16 wire: an own copy holds what another rank would have received."""
    live = weights()
    targets = {n: torch.zeros_like(t) for n, t in live.items()}
    resharder = bind(live, targets, verify="checksum")
    pushed = resharder.push(1)
    assert pushed.copied_bytes == 2 * 22
    assert all(torch.equal(targets[n], t.bfloat16().float()) for n, t in live.items())
    live["a"] = live["a"] * 2.0  # another tensor, elsewhere in memory
    resharder.push(2)
    assert torch.equal(targets["a"], live["a"].bfloat16().float())


def test_all_faults_at_bind_in_one_error() -> None:
    """sync-10: missing, unknown, misshapen and mistyped tensors are one error before anything moves."""
    live = weights() | {"c": torch.zeros(1)}
    targets = {"a": torch.zeros(3, 4, dtype=torch.bfloat16), "b": torch.zeros(2, 5, dtype=torch.float16)}
    with pytest.raises(LayoutError) as caught:
        bind(live, targets)
    text = str(caught.value)
    assert len(caught.value.faults) == 3
    assert "c: training has it and the plan does not know it" in text
    assert "a: generation shape (3, 4)" in text
    assert "b: generation holds torch.float16, the wire carries torch.bfloat16" in text


def test_no_version_before_the_first_push_and_none_of_a_changed_model() -> None:
    live = weights()
    resharder = bind(live, {n: t.bfloat16() for n, t in live.items()}, keep_old=False)
    with pytest.raises(RunError, match="weights of no version"):
        resharder.require_version()
    resharder.push(5)
    assert resharder.require_version() == 5
    live["b"] = torch.zeros(1, 5)
    with pytest.raises(RunError, match=r"(?s)b: gone or of another shape.*the old weights stay in force"):
        resharder.push(6)
    assert resharder.require_version() == 5


def test_targets_of_a_rank() -> None:
    targets = empty_targets(one_rank_plan(), 0, torch.bfloat16, CPU)
    assert {n: (tuple(t.shape), t.dtype) for n, t in targets.items()} == {
        "a": ((4, 3), torch.bfloat16),
        "b": ((2, 5), torch.bfloat16),
    }
    assert empty_targets(one_rank_plan(), 1, torch.bfloat16, CPU) == {}
