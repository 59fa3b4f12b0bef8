"""Damaged configurations and device maps: a run that could start, or errors with exit code 2."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from rlspeed.config.load import load_device_mapping, load_profile
from rlspeed.config.rules import check
from rlspeed.errors import RlspeedError
from rlspeed.planning.machine import assume, parse_visible
from rlspeed.planning.report import inspect_profile, inspect_run
from tests.fuzz.damage import EDITS, Edit, damaged, refused

SEEDS = Path(__file__).parents[1] / "data"
TRAINER, MAPPING = (SEEDS / "ppo_trainer.yaml").read_bytes(), (SEEDS / "device_mapping.yaml").read_bytes()
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
}
MACHINES = ["8x A100-80GB", "2x8x H100", "1x T4", "2x A100-40GB + 2x H100"]


def test_files(attempt: Any) -> None:
    """Trainer file, device mapping and config.json of the model, each damaged."""

    def body(case: tuple[list[Edit], list[Edit], list[Edit], str, int]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            (home / "run.yaml").write_bytes(damaged(TRAINER, case[0]))
            (home / "map.yaml").write_bytes(damaged(MAPPING, case[1]))
            (home / "model").mkdir()
            (home / "model" / "config.json").write_bytes(damaged(json.dumps(MODEL).encode(), case[2]))
            words = [f"device_mapping_file={home / 'map.yaml'}", f"model.path={home / 'model'}"]
            try:
                loaded = load_profile(str(home / "run.yaml"), words)
                check(loaded, case[4])
                report = inspect_profile(loaded.profile, assume(case[3]), world_size=case[4])
                json.dumps(report.as_json())
            except RlspeedError as error:
                refused(error)

    attempt(st.tuples(EDITS, EDITS, EDITS, st.sampled_from(MACHINES), st.sampled_from([1, 4, 16])), body)


POSITIONS = st.one_of(
    st.integers(-2, 8), st.sampled_from(["cpu", "gpu", "0", True, None, 1.0, 10**9, 10**30, -(2**63), [0]])
)
DEGREES = st.one_of(st.integers(-1, 9), st.sampled_from([None, "2", 10**12, 1.5, True]))
SECTION = st.fixed_dictionaries(
    {},
    optional={
        "device_mesh": st.one_of(st.lists(POSITIONS, max_size=8), st.lists(st.integers(0, 7), unique=True), POSITIONS),
        "strategy": st.sampled_from(["fsdp2", "none", "ddp", None]),
        "fsdp_config": st.fixed_dictionaries(
            {},
            optional={
                "sharding_strategy": st.sampled_from(["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD", "SHARD_GRAD_OP", "X"]),
                "cpu_offload": st.one_of(st.booleans(), st.just("yes")),
            },
        ),
        "use_cpu_offload": st.booleans(),
        "shares_with": st.sampled_from(["actor", "critic", "rollout", "reward_model", "nobody", None]),
        "sequence_parallel_size": DEGREES,
        "tensor_parallel_size": DEGREES,
    },
)
ACTOR = st.builds(
    lambda a, b: a | b,
    SECTION,
    st.fixed_dictionaries(
        {},
        optional={
            "use_vllm": st.one_of(st.booleans(), st.none(), st.just(1)),
            "vllm_config": st.fixed_dictionaries({}, optional={"tensor_parallel_size": DEGREES, "x": POSITIONS}),
        },
    ),
)
MAPPINGS = st.fixed_dictionaries(
    {},
    optional={"actor": ACTOR, "critic": SECTION, "reference": SECTION, "reward_model": SECTION, "other": SECTION},
)


def test_device_maps(attempt: Any) -> None:
    """Any placement of roles, on machines of several kinds, with and without the run's number of processes."""
    with tempfile.TemporaryDirectory() as folder:
        model, file = Path(folder) / "model", Path(folder) / "map.yaml"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))

        def body(case: tuple[dict[str, Any], str, int | None]) -> None:
            file.write_text(yaml.safe_dump(case[0]), encoding="utf-8")
            try:
                mapping = load_device_mapping(file)
                json.dumps(inspect_run(mapping, assume(case[1]), world_size=case[2]).as_json())
                words = [f"model.path={model}", "data.train_files=f", f"device_mapping_file={file}"]
                loaded = load_profile("packed", words)
                check(loaded, case[2] or 1)
                json.dumps(inspect_profile(loaded.profile, assume(case[1]), world_size=case[2]).as_json())
            except RlspeedError as error:
                refused(error)

        attempt(st.tuples(MAPPINGS, st.sampled_from(MACHINES), st.sampled_from([None, 1, 2, 4, 8, 16])), body)


def test_names_of_devices(attempt: Any) -> None:
    """CUDA_VISIBLE_DEVICES and --assume, whatever they hold."""
    uuids = ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f7"]
    words = st.one_of(
        st.text(max_size=30),
        st.lists(
            st.sampled_from(["0", "1", "-1", "GPU-8932f937", "MIG-4c60d78c", uuids[0], " ", "007", "1x", "x H100"])
        ).map(",".join),
        st.from_regex(r"(\d{1,12}x ?)?\d{1,12} ?x (H100|A100-80GB|t4)", fullmatch=True),
    )

    def body(case: tuple[str, bool]) -> None:
        visible = parse_visible(case[0], uuids if case[1] else None)
        assert len(visible.entries) == len(visible.positions)
        try:
            assume(case[0])
        except RlspeedError as error:
            refused(error)

    attempt(st.tuples(words, st.booleans()), body)
