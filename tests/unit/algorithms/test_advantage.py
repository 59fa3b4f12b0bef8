from __future__ import annotations

import math

import pytest
import torch

from rlspeed.algorithms import advantage, segments
from rlspeed.errors import LayoutError


def test_gae_reference(case, stream):
    c = case("gae/right_padding_gamma1.0_lam1.0")
    s = stream(c.input["mask"])
    raw, returns = advantage.gae(
        s.flat(c.input["rewards"]),
        s.flat(c.input["values"]),
        s.ids,
        s.num,
        gamma=c.input["gamma"],
        lam=c.input["lam"],
    )
    c.close(s.padded(raw), "advantages_raw")
    c.close(s.padded(returns), "returns")
    c.close(s.padded(segments.whiten(raw)), "advantages_whitened")


@pytest.mark.parametrize("seed", range(4))
def test_gae_equals_the_textbook_loop(seed):
    """Holes in the mask are passed over and sequences do not see each other, as in a loop over each padded row."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(5, 12, generator=generator) < 0.7
    mask[2] = False
    rewards, values = torch.randn(2, 5, 12, generator=generator)
    gamma, lam = 0.97, 0.9
    want = torch.zeros(5, 12, dtype=torch.float64)
    for row in range(5):
        next_value = next_advantage = 0.0
        for t in reversed(range(12)):
            if mask[row, t]:
                v = float(values[row, t])
                delta = float(rewards[row, t]) + gamma * next_value - v
                next_value, next_advantage = v, delta + gamma * lam * next_advantage
                want[row, t] = next_advantage
    got, returns = advantage.gae(rewards[mask], values[mask], mask.nonzero()[:, 0], 5, gamma=gamma, lam=lam)
    torch.testing.assert_close(got, want[mask].float(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(returns, got + values[mask])


def test_grpo_reference(case, groups):
    """The reference hands a lone answer its raw reward (5.0); training uses 0 (num-11)."""
    c = case("adv/grpo")
    rewards, (ids, num) = torch.tensor(c.input["scores"]), groups(c.input["group"])
    c.close(advantage.group_relative(rewards, ids, num, singleton="raw"), "grpo")
    c.close(advantage.group_relative(rewards, ids, num, divide_by_std=False, singleton="raw"), "dr_grpo")
    c.close_to(advantage.group_relative(rewards, ids, num), [*c.expected["grpo"][:-1], 0.0])
    c.close_to(advantage.group_centred(rewards, ids, num), [*c.expected["dr_grpo"][:-1], 0.0])


def test_rloo_reference(case, groups):
    c = case("adv/rloo")
    rewards, (ids, num) = torch.tensor(c.input["scores"]), groups(c.input["group"])
    c.close(advantage.rloo(rewards, ids, num, singleton="raw"), "rloo")
    c.close(advantage.rloo(rewards, ids, num), "rloo_vectorized")


def test_reinforce_pp_reference(case, stream):
    c = case("adv/reinforce_pp")
    s = stream(c.input["mask"])
    returns = advantage.discounted_returns(s.flat(c.input["rewards"]), s.ids, s.num, gamma=c.input["gamma"])
    c.close(s.padded(returns), "returns")
    c.close(s.padded(segments.whiten(returns)), "advantages")


def test_reinforce_pp_baseline_reference(case, stream, groups):
    c = case("adv/reinforce_pp_baseline")
    s = stream(c.input["mask"])
    ids, num = groups(c.input["group"])
    centred = advantage.group_centred(torch.tensor(c.input["scores"]), ids, num)
    c.close(s.padded(segments.whiten(centred[s.ids])), "advantages")


def test_remax_reference(case, stream):
    c = case("adv/remax")
    s = stream(c.input["mask"])
    out, returns = advantage.remax(s.flat(c.input["rewards"]), torch.tensor(c.input["baseline"]), s.ids, s.num)
    c.close(s.padded(out), "advantages")
    assert returns.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(LayoutError, match="baseline"):
        advantage.remax(s.flat(c.input["rewards"]), torch.zeros(2), s.ids, s.num)


def test_num_08_leave_one_out_is_bounded():
    """num-08: the other three rewards are equal; dividing by their std would give 1e6."""
    rewards, ids = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64)
    torch.testing.assert_close(advantage.rloo(rewards, ids, 1), torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))
    scaled = advantage.rloo(rewards, ids, 1, divide_by_std=True)
    torch.testing.assert_close(scaled, torch.tensor([2.0, -2 / 3, -2 / 3, -2 / 3]), atol=1e-5, rtol=0)


ESTIMATORS = {
    "centred": advantage.group_centred,
    "grpo": advantage.group_relative,
    "rloo": advantage.rloo,
    "rloo_std": lambda r, g, n: advantage.rloo(r, g, n, divide_by_std=True),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_num_11_a_lone_answer_gets_zero_everywhere(name):
    """num-11: groups of one, by design or because the others were dropped, are finite and 0 in every estimator."""
    rewards, ids = torch.tensor([1.0, 5.0, 1.0, 0.0]), torch.tensor([0, 2, 3, 3])
    out = ESTIMATORS[name](rewards, ids, 4)
    assert out[:2].tolist() == [0.0, 0.0]
    assert bool((out[2:] != 0).all())
    assert advantage.informative(rewards, ids, 4).tolist() == [False, False, True, True]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(name, dtype):
    """0.1 * 3 / 3 is not 0.1 in floating point; with a division by 1e-6 that would be an advantage."""
    rewards, ids = torch.tensor([0.1] * 3 + [0.7] * 7, dtype=dtype), torch.tensor([0] * 3 + [1] * 7)
    assert ESTIMATORS[name](rewards, ids, 2).tolist() == [0.0] * 10


@pytest.mark.parametrize("seed", range(5))
def test_group_estimators_do_not_depend_on_the_order_of_answers(seed):
    generator = torch.Generator().manual_seed(seed)
    rewards, ids = torch.randn(20, generator=generator), torch.randint(0, 4, (20,), generator=generator)
    order = torch.randperm(20, generator=generator)
    for estimator in ESTIMATORS.values():
        torch.testing.assert_close(estimator(rewards, ids, 4)[order], estimator(rewards[order], ids[order], 4))
    leave_one_out = [float(rewards[i] - rewards[(ids == ids[i]) & (torch.arange(20) != i)].mean()) for i in range(20)]
    if not any(math.isnan(x) for x in leave_one_out):
        torch.testing.assert_close(advantage.rloo(rewards, ids, 4), torch.tensor(leave_one_out), atol=1e-6, rtol=1e-5)


def test_groups_out_of_range_are_refused():
    with pytest.raises(LayoutError, match=r"0\.\.2 outside of 0\.\.1"):
        advantage.rloo(torch.ones(3), torch.tensor([0, 1, 2]), 2)
    with pytest.raises(LayoutError, match="beside group ids"):
        advantage.rloo(torch.ones(3), torch.tensor([0, 1]), 2)


def test_no_answers():
    none = torch.zeros(0, dtype=torch.int64)
    assert advantage.group_relative(torch.zeros(0), none, 0).tolist() == []
    assert advantage.informative(torch.zeros(0), none, 2).tolist() == []


def test_overlong_penalty_reference(case):
    c = case("reward/dapo_overlong")
    lengths = torch.tensor(c.input["lengths"])
    settings = {"max_response_tokens": c.input["max_resp_len"], "factor": c.input["factor"]}
    c.close(advantage.overlong_penalty(lengths, buffer=c.input["buffer"], **settings), "penalty")
    assert advantage.overlong_penalty(lengths, buffer=0, **settings).tolist() == [0.0] * 4
