"""What casts, padding and concatenation cost in a training step: padded under autocast against packed in bf16.

    python benchmarks/casts.py OUT.json [--size 0.5b] [--answers 64] [--variants autocast,packed,packed+compile]

A step is a log-prob pass without gradient and one update over all answers (`update.py` says which). `autocast` is how
trainers commonly run: fp32 weights, torch.autocast to bf16, padded rows, log-softmax over fp32 logits. The kernels of
one step are sorted by `rlspeed.bench.kernels`: changes of dtype, pads and concatenations of tensors over tokens, and
changes of dtype of weights and gradients. Prints the table and writes it with the longest moves as one record.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from update import CLIPS, SHAPE_KEYS, SHAPES, VOCABULARY, make_actor, make_answers, make_batches, make_loss

from rlspeed.algorithms import loss
from rlspeed.bench.kernels import classify
from rlspeed.bench.measure import trace_events
from rlspeed.bench.record import code_state, write_json
from rlspeed.engine.packed import PackedBatch
from rlspeed.engine.padded import PaddedView

COLUMNS = ("cast", "pad", "cat", "weight_cast", "total")


def packed_step(
    options: argparse.Namespace, variant: str, answers: list[tuple[int, int]]
) -> tuple[Callable[[], None], list[PackedBatch], list[tuple[int, ...]]]:
    """A step of rlspeed's, its packs, and the sizes of what is over tokens."""
    actor, _ = make_actor(options, variant)
    batches = make_batches(answers, variant, options.capacity, options.micro, options.device)
    counts = loss.GlobalCounts(tokens=sum(a for _, a in answers), sequences=len(answers))
    loss_of = make_loss(actor, counts)

    def step() -> None:
        for batch in batches:
            batch.put("old_logprobs", actor.logprobs(batch))
        actor.update(batches, loss_of, global_tokens=counts.tokens)

    sizes: list[tuple[int, ...]] = [(b.num_tokens,) for b in batches]
    sizes += [(b.response_index().numel(),) for b in batches]
    if not variant.startswith("packed"):
        sizes += [(b.num_sequences, b.max_seqlen) for b in batches]
    return step, batches, sizes


def autocast_step(
    options: argparse.Namespace, answers: list[tuple[int, int]]
) -> tuple[Callable[[], None], list[PackedBatch], list[tuple[int, ...]]]:
    """The same work with fp32 weights under autocast, in padded rows, with whole logits."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    shape = dict(zip(SHAPE_KEYS, SHAPES[options.size]))
    config = Qwen2Config(vocab_size=VOCABULARY, tie_word_embeddings=True, use_cache=False, **shape)
    with device:
        model = Qwen2ForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batches = make_batches(answers, "padded", options.capacity, options.micro, options.device)
    total = sum(a for _, a in answers)

    def logprobs_of(batch: PackedBatch) -> torch.Tensor:
        view = PaddedView.of(batch)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=view.input_ids, attention_mask=view.attention_mask).logits
        log_p = torch.log_softmax(logits[:, :-1].float(), -1)
        chosen = torch.gather(log_p, 2, view.input_ids[:, 1:, None])[..., 0]
        index = batch.response_index()
        return chosen[view.rows[index], view.columns[index] - 1]

    def step() -> None:
        for batch in batches:
            with torch.no_grad():
                batch.put("old_logprobs", logprobs_of(batch))
        optimizer.zero_grad()
        for batch in batches:
            logprobs = logprobs_of(batch)
            weights = torch.full_like(logprobs, 1.0 / total)
            loss.ppo_policy_loss(
                logprobs, batch.get("old_logprobs"), batch.get("advantages"), weights, **CLIPS
            ).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    shapes = [(b.num_sequences, b.max_seqlen) for b in batches]
    return step, batches, [*shapes, *((s, n - 1) for s, n in shapes)]


def measure(options: argparse.Namespace, variant: str, answers: list[tuple[int, int]]) -> dict[str, Any]:
    """One variant: warm up, time one step, trace another."""
    device = torch.device(options.device)
    autocast = variant == "autocast"
    step, batches, sizes = autocast_step(options, answers) if autocast else packed_step(options, variant, answers)
    for _ in range(options.warmup):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    moves = classify(trace_events(step, device), sizes)
    return {
        "step_seconds": seconds,
        "kernel_seconds": {name: getattr(moves, name) for name in COLUMNS},
        "share": moves.share,
        "longest": moves.longest,
        "micro_batches": len(batches),
    }


def table(variants: dict[str, Any]) -> str:
    """The record as a table in Markdown, kernel times in ms."""
    lines = ["| step | seconds | casts | pads | cats | of all kernels | casts of weights |", "| --- " * 7 + "|"]
    for name, found in variants.items():
        if "error" in found:
            lines.append(f"| {name} | {found['error'][:80]} |" + " |" * 5)
            continue
        ms = {k: f"{1e3 * v:,.2f} ms" for k, v in found["kernel_seconds"].items()}
        parts = [name, f"{found['step_seconds']:.3f}", ms["cast"], ms["pad"], ms["cat"], f"{found['share']:.2%}"]
        lines.append("| " + " | ".join([*parts, ms["weight_cast"]]) + " |")
    return "\n".join(lines)


def main() -> None:
    """All variants, one record; a variant that fails is recorded with its message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="0.5b", choices=SHAPES)
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--capacity", type=int, default=16384)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "adamw8bit", "adamw_offload"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--variants", default="autocast,padded,packed,packed+compile")
    options = parser.parse_args()
    answers = make_answers(options.answers)
    record: dict[str, Any] = {
        "schema": 1,
        "benchmark": "casts",
        "commit": code_state()[0],
        "dirty": code_state()[1],
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "options": {k: v for k, v in vars(options).items() if k != "out"},
        "variants": {},
    }
    for variant in options.variants.split(","):
        try:
            result = measure(options, variant, answers)
        except Exception as error:  # one variant out of memory must not lose the others
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        record["variants"][variant] = result
        print(variant, json.dumps(result), flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()
        record["table"] = table(record["variants"])
        write_json(options.out, record)
    print(record["table"])


if __name__ == "__main__":
    main()
