"""Each rule: the configuration that breaks it, the numbers that it names, and the one beside it that passes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from rlspeed.config.load import load_profile
from rlspeed.config.rules import RULES, check
from rlspeed.errors import Fault

Write = Callable[..., str]
NEEDED = ("model.path=DIR", "data.train_files=FILE")


def found(*words: str, world_size: int = 1, base: str = "packed") -> list[Fault]:
    return check(load_profile(base, [*NEEDED, *words]), world_size)


def keys(*words: str, **options: int) -> list[str]:
    """What the faults speak of."""
    return [f.found.split(":")[0].split(" is ")[0] for f in found(*words, **options)]


@pytest.mark.parametrize("name", ["baseline", "hybrid", "packed", "full"])
def test_the_packaged_profiles_break_no_rule(name: str) -> None:
    assert check(load_profile(name, NEEDED)) == []
    assert check(load_profile("quickstart")) == []


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_num_11_groups_need_two_answers(kind: str) -> None:
    """num-11: each kind that compares answers of a group."""
    (fault,) = found(f"algorithm.kind={kind}", "rollout.n=1")
    assert fault.allowed == "at least 2"
    assert f"algorithm.kind={kind}" in fault.found
    assert found(f"algorithm.kind={kind}", "rollout.n=2") == []
    assert found("algorithm.kind=reinforce_pp", "rollout.n=1") == []


def test_a_group_filter_needs_two_answers() -> None:
    assert keys("algorithm.filter_groups=true") == ["rollout.n"]


def test_pack_24_the_longest_sequence_fits_a_bin() -> None:
    """pack-24: refused at the start with all three numbers; with budget 16 a sequence of 16 fits."""
    lengths = ("data.max_prompt_length=8", "rollout.max_new_tokens=8", "data.max_length=16")
    (fault,) = found(*lengths, "packing.capacity=12")
    assert fault.where == "override"
    for words in ("12 tokens", "data.max_length 16", "prompt up to 8, answer up to 8"):
        assert words in fault.found
    assert fault.allowed == "at least 16"
    assert found(*lengths, "packing.capacity=16") == []


def test_lengths_fit() -> None:
    assert keys("data.max_length=512", "rollout.max_new_tokens=512") == ["rollout.max_new_tokens"]
    assert keys("data.max_length=513", "rollout.max_new_tokens=512") == []
    words = ("data.max_length=100", "rollout.max_new_tokens=60")
    (fault,) = found(*words, "data.max_prompt_length=41")
    assert fault.allowed == "at most 40"
    assert found(*words, "data.max_prompt_length=40") == []


@pytest.mark.parametrize(("size", "fits"), [(32, True), (16, True), (64, False), (12, False)])
def test_minibatch_divides_the_batch(size: int, fits: bool) -> None:
    assert keys("data.batch_size=32", f"algorithm.mini_batch_size={size}") == (
        [] if fits else ["algorithm.mini_batch_size"]
    )


def test_adaptive_kl_is_in_the_reward() -> None:
    adaptive = "algorithm.kl.controller=adaptive"
    assert keys(adaptive, "algorithm.kl.where=loss") == ["algorithm.kl.controller"]
    assert keys(adaptive, "algorithm.kl.where=reward") == []


def test_bands_and_buffers() -> None:
    mask = "rollout.correction=token_mask"
    assert keys(mask, "rollout.correction_lower=2.0") == ["rollout.correction_lower"]
    assert keys(mask, "rollout.correction_lower=1.9") == []
    buffer = "algorithm.overlong_penalty.buffer"
    assert keys("rollout.max_new_tokens=64", f"{buffer}=65") == [buffer]
    assert keys("rollout.max_new_tokens=64", f"{buffer}=64") == []


def test_the_actor_learns_at_some_step() -> None:
    warmup = "algorithm.critic_warmup_steps"
    assert keys("run.steps=5", f"{warmup}=5") == [warmup]
    assert keys("run.steps=5", f"{warmup}=4") == []


def test_training_samples() -> None:
    assert keys("rollout.temperature=0") == ["rollout.temperature"]


def test_resume_has_a_folder() -> None:
    assert keys("run.resume=true") == ["run.resume"]
    assert keys("run.resume=true", "run.dir=x") == []


def test_loggers_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else object())
    (fault,) = found("run.loggers=[tensorboard, wandb]")
    assert fault.fix == "pip install 'rlspeed[wandb]'"


def test_optimizers_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing library and kinds for one rank; the critic's only where there is one."""
    words = ("optim.actor.kind=adamw8bit", "optim.critic.kind=adamw8bit")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    faults = found(*words)
    assert [f.fix for f in faults] == [
        f"pip install 'rlspeed[eightbit]', or optim.{role}.kind=adamw" for role in ("actor", "critic")
    ]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert found(*words) == []
    loaded = load_profile("quickstart", ["optim.actor.kind=adamw_offload"])
    (fault,) = [f for f in check(loaded, 2) if "kind" in f.found]
    assert "optim.actor.kind: adamw_offload on 2 ranks" in fault.found


