"""Rules that touch more than one key, one function each, named after the rule; `check` runs them all."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from rlspeed.config.load import LoadedProfile
from rlspeed.errors import Fault

GROUP_KINDS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")


def check(loaded: LoadedProfile, world_size: int = 1) -> list[Fault]:
    """Every violation of every rule."""
    return [fault for rule in RULES for fault in rule(loaded, world_size)]


def _fault(loaded: LoadedProfile, key: str, found: str, allowed: str = "", fix: str = "") -> Fault:
    return Fault(where=loaded.origin(key), found=f"{key}: {found}", allowed=allowed, fix=fix)


def _set(loaded: LoadedProfile, key: str) -> bool:
    """True when the user, not a default or a packaged profile, set `key` or something below it."""
    return any(
        (k == key or k.startswith(f"{key}.")) and not o.startswith("profile ") for k, o in loaded.origins.items()
    )


def groups_need_two_answers(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """A group of one has nothing to be compared with (num-11)."""
    p = loaded.profile
    if p.algorithm.kind in GROUP_KINDS and p.rollout.n < 2:
        yield _fault(
            loaded,
            "rollout.n",
            f"{p.rollout.n} with algorithm.kind={p.algorithm.kind}",
            "at least 2",
            "set rollout.n=8",
        )


def lengths_fit(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """Prompt and answer fit max_length."""
    p = loaded.profile
    longest, answer = p.data.max_length, p.rollout.max_new_tokens
    if answer >= longest:
        yield _fault(
            loaded,
            "rollout.max_new_tokens",
            f"{answer}, not less than data.max_length {longest}",
            f"at most {longest - 1}",
            "raise data.max_length or lower rollout.max_new_tokens",
        )
    elif p.data.max_prompt_length is not None and p.data.max_prompt_length + answer > longest:
        yield _fault(
            loaded,
            "data.max_prompt_length",
            f"{p.data.max_prompt_length} + rollout.max_new_tokens {answer} is more than data.max_length {longest}",
            f"at most {longest - answer}",
        )


def longest_sequence_fits_a_bin(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """Checked before the first step, not when the first long sequence turns up (pack-24)."""
    p = loaded.profile
    if p.model.use_remove_padding and p.packing.capacity is not None and p.packing.capacity < p.data.max_length:
        yield _fault(
            loaded,
            "packing.capacity",
            f"{p.packing.capacity} tokens, but a sequence may have data.max_length {p.data.max_length} "
            f"(answer up to {p.rollout.max_new_tokens})",
            f"at least {p.data.max_length}",
            "raise packing.capacity or lower data.max_length",
        )


def minibatch_fits_the_batch(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """Mini-batches cut the step's prompts."""
    p = loaded.profile
    size = p.algorithm.mini_batch_size
    if size is not None and (size > p.data.batch_size or p.data.batch_size % size):
        yield _fault(
            loaded, "algorithm.mini_batch_size", f"{size}", f"a divisor of data.batch_size {p.data.batch_size}"
        )


