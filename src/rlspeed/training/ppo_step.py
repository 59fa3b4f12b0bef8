"""One PPO/GRPO step, top to bottom: new weights to the generator, answers, scores, packs, log-probs, credit,
updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlspeed.algorithms import correction, kl, loss, segments
from rlspeed.config.schema import Profile
from rlspeed.data.prompts import PromptTable
from rlspeed.engine.packed import PackedBatch
from rlspeed.engine.world import World
from rlspeed.planning.devices import Role
from rlspeed.training.batches import Answer, Laid, build_batches, gather_table, plan_minibatches
from rlspeed.training.clock import Clock
from rlspeed.training.collect import Collected, Collector
from rlspeed.training.credit import assign_advantages, leave_out
from rlspeed.training.grid import Grid
from rlspeed.training.handover import Handover
from rlspeed.training.meet import bring, journeys
from rlspeed.training.metrics import StepMetrics
from rlspeed.training.roles import Roles, Updated, actor_waits
from rlspeed.training.seeds import seed_of
from rlspeed.training.step_metrics import (
    explained_variance,
    record_answers,
    record_generation,
    record_mismatch,
    record_parts,
    record_sizes,
    record_streams,
    record_transition,
)
from rlspeed.training.stop import StopFlag


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a step works with; made once by the loop."""

    profile: Profile
    world: World
    grid: Grid
    roles: Roles
    handover: Handover
    collector: Collector
    train_table: PromptTable
    clock: Clock
    stop: StopFlag
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the loop needs from a finished step.

    mean_kl: mean over sequences of the KL per token in the reward, for the controller. collected: this rank's answers;
    ahead: those of the next step, where they were asked for.
    """

    mean_kl: float
    collected: Collected
    table: list[Answer]
    ahead: Collected | None = None


def ppo_step(
    parts: Parts,
    step: int,
    rows: Sequence[int],
    kl_coef: float,
    metrics: StepMetrics,
    *,
    ahead: Collected | None = None,
    following: Sequence[int] | None = None,
) -> StepResult:
    """Run training step `step` (from 1) on the prompts `rows`.

    ahead: answers to them that the step before has generated; None: they are generated now. following: prompts of the
    next step, which are to be answered before this one's update (rollout.one_step_off).

    Every rank runs this with the same arguments. Nothing is changed before all ranks have agreed, after the last
    scoring pass, that no stop was asked for.

    Raises:
        StopRequested: a stop was asked for before the update began.
    """
    cfg, world, grid, clock = parts.profile, parts.world, parts.grid, parts.clock
    collected = ahead or _generate(parts, rows, step, metrics)
    record_generation(metrics, getattr(parts.collector.generator, "stats", None))
    if not cfg.model.actor.enable_auto_repartition_for_training:
        parts.handover.to_training()  # the explicit call; otherwise the first pass below changes over
    # what needs no score goes first: roles on other ranks work while the last answers are scored
    with clock.phase("exchange"):
        bins = _lay(parts, step, gather_table(world, parts.collector.answers(collected)), collected)
    _score(parts, bins)
    with clock.phase("reward"):
        scored = parts.collector.score(collected, step)
        with clock.idle():
            table = gather_table(world, scored)
    table = leave_out(table, filter_groups=cfg.algorithm.filter_groups)
    left_out = {n for n, a in enumerate(table) if not a.trains}
    masked = {laid: laid.without(left_out) for laid in bins.values()}
    bins = {role: masked[laid] for role, laid in bins.items()}
    home = bins[Role.ACTOR]
    shared = metrics if grid.home.leads else StepMetrics()  # what all ranks of a share see is counted once
    record_answers(metrics, table, world)
    record_parts(metrics, collected)
    padded, prefixes = not cfg.model.use_remove_padding, cfg.model.shared_prefixes
    record_sizes(shared, table, home.plans, grid.home, padded=padded, shared=prefixes)
    with clock.phase("meet"), clock.idle():
        bring(world, table, journeys(bins, cfg.algorithm.kl.where))
    with clock.phase("adv"):
        mean_kl = _mean_kl(parts, home)
        _credit(parts, bins, table, kl_coef)
        record_streams(shared, home.batches)
    parts.stop.agree()
    later = None
    if following is not None:
        # the actor's ranks alone: the critic is updated meanwhile where it has ranks of its own
        later = _generate(parts, following, step + 1, metrics, ahead=True)
    _update(parts, step, table, bins, kl_coef, metrics)
    _record_run(parts, home, mean_kl, kl_coef, metrics, collected.version)
    parts.handover.updated()
    return StepResult(mean_kl=mean_kl, collected=collected, table=table, ahead=later)


def _generate(parts: Parts, rows: Sequence[int], step: int, metrics: StepMetrics, *, ahead: bool = False) -> Collected:
    """Answers to the prompts of `step`; ahead: of the next one, and nothing on ranks outside of the actor."""
    cfg, collector = parts.profile, parts.collector
    if ahead and not parts.grid.home.here:
        return Collected(rollouts={}, rows={}, under_way=collector.nothing(parts.train_table, rows))
    generate_ready(parts, metrics)
    with parts.clock.phase("gen"):
        out = collector.generate(
            parts.train_table,
            rows,
            n=cfg.rollout.n,
            sampling=collector.sampling,
            stream=step,
            enough=cfg.data.batch_size if cfg.rollout.overprovision > 1.0 else None,
            lengths=cfg.rollout.fix_lengths,
            ahead=ahead,
        )
    if ahead and not cfg.model.actor.enable_auto_repartition_for_training:
        parts.handover.to_training()
    return out


def _lay(parts: Parts, step: int, table: Sequence[Answer], collected: Collected) -> dict[Role, Laid]:
    """The step's bins as each role has them; roles on one site have the same ones."""
    cfg, world, grid = parts.profile, parts.world, parts.grid
    sites = list(dict.fromkeys(grid.sites.values()))
    planned = [
        (
            site,
            plan_minibatches(
                table,
                shares=site.shares,
                groups_per_minibatch=cfg.algorithm.mini_batch_size,
                balance=cfg.data.balance_dp_token,
                capacity=parts.capacity if cfg.model.use_remove_padding else None,
                micro_batch_size=cfg.packing.micro_batch_size,
                seed=seed_of(cfg.run.seed, step),
                shared=cfg.model.shared_prefixes,
            ),
        )
        for site in sites
    ]
    mine = {i: collected.rollouts[(a.group, a.sample_id)] for i, a in enumerate(table) if a.holder == world.rank}
    laid = build_batches(world, table, mine, planned, multiple=grid.multiple, shared=cfg.model.shared_prefixes)
    found = dict(zip(sites, laid))
    return {role: found[site] for role, site in grid.sites.items()}


