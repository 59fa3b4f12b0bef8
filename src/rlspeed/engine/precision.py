"""Names of precisions to dtypes, and whether the device can do them: the one home of every dtype in a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlspeed.errors import DeviceError, Fault

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# first compute capability with bf16 arithmetic (Ampere); older ones only emulate it
NATIVE_BF16 = (8, 0)
# first compute capability with fp16 tensor cores (Volta)
NATIVE_FP16 = (7, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtypes of a run.

    master: optimizer's weights. compute: weights and activations in forward and backward. reduce: gradient reductions.
    logits: log-sum-exp inside the head. loss: scalars per token. kv: the generator's cache. wire: weights on their way
    to the generator. reason: one line that says why, to print.
    """

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    logits: torch.dtype
    loss: torch.dtype
    kv: torch.dtype
    wire: torch.dtype
    reason: str

    @property
    def needs_loss_scaling(self) -> bool:
        """fp16 gradients of small losses vanish below 6e-8; bf16 and fp32 have the range."""
        return self.compute == torch.float16


def resolve(model_dtype: str, device: torch.device | str, *, capability: tuple[int, int] | None = None) -> Precision:
    """The dtypes of a run with `model_dtype` (auto, bf16, fp16, fp32) on `device`.

    capability: of a CUDA device; None: asked from the driver.

    Raises:
        DeviceError: an unknown name, or a precision that the device has no arithmetic for. Nothing else is taken
        instead.
    """
    where = torch.device(device)
    if where.type == "cuda" and capability is None:
        capability = torch.cuda.get_device_capability(where)
    if model_dtype == "auto":
        return _pick(where, capability)
    if model_dtype not in DTYPES:
        raise DeviceError(
            Fault(
                where="model.model_dtype",
                found=repr(model_dtype),
                allowed="auto, bf16, fp16, fp32",
                fix="take one of these",
            )
        )
    fault = _fault(model_dtype, where, capability)
    if fault is not None:
        raise DeviceError(
            Fault(
                where="model.model_dtype",
                found=f"{model_dtype} on {where}: {fault}",
                allowed="fp32, or auto",
                fix="set model.model_dtype: auto or fp32, or run on a newer GPU",
            )
        )
    if where.type == "cpu":
        speed = "" if model_dtype == "fp32" else ", slower than fp32 on most CPUs"
        return _precision(model_dtype, f"{model_dtype}, asked for; a CPU computes it{speed}")
    return _precision(model_dtype, f"{model_dtype}, asked for; native on {_name(where, capability)}")


def native_bf16(capability: tuple[int, int]) -> bool:
    """Whether a CUDA device of this compute capability computes in bf16 itself.

    `torch.cuda.is_bf16_supported()` also says yes to emulation, which is slower than fp32 on such devices.
    """
    return tuple(capability) >= NATIVE_BF16


def _fault(model_dtype: str, device: torch.device, capability: tuple[int, int] | None) -> str | None:
    """Why the device cannot compute in this precision; None when it can."""
    if device.type == "cpu" or model_dtype == "fp32":
        return None
    if device.type != "cuda" or capability is None:
        return f"a {device.type} device is not known to compute in it"
    least = NATIVE_BF16 if model_dtype == "bf16" else NATIVE_FP16
    if tuple(capability) < least:
        return (
            f"compute capability {capability[0]}.{capability[1]}, {model_dtype} is native from {least[0]}.{least[1]} on"
        )
    return None


def _pick(device: torch.device, capability: tuple[int, int] | None) -> Precision:
    """auto: bf16 where it is native, fp32 everywhere else."""
    if device.type == "cpu":
        return _precision("fp32", "fp32, picked by auto: the fastest precision of most CPUs")
    fault = _fault("bf16", device, capability)
    if fault is None:
        return _precision("bf16", f"bf16, picked by auto: native on {_name(device, capability)}")
    return _precision(
        "fp32", f"fp32, picked by auto: no bf16 on {device} ({fault}); fp16 with loss scaling is taken when asked for"
    )


def _name(device: torch.device, capability: tuple[int, int] | None) -> str:
    return f"{device} (compute capability {capability[0]}.{capability[1]})" if capability else str(device)


def _precision(name: str, reason: str) -> Precision:
    """fp32 for weights at rest, reductions and scalars; the named precision for arithmetic, cache and transfers."""
    low = DTYPES[name]
    return Precision(
        master=torch.float32,
        compute=low,
        reduce=torch.float32,
        logits=torch.float32,
        loss=torch.float32,
        kv=low,
        wire=low,
        reason=reason,
    )
