"""rlspeed's packed attention as an attention implementation of transformers.

A model loaded with `attn_implementation=PACKED_ATTENTION` calls `packed_attention` in every layer. The boundaries reach
it as a keyword argument of the model's forward (`packed_attention_kwargs`), which Llama, Qwen2 and Qwen3 hand down
unchanged; when they are missing the layer raises. No mask is built: transformers makes none for an implementation
without a mask function, and registering one would make it look for packing in `position_ids`, which costs a host
synchronisation per forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlspeed.engine.attention import check_segments, varlen_attention
from rlspeed.engine.attention_shared import SharedPrefixes, shared_attention
from rlspeed.engine.ulysses import SequenceParallel
from rlspeed.errors import LayoutError

PACKED_ATTENTION = "rlspeed_packed"


def register_attention() -> None:
    """Make PACKED_ATTENTION known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


class Boundaries:
    """What one pack tells every layer: boundaries on device and host, the longest sequence, the kernel, the ranks
    that share the row, and the prompts that answers share.

    A plain class on purpose: torch.compile looks into tuples and dataclasses and compiles a block again for every
    number of sequences; an object that compiled code only hands on costs nothing.
    """

    __slots__ = ("backend", "cu_seqlens", "lengths", "max_seqlen", "prefixes", "sp")

    def __init__(
        self,
        cu_seqlens: torch.Tensor,
        lengths: tuple[int, ...],
        max_seqlen: int,
        backend: str,
        sp: SequenceParallel | None = None,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        self.cu_seqlens = cu_seqlens
        self.lengths = lengths
        self.max_seqlen = max_seqlen
        self.backend = backend
        self.sp = sp
        self.prefixes = prefixes


def packed_attention_kwargs(
    cu_seqlens: torch.Tensor,
    lengths: tuple[int, ...],
    max_seqlen: int,
    backend: str,
    sp: SequenceParallel | None = None,
    prefixes: SharedPrefixes | None = None,
) -> dict[str, Any]:
    """Keyword arguments for the forward of a model with PACKED_ATTENTION.

    cu_seqlens [S+1] int32; lengths: the same boundaries on the host; max_seqlen: the longest; backend: of
    `choose_attention`. sp: ranks that share the row, each with a slice of it; the boundaries are the whole row's.
    prefixes: prompts that answers share; not together with sp.

    Raises:
        LayoutError: they contradict each other.
    """
    check_segments(sum(lengths), cu_seqlens, lengths, max_seqlen)
    if prefixes is not None and sp is not None:
        raise LayoutError("packed attention: shared prefixes together with sequence parallel ranks")
    return {"boundaries": Boundaries(cu_seqlens, lengths, max_seqlen, backend, sp, prefixes)}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    boundaries: Boundaries | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] to ([1, T, Hq, D], no weights).

    Compiled blocks call it as it is: the kernels are no torch operations, and their arguments differ from pack to pack.

    Raises:
        LayoutError: boundaries missing, more than one row, a mask, keys of earlier calls (a cache), dropout, or shared
            prefixes in a layer with a sliding window.
    """
    if boundaries is None:
        raise LayoutError(
            "packed attention: the model's forward was called without packed_attention_kwargs(...); "
            "boundaries are never inferred"
        )
    if query.shape[0] != 1:
        raise LayoutError(f"packed attention: {query.shape[0]} rows; packed sequences lie in one row")
    if attention_mask is not None:
        raise LayoutError("packed attention: an attention mask was given; cu_seqlens alone says who sees whom")
    if key.shape[2] != query.shape[2]:
        raise LayoutError(
            f"packed attention: {query.shape[2]} queries, {key.shape[2]} keys; no cache in packed training"
        )
    if dropout:
        raise LayoutError(f"packed attention: attention dropout {dropout} is not supported; set attention_dropout to 0")

    prefixes = boundaries.prefixes

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if prefixes is not None:
            options: dict[str, Any] = {"window": sliding_window, "scale": scaling, "backend": boundaries.backend}
            return shared_attention(q, k, v, boundaries.cu_seqlens, boundaries.lengths, prefixes, **options)
        return varlen_attention(
            q,
            k,
            v,
            boundaries.cu_seqlens,
            boundaries.lengths,
            max_seqlen=boundaries.max_seqlen,
            causal=getattr(module, "is_causal", True),
            window=sliding_window,
            scale=scaling,
            backend=boundaries.backend,
        )

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attend(q, k, v) if boundaries.sp is None else boundaries.sp.attention(q, k, v, attend)
    return out[None], None
