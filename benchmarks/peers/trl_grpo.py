"""TRL's side of a side-by-side run: GRPO with vLLM colocated on one GPU; prints one line of JSON.

    python benchmarks/peers/trl_grpo.py MODEL_DIR PROMPTS.parquet --steps 4 [--micro 16] [--dtype float32] [--liger]

32 prompts of 8 answers a step, at most 1,024 new tokens, random rewards, gradient checkpointing, AdamW.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ANSWERS = 256


class Clock(TrainerCallback):
    """Times at which steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--liger", action="store_true")
    args = parser.parse_args()
    answers: list[int] = []
    generation: list[float] = []
    clock = Clock()

    def reward(completions: object = None, completion_ids: list[list[int]] = (), **_: object) -> list[float]:
        answers.append(sum(len(ids) for ids in completion_ids))
        return [random.random() for _ in completion_ids]

    config = GRPOConfig(
        output_dir="/tmp/trl-out",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.35,
        vllm_max_model_length=2048,
        per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=ANSWERS // args.micro,
        num_generations=8,
        max_completion_length=1024,
        bf16=True,
        gradient_checkpointing=True,
        max_steps=args.steps,
        logging_steps=1,
        report_to=[],
        learning_rate=1e-6,
        beta=0.0,
        save_strategy="no",
        temperature=1.0,
        model_init_kwargs={"dtype": args.dtype},
        use_liger_kernel=args.liger,
    )
    rows = pq.read_table(args.prompts, columns=["prompt"]).to_pylist()
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=reward,
        args=config,
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[clock],
        train_dataset=Dataset.from_list(rows),
    )
    inner = trainer._generate_single_turn

    def timed(*a: object, **k: object) -> object:
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = inner(*a, **k)
        torch.cuda.synchronize()
        generation.append(time.perf_counter() - start)
        return result

    trainer._generate_single_turn = timed
    clock.ends.append(time.perf_counter())
    trainer.train()
    steps = [b - a for a, b in zip(clock.ends, clock.ends[1:])]
    print(
        json.dumps(
            {
                "step_seconds": steps,
                "generation_seconds": generation,
                "answer_tokens": answers,
                "peak_bytes": torch.cuda.max_memory_allocated(),
            }
        )
    )


if __name__ == "__main__":
    main()
