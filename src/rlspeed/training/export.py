"""The trained actor as a Hugging Face directory, whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from rlspeed.engine.precision import Precision
from rlspeed.engine.world import World
from rlspeed.models.build import save_hf
from rlspeed.training.grid import Site
from rlspeed.training.roles import Roles


def export_hf(roles: Roles, tokenizer: Any, folder: Path, world: World, home: Site, precision: Precision) -> Path:
    """Gather the actor's weights and write them on the first rank of `home`, its site; every rank calls it."""
    writes = world.rank == home.first
    weights = roles.actor.whole_weights(keep=writes) if home.here else {}
    if writes:
        writing = folder.with_name(f".{folder.name}.writing")
        shutil.rmtree(writing, ignore_errors=True)
        save_hf(roles.causal_lm, weights, tokenizer, writing, precision.compute)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(writing, folder)
    world.barrier()
    return folder
