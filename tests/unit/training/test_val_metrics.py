from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rlspeed.training import val_metrics
from rlspeed.training.declared import declaration
from rlspeed.training.val_metrics import ValAnswer, validation_metrics

CASES = Path(__file__).parents[2] / "conformance" / "cases.json"


def test_best_at_n_reference():
    """Exact 0.75; verl's draws say 0.738 and 0.278 for the same four answers."""
    case = next(c for c in json.loads(CASES.read_text())["cases"] if c["id"] == "metrics/best_at_n")
    values, n, want = case["input"]["values"], case["input"]["n"], case["expected"]
    exact = val_metrics.best_worst(values, n)
    drawn = val_metrics.best_worst_bootstrap(values, n)
    assert exact["best"][0] == pytest.approx(want["exact_best_mean"], abs=case["abs_tol"])
    assert exact["worst"][0] == pytest.approx(1 - want["exact_best_mean"], abs=case["abs_tol"])
    assert drawn["best"] == pytest.approx((want["best_mean"], want["best_std"]), abs=case["abs_tol"])
    assert drawn["worst"][0] == pytest.approx(want["worst_mean"], abs=case["abs_tol"])


def every_draw(size: int, n: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(size), repeat=n))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_best_and_worst_equal_all_draws(n):
    values = [0.3, -1.0, 0.3, 2.0]
    drawn = np.array(values)[every_draw(4, n)]
    got = val_metrics.best_worst(values, n)
    assert got["best"] == pytest.approx((drawn.max(1).mean(), drawn.max(1).std()))
    assert got["worst"] == pytest.approx((drawn.min(1).mean(), drawn.min(1).std()))


@pytest.mark.parametrize("votes", ["aabbc", "aaaaa", "abcde", "aabb", "aaab"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_majority_equals_all_draws(votes, n):
    """Ties are shared: each winner counts with 1 / number of winners, with the mean value of its answers."""
    values = [0.1 * i * i for i in range(len(votes))]
    by_vote = {v: [x for w, x in zip(votes, values) if w == v] for v in set(votes)}
    first = second = 0.0
    draws = every_draw(len(votes), n)
    for draw in draws:
        counts = Counter(votes[i] for i in draw)
        winners = [v for v, c in counts.items() if c == max(counts.values())]
        first += sum(np.mean(by_vote[v]) for v in winners) / len(winners) / len(draws)
        second += sum(np.mean(np.square(by_vote[v])) for v in winners) / len(winners) / len(draws)
    mean, std = val_metrics.majority(list(votes), values, n)
    assert mean == pytest.approx(first)
    assert std == pytest.approx(np.sqrt(max(second - first**2, 0.0)), abs=1e-6)


def test_majority_of_many_answers_is_a_probability():
    """64 answers, 64 draws: no overflow, and near what the draws say."""
    votes = ["a"] * 30 + ["b"] * 25 + [f"c{i}" for i in range(9)]
    values = [float(v == "a") for v in votes]
    mean, _ = val_metrics.majority(votes, values, 64)
    drawn, _ = val_metrics.majority_bootstrap(votes, values, 64)
    assert mean == pytest.approx(drawn, abs=0.05)
    assert val_metrics.majority(votes, [1.0] * 64, 64) == pytest.approx((1.0, 0.0), abs=1e-6)


def answers_of(source: str, rows: dict[int, list[tuple[float, str | None]]], variable: str) -> list[ValAnswer]:
    return [
        ValAnswer(data_source=source, prompt_id=p, values={variable: x, "reward": x - 1}, vote=v)
        for p, row in rows.items()
        for x, v in row
    ]


def test_names_and_means_over_prompts():
    math = answers_of("openai/gsm8k", {0: [(1.0, "7"), (0.0, "8")], 1: [(0.0, "1"), (0.0, "1")]}, "acc")
    plain = [ValAnswer(data_source="poems", prompt_id=2, values={"reward": 0.5})]
    out = validation_metrics(math + plain)
    assert out["val-core/openai/gsm8k/acc/mean@2"] == 0.25
    assert out["val-core/openai/gsm8k/acc/best@2/mean"] == pytest.approx(0.375)
    assert out["val-core/openai/gsm8k/acc/maj@2/mean"] == pytest.approx(0.25)
    assert out["val-aux/openai/gsm8k/acc/std@2"] == 0.25
    assert out["val-aux/openai/gsm8k/reward/mean@2"] == -0.75
    assert {k: v for k, v in out.items() if "poems" in k} == {"val-core/poems/reward/mean@1": 0.5}
    for name in out:
        assert declaration(name).name.startswith(name.split("/")[0])


def test_only_the_largest_n_is_core_and_no_answer_is_a_vote():
    votes = ["1", None, None, "2"]
    rows = {0: [(float(v == "1"), v) for v in votes]}
    out = validation_metrics(answers_of("m", rows, "acc"))
    assert "val-aux/m/acc/best@2/mean" in out
    assert "val-core/m/acc/best@4/mean" in out
    assert "val-core/m/acc/maj@4/std" in out
    assert "val-aux/m/acc/worst@4/mean" in out
    assert out["val-core/m/acc/maj@4/mean"] < 0.25
    silent = {0: [(1.0, None), (0.0, None)]}
    assert not any("maj@" in k for k in validation_metrics(answers_of("m", silent, "acc")))


def test_bootstrap_on_request():
    rows = {0: [(1.0, "1"), (0.0, "2"), (0.0, "2"), (1.0, "1")]}
    out = validation_metrics(answers_of("m", rows, "acc"), method="bootstrap")
    assert out["val-aux/m/acc/best@2/mean"] == 0.738
    assert 0.4 < out["val-core/m/acc/maj@4/mean"] < 0.6


def test_no_answers():
    assert validation_metrics([]) == {}
