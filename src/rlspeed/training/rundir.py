"""The run folder: made once by rank 0, refused when it already holds a run, cut back to the checkpoint on resume."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from rlspeed.engine.world import World
from rlspeed.errors import ConfigError, Fault

RESOLVED = "resolved.yaml"
SHARED_SECONDS = 10.0


def open_run_dir(world: World, name: str, wanted: str | None, *, resume: bool) -> Path:
    """The run's folder on all ranks: `wanted`, or runs/NAME-DATE-TIME.

    Raises:
        ConfigError: the folder already holds a run and resume is off, cannot be made, or resume is on without run.dir;
            or a rank does not see it.
    """
    fault: Fault | None = None
    path = ""
    if world.is_main:
        try:
            path = str(_open(name, wanted, resume=resume))
        except OSError as error:
            fault = Fault(
                where="run.dir", found=f"{wanted or 'runs'}: {error}", fix="choose a folder that can be written"
            )
        except ConfigError as error:
            fault = error.faults[0]
    path, fault = world.broadcast_object((path, fault))
    if fault is not None:
        raise ConfigError(fault)
    blind = [rank for rank, seen in enumerate(world.gather_objects(_appears(Path(path)))) if not seen]
    if blind:
        found = f"rank 0 made {path}, but {'rank' if len(blind) == 1 else 'ranks'} {', '.join(map(str, blind))}"
        fix = "a full path on a file system that all nodes share: every rank writes its part of a checkpoint"
        raise ConfigError(Fault(where="run.dir", found=f"{found} cannot see it", fix=fix))
    return Path(path)


def _appears(folder: Path) -> bool:
    """Whether this rank sees the folder; a network file system may take a while."""
    end = time.monotonic() + SHARED_SECONDS
    while not folder.is_dir():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _open(name: str, wanted: str | None, *, resume: bool) -> Path:
    if wanted is None:
        if resume:
            raise ConfigError(
                Fault(where="run.resume", found="true without run.dir", fix="name the folder of the run to go on with")
            )
        base = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        path, count = base, 1
        while path.exists():
            count += 1
            path = base.with_name(f"{base.name}-{count}")
    else:
        path = Path(wanted)
    if (path / RESOLVED).exists() and not resume:
        raise ConfigError(
            Fault(
                where="run.dir",
                found=f"{path} already holds a run",
                fix="go on with it (--resume), or choose another folder",
            )
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name in the same folder, wait for the disk, then rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object per line, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))
