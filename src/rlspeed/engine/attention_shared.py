"""Attention over a pack with shared prompts: two calls, causal within each segment and answers over their prompt, put
together by log-sum-exp.

o = sum_i exp(lse_i - lse) o_i with lse = log sum_i exp(lse_i), i over the two sets of keys. The backward runs each
call's own backward with the merged output and the merged lse: the weights are then exp(scores - lse) over all keys, so
the parts add up to the whole gradient and no gradient of an lse is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rlspeed.engine.attention_lse import Spans, backward_lse, forward_lse
from rlspeed.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedPrefixes:
    """Which tokens of a pack look at which prompt.

    answer_index [A] int64, prompt_index [P] int64: tokens of all answers and of all prompts, in order. cu_answers,
    cu_prompts [G+1] int32: the answers and the prompt of each family among them; answers, prompts: their lengths on the
    host. predecessors [T] int64: the token before each token in its sequence.
    """

    answer_index: torch.Tensor
    prompt_index: torch.Tensor
    cu_answers: torch.Tensor
    cu_prompts: torch.Tensor
    answers: tuple[int, ...]
    prompts: tuple[int, ...]
    predecessors: torch.Tensor

    def to(self, device: torch.device | str) -> SharedPrefixes:
        """The same on another device."""
        return SharedPrefixes(
            answer_index=self.answer_index.to(device, non_blocking=True),
            prompt_index=self.prompt_index.to(device, non_blocking=True),
            cu_answers=self.cu_answers.to(device, non_blocking=True),
            cu_prompts=self.cu_prompts.to(device, non_blocking=True),
            answers=self.answers,
            prompts=self.prompts,
            predecessors=self.predecessors.to(device, non_blocking=True),
        )

    @property
    def spans(self) -> Spans:
        """All answers of a family over its prompt."""
        return Spans(
            cu_q=self.cu_answers,
            cu_k=self.cu_prompts,
            q_lengths=self.answers,
            k_lengths=self.prompts,
            causal=False,
        )


def shared_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lengths: tuple[int, ...],
    prefixes: SharedPrefixes,
    *,
    window: int | None = None,
    scale: float | None = None,
    backend: str,
) -> torch.Tensor:
    """Attention of each token over its segment so far and, in an answer, over the whole prompt.

    q [T, Hq, D]; k, v [T, Hkv, D]; cu_seqlens [S+1] int32, lengths: the segments. scale: None: 1/sqrt(D). backend: of
    `choose_attention`. Returns [T, Hq, D] in q's dtype.

    Raises:
        LayoutError: a sliding window, which would reach into a prompt by a different length for each token.
    """
    if window is not None:
        raise LayoutError(f"packed attention: shared prefixes in a layer with a sliding window of {window}")
    own = Spans(cu_q=cu_seqlens, cu_k=cu_seqlens, q_lengths=lengths, k_lengths=lengths, causal=True)
    factor = q.shape[2] ** -0.5 if scale is None else scale
    out: torch.Tensor = _Merged.apply(q, k, v, own, prefixes, factor, backend)  # type: ignore[no-untyped-call]
    return out


class _Merged(torch.autograd.Function):
    """The two calls and their merge."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        own: Spans,
        prefixes: SharedPrefixes,
        scale: float,
        backend: str,
    ) -> torch.Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        rows, keys = prefixes.answer_index, prefixes.prompt_index
        out, lse = forward_lse(backend, q, k, v, own, scale)
        far, far_lse = forward_lse(backend, q[rows], k[keys], v[keys], prefixes.spans, scale)
        near_lse = lse[:, rows]
        both = torch.logaddexp(near_lse, far_lse)
        near_share, far_share = ((part - both).exp().T[..., None] for part in (near_lse, far_lse))
        out[rows] = (near_share * out[rows] + far_share * far).to(out.dtype)
        lse[:, rows] = both
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.own, ctx.prefixes, ctx.scale, ctx.backend = own, prefixes, scale, backend
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rows, keys = ctx.prefixes.answer_index, ctx.prefixes.prompt_index
        grad = grad.contiguous()
        dq, dk, dv = backward_lse(ctx.backend, grad, q, k, v, out, lse, ctx.own, ctx.scale)
        far = backward_lse(
            ctx.backend,
            grad[rows],
            q[rows],
            k[keys],
            v[keys],
            out[rows],
            lse[:, rows].contiguous(),
            ctx.prefixes.spans,
            ctx.scale,
        )
        for whole, index, part in ((dq, rows, far[0]), (dk, keys, far[1]), (dv, keys, far[2])):
            whole.index_add_(0, index, part)
        return dq, dk, dv, None, None, None, None
