"""Checkpoints by torch.distributed.checkpoint: complete or not there at all, never half."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from rlspeed.engine.parallelize import rest
from rlspeed.engine.world import World
from rlspeed.errors import Fault, RunError
from rlspeed.training.roles import Trainable

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
STATE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Everything of a run that is not a tensor.

    step: finished training steps (the position in the data follows from it and the seed). kl_coef: the controller's
    present value. optimizer_steps: by role. policy_version: weight updates so far.
    """

    step: int
    kl_coef: float
    optimizer_steps: dict[str, int]
    policy_version: int
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleState:
    """A role whose state is saved, and the ranks that have it; both None on other ranks, which pass it over."""

    members: World | None
    role: Trainable | None


def optimizer_steps(world: World, roles: Mapping[str, RoleState]) -> dict[str, int]:
    """Steps of each role's optimizer, on every rank: the rank that writes may lack a role. Every rank calls it."""
    own = {name: state.role.optimizer.steps_done for name, state in roles.items() if state.role is not None}
    return {name: steps for part in reversed(world.gather_objects(own)) for name, steps in part.items()}


def step_folder(run_dir: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` steps."""
    return run_dir / FOLDER / f"step_{step:08d}"


def save(run_dir: Path, world: World, roles: Mapping[str, RoleState], progress: Progress, *, keep: int) -> Path:
    """Write the state after `progress.step` steps, then drop all but the last `keep` checkpoints.

    All ranks call it. Files go to a hidden folder that is renamed when every rank has finished and the manifest (sizes
    of all files) is on disk, so a killed or failed save leaves the earlier checkpoints as they were.

    Raises:
        RunError: a file could not be written (disk full, say), on any rank.
    """
    final = step_folder(run_dir, progress.step)
    if world.broadcast_object(final.exists()):
        return final
    writing = final.with_name(f".writing-{final.name}")
    if world.is_main:
        shutil.rmtree(writing, ignore_errors=True)
    world.barrier()
    problem = ""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            _write(writing, world, roles, progress)
    except (Exception, CheckpointException) as error:  # whatever failed on one rank must stop all ranks with a message
        problem = f"{type(error).__name__}: {_root_cause(error)}"
    problems = [f"rank {r}: {p}" for r, p in enumerate(world.gather_objects(problem)) if p]
    if not problems and world.is_main:
        try:
            _seal(writing, final, keep)
        except OSError as error:
            problems = [f"rank 0: {type(error).__name__}: {error}"]
    problems = world.broadcast_object(problems)
    if problems:
        # measured before the clean-up: the writer of tensors hides the reason of a failed write
        free = shutil.disk_usage(run_dir).free
        if world.is_main:
            shutil.rmtree(writing, ignore_errors=True)
        raise RunError(
            Fault(
                where=str(final),
                found=f"not written: {'; '.join(problems)} ({free / 1e6:,.1f} MB free on this file system)",
                fix=f"free space or choose another run.dir, then go on with --resume; {_last_word(run_dir)}",
            )
        )
    return final


def _write(writing: Path, world: World, roles: Mapping[str, RoleState], progress: Progress) -> None:
    """This rank's files."""
    writing.mkdir(parents=True, exist_ok=True)
    for name, state in roles.items():
        if state.role is not None and state.members is not None:
            group, alone = state.members.members, state.members.size == 1
            dcp.save(_tensors(state.role), checkpoint_id=writing / name, process_group=group, no_dist=alone)
    (writing / f"rng_{world.rank}.json").write_text(json.dumps(_rng_state()))
    if world.is_main:
        body = {field: getattr(progress, field) for field in Progress.__dataclass_fields__}
        (writing / STATE).write_text(json.dumps({**body, "roles": sorted(roles), "world_size": world.size}, indent=2))


def _seal(writing: Path, final: Path, keep: int) -> None:
    """Manifest, fsync, rename, `last` link, and only then the removal of old ones."""
    sizes = {str(p.relative_to(writing)): p.stat().st_size for p in sorted(writing.rglob("*")) if p.is_file()}
    (writing / MANIFEST).write_text(json.dumps(sizes, indent=2))
    for path in writing.rglob("*"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    os.replace(writing, final)
    link = final.parent / "last"
    fresh = final.parent / ".last"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(final.name)
    os.replace(fresh, link)
    for old in sorted(final.parent.glob("step_*"))[:-keep]:
        shutil.rmtree(old)


def find_last(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, and one sentence for each newer one that is not complete."""
    skipped: list[str] = []
    for folder in sorted((run_dir / FOLDER).glob("step_*"), reverse=True):
        problem = _incomplete(folder)
        if problem is None:
            return folder, skipped
        skipped.append(f"{folder.name} skipped: {problem}")
    return None, skipped


def _incomplete(folder: Path) -> str | None:
    """Why the folder is no complete checkpoint, None when it is one."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())
        json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, written were {size}"
    return None


def load(folder: Path, world: World, roles: Mapping[str, RoleState]) -> Progress:
    """Read a complete checkpoint into the live models and optimizers, in place.

    Raises:
        RunError: roles or parameters that are not in it, or files that cannot be read.
    """
    state = json.loads((folder / STATE).read_text())
    missing = sorted(set(roles) - set(state["roles"]))
    if missing:
        raise RunError(
            Fault(
                where=str(folder),
                found=f"no state of {', '.join(missing)}",
                allowed=f"roles {', '.join(state['roles'])}",
                fix="resume with the algorithm that the run was started with",
            )
        )
    for name, own in roles.items():
        role, members = own.role, own.members
        if role is None or members is None:
            continue
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                group, alone = members.members, members.size == 1
                dcp.load(_tensors(role), checkpoint_id=folder / name, process_group=group, no_dist=alone)
        except (Exception, CheckpointException) as error:
            raise RunError(
                Fault(
                    where=str(folder / name),
                    found=f"{type(error).__name__}: {_root_cause(error)}",
                    fix="resume with the same model and optimizer settings, or start a new run",
                )
            ) from error
        role.optimizer.steps_done = state["optimizer_steps"][name]
    rng = folder / f"rng_{world.rank}.json"
    if rng.exists():
        _set_rng_state(json.loads(rng.read_text()))
    return Progress(**{field: state[field] for field in Progress.__dataclass_fields__})


def _tensors(role: Trainable) -> dict[str, Any]:
    """All tensors of a role by flat name; the live ones, so that loading writes into them."""
    role.wake()
    rest(role.model)
    out: dict[str, Any] = {f"model.{n}": p.detach() for n, p in role.model.named_parameters()}
    out.update({f"optim.{n}": t for n, t in role.optimizer.state_tensors().items()})
    return out


def _rng_state() -> dict[str, Any]:
    """States of every random generator in use, as JSON."""
    kind, keys, pos, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    out: dict[str, Any] = {
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "numpy": [kind, np.asarray(keys).tolist(), pos, has_gauss, cached],
        "python": [version, list(internal), gauss],
    }
    if torch.cuda.is_available():
        out["cuda"] = base64.b64encode(torch.cuda.get_rng_state().numpy().tobytes()).decode()
    return out


def _set_rng_state(state: dict[str, Any]) -> None:
    """Undo `_rng_state`."""
    torch.set_rng_state(_bytes(state["torch"]))
    kind, keys, pos, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), pos, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _root_cause(error: BaseException) -> str:
    """The innermost reason, since the checkpoint library wraps it."""
    while error.__cause__ is not None:
        error = error.__cause__
    inner = getattr(error, "failures", None)
    if inner:
        first = next(iter(inner.values()))
        return str(first[0] if isinstance(first, tuple) else first)
    return str(error) or type(error).__name__


def _last_word(run_dir: Path) -> str:
    last, _ = find_last(run_dir)
    return f"the last good checkpoint is {last}" if last else "there is no earlier checkpoint"