def _credit(parts: Parts, bins: Mapping[Role, Laid], table: Sequence[Answer], kl_coef: float) -> None:
    """Advantages and returns where they are learned from: at the actor's site and at the critic's."""
    for laid in dict.fromkeys(bins[role] for role in (Role.ACTOR, Role.CRITIC) if role in bins):
        if laid.site.data is not None:
            assign_advantages(laid.batches, table, parts.profile.algorithm, kl_coef, laid.site.data)


def generate_ready(parts: Parts, metrics: StepMetrics) -> None:
    """Bring the generator to the trainer's weights, and report it when something had to be done."""
    with parts.clock.phase("update_weights"):
        parts.handover.to_generation()
    done = parts.handover.take()
    if parts.grid.home.here:
        record_transition(metrics, done, parts.world.device)


def _record_run(parts: Parts, home: Laid, mean_kl: float, kl_coef: float, metrics: StepMetrics, version: int) -> None:
    """Numbers that are the same on all ranks of the actor. version: of the weights that the answers are from."""
    if home.site.data is None:
        return
    where = parts.profile.algorithm.kl.where
    if where == "reward":
        metrics.add("actor/reward_kl_penalty", mean_kl)
        metrics.add("actor/reward_kl_penalty_coeff", kl_coef)
    if where == "loss":
        metrics.add("actor/kl_coef", kl_coef)
    metrics.add("rollout_corr/policy_version", float(version))
    if parts.profile.rollout.one_step_off:
        metrics.add("rollout_corr/staleness", float(parts.handover.version - version))
    if parts.profile.algorithm.kind == "ppo":
        explained = explained_variance(home.batches, home.site.data)
        if explained is not None:
            metrics.add("critic/vf_explained_var", explained)


