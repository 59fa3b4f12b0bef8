"""Bins of a step whose answers share their prompts, and the models that cannot do it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlspeed.config.load import load_profile
from rlspeed.engine.precision import resolve
from rlspeed.engine.world import World
from rlspeed.errors import ConfigError
from rlspeed.training.batches import build_batches, plan_minibatches
from rlspeed.training.grid import make_grid
from rlspeed.training.roles import build_roles
from tests.whole_update import make_answers, site_of

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), mesh=None)


@pytest.mark.parametrize("balance", [True, False])
def test_a_step_holds_the_same_tokens_in_fewer_places(balance: bool) -> None:
    table, rollouts = make_answers(groups=5, each=4, longest=6, vocabulary=60)
    both = []
    for shared in (False, True):
        plans = plan_minibatches(
            table,
            shares=((0,),),
            groups_per_minibatch=3,
            balance=balance,
            capacity=40,
            micro_batch_size=1,
            seed=0,
            shared=shared,
        )
        assert sorted(n for p in plans for b in p.bins[0] for n in b) == list(range(20))
        assert all(p.targets == dict.fromkeys(p.numbers, 0) for p in plans)
        (laid,) = build_batches(ALONE, table, rollouts, [(site_of(ALONE), plans)], shared=shared)
        batches = laid.batches
        assert max(b.num_tokens for b in batches) <= 40
        trained = {}
        for b in batches:
            for s, token, value in zip(
                b.segment_ids().tolist(), b.input_ids[b.response_index()].tolist(), b.get("rollout_logprobs").tolist()
            ):
                trained.setdefault(b.sequence_ids[s], []).append((token, value))
        both.append((sum(b.num_tokens for b in batches), trained))
    assert both[0][1] == both[1][1]
    assert both[0][1] == {n: [(t, -1.0) for t in r.response_ids] for n, r in rollouts.items()}
    assert both[1][0] < both[0][0]


def test_a_model_with_sliding_windows_is_refused(tmp_path: Path) -> None:
    from transformers import Qwen2Config

    Qwen2Config(
        hidden_size=16, num_hidden_layers=2, use_sliding_window=True, sliding_window=4, max_window_layers=0
    ).save_pretrained(tmp_path)
    words = [f"model.path={tmp_path}", "model.shared_prefixes=true"]
    profile = load_profile("quickstart", words).profile
    with pytest.raises(ConfigError, match="sliding window of 4"):
        build_roles(profile, resolve("fp32", ALONE.device), ALONE, make_grid(profile, ALONE), 1, 1)
