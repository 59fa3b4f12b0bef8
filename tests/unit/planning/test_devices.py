"""The users' device mapping as placements, and every fault of the mapping itself."""

from __future__ import annotations

from typing import Any

import pytest

from rlspeed.config.device_schema import DeviceMapping
from rlspeed.errors import DeviceError
from rlspeed.planning.devices import DeviceMap, Role, build_device_map, uses_vllm

SEED = {
    "actor": {
        "device_mesh": [0, 1],
        "use_vllm": True,
        "vllm_config": {"tensor_parallel_size": 2, "dtype": "bfloat16"},
    },
    "critic": {
        "device_mesh": [2, 3],
        "strategy": "fsdp2",
        "fsdp_config": {"sharding_strategy": "FULL_SHARD", "cpu_offload": False},
    },
    "reward_model": {"device_mesh": ["cpu"], "use_cpu_offload": True},
}


def build(mapping: dict[str, Any], world_size: int | None = None, **kwargs: Any) -> DeviceMap:
    return build_device_map(DeviceMapping.model_validate(mapping), world_size=world_size, **kwargs)


def texts(mapping: dict[str, Any], world_size: int | None = None, **kwargs: Any) -> list[str]:
    return [str(f) for f in build(mapping, world_size, **kwargs).check()]


def test_dev_06_the_users_file_gives_ranks_of_their_own() -> None:
    """dev-06: actor [0,1], critic [2,3], reward on the host: ranks 0..3 on logical devices 0..3, nothing shared by
    accident.
    """
    devices = build(SEED)
    assert devices.world_size == 4
    assert devices.check() == []
    roles = devices.roles
    assert roles[Role.ACTOR].ranks == roles[Role.REFERENCE].ranks == roles[Role.ROLLOUT].ranks == (0, 1)
    assert roles[Role.CRITIC].ranks == (2, 3)
    assert (roles[Role.REWARD].device, roles[Role.REWARD].backend) == ("cpu", "gloo")
    assert roles[Role.ACTOR].backend == "cpu:gloo,cuda:nccl"
    assert (roles[Role.ROLLOUT].tp, roles[Role.ACTOR].tp, roles[Role.ACTOR].dp_shard) == (2, 1, 2)
    assert devices.device_ranks == (0, 1, 2, 3)
    assert devices.roles_on(3) == (Role.CRITIC, Role.REWARD)


def test_an_empty_mapping_puts_every_role_everywhere() -> None:
    devices = build({}, world_size=2)
    assert devices.check() == []
    assert {p.ranks for p in devices.roles.values()} == {(0, 1)}
    on_host = build({}, world_size=1, default_device="cpu")
    assert {p.device for p in on_host.roles.values()} == {"cpu"}
    assert build(SEED, 4, use_cpu=True).roles[Role.CRITIC].device == "cpu"
    assert build(SEED, 4, use_cpu=True).check() == []


def test_dev_07_all_faults_of_one_mapping_in_one_pass() -> None:
    """dev-07: [0,0], [], [1,0,1] and roles that overlap without saying so: each named with role, position and value."""
    found = texts(
        {
            "actor": {"device_mesh": [0, 0]},
            "critic": {"device_mesh": []},
            "reference": {"device_mesh": [1, 0, 1]},
            "reward_model": {"device_mesh": ["cpu", 2]},
        },
        world_size=2,
    )
    text = "\n".join(found)
    assert "actor.device_mesh: [0, 0]: 0 at position 1, as at 0" in text
    assert "critic.device_mesh: []: no device" in text
    assert "reference.device_mesh: [1, 0, 1]: 1 at position 2, as at 0" in text
    assert "reward_model.device_mesh: [cpu, 2] mixes cpu with indices" in text
    assert "actor.device_mesh and reference.device_mesh: both use device 0" in text
    assert len(found) == 6  # and 2 is out of range


def test_dev_07_overlap_needs_shares_with() -> None:
    """dev-07: actor [0,1] and critic [1,2]."""
    mapping = {"actor": {"device_mesh": [0, 1]}, "critic": {"device_mesh": [1, 2]}}
    (fault,) = build(mapping).check()
    assert fault.found == "both use device 1"
    assert "critic.shares_with: actor" in fault.fix
    same: dict[str, Any] = {"actor": {"device_mesh": [0, 1]}, "critic": {"device_mesh": [0, 1], "shares_with": "actor"}}
    assert build(same).check() == []
    assert build({**same, "critic": {"shares_with": "actor"}}).roles[Role.CRITIC].ranks == (0, 1)
    # two roles that both share with the actor share with each other
    both = {**same, "reference": {"device_mesh": [0, 1], "shares_with": "actor"}}
    assert build(both).check() == []


@pytest.mark.parametrize(
    ("critic", "expected"),
    [
        ({"device_mesh": [0, 1], "shares_with": "critic"}, "critic.shares_with: 'critic'"),
        ({"device_mesh": [0, 1], "shares_with": "actr"}, "allowed: actor, reference, reward_model"),
        ({"device_mesh": [1, 2], "shares_with": "actor"}, "actor, which is not on device 2"),
    ],
)
def test_shares_with_that_cannot_hold(critic: dict[str, Any], expected: str) -> None:
    assert expected in "\n".join(texts({"actor": {"device_mesh": [0, 1]}, "critic": critic}, world_size=3))


