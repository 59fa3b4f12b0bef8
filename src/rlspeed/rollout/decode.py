"""Forward passes of Llama, Qwen2 and Qwen3 over the trainer's own weights: a packed prefill and one decode step.

Shapes: B sequences in flight, T packed tokens, H width, D head width, L longest cached length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlspeed.engine.attention import varlen_attention
from rlspeed.errors import ConfigError, Fault


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder block; biases and head norms are None where the family has none."""

    norm1: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    norm2: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


class Cache:
    """Keys and values in flight: [layers][slots, Hkv, L, D]; one slot per sequence, slots 0..B-1 are in use."""

    def __init__(self, config: Any, slots: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        width = head_width(config)
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, length, width)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot into another."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]


def head_width(config: Any) -> int:
    """D of the model."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check_rope(rotary: Any, config: Any, max_length: int) -> None:
    """Refuse rotary tables that change with the length of the sequence; one table serves all sequences here."""
    kind = getattr(rotary, "rope_type", "default")
    parameters = getattr(config, "rope_parameters", None) or {}
    limit = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    if kind in ("dynamic", "longrope") and max_length > limit:
        raise ConfigError(
            Fault(
                where="model.path",
                found=f"rope type {kind!r}, whose angles change past {limit} tokens",
                allowed=f"data.max_length of at most {limit}, or another rope type",
                fix="shorten data.max_length",
            )
        )


class Decoder:
    """The model as plain tensor functions; `refresh` takes the weights, by reference where they are plain tensors."""

    def __init__(self, model: Any, max_length: int) -> None:
        config = model.config
        sliding = [t for t in getattr(config, "layer_types", None) or [] if t != "full_attention"]
        window = getattr(config, "sliding_window", None)
        if sliding and window is not None and window < max_length:
            raise ConfigError(
                Fault(
                    where="model.path",
                    found=f"layers of type {sliding[0]!r} with a window of {window}",
                    allowed=f"full attention, or data.max_length of at most {window}",
                    fix="shorten data.max_length",
                )
            )
        _check_rope(model.model.rotary_emb, config, max_length)
        self.config = config
        self.act = model.model.layers[0].mlp.act_fn
        self.heads, self.kv_heads, self.width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            head_width(config),
        )
        self.eps = config.rms_norm_eps
        self.scale = self.width**-0.5
        device = model.model.rotary_emb.inv_freq.device
        positions = torch.arange(max_length, device=device)[None]
        cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float32, device=device), positions)
        self.cos, self.sin = cos[0], sin[0]
        self.layers: list[Layer] = []

    def refresh(self, weights: dict[str, Tensor]) -> None:
        """Point at `weights`, by Hugging Face name."""
        get = weights.get
        self.embed = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.head = get("lm_head.weight", self.embed)
        self.layers = []
        for i in range(self.config.num_hidden_layers):
            a, m = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
            self.layers.append(
                Layer(  # type: ignore[call-arg]
                    weights[f"model.layers.{i}.input_layernorm.weight"],
                    *(weights[f"{a}{n}_proj.weight"] for n in "qkv"),
                    *(get(f"{a}{n}_proj.bias") for n in "qkv"),
                    *(get(f"{a}{n}_norm.weight") for n in "qk"),
                    weights[f"{a}o_proj.weight"],
                    get(f"{a}o_proj.bias"),
                    weights[f"model.layers.{i}.post_attention_layernorm.weight"],
                    *(weights[f"{m}{n}_proj.weight"] for n in ("gate", "up", "down")),
                    *(get(f"{m}{n}_proj.bias") for n in ("gate", "up", "down")),
                )
            )

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.embed.dtype

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    def _qkv(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H] to rotated q [T, Hq, D], rotated k and v [T, Hkv, D]."""
        q = F.linear(x, layer.q, layer.q_bias).view(-1, self.heads, self.width)
        k = F.linear(x, layer.k, layer.k_bias).view(-1, self.kv_heads, self.width)
        v = F.linear(x, layer.v, layer.v_bias).view(-1, self.kv_heads, self.width)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._rms(q, layer.q_norm), self._rms(k, layer.k_norm)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate = self.act(F.linear(x, layer.gate, layer.gate_bias))
        return F.linear(gate * F.linear(x, layer.up, layer.up_bias), layer.down, layer.down_bias)

    def prefill(self, prompts: list[tuple[int, ...]], cache: Cache, slots: list[int], backend: str) -> Tensor:
        """Run prompts packed, keep keys and values in `slots`; returns the logits [P, V] after their last tokens."""
        device = self.embed.device
        lengths = tuple(len(p) for p in prompts)
        ids = torch.tensor([t for p in prompts for t in p], device=device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        bounds[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
        bounds = bounds.to(device)
        rows = torch.repeat_interleave(torch.tensor(slots), torch.tensor(lengths)).to(device)
        cos, sin = self._tables(positions)
        x = F.embedding(ids, self.embed)
        for i, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, self._rms(x, layer.norm1), cos, sin)
            cache.keys[i, rows, :, positions] = k
            cache.values[i, rows, :, positions] = v
            out = varlen_attention(q, k, v, bounds, lengths, max_seqlen=max(lengths), scale=self.scale, backend=backend)
            x = x + F.linear(out.reshape(x.shape[0], -1), layer.o, layer.o_bias)
            x = x + self._mlp(layer, self._rms(x, layer.norm2))
        last = bounds[1:].long() - 1
        return F.linear(self._rms(x[last], self.norm), self.head)

    def step(self, tokens: Tensor, positions: Tensor, cache: Cache, longest: int) -> Tensor:
        """One token for each of the first B slots: tokens, positions [B] int64 to logits [B, V].

        longest: highest position + 1, so that only live cache is read.
        """
        count = tokens.shape[0]
        rows = torch.arange(count, device=tokens.device)
        cos, sin = self._tables(positions)
        seen = (torch.arange(longest, device=tokens.device)[None] <= positions[:, None])[:, None, None]
        x = F.embedding(tokens, self.embed)
        group = self.heads // self.kv_heads
        for i, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, self._rms(x, layer.norm1), cos, sin)
            keys, values = cache.keys[i], cache.values[i]
            keys[rows, :, positions] = k
            values[rows, :, positions] = v
            # the query heads of one KV head stand as its queries, so nothing is expanded
            out = F.scaled_dot_product_attention(
                q.view(count, self.kv_heads, group, self.width),
                keys[:count, :, :longest],
                values[:count, :, :longest],
                attn_mask=seen,
                scale=self.scale,
            )
            x = x + F.linear(out.reshape(count, -1), layer.o, layer.o_bias)
            x = x + self._mlp(layer, self._rms(x, layer.norm2))
        return F.linear(self._rms(x, self.norm), self.head)

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, D] in the weights' dtype, as the model itself rounds them."""
        return self.cos[positions][:, None].to(self.dtype), self.sin[positions][:, None].to(self.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, D] with the two halves of a head as pairs (as transformers lays them out)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
