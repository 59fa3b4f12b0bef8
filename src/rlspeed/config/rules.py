"""Rules that touch more than one key, one function each, named after the rule; `check` runs them all."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache

from rlspeed.config.load import LoadedProfile
from rlspeed.config.not_yet import cannot_be_done_yet, roles_in_use, vllm_generates
from rlspeed.config.overrides import OVERRIDE
from rlspeed.config.schema import Data, Model, Profile
from rlspeed.errors import Fault

GROUP_KINDS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")


def check(loaded: LoadedProfile, world_size: int = 1) -> list[Fault]:
    """Every violation of every rule."""
    return [fault for rule in RULES for fault in rule(loaded, world_size)]


def _fault(loaded: LoadedProfile, key: str, found: str, allowed: str = "", fix: str = "") -> Fault:
    return Fault(where=loaded.where(key), found=f"{key}: {found}", allowed=allowed, fix=fix)


def groups_need_two_answers(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """A group of one has nothing to be compared with (num-11)."""
    p = loaded.profile
    if p.rollout.n >= 2:
        return
    if p.algorithm.kind in GROUP_KINDS:
        found = f"{p.rollout.n} with algorithm.kind={p.algorithm.kind}"
        yield _fault(loaded, "rollout.n", found, "at least 2", "set rollout.n=8")
    if p.algorithm.filter_groups:
        found = f"{p.rollout.n} with algorithm.filter_groups=true: a group of one is always left out"
        yield _fault(loaded, "rollout.n", found, "at least 2", "set rollout.n=8, or filter_groups=false")


def lengths_fit(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """Prompt and answer fit max_length."""
    p = loaded.profile
    longest, answer = p.data.max_length, p.rollout.max_new_tokens
    if answer >= longest:
        found = f"{answer}, not less than data.max_length {longest}"
        fix = "raise data.max_length or lower rollout.max_new_tokens"
        yield _fault(loaded, "rollout.max_new_tokens", found, f"at most {longest - 1}", fix)
    elif p.data.max_prompt_length is not None and p.data.max_prompt_length + answer > longest:
        prompt = p.data.max_prompt_length
        found = f"{prompt} + rollout.max_new_tokens {answer} is more than data.max_length {longest}"
        fix = "raise data.max_length or lower one of the other two"
        yield _fault(loaded, "data.max_prompt_length", found, f"at most {longest - answer}", fix)


def longest_sequence_fits_a_bin(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """Checked before the first step, not when the first long sequence turns up (pack-24)."""
    p = loaded.profile
    capacity, longest = p.packing.capacity, p.data.max_length
    if p.model.use_remove_padding and capacity is not None and capacity < longest:
        prompt = p.data.max_prompt_length or longest - p.rollout.max_new_tokens
        found = (
            f"{capacity} tokens, but a sequence may have data.max_length {longest} "
            f"(prompt up to {prompt}, answer up to {p.rollout.max_new_tokens})"
        )
        fix = "raise packing.capacity or lower data.max_length"
        yield _fault(loaded, "packing.capacity", found, f"at least {longest}", fix)


def minibatch_divides_the_batch(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """Mini-batches cut the step's prompts."""
    p = loaded.profile
    size, batch = p.algorithm.mini_batch_size, p.data.batch_size
    if size is not None and batch % size:
        yield _fault(loaded, "algorithm.mini_batch_size", f"{size}", f"a divisor of data.batch_size {batch}")


