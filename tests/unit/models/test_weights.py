"""Names, shapes and views of live weights; the tensor parallel tables of each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlspeed.engine.tensor_parallel import tensor_faults
from rlspeed.engine.ulysses import check_heads
from rlspeed.errors import LayoutError
from rlspeed.models.build import PolicyModel, ValueModel, load_causal_lm
from rlspeed.models.tp_rules import rules_for
from rlspeed.models.weights import checkpoint_name, generator_views, live_weights, reshard_requests, weight_specs
from rlspeed.planning.layout import Mesh
from rlspeed.planning.reshard import plan_reshard
from rlspeed.planning.transition import interval_generation, own_generation

FAMILIES = ["llama", "qwen2", "qwen3"]


def policy(tiny_models: dict[str, Path], family: str) -> Any:
    lm = load_causal_lm(str(tiny_models[family]), dtype=torch.float32, attention="packed")
    return PolicyModel(lm, backend="sdpa", padded=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_a_block_has_a_rule(tiny_models: dict[str, Path], family: str) -> None:
    """A matrix without a rule would be computed on every rank; a head norm without one would lose gradients."""
    module = policy(tiny_models, family)
    rules = rules_for(module)
    named = {cut.module for cut in rules.cuts}
    for block in rules.blocks:
        found = {n for n, m in block.named_modules() if isinstance(m, nn.Linear)}
        found |= {n for n, m in block.named_modules() if n.startswith("self_attn.") and n.endswith("_norm")}
        assert found == named
    assert rules_for(ValueModel(module.causal_lm, backend="sdpa", padded=False)).head is None


@pytest.mark.parametrize("family", FAMILIES)
def test_specs_are_the_live_model(tiny_models: dict[str, Path], family: str) -> None:
    """Names of the checkpoint, each trainable parameter once, tied weights once."""
    module = policy(tiny_models, family)
    specs = {s.name: s for s in weight_specs(module, module.causal_lm.config)}
    assert set(specs) == set(live_weights(module))
    assert ("lm_head.weight" in specs) == (family == "qwen3")
    assert specs["model.layers.1.self_attn.k_proj.weight"].planned.heads == 2
    assert specs["model.layers.1.mlp.down_proj.weight"].tp_dim == 1
    assert {s.dtype for s in specs.values()} == {torch.float32}
    value = ValueModel(module.causal_lm, backend="sdpa", padded=False)
    names = {s.name for s in weight_specs(value, module.causal_lm.config)}
    assert names - set(specs) == {"value_head.weight", "value_head.bias"}


def test_sync_09_a_parameter_that_no_table_lists_is_refused(tiny_models: dict[str, Path]) -> None:
    """sync-09: an adapter beside the model would train and never reach the generator."""
    module = policy(tiny_models, "llama")
    module.causal_lm.model.layers[0].mlp.adapter = nn.Linear(2, 3, bias=False)
    del module.causal_lm.model.layers[1].mlp.up_proj
    with pytest.raises(LayoutError) as caught:
        weight_specs(module, module.causal_lm.config)
    assert {f.where for f in caught.value.faults} == {
        "model.layers.0.mlp.adapter.weight",
        "model.layers.1.mlp.up_proj.weight",
    }


def test_sync_10_wrapper_names_are_taken_off() -> None:
    """sync-10: compile's, checkpointing's and both."""
    name = "causal_lm.model.layers.3._checkpoint_wrapped_module._orig_mod.mlp.up_proj.weight"
    assert checkpoint_name(name) == "model.layers.3.mlp.up_proj.weight"
    assert checkpoint_name("backbone.norm.weight") == "model.norm.weight"
    assert checkpoint_name("value_head.bias") == "value_head.bias"


def test_dev_10_heads_are_whole_or_refused(tiny_models: dict[str, Path]) -> None:
    """dev-10: four query and two KV heads: degree 4 shares each KV head between two ranks, degree 3 halves heads."""
    rules = rules_for(policy(tiny_models, "llama"))
    assert tensor_faults(rules, 2) == []
    assert tensor_faults(rules, 4) == []
    assert {f.found for f in tensor_faults(rules, 3)} == {"4 query heads", "2 KV heads"}
    assert "a vocabulary of 97" in {f.found for f in tensor_faults(rules, 64)}
    assert check_heads(32, 4, 8) == []
    assert check_heads(32, 8, 4) == []
    assert [f.found for f in check_heads(12, 6, 4)] == ["6 KV heads on a tensor parallel rank over 4 ranks"]
    assert [f.found for f in check_heads(6, 2, 4)] == ["6 query heads on a tensor parallel rank over 4 ranks"]


def test_dev_10_training_keeps_few_kv_heads_whole(tiny_models: dict[str, Path]) -> None:
    """dev-10: over tensor parallel 4 two KV heads are not cut in training, and one to a rank in generation."""
    module = policy(tiny_models, "qwen2")
    specs = weight_specs(module, module.causal_lm.config)
    train = Mesh.of(range(8), dp_replicate=1, dp_shard=2, tp=4)
    generation = interval_generation(train, 4)
    requests = {r.name: r for r in reshard_requests(specs, train, generation, aligned=True, wire_dtype="bf16")}
    request = requests["model.layers.0.self_attn.k_proj.weight"]
    assert {r.shape for r in request.src.regions(request.shape).values()} == {(12, 48)}
    assert [request.dst.region(request.shape, r).offset[0] for r in range(4)] == [0, 0, 12, 12]
    with pytest.raises(LayoutError, match="int3"):
        reshard_requests(specs, train, generation, aligned=True, wire_dtype="int3")


def test_fused_and_filled_tensors_are_views(tiny_models: dict[str, Path]) -> None:
    """qkv and gate_up of the second of two ranks, a vocabulary filled up to 128, a tied head under its own name."""
    module = policy(tiny_models, "qwen2")
    specs = weight_specs(module, module.causal_lm.config)
    generation = own_generation((0,), 1)
    plan = plan_reshard(
        reshard_requests(specs, Mesh.of((0,), dp_shard=1, tp=1), generation, aligned=True, wire_dtype="fp32")
    )
    regions = {t.name: t.dst.region(t.shape, 0) for t in plan.tensors}
    fused = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
    tensors: dict[str, torch.Tensor] = {}
    for spec in specs:
        part = spec.name.split(".")[-2]
        if part in ("k_proj", "v_proj", "up_proj"):
            continue
        shape = list(spec.shape)
        if part == "q_proj":
            shape[0] = 48 + 2 * 24
        if part == "gate_proj":
            shape[0] = 2 * 96
        if part == "embed_tokens":
            shape[0] = 128
        tensors[spec.name.replace(part, fused.get(part, part))] = torch.zeros(shape)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    views = generator_views(tensors, regions)
    assert set(views) == {s.name for s in specs}
    for name, view in views.items():
        view.copy_(live_weights(module)[name].detach())
    attention = module.causal_lm.model.layers[1].self_attn
    expected = torch.cat([attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias])
    assert torch.equal(tensors["model.layers.1.self_attn.qkv_proj.bias"], expected.detach())
    mlp = module.causal_lm.model.layers[0].mlp
    joined = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()
    assert torch.equal(tensors["model.layers.0.mlp.gate_up_proj.weight"], joined)
    assert torch.equal(
        tensors["model.embed_tokens.weight"][:97], live_weights(module)["model.embed_tokens.weight"].detach()
    )


def test_a_generator_with_other_tensors_is_refused(tiny_models: dict[str, Path]) -> None:
    """sync-10: what is missing, what is left over (an own copy of a tied head) and what has other rows, together."""
    module = policy(tiny_models, "llama")
    specs = weight_specs(module, module.causal_lm.config)
    generation = own_generation((0,), 1)
    plan = plan_reshard(
        reshard_requests(specs, Mesh.of((0,), dp_shard=1, tp=1), generation, aligned=True, wire_dtype="fp32")
    )
    regions = {t.name: t.dst.region(t.shape, 0) for t in plan.tensors}
    tensors = {s.name: torch.zeros(s.shape) for s in specs if s.name != "model.norm.weight"}
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(95, 48)
    tensors["lm_head.weight"] = torch.zeros(97, 48)
    with pytest.raises(LayoutError) as caught:
        generator_views(tensors, regions)
    assert [f.where for f in caught.value.faults] == [
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]
