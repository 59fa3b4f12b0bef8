"""Predicted memory and floors: activations against the real modules, states by hand, changes that make a run fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlspeed.config.device_schema import DeviceMapping
from rlspeed.config.schema import Profile
from rlspeed.planning.devices import DeviceMap, Role, build_device_map
from rlspeed.planning.fit import forecast, memory_faults
from rlspeed.planning.floor import floor_times, transition_floor
from rlspeed.planning.machine import DEVICE_KINDS, GIB, Machine, assume
from rlspeed.planning.memory import (
    RunSize,
    activation_bytes,
    layer_activation_bytes,
    optimizer_bytes,
    predict_memory,
    run_size,
)
from rlspeed.planning.shape import ModelShape
from rlspeed.planning.transition import Mesh, interval_generation, received_bytes

QWEN_1_5B = ModelShape.from_config(
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
QWEN_7B = replace(
    QWEN_1_5B, hidden=3584, heads=28, kv_heads=4, intermediate=18944, vocab=152064, head_dim=128, tied=False
)
SIZE = RunSize(
    element_bytes=2,
    micro_tokens=4096,
    padded=False,
    longest=1536,
    new_tokens=512,
    sequences=1024,
    concurrent=256,
    recompute=False,
    vllm=False,
    hybrid_engine=True,
    lightweight=False,
)


def device_map(world_size: int, roles: tuple[Role, ...], **actor: Any) -> DeviceMap:
    mapping = {"actor": actor} if actor else {}
    return build_device_map(DeviceMapping.model_validate(mapping), world_size=world_size, roles=roles)


GRPO = (Role.ACTOR, Role.ROLLOUT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_saved_activations_of_a_block_are_counted_exactly(family: str, dtype: torch.dtype) -> None:
    """Two more layers must keep exactly twice the formula's bytes, storage by storage, in the modules that train.

    It catches a transformers release whose blocks keep more or less. CPU attention keeps what the CUDA kernels keep.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlspeed.engine.packed import pack_sequences
    from rlspeed.models.attention_hook import PACKED_ATTENTION, register_attention
    from rlspeed.models.build import hidden_states

    register_attention()
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "head_dim": 16,
    }
    tokens, kept = 96, {}
    for layers in (1, 3):
        config = AutoConfig.for_model(family, num_hidden_layers=layers, **sizes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION).to(dtype)
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, int] = {}
        alive: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor, own: set[int] = parameters, seen: dict[int, int] = storages) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)  # noqa: B023 - a freed address must not be counted for another tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            hidden_states(model.model, pack_sequences([[1] * tokens], [1]), backend="sdpa", padded=False)
        kept[layers] = sum(storages.values())
    shape = ModelShape.from_config({"model_type": family, "num_hidden_layers": 1, **sizes})
    assert (kept[3] - kept[1]) / 2 / tokens == layer_activation_bytes(shape, dtype.itemsize)


def test_states_of_one_gpu() -> None:
    """2 bytes of weight, 12 of master and moments, 4 of gradient per parameter, and nothing gathered."""
    devices = device_map(1, GRPO)
    phases = {m.phase: m for m in predict_memory(devices, dict.fromkeys(GRPO, QWEN_1_5B), SIZE, 0)}
    params = QWEN_1_5B.num_params
    update = phases["update actor"]
    assert set(phases) == {"generation", "update actor", "transition"}
    assert (update.weights, update.optimizer, update.buffers) == (2 * params, 12 * params, 0)
    tied = 2 * QWEN_1_5B.vocab * QWEN_1_5B.hidden
    assert update.gradients == 4 * params + tied
    assert phases["generation"].weights == 2 * params  # the generator reads the actor's
    assert phases["generation"].kv_cache == 256 * 1536 * QWEN_1_5B.kv_elements_per_token * 2
    assert phases["transition"].buffers == 0


