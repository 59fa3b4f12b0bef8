"""Rewards to advantages: per token (GAE, returns, ReMax) or per answer against its group (GRPO, RLOO and kin)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlspeed.algorithms.segments import check_stream, suffix_scan
from rlspeed.errors import LayoutError

Singleton = Literal["zero", "raw"]

STD_EPS = 1e-6


def gae(
    rewards: Tensor, values: Tensor, segment_ids: Tensor, num_segments: int, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over each segment: advantages [N] (not whitened) and returns [N], fp32.

    delta_t = r_t + gamma * V_{t+1} - V_t with V = 0 after the last token; A_t = delta_t + gamma * lam * A_{t+1};
    returns = A + V. Tokens that do not train are not in the stream, so the scan passes over them.

    Source: Schulman et al. 2015 (arXiv 1506.02438), equations 11 and 16.
    """
    check_stream(segment_ids, num_segments, rewards, values)
    r, v = rewards.double(), values.double()
    after = torch.zeros_like(v)
    after[:-1] = torch.where(segment_ids[1:] == segment_ids[:-1], v[1:], 0.0)
    advantages = suffix_scan(r + gamma * after - v, segment_ids, gamma * lam)
    return advantages, (advantages.double() + v).float()


def discounted_returns(rewards: Tensor, segment_ids: Tensor, num_segments: int, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} within each segment [N] fp32: the returns of REINFORCE++ (whitened by the caller).

    Source: Hu 2025, "REINFORCE++" (arXiv 2501.03262).
    """
    check_stream(segment_ids, num_segments, rewards)
    return suffix_scan(rewards, segment_ids, gamma)


def remax(rewards: Tensor, baseline: Tensor, segment_ids: Tensor, num_segments: int) -> tuple[Tensor, Tensor]:
    """ReMax: advantages [N] = returns - baseline of the sequence, and the undiscounted returns [N], fp32.

    baseline [num_segments]: reward of the greedy answer to the same prompt.

    Source: Li et al. 2023, "ReMax" (arXiv 2310.10505).
    """
    if baseline.shape != (num_segments,):
        raise LayoutError(f"baseline {tuple(baseline.shape)} for {num_segments} sequences")
    returns = discounted_returns(rewards, segment_ids, num_segments, gamma=1.0)
    return returns - baseline.float()[segment_ids], returns


def group_counts(group_ids: Tensor, num_groups: int) -> Tensor:
    """Answers in each group [num_groups] fp64."""
    ones = torch.ones(group_ids.shape, dtype=torch.float64, device=group_ids.device)
    return torch.zeros(num_groups, dtype=torch.float64, device=group_ids.device).index_add(0, group_ids, ones)


def informative(rewards: Tensor, group_ids: Tensor, num_groups: int) -> Tensor:
    """True [R] for answers whose group has at least two different rewards; all others get advantage 0 anyway.

    This is DAPO's group filter: answers where it is False leave numerator and denominator when the user asks for it,
    and groups where it is False are the degenerate ones of the metrics.

    Source: Yu et al. 2025, "DAPO" (arXiv 2503.14476), dynamic sampling.
    """
    _check_groups(rewards, group_ids, num_groups)
    low = torch.full((num_groups,), torch.inf, dtype=torch.float64, device=rewards.device)
    high = -low
    low = low.scatter_reduce(0, group_ids, rewards.double(), "amin")
    high = high.scatter_reduce(0, group_ids, rewards.double(), "amax")
    return (high > low)[group_ids]


def group_centred(rewards: Tensor, group_ids: Tensor, num_groups: int, *, singleton: Singleton = "zero") -> Tensor:
    """reward - mean of its group [R] fp32: Dr.GRPO, and the baseline of REINFORCE++-baseline (whitened by the caller).

    rewards [R] one per answer; group_ids [R] int64 in any order. A group with equal rewards gets exactly 0. A group of
    one has
    nothing to be compared with: 0, or its plain reward with singleton="raw" (what some trainers do; it has no
    baseline).

    Source: Liu et al. 2025, "Understanding R1-Zero-Like Training" (arXiv 2503.20783).
    """
    keep = informative(rewards, group_ids, num_groups)
    r = rewards.double()
    counts = group_counts(group_ids, num_groups)
    means = torch.zeros_like(counts).index_add(0, group_ids, r) / counts.clamp(min=1.0)
    out = torch.where(keep, r - means[group_ids], 0.0)
    return _singletons(out, r, counts[group_ids], singleton).float()


def group_relative(
    rewards: Tensor, group_ids: Tensor, num_groups: int, *, divide_by_std: bool = True, singleton: Singleton = "zero"
) -> Tensor:
    """GRPO: (reward - mean) / (std + 1e-6) over its group [R] fp32, std with n - 1; without the division Dr.GRPO.

    Groups with equal rewards and groups of one as in `group_centred`; a group of one counts as std 1.

    Source: Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), section 4.1.2.
    """
    centred = group_centred(rewards, group_ids, num_groups, singleton=singleton)
    if not divide_by_std:
        return centred
    return (centred.double() / (_group_std(rewards, group_ids, num_groups) + STD_EPS)).float()


def rloo(
    rewards: Tensor, group_ids: Tensor, num_groups: int, *, divide_by_std: bool = False, singleton: Singleton = "zero"
) -> Tensor:
    """Leave-one-out: reward - mean of the other answers of its group = n / (n - 1) * (reward - mean), [R] fp32.

    divide_by_std: divided by the std (n - 1) of the whole group + 1e-6, never by that of the others, which can be 0.
    Groups with equal rewards and groups of one as in `group_centred`.

    Source: Ahmadian et al. 2024, "Back to Basics" (arXiv 2402.14740).
    """
    centred = group_centred(rewards, group_ids, num_groups, singleton=singleton).double()
    counts = group_counts(group_ids, num_groups)[group_ids]
    out = centred * torch.where(counts > 1, counts / (counts - 1.0).clamp(min=1.0), 1.0)
    if divide_by_std:
        out = out / (_group_std(rewards, group_ids, num_groups) + STD_EPS)
    return out.float()


def overlong_penalty(lengths: Tensor, *, max_response_tokens: int, buffer: int, factor: float) -> Tensor:
    """DAPO's soft penalty to be added to the reward: from 0 at max - buffer tokens down to -factor at max, fp32.

    min(-(length - (max - buffer)) / buffer * factor, 0); all zeros when buffer is 0.

    Source: Yu et al. 2025, "DAPO" (arXiv 2503.14476), equation 13.
    """
    if buffer == 0:
        return torch.zeros(lengths.shape, dtype=torch.float32, device=lengths.device)
    over = (lengths - (max_response_tokens - buffer)).clamp(min=0).float()
    return -over / buffer * factor


def _check_groups(rewards: Tensor, group_ids: Tensor, num_groups: int) -> None:
    if rewards.ndim != 1 or rewards.shape != group_ids.shape or group_ids.dtype != torch.int64:
        raise LayoutError(f"{tuple(rewards.shape)} rewards beside group ids {tuple(group_ids.shape)} {group_ids.dtype}")
    if group_ids.device.type == "cpu" and group_ids.numel():
        low, high = group_ids.aminmax()
        if int(low) < 0 or int(high) >= num_groups:
            raise LayoutError(f"group ids {int(low)}..{int(high)} outside of 0..{num_groups - 1}")


def _singletons(values: Tensor, rewards: Tensor, counts: Tensor, singleton: Singleton) -> Tensor:
    """`values` with the rule for groups of one put in."""
    return torch.where(counts == 1.0, rewards, values) if singleton == "raw" else values


def _group_std(rewards: Tensor, group_ids: Tensor, num_groups: int) -> Tensor:
    """Std (n - 1) of each answer's group [R] fp64; 1 for a group of one."""
    centred = group_centred(rewards, group_ids, num_groups).double()
    counts = group_counts(group_ids, num_groups)
    squares = torch.zeros_like(counts).index_add(0, group_ids, centred.square())
    std = (squares / (counts - 1.0).clamp(min=1.0)).sqrt()
    return torch.where(counts == 1.0, 1.0, std)[group_ids]
