"""Experience: prompts to answers to rewards, on the ranks that generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rlspeed.algorithms.advantage import overlong_penalty
from rlspeed.config.schema import Profile
from rlspeed.data.prompts import PromptRow, PromptTable
from rlspeed.engine.world import World
from rlspeed.rewards.pool import RewardPool
from rlspeed.rewards.stream import StreamScorer
from rlspeed.rewards.types import Sample, Score, add_model_scores
from rlspeed.rollout.builtin import BuiltinGenerator
from rlspeed.rollout.generator import Generator
from rlspeed.rollout.types import GenerationStopped, Prompt, Rollout, SamplingParams
from rlspeed.training.batches import Answer
from rlspeed.training.lengths import FixedLengths, fixed_length
from rlspeed.training.seeds import seed_of
from rlspeed.training.stop import StopFlag


@dataclass(slots=True, kw_only=True)
class Collected:
    """This rank's answers of a step: by (position of the prompt in the step, number of the answer).

    version: of the weights that generated them. early: answers that the reward model had scored when generation ended;
    None where it scores them together.
    """

    rollouts: dict[tuple[int, int], Rollout]
    rows: dict[int, int]
    scores: dict[tuple[int, int], Score] = field(default_factory=dict)
    early: int | None = None
    version: int = 0
    under_way: _UnderWay | None = None


@dataclass(slots=True)
class _UnderWay:
    """What is being generated and scored: streamed are the answers that are scored when they finish.

    submitted: places of the samples, in their order.
    """

    table: PromptTable
    rows: Sequence[int]
    streamed: set[tuple[int, int]]
    submitted: dict[tuple[int, int], None] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)


class Collector:
    """Generates and scores; owns nothing but references to the parts that do it.

    rank: this one in the run. makers: the ranks that generate, the actor's; None on all others, which are given no
    prompt and hold no answer.
    """

    def __init__(
        self,
        profile: Profile,
        rank: int,
        makers: World | None,
        tokenizer: Any,
        generator: Generator,
        pool: RewardPool,
        scorer: Any | None,
        sampling: SamplingParams,
        stop: StopFlag,
    ) -> None:
        self.profile = profile
        self.rank = rank
        self.makers = makers
        self.tokenizer = tokenizer
        self.generator = generator
        self.pool = pool
        self.scorer = scorer
        self.sampling = sampling
        self.stop = stop
        self._now: _UnderWay | None = None
        if isinstance(generator, BuiltinGenerator):
            generator.on_finished = self._finished

    def take_spans(self) -> list[tuple[float, float]]:
        """When the reward model worked in a thread of its own; nothing where it has none."""
        return self.scorer.take_spans() if isinstance(self.scorer, StreamScorer) else []

    def close(self) -> None:
        """End the generator and the reward workers."""
        self.generator.close()
        self.pool.close()
        if isinstance(self.scorer, StreamScorer):
            self.scorer.close()

    def generate(
        self,
        table: PromptTable,
        rows: Sequence[int],
        *,
        n: int,
        sampling: SamplingParams,
        stream: int,
        enough: int | None = None,
        lengths: FixedLengths = "none",
        ahead: bool = False,
    ) -> Collected:
        """`n` answers to each of this rank's share of `rows`.

        enough: over all ranks, the prompts whose answers are wanted; each rank goes on when its share of them is
        complete, and the other prompts are left out. None: all. lengths: `rollout.fix_lengths`; other than none, each
        answer has its drawn length whatever is sampled. ahead: for the next step, on the makers alone: the ranks do not
        meet, and what is to be scored waits.

        The random stream of an answer depends on run.seed, `stream` (the step), the row and the answer's number alone,
        so neither ranks nor batches nor a resumed run change what is drawn.

        Raises:
            StopRequested: some rank was asked to stop meanwhile.
        """
        requests = []
        for group in self._mine(len(rows)):
            for sample_id in range(n):
                seed = seed_of(self.profile.run.seed, stream, rows[group], sample_id)
                tokens = tuple(table[rows[group]].token_ids)
                limit = fixed_length(lengths, seed, sampling.max_new_tokens)
                requests.append(
                    Prompt(prompt_id=group, sample_id=sample_id, token_ids=tokens, seed=seed, max_new_tokens=limit)
                )
        # what may be dropped is not scored; functions that take a batch get it in the order of the prompts
        streams = (enough is None or enough >= len(rows)) and not self.pool.takes_batches and not ahead
        now = self._now = _UnderWay(table, rows, {(r.prompt_id, r.sample_id) for r in requests} if streams else set())
        if lengths != "none":
            sampling = replace(sampling, stop=(), stop_token_ids=())
        try:
            rollouts = self._answers(requests, sampling, len(rows), enough)
        except GenerationStopped:
            rollouts = []
        self._now = None
        if not ahead:
            self.stop.agree()
        answers = {(r.prompt_id, r.sample_id): r for r in rollouts}
        return Collected(
            rollouts=answers,
            rows={group: rows[group] for group, _ in answers},
            version=self.generator.version,
            under_way=now,
        )

    def _mine(self, prompts: int) -> range:
        """Places of this rank's share of the step's prompts."""
        return range(self.makers.rank, prompts, self.makers.size) if self.makers is not None else range(0)

    def _answers(
        self, requests: Sequence[Prompt], sampling: SamplingParams, prompts: int, enough: int | None
    ) -> list[Rollout]:
        """Of all requests, or of the first prompts that are complete."""
        if enough is None or enough >= prompts or self.makers is None:
            # a rank without prompts still takes part: an engine may span ranks
            return self.generator.generate(requests, sampling)
        mine = len(self._mine(enough))
        assert isinstance(self.generator, BuiltinGenerator), "the configuration allows no other"
        return self.generator.generate_enough(requests, sampling, groups=mine)

    def nothing(self, table: PromptTable, rows: Sequence[int]) -> _UnderWay:
        """Of a rank that generates nothing."""
        return _UnderWay(table, rows, set())

    def answers(self, collected: Collected) -> list[Answer]:
        """This rank's answers as far as they are known before they are scored."""
        return [self._answer(collected, place, Score(total=0.0)) for place in collected.rollouts]

    def score(self, collected: Collected, step: int) -> list[Answer]:
        """Rewards of the answers of one `generate`; fills `collected.scores`.

        Raises:
            RewardError: a function failed and the policy is to stop, on the rank where it happened.
        """
        now = collected.under_way
        assert now is not None, "answers are generated before they are scored"
        if isinstance(self.scorer, StreamScorer):
            collected.early = self.scorer.done
        for place, rollout in collected.rollouts.items():
            if place not in now.submitted:
                self._submit(now, rollout)
        scores = self.pool.collect(step=step) if now.samples else []
        if self.scorer is not None and now.samples:
            own = self.scorer
            values = own.collect() if isinstance(own, StreamScorer) else own.score(now.samples)
            scores = add_model_scores(scores, values, self.profile.reward.model.weight)
        found = dict(zip(now.submitted, scores))
        collected.scores.update({place: found[place] for place in collected.rollouts})
        return [self._answer(collected, place, score) for place, score in collected.scores.items()]

    def _finished(self, rollout: Rollout) -> None:
        """An answer is complete while others are generated: its scoring begins."""
        if self._now is not None and (rollout.prompt_id, rollout.sample_id) in self._now.streamed:
            self._submit(self._now, rollout)

    def _submit(self, now: _UnderWay, rollout: Rollout) -> None:
        sample = self._sample(now.table[now.rows[rollout.prompt_id]], rollout, len(now.samples))
        now.submitted[rollout.prompt_id, rollout.sample_id] = None
        now.samples.append(sample)
        self.pool.submit(sample)
        if isinstance(self.scorer, StreamScorer):
            self.scorer.submit(sample)

    def dump(self, table: PromptTable, collected: Collected, step: int) -> list[dict[str, Any]]:
        """This rank's answers as verl dumps them: input, output, gts, score, step, and what the rewards returned
        beside it.
        """
        out = []
        for place, rollout in collected.rollouts.items():
            row, score = table[collected.rows[place[0]]], collected.scores[place]
            out.append(
                {
                    "input": row.text,
                    "output": self.tokenizer.decode(rollout.response_ids, skip_special_tokens=True),
                    "gts": row.ground_truth,
                    "score": score.total,
                    "step": step,
                    "uid": f"{row.index}_{place[1]}",
                    "finish": rollout.finish,
                    "policy_version": rollout.policy_version,
                    **{f"reward/{k}": v for k, v in score.parts.items()},
                    **score.extra,
                }
            )
        return out

    def _sample(self, row: PromptRow, rollout: Rollout, index: int) -> Sample:
        return Sample(
            index=index,
            prompt_id=row.index,
            sample_id=rollout.sample_id,
            prompt=row.prompt,
            prompt_text=row.text,
            response_text=self.tokenizer.decode(rollout.response_ids, skip_special_tokens=True),
            response_ids=rollout.response_ids,
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
            columns=row.columns,
            finish=rollout.finish,
        )

    def _answer(self, collected: Collected, place: tuple[int, int], score: Score) -> Answer:
        rollout = collected.rollouts[place]
        total = 0.0 if score.total is None else float(score.total)
        soft = self.profile.algorithm.overlong_penalty
        penalty = overlong_penalty(
            torch.tensor([len(rollout.response_ids)]),
            max_response_tokens=self.profile.rollout.max_new_tokens,
            buffer=soft.buffer,
            factor=soft.factor,
        )
        return Answer(
            group=place[0],
            row=collected.rows[place[0]],
            sample_id=place[1],
            holder=self.rank,
            prompt_tokens=len(rollout.prompt_ids),
            response_tokens=len(rollout.response_ids),
            score=total,
            reward=total + float(penalty[0]),
            failed=score.total is None,
            trains=score.total is not None,
            truncated=rollout.finish == "length",
        )
