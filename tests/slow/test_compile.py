"""Compiled blocks are the same function: log-probs and gradients of packs of several sizes equal the plain ones."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from rlspeed.engine.packed import pack_sequences
from rlspeed.engine.parallelize import compile_blocks
from rlspeed.models.build import PolicyModel, load_causal_lm


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_equals_plain_for_packs_of_any_size(tmp_path: Path) -> None:
    """fp32 on CPU: fused kernels add in another order, 1e-5 on log-probs of about 5, 1e-4 on sums of gradients."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    plain = PolicyModel(
        load_causal_lm(str(tmp_path), dtype=torch.float32, attention="packed"), backend="sdpa", padded=False
    )
    compiled = copy.deepcopy(plain)
    compile_blocks([*compiled.causal_lm.model.layers, compiled.causal_lm.model.norm])
    for lengths in ([7, 3, 12], [5], [9, 9, 2, 4, 6]):
        rows = [[(3 * i + n) % 97 for i in range(n)] for n in lengths]
        batch = pack_sequences(rows, [1] * len(rows))
        results = []
        for model in (plain, compiled):
            model.zero_grad()
            logprobs, _ = model(batch)
            logprobs.sum().backward()
            results.append((logprobs.detach(), [p.grad.clone() for p in model.parameters()]))
        torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=0)
        for a, b in zip(results[0][1], results[1][1]):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
