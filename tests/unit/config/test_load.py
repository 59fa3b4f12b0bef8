"""Layers, origins and overrides: what a configuration becomes when nothing is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rlspeed.config.load import LoadedProfile, load_device_mapping, load_profile, packaged_profiles, run_folder
from rlspeed.config.schema import Profile

Write = Callable[..., str]
NEEDED = ("model.path=DIR", "data.train_files=FILE")
MINIMAL = "model: {path: m}\ndata: {train_files: f}\n"


def test_the_users_two_files_load_unmodified(seeds: Path) -> None:
    words = ["device_mapping_file=device_mapping.yaml", *NEEDED]
    loaded = load_profile("ppo_trainer.yaml", words)
    p = loaded.profile
    assert (p.model.path, p.model.model_dtype, p.model.use_remove_padding) == ("DIR", "bf16", True)
    assert (p.data.train_files, p.data.max_length, p.data.balance_dp_token) == ("FILE", 1536, True)
    assert p.model.actor.use_3d_hybrid_engine
    assert not p.model.actor.use_vllm_for_generation
    assert p.devices.actor is not None
    assert p.devices.critic is not None
    assert p.devices.reward_model is not None
    assert p.devices.actor.device_mesh == [0, 1]
    assert p.devices.actor.vllm_config.tensor_parallel_size == 2
    assert p.devices.critic.fsdp_config.sharding_strategy == "FULL_SHARD"
    assert p.devices.reward_model.device_mesh == ["cpu"]
    assert p.name == "ppo_trainer"
    assert load_device_mapping("device_mapping.yaml") == p.devices


def test_the_users_file_needs_no_override_and_no_mapping(seeds: Path) -> None:
    p = load_profile("ppo_trainer.yaml").profile
    assert p.model.path == "Qwen/Qwen2.5-7B-Instruct"
    assert p.devices.actor is None


def test_each_value_says_where_it_comes_from(seeds: Path) -> None:
    words = ["device_mapping_file=device_mapping.yaml", *NEEDED, "optim.actor.lr=1e-6"]
    origin = load_profile("ppo_trainer.yaml", words).origin
    assert origin("model.path") == "override"
    assert origin("optim.actor.lr") == "override"
    assert origin("model.model_dtype") == "ppo_trainer.yaml:5"
    assert origin("data.max_length") == "ppo_trainer.yaml:15"
    assert origin("devices.critic.fsdp_config.cpu_offload") == "device_mapping.yaml:13"
    assert origin("devices.critic.shares_with") == "default"
    assert origin("rollout.temperature") == "default"


def test_later_layers_win(write: Write) -> None:
    """defaults < profile < file < overrides, each seen where the next one says nothing."""
    write("profile: baseline\n" + MINIMAL + "rollout: {n: 4, top_k: 5}\n")
    loaded = load_profile("run.yaml", ["rollout.top_k=7"])
    p = loaded.profile
    assert (p.rollout.top_p, loaded.origin("rollout.top_p")) == (1.0, "default")
    assert (p.model.use_remove_padding, loaded.origin("model.use_remove_padding")) == (False, "profile baseline")
    assert (p.rollout.n, loaded.origin("rollout.n")) == (4, "run.yaml:4")
    assert (p.rollout.top_k, loaded.origin("rollout.top_k")) == (7, "override")


def test_a_file_wins_over_the_profile_below_it(write: Write) -> None:
    write("profile: baseline\nmodel: {path: m, use_remove_padding: true}\ndata: {train_files: f}\n")
    loaded = load_profile("run.yaml")
    assert loaded.profile.model.use_remove_padding
    assert loaded.profile.model.model_dtype == "fp32"
    assert loaded.origin("model.use_remove_padding") == "run.yaml:2"


def test_the_word_profile_chooses_what_lies_below(write: Write) -> None:
    write("profile: packed\n" + MINIMAL)
    assert load_profile("run.yaml").profile.model.use_remove_padding
    assert not load_profile("run.yaml", ["profile=baseline"]).profile.model.use_remove_padding
    below = load_profile("quickstart", ["profile=baseline"])
    assert not below.profile.model.use_remove_padding
    assert below.profile.model.path == "quickstart"
    assert below.origin("model.use_remove_padding") == "profile baseline"


def test_a_profile_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_profile("packed", NEEDED)
    assert loaded.profile.name == "packed"
    assert loaded.origin("model.use_remove_padding") == "profile packed"


@pytest.mark.parametrize("name", packaged_profiles())
def test_every_profile_loads_and_round_trips(name: str, tmp_path: Path) -> None:
    loaded = load_profile(name, NEEDED if name != "quickstart" else ())
    (tmp_path / "resolved.yaml").write_text(loaded.dump())
    assert load_profile(str(tmp_path)).profile == loaded.profile


def test_a_run_folder_stands_alone(seeds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device mapping is inside resolved.yaml, so that a resume needs no second file and sees no change of it."""
    words = ["device_mapping_file=device_mapping.yaml", *NEEDED, "reward.functions=[{path: 'a:b', kwargs: {x: [1]}}]"]
    loaded = load_profile("ppo_trainer.yaml", words)
    folder = tmp_path / "elsewhere" / "run"
    folder.mkdir(parents=True)
    (folder / "resolved.yaml").write_text(loaded.dump())
    (seeds / "device_mapping.yaml").unlink()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run_folder("run") == Path("run")
    again = load_profile("run")
    assert again.profile == loaded.profile
    assert again.profile.name == "ppo_trainer"


