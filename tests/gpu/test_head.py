"""The head's CUDA designs against float64, the same laws as on CPU, on shapes that end in the middle of every tile."""

from __future__ import annotations

import pytest
import torch

from rlspeed.engine.head import HeadPlan, Tile, linear_logprob

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SMALL = Tile(tokens=64, words=64, inner=32, warps=4, stages=3)
PLANS = {
    "fp32": HeadPlan(forward_words=1000, backward_words=768, tokens=200),
    "bf16": HeadPlan(forward="bf16", backward="bf16", forward_words=1000, backward_words=768, tokens=200),
    "fused": HeadPlan(forward="fused", backward="fused", backward_words=768, tokens=200),
    "fused small persistent": HeadPlan(
        forward="fused",
        backward="fused",
        backward_words=768,
        tile=Tile(tokens=64, words=64, inner=32, warps=4, stages=3, persistent=True),
    ),
    "default": HeadPlan(),
}


def plain(hidden, weight, targets, temperature=1.0, bias=None):
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(tokens, width, vocab, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = (torch.randn(tokens, width, generator=generator, device="cuda") * scale).to(dtype)
    weight = (torch.randn(vocab, width, generator=generator, device="cuda") * width**-0.5).to(dtype)
    return hidden, weight, torch.randint(vocab, (tokens,), generator=generator, device="cuda")


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("width", "vocab"), [(512, 5003), (100, 2304)])
@pytest.mark.parametrize(("temperature", "with_bias", "with_entropy"), [(1.0, False, True), (0.7, True, False)])
def test_matches_float64(name, width, vocab, temperature, with_bias, with_entropy):
    """Products of bf16 are exact, so only the order of fp32 sums is left (1e-5), and in gradients one rounding to bf16
    of the logits' gradient and one of the result (1%). The bf16 design also rounds logits: 2^-9 of about 4.
    """
    hidden, weight, targets = inputs(517, width, vocab)
    bias = torch.randn(vocab, device="cuda").bfloat16() if with_bias else None
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    b = None if bias is None else bias.clone().requires_grad_()
    doubles = [x.double().requires_grad_() for x in (hidden, weight)]
    b64 = None if bias is None else bias.double().requires_grad_()
    logprobs, entropy = linear_logprob(
        *leaves, targets, temperature=temperature, bias=b, with_entropy=with_entropy, plan=PLANS[name]
    )
    want, want_entropy = plain(*doubles, targets, temperature, b64)
    scales = torch.linspace(-1, 2, 517, device="cuda")
    loss, want_loss = (logprobs * scales).sum(), (want * scales).sum()
    if with_entropy:
        loss, want_loss = loss + (entropy * scales.flip(0)).sum(), want_loss + (want_entropy * scales.flip(0)).sum()
    loss.backward()
    want_loss.backward()
    atol = 4e-2 if name == "bf16" else 2e-5
    torch.testing.assert_close(logprobs.double(), want, rtol=0, atol=atol)
    if with_entropy:
        torch.testing.assert_close(entropy.double(), want_entropy, rtol=0, atol=atol)
    for leaf, double in zip(leaves, doubles):
        assert leaf.grad.dtype == torch.bfloat16
        assert relative(leaf.grad, double.grad) < 1e-2
    if with_bias:
        assert relative(b.grad, b64.grad) < 1e-2


@pytest.mark.parametrize("name", PLANS)
def test_large_logits(name):
    """Logits of a thousand: nothing overflows and the error stays relative."""
    hidden, weight, targets = inputs(64, 256, 3000, scale=300.0)
    logprobs, entropy = linear_logprob(hidden, weight, targets, with_entropy=True, plan=PLANS[name])
    want, want_entropy = plain(hidden.double(), weight.double(), targets)
    tolerance = 8.0 if name == "bf16" else 5e-3
    torch.testing.assert_close(logprobs.double(), want, rtol=1e-5, atol=tolerance)
    if name != "bf16":
        torch.testing.assert_close(entropy.double(), want_entropy, rtol=0, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PLANS)
