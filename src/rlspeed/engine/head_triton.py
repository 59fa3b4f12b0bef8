"""The head on CUDA: matrix products by cuBLAS or Triton, everything between them in one Triton pass.

Three designs, chosen by `HeadPlan`, for the forward and for the logits' gradients in the backward:

- `fused`: a Triton product whose tiles never leave registers (forward), or leave as gradients (backward);
- `fp32`, `bf16`: cuBLAS writes the logits of a cut of the vocabulary into one buffer in fp32 (or the inputs' dtype), a
  Triton pass reads them.

Backward is cut over the vocabulary: each cut's rows of the weight's gradient are written once, and only the small
gradient of hidden [N, H] is accumulated, in fp32. The two products of each cut are cuBLAS's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from rlspeed.engine import head_kernels as kernels
from rlspeed.engine.head import Design, HeadPlan, Tile


def stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    bias: torch.Tensor | None,
    with_entropy: bool,
    plan: HeadPlan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """m, s, u, z_target [N] fp32 of `head.Stats`. hidden [N, H], weight [V, H] bf16 or fp16; targets [N] int64."""
    hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.contiguous()
    m, s, u = (torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device) for _ in range(3))
    z_target = torch.zeros_like(m)
    if plan.forward == "fused":
        _fused_stats(hidden, weight, targets, temperature, bias, with_entropy, plan.tile, (m, s, u, z_target))
        return m, s, u, z_target
    words = min(plan.forward_words, weight.shape[0])
    tokens = min(plan.tokens, hidden.shape[0])
    buffer = torch.empty(tokens, words, dtype=_logit_dtype(plan.forward, hidden), device=hidden.device)
    for part in _slices(hidden.shape[0], tokens):
        for cut in _slices(weight.shape[0], words):
            logits = buffer[: part.stop - part.start, : cut.stop - cut.start]
            product(hidden[part], weight[cut].T, logits)
            _launch(
                kernels.row_stats_kernel,
                logits.shape[0],
                logits,
                weight if bias is None else bias,
                targets[part],
                m[part],
                s[part],
                u[part],
                z_target[part],
                cut.start,
                logits.shape[1],
                logits.stride(0),
                1.0 / temperature,
                HAS_BIAS=bias is not None,
                WITH_ENTROPY=with_entropy,
                FIRST=cut.start == 0,
                **_row_block(logits.shape[1], plan),
            )
    return m, s, u, z_target


def _fused_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    bias: torch.Tensor | None,
    with_entropy: bool,
    tile: Tile,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Fill m, s, u, z_target by the fused product; the partial sums take 12 bytes per token and tile column."""
    tokens, vocab = hidden.shape[0], weight.shape[0]
    parts = triton.cdiv(vocab, tile.words)
    part_m, part_s = (torch.empty(parts, tokens, dtype=torch.float32, device=hidden.device) for _ in range(2))
    part_u = torch.empty_like(part_m) if with_entropy else part_m
    m, s, u, z_target = outputs
    _launch(
        kernels.fused_stats_kernel,
        _programs(tokens, vocab, tile, hidden.device),
        *_operands(hidden, weight, tile),
        weight if bias is None else bias,
        targets,
        part_m,
        part_s,
        part_u,
        z_target,
        tokens,
        vocab,
        hidden.shape[1],
        hidden.stride(0),
        weight.stride(0),
        1.0 / temperature,
        HAS_BIAS=bias is not None,
        WITH_ENTROPY=with_entropy,
        **_tile_options(hidden, tile),
    )
    _launch(
        kernels.merge_stats_kernel,
        triton.cdiv(tokens, 64),
        part_m,
        part_s,
        part_u,
        m,
        s,
        u,
        tokens,
        parts,
        WITH_ENTROPY=with_entropy,
        BLOCK_P=16,
        BLOCK_N=64,
        num_warps=4,
    )


def gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    bias: torch.Tensor | None,
    lse: torch.Tensor,
    entropy: torch.Tensor | None,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    wants: tuple[bool, bool, bool],
    plan: HeadPlan,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of hidden (fp32 [N, H]), weight [V, H] and bias [V], as `head.torch_gradients`."""
    hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.contiguous()
    num_tokens, vocab = hidden.shape[0], weight.shape[0]
    d_hidden = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device) if wants[0] else None
    d_weight = torch.empty_like(weight) if wants[1] else None
    d_bias = torch.empty_like(bias) if wants[2] and bias is not None else None
    words, tokens = min(plan.backward_words, vocab), min(plan.tokens, num_tokens)
    dz_buffer = torch.empty(tokens, words, dtype=hidden.dtype, device=hidden.device)
    logit_buffer = dz_buffer
    if plan.backward == "fp32":
        logit_buffer = torch.empty(tokens, words, dtype=torch.float32, device=hidden.device)
    several = num_tokens > tokens
    rows = _Rows(targets, lse, entropy, grad_logprobs.contiguous(), grad_entropy)
    for cut in _slices(vocab, words):
        w = weight[cut]
        w_bias = None if bias is None else bias[cut]
        w_sum = torch.zeros(w.shape, dtype=torch.float32, device=w.device) if several and wants[1] else None
        b_sum = torch.zeros(w.shape[0], dtype=torch.float32, device=w.device) if d_bias is not None else None
        for part in _slices(num_tokens, tokens):
            h = hidden[part]
            dz = dz_buffer[: h.shape[0], : w.shape[0]]
            logits = logit_buffer[: h.shape[0], : w.shape[0]]
            _logit_gradients(h, w, w_bias, rows, part, cut.start, temperature, plan, logits, dz)
            if d_hidden is not None:
                product(dz, w, d_hidden[part], add=cut.start > 0)
            if w_sum is not None:
                product(dz.T, h, w_sum, add=True)
            elif d_weight is not None:
                product(dz.T, h, d_weight[cut])
            if b_sum is not None:
                b_sum += dz.sum(0, dtype=torch.float32)
        if d_weight is not None and w_sum is not None:
            d_weight[cut] = w_sum
        if d_bias is not None and b_sum is not None:
            d_bias[cut] = b_sum
    return d_hidden, d_weight, d_bias


@dataclass(frozen=True, slots=True)
class _Rows:
    """The [N] inputs of the backward pass."""

    targets: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor | None
    grad: torch.Tensor
    grad_entropy: torch.Tensor | None

    def arguments(self, part: slice) -> tuple[torch.Tensor, ...]:
        """lse, entropy, grad, grad_entropy of some tokens; unused ones are filled in by grad."""
        spread = self.grad if self.entropy is None else self.entropy
        g_entropy = self.grad if self.grad_entropy is None else self.grad_entropy.contiguous()
        return self.lse[part], spread[part], self.grad[part], g_entropy[part]


def _logit_gradients(
    h: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    rows: _Rows,
    part: slice,
    v0: int,
    temperature: float,
    plan: HeadPlan,
    logits: torch.Tensor,
    dz: torch.Tensor,
) -> None:
    """Fill dz [n, v]: the gradients of the logits h @ w.T, where w is rows v0.. of the weight."""
    options: dict[str, Any] = {
        "HAS_BIAS": bias is not None,
        "WITH_ENTROPY": rows.grad_entropy is not None and rows.entropy is not None,
    }
    bias = w if bias is None else bias
    targets = rows.targets[part] - v0
    if plan.backward == "fused":
        _launch(
            kernels.fused_gradient_kernel,
            _programs(h.shape[0], w.shape[0], plan.tile, h.device),
            *_operands(h, w, plan.tile),
            bias,
            targets,
            *rows.arguments(part),
            dz,
            h.shape[0],
            w.shape[0],
            h.shape[1],
            h.stride(0),
            w.stride(0),
            dz.stride(0),
            1.0 / temperature,
            **options,
            **_tile_options(h, plan.tile),
        )
        return
    product(h, w.T, logits)
    _launch(
        kernels.row_gradient_kernel,
        h.shape[0],
        logits,
        bias,
        targets,
        *rows.arguments(part),
        dz,
        0,
        w.shape[0],
        logits.stride(0),
        dz.stride(0),
        1.0 / temperature,
        **options,
        **_row_block(w.shape[0], plan),
    )


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
    """out = a @ b, or out += a @ b, by cuBLAS, with fp32 sums; out in the inputs' dtype or fp32 (add: fp32 only)."""
    if not add and out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif not add:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    elif _adds_in_place(out.device):
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        out += torch.mm(a, b, out_dtype=torch.float32)


@cache
def _adds_in_place(device: torch.device) -> bool:
    """Whether this torch's addmm adds half-precision products to an fp32 sum; the first with out_dtype did not."""
    half = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, half, half, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _logit_dtype(design: Design, like: torch.Tensor) -> torch.dtype:
    return torch.float32 if design == "fp32" else like.dtype


def _slices(total: int, step: int) -> Iterator[slice]:
    """0..total in steps, the last one shorter."""
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


def _row_block(width: int, plan: HeadPlan) -> dict[str, int]:
    """Block of the one-token kernels: 16 values to a thread."""
    block = min(triton.next_power_of_2(width), plan.row_block)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}


def _tile_options(hidden: torch.Tensor, tile: Tile) -> dict[str, Any]:
    return {
        "BLOCK_N": tile.tokens,
        "BLOCK_V": tile.words,
        "BLOCK_K": tile.inner,
        "GROUP": tile.band,
        "TMA": _takes_descriptors(hidden),
        "SPECIALIZE": tile.specialize and _takes_descriptors(hidden),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _takes_descriptors(hidden: torch.Tensor) -> bool:
    """Tensor descriptors (Hopper and newer) want rows that start at multiples of 16 bytes."""
    aligned = hidden.shape[1] * hidden.element_size() % 16 == 0
    return aligned and hidden.is_cuda and torch.cuda.get_device_capability(hidden.device) >= (9, 0)


def _operands(hidden: torch.Tensor, weight: torch.Tensor, tile: Tile) -> tuple[Any, Any]:
    """hidden and weight as tensor descriptors, or as they are."""
    if not _takes_descriptors(hidden):
        return hidden, weight
    return (
        TensorDescriptor.from_tensor(hidden, [tile.tokens, tile.inner]),
        TensorDescriptor.from_tensor(weight, [tile.words, tile.inner]),
    )


def _programs(tokens: int, vocab: int, tile: Tile, device: torch.device) -> int:
    tiles: int = triton.cdiv(tokens, tile.tokens) * triton.cdiv(vocab, tile.words)
    if tile.persistent:
        tiles = min(tiles, int(torch.cuda.get_device_properties(device).multi_processor_count))
    return tiles


def _launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Start `programs` programs on the device of the tensors, which need not be the current one."""
    tensor = next(x for x in arguments if isinstance(x, torch.Tensor))
    with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
        kernel[(programs,)](*arguments, **options)
