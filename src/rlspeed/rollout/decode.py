"""Forward passes of Llama, Qwen2 and Qwen3 over the trainer's own weights: a packed prefill and one decode step.

Shapes: B lanes (sequences in flight), T packed tokens, H width, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rlspeed.engine.attention import varlen_attention
from rlspeed.errors import ConfigError, Fault
from rlspeed.rollout.paged import PagedCache


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder block; biases and head norms are None where the family has none.

    qkv, qkv_bias, gate_up, gate_up_bias: q, k, v (gate, up) as one tensor where their rows lie in one piece of memory
    (`fuse_parameters`), else None.
    """

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
    qkv: Tensor | None = None
    qkv_bias: Tensor | None = None
    gate_up: Tensor | None = None
    gate_up_bias: Tensor | None = None


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The parts as one tensor along dimension 0, if they lie behind one another in memory; else None."""
    first = parts[0]
    if first is None:
        return None
    where, rows = first.data_ptr(), 0
    for part in parts:
        if part is None or not part.is_contiguous() or part.data_ptr() != where or part.shape[1:] != first.shape[1:]:
            return None
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        where += part.numel() * part.element_size()
        rows += part.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


FUSED = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


@torch.no_grad()
def fuse_parameters(model: Any) -> None:
    """Lay q, k and v (gate and up) of each block behind one another in memory; the parameters become views.

    Names, shapes and values stay: trainer, optimizer and checkpoint see what they saw, and the generator has one matrix
    product where there were three.
    """
    for block in model.model.layers:
        for part, names in FUSED:
            modules = [getattr(getattr(block, part), name) for name in names]
            for kind in ("weight", "bias"):
                parameters = [getattr(m, kind) for m in modules]
                if any(p is None for p in parameters) or joined([p.data for p in parameters]) is not None:
                    continue
                whole = torch.cat([p.data for p in parameters])
                for p, piece in zip(parameters, whole.split([p.shape[0] for p in parameters])):
                    p.data = piece


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


class DecodeOps(Protocol):
    """What a decode step needs beside matrix products: `paged.TorchOps` anywhere, `fused.TritonOps` on CUDA."""

    graphs: bool

    def bind(self, cache: PagedCache | None) -> None:
        """Use this cache from now on; None gives it up."""

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta [B, H], and that normalised."""

    def attend(self, layer: int, qkv: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """qkv [B, (Hq + 2 Hkv) D] to attention's output [B, Hq D]; the token's key and value are kept."""

    def keep(self, layer: int, qkv: Tensor, positions: Tensor, pages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, (Hq + 2 Hkv) D] to rotated q, rotated k, v; keys and values go to the pages [T] int32."""

    def gated(self, gate_up: Tensor) -> Tensor:
        """act(gate) * up of [B, 2 I]."""


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
        """Point at `weights`, by Hugging Face name.

        On a GPU q, k, v (gate, up) that lie apart are copied into one tensor, on a CPU they are used one by one.
        """
        get = weights.get
        self.embed = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.head = get("lm_head.weight", self.embed)
        self.layers = []
        for i in range(self.config.num_hidden_layers):
            a, m = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
            qkv, gate_up = [f"{a}{n}_proj." for n in "qkv"], [f"{m}{n}_proj." for n in ("gate", "up")]
            self.layers.append(
                Layer(
                    norm1=weights[f"model.layers.{i}.input_layernorm.weight"],
                    q=weights[f"{a}q_proj.weight"],
                    k=weights[f"{a}k_proj.weight"],
                    v=weights[f"{a}v_proj.weight"],
                    q_bias=get(f"{a}q_proj.bias"),
                    k_bias=get(f"{a}k_proj.bias"),
                    v_bias=get(f"{a}v_proj.bias"),
                    q_norm=get(f"{a}q_norm.weight"),
                    k_norm=get(f"{a}k_norm.weight"),
                    o=weights[f"{a}o_proj.weight"],
                    o_bias=get(f"{a}o_proj.bias"),
                    norm2=weights[f"model.layers.{i}.post_attention_layernorm.weight"],
                    gate=weights[f"{m}gate_proj.weight"],
                    up=weights[f"{m}up_proj.weight"],
                    down=weights[f"{m}down_proj.weight"],
                    gate_bias=get(f"{m}gate_proj.bias"),
                    up_bias=get(f"{m}up_proj.bias"),
                    down_bias=get(f"{m}down_proj.bias"),
                    qkv=self._whole([get(n + "weight") for n in qkv]),
                    qkv_bias=self._whole([get(n + "bias") for n in qkv]),
                    gate_up=self._whole([get(n + "weight") for n in gate_up]),
                    gate_up_bias=self._whole([get(n + "bias") for n in gate_up]),
                )
            )

    def _whole(self, parts: Sequence[Tensor | None]) -> Tensor | None:
        whole = joined(parts)
        if whole is None and self.embed.is_cuda:
            present = [p for p in parts if p is not None]
            whole = torch.cat(present) if len(present) == len(parts) else None
        return whole

    def addresses(self) -> tuple[int, ...]:
        """Where the weights lie: a captured graph is good for these alone."""
        tensors = [self.embed, self.norm, self.head]
        for layer in self.layers:
            tensors += [t for t in (getattr(layer, name) for name in Layer.__slots__) if t is not None]
        return tuple(t.data_ptr() for t in tensors)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.embed.dtype

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., H] over its root mean square, times weight [H], rounded where the model rounds."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    def heads_of(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, (Hq + 2 Hkv) D] to rotated q [T, Hq, D], rotated k and v [T, Hkv, D]."""
        weights = self.layers[layer]
        q, k, v = (
            x.unflatten(-1, (-1, self.width))
            for x in qkv.split([n * self.width for n in (self.heads, self.kv_heads, self.kv_heads)], -1)
        )
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = self.rms(q, weights.q_norm), self.rms(k, weights.k_norm)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    @staticmethod
    def _qkv(layer: Layer, x: Tensor) -> Tensor:
        if layer.qkv is not None:
            return F.linear(x, layer.qkv, layer.qkv_bias)
        parts = ((layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias))
        return torch.cat([F.linear(x, w, b) for w, b in parts], -1)

    @staticmethod
    def _gate_up(layer: Layer, x: Tensor) -> Tensor:
        if layer.gate_up is not None:
            return F.linear(x, layer.gate_up, layer.gate_up_bias)
        return torch.cat([F.linear(x, layer.gate, layer.gate_bias), F.linear(x, layer.up, layer.up_bias)], -1)

    def prefill(
        self,
        sequences: Sequence[Sequence[int]],
        pages: Sequence[Sequence[int]],
        size: int,
        ops: DecodeOps,
        backend: str,
    ) -> Tensor:
        """Run sequences packed and keep keys and values in their pages; logits [S, V] fp32 after their last tokens.

        size: tokens of a page. backend: of `choose_attention`.
        """
        device = self.embed.device
        lengths = tuple(len(s) for s in sequences)
        ids = torch.tensor([t for s in sequences for t in s], device=device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        rows = torch.tensor([held[i // size] for held, n in zip(pages, lengths) for i in range(n)], dtype=torch.int32)
        rows = rows.to(device)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        last = (ends[1:] - 1).to(device)
        bounds = ends.to(device, torch.int32)
        x, delta = F.embedding(ids, self.embed), None
        for i, layer in enumerate(self.layers):
            x, y = ops.add_norm(x, delta, layer.norm1)
            q, k, v = ops.keep(i, self._qkv(layer, y), positions, rows)
            out = varlen_attention(q, k, v, bounds, lengths, max_seqlen=max(lengths), scale=self.scale, backend=backend)
            x, y = ops.add_norm(x, F.linear(out.reshape(x.shape[0], -1), layer.o, layer.o_bias), layer.norm2)
            delta = F.linear(ops.gated(self._gate_up(layer, y)), layer.down, layer.down_bias)
        return self.logits(ops.add_norm(x[last], None if delta is None else delta[last], self.norm)[1])

    def step(self, tokens: Tensor, positions: Tensor, table: Tensor, ops: DecodeOps) -> Tensor:
        """One token of each of B lanes: tokens, positions [B] int64, table [B, pages] int32, to logits [B, V] fp32."""
        x, delta = F.embedding(tokens, self.embed), None
        for i, layer in enumerate(self.layers):
            x, y = ops.add_norm(x, delta, layer.norm1)
            out = ops.attend(i, self._qkv(layer, y), positions, table)
            x, y = ops.add_norm(x, F.linear(out, layer.o, layer.o_bias), layer.norm2)
            delta = F.linear(ops.gated(self._gate_up(layer, y)), layer.down, layer.down_bias)
        return self.logits(ops.add_norm(x, delta, self.norm)[1])

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, H] to logits [B, V] fp32; a GPU does not round them to the weights' dtype in between."""
        if hidden.is_cuda and hidden.dtype != torch.float32:
            return torch.mm(hidden, self.head.T, out_dtype=torch.float32)
        return F.linear(hidden, self.head).float()

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, D] in the weights' dtype, as the model itself rounds them."""
        return self.cos[positions][:, None].to(self.dtype), self.sin[positions][:, None].to(self.dtype)

    def cache(self, pages: int, size: int) -> PagedCache:
        """An empty cache of so many pages of `size` tokens."""
        layers = self.config.num_hidden_layers
        return PagedCache(pages, layers, self.kv_heads, size, self.width, self.dtype, self.embed.device)

    def page_bytes(self, size: int) -> int:
        """Bytes of one page of `size` tokens."""
        return PagedCache.page_bytes(self.config.num_hidden_layers, self.kv_heads, size, self.width, self.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, D] with the two halves of a head as pairs (as transformers lays them out)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
