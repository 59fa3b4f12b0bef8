"""Per family: which matrices tensor parallel cuts by columns and which by rows.

| submodule of a block | cut | heads |
| --- | --- | --- |
| q_proj (and its bias) | column | query |
| k_proj, v_proj (and their biases) | column | KV; whole on every rank where there are fewer heads than ranks |
| o_proj | row (a bias is added once, after the sum) | query |
| gate_proj, up_proj | column | |
| down_proj | row | |
| q_norm, k_norm (Qwen3) | whole; each rank's gradient covers its own heads | |

Embedding and output head are cut by vocabulary, tied or not; all other norms are whole and alike on every rank.
"""

from __future__ import annotations

from typing import Any

from rlspeed.engine.tensor_parallel import Cut, ModelRules
from rlspeed.models.build import PolicyModel, ValueModel

_DECODER = (
    Cut(module="self_attn.q_proj", kind="column", heads="q"),
    Cut(module="self_attn.k_proj", kind="column", heads="kv"),
    Cut(module="self_attn.v_proj", kind="column", heads="kv"),
    Cut(module="self_attn.o_proj", kind="row", heads="q"),
    Cut(module="mlp.gate_proj", kind="column"),
    Cut(module="mlp.up_proj", kind="column"),
    Cut(module="mlp.down_proj", kind="row"),
)
_HEAD_NORMS = (Cut(module="self_attn.q_norm", kind="per_head"), Cut(module="self_attn.k_norm", kind="per_head"))

FAMILIES: dict[str, tuple[Cut, ...]] = {
    "llama": _DECODER,
    "qwen2": _DECODER,
    "qwen3": (*_DECODER, *_HEAD_NORMS),
}


def rules_for(module: PolicyModel | ValueModel) -> ModelRules:
    """The rules of the model inside a policy or a value model."""
    backbone: Any = module.causal_lm.model if isinstance(module, PolicyModel) else module.backbone
    config = backbone.config
    return ModelRules(
        blocks=backbone.layers,
        embedding=backbone.embed_tokens,
        head=module.causal_lm.lm_head if isinstance(module, PolicyModel) else None,
        cuts=FAMILIES[config.model_type],
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
    )
