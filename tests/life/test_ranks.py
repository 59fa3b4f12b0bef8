"""Several ranks do what one process does, however the models are spread: same answers, same rewards, same updates."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlspeed.config.load import load_profile
from rlspeed.planning.machine import Machine
from rlspeed.planning.report import inspect_profile

WORDS = (
    *("quickstart", "run.steps=2", "run.plots=false", "run.save_every=1", "data.batch_size=10"),
    *("data.max_val_samples=9", "rollout.n=2", "algorithm.mini_batch_size=5", "packing.capacity=64"),
)
TP, SP = "devices.actor.tensor_parallel_size=2", "devices.actor.sequence_parallel_size=2"
SHARDING = "devices.actor.fsdp_config.sharding_strategy"
CLASSIC, STAYS = "model.actor.use_3d_hybrid_engine=false", "model.actor.use_lightweight_sharding_for_generation=false"
CALLED, CHECKED = "model.actor.enable_auto_repartition_for_training=false", "model.actor.verify_sync=checksum"

# with each layout another way of the weights to the generator
LAYOUTS = {
    "one-classic": (1, (CLASSIC, CALLED)),
    "dp2": (2, ()),
    "tp2": (2, (TP, CHECKED)),
    "sp2-classic": (2, (SP, CLASSIC)),
    "copies2-stays": (2, (f"{SHARDING}=NO_SHARD", STAYS, CHECKED)),
    "dp2-tp2": (4, (TP, f"{SHARDING}=SHARD_GRAD_OP", CALLED, CHECKED)),
}
# roles on ranks of their own; in those of EQUAL each role has one rank: the bins, the sums and the bits of one process
HOST = "run.device=cpu"
TURNED = ("devices.actor.device_mesh=[1]", "devices.critic.device_mesh=[0]", "devices.reference.shares_with=critic")
MIXED = (
    *("devices.actor.device_mesh=[3,1]", "devices.critic.device_mesh=[2,0]", "devices.reference.device_mesh=[0,2]"),
    *("devices.actor.tensor_parallel_size=2", "devices.critic.sequence_parallel_size=2", CHECKED),
    "devices.reference.shares_with=critic",
)
EQUAL = ("apart2", "apart2-turned")
LAYOUTS |= {
    "apart2": (2, (HOST, "devices.actor.device_mesh=[0]", "devices.critic.device_mesh=[1]")),
    "apart2-turned": (2, (HOST, *TURNED, CLASSIC)),
    "apart4": (4, (HOST, "devices.actor.device_mesh=[0,1]", "devices.critic.device_mesh=[2,3]", CALLED)),
    "apart4-mixed": (4, (HOST, *MIXED)),
}
# loads of shares are about shares; answers, rewards, lengths and counts are equal exactly
ABOUT_RANKS = "global_seqlen/"
EXACT = ("critic/score", "response_length", "prompt_length", "tokens/", "group/", "val-")


def run(*words: str) -> str:
    """What a run says on stderr and stdout."""
    command = [sys.executable, "-m", "rlspeed", "train", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr + done.stdout


def metrics(folder: Path) -> dict[tuple[int, str], float]:
    """All metrics of a run by step and name."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(r["step"], k): v for r in rows for k, v in r.items() if not k.startswith(ABOUT_RANKS)}


def transitions(folder: Path) -> set[float]:
    """Bytes over the wire in a transition, of all ranks together, as the run reports them."""
    rows = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    return {r["transition/bytes_received"] for r in rows if "transition/bytes_received" in r}


def planned_bytes(ranks: int, words: tuple[str, ...]) -> int:
    """What `check-devices --plan` says of it beforehand."""
    plan = inspect_profile(load_profile("quickstart", words).profile, Machine(devices=()), world_size=ranks).plan
    assert plan is not None
    return plan.num_bytes


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    run(*WORDS, f"run.dir={folder}")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_equal_one(one: Path, tmp_path: Path, layout: str) -> None:
    """life-15: 10 prompts and 9 validation prompts, bins of 64 tokens, so that shares have several.

    fp32: sums over tokens in another order, 1e-6 relative; two updates with Adam, which divides by small numbers, leave
    1e-3 of room on norms and clip fractions. An exported weight moved by at most four steps of lr 3e-4, whose sign a
    gradient near zero may change: 1e-4 is far less than a part that is missing or doubled, as the mean shows.
    """
    ranks, words = LAYOUTS[layout]
    folder = tmp_path / "run"
    said = run(*WORDS, f"run.dir={folder}", "--nproc-per-node", str(ranks), *words)
    assert f"{ranks} process(es) on cpu" in said
    single, several = metrics(one), metrics(folder)
    assert single.keys() == several.keys()
    for key, value in single.items():
        if key[1].startswith(EXACT):
            assert several[key] == value, key
        else:
            assert several[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
    assert transitions(folder) == {planned_bytes(ranks, words)}
    wanted, got = (load_file(place / "hf" / "model.safetensors") for place in (one, folder))
    assert wanted.keys() == got.keys()
    if layout in EQUAL:
        assert (folder / "metrics.jsonl").read_bytes() == (one / "metrics.jsonl").read_bytes()
        assert all(torch.equal(got[name], weight) for name, weight in wanted.items())
    for name, weight in wanted.items():
        gaps = (weight - got[name]).abs()
        assert float(gaps.max()) < 1e-4, name
        assert float(gaps.mean()) < 1e-6, name
    if ranks == 4 or layout == "apart2-turned":
        resumed_repeats_the_last_step(folder, ranks)


def test_one_step_ahead_is_the_same_apart(tmp_path: Path) -> None:
    """The actor answers the next prompts while the critic is updated: no bit depends on when."""
    words = (*WORDS, "run.steps=3", "run.save_hf=false", "rollout.one_step_off=true", "rollout.correction=token_tis")
    run(*words, f"run.dir={tmp_path / 'one'}")
    run(*words, f"run.dir={tmp_path / 'two'}", "--nproc-per-node", "2", *LAYOUTS["apart2"][1])
    found = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("one", "two")]
    assert found[0] == found[1]
    assert b'"rollout_corr/staleness": 1.0' in found[0]


def resumed_repeats_the_last_step(folder: Path, ranks: int) -> None:
    """Resume after step 1, of a checkpoint whose tensors lie on tensor parallel x FSDP2.

    Lost moments or masters would change a weight by a step of lr 3e-4; sums of four ranks differ in the last bit from
    run to run.
    """
    before, weights = metrics(folder), load_file(folder / "hf" / "model.safetensors")
    shutil.rmtree(folder / "hf")
    shutil.rmtree(folder / "checkpoints" / "step_00000002")
    said = run(str(folder), "--resume", "--nproc-per-node", str(ranks))
    assert "step_00000001" in said
    assert metrics(folder) == {key: pytest.approx(value, rel=1e-5, abs=1e-6) for key, value in before.items()}
    again = load_file(folder / "hf" / "model.safetensors")
    assert max(float((again[name] - weight).abs().max()) for name, weight in weights.items()) < 1e-6