def test_dev_16_more_or_fewer_ranks_than_the_map_needs() -> None:
    """dev-16: world 4 with a mapping for 6, and 4 with a mapping for 2: who asks for what, and which ranks are idle."""
    six = {"actor": {"device_mesh": [0, 1, 2, 3]}, "critic": {"device_mesh": [4, 5]}}
    text = "\n".join(texts(six, world_size=4))
    assert "4 rank(s), the mapping needs 6 (actor devices 0, 1, 2, 3; critic devices 4, 5)" in text
    assert "critic.device_mesh: [4, 5]: 4 at position 0" in text
    (fault,) = texts({"actor": {"device_mesh": [0, 1]}, "reward_model": {"device_mesh": ["cpu"]}}, world_size=4)
    assert "no role uses devices 2, 3" in fault
    assert "--nproc-per-node 2" in fault


def test_negative_positions_are_refused() -> None:
    assert "-1 at position 1" in "\n".join(texts({"actor": {"device_mesh": [0, -1]}}))


def test_dev_18_generation_tensor_parallel_on_the_actors_devices() -> None:
    """dev-18: TP 2 on two shared devices works and uses both; TP 4 on 2 and TP 4 on 6 are refused with the numbers."""

    def mapping(count: int, tp: int) -> dict[str, Any]:
        return {
            "actor": {
                "device_mesh": list(range(count)),
                "use_vllm": True,
                "vllm_config": {"tensor_parallel_size": tp},
            }
        }

    good = build(mapping(2, 2))
    assert good.check() == []
    assert good.roles[Role.ROLLOUT].mesh().groups("tp") == ((0, 1),)
    (fault,) = build(mapping(2, 4)).check()
    assert fault.found == "4 on 2 device(s) of the actor: more than there are"
    (fault,) = build(mapping(6, 4)).check()
    assert fault.found == "4 on 6 device(s) of the actor: 6 / 4 leaves 2 over"
    assert fault.allowed == "1, 2, 3, 6"


def test_degrees_must_multiply_to_the_devices() -> None:
    critic = {"device_mesh": [0, 1, 2], "tensor_parallel_size": 2, "sequence_parallel_size": 2}
    text = "\n".join(texts({"actor": critic}))
    assert "3 device(s) for tensor_parallel_size 2 x sequence_parallel_size 2" in text
    assert "a multiple of 4" in text


def test_meshes_and_groups() -> None:
    """Tensor parallel between neighbours, FSDP2 over everything else; every group of the run has a name."""
    actor = {"device_mesh": list(range(8)), "tensor_parallel_size": 2, "sequence_parallel_size": 2}
    devices = build({"actor": actor}, roles=(Role.ACTOR,))
    place = devices.roles[Role.ACTOR]
    assert (place.dp, place.dp_shard) == (2, 4)
    assert place.mesh().axes == (("dp_replicate", 1), ("dp_shard", 2), ("sp", 2), ("tp", 2))
    named = dict(devices.groups())
    assert named["actor tp 0"] == (0, 1)
    assert named["actor sp 1"] == (1, 3)
    assert named["actor dp_shard 0"] == (0, 4)
    assert named["world"] == tuple(range(8))


def test_sharding_strategies() -> None:
    def actor(**config: Any) -> DeviceMap:
        return build({"actor": {"device_mesh": list(range(8)), **config}}, ranks_per_node=4, roles=(Role.ACTOR,))

    full = actor().roles[Role.ACTOR]
    none = actor(strategy="none").roles[Role.ACTOR]
    hybrid = actor(fsdp_config={"sharding_strategy": "HYBRID_SHARD"}).roles[Role.ACTOR]
    assert [(p.replicas, p.dp_shard) for p in (full, none, hybrid)] == [(1, 8), (8, 1), (2, 4)]


def test_only_the_roles_of_the_algorithm() -> None:
    """GRPO has no critic: its devices are then idle, and that is said."""
    devices = build(SEED, 4, roles=(Role.ACTOR, Role.ROLLOUT))
    assert set(devices.roles) == {Role.ACTOR, Role.ROLLOUT}
    assert "no role uses devices 2, 3" in str(devices.check()[0])


def test_the_mapping_decides_about_vllm() -> None:
    assert uses_vllm(DeviceMapping.model_validate(SEED), model_says=False)
    assert uses_vllm(DeviceMapping(), model_says=True)
    assert not uses_vllm(DeviceMapping.model_validate({"actor": {"use_vllm": False}}), model_says=True)


def test_require_raises_everything() -> None:
    with pytest.raises(DeviceError) as caught:
        build({"actor": {"device_mesh": [0, 0]}, "critic": {"device_mesh": []}}).require()
    assert len(caught.value.faults) == 2
    build(SEED).require()


def test_ranks_ascend_and_a_role_without_devices_has_those_that_it_shares() -> None:
    """torch numbers the ranks of a group in ascending order; the chain of shares_with is followed to its end."""
    sections = {
        "actor": {"device_mesh": [3, 1]},
        "critic": {"device_mesh": [2, 0]},
        "reference": {"shares_with": "reward_model"},
        "reward_model": {"shares_with": "critic"},
    }
    devices = build(sections, 4)
    assert devices.roles[Role.ACTOR].ranks == (1, 3)
    assert [devices.roles[r].ranks for r in (Role.CRITIC, Role.REFERENCE, Role.REWARD)] == [(0, 2)] * 3
    assert devices.check() == []
