"""What goes into a reward and what comes out of it: plain Python values, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer to be scored.

    index: position in the caller's list. prompt_id: row of the data file. sample_id: which of the prompt's answers.
    prompt: string or list of {role, content}, as in the data; prompt_text: what the model saw.
    response_text: the decoded answer without special tokens; response_ids: its tokens, the end token included.
    extra_info: verl's column (empty when missing); columns: all further columns of the row.
    finish: "stop" or "length".

    Reward functions get copies of the values, so nothing that they change comes back here.
    """

    index: int
    prompt_id: int
    sample_id: int
    prompt: Any
    prompt_text: str
    response_text: str
    response_ids: tuple[int, ...] = ()
    data_source: str | None = None
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    finish: str = "stop"

    @property
    def label(self) -> str:
        """How messages name this sample."""
        return f"data row {self.prompt_id}, answer {self.sample_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one answer earned.

    total: weighted sum over the functions that apply; None when a function failed, or when nothing has scored the
    sample yet (only a reward model does). parts: function name to its own number, before the weight; functions that
    answered None (not applicable) or failed are absent. extra: further values to be written with the sample. failed:
    why, or None.
    """

    total: float | None
    parts: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where the run stands, for functions that ask for TRL's `trainer_state`; None: the caller did not say."""

    global_step: int | None = None
    max_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """One reward function as configured: what a worker process needs to load it. where: its configuration key."""

    path: str
    name: str
    weight: float = 1.0
    signature: str = "auto"
    kwargs: dict[str, Any] = field(default_factory=dict)
    where: str = "reward.functions[0]"

    @property
    def title(self) -> str:
        """How messages name the function."""
        return f"reward function {self.name!r} ({self.path})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One call of one function. function: its place in the configuration."""

    id: int
    function: int
    samples: tuple[Sample, ...]
    state: RunState = RunState()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a job; every tuple has one entry for each sample.

    values: None where the function does not apply or failed; failures: the reason (with the user's traceback) or
    None. metrics: name to what the function logged through `log_metric`. fatal: the run must stop whatever the policy
    says.
    """

    job: int
    values: tuple[float | None, ...]
    failures: tuple[str | None, ...]
    extras: tuple[dict[str, Any], ...]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    fatal: bool = False

    @staticmethod
    def of_failure(job: Job, why: str, *, fatal: bool = False) -> Outcome:
        """All samples of the job failed for one reason."""
        count = len(job.samples)
        return Outcome(
            job=job.id,
            values=(None,) * count,
            failures=(why,) * count,
            extras=tuple({} for _ in range(count)),
            fatal=fatal,
        )


def add_model_scores(scores: list[Score], values: list[float], weight: float, name: str = "model") -> list[Score]:
    """The functions' scores with the reward model's added; failed samples stay failed.

    values: one finite number for each score.
    """
    if len(scores) != len(values):
        raise ValueError(f"{len(scores)} scores, {len(values)} model scores")
    out = []
    for score, value in zip(scores, values):
        total = None if score.failed is not None else (score.total or 0.0) + weight * value
        out.append(Score(total=total, parts={**score.parts, name: value}, extra=score.extra, failed=score.failed))
    return out
