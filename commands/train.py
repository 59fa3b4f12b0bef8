"""`rlspeed train`: one run, on one process, or on several through torch's elastic launcher."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from .console import out, talk


def train(
    config: Annotated[str, typer.Argument(help="A YAML file, a profile's name, or a run folder (with --resume).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values that win over the file's.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration with the origin of each value.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: JSON instead of a table.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the run folder.")] = False,
    nproc_per_node: Annotated[
        int, typer.Option(min=1, help="Processes on this node; more than one is started through torch's launcher.")
    ] = 1,
) -> None:
    """Train by PPO, GRPO and kin: generate, score, update, step by step."""
    from rlspeed.config.load import load_profile
    from rlspeed.config.rules import check
    from rlspeed.errors import ConfigError

    words = list(overrides or [])
    if resume:
        words.append("run.resume=true")
        if Path(config).is_dir():
            words.append(f"run.dir={json.dumps(config)}")
    loaded = load_profile(config, words)
    world_size = int(os.environ.get("WORLD_SIZE", str(nproc_per_node)))
    faults = check(loaded, world_size)
    if dry_run:
        _print(loaded, as_json)
        if faults:
            raise ConfigError(faults)
        return
    if faults:
        raise ConfigError(faults)
    if nproc_per_node > 1 and "RANK" not in os.environ:
        from rlspeed.engine.launch import launch

        words_out = [config, *words]
        raise SystemExit(launch(words_out, nproc_per_node))
    from rlspeed.training.loop import train as run

    raise SystemExit(run(loaded))


def _print(loaded: object, as_json: bool) -> None:
    """Every value and where it comes from."""
    from rich.table import Table

    from rlspeed.config.load import LoadedProfile

    assert isinstance(loaded, LoadedProfile)
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
        table.add_row(key, json.dumps(value), origin, style="" if origin == "default" else "bold")
    out.print(table)
    talk.print("bold: not the default")
