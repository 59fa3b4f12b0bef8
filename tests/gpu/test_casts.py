"""bf16 end to end: in a whole step casts, pads and concatenations over tokens take less than 1 % of the time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlspeed.bench.kernels import classify
from rlspeed.bench.measure import trace_events
from tests.whole_update import WholeUpdate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers of the 0.5B shape."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=8,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.timeout(900)
def test_casts_and_pads_take_less_than_a_hundredth(model: Path) -> None:
    """Log-probs of two mini-batches, then their updates, after a first round that compiles."""
    words = ("model.model_dtype=bf16", "model.compile=true", "packing.capacity=16384", "algorithm.mini_batch_size=16")
    step = WholeUpdate(
        "cuda",
        *(f"model.path={model}", "data.train_files=none", "algorithm.kind=grpo", "rollout.n=2", *words),
        profile="packed",
        groups=32,
        longest=1024,
    )

    def whole() -> None:
        step.score()
        step.update()

    whole()
    batches = [b for part in step.per_minibatch for b in part]
    sizes = [(b.num_tokens,) for b in batches] + [(b.response_index().numel(),) for b in batches]
    moves = classify(trace_events(whole, step.world.device), sizes)
    assert moves.total > 0
    assert moves.share < 0.01, moves
