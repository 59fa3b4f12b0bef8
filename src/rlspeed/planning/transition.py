"""The actor's two layouts, for training and for generation, and the transition between them.

Training cuts every weight by FSDP2 (axis "dp_shard") over tensor parallel (axis "tp"); generation cuts by tensor
parallel alone. Where the generation's groups take ranks at regular intervals, each rank's training shard lies inside
its generation shard (HybridFlow, section 5.3), so a rank receives only what it never had.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from rlspeed.config.schema import Profile
from rlspeed.errors import Fault, LayoutError
from rlspeed.planning.devices import Placement, generator_placement, uses_vllm
from rlspeed.planning.layout import Layout, Mesh
from rlspeed.planning.reshard import TensorRequest, least_bytes
from rlspeed.planning.shape import ModelShape, WeightShape

DP, TP = "dp_shard", "tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationMesh:
    """Ranks of the generator. axes: what cuts a weight, outermost first; all other axes of the mesh are replicas."""

    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def tp(self) -> int:
        """Tensor parallel degree."""
        size = 1
        for axis in self.axes:
            size *= self.mesh.size(axis)
        return size

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The tensor parallel groups, each in the order of its shards."""
        return self.mesh.groups(*self.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the actor's weights lie while it trains and while it generates.

    aligned: FSDP2 cuts along the dimension that tensor parallel cuts, see `training_layout`.
    """

    train: Mesh
    generation: GenerationMesh
    aligned: bool


def actor_way(profile: Profile, actor: Placement, shape: ModelShape) -> Way:
    """The two layouts of a run: those that `train` binds and that `check-devices` plans with.

    FSDP2 is aligned where slices are taken on the training's own ranks and the row-wise matrices divide evenly, which
    FSDP2 asks for; whole weights cost the same either way.

    Raises:
        LayoutError: degrees that do not divide the ranks.
    """
    own = profile.model.actor
    rollout = generator_placement(profile.devices, actor, own.use_vllm_for_generation)
    vllm = uses_vllm(profile.devices, own.use_vllm_for_generation)
    if takes_whole(vllm=vllm, hybrid_engine=own.use_3d_hybrid_engine):
        rollout = replace(rollout, tp=1)
    train, generation = training_mesh(actor), generation_mesh(actor, rollout)
    over = train.size(DP) * train.size(TP)
    even = all(w.shape[1] % over == 0 for w in shape.weights() if w.tp_dim == 1)
    return Way(
        train=train,
        generation=generation,
        aligned=generation.tp > 1 and set(actor.ranks) == set(rollout.ranks) and even,
    )


def takes_whole(*, vllm: bool, hybrid_engine: bool) -> bool:
    """Whether every rank is brought whole weights, whatever its degree in generation; else its slices alone.

    vLLM is given whole tensors, of which each of its ranks loads a slice by itself; without the hybrid engine whole
    tensors are gathered.
    """
    return vllm or not hybrid_engine


def interval_generation(train: Mesh, tp: int) -> GenerationMesh:
    """The generation mesh on the training ranks in which every rank keeps what it has.

    tp at most the training's: its "tp" axis is split, groups take every (training tp / tp)-th rank. More: "dp_shard"
    gives the missing factor, inside "tp".

    Raises:
        LayoutError: `tp` neither divides the training's tp nor is a multiple of it that the dp_shard axis can give.
    """
    have, shards = train.size(TP), train.size(DP)
    if have % tp == 0:
        return GenerationMesh(mesh=train.split(TP, tp, "micro_dp"), axes=(TP,))
    if tp % have == 0 and shards % (tp // have) == 0:
        return GenerationMesh(mesh=train.split(DP, tp // have, "micro_dp"), axes=(TP, DP))
    raise LayoutError(
        Fault(
            where="generation tensor parallel",
            found=f"{tp} over training dp_shard {shards} x tp {have}",
            allowed=f"a divisor of {have}, or {have} times a divisor of {shards}",
        )
    )


def own_generation(ranks: tuple[int, ...], tp: int) -> GenerationMesh:
    """A generation mesh on ranks of its own, groups of `tp` neighbours.

    Raises:
        LayoutError: `tp` does not divide the number of ranks.
    """
    if tp < 1 or len(ranks) % tp:
        raise LayoutError(Fault(where="generation tensor parallel", found=f"{tp} over {len(ranks)} ranks"))
    return GenerationMesh(mesh=Mesh.of(ranks, replica=len(ranks) // tp, tp=tp), axes=(TP,))


def training_mesh(actor: Placement) -> Mesh:
    """The actor's ranks as (dp_replicate, dp_shard, tp); FSDP2 cuts over the sequence parallel ranks as well.

    Raises:
        LayoutError: degrees that do not multiply to the number of ranks.
    """
    return Mesh.of(actor.ranks, dp_replicate=actor.replicas, dp_shard=actor.dp_shard, tp=actor.tp)


def generation_mesh(actor: Placement, rollout: Placement) -> GenerationMesh:
    """The generator's ranks: at intervals on the actor's where the degrees allow it, else neighbours.

    Raises:
        LayoutError: the generator's tensor parallel degree does not divide its ranks.
    """
    if actor.ranks == rollout.ranks:
        try:
            return interval_generation(training_mesh(actor), rollout.tp)
        except LayoutError:
            pass
    return own_generation(rollout.ranks, rollout.tp)


def training_layout(weight: WeightShape, mesh: Mesh, *, aligned: bool) -> Layout:
    """How FSDP2 over tensor parallel lays a weight out.

    aligned: FSDP2 cuts along the dimension that tensor parallel cuts (`shard_placement_fn` with Shard(1) for the
    row-wise matrices) and leaves weights whole that tensor parallel does not cut (norms: a few kilobytes). Otherwise
    FSDP2 always cuts dimension 0. On a shared dimension tensor parallel is the outer cut. Where there are fewer KV
    heads than tensor parallel ranks, training keeps k and v whole over them; each rank computes the one head it needs.
    """
    cuts: list[tuple[str, ...]] = [()] * len(weight.shape)
    if weight.tp_dim is not None:
        divided, axes = _whole_heads(weight, mesh, (TP,))
        cuts[weight.tp_dim] = axes if divided == mesh else ()
    fsdp_dim = weight.tp_dim if aligned else 0
    if fsdp_dim is not None and cuts:
        cuts[fsdp_dim] = (*cuts[fsdp_dim], DP)
    return Layout(mesh=mesh, cuts=tuple(cuts))


def generation_layout(weight: WeightShape, generation: GenerationMesh) -> Layout:
    """How the generator lays a weight out; key and value heads are replicated where there are fewer than ranks."""
    mesh, axes = _whole_heads(weight, generation.mesh, generation.axes)
    cuts = tuple(axes if dim == weight.tp_dim else () for dim in range(len(weight.shape)))
    return Layout(mesh=mesh, cuts=cuts)


def transition_requests(
    shape: ModelShape, train: Mesh, generation: GenerationMesh, *, aligned: bool, wire_dtype: str = "bf16"
) -> tuple[TensorRequest, ...]:
    """One request per weight of the actor, for `plan_reshard`."""
    return tuple(
        TensorRequest(
            name=w.name,
            shape=w.shape,
            wire_dtype=wire_dtype,
            src=training_layout(w, train, aligned=aligned),
            dst=generation_layout(w, generation),
        )
        for w in shape.weights()
    )


def received_bytes(
    shape: ModelShape, train: Mesh, generation: GenerationMesh, *, aligned: bool, element_bytes: int = 2
) -> dict[int, int]:
    """Bytes that each generation rank receives, without making a plan: any plan of `plan_reshard` has just these.

    Weights of the same shape and cut are counted once and multiplied, so a thousand ranks take a second.
    """
    kinds = Counter((w.shape, w.tp_dim, w.heads) for w in shape.weights())
    out = dict.fromkeys(generation.mesh.ranks, 0)
    for (size, tp_dim, heads), count in kinds.items():
        weight = WeightShape(name=f"weight {size}", shape=size, tp_dim=tp_dim, heads=heads)
        src = training_layout(weight, train, aligned=aligned)
        for rank, least in least_bytes(size, src, generation_layout(weight, generation), element_bytes).items():
            out[rank] += count * least
    return out


def _whole_heads(weight: WeightShape, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Mesh, tuple[str, ...]]:
    """Mesh and axes that cut the weight without halving a head: with fewer heads than ranks, neighbours hold the same
    one.

    Raises:
        LayoutError: the number of heads neither divides nor is a multiple of the degree.
    """
    if weight.heads is None or weight.tp_dim is None:
        return mesh, axes
    left, out = weight.heads, []
    for axis in axes:
        size = mesh.size(axis)
        if left % size == 0:
            out.append(axis)
            left //= size
        elif size % left == 0:
            mesh = mesh.split(axis, left, f"{axis}_same_head")
            out.append(axis)
            left = 1
        else:
            found = f"{weight.heads} heads over {axis} = {size}"
            raise LayoutError(Fault(where=weight.name, found=found, allowed="a divisor or a multiple of the heads"))
    return mesh, tuple(out)
