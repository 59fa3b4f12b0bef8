"""The gap between the generator's log-probs and the trainer's: importance weights, masks and how large it is.

The generator samples with other kernels (and sometimes older weights) than the trainer computes with. The ratio
exp(trainer - generator) corrects for it; it is a constant factor of the token's loss, without gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rlspeed.algorithms.kl import LOG_RATIO_LIMIT, estimate
from rlspeed.algorithms.segments import segment_sum
from rlspeed.errors import ConfigError, Fault

Correction = Literal["none", "token_tis", "sequence_tis", "token_mask", "sequence_mask"]

# a ratio further from 1 than this factor, either way, counts as a mismatch in the metrics
MISMATCH_BAND = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How far trainer and generator are apart on a stream; add sums and take the maximum of maxima over bins and ranks.

    abs_sum: sum of |log-prob difference|. abs_max: its maximum. k3_sum: sum of the k3 estimate of KL(generator ||
    trainer).
    outside: tokens whose ratio is outside of 1/1.05..1.05. All 0-d fp32; the denominator is `tokens`.
    """

    abs_sum: Tensor
    abs_max: Tensor
    k3_sum: Tensor
    outside: Tensor
    tokens: int


@torch.no_grad()
def mismatch(logprobs: Tensor, rollout_logprobs: Tensor) -> Mismatch:
    """Compare the trainer's log-probs [N] with the generator's [N] of the same sampled tokens."""
    delta = (logprobs - rollout_logprobs).float()
    size = delta.abs()
    return Mismatch(
        abs_sum=size.sum(),
        abs_max=size.max() if size.numel() else size.sum(),
        k3_sum=estimate(rollout_logprobs.float(), logprobs.float(), "k3").sum(),
        outside=(size > math.log(MISMATCH_BAND)).sum().float(),
        tokens=size.numel(),
    )


@torch.no_grad()
def importance_weights(
    mode: Correction,
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    segment_ids: Tensor,
    num_segments: int,
    *,
    threshold: float,
    lower: float,
) -> Tensor:
    """Factor of each token's loss [N] fp32 that corrects for sampling with the generator's probabilities.

    none: 1. token_tis: min(ratio of the token, threshold). token_mask (IcePop): the ratio inside of [lower,
    threshold], 0 outside.
    sequence_tis, sequence_mask: the same with the ratio of the whole sequence, the product over its tokens. Log-ratios
    are clamped to +-20. Masked tokens stay in the denominator: the counts of the mini-batch are not changed.

    Raises:
        ConfigError: unknown mode, or a band with lower > threshold.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS); IcePop,
    Ling team 2025.
    """
    if mode not in get_args(Correction):
        raise ConfigError(Fault(where="rollout.correction", found=str(mode), allowed=", ".join(get_args(Correction))))
    delta = (logprobs - rollout_logprobs).float()
    if mode == "none":
        return torch.ones_like(delta)
    if mode.startswith("sequence"):
        delta = segment_sum(delta, segment_ids, num_segments)[segment_ids]
    ratio = delta.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if mode.endswith("tis"):
        return ratio.clamp(max=threshold)
    if lower > threshold:
        raise ConfigError(
            Fault(
                where="rollout.correction_lower", found=str(lower), allowed=f"at most correction_threshold {threshold}"
            )
        )
    return ratio.masked_fill(~((ratio >= lower) & (ratio <= threshold)), 0.0)
