"""`rlspeed check-devices`: where each role runs, what is wrong with that and what it needs, before anything starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import yaml
from pydantic import BaseModel, ValidationError

from rlspeed.config.device_schema import DeviceMapping
from rlspeed.config.schema import Profile
from rlspeed.errors import ConfigError, DeviceError, Fault
from rlspeed.planning.devices import Role, build_device_map
from rlspeed.planning.machine import assume as assume_machine
from rlspeed.planning.probe import probe_machine, read_shape
from rlspeed.planning.report import Report, inspect_run, model_paths
from rlspeed.planning.shape import ModelShape

from .device_picture import show_report

Model = TypeVar("Model", bound=BaseModel)


def check_devices(
    mapping: Annotated[Path, typer.Argument(help="YAML file with the devices of each role.")],
    trainer: Annotated[
        Path | None, typer.Argument(help="The run's YAML file: adds checks of model, precision, memory and time.")
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
    machine = assume_machine(assume) if assume else probe_machine()
    devices = _read(mapping, DeviceMapping)
    profile = None
    shapes: dict[Role, ModelShape] = {}
    unknown: list[str] = []
    if trainer is not None:
        profile = _read(trainer, Profile).model_copy(update={"devices": devices})
        shapes, unknown = _shapes(profile)
    world = os.environ.get("WORLD_SIZE", "")
    report = inspect_run(
        devices, machine, profile=profile, shapes=shapes, world_size=int(world) if world.isdigit() else None
    )
    tried = None
    if smoke and not report.devices.check():
        tried = _smoke(devices, report, smoke_timeout)
    if as_json:
        text = {**report.as_json(), "models_not_found": unknown, "smoke": tried}
        typer.echo(json.dumps(text, indent=2))
    else:
        show_report(report, unknown=unknown, with_plan=plan, smoke=tried)
    if report.problems or (tried is not None and not tried["ok"]):
        raise typer.Exit(1)


def _read(path: Path, model: type[Model]) -> Model:
    """A YAML file as a model.

    Raises:
        ConfigError: no such file, not YAML, or keys and values that the model does not take (all are named).
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Fault(where=str(path), found=f"cannot be read: {error}")) from error
    except yaml.YAMLError as error:
        raise ConfigError(Fault(where=str(path), found=f"not YAML: {error}")) from error
    try:
        return model.model_validate({} if content is None else content)
    except ValidationError as error:
        faults = [
            Fault(where=f"{path}: {'.'.join(map(str, e['loc']))}", found=f"{e.get('input')!r}: {e['msg']}")
            for e in error.errors()
        ]
        raise ConfigError(faults) from error


def _shapes(profile: Profile) -> tuple[dict[Role, ModelShape], list[str]]:
    """Sizes of each role's model, and the paths of those that are not here."""
    found: dict[str, ModelShape | None] = {}
    shapes: dict[Role, ModelShape] = {}
    for role, path in model_paths(profile).items():
        if path not in found:
            found[path] = read_shape(path)
        shape = found[path]
        if shape is not None:
            shapes[role] = shape.with_head("value" if role is Role.CRITIC else "score" if role is Role.REWARD else "lm")
    return shapes, [path for path, shape in found.items() if shape is None]


def _smoke(mapping: DeviceMapping, report: Report, timeout_seconds: float) -> dict[str, Any]:
    """Try the process groups on this machine, on its GPUs when there are enough of them."""
    from rlspeed.engine.smoke import run_smoke

    needed = len(report.devices.device_ranks)
    cuda = not report.machine.assumed and report.machine.num_devices >= needed > 0
    cuda = cuda and any(p.device == "cuda" for p in report.devices.roles.values())
    devices = report.devices
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
