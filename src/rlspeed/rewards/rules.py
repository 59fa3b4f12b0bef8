"""Built-in rewards by name: `builtin:exact_number`, `builtin:math`, ...; each maker takes the configured kwargs.

A maker checks its arguments (TypeError or ValueError becomes a ConfigError) and gives back a function in verl's or
TRL's signature. The rules for answers also return `acc` (1 or 0) and `pred` (what was read from the answer), as
verl's do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from rlspeed.rewards.math_rule import MathRule
from rlspeed.rewards.numbers_in_text import accepted_answers, exact_value, last_number

Result = dict[str, Any]
GSM8K_TAIL_CHARS = 300
_FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}


def exact_number(*, score: float = 1.0, wrong_score: float = 0.0) -> Callable[..., Result]:
    """`score` when the last number in the answer equals the ground truth exactly (7.0 = 7, 1,000 = 1000, $5 = 5)."""

    def rule(solution_str: str, ground_truth: Any) -> Result:
        right = [exact_value(a) for a in accepted_answers(ground_truth)]
        number = last_number(solution_str)
        correct = number is not None and number[1] in right
        return _result(correct, score, wrong_score, None if number is None else number[0])

    return rule


def regex(
    *,
    pattern: str,
    group: int | str | None = None,
    flags: str = "",
    score: float = 1.0,
    wrong_score: float = 0.0,
    which: Literal["first", "last"] = "last",
) -> Callable[..., Result]:
    """`score` when the pattern is found; with `group`, when that group of the first or last match equals the ground
    truth.

    flags: letters of i, m, s, x, as in Python's re. Blanks around both texts do not count.
    """
    unknown = set(flags) - set(_FLAGS)
    if unknown:
        raise ValueError(f"flags {flags!r}: unknown {', '.join(sorted(unknown))}; allowed: {', '.join(_FLAGS)}")
    if which not in ("first", "last"):
        raise ValueError(f"which {which!r}; allowed: first, last")
    try:
        compiled = re.compile(pattern, sum((_FLAGS[f] for f in set(flags)), re.NOFLAG))
    except re.error as error:
        raise ValueError(f"pattern {pattern!r}: {error}") from error
    if group is not None and group not in compiled.groupindex and group not in range(compiled.groups + 1):
        raise ValueError(f"group {group!r}: the pattern {pattern!r} has no such group")

    def rule(solution_str: str, ground_truth: Any) -> Result:
        match = compiled.search(solution_str)
        if match is None:
            return _result(False, score, wrong_score, None)
        if group is None:
            return _result(True, score, wrong_score, match.group())
        if which == "last":
            *_, match = compiled.finditer(solution_str)
        pred = (match[group] or "").strip()
        return _result(pred in [a.strip() for a in accepted_answers(ground_truth)], score, wrong_score, pred)

    return rule


def gsm8k(
    *, method: Literal["strict", "flexible"] = "strict", score: float = 1.0, format_score: float = 0.0
) -> Callable[..., Result]:
    """GSM8K as verl scores it: strict reads "#### 72", flexible the last number; only the last 300 characters count.

    `format_score` for a readable but wrong answer, 0 for none.

    Source: verl/utils/reward_score/gsm8k.py (behaviour, not code).
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method {method!r}; allowed: strict, flexible")
    pattern = re.compile(r"#### (-?[0-9.,]+)" if method == "strict" else r"(-?[0-9.,]+)")

    def rule(solution_str: str, ground_truth: Any) -> Result:
        right = [a.rpartition("####")[2].strip() for a in accepted_answers(ground_truth)]
        right += [a.replace(",", "") for a in right]
        found = pattern.findall(solution_str[-GSM8K_TAIL_CHARS:])
        if method == "strict":
            found = [f.replace(",", "") for f in found]
        else:
            found = [f for f in found if f not in ("", ".")]
        if not found:
            return {"score": 0.0, "acc": 0.0, "pred": ""}
        return _result(found[-1] in right, score, format_score, found[-1])

    return rule


class DataSourceRule:
    """The rule that belongs to the row's `data_source`, as verl's users expect without configuring a reward.

    openai/gsm8k: gsm8k; mathematics (MATH and its subsets, AIME, AMC, DAPO, numina_*, deepscaler): math.
    """

    def __init__(self) -> None:
        self._gsm8k = gsm8k()
        self._math = MathRule()

    def __call__(self, data_source: str, solution_str: str, ground_truth: Any) -> Result:
        """verl's signature.

        Raises:
            ValueError: a data source without a built-in rule.
        """
        name = (data_source or "").lower()
        if name.endswith("gsm8k"):
            return self._gsm8k(solution_str, ground_truth)
        if any(part in name for part in MATH_SOURCES):
            return self._math(solution_str, ground_truth)
        raise ValueError(
            f"no built-in rule for data_source {data_source!r} (known: gsm8k, {', '.join(MATH_SOURCES)}); "
            "set reward.functions"
        )

    def close(self) -> None:
        """End the helper of the mathematical rule."""
        self._math.close()


def tagged(
    *, tags: Sequence[str] = ("think", "answer"), score: float = 1.0, wrong_score: float = 0.0
) -> Callable[..., Result]:
    """`score` when the answer is <a>...</a><b>...</b> for the given tags: each once, in order, only blanks outside."""
    names = [tags] if isinstance(tags, str) else list(tags)
    if not names or not all(isinstance(t, str) and t for t in names) or len(set(names)) != len(names):
        raise ValueError(f"tags {tags!r}; expected a list of different names")

    def rule(solution_str: str) -> Result:
        rest = solution_str.strip()
        good = all(solution_str.count(mark) == 1 for t in names for mark in (f"<{t}>", f"</{t}>"))
        for tag in names:
            rest = rest.lstrip()
            good = good and rest.startswith(f"<{tag}>") and f"</{tag}>" in rest
            rest = rest.partition(f"</{tag}>")[2]
        return {"score": score if good and not rest.strip() else wrong_score}

    return rule


def length_penalty(*, start: int, limit: int, factor: float = 1.0) -> Callable[..., list[float]]:
    """0 up to `start` tokens, then falling in a straight line to -factor at `limit` tokens and staying there."""
    if not 0 <= start < limit:
        raise ValueError(f"start {start}, limit {limit}; expected 0 <= start < limit")

    def rule(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [-factor * min(1.0, max(0.0, (len(ids) - start) / (limit - start))) for ids in completion_ids]

    return rule


def _result(correct: bool, score: float, wrong_score: float, pred: str | None) -> Result:
    return {"score": score if correct else wrong_score, "acc": float(correct), "pred": pred or ""}


MATH_SOURCES = ("math", "aime", "amc", "numina", "dapo", "deepscaler", "olympiad")

BUILTINS: dict[str, Callable[..., Callable[..., Any]]] = {
    "data_source": DataSourceRule,
    "exact_number": exact_number,
    "format": tagged,
    "gsm8k": gsm8k,
    "length": length_penalty,
    "math": MathRule,
    "regex": regex,
}