def adaptive_kl_is_in_the_reward(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """The controller moves the penalty in the reward."""
    kl = loaded.profile.algorithm.kl
    if kl.controller == "adaptive" and kl.where != "reward":
        found = f"adaptive with algorithm.kl.where={kl.where}"
        yield _fault(loaded, "algorithm.kl.controller", found, "fixed, or algorithm.kl.where=reward")


def compile_or_recompute(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """Compiled blocks with recomputed activations are not known to work."""
    if loaded.profile.model.compile and loaded.profile.model.activation_checkpointing:
        chosen = str(loaded.profile.model.activation_checkpointing).lower()
        found = f"true with model.activation_checkpointing={chosen}"
        yield _fault(loaded, "model.compile", found, "one of the two", "compiled blocks need less memory, too")


def prefixes_can_be_shared(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """Answers share a prompt in one packed row that no other rank holds a part of."""
    p, key = loaded.profile, "model.shared_prefixes"
    if not p.model.shared_prefixes:
        return
    if not p.model.use_remove_padding:
        found, fix = "true with padded rows", "set model.use_remove_padding=true, or leave it out"
        yield _fault(loaded, key, found, "packed rows", fix)
    if p.rollout.n < 2:
        found = f"true with rollout.n={p.rollout.n}: no two answers have one prompt"
        yield _fault(loaded, key, found, "rollout.n of at least 2", "leave it out")
    places = roles_in_use(p)
    degrees = ("sequence_parallel_size", "tensor_parallel_size")
    for role, degree in ((r, d) for r in ("actor", "critic", "reference") for d in degrees):
        size = getattr(places.get(role), degree, 1)
        if size > 1:
            found = f"true with devices.{role}.{degree}={size}, which this version cannot do yet"
            yield _fault(loaded, key, found, f"{degree} of 1", "leave it out, or lower the degree")


def stale_answers_are_corrected(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """Answers of older weights are weighted by what the present ones think of them."""
    r = loaded.profile.rollout
    if r.one_step_off and r.correction == "none":
        found = "true with rollout.correction=none"
        yield _fault(loaded, "rollout.one_step_off", found, "a correction", "set rollout.correction=token_tis")


def correction_band_is_a_band(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """The masks keep weights between two ends."""
    r = loaded.profile.rollout
    if r.correction.endswith("_mask") and r.correction_lower >= r.correction_threshold:
        found = f"{r.correction_lower}, not less than rollout.correction_threshold {r.correction_threshold}"
        yield _fault(loaded, "rollout.correction_lower", found, f"less than {r.correction_threshold}")


def overlong_buffer_fits_the_answer(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """The soft penalty begins inside the answer."""
    p = loaded.profile
    buffer, answer = p.algorithm.overlong_penalty.buffer, p.rollout.max_new_tokens
    if buffer > answer:
        found = f"{buffer}, more than rollout.max_new_tokens {answer}"
        yield _fault(loaded, "algorithm.overlong_penalty.buffer", found, f"at most {answer}")


def actor_learns_at_some_step(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """A warm-up of the critic ends before the run does."""
    p = loaded.profile
    steps, warmup = p.run.steps, p.algorithm.critic_warmup_steps
    if p.algorithm.kind == "ppo" and steps is not None and warmup >= steps:
        found = f"{warmup} of run.steps {steps}: the actor would never learn"
        yield _fault(loaded, "algorithm.critic_warmup_steps", found, f"at most {steps - 1}")


def training_samples(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """Greedy answers explore nothing, and those of one prompt are all the same."""
    if loaded.profile.rollout.temperature == 0.0:
        fix = "validation alone is greedy: run.validation_temperature"
        yield _fault(loaded, "rollout.temperature", "0 in training", "above 0", fix)


def resume_has_a_folder(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """A run that goes on needs the folder that it goes on in."""
    run = loaded.profile.run
    if run.resume and run.dir is None:
        yield _fault(loaded, "run.resume", "true without run.dir", fix="rlspeed train RUN_FOLDER --resume")


def loggers_are_installed(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """Found now, not after the models are loaded."""
    for name in dict.fromkeys(loaded.profile.run.loggers):
        if importlib.util.find_spec(name) is None:
            yield _fault(loaded, "run.loggers", f"{name} is not installed", fix=f"pip install 'rlspeed[{name}]'")


def optimizers_can_run(loaded: LoadedProfile, world_size: int) -> Iterator[Fault]:
    """The library of a kind is installed; kinds that keep no cut state run on one rank."""
    optim = loaded.profile.optim
    critic = {"critic": optim.critic} if loaded.profile.algorithm.kind == "ppo" else {}
    for role, chosen in {"actor": optim.actor, **critic}.items():
        key = f"optim.{role}.kind"
        if chosen.kind == "adamw8bit" and importlib.util.find_spec("torchao") is None:
            fix = f"pip install 'rlspeed[eightbit]', or {key}=adamw"
            yield _fault(loaded, key, "adamw8bit, and torchao is not installed", fix=fix)
        if chosen.kind != "adamw" and world_size > 1:
            found = f"{chosen.kind} on {world_size} ranks, which this version cannot do yet"
            yield _fault(loaded, key, found, "adamw, or one rank", f"set {key}=adamw: each rank keeps its share of it")


def every_key_has_an_effect(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """A key that the user set and that this run would not look at."""
    p = loaded.profile
    for applies, keys, need in (*_without_effect(p), *_of_rollout(p), *_for_another_generator(p)):
        for key in keys:
            if applies and _asked_for(loaded, key):
                yield _fault(loaded, key, "has no effect in this run", need, f"leave {key} out")


OF_CRITIC = (
    "model.critic",
    "optim.critic",
    "algorithm.value_clip",
    "algorithm.lam",
    "algorithm.critic_warmup_steps",
)
WITH_KL = ("model.reference", "algorithm.kl.coef", "algorithm.kl.estimator")
IN_VALIDATION = ("run.validate_every", "run.validation_temperature", "run.validation_n", "data.max_val_samples")


def _without_effect(p: Profile) -> list[tuple[bool, tuple[str, ...], str]]:
    """(condition of the run, keys that then change nothing, what they would need)."""
    kl, optim, critic = p.algorithm.kl, p.optim, p.algorithm.kind == "ppo"
    packed = p.model.use_remove_padding
    ratio = "min_lr_ratio"
    return [
        (not critic, OF_CRITIC, "algorithm.kind=ppo"),
        (p.algorithm.kind not in ("ppo", "reinforce_pp"), ("algorithm.gamma",), "algorithm.kind=ppo or reinforce_pp"),
        (packed, ("packing.micro_batch_size",), "model.use_remove_padding=false"),
        (not packed, ("packing.capacity", "model.attention"), "model.use_remove_padding=true"),
        (
            not p.model.actor.use_3d_hybrid_engine,
            ("model.actor.sync_bucket_mb", "model.actor.verify_sync"),
            "model.actor.use_3d_hybrid_engine=true",
        ),
        (kl.where == "none", WITH_KL, "algorithm.kl.where=reward or loss"),
        (
            kl.controller != "adaptive",
            ("algorithm.kl.target", "algorithm.kl.horizon"),
            "algorithm.kl.controller=adaptive",
        ),
        (p.algorithm.policy_loss != "clip", ("algorithm.dual_clip",), "algorithm.policy_loss=clip"),
        (p.algorithm.policy_loss == "gspo", ("algorithm.loss_agg",), "another policy_loss: gspo has its own average"),
        (
            p.algorithm.loss_agg != "seq-mean-token-sum-norm",
            ("algorithm.loss_norm_scale",),
            "algorithm.loss_agg=seq-mean-token-sum-norm",
        ),
        (
            p.algorithm.overlong_penalty.buffer == 0,
            ("algorithm.overlong_penalty.factor",),
            "algorithm.overlong_penalty.buffer above 0",
        ),
        (
            p.run.validation_temperature == 0.0 and p.data.val_files is not None,
            ("run.validation_n",),
            "run.validation_temperature above 0: greedy answers are all the same",
        ),
        (p.reward.model.path is None, ("reward.model.weight", "reward.model.use_chat_template"), "reward.model.path"),
        (p.reward.on_failure == "stop", ("reward.max_failed_share",), "reward.on_failure=mask"),
        (p.data.val_files is None, IN_VALIDATION, "data.val_files"),
        (optim.actor.schedule == "constant", (f"optim.actor.{ratio}",), "optim.actor.schedule=cosine or linear"),
        (
            critic and optim.critic.schedule == "constant",
            (f"optim.critic.{ratio}",),
            "optim.critic.schedule=cosine or linear",
        ),
        (p.run.steps is not None, ("run.epochs",), "run.steps=null: one of the two says how long the run is"),
    ]


def _of_rollout(p: Profile) -> list[tuple[bool, tuple[str, ...], str]]:
    """As `_without_effect`: keys of sampling."""
    mask = p.rollout.correction.endswith("_mask")
    return [
        (
            p.rollout.temperature == 0.0,
            ("rollout.top_k", "rollout.top_p", "rollout.min_p"),
            "rollout.temperature above 0",
        ),
        (
            p.rollout.fix_lengths != "none" and p.data.val_files is None,
            ("rollout.stop", "rollout.stop_token_ids"),
            "rollout.fix_lengths=none: with it no token ends an answer",
        ),
        (p.rollout.correction == "none", ("rollout.correction_threshold",), "rollout.correction"),
        (not mask, ("rollout.correction_lower",), "rollout.correction=token_mask or sequence_mask"),
    ]


def _for_another_generator(p: Profile) -> list[tuple[bool, tuple[str, ...], str]]:
    """As `_without_effect`: keys of the built-in generator in a run with vLLM."""
    keys = ("rollout.kv_cache_gib", "rollout.longest_first", "rollout.overprovision")
    return [(vllm_generates(p), keys, "the built-in generator: model.actor.use_vllm_for_generation=false")]


def _asked_for(loaded: LoadedProfile, key: str) -> bool:
    """True when the user asks for `key`: by a word, or by a value in a file that is not the default.

    A default written down in a file asks for nothing; each resolved.yaml holds them all. Packaged profiles do not ask.
    """
    origins = [o for k, o in loaded.origins.items() if k == key or k.startswith(f"{key}.")]
    if OVERRIDE in origins:
        return True
    return any(not o.startswith("profile ") for o in origins) and _at(loaded.profile, key) != _at(_defaults(), key)


@cache
def _defaults() -> Profile:
    return Profile(model=Model(path="-"), data=Data(train_files="-"))


def _at(profile: Profile, key: str) -> object:
    value: object = profile
    for part in key.split("."):
        value = getattr(value, part)
    return value


RULES = (
    groups_need_two_answers,
    lengths_fit,
    longest_sequence_fits_a_bin,
    minibatch_divides_the_batch,
    adaptive_kl_is_in_the_reward,
    compile_or_recompute,
    prefixes_can_be_shared,
    stale_answers_are_corrected,
    correction_band_is_a_band,
    overlong_buffer_fits_the_answer,
    actor_learns_at_some_step,
    training_samples,
    resume_has_a_folder,
    loggers_are_installed,
    optimizers_can_run,
    every_key_has_an_effect,
    cannot_be_done_yet,
)
