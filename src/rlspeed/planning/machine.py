"""What a machine offers, as plain data: its devices, memory, packages and settings. Nothing here looks at the machine.

`probe.py` fills a `Machine` from the one it runs on; `assume` makes one from a table of public device data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlspeed.config.device_schema import MOST_RANKS
from rlspeed.errors import ConfigError, Fault

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """Public data of one GPU model.

    flops: dense half-precision tensor FLOP/s (bf16 where it has it, else fp16). memory_bytes_per_second: of its own
    memory.
    link_bytes_per_second: to a neighbour in the node, one way (NVLink, or PCIe). capability: CUDA compute capability.
    """

    memory_bytes: int
    flops: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    capability: tuple[int, int]


def _kind(mib: int, tflops: float, gb_memory: float, gb_link: float, capability: tuple[int, int]) -> DeviceKind:
    return DeviceKind(
        memory_bytes=mib * MIB,
        flops=tflops * 1e12,
        memory_bytes_per_second=gb_memory * 1e9,
        link_bytes_per_second=gb_link * 1e9,
        capability=capability,
    )


# vendors' data sheets: MiB, dense TFLOP/s, GB/s of memory, GB/s of the link one way
DEVICE_KINDS: Mapping[str, DeviceKind] = {
    "B300": _kind(275_040, 2250, 8000, 900, (10, 3)),
    "B200": _kind(183_359, 2250, 8000, 900, (10, 0)),
    "H200": _kind(143_771, 989, 4800, 450, (9, 0)),
    "H100-80GB": _kind(81_559, 989, 3350, 450, (9, 0)),
    "H100-PCIE": _kind(81_559, 756, 2000, 64, (9, 0)),
    "H800": _kind(81_559, 989, 3350, 200, (9, 0)),
    "H20": _kind(97_871, 148, 4000, 450, (9, 0)),
    "A100-80GB": _kind(81_920, 312, 2039, 300, (8, 0)),
    "A100-40GB": _kind(40_960, 312, 1555, 300, (8, 0)),
    "A800": _kind(81_920, 312, 2039, 200, (8, 0)),
    "L40S": _kind(46_068, 362, 864, 32, (8, 9)),
    "L4": _kind(23_034, 121, 300, 32, (8, 9)),
    "A10": _kind(23_028, 125, 600, 32, (8, 6)),
    "RTX-A6000": _kind(49_140, 155, 768, 32, (8, 6)),
    "RTX-3090": _kind(24_576, 71, 936, 32, (8, 6)),
    "RTX-4090": _kind(24_564, 165, 1008, 32, (8, 9)),
    "RTX-5090": _kind(32_607, 209, 1792, 64, (12, 0)),
    "V100-32GB": _kind(32_768, 125, 900, 150, (7, 0)),
    "V100-16GB": _kind(16_384, 125, 900, 150, (7, 0)),
    "T4": _kind(15_360, 65, 320, 16, (7, 5)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device that CUDA would show, in the order of CUDA_VISIBLE_DEVICES.

    entry: how the variable names it (the index where it is unset). free_bytes: memory that nobody holds now. mig: it
    is a slice of a GPU. holders: (pid, bytes) of processes that hold its memory.
    """

    entry: str
    name: str
    memory_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    uuid: str = ""
    mig: bool = False
    holders: tuple[tuple[int, int], ...] = ()

    @property
    def kind(self) -> DeviceKind | None:
        """Public data of the model; None when it is not in the table."""
        found = kind_name(self.name)
        return DEVICE_KINDS[found] if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one node offers.

    devices: the visible ones. visible: CUDA_VISIBLE_DEVICES as it was (None: unset). faults: what is wrong with that
    variable.
    packages: name to version, of the optional packages that are installed. env: variables that matter to torch, NCCL
    and vLLM.
    busy_ports: ports that somebody listens on, among those that the run would use. assumed: made up, not looked at.
    """

    devices: tuple[Device, ...]
    visible: str | None = None
    faults: tuple[Fault, ...] = ()
    host_memory_bytes: int | None = None
    host_free_bytes: int | None = None
    shm_bytes: int | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    busy_ports: tuple[int, ...] = ()
    assumed: bool = False
    nodes: int = 1

    @property
    def num_devices(self) -> int:
        """Devices of one node."""
        return len(self.devices)

    def device(self, rank: int) -> Device | None:
        """The device of a global rank: its node's device with the same position; None when there is none.

        All nodes are taken to be like this one.
        """
        position = rank % self.num_devices if self.num_devices and self.nodes > 1 else rank
        return self.devices[position] if position < self.num_devices else None


def assume(text: str) -> Machine:
    """A machine that is not here, from `8x A100-80GB`, `2x8x H100` (nodes x devices) or `4x A100-80GB + 4x H100`.

    Raises:
        ConfigError: not of that form, or a model that is not in the table.
    """
    devices: list[Device] = []
    nodes, faults = 1, []
    for part in re.split(r"\s*[+,]\s*", text.strip()):
        match = re.fullmatch(r"(?:(\d{1,5})\s*x\s*)?(\d{1,5})\s*x\s*(\S.*)", part, flags=re.IGNORECASE)
        name = kind_name(match[3]) if match else None
        if match is None or name is None:
            fix = "write for instance --assume '8x A100-80GB'"
            faults.append(
                Fault(where="--assume", found=repr(part), allowed=f"COUNTx {', '.join(DEVICE_KINDS)}", fix=fix)
            )
            continue
        nodes = max(nodes, int(match[1] or 1))
        kind = DEVICE_KINDS[name]
        for _ in range(int(match[2])):
            entry = str(len(devices))
            size = kind.memory_bytes
            devices.append(
                Device(entry=entry, name=name, memory_bytes=size, free_bytes=size, capability=kind.capability)
            )
    if len(devices) * nodes > MOST_RANKS:
        found = f"{len(devices) * nodes:,} devices"
        faults.append(Fault(where="--assume", found=found, allowed=f"at most {MOST_RANKS:,}"))
    if faults:
        raise ConfigError(faults)
    return Machine(devices=tuple(devices), assumed=True, nodes=nodes)


def kind_name(text: str) -> str | None:
    """The table's name of a GPU as users and drivers write it (`NVIDIA A100-SXM4-80GB`, `h100`); None when unknown."""
    words = {re.sub(r"^RTX(?=.)", "", w) for w in re.split(r"[^A-Z0-9]+", text.upper())}
    words |= {"A10"} if "A10G" in words else set()
    for name in DEVICE_KINDS:
        model, *rest = name.removeprefix("RTX-").split("-")
        sizes = {w for w in words if re.fullmatch(r"\d+GB?", w)}
        if model not in words or ("PCIE" in rest) != (model == "H100" and "PCIE" in words):
            continue
        if not sizes or not rest or rest == ["PCIE"] or {w.rstrip("B") for w in sizes} & {r.rstrip("B") for r in rest}:
            return name
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """CUDA_VISIBLE_DEVICES read as the driver reads it: which devices, in which order.

    form: how the entries name devices. positions: index into the list of physical devices, None where that list is
    not known.
    """

    form: Literal["unset", "none", "index", "uuid", "mig"]
    entries: tuple[str, ...]
    positions: tuple[int | None, ...]
    faults: tuple[Fault, ...]


