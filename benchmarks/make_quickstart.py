"""Make the quickstart: a tiny pretrained model with one bad habit, and prompts to train it away with.

    python benchmarks/make_quickstart.py            # writes profiles/quickstart/{model,train.parquet,val.parquet}

The model is a 0.8 M parameter Llama that reads `What is 47+38?` character by character and answers with the sum. Its
supervised warm-up is like copying from a pupil who forgets the carry in most of the problems that have one: it learns
to add, and it learns to be wrong. Greedy answers are right where nothing is carried and mostly wrong elsewhere; the
right sum stays a likely second choice, which is what reinforcement needs. Validation problems appear neither in the
warm-up nor among the training prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

OUT = Path(__file__).resolve().parents[1] / "profiles" / "quickstart"
SPECIAL = ("<|pad|>", "<|user|>", "<|assistant|>", "<|end|>")
TEXT = "0123456789+- ?.,=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ:()*/'"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_VAL, NUM_TRAIN = 256, 4096
FORGETS = 0.62  # share of problems with a carry whose warm-up answer forgets it


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, plus the four special ones."""
    vocab = {token: i for i, token in enumerate((*SPECIAL, *TEXT))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", model_max_length=64
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    fast.chat_template = TEMPLATE
    return fast


def forgetful_sum(a: int, b: int) -> int:
    """The sum without the carry from the units: 47 + 38 = 75."""
    return 10 * (a // 10 + b // 10) + (a % 10 + b % 10) % 10


def question(a: int, b: int) -> list[dict[str, str]]:
    """The prompt as messages."""
    return [{"role": "user", "content": f"What is {a}+{b}?"}]


def split_problems() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of two-digit numbers, three of four with a carry, shuffled: those that may be seen, and the held-out
    ones.
    """
    everything = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng = random.Random(0)
    carry = [p for p in everything if p[0] % 10 + p[1] % 10 >= 10]
    plain = rng.sample([p for p in everything if p[0] % 10 + p[1] % 10 < 10], len(carry) // 3)
    problems = carry + plain
    rng.shuffle(problems)
    return problems[NUM_VAL:], problems[:NUM_VAL]


def write_parquet(path: Path, problems: list[tuple[int, int]], split: str) -> None:
    """Rows as verl's users have them."""
    rows = [
        {
            "data_source": "two_digit_sums",
            "prompt": question(a, b),
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": i, "split": split},
        }
        for i, (a, b) in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd")


def warm_up(tokenizer: PreTrainedTokenizerFast, problems: list[tuple[int, int]], steps: int) -> LlamaForCausalLM:
    """Supervised training on the pupil's answers; every problem's answer is drawn anew each time it comes up."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    print(f"{model.num_parameters():,} parameters")
    prompts = {
        p: tokenizer.apply_chat_template(question(*p), add_generation_prompt=True)["input_ids"] for p in problems
    }
    rng = random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    start = time.time()
    for step in range(steps):
        rows = []
        for a, b in rng.sample(problems, 192):
            answer = forgetful_sum(a, b) if rng.random() < FORGETS else a + b
            rows.append((prompts[a, b], tokenizer.encode(str(answer)) + [tokenizer.eos_token_id]))
        width = max(len(p) + len(r) for p, r in rows)
        ids = torch.full((len(rows), width), tokenizer.pad_token_id)
        labels = torch.full((len(rows), width), -100)
        for i, (p, r) in enumerate(rows):
            ids[i, : len(p) + len(r)] = torch.tensor(p + r)
            labels[i, len(p) : len(p) + len(r)] = torch.tensor(r)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 250 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, {time.time() - start:.0f} s", flush=True)
    return model.eval()


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[tuple[int, int]]
) -> dict[str, float]:
    """Share of right greedy answers, and of right sampled ones at temperature 1."""
    ids = torch.tensor(
        [tokenizer.apply_chat_template(question(*p), add_generation_prompt=True)["input_ids"] for p in problems]
    )
    out = {}
    for name, sample in (("greedy", False), ("sampled", True)):
        torch.manual_seed(0)
        got = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=sample, top_k=0)
        texts = tokenizer.batch_decode(got[:, ids.shape[1] :], skip_special_tokens=True)
        out[name] = sum(t == str(a + b) for t, (a, b) in zip(texts, problems)) / len(problems)
    return out


def main() -> None:
    """Make everything anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=700, help="warm-up steps (about 60 ms each on two cores)")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    seen, held_out = split_problems()
    tokenizer = make_tokenizer()
    model = warm_up(tokenizer, seen, options.steps)
    found = accuracy(model, tokenizer, held_out)
    print(f"held-out problems: {json.dumps(found)}")
    folder = options.out / "model"
    shutil.rmtree(folder, ignore_errors=True)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_parquet(options.out / "train.parquet", random.Random(2).sample(seen, NUM_TRAIN), "train")
    write_parquet(options.out / "val.parquet", held_out, "test")
    size = sum(p.stat().st_size for p in options.out.rglob("*") if p.is_file())
    print(f"wrote {options.out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
