"""Spread a model over its ranks: tensor parallel, activation checkpointing, FSDP2 (`fully_shard`), in that order.

Sequence parallel changes no weight: its ranks share a row of tokens (`ulysses.py`) and FSDP2 cuts over them as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from rlspeed.engine.tensor_parallel import ModelRules, TensorParallel, apply_tensor_parallel
from rlspeed.engine.ulysses import SequenceParallel, check_heads
from rlspeed.engine.world import shard_mesh
from rlspeed.errors import Fault, LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a module was spread; `parallelize` leaves it on the module as `spread`, whose forward asks it.

    tp, sp: None for a degree of 1. data: (rank, size) among the ranks that work on different tokens: all ranks of a
    tensor or sequence parallel group are given the same batch and return the same numbers. aligned: FSDP2 cuts along
    the dimension of tensor parallel.
    """

    tp: TensorParallel | None
    sp: SequenceParallel | None
    data: tuple[int, int]
    aligned: bool


def checkpoint_blocks(blocks: Sequence[nn.Module] | nn.ModuleList, *, keep: int = 0) -> None:
    """Recompute each block's activations in the backward pass; the last `keep` blocks keep theirs.

    The last ones, since theirs are the first that the backward pass frees, before any block is computed again.
    The blocks' forward is wrapped in place, so that parameter names stay those of the checkpoint files.
    """
    from torch.utils.checkpoint import checkpoint

    for block in list(blocks)[: max(len(blocks) - keep, 0)]:
        inner = block.forward

        def forward(*args: Any, _inner: Callable[..., Any] = inner, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                return checkpoint(_inner, *args, use_reentrant=False, **kwargs)
            return _inner(*args, **kwargs)

        block.forward = forward  # type: ignore[method-assign]


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """torch.compile each block on its own, for any number of tokens; the same code serves all blocks of a model.

    The last norm is best among them: by itself it would cast its input to fp32 and its output back.
    """
    for block in blocks:
        block.compile(dynamic=True)


def _policy(compute: torch.dtype, reduce: torch.dtype) -> MixedPrecisionPolicy:
    # fp32 everywhere needs no policy; casting inputs would round the fp32 rotary tables (torchtitan does the same)
    low = compute != torch.float32
    return MixedPrecisionPolicy(
        param_dtype=compute if low else None, reduce_dtype=reduce if low else None, cast_forward_inputs=False
    )


def parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    rules: ModelRules,
    *,
    compute: torch.dtype,
    reduce: torch.dtype,
    aligned: bool = False,
    checkpointing: bool = False,
    kept_blocks: int = 0,
    compiling: Sequence[nn.Module] = (),
    keep_gathered: bool = False,
) -> Spread:
    """Spread a policy or value model over `mesh`, in place: its forward then takes and returns what it did before.

    mesh: axes (dp_shard, sp, tp), with dp_replicate before them for copies; of `world.device_mesh`. rules: of
    `tp_rules.rules_for(module)`. compute, reduce: dtypes of the products and of gradient reductions. aligned: see
    `fsdp`. checkpointing: recompute each block's activations in the backward pass, all but the last kept_blocks.
    compiling: modules to be compiled, one by one. keep_gathered: blocks stay whole between forward and backward: more
    memory and one gather less (ZeRO-2).

    All ranks that differ only in sp and tp are given the same `PackedBatch`, its T a multiple of sp. After backward the
    gradients are the sum over the data parallel ranks: weight the loss by global counts and scale it by nothing.

    Raises:
        LayoutError: degrees that the model's heads, width or vocabulary do not allow; all faults at once.
    """
    names = mesh.mesh_dim_names or ()
    size = {name: mesh.size(i) for i, name in enumerate(names)}
    tp_degree, sp_degree = size.get("tp", 1), size.get("sp", 1)
    faults = _spread_faults(module, rules, size, aligned)
    if faults:
        raise LayoutError(faults)
    tp = apply_tensor_parallel(module, rules, mesh["tp"]) if tp_degree > 1 else None
    sp = SequenceParallel.of(mesh["sp"].get_group()) if sp_degree > 1 else None
    if checkpointing:
        checkpoint_blocks(rules.blocks, keep=kept_blocks)
    if compiling:
        compile_blocks(compiling)
    if mesh.size() > tp_degree:
        fsdp(module, mesh, rules, compute=compute, reduce=reduce, aligned=aligned, keep_gathered=keep_gathered)
    rank, count = 0, 1
    for name in ("dp_replicate", "dp_shard"):
        if name in size:
            rank, count = rank * size[name] + mesh.get_local_rank(name), count * size[name]
    spread = Spread(tp=tp, sp=sp, data=(rank, count), aligned=aligned)
    module.spread = spread  # type: ignore[assignment]
    return spread


