"""Validation: answers to held-out prompts, scored by the same rewards, over all ranks."""

from __future__ import annotations

from dataclasses import replace
from numbers import Number
from typing import Any

from rlspeed.data.prompts import PromptTable
from rlspeed.training.collect import Collected
from rlspeed.training.metrics import StepMetrics
from rlspeed.training.ppo_step import Parts, generate_ready
from rlspeed.training.val_metrics import ValAnswer, validation_metrics

# keeps the random streams of validation apart from those of training steps
VALIDATION_STREAM = 1 << 40


def validate(parts: Parts, table: PromptTable, step: int, metrics: StepMetrics) -> Collected:
    """Answer every prompt of `table` once per validation_n and add the results to `metrics`; returns this rank's
    answers.

    Prompts are dealt round robin, so their number need not divide by the ranks; the means are over exactly the prompts
    there are.
    """
    cfg, collector = parts.profile, parts.collector
    sampling = replace(collector.sampling, temperature=cfg.run.validation_temperature, top_k=0, top_p=1.0, min_p=0.0)
    if cfg.run.validation_temperature > 0:
        sampling = replace(collector.sampling, temperature=cfg.run.validation_temperature)
    count = len(table) if cfg.data.max_val_samples is None else min(len(table), cfg.data.max_val_samples)
    generate_ready(parts, metrics)
    collected = collector.generate(
        table, range(count), n=cfg.run.validation_n, sampling=sampling, stream=VALIDATION_STREAM
    )
    collector.score(collected, step)
    mine = [_val_answer(table, collected, place) for place in collected.rollouts]
    scored = [a for part in parts.world.gather_objects([a for a in mine if a is not None]) for a in part]
    for name, value in validation_metrics(sorted(scored, key=lambda a: a.prompt_id)).items():
        metrics.add(name, value)
    rollouts = list(collected.rollouts.values())
    if rollouts:
        metrics.add("val-aux/response_length/mean", float(sum(len(r.response_ids) for r in rollouts)), len(rollouts))
        metrics.add(
            "val-aux/response_length/clip_ratio", float(sum(r.finish == "length" for r in rollouts)), len(rollouts)
        )
    metrics.add("val-aux/failed", float(sum(a is None for a in mine)))
    return collected


def _val_answer(table: PromptTable, collected: Collected, place: tuple[int, int]) -> ValAnswer | None:
    """The numbers of one answer, None when its scoring failed."""
    score = collected.scores[place]
    if score.total is None:
        return None
    extra: dict[str, Any] = {k: v for k, v in score.extra.items() if isinstance(v, (Number, bool))}
    row = table[collected.rows[place[0]]]
    vote = score.extra.get("pred")
    return ValAnswer(
        data_source=str(row.data_source or "data"),
        prompt_id=collected.rows[place[0]],
        values={"reward": float(score.total), **{k: float(v) for k, v in extra.items()}},
        vote=None if vote is None else str(vote),
    )
