from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlspeed.algorithms import advantage, loss
from rlspeed.errors import ConfigError

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def counts_of(s) -> loss.GlobalCounts:
    return loss.GlobalCounts(tokens=int(s.mask.sum()), sequences=int(s.mask.any(1).sum()))


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_reference(case, stream, mode):
    """The fourth row is fully masked: it is in no denominator."""
    c = case("agg/modes")
    s = stream(c.input["mask"])
    scale = float(s.mask.shape[1])
    weights = loss.token_weights(mode, s.ids, s.num, counts_of(s), scale=scale)
    c.close((weights * s.flat(c.input["loss_mat"])).sum(), mode)


def test_aggregation_with_a_scale(case, stream):
    c = case("agg/modes")
    s = stream(c.input["mask"])
    mode = "seq-mean-token-sum-norm"
    weights = loss.token_weights(mode, s.ids, s.num, counts_of(s), scale=1024)
    c.close((weights * s.flat(c.input["loss_mat"])).sum(), "seq-mean-token-sum-norm_scale_1024")
    with pytest.raises(ConfigError, match="loss_norm_scale"):
        loss.token_weights(mode, s.ids, s.num, counts_of(s))
    with pytest.raises(ConfigError, match="loss_agg"):
        loss.token_weights("mean", s.ids, s.num, counts_of(s))  # type: ignore[arg-type]


def inputs_of(c, s) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lp = s.flat(c.input["logprob"]).requires_grad_()
    return lp, s.flat(c.input["old_logprob"]), s.flat(c.input["advantages"])


def test_ppo_reference(case, stream):
    c = case("policy_loss/ppo_symmetric")
    s = stream(c.input["mask"])
    lp, old, adv = inputs_of(c, s)
    clips = {"clip_low": c.input["clip_low"], "clip_high": c.input["clip_high"], "dual_clip": c.input["clip_c"]}
    each = [
        loss.ppo_policy_loss(lp[i : i + 1], old[i : i + 1], adv[i : i + 1], torch.ones(1), **clips).loss
        for i in range(lp.numel())
    ]
    c.close(s.padded(torch.stack(each)), "per_token_loss")
    out = loss.ppo_policy_loss(lp, old, adv, torch.full_like(lp, 1 / out_tokens(s)), **clips)
    out.loss.backward()
    c.close(out.loss, "loss")
    c.close(s.padded(lp.grad * out_tokens(s)), "grad_logprob_times_num_tokens")
    c.close(out.metrics["pg_clipfrac"] / out.tokens, "clipfrac")
    c.close(out.metrics["pg_clipfrac_lower"] / out.tokens, "clipfrac_lower")
    c.close(out.metrics["ppo_kl"] / out.tokens, "ppo_kl")
    c.close(out.metrics["pg_loss"], "loss")


def out_tokens(s) -> int:
    return int(s.mask.sum())


def test_gspo_reference(case, stream):
    c = case("policy_loss/gspo")
    s = stream(c.input["mask"])
    lp, old, adv = inputs_of(c, s)
    weights = loss.token_weights("seq-mean-token-mean", s.ids, s.num, counts_of(s))
    clips = {"clip_low": c.input["clip_low"], "clip_high": c.input["clip_high"]}
    out = loss.gspo_policy_loss(lp, old, adv, weights, s.ids, s.num, **clips)
    c.close(out.loss, "loss")
    wide = loss.gspo_policy_loss(lp, old, torch.ones_like(adv), weights, s.ids, s.num, clip_low=9.0, clip_high=9.0)
    grad = torch.autograd.grad(wide.loss, lp)[0]
    ratio = torch.tensor(c.expected["seq_ratio"])
    torch.testing.assert_close(grad, -ratio[s.ids] * weights)


def test_cispo_reference(case, stream):
    c = case("policy_loss/cispo")
    s = stream(c.input["mask"])
    lp, old, adv = inputs_of(c, s)
    clips = {"clip_low": c.input["clip_low"], "clip_high": c.input["clip_high"]}
    each = [
        loss.cispo_policy_loss(lp[i : i + 1], old[i : i + 1], adv[i : i + 1], torch.ones(1), **clips).loss
        for i in range(lp.numel())
    ]
    c.close(s.padded(torch.stack(each)), "per_token_loss")
    out = loss.cispo_policy_loss(lp, old, adv, torch.full_like(lp, 1 / out_tokens(s)), **clips)
    out.loss.backward()
    c.close(out.loss, "loss")
    c.close(s.padded(lp.grad * out_tokens(s)), "grad_logprob_times_num_tokens")


