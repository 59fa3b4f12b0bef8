"""Whatever a function returns, the pool gives finite numbers or a RewardError, and goes on with the next batch."""

from __future__ import annotations

import json
import math
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlspeed.config.schema import Reward, RewardFunction
from rlspeed.errors import RewardError
from rlspeed.rewards.pool import RewardPool
from rlspeed.rewards.types import Sample
from rlspeed.rewards.values import loggable, plain

MODULE = "rewards_of_the_fuzz_test"


class Liar(list[Any]):
    """Claims three entries, whatever it holds."""

    def __len__(self) -> int:
        return 3


class Endless(list[Any]):
    """Claims three entries and gives for ever."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield 1.0


class NoFloat(float):
    """A float that cannot be converted."""

    def __float__(self) -> float:
        raise RuntimeError("no float")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class BadKeys(dict[Any, Any]):
    """A dictionary that breaks when it is asked."""

    def __contains__(self, key: object) -> bool:
        raise ZeroDivisionError


class BadShape:
    """Looks like an array and is none."""

    @property
    def shape(self) -> tuple[int, ...]:
        raise OSError("no shape")


class OwnList:
    """Its `tolist` and `item` give itself."""

    shape = (3,)

    def tolist(self) -> Any:
        return self

    item = tolist


class OwnItem(OwnList):
    shape = ()  # type: ignore[assignment]


CYCLE: list[Any] = [1.0, 2.0]
CYCLE.append(CYCLE)
HOSTILE: list[Any] = [NoFloat(1.0), BadShape(), OwnList(), OwnItem(), object(), int, math.sqrt, CYCLE, Ellipsis]
HOSTILE += [Liar([1.0]), Liar([1.0, 2.0, 3.0]), Liar(range(9)), Endless(), BadKeys(), BadKeys(score=1)]

atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.fractions(),
    st.decimals(),
    st.sampled_from(
        [np.float32(1), np.float64("nan"), np.int8(3), np.bool_(True), np.datetime64("2020"), np.str_("1")]
    ),
    st.sampled_from([np.ones(3), np.ones((3, 1)), np.array(1.0), np.array(["a", "b", "c"]), np.array([None] * 3)]),
    st.integers(0, len(HOSTILE) - 1).map(lambda i: HOSTILE[i]),
)
values = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, min_size=3, max_size=3),
        st.lists(inner, min_size=3, max_size=3).map(tuple),
        st.dictionaries(
            st.one_of(st.sampled_from(["score", "rewards", "scores", "extra_logs", "acc"]), st.integers(), st.none()),
            inner,
            max_size=4,
        ),
        st.dictionaries(st.just("score"), inner, min_size=1),
        st.dictionaries(st.just("rewards"), inner, min_size=1),
    ),
    max_leaves=8,
)

FUNCTIONS = {
    "verl": "def f(solution_str): return RESULT[0]",
    "verl_batch": "def f(solution_strs): return RESULT[0]",
    "trl": "def f(completions): return RESULT[0]",
    "openrlhf": "def f(queries, prompts, labels): return RESULT[0]",
    "async": "async def f(completions): return RESULT[0]",
}


@pytest.fixture(scope="module", params=FUNCTIONS)
def pools(request: pytest.FixtureRequest) -> Iterator[tuple[list[Any], RewardPool, RewardPool]]:
    """A stopping and a masking pool over one function that returns what RESULT holds."""
    module: Any = ModuleType(MODULE)
    exec(f"RESULT = [None]\n{FUNCTIONS[request.param]}", module.__dict__)
    sys.modules[MODULE] = module
    functions = [RewardFunction(path=f"{MODULE}:f")]
    with (
        RewardPool(Reward(functions=functions, timeout_seconds=10)) as stop,
        RewardPool(Reward(functions=functions, timeout_seconds=10, on_failure="mask", max_failed_share=1)) as mask,
    ):
        yield module.RESULT, stop, mask
    del sys.modules[MODULE]


SAMPLES = [
    Sample(index=i, prompt_id=i, sample_id=0, prompt="q", prompt_text="q", response_text="a", ground_truth="1")
    for i in range(3)
]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(value=values)
def test_any_return_value_is_a_number_or_a_reward_error(
    pools: tuple[list[Any], RewardPool, RewardPool], value: Any
) -> None:
    """Both policies agree on what is good; scores can be sent to another process and written as JSON."""
    result, stop, mask = pools
    result[0] = value
    try:
        stopped, message = stop.score(SAMPLES), ""
    except RewardError as error:
        stopped, message = None, str(error)
    assert stopped is not None or "reward function 'f'" in message or "no reward function applies" in message
    masked = mask.score(SAMPLES)
    assert len(masked) == len(SAMPLES)
    for score in masked:
        assert (score.total is None) == (score.failed is not None)
        assert score.total is None or (type(score.total) is float and math.isfinite(score.total))
    assert (stopped is None) == any(s.failed is not None for s in masked)
    if stopped is not None:
        assert stopped == masked
    json.dumps([s.extra for s in masked], allow_nan=False)
    pickle.dumps(masked)


@settings(max_examples=200, deadline=None)
@given(value=values)
def test_loggable_values_are_json_and_picklable(value: Any) -> None:
    json.dumps(loggable(value), allow_nan=False)
    pickle.dumps(loggable(value))


data_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner), st.lists(inner).map(tuple)),
    max_leaves=10,
)


def containers(value: Any) -> list[int]:
    """Identities of all lists and dictionaries inside."""
    if isinstance(value, dict):
        return [id(value)] + [i for v in value.values() for i in containers(v)]
    if isinstance(value, (list, tuple)):
        own = [id(value)] if isinstance(value, list) else []
        return own + [i for v in value for i in containers(v)]
    return []


@settings(max_examples=200, deadline=None)
@given(value=data_values)
def test_plain_copies_are_equal_and_share_nothing(value: Any) -> None:
    copied = plain(value)
    assert copied == value
    assert not set(containers(copied)) & set(containers(value))
