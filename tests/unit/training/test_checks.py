"""The laws before the first step: a model that lets sequences touch does not pass, and is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlspeed.engine.packed import PackedBatch
from rlspeed.errors import RunError
from rlspeed.training.checks import check_gap, check_layout, check_shared

PRECISION: Any = SimpleNamespace(compute=torch.bfloat16)
WORLD: Any = SimpleNamespace(device=torch.device("cpu"))
SEQUENCES = [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13], [14, 15, 16, 17]]


class Conv(nn.Module):
    """Log-probs that depend on this token and a little on the three before it: a convolution of four taps."""

    def __init__(self, *, stops_at_boundaries: bool, share: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.randn(64).abs()
        self.stops, self.share = stops_at_boundaries, share

    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        x = self.table[batch.input_ids]
        lengths = torch.tensor(batch.lengths)
        ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        out = -x
        for tap in (1, 2, 3):
            shifted = torch.cat([torch.zeros(tap), x[:-tap]])
            if self.stops:
                shifted = torch.where(ids == torch.cat([torch.full((tap,), -1), ids[:-tap]]), shifted, 0.0)
            out = out - self.share * shifted
        return out[batch.response_index()]


def check(model: Conv) -> float:
    actor: Any = model
    return check_layout(actor, SEQUENCES, PRECISION, WORLD, "org/hybrid-7b")


@pytest.mark.parametrize(
    ("share", "words"),
    [
        pytest.param(1.0, "differ from one by one", id="as strong as the token itself"),
        pytest.param(1e-3, "moved another's log-probs", id="below the rounding of 16 bits on average"),
    ],
)
def test_a_convolution_over_boundaries_stops_the_run(share: float, words: str) -> None:
    """pack-03, pack-10: the first three tokens after a boundary give it away; the model is named, no warning."""
    with pytest.raises(RunError, match=words) as caught:
        check(Conv(stops_at_boundaries=False, share=share))
    assert "org/hybrid-7b" in str(caught.value)
    assert caught.value.exit_code == 1


def test_one_that_stops_at_boundaries_passes() -> None:
    assert check(Conv(stops_at_boundaries=True, share=1.0)) == 0.0


def test_a_generator_with_other_weights_stops_the_run_at_that_step() -> None:
    """sync-17, sync-12: after every sync, the first and the second too; the step and the phase are named."""
    metric = "rollout_corr/logprob_diff_mean"
    check_gap({metric: 0.049}, 3, 0.05)
    check_gap({}, 3, 0.05)  # the critic's warm-up measures nothing
    for gap in (0.051, 0.49, float("nan")):
        with pytest.raises(RunError, match="step 3, phase gen") as caught:
            check_gap({metric: gap}, 3, 0.05)
        assert "update_weights of step 2" in str(caught.value)
        assert "at most 0.05 (rollout.parity_tolerance)" in str(caught.value)


def test_answers_that_do_not_see_their_prompt_stop_the_run() -> None:
    """A model that looks one token back: right where it goes by `source_index`, wrong where by the row."""

    def model(*, by_row: bool) -> Any:
        def logprobs(batch: PackedBatch) -> torch.Tensor:
            before = batch.response_index() - 1 if by_row else batch.source_index()
            return -batch.input_ids[before].float()

        return SimpleNamespace(logprobs=logprobs)

    assert check_shared(model(by_row=False), SEQUENCES, PRECISION, WORLD, "org/m") == 0.0
    with pytest.raises(RunError, match="share a prompt differ from plain packs"):
        check_shared(model(by_row=True), SEQUENCES, PRECISION, WORLD, "org/m")
