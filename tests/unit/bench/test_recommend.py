"""`rlspeed bench recommend`: the rule, its numbers, and the door."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rlspeed.commands import app
from typer.testing import CliRunner

from rlspeed.bench.lengths import sampled_answers, step_lengths
from rlspeed.bench.recommend import Needs, Update, choose, update_of
from rlspeed.config.load import load_profile
from rlspeed.data.render import load_tokenizer
from rlspeed.errors import DataError
from rlspeed.models.build import resolve_model_path

CLI = CliRunner()
UNKNOWN = Needs(peak_gib=None, fits=None, floor_seconds=None)
EVEN = Update(real=100, padded=104, in_order=1.0, dealt=1.0)
TAILED = Update(real=100, padded=250, in_order=1.2, dealt=1.0)


def pick(update: Update, ranks: int = 1, reward_model: bool = False, **needs: Needs) -> str:
    found = {"baseline": UNKNOWN, "hybrid": UNKNOWN, "packed": UNKNOWN, "full": UNKNOWN} | needs
    return choose(update, found, ranks=ranks, reward_model=reward_model, lengths_from="x").profile


def test_the_rule() -> None:
    assert pick(EVEN) == "hybrid"
    assert pick(TAILED) == "packed"
    assert pick(TAILED, reward_model=True) == "full"
    assert pick(EVEN, ranks=8) == "full"
    tight = Needs(peak_gib=90.0, fits=False, floor_seconds=1.0)
    roomy = Needs(peak_gib=40.0, fits=True, floor_seconds=1.0)
    assert pick(EVEN, hybrid=tight, packed=roomy) == "packed", "what does not fit is not recommended"
    assert pick(EVEN, hybrid=tight, packed=tight) == "hybrid"


def test_the_gain_is_counted() -> None:
    """Rows 1 and 9 are filled up to 9, rows 3 and 3 need nothing: 24 tokens for 16."""
    found = update_of([1, 9, 3, 3], ranks=1, micro_batch_size=2)
    assert (found.real, found.padded, found.in_order, found.dealt) == (16, 24, 1.0, 1.0)
    assert found.gain == 1.5
    two = update_of([9, 1, 9, 1], ranks=2, micro_batch_size=2)
    assert (two.padded, two.in_order, two.dealt) == (20, 1.8, 1.0)
    assert two.gain == pytest.approx(1.8)
    advice = choose(two, {}, ranks=2, reward_model=False, lengths_from="x")
    assert (advice.profile, advice.gain) == ("hybrid", 1.0), "hybrid pads as the baseline does"


def test_lengths_of_a_step(tmp_path: Path) -> None:
    profile = load_profile("quickstart").profile
    lengths, told = step_lengths(profile)
    assert len(lengths) == 64 * 4
    assert min(lengths) >= 18
    assert max(lengths) <= profile.data.max_length
    assert "a guess" in told
    folder = tmp_path / "run"
    with pytest.raises(DataError, match="no sampled answers"):
        step_lengths(profile, folder)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "rollouts" / "1.jsonl").write_text(json.dumps({"output": "123"}) + "\n")
    tokenizer = load_tokenizer(resolve_model_path("quickstart"))
    assert sampled_answers(folder, tokenizer) == [len(tokenizer("123")["input_ids"]) + 1]
    same, told = step_lengths(profile, folder)
    assert set(same) == {17 + sampled_answers(folder, tokenizer)[0]}
    assert "1 answers of" in told


def test_the_door() -> None:
    words = ["bench", "recommend", "quickstart", "rollout.max_new_tokens=20", "--json"]
    here = CLI.invoke(app, words)
    assert here.exit_code == 0, here.output
    advice = json.loads(here.stdout)
    assert advice["profile"] == "packed"
    assert advice["predicted_update_gain"] > 1.0
    assert advice["measured"] is None
    there = json.loads(CLI.invoke(app, [*words, "--assume", "8x H100"]).stdout)
    assert there["profile"] == "full"
    needs = there["profiles"]
    assert all(needs[name]["fits"] for name in needs)
    assert needs["packed"]["floor_seconds"] > 0
    plain = CLI.invoke(app, [*words[:-1], "--assume", "1x H100"])
    assert "take packed" in plain.stdout
    assert CLI.invoke(app, [*words, "--assume", "1x H100", "--measure"]).exit_code != 0
