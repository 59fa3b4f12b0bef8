"""Shared prompts on CUDA: each kernel that gives its log-sum-exp against the fp32 reference, gradients too."""

from __future__ import annotations

import pytest
import torch

from rlspeed.engine.attention import BACKENDS
from rlspeed.engine.attention_kernels import kernel_fault
from rlspeed.engine.attention_lse import lse_fault
from rlspeed.engine.attention_shared import shared_attention
from rlspeed.engine.packed_shared import pack_shared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS, ANSWERS = (300, 1, 129), ((100, 1, 257), (5,), (64, 64, 300, 7))


def batch():
    """Three groups whose prompts and answers are below, at and above the tiles of the kernels."""
    rows = [[1] * (p + a) for p, answers in zip(PROMPTS, ANSWERS) for a in answers]
    prompts = [p for p, answers in zip(PROMPTS, ANSWERS) for _ in answers]
    groups = [g for g, answers in enumerate(ANSWERS) for _ in answers]
    return pack_shared(rows, prompts, groups).to("cuda")


@pytest.mark.parametrize("heads", [(8, 8, 64), (8, 2, 128)])
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "sdpa"])
def test_kernels_equal_the_reference(backend: str, heads: tuple[int, int, int]) -> None:
    """bf16 against fp32 on the same rounded inputs: 2e-2 of the size, some roundings of 2^-9 each."""
    query_heads, kv_heads, dim = heads
    fault = kernel_fault(backend, torch.device("cuda"), torch.bfloat16, dim) or lse_fault(backend)
    if fault is not None:
        pytest.skip(f"{backend} {fault}")
    pack = batch()
    assert pack.prefixes is not None
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [
        torch.randn(pack.num_tokens, n, dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        for n in (query_heads, kv_heads, kv_heads)
    ]
    upstream = torch.randn(inputs[0].shape, generator=generator, device="cuda")
    results = []
    for name, dtype in (("sdpa", torch.float32), (backend, torch.bfloat16)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = shared_attention(*leaves, pack.cu_seqlens, pack.lengths, pack.prefixes, backend=name)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))])
    for want, got in zip(*results):
        assert float((got.float() - want).norm() / want.norm()) < 2e-2
        torch.testing.assert_close(got.float(), want, atol=5e-2 * float(want.abs().max()), rtol=0)
