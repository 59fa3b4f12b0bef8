"""The fused head against float64 log-probs of the whole [N, V] logits.

A wrong answer here is a wrong ratio in every update: a temperature left out, a sum in bf16, a gradient prepared for a
scalar upstream gradient, a cut of the vocabulary merged around the wrong maximum.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rlspeed.engine import head
from rlspeed.engine.head import VocabularyShard, linear_logprob
from rlspeed.errors import LayoutError

CASES = {
    c["id"]: c for c in json.loads((Path(__file__).parents[2] / "conformance" / "cases.json").read_text())["cases"]
}


def plain(hidden, weight, targets, temperature=1.0, bias=None):
    """Log-probs and entropies through the whole logits, in the dtype of the inputs."""
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(tokens, width, vocab, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(tokens, width, generator=generator) * scale).to(dtype)
    weight = (torch.randn(vocab, width, generator=generator) * width**-0.5).to(dtype)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    return hidden, weight, targets


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of a few rows and columns, so that every merge over cuts is taken."""
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 300)
    monkeypatch.setattr(head, "_cuts", lambda hidden, weight: (min(weight.shape[0], 37), 5))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_conformance_logprob_and_entropy(temperature):
    """logprob/temperature_1.0, and the same definition at other temperatures: z = logits / T."""
    case = CASES["logprob/temperature_1.0"]
    logits = torch.tensor(case["input"]["logits"])
    weight = logits[:, None].contiguous()
    hidden = torch.ones(4, 1)
    logprobs, entropy = linear_logprob(hidden, weight, torch.arange(4), temperature=temperature, with_entropy=True)
    if temperature == 1.0:
        torch.testing.assert_close(logprobs, torch.tensor(case["expected"]["logprobs"]), atol=case["abs_tol"], rtol=0)
        expected = torch.full((4,), case["expected"]["entropy"])
        torch.testing.assert_close(entropy, expected, atol=case["abs_tol"], rtol=0)
    want, want_entropy = plain(hidden.double(), weight.double(), torch.arange(4), temperature)
    torch.testing.assert_close(logprobs.double(), want, atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_matches_float64_in_every_tiling(dtype, temperature, small_tiles):
    """Inputs are exact in float64, so what is left is fp32 summation: 2e-6 relative, whatever the input dtype."""
    hidden, weight, targets = inputs(23, 48, 211, dtype)
    bias = torch.randn(211).to(dtype)
    logprobs, entropy = linear_logprob(hidden, weight, targets, temperature=temperature, bias=bias, with_entropy=True)
    want, want_entropy = plain(hidden.double(), weight.double(), targets, temperature, bias.double())
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), want, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=4e-6, rtol=2e-6)


@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_large_logits_do_not_overflow(scale, small_tiles):
    """Logits of thousands: exp() of them is inf, and fp32 has no digits to lose after the maximum is taken off."""
    hidden, weight, targets = inputs(9, 32, 150, scale=scale)
    logprobs, entropy = linear_logprob(hidden, weight, targets, with_entropy=True)
    want, want_entropy = plain(hidden.double(), weight.double(), targets)
    assert torch.isfinite(logprobs).all()
    torch.testing.assert_close(logprobs.double(), want, rtol=1e-6, atol=scale * 1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-4, atol=scale * 1e-6)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_num_23_gradients_for_any_upstream_gradient(with_entropy, dtype, small_tiles):
    """num-23: per-token weights [0, 1, 2, 0.5] (a token that is ignored among them) on log-probs and on entropies."""
    hidden, weight, targets = inputs(4, 16, 90, dtype)
    bias = torch.randn(90).to(dtype)
    scales = torch.tensor([0.0, 1.0, 2.0, 0.5])
    got = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    want = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    logprobs, entropy = linear_logprob(got[0], got[1], targets, temperature=0.8, bias=got[2], with_entropy=with_entropy)
    plain_logprobs, plain_entropy = plain(want[0], want[1], targets, 0.8, want[2])
    loss, plain_loss = (logprobs * scales).sum(), (plain_logprobs * scales).sum()
    if with_entropy:
        loss = loss + (entropy * scales.flip(0)).sum()
        plain_loss = plain_loss + (plain_entropy * scales.flip(0)).sum()
    loss.backward()
    plain_loss.backward()
    # a bf16 gradient is the fp32 one rounded once: half a unit in the last of 8 bits
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    for a, b in zip(got, want):
        assert a.grad.dtype == dtype
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=rtol, atol=1e-6)
    if not with_entropy:
        assert (got[0].grad[0] == 0).all()