def _single_update(parts: Parts, home: Laid) -> bool:
    """True when each answer is used in exactly one optimizer step, so that the ratio to the old policy is exactly 1."""
    cfg = parts.profile.algorithm
    return cfg.epochs == 1 and len(home.plans) == 1 and cfg.kl.where != "reward"


@torch.no_grad()
def _score(parts: Parts, bins: Mapping[Role, Laid]) -> None:
    """Streams without gradient: old log-probs (unless the update makes them itself), reference log-probs, values.

    Roles on other ranks than each other work at the same time.
    """
    roles, clock = parts.roles, parts.clock
    if roles.actor_or_none is not None and not _single_update(parts, bins[Role.ACTOR]):
        with clock.phase("old_log_prob"):
            for batch in bins[Role.ACTOR].batches:
                batch.put("old_logprobs", roles.actor.logprobs(batch))
    if roles.reference is not None:
        with clock.phase("ref"):
            for batch in bins[Role.REFERENCE].batches:
                batch.put("ref_logprobs", roles.reference.logprobs(batch))
            roles.reference.leave()
    if roles.critic is not None:
        with clock.phase("values"):
            for batch in bins[Role.CRITIC].batches:
                batch.put("values", roles.critic.values(batch))
            roles.critic.leave()


@torch.no_grad()
def _mean_kl(parts: Parts, home: Laid) -> float:
    """Mean over sequences of the mean KL per token, as the actor's ranks have it, told to all; 0 when there is none in
    the reward.
    """
    cfg = parts.profile.algorithm
    if cfg.kl.where != "reward":
        return 0.0
    total, count = 0.0, 0.0
    for batch in home.batches:
        ids = batch.segment_ids()
        values = kl.estimate(batch.get("old_logprobs"), batch.get("ref_logprobs"), cfg.kl.estimator)
        total += float(segments.segment_mean(values, ids, batch.num_sequences).double().sum())
        count += float((segments.segment_lengths(ids, batch.num_sequences) > 0).sum())
    if home.site.data is not None:
        total, count = home.site.data.sum([total, count])
    mean = total / max(count, 1.0)
    # ranks outside of the actor have a controller, too
    return mean if home.site.members is parts.world else parts.world.told_by(home.site.first, mean)


def _update(
    parts: Parts, step: int, table: Sequence[Answer], bins: Mapping[Role, Laid], kl_coef: float, metrics: StepMetrics
) -> None:
    """Passes over the mini-batches: the critic's update, then the actor's; at the same time on ranks of their own."""
    cfg, roles = parts.profile.algorithm, parts.roles
    home, beside = bins[Role.ACTOR], bins.get(Role.CRITIC)
    for epoch in range(cfg.epochs):
        for number, plan in enumerate(home.plans):
            counts = loss.GlobalCounts(
                tokens=sum(table[n].response_tokens for n in plan.numbers if table[n].trains),
                sequences=sum(table[n].trains for n in plan.numbers),
            )
            if roles.critic is not None and beside is not None:
                counted = metrics if beside.site.leads else StepMetrics()
                with parts.clock.phase("update_critic"):
                    done = _update_critic(parts, beside.per_minibatch[number], counts, counted)
                    roles.critic.leave()
                counted.add_update("critic", grad_norm=done.grad_norm, lr=done.lr, empty=done.empty)
            if step <= actor_waits(parts.profile) or roles.actor_or_none is None:
                continue
            counted = metrics if home.site.leads else StepMetrics()
            with parts.clock.phase("update_actor"):
                done = _update_actor(parts, home.per_minibatch[number], counts, kl_coef, counted, first=epoch == 0)
            counted.add_update("actor", grad_norm=done.grad_norm, lr=done.lr, empty=done.empty)


