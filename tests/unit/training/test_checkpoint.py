"""Checkpoints: complete or not there, the last good one always found, faults said."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from rlspeed.config.schema import Optimizer
from rlspeed.engine.world import World
from rlspeed.errors import RunError
from rlspeed.training import checkpoint
from rlspeed.training.checkpoint import Progress, RoleState
from rlspeed.training.optim import MasterAdamW
from rlspeed.training.roles import Trainable

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), mesh=None)


def trained(seed: int, dtype: torch.dtype = torch.float32, width: int = 8) -> Trainable:
    """A small model after two optimizer steps, so that moments are not zero."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1)).to(dtype)
    role = Trainable(model, MasterAdamW(model, Optimizer(lr=1e-2), total_steps=9))
    for _ in range(2):
        role.optimizer.zero_grad()
        model(torch.randn(3, 4, dtype=dtype)).float().sum().backward()
        role.optimizer.step()
    return role


def saved(role: Trainable) -> RoleState:
    """A role on this rank."""
    return RoleState(members=ALONE, role=role)


def progress(step: int) -> Progress:
    """What else is saved."""
    return Progress(step=step, kl_coef=0.25, optimizer_steps={"actor": 2}, policy_version=step, total_tokens=7)


def tensors(role: Trainable) -> dict[str, torch.Tensor]:
    """All tensors of a role, copied."""
    params = {f"model.{n}": p.detach().clone() for n, p in role.model.named_parameters()}
    return params | {n: t.clone() for n, t in role.optimizer.state_tensors().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    """life-04, life-05: weights, masters, moments, counters and random states, none of them trivial."""
    role = trained(0, dtype)
    want = tensors(role)
    assert all(float(t.float().abs().sum()) > 0 for t in want.values())
    folder = checkpoint.save(tmp_path, ALONE, {"actor": saved(role)}, progress(3), keep=2)
    drawn = torch.rand(3)
    other = trained(5, dtype)
    got = checkpoint.load(folder, ALONE, {"actor": saved(other)})
    assert got == progress(3)
    assert other.optimizer.steps_done == 2
    assert all(torch.equal(t, want[n]) for n, t in tensors(other).items())
    assert torch.equal(torch.rand(3), drawn)


def test_keeps_the_last_and_links_it(tmp_path: Path) -> None:
    role = trained(0)
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, ALONE, {"actor": saved(role)}, progress(step), keep=2)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["last", "step_00000002", "step_00000003"]
    assert (tmp_path / "checkpoints" / "last").resolve().name == "step_00000003"


@pytest.mark.parametrize("damage", ["truncate", "no state", "no manifest", "empty folder", "still writing"])
def test_incomplete_is_skipped_and_said(tmp_path: Path, damage: str) -> None:
    """life-06: whatever is missing from the newest folder, the one before is taken."""
    role = trained(0)
    good = checkpoint.save(tmp_path, ALONE, {"actor": saved(role)}, progress(1), keep=3)
    bad = checkpoint.save(tmp_path, ALONE, {"actor": saved(role)}, progress(2), keep=3)
    if damage == "truncate":
        victim = next((bad / "actor").glob("*.distcp"))
        victim.write_bytes(victim.read_bytes()[:-1])
    elif damage == "no state":
        (bad / "state.json").unlink()
    elif damage == "no manifest":
        (bad / "manifest.json").unlink()
    elif damage == "empty folder":
        shutil.rmtree(bad)
        bad.mkdir()
    else:
        bad.rename(bad.with_name(f".writing-{bad.name}"))
    found, skipped = checkpoint.find_last(tmp_path)
    assert found == good
    assert len(skipped) == (0 if damage == "still writing" else 1)
    assert all("step_00000002 skipped" in s for s in skipped)


def test_missing_role_and_other_shape_are_errors(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, ALONE, {"actor": saved(trained(0))}, progress(1), keep=1)
    with pytest.raises(RunError, match="no state of critic"):
        checkpoint.load(folder, ALONE, {"actor": saved(trained(0)), "critic": saved(trained(1))})
    with pytest.raises(RunError, match="same model"):
        checkpoint.load(folder, ALONE, {"actor": saved(trained(0, width=9))})


def test_full_disk_keeps_the_last_good_one(tmp_path: Path) -> None:
    """A write that fails half way (a file-size limit stands in for a full disk): said, cleaned up, nothing lost."""
    good = checkpoint.save(tmp_path, ALONE, {"actor": saved(trained(0))}, progress(1), keep=1)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(RunError) as caught:
            checkpoint.save(tmp_path, ALONE, {"actor": saved(trained(0, width=4000))}, progress(2), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old_handler)
    assert "not written" in str(caught.value)
    assert "MB free" in str(caught.value)
    assert str(good) in str(caught.value)
    assert checkpoint.find_last(tmp_path) == (good, [])
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".writing")] == []


def test_state_is_readable_json(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, ALONE, {"actor": saved(trained(0))}, progress(1), keep=1)
    assert json.loads((folder / "state.json").read_text())["kl_coef"] == 0.25