def test_entropy_alone_carries_gradients(small_tiles):
    """A loss of the entropy only: no upstream gradient at all for the log-probs."""
    hidden, weight, targets = inputs(6, 8, 70)
    a, b = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    linear_logprob(a, weight, targets, with_entropy=True)[1].sum().backward()
    plain(b, weight.double(), targets)[1].sum().backward()
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-6)


def test_gradcheck_in_double(small_tiles):
    """The analytic gradient of both outputs against finite differences, with bias and temperature."""
    hidden, weight, targets = inputs(7, 3, 50, torch.float64)
    bias = torch.randn(50, dtype=torch.float64)
    for x in (hidden, weight, bias):
        x.requires_grad_()

    def function(h, w, b):
        return linear_logprob(h, w, targets, temperature=1.3, bias=b, with_entropy=True)

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_num_23_under_checkpointing_and_tied_weight(small_tiles):
    """num-23: the weight is the embedding too: its gradient is the sum of both uses, also when the forward runs
    twice.
    """
    from torch.utils.checkpoint import checkpoint

    _, weight, targets = inputs(10, 12, 80)
    ids = torch.arange(10)
    scales = torch.linspace(0, 2, 10)
    grads = []
    for kind in ("plain", "fused", "checkpointed"):
        tied = (weight.double() if kind == "plain" else weight).clone().requires_grad_()

        def run(w, kind=kind):
            hidden = torch.tanh(w[ids])
            return plain(hidden, w, targets)[0] if kind == "plain" else linear_logprob(hidden, w, targets)[0]

        out = checkpoint(run, tied, use_reentrant=False) if kind == "checkpointed" else run(tied)
        (out * scales).sum().backward()
        grads.append(tied.grad)
    torch.testing.assert_close(grads[1].double(), grads[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads[2], grads[1], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_num_16_scoring_and_training_give_the_same_bits(dtype):
    """num-16: the ratio of the first on-policy update is exactly 1 only if both passes round alike."""
    hidden, weight, targets = inputs(33, 24, 500, dtype)
    with torch.no_grad():
        scored = linear_logprob(hidden, weight, targets, temperature=0.9)[0]
    trained = linear_logprob(hidden.requires_grad_(), weight, targets, temperature=0.9, with_entropy=True)[0]
    assert torch.equal(scored, trained.detach())
    assert trained.requires_grad
    assert not scored.requires_grad


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tokens_gives_an_empty_result_with_a_graph(with_entropy):
    """num-05's neighbour: a bin without training tokens still takes part in backward, with zero gradients."""
    hidden = torch.zeros(0, 8, requires_grad=True)
    weight = torch.randn(20, 8, requires_grad=True)
    logprobs, entropy = linear_logprob(hidden, weight, torch.zeros(0, dtype=torch.int64), with_entropy=with_entropy)
    assert logprobs.shape == (0,)
    assert (entropy is not None) == with_entropy
    loss = logprobs.sum() if entropy is None else (logprobs + entropy).sum()
    loss.backward()
    assert loss == 0
    assert hidden.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros(20, 8))


def test_frozen_weight_gets_no_gradient():
    """A frozen head costs no [V, H] gradient."""
    hidden, weight, targets = inputs(5, 8, 30)
    hidden.requires_grad_()
    linear_logprob(hidden, weight, targets)[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_peak_memory_stays_below_the_logits():
    """The largest tensor made is a tile: with 4,096 tokens and 32,768 words the logits alone would be 512 MiB."""
    hidden, weight, targets = inputs(4096, 4, 32768)
    hidden.requires_grad_()
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.untyped_storage().nbytes())
            return out

    with Watch():
        linear_logprob(hidden, weight, targets, with_entropy=True)[0].sum().backward()
    assert max(sizes) <= 4 * head.CHUNK_ELEMENTS


class Ranks:
    """Threads as ranks: each reduction waits for all of them."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=30)
        self.slots = [None] * count

    def reduce(self, rank, value, how):
        self.slots[rank] = value
        self.barrier.wait()
        stacked = torch.stack(self.slots)
        self.barrier.wait()
        return stacked.amax(0) if how == "max" else stacked.sum(0)

    def shard(self, rank, start, end):
        return VocabularyShard(
            start=start,
            end=end,
            reduce_max=lambda x: self.reduce(rank, x, "max"),
            reduce_sum=lambda x: self.reduce(rank, x, "sum"),
        )


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vocabulary_parallel_equals_the_whole_head(parts, dtype, small_tiles):
    """Rows of the head on several ranks: statistics and the gradient of hidden are reduced, nothing of size V is."""
    hidden, weight, targets = inputs(19, 16, 120, dtype)
    scales = torch.linspace(-1, 1, 19)
    bounds = torch.linspace(0, 120, parts + 1).long().tolist()
    ranks = Ranks(parts)

    def run(rank):
        h = hidden.clone().requires_grad_()
        w = weight[bounds[rank] : bounds[rank + 1]].clone().requires_grad_()
        shard = ranks.shard(rank, bounds[rank], bounds[rank + 1])
        logprobs, entropy = linear_logprob(h, w, targets, temperature=0.9, with_entropy=True, shard=shard)
        (logprobs * scales + entropy).sum().backward()
        return logprobs.detach(), entropy.detach(), h.grad, w.grad

    with ThreadPoolExecutor(parts) as pool:
        results = list(pool.map(run, range(parts)))
    h = hidden.double().requires_grad_()
    w = weight.double().requires_grad_()
    want, want_entropy = plain(h, w, targets, 0.9)
    (want * scales + want_entropy).sum().backward()
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    for logprobs, entropy, h_grad, _ in results:
        torch.testing.assert_close(logprobs.double(), want.detach(), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(entropy.double(), want_entropy.detach(), rtol=2e-6, atol=4e-6)
        torch.testing.assert_close(h_grad.double(), h.grad, rtol=rtol, atol=1e-5)
    torch.testing.assert_close(torch.cat([r[3] for r in results]).double(), w.grad, rtol=rtol, atol=1e-5)


def test_autocast_does_not_lower_the_sums():
    """Under autocast a matmul of fp32 tensors would be rounded to bf16; the head keeps its own precision."""
    hidden, weight, targets = inputs(5, 16, 60)
    with torch.autocast("cpu", torch.bfloat16):
        inside = linear_logprob(hidden, weight, targets)[0]
    assert torch.equal(inside, linear_logprob(hidden, weight, targets)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.tensor([0, 30, 1])}, "outside"),
        ({"targets": torch.tensor([0, -100, 1])}, "outside"),
        ({"targets": torch.tensor([0, 1])}, "must be"),
        ({"targets": torch.tensor([0, 1, 2], dtype=torch.int32)}, "int64"),
        ({"weight": torch.zeros(30, 8, dtype=torch.bfloat16)}, "cast"),
        ({"weight": torch.zeros(30, 9)}, "must be"),
        ({"temperature": 0.0}, "temperature"),
        ({"bias": torch.zeros(29)}, "bias"),
    ],
)
def test_refuses_what_does_not_fit(change, message):
    """Faults that would otherwise be a broadcast, a wrapped index or a silent cast."""
    call = {"hidden": torch.zeros(3, 8), "weight": torch.zeros(30, 8), "targets": torch.tensor([0, 1, 2])} | change
    with pytest.raises(LayoutError, match=message):
        linear_logprob(**call)
