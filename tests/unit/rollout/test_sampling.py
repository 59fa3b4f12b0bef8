"""Filters and random numbers of the sampler."""

from __future__ import annotations

import pytest
import torch

from rlspeed.rollout.sampling import draw, filtered, uniforms
from rlspeed.rollout.types import SamplingParams

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.81}, [0, 1, 2]),
        ({"min_p": 0.4}, [0, 1]),
        ({"min_p": 1.0}, [0]),
        ({"min_p": 0.2, "top_p": 0.6}, [0, 1]),
    ],
)
def test_filters(params: dict[str, float], kept: list[int]) -> None:
    out = filtered(LOGITS, SamplingParams(max_new_tokens=1, **params))
    assert out[0].isfinite().nonzero()[:, 0].tolist() == kept


def test_inverse_cdf_hits_each_token_in_its_share() -> None:
    u = torch.tensor([0.0, 0.4999, 0.5001, 0.7999, 0.8001, 0.9499, 0.9501, 1.0 - 1e-12])
    tokens, logprobs = draw(LOGITS.expand(8, 4), SamplingParams(max_new_tokens=1), u.double())
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    torch.testing.assert_close(logprobs, LOGITS[0, tokens])


def test_zero_probability_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, -torch.inf]])
    for u in (0.0, 0.5, 1.0 - 2**-53):
        assert draw(logits, SamplingParams(max_new_tokens=1), torch.tensor([u]).double())[0].item() == 1


def test_logprobs_are_at_the_temperature_and_before_filters() -> None:
    sampling = SamplingParams(max_new_tokens=1, temperature=2.0, top_k=1)
    tokens, logprobs = draw(LOGITS, sampling, torch.tensor([0.9]).double())
    assert tokens.item() == 0
    torch.testing.assert_close(logprobs, (LOGITS / 2).log_softmax(-1)[:, 0])


def test_uniforms_are_uniform_and_stateless() -> None:
    seeds = torch.arange(2000).repeat_interleave(50)
    places = torch.arange(50).repeat(2000)
    u = uniforms(seeds, places)
    assert torch.equal(u[777:778], uniforms(seeds[777:778], places[777:778]))
    assert float(u.min()) >= 0.0
    assert float(u.max()) < 1.0
    assert u.unique().numel() == u.numel()
    # 100,000 numbers in 100 cells of 1,000: standard deviation 31
    assert (torch.histc(u.float(), 100, 0, 1) - 1000).abs().max() < 160
    rows = u.view(2000, 50)
    assert abs(float(torch.corrcoef(rows[:, :2].T)[0, 1])) < 0.08, "neighbouring positions are independent"
