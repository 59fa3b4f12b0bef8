"""Tiny models, batches and losses of the tests with several ranks, the same in every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlspeed.engine.packed import PackedBatch, pack_sequences
from rlspeed.models.attention_hook import PACKED_ATTENTION, register_attention
from rlspeed.models.build import PolicyModel, ValueModel

VOCAB = 61  # a prime: no degree divides it


def tiny_lm(family: str, *, tied: bool, kv_heads: int = 4, heads: int = 8, vocab: int = VOCAB, **extra: Any) -> Any:
    """A two-layer causal language model in fp32 whose norms and biases differ from layer to layer."""
    import transformers

    register_attention()
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
        attn_implementation=PACKED_ATTENTION,
        **extra,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.1 if label.endswith("bias") else 0.3
            parameter.copy_(1.0 + 0.1 * noise if "norm" in label else scale * noise)
    return model


def tiny_module(kind: str, family: str, **model: Any) -> PolicyModel | ValueModel:
    """A policy, or a value model with a head that is not zero."""
    lm = tiny_lm(family, **model)
    if kind == "policy":
        return PolicyModel(lm, backend="sdpa", padded=False)
    value = ValueModel(lm, backend="sdpa", padded=False)
    with torch.no_grad():
        value.value_head.weight.copy_(torch.linspace(-1.0, 1.0, value.value_head.in_features)[None])
        value.value_head.bias.fill_(0.25)
    return value


def tiny_batch(number: int, *, multiple: int = 4) -> PackedBatch:
    """Batch `number`: sequences of several lengths, a one-token prompt and a sequence that crosses every slice.

    Even batches begin with a long prompt, so the first slice of a row holds no token that trains. Stream `target` is
    what a loss compares with, stream `weight` each token's weight in it; both differ from token to token.
    """
    generator = torch.Generator().manual_seed(100 + number)
    lengths, prompts = ((14, 9, 3, 2), (12, 2, 1, 1)) if number % 2 == 0 else ((5, 17, 4), (2, 1, 3))
    sequences = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    batch = pack_sequences(sequences, list(prompts), multiple=multiple)
    count = int(batch.loss_mask.sum())
    batch.put("target", torch.randn(count, generator=generator))
    batch.put("weight", torch.rand(count, generator=generator) / 20.0)
    return batch


def tiny_loss(module: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """A loss whose gradient differs from token to token: squares of log-probs with some entropy, or of values."""
    target, weight = batch.get("target"), batch.get("weight")
    if isinstance(module, PolicyModel):
        logprobs, entropy = module(batch, 0.8)
        assert entropy is not None
        return (weight * ((logprobs - target).square() - 0.3 * entropy)).sum()
    return (weight * (module(batch) - target).square()).sum()
