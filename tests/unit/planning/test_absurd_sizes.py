"""Numbers that no machine and no model has are refused before a list of that length is made (fuzz tests found them)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlspeed.config.load import load_device_mapping
from rlspeed.errors import ConfigError
from rlspeed.planning.machine import assume
from rlspeed.planning.probe import read_shape

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "vocab_size": 512,
}


@pytest.mark.parametrize("text", ["999999999x H100", "99999x99999x H100", "70000x H100", "99999999999x2x T4"])
def test_machines(text: str) -> None:
    with pytest.raises(ConfigError, match="--assume"):
        assume(text)


@pytest.mark.parametrize("line", ["device_mesh: [1000000000]", "tensor_parallel_size: 1000000000000"])
def test_device_maps(line: str, tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text(f"critic:\n  {line}\n")
    with pytest.raises(ConfigError, match=r"map\.yaml:2"):
        load_device_mapping(tmp_path / "map.yaml")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", True),
        ("num_hidden_layers", 10**12),
        ("hidden_size", -64),
        ("num_key_value_heads", "2"),
        ("head_dim", 1.5),
    ],
)
def test_models(key: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {key: value}))
    with pytest.raises(ConfigError, match=f"config.json: {key}"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize("content", [b"[]", b"null", b"\xff{}", b"[" * 100_000])
def test_files_that_are_no_json_object(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_shape(str(tmp_path))
