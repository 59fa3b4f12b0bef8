"""Validation metrics: mean@N, best@n, worst@n and majority vote maj@n of every variable of every data source.

`best@n` of a prompt with N answers is the expected largest value of n draws with replacement from its N values,
computed exactly; verl estimates the same by 1000 bootstrap draws, which is here as `method="bootstrap"` to compare
with its runs. Numbers are means over the prompts of a data source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, lgamma, log, sqrt
from typing import Literal

import numpy as np

Method = Literal["exact", "bootstrap"]

# verl's, for the same draws
BOOTSTRAP_DRAWS = 1000
BOOTSTRAP_SEED = 42

CORE_PREFIXES = ("mean@", "maj@", "best@")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValAnswer:
    """One scored answer to a validation prompt.

    prompt_id: its row. values: numbers by variable, `reward` and what the reward function returned beside it (`acc`,
    ...).
    vote: the extracted answer that the majority vote counts; None votes for "no answer" where others have one.
    """

    data_source: str
    prompt_id: int
    values: Mapping[str, float] = field(default_factory=dict)
    vote: str | None = None


def validation_metrics(answers: Sequence[ValAnswer], *, method: Method = "exact") -> dict[str, float]:
    """`val-core/...` and `val-aux/...` by name, as verl names them.

    Per data source and variable: mean@N; with several answers per prompt also std@N, and for n = 2, 4, ... N
    best@n/mean, best@n/std, worst@n/mean, worst@n/std, and maj@n/mean, maj@n/std where answers have votes. Core are
    mean, best and maj of the largest n of the core variable (`acc` where the source has it, else `reward`); all others
    are aux.
    """
    out: dict[str, float] = {}
    for source in sorted({a.data_source for a in answers}):
        mine = [a for a in answers if a.data_source == source]
        variables = sorted({v for a in mine for v in a.values})
        core = "acc" if "acc" in variables else "reward"
        for variable in variables:
            found = _over_prompts([a for a in mine if variable in a.values], variable, method)
            largest = max(_subset_of(name) for name in found)
            for name, value in found.items():
                is_core = variable == core and name.startswith(CORE_PREFIXES) and _subset_of(name) == largest
                out[f"val-{'core' if is_core else 'aux'}/{source}/{variable}/{name}"] = value
    return out


def _subset_of(name: str) -> int:
    """n of best@n/mean."""
    return int(name.split("/")[0].split("@")[1])


def _over_prompts(answers: Sequence[ValAnswer], variable: str, method: Method) -> dict[str, float]:
    """Means over prompts of each metric of one variable; a metric that only some prompts have is their mean."""
    by_prompt: dict[int, list[ValAnswer]] = {}
    for answer in answers:
        by_prompt.setdefault(answer.prompt_id, []).append(answer)
    found: dict[str, list[float]] = {}
    for prompt in by_prompt.values():
        values = [float(a.values[variable]) for a in prompt]
        votes = [a.vote for a in prompt]
        for name, value in _of_prompt(values, votes, method).items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def _of_prompt(values: Sequence[float], votes: Sequence[str | None], method: Method) -> dict[str, float]:
    size = len(values)
    out = {f"mean@{size}": float(np.mean(values))}
    if size == 1:
        return out
    out[f"std@{size}"] = float(np.std(values))
    for n in subset_sizes(size):
        draws = best_worst(values, n) if method == "exact" else best_worst_bootstrap(values, n)
        for name, (mean, std) in draws.items():
            out |= {f"{name}@{n}/mean": mean, f"{name}@{n}/std": std}
        if any(v is not None for v in votes):
            labels = ["" if v is None else v for v in votes]
            mean, std = majority(labels, values, n) if method == "exact" else majority_bootstrap(labels, values, n)
            out |= {f"maj@{n}/mean": mean, f"maj@{n}/std": std}
    return out


def subset_sizes(size: int) -> list[int]:
    """2, 4, 8, ... below `size`, then `size`."""
    sizes, n = [], 2
    while n < size:
        sizes.append(n)
        n *= 2
    return [*sizes, size]


def best_worst(values: Sequence[float], n: int) -> dict[str, tuple[float, float]]:
    """Exact mean and std of the largest and the smallest of n draws with replacement.

    The largest of n draws is at most the i-th smallest of N values with probability (i / N)^n.
    """
    size = len(values)
    ascending = np.sort(np.asarray(values, dtype=np.float64))
    steps = np.diff((np.arange(size + 1) / size) ** n)
    return {"best": _moments(ascending, steps), "worst": _moments(ascending[::-1], steps)}


def best_worst_bootstrap(values: Sequence[float], n: int) -> dict[str, tuple[float, float]]:
    """The same from verl's 1000 draws."""
    drawn = np.asarray(values, dtype=np.float64)[_draws(len(values), n)]
    best, worst = drawn.max(axis=1), drawn.min(axis=1)
    return {"best": (float(best.mean()), float(best.std())), "worst": (float(worst.mean()), float(worst.std()))}


