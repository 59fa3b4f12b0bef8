"""The reward model: read at the last real token, whatever the padding id is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlspeed.config.schema import RewardModel
from rlspeed.errors import ConfigError, RewardError
from rlspeed.rewards.model import RewardModelScorer, length_batches
from rlspeed.rewards.types import Sample

WORDS = ["<pad>", "<s>", "</s>", *"abcdefghij"]
TEMPLATE = "{% for m in messages %}{{ '<s>' if loop.first else '' }}{{ m['content'] }}</s>{% endfor %}"


def save(folder: Path, *, labels: int = 1, template: str | None = TEMPLATE, kind: str = "score") -> Path:
    """A random two-layer Llama with a score head and a tokenizer of one letter per token, where eos is also pad."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=2,
        eos_token_id=2,
        bos_token_id=1,
        num_labels=labels,
    )
    model = (LlamaForSequenceClassification if kind == "score" else LlamaForCausalLM)(config)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("reward") / "model")


def scorer(folder: Path, **cfg: Any) -> RewardModelScorer:
    return RewardModelScorer(RewardModel(path=str(folder), **cfg), torch.device("cpu"), torch.float32)


def alone(folder: Path, ids: list[int]) -> float:
    """The score of one unpadded sequence, computed step by step from the model's own parts."""
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state
        return float(model.score(hidden[0, -1])[0])


def test_each_score_is_that_of_the_text_alone(folder: Path, make_sample: Callable[..., Sample]) -> None:
    """pack-17: pad = eos, and eos after every turn; the naive rule reads after the first turn; order is kept."""
    messages = [
        {"role": "user", "content": "abc"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    samples = [
        make_sample(0, prompt="ab", response_text="cdefghij"),
        make_sample(1, prompt="a", response_text="b"),
        make_sample(2, prompt=messages, response_text="fg"),
    ]
    letters = {w: i for i, w in enumerate(WORDS)}
    expected_ids = [
        [1, *(letters[c] for c in "ab"), 2, *(letters[c] for c in "cdefghij"), 2],
        [1, letters["a"], 2, letters["b"], 2],
        [1, *(letters[c] for c in "abc"), 2, letters["d"], 2, letters["e"], 2, *(letters[c] for c in "fg"), 2],
    ]
    made = scorer(folder)
    assert [made._tokens(s) for s in samples] == expected_ids
    expected = [alone(folder, ids) for ids in expected_ids]
    # fp32 sums in another order: 1e-5 is 100 times the rounding of these numbers near 1, and scores differ by far more
    assert made.score(samples) == pytest.approx(expected, abs=1e-5)
    assert min(abs(a - b) for i, a in enumerate(expected) for b in expected[:i]) > 1e-3


def test_the_published_case_of_padding_equal_to_the_end_token(folder: Path) -> None:
    """pack-17: 5,6,2,7,8,2 padded to 8; the score is that of index 5 (the naive rule gives index 1)."""
    ids = [5, 6, 2, 7, 8, 2]
    made = scorer(folder)
    both = made._forward([ids, [3, 4, 5, 6, 7, 8, 9, 10]])
    assert both == pytest.approx([alone(folder, ids), alone(folder, [3, 4, 5, 6, 7, 8, 9, 10])], abs=1e-5)
    assert abs(both[0] - alone(folder, ids[:2])) > 1e-3


def test_the_text_alone_without_a_template(folder: Path, make_sample: Callable[..., Sample]) -> None:
    made = scorer(folder, use_chat_template=False)
    sample = make_sample(0, prompt_text="ab", response_text="cd")
    assert made.text(sample) == "abcd"
    assert made.score([sample]) == pytest.approx([alone(folder, [3, 4, 5, 6])], abs=1e-5)
    assert made.score([]) == []


def test_several_labels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 labels"):
        scorer(save(tmp_path / "two", labels=2))


def test_an_adapter_beside_the_model_is_refused(folder: Path, tmp_path: Path) -> None:
    """sync-08: an adapter would be left out, or loaded by whoever has peft."""
    copy = tmp_path / "rm"
    shutil.copytree(folder, copy)
    RewardModelScorer(RewardModel(path=str(copy)), "cpu", torch.float32)
    (copy / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="adapter"):
        RewardModelScorer(RewardModel(path=str(copy)), "cpu", torch.float32)


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    """Its head would be random; nobody would notice."""
    with pytest.raises(ConfigError, match=r"no weights for score\.weight"):
        scorer(save(tmp_path / "lm", kind="lm"))


def test_a_missing_template_or_folder_is_named(tmp_path: Path) -> None:
    bare = save(tmp_path / "bare", template=None)
    with pytest.raises(ConfigError, match="no chat template"):
        scorer(bare)
    assert scorer(bare, use_chat_template=False) is not None
    with pytest.raises(ConfigError, match=r"reward\.model\.path"):
        scorer(tmp_path / "nothing")


def test_texts_that_do_not_fit_are_named(folder: Path, make_sample: Callable[..., Sample]) -> None:
    made = scorer(folder, use_chat_template=False)
    samples = [
        make_sample(0, prompt_text="a", response_text="b"),
        make_sample(1, prompt_text="a" * 40, response_text="b" * 40),
        make_sample(2, prompt_text="", response_text=""),
    ]
    with pytest.raises(RewardError) as caught:
        made.score(samples)
    assert [("data row 11" in f.where, f.found) for f in caught.value.faults] == [
        (True, "80 tokens"),
        (False, "0 tokens"),
    ]


def test_scores_that_are_not_finite_are_named(folder: Path, make_sample: Callable[..., Sample]) -> None:
    made = scorer(folder)
    with torch.no_grad():
        made._model.score.weight.fill_(float("nan"))
    with pytest.raises(RewardError, match="data row 11, answer 1: scored nan"):
        made.score([make_sample(1, prompt="a", response_text="b")])


def test_bf16_on_cpu(folder: Path, make_sample: Callable[..., Sample]) -> None:
    made = RewardModelScorer(RewardModel(path=str(folder)), "cpu", torch.bfloat16)
    sample = make_sample(0, prompt="ab", response_text="cd")
    # bf16 keeps 8 bits: two layers of this size stay within a few per cent of a number near 1
    assert made.score([sample]) == pytest.approx(scorer(folder).score([sample]), abs=0.05)


def test_batches_are_sorted_bounded_and_complete() -> None:
    lengths = [5, 1, 9, 2, 30, 2, 8]
    batches = length_batches(lengths, 16)
    assert sorted(i for b in batches for i in b) == list(range(7))
    assert all(len(b) * max(lengths[i] for i in b) <= 16 or len(b) == 1 for b in batches)
    assert [lengths[i] for b in batches for i in b] == sorted(lengths)
    assert length_batches([], 16) == []