def test_a_profiles_name_is_not_taken_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run.dir=quickstart` once must not change what `rlspeed train quickstart` means."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "resolved.yaml").write_text(MINIMAL)
    assert load_profile("quickstart").profile.model.path == "quickstart"
    assert load_profile("./quickstart").profile.model.path == "m"


def test_the_mapping_is_found_beside_the_file_too(write: Write, tmp_path: Path) -> None:
    write("device_mapping_file: map.yaml\n" + MINIMAL, "conf/run.yaml")
    write("actor: {device_mesh: [1]}\n", "conf/map.yaml")
    assert load_profile("conf/run.yaml").profile.devices.actor.device_mesh == [1]
    write("actor: {device_mesh: [2]}\n", "map.yaml")
    assert load_profile("conf/run.yaml").profile.devices.actor.device_mesh == [2]


def test_inline_devices_lie_above_the_mapping(write: Write) -> None:
    write("actor: {device_mesh: [0, 1], use_vllm: true}\n", "map.yaml")
    write(MINIMAL + "device_mapping_file: map.yaml\ndevices:\n  actor:\n    device_mesh: [0]\n")
    loaded = load_profile("run.yaml", ["devices.actor.use_vllm=false"])
    actor = loaded.profile.devices.actor
    assert (actor.device_mesh, actor.use_vllm) == ([0], False)
    assert loaded.origin("devices.actor.device_mesh") == "run.yaml:6"
    assert loaded.origin("devices.actor.use_vllm") == "override"


def test_a_role_can_be_taken_out_of_the_mapping(write: Write) -> None:
    write("actor: {device_mesh: [0]}\ncritic: {device_mesh: [1]}\n", "map.yaml")
    write(MINIMAL)
    loaded = load_profile("run.yaml", ["device_mapping_file=map.yaml", "devices.critic=null"])
    assert loaded.profile.devices.critic is None


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("optim.actor.lr=1e-6", "optim.actor.lr", 1e-6),
        ("optim.actor.lr=1E-06", "optim.actor.lr", 1e-6),
        ("optim.actor.lr=2", "optim.actor.lr", 2.0),
        ("optim.actor.betas=[0.9, 0.95]", "optim.actor.betas", (0.9, 0.95)),
        ("optim.actor.max_grad_norm=null", "optim.actor.max_grad_norm", None),
        ("optim.actor.max_grad_norm=", "optim.actor.max_grad_norm", None),
        ("algorithm.kl.horizon=1e4", "algorithm.kl.horizon", 10000),
        ("run.steps=1_000", "run.steps", 1000),
        ("run.loggers=[tensorboard]", "run.loggers", ["tensorboard"]),
        ("run.plots=false", "run.plots", False),
        ("run.name=2026-12-01", "run.name", "2026-12-01"),
        ("run.name=010", "run.name", "010"),
        ("run.name=1:30", "run.name", "1:30"),
        ("run.name='7'", "run.name", "7"),
        ("run.name=a=b", "run.name", "a=b"),
        ('data.system_prompt="yes: no"', "data.system_prompt", "yes: no"),
        ("data.train_files=[a.parquet, b.parquet]", "data.train_files", ["a.parquet", "b.parquet"]),
        ("data.chat_template_kwargs.enable_thinking=false", "data.chat_template_kwargs", {"enable_thinking": False}),
        ("algorithm.kl={where: loss, coef: 0.5}", "algorithm.kl.coef", 0.5),
    ],
)
def test_a_word_has_the_value_that_yaml_gives_it(word: str, key: str, value: object) -> None:
    """YAML 1.1, which PyYAML reads, makes 1e-6 a string, 010 eight, 1:30 ninety and 2026-12-01 a date."""
    found: object = load_profile("packed", [*NEEDED, word]).profile
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_numbers_of_a_file_too(write: Write) -> None:
    write(MINIMAL + "optim: {actor: {lr: 1e-6}, critic: {lr: 5.e-6}}\n")
    optim = load_profile("run.yaml").profile.optim
    assert (optim.actor.lr, optim.critic.lr) == (1e-6, 5e-6)


def test_words_reach_into_lists(write: Write) -> None:
    write(MINIMAL + "reward:\n  functions:\n    - path: a:b\n    - {path: c:d, weight: 0.5}\n")
    words = ["reward.functions.0.weight=2", "reward.functions.2={path: 'e:f'}", "reward.functions.2.name=third"]
    loaded = load_profile("run.yaml", words)
    functions = loaded.profile.reward.functions
    assert [(f.path, f.weight, f.name) for f in functions] == [
        ("a:b", 2.0, None),
        ("c:d", 0.5, None),
        ("e:f", 1.0, "third"),
    ]
    assert loaded.origin("reward.functions.0.weight") == "override"
    assert loaded.origin("reward.functions.0.path") == "run.yaml:5"
    assert loaded.origin("reward.functions.1.weight") == "run.yaml:6"
    assert loaded.origin("reward.functions.2.path") == "override"


def test_an_item_of_a_plain_list(write: Write) -> None:
    write(MINIMAL + "devices: {actor: {device_mesh: [0, 1]}}\n")
    loaded = load_profile("run.yaml", ["devices.actor.device_mesh.1=3"])
    assert loaded.profile.devices.actor.device_mesh == [0, 3]
    assert loaded.origin("devices.actor.device_mesh") == "run.yaml:3, override"


def test_the_last_of_two_words_wins() -> None:
    assert load_profile("packed", [*NEEDED, "rollout.n=2", "rollout.n=3"]).profile.rollout.n == 3


def test_a_mapping_as_a_word_is_merged_and_a_list_replaces(write: Write) -> None:
    write(MINIMAL + "rollout: {n: 4, stop: [a, b]}\n")
    loaded = load_profile("run.yaml", ["rollout={top_k: 3, stop: [c]}"])
    r = loaded.profile.rollout
    assert (r.n, r.top_k, r.stop) == (4, 3, ["c"])
    assert loaded.origin("rollout.n") == "run.yaml:3"
    assert loaded.origin("rollout.temperature") == "default"


def test_an_empty_section_says_nothing(write: Write) -> None:
    """All keys under it commented out: YAML reads null, and the profile's values stay."""
    write("profile: baseline\n" + MINIMAL + "rollout:\noptim:\n  actor:\n")
    loaded = load_profile("run.yaml")
    assert loaded.profile.rollout == load_profile("baseline", NEEDED).profile.rollout
    assert loaded.origin("rollout.n") == "default"


def test_anchors_and_merge_keys(write: Write) -> None:
    write(MINIMAL + "optim:\n  actor: &both {lr: 1e-5, weight_decay: 0.1}\n  critic: {<<: *both, lr: 1e-4}\n")
    optim = load_profile("run.yaml").profile.optim
    assert (optim.actor.lr, optim.critic.lr, optim.critic.weight_decay) == (1e-5, 1e-4, 0.1)


def test_arguments_of_vllm_pass_through(write: Write) -> None:
    write(MINIMAL + "devices: {actor: {vllm_config: {gpu_memory_utilization: 0.5, hf_overrides: {a: [1]}}}}\n")
    config = load_profile("run.yaml").profile.devices.actor.vllm_config
    assert config.model_extra == {"gpu_memory_utilization": 0.5, "hf_overrides": {"a": [1]}}


def test_a_byte_order_mark_and_windows_line_ends(write: Write) -> None:
    write("\ufeff" + MINIMAL.replace("\n", "\r\n"))
    assert load_profile("run.yaml").profile.model.path == "m"


def test_leaves_cover_the_whole_profile(write: Write) -> None:
    """What --dry-run prints leaves no value out: put together again it is the profile."""
    write(MINIMAL + "reward: {functions: [{path: 'a:b'}]}\ndevices: {actor: {device_mesh: [0]}}\n")
    loaded = load_profile("run.yaml")
    assert _rebuild(loaded) == loaded.profile


def _rebuild(loaded: LoadedProfile) -> Profile:
    data: dict[str, object] = {}
    for key, value, _ in loaded.leaves():
        at = data
        *above, last = key.split(".")
        for part in above:
            at = at.setdefault(part, {})  # type: ignore[assignment]
        at[last] = value
    functions = data["reward"]["functions"]  # type: ignore[index]
    data["reward"]["functions"] = [functions[str(i)] for i in range(len(functions))]  # type: ignore[index]
    return Profile.model_validate(yaml.safe_load(yaml.safe_dump(data)))
