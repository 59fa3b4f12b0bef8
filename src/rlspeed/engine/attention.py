"""Attention over packed sequences: one function, four kernels, and the rule that chooses between them.

`cu_seqlens` is the only source of boundaries; nothing is inferred from positions or masks. The kernels are wrapped in
`attention_kernels.py` (CUDA) and `attention_sdpa.py` (any device).
"""

from __future__ import annotations

import torch

from rlspeed.engine.attention_kernels import kernel_fault, run_flash2, run_flash4, run_varlen
from rlspeed.engine.attention_lse import lse_fault
from rlspeed.engine.attention_sdpa import run_sdpa
from rlspeed.errors import DeviceError, Fault, LayoutError

# in the order in which `auto` tries them; sdpa runs everywhere
BACKENDS = ("flash4", "flash2", "varlen", "sdpa")
DESCRIPTIONS = {
    "flash4": "FlashAttention-4 (flash_attn.cute)",
    "flash2": "flash-attn 2",
    "varlen": "torch.nn.attention.varlen",
    "sdpa": "scaled_dot_product_attention by segments",
}


def choose_attention(
    requested: str, device: torch.device | str, dtype: torch.dtype, head_dim: int, *, shared: bool = False
) -> tuple[str, str]:
    """The backend for packed attention, and the reason in one line to print.

    requested: "auto", or one of BACKENDS. dtype: of q, k and v. head_dim: of one query head. shared: prompts are
    shared, which needs a kernel's log-sum-exp and its backward apart.

    auto takes the first of BACKENDS that can run; the reason names what was passed over and why.

    Raises:
        DeviceError: a backend was asked for by name and cannot run here.
    """
    if requested != "auto" and requested not in BACKENDS:
        raise DeviceError(
            Fault(
                where="model.attention",
                found=repr(requested),
                allowed=", ".join(("auto", *BACKENDS)),
                fix="take one of these",
            )
        )
    where = torch.device(device)

    def fault_of(backend: str) -> str | None:
        fault = kernel_fault(backend, where, dtype, head_dim)
        return lse_fault(backend) if fault is None and shared else fault

    if requested != "auto":
        fault = fault_of(requested)
        if fault is not None:
            raise DeviceError(
                Fault(
                    where="model.attention",
                    found=f"{requested}: {fault}",
                    allowed="auto, sdpa, or a kernel that runs on this device",
                    fix="set model.attention: auto",
                )
            )
        return requested, f"{requested}: {DESCRIPTIONS[requested]}, asked for by model.attention"
    passed: list[str] = []
    for backend in BACKENDS:
        fault = fault_of(backend)
        if fault is None:
            break
        passed.append(f"{backend}: {fault}")
    why = f"; not {'; not '.join(passed)}" if passed else ", the first choice"
    return backend, f"{backend}: {DESCRIPTIONS[backend]}{why}"


def check_segments(num_tokens: int, cu_seqlens: torch.Tensor, lengths: tuple[int, ...], max_seqlen: int) -> None:
    """Boundaries, lengths and longest length must tell the same story before a kernel runs.

    The values of cu_seqlens are compared only when they are in host memory: reading them from a GPU would make the host
    wait in every layer.

    Raises:
        LayoutError: any disagreement, with both numbers.
    """
    found = []
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1:
        found.append(f"cu_seqlens must be int32 of one dimension, found {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}")
    if cu_seqlens.numel() != len(lengths) + 1:
        found.append(f"cu_seqlens has {cu_seqlens.numel()} entries for {len(lengths)} sequences")
    shortest = min(lengths, default=1)
    if shortest < 1:
        found.append(f"a sequence of length {shortest}; every sequence has at least one token")
    if sum(lengths) != num_tokens:
        found.append(f"lengths sum to {sum(lengths)}, the stream has {num_tokens} tokens")
    longest = max(lengths, default=0)
    if max_seqlen != longest:
        found.append(f"max_seqlen is {max_seqlen}, the longest sequence has {longest} tokens")
    if not found and cu_seqlens.device.type == "cpu":
        bounds = [0]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        if cu_seqlens.tolist() != bounds:
            found.append("cu_seqlens and lengths cut the stream at different places")
    if found:
        raise LayoutError("packed attention: " + "; ".join(found))


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lengths: tuple[int, ...],
    *,
    max_seqlen: int,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    backend: str,
) -> torch.Tensor:
    """Attention within each of S sequences laid back to back.

    q [T, Hq, D]; k, v [T, Hkv, D] with Hq a multiple of Hkv (query head h reads KV head h // (Hq / Hkv)).
    cu_seqlens [S+1] int32 on the device; lengths: the same boundaries on the host; max_seqlen: the longest length.
    window: each token sees itself and the window-1 tokens before it (and after it when not causal); None: all.
    scale: factor of the scores; None: 1/sqrt(D). backend: one of BACKENDS, from `choose_attention`.

    Returns [T, Hq, D] in q's dtype. A token of one sequence has no influence at all on the values and gradients of
    another.

    Raises:
        LayoutError: shapes, boundaries or lengths that contradict each other, an unknown backend, a window below 1.
    """
    if q.ndim != 3 or k.shape != v.shape or k.ndim != 3 or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise LayoutError(f"packed attention: shapes q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if q.shape[1] % k.shape[1]:
        raise LayoutError(f"packed attention: {q.shape[1]} query heads are no multiple of {k.shape[1]} KV heads")
    if window is not None and window < 1:
        raise LayoutError(f"packed attention: window {window}; a token sees at least itself")
    check_segments(q.shape[0], cu_seqlens, lengths, max_seqlen)
    if q.shape[0] == 0:
        return q.clone()
    if scale is None:
        scale = q.shape[2] ** -0.5
    if backend == "sdpa":
        return run_sdpa(q, k, v, lengths, causal=causal, window=window, scale=scale)
    runners = {"flash4": run_flash4, "flash2": run_flash2, "varlen": run_varlen}
    if backend not in runners:
        raise LayoutError(f"packed attention: unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    return runners[backend](q, k, v, cu_seqlens, max_seqlen, causal=causal, window=window, scale=scale)
