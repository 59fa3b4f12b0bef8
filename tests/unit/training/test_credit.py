"""Rewards to advantages on packed bins: the right token gets it, whitening is over the step, cuts do not matter."""

from __future__ import annotations

import pytest
import torch

from rlspeed.config.schema import KL, Algorithm
from rlspeed.engine.packed import PackedBatch, pack_sequences
from rlspeed.engine.world import World
from rlspeed.training.batches import Answer
from rlspeed.training.credit import assign_advantages, leave_out, sequence_advantages, token_rewards

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), mesh=None)


def table_of(rewards: list[list[float]], *, failed: set[tuple[int, int]] = frozenset()) -> list[Answer]:  # type: ignore[assignment]
    """One group per inner list; answers of 2, 3, ... tokens after a prompt of 1."""
    return [
        Answer(
            group=g,
            row=g,
            sample_id=s,
            holder=0,
            prompt_tokens=1,
            response_tokens=2 + s,
            score=r,
            reward=r,
            failed=(g, s) in failed,
            trains=(g, s) not in failed,
            truncated=False,
        )
        for g, group in enumerate(rewards)
        for s, r in enumerate(group)
    ]


def bins_of(table: list[Answer], cuts: list[list[int]]) -> list[PackedBatch]:
    """Bins with the given sequence numbers."""
    return [
        pack_sequences(
            [[5] * table[n].tokens for n in cut],
            [1] * len(cut),
            sequence_ids=cut,
            trains=[table[n].trains for n in cut],
        )
        for cut in cuts
    ]


def test_reward_sits_on_the_last_token_of_its_answer() -> None:
    table = table_of([[1.0, 2.0], [3.0]])
    (batch,) = bins_of(table, [[2, 0, 1]])
    got = token_rewards(batch, table, Algorithm(), 0.0)
    assert got.tolist() == [0.0, 3.0, 0.0, 1.0, 0.0, 0.0, 2.0]


def test_kl_penalty_in_the_reward() -> None:
    table = table_of([[1.0]])
    (batch,) = bins_of(table, [[0]])
    batch.put("old_logprobs", torch.tensor([-1.0, -2.0]))
    batch.put("ref_logprobs", torch.tensor([-1.5, -1.0]))
    cfg = Algorithm(kl=KL(where="reward", estimator="k1"))
    torch.testing.assert_close(token_rewards(batch, table, cfg, 0.1), torch.tensor([-0.05, 1.1]))


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_zero_variance_groups_get_exactly_zero(kind: str) -> None:
    table = table_of([[2.0, 2.0, 2.0], [1.0, 0.0, 0.0]])
    got = sequence_advantages(table, Algorithm(kind=kind))
    assert got is not None
    assert got[:3].tolist() == [0.0, 0.0, 0.0]
    assert torch.isfinite(got).all()
    assert float(got[3]) > 0 > float(got[4])


def test_failed_answers_leave_their_groups_statistics() -> None:
    """num-11: a group of which one answer is left has nothing to compare with."""
    table = table_of([[1.0, 0.0, 9.0], [1.0, 5.0]], failed={(0, 2), (1, 1)})
    got = sequence_advantages(table, Algorithm(kind="dr_grpo"))
    assert got is not None
    assert got.tolist() == [0.5, -0.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["ppo", "reinforce_pp", "reinforce_pp_baseline", "grpo"])
def test_any_cut_into_bins_gives_the_same_advantages(kind: str) -> None:
    """num-13: whitening is over the step's tokens, not over a bin's, and never over padding."""
    table = table_of([[1.0, 0.0, 2.0], [0.5, 0.25, 3.0]])
    results = []
    for cuts in ([[0, 1, 2, 3, 4, 5]], [[5, 0], [1, 3], [2, 4], []]):
        batches = bins_of(table, cuts)
        for batch in batches:
            ids = torch.tensor([batch.sequence_ids[s] for s in batch.segment_ids().tolist()])
            batch.put("values", ids.float() * 0.1)
        assign_advantages(batches, table, Algorithm(kind=kind), 0.0, ALONE)
        by_number: dict[int, list[float]] = {}
        for batch in batches:
            values = batch.get("advantages").tolist()
            for s, v in zip(batch.segment_ids().tolist(), values):
                by_number.setdefault(batch.sequence_ids[s], []).append(v)
        results.append(torch.tensor([v for n in sorted(by_number) for v in by_number[n]]))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=0)
    if kind != "grpo":
        assert float(results[0].mean()) == pytest.approx(0.0, abs=1e-6)
        assert float(results[0].var()) == pytest.approx(1.0, abs=1e-4)


def test_one_token_in_all_is_finite() -> None:
    table = [table_of([[1.0]])[0]]
    batch = pack_sequences([[5, 6]], [1], sequence_ids=[0])
    batch.put("values", torch.tensor([0.5]))
    assign_advantages([batch], table, Algorithm(kind="ppo"), 0.0, ALONE)
    assert batch.get("advantages").tolist() == [0.0]
    assert batch.get("returns").tolist() == [1.0]


def test_group_filter_leaves_numerator_and_denominator() -> None:
    """num-12: filtered groups have no training token at all; without the filter they stay in the count."""
    table = table_of([[1.0, 1.0], [1.0, 0.0]])
    assert [a.trains for a in leave_out(table, filter_groups=False)] == [True] * 4
    assert [a.trains for a in leave_out(table, filter_groups=True)] == [False, False, True, True]
