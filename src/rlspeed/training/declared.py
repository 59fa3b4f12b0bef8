"""Every metric of a training run, declared once: name, unit, reduction, denominator and meaning.

Names follow verl where it has one. A name may hold placeholders; `{data_source}` may match slashes, the others may not.
`docs/reference/metrics.md` is generated from this table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Reduction = Literal["mean", "per_update", "global", "sum", "max", "min"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric.

    unit: of the value ("" for a plain number). meaning: one sentence.
    reduction: how the contributions of micro-batches and ranks become one number.
        mean: sum of all / count of all, where `denominator` says what is counted.
        per_update: sum of all / optimizer steps of the role that had tokens.
        global: the same on all ranks already; the mean of what rank 0 added.
        sum, max, min: over everything.
    clock: True when the value depends on the clock, the machine or its memory; it goes to timings.jsonl, all others to
        metrics.jsonl, which a resumed run repeats bit for bit.
    """

    name: str
    unit: str
    reduction: Reduction
    denominator: str = ""
    meaning: str
    clock: bool = False

    def __post_init__(self) -> None:
        if (self.reduction == "mean") != bool(self.denominator):
            raise ValueError(f"{self.name}: a mean declares its denominator, nothing else does")

    def pattern(self) -> re.Pattern[str]:
        """Names that this declaration covers."""
        parts = re.split(r"(\{\w+\})", self.name)
        return re.compile("".join(_placeholder(p) if p.startswith("{") else re.escape(p) for p in parts))


def _placeholder(text: str) -> str:
    return ".+" if text == "{data_source}" else "[^/]+"


def _mean(name: str, unit: str, denominator: str, meaning: str) -> Metric:
    return Metric(name=name, unit=unit, reduction="mean", denominator=denominator, meaning=meaning)


def _of(reduction: Reduction, name: str, unit: str, meaning: str, *, clock: bool = False) -> Metric:
    return Metric(name=name, unit=unit, reduction=reduction, meaning=meaning, clock=clock)


def _spread(prefix: str, unit: str, denominator: str, what: str) -> tuple[Metric, ...]:
    """mean, max and min of one quantity."""
    return (
        _mean(f"{prefix}/mean", unit, denominator, f"Mean of {what}."),
        _of("max", f"{prefix}/max", unit, f"Largest of {what}."),
        _of("min", f"{prefix}/min", unit, f"Smallest of {what}."),
    )


ANSWERS = (
    *_spread("critic/score", "", "scored answers", "the reward before penalties"),
    *_spread("critic/rewards", "", "scored answers", "the reward that trains, penalties included"),
    *_spread("critic/advantages", "", "trained tokens", "the advantages as the loss sees them"),
    *_spread("critic/returns", "", "trained tokens", "the returns"),
    *_spread("critic/values", "", "trained tokens", "the critic's values before the update"),
    _of(
        "global", "critic/vf_explained_var", "", "1 - Var(return - value) / Var(return) over the step's trained tokens."
    ),
    _mean("reward/{function}/mean", "", "answers it scored", "Mean of one reward function, before its weight."),
    _of("sum", "reward/failed", "answers", "Answers whose scoring failed; they do not train."),
    _of(
        "sum",
        "reward/scored_early",
        "answers",
        "Answers that a reward model on the host had scored when generation ended.",
        clock=True,
    ),
    _of("global", "group/degenerate", "groups", "Groups without two different rewards; their advantage is 0."),
    _of("global", "group/total", "groups", "Groups of the step."),
    _of("global", "group/filtered", "groups", "Degenerate groups that were left out of the loss."),
    *_spread("response_length", "tokens", "answers", "the length of an answer"),
    _mean("response_length/clip_ratio", "share", "answers", "Answers that ran into the length limit."),
    *_spread("prompt_length", "tokens", "answers", "the length of a prompt"),
    _of("global", "training/epoch", "", "Pass over the training prompts."),
)

