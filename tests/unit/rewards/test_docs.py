"""The functions and configurations shown in docs/how-to/rewards.md work."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rlspeed.config.schema import Reward
from rlspeed.rewards.pool import RewardPool
from rlspeed.rewards.types import Sample

TEXT = (Path(__file__).parents[3] / "docs" / "how-to" / "rewards.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_shown_functions_score(make_pool: Callable[..., RewardPool], make_sample: Callable[..., Sample]) -> None:
    pool = make_pool("\n".join(blocks("python")), "compute_score", "brevity", "reward_func")
    (score,) = pool.score([make_sample(0, response_text=" 7 ", ground_truth="7", response_ids=(1, 2, 3))])
    assert score.parts == pytest.approx({"compute_score": 1.0, "brevity": -0.003, "reward_func": 1.0})
    assert score.extra == {"acc": True, "pred": "7", "scores": 1.0, "length": 6}
    assert pool.take_metrics() == {"longest": 3.0}


def test_the_shown_configurations_are_valid() -> None:
    configurations = [Reward(**yaml.safe_load(block)["reward"]) for block in blocks("yaml")]
    assert [len(c.functions) for c in configurations] == [2, 0]
    assert configurations[1].model.path is not None