def adaptive_kl_is_in_the_reward(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """The controller moves the penalty in the reward."""
    kl = loaded.profile.algorithm.kl
    if kl.controller == "adaptive" and kl.where != "reward":
        yield _fault(
            loaded,
            "algorithm.kl.controller",
            f"adaptive with algorithm.kl.where={kl.where}",
            "fixed, or algorithm.kl.where=reward",
        )


def keys_without_effect_are_refused(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """A key that the user set and that this run would not look at."""
    p = loaded.profile
    critic = "needs algorithm.kind=ppo"
    reasons: list[tuple[bool, tuple[str, ...], str]] = [
        (
            p.algorithm.kind != "ppo",
            ("model.critic", "optim.critic", "algorithm.value_clip", "algorithm.lam", "algorithm.critic_warmup_steps"),
            critic,
        ),
        (
            p.algorithm.kind not in ("ppo", "reinforce_pp"),
            ("algorithm.gamma",),
            "needs algorithm.kind=ppo or reinforce_pp",
        ),
        (p.model.use_remove_padding, ("packing.micro_batch_size",), "needs model.use_remove_padding=false"),
        (not p.model.use_remove_padding, ("packing.capacity",), "needs model.use_remove_padding=true"),
        (p.algorithm.kl.where == "none", ("model.reference",), "needs algorithm.kl.where=reward or loss"),
        (
            p.algorithm.kl.where == "none",
            ("algorithm.kl.coef", "algorithm.kl.estimator"),
            "needs algorithm.kl.where=reward or loss",
        ),
        (
            p.algorithm.kl.controller != "adaptive",
            ("algorithm.kl.target", "algorithm.kl.horizon"),
            "needs algorithm.kl.controller=adaptive",
        ),
        (p.algorithm.policy_loss != "clip", ("algorithm.dual_clip",), "needs algorithm.policy_loss=clip"),
        (
            p.algorithm.policy_loss == "gspo",
            ("algorithm.loss_agg",),
            "gspo is defined with seq-mean-token-mean; leave it out",
        ),
        (
            p.algorithm.loss_agg != "seq-mean-token-sum-norm",
            ("algorithm.loss_norm_scale",),
            "needs algorithm.loss_agg=seq-mean-token-sum-norm",
        ),
        (
            p.rollout.temperature == 0.0,
            ("rollout.top_k", "rollout.top_p", "rollout.min_p"),
            "needs rollout.temperature above 0",
        ),
        (
            p.rollout.correction == "none",
            ("rollout.correction_threshold", "rollout.correction_lower"),
            "needs rollout.correction",
        ),
        (
            p.reward.model.path is None,
            ("reward.model.weight", "reward.model.use_chat_template"),
            "needs reward.model.path",
        ),
        (p.reward.on_failure == "stop", ("reward.max_failed_share",), "needs reward.on_failure=mask"),
        (
            p.data.val_files is None,
            ("run.validate_every", "run.validation_temperature", "run.validation_n", "data.max_val_samples"),
            "needs data.val_files",
        ),
        (p.run.steps is not None, ("run.epochs",), "run.steps says how long the run is; leave one of the two out"),
    ]
    for applies, keys, need in reasons:
        for key in keys:
            if applies and _set(loaded, key) and _chosen(loaded, key):
                yield _fault(loaded, key, "has no effect in this run", need)


def _chosen(loaded: LoadedProfile, key: str) -> bool:
    """False when the user wrote the default value down (a resolved.yaml does), which asks for nothing."""
    from rlspeed.config.schema import Data, Model, Profile

    default = Profile(model=Model(path="x"), data=Data(train_files="x"))
    ours: object = loaded.profile
    theirs: object = default
    for part in key.split("."):
        ours, theirs = getattr(ours, part), getattr(theirs, part)
    return ours != theirs


def greedy_groups_are_equal(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """Greedy answers of one prompt are all the same, so nothing can be compared."""
    p = loaded.profile
    if p.rollout.temperature == 0.0:
        yield _fault(loaded, "rollout.temperature", "0 in training", "above 0", "greedy answers explore nothing")


def loggers_are_installed(loaded: LoadedProfile, _: int) -> Iterator[Fault]:
    """Found now, not after the models are loaded."""
    for name in loaded.profile.run.loggers:
        if importlib.util.find_spec(name) is None:
            yield _fault(loaded, "run.loggers", f"{name} is not installed", fix=f"pip install 'rlspeed[{name}]'")


def not_yet(loaded: LoadedProfile, world_size: int) -> Iterator[Fault]:
    """Settings that this version understands and cannot do."""
    p = loaded.profile
    actor = p.model.actor
    if actor.use_vllm_for_generation or (p.devices.actor is not None and p.devices.actor.use_vllm):
        key = "devices.actor.use_vllm" if not actor.use_vllm_for_generation else "model.actor.use_vllm_for_generation"
        yield _fault(
            loaded, key, "true", "false", "generation with vLLM cannot be done yet; use the built-in generator"
        )
    for key, value in (
        ("model.actor.use_3d_hybrid_engine", actor.use_3d_hybrid_engine),
        ("model.actor.enable_auto_repartition_for_training", actor.enable_auto_repartition_for_training),
        ("model.actor.use_lightweight_sharding_for_generation", actor.use_lightweight_sharding_for_generation),
    ):
        if not value:
            yield _fault(loaded, key, "false", "true", "switching it off cannot be done yet")
    meshes = {}
    for role in ("actor", "critic", "reference", "reward_model"):
        placement = getattr(p.devices, role)
        if placement is None:
            continue
        where = f"devices.{role}"
        if placement.device_mesh is not None:
            meshes[role] = tuple(placement.device_mesh)
        if placement.tensor_parallel_size > 1 or placement.sequence_parallel_size > 1:
            yield _fault(loaded, where, "tensor or sequence parallel training", "degree 1", "cannot be done yet")
        if placement.fsdp_config.sharding_strategy != "FULL_SHARD":
            found = placement.fsdp_config.sharding_strategy
            yield _fault(loaded, f"{where}.fsdp_config.sharding_strategy", found, "FULL_SHARD", "cannot be done yet")
        if placement.fsdp_config.cpu_offload:
            yield _fault(loaded, f"{where}.fsdp_config.cpu_offload", "true", "false", "cannot be done yet")
        if placement.strategy == "none" and world_size > 1:
            yield _fault(loaded, f"{where}.strategy", "none on several ranks", "fsdp2", "cannot be done yet")
        if placement.use_cpu_offload and placement.device_mesh != ["cpu"]:
            yield _fault(
                loaded, f"{where}.use_cpu_offload", "true", "false, or device_mesh: [cpu]", "cannot be done yet"
            )
    apart = {m for r, m in meshes.items() if not (r == "reward_model" and m == ("cpu",))}
    whole = tuple(range(world_size))
    if any(m not in (whole, ("cpu",)) for m in apart) or len(apart) > 1:
        text = "; ".join(f"{r} on {list(m)}" for r, m in meshes.items())
        yield _fault(
            loaded, "devices", text, "all models on all ranks", "roles on devices of their own cannot be done yet"
        )


RULES = (
    groups_need_two_answers,
    lengths_fit,
    longest_sequence_fits_a_bin,
    minibatch_fits_the_batch,
    adaptive_kl_is_in_the_reward,
    keys_without_effect_are_refused,
    greedy_groups_are_equal,
    loggers_are_installed,
    not_yet,
)
