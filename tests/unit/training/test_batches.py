"""From the table of a step to bins: everything trains exactly once, on as many bins per rank, whatever the shape."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from rlspeed.engine.world import World
from rlspeed.rollout.types import Rollout
from rlspeed.training.batches import Answer, build_batches, gather_table, plan_minibatches
from tests.whole_update import make_answers, site_of

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), mesh=None)


def answer(group: int, sample_id: int, prompt: int, response: int, *, holder: int = 0, trains: bool = True) -> Answer:
    """One row of the table."""
    return Answer(
        group=group,
        row=group,
        sample_id=sample_id,
        holder=holder,
        prompt_tokens=prompt,
        response_tokens=response,
        score=1.0,
        reward=1.0,
        failed=not trains,
        trains=trains,
        truncated=False,
    )


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("capacity", [None, 64])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_each_answer_trains_once(ranks: int, capacity: int | None, balance: bool, elsewhere: bool) -> None:
    """elsewhere: ranks outside of the shares hold the answers, as those of an actor on ranks of its own."""
    rng = random.Random(ranks)
    for groups in (1, 3, 9):
        table = [
            answer(g, s, rng.randint(1, 30), rng.randint(1, 30), holder=g % ranks + (ranks if elsewhere else 0))
            for g in range(groups)
            for s in range(3)
        ]
        plans = plan_minibatches(
            table,
            shares=[(r,) for r in range(ranks)],
            groups_per_minibatch=4,
            balance=balance,
            capacity=capacity,
            micro_batch_size=2,
            seed=1,
        )
        seen = sorted(n for p in plans for rank in p.bins for b in rank for n in b)
        assert seen == list(range(len(table)))
        for plan in plans:
            assert len({len(b) for b in plan.bins}) == 1, "all ranks run the same number of bins"
            for rank, bins in enumerate(plan.bins):
                assert all(plan.targets[n] == rank for b in bins for n in b)
                if capacity is not None:
                    assert all(sum(table[n].tokens for n in b) <= capacity for b in bins)
                else:
                    assert all(len(b) <= 2 for b in bins)
            if not balance and not elsewhere:
                assert all(plan.targets[n] == table[n].holder for n in plan.numbers)
            assert len({table[n].group for n in plan.numbers}) <= 4, "a group is never cut by a mini-batch"


def test_unequal_ranks_get_spare_bins() -> None:
    """pack-22: five long sequences on one rank, five short ones on the other, unbalanced: five bins each."""
    table = [answer(g, 0, 1, 94, holder=0) for g in range(5)] + [answer(5 + g, 0, 1, 19, holder=1) for g in range(5)]
    (plan,) = plan_minibatches(
        table, shares=((0,), (1,)), groups_per_minibatch=None, balance=False, capacity=100, micro_batch_size=1, seed=0
    )
    assert [len(b) for b in plan.bins] == [5, 5]
    assert plan.bins[1].count(()) == 4


def test_table_order_does_not_depend_on_ranks() -> None:
    rows = [answer(g, s, 2, 2) for g in (2, 0, 1) for s in (1, 0)]
    assert [(a.group, a.sample_id) for a in gather_table(ALONE, rows)] == [(g, s) for g in range(3) for s in range(2)]


def test_batches_carry_tokens_and_generator_logprobs() -> None:
    table = [answer(0, 0, 2, 2), answer(1, 0, 1, 3, trains=False), answer(2, 0, 1, 1)]
    rollouts = {}
    for n, a in enumerate(table):
        rollouts[n] = Rollout(
            prompt_id=n,
            sample_id=0,
            prompt_ids=tuple(range(10 * n + 1, 10 * n + 1 + a.prompt_tokens)),
            response_ids=tuple(range(50 + 10 * n, 50 + 10 * n + a.response_tokens)),
            logprobs=tuple(-0.5 - n - i for i in range(a.response_tokens)),
            finish="stop",
            policy_version=0,
        )
    plans = plan_minibatches(
        table, shares=((0,),), groups_per_minibatch=None, balance=True, capacity=64, micro_batch_size=1, seed=0
    )
    (laid,) = build_batches(ALONE, table, rollouts, [(site_of(ALONE), plans)])
    (batch,) = laid.batches
    assert batch.sequence_ids == (0, 1, 2)
    assert batch.input_ids[batch.loss_mask].tolist() == [50, 51, 70], "a masked answer trains no token"
    assert batch.get("rollout_logprobs").tolist() == [-0.5, -1.5, -2.5]


@pytest.mark.parametrize("shared", [False, True])
def test_sequences_left_out_later_train_no_token_and_leave_the_streams_of_others(shared: bool) -> None:
    """What was computed for all answers stays where it lies; the mask is that of a pack that knew beforehand."""
    table, rollouts = make_answers(groups=3, each=3, longest=5, vocabulary=60)
    plans = plan_minibatches(
        table,
        shares=((0,),),
        groups_per_minibatch=None,
        balance=True,
        capacity=40,
        micro_batch_size=1,
        seed=0,
        shared=shared,
    )
    late = [replace(a, trains=n not in (1, 5)) for n, a in enumerate(table)]
    (early,) = build_batches(ALONE, table, rollouts, [(site_of(ALONE), plans)], shared=shared)
    (known,) = build_batches(ALONE, late, rollouts, [(site_of(ALONE), plans)], shared=shared)
    for batch in (*early.batches, *known.batches):
        numbers = torch.arange(batch.num_tokens, dtype=torch.float32)[batch.response_index()]
        batch.put("place", numbers)
    for batch, other in zip(early.without({1, 5}).batches, known.batches, strict=True):
        assert torch.equal(batch.loss_mask, other.loss_mask)
        assert torch.equal(batch.segment_ids(), other.segment_ids())
        assert torch.equal(batch.get("place"), other.get("place"))
        assert torch.equal(batch.get("rollout_logprobs"), other.get("rollout_logprobs"))
    assert early.without(set()) is early