UPDATES = (
    _of("per_update", "actor/pg_loss", "", "Policy loss of a mini-batch, without KL and entropy terms."),
    _mean("actor/ppo_kl", "nats", "trained tokens", "Old log-prob minus new one."),
    _mean("actor/pg_clipfrac", "share", "trained tokens", "Tokens whose ratio was clipped."),
    _mean("actor/pg_clipfrac_lower", "share", "trained tokens", "Tokens that the dual clip bounded."),
    _mean("actor/entropy", "nats", "trained tokens", "Entropy of the policy at the sampling temperature."),
    _of("per_update", "actor/kl_loss", "nats", "KL term of the loss of a mini-batch, before its coefficient."),
    _mean("actor/kl", "nats", "trained tokens", "KL to the reference in the loss, by the configured estimator."),
    _of("global", "actor/kl_coef", "", "Coefficient of the KL term of the loss."),
    _of("global", "actor/reward_kl_penalty", "nats", "KL in the reward: mean over sequences of the mean per token."),
    _of("global", "actor/reward_kl_penalty_coeff", "", "Coefficient of the KL in the reward during this step."),
    _of("global", "actor/grad_norm", "", "Gradient norm over all ranks before clipping, mean over optimizer steps."),
    _of("global", "actor/lr", "", "Learning rate, mean over optimizer steps."),
    _of(
        "global", "actor/empty_updates", "share", "Optimizer steps without a token to learn from; they change nothing."
    ),
    _of("per_update", "critic/vf_loss", "", "Value loss of a mini-batch."),
    _mean("critic/vf_clipfrac", "share", "trained tokens", "Values that the value clip held back."),
    _mean("critic/vpred_mean", "", "trained tokens", "Values during the update."),
    _of("global", "critic/grad_norm", "", "Gradient norm over all ranks before clipping, mean over optimizer steps."),
    _of("global", "critic/lr", "", "Learning rate, mean over optimizer steps."),
    _of(
        "global", "critic/empty_updates", "share", "Optimizer steps without a token to learn from; they change nothing."
    ),
    _mean("rollout_corr/logprob_diff_mean", "nats", "trained tokens", "|trainer - generator| log-prob of a token."),
    _of("max", "rollout_corr/logprob_diff_max", "nats", "Largest |trainer - generator| log-prob of a token."),
    _mean("rollout_corr/k3_kl", "nats", "trained tokens", "KL(generator || trainer), k3."),
    _mean("rollout_corr/outside_ratio", "share", "trained tokens", "Tokens with a ratio outside of 1/1.05..1.05."),
    _mean("rollout_corr/weight_mean", "", "trained tokens", "Factor that corrects for the generator's probabilities."),
    _of("global", "rollout_corr/staleness", "updates", "Updates since the weights that generated; one_step_off only."),
    _of("global", "rollout_corr/policy_version", "updates", "Weight updates that the generator had seen."),
)

SIZES = (
    _of("global", "global_seqlen/min", "tokens", "Smallest load of a rank, sequences in their first order."),
    _of("global", "global_seqlen/max", "tokens", "Largest load of a rank, sequences in their first order."),
    _of("global", "global_seqlen/minmax_diff", "tokens", "Difference of the two."),
    _of("global", "global_seqlen/balanced_min", "tokens", "Smallest load of a rank after balancing."),
    _of("global", "global_seqlen/balanced_max", "tokens", "Largest load of a rank after balancing."),
    _of("global", "global_seqlen/mean", "tokens", "Mean load of a rank."),
    _of("sum", "tokens/prompt", "tokens", "Prompt tokens of the step over all ranks, no padding."),
    _of("sum", "tokens/response", "tokens", "Generated tokens of the step over all ranks, no padding."),
    _of("sum", "tokens/squares", "tokens^2", "Sum of the squared lengths of all sequences: what attention computes."),
    _of("sum", "tokens/trained", "tokens", "Tokens under the loss mask over all ranks, each once whatever the epochs."),
    _of("sum", "tokens/padding", "tokens", "Padding tokens computed in the update; they are in no throughput."),
    _of("sum", "pack/shared_tokens_saved", "tokens", "Prompt tokens that the bins hold once and not once per answer."),
)

