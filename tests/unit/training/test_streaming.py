"""Answers are scored while others are still generated, and come out the same as if they had been scored together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlspeed.config.load import load_profile
from rlspeed.data.prompts import load_prompts
from rlspeed.data.render import load_tokenizer
from rlspeed.engine.world import World
from rlspeed.errors import RewardError
from rlspeed.models.build import resolve_model_path
from rlspeed.rewards.pool import RewardPool
from rlspeed.rewards.stream import StreamScorer
from rlspeed.rewards.types import Sample
from rlspeed.rollout.builtin import BuiltinGenerator
from rlspeed.rollout.types import Prompt, Rollout, SamplingParams
from rlspeed.training.collect import Collector

LONGEST = 20.0  # seconds that a test waits for what does not come
ALONE = World(rank=0, size=1, local_rank=0, device=None, mesh=None)  # type: ignore[arg-type]


class Length:
    """Scores an answer by its tokens, and says when."""

    def __init__(self) -> None:
        self.scored = threading.Semaphore(0)
        self.together: list[int] = []

    def score(self, samples: Sequence[Sample]) -> list[float]:
        self.together.append(len(samples))
        self.scored.release()
        return [float(len(s.response_ids)) for s in samples]


class LastToFirst(BuiltinGenerator):
    """Finishes the last answer first; goes on with the next when `after` has returned."""

    def __init__(self, after: Any) -> None:
        self.after = after
        self.version = 0
        self.heard: list[bool] = []

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Rollout]:
        out = []
        for i, p in reversed(list(enumerate(prompts))):
            ids = tuple(range(5, 6 + i % 4))
            out.append(
                Rollout(
                    prompt_id=p.prompt_id,
                    sample_id=p.sample_id,
                    prompt_ids=p.token_ids,
                    response_ids=ids,
                    logprobs=(-1.0,) * len(ids),
                    finish="stop",
                    policy_version=0,
                )
            )
            if self.on_finished is not None:
                self.on_finished(out[-1])
            self.heard.append(self.after())
        return out[::-1]

    def close(self) -> None:
        """Nothing is open."""


def collected(scorer: Any, generator: BuiltinGenerator, *words: str) -> tuple[dict[tuple[int, int], Any], Any]:
    """Scores of three prompts with two answers each, and what was collected."""
    profile = load_profile("quickstart", ["rollout.n=2", *words]).profile
    tokenizer = load_tokenizer(resolve_model_path("quickstart"), trust_remote_code=False)
    table = load_prompts(profile.data, profile.rollout, tokenizer, "train")
    collector = Collector(
        profile,
        0,
        ALONE,
        tokenizer,
        generator,
        RewardPool(profile.reward),
        scorer,
        SamplingParams(max_new_tokens=6),
        SimpleNamespace(agree=lambda: None),  # type: ignore[arg-type]
    )
    try:
        found = collector.generate(table, [7, 3, 5], n=2, sampling=collector.sampling, stream=1)
        collector.score(found, 1)
    finally:
        collector.close()
    return {place: score.total for place, score in found.scores.items()}, found


MODEL = ("reward.model.path=somewhere",)


def test_a_reward_model_on_the_host_scores_while_others_are_generated() -> None:
    """The generator waits after each answer until that one is scored: without streaming it would wait for ever."""
    model = Length()
    generator = LastToFirst(lambda: model.scored.acquire(timeout=LONGEST))
    streamed, found = collected(StreamScorer(model), generator, *MODEL)
    assert generator.heard == [True] * 6
    assert model.together == [1] * 6
    assert found.early is not None
    assert found.early >= 5
    together, later = collected(Length(), LastToFirst(lambda: True), *MODEL)
    assert streamed == together
    assert list(streamed) == [(g, s) for g in range(3) for s in range(2)], "in the order of the answers"
    assert later.early is None


def test_a_function_scores_while_others_are_generated(tmp_path: Path) -> None:
    (tmp_path / "mark.py").write_text(
        "from pathlib import Path\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    with Path({str(tmp_path / 'seen')!r}).open('a') as file:\n"
        "        file.write('x')\n"
        "    return 1.0\n"
    )
    seen = tmp_path / "seen"
    asked = 0

    def scored() -> bool:
        nonlocal asked
        asked += 1
        end = threading.Event()
        for _ in range(int(LONGEST / 0.01)):
            if seen.exists() and len(seen.read_text()) >= asked:
                return True
            end.wait(0.01)
        return False

    generator = LastToFirst(scored)
    scores, _ = collected(None, generator, f"reward.functions=[{{path: '{tmp_path / 'mark.py'}:compute_score'}}]")
    assert generator.heard == [True] * 6
    assert set(scores.values()) == {1.0}


def test_an_error_of_the_model_comes_out_where_scores_are_collected() -> None:
    class Broken:
        def score(self, samples: Sequence[Sample]) -> list[float]:
            raise RewardError("no number")

    with pytest.raises(RewardError, match="no number"):
        collected(StreamScorer(Broken()), LastToFirst(lambda: True), *MODEL)
