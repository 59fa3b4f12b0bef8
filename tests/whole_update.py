"""A training step without generator and rewards: random answers, scored and updated by the code of a real step."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch

from rlspeed.config.load import load_profile
from rlspeed.engine.precision import resolve
from rlspeed.engine.world import World
from rlspeed.rollout.types import Rollout
from rlspeed.training import ppo_step
from rlspeed.training.batches import Answer, build_batches, plan_minibatches
from rlspeed.training.clock import Clock
from rlspeed.training.credit import assign_advantages
from rlspeed.training.grid import Site, make_grid
from rlspeed.training.metrics import StepMetrics
from rlspeed.training.roles import Roles, build_roles


class WholeUpdate:
    """Models of a profile and a step's answers on one device; `score` then `update` are what a step does with them."""

    def __init__(
        self, device: str, *words: str, profile: str = "quickstart", groups: int = 4, longest: int = 12
    ) -> None:
        loaded = load_profile(profile, list(words))
        self.world = World(rank=0, size=1, local_rank=0, device=torch.device(device), mesh=None)
        precision = resolve(loaded.profile.model.model_dtype, self.world.device)
        grid = make_grid(loaded.profile, self.world)
        home = grid.home
        self.roles: Roles = build_roles(loaded.profile, precision, self.world, grid, 100, 1)
        cfg = loaded.profile.algorithm
        vocabulary = self.roles.causal_lm.config.vocab_size
        self.table, rollouts = make_answers(groups, 2, longest, vocabulary)
        self.plans = plan_minibatches(
            self.table,
            shares=home.shares,
            groups_per_minibatch=cfg.mini_batch_size,
            balance=True,
            capacity=loaded.profile.packing.capacity or 4096,
            micro_batch_size=4,
            seed=0,
        )
        (laid,) = build_batches(self.world, self.table, rollouts, [(home, self.plans)])
        self.per_minibatch = laid.per_minibatch
        self.bins = dict.fromkeys(grid.sites, laid)
        self.parts: Any = SimpleNamespace(
            profile=loaded.profile, world=self.world, grid=grid, roles=self.roles, clock=Clock(self.world.device)
        )
        self.metrics = StepMetrics()

    def score(self) -> None:
        """Passes without gradient, and the advantages."""
        batches = [b for part in self.per_minibatch for b in part]
        ppo_step._score(self.parts, self.bins)
        assign_advantages(batches, self.table, self.parts.profile.algorithm, 0.01, self.world)

    def update(self) -> None:
        """All optimizer steps of all roles."""
        ppo_step._update(self.parts, 1, self.table, self.bins, 0.01, self.metrics)

    def numbers(self) -> dict[str, float]:
        """The metrics so far."""
        return self.metrics.reduce(self.world.gather_objects)


def site_of(world: World) -> Site:
    """The site of all models in a world of one."""
    return Site(shares=((0,),), share=0, members=world, data=world, sp=1, rank=0)


def make_answers(groups: int, each: int, longest: int, vocabulary: int) -> tuple[list[Answer], dict[int, Rollout]]:
    """Random prompts and answers with random rewards, in the order of the step's table."""
    rng = random.Random(0)
    table, rollouts = [], {}
    for group in range(groups):
        prompt = [rng.randrange(4, vocabulary) for _ in range(rng.randint(3, 8))]
        for sample in range(each):
            answer = [rng.randrange(4, vocabulary) for _ in range(rng.randint(1, longest))]
            rollouts[len(table)] = Rollout(
                prompt_id=group,
                sample_id=sample,
                prompt_ids=prompt,
                response_ids=answer,
                logprobs=[-1.0] * len(answer),
                finish="stop",
                policy_version=0,
            )
            table.append(
                Answer(
                    group=group,
                    row=group,
                    sample_id=sample,
                    holder=0,
                    prompt_tokens=len(prompt),
                    response_tokens=len(answer),
                    score=float(sample),
                    reward=rng.random(),
                    failed=False,
                    trains=True,
                    truncated=False,
                )
            )
    return table, rollouts
