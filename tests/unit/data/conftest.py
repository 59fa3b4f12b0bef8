"""Tiny word-level tokenizers with chat templates, and writers of test files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from rlspeed.data.render import load_tokenizer

SPECIAL = ["<pad>", "<bos>", "<eos>", "<user>", "<system>", "<assistant>", "<unk>"]
LETTERS = list("abcdefghijklmnopqrstuvwxyz0123456789")
PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# writes the begin token itself, wants the system message first and at least one user message
STRICT = (
    "{{ bos_token }}{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('a user message is required') }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "<{{ m['role'] }}> {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(folder: Path, *, template: str | None = PLAIN, add_bos: bool = False, max_length: int = 0) -> Path:
    """One token for each word of a small vocabulary; words of one letter or digit are known, all others <unk>."""
    vocab = {word: i for i, word in enumerate(SPECIAL + LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    if max_length:
        tokenizer.enable_truncation(max_length)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    if template:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the plain tokenizer."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizers") / "plain")


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Any:
    """The plain tokenizer: n words give n tokens, a message two more, an answer's beginning one."""
    return load_tokenizer(str(tokenizer_dir))


@pytest.fixture(scope="session")
def strict_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Puts <bos> before texts by itself; so does its template, which refuses odd chats."""
    folder = make_tokenizer(tmp_path_factory.mktemp("tokenizers") / "strict", template=STRICT, add_bos=True)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="session")
def bare_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """No chat template, and a cut at 3 tokens left in its tokenizer.json."""
    folder = make_tokenizer(tmp_path_factory.mktemp("tokenizers") / "bare", template=None, max_length=3)
    return load_tokenizer(str(folder))


def words(count: int) -> str:
    """A text of `count` tokens."""
    return " ".join(LETTERS[i % len(LETTERS)] for i in range(count))


def chat(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    """Messages from (role, content) pairs."""
    return [{"role": role, "content": content} for role, content in turns]


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], schema: pa.Schema | None = None, **kwargs: Any) -> Path:
    """A parquet file of rows."""
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path, **kwargs)
    return path


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers of this file, for tests."""
    return SimpleNamespace(
        words=words, chat=chat, write_jsonl=write_jsonl, write_parquet=write_parquet, make_tokenizer=make_tokenizer
    )