@pytest.mark.parametrize(
    ("words", "without_effect"),
    [
        (["algorithm.kind=grpo", "rollout.n=2", "algorithm.gamma=0.9"], "algorithm.gamma"),
        (["algorithm.kind=grpo", "rollout.n=2", "algorithm.lam=0.9"], "algorithm.lam"),
        (["algorithm.kind=grpo", "rollout.n=2", "algorithm.value_clip=null"], "algorithm.value_clip"),
        (["algorithm.kind=grpo", "rollout.n=2", "optim.critic.lr=1"], "optim.critic"),
        (["algorithm.kind=grpo", "rollout.n=2", "model.critic.path=x"], "model.critic"),
        (["algorithm.kind=reinforce_pp", "algorithm.critic_warmup_steps=1"], "algorithm.critic_warmup_steps"),
        (["packing.micro_batch_size=4"], "packing.micro_batch_size"),
        (["model.use_remove_padding=false", "packing.capacity=4096"], "packing.capacity"),
        (["model.use_remove_padding=false", "model.attention=sdpa"], "model.attention"),
        (["model.reference.path=x"], "model.reference"),
        (["algorithm.kl.coef=0.1"], "algorithm.kl.coef"),
        (["algorithm.kl.estimator=k1"], "algorithm.kl.estimator"),
        (["algorithm.kl.where=reward", "algorithm.kl.target=0.2"], "algorithm.kl.target"),
        (["algorithm.kl.where=reward", "algorithm.kl.horizon=5"], "algorithm.kl.horizon"),
        (["algorithm.policy_loss=cispo", "algorithm.dual_clip=3.0"], "algorithm.dual_clip"),
        (["algorithm.policy_loss=gspo", "algorithm.loss_agg=token-sum"], "algorithm.loss_agg"),
        (["algorithm.loss_norm_scale=5"], "algorithm.loss_norm_scale"),
        (["algorithm.overlong_penalty.factor=2"], "algorithm.overlong_penalty.factor"),
        (["rollout.correction_threshold=3"], "rollout.correction_threshold"),
        (["rollout.correction=token_tis", "rollout.correction_lower=0.1"], "rollout.correction_lower"),
        (["reward.model.weight=2"], "reward.model.weight"),
        (["reward.model.use_chat_template=false"], "reward.model.use_chat_template"),
        (["reward.max_failed_share=0.5"], "reward.max_failed_share"),
        (["run.validate_every=5"], "run.validate_every"),
        (["run.validation_temperature=1"], "run.validation_temperature"),
        (["data.max_val_samples=5"], "data.max_val_samples"),
        (["data.val_files=f", "run.validation_n=4"], "run.validation_n"),
        (["optim.actor.min_lr_ratio=0.1"], "optim.actor.min_lr_ratio"),
        (["optim.critic.min_lr_ratio=0.1"], "optim.critic.min_lr_ratio"),
        (["run.steps=5", "run.epochs=2"], "run.epochs"),
    ],
)
def test_a_key_without_effect_is_refused(words: list[str], without_effect: str) -> None:
    (fault,) = found(*words)
    assert fault.found == f"{without_effect}: has no effect in this run"
    assert fault.allowed
    assert fault.where == "override"


