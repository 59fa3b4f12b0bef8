"""The laws that a run must pass before its first step (packed = one by one, no leak, generator = trainer), and after
each one (generator = trainer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from rlspeed.engine.packed import pack_sequences
from rlspeed.engine.packed_shared import pack_shared
from rlspeed.engine.precision import Precision
from rlspeed.engine.world import World
from rlspeed.errors import Fault, RunError
from rlspeed.rollout.types import Prompt, Rollout, SamplingParams
from rlspeed.training.roles import Actor

# Largest mean |log-prob difference| between two layouts of the same tokens. fp32: rounding of a few hundred additions
# in another order, 1e-6 relative, with room for 30 layers. 16 bit: one rounding step of a hidden state moves a log-prob
# by about 1e-2.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
NUM_TOKENS = 8


def check_layout(
    actor: Actor,
    sequences: Sequence[Sequence[int]],
    precision: Precision,
    world: World,
    model: str,
    *,
    multiple: int = 1,
) -> float:
    """Compare log-probs of `sequences` packed together and alone, and look for a leak from the first into the second.

    multiple: packed rows are filled up to a multiple of it. Returns the mean absolute difference.

    Raises:
        RunError: they differ by more than TOLERANCE, or changing the first sequence moves the others at all.
    """

    def logprobs(rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Of all but the first token of each sequence, on CPU."""
        batch = pack_sequences(rows, [1] * len(rows), multiple=multiple)
        return actor.logprobs(batch.to(world.device)).float().cpu()

    together = logprobs(sequences)
    alone = torch.cat([logprobs([s]) for s in sequences])
    gap = float((together - alone).abs().mean())
    limit = TOLERANCE[precision.compute]
    if not gap <= limit:
        raise RunError(
            Fault(
                where=f"start-up check of {model}",
                found=f"log-probs of packed sequences differ from one by one by {gap:.2e} on average",
                allowed=f"at most {limit:.0e} in {precision.compute}",
                fix="this architecture or attention kernel does not keep packed sequences apart; "
                "try model.attention=sdpa or model.use_remove_padding=false",
            )
        )
    vocabulary = int(max(max(s) for s in sequences)) + 1
    changed = [[(t + 1) % vocabulary for t in sequences[0]], *sequences[1:]]
    first = len(sequences[0]) - 1
    leak = float((logprobs(changed)[first:] - together[first:]).abs().max())
    if leak > 1e-6:
        raise RunError(
            Fault(
                where=f"start-up check of {model}",
                found=f"changing one sequence moved another's log-probs by {leak:.2e}",
                allowed="exactly 0",
                fix="attention crosses sequence boundaries; try model.attention=sdpa and report the model",
            )
        )
    return gap


def check_shared(
    actor: Actor, sequences: Sequence[Sequence[int]], precision: Precision, world: World, model: str
) -> float:
    """Compare log-probs of answers that share their prompt with those of the plain pack; the mean absolute difference.

    sequences: the first is the prompt, the others are its answers.

    Raises:
        RunError: they differ by more than TOLERANCE.
    """
    prompt, *answers = sequences
    rows, prompts = [[*prompt, *a] for a in answers], [len(prompt)] * len(answers)
    plain = actor.logprobs(pack_sequences(rows, prompts).to(world.device)).float().cpu()
    shared = actor.logprobs(pack_shared(rows, prompts, [0] * len(rows)).to(world.device)).float().cpu()
    gap = float((shared - plain).abs().mean())
    limit = TOLERANCE[precision.compute]
    if not gap <= limit:
        raise RunError(
            Fault(
                where=f"start-up check of {model}",
                found=f"log-probs of answers that share a prompt differ from plain packs by {gap:.2e} on average",
                allowed=f"at most {limit:.0e} in {precision.compute}",
                fix="set model.shared_prefixes=false",
            )
        )
    return gap


def check_generator(
    actor: Actor,
    generate: Callable[[Sequence[Prompt], SamplingParams], list[Rollout]],
    prompts: Sequence[Sequence[int]],
    world: World,
    limit: float,
    limits: SamplingParams,
    *,
    multiple: int = 1,
) -> float:
    """Sample a few tokens and compare the generator's log-probs with the trainer's; returns the mean absolute
    difference.

    All ranks look at rank 0's answers: those of a share have to compute the same rows.

    Raises:
        RunError: the mean difference is above `limit`.
    """
    sampling = SamplingParams(
        max_new_tokens=min(NUM_TOKENS, limits.max_new_tokens),
        temperature=limits.temperature,
        stop_token_ids=limits.stop_token_ids,
    )
    requests = [Prompt(prompt_id=i, sample_id=0, token_ids=tuple(p), seed=i) for i, p in enumerate(prompts)]
    rollouts = world.broadcast_object(generate(requests, sampling))
    batch = pack_sequences(
        [r.prompt_ids + r.response_ids for r in rollouts], [len(r.prompt_ids) for r in rollouts], multiple=multiple
    )
    trainer = actor.logprobs(batch.to(world.device)).cpu()
    sampled = torch.tensor([x for r in rollouts for x in r.logprobs])
    gap = float((trainer - sampled).abs().mean())
    if not gap <= limit:
        raise RunError(
            Fault(
                where="start-up check",
                found=f"generator and trainer log-probs of the same tokens differ by {gap:.3f} on average",
                allowed=f"at most {limit:g} (rollout.parity_tolerance)",
                fix="the generator does not have the trainer's weights or settings; so a run would learn from noise",
            )
        )
    return gap


def check_gap(values: Mapping[str, float], step: int, limit: float) -> None:
    """After each step: the answers it learned from were sampled from the trainer's weights.

    values: the reduced metrics of the step, the same on all ranks, so that all stop.

    Raises:
        RunError: the mean log-prob difference of the step's answers is above `limit`, or is no number.
    """
    gap = values.get("rollout_corr/logprob_diff_mean")
    if gap is None or gap <= limit:
        return
    sent = "start" if step == 1 else f"update_weights of step {step - 1}"
    raise RunError(
        Fault(
            where=f"step {step}, phase gen",
            found=f"generator and trainer log-probs of the same tokens differ by {gap:.3f} on average",
            allowed=f"at most {limit:g} (rollout.parity_tolerance)",
            fix=f"the generator did not get the trainer's weights in phase {sent}, or rounds too much; "
            "the last checkpoint is from before this step",
        )
    )


def sample_sequences(prompts: Sequence[Sequence[int]], length: int = 48) -> list[list[int]]:
    """Up to four short sequences of unequal length from real prompts, each at least three tokens long."""
    out = []
    for i, prompt in enumerate(prompts[:4]):
        tokens = list(prompt)[: length - 7 * i]
        while len(tokens) < 3:
            tokens = tokens + tokens[:1]
        out.append(tokens)
    if len(out) == 1:
        out.append(out[0][: max(3, len(out[0]) // 2)])
    return out