def _update_critic(
    parts: Parts, batches: Sequence[PackedBatch], counts: loss.GlobalCounts, metrics: StepMetrics
) -> Updated:
    cfg, critic = parts.profile.algorithm, parts.roles.critic
    assert critic is not None

    def loss_of(batch: PackedBatch) -> torch.Tensor:
        values = critic.forward(batch)
        out = loss.value_loss(
            values,
            batch.get("values"),
            batch.get("returns"),
            _weights(parts, batch, counts),
            clip=cfg.value_clip,
        )
        metrics.add_loss("critic", out)
        return out.loss

    return critic.update(batches, loss_of, global_tokens=counts.tokens)


def _update_actor(
    parts: Parts,
    batches: Sequence[PackedBatch],
    counts: loss.GlobalCounts,
    kl_coef: float,
    metrics: StepMetrics,
    *,
    first: bool,
) -> Updated:
    """One optimizer step of the policy; on the first pass over on-policy data it also measures the gap to the
    generator.
    """
    cfg, actor = parts.profile.algorithm, parts.roles.actor

    def loss_of(batch: PackedBatch) -> torch.Tensor:
        logprobs, entropy = actor.forward(batch, with_entropy=True)
        if "old_logprobs" not in batch.streams:
            batch.put("old_logprobs", logprobs)
        if first:
            record_mismatch(metrics, batch)
        weights = _weights(parts, batch, counts)
        out = _policy_loss(parts, batch, logprobs, weights, metrics)
        assert entropy is not None
        out = out.plus(loss.entropy_bonus(entropy, weights, coef=cfg.entropy_coef))
        if cfg.kl.where == "loss":
            term = loss.kl_loss(
                logprobs,
                batch.get("ref_logprobs"),
                weights,
                estimator=cfg.kl.estimator,
                coef=kl_coef,
            )
            out = out.plus(term)
        metrics.add_loss("actor", out)
        return out.loss

    return actor.update(batches, loss_of, global_tokens=counts.tokens)


def _policy_loss(
    parts: Parts, batch: PackedBatch, logprobs: torch.Tensor, weights: torch.Tensor, metrics: StepMetrics
) -> loss.LossOut:
    """The policy term that the configuration names, with the correction for the generator's probabilities in the
    weights.
    """
    cfg, rollout = parts.profile.algorithm, parts.profile.rollout
    old, advantages, ids = batch.get("old_logprobs"), batch.get("advantages"), batch.segment_ids()
    if rollout.correction != "none":
        factors = correction.importance_weights(
            rollout.correction,
            old,
            batch.get("rollout_logprobs"),
            ids,
            batch.num_sequences,
            threshold=rollout.correction_threshold,
            lower=rollout.correction_lower,
        )
        metrics.add("rollout_corr/weight_mean", factors.sum(), factors.numel())
        weights = weights * factors
    clips: dict[str, Any] = {"clip_low": cfg.clip_low, "clip_high": cfg.clip_high}
    if cfg.policy_loss == "gspo":
        return loss.gspo_policy_loss(logprobs, old, advantages, weights, ids, batch.num_sequences, **clips)
    if cfg.policy_loss == "cispo":
        return loss.cispo_policy_loss(logprobs, old, advantages, weights, **clips)
    return loss.ppo_policy_loss(logprobs, old, advantages, weights, dual_clip=cfg.dual_clip, **clips)


def _weights(parts: Parts, batch: PackedBatch, counts: loss.GlobalCounts) -> torch.Tensor:
    """Weight [N] of each token in the loss of the mini-batch; GSPO's is defined by sequence means."""
    cfg = parts.profile
    return loss.token_weights(
        "seq-mean-token-mean" if cfg.algorithm.policy_loss == "gspo" else cfg.algorithm.loss_agg,
        batch.segment_ids(),
        batch.num_sequences,
        counts,
        scale=cfg.algorithm.loss_norm_scale or cfg.rollout.max_new_tokens,
    )