def test_greedy_training_leaves_no_use_for_filters() -> None:
    assert keys("rollout.temperature=0", "rollout.top_p=0.9", "rollout.min_p=0.1") == [
        "rollout.temperature",
        "rollout.top_p",
        "rollout.min_p",
    ]


def test_a_default_in_a_file_asks_for_nothing_and_a_word_does(write: Write) -> None:
    """resolved.yaml holds every key, so it must load again whatever the algorithm is."""
    loaded = load_profile("packed", [*NEEDED, "algorithm.kind=grpo", "rollout.n=2"])
    write(loaded.dump())
    assert check(load_profile("run.yaml")) == []
    assert len(check(load_profile("run.yaml", ["algorithm.lam=1.0"]))) == 1
    write(loaded.dump().replace("lam: 1.0", "lam: 0.9"))
    (fault,) = check(load_profile("run.yaml"))
    assert fault.where.startswith("run.yaml:")


def test_what_a_profile_sets_may_lose_its_effect() -> None:
    """The user cannot take it out of the package."""
    words = ["algorithm.kind=grpo", "algorithm.kl.where=none", "model.use_remove_padding=false"]
    assert check(load_profile("quickstart", words)) == []


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("devices.critic.fsdp_config.cpu_offload=true", "devices.critic.fsdp_config.cpu_offload"),
        ("devices.actor.use_cpu_offload=true", "devices.actor.use_cpu_offload"),
        ("devices.critic.device_mesh=[cpu]", "devices.critic.device_mesh"),
    ],
)
def test_what_cannot_be_done_yet_is_refused_and_never_ignored(word: str, key: str) -> None:
    (fault,) = found(word, world_size=2)
    assert fault.found.startswith(f"{key} is ")
    assert "cannot do yet" in fault.found
    assert fault.allowed
    assert fault.fix


def test_degrees_that_do_not_go_together_are_refused() -> None:
    """A reward model is whole on every rank; critic and reference are cut as they like."""
    tp, sp = "devices.actor.tensor_parallel_size=2", "devices.actor.sequence_parallel_size=2"
    assert found(tp, "devices.critic.strategy=fsdp2", world_size=2) == []
    assert found(tp, "devices.critic.tensor_parallel_size=2", world_size=2) == []
    (fault,) = found("reward.model.path=x", "devices.reward_model.tensor_parallel_size=2", world_size=2)
    assert fault.allowed == "1"
    (fault,) = found(tp, "model.compile=true", world_size=2)
    assert fault.found.startswith("model.compile is true with tensor parallel 2")
    (fault,) = found(sp, "model.use_remove_padding=false", world_size=2)
    assert fault.found.startswith("devices.actor.sequence_parallel_size is 2 with padded rows")
    assert found(tp, "model.use_remove_padding=false", world_size=2) == []


def test_roles_on_devices_of_their_own() -> None:
    """Models that train may be apart; answers are scored where they are, or on the host; one kind of device for all."""
    apart = ("devices.actor.device_mesh=[0]", "devices.critic.device_mesh=[1]")
    assert found(*apart, "devices.reference.shares_with=critic", world_size=2) == []
    reward = "reward.model.path=x"
    assert found(*apart, reward, "devices.reward_model.device_mesh=[cpu]", world_size=2) == []
    assert found(*apart, reward, "devices.reward_model.shares_with=actor", world_size=2) == []
    (fault,) = found(*apart, reward, "devices.reward_model.shares_with=critic", world_size=2)
    assert fault.found.startswith("devices.reward_model.device_mesh is [1] and the actor is on [0]")
    for words in ((apart[0], "devices.critic.device_mesh=[cpu]"), ("devices.actor.device_mesh=[cpu]", apart[1])):
        (fault,) = found(*words, world_size=2)
        assert fault.allowed == "models on one kind of device"
        assert found(*words, "run.device=cpu", world_size=2) == []
    (fault,) = found(*apart, "devices.actor.use_vllm=true", world_size=2)
    assert fault.found.startswith("devices.actor.device_mesh is [0] of 2 ranks while vLLM generates")


