"""One model onto the ranks of its role: read by one process, spread by `parallelize`, filled shard by shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from rlspeed.config.schema import Profile
from rlspeed.engine.parallelize import checkpoint_blocks, compile_blocks, parallelize
from rlspeed.engine.precision import Precision
from rlspeed.engine.world import World
from rlspeed.errors import Fault, RlspeedError, RunError
from rlspeed.models.build import PolicyModel, ValueModel, load_causal_lm, load_model_config
from rlspeed.models.materialize import fill_from_main, meta_causal_lm
from rlspeed.models.tp_rules import rules_for
from rlspeed.planning.devices import Placement, Role
from rlspeed.planning.shape import ModelShape
from rlspeed.planning.transition import actor_way, training_mesh
from rlspeed.training.grid import Grid

M = TypeVar("M", PolicyModel, ValueModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """What all models of a run have in common. kept_blocks: blocks that keep their activations, see `kept_blocks`."""

    profile: Profile
    precision: Precision
    world: World
    grid: Grid
    kept_blocks: int = 0

    @property
    def attention(self) -> str:
        """Implementation that the layers call."""
        return "packed" if self.profile.model.use_remove_padding else "sdpa"

    def model(self, role: Role, path: str, wrap: Callable[[Any], M], *, train: bool) -> M | None:
        """The model at `path` as `role` has it, None on ranks outside of the role; every rank of the run calls it.

        wrap: of a causal language model to the module that trains.

        Raises:
            RlspeedError: no model there, or degrees that it does not allow; on every rank.
        """
        if role in self.grid.meshes:
            module = self._spread(role, path, wrap, train=train)
            if module is None:
                return None
        else:
            whole = self._read_on(self.grid.places[role].ranks[0], path)
            if whole is None:
                return None
            module = wrap(whole).to(self.world.device)
            if train and self.profile.model.activation_checkpointing:
                checkpoint_blocks(rules_for(module).blocks, keep=self.kept_blocks)
            if train and self.profile.model.compile:
                compile_blocks(_compiled(module))
        module.train(train).requires_grad_(train)
        return module

    def _load(self, path: str) -> Any:
        return load_causal_lm(
            path,
            dtype=self.precision.compute,
            attention=self.attention,
            trust_remote_code=self.profile.model.trust_remote_code,
        )

    def _spread(self, role: Role, path: str, wrap: Callable[[Any], M], *, train: bool) -> M | None:
        """Spread on the meta device on all ranks of the role; one rank reads the files and sends each rank its part."""
        own, place, mesh = self.profile.model, self.grid.places[role], self.grid.meshes[role]
        members = self.grid.sites[role].members
        whole = self._read_on(place.ranks[0], path)
        ends = self._told_by(place.ranks[0], None if whole is None else whole.generation_config)
        if members is None:
            return None
        config = load_model_config(path, trust_remote_code=own.trust_remote_code)
        lm = meta_causal_lm(config, dtype=self.precision.compute, attention=self.attention)
        lm.generation_config = ends
        with torch.device("meta"):
            module = wrap(lm)
        section = getattr(self.profile.devices, role)
        aligned = role is Role.ACTOR and self._aligned(place, config)
        parallelize(
            module,
            mesh,
            rules_for(module),
            compute=self.precision.compute,
            reduce=self.precision.reduce,
            aligned=aligned,
            checkpointing=train and bool(own.activation_checkpointing),
            kept_blocks=self.kept_blocks,
            compiling=_compiled(module) if train and own.compile else (),
            keep_gathered=section is not None and section.fsdp_config.sharding_strategy == "SHARD_GRAD_OP",
        )
        fill_from_main(
            module,
            None if whole is None else wrap(whole),
            mesh=training_mesh(place),
            rank=self.world.rank,
            group=members.members,
            device=self.world.device,
            aligned=aligned,
            bucket_bytes=own.actor.sync_bucket_mb << 20,
        )
        return module

    def _aligned(self, actor: Placement, config: Any) -> bool:
        """Whether the actor's shards are to be its slices in generation; see `engine.parallelize.fsdp`."""
        shape = ModelShape.from_config(config.to_dict(), where="model config")
        return actor_way(self.profile, actor, shape).aligned

    def _read_on(self, rank: int, path: str) -> Any:
        """The model on `rank`, None on all others; what fails there is raised everywhere."""
        whole: Any = None
        faults: tuple[Fault, ...] = ()
        if self.world.rank == rank:
            try:
                whole = self._load(path)
            except RlspeedError as error:
                faults = error.faults
            except (OSError, RuntimeError) as error:
                faults = (Fault(where=path, found=f"{type(error).__name__}: {error}"),)
        faults = self._told_by(rank, faults)
        if faults:
            raise RunError(faults)
        return whole

    def _told_by(self, rank: int, value: Any) -> Any:
        """`value` of `rank` on every rank of the run."""
        return self.world.told_by(rank, value)


def _compiled(module: PolicyModel | ValueModel) -> list[nn.Module]:
    """What model.compile compiles: the blocks and the norm after them."""
    backbone: Any = module.causal_lm.model if isinstance(module, PolicyModel) else module.backbone
    return [*backbone.layers, backbone.norm]
