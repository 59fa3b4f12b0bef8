"""The whole report: which roles count, what an empty mapping means, what is said about the rest."""

from __future__ import annotations

from typing import Any

import pytest

from rlspeed.config.device_schema import DeviceMapping
from rlspeed.config.schema import Profile
from rlspeed.errors import ConfigError
from rlspeed.planning.devices import Role
from rlspeed.planning.machine import Machine, assume
from rlspeed.planning.probe import read_shape
from rlspeed.planning.report import element_bytes, inspect_run, model_paths, used_roles
from rlspeed.planning.shape import ModelShape

SHAPE = ModelShape(family="llama", hidden=64, layers=2, heads=8, kv_heads=4, head_dim=8, intermediate=96, vocab=128)


def profile(**sections: Any) -> Profile:
    return Profile.model_validate({"model": {"path": "m"}, "data": {"train_files": "d"}, **sections})


def test_roles_follow_the_algorithm() -> None:
    assert used_roles(profile()) == (Role.ACTOR, Role.CRITIC, Role.ROLLOUT)
    full = profile(
        algorithm={"kind": "grpo", "kl": {"where": "loss"}},
        reward={"model": {"path": "rm"}},
        model={"path": "m", "reference": {"path": "ref"}},
    )
    assert model_paths(full) == {
        Role.ACTOR: "m",
        Role.REFERENCE: "ref",
        Role.REWARD: "rm",
        Role.ROLLOUT: "m",
    }


def test_sections_that_are_not_used_are_said() -> None:
    mapping = DeviceMapping.model_validate({"critic": {"device_mesh": [0]}, "reference": {"device_mesh": [0]}})
    notes = inspect_run(mapping, assume("1x H100"), profile=profile(algorithm={"kind": "grpo"})).notes
    assert "critic: not used, algorithm.kind grpo has no critic" in notes
    assert "reference: not used, algorithm.kl.where is none" in notes


def test_an_empty_mapping_takes_the_whole_machine() -> None:
    assert inspect_run(DeviceMapping(), assume("4x H100")).devices.world_size == 4
    assert inspect_run(DeviceMapping(), assume("2x8x H100")).devices.world_size == 16
    on_host = inspect_run(DeviceMapping(), Machine(devices=()))
    assert on_host.devices.world_size == 1
    assert {p.device for p in on_host.devices.roles.values()} == {"cpu"}
    assert on_host.problems == ()


def test_hybrid_sharding_stays_in_a_node() -> None:
    """Two nodes: FSDP2 cuts over 8 ranks, no byte of the transition crosses the nodes."""
    actor = {"fsdp_config": {"sharding_strategy": "HYBRID_SHARD"}}
    mapping = DeviceMapping.model_validate({"actor": actor})
    shapes = {Role.ACTOR: SHAPE, Role.ROLLOUT: SHAPE}
    report = inspect_run(mapping, assume("2x8x H100"), profile=profile(algorithm={"kind": "grpo"}), shapes=shapes)
    assert report.devices.roles[Role.ACTOR].dp_shard == 8
    assert report.plan is not None
    assert all(a // 8 == b // 8 for a, b in report.plan.bytes_by_pair())
    assert report.plan.num_bytes > 0


def test_auto_precision_is_that_of_the_devices() -> None:
    auto = profile()
    assert element_bytes(auto, assume("1x H100")) == 2
    assert element_bytes(auto, assume("1x T4")) == 4
    assert element_bytes(auto, Machine(devices=())) == 4
    assert element_bytes(profile(model={"path": "m", "model_dtype": "fp16"}), assume("1x T4")) == 2


def test_a_broken_map_is_not_forecast() -> None:
    mapping = DeviceMapping.model_validate({"actor": {"device_mesh": [0, 0]}})
    report = inspect_run(mapping, assume("2x H100"), profile=profile(), shapes={Role.ACTOR: SHAPE})
    assert report.faults
    assert (report.forecasts, report.floors, report.plan) == ((), (), None)


def test_config_files_that_are_wrong(tmp_path) -> None:
    assert read_shape(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match="mamba"):
        read_shape(str(tmp_path))
