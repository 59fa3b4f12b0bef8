from __future__ import annotations

import pytest

from rlspeed.rewards.types import Score
from rlspeed.training.metrics import StepMetrics
from rlspeed.training.step_metrics import record_parts


def test_each_reward_function_is_averaged_over_the_answers_it_scored():
    """A function that does not apply to an answer (or failed on it) is not a 0 in its mean."""
    metrics = StepMetrics()
    record_parts(
        metrics,
        [
            Score(total=1.5, parts={"exact_number": 1.0, "style": 0.5}),
            Score(total=0.0, parts={"exact_number": 0.0}),
            Score(total=None, failed="style raised"),
        ],
    )
    out = metrics.reduce(lambda value: [value])
    assert out == {"reward/exact_number/mean": pytest.approx(0.5), "reward/style/mean": pytest.approx(0.5)}
