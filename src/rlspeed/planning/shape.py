"""The sizes of a language model from its config.json: weights by name, bytes and FLOPs. No weights are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlspeed.errors import ConfigError, Fault

# what a family's layers carry beside the matrices: (bias on q, k, v; norms on q and k)
_FAMILIES = {"llama": (False, False), "qwen2": (True, False), "qwen3": (False, True)}


_LARGEST = {"num_hidden_layers": 10_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShape:
    """One weight: its checkpoint name, its global shape, and how tensor parallel cuts it.

    tp_dim: the dimension cut; None: every rank holds it whole. heads: number of heads along that dimension, which
    bounds the cut (a head is never halved); None where any cut will do.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None
    heads: int | None = None

    @property
    def num_elements(self) -> int:
        """Parameters in it."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder of the Llama, Qwen2 or Qwen3 family.

    kind: "lm" has a vocabulary head, "value" (critic) and "score" (reward model) a head of one output.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    kind: Literal["lm", "value", "score"] = "lm"

    @staticmethod
    def from_config(config: Mapping[str, Any], *, where: str = "config.json") -> ModelShape:
        """Read the keys of a Hugging Face config.json.

        Raises:
            ConfigError: an unknown family, or keys that are missing (all are named).
        """
        family = str(config.get("model_type", "?"))
        if family not in _FAMILIES:
            known = ", ".join(_FAMILIES)
            raise ConfigError(Fault(where=f"{where}: model_type", found=family, allowed=known))
        needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        sizes = {key: config.get(key) for key in needed}
        # null and 0 stand for the default, as in transformers
        sizes |= {key: config[key] for key in ("num_key_value_heads", "head_dim") if config.get(key)}
        wrong = [
            key for key, size in sizes.items() if type(size) is not int or not 0 < size <= _LARGEST.get(key, 1 << 31)
        ]
        if wrong:
            raise ConfigError(
                [
                    Fault(
                        where=f"{where}: {key}",
                        found="missing or not a whole number" if type(sizes[key]) is not int else str(sizes[key])[:40],
                        allowed=f"1 to {_LARGEST.get(key, 1 << 31):,}",
                    )
                    for key in wrong
                ]
            )
        bias, norm = _FAMILIES[family]
        heads = int(config["num_attention_heads"])
        return ModelShape(
            family=family,
            hidden=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or bool(config.get("attention_bias", False)),
            qk_norm=norm,
        )

    def with_head(self, kind: Literal["lm", "value", "score"]) -> ModelShape:
        """The same backbone with another head."""
        return replace(self, kind=kind)

    def weights(self) -> tuple[WeightShape, ...]:
        """All weights under their checkpoint names; a tied head is not listed twice."""
        out = [WeightShape(name="model.embed_tokens.weight", shape=(self.vocab, self.hidden), tp_dim=0)]
        for layer in range(self.layers):
            out.extend(self.layer_weights(f"model.layers.{layer}."))
        out.append(WeightShape(name="model.norm.weight", shape=(self.hidden,), tp_dim=None))
        if self.kind != "lm":
            out.append(WeightShape(name="score.weight", shape=(1, self.hidden), tp_dim=None))
        elif not self.tied:
            out.append(WeightShape(name="lm_head.weight", shape=(self.vocab, self.hidden), tp_dim=0))
        return tuple(out)

    def layer_weights(self, prefix: str) -> tuple[WeightShape, ...]:
        """Weights of one block."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        h, i = self.hidden, self.intermediate
        table: list[tuple[str, tuple[int, ...], int | None, int | None]] = [
            ("input_layernorm.weight", (h,), None, None),
            ("self_attn.q_proj.weight", (wide, h), 0, self.heads),
            ("self_attn.k_proj.weight", (narrow, h), 0, self.kv_heads),
            ("self_attn.v_proj.weight", (narrow, h), 0, self.kv_heads),
            ("self_attn.o_proj.weight", (h, wide), 1, self.heads),
            ("post_attention_layernorm.weight", (h,), None, None),
            ("mlp.gate_proj.weight", (i, h), 0, None),
            ("mlp.up_proj.weight", (i, h), 0, None),
            ("mlp.down_proj.weight", (h, i), 1, None),
        ]
        if self.qkv_bias:
            table.append(("self_attn.q_proj.bias", (wide,), 0, self.heads))
            table.append(("self_attn.k_proj.bias", (narrow,), 0, self.kv_heads))
            table.append(("self_attn.v_proj.bias", (narrow,), 0, self.kv_heads))
            if self.family == "llama":
                table.append(("self_attn.o_proj.bias", (h,), None, None))
        if self.qk_norm:
            table.append(("self_attn.q_norm.weight", (self.head_dim,), None, None))
            table.append(("self_attn.k_norm.weight", (self.head_dim,), None, None))
        return tuple(WeightShape(name=prefix + n, shape=s, tp_dim=d, heads=k) for n, s, d, k in table)

    @property
    def num_params(self) -> int:
        """All parameters; a tied matrix counts once."""
        per_layer = sum(w.num_elements for w in self.layer_weights(""))
        heads = {"lm": 0 if self.tied else self.vocab * self.hidden}.get(self.kind, self.hidden)
        return self.vocab * self.hidden + self.layers * per_layer + self.hidden + heads

    @property
    def layer_matmul_params(self) -> int:
        """Parameters of one block's matrices: what each token is multiplied with."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def head_params(self) -> int:
        """Parameters of the output head's matrix (the embedding lookup multiplies nothing)."""
        return self.hidden * (self.vocab if self.kind == "lm" else 1)

    @property
    def matmul_params(self) -> int:
        """N of the FLOP formulae: all matrices, the output head included."""
        return self.layers * self.layer_matmul_params + self.head_params

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of the KV cache that one token adds."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def forward_flops(self, tokens: float, squares: float, head_tokens: float | None = None) -> float:
        """FLOPs of one forward pass over packed causal sequences.

        tokens: sum of lengths. squares: sum of squared lengths. head_tokens: tokens that go through the output head
        (None: all). 2 N per token and 2 L n d s per token of a sequence of length s (half of QK^T and PV is masked
        away).
        """
        body = 2.0 * self.layers * self.layer_matmul_params * tokens
        head = 2.0 * self.head_params * (tokens if head_tokens is None else head_tokens)
        return body + head + 2.0 * self.layers * self.heads * self.head_dim * squares

    def workload(self) -> tuple[float, float]:
        """(linear, quadratic) FLOPs of training on a sequence: linear * L + quadratic * L^2, for `balance.deal`.

        Forward and backward: 6 N per token; attention 2 L n d forward and 5 L n d backward (flash attention
        recomputes).
        """
        return 6.0 * self.matmul_params, 7.0 * self.layers * self.heads * self.head_dim