def test_optimizer_kinds_take_what_they_keep_on_the_device() -> None:
    """Masters of 4 bytes and moments of 8 or, in 8 bits, 2 and a scale for 256; on the host nothing is left."""
    params = QWEN_1_5B.num_params
    for kind, each in (("adamw", 12), ("adamw8bit", 6 + 1 / 32), ("adamw_offload", 0)):
        devices = device_map(1, GRPO)
        size = replace(SIZE, actor_optimizer=kind)
        phases = predict_memory(devices, dict.fromkeys(GRPO, QWEN_1_5B), size, 0)
        update = next(m for m in phases if m.phase == "update actor")
        assert update.optimizer == int(each * params)
    assert optimizer_bytes("adamw8bit", 4) == 2 + 1 / 32


def test_sharding_divides_the_states_and_gathers_blocks() -> None:
    whole = {m.phase: m for m in predict_memory(device_map(1, GRPO), dict.fromkeys(GRPO, QWEN_7B), SIZE, 0)}
    light, roles = replace(SIZE, lightweight=True), dict.fromkeys(GRPO, QWEN_7B)
    eight = {m.phase: m for m in predict_memory(device_map(8, GRPO), roles, light, 3)}
    a, b = whole["update actor"], eight["update actor"]
    assert b.optimizer == pytest.approx(a.optimizer / 8, rel=1e-6)
    assert b.weights == pytest.approx(a.weights / 8, rel=1e-6)
    assert b.activations == a.activations
    assert 0 < b.buffers < 0.6 * a.weights
    assert eight["generation"].weights > whole["generation"].weights  # its own copy beside the shard


def test_classic_way_needs_the_models_size_more() -> None:
    """While it generates on one rank; while it changes over on eight, where the engine has its buckets alone."""
    weights = 2 * QWEN_1_5B.num_params
    roles, light = dict.fromkeys(GRPO, QWEN_1_5B), replace(SIZE, lightweight=True)
    for ranks, phase in ((1, "generation"), (1, "transition"), (8, "transition")):
        ways = [
            {m.phase: m.peak for m in predict_memory(device_map(ranks, GRPO), roles, size, 0)}
            for size in (replace(light, hybrid_engine=False), light)
        ]
        less = 4 * SIZE.bucket_bytes if ranks > 1 else 0
        assert ways[0][phase] - ways[1][phase] >= weights - less
        assert ways[0]["update actor"] == ways[1]["update actor"]


def test_weights_of_the_generator_stay_where_generation_is_not_lightweight() -> None:
    roles = dict.fromkeys(GRPO, QWEN_1_5B)
    light, heavy = (
        {m.phase: m for m in predict_memory(device_map(8, GRPO), roles, replace(SIZE, lightweight=lightweight), 0)}
        for lightweight in (True, False)
    )
    assert heavy["update actor"].weights - light["update actor"].weights == 2 * QWEN_1_5B.num_params
    # what is received waits beside the old weights until all has arrived
    assert heavy["transition"].buffers - light["transition"].buffers == 2 * QWEN_1_5B.num_params - 2 * SIZE.bucket_bytes


def test_vllm_is_given_whole_weights_on_every_rank() -> None:
    """Beside its own half at tensor parallel 2: what arrived whole, before each rank loads its slice."""
    devices, roles = device_map(2, GRPO), dict.fromkeys(GRPO, QWEN_1_5B)
    halves = {**devices.roles, Role.ROLLOUT: replace(devices.roles[Role.ROLLOUT], tp=2)}
    phases = predict_memory(replace(devices, roles=halves), roles, replace(SIZE, vllm=True), 0)
    moving = next(m for m in phases if m.phase == "transition")
    assert moving.buffers == 4 * SIZE.bucket_bytes + 2 * QWEN_1_5B.num_params


