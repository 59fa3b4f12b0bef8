"""The three optimizers behind `MasterAdamW`: AdamW on the device, with moments in 8 bits, or on the host.

All of them update fp32 masters; they differ in where masters and moments are, how precise the moments are, and
whether the host must know the gradients' norm before it can go on.

kind           masters        moments                         bytes of device memory per parameter, without gradients
adamw          device, fp32   device, fp32                    12 (8 when the parameter is fp32)
adamw8bit      device, fp32   device, 8 bits in blocks of 256  6 (2)
adamw_offload  host, fp32     host, fp32                       0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlspeed.config.schema import Optimizer as OptimizerConfig
from rlspeed.errors import ConfigError, Fault

EIGHT_BIT_FIX = "pip install torchao, or take optim.*.kind=adamw"


class Inner(Protocol):
    """What `MasterAdamW` asks of a kind."""

    def step(self, norm: torch.Tensor, lr: float) -> bool:
        """Clip and update the masters; False when they are certainly as before. norm: of all gradients, 0-d."""

    def states(self) -> Iterator[dict[str, torch.Tensor]]:
        """For each master the live tensors of its state, by name; made when there are none yet."""


class DeviceAdamW:
    """torch's fused AdamW. Clipping and the decision to skip a step are made by its kernel: the host waits for nothing.

    Cut parameters (DTensor) are stepped by their local parts, since the update is element by element.
    """

    def __init__(self, masters: Sequence[nn.Parameter], sums: Sequence[Any], cfg: OptimizerConfig) -> None:
        self.limit = cfg.max_grad_norm
        self.masters, self.sums = masters, sums
        self.parts = [nn.Parameter(_local(m)) if isinstance(m, DTensor) else m for m in masters]
        self.adamw: Any = torch.optim.AdamW(
            _groups(masters, self.parts, cfg.weight_decay), lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True
        )

    def step(self, norm: torch.Tensor, lr: float) -> bool:
        """See `Inner`."""
        counted = []
        for master, part in zip(self.masters, self.parts):
            if part is master:
                continue
            part.data = _local(master)  # the master may have been moved
            grad = master.grad
            if grad is not None and isinstance(master, DTensor) and grad.placements != master.placements:  # type: ignore[attr-defined]
                grad = grad.redistribute(placements=master.placements)  # type: ignore[attr-defined]
            part.grad = None if grad is None or part.numel() == 0 else _local(grad)
            if grad is not None and part.numel() == 0:
                counted.append(part)
        # the kernel divides gradients by the one and leaves everything as it is when the other is 1
        self.adamw.grad_scale = _divisor(norm, self.limit)
        self.adamw.found_inf = norm.isfinite().logical_not().float()
        _set_lr(self.adamw, lr)
        self.adamw.step()
        for part in counted:  # ranks count alike: a checkpoint keeps one rank's count for all
            _adam_state(self.adamw, part)["step"].add_(1.0 - self.adamw.found_inf)
        for part in self.parts:
            part.grad = None
        return True

    def states(self) -> Iterator[dict[str, torch.Tensor]]:
        """See `Inner`."""
        for master, part in zip(self.masters, self.parts):
            state = _adam_state(self.adamw, part)
            if isinstance(master, DTensor):
                state = {k: v if v.ndim == 0 and k == "step" else _cut_like(v, master) for k, v in state.items()}
            yield state


class EightBitAdamW:
    """torchao's AdamW8bit (Dettmers et al. 2021, arXiv 2110.02861) on fp32 masters.

    Masters of fewer than 4,096 elements, or of a number that is no multiple of 256, keep fp32 moments. The norm is
    read before the step, since the library's kernel cannot skip one.
    """

    def __init__(self, masters: Sequence[nn.Parameter], sums: Sequence[Any], cfg: OptimizerConfig) -> None:
        try:
            from torchao.optim import AdamW8bit
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                Fault(where="optim.*.kind", found=f"adamw8bit: torchao: {error}", fix=EIGHT_BIT_FIX)
            ) from error
        self.limit = cfg.max_grad_norm
        self.masters = masters
        groups = _groups(masters, masters, cfg.weight_decay)
        self.adamw: Any = AdamW8bit(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps)

    def step(self, norm: torch.Tensor, lr: float) -> bool:
        """See `Inner`."""
        if not math.isfinite(float(norm)):
            return False
        if self.limit is not None and float(norm) > self.limit:
            grads = [m.grad for m in self.masters if m.grad is not None]
            torch._foreach_mul_(grads, self.limit / (float(norm) + 1e-6))
        _set_lr(self.adamw, lr)
        self.adamw.step()
        return True

    def states(self) -> Iterator[dict[str, torch.Tensor]]:
        """See `Inner`; moments in 8 bits as their codes [like the master] uint8 and scales [elements / 256] fp32."""
        self._make_states()
        for master in self.masters:
            out: dict[str, torch.Tensor] = {}
            for name, value in self.adamw.state[master].items():
                if hasattr(value, "codes"):
                    out.update({f"{name}.codes": value.codes, f"{name}.scale": value.scale})
                else:
                    out[name] = value
            yield out

    def _make_states(self) -> None:
        """A step by gradients of 0 with a learning rate of 0 changes no weight, and leaves moments of 0 behind."""
        new = [m for m in self.masters if not self.adamw.state[m]]
        if not new:
            return
        kept = [m.grad for m in self.masters]
        for master in self.masters:
            master.grad = None
        for master in new:
            master.grad = torch.zeros_like(master)
        _set_lr(self.adamw, 0.0)
        self.adamw.step()
        for master, grad in zip(self.masters, kept):
            master.grad = grad
        for master in new:
            self.adamw.state[master]["step"].zero_()


class HostAdamW:
    """torch's fused AdamW on the host's cores, masters and moments in host memory.

    Once per step the gradient sums come to the host and the rounded weights go back; with micro-batches in between
    that is little beside the update.
    """

    def __init__(self, masters: Sequence[nn.Parameter], sums: Sequence[Any], cfg: OptimizerConfig) -> None:
        self.limit = cfg.max_grad_norm
        self.masters, self.sums = masters, sums
        pin = any(m.is_pinned() for m in masters) if torch.cuda.is_available() else False
        self.grads = [torch.empty_like(m, requires_grad=False, pin_memory=pin) for m in masters]
        groups = _groups(masters, masters, cfg.weight_decay)
        self.adamw: Any = torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True)

    def step(self, norm: torch.Tensor, lr: float) -> bool:
        """See `Inner`."""
        value = float(norm)
        if not math.isfinite(value):
            return False
        device = norm.device
        for master, held, grad in zip(self.masters, self.sums, self.grads):
            master.grad = None if held.grad is None else grad.copy_(held.grad, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self.adamw.grad_scale = _divisor(norm.cpu(), self.limit)
        _set_lr(self.adamw, lr)
        self.adamw.step()
        return True

    def states(self) -> Iterator[dict[str, torch.Tensor]]:
        """See `Inner`."""
        yield from (_adam_state(self.adamw, master) for master in self.masters)


INNERS: dict[str, Callable[[Sequence[nn.Parameter], Sequence[Any], OptimizerConfig], Inner]] = {
    "adamw": DeviceAdamW,
    "adamw8bit": EightBitAdamW,
    "adamw_offload": HostAdamW,
}


def _groups(
    masters: Sequence[nn.Parameter], stepped: Sequence[nn.Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    """Parameter groups of what is stepped: vectors take no weight decay."""
    kinds: dict[bool, list[nn.Parameter]] = {}
    for master, part in zip(masters, stepped):
        kinds.setdefault(master.ndim >= 2, []).append(part)
    return [{"params": p, "weight_decay": weight_decay if matrix else 0.0} for matrix, p in sorted(kinds.items())]


def _divisor(norm: torch.Tensor, limit: float | None) -> torch.Tensor | None:
    """What gradients are divided by so that their norm is at most `limit`: 0-d fp32, 1 below it."""
    return None if limit is None else ((norm + 1e-6) / limit).clamp(min=1.0)


def _set_lr(optimizer: Any, lr: float) -> None:
    """torchao keeps the learning rate in a tensor, torch in a number."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _adam_state(optimizer: Any, part: nn.Parameter) -> dict[str, torch.Tensor]:
    """The state of torch's AdamW for one parameter."""
    state = optimizer.state[part]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=part.device)
        state["exp_avg"] = torch.zeros_like(part, requires_grad=False)
        state["exp_avg_sq"] = torch.zeros_like(part, requires_grad=False)
    return {key: state[key] for key in ("step", "exp_avg", "exp_avg_sq")}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a cut tensor, in the same memory."""
    out: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return out


def _cut_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's part as a cut tensor, in the same memory."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
