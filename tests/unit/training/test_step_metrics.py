from __future__ import annotations

import pytest

from rlspeed.rewards.types import Score
from rlspeed.training.collect import Collected
from rlspeed.training.metrics import StepMetrics
from rlspeed.training.step_metrics import record_parts


def test_each_reward_function_is_averaged_over_the_answers_it_scored():
    """A function that does not apply to an answer (or failed on it) is not a 0 in its mean."""
    metrics = StepMetrics()
    scores = [
        Score(total=1.5, parts={"exact_number": 1.0, "style": 0.5}),
        Score(total=0.0, parts={"exact_number": 0.0}),
        Score(total=None, failed="style raised"),
    ]
    places = {(number, 0): score for number, score in enumerate(scores)}
    record_parts(metrics, Collected(rollouts={}, rows={}, scores=places))
    out = metrics.reduce(lambda value: [value])
    assert out == {"reward/exact_number/mean": pytest.approx(0.5), "reward/style/mean": pytest.approx(0.5)}
