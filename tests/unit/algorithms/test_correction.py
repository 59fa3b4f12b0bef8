from __future__ import annotations

import math

import pytest
import torch

from rlspeed.algorithms import correction
from rlspeed.errors import ConfigError


def test_token_tis_reference(case, stream):
    c = case("rollout_correction/token_tis")
    s = stream(c.input["mask"])
    ratio = s.flat(c.input["log_ratio"])
    got = correction.importance_weights(
        "token_tis", ratio, torch.zeros_like(ratio), s.ids, s.num, threshold=c.input["threshold"], lower=0.0
    )
    c.close(s.padded(got), "weights")


def test_icepop_reference(case, stream):
    c = case("rollout_correction/icepop")
    s = stream(c.input["mask"])
    ratio = s.flat(c.input["log_ratio"])
    band = {"threshold": c.input["upper"], "lower": c.input["lower"]}
    got = correction.importance_weights("token_mask", ratio, torch.zeros_like(ratio), s.ids, s.num, **band)
    c.close(s.padded(got), "weights")


def test_sequence_weights_are_those_of_the_whole_answer():
    """Products 1.2 * 1.5 = 1.8 (kept), 2 * 2 = 4 (cut to 2, or masked), one token of 0.4 (kept, or masked)."""
    trainer = torch.tensor([1.2, 1.5, 2.0, 2.0, 0.4]).log().requires_grad_()
    ids = torch.tensor([0, 0, 2, 2, 3])
    args = (trainer, torch.zeros(5), ids, 4)
    tis = correction.importance_weights("sequence_tis", *args, threshold=2.0, lower=0.5)
    torch.testing.assert_close(tis, torch.tensor([1.8, 1.8, 2.0, 2.0, 0.4]))
    masked = correction.importance_weights("sequence_mask", *args, threshold=2.0, lower=0.5)
    torch.testing.assert_close(masked, torch.tensor([1.8, 1.8, 0.0, 0.0, 0.0]))
    assert not tis.requires_grad
    assert correction.importance_weights("none", *args, threshold=2.0, lower=0.5).tolist() == [1.0] * 5


def test_long_sequences_do_not_overflow():
    ids = torch.zeros(4000, dtype=torch.int64)
    for sign in (1.0, -1.0):
        got = correction.importance_weights(
            "sequence_tis", sign * torch.ones(4000), torch.zeros(4000), ids, 1, threshold=2.0, lower=0.5
        )
        assert bool(torch.isfinite(got).all())


def test_mismatch_counts():
    """Differences 0, 0.1, -0.02 of log-probs: mean 0.04, maximum 0.1, one of three ratios outside of 1/1.05..1.05."""
    trainer, rollout = torch.tensor([-1.0, -1.9, -3.02]), torch.tensor([-1.0, -2.0, -3.0])
    got = correction.mismatch(trainer, rollout)
    assert float(got.abs_sum) / got.tokens == pytest.approx(0.04, abs=1e-6)
    assert float(got.abs_max) == pytest.approx(0.1, abs=1e-6)
    assert float(got.outside) == 1.0
    want = sum(math.exp(d) - 1 - d for d in (0.1, -0.02))
    assert float(got.k3_sum) == pytest.approx(want, abs=1e-6)


def test_mismatch_of_an_empty_stream():
    got = correction.mismatch(torch.zeros(0), torch.zeros(0))
    assert (got.tokens, float(got.abs_sum), float(got.abs_max), float(got.outside)) == (0, 0.0, 0.0, 0.0)


def test_unusable_settings_are_refused():
    args = (torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.int64), 1)
    with pytest.raises(ConfigError, match="token_tis"):
        correction.importance_weights("tis", *args, threshold=2.0, lower=0.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="correction_lower"):
        correction.importance_weights("token_mask", *args, threshold=0.4, lower=0.5)
