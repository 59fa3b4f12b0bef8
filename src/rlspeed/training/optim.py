"""AdamW with fp32 master weights behind low-precision parameters, its learning-rate course and gradient clipping."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlspeed.config.schema import Optimizer as OptimizerConfig
from rlspeed.engine.parallelize import grad_norm
from rlspeed.training.optim_kinds import INNERS, Inner


def lr_factor(step: int, cfg: OptimizerConfig, total_steps: int) -> float:
    """Share of cfg.lr in optimizer step `step` (from 0): linear warm-up, then constant, linear or cosine to
    min_lr_ratio.
    """
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return 1.0
    span = max(total_steps - cfg.warmup_steps, 1)
    done = min((step - cfg.warmup_steps) / span, 1.0)
    shape = 1.0 - done if cfg.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * shape


class MasterAdamW:
    """AdamW whose weights are fp32, whatever the precision of the model's parameters.

    For fp32 parameters the parameter is its own master. For bf16 and fp16 each parameter has an fp32 master; every
    micro-batch's gradient is added to an fp32 sum the moment it is complete (and freed), the update happens on the
    master, and the rounded result is written into the parameter in place, so views of it (a generator's) see the new
    weights. Where the moments are and in which precision is cfg.kind's matter (`optim_kinds.py`).

    Norms, biases and other vectors take no weight decay.
    """

    def __init__(self, model: nn.Module, cfg: OptimizerConfig, *, total_steps: int, loss_scaling: bool = False) -> None:
        """total_steps: optimizer steps of the run, for the schedule. loss_scaling: for fp16, see `LossScale`.

        Raises:
            ConfigError: the library of cfg.kind cannot be imported.
        """
        self.cfg = cfg
        self.scale = LossScale(65536.0 if loss_scaling else 1.0, dynamic=loss_scaling)
        self.total_steps = total_steps
        self.steps_done = 0
        self.names = [n for n, p in model.named_parameters() if p.requires_grad]
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters: list[nn.Parameter] = []
        # what holds the sum of a parameter's gradients: its master, or in its place what stays on the device
        self.sums: list[Any] = []
        on_host = cfg.kind == "adamw_offload"
        for param in self.params:
            whole = param.dtype == torch.float32
            master = param if whole and not on_host else nn.Parameter(_master_of(param, on_host))
            held: Any = param if whole else GradSum() if on_host else master
            if not whole:
                param.register_post_accumulate_grad_hook(_collector(held, self.scale))
            self.masters.append(master)
            self.sums.append(held)
        self.inner: Inner = INNERS[cfg.kind](self.masters, self.sums, cfg)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.cfg.lr * lr_factor(self.steps_done, self.cfg, self.total_steps)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for param in (*self.params, *self.masters, *self.sums):
            param.grad = None

    def step(self) -> float:
        """Clip to cfg.max_grad_norm, update, and return the norm before clipping.

        A norm that is not finite leaves weights and moments untouched (the caller reports it) and halves the loss
        scale.
        """
        return self.finish(self.launch())

    def launch(self) -> torch.Tensor:
        """Everything of `step` that the device does, and the norm as it will be there (0-d fp32).

        With kind adamw the host waits for nothing. `finish` must follow before the next step.
        """
        norm = grad_norm(self.sums)
        if self.inner.step(norm, self.lr):
            with torch.no_grad():
                for param, master in zip(self.params, self.masters):
                    if param is not master:
                        param.copy_(master)
        self.zero_grad()
        return norm

    def finish(self, norm: torch.Tensor) -> float:
        """Read the norm, the one moment at which the host waits, and count the step when it was finite."""
        value = float(norm)
        if math.isfinite(value):
            self.scale.grow()
            self.steps_done += 1
        else:
            self.scale.shrink()
        return value

    def device_state(self) -> list[torch.Tensor]:
        """Moments and masters that take memory of a GPU: this rank's parts, each with a storage of its own.

        Before the first step there are no moments, and none are made.
        """
        state = [m.detach() for p, m in zip(self.params, self.masters) if m is not p]
        if self.steps_done:
            state = [t for t in self.state_tensors().values() if t.ndim]
        parts = [t.to_local() if isinstance(t, DTensor) else t for t in state]
        own = [t for t in parts if t.nbytes and t.untyped_storage().nbytes() == t.nbytes]
        return [t for t in own if t.device.type == "cuda"]

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Moments, step counts and masters by parameter name, for a checkpoint; moments that do not exist yet are made.

        The tensors are the live ones: loading writes into them in place.
        """
        out: dict[str, torch.Tensor] = {}
        for name, param, master, state in zip(self.names, self.params, self.masters, self.inner.states()):
            out.update({f"{name}.{key}": tensor for key, tensor in state.items()})
            if param is not master:
                out[f"{name}.master"] = master.detach()
        return out


class GradSum:
    """Holds the fp32 sum of one parameter's gradients."""

    __slots__ = ("grad",)

    def __init__(self) -> None:
        self.grad: torch.Tensor | None = None


def _master_of(param: nn.Parameter, on_host: bool) -> torch.Tensor:
    """An fp32 copy; in pinned host memory where a device is to read it."""
    master = param.detach().to(device="cpu" if on_host else None, dtype=torch.float32, copy=True)
    return master.pin_memory() if on_host and param.device.type == "cuda" else master


class LossScale:
    """Factor of the loss that keeps small fp16 gradients above the smallest fp16 number; 1 for other precisions.

    Halved after a gradient that was not finite, doubled after 200 good steps (Micikevicius et al. 2018).
    """

    def __init__(self, value: float, *, dynamic: bool) -> None:
        self.value = value
        self.dynamic = dynamic
        self.good = 0

    def shrink(self) -> None:
        """After a gradient that was not finite."""
        if self.dynamic:
            self.value, self.good = max(self.value / 2.0, 1.0), 0

    def grow(self) -> None:
        """After a good step."""
        self.good += 1
        if self.dynamic and self.good % 200 == 0:
            self.value *= 2.0


def _collector(master: Any, scale: LossScale) -> Any:
    """A hook that moves a finished low-precision gradient into the fp32 sum of `master`, a parameter or a GradSum."""

    def collect(param: torch.Tensor) -> None:
        if param.grad is None:
            return
        if master.grad is None:
            master.grad = param.grad.float().div_(scale.value)
        else:
            master.grad.add_(param.grad, alpha=1.0 / scale.value)
        param.grad = None

    return collect
