"""The trial of a device map's process groups: passes on gloo, and names the rank that is missing."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from rlspeed.config.device_schema import DeviceMapping
from rlspeed.engine.smoke import SmokeSpec, run_smoke, trial
from rlspeed.errors import DeviceError
from rlspeed.planning.devices import DeviceMap, build_device_map


def device_map(actor: dict[str, Any], critic: dict[str, Any] | None = None) -> DeviceMap:
    sections = {"actor": actor} | ({"critic": critic} if critic else {})
    return build_device_map(DeviceMapping.model_validate(sections), world_size=None, use_cpu=True)


def silent_rank_1(rank: int, spec: SmokeSpec, reports: Any) -> None:
    """Rank 1 never joins."""
    if rank == 1:
        time.sleep(60)
    trial(rank, spec, reports)


def dying_rank_1(rank: int, spec: SmokeSpec, reports: Any) -> None:
    """Rank 1 is killed at once, as by the kernel when memory runs out."""
    if rank == 1:
        os._exit(9)
    trial(rank, spec, reports)


def test_every_group_and_a_reshard() -> None:
    """actor on [0, 1] with vLLM's tensor parallel 2, critic on [3, 2]: rank is not the position in the group."""
    actor = {"device_mesh": [0, 1], "use_vllm": True, "vllm_config": {"tensor_parallel_size": 2}}
    result = run_smoke(device_map(actor, {"device_mesh": [3, 2]}), cuda=False)
    assert result.groups == ("world", "actor = reference = reward_model = rollout", "critic")
    assert result.backend == "gloo"
    assert result.moved_bytes == 2 * 24 * 8 * 4  # each of two ranks gets the other's half of its columns, in fp32


@pytest.mark.parametrize(
    ("worker", "words"),
    [(silent_rank_1, "no answer in 12 s, last heard: nothing"), (dying_rank_1, "ended with exit code 9")],
)
def test_dev_08_the_missing_rank_is_named(worker: Any, words: str) -> None:
    """dev-08: whoever does not come is named, after the start-up's own short wait."""
    with pytest.raises(DeviceError) as caught:
        run_smoke(device_map({"device_mesh": [0, 1]}), cuda=False, timeout_seconds=12.0, worker=worker)
    (fault,) = caught.value.faults
    assert fault.where == "rank 1"
    assert words in fault.found
