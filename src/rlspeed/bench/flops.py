"""Model FLOPs of a training step from its own metrics: what the models must compute, without padding and recomputation.

Forward: 2 N per token and 2 L n d s per token of a sequence of length s; forward and backward three times the matrices
and 3.5 times the attention (`ModelShape.forward_flops`, `workload`). The share of the devices' dense half-precision
peak is the MFU of Chowdhery et al. 2022 (PaLM), appendix B, with generation and scoring counted too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlspeed.config.schema import Profile
from rlspeed.planning.machine import Machine
from rlspeed.planning.probe import read_shape
from rlspeed.planning.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """FLOPs of one step over all devices: of generation, of the passes without gradient, of all updates."""

    generation: float
    scoring: float
    update: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.generation + self.scoring + self.update


def step_flops(row: Mapping[str, float], profile: Profile) -> StepFlops | None:
    """Of a step with these metrics (`tokens/*`, `timing_s/*`); None for a model whose shape is not known, or a step
    without answers.
    """
    actor = read_shape(profile.model.path)
    tokens = row.get("tokens/prompt", 0.0) + row.get("tokens/response", 0.0)
    if actor is None or not tokens:
        return None
    squares, epochs = row.get("tokens/squares", 0.0), profile.algorithm.epochs
    computed = row.get("gen/prefill_tokens", row["tokens/prompt"]) + row["tokens/response"]
    scoring, update = 0.0, 0.0
    forward = actor.forward_flops(tokens, squares)
    scoring += forward * (("timing_s/old_log_prob" in row) + ("timing_s/ref" in row))
    if "timing_s/update_actor" in row:
        update += epochs * _training(actor, tokens, squares)
    if "timing_s/values" in row:
        critic = (read_shape(profile.model.critic.path or profile.model.path) or actor).with_head("value")
        scoring += critic.forward_flops(tokens, squares)
        update += epochs * _training(critic, tokens, squares)
    generation = actor.forward_flops(computed, squares, row["tokens/response"])
    return StepFlops(generation=generation, scoring=scoring, update=update)


def _training(shape: ModelShape, tokens: float, squares: float) -> float:
    linear, quadratic = shape.workload()
    return linear * tokens + quadratic * squares


def peak_flops(machine: Machine) -> float | None:
    """Dense half-precision FLOP/s of one device, by its data sheet; None on a CPU and for unknown devices."""
    device = machine.device(0)
    return device.kind.flops if device is not None and device.kind is not None else None