def parse_visible(value: str | None, uuids: Sequence[str] | None) -> Visible:
    """Read CUDA_VISIBLE_DEVICES.

    value: None when unset. uuids: of all physical devices (GPUs, then MIG slices) in the driver's order; None when
    unknown. Unset shows all GPUs; empty and -1 show none; the driver stops at the first entry that it cannot use, so
    what comes after it is hidden too (a fault here).

    Source: CUDA C++ Programming Guide, environment variables.
    """
    gpus = None if uuids is None else [u for u in uuids if not u.startswith("MIG-")]
    if value is None:
        count = len(gpus or ())
        return Visible(form="unset", entries=tuple(map(str, range(count))), positions=tuple(range(count)), faults=())
    entries = [e.strip() for e in value.split(",")]
    if value.strip() == "" or entries[0] in ("-1", "NoDevFiles"):
        return Visible(form="none", entries=(), positions=(), faults=())
    good: list[str] = []
    positions: list[int | None] = []
    faults: list[Fault] = []
    for number, entry in enumerate(entries):
        position, problem = _resolve(entry, gpus, uuids)
        if problem is None and (entry in good or (position is not None and position in positions)):
            problem = "names a device for the second time"
        if problem is not None:
            hidden = len(entries) - number - 1
            tail = f"; CUDA stops there and hides the {hidden} after it" if hidden else ""
            fix = "list each device once, by index or by UUID from nvidia-smi -L"
            faults.append(Fault(where="CUDA_VISIBLE_DEVICES", found=f"{value!r}: {entry!r} {problem}{tail}", fix=fix))
            break
        good.append(entry)
        positions.append(position)
    forms = {_form(e) for e in good}
    if len(forms) > 1:
        found = f"{value!r} mixes {' and '.join(sorted(forms))} entries"
        fix = "use one form: indices, GPU UUIDs or MIG UUIDs"
        faults.append(Fault(where="CUDA_VISIBLE_DEVICES", found=found, fix=fix))
    form: Literal["none", "index", "uuid", "mig"] = "none"
    if good:
        form = "mig" if "mig" in forms else "uuid" if "uuid" in forms else "index"
    return Visible(form=form, entries=tuple(good), positions=tuple(positions), faults=tuple(faults))


def _form(entry: str) -> Literal["index", "uuid", "mig"]:
    if entry.startswith("MIG-"):
        return "mig"
    return "uuid" if entry.startswith("GPU-") else "index"


def _resolve(entry: str, gpus: Sequence[str] | None, uuids: Sequence[str] | None) -> tuple[int | None, str | None]:
    """(position among the physical devices, what is wrong); a UUID may be cut short while it stays unique."""
    if _form(entry) == "index":
        if not re.fullmatch(r"\d+", entry):
            return None, "is neither an index nor a UUID"
        if gpus is not None and int(entry) >= len(gpus):
            return None, f"is out of range, the machine has {len(gpus)} GPU(s)"
        return int(entry), None
    if uuids is None:
        return None, None
    hits = [i for i, u in enumerate(uuids) if u.startswith(entry)]
    if len(hits) == 1:
        return hits[0], None
    return None, "is no device of this machine" if not hits else f"fits {len(hits)} devices"
