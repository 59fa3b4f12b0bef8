"""How long the sequences of a step are: prompts from the data, answers from a run's samples or as a benchmark draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlspeed.config.schema import Profile
from rlspeed.data.prompts import load_prompts, prompt_limit
from rlspeed.data.render import load_tokenizer
from rlspeed.errors import DataError, Fault
from rlspeed.models.build import resolve_model_path
from rlspeed.training.lengths import fixed_length
from rlspeed.training.seeds import seed_of


def step_lengths(profile: Profile, run: Path | None = None) -> tuple[list[int], str]:
    """(tokens of each sequence of one step, where the answers' lengths come from).

    run: a run folder whose sampled answers (`rollouts/*.jsonl`) are counted; None: as `rollout.fix_lengths: long_tail`
    draws them.

    Raises:
        DataError: prompts or samples that cannot be read.
    """
    tokenizer = load_tokenizer(
        resolve_model_path(profile.model.path), trust_remote_code=profile.model.trust_remote_code
    )
    prompt_limit(profile.data, profile.rollout)
    prompts = load_prompts(profile.data, profile.rollout, tokenizer, "train").lengths
    limit, seed = profile.rollout.max_new_tokens, profile.run.seed
    seen = None if run is None else sampled_answers(run, tokenizer)
    out = []
    for group in range(min(profile.data.batch_size, len(prompts))):
        row = seed_of(seed, group) % len(prompts)
        for number in range(profile.rollout.n):
            drawn = seed_of(seed, group, number)
            answer = fixed_length("long_tail", drawn, limit) if seen is None else seen[drawn % len(seen)]
            assert answer is not None
            out.append(min(int(prompts[row]) + min(answer, limit), profile.data.max_length))
    told = f"answers long-tailed up to {limit}, a guess" if seen is None else f"{len(seen)} answers of {run}"
    return out, told


def sampled_answers(run: Path, tokenizer: Any) -> list[int]:
    """Tokens of the answers that a run wrote down.

    Raises:
        DataError: it wrote none (run.log_rollouts).
    """
    texts: list[str] = []
    for file in sorted((run / "rollouts").glob("*.jsonl")):
        try:
            texts += [str(json.loads(line)["output"]) for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(Fault(where=str(file), found=f"cannot be read: {error!r}")) from error
    if not texts:
        fix = "a run with run.log_rollouts above 0"
        raise DataError(Fault(where=str(run / "rollouts"), found="no sampled answers", fix=fix))
    # the end token is not in the text
    return [len(ids) + 1 for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
