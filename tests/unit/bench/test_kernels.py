"""Casts, pads and concatenations are found in traces: made-up ones of a device, real ones of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rlspeed.bench.kernels import Work, classify, kind_of, over_tokens
from rlspeed.bench.measure import trace_events
from tests.whole_update import WholeUpdate

T, H = 300, 128
CPU = torch.device("cpu")


def op(name: str, number: int, start: float, length: float, dims: list[Any], types: list[str], tid: int = 1) -> dict:
    args = {"External id": number, "Input Dims": dims, "Input type": types}
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": length, "tid": tid, "args": args}


def kernel(name: str, number: int, length: float) -> dict:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": 900.0,
        "dur": length,
        "tid": 7,
        "args": {"External id": number},
    }


BF16, FP32 = "c10::BFloat16", "float"


def test_kernels_are_brought_back_to_their_operations() -> None:
    """The kernels of to(), pad() and cat() all bear the same kind of name; the operations around them tell."""
    both = [[T, H], [T, H], []]
    events = [
        op("aten::to", 1, 0, 30, [[T, H]], [BF16]),
        op("aten::_to_copy", 2, 1, 28, [[T, H]], [BF16]),
        op("aten::copy_", 3, 5, 20, both, [FP32, BF16, "Scalar"]),
        kernel("elementwise", 3, 1e6),
        op("aten::copy_", 4, 40, 5, [[H, H], [H, H], []], [BF16, FP32, "Scalar"]),  # a weight
        kernel("elementwise", 4, 2e6),
        op("aten::copy_", 5, 50, 5, both, [BF16, BF16, "Scalar"]),  # no change
        kernel("elementwise", 5, 4e6),
        op("aten::constant_pad_nd", 6, 60, 20, [[T, H]], [BF16]),
        op("aten::copy_", 7, 65, 5, both, [BF16, BF16, "Scalar"]),
        kernel("elementwise", 7, 8e6),
        op("aten::cat", 8, 90, 5, [[[T, H], [T, H]], []], ["TensorList", "Scalar"]),
        kernel("CatArrayBatchedCopy", 8, 16e6),
        op("aten::cat", 9, 96, 3, [[[T], [T]], []], ["TensorList", "Scalar"]),  # scalars per token
        kernel("CatArrayBatchedCopy", 9, 32e6),
        op("aten::mm", 10, 62, 50, [[T, H], [H, H]], [BF16, BF16], tid=2),  # at the same time on another thread
        kernel("gemm", 10, 64e6),
        kernel("of nobody", 99, 128e6),
    ]
    moves = classify(events, [(T,)])
    assert (moves.cast, moves.weight_cast, moves.pad, moves.cat) == (1.0, 2.0, 8.0, 16.0)
    assert moves.total == 255.0
    assert moves.share == pytest.approx(25 / 255)
    assert [name.split(":")[0] for name, _ in moves.longest] == ["cat", "pad", "cast"]
    assert classify([], [(T,)]).share == 0.0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_poi_fused__to_copy_3", "cast"),
        ("triton_poi_fused__to_copy_view_12", "cast"),
        ("triton_poi_fused_constant_pad_nd_0", "pad"),
        ("triton_poi_fused_cat_transpose_1", "cat"),
        ("triton_poi_fused_clone_1", None),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", None),
        ("triton_poi_fused_add_cat_mul_neg_4", None),
        ("triton_poi_fused_mul_silu_0", None),
        ("nvjet_tst_256x128", None),
    ],
)
def test_fused_kernels_are_told_by_their_names(name: str, kind: str | None) -> None:
    """A cast fused into arithmetic happens in registers; a kernel that only casts does not."""
    assert kind_of(Work(name=name, seconds=1.0, operations=()), [(T,)]) == kind


def test_tensors_over_tokens() -> None:
    assert over_tokens([1, T, H], [(T,)])
    assert over_tokens([1, 4, T, 32], [(T,)])
    assert not over_tokens([T], [(T,)])
    assert not over_tokens([T, 8], [(T,)])
    assert not over_tokens([H, H], [(T,)])
    assert over_tokens([4, 50, H], [(4, 50)])
    assert not over_tokens([4, H], [(4, 50)])
    assert over_tokens([64, 64], [(64,)])
    assert not over_tokens([64, 64], [(64, 64)])


def test_a_real_trace_of_a_cpu() -> None:
    """The same layer with and without a detour over fp32: casts appear, and nothing else is taken for one."""
    layer, x = nn.Linear(H, H).to(torch.bfloat16), torch.randn(T, H, dtype=torch.bfloat16)

    def plain() -> None:
        layer(x)

    def detour() -> None:
        layer(x.float().to(torch.bfloat16))
        torch.nn.functional.pad(x, (0, 0, 1, 1))
        torch.cat([x, x])
        layer.weight.float()

    moves = classify(trace_events(plain, CPU), [(T,)])
    assert (moves.cast, moves.pad, moves.cat, moves.weight_cast) == (0.0, 0.0, 0.0, 0.0)
    assert moves.total > 0
    moves = classify(trace_events(detour, CPU), [(T,)])
    assert min(moves.cast, moves.pad, moves.cat, moves.weight_cast) > 0
    assert moves.share < 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_real_model_casts_in_bf16_and_not_in_fp32(dtype: str) -> None:
    """In fp32 there is nothing to cast; in bf16 the norms of blocks that are not compiled go through fp32."""
    step = WholeUpdate("cpu", "packing.capacity=64", "algorithm.mini_batch_size=4", "algorithm.kl.where=none")
    if dtype == "bf16":
        step.roles.actor.model.to(torch.bfloat16)

    def whole() -> None:
        for part in step.per_minibatch:
            for batch in part:
                step.roles.actor.forward(batch, with_entropy=True)[0].sum().backward()

    batches = [b for part in step.per_minibatch for b in part]
    sizes = [(b.num_tokens,) for b in batches] + [(b.response_index().numel(),) for b in batches]
    moves = classify(trace_events(whole, CPU), sizes)
    assert (moves.cast > 0) == (dtype == "bf16")
    assert moves.pad == 0
    assert moves.cat > 0  # the rotary embedding of blocks that are not compiled