def test_the_classic_way_has_no_buckets() -> None:
    words = ("model.actor.use_3d_hybrid_engine=false", "model.actor.verify_sync=checksum")
    (fault,) = found(*words)
    assert fault.found.startswith("model.actor.verify_sync: has no effect")
    assert found(words[1]) == []


def test_what_can_be_done_is_not_refused() -> None:
    switches = ("use_3d_hybrid_engine", "use_lightweight_sharding_for_generation")
    assert found(*(f"model.actor.{s}=false" for s in (*switches, "enable_auto_repartition_for_training"))) == []
    strategy = "devices.actor.fsdp_config.sharding_strategy"
    for value in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"):
        assert found(f"{strategy}={value}", world_size=2) == []
    degrees = ("devices.actor.tensor_parallel_size=2", "devices.actor.sequence_parallel_size=2")
    assert found("devices.actor.strategy=none", *degrees, world_size=8) == []
    both = ("devices.actor.device_mesh=[0, 1]", "devices.critic.device_mesh=[1, 0]")
    assert found(*both, world_size=2) == []
    model = "reward.model.path=x"
    assert found(model, "devices.reward_model={device_mesh: [cpu], use_cpu_offload: true}") == []
    # a mapping may name roles that this run does not have
    assert found("devices.reference.device_mesh=[3]", "devices.reward_model.tensor_parallel_size=8") == []
    assert found("model.actor.use_vllm_for_generation=true") == []
    assert found("devices.actor.use_vllm=true") == []
    # the mapping's word on vLLM holds over the model's
    assert found("model.actor.use_vllm_for_generation=true", "devices.actor.use_vllm=false") == []


def test_the_users_mapping_is_refused_with_every_reason(seeds: Path) -> None:
    loaded = load_profile("ppo_trainer.yaml", ["device_mapping_file=device_mapping.yaml"])
    found = {f.where: f.found for f in check(loaded, 4)}
    assert set(found) == {"device_mapping.yaml:3"}
    assert found["device_mapping.yaml:3"].startswith("devices.actor.device_mesh is [0, 1] of 4 ranks while vLLM")
    assert check(load_profile("ppo_trainer.yaml"), 4) == []
    on_host = ["device_mapping_file=device_mapping.yaml", "run.device=cpu"]
    assert check(load_profile("ppo_trainer.yaml", on_host), 4) == []
    assert check(load_profile("ppo_trainer.yaml", [*on_host, "rollout.kv_cache_gib=1"]), 4) == []


def test_every_rule_has_a_docstring_and_its_own_name() -> None:
    assert all(rule.__doc__ for rule in RULES)
    assert len({rule.__name__ for rule in RULES}) == len(RULES)


def test_compiled_blocks_and_recomputation_exclude_each_other() -> None:
    assert keys("model.compile=true", "model.activation_checkpointing=true") == ["model.compile"]
    assert keys("model.compile=true") == []


def test_prompts_are_shared_in_packed_rows_of_one_rank() -> None:
    shared = ("model.shared_prefixes=true", "rollout.n=4")
    assert found(*shared) == []
    assert found(*shared, "model.activation_checkpointing=true") == []
    (fault,) = found(*shared, "model.use_remove_padding=false")
    assert fault.found == "model.shared_prefixes: true with padded rows"
    (fault,) = found(shared[0], "rollout.n=1")
    assert "no two answers have one prompt" in fault.found
    for degree in ("tensor_parallel_size", "sequence_parallel_size"):
        (fault,) = found(*shared, f"devices.actor.{degree}=2", world_size=2)
        assert f"devices.actor.{degree}=2, which this version cannot do yet" in fault.found
