"""Everything that a run needs before its first step: models, prompts, generator, rewards, checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlspeed.config.device_schema import VLLMConfig
from rlspeed.config.schema import Profile
from rlspeed.data.prompts import PromptStream, PromptTable, load_prompts, prompts_per_step
from rlspeed.data.render import load_tokenizer
from rlspeed.engine.precision import Precision, resolve
from rlspeed.engine.world import World
from rlspeed.errors import ConfigError
from rlspeed.models.build import end_token_ids, load_model_config, resolve_model_path, vocabulary_faults
from rlspeed.planning.devices import Placement, uses_vllm
from rlspeed.rewards.pool import RewardPool
from rlspeed.rollout.builtin import BuiltinGenerator
from rlspeed.rollout.generator import Generator, IdleGenerator
from rlspeed.rollout.types import Prompt, Rollout, SamplingParams
from rlspeed.rollout.vllm import VllmGenerator
from rlspeed.training.checks import check_generator, check_layout, check_shared, sample_sequences
from rlspeed.training.clock import Clock
from rlspeed.training.collect import Collector
from rlspeed.training.grid import Grid, Site, make_grid
from rlspeed.training.handover import Handover, make_handover
from rlspeed.training.ppo_step import Parts
from rlspeed.training.roles import Roles, build_roles
from rlspeed.training.stop import StopFlag


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The parts of a run, its data and what to say about them."""

    parts: Parts
    train_table: PromptTable
    val_table: PromptTable | None
    stream: PromptStream
    total_steps: int
    tokenizer: Any
    precision: Precision
    notes: tuple[str, ...]


def build(profile: Profile, world: World, stop: StopFlag, clock: Clock) -> Setup:
    """Load and place everything; data first, since a bad row costs seconds and a model minutes."""
    model_dir = resolve_model_path(profile.model.path)
    precision = resolve(profile.model.model_dtype, world.device)
    config = load_model_config(profile.model.path, trust_remote_code=profile.model.trust_remote_code)
    tokenizer = load_tokenizer(model_dir, trust_remote_code=profile.model.trust_remote_code)
    faults = vocabulary_faults(config, tokenizer)
    if faults:
        raise ConfigError(faults)
    train_table = load_prompts(profile.data, profile.rollout, tokenizer, "train")
    val_table = load_prompts(profile.data, profile.rollout, tokenizer, "val") if profile.data.val_files else None
    stream = PromptStream(
        num_rows=len(train_table),
        batch_size=prompts_per_step(profile.data, profile.rollout),
        shuffle=profile.data.shuffle,
        seed=profile.run.seed,
    )
    total_steps, per_step = _lengths(profile, len(train_table))
    grid = make_grid(profile, world)
    roles = build_roles(profile, precision, world, grid, total_steps, per_step)
    handover = make_handover(profile, precision, world, grid, roles)
    sampling = _sampling(profile, _ends(profile, grid, roles, tokenizer, world))
    generator = _generator(profile, roles, handover, tokenizer, grid.home, sampling, stop, precision)
    handover.attach(generator)
    collector = Collector(
        profile=profile,
        rank=world.rank,
        makers=grid.home.members,
        tokenizer=tokenizer,
        generator=generator,
        pool=RewardPool(profile.reward, max_steps=total_steps),
        scorer=_scorer(profile, world, precision) if grid.home.here else None,
        sampling=sampling,
        stop=stop,
    )
    return Setup(
        parts=Parts(
            profile=profile,
            world=world,
            grid=grid,
            roles=roles,
            handover=handover,
            collector=collector,
            train_table=train_table,
            clock=clock,
            stop=stop,
            capacity=_capacity(profile, grid),
        ),
        train_table=train_table,
        val_table=val_table,
        stream=stream,
        total_steps=total_steps,
        tokenizer=tokenizer,
        precision=precision,
        notes=(
            *world.told_by(grid.home.first, _reasons(world, grid, precision, roles, generator)),
            *train_table.notes,
            *(val_table.notes if val_table else ()),
        ),
    )


def _reasons(world: World, grid: Grid, precision: Precision, roles: Roles, generator: Generator) -> list[str]:
    """How the roles lie, and why kernels, memory and the generator are as they are."""
    out = [f"{world.size} process(es) on {world.device.type}{_degrees(grid)}; {precision.reason}"]
    out.append(f"attention: {roles.attention_reason}")
    if roles.memory_reason:
        out.append(roles.memory_reason)
    if isinstance(generator, VllmGenerator):
        out.append(generator.note)
    return out


