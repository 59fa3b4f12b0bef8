"""The door of `rlspeed train`: what it hands to the loop, what --dry-run prints, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rlspeed.commands import app
from typer.testing import CliRunner, Result

from rlspeed.config.load import LoadedProfile
from rlspeed.errors import ConfigError

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory with the users' two files, on a machine without GPU and outside of any launcher."""
    for name in ("ppo_trainer.yaml", "device_mapping.yaml"):
        shutil.copy(DATA / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reached the loop or the launcher, which are stood in for."""
    seen: list[Any] = []
    loop, launch = types.ModuleType("loop"), types.ModuleType("launch")
    loop.train = lambda loaded: seen.append(loaded) or 0  # type: ignore[attr-defined]
    launch.launch = lambda words, processes: seen.append((words, processes)) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rlspeed.training.loop", loop)
    monkeypatch.setitem(sys.modules, "rlspeed.engine.launch", launch)
    return seen


def run(*words: str) -> Result:
    result = CliRunner().invoke(app, ["train", *words])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result


def refused(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        run(*words)
    assert caught.value.exit_code == 2
    return [str(f) for f in caught.value.faults]


def test_the_loop_gets_the_loaded_profile(here: Path, handed: list[Any]) -> None:
    result = run("ppo_trainer.yaml", "model.path=DIR", "data.train_files=FILE", "model.model_dtype=auto")
    assert result.exit_code == 0
    (loaded,) = handed
    assert isinstance(loaded, LoadedProfile)
    assert loaded.profile.model.path == "DIR"


def test_dry_run_prints_every_value_with_its_origin(here: Path, handed: list[Any]) -> None:
    result = run("ppo_trainer.yaml", "rollout.top_k=5", "profile=packed", "--dry-run")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert "data.max_length = 1536  # ppo_trainer.yaml:15" in lines
    assert "rollout.top_k = 5  # override" in lines
    assert "rollout.n = 1  # default" in lines
    assert "model.critic.path = null  # default" in lines
    assert handed == []


def test_dry_run_as_json(here: Path) -> None:
    result = run("quickstart", "--dry-run", "--json")
    values = json.loads(result.stdout)
    assert values["model.path"] == {"value": "quickstart", "origin": "profile quickstart"}
    assert "--json belongs to --dry-run" in refused("quickstart", "--json")[0]


def test_dry_run_prints_and_then_says_what_would_refuse_the_run(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The users' mapping on a machine without GPU: the configuration, then each reason."""
    words = ("ppo_trainer.yaml", "device_mapping_file=device_mapping.yaml", "model.path=DIR", "data.train_files=FILE")
    result = CliRunner().invoke(app, ["train", *words, "--dry-run"])
    assert isinstance(result.exception, ConfigError)
    assert "devices.critic.device_mesh = [2, 3]  # device_mapping.yaml:9" in result.stdout
    faults = {f.where: str(f) for f in result.exception.faults}
    assert "not installed, and it is to generate" in faults["vllm"]
    assert "0 visible" in faults["GPUs"]
    assert "the mapping needs 4" in faults["world size"]


def test_devices_that_are_not_there(here: Path) -> None:
    found = refused("quickstart", "devices.actor.device_mesh=[0, 1]", "--nproc-per-node", "2")
    assert len(found) == 1
    assert found[0].startswith("GPUs: 0 visible")


def test_dev_14_a_taken_port_is_named_by_the_rank_that_would_open_it(
    here: Path, handed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """dev-14: not where nobody opens it: on other ranks, and without or before a launcher, which takes a free one."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setenv("MASTER_PORT", port)
        assert run("quickstart").exit_code == 0
        for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        assert run("quickstart").exit_code == 0
        monkeypatch.setenv("RANK", "0")
        (fault,) = refused("quickstart")
        assert f"port {port} is in use" in fault


def test_faults_of_configuration_and_machine_together(here: Path) -> None:
    found = refused("quickstart", "algorithm.kind=grpo", "rollout.n=1", "devices.actor.device_mesh=[0]")
    assert [f.split(":")[0] for f in found] == ["override", "GPUs"]


def test_several_processes_go_through_the_launcher(here: Path, handed: list[Any]) -> None:
    result = run("quickstart", "run.steps=2", "--nproc-per-node", "2")
    assert result.exit_code == 7
    assert handed == [(["quickstart", "run.steps=2"], 2)]


def test_a_process_that_was_launched_does_not_launch(
    here: Path, handed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert run("quickstart", "--nproc-per-node", "2").exit_code == 0
    assert isinstance(handed[0], LoadedProfile)
    assert "torchrun started 2 process(es)" in refused("quickstart", "--nproc-per-node", "4")[0]


def test_resume_names_the_folder(here: Path, handed: list[Any], make_run: Callable[[str], None]) -> None:
    make_run("runs/a b")
    assert run("runs/a b", "--resume").exit_code == 0
    assert run("quickstart", "--resume", "run.dir=runs/c").exit_code == 0
    assert [(h.profile.run.resume, h.profile.run.dir) for h in handed] == [(True, "runs/a b"), (True, "runs/c")]
    assert "true without run.dir" in refused("quickstart", "--resume")[0]


def test_resume_travels_to_the_launched_processes(
    here: Path, handed: list[Any], make_run: Callable[[str], None]
) -> None:
    make_run("runs/x")
    run("runs/x", "--resume", "--nproc-per-node", "2")
    assert handed == [(["runs/x", "run.resume=true", 'run.dir="runs/x"'], 2)]


def test_profile_steps_are_a_list_of_steps(here: Path, handed: list[Any]) -> None:
    assert run("quickstart", "--profile-steps", "3,5").exit_code == 0
    assert run("quickstart", "--profile-steps", "2").exit_code == 0
    assert [h.profile.run.profile_steps for h in handed] == [[3, 5], [2]]
    assert "run.profile_steps" in refused("quickstart", "--profile-steps", "0")[0]


@pytest.fixture
def make_run(here: Path) -> Callable[[str], None]:
    """A run folder as the loop leaves it."""

    def make_run(name: str) -> None:
        from rlspeed.config.load import load_profile

        (here / name).mkdir(parents=True)
        (here / name / "resolved.yaml").write_text(load_profile("quickstart").dump())

    return make_run


def test_no_environment_is_changed(here: Path, handed: list[Any]) -> None:
    before = dict(os.environ)
    run("quickstart")
    assert dict(os.environ) == before
