"""The run folder is one folder for all ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlspeed.errors import ConfigError
from rlspeed.training import rundir


def test_a_folder_that_another_node_does_not_see_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """dev-22: rank 0 makes the folder; ranks 1 and 2 are on a node with a disk of its own."""
    monkeypatch.setattr(rundir, "SHARED_SECONDS", 0.0)
    other = tmp_path / "other"
    world: Any = SimpleNamespace(
        is_main=True,
        broadcast_object=lambda value: value,
        gather_objects=lambda mine: [mine, rundir._appears(other), rundir._appears(other)],
    )
    with pytest.raises(ConfigError, match=r"run.dir: rank 0 made .*run, but ranks 1, 2 cannot see it"):
        rundir.open_run_dir(world, "run", str(tmp_path / "run"), resume=False)
    other.mkdir()
    assert rundir.open_run_dir(world, "run", str(tmp_path / "run"), resume=False) == tmp_path / "run"
