from __future__ import annotations

import pytest
import torch

from rlspeed.algorithms import kl, logprobs, segments
from rlspeed.errors import ConfigError


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_estimators_reference(case, estimator):
    c = case("kl/estimators")
    c.close(kl.estimate(torch.tensor(c.input["logprob"]), torch.tensor(c.input["ref_logprob"]), estimator), estimator)


def test_k3_clamps_reference(case):
    c = case("kl/k3_clamps")
    c.close(kl.estimate(torch.tensor(c.input["logprob"]), torch.tensor(c.input["ref_logprob"]), "k3"), "k3")


def test_kl_in_reward_reference(case, stream):
    c = case("kl/in_reward")
    s = stream(c.input["mask"])
    per_token = kl.estimate(s.flat(c.input["old_logprob"]), s.flat(c.input["ref_logprob"]), c.input["kl_penalty"])
    c.close(s.padded(s.flat(c.input["token_level_scores"]) - c.input["beta"] * per_token), "token_level_rewards")
    c.close(segments.segment_mean(per_token, s.ids, s.num).mean(), "current_kl")


def test_adaptive_controller_reference(case):
    c = case("kl/adaptive_controller")
    controller = kl.AdaptiveKL(coef=c.input["init"], target=c.input["target_kl"], horizon=c.input["horizon"])
    betas = []
    for value in c.input["kl_sequence"]:
        controller = controller.updated(value, c.input["n_steps_each"])
        betas.append(controller.coef)
    c.close_to(torch.tensor(betas, dtype=torch.float64), c.expected["beta_after_each"])


def test_identical_policies_have_no_kl():
    """num-16: exactly 0, not nearly."""
    lp = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 8
    for estimator in ("k1", "abs", "k2", "k3"):
        assert kl.estimate(lp, lp.clone(), estimator).eq(0).all()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_num_17_sixteen_bit_logprobs_are_refused(half):
    """num-17: the rounding of a 16-bit log-prob is larger than the KL of near-equal policies."""
    lp = torch.tensor([-10.0, -2.0])
    with pytest.raises(ConfigError, match="compute log-probs in fp32"):
        kl.estimate(lp, lp.to(half), "k3")
    with pytest.raises(ConfigError, match="in a KL"):
        kl.estimate(lp.to(half), lp, "k1")


def test_num_17_gradient_from_bf16_logits_is_that_of_fp64():
    """num-17: two near-equal 32k-way policies with bf16 logits; error of the gradient below 0.3 % (bf16: over 10 %)."""
    generator = torch.Generator().manual_seed(0)
    base = (torch.randn(8, 32_000, generator=generator) * 2).bfloat16()
    near = (base.float() + 0.02 * torch.randn(8, 32_000, generator=generator)).bfloat16()
    targets = torch.randint(0, 32_000, (8,), generator=generator)

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        logits = base.to(dtype).requires_grad_()
        ours = logprobs.token_logprobs(logits, targets)[0]
        other = logprobs.token_logprobs(near.to(dtype), targets)[0]
        kl.estimate(ours, other, "k3").sum().backward()
        assert logits.grad is not None
        return logits.grad.double()

    want, got = gradient(torch.float64), gradient(torch.float32)
    assert float((got - want).norm() / want.norm()) < 3e-3


def test_unknown_estimator_is_refused():
    with pytest.raises(ConfigError, match="k1, abs, k2, k3"):
        kl.estimate(torch.zeros(1), torch.zeros(1), "full")  # type: ignore[arg-type]
