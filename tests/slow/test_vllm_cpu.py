"""The real vLLM on a CPU (package vllm-cpu, see docs/how-to/vllm.md): answers, log-probs, and weights after updates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlspeed.rollout.types import Prompt, Rollout, SamplingParams

pytestmark = pytest.mark.slow

PROMPTS = [Prompt(prompt_id=i, sample_id=0, token_ids=tuple(range(5 + i, 12 + 2 * i)), seed=i) for i in range(6)]
SAMPLING = SamplingParams(max_new_tokens=12, temperature=0.8, stop_token_ids=(2,))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A tied Qwen2 in transformers, and vLLM started from its directory."""
    pytest.importorskip("vllm")
    for key, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}.items():
        os.environ.setdefault(key, value)
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlspeed.rollout.vllm import VllmGenerator

    folder: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
    ).eval()
    model.save_pretrained(folder)
    generator = VllmGenerator(
        folder,
        dtype="float32",
        max_length=64,
        max_concurrent=8,
        sampling=SAMPLING,
        weights=lambda: {n: p.detach() for n, p in model.named_parameters()},
        engine_args={"enforce_eager": True, "skip_tokenizer_init": True},
    )
    yield model, generator
    generator.close()


def gap(model: Any, rollouts: list[Rollout]) -> float:
    """Mean |log-prob difference| to transformers at the sampling temperature."""
    differences = []
    for r in rollouts:
        ids = torch.tensor([r.prompt_ids + r.response_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(r.prompt_ids) - 1 : -1].float() / SAMPLING.temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(r.response_ids)[:, None])[:, 0]
        differences.append((expected - torch.tensor(r.logprobs)).abs())
    return float(torch.cat(differences).mean())


def test_logprobs_follow_the_trainer_through_updates(pair: tuple[Any, Any]) -> None:
    model, generator = pair
    assert generator.how == "reload_weights"
    assert gap(model, generator.generate(PROMPTS, SAMPLING)) < 1e-4
    for version in (1, 2):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.2)
        stale = gap(model, generator.generate(PROMPTS, SAMPLING))
        generator.load(None, version)
        rollouts = generator.generate(PROMPTS, SAMPLING)
        assert stale > 1e-3
        assert gap(model, rollouts) < 1e-4
        assert {r.policy_version for r in rollouts} == {version}


def test_a_stale_tied_head_is_seen(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, generator = pair
    monkeypatch.setattr("rlspeed.rollout.vllm.TIED", {})
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.2)
    generator.load(None, 3)
    assert gap(model, generator.generate(PROMPTS, SAMPLING)) > 1e-3
    monkeypatch.undo()
    generator.load(None, 4)
    assert gap(model, generator.generate(PROMPTS, SAMPLING)) < 1e-4


def test_seeds_limits_and_reasons(pair: tuple[Any, Any]) -> None:
    _, generator = pair
    alone = generator.generate(PROMPTS[2:3], SAMPLING)
    assert alone[0].response_ids == generator.generate(PROMPTS, SAMPLING)[2].response_ids
    edge = Prompt(prompt_id=0, sample_id=0, token_ids=tuple(range(3, 66)), seed=0)
    (answer,) = generator.generate([edge], SAMPLING)
    assert len(answer.response_ids) == 1
    first = generator.generate(PROMPTS[:1], SAMPLING)[0].response_ids[0]
    stop = SamplingParams(max_new_tokens=12, temperature=0.8, stop_token_ids=(first,))
    (stopped,) = generator.generate(PROMPTS[:1], stop)
    assert (stopped.response_ids, stopped.finish) == ((first,), "stop")