def test_options_do_what_they_say() -> None:
    kept = activation_bytes(QWEN_7B, SIZE, trains=True)
    assert activation_bytes(QWEN_7B, replace(SIZE, recompute=True), trains=True) < kept / 8
    assert activation_bytes(QWEN_7B, SIZE, sp=2, trains=True) == pytest.approx(kept / 2, rel=1e-6)
    assert kept / 2 < activation_bytes(QWEN_7B, SIZE, tp=2, trains=True) < kept
    assert activation_bytes(QWEN_7B, SIZE, trains=False) < kept / 20
    roles = dict.fromkeys(GRPO, QWEN_7B)
    light = predict_memory(device_map(1, GRPO), roles, replace(SIZE, lightweight=True), 0)
    assert light[0].optimizer == 0
    share = predict_memory(
        device_map(1, GRPO), roles, replace(SIZE, vllm=True, vllm_share=0.5), 0, device_bytes=100 * GIB
    )
    assert share[0].weights + share[0].kv_cache == 50 * GIB


def test_host_roles_take_no_device_memory() -> None:
    mapping = DeviceMapping.model_validate({"actor": {"device_mesh": [0]}, "reward_model": {"device_mesh": ["cpu"]}})
    roles = (*GRPO, Role.REWARD)
    devices = build_device_map(mapping, world_size=1, roles=roles)
    with_reward = predict_memory(devices, dict.fromkeys(roles, QWEN_1_5B), SIZE, 0)
    without = predict_memory(device_map(1, GRPO), dict.fromkeys(GRPO, QWEN_1_5B), SIZE, 0)
    assert [m.peak for m in with_reward] == [m.peak for m in without]


def test_sizes_come_from_the_profile() -> None:
    base = {
        "model": {"path": "m"},
        "data": {"train_files": "d", "max_length": 6000, "batch_size": 4},
        "rollout": {"n": 8},
    }
    size = run_size(Profile.model_validate(base), element_bytes=2, vllm=False)
    assert (size.micro_tokens, size.sequences, size.padded, size.prompt_tokens) == (6000, 32, False, 5488)
    base["model"]["use_remove_padding"] = False
    base["packing"] = {"micro_batch_size": 2}
    base["algorithm"] = {"epochs": 2}
    padded = run_size(Profile.model_validate(base), element_bytes=4, vllm=True)
    assert (padded.micro_tokens, padded.padded, padded.reuses_generation) == (12000, True, False)


def test_the_advice_makes_it_fit() -> None:
    """7B on one H200 with bins of 4,096 tokens is too much; the change that is named is enough."""
    machine = assume("1x H200")
    roles = dict.fromkeys(GRPO, QWEN_7B)
    (found,) = forecast(device_map(1, GRPO), roles, SIZE, machine)
    assert not found.fits
    assert found.advice == "packing.capacity: 1536 (smaller micro-batches)"
    (after,) = forecast(device_map(1, GRPO), roles, replace(SIZE, micro_tokens=1536), machine)
    assert after.fits
    assert after.advice == ""
    (fault,) = memory_faults((found,))
    assert "update actor needs" in fault.found
    assert fault.fix == found.advice
    assert memory_faults((after,)) == []


def test_no_advice_when_nothing_helps() -> None:
    (found,) = forecast(device_map(1, GRPO), dict.fromkeys(GRPO, QWEN_7B), SIZE, assume("1x T4"))
    assert not found.fits
    assert found.advice == ""
    (fault,) = memory_faults((found,))
    assert "more and larger devices" in fault.fix


def test_equal_ranks_share_one_fault() -> None:
    found = forecast(device_map(8, GRPO), dict.fromkeys(GRPO, QWEN_7B), SIZE, assume("8x T4"))
    (fault,) = memory_faults(found)
    assert fault.where == "memory of rank 0, 1, 2, 3, 4, 5, 6, 7"


