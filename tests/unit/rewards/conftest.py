"""Samples, configurations and user files for the tests of rewards."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlspeed.config.schema import Reward, RewardFunction
from rlspeed.rewards.pool import RewardPool
from rlspeed.rewards.types import Sample


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    def make(index: int = 0, **values: Any) -> Sample:
        fields: dict[str, Any] = {
            "index": index,
            "prompt_id": 10 + index,
            "sample_id": index % 2,
            "prompt": f"question {index}",
            "prompt_text": f"Q{index}:",
            "response_text": f"answer {index}",
            "response_ids": (5, 6, 2),
            "data_source": "unit",
            "ground_truth": str(index),
            "extra_info": {"index": index},
            "columns": {"level": index},
        }
        return Sample(**(fields | values))

    return make


@pytest.fixture
def make_samples(make_sample: Callable[..., Sample]) -> Callable[[int], list[Sample]]:
    return lambda count: [make_sample(i) for i in range(count)]


@pytest.fixture
def user_file(tmp_path: Path) -> Callable[..., str]:
    """Write a user's file; returns its path."""

    def write(code: str, name: str = "user_rewards.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(code))
        return str(path)

    return write


@pytest.fixture
def make_pool(user_file: Callable[..., str]) -> Iterator[Callable[..., RewardPool]]:
    """A pool over functions of one user file; closed at the end of the test."""
    pools: list[RewardPool] = []

    def make(code: str, *functions: str | dict[str, Any], max_steps: int | None = None, **reward: Any) -> RewardPool:
        path = user_file(code)
        configured = []
        for function in functions or ("f",):
            entry = {"path": function} if isinstance(function, str) else dict(function)
            if ":" not in entry["path"]:
                entry["path"] = f"{path}:{entry['path']}"
            configured.append(RewardFunction(**entry))
        pools.append(RewardPool(Reward(functions=configured, **reward), max_steps=max_steps))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
