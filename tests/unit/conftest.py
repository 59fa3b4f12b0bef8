"""Small things that many tests need: tiny models on disk, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def make_tiny_model(folder: Path, kind: str = "llama", *, tied: bool = True, vocab: int = 97) -> Path:
    """A two-layer random model of a supported family as a Hugging Face directory."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    classes = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config_class, model_class = classes[kind]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=vocab,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
    )
    model = model_class(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One directory for each supported family."""
    root = tmp_path_factory.mktemp("models")
    return {kind: make_tiny_model(root / kind, kind, tied=kind != "qwen3") for kind in ("llama", "qwen2", "qwen3")}
