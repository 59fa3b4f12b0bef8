"""Damaged data files: read as they are, or refused with a DataError; never a traceback, never a half-written file."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from rlspeed.config.schema import Data, Rollout
from rlspeed.data.files import expand
from rlspeed.data.pack import PackOptions, pack_files
from rlspeed.data.prompts import load_prompts
from rlspeed.data.sort import SortOptions, sort_files
from rlspeed.data.stats import measure_files
from rlspeed.errors import RlspeedError
from tests.fuzz.damage import EDITS, Edit, damaged, refused

TEXTS = [{"prompt": "a b c", "answer": 7}, {"prompt": "d", "answer": 8}, {"prompt": "e f g h i j", "answer": -1}]
CHATS = [
    {
        "prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b c"}],
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": i, "split": "train"},
    }
    for i in range(4)
]
IDS = [{"input_ids": list(range(1, n + 1)), "loss_mask": [0] + [1] * (n - 1), "answer": str(n)} for n in (3, 1, 5, 2)]


def parquet(rows: list[dict[str, Any]], **how: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, **how)
    return sink.getvalue()


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


PARQUET = [
    parquet(TEXTS, compression="none"),
    parquet(CHATS, compression="none", row_group_size=2),
    parquet(CHATS, compression="snappy", use_dictionary=False),
    parquet(IDS, compression="none", data_page_version="2.0"),
    parquet(TEXTS * 20, compression="zstd", write_statistics=False),
]
JSONL = [jsonl(TEXTS), jsonl(CHATS), jsonl(IDS), jsonl([*TEXTS, *CHATS])]


def valid(file: Path) -> bool:
    """True when all values of a parquet file are what their types say; JSONL becomes columns by being read."""
    if file.suffix != ".parquet":
        return True
    try:
        pq.read_table(file).validate(full=True)
    except (pa.ArrowException, OSError):
        return False
    return True


def use(content: bytes, name: str, tokenizer: Any, renderer: Any) -> None:
    """Everything that reads files; each output is there as a whole or not at all, and nothing else is left."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        file = home / name
        file.write_bytes(content)
        data = Data(train_files=str(file), max_length=64)
        outputs = [home / f"sorted{file.suffix}", home / "packed.parquet", home / "packed.parquet.manifest.json"]
        doors: list[Callable[[], Any]] = [
            lambda: load_prompts(data, Rollout(max_new_tokens=8), tokenizer, "train"),
            lambda: sort_files(expand(str(file), "in"), outputs[0], renderer, SortOptions(bad_rows="drop")),
            lambda: pack_files(
                expand(str(file), "in"), outputs[1], renderer, PackOptions(capacity=64, overlong="drop")
            ),
            lambda: measure_files(expand(str(file), "in"), renderer, "prompt", "error"),
        ]
        for door in doors:
            before = set(home.rglob("*"))
            try:
                door()
            except RlspeedError as error:
                refused(error)
                assert set(home.rglob("*")) == before
        assert set(home.rglob("*")) <= {file, *outputs}
        assert file.read_bytes() == content
        for output in outputs:
            if output.exists() and output.suffix == ".parquet":
                # texts that are no UTF-8 in columns that nobody looked at go through as they are
                pq.read_table(output).validate(full=valid(file))
            elif output.exists():
                assert output.read_text(encoding="utf-8").count("\n") >= (output.stat().st_size > 0)


def test_parquet(attempt: Any, tokenizer: Any, renderer: Any) -> None:
    def body(case: tuple[int, list[Edit]]) -> None:
        use(damaged(PARQUET[case[0]], case[1]), "in.parquet", tokenizer, renderer)

    attempt(st.tuples(st.integers(0, len(PARQUET) - 1), EDITS), body, few=15)


def test_jsonl(attempt: Any, tokenizer: Any, renderer: Any) -> None:
    def body(case: tuple[int, list[Edit]]) -> None:
        use(damaged(JSONL[case[0]], case[1]), "in.jsonl", tokenizer, renderer)

    attempt(st.tuples(st.integers(0, len(JSONL) - 1), EDITS), body, few=15)
