"""Finding numbers in what people and models write: 1,000 and $5 and 7.0 and -3 and 1/2."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\.)\.\d+"
_NUMBER = re.compile(
    r"(?<!\w)(?<!\d\.)"  # no part of a word, a name or a longer number
    r"(?P<sign>(?<![)\]}])[-+\u2212])?"
    r"(?:\\?[$\u20ac\u00a3]\s?(?P<inner>[-\u2212])?)?"
    rf"(?P<value>{_DIGITS})"
    r"(?:[eE](?P<exponent>[-+]?\d+)(?![\dA-Za-z]))?"
    r"(?:\s?/\s?(?P<denominator>\d+)(?![\d/]))?",
    re.ASCII,
)
_MAX_DIGITS = 400
_MAX_EXPONENT_DIGITS = 4  # with the sign


def find_numbers(text: str) -> list[tuple[str, Fraction]]:
    """All numbers in reading order, each as (the text, its exact value).

    Thousands commas (also LaTeX's), currency signs, a sign, decimals, an exponent, and a simple fraction a/b belong
    to a number; digits inside a word (H2O) do not make one.
    """
    found = ((m.group().strip(), _value(m)) for m in _matches(text))
    return [(shown, value) for shown, value in found if value is not None]


def last_number(text: str) -> tuple[str, Fraction] | None:
    """The last number in the text, or None."""
    for match in reversed(_matches(text)):
        value = _value(match)
        if value is not None:
            return match.group().strip(), value
    return None


def accepted_answers(ground_truth: Any) -> list[str]:
    """The right answers of a row: a plain value, or a list of equally right ones; texts and lists of texts also as
    JSON.

    "[1, 2]" stays as it is: it may be an interval or a vector. '["1", "2"]' is two right answers.

    Raises:
        ValueError: a ground truth that holds no answer.
    """
    value = ground_truth
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str) and value.lstrip().startswith(("[", '"')):
        value = _json_texts(value)
    if isinstance(value, Mapping) or value is None:
        raise ValueError(f"ground truth {ground_truth!r} holds no answer; expected a number, a text or a list of them")
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [str(value)]
    if not value:
        raise ValueError(f"ground truth {ground_truth!r} holds no answer; expected at least one")
    return [str(v) for v in value]


def _json_texts(text: str) -> Any:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text
    texts = isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(v, str) for v in value))
    return value if texts else text


def exact_value(answer: str) -> Fraction:
    """The one number that a ground truth holds (its last, when it is a whole solution as GSM8K's "... #### 72").

    Raises:
        ValueError: there is none.
    """
    number = last_number(answer)
    if number is None:
        raise ValueError(f"ground truth {answer!r} holds no number")
    return number[1]


def _matches(text: str) -> list[re.Match[str]]:
    return list(_NUMBER.finditer(text.replace("{,}", ",").replace("\\,", "").replace("\\!", "")))


def _value(match: re.Match[str]) -> Fraction | None:
    digits = match["value"].replace(",", "")
    denominator = match["denominator"] or "1"
    exponent = match["exponent"] or "0"
    if (
        max(len(digits), len(denominator)) > _MAX_DIGITS
        or len(exponent) > _MAX_EXPONENT_DIGITS
        or int(denominator) == 0
    ):
        return None
    negative = (match["sign"] or match["inner"] or "+") in "-\u2212"
    value = Fraction(digits) * Fraction(10) ** int(exponent) / int(denominator)
    return -value if negative else value
