"""CUDA_VISIBLE_DEVICES in all its forms, nvidia-smi's text, and machines that are not here."""

from __future__ import annotations

import pytest

from rlspeed.errors import ConfigError
from rlspeed.planning.machine import GIB, MIB, assume, kind_name, parse_visible
from rlspeed.planning.probe import SmiOutput, machine_of, port_is_free, probe_machine

GPUS = ["GPU-8932f937-aaaa", "GPU-11112222-bbbb", "GPU-11113333-cccc", "GPU-99990000-dddd"]
MIGS = ["MIG-4c60d78c-eeee", "MIG-5d71e89d-ffff"]


@pytest.mark.parametrize(
    ("value", "form", "positions"),
    [
        (None, "unset", (0, 1, 2, 3)),
        ("", "none", ()),
        ("  ", "none", ()),
        ("-1", "none", ()),
        ("NoDevFiles", "none", ()),
        ("0,1", "index", (0, 1)),
        ("3,1, 0", "index", (3, 1, 0)),
        ("GPU-8932f937-aaaa,GPU-99990000-dddd", "uuid", (0, 3)),
        ("GPU-9999", "uuid", (3,)),
        ("MIG-5d71e89d-ffff", "mig", (5,)),
    ],
)
def test_dev_01_forms(value: str | None, form: str, positions: tuple[int, ...]) -> None:
    """dev-01: numbers, UUIDs, MIG names, one logical device each."""
    visible = parse_visible(value, GPUS + MIGS)
    assert (visible.form, visible.positions, visible.faults) == (form, positions, ())


@pytest.mark.parametrize(
    ("value", "shown", "words"),
    [
        ("0,4,1", 1, "out of range, the machine has 4 GPU(s); CUDA stops there and hides the 1 after it"),
        ("1,-1,0", 1, "neither an index nor a UUID"),
        ("0,0", 1, "for the second time"),
        ("GPU-8932f937-aaaa,GPU-8932", 1, "for the second time"),
        ("GPU-1111", 0, "fits 2 devices"),
        ("GPU-abcd", 0, "is no device of this machine"),
        ("cuda:0", 0, "neither an index nor a UUID"),
        ("0,GPU-11112222-bbbb", 2, "mixes index and uuid"),
    ],
)
def test_entries_that_the_driver_does_not_take(value: str, shown: int, words: str) -> None:
    visible = parse_visible(value, GPUS + MIGS)
    assert len(visible.entries) == shown
    assert len(visible.faults) == 1
    assert words in visible.faults[0].found


def test_uuids_of_an_unknown_machine_count_as_devices() -> None:
    visible = parse_visible("GPU-8932f937,MIG-4c60d78c", None)
    assert visible.entries == ("GPU-8932f937", "MIG-4c60d78c")
    assert visible.positions == (None, None)


SMI = SmiOutput(
    gpus="""\
0, GPU-8932f937-aaaa, NVIDIA H200, 143771, 143000, 9.0
1, GPU-11112222-bbbb, NVIDIA A100-SXM4-80GB, 81920, 40000, 8.0
""",
    listing="""\
GPU 0: NVIDIA H200 (UUID: GPU-8932f937-aaaa)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-11112222-bbbb)
  MIG 3g.40gb     Device  0: (UUID: MIG-4c60d78c-eeee)
  MIG 3g.40gb     Device  1: (UUID: MIG-5d71e89d-ffff)
""",
    processes="GPU-11112222-bbbb, 4711, 41000\n",
)


def test_dev_01_a_mig_slice_has_the_memory_of_the_slice() -> None:
    """dev-01: not of the whole GPU."""
    machine = machine_of(SMI, {"CUDA_VISIBLE_DEVICES": "MIG-5d71e89d-ffff"})
    (device,) = machine.devices
    assert (device.entry, device.mig, device.memory_bytes) == ("MIG-5d71e89d-ffff", True, 40 * GIB)
    assert device.name == "NVIDIA A100-SXM4-80GB MIG 3g.40gb"


def test_the_order_of_the_variable_is_the_order_of_ranks() -> None:
    machine = machine_of(SMI, {"CUDA_VISIBLE_DEVICES": "1,0", "NCCL_DEBUG": "INFO", "HOME": "/root"})
    assert [d.name for d in machine.devices] == ["NVIDIA A100-SXM4-80GB", "NVIDIA H200"]
    first = machine.device(0)
    assert first is not None
    assert (first.entry, first.capability, first.holders) == ("1", (8, 0), ((4711, 41000 * MIB),))
    assert machine.env == {"CUDA_VISIBLE_DEVICES": "1,0", "NCCL_DEBUG": "INFO"}
    assert machine.device(2) is None


def test_all_nodes_are_like_this_one() -> None:
    machine = machine_of(SMI, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    assert machine.nodes == 2
    assert machine.device(3) == machine.devices[1]


def test_a_machine_without_nvidia_smi_has_no_gpu() -> None:
    assert machine_of(SmiOutput(), {}).devices == ()
    assert machine_of(SmiOutput(gpus="Failed to initialize NVML"), {}).devices == ()


def test_this_machine_can_be_looked_at() -> None:
    """The packages and the host memory of the machine that the tests run on."""
    machine = probe_machine({"CUDA_VISIBLE_DEVICES": ""})
    assert "torch" in machine.packages
    assert machine.host_memory_bytes is not None
    assert 0 < (machine.host_free_bytes or 0) <= machine.host_memory_bytes
    assert machine.devices == ()


def test_dev_14_a_taken_port_is_seen() -> None:
    """dev-14: MASTER_PORT with a listener, and without."""
    import socket

    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not port_is_free(port)
        assert probe_machine({"MASTER_PORT": str(port)}).busy_ports == (port,)
        # the launcher's own port is no clash
        assert probe_machine({"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "x"}).busy_ports == ()
    assert port_is_free(port)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("NVIDIA H200", "H200"),
        ("h20", "H20"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10"),
        ("GTX 1080", None),
        ("NVIDIA A1000", None),
    ],
)
def test_names_of_gpus(text: str, name: str | None) -> None:
    assert kind_name(text) == name


def test_assumed_machines() -> None:
    machine = assume("8x A100-80GB")
    assert (machine.num_devices, machine.nodes, machine.assumed) == (8, 1, True)
    assert machine.devices[0].memory_bytes == 80 * GIB
    nodes = assume("2x8x h100")
    assert (nodes.num_devices, nodes.nodes) == (8, 2)
    assert nodes.device(15) is not None
    mixed = assume("2x A100-40GB + 1xT4")
    assert [d.name for d in mixed.devices] == ["A100-40GB", "A100-40GB", "T4"]


def test_assumptions_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError) as caught:
        assume("8x Banana + H100")
    assert len(caught.value.faults) == 2
