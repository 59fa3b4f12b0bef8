"""Models together or apart: the floors of a step by hand, and who wins where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlspeed.config.device_schema import DeviceMapping
from rlspeed.planning.devices import DeviceMap, Role, build_device_map
from rlspeed.planning.floor import floor_times
from rlspeed.planning.machine import assume
from rlspeed.planning.split import compare_split, step_seconds
from tests.unit.planning.test_memory import QWEN_1_5B, QWEN_7B, SIZE

PPO = (Role.ACTOR, Role.CRITIC, Role.REFERENCE, Role.ROLLOUT)
SHAPES = dict.fromkeys(PPO, QWEN_1_5B)
COPIES = {"strategy": "none"}  # whole weights: nothing is gathered


def mapped(world: int, **sections: Any) -> DeviceMap:
    return build_device_map(DeviceMapping.model_validate(sections), world_size=world, roles=PPO)


def test_a_step_is_the_sum_on_shared_ranks_and_the_longest_on_others() -> None:
    """Without anything to gather the parts are the floors themselves."""
    machine = assume("2x H100")
    apart = mapped(2, actor={"device_mesh": [0], **COPIES}, critic={"device_mesh": [1], **COPIES})
    floors = {f.phase: f.seconds for f in floor_times(apart, SHAPES, SIZE, machine)}
    found = step_seconds(apart, SHAPES, SIZE, machine)
    assert found is not None
    # reference and critic score at the same time, each one half of the phase; so do the updates
    scores = floors["log-probs"] / 2
    update = max(floors["update actor"], floors["update critic"])
    assert found[0] == pytest.approx(floors["generation"] + scores + update)
    worked = floors["generation"] + floors["log-probs"] + floors["update actor"] + floors["update critic"]
    assert found[1] == pytest.approx(worked / (2 * found[0]))
    together = mapped(2, actor=COPIES, critic={**COPIES, "shares_with": "actor"})
    floors = {f.phase: f.seconds for f in floor_times(together, SHAPES, SIZE, machine)}
    assert step_seconds(together, SHAPES, SIZE, machine) == (pytest.approx(sum(floors.values())), pytest.approx(1.0))


def test_few_devices_on_fast_links_are_shared() -> None:
    """Balanced loads: nobody waits, and weights are gathered faster than they are used."""
    found = compare_split(mapped(8), SHAPES, SIZE, assume("8x H100"))
    assert found is not None
    assert not found.given_apart
    assert found.winner == "together"
    assert found.together.seconds < found.apart.seconds
    assert found.together.busy > found.apart.busy
    assert "all models on all devices win" in found.lines()[-1]


def test_slow_links_are_a_reason_to_split() -> None:
    """Over PCIe an update waits for weights, however many ranks there are: two that run at once wait half as long."""
    given = mapped(8, actor={"device_mesh": [0, 1, 2, 3]}, critic={"device_mesh": [4, 5, 6, 7]})
    found = compare_split(given, SHAPES, SIZE, assume("8x L40S"))
    assert found is not None
    assert found.given_apart
    assert found.winner == "apart"
    assert found.apart.devices is given
    assert found.lines()[1].startswith("split: apart, as mapped: at least ")


def test_what_does_not_fit_loses_and_what_is_near_is_undecided() -> None:
    found = compare_split(mapped(8), SHAPES, SIZE, assume("8x H100"))
    assert found is not None
    assert replace(found, together=replace(found.together, fits=False)).winner == "apart"
    near = replace(found.apart, seconds=found.together.seconds * 1.01)
    assert replace(found, apart=near).winner == "neither"
    assert "measure both" in replace(found, apart=near).lines()[-1]


def test_degrees_that_do_not_divide_the_other_ranks_are_left_out() -> None:
    found = compare_split(
        mapped(6, actor={"tensor_parallel_size": 2}), dict.fromkeys(PPO, QWEN_7B), SIZE, assume("6x H100")
    )
    assert found is not None
    apart = found.apart.devices.roles
    assert all(len(p.ranks) % (p.tp * p.sp) == 0 for p in apart.values())
    assert set(apart[Role.ACTOR].ranks) | set(apart[Role.CRITIC].ranks) == set(range(6))
    assert apart[Role.ROLLOUT].ranks == apart[Role.ACTOR].ranks


def test_there_is_nothing_to_compare() -> None:
    assert compare_split(mapped(1), SHAPES, SIZE, assume("1x H100")) is None
    alone = build_device_map(DeviceMapping(), world_size=2, roles=(Role.ACTOR, Role.ROLLOUT))
    assert compare_split(alone, SHAPES, SIZE, assume("2x H100")) is None
    on_host = build_device_map(DeviceMapping(), world_size=2, roles=PPO, use_cpu=True)
    assert compare_split(on_host, SHAPES, SIZE, assume("2x H100")) is None
