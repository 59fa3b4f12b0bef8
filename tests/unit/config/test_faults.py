"""What is said about a configuration that cannot be used: all of it at once, each with place, key, value and cure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlspeed.config.keys import all_keys
from rlspeed.config.load import load_device_mapping, load_profile
from rlspeed.config.names import FOREIGN, nearest
from rlspeed.errors import ConfigError, Fault

Write = Callable[..., str]
Faults = Callable[..., list[Fault]]
FaultOf = Callable[..., Fault]
NEEDED = ("model.path=DIR", "data.train_files=FILE")
MINIMAL = "model: {path: m}\ndata: {train_files: f}\n"


def test_all_faults_of_all_files_and_words_in_one_error(write: Write, faults: Faults) -> None:
    write("actor:\n  device_mesh: [0, x]\ncritik: {}\n", "map.yaml")
    write("profile: pakced\nmodel:\n  path: m\n  pth: m\n  path: n\ndata: {train_files: 3}\nrun:\n  steps: many\n")
    found = faults("run.yaml", "device_mapping_file=map.yaml", "rollout.n=0", "algorithm.kind=gprp", "seed=", "nothing")
    assert {(f.where, f.found) for f in found} == {
        ("run.yaml:1", "profile is 'pakced'"),
        ("run.yaml:4", "unknown key model.pth (set to 'm')"),
        ("run.yaml:5", "model.path stands twice, first on line 3"),
        ("run.yaml:6", "data.train_files is 3"),
        ("run.yaml:8", "run.steps is 'many'"),
        ("map.yaml:2", "devices.actor.device_mesh.1 is 'x'"),
        ("map.yaml:3", "unknown key devices.critik"),
        ("override", "rollout.n is 0"),
        ("override", "algorithm.kind is 'gprp'"),
        ("override", "unknown key seed (set to None)"),
        ("override", "'nothing'"),
    }
    by_key = {f.found: f for f in found}
    assert by_key["profile is 'pakced'"].fix == "did you mean packed?"
    assert by_key["unknown key model.pth (set to 'm')"].fix == "did you mean model.path?"
    assert by_key["data.train_files is 3"].allowed == "a string, or a list"
    assert by_key["rollout.n is 0"].allowed == "greater than or equal to 1"
    assert by_key["algorithm.kind is 'gprp'"].fix == "did you mean grpo?"
    assert "'ppo', 'grpo'" in by_key["algorithm.kind is 'gprp'"].allowed
    assert by_key["unknown key devices.critik"].fix == "did you mean devices.critic?"
    assert by_key["unknown key seed (set to None)"].fix == "did you mean run.seed?"


def test_required_keys(faults: Faults) -> None:
    found = {f.found: f for f in faults("packed")}
    assert set(found) == {"model.path is required and not set", "data.train_files is required and not set"}
    assert found["model.path is required and not set"].fix == "set it: model.path=..."


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("model:\n  path: [a\nx: 1\n", 3, "expected ',' or ']'"),
        ("a: b\n\tc: d\n", 2, "found character '\\t'"),
        ("a: 1\n--- \nb: 2\n", 2, "found another document"),
        ("a: *nowhere\n", 1, "undefined alias"),
        ("a: !!python/object:os.system {}\n", 1, "could not determine a constructor"),
        ("? [a]\n: 1\n", 1, "found unhashable key"),
    ],
)
def test_not_yaml_names_the_line(write: Write, faults: Faults, text: str, line: int, words: str) -> None:
    write(text)
    found = faults("run.yaml", "rollout.n=x")
    assert found[0].where == f"run.yaml:{line}"
    assert words in found[0].found
    # what stood in the broken file is not called missing, and the words are still checked
    assert [f.found for f in found[1:]] == ["rollout.n is 'x'"]


@pytest.mark.parametrize(
    "text", ["a: !!int ''\n", "a: !!bool maybe\n", "a: !!float abc\n", "a: &x [*x]\n", "a: \x01\n"]
)
def test_yaml_that_makes_the_parser_stumble(write: Write, faults: Faults, text: str) -> None:
    write(text)
    assert "not YAML" in faults("run.yaml")[0].found


def test_anchors_that_unfold_without_end(write: Write, faults: Faults) -> None:
    lines = ["a0: &a0 [x]\n"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)]
    write("".join(lines))
    assert "more than 100000 values" in faults("run.yaml")[0].found


def test_a_file_that_is_no_mapping_or_no_text(write: Write, faults: Faults, tmp_path: Path) -> None:
    write("- a\n- b\n")
    assert faults("run.yaml")[0].found == "a list"
    (tmp_path / "run.yaml").write_bytes(b"a: \xff\xfe\n")
    assert "cannot be read" in faults("run.yaml")[0].found


def test_no_such_configuration(faults: Faults) -> None:
    (fault,) = faults("quikstart")
    assert fault.fix == "did you mean quickstart?"
    assert "baseline, full, hybrid, packed, quickstart" in fault.allowed
    for name in ("x" * 5000, "a\0b", "", "."):
        assert "is no file" in faults(name)[0].found


def test_no_such_device_mapping(write: Write, faults: Faults) -> None:
    write("device_mapping_file: map.yaml\nrollout: {n: 0}\n" + MINIMAL)
    found = {f.where: f for f in faults("run.yaml")}
    assert found["run.yaml:1"].found == "device_mapping_file is 'map.yaml', which is not there"
    assert "relative to" in found["run.yaml:1"].allowed
    assert "run.yaml:2" in found


def test_faults_of_a_mapping_alone(write: Write) -> None:
    write("actor: {device_mesh: 0}\nactor: {devise_mesh: [0]}\nreward: {device_mesh: [cpu]}\n", "map.yaml")
    with pytest.raises(ConfigError) as caught:
        load_device_mapping("map.yaml")
    assert [f.where for f in caught.value.faults] == ["map.yaml:2", "map.yaml:2", "map.yaml:3"]
    assert "devices.reward_model" in caught.value.faults[-1].fix


@pytest.mark.parametrize(
    ("word", "allowed", "fix"),
    [
        ("rollout.n=true", "a whole number", ""),
        ("rollout.n=1.5", "a whole number", ""),
        ("rollout.n='8'", "a whole number", "take the quotes away"),
        ("rollout.n=None", "a whole number", "write null for no value"),
        ("rollout.temperature=.nan", "a finite number", ""),
        ("optim.actor.lr=1e999", "a finite number", ""),
        ("optim.actor.lr=true", "a number", ""),
        ("optim.actor.lr=0", "greater than 0", ""),
        ("model.use_remove_padding=1", "true or false", ""),
        ("model.use_remove_padding='true'", "true or false", "take the quotes away"),
        ("data.system_prompt=no", "a string", "put it in quotes"),
        ("rollout=5", "a section: keys with values", ""),
        ("rollout.stop=x", "a list", ""),
        ("reward.functions=[a:b]", "a section: keys with values", ""),
        ("devices.actor.device_mesh=[gpu]", "a whole number, or 'cpu'", ""),
        ("model.model_dtype=bfloat16", "'auto', 'bf16', 'fp16' or 'fp32'", ""),
        ("optim.actor.betas=[0.9]", "field required", ""),
        ("optim.actor.betas=[0.9, 1.0]", "less than 1", ""),
    ],
)
def test_types_are_not_guessed(fault_of: FaultOf, word: str, allowed: str, fix: str) -> None:
    """pydantic would take true for 1, '8' for 8 and 'yes' for true."""
    key = word.partition("=")[0]
    fault = fault_of(key, "packed", *NEEDED, word)
    assert fault.where == "override"
    assert allowed in fault.allowed or "required" in fault.found
    assert fix in fault.fix


@pytest.mark.parametrize("word", ["x", "=1", "a..b=1", ".a=1", "a.=1"])
def test_words_that_are_none(fault_of: FaultOf, word: str) -> None:
    assert fault_of(repr(word), "packed", *NEEDED, word).allowed == "key.path=value"


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("run.name=[a", "is not YAML"),
        ("run.name={a: 1, a: 2}", "a stands twice"),
        ("run.name=" + "[" * 5000, "is not YAML"),
        ("model.path.x=1", "model.path is a plain value"),
        ("reward.functions.1.weight=2", "reward.functions has 0 item(s), no '1'"),
        ("reward.functions.x=2", "reward.functions has 0 item(s), no 'x'"),
        ("reward.functions.\u00b2=2", "reward.functions has 0 item(s)"),
    ],
)
def test_words_that_cannot_be_placed(faults: Faults, word: str, words: str) -> None:
    found = faults("packed", *NEEDED, "reward.functions=[]", word)
    assert any(words in f.found for f in found), found


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        # verl
        ("actor_rollout_ref.model.path", "model.path"),
        ("actor_rollout_ref.rollout.n", "rollout.n"),
        ("actor_rollout_ref.rollout.temperature", "rollout.temperature"),
        ("actor_rollout_ref.actor.optim.lr", "optim.actor.lr"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "algorithm.mini_batch_size"),
        ("actor_rollout_ref.actor.kl_loss_coef", "algorithm.kl.coef"),
        ("actor_rollout_ref.model.use_remove_padding", "model.use_remove_padding"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "devices.actor.vllm_config.tensor_parallel_size"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization", "devices.actor.vllm_config.gpu_memory_utilization"),
        ("critic.optim.lr", "optim.critic.lr"),
        ("critic.model.path", "model.critic.path"),
        ("data.train_batch_size", "data.batch_size"),
        ("data.max_response_length", "rollout.max_new_tokens"),
        ("algorithm.adv_estimator", "algorithm.kind"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl.coef"),
        ("trainer.total_epochs", "run.epochs"),
        ("trainer.save_freq", "run.save_every"),
        ("custom_reward_function.path", "reward.functions"),
        # TRL
        ("model_name_or_path", "model.path"),
        ("num_generations", "rollout.n"),
        ("max_completion_length", "rollout.max_new_tokens"),
        ("max_prompt_length", "data.max_prompt_length"),
        ("learning_rate", "optim.actor.lr"),
        ("beta", "algorithm.kl.coef"),
        ("epsilon_high", "algorithm.clip_high"),
        ("report_to", "run.loggers"),
        ("use_vllm", "model.actor.use_vllm_for_generation"),
        ("--learning_rate", "optim.actor.lr"),
        # OpenRLHF
        ("actor.model_name_or_path", "model.path"),
        ("rollout.n_samples_per_prompt", "rollout.n"),
        ("ds.packing_samples", "model.use_remove_padding"),
        ("algo.advantage.estimator", "algorithm.kind"),
        ("prompt_data", "data.train_files"),
        ("ckpt.load_enable", "run.resume"),
        # spelling
        ("rolout.n", "rollout.n"),
        ("model.use_remove_paddings", "model.use_remove_padding"),
        ("Data.Max_Length", "data.max_length"),
        ("temprature", "rollout.temperature"),
        ("optim.critic.lrate", "optim.critic.lr"),
    ],
)
def test_the_nearest_known_name(theirs: str, ours: str) -> None:
    assert nearest(theirs, all_keys()) == ours


def test_the_table_of_foreign_names_is_about_keys_that_exist() -> None:
    known = set(all_keys())
    for theirs, ours in FOREIGN.items():
        sentence = " " in ours
        passed_to_vllm = ours.startswith("devices.actor.vllm_config.")
        assert sentence or passed_to_vllm or ours in known, (theirs, ours)
        assert theirs not in known, theirs


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.lora_rank", "adapters are not offered"),
        ("actor_rollout_ref.model.lora_rank", "adapters are not offered"),
        ("model.peft_config", "adapters are not offered"),
        ("lora.rank", "adapters are not offered"),
        ("model.load_in_4bit", "quantised weights are not offered"),
        ("rollout.quantization", "quantised weights are not offered"),
    ],
)
def test_adapters_and_quantised_weights_are_refused(fault_of: FaultOf, key: str, words: str) -> None:
    """sync-08, sync-09, sync-13: nothing that would need merging, or scales, can be asked for."""
    fault = fault_of(key, "packed", *NEEDED, f"{key}=8")
    assert "unknown key" in fault.found
    assert words in fault.fix


def test_unknown_sections_are_told_key_by_key(faults: Faults) -> None:
    words = ["trainer.total_epochs=3", "trainer.n_gpus_per_node=8", "trainer.what_is_this=1"]
    found = {f.found: f.fix for f in faults("packed", *NEEDED, *words)}
    assert found == {
        "unknown key trainer.total_epochs (set to 3)": "did you mean run.epochs?",
        "unknown key trainer.n_gpus_per_node (set to 8)": "give the option --nproc-per-node",
        "unknown key trainer.what_is_this (set to 1)": "leave it out",
    }


def test_keys_are_what_is_written(write: Write, faults: Faults) -> None:
    """For YAML 1.1 these are 1, None, True and 2."""
    write(MINIMAL + "1: a\nnull: b\non: c\nrollout: {2: d}\n")
    assert {(f.where, f.found) for f in faults("run.yaml")} == {
        ("run.yaml:3", "unknown key 1 (set to 'a')"),
        ("run.yaml:4", "unknown key null (set to 'b')"),
        ("run.yaml:5", "unknown key on (set to 'c')"),
        ("run.yaml:6", "unknown key rollout.2 (set to 'd')"),
    }


def test_a_dotted_key_in_a_file(write: Write, faults: Faults) -> None:
    write(MINIMAL + "rollout.n: 4\nreward: {functions: [{path: 'a:b', kwargs: {x.y: !!binary aGk=}}]}\n")
    found = {f.where: f for f in faults("run.yaml")}
    assert "each part is a key of its own" in found["run.yaml:3"].fix
    assert found["run.yaml:4"].found == "reward.functions.0.kwargs.x.y is b'hi'"


def test_good_configurations_after_bad_ones() -> None:
    """Nothing of a refused configuration is kept."""
    with pytest.raises(ConfigError):
        load_profile("packed", ["rollout.n=x"])
    assert load_profile("packed", NEEDED).profile.rollout.n == 1
