"""The built-in rules, answer by answer."""

from __future__ import annotations

import json
from contextlib import closing
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rlspeed.errors import ConfigError
from rlspeed.rewards.load import load_function
from rlspeed.rewards.numbers_in_text import accepted_answers, find_numbers, last_number
from rlspeed.rewards.rules import BUILTINS, exact_number, gsm8k, length_penalty, regex, tagged
from rlspeed.rewards.types import FunctionSpec


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("7", [7]),
        ("it is 7.0.", [7]),
        ("1,000 and 1,234,567.50", [1000, Fraction("1234567.5")]),
        ("1, 2,3", [1, 2, 3]),
        ("$5, -$5, $-5, \\$5", [5, -5, -5, 5]),
        ("\u20ac 5 and \u22123", [5, -3]),
        ("x = -3", [-3]),
        ("5-3 (4)-2", [5, 3, 4, 2]),
        ("- 5 apples", [5]),
        ("+5", [5]),
        (".5 and 0.5 and ...5", [Fraction(1, 2), Fraction(1, 2), 5]),
        ("1/2 3 / 4 5/0", [Fraction(1, 2), Fraction(3, 4)]),
        ("1e3 2E-2 2em", [1000, Fraction(1, 50), 2]),
        ("H2O step_3 x5", []),
        ("5km", [5]),
        ("\\boxed{1{,}000}", [1000]),
        ("1\\,000", [1000]),
        ("10:30", [10, 30]),
        ("50%", [50]),
        ("3.14.15", [Fraction("3.14")]),
        ("007", [7]),
        ("none", []),
        ("", []),
    ],
)
def test_numbers_in_text(text: str, values: list[Any]) -> None:
    assert [v for _, v in find_numbers(text)] == values
    last = last_number(text)
    assert (None if last is None else last[1]) == (values[-1] if values else None)


def test_monstrous_numbers_cost_nothing() -> None:
    """Exponents and digit strings that would fill the memory when taken exactly are no numbers."""
    assert find_numbers("1e999999999 " + "9" * 100_000 + " 1e400")[0][0] == "1e400"
    assert find_numbers("1," * 50_000 + "-" * 50_000) == [("1", 1)] * 50_000


@pytest.mark.parametrize(
    ("ground_truth", "answers"),
    [
        ("7", ["7"]),
        (7, ["7"]),
        (7.5, ["7.5"]),
        (np.int64(7), ["7"]),
        (["a", 2], ["a", "2"]),
        (np.array(["a", "b"]), ["a", "b"]),
        ('["12", "13"]', ["12", "13"]),
        ('"12"', ["12"]),
        ("[1, 2)", ["[1, 2)"]),
        ("[1, 2]", ["[1, 2]"]),
        ("[broken", ["[broken"]),
        (json.dumps([]), ["[]"]),
    ],
)
def test_accepted_answers(ground_truth: Any, answers: list[str]) -> None:
    """data-12: 7 is never read as 7.0; JSON lists of texts are alternatives, intervals stay intervals."""
    assert accepted_answers(ground_truth) == answers


@pytest.mark.parametrize("ground_truth", [None, [], {"answer": 1}])
def test_ground_truths_without_an_answer_are_errors(ground_truth: Any) -> None:
    with pytest.raises(ValueError, match="holds no answer"):
        accepted_answers(ground_truth)


@pytest.mark.parametrize(
    ("answer", "ground_truth", "score"),
    [
        ("so the total is $1,000.", 1000, 1.0),
        ("7.0", "7", 1.0),
        ("first 7, then 8", "7", 0.0),
        ("no number", "7", 0.0),
        ("0.1", 0.1, 1.0),
        ("0.1000000001", "0.1", 0.0),
        ("1/2", "0.5", 1.0),
        ("-3", "3", 0.0),
        ("72", "Natalia sold 48/2 = 24. #### 72", 1.0),
        ("13", '["12", "13"]', 1.0),
        ("13", [12, 13], 1.0),
    ],
)
def test_exact_number(answer: str, ground_truth: Any, score: float) -> None:
    assert exact_number()(answer, ground_truth)["score"] == score


def test_exact_number_reports_what_it_read_and_refuses_other_truths() -> None:
    rule = exact_number(score=2.0, wrong_score=-1.0)
    assert rule("it is 1,000", 1000) == {"score": 2.0, "acc": 1.0, "pred": "1,000"}
    assert rule("it is 3", 1000) == {"score": -1.0, "acc": 0.0, "pred": "3"}
    with pytest.raises(ValueError, match="ground truth 'blue' holds no number"):
        rule("7", "blue")


