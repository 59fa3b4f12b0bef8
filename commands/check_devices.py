"""`rlspeed check-devices`: where each role runs, what is wrong with that and what it needs, before anything starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import out

if TYPE_CHECKING:
    from rlspeed.config.device_schema import DeviceMapping
    from rlspeed.planning.report import Report


def check_devices(
    mapping: Annotated[Path, typer.Argument(help="YAML file with the devices of each role.")],
    trainer: Annotated[
        str | None,
        typer.Argument(help="The run's YAML file or profile: adds checks of model, precision, memory and time."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values that win over the run's file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the bytes per pair of ranks of the weight transition.")
    ] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Start the process groups and try each (NCCL on GPUs, gloo on a CPU).")
    ] = False,
    smoke_timeout: Annotated[float, typer.Option(help="Seconds before a rank counts as missing in --smoke.")] = 120.0,
    assume: Annotated[
        str | None, typer.Option(help="Judge for a machine that is not here: '8x A100-80GB', '2x8x H100' (nodes).")
    ] = None,
) -> None:
    """Check a device mapping and predict memory and time, without starting anything.

    Exit code 0: nothing to mend; 1: problems, all of them listed; 2: a file that cannot be read.
    """
    from rlspeed.config.load import load_device_mapping, load_profile
    from rlspeed.planning.machine import assume as assume_machine
    from rlspeed.planning.probe import probe_machine
    from rlspeed.planning.report import inspect_profile, inspect_run

    from .device_picture import show_report

    devices = load_device_mapping(mapping)
    machine = assume_machine(assume) if assume else probe_machine()
    world = os.environ.get("WORLD_SIZE", "")
    world_size = int(world) if world.isdigit() else None
    if trainer is None:
        report = inspect_run(devices, machine, world_size=world_size)
    else:
        words = [f"device_mapping_file={json.dumps(str(mapping))}", *(overrides or [])]
        profile = load_profile(trainer, words).profile.model_copy(update={"devices": devices})
        report = inspect_profile(profile, machine, world_size=world_size)
    tried = _smoke(devices, report, smoke_timeout) if smoke and not report.devices.check() else None
    if as_json:
        typer.echo(json.dumps({**report.as_json(), "smoke": tried}, indent=2))
    else:
        show_report(out, report, with_plan=plan, smoke=tried)
    if report.problems or (tried is not None and not tried["ok"]):
        raise typer.Exit(1)


def _smoke(mapping: DeviceMapping, report: Report, timeout_seconds: float) -> dict[str, Any]:
    """Try the process groups on this machine, on its GPUs when there are enough of them."""
    from rlspeed.engine.smoke import run_smoke
    from rlspeed.errors import DeviceError
    from rlspeed.planning.devices import build_device_map

    devices = report.devices
    needed = len(devices.device_ranks)
    cuda = not report.machine.assumed and report.machine.num_devices >= needed > 0
    cuda = cuda and any(p.device == "cuda" for p in devices.roles.values())
    if not cuda:
        devices = build_device_map(
            mapping,
            world_size=devices.world_size,
            use_vllm=report.vllm,
            use_cpu=True,
            roles=tuple(devices.roles),
        )
    try:
        result = run_smoke(devices, cuda=cuda, timeout_seconds=timeout_seconds)
    except DeviceError as error:
        faults = [{"where": f.where, "found": f.found, "fix": f.fix} for f in error.faults]
        return {"ok": False, "backend": "nccl" if cuda else "gloo", "problems": faults}
    return {
        "ok": True,
        "backend": result.backend,
        "groups": list(result.groups),
        "moved_bytes": result.moved_bytes,
        "seconds": round(result.seconds, 2),
    }
