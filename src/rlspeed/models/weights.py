"""The weights of a live model by checkpoint name: what the reshard plan calls them, and where the generator has them.

A name, a shape and a cut come from the table of `planning/shape.py`; here they meet the model that is really there. The
generator may hold several weights in one tensor: those are views, listed below, so that the mover knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlspeed.engine.parallelize import rest
from rlspeed.errors import Fault, LayoutError
from rlspeed.planning.layout import Mesh, Region
from rlspeed.planning.reshard import DTYPE_BYTES, TensorRequest
from rlspeed.planning.shape import ModelShape, WeightShape
from rlspeed.planning.transition import GenerationMesh, generation_layout, training_layout

# tensor of the generator -> the checkpoint tensors that lie in it, one after the other along dimension 0
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
# with tied embeddings the first is another name of the second
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
# what wrappers put in front of or into a parameter's name
_PREFIXES = ("causal_lm.",)
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """One weight: checkpoint name, global shape, dtype, and how tensor parallel cuts it (see `WeightShape`)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tp_dim: int | None
    heads: int | None

    @property
    def planned(self) -> WeightShape:
        """The same for the planner, which knows no torch."""
        return WeightShape(name=self.name, shape=self.shape, tp_dim=self.tp_dim, heads=self.heads)


def checkpoint_name(name: str) -> str:
    """A parameter's name as the checkpoint has it: wrappers of compilation, checkpointing and sharding taken off."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return "model." + name.removeprefix("backbone.") if name.startswith("backbone.") else name


def live_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by checkpoint name, in the form in which they rest: FSDP2's shards, not its gathered copies.

    Tied weights come once, under the first of their names.
    """
    rest(module)
    return {checkpoint_name(name): parameter for name, parameter in module.named_parameters()}


def weight_specs(module: nn.Module, config: Any) -> tuple[WeightSpec, ...]:
    """Every weight of a policy or value model, from the table of its family, checked against the live module.

    Raises:
        LayoutError: a parameter that the table does not know, or one that is missing or of another shape; all are
        named. So nothing that trains can be left out of a transition.
    """
    shape = ModelShape.from_config(config.to_dict(), where="model config")
    live = live_weights(module)
    table = {w.name: w for w in shape.weights()}
    if "value_head.weight" in live:
        table.pop("lm_head.weight", None)
        for name in ("value_head.weight", "value_head.bias"):
            table[name] = WeightShape(name=name, shape=tuple(live[name].shape), tp_dim=None)
    faults = [Fault(where=name, found="a parameter that no table lists") for name in sorted(set(live) - set(table))]
    faults += [Fault(where=name, found="not among the model's parameters") for name in sorted(set(table) - set(live))]
    for name in sorted(set(table) & set(live)):
        if tuple(live[name].shape) != table[name].shape:
            found = f"shape {tuple(live[name].shape)}"
            faults.append(Fault(where=name, found=found, allowed=f"{table[name].shape}"))
    if faults:
        raise LayoutError(faults)
    return tuple(
        WeightSpec(name=n, shape=w.shape, dtype=live[n].dtype, tp_dim=w.tp_dim, heads=w.heads)
        for n, w in sorted(table.items())
    )


def reshard_requests(
    specs: Iterable[WeightSpec], train: Mesh, generation: GenerationMesh, *, aligned: bool, wire_dtype: str
) -> tuple[TensorRequest, ...]:
    """One request per weight for `plan_reshard`: from the training layout to the generator's.

    train: axes (dp_replicate, dp_shard, tp), FSDP2's cut over sequence parallel ranks being part of dp_shard
    (`training_mesh`).
    """
    if wire_dtype not in DTYPE_BYTES:
        raise LayoutError(Fault(where="wire dtype", found=wire_dtype, allowed=", ".join(DTYPE_BYTES)))
    return tuple(
        TensorRequest(
            name=spec.name,
            shape=spec.shape,
            wire_dtype=wire_dtype,
            src=training_layout(spec.planned, train, aligned=aligned),
            dst=generation_layout(spec.planned, generation),
        )
        for spec in specs
    )


def generator_views(tensors: Mapping[str, torch.Tensor], regions: Mapping[str, Region]) -> dict[str, torch.Tensor]:
    """For each checkpoint name in `regions` the part of the generator's `tensors` that holds this rank's region.

    tensors: by the generator's names: checkpoint names, or those of FUSED. A vocabulary that the generator has filled
    up at its end (vLLM: to a multiple of 64) is taken without the filling, as long as the rank's rows begin where they
    should.

    Raises:
        LayoutError: a weight that the generator does not have, or a tensor that nothing goes into; all are named.
    """
    out: dict[str, torch.Tensor] = {}
    faults: list[Fault] = []
    used: set[str] = set()
    for name, region in regions.items():
        home, start, whole = _home(name, tensors, regions)
        if home is None:
            faults.append(Fault(where=name, found="the generator has no tensor for it"))
            continue
        used.add(home)
        tensor, rows = tensors[home], region.shape[0]
        filled = whole < tensor.shape[0] and home == name and region.offset[0] % tensor.shape[0] == 0
        if tensor.shape[1:] != region.shape[1:] or not (whole == tensor.shape[0] or filled):
            found = f"generator tensor {home} of shape {tuple(tensor.shape)}"
            faults.append(Fault(where=name, found=found, allowed=f"{whole} rows for this rank"))
            continue
        out[name] = tensor.detach()[start : start + rows]
    for name in sorted(set(tensors) - used):
        home_of_tied = TIED.get(name)
        if home_of_tied in out and tensors[name].data_ptr() == out[home_of_tied].data_ptr():
            continue
        faults.append(Fault(where=name, found="a tensor of the generator that no weight goes into"))
    if faults:
        raise LayoutError(faults)
    return out


def _home(name: str, tensors: Mapping[str, torch.Tensor], regions: Mapping[str, Region]) -> tuple[str | None, int, int]:
    """The generator's tensor that holds `name`, its first row there, and the rows of all that lie in it."""
    if name in tensors:
        return name, 0, regions[name].shape[0]
    for fused, parts in FUSED.items():
        mine = next((p for p in parts if f".{p}." in name), None)
        if mine is None:
            continue
        home = name.replace(mine, fused)
        if home in tensors:
            rows = [regions[name.replace(mine, p)].shape[0] for p in parts]
            return home, sum(rows[: parts.index(mine)]), sum(rows)
    return None, 0, 0


def fused_order(names: Iterable[str]) -> list[str]:
    """The names with those that lie in one tensor of FUSED behind one another, in its order."""

    def place(name: str) -> tuple[str, int]:
        for fused, parts in FUSED.items():
            for number, part in enumerate(parts):
                if f".{part}." in name:
                    return name.replace(part, fused), number
        return name, 0

    return sorted(names, key=place)


def weights_of(module: nn.Module) -> Callable[[], dict[str, torch.Tensor]]:
    """What `Resharder` calls at each push."""
    return lambda: live_weights(module)
