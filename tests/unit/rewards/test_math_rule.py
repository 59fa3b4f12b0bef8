"""builtin:math: equality, monsters, helper processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rlspeed.config.schema import Reward, RewardFunction
from rlspeed.errors import RewardError
from rlspeed.rewards.math_rule import MathRule, equal, last_boxed
from rlspeed.rewards.pool import RewardPool
from rlspeed.rewards.types import Sample

pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def rule() -> Iterator[MathRule]:
    made = MathRule()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("answer", "ground_truth", "score"),
    [
        ("so \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("so $0.5$", "\\frac{1}{2}", 1.0),
        ("the answer is 7.0", "7", 1.0),
        ("the answer is 7", 7, 1.0),
        ("\\boxed{x^2+2x+1}", "$(x+1)^2$", 1.0),
        ("\\boxed{\\{2, 1\\}}", "\\{1, 2\\}", 1.0),
        ("\\boxed{(1, 2]}", "(1, 2]", 1.0),
        ("\\boxed{3}", ["2", "3"], 1.0),
        ("\\boxed{3}", "4", 0.0),
        ("no idea", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_equality(rule: MathRule, answer: str, ground_truth: Any, score: float) -> None:
    result = rule(answer, ground_truth)
    assert (result["score"], result["acc"], result["undecided"]) == (score, score, 0.0)


def test_works_in_a_thread(rule: MathRule) -> None:
    """The library's own time-outs use signals and fail outside the main thread; ours does not."""
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(rule("$\\frac{2}{4}$", "0.5")["score"]))
    thread.start()
    thread.join()
    assert results == [1.0]


def test_an_answer_that_cannot_be_decided_in_time_is_wrong_and_marked() -> None:
    """10^10^10 is one C call that no signal ends; the next answer is scored by a fresh helper."""
    rule = MathRule(seconds=5.0, wrong_score=-0.5)
    try:
        result = rule("\\boxed{10^{10^{10}}}", "5")
        assert (result["score"], result["undecided"], result["pred"]) == (-0.5, 1.0, "10^{10^{10}}")
        assert rule("$\\frac{2}{4}$", "0.5")["score"] == 1.0
    finally:
        rule.close()


def test_equal_text_needs_no_helper() -> None:
    rule = MathRule()
    assert rule("\\boxed{ 3 }", "3")["score"] == 1.0
    assert rule._helper is None


def test_an_unreadable_ground_truth_is_an_error_with_the_row() -> None:
    sample = Sample(
        index=0, prompt_id=4, sample_id=1, prompt="", prompt_text="", response_text="\\boxed{3}", ground_truth="$$"
    )
    with (
        RewardPool(Reward(functions=[RewardFunction(path="builtin:math")])) as pool,
        pytest.raises(RewardError, match=r"data row 4, answer 1(.|\n)*cannot be read as mathematics"),
    ):
        pool.score([sample])


def test_equal_reads_predictions() -> None:
    assert equal("$0.50$", ["\\frac12"]) == {"score": 1.0, "pred": "0.50"}


@pytest.mark.parametrize(
    ("text", "content"),
    [("\\boxed{a} \\boxed{b{c}}d", "b{c}"), ("\\boxed{a", None), ("a", None), ("\\boxed{}", "")],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content
