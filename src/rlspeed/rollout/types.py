"""What goes into a generator and what comes out of it: plain Python values, no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from rlspeed.errors import DataError

FinishReason = Literal["stop", "length"]


class GenerationStopped(Exception):
    """Generation was given up because a stop was asked for; no answer of the call is returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How answers are drawn.

    temperature 0 means greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 switch the filters off. `stop_token_ids` end an
    answer and are part of it; `stop` strings end it at the token that completes them.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request to the generator: one answer to one prompt.

    prompt_id: index of the prompt's row in the data stream (the group of GRPO).
    sample_id: which of the group's answers this is, 0..n-1.
    token_ids: the rendered prompt, at least one token.
    seed: seed of this answer's own random stream, so that batch composition does not matter.
    max_new_tokens: limit of this request; None takes the one in SamplingParams.
    """

    prompt_id: int
    sample_id: int
    token_ids: tuple[int, ...]
    seed: int
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise DataError(f"prompt {self.prompt_id} has no tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One finished answer.

    response_ids: sampled tokens, the end token included when `finish` is "stop"; at least one.
    logprobs: log-probability of each sampled token under the sampling temperature, before top-k/top-p/min-p filters.
    policy_version: number of weight updates the generator had seen.
    """

    prompt_id: int
    sample_id: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    policy_version: int
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.response_ids or len(self.response_ids) != len(self.logprobs):
            raise ValueError(
                f"rollout {self.prompt_id}/{self.sample_id}: "
                f"{len(self.response_ids)} tokens, {len(self.logprobs)} log-probs"
            )
        if not all(math.isfinite(x) for x in self.logprobs):
            raise ValueError(f"rollout {self.prompt_id}/{self.sample_id}: a log-prob is not finite")
