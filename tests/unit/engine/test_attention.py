"""Packed attention against one sequence at a time, on CPU, and the choice of the kernel.

A wrong answer here is a token that sees another document: training looks healthy and learns from the wrong context.
"""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch

from rlspeed.engine import attention, attention_kernels
from rlspeed.engine.attention import choose_attention, varlen_attention
from rlspeed.engine.attention_kernels import shape_fault, varlen_options
from rlspeed.engine.attention_sdpa import bucket_width, plan_buckets
from rlspeed.errors import DeviceError, LayoutError


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def tensors(lengths, heads=4, kv_heads=2, dim=16, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(lengths), heads, dim), (sum(lengths), kv_heads, dim), (sum(lengths), kv_heads, dim)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def packed(q, k, v, lengths, **options):
    return varlen_attention(
        q, k, v, bounds(lengths), tuple(lengths), max_seqlen=max(lengths), backend="sdpa", **options
    )


def one_by_one(q, k, v, lengths, causal=True, window=None, scale=None):
    """Softmax attention written out, one sequence after the other."""
    out = []
    scale = q.shape[2] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    for a, b in zip(bounds(lengths)[:-1].tolist(), bounds(lengths)[1:].tolist()):
        qs, ks, vs = q[a:b], k[a:b].repeat_interleave(group, 1), v[a:b].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * scale
        distance = torch.arange(b - a)[:, None] - torch.arange(b - a)[None]
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if causal:
            allowed &= distance >= 0
        if window is not None:
            allowed &= distance.abs() < window
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -math.inf).softmax(-1), vs))
    return torch.cat(out)


LENGTHS = {
    "one sequence": [13],
    "one token": [1],
    "one-token sequences": [1, 1, 1],
    "equal": [4, 4, 4],
    "mixed": [5, 1, 9, 5, 30, 2, 17, 31],
    "masked tail": [6, 7, 3],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize(
    "options", [{}, {"window": 3}, {"causal": False}, {"causal": False, "window": 4}, {"scale": 0.3}]
)
def test_equal_to_one_sequence_at_a_time(lengths, options):
    """Values and all three gradients, in float64, where the order of sums is below 1e-12."""
    q, k, v = (x.detach().double().requires_grad_() for x in tensors(lengths))
    weights = torch.randn(sum(lengths), 4, 16, dtype=torch.float64)
    got = packed(q, k, v, lengths, **options)
    got_grads = torch.autograd.grad((got * weights).sum(), (q, k, v))
    want = one_by_one(q, k, v, lengths, **options)
    want_grads = torch.autograd.grad((want * weights).sum(), (q, k, v))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    for a, b in zip(got_grads, want_grads):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 32), (6, 2, 64), (8, 1, 128), (2, 1, 256)])
def test_grouped_heads_and_head_sizes(heads, kv_heads, dim):
    """Query head h reads KV head h // group: the other order gives another result for every group."""
    lengths = [7, 3, 12]
    q, k, v = tensors(lengths, heads, kv_heads, dim)
    torch.testing.assert_close(packed(q, k, v, lengths), one_by_one(q, k, v, lengths), rtol=1e-5, atol=1e-5)


def test_bf16_keeps_its_dtype():
    """bf16 in, bf16 out, within two roundings of the float64 result."""
    lengths = [7, 20]
    q, k, v = tensors(lengths, dtype=torch.bfloat16)
    out = packed(q, k, v, lengths)
    assert out.dtype == torch.bfloat16
    want = one_by_one(q.double(), k.double(), v.double(), lengths)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"causal": False}])
@pytest.mark.parametrize("lengths", [[4, 3], [5, 6], [3, 3], [1, 4]])
def test_pack_01_nothing_crosses_a_boundary(lengths, options):
    """pack-01: change a token of document 1; document 2 keeps every bit, and its loss gives document 1 gradient 0."""
    first = lengths[0]
    q, k, v = tensors(lengths)
    before = packed(q, k, v, lengths, **options)
    grads = torch.autograd.grad(before[first:].square().sum(), (q, k, v))
    for g in grads:
        assert (g[:first] == 0).all()
        assert (g[first:] != 0).any() or lengths[1] == 1
    changed = [x.detach().clone() for x in (q, k, v)]
    for x in changed:
        x[0] = 1e4
    after = packed(*changed, lengths, **options)
    assert torch.equal(after[first:], before[first:].detach())
    assert not torch.equal(after[:first], before[:first].detach())