def test_floors_follow_the_formulae() -> None:
    """1,024 answers of 1,024 + 512 tokens on one H200: by hand from FLOPs and bytes."""
    machine, kind = assume("1x H200"), DEVICE_KINDS["H200"]
    floors = {f.phase: f for f in floor_times(device_map(1, GRPO), dict.fromkeys(GRPO, QWEN_7B), SIZE, machine)}
    n, tokens = QWEN_7B.matmul_params, 1024 * 1536
    attention = 7 * 28 * 28 * 128 * 1536
    assert floors["update actor"].seconds == pytest.approx((6 * n + attention) * tokens / kind.flops, rel=0.01)
    assert floors["update actor"].bound == "compute"
    step = 2 * n * 256 / kind.flops  # past the knee of 206 answers the products bound a step
    cache = 256 * 1280 * QWEN_7B.kv_elements_per_token * 2 / kind.memory_bytes_per_second
    prefill = 2 * (n - QWEN_7B.head_params) * 1024 * 1024 / kind.flops
    assert floors["generation"].seconds == pytest.approx(512 * 4 * (step + cache) + prefill, rel=0.03)
    few = {
        f.phase: f
        for f in floor_times(device_map(1, GRPO), dict.fromkeys(GRPO, QWEN_7B), replace(SIZE, sequences=1), machine)
    }
    assert few["generation"].bound == "memory"
    assert few["generation"].seconds == pytest.approx(512 * 2 * n / kind.memory_bytes_per_second, rel=0.05)


def test_more_devices_are_faster_and_critic_and_scoring_count() -> None:
    roles = (*GRPO, Role.CRITIC, Role.REFERENCE)
    shapes = dict.fromkeys(roles, QWEN_7B)
    one = {f.phase: f.seconds for f in floor_times(device_map(1, roles), shapes, SIZE, assume("1x H100"))}
    eight = {f.phase: f.seconds for f in floor_times(device_map(8, roles), shapes, SIZE, assume("8x H100"))}
    assert set(one) == {"generation", "log-probs", "update critic", "update actor"}
    assert eight["update actor"] == pytest.approx(one["update actor"] / 8)
    more = floor_times(
        device_map(1, roles), shapes, replace(SIZE, reuses_generation=False, recompute=True), assume("1x H100")
    )
    slower = {f.phase: f.seconds for f in more}
    assert slower["log-probs"] == pytest.approx(1.5 * one["log-probs"])
    assert slower["update actor"] > 1.25 * one["update actor"]


def test_no_floor_without_public_data_of_the_device() -> None:
    (device,) = assume("1x H100").devices
    unknown = Machine(devices=(replace(device, name="Banana 9000"),))
    assert floor_times(device_map(1, GRPO), dict.fromkeys(GRPO, QWEN_7B), SIZE, unknown) == ()


def test_transition_floor() -> None:
    """13.3 GB per rank over 450 GB/s; on one rank nothing moves; an aligned transition costs the copy alone."""
    kind = DEVICE_KINDS["H200"]
    train = Mesh.of(range(8), dp_shard=8, tp=1)
    gathered = received_bytes(QWEN_7B, train, interval_generation(train, 1), aligned=True)
    floor = transition_floor(gathered, QWEN_7B, kind, SIZE)
    assert floor.bound == "link"
    assert floor.seconds == pytest.approx(13.327e9 / 450e9, rel=0.001)
    assert transition_floor({0: 0}, QWEN_1_5B, kind, SIZE).seconds == 0.0
    still = transition_floor({0: 0, 1: 0}, QWEN_1_5B, kind, SIZE, tp=2)
    assert still.bound == "memory"
    assert still.seconds == pytest.approx(2 * QWEN_1_5B.num_params / kind.memory_bytes_per_second)


def test_workload_of_a_model_is_its_training_flops() -> None:
    """Six times the matrices per token plus attention; a long sequence costs more per token than a short one."""
    linear, quadratic = QWEN_7B.workload()
    assert linear == 6 * QWEN_7B.matmul_params
    assert quadratic == 7 * 28 * 28 * 128
    assert 1.0 < (linear + quadratic * 32768) / linear < 2.0
    forward = QWEN_7B.forward_flops(100, 100 * 100, head_tokens=10)
    assert forward == 2 * (28 * QWEN_7B.layer_matmul_params * 100 + QWEN_7B.head_params * 10 + 28 * 28 * 128 * 10_000)
