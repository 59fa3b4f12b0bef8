"""check-devices end to end on files: exit codes, plain text, JSON, assumed machines; no torch, no process."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from rlspeed.commands.check_devices import check_devices
from rlspeed.commands.device_picture import show_report
from typer.testing import CliRunner

from rlspeed.config.device_schema import DeviceMapping
from rlspeed.errors import ConfigError
from rlspeed.planning.machine import assume
from rlspeed.planning.report import inspect_run

MAPPING = """\
actor:
  device_mesh: [0, 1]
  use_vllm: true
  vllm_config: {tensor_parallel_size: 2, dtype: bfloat16}
critic:
  device_mesh: [2, 3]
  strategy: fsdp2
  fsdp_config: {sharding_strategy: FULL_SHARD, cpu_offload: false}
reward_model:
  device_mesh: [cpu]
  use_cpu_offload: true
"""
TRAINER = """\
model: {path: MODEL, model_dtype: bf16}
data: {train_files: data/train.parquet, max_length: 1536}
"""
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the users' two files and a model's config.json."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "map.yaml").write_text(MAPPING)
    (tmp_path / "run.yaml").write_text(TRAINER.replace("MODEL", str(tmp_path / "model")))
    return tmp_path


def run(*words: str | Path) -> tuple[int, str]:
    """Exit code and output; errors for the user are raised."""
    app = typer.Typer()
    app.command()(check_devices)
    result = CliRunner().invoke(app, [str(w) for w in words])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result.exit_code, result.output


def test_clean_on_an_assumed_machine(files: Path) -> None:
    code, text = run(files / "map.yaml", files / "run.yaml", "--assume", "4x H200")
    assert code == 0, text
    assert "critic: cuda ranks 2 3; dp 2 x sp 1 x tp 1; cpu:gloo,cuda:nccl" in text
    assert "rollout: cuda ranks 0 1; dp 1 x sp 1 x tp 2" in text
    assert "memory: ranks 0-1, update actor: weights 7.1" in text
    assert "floor: update actor: at least" in text
    assert text.rstrip().endswith("no problems")


def test_problems_give_exit_code_1_and_are_all_listed(files: Path) -> None:
    (files / "map.yaml").write_text(MAPPING.replace("[2, 3]", "[1, 1]"))
    code, text = run(files / "map.yaml", files / "run.yaml", "--assume", "2x V100-16GB")
    assert code == 1
    for words in ("1 at position 1", "both use device 1", "bf16 on V100-16GB"):
        assert words in text


def test_too_little_memory_is_a_problem_with_the_change_that_helps(files: Path) -> None:
    code, text = run(files / "map.yaml", files / "run.yaml", "--assume", "4x A100-80GB")
    assert code == 1
    assert "memory of rank 0, 1: update actor needs" in text
    assert "fix: " in text


def test_dev_16_on_a_machine_without_gpu(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """dev-16: needs 4, sees what is here: said at once, not after a wait for resources."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    code, text = run(files / "map.yaml")
    assert code == 1
    assert (
        "0 visible (CUDA_VISIBLE_DEVICES is '-1'), the mapping needs 4: actor asks for 0, 1; critic asks for 2, 3"
        in text
    )


def test_json_has_everything(files: Path) -> None:
    code, text = run(files / "map.yaml", files / "run.yaml", "--assume", "4x H200", "--json")
    report = json.loads(text)
    assert code == 0
    assert report["ok"] is True
    assert report["roles"]["critic"]["ranks"] == [2, 3]
    assert report["memory"][0]["phases"]["update actor"]["optimizer"] == 12 * (7_615_616_512 // 2)
    assert {f["phase"] for f in report["floors"]} >= {"generation", "update actor", "transition"}
    # vLLM is given whole tensors at any degree: each of the two ranks lacks the other's half
    assert report["transition"]["bytes"] == pytest.approx(2 * 7_615_616_512, rel=1e-4)
    assert report["smoke"] is None


def test_plan_lists_bytes_per_pair(files: Path) -> None:
    alone = "actor: {device_mesh: [0, 1]}\ncritic: {shares_with: actor}\n"
    (files / "map.yaml").write_text(alone)
    code, text = run(files / "map.yaml", files / "run.yaml", "--assume", "2x B300", "--plan")
    assert code == 0, text
    pairs = [line for line in text.splitlines() if line.startswith("transition: rank")]
    assert len(pairs) == 2
    half = int(pairs[0].split(": ")[-1].split()[0])
    assert half == pytest.approx(7_615_616_512, rel=1e-4)  # half of the bf16 weights to each


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("actor: [", "not YAML"),
        ("actor: {device_mesh: [gpu0]}", "actor.device_mesh"),
        ("actor: {fsdp_config: {sharding_strategy: ZERO_3}}", "FULL_SHARD"),
        ("actor: {devce_mesh: [0]}", "did you mean devices.actor.device_mesh"),
    ],
)
def test_unreadable_files_are_errors_of_their_own(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "map.yaml").write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        run(tmp_path / "map.yaml")
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigError):
        run(tmp_path / "absent.yaml")


def test_words_win_over_the_file(files: Path) -> None:
    words = ("algorithm.kind=grpo", "rollout.n=8", "packing.capacity=1536")
    code, text = run(files / "map.yaml", files / "run.yaml", *words, "--assume", "4x H200")
    assert "critic: not used, algorithm.kind grpo has no critic" in text
    assert code == 1  # the critic's two ranks have nothing to do
    assert "no role uses devices 2, 3" in text


def test_a_model_that_is_not_here_is_said(files: Path) -> None:
    (files / "run.yaml").write_text(TRAINER.replace("MODEL", "nobody/nothing-7B"))
    code, text = run(files / "map.yaml", files / "run.yaml", "--assume", "4x H200")
    assert code == 0
    assert "no config.json of nobody/nothing-7B here" in text


def test_terminal_shows_devices_by_roles() -> None:
    """On a terminal: a table with a row for each rank and a column for each role, in colour."""
    mapping = DeviceMapping.model_validate({"actor": {"device_mesh": [0, 1]}, "critic": {"device_mesh": [2]}})
    report = inspect_run(mapping, assume("3x H100"))
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=140, color_system="standard")
    show_report(console, report, with_plan=True, smoke=None)
    text = out.getvalue()
    assert "roles on devices" in text
    assert "2: H100-80GB, 80 GiB" in text
    assert "\x1b[35m" in text  # the critic's colour
    assert "no plan" in text


def test_no_torch_is_imported(files: Path) -> None:
    """The command answers on a laptop in well under a second because torch stays out."""
    code = (
        "import sys\n"
        "from rlspeed.commands.check_devices import check_devices\n"
        "from pathlib import Path\n"
        f"check_devices(Path({str(files / 'map.yaml')!r}), Path({str(files / 'run.yaml')!r}), assume='4x H200')\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
