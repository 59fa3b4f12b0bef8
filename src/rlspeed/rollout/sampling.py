"""Drawing tokens: filters, a stateless random stream per request, and the log-probs that training compares with."""

from __future__ import annotations

import torch
from torch import Tensor

from rlspeed.rollout.types import SamplingParams

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The 64-bit pattern of `value` as a signed number, which is what int64 tensors hold."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) per request, float64: a hash of its seed and the position of the token drawn.

    seeds, positions [B] int64. The same on every device and in every batch, so a request's answer does not depend on
    what else is generated beside it.

    Source: splitmix64 (Steele, Lea and Flood 2014).
    """
    x = seeds + (positions + 1) * _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX2)
    x = x ^ _shift(x, 31)
    return _shift(x, 11).double() * 2.0**-53


def draw(logits: Tensor, sampling: SamplingParams, u: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] int64 and their log-probs [B] fp32 from logits [B, V].

    Log-probs are of the distribution at the sampling temperature (1 for greedy), before top-k, top-p and min-p: what
    the trainer recomputes. u [B]: uniform numbers; the token is the first whose cumulative probability exceeds it.
    """
    scaled = logits.float()
    if sampling.temperature not in (0.0, 1.0):
        scaled = scaled / sampling.temperature
    if sampling.temperature == 0.0:
        tokens = scaled.argmax(-1)
        return tokens, _logprob(scaled, tokens)
    probs = torch.softmax(filtered(scaled, sampling), -1)
    cumulative = probs.cumsum(-1)
    # the last sum is not exactly 1, and a token of probability 0 must never be drawn
    target = (u.to(cumulative.dtype) * cumulative[:, -1])[:, None]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
    tokens = torch.minimum(tokens, last)
    return tokens, _logprob(scaled, tokens)


def _logprob(scaled: Tensor, tokens: Tensor) -> Tensor:
    return scaled.gather(-1, tokens[:, None])[:, 0] - torch.logsumexp(scaled, -1)


def filtered(scaled: Tensor, sampling: SamplingParams) -> Tensor:
    """Logits [B, V] with what top-k, top-p and min-p exclude at -inf; the likeliest token always stays.

    top-p keeps the smallest set of likeliest tokens whose probability reaches it; the filters apply in the order min-p,
    top-k, top-p, each to what the one before left.
    """
    if sampling.min_p > 0.0:
        probs = torch.softmax(scaled, -1)
        scaled = scaled.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    if 0 < sampling.top_k < scaled.shape[-1]:
        kth = scaled.topk(sampling.top_k, -1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, index = scaled.sort(-1, descending=True)
        probs = torch.softmax(ordered, -1)
        before = probs.cumsum(-1) - probs
        drop = torch.zeros_like(scaled, dtype=torch.bool).scatter(-1, index, before >= sampling.top_p)
        scaled = scaled.masked_fill(drop, -torch.inf)
    return scaled