def test_value_loss_reference(case, stream):
    c = case("value_loss/clipped")
    s = stream(c.input["mask"])
    weights = loss.token_weights(c.input["loss_agg_mode"], s.ids, s.num, counts_of(s))
    streams = [s.flat(c.input[k]) for k in ("vpreds", "old_values", "returns")]
    out = loss.value_loss(*streams, weights, clip=c.input["cliprange_value"])
    c.close(out.loss, "loss")
    c.close(out.metrics["vf_clipfrac"] / out.tokens, "clipfrac")
    plain = loss.value_loss(*streams, weights, clip=None)
    assert float(plain.loss) == pytest.approx(float((0.5 * (streams[0] - streams[2]).square()).mean()))
    assert float(plain.metrics["vf_clipfrac"]) == 0.0


Term = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], loss.LossOut]

TERMS: dict[str, Term] = {
    "ppo": lambda lp, old, a, w, ids, n: loss.ppo_policy_loss(lp, old, a, w, clip_low=0.2, dual_clip=3.0),
    "gspo": lambda lp, old, a, w, ids, n: loss.gspo_policy_loss(lp, old, a, w, ids, n, clip_low=0.2),
    "cispo": lambda lp, old, a, w, ids, n: loss.cispo_policy_loss(lp, old, a, w, clip_low=0.2, clip_high=0.3),
    "value": lambda lp, old, a, w, ids, n: loss.value_loss(lp, old, a, w, clip=0.5),
    "kl": lambda lp, old, a, w, ids, n: loss.kl_loss(lp, old, w, estimator="k3", coef=0.1),
    "entropy": lambda lp, old, a, w, ids, n: loss.entropy_bonus(lp, w, coef=0.1),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TERMS)
