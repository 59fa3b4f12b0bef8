"""The one protocol between the training loop and whatever generates answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from rlspeed.rollout.types import Prompt, Rollout, SamplingParams


class Generator(Protocol):
    """Generates answers with the weights of one policy version.

    `version` counts weight updates and is stamped on every Rollout. `load` is called after every update, also when the
    generator shares the trainer's weights (then `weights` is None): it must forget everything that was computed with
    the old weights (prefix caches) and set `version`.
    """

    version: int

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Rollout]:
        """One Rollout per Prompt, in the order of `prompts`. `len(response_ids) >= 1` always."""
        ...

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> None:
        """Take new weights by Hugging Face name (None: the weights are shared and already new)."""
        ...

    def close(self) -> None:
        """Free device memory and stop helper processes."""
        ...


class IdleGenerator:
    """The generator of a rank that the actor does not work on: it is asked for nothing and keeps the version."""

    version = 0

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Rollout]:
        """Nothing, to no prompt."""
        assert not prompts, "prompts on a rank outside of the actor"
        return []

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> None:
        """Count."""
        self.version = version

    def close(self) -> None:
        """There is nothing to free."""