@pytest.mark.parametrize(
    ("answer", "kwargs", "score"),
    [
        ("so #### 72", {}, 1.0),
        ("so #### 1,072", {}, 0.0),
        ("so #### 7,2", {}, 1.0),
        ("#### 71 #### 72", {}, 1.0),
        ("#### 72 #### 71", {}, 0.0),
        ("####72", {}, 0.0),
        ("72", {}, 0.0),
        ("72", {"format_score": 0.1}, 0.0),
        ("#### 71", {"format_score": 0.1}, 0.1),
        ("#### 72", {"score": 3.0}, 3.0),
        ("#### 72" + " " * 400, {}, 0.0),
        ("it is 72", {"method": "flexible"}, 1.0),
        ("it is 72 .", {"method": "flexible"}, 1.0),
        ("it is 71", {"method": "flexible", "format_score": 0.1}, 0.1),
        ("nothing", {"method": "flexible", "format_score": 0.1}, 0.0),
    ],
)
def test_gsm8k_is_scored_as_verl_does(answer: str, kwargs: dict[str, Any], score: float) -> None:
    assert gsm8k(**kwargs)(answer, "72")["score"] == score


def test_gsm8k_takes_a_whole_solution_as_ground_truth() -> None:
    assert gsm8k()("#### 1,072", "18 * 4 = 72 ... #### 1,072")["score"] == 1.0
    assert gsm8k(method="flexible")("1,072", "1,072")["score"] == 1.0


@pytest.mark.parametrize(
    ("kwargs", "answer", "ground_truth", "score"),
    [
        ({"pattern": "yes"}, "oh yes", None, 1.0),
        ({"pattern": "yes"}, "oh YES", None, 0.0),
        ({"pattern": "yes", "flags": "i"}, "oh YES", None, 1.0),
        ({"pattern": r"answer: (\w+)", "group": 1}, "answer: a ... answer: b", "b", 1.0),
        ({"pattern": r"answer: (\w+)", "group": 1, "which": "first"}, "answer: a ... answer: b", "b", 0.0),
        ({"pattern": r"<a>(?P<x>.*?)</a>", "group": "x", "flags": "s"}, "<a>\n b \n</a>", "b", 1.0),
        ({"pattern": r"(x)|(y)", "group": 2}, "x", "x", 0.0),
        ({"pattern": "yes", "score": 0.5, "wrong_score": -0.5}, "no", None, -0.5),
    ],
)
def test_regex(kwargs: dict[str, Any], answer: str, ground_truth: Any, score: float) -> None:
    assert regex(**kwargs)(answer, ground_truth)["score"] == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("  <think>a\nb</think>\n<answer>b</answer>\n", 1.0),
        ("<think>a</think> and <answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b</answer> more", 0.0),
        ("<think>a</think><answer>b</answer><answer>b</answer>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("", 0.0),
    ],
)
def test_format(answer: str, score: float) -> None:
    assert tagged()(answer)["score"] == score


def test_length_penalty_falls_in_a_straight_line() -> None:
    rule = length_penalty(start=2, limit=6, factor=2.0)
    assert rule(completions=[""] * 5, completion_ids=[[0] * n for n in (1, 2, 4, 6, 60)]) == [
        0.0,
        0.0,
        -1.0,
        -2.0,
        -2.0,
    ]


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("exact_number", {"scroe": 1}, "did you mean score?"),
        ("regex", {}, "kwargs.pattern: missing"),
        ("regex", {"pattern": "("}, "unterminated"),
        ("regex", {"pattern": "x", "group": 1}, "no such group"),
        ("regex", {"pattern": "x", "flags": "q"}, "flags 'q'"),
        ("regex", {"pattern": "x", "which": "all"}, "which 'all'"),
        ("regex", {"pattern": 5}, "kwargs"),
        ("gsm8k", {"method": "loose"}, "allowed: strict, flexible"),
        ("length", {"start": 5, "limit": 5}, "start < limit"),
        ("format", {"tags": []}, "different names"),
        ("math", {"seconds": 0}, "more than 0"),
    ],
)
def test_wrong_arguments_of_rules_are_configuration_errors(name: str, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_function(FunctionSpec(path=f"builtin:{name}", name=name, kwargs=kwargs))
    assert words in str(caught.value), str(caught.value)


def test_data_source_picks_the_rule_and_names_an_unknown_one() -> None:
    with closing(BUILTINS["data_source"]()) as rule:
        assert rule("openai/gsm8k", "so\n#### 72", "72")["score"] == 1.0
        assert rule("lighteval/MATH", "thus \\boxed{3}", "3")["score"] == 1.0
        with pytest.raises(ValueError, match="no built-in rule for data_source 'poems'"):
            rule("poems", "a rose", "is a rose")


def test_every_rule_is_described_in_the_documentation() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[3] / "docs" / "how-to" / "rewards.md").read_text()
    assert [name for name in BUILTINS if f"builtin:{name}`" not in text] == []
