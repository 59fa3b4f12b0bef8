"""What a training step reports about its answers, streams and sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlspeed.algorithms import correction
from rlspeed.engine.packed import PackedBatch
from rlspeed.engine.world import World
from rlspeed.planning.prefixes import tokens_saved
from rlspeed.rollout.stats import GenerationStats
from rlspeed.training.batches import Answer, MiniBatch
from rlspeed.training.collect import Collected
from rlspeed.training.credit import informative_groups
from rlspeed.training.grid import Site
from rlspeed.training.handover import Transition
from rlspeed.training.metrics import GIB, StepMetrics, seqlen_balance


def record_answers(metrics: StepMetrics, table: Sequence[Answer], world: World) -> None:
    """Scores, rewards and lengths; every rank adds the answers it holds, groups are counted from the whole table."""
    mine = [a for a in table if a.holder == world.rank]
    scored = [a for a in mine if not a.failed]
    metrics.add("reward/failed", float(len(mine) - len(scored)))
    metrics.add_spread("critic/score", torch.tensor([a.score for a in scored]))
    metrics.add_spread("critic/rewards", torch.tensor([a.reward for a in scored]))
    metrics.add_spread("response_length", torch.tensor([a.response_tokens for a in mine]))
    metrics.add_spread("prompt_length", torch.tensor([a.prompt_tokens for a in mine]))
    if mine:
        metrics.add("response_length/clip_ratio", float(sum(a.truncated for a in mine)), len(mine))
    metrics.add("tokens/prompt", float(sum(a.prompt_tokens for a in mine)))
    metrics.add("tokens/response", float(sum(a.response_tokens for a in mine)))
    metrics.add("tokens/squares", float(sum(a.tokens**2 for a in mine)))
    metrics.add("tokens/trained", float(sum(a.response_tokens for a in mine if a.trains)))
    record_groups(metrics, table)


def record_parts(metrics: StepMetrics, collected: Collected) -> None:
    """Each reward function's own numbers, before its weight, of the answers that this rank holds."""
    if collected.early is not None:
        metrics.add("reward/scored_early", float(collected.early))
    for score in collected.scores.values():
        for function, value in score.parts.items():
            metrics.add(f"reward/{function}/mean", value, 1)


def record_groups(metrics: StepMetrics, table: Sequence[Answer]) -> None:
    """Groups without two different rewards, and those that the group filter left out."""
    alive = [a for a in table if not a.failed]
    names = sorted({a.group for a in table})
    degenerate = set(names) - informative_groups(alive)
    filtered = {a.group for a in table} - {a.group for a in table if a.trains}
    metrics.add("group/total", float(len(names)))
    metrics.add("group/degenerate", float(len(degenerate)))
    metrics.add("group/filtered", float(len(filtered & degenerate)))


def record_sizes(
    metrics: StepMetrics, table: Sequence[Answer], plans: Sequence[MiniBatch], site: Site, *, padded: bool, shared: bool
) -> None:
    """Loads of the shares of the data before and after balancing, padding tokens of padded training, and prompt tokens
    that sharing leaves out.
    """
    before = [sum(a.tokens for a in table if a.holder in ranks) for ranks in site.shares]
    after = [sum(table[n].tokens for p in plans for b in p.bins[s] for n in b) for s in range(len(site.shares))]
    for name, value in seqlen_balance(before, after).items():
        metrics.add(name, value)
    bins = [b for p in plans for b in p.bins[site.share] if b] if site.share is not None else []
    waste = (
        sum(len(b) * max(table[n].tokens for n in b) - sum(table[n].tokens for n in b) for b in bins) if padded else 0
    )
    metrics.add("tokens/padding", float(waste))
    if shared:
        saved = tokens_saved(bins, [a.group for a in table], [a.prompt_tokens for a in table])
        metrics.add("pack/shared_tokens_saved", float(saved))


def record_generation(metrics: StepMetrics, stats: GenerationStats | None) -> None:
    """Latency, tail and lack of cache of one rank's generation; None: a generator that keeps no such numbers."""
    if stats is None or not stats.tokens:
        return
    metrics.add("gen/token_latency/mean", stats.latency_mean * 1e3)
    metrics.add("gen/token_latency/std", stats.latency_std * 1e3)
    metrics.add("gen/token_latency/p99", stats.latency_p99 * 1e3)
    metrics.add("gen/tail_seconds", stats.tail_seconds)
    metrics.add("gen/prefill_tokens", float(stats.prefill_tokens))
    metrics.add("gen/preempted", float(stats.preempted))


def record_streams(metrics: StepMetrics, batches: Sequence[PackedBatch]) -> None:
    """Advantages, returns and values as the losses see them."""
    if not batches:
        return
    advantages = torch.cat([b.get("advantages") for b in batches])
    metrics.add_spread("critic/advantages", advantages)
    returns = torch.cat([b.get("returns") for b in batches])
    metrics.add_spread("critic/returns", returns)
    if "values" in batches[0].streams:
        metrics.add_spread("critic/values", torch.cat([b.get("values") for b in batches]))


def explained_variance(batches: Sequence[PackedBatch], world: World) -> float | None:
    """1 - Var(return - value) / Var(return) over the step's tokens of all ranks; None when the returns do not vary."""
    returns = torch.cat([b.get("returns") for b in batches]).double() if batches else torch.zeros(0).double()
    errors = returns - torch.cat([b.get("values") for b in batches]).double() if batches else returns
    sums: list[float | torch.Tensor] = [
        returns.numel(),
        returns.sum(),
        returns.square().sum(),
        errors.sum(),
        errors.square().sum(),
    ]
    count, r, r2, e, e2 = world.sum([float(s) for s in sums])
    if count < 2:
        return None
    total, left = r2 / count - (r / count) ** 2, e2 / count - (e / count) ** 2
    return 1.0 - left / total if total > 1e-12 else None


def record_transition(metrics: StepMetrics, done: Transition | None, device: torch.device) -> None:
    """What it took to bring the generator the present weights; nothing when it had them."""
    if done is None:
        return
    moved = done.moved
    metrics.add("transition/seconds", done.seconds)
    metrics.add("transition/weights_s", moved.seconds)
    metrics.add("transition/bytes_received", float(moved.received_bytes))
    metrics.add("transition/bytes_copied", float(moved.copied_bytes))
    metrics.add("transition/bytes_shared", float(moved.shared_bytes))
    metrics.add("transition/bytes_offloaded", float(done.offloaded_bytes))
    metrics.add("transition/buffers_gb", moved.buffer_bytes / GIB)
    if device.type == "cuda":
        metrics.add("transition/max_memory_allocated_gb", done.peak.num_bytes / GIB)


def record_mismatch(metrics: StepMetrics, batch: PackedBatch) -> None:
    """The gap between the trainer's and the generator's log-probs of the sampled tokens."""
    gap = correction.mismatch(batch.get("old_logprobs"), batch.get("rollout_logprobs"))
    if gap.tokens == 0:
        return
    metrics.add("rollout_corr/logprob_diff_mean", gap.abs_sum, gap.tokens)
    metrics.add("rollout_corr/logprob_diff_max", gap.abs_max)
    metrics.add("rollout_corr/k3_kl", gap.k3_sum, gap.tokens)
    metrics.add("rollout_corr/outside_ratio", gap.outside, gap.tokens)
