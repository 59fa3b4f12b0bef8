"""activation_checkpointing: auto: as many blocks keep their activations as fit, and the forecast says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlspeed.config.device_schema import DeviceMapping
from rlspeed.planning.devices import Role, build_device_map
from rlspeed.planning.fit import forecast
from rlspeed.planning.floor import floor_times
from rlspeed.planning.machine import GIB, Machine, assume
from rlspeed.planning.memory import RunSize, activation_bytes
from rlspeed.planning.recompute import SPARE_SHARE, keep_what_fits
from rlspeed.planning.shape import ModelShape

SHAPE = ModelShape.from_config(
    {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
)
ROLES = (Role.ACTOR, Role.ROLLOUT)
SIZE = RunSize(
    element_bytes=2,
    micro_tokens=16384,
    padded=False,
    longest=1536,
    new_tokens=512,
    sequences=256,
    concurrent=64,
    recompute=True,
    vllm=False,
    hybrid_engine=True,
    lightweight=False,
)
DEVICES = build_device_map(DeviceMapping(), world_size=1, roles=ROLES)
SHAPES = dict.fromkeys(ROLES, SHAPE)


def machine(gib: float) -> Machine:
    """One H100 with so much memory."""
    full = assume("1x H100")
    return replace(
        full, devices=tuple(replace(d, memory_bytes=int(gib * GIB), free_bytes=int(gib * GIB)) for d in full.devices)
    )


def kept(gib: float, size: RunSize = SIZE) -> int:
    found = keep_what_fits(DEVICES, SHAPES, size, machine(gib))
    assert found is not None
    assert found.recompute == (found.kept_blocks < SHAPE.layers)
    return found.kept_blocks


def test_from_none_to_all_with_the_memory() -> None:
    numbers = [kept(gib) for gib in range(20, 200, 10)]
    assert numbers == sorted(numbers)
    assert numbers[0] == 0
    assert numbers[-1] == SHAPE.layers
    assert len(set(numbers)) > 4


@pytest.mark.parametrize("gib", [48.0, 64.0])
def test_what_is_kept_fits_and_one_more_does_not(gib: float) -> None:
    number = kept(gib)
    assert 0 < number < SHAPE.layers
    peaks = []
    for blocks in (number, number + 1):
        size = replace(SIZE, kept_blocks=blocks)
        (found,) = forecast(DEVICES, SHAPES, size, machine(gib))
        update = next(m for m in found.phases if m.phase == "update actor")
        peaks.append(update.peak / found.usable_bytes)
    assert peaks[0] <= 1 - SPARE_SHARE < peaks[1]


def test_fewer_tokens_keep_more() -> None:
    assert kept(48.0, replace(SIZE, micro_tokens=4096)) > kept(48.0)


def test_nothing_is_known_of_a_cpu_or_of_no_model() -> None:
    on_cpu = build_device_map(DeviceMapping(), world_size=1, roles=ROLES, default_device="cpu")
    assert keep_what_fits(on_cpu, SHAPES, SIZE, machine(80)) is None
    assert keep_what_fits(DEVICES, {}, SIZE, machine(80)) is None


def test_activations_and_time_lie_between_all_and_none() -> None:
    """Keeping all costs what no recomputation costs; time falls with every block that is kept."""
    none, half, all_blocks = (replace(SIZE, kept_blocks=n) for n in (0, 14, 28))
    sizes = [activation_bytes(SHAPE, s, trains=True) for s in (none, half, all_blocks)]
    assert sizes == sorted(sizes)
    assert sizes[2] == activation_bytes(SHAPE, replace(SIZE, recompute=False), trains=True)
    seconds = []
    for size in (none, half, all_blocks):
        floors = {f.phase: f.seconds for f in floor_times(DEVICES, SHAPES, size, machine(80))}
        seconds.append(floors["update actor"])
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] - seconds[1] == pytest.approx(seconds[1] - seconds[2])