CLOCK = (
    _of(
        "max",
        "busy/{rank}",
        "share",
        "Share of the step in which this rank did not wait for others; with several ranks.",
        clock=True,
    ),
    _of("max", "idle_s/{rank}/{phase}", "s", "Seconds in which this rank waited for others in a phase.", clock=True),
    _of("max", "timing_s/{phase}", "s", "Wall-clock time of a phase on the slowest rank.", clock=True),
    _of(
        "global",
        "timing_per_token_ms/{phase}",
        "ms",
        "Phase time per token: generated ones for gen, else all.",
        clock=True,
    ),
    _of(
        "global",
        "perf/total_num_tokens",
        "tokens",
        "Prompt and response tokens of the step over all ranks.",
        clock=True,
    ),
    _of("max", "gen/token_latency/mean", "ms", "Time between two tokens of a sequence, slowest rank.", clock=True),
    _of("max", "gen/token_latency/std", "ms", "Its standard deviation over chunks of steps, largest rank.", clock=True),
    _of("max", "gen/token_latency/p99", "ms", "Its 99th percentile, largest rank.", clock=True),
    _of("max", "gen/tail_seconds", "s", "Generation with under a tenth of the sequences left, longest.", clock=True),
    _of("sum", "gen/prefill_tokens", "tokens", "Prompt tokens computed; a group's prompt counts once.", clock=True),
    _of("sum", "gen/preempted", "sequences", "Sequences computed again for lack of key-value cache.", clock=True),
    _of("global", "perf/time_per_step", "s", "Wall-clock time of the step on the slowest rank.", clock=True),
    _of("global", "perf/throughput", "tokens/s/rank", "Prompt and response tokens per second and rank.", clock=True),
    _of("global", "perf/throughput_response", "tokens/s/rank", "Generated tokens per second and rank.", clock=True),
    _of(
        "global",
        "perf/processed_tokens_per_s",
        "tokens/s",
        "Prompt and response tokens per second, all ranks.",
        clock=True,
    ),
    _of(
        "global",
        "perf/trained_tokens_per_s",
        "tokens/s",
        "Tokens under the loss mask per second, all ranks.",
        clock=True,
    ),
    _of(
        "max",
        "perf/max_memory_allocated_gb",
        "GiB",
        "Device memory in tensors, peak of the run, largest rank.",
        clock=True,
    ),
    _of("max", "perf/max_memory_reserved_gb", "GiB", "Device memory held, peak of the run, largest rank.", clock=True),
    _of(
        "max",
        "perf/max_rss_gb",
        "GiB",
        "Resident memory of the process, peak of the run, largest rank.",
        clock=True,
    ),
    _of(
        "global",
        "perf/max_memory_rank",
        "rank",
        "Rank with the largest peak (device memory; on CPU resident).",
        clock=True,
    ),
)

VALIDATION = (
    _of("global", "val-core/{data_source}/{variable}/mean@{n}", "", "Mean over prompts of the mean of n answers."),
    _of("global", "val-core/{data_source}/{variable}/best@{n}/mean", "", "Expected best of n answers, largest n."),
    _of("global", "val-core/{data_source}/{variable}/best@{n}/std", "", "Spread of the best of n answers, largest n."),
    _of("global", "val-core/{data_source}/{variable}/maj@{n}/mean", "", "Expected majority vote of n, largest n."),
    _of("global", "val-core/{data_source}/{variable}/maj@{n}/std", "", "Spread of the majority vote of n, largest n."),
    _of("global", "val-aux/{data_source}/{variable}/mean@{n}", "", "As val-core, for the other variables."),
    _of(
        "global", "val-aux/{data_source}/{variable}/std@{n}", "", "Mean over prompts of the std of n answers (ddof 0)."
    ),
    _of("global", "val-aux/{data_source}/{variable}/best@{n}/mean", "", "Expected best of n answers."),
    _of("global", "val-aux/{data_source}/{variable}/best@{n}/std", "", "Spread of the best of n answers."),
    _of("global", "val-aux/{data_source}/{variable}/worst@{n}/mean", "", "Expected worst of n answers."),
    _of("global", "val-aux/{data_source}/{variable}/worst@{n}/std", "", "Spread of the worst of n answers."),
    _of("global", "val-aux/{data_source}/{variable}/maj@{n}/mean", "", "Expected majority vote of n answers."),
    _of("global", "val-aux/{data_source}/{variable}/maj@{n}/std", "", "Spread of the majority vote of n answers."),
    _mean("val-aux/response_length/mean", "tokens", "answers", "Mean length of the validation answers."),
    _mean("val-aux/response_length/clip_ratio", "share", "answers", "Validation answers that ran into the limit."),
    _of("sum", "val-aux/failed", "answers", "Validation answers whose scoring failed; they are in no other number."),
)