def majority(votes: Sequence[str], values: Sequence[float], n: int) -> tuple[float, float]:
    """Exact mean and std of the value of the majority vote among n draws with replacement; ties are drawn by lot.

    The value of a vote is that of a random answer that cast it.
    """
    counts = Counter(votes)
    wins = _win_probabilities(tuple(sorted(counts.values())), n)
    weights = np.array([wins[counts[v]] / counts[v] for v in votes])
    return _moments(np.asarray(values, dtype=np.float64), weights)


def majority_bootstrap(votes: Sequence[str], values: Sequence[float], n: int) -> tuple[float, float]:
    """The same from verl's 1000 draws, where a tie goes to the vote that was drawn first."""
    out = []
    for row in _draws(len(votes), n):
        winner = Counter(votes[i] for i in row).most_common(1)[0][0]
        out.append(next(values[i] for i in row if votes[i] == winner))
    return float(np.mean(out)), float(np.std(out))


def _moments(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Mean and std of `values` with probabilities `weights`."""
    mean = float((values * weights).sum())
    return mean, sqrt(max(float((np.square(values - mean) * weights).sum()), 0.0))


def _draws(size: int, n: int) -> np.ndarray:
    """verl's bootstrap indices [1000, n]."""
    return np.random.RandomState(BOOTSTRAP_SEED).choice(size, (BOOTSTRAP_DRAWS, n), replace=True)


@lru_cache(maxsize=4096)
def _win_probabilities(counts: tuple[int, ...], n: int) -> dict[int, float]:
    """By number of answers with a label: its probability to be the most frequent of n draws, ties shared equally.

    Draws are independent Poisson numbers per label, conditioned on their sum n. That a label is drawn k times, t
    others as often and the rest less often is a coefficient of a product of polynomials in x (draws) and y (ties); the
    share 1 / (t + 1) of a tie is the integral of y^t over 0..1, for which Gauss-Legendre nodes are exact.
    """
    size, kinds = sum(counts), Counter(counts)
    pmf = {c: _poisson(n * c / size, n) for c in kinds}
    wins = dict.fromkeys(kinds, 0.0)
    for k in range(1, n + 1):
        nodes, node_weights = np.polynomial.legendre.leggauss(n // k // 2 + 1)
        for y, weight in zip((nodes + 1) / 2, node_weights / 2):
            factors = {c: np.append(p[:k], y * p[k]) for c, p in pmf.items()}
            for c in kinds:
                rest = np.ones(1)
                for other, times in kinds.items():
                    rest = _times(rest, _power(factors[other], times - (other == c), n), n)
                if n - k < len(rest):
                    wins[c] += float(weight * pmf[c][k] * rest[n - k])
    whole = sum(wins[c] for c in counts)
    return {c: w / whole for c, w in wins.items()}


def _poisson(rate: float, n: int) -> np.ndarray:
    """Probabilities of 0..n events."""
    return np.array([exp(j * log(rate) - rate - lgamma(j + 1)) for j in range(n + 1)])


def _times(a: np.ndarray, b: np.ndarray, degree: int) -> np.ndarray:
    """Product of two polynomials up to x^degree."""
    return np.convolve(a, b)[: degree + 1]


def _power(base: np.ndarray, exponent: int, degree: int) -> np.ndarray:
    """base ** exponent up to x^degree."""
    out = np.ones(1)
    while exponent:
        if exponent & 1:
            out = _times(out, base, degree)
        base, exponent = _times(base, base, degree), exponent >> 1
    return out
