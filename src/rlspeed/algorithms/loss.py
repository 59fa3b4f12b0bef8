"""Losses as weighted sums over a response stream, so that any cut into micro-batches and ranks adds up to the same.

Every loss is `sum(weights * token_loss)`. The weights come from `token_weights`, from the counts of the whole
mini-batch over all ranks; nothing here divides by the size of what it was given. A correction
(algorithms/correction.py) or a mask is one more factor in `weights`. An empty stream gives 0 with the graph of the
stream, so that its backward pass still runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rlspeed.algorithms.kl import LOG_RATIO_LIMIT, Estimator, estimate
from rlspeed.algorithms.segments import segment_lengths, segment_mean
from rlspeed.errors import ConfigError, Fault

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Denominator = Literal["tokens", "updates"]

# a sequence ratio above e^10 would only make the loss overflow
GSPO_LOG_RATIO_LIMIT = 10.0

# what the sum of each metric over micro-batches and ranks is divided by: all tokens that trained (an epoch counts
# again), or the number of optimizer steps (losses are complete sums already)
DENOMINATORS: Mapping[str, Denominator] = {
    "pg_loss": "updates",
    "kl_loss": "updates",
    "vf_loss": "updates",
    "ppo_kl": "tokens",
    "pg_clipfrac": "tokens",
    "pg_clipfrac_lower": "tokens",
    "entropy": "tokens",
    "kl": "tokens",
    "vf_clipfrac": "tokens",
    "vpred_mean": "tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalCounts:
    """Size of one mini-batch over all ranks: tokens that train, and sequences with at least one of them."""

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOut:
    """A loss and what to report about it.

    loss: 0-d fp32 with a graph; adding it over micro-batches and ranks gives the loss of the mini-batch.
    metrics: detached 0-d sums that add up in the same way; DENOMINATORS says what their total is divided by.
    tokens: size of the stream.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]
    tokens: int

    def plus(self, other: LossOut) -> LossOut:
        """Both terms on the same tokens as one loss."""
        return LossOut(loss=self.loss + other.loss, metrics={**self.metrics, **other.metrics}, tokens=self.tokens)


def token_weights(
    mode: Aggregation, segment_ids: Tensor, num_segments: int, counts: GlobalCounts, *, scale: float | None = None
) -> Tensor:
    """Weight of each token's loss [N] fp32.

    token-mean 1/tokens; token-sum 1; seq-mean-token-sum 1/sequences; seq-mean-token-mean 1/(sequences * tokens of its
    sequence); seq-mean-token-sum-norm 1/(sequences * scale). A sequence must lie in one stream as a whole. With counts
    of 0 there is no token to weigh.

    Raises:
        ConfigError: unknown mode, or seq-mean-token-sum-norm without a positive scale.
    """
    tokens, sequences = max(counts.tokens, 1), max(counts.sequences, 1)
    ones = torch.ones(segment_ids.shape, dtype=torch.float32, device=segment_ids.device)
    match mode:
        case "token-mean":
            return ones / tokens
        case "token-sum":
            return ones
        case "seq-mean-token-sum":
            return ones / sequences
        case "seq-mean-token-mean":
            return ones / (sequences * segment_lengths(segment_ids, num_segments)[segment_ids])
        case "seq-mean-token-sum-norm":
            if scale is None or scale <= 0:
                raise ConfigError(
                    Fault(where="algorithm.loss_norm_scale", found=str(scale), allowed="a positive number")
                )
            return ones / (sequences * scale)
    raise ConfigError(Fault(where="algorithm.loss_agg", found=str(mode), allowed=", ".join(get_args(Aggregation))))


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> LossOut:
    """PPO's clipped loss: max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high)), all [N].

    clip_high: None takes clip_low. dual_clip: c > 1 bounds the loss of tokens with A < 0 by -A * c. The gradient is 0
    where a clip acts, whole where the ratio is exactly 1. Metrics: pg_loss, ppo_kl (mean of old - new), pg_clipfrac,
    pg_clipfrac_lower.

    Source: Schulman et al. 2017 (arXiv 1707.06347); dual clip, Ye et al. 2019 (arXiv 1912.09729); clip-higher, DAPO.
    """
    delta = logprobs.float() - old_logprobs.float()
    ratio = delta.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return _clipped(delta, ratio, advantages, weights, clip_low, clip_high, dual_clip)


