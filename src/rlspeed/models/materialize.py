"""Start of a spread model: built on the meta device on every rank, filled from the one rank that has read the files.

No rank but that one ever holds the whole model, and it sends each rank its shard alone, by the same plan and mover that
carry weights to the generator. Tied weights stay one parameter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlspeed.engine.reshard import Pushed, Resharder, local_part
from rlspeed.engine.transit import WIRE_DTYPES
from rlspeed.engine.world import broadcast_tensor
from rlspeed.models.attention_hook import PACKED_ATTENTION, register_attention
from rlspeed.models.weights import checkpoint_name, live_weights, weight_specs, weights_of
from rlspeed.planning.layout import Layout, Mesh
from rlspeed.planning.reshard import TensorRequest, plan_reshard
from rlspeed.planning.transition import training_layout

_NAMES = {dtype: name for name, dtype in WIRE_DTYPES.items()}


def meta_causal_lm(config: Any, *, dtype: torch.dtype, attention: str) -> Any:
    """The causal language model of a transformers config without memory for its weights; as `load_causal_lm`."""
    from transformers import AutoModelForCausalLM

    register_attention()
    implementation = PACKED_ATTENTION if attention == "packed" else "sdpa"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)
    model.config.use_cache = False
    return model


def fill_from_main(
    module: nn.Module,
    whole: nn.Module | None,
    *,
    mesh: Mesh,
    rank: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    aligned: bool,
    bucket_bytes: int,
) -> Pushed:
    """Give a module that was spread on meta its memory and its weights.

    whole: on the mesh's first rank a module of the same kind with all weights, None on the others. mesh: the training
    mesh (dp_replicate, dp_shard, tp) of `training_mesh`; group: its ranks. Make the optimizer afterwards: parameters
    are new objects.

    Raises:
        LayoutError: modules that do not match.
        RunError: a rank failed; all raise.
    """
    give_memory(module, device)
    config = _config(module)
    live = live_weights(module)
    main = Mesh.of(mesh.ranks[:1], main=1)
    plan = plan_reshard(
        TensorRequest(
            name=spec.name,
            shape=spec.shape,
            wire_dtype=_NAMES[spec.dtype],
            src=Layout(mesh=main, cuts=((),) * len(spec.shape)),
            dst=training_layout(spec.planned, mesh, aligned=aligned),
        )
        for spec in weight_specs(module, config)
    )
    mover = Resharder(
        plan,
        rank=rank,
        sources=weights_of(whole) if whole is not None else dict,
        targets={name: local_part(p) for name, p in live.items()},
        group=group,
        device=device,
        bucket_bytes=bucket_bytes,
        keep_old=False,
    )
    pushed = mover.push(0)
    known = {checkpoint_name(n): b for n, b in whole.named_buffers()} if whole is not None else {}
    for name, buffer in module.named_buffers():
        if whole is not None:
            buffer.copy_(known[checkpoint_name(name)])
        broadcast_tensor(buffer, mesh.ranks[0], group)
    return pushed


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Uninitialised memory on `device` for everything on meta; what was one parameter under two names stays one."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = _with_memory(parameter, device)
                part.register_parameter(name, made[id(parameter)])
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device=device)


def _with_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    data: torch.Tensor
    if isinstance(parameter, DTensor):
        data = DTensor.from_local(
            torch.empty_like(parameter.to_local(), device=device),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    else:
        data = torch.empty_like(parameter, device=device)
    new = nn.Parameter(data.detach(), requires_grad=parameter.requires_grad)
    for hook in (parameter._backward_hooks or {}).values():
        new.register_hook(hook)
    return new


def _config(module: nn.Module) -> Any:
    """The transformers config inside a policy or value model."""
    inner: Any = module.causal_lm if hasattr(module, "causal_lm") else module.backbone
    return inner.config
