"""rollout.fix_lengths: lengths that neither weights nor precision nor layout can change."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from rlspeed.config.load import load_profile
from rlspeed.config.rules import check
from rlspeed.training.lengths import fixed_length
from rlspeed.training.loop import train

SHORT = [
    "data.max_length=40",
    "data.batch_size=4",
    "data.val_files=null",
    "rollout.n=2",
    "rollout.max_new_tokens=12",
    "run.steps=2",
    "run.startup_checks=false",
    "run.save_last=false",
    "run.save_hf=false",
    "run.plots=false",
    "run.log_rollouts=0",
]

UNIFORM = [1, 40, 15, 29, 24, 68]
LONG_TAIL = [4, 10, 88, 9, 21, 4]


def test_lengths_are_within_the_limit_and_spread_as_they_say() -> None:
    drawn = {kind: [fixed_length(kind, seed, 600) for seed in range(4000)] for kind in ("uniform", "long_tail")}
    for values in drawn.values():
        assert min(values) >= 1
        assert max(values) <= 600
    assert 280 < statistics.fmean(drawn["uniform"]) < 320
    assert 93 < statistics.median(drawn["long_tail"]) < 107, "a sixth of the limit"
    full = sum(v == 600 for v in drawn["long_tail"]) / 4000
    assert 0.025 < full < 0.05, "P(z > ln 6) is 0.037"
    assert fixed_length("whole", 3, 600) == 600
    assert fixed_length("none", 3, 600) is None
    assert fixed_length("uniform", 3, 1) == fixed_length("long_tail", 3, 1) == 1


def test_lengths_are_those_of_the_seed() -> None:
    """Written down once: another machine, or another version, must draw the same."""
    assert [fixed_length("uniform", s, 100) for s in range(6)] == UNIFORM
    assert [fixed_length("long_tail", s, 100) for s in range(6)] == LONG_TAIL


def run_tokens(folder: Path, *words: str) -> list[tuple[float, ...]]:
    """Tokens of each step: prompt, response, sum of squares."""
    assert train(load_profile("quickstart", [*SHORT, f"run.dir={folder}", *words])) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert not (folder / "checkpoints").exists(), "run.save_last=false"
    return [tuple(r[f"tokens/{n}"] for n in ("prompt", "response", "squares")) for r in rows]


def test_other_weights_and_another_layout_generate_the_same_lengths(tmp_path: Path) -> None:
    words = ("rollout.fix_lengths=long_tail",)
    first = run_tokens(tmp_path / "a", *words)
    other = ("optim.actor.lr=0.05", "model.use_remove_padding=false", "model.actor.use_3d_hybrid_engine=false")
    assert run_tokens(tmp_path / "b", *words, *other) == first
    assert first[0] != first[1], "each step has lengths of its own"
    whole = run_tokens(tmp_path / "c", "rollout.fix_lengths=whole")
    assert [w[1] for w in whole] == [4 * 2 * 12] * 2, "the model would end after 3 or 4 tokens"


@pytest.mark.parametrize("key", ["rollout.stop=[x]", "rollout.stop_token_ids=[5]"])
def test_what_would_end_an_answer_has_no_effect(key: str) -> None:
    words = ["data.val_files=null", "run.validate_every=0", key]
    name = key.partition("=")[0]
    found = [str(f) for f in check(load_profile("quickstart", [*words, "rollout.fix_lengths=uniform"]))]
    assert any(name in f and "no effect" in f for f in found)
    assert not any(name in str(f) for f in check(load_profile("quickstart", words)))