def test_num_16_scoring_and_training_give_the_same_bits(name, dtype):
    """num-16: with or without gradients and entropy, the log-probs are the same numbers."""
    hidden, weight, targets = inputs(300, 256, 4000, dtype)
    with torch.no_grad():
        scored = linear_logprob(hidden, weight, targets, temperature=0.9, plan=PLANS[name])[0]
    hidden.requires_grad_()
    trained = linear_logprob(hidden, weight, targets, temperature=0.9, with_entropy=True, plan=PLANS[name])[0]
    assert torch.equal(scored, trained.detach())


@pytest.mark.parametrize("name", PLANS)
def test_num_23_zero_weight_gives_zero_gradient(name):
    """num-23: tokens whose upstream gradient is 0 leave no trace, the others are scaled one by one."""
    hidden, weight, targets = inputs(4, 128, 1500)
    scales = torch.tensor([0.0, 1.0, 2.0, 0.5], device="cuda")
    hidden.requires_grad_()
    (linear_logprob(hidden, weight, targets, plan=PLANS[name])[0] * scales).sum().backward()
    double = hidden.detach().double().requires_grad_()
    (plain(double, weight.double(), targets)[0] * scales).sum().backward()
    assert (hidden.grad[0] == 0).all()
    assert relative(hidden.grad, double.grad) < 1e-2


@pytest.mark.parametrize("name", ["fp32", "fused"])
def test_part_of_the_vocabulary(name):
    """Statistics of two halves, merged, are those of the whole; a target in the other half counts as 0."""
    from rlspeed.engine import head_triton

    hidden, weight, targets = inputs(130, 256, 3000)
    whole = head_triton.stats(hidden, weight, targets, 1.0, None, True, PLANS[name])
    halves = [
        head_triton.stats(hidden, w, targets - start, 1.0, None, True, PLANS[name])
        for start, w in ((0, weight[:1100]), (1100, weight[1100:]))
    ]
    m = torch.maximum(halves[0][0], halves[1][0])
    s = sum(h[1] * (h[0] - m).exp() for h in halves)
    u = sum((h[0] - m).exp() * (h[2] + h[1] * (h[0] - m)) for h in halves)
    torch.testing.assert_close(m + s.log(), whole[0] + whole[1].log(), rtol=0, atol=1e-5)
    torch.testing.assert_close(u / s, whole[2] / whole[1], rtol=1e-4, atol=1e-4)
    assert torch.equal((halves[0][3] == 0), targets >= 1100)
    torch.testing.assert_close(halves[0][3] + halves[1][3], whole[3], rtol=0, atol=1e-5)


def test_no_tokens():
    """An empty bin: empty results with a graph, zero gradients."""
    hidden = torch.zeros(0, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(100, 64, device="cuda").bfloat16().requires_grad_()
    logprobs, entropy = linear_logprob(
        hidden, weight, torch.zeros(0, dtype=torch.int64, device="cuda"), with_entropy=True
    )
    (logprobs + entropy).sum().backward()
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("name", ["default", "fused"])
def test_memory_and_no_host_synchronisation(name):
    """Peak above the inputs stays far below [T, V], and nothing in forward or backward waits for the device."""
    hidden, weight, targets = inputs(8192, 512, 131072)
    hidden.requires_grad_(), weight.requires_grad_()
    plan = PLANS["default"] if name == "default" else HeadPlan(forward="fused", backward="fused")
    linear_logprob(hidden, weight, targets, with_entropy=True, plan=plan)[0].sum().backward()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_logprob(hidden, weight, targets, with_entropy=True, plan=plan)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # [T, V] in bf16 is 2.15 GB; buffers of the default plan are 0.84 GB, the weight's gradient 0.13 GB
    assert torch.cuda.max_memory_allocated() - before < 1.1e9
