"""Packed attention on CUDA: each kernel that runs on this device against float64, one sequence at a time."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from rlspeed.engine.attention import BACKENDS, choose_attention, varlen_attention
from rlspeed.engine.attention_kernels import kernel_fault

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def usable(backend, dim=128):
    fault = kernel_fault(backend, torch.device("cuda"), torch.bfloat16, dim)
    if fault is not None:
        pytest.skip(f"{backend} {fault}")


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


def tensors(lengths, heads, kv_heads, dim, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(sum(lengths), n, dim, generator=generator, device="cuda").to(dtype).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]


def packed(q, k, v, lengths, backend, **options):
    return varlen_attention(
        q, k, v, bounds(lengths), tuple(lengths), max_seqlen=max(lengths), backend=backend, **options
    )


def one_by_one(q, k, v, lengths, window=None):
    out = []
    group = q.shape[1] // k.shape[1]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for a, b in pairwise(starts):
        ks, vs = k[a:b].repeat_interleave(group, 1), v[a:b].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[a:b], ks) * q.shape[2] ** -0.5
        distance = torch.arange(b - a, device="cuda")[:, None] - torch.arange(b - a, device="cuda")[None]
        allowed = (distance >= 0) & (distance < (window or b - a))
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), vs))
    return torch.cat(out)


@pytest.mark.parametrize(
    ("lengths", "heads", "window"),
    [
        ([300, 1, 77, 512, 2, 130], (8, 2, 128), None),
        ([1], (8, 2, 128), None),
        ([1, 1, 1], (8, 2, 128), None),
        ([700], (8, 2, 128), None),
        ([300, 1, 77, 512, 2, 130], (8, 2, 128), 64),
        ([300, 1, 77], (4, 4, 64), None),
    ],
    ids=["mixed", "one token", "one-token sequences", "one sequence", "window", "equal heads of 64"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_float64(backend, lengths, heads, window):
    """Values and gradients: bf16 scores' weights and outputs leave about 3e-3 of the norm; a leak would leave 1e-1."""
    usable(backend, heads[2])
    q, k, v = tensors(lengths, *heads)
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    got = packed(q, k, v, lengths, backend, window=window)
    want = one_by_one(*doubles, lengths, window=window)
    upstream = torch.randn_like(got)
    grads = torch.autograd.grad(got, (q, k, v), upstream)
    want_grads = torch.autograd.grad(want, doubles, upstream.double())
    assert ((got - want).norm() / want.norm()).item() < 1e-2
    for name, a, b in zip("qkv", grads, want_grads):
        # one token alone: the weights are constant 1, so the gradients of q and k are 0 but for rounding
        scale = b.norm() if b.norm() > 1e-6 else upstream.double().norm()
        assert ((a - b).norm() / scale).item() < 2e-2, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 64])
def test_pack_01_and_pack_09(backend, window):
    """pack-01: change document 1, document 2 keeps every bit; its loss gives document 1 gradient 0. pack-09: with a
    window, far tokens of the same document keep every bit too."""
    usable(backend)
    lengths = [200, 150]
    q, k, v = tensors(lengths, 8, 2, 128)
    out = packed(q, k, v, lengths, backend, window=window)
    for grad in torch.autograd.grad(out[200:].float().square().sum(), (q, k, v)):
        assert (grad[:200] == 0).all()
        assert (grad[200:] != 0).any()
    changed = [x.detach().clone() for x in (q, k, v)]
    for x in changed:
        x[0] = 100.0
    after = packed(*changed, lengths, backend, window=window)
    assert torch.equal(after[200:], out[200:])
    assert not torch.equal(after[:200], out[:200])
    if window:
        assert torch.equal(after[window:200], out[window:200])


@pytest.mark.parametrize("backend", BACKENDS)
def test_ten_thousand_sequences(backend):
    """Many short sequences in one pack."""
    usable(backend)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (10_000,), generator=generator).tolist()
    q, k, v = tensors(lengths, 8, 2, 128)
    out = packed(q, k, v, lengths, backend)
    out.float().square().sum().backward()
    part = sum(lengths[:50])
    want = one_by_one(*(x.detach()[:part].double() for x in (q, k, v)), lengths[:50])
    assert ((out[:part] - want).norm() / want.norm()).item() < 1e-2
    assert torch.isfinite(q.grad).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_head_size_256(backend):
    """The largest head size, forward and backward."""
    usable(backend, 256)
    lengths = [300, 1, 77]
    q, k, v = tensors(lengths, 4, 2, 256)
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    got, want = packed(q, k, v, lengths, backend), one_by_one(*doubles, lengths)
    upstream = torch.randn_like(got)
    grads = torch.autograd.grad(got, (q, k, v), upstream)
    assert ((got - want).norm() / want.norm()).item() < 1e-2
    for a, b in zip(grads, torch.autograd.grad(want, doubles, upstream.double())):
        assert ((a - b).norm() / b.norm()).item() < 2e-2


def test_the_choice_runs():
    """What auto picks here works, and fp32 goes to sdpa with the reason."""
    backend, reason = choose_attention("auto", "cuda", torch.bfloat16, 128)
    lengths = [33, 65]
    assert torch.isfinite(packed(*tensors(lengths, 8, 2, 128), lengths, backend)).all()
    assert reason.startswith(backend)
    backend, reason = choose_attention("auto", "cuda", torch.float32, 128)
    assert backend == "sdpa"
    assert "fp16" in reason
    q, k, v = tensors(lengths, 8, 2, 128, torch.float32)
    want = one_by_one(*(x.double() for x in (q, k, v)), lengths)
    torch.testing.assert_close(packed(q, k, v, lengths, "sdpa").double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["flash4", "flash2", "varlen"])
def test_no_host_synchronisation(backend):
    """The kernels take boundaries from the device; the host does not wait in forward or backward."""
    usable(backend)
    lengths = [300, 77, 130]
    q, k, v = tensors(lengths, 8, 2, 128)
    cu = bounds(lengths)

    def step():
        out = varlen_attention(q, k, v, cu, tuple(lengths), max_seqlen=300, backend=backend)
        torch.autograd.grad(out.sum(), (q, k, v))

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