TRANSITION = (
    _of(
        "max",
        "transition/seconds",
        "s",
        "Bringing the generator the present weights, offload included, slowest rank.",
        clock=True,
    ),
    _of("max", "transition/weights_s", "s", "Moving the weights alone, slowest rank.", clock=True),
    _of("sum", "transition/bytes_received", "bytes", "Weights that came over the wire, all ranks.", clock=True),
    _of("sum", "transition/bytes_copied", "bytes", "Weights copied on the spot, all ranks.", clock=True),
    _of("sum", "transition/bytes_shared", "bytes", "Weights read where the trainer has them, all ranks.", clock=True),
    _of(
        "sum",
        "transition/bytes_offloaded",
        "bytes",
        "Optimizer state that went to the host for the time of generation, all ranks.",
        clock=True,
    ),
    _of(
        "global",
        "transition/gb_per_s",
        "GB/s",
        "Bytes received and copied per rank and second of moving.",
        clock=True,
    ),
    _of("max", "transition/buffers_gb", "GiB", "Memory of the mover beyond the weights, largest rank.", clock=True),
    _of(
        "max",
        "transition/max_memory_allocated_gb",
        "GiB",
        "Device memory in tensors, peak of the transition, largest rank.",
        clock=True,
    ),
)

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Answers": ANSWERS,
    "Updates": UPDATES,
    "Sizes": SIZES,
    "Time and memory": CLOCK,
    "Weights to the generator": TRANSITION,
    "Validation": VALIDATION,
}


@lru_cache(maxsize=4096)
def declaration(name: str) -> Metric:
    """The declaration that covers `name`.

    Raises:
        LookupError: no declaration does.
    """
    for metrics in SECTIONS.values():
        for metric in metrics:
            if metric.name == name or ("{" in metric.name and metric.pattern().fullmatch(name)):
                return metric
    raise LookupError(f"metric {name!r} is not declared in training/declared.py")


def metrics_reference() -> str:
    """The text of docs/reference/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated from `rlspeed.training.declared`; edit the declarations, then write this file again with",
        "`python -c 'from rlspeed.training.declared import *; print(metrics_reference(), end=\"\")'`.",
        "",
        "A run writes one JSON object per step to `metrics.jsonl` (decided by data, seed and weights: a resumed run",
        "repeats it bit for bit) and one to `timings.jsonl` (what depends on the clock, the machine or its memory).",
        "Means are sums over all micro-batches and ranks divided by the count of all, never means of means. No token",
        "rate counts padding.",
        "A metric without contributions in a step is absent from its line.",
    ]
    for title, metrics in SECTIONS.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| name | unit | reduction | file | meaning |",
            "| --- | --- | --- | --- | --- |",
        ]
        for m in metrics:
            reduction = f"mean over {m.denominator}" if m.denominator else m.reduction.replace("_", " ")
            file = "timings" if m.clock else "metrics"
            lines.append(f"| `{m.name}` | {m.unit} | {reduction} | {file} | {m.meaning} |".replace("||", "\\|\\|"))
    return "\n".join(lines) + "\n"
