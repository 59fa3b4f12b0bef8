"""AdamW with fp32 master weights behind low-precision parameters, its learning-rate course and gradient clipping."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlspeed.config.schema import Optimizer as OptimizerConfig
from rlspeed.engine.parallelize import grad_norm


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
    """AdamW whose moments and weights are fp32, whatever the precision of the model's parameters.

    For fp32 parameters the parameter is its own master. For bf16 and fp16 each parameter has an fp32 master; every
    micro-batch's gradient is added to an fp32 sum the moment it is complete (and freed), the update happens on the
    master, and the rounded result is written into the parameter in place, so views of it (a generator's) see the new
    weights.

    Norms, biases and other vectors take no weight decay.
    """

    def __init__(self, model: nn.Module, cfg: OptimizerConfig, *, total_steps: int, loss_scaling: bool = False) -> None:
        """total_steps: optimizer steps of the run, for the schedule. loss_scaling: for fp16, see `LossScale`."""
        self.cfg = cfg
        self.scale = LossScale(65536.0 if loss_scaling else 1.0, dynamic=loss_scaling)
        self.total_steps = total_steps
        self.steps_done = 0
        self.names = [n for n, p in model.named_parameters() if p.requires_grad]
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters: list[nn.Parameter] = []
        for param in self.params:
            if param.dtype == torch.float32:
                self.masters.append(param)
                continue
            master = nn.Parameter(param.detach().float().clone())
            param.register_post_accumulate_grad_hook(_collector(master, self.scale))
            self.masters.append(master)
        # one group for each weight decay and kind of tensor: torch's batched kernels take no mixture of kinds
        kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for master in self.masters:
            kinds.setdefault((master.ndim >= 2, isinstance(master, DTensor)), []).append(master)
        groups = [{"params": p, "weight_decay": cfg.weight_decay if k[0] else 0.0} for k, p in sorted(kinds.items())]
        # the fused kernel takes plain tensors; sharded ones go through the foreach path
        plain_tensors = not any(isinstance(m, DTensor) for m in self.masters)
        self.inner = torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=plain_tensors or None)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.cfg.lr * lr_factor(self.steps_done, self.cfg, self.total_steps)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for param in (*self.params, *self.masters):
            param.grad = None

    def step(self) -> float:
        """Clip to cfg.max_grad_norm, update, and return the norm before clipping.

        A norm that is not finite leaves weights and moments untouched (the caller reports it) and halves the loss
        scale.
        """
        norm = float(grad_norm(self.masters))
        if not math.isfinite(norm):
            self.zero_grad()
            self.scale.shrink()
            return norm
        self.scale.grow()
        limit = self.cfg.max_grad_norm
        if limit is not None and norm > limit:
            for master in self.masters:
                if master.grad is not None:
                    master.grad.mul_(limit / (norm + 1e-6))
        for group in self.inner.param_groups:
            group["lr"] = self.lr
        self.inner.step()
        self.steps_done += 1
        with torch.no_grad():
            for param, master in zip(self.params, self.masters):
                if param is not master:
                    param.copy_(master)
        self.zero_grad()
        return norm

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Moments, step counts and masters by parameter name, for a checkpoint; moments that do not exist yet are made.

        The tensors are the live ones: loading writes into them in place.
        """
        out: dict[str, torch.Tensor] = {}
        for name, param, master in zip(self.names, self.params, self.masters):
            state = self.inner.state[master]
            if not state:
                state["step"] = torch.zeros(
                    (), dtype=torch.float32, device=master.device if _fused(self.inner) else "cpu"
                )
                state["exp_avg"] = torch.zeros_like(master)
                state["exp_avg_sq"] = torch.zeros_like(master)
            out.update({f"{name}.{key}": state[key] for key in ("step", "exp_avg", "exp_avg_sq")})
            if param is not master:
                out[f"{name}.master"] = master.detach()
        return out


def _fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.param_groups[0].get("fused"))


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


def _collector(master: nn.Parameter, scale: LossScale) -> Any:
    """A hook that moves a finished low-precision gradient into the master's fp32 sum."""

    def collect(param: torch.Tensor) -> None:
        if param.grad is None:
            return
        if master.grad is None:
            master.grad = param.grad.float().div_(scale.value)
        else:
            master.grad.add_(param.grad, alpha=1.0 / scale.value)
        param.grad = None

    return collect
