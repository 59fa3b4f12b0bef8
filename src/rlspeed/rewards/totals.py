"""From the functions' answers to one score for each sample, and from failures to messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlspeed.errors import Fault
from rlspeed.rewards.types import FunctionSpec, Sample, Score

MAX_NAMED = 4
NONE_APPLIES = "no reward function applies: each returned None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one function said about one sample. value: None when it does not apply or failed; failure: why it failed."""

    value: float | None
    failure: str | None
    extra: dict[str, Any]


def total_score(specs: Sequence[FunctionSpec], answers: Sequence[Answer], *, model_follows: bool) -> Score:
    """The weighted sum over the functions that apply; further values keep their names, the second owner of a name is
    prefixed.

    model_follows: a reward model scores the sample too, so that no function needs to apply.
    """
    parts = {spec.name: a.value for spec, a in zip(specs, answers) if a.value is not None}
    extra: dict[str, Any] = {}
    for spec, answer in zip(specs, answers):
        for key, value in answer.extra.items():
            extra[key if key not in extra else f"{spec.name}/{key}"] = value
    failures = [f"{spec.name}: {a.failure}" for spec, a in zip(specs, answers) if a.failure is not None]
    if not failures and not parts and not model_follows:
        failures = [NONE_APPLIES]
    if failures or not parts:
        return Score(total=None, parts=parts, extra=extra, failed="\n".join(failures) or None)
    total = sum(spec.weight * a.value for spec, a in zip(specs, answers) if a.value is not None)
    return Score(total=total, parts=parts, extra=extra)


def failure_fault(spec: FunctionSpec, samples: Sequence[Sample], why: str, workers: int) -> Fault:
    """One failed call as the user shall see it: function, samples, reason with the traceback, way out."""
    named = "; ".join(s.label for s in samples[:MAX_NAMED])
    more = f"; and {len(samples) - MAX_NAMED} more" if len(samples) > MAX_NAMED else ""
    fix = "mend the function; or leave such answers out with reward.on_failure: mask"
    if "signal only works in main thread" in why and workers == 0:
        fix = "set reward.workers to 1 or more: the function uses signals, which need a process of its own"
    elif "in a thread cannot be ended" in why:
        fix = "set reward.workers to 1 or more (a worker process can be ended), or raise reward.timeout_seconds"
    elif "gave no answer within" in why:
        fix = "make the function faster, raise reward.timeout_seconds, or set reward.on_failure: mask"
    return Fault(where=f"{spec.title}, {named}{more}", found=why, fix=fix)


def too_many_fault(samples: Sequence[Sample], scores: Sequence[Score], share: float) -> Fault | None:
    """More failures in this step than reward.max_failed_share allows."""
    failed = [s for s, score in zip(samples, scores) if score.failed is not None]
    if len(failed) <= share * len(samples):
        return None
    named = "; ".join(s.label for s in failed[:MAX_NAMED])
    return Fault(
        where="reward.max_failed_share",
        found=f"scoring failed for {len(failed)} of {len(samples)} answers of this step: {named}",
        allowed=f"at most {share:g} of them",
        fix="mend the reward functions; the first failure is shown below",
    )
