"""Reference token log-probs and entropy from whole logits, fp32 inside; training uses the fused engine/head.py."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) over the last dim, fp32 (fp64 stays): z - logsumexp(z).

    Raises:
        ValueError: a temperature that is not positive (greedy text is scored at 1.0).
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: must be positive")
    z = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(z / temperature, dim=-1)


def token_logprobs(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution, in nats.

    logits [..., V] any float dtype, targets [...] int64 -> two [...] fp32. Tokens that cannot be drawn (logit -inf)
    add 0 to the entropy.
    """
    logp = scaled_log_softmax(logits, temperature)
    chosen = logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropy = torch.special.entr(logp.exp()).sum(-1)
    return chosen, entropy


def sum_pi_squared(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Sum over the vocabulary of squared probabilities [...] fp32: 1 for a certain token, 1/V for a uniform one."""
    return scaled_log_softmax(logits, temperature).exp().square().sum(-1)
