"""Tensor parallel: which part of each matrix a rank holds, and the two sums per block that this costs.

```
   x --+-- q, k, v (columns) -- attention of the own heads -- o (rows) --+--> sum over ranks
       |                                                                 |
   the gradient of x is summed over ranks                    its gradient is taken as it is
```

The MLP is the same with gate, up and down. Weights are DTensors, so that FSDP2, checkpoints and the reshard plan see
global shapes; the products themselves run on plain local tensors. Where there are fewer KV heads than ranks, k and v
stay whole on every rank and each rank computes the one head that its query heads read: a head is never halved.

Source: Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rlspeed.engine.head import VocabularyShard
from rlspeed.errors import Fault, LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one submodule of a block is cut.

    kind: "column" cuts the output, "row" the input; "per_head" is whole and used on each rank's own heads.
    heads: "q" or "kv" where the cut dimension is heads, None for the width of the MLP.
    """

    module: str
    kind: Literal["column", "row", "per_head"]
    heads: Literal["q", "kv"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRules:
    """Where the parts of a model are.

    blocks: its decoder layers. embedding, head: the two ends (head None for a value model). cuts: of each block.
    attention, mlp: names of the two submodules of a block whose input is shared by their matrices.
    """

    blocks: nn.ModuleList
    embedding: nn.Embedding
    head: nn.Linear | None
    cuts: tuple[Cut, ...]
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    attention: str = "self_attn"
    mlp: str = "mlp"


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The ranks that share one copy of the model's matrices. size: how many; rank: this one's place."""

    group: dist.ProcessGroup
    size: int
    rank: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> TensorParallel:
        """The group as seen from this process."""
        return TensorParallel(group, dist.get_world_size(group), dist.get_rank(group))

    def span(self, length: int) -> tuple[int, int]:
        """First and one past the last of this rank's part of `length`, by torch.chunk's rule."""
        chunk = -(-length // self.size)
        start = min(self.rank * chunk, length)
        return start, min(start + chunk, length)

    def vocabulary(self, words: int) -> VocabularyShard:
        """This rank's rows of a head over `words` tokens."""
        start, end = self.span(words)
        return VocabularyShard(
            start=start,
            end=end,
            reduce_max=partial(_reduced, group=self.group, op=dist.ReduceOp.MAX),
            reduce_sum=partial(_reduced, group=self.group, op=dist.ReduceOp.SUM),
        )


def tensor_faults(rules: ModelRules, degree: int) -> list[Fault]:
    """Everything that keeps `degree` ranks from sharing the model; nothing when they can."""
    where = f"tensor parallel {degree}"
    words = rules.embedding.num_embeddings
    out = []
    if rules.heads % degree:
        allowed = "a degree that divides the query heads"
        out.append(Fault(where=where, found=f"{rules.heads} query heads", allowed=allowed))
    if rules.kv_heads % degree and degree % rules.kv_heads:
        allowed = "a divisor or a multiple of the KV heads (then each head is on several ranks)"
        out.append(Fault(where=where, found=f"{rules.kv_heads} KV heads", allowed=allowed))
    if rules.intermediate % degree:
        allowed = "a degree that divides the MLP's width"
        out.append(Fault(where=where, found=f"an MLP of width {rules.intermediate}", allowed=allowed))
    if -(-words // degree) * (degree - 1) >= words:
        allowed = "at least one word on every rank"
        out.append(Fault(where=where, found=f"a vocabulary of {words}", allowed=allowed))
    return out


def apply_tensor_parallel(model: nn.Module, rules: ModelRules, mesh: DeviceMesh) -> TensorParallel:
    """Cut `model` over the one axis of `mesh`, in place. Tied weights stay one parameter.

    Raises:
        LayoutError: degrees that would halve a head, or leave a rank without columns or words.
    """
    tp = TensorParallel.of(mesh.get_group())
    faults = tensor_faults(rules, tp.size)
    if faults:
        raise LayoutError(faults)
    owners = _owners(model)
    for block in rules.blocks:
        for cut in rules.cuts:
            _apply(block.get_submodule(cut.module), cut, rules, tp, mesh, owners)
        for name in (rules.attention, rules.mlp):
            block.get_submodule(name).register_forward_pre_hook(partial(_enter, tp=tp), with_kwargs=True)
        # transformers' own attention repeats KV heads by this number
        attention: Any = block.get_submodule(rules.attention)
        attention.num_key_value_groups = (rules.heads // tp.size) // max(rules.kv_heads // tp.size, 1)
    _shard(rules.embedding.weight, 0, mesh, owners)
    rules.embedding.forward = partial(_embed, rules.embedding, tp)  # type: ignore[method-assign]
    if rules.head is not None:
        for parameter in (rules.head.weight, rules.head.bias):
            if parameter is not None and not isinstance(parameter, DTensor):
                _shard(parameter, 0, mesh, owners)
    return tp


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight, with its graph."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_gradient(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`tensor` itself; its gradient is summed over the group."""
    out: torch.Tensor = _SumGradient.apply(tensor, group)  # type: ignore[no-untyped-call]
    return out


def sum_output(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of `tensor` over the group; the gradient is passed on as it is."""
    out: torch.Tensor = _SumOutput.apply(tensor, group)  # type: ignore[no-untyped-call]
    return out


Owners = dict[int, list[tuple[nn.Module, str]]]


def _owners(model: nn.Module) -> Owners:
    """Every (module, name) that holds a parameter, by the parameter's identity: tied weights have two."""
    found: Owners = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), []).append((module, name))
    return found


def _shard(parameter: torch.Tensor, dim: int, mesh: DeviceMesh, owners: Owners) -> None:
    """Replace the parameter by its part, in all places that hold it."""
    whole = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    # the part is a view that would keep the whole tensor alive
    part = DTensor.from_local(
        whole.to_local().clone(), mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    new = nn.Parameter(part, requires_grad=parameter.requires_grad)
    for module, name in owners[id(parameter)]:
        module.register_parameter(name, new)


def _apply(
    module: nn.Module, cut: Cut, rules: ModelRules, tp: TensorParallel, mesh: DeviceMesh, owners: Owners
) -> None:
    if cut.kind == "per_head":
        module.forward = partial(_per_head, module, module.forward, tp)  # type: ignore[method-assign]
        return
    assert isinstance(module, nn.Linear)
    if cut.kind == "row":
        _shard(module.weight, 1, mesh, owners)
        module.forward = partial(_row, module, tp)  # type: ignore[method-assign]
        return
    if cut.heads == "kv" and rules.kv_heads < tp.size:
        head = tp.rank // (tp.size // rules.kv_heads)
        rows = slice(head * rules.head_dim, (head + 1) * rules.head_dim)
        module.forward = partial(_one_head, module, rows, tp)  # type: ignore[method-assign]
        return
    _shard(module.weight, 0, mesh, owners)
    if module.bias is not None:
        _shard(module.bias, 0, mesh, owners)
    module.forward = partial(_column, module)  # type: ignore[method-assign]


def _enter(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *, tp: TensorParallel) -> Any:
    """Before attention and MLP: one sum of the input's gradient for all matrices that read it."""
    if args:
        return (sum_gradient(args[0], tp.group), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": sum_gradient(kwargs["hidden_states"], tp.group)}


def _column(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, local(linear.weight), None if linear.bias is None else local(linear.bias))


def _row(linear: nn.Linear, tp: TensorParallel, x: torch.Tensor) -> torch.Tensor:
    out = sum_output(F.linear(x, local(linear.weight)), tp.group)
    return out if linear.bias is None else out + local(linear.bias)


def _one_head(linear: nn.Linear, rows: slice, tp: TensorParallel, x: torch.Tensor) -> torch.Tensor:
    """The rows of one head of a weight that every rank holds whole; the ranks' gradients complete each other."""
    weight = sum_gradient(linear.weight, tp.group)[rows]
    return F.linear(x, weight, None if linear.bias is None else sum_gradient(linear.bias, tp.group)[rows])


def _per_head(norm: nn.Module, inner: Callable[..., Any], tp: TensorParallel, x: torch.Tensor) -> torch.Tensor:
    """A norm over each head: every rank sees its own heads only, so the weight's gradient is a sum over ranks."""
    weight = norm._parameters["weight"]
    assert weight is not None
    norm._parameters["weight"] = sum_gradient(weight, tp.group)  # type: ignore[assignment]
    try:
        out: torch.Tensor = inner(x)
        return out
    finally:
        norm._parameters["weight"] = weight  # type: ignore[assignment]


def _embed(embedding: nn.Embedding, tp: TensorParallel, ids: torch.Tensor) -> torch.Tensor:
    """Rows of the ids that this rank holds, zeros for all others, summed over ranks."""
    start, end = tp.span(embedding.num_embeddings)
    places = ids - start
    here = (places >= 0) & (places < end - start)
    pad = embedding.padding_idx
    own_pad = pad - start if pad is not None and start <= pad < end else None
    rows = F.embedding(places.clamp(0, end - start - 1), local(embedding.weight), own_pad)
    return sum_output(rows.masked_fill(~here[..., None], 0.0), tp.group)


def _reduced(tensor: torch.Tensor, *, group: dist.ProcessGroup, op: Any) -> torch.Tensor:
    """The all-reduced tensor; it may be written in place."""
    tensor = tensor.contiguous()
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduced(grad.clone(memory_format=torch.contiguous_format), group=ctx.group, op=dist.ReduceOp.SUM), None


class _SumOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _reduced(tensor.clone(memory_format=torch.contiguous_format), group=group, op=dist.ReduceOp.SUM)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