def test_not_a_number_stays_in_its_sequence():
    """A broken document must not spread: 0 * NaN is NaN, so a mask over a shared row would let it through."""
    lengths = [6, 5, 7]
    q, k, v = (x.detach() for x in tensors(lengths))
    for x in (q, k, v):
        x[:6] = math.nan
    out = packed(q, k, v, lengths)
    assert torch.isfinite(out[6:]).all()
    assert out[:6].isnan().all()


@pytest.mark.parametrize("lengths", [[12], [3, 12, 1]])
def test_pack_09_window_is_applied(lengths):
    """pack-09: window 4, change the first token of the 12; positions 4 and later keep every bit, 0 to 3 change."""
    start = 0 if lengths[0] == 12 else 3
    q, k, v = (x.detach() for x in tensors(lengths))
    before = packed(q, k, v, lengths, window=4)
    for x in (q, k, v):
        x[start] += 1.0
    after = packed(q, k, v, lengths, window=4)
    same = (before == after).all(-1).all(-1)
    assert same[start + 4 : start + 12].all()
    assert not same[start : start + 4].any()


def test_pack_11_three_documents_of_one_token():
    """pack-11: each token sees only itself, so the output is its own value vector."""
    q, k, v = (x.detach() for x in tensors([1, 1, 1]))
    out = packed(q, k, v, [1, 1, 1])
    torch.testing.assert_close(out, v.repeat_interleave(2, 1))


@pytest.mark.parametrize("max_seqlen", [4, 12])
def test_pack_12_longest_length_must_be_the_longest(max_seqlen):
    """pack-12: cu_seqlens [0, 7, 12] with max_seqlen 4 works on one kernel and corrupts on another."""
    q, k, v = tensors([7, 5])
    with pytest.raises(LayoutError, match=f"max_seqlen is {max_seqlen}, the longest sequence has 7"):
        varlen_attention(q, k, v, bounds([7, 5]), (7, 5), max_seqlen=max_seqlen, backend="sdpa")


@pytest.mark.parametrize(
    ("cu_seqlens", "lengths", "message"),
    [
        ([0, 7, 12], (7, 6), "sum to 13"),
        ([0, 7, 12], (7, 5, 0), "length 0"),
        ([0, 12], (7, 5), "2 entries for 2 sequences"),
        ([0, 6, 12], (7, 5), "different places"),
    ],
)
def test_contradicting_boundaries(cu_seqlens, lengths, message):
    """Empty segments crash some kernels (AReaL#1103); disagreeing boundaries would be a silent leak."""
    q, k, v = tensors([7, 5])
    with pytest.raises(LayoutError, match=message):
        varlen_attention(
            q, k, v, torch.tensor(cu_seqlens, dtype=torch.int32), lengths, max_seqlen=max(lengths), backend="sdpa"
        )


def test_other_faults():
    """int64 boundaries, uneven groups, an unknown backend, an empty window."""
    q, k, v = tensors([7, 5])
    call = {"max_seqlen": 7, "backend": "sdpa"}
    with pytest.raises(LayoutError, match="int32"):
        varlen_attention(q, k, v, bounds([7, 5]).long(), (7, 5), **call)
    with pytest.raises(LayoutError, match="no multiple"):
        varlen_attention(q[:, :3], k, v, bounds([7, 5]), (7, 5), **call)
    with pytest.raises(LayoutError, match="window"):
        varlen_attention(q, k, v, bounds([7, 5]), (7, 5), window=0, **call)
    with pytest.raises(LayoutError, match="unknown backend 'eager'"):
        varlen_attention(q, k, v, bounds([7, 5]), (7, 5), max_seqlen=7, backend="eager")


