"""The users' own two files as they are: actor on ranks 0-1, critic on 2-3, reward model on the CPU, four gloo ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILES = Path(__file__).parents[1] / "data"
WORDS = (
    *("run.device=cpu", "run.steps=2", "run.plots=false", "data.train_files=quickstart:train", "data.batch_size=8"),
    *("data.max_length=64", "rollout.n=2", "rollout.max_new_tokens=8", "algorithm.mini_batch_size=4"),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random policy and a random reward model, two layers each, with the tokenizer of the packaged model."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    from rlspeed.models.build import resolve_model_path

    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("quickstart"))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    folders = tuple(tmp_path_factory.mktemp(name) for name in ("policy", "reward"))
    for folder, kind in zip(folders, (Qwen2ForCausalLM, Qwen2ForSequenceClassification)):
        kind(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folders


def test_the_users_files_train_under_torchrun(models: tuple[Path, Path], tmp_path: Path) -> None:
    """The built-in generator stands in for vLLM on the host, and says so; everything else is as the files say it."""
    policy, reward = models
    folder = tmp_path / "run"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"),
            *("-m", "rlspeed", "train", str(FILES / "ppo_trainer.yaml"), *WORDS, f"run.dir={folder}"),
            *("device_mapping_file=device_mapping.yaml", f"model.path={policy}", f"reward.model.path={reward}"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=240,
    )
    said = done.stderr + done.stdout
    assert done.returncode == 0, said[-3000:]
    assert "actor on 0, 1 (data 2 parallel); critic on 2, 3 (data 2 parallel); bf16" in said
    assert "the built-in generator answers in vLLM's place" in said
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["actor/grad_norm"] > 0.0
        assert row["critic/grad_norm"] > 0.0
        assert row["critic/score/max"] > row["critic/score/min"], "the reward model tells answers apart"
    timings = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    assert all(0 <= row["reward/scored_early"] <= 16 for row in timings), "the reward model works beside generation"
    assert (folder / "hf" / "model.safetensors").exists()
