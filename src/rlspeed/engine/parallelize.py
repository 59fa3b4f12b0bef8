"""Spread a model over its ranks: activation checkpointing, then FSDP2, in that order."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def checkpoint_blocks(blocks: nn.ModuleList) -> None:
    """Recompute each block's activations in the backward pass.

    The blocks' forward is wrapped in place, so that parameter names stay those of the checkpoint files.
    """
    from torch.utils.checkpoint import checkpoint

    for block in blocks:
        inner = block.forward

        def forward(*args: object, _inner: object = inner, **kwargs: object) -> object:
            if torch.is_grad_enabled():
                return checkpoint(_inner, *args, use_reentrant=False, **kwargs)
            return _inner(*args, **kwargs)  # type: ignore[operator]

        block.forward = forward  # type: ignore[method-assign]


def compile_blocks(blocks: nn.ModuleList) -> None:
    """torch.compile each block on its own, for any number of tokens; the same code serves all blocks of a model."""
    for block in blocks:
        block.compile(dynamic=True)


def shard(
    model: nn.Module, blocks: nn.ModuleList, mesh: DeviceMesh, *, compute: torch.dtype, reduce: torch.dtype
) -> None:
    """FSDP2 over `mesh`: each block is one unit, the rest (embedding, norm, head) is the root's.

    The root stays unsharded between forward and backward, since the head is used outside of any block.
    """
    # fp32 everywhere needs no policy; casting inputs would round the fp32 rotary tables (torchtitan does the same)
    low = compute != torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=compute if low else None, reduce_dtype=reduce if low else None, cast_forward_inputs=False
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank (a collective when it is sharded)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def grad_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """L2 norm of all gradients over all ranks, each parameter counted once, as a plain fp32 scalar.

    A sharded gradient's norm is a partial value per rank; `full_tensor` of it sums the squares over the mesh.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norms = [full_tensor(torch.linalg.vector_norm(g, dtype=torch.float32)) for g in grads]
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
