"""Rewards to advantages: who gets the credit, per sequence for group estimators, per token for PPO and REINFORCE++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rlspeed.algorithms import advantage, kl, segments
from rlspeed.config.schema import Algorithm
from rlspeed.engine.packed import PackedBatch
from rlspeed.engine.world import World
from rlspeed.training.batches import Answer

PER_SEQUENCE = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")


def informative_groups(answers: Sequence[Answer]) -> set[int]:
    """Groups with at least two different rewards."""
    if not answers:
        return set()
    names = sorted({a.group for a in answers})
    place = {g: i for i, g in enumerate(names)}
    ids = torch.tensor([place[a.group] for a in answers])
    keep = advantage.informative(torch.tensor([a.reward for a in answers]), ids, len(names))
    return {a.group for a, k in zip(answers, keep.tolist()) if k}


def leave_out(table: Sequence[Answer], *, filter_groups: bool) -> list[Answer]:
    """DAPO's group filter: answers of groups without two different rewards train no more (numerator and
    denominator).
    """
    if not filter_groups:
        return list(table)
    keep = informative_groups([a for a in table if a.trains])
    return [replace(a, trains=a.trains and a.group in keep) for a in table]


def sequence_advantages(table: Sequence[Answer], cfg: Algorithm) -> torch.Tensor | None:
    """Advantage [answers] of each answer of the step; None for the estimators that work per token.

    Answers that do not train (failed scoring) are left out of their group's statistics and get 0.
    """
    if cfg.kind not in PER_SEQUENCE:
        return None
    out = torch.zeros(len(table))
    index = [i for i, a in enumerate(table) if a.trains]
    if not index:
        return out
    rewards = torch.tensor([table[i].reward for i in index])
    names = sorted({table[i].group for i in index})
    groups = torch.tensor([names.index(table[i].group) for i in index])
    if cfg.kind == "rloo":
        values = advantage.rloo(rewards, groups, len(names))
    elif cfg.kind == "reinforce_pp_baseline":
        values = advantage.group_centred(rewards, groups, len(names))
    else:
        values = advantage.group_relative(rewards, groups, len(names), divide_by_std=cfg.kind == "grpo")
    out[index] = values.float()
    return out


def token_rewards(batch: PackedBatch, table: Sequence[Answer], cfg: Algorithm, kl_coef: float) -> torch.Tensor:
    """Rewards [N] of the tokens that train: the answer's reward on its last token, minus the KL penalty when that is
    on.
    """
    segment_ids = batch.segment_ids()
    rewards = torch.zeros(segment_ids.numel(), device=segment_ids.device)
    if rewards.numel() == 0:
        return rewards
    last = segments.last_index(segment_ids)
    owners = [batch.sequence_ids[s] for s in segment_ids[last].tolist()]
    rewards[last] = torch.tensor([table[n].reward for n in owners], device=rewards.device)
    if cfg.kl.where == "reward":
        penalty = kl.estimate(batch.get("old_logprobs"), batch.get("ref_logprobs"), cfg.kl.estimator)
        rewards = rewards - kl_coef * penalty
    return rewards


def assign_advantages(
    batches: Sequence[PackedBatch], table: Sequence[Answer], cfg: Algorithm, kl_coef: float, world: World
) -> None:
    """Put the streams `advantages`, `returns` and `token_rewards` on every bin; whitening is over all tokens of all
    ranks.
    """
    per_sequence = sequence_advantages(table, cfg)
    flat = []
    for batch in batches:
        ids = batch.segment_ids()
        rewards = token_rewards(batch, table, cfg, kl_coef)
        if per_sequence is not None:
            owners = torch.tensor([n if n >= 0 else 0 for n in batch.sequence_ids])
            advantages = per_sequence[owners].to(ids.device)[ids]
            returns = advantages
        elif cfg.kind == "ppo":
            values = batch.get("values")
            advantages, returns = advantage.gae(rewards, values, ids, batch.num_sequences, gamma=cfg.gamma, lam=cfg.lam)
        else:
            advantages = returns = advantage.discounted_returns(rewards, ids, batch.num_sequences, gamma=cfg.gamma)
        flat.append(advantages)
        batch.put("token_rewards", rewards)
        batch.put("returns", returns)
    whiten = cfg.whiten_advantages
    if whiten is None:
        whiten = cfg.kind in ("ppo", "reinforce_pp", "reinforce_pp_baseline")
    if whiten:
        flat = whiten_over_ranks(flat, world)
    for batch, advantages in zip(batches, flat):
        batch.put("advantages", advantages)


def whiten_over_ranks(parts: Sequence[torch.Tensor], world: World) -> list[torch.Tensor]:
    """Mean 0 and unbiased variance 1 over all values of all ranks; ranks without values take part (with zeros)."""
    sums = [segments.count_and_sum(p) for p in parts]
    count, total = world.sum([sum(n for n, _ in sums), sum(t for _, t in sums)])
    mean = total / max(count, 1.0)
    squares = world.sum([sum(segments.centred_square_sum(p, mean) for p in parts)])[0]
    variance = segments.unbiased_variance(squares, count)
    return [segments.standardise(p, mean, variance) for p in parts]
