"""Attention of query spans over key spans that also gives the log-sum-exp of the scores, and its backward from any
output and log-sum-exp: what is needed to add up attention over several sets of keys.

Forward: q [Tq, Hq, D]; k, v [Tk, Hkv, D] -> out [Tq, Hq, D] in q's dtype, lse [Hq, Tq] fp32. Backward: P = exp(scores -
lse), so with the lse and the output of a larger set of keys it gives this set's part of the gradients.

Source: FlashAttention, Dao et al. 2022 (arXiv 2205.14135), algorithms 1 and 4.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch

from rlspeed.errors import LayoutError

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Query span s looks at key span s.

    cu_q, cu_k [S+1] int32 on the device; q_lengths, k_lengths: the same on the host. causal: spans are equal, and a
    query sees no later key.
    """

    cu_q: Tensor
    cu_k: Tensor
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    causal: bool

    @property
    def longest(self) -> tuple[int, int]:
        """The longest query span and the longest key span."""
        return max(self.q_lengths), max(self.k_lengths)


def lse_fault(backend: str) -> str | None:
    """Why a kernel that can run cannot give its log-sum-exp and its backward apart; None when it can."""
    needed = {
        "flash4": (("flash_attn.cute", "flash_attn_varlen_func"), ("flash_attn.cute.interface", "_flash_attn_bwd")),
        "flash2": tuple(
            ("flash_attn.flash_attn_interface", name)
            for name in ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward")
        ),
    }
    try:
        for module, name in needed.get(backend, ()):
            _of(module, name)
    except (ImportError, AttributeError) as error:
        return f"has no backward from a log-sum-exp here ({type(error).__name__})"
    return None


def forward_lse(backend: str, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse, without a graph. backend: of `choose_attention`.

    Raises:
        LayoutError: an unknown backend.
    """
    if backend == "sdpa":
        return _reference_forward(q, k, v, spans, scale)
    longest_q, longest_k = spans.longest
    bounds = (spans.cu_q, spans.cu_k, longest_q, longest_k)
    if backend == "varlen":
        found: Any = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, spans.causal, False, scale=scale)
        return found[0], found[1]
    if backend == "flash2":
        found = _of("flash_attn.flash_attn_interface", "_flash_attn_varlen_forward")(
            q, k, v, *bounds, 0.0, scale, spans.causal
        )
        return found[0], found[1]
    if backend == "flash4":
        function = _of("flash_attn.cute", "flash_attn_varlen_func")
        options = {"return_lse": True} if "return_lse" in inspect.signature(function).parameters else {}
        found = function(
            q,
            k,
            v,
            cu_seqlens_q=spans.cu_q,
            cu_seqlens_k=spans.cu_k,
            max_seqlen_q=longest_q,
            max_seqlen_k=longest_k,
            softmax_scale=scale,
            causal=spans.causal,
            **options,
        )
        return found[0], found[1]
    raise LayoutError(f"attention with log-sum-exp: unknown backend {backend!r}")


def backward_lse(
    backend: str,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Spans,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; out and lse may be those of more keys than these. grad [Tq, Hq, D], lse [Hq, Tq]."""
    if backend == "sdpa":
        return _reference_backward(grad, q, k, v, out, lse, spans, scale)
    longest_q, longest_k = spans.longest
    bounds = (spans.cu_q, spans.cu_k, longest_q, longest_k)
    if backend == "varlen":
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # the state of dropout, which there is none of
        found: Any = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, *bounds, 0.0, spans.causal, unused, unused, scale=scale
        )
        return found[0], found[1], found[2]
    if backend == "flash2":
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _of("flash_attn.flash_attn_interface", "_flash_attn_varlen_backward")(
            *(grad, q, k, v, out, lse, dq, dk, dv),
            *bounds,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=spans.causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
        )
        return dq, dk, dv
    function = _of("flash_attn.cute.interface", "_flash_attn_bwd")
    known = inspect.signature(function).parameters
    options = {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
    found = function(
        *(q, k, v, out, grad, lse),
        softmax_scale=scale,
        causal=spans.causal,
        cu_seqlens_q=spans.cu_q,
        cu_seqlens_k=spans.cu_k,
        **{name: value for name, value in options.items() if name in known},
    )
    return found[0], found[1], found[2]


@cache
def _of(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _places(spans: Spans) -> list[tuple[slice, slice]]:
    """Query and key places of each span."""
    ends: list[list[int]] = []
    for lengths in (spans.q_lengths, spans.k_lengths):
        ends.append([0])
        for length in lengths:
            ends[-1].append(ends[-1][-1] + length)
    return [(slice(*a), slice(*b)) for a, b in zip(pairwise(ends[0]), pairwise(ends[1]))]


def _scores(q: Tensor, k: Tensor, spans: Spans, scale: float) -> Tensor:
    """q [Lq, Hkv, G, D], k [Lk, Hkv, D] in at least fp32 -> [Hkv, G, Lq, Lk]."""
    scores = torch.einsum("qhgd,khd->hgqk", q, k) * scale
    if spans.causal:
        later = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _wide(x: Tensor) -> Tensor:
    """At least fp32, as the kernels' sums are."""
    return x if x.dtype == torch.float64 else x.float()


def _reference_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    """On any device, span by span, with whole score matrices."""
    kv = k.shape[1]
    out, lse = torch.empty_like(q), _wide(q.new_empty(q.shape[1], q.shape[0]))
    for a, b in _places(spans):
        scores = _scores(_wide(q[a]).unflatten(1, (kv, -1)), _wide(k[b]), spans, scale)
        total = scores.logsumexp(-1)
        out[a] = torch.einsum("hgqk,khd->qhgd", (scores - total[..., None]).exp(), _wide(v[b])).flatten(1, 2)
        lse[:, a] = total.flatten(0, 1)
    return out, lse


def _reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_reference_forward`."""
    kv = k.shape[1]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for a, b in _places(spans):
        queries, keys, values = _wide(q[a]).unflatten(1, (kv, -1)), _wide(k[b]), _wide(v[b])
        upstream = _wide(grad[a]).unflatten(1, (kv, -1))
        weights = (_scores(queries, keys, spans, scale) - lse[:, a].unflatten(0, (kv, -1))[..., None]).exp()
        dot = (upstream * _wide(out[a]).unflatten(1, (kv, -1))).sum(-1).permute(1, 2, 0)
        slope = weights * (torch.einsum("qhgd,khd->hgqk", upstream, values) - dot[..., None]) * scale
        dq[a] = torch.einsum("hgqk,khd->qhgd", slope, keys).flatten(1, 2)
        dk[b] = torch.einsum("hgqk,qhgd->khd", slope, queries)
        dv[b] = torch.einsum("hgqk,qhgd->khd", weights, upstream)
    return dq, dk, dv