def test_ten_thousand_sequences():
    """Many short sequences run as a handful of calls, not as ten thousand."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (10_000,), generator=generator).tolist()
    assert len(plan_buckets(tuple(lengths)).buckets) == 8
    q, k, v = tensors(lengths, 2, 1, 16)
    out = packed(q, k, v, lengths)
    out.square().sum().backward()
    head = sum(lengths[:50])
    want = one_by_one(q.detach()[:head], k.detach()[:head], v.detach()[:head], lengths[:50])
    torch.testing.assert_close(out[:head], want, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(q.grad).all()


def test_bucket_rows_waste_at_most_a_quarter():
    """Rows of one bucket: spare slots stay below a quarter, and there are at most four widths to a doubling."""
    widths = {bucket_width(n) for n in range(1, 4097)}
    assert all(n <= bucket_width(n) <= n * 1.25 for n in range(1, 4097))
    assert len(widths) == 8 + 4 * 9


def test_inference_mode_then_training():
    """Scoring without gradients first must not leave tensors behind that autograd cannot save."""
    lengths = [5, 2, 8]
    q, k, v = tensors(lengths)
    with torch.inference_mode():
        packed(q.detach(), k.detach(), v.detach(), lengths)
    packed(q, k, v, lengths).sum().backward()
    assert q.grad is not None


def test_no_tokens():
    """An empty stream is an empty result."""
    q, k, v = tensors([])
    out = varlen_attention(q, k, v, torch.zeros(1, dtype=torch.int32), (), max_seqlen=0, backend="sdpa")
    assert out.shape == (0, 4, 16)


def test_choice_on_cpu():
    """auto on a CPU is sdpa and the reason names each kernel that was passed over; by name they are refused."""
    backend, reason = choose_attention("auto", torch.device("cpu"), torch.float32, 64)
    assert backend == "sdpa"
    for name in ("flash4", "flash2", "varlen"):
        assert f"not {name}: runs on CUDA, not on cpu" in reason
        with pytest.raises(DeviceError, match=f"{name}: runs on CUDA"):
            choose_attention(name, "cpu", torch.bfloat16, 64)
    assert choose_attention("sdpa", "cpu", torch.float32, 16)[0] == "sdpa"
    with pytest.raises(DeviceError, match="flash3"):
        choose_attention("flash3", "cpu", torch.float32, 64)


@pytest.mark.parametrize(
    ("capability", "installed", "dtype", "head_dim", "want"),
    [
        ((9, 0), {"flash4", "flash2", "varlen"}, torch.bfloat16, 128, "flash4"),
        ((9, 0), {"flash2", "varlen"}, torch.bfloat16, 128, "flash2"),
        ((9, 0), {"varlen"}, torch.float16, 256, "varlen"),
        ((9, 0), {"flash4", "varlen"}, torch.float32, 128, "sdpa"),
        ((9, 0), {"flash4", "varlen"}, torch.bfloat16, 20, "sdpa"),
        ((8, 0), {"flash4", "flash2", "varlen"}, torch.bfloat16, 64, "flash2"),
        ((10, 0), {"flash4", "varlen"}, torch.bfloat16, 192, "varlen"),
        ((7, 5), {"flash4", "flash2", "varlen"}, torch.float16, 64, "sdpa"),
    ],
)
def test_choice_on_cuda(monkeypatch, capability, installed, dtype, head_dim, want):
    """The first kernel that is installed and can run, and the reason says what kept the others out."""
    monkeypatch.setattr(attention_kernels, "_missing", lambda name: None if name in installed else "is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    backend, reason = choose_attention("auto", "cuda:0", dtype, head_dim)
    assert backend == want
    assert reason.startswith(f"{want}: {attention.DESCRIPTIONS[want]}")
    for name in attention.BACKENDS[: attention.BACKENDS.index(want)]:
        assert f"not {name}: " in reason


def test_kernel_limits():
    """FlashAttention-4 takes up to 128 on Blackwell (and 256), up to 256 on Hopper."""
    assert shape_fault("flash4", (9, 0), 256) is None
    assert shape_fault("flash4", (10, 0), 256) is None
    assert "128" in shape_fault("flash4", (10, 0), 160)
    assert "9.0" in shape_fault("flash4", (8, 6), 64)
    assert "multiples of 8" in shape_fault("varlen", (8, 0), 12)


def test_varlen_signatures():
    """torch changed varlen_attn twice: is_causal became a window, grouped heads became a flag."""

    def until_2_10(query, key, value, cu_q, cu_k, max_q, max_k, is_causal=False, return_aux=None):
        raise AssertionError

    def in_2_11(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        raise AssertionError

    def since_2_12(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        raise AssertionError

    assert varlen_options(in_2_11, True, None, 0.5) == {"scale": 0.5, "window_size": (-1, 0)}
    assert varlen_options(in_2_11, True, 4, 0.5) == {"scale": 0.5, "window_size": (3, 0)}
    assert varlen_options(in_2_11, False, 4, 0.5) == {"scale": 0.5, "window_size": (3, 3)}
    assert varlen_options(since_2_12, False, None, 0.5) == {"scale": 0.5, "window_size": (-1, -1), "enable_gqa": True}
    with pytest.raises(DeviceError, match="window"):
        varlen_options(until_2_10, True, 4, 0.5)
    with pytest.raises(DeviceError, match="scale"):
        varlen_options(until_2_10, True, None, 0.5)
    installed = import_module("torch.nn.attention.varlen").varlen_attn
    assert varlen_options(installed, True, None, 0.5)["window_size"] == (-1, 0)