def _capacity(profile: Profile, grid: Grid) -> int:
    """Tokens of a bin, a multiple of every sequence parallel degree."""
    return profile.packing.capacity or -(-max(4096, profile.data.max_length) // grid.multiple) * grid.multiple


def _degrees(grid: Grid) -> str:
    """How the models are spread, in the words of the mapping; each role by itself where they are not on one site."""
    if len(set(grid.sites.values())) == 1:
        said = _spread(grid.actor)
        return f", {said}" if said else ""
    roles = [
        f"{role} on {', '.join(map(str, p.ranks))}{f' ({_spread(p)})' if _spread(p) else ''}"
        for role, p in grid.places.items()
    ]
    return f", {'; '.join(roles)}"


def _spread(place: Placement) -> str:
    sizes = {"copies": place.replicas, "data": place.dp // place.replicas, "sequence": place.sp, "tensor": place.tp}
    said = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return f"{' x '.join(said)} parallel" if said else ""


def _ends(profile: Profile, grid: Grid, roles: Roles, tokenizer: Any, world: World) -> tuple[int, ...]:
    """Token ids that end an answer, as the rank knows them that has read the actor; every rank calls it."""
    own = end_token_ids(roles.causal_lm, tokenizer, profile.rollout.stop_token_ids) if grid.home.here else ()
    return world.told_by(grid.home.first, own)


def _sampling(profile: Profile, ends: tuple[int, ...]) -> SamplingParams:
    """How training samples; validation changes the temperature."""
    return SamplingParams(
        max_new_tokens=profile.rollout.max_new_tokens,
        temperature=profile.rollout.temperature,
        top_k=profile.rollout.top_k,
        top_p=profile.rollout.top_p,
        min_p=profile.rollout.min_p,
        stop_token_ids=ends,
        stop=tuple(profile.rollout.stop),
    )


def _lengths(profile: Profile, rows: int) -> tuple[int, int]:
    """Training steps of the run, and optimizer steps in each."""
    batch = min(profile.data.batch_size, rows)
    asked = min(prompts_per_step(profile.data, profile.rollout), rows)
    steps = profile.run.steps or max(1, math.ceil(profile.run.epochs * rows / asked))
    return steps, profile.algorithm.epochs * math.ceil(batch / (profile.algorithm.mini_batch_size or batch))


def _generator(
    profile: Profile,
    roles: Roles,
    handover: Handover,
    tokenizer: Any,
    home: Site,
    sampling: SamplingParams,
    stop: StopFlag,
    precision: Precision,
) -> Generator:
    """vLLM where it is asked for, else the built-in generator over the weights that the handover brings."""
    if home.members is None:
        return IdleGenerator()
    if uses_vllm(profile.devices, profile.model.actor.use_vllm_for_generation):
        return _vllm(profile, roles, handover, home.members, sampling, stop, precision)
    return BuiltinGenerator(
        roles.causal_lm,
        tokenizer=tokenizer,
        max_concurrent=profile.rollout.max_concurrent,
        cache_gib=profile.rollout.kv_cache_gib,
        longest_first=profile.rollout.longest_first,
        max_length=profile.data.max_length,
        weights=handover.carrier.tensors,
        should_stop=stop,
    )


def _vllm(
    profile: Profile,
    roles: Roles,
    handover: Handover,
    world: World,
    sampling: SamplingParams,
    stop: StopFlag,
    precision: Precision,
) -> VllmGenerator:
    """vLLM with the engine arguments of the device mapping; its tensors hold the training parameters where they can."""
    mapped = profile.devices.actor.vllm_config if profile.devices.actor else VLLMConfig()
    extra = dict(mapped.model_extra or {})
    extra.setdefault("trust_remote_code", profile.model.trust_remote_code)
    return VllmGenerator(
        resolve_model_path(profile.model.path),
        dtype=str(precision.compute).removeprefix("torch.") if mapped.dtype == "auto" else mapped.dtype,
        max_length=profile.data.max_length,
        max_concurrent=profile.rollout.max_concurrent,
        sampling=sampling,
        weights=handover.carrier.tensors if handover.carrier.shares else dict,
        trainer=roles.actor.model if handover.carrier.shares else None,
        world=world,
        tensor_parallel_size=mapped.tensor_parallel_size,
        engine_args=extra,
        seed=profile.run.seed % (1 << 31),
        should_stop=stop,
    )


def _scorer(profile: Profile, world: World, precision: Precision) -> Any:
    """The reward model, when there is one."""
    if profile.reward.model.path is None:
        return None
    from rlspeed.rewards.model import RewardModelScorer
    from rlspeed.rewards.stream import StreamScorer

    place = profile.devices.reward_model
    if place is not None and place.device_mesh == ["cpu"]:
        # one after the other in a thread, while others are generated
        return StreamScorer(RewardModelScorer(profile.reward.model, torch.device("cpu"), torch.float32))
    rests = place is not None and place.use_cpu_offload
    return RewardModelScorer(profile.reward.model, world.device, precision.compute, rests=rests)


def startup_checks(setup: Setup) -> list[str]:
    """Run the laws of training/checks.py on real prompts; returns a sentence for each. Every rank calls it."""
    home, world = setup.parts.grid.home, setup.parts.world
    return world.told_by(home.first, _checked(setup, home.members) if home.members is not None else [])


def _checked(setup: Setup, members: World) -> list[str]:
    """The sentences, on the ranks of the actor."""
    parts = setup.parts
    actor, path, multiple = parts.roles.actor, parts.profile.model.path, parts.grid.multiple
    prompts = [setup.train_table[i].token_ids for i in range(min(4, len(setup.train_table)))]
    gap = check_layout(actor, sample_sequences(prompts), setup.precision, members, path, multiple=multiple)
    form = "packed" if parts.profile.model.use_remove_padding else "padded"
    notes = [f"checked: {form} = one by one (mean difference {gap:.1e})"]
    if parts.profile.model.shared_prefixes:
        gap = check_shared(actor, sample_sequences(prompts), setup.precision, members, path)
        notes.append(f"checked: shared prompts = plain packs (mean difference {gap:.1e})")

    def answers(requests: Sequence[Prompt], sampling: SamplingParams) -> list[Rollout]:
        parts.handover.to_generation()
        out = parts.collector.generator.generate(requests, sampling)
        parts.handover.to_training()
        return out

    limit, sampling = parts.profile.rollout.parity_tolerance, parts.collector.sampling
    gap = check_generator(actor, answers, prompts, members, limit, sampling, multiple=multiple)
    return [*notes, f"checked: generator = trainer log-probs (mean difference {gap:.1e})"]