def test_num_01_any_cut_into_micro_batches_gives_the_same_loss_and_gradient(name, mode):
    """num-01: sequences dealt to micro-batches at random, some of them left without any token."""
    generator = torch.Generator().manual_seed(len(name) + len(mode))
    lengths = [3, 1, 0, 7, 2, 5]
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))
    lp = torch.randn(ids.numel(), generator=generator, requires_grad=True)
    old, adv = torch.randn(2, ids.numel(), generator=generator)
    counts = loss.GlobalCounts(tokens=18, sequences=5)

    def run(parts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        outs = []
        for part in parts:
            index = torch.cat([torch.tensor([], dtype=torch.int64), *[(ids == s).nonzero()[:, 0] for s in part]])
            mine = torch.repeat_interleave(torch.arange(len(part)), torch.tensor([lengths[s] for s in part]).long())
            weights = loss.token_weights(mode, mine, len(part), counts, scale=10)
            outs.append(TERMS[name](lp[index], old[index], adv[index], weights, mine, len(part)))
        total = torch.stack([o.loss for o in outs]).sum()
        sums = {k: sum(float(o.metrics[k]) for o in outs) for k in outs[0].metrics}
        assert sum(o.tokens for o in outs) == 18
        return total, torch.autograd.grad(total, lp)[0], sums

    whole = run([[0, 1, 2, 3, 4, 5]])
    for parts in ([[0], [1], [2], [3], [4], [5]], [[5, 3], [], [0, 2, 4, 1]], [[2], [4, 0, 1], [3, 5]]):
        cut = run(parts)
        torch.testing.assert_close(cut[0], whole[0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(cut[1], whole[1], atol=1e-6, rtol=1e-6)
        assert cut[2] == pytest.approx(whole[2], abs=1e-4)


def test_num_01_token_mean_of_two_micro_batches():
    """num-01: losses [4] and [1, 1, 2] make 2.0, the mean of their means would be 2.667."""
    counts = loss.GlobalCounts(tokens=4, sequences=2)
    total = 0.0
    for part in ([4.0], [1.0, 1.0, 2.0]):
        ids = torch.zeros(len(part), dtype=torch.int64)
        weights = loss.token_weights("token-mean", ids, 1, counts)
        total += float(loss.kl_loss(torch.tensor(part), torch.zeros(len(part)), weights, estimator="k1", coef=1.0).loss)
    assert total == pytest.approx(2.0)


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("counts", [loss.GlobalCounts(tokens=0, sequences=0), loss.GlobalCounts(tokens=9, sequences=2)])
def test_num_05_no_token_gives_zero_with_a_graph(name, counts):
    """num-05: a fully masked micro-batch, alone or in a step of others: loss 0, gradient 0, no NaN."""
    parameter = torch.randn(4, requires_grad=True)
    lp = parameter[torch.zeros(4, dtype=torch.bool)]
    ids = torch.zeros(0, dtype=torch.int64)
    weights = loss.token_weights("seq-mean-token-mean", ids, 3, counts)
    out = TERMS[name](lp, torch.zeros(0), torch.zeros(0), weights, ids, 3)
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.0] * 4
    assert all(float(v) == 0.0 for v in out.metrics.values())


def test_num_12_constant_group_keeps_its_kl_unless_it_is_dropped():
    """num-12: policy term 0, KL term there, denominator all tokens; once dropped, out of numerator and denominator."""
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    ids = torch.tensor([0, 0, 1, 2, 3, 3])
    adv = advantage.group_relative(rewards, groups, 2)[ids]
    lp = torch.linspace(-3.0, -1.0, 6).requires_grad_()
    ref = torch.full((6,), -2.5)

    def gradient(keep: torch.Tensor) -> torch.Tensor:
        counts = loss.GlobalCounts(tokens=int(keep.sum()), sequences=len(ids[keep].unique()))
        weights = loss.token_weights("token-mean", ids[keep], 4, counts)
        policy = loss.ppo_policy_loss(lp[keep], lp[keep].detach(), adv[keep], weights, clip_low=0.2)
        out = policy.plus(loss.kl_loss(lp[keep], ref[keep], weights, estimator="k3", coef=0.1))
        return torch.autograd.grad(out.loss, lp)[0]

    everything = gradient(torch.ones(6, dtype=torch.bool))
    kl_part = 0.1 * (1 - (ref - lp.detach()).exp()) / 6
    torch.testing.assert_close(everything, kl_part - adv / 6)
    assert adv[:3].tolist() == [0.0, 0.0, 0.0]
    dropped = gradient(advantage.informative(rewards, groups, 2)[ids])
    assert dropped[:3].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(dropped[3:], 2 * everything[3:])


def test_on_policy_gradient_is_whole():
    """Ratio exactly 1 is a tie of both branches of the maximum: the gradient is -A, not half of it."""
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    adv = torch.tensor([2.0, -3.0])
    out = loss.ppo_policy_loss(lp, lp.detach(), adv, torch.ones(2), clip_low=0.2, dual_clip=3.0)
    out.loss.backward()
    assert lp.grad is not None
    assert lp.grad.tolist() == [-2.0, 3.0]


def test_extreme_ratios_stay_finite():
    lp = torch.tensor([0.0, 0.0], requires_grad=True)
    for term in ("ppo", "gspo", "cispo"):
        ids = torch.tensor([0, 1])
        out = TERMS[term](lp, torch.tensor([-500.0, 500.0]), torch.tensor([-1.0, 1.0]), torch.ones(2), ids, 2)
        grad = torch.autograd.grad(out.loss, lp)[0]
        assert bool(torch.isfinite(out.loss))
        assert bool(torch.isfinite(grad).all())


def test_every_metric_declares_its_denominator():
    lp, ids = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    for term in TERMS.values():
        assert set(term(lp, lp, lp, lp, ids, 1).metrics) <= set(loss.DENOMINATORS)


def test_bf16_values_make_an_fp32_loss():
    values = torch.full((4096,), 0.01, dtype=torch.bfloat16, requires_grad=True)
    out = loss.entropy_bonus(values, torch.ones(4096), coef=1.0)
    assert out.loss.dtype == torch.float32
    assert float(out.loss.detach()) == pytest.approx(-4096 * float(values[0].detach()), rel=1e-5)
