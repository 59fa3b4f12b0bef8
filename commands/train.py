"""`rlspeed train`: one run, on one process, or on several through torch's elastic launcher."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

from .console import out, talk

if TYPE_CHECKING:
    from rlspeed.config.load import LoadedProfile
    from rlspeed.config.schema import Profile
    from rlspeed.errors import Fault


def train(
    config: Annotated[str, typer.Argument(help="A profile's name, a YAML file, or a run folder (to go on: --resume).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values that win over the file's.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print every value with its origin, then what would refuse the run (exit code 2)."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: as JSON.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the run folder.")] = False,
    profile_steps: Annotated[
        str | None,
        typer.Option(
            "--profile-steps",
            metavar="N[,N]...",
            help="Trace these training steps: files for Perfetto and pictures in profile/ of the run folder.",
        ),
    ] = None,
    nproc_per_node: Annotated[
        int, typer.Option(min=1, help="Processes on this node; more than one is started through torch's launcher.")
    ] = 1,
) -> None:
    """Train by PPO, GRPO and kin: generate, score, update, step by step.

    Several processes: --nproc-per-node N, or torchrun --nproc-per-node N -m rlspeed train ... (several nodes too).
    """
    from rlspeed.config.load import load_profile, run_folder
    from rlspeed.config.rules import check
    from rlspeed.errors import ConfigError

    words = list(overrides or [])
    if resume:
        words.append("run.resume=true")
        if run_folder(config) is not None:
            words.append(f"run.dir={json.dumps(config)}")
    if profile_steps is not None:
        words.append(f"run.profile_steps=[{profile_steps}]")
    if as_json and not dry_run:
        raise ConfigError("--json belongs to --dry-run")
    loaded = load_profile(config, words)
    world_size = _world_size(nproc_per_node)
    faults = [*check(loaded, world_size), *_device_faults(loaded.profile, world_size)]
    if dry_run:
        _print(loaded, as_json=as_json)
    if faults:
        raise ConfigError(faults)
    if dry_run:
        return
    if nproc_per_node > 1 and "RANK" not in os.environ:
        from rlspeed.engine.launch import launch

        raise typer.Exit(launch([config, *words], nproc_per_node))
    from rlspeed.training.loop import train as run

    raise typer.Exit(run(loaded))


def _world_size(nproc_per_node: int) -> int:
    """Processes of the run: torchrun's number, else the option's.

    Raises:
        ConfigError: both are given and differ.
    """
    from rlspeed.errors import ConfigError, Fault

    given = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
    if not given.isdigit():
        return nproc_per_node
    local = os.environ.get("LOCAL_WORLD_SIZE", given)
    if nproc_per_node > 1 and str(nproc_per_node) != local:
        found = f"{nproc_per_node}, but torchrun started {local} process(es) on this node"
        raise ConfigError(Fault(where="--nproc-per-node", found=found, fix="leave the option out under torchrun"))
    return int(given)


def _device_faults(profile: Profile, world_size: int) -> list[Fault]:
    """Faults of the device mapping; of the machine too, unless other ranks are at work on it already.

    MASTER_PORT counts where rank 0 is to open it: torchrun has opened its own, and the launcher here takes a free one.
    """
    from rlspeed.errors import RlspeedError
    from rlspeed.planning.probe import probe_machine
    from rlspeed.planning.report import inspect_profile

    try:
        report = inspect_profile(profile, probe_machine(), world_size=world_size)
    except RlspeedError as error:
        return list(error.faults)
    port = [f for f in report.faults if f.where == "MASTER_PORT"]
    if "RANK" in os.environ:
        return [*report.devices.check(), *(port if os.environ["RANK"] == "0" else [])]
    return [f for f in report.faults if f not in port]


def _print(loaded: LoadedProfile, *, as_json: bool) -> None:
    """Every value and where it comes from."""
    from rich.table import Table
    from rich.text import Text

    rows = list(loaded.leaves())
    if as_json:
        print(json.dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}, indent=1))
        return
    if not out.is_terminal:
        for key, value, origin in rows:
            print(f"{key} = {json.dumps(value)}  # {origin}")
        return
    table = Table("key", "value", "from", title=loaded.profile.name)
    for key, value, origin in rows:
        table.add_row(key, Text(json.dumps(value)), Text(origin), style="dim" if origin == "default" else "")
    out.print(table)
    talk.print("dim: the default")
