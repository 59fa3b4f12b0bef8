from __future__ import annotations

import pytest
import torch

from rlspeed.algorithms import logprobs


def test_logprobs_reference(case):
    c = case("logprob/temperature_1.0")
    logits = torch.tensor(c.input["logits"])
    targets = torch.arange(4)
    got, entropy = logprobs.token_logprobs(logits.expand(4, 4), targets, temperature=c.input["temperature"])
    c.close(got, "logprobs")
    c.close(entropy[0], "entropy")
    c.close(logprobs.sum_pi_squared(logits, temperature=c.input["temperature"]), "sum_pi_squared")


def test_temperature_is_applied_before_the_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0]])
    got, entropy = logprobs.token_logprobs(logits, torch.tensor([0]), temperature=0.5)
    p = torch.softmax(logits.double() * 2, -1)[0]
    assert float(got) == pytest.approx(float(p[0].log()), abs=1e-6)
    assert float(entropy) == pytest.approx(float(-(p * p.log()).sum()), abs=1e-6)
    with pytest.raises(ValueError, match="must be positive"):
        logprobs.token_logprobs(logits, torch.tensor([0]), temperature=0.0)


def test_num_16_bf16_logits_are_summed_in_fp32():
    """num-16: a bf16 log-sum-exp is off by more than 0.01; with and without a graph the bits are equal."""
    logits = torch.randn(4, 32_000, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    targets = torch.arange(4)
    got, _ = logprobs.token_logprobs(logits, targets)
    assert got.dtype == torch.float32
    want = torch.log_softmax(logits.double(), -1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
    with torch.no_grad():
        again, _ = logprobs.token_logprobs(logits, targets)
    assert torch.equal(got, again)


def test_tokens_that_cannot_be_drawn_add_no_entropy():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    got, entropy = logprobs.token_logprobs(logits, torch.tensor([1]))
    assert float(got) == pytest.approx(-0.6931472, abs=1e-6)
    assert float(entropy) == pytest.approx(0.6931472, abs=1e-6)
