"""Mathematical equality as a reward: `builtin:math`, by the math-verify library in a helper process.

What a model writes can keep a computer algebra system busy for ever, also inside one C call that neither a signal nor
a thread can end (10^{10^{10}} is enough). So the comparison runs in a process that can be killed: the rule has its
own limit of seconds, works in threads and in workers alike, and takes an answer that cannot be shown equal in time as
wrong, marked `undecided`.
"""

from __future__ import annotations

import logging
from typing import Any

from rlspeed.rewards.numbers_in_text import accepted_answers
from rlspeed.rewards.process import Worker, WorkerDied, WorkerTimeout
from rlspeed.rewards.types import FunctionSpec, Job, Outcome, Sample

HELPER_MEMORY_BYTES = 8 * 2**30
MAX_DEATHS = 3
TAIL_CHARS = 10_000
HELPER = FunctionSpec(path="rlspeed.rewards.math_rule:equal", name="math", signature="verl")


class MathRule:
    """`score` when the answer is mathematically equal to the ground truth: 1/2 = 0.5 = \\frac{1}{2}, sets, intervals,
    ...

    seconds: limit of one comparison. The helper starts with the first answer that is not settled by equal text.

    Source: https://github.com/huggingface/Math-Verify
    """

    def __init__(self, *, score: float = 1.0, wrong_score: float = 0.0, seconds: float = 5.0) -> None:
        if seconds <= 0:
            raise ValueError(f"seconds {seconds}; expected more than 0")
        self._score = score
        self._wrong_score = wrong_score
        self._seconds = seconds
        self._helper: Worker | None = None
        self._deaths = 0

    def __call__(self, solution_str: str, ground_truth: Any) -> dict[str, Any]:
        """verl's signature."""
        answers = accepted_answers(ground_truth)
        boxed = last_boxed(solution_str)
        if boxed is not None and boxed.strip() in [a.strip() for a in answers]:
            return {"score": self._score, "acc": 1.0, "pred": boxed.strip(), "undecided": 0.0}
        sample = Sample(
            index=0,
            prompt_id=0,
            sample_id=0,
            prompt="",
            prompt_text="",
            response_text=solution_str,
            ground_truth=answers,
        )
        outcome = self._ask(Job(id=0, function=0, samples=(sample,)))
        if outcome is None:
            return {"score": self._wrong_score, "acc": 0.0, "pred": boxed or "", "undecided": 1.0}
        if outcome.failures[0] is not None:
            raise ValueError(f"comparing with ground truth {ground_truth!r}: {outcome.failures[0]}")
        equal = outcome.values[0] == 1.0
        score = self._score if equal else self._wrong_score
        return {"score": score, "acc": float(equal), "pred": outcome.extras[0].get("pred", ""), "undecided": 0.0}

    def close(self) -> None:
        """End the helper."""
        if self._helper is not None:
            self._helper.kill()
            self._helper = None

    def _ask(self, job: Job) -> Outcome | None:
        """The helper's outcome; None when it gave none in time or broke down over this answer."""
        if self._helper is None:
            self._helper = Worker([HELPER], self._seconds, HELPER_MEMORY_BYTES)
        try:
            outcome: Outcome = self._helper.call(job, self._seconds)
        except (WorkerTimeout, WorkerDied) as error:
            self._deaths += isinstance(error, WorkerDied)
            self.close()
            if self._deaths > MAX_DEATHS:
                raise RuntimeError(
                    f"the helper process of builtin:math died {self._deaths} times in a row: {error}"
                ) from error
            return None
        self._deaths = 0
        return outcome


def equal(solution_str: str, ground_truth: list[str]) -> dict[str, Any]:
    """Runs in the helper: score 1 when the answer equals one of the texts, `pred` as the library read it.

    Raises:
        ValueError: a ground truth that the library cannot read.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # the library warns that nothing limits the time; the helper's parent does
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    try:
        answer = parse(solution_str[-TAIL_CHARS:], configs, parsing_timeout=None)
    except (MemoryError, RecursionError):
        answer = []
    right = False
    for text in ground_truth:
        gold = parse(_as_latex(text), configs, parsing_timeout=None)
        if not gold:
            raise ValueError(f"ground truth {text!r} cannot be read as mathematics")
        right = right or bool(verify(gold, answer, timeout_seconds=None))
    return {"score": float(right), "pred": str(answer[-1]) if answer else ""}


def last_boxed(text: str) -> str | None:
    """Content of the last \\boxed{...}, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for i in range(begin, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin + 1 : i]
    return None


def _as_latex(text: str) -> str:
    return text if "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text else f"\\boxed{{{text}}}"
