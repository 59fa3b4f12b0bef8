"""Whatever stands in the files and words: a profile that round-trips, or a ConfigError; never anything else."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rlspeed.config.keys import all_keys
from rlspeed.config.load import load_profile
from rlspeed.config.rules import check
from rlspeed.errors import ConfigError

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["cpu", "ppo", "grpo", "bf16", "1e-6", "~", "<<", "*a", "&a", "!!int", "a:b", "builtin:math"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
KEYS = st.one_of(
    st.sampled_from(all_keys()),
    st.sampled_from(["profile", "device_mapping_file", "reward.functions.0.path", "devices.actor.vllm_config.x"]),
    st.text(max_size=12),
    st.lists(st.text("abn.0", max_size=3), max_size=4).map(".".join),
)


def load(name: str, words: list[str]) -> None:
    """Load; when it loads, rules run and the dump loads back equal."""
    try:
        loaded = load_profile(name, words)
    except ConfigError as error:
        refused = error.faults
    else:
        refused = None
    if refused is not None:
        assert refused
        assert all(f.where and f.found for f in refused)
        return
    check(loaded, 2)
    assert list(loaded.leaves())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "resolved.yaml").write_text(loaded.dump(), encoding="utf-8")
        assert load_profile(folder).profile == loaded.profile


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(KEYS, st.one_of(VALUES.map(yaml.safe_dump), st.text(max_size=12))), max_size=4))
def test_any_words(pairs: list[tuple[str, str]]) -> None:
    load("packed", ["model.path=m", "data.train_files=f", *(f"{k}={v}" for k, v in pairs)])


@settings(max_examples=150, deadline=None)
@given(st.text("ab:-? &*!<>[]{},'\"|%@#\n\t\\0~.e=\xe9\x85\u2028\ud800", max_size=40), st.binary(max_size=30))
def test_any_file(text: str, raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for content in (text.encode("utf-8", "surrogatepass"), raw):
            (Path(folder) / "run.yaml").write_bytes(content)
            load(f"{folder}/run.yaml", ["model.path=m", "data.train_files=f"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(all_keys()), VALUES), max_size=4))
def test_any_values_at_known_keys(pairs: list[tuple[str, Any]]) -> None:
    """A file that is good but for some keys."""
    data: dict[str, Any] = {"model": {"path": "m"}, "data": {"train_files": "f"}}
    for key, value in pairs:
        *above, last = key.split(".")
        at: Any = data
        for part in above:
            at = at.setdefault(part, {}) if isinstance(at, dict) else {}
        if isinstance(at, dict):
            at[last] = value
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
        load(f"{folder}/run.yaml", [])


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=3), st.text(max_size=20))
def test_what_is_passed_on_round_trips(kwargs: dict[str, Any], prompt: str) -> None:
    """Free values (keyword arguments, strings of any alphabet) survive resolved.yaml."""
    data = {
        "model": {"path": "m"},
        "data": {"train_files": "f", "system_prompt": prompt, "chat_template_kwargs": kwargs},
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
        load(f"{folder}/run.yaml", [])


@pytest.mark.parametrize(
    "text", [r"\ud800", r"\x00", r"\e[31m", r"\N a", r"\L\P", "\ufeffa", "a\r\nb", " a ", "", "null", "1e5"]
)
def test_strange_strings(text: str, tmp_path: Path) -> None:
    for key in ("data.system_prompt", "data.chat_template_kwargs.x"):
        load("packed", ["model.path=m", "data.train_files=f", f'{key}="{text}"'])


@pytest.mark.parametrize("depth", [50, 400, 3000])
def test_deep_values(depth: int, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: {path: m}\ndata: {train_files: f, chat_template_kwargs: {x: " + "[" * depth + "]" * depth + "}}\n"
    )
    load(str(tmp_path / "run.yaml"), [])
