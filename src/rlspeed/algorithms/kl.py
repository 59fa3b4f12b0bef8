"""Estimators of KL(policy || reference) on sampled tokens, and the controller of its coefficient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rlspeed.errors import ConfigError, Fault

Estimator = Literal["k1", "abs", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0


def estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """KL of each token [N] fp32 in nats, with the gradient of the formula towards `logprobs`.

    k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, where d = logprobs - ref_logprobs. k3 is never negative; its
    log-ratio is clamped to +-20 and its value to +-10, and where a clamp acts the gradient is 0.

    Raises:
        ConfigError: log-probs in 16 bits. Their rounding (0.4 % of the log-prob) is larger than the KL of two policies
        that are
            close, so the estimate would be noise; [N] values in fp32 cost nothing.

    Source: Schulman 2020, "Approximating KL divergence".
    """
    for name, stream in (("logprobs", logprobs), ("ref_logprobs", ref_logprobs)):
        if stream.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                Fault(
                    where=name,
                    found=f"{stream.dtype} log-probs in a KL",
                    allowed="float32",
                    fix="compute log-probs in fp32",
                )
            )
    d = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return d
        case "abs":
            return d.abs()
        case "k2":
            return 0.5 * d.square()
        case "k3":
            x = (-d).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return (torch.expm1(x) - x).clamp(-K3_LIMIT, K3_LIMIT)
    raise ConfigError(Fault(where="algorithm.kl.estimator", found=str(estimator), allowed="k1, abs, k2, k3"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKL:
    """Coefficient of the KL penalty that follows the measured KL towards `target`.

    target: nats per token. horizon: sequences over which an error of 100 % would double the coefficient.

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2.
    """

    coef: float
    target: float
    horizon: float

    def updated(self, kl: float, n: int) -> AdaptiveKL:
        """The controller after a step with mean KL `kl` over `n` sequences, which was run with the present `coef`."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * n / self.horizon))
