"""What a model directory may not be: an architecture that mixes sequences, quantised weights, an adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rlspeed.errors import ConfigError
from rlspeed.models.build import SUPPORTED, load_causal_lm, load_model_config

HYBRID = ["mamba2", "jamba", "lfm2", "qwen3_next", "recurrent_gemma"]


def written(folder: Path, **config: Any) -> str:
    """A directory with a config.json of these values."""
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("kind", [*HYBRID, "gpt2", "mixtral", "gemma3_text"])
def test_architectures_that_do_not_take_boundaries_are_refused(kind: str, tmp_path: Path) -> None:
    """pack-03, pack-10: by the architecture's name, before a weight is read; also those with recurrent state."""
    with pytest.raises(ConfigError) as caught:
        load_model_config(written(tmp_path, model_type=kind))
    (fault,) = caught.value.faults
    assert fault.where == "model.path"
    assert repr(kind) in fault.found
    assert fault.allowed == ", ".join(SUPPORTED)


def test_quantised_weights_are_refused(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """sync-13: for every role, since all are loaded here; the method is named."""
    config = json.loads((tiny_models["llama"] / "config.json").read_text())
    folder = written(tmp_path, **config, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match="weights quantised by fp8"):
        load_causal_lm(folder, dtype=torch.float32, attention="packed")


def test_an_adapter_is_refused(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """sync-08: with peft it would be put into the model, without peft left out; either way not what was asked for."""
    folder = shutil.copytree(tiny_models["qwen2"], tmp_path / "model")
    load_model_config(str(folder))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="adapters are not offered") as caught:
        load_causal_lm(str(folder), dtype=torch.float32, attention="packed")
    assert len(caught.value.faults) == 1