def gspo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    segment_ids: Tensor,
    num_segments: int,
    *,
    clip_low: float,
    clip_high: float | None = None,
) -> LossOut:
    """GSPO: a token's ratio is exp(mean over its sequence of (new - old)), with the gradient of its own log-prob.

    To be used with the weights of seq-mean-token-mean. Metrics as in `ppo_policy_loss`.

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization" (arXiv 2507.18071), GSPO-token.
    """
    new = logprobs.float()
    delta = new - old_logprobs.float()
    per_sequence = segment_mean(delta.detach(), segment_ids, num_segments)
    ratio = (per_sequence[segment_ids] + new - new.detach()).clamp(max=GSPO_LOG_RATIO_LIMIT).exp()
    return _clipped(delta, ratio, advantages, weights, clip_low, clip_high, None)


def cispo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float | None = None,
) -> LossOut:
    """CISPO: -clip(ratio, 1 - clip_low, 1 + clip_high) * A * logprob with the clipped ratio as a constant.

    No token loses its gradient. Metrics as in `ppo_policy_loss`; pg_clipfrac is the share of ratios outside of the
    band.

    Source: MiniMax 2025, "MiniMax-M1" (arXiv 2506.13585), equation 4.
    """
    new = logprobs.float()
    delta = (new - old_logprobs.float()).detach()
    ratio = delta.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    band = ratio.clamp(1.0 - clip_low, 1.0 + (clip_low if clip_high is None else clip_high))
    total = (weights * (-band * advantages.float() * new)).sum()
    sums = {"pg_loss": total, "ppo_kl": -delta.sum(), "pg_clipfrac": (ratio != band).sum()}
    return _out(total, sums, delta.numel())


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, clip: float | None) -> LossOut:
    """0.5 * max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) per token [N]; clip None: 0.5 * (v - R)^2.

    Metrics: vf_loss, vf_clipfrac, vpred_mean.

    Source: Schulman et al., OpenAI baselines, ppo2; Huang et al. 2022, "The 37 Implementation Details of PPO", detail
    9.
    """
    v, r = values.float(), returns.float()
    plain = (v - r).square()
    if clip is None:
        worst, clipped = plain, torch.zeros_like(plain)
    else:
        near = torch.minimum(torch.maximum(v, old_values.float() - clip), old_values.float() + clip)
        limited = (near - r).square()
        worst, clipped = torch.maximum(plain, limited), (limited > plain).float()
    total = (weights * (0.5 * worst)).sum()
    return _out(total, {"vf_loss": total, "vf_clipfrac": clipped.sum(), "vpred_mean": v.sum()}, v.numel())


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor, *, estimator: Estimator, coef: float) -> LossOut:
    """coef * KL to the reference as a term of the loss. Metrics: kl_loss (without coef), kl (mean per token)."""
    per_token = estimate(logprobs, ref_logprobs, estimator)
    total = (weights * per_token).sum()
    return _out(coef * total, {"kl_loss": total, "kl": per_token.sum()}, per_token.numel())


def entropy_bonus(entropy: Tensor, weights: Tensor, *, coef: float) -> LossOut:
    """-coef * entropy as a term of the loss. Metrics: entropy (mean per token, nats)."""
    return _out(-coef * (weights * entropy.float()).sum(), {"entropy": entropy.float().sum()}, entropy.numel())


def _clipped(
    delta: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    weights: Tensor,
    clip_low: float,
    clip_high: float | None,
    dual_clip: float | None,
) -> LossOut:
    a = advantages.float()
    plain = -a * ratio
    limited = -a * ratio.clamp(1.0 - clip_low, 1.0 + (clip_low if clip_high is None else clip_high))
    per_token = torch.maximum(plain, limited)
    lower = torch.zeros_like(per_token)
    if dual_clip is not None:
        bound = -a * dual_clip
        lower = ((per_token > bound) & (a < 0)).float()
        per_token = torch.where(a < 0, torch.minimum(per_token, bound), per_token)
    total = (weights * per_token).sum()
    sums = {
        "pg_loss": total,
        "ppo_kl": -delta.sum(),
        "pg_clipfrac": (limited > plain).sum(),
        "pg_clipfrac_lower": lower.sum(),
    }
    return _out(total, sums, a.numel())


def _out(loss: Tensor, sums: Mapping[str, Tensor], tokens: int) -> LossOut:
    return LossOut(loss=loss, metrics={k: s.detach().float() for k, s in sums.items()}, tokens=tokens)