def fsdp(
    module: nn.Module,
    mesh: DeviceMesh,
    rules: ModelRules,
    *,
    compute: torch.dtype,
    reduce: torch.dtype,
    aligned: bool,
    keep_gathered: bool = False,
) -> None:
    """FSDP2 over the axes dp_shard and sp (copies over dp_replicate); gradients are summed, not averaged.

    Each block is one unit, the rest (embedding, norm, head) is the root's, which stays gathered between forward and
    backward: the head is used outside of any block. keep_gathered: blocks do, too.

    aligned: matrices that tensor parallel cuts (or would cut) by rows are cut along dimension 1, so that a rank's shard
    is its slice under tensor parallel over the same ranks; norms (a few kilobytes) and a value head stay whole, their
    gradients are summed one by one. Otherwise everything is cut along dimension 0.
    """
    policy = _policy(compute, reduce)
    over, data_groups = shard_mesh(mesh)
    row_wise = {id(p) for p in _row_weights(rules)}
    whole = set(_uncut(module, rules)) if aligned else set()
    for parameter in whole:
        parameter.register_hook(partial(_summed, groups=data_groups, dtype=reduce))

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if aligned and id(parameter) in row_wise else None

    units: list[nn.Module] = [*rules.blocks, module]
    for unit in units:
        fully_shard(
            unit,
            mesh=over,
            mp_policy=policy,
            shard_placement_fn=placement,
            reshard_after_forward=unit is not module and not keep_gathered,
            ignored_params=whole or None,
        )
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def rest(module: nn.Module) -> None:
    """Leave FSDP2's shards alone as the module's parameters, its gathered copies freed."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank (a collective when it is sharded)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def grad_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """L2 norm of all gradients over all ranks, each parameter counted once, as a plain fp32 scalar.

    A cut gradient's local norm is a part; the squares are summed over the mesh axes that cut it, and over no axis that
    only repeats it. Gradients with the same cuts share one all-reduce, so a model costs a few of them.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    device = full_device(grads[0])
    sums: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[torch.Tensor]] = {}
    for grad in grads:
        if isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements):
            grad = grad.full_tensor()
        mesh: DeviceMesh | None = None
        axes: tuple[int, ...] = ()
        if isinstance(grad, DTensor):
            mesh = grad.device_mesh
            axes = tuple(i for i, p in enumerate(grad.placements) if not p.is_replicate())
            grad = grad.to_local()
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32).to(device)
        sums.setdefault((mesh, axes), []).append(norm)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (where, cut), norms in sums.items():
        square = torch.stack(norms).double().square().sum()
        for axis in cut:
            assert where is not None
            dist.all_reduce(square, group=where.get_group(axis))
        total = total + square
    return total.sqrt().float()


def full_device(tensor: torch.Tensor) -> torch.device:
    """Where the local part lies."""
    return tensor.to_local().device if isinstance(tensor, DTensor) else tensor.device


def _row_weights(rules: ModelRules) -> list[nn.Parameter]:
    """Matrices that are cut along their input."""
    return [block.get_submodule(c.module).weight for block in rules.blocks for c in rules.cuts if c.kind == "row"]  # type: ignore[misc]


def _uncut(module: nn.Module, rules: ModelRules) -> list[nn.Parameter]:
    """Parameters that tensor parallel would leave whole: norms, biases of row-wise matrices, a value head."""
    columns = [block.get_submodule(c.module) for block in rules.blocks for c in rules.cuts if c.kind == "column"]
    ends = [rules.embedding] + ([rules.head] if rules.head is not None else [])
    cut = {id(p) for part in (*columns, *ends) for p in part.parameters(recurse=False)}
    cut |= {id(p) for p in _row_weights(rules)}
    return [p for p in module.parameters() if id(p) not in cut]


def _summed(grad: torch.Tensor, *, groups: list[dist.ProcessGroup], dtype: torch.dtype) -> torch.Tensor:
    """A gradient summed over data and sequence parallel ranks."""
    total = grad.to(dtype, copy=True)
    for group in groups:
        dist.all_reduce(total, group=group)
    return total.to(grad.dtype)


def _spread_faults(module: nn.Module, rules: ModelRules, size: dict[str, int], aligned: bool) -> list[Fault]:
    """What the model does not allow; tensor parallel's own faults come from `apply_tensor_parallel`."""
    tp, sp, faults = size.get("tp", 1), size.get("sp", 1), []
    if sp > 1:
        if getattr(module, "padded", False):
            faults.append(
                Fault(
                    where=f"sequence parallel {sp}",
                    found="padded training",
                    allowed="packed rows",
                    fix="set model.use_remove_padding: true",
                )
            )
        if rules.heads % tp == 0:
            faults.extend(check_heads(rules.heads // tp, max(rules.kv_heads // tp, 1), sp, f"sequence parallel {sp}"))
    over = size.get("dp_shard", 1) * sp
    if aligned:
        for width in sorted({p.shape[1] for p in _row_weights(rules)}):
            if width % (tp * over):
                found = f"a row-wise matrix of {width} columns over {over} ranks x tensor parallel {tp}"
                faults.append(Fault(where="aligned FSDP2", found=found, allowed="an even division"))
    return faults
