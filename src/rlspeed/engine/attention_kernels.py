"""The CUDA kernels for packed attention, each behind the same signature, and what each of them can run."""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from rlspeed.errors import DeviceError

HALF = (torch.bfloat16, torch.float16)


def kernel_fault(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why `backend` cannot run with these, in a few words; None when it can."""
    if backend == "sdpa":
        return None
    if device.type != "cuda":
        return f"runs on CUDA, not on {device.type}"
    if dtype not in HALF:
        return f"takes bf16 and fp16, not {str(dtype).removeprefix('torch.')}"
    capability = torch.cuda.get_device_capability(device)
    missing = _missing(backend)
    if missing is not None:
        return missing
    return shape_fault(backend, capability, head_dim)


def shape_fault(backend: str, capability: tuple[int, int], head_dim: int) -> str | None:
    """Why a kernel that is installed cannot run on this compute capability with this head size; None when it can."""
    least = (9, 0) if backend == "flash4" else (8, 0)
    if capability < least:
        return f"needs compute capability {least[0]}.{least[1]}, this device has {capability[0]}.{capability[1]}"
    largest = 256
    if backend == "flash4" and capability[0] >= 10 and head_dim != 256:
        largest = 128
    if head_dim % 8 or not 8 <= head_dim <= largest:
        return f"takes head sizes up to {largest} that are multiples of 8, not {head_dim}"
    return None


def _missing(backend: str) -> str | None:
    """Whether the package of a kernel is importable; a package that is there but broken is reported with its error."""
    module = {"flash4": "flash_attn.cute", "flash2": "flash_attn", "varlen": "torch.nn.attention.varlen"}[backend]
    name = {"flash4": "flash_attn_varlen_func", "flash2": "flash_attn_varlen_func", "varlen": "varlen_attn"}[backend]
    if find_spec(module.partition(".")[0]) is None:
        return "is not installed"
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        return f"cannot be imported ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    return None if hasattr(found, name) else "is not installed"


@cache
def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def run_flash4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """FlashAttention-4 of the flash-attn-4 package (Hopper and newer). Shapes as in `varlen_attention`."""
    left = None if window is None else window - 1
    out: Any = _function("flash_attn.cute", "flash_attn_varlen_func")(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        softmax_scale=scale,
        causal=causal,
        window_size=(left, 0 if causal and window is not None else left),
    )
    result: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return result


def run_flash2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """flash-attn 2 (Ampere and newer). Shapes as in `varlen_attention`."""
    left = -1 if window is None else window - 1
    out: torch.Tensor = _function("flash_attn", "flash_attn_varlen_func")(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        softmax_scale=scale,
        causal=causal,
        window_size=(left, 0 if causal and window is not None else left),
    )
    return out


def run_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """FlashAttention-2 as it ships inside torch. Shapes as in `varlen_attention`.

    Two signatures: until 2.10 an `is_causal` flag; since then a window, causal being (-1, 0). Grouped heads are taken
    by the kernel itself; from 2.12 on it wants to be told by `enable_gqa`.
    """
    function = _function("torch.nn.attention.varlen", "varlen_attn")
    out: torch.Tensor = function(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **varlen_options(function, causal, window, scale)
    )
    return out


def varlen_options(function: Any, causal: bool, window: int | None, scale: float) -> dict[str, Any]:
    """The keyword arguments of `varlen_attn` in the installed torch.

    Raises:
        DeviceError: a sliding window or a scale that this torch's function has no argument for.
    """
    known = inspect.signature(function).parameters
    options: dict[str, Any] = {}
    for name, value in (("scale", scale), ("enable_gqa", True)):
        if name in known:
            options[name] = value
    if "window_size" in known:
        left = -1 if window is None else window - 1
        options["window_size"] = (left, 0 if causal else left)
    elif window is not None:
        raise DeviceError("this torch's varlen_attn has no sliding window; use flash4, flash2 or sdpa")
    else:
        options["is_causal"] = causal
    if "scale" not in known:
        raise DeviceError("this torch's varlen_attn has no scale; use flash4, flash2 or sdpa, or torch 2.11 or newer")
    return options
