"""The prompts of a run: rendered, measured and checked at the start, then drawn by seed and step."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from rlspeed.config.schema import Data, Rollout
from rlspeed.data.bins import check_tokenizer, is_packed, unpack
from rlspeed.data.files import DataFile, FaultLog, RowFaults, expand, name_rows
from rlspeed.data.render import PromptRenderer, Rendered, tokenizer_digest
from rlspeed.data.schema import Kinds
from rlspeed.data.store import RowStore
from rlspeed.data.tables import Chunk, open_tables
from rlspeed.errors import ConfigError, DataError, Fault

Split = Literal["train", "val"]
# where the right answer stands when there is no reward_model.ground_truth, first match first
ANSWER_COLUMNS = ("ground_truth", "answer", "solution", "label")
ENCODE_ROWS = 2048


class PromptRow:
    """One prompt with everything that its row says.

    index: number of the row over all files, from 0, whatever was dropped. token_ids: the prompt as generator and
    trainer both take it, cut already. file, file_row: where it stands in the data. Everything else is read on first
    use and belongs to this object: `table[i]` gives fresh copies each time.
    """

    def __init__(self, table: PromptTable, place: int) -> None:
        self._table = table
        self._place = place
        self.index = table.kept[place]
        self.token_ids = tuple(table.tokens[table.offsets[place] : table.offsets[place + 1]])

    @property
    def truncated(self) -> bool:
        """Whether the beginning of the prompt was cut off."""
        return self.index in self._table.truncated

    @cached_property
    def _row(self) -> dict[str, Any]:
        return self._table.store.row(self.index)

    @property
    def prompt(self) -> Any:
        """The prompt as in the data: a string or a list of messages; of packed data without prompts, the text."""
        found = self._row[self._table.prompt_key]
        return self.text if found is None else found

    @cached_property
    def text(self) -> str:
        """What the model sees: the rendered prompt, or what is left of it."""
        if self.truncated or self._table.packed:
            return str(self._table.renderer.tokenizer.decode(list(self.token_ids), skip_special_tokens=False))
        return self._table.renderer.render([self.prompt])[0].text

    @property
    def data_source(self) -> str | None:
        """verl's column; None when missing."""
        value = self._row.get("data_source")
        return None if value is None else str(value)

    @cached_property
    def ground_truth(self) -> Any:
        """`reward_model.ground_truth`, or the first of ANSWER_COLUMNS that the row has; None without."""
        model = self._row.get("reward_model")
        if isinstance(model, dict) and model.get("ground_truth") is not None:
            return model["ground_truth"]
        return next((self._row[name] for name in ANSWER_COLUMNS if self._row.get(name) is not None), None)

    @cached_property
    def extra_info(self) -> dict[str, Any]:
        """verl's column; empty when missing or null. A string with a JSON object in it is read."""
        value = self._row.get("extra_info")
        if isinstance(value, str):
            value = _json_object(value)
        return value if isinstance(value, dict) else {}

    @cached_property
    def columns(self) -> dict[str, Any]:
        """All columns but the prompt, the same names in every row of the table; None where a row lacks one."""
        out = {name: self._row.get(name) for name in self._table.columns if name != self._table.prompt_key}
        if "extra_info" in out and out["extra_info"] is None:
            out["extra_info"] = {}
        return out

    @property
    def file(self) -> DataFile:
        """The file that holds the row."""
        return self._table.locate(self.index)[0]

    @property
    def file_row(self) -> int:
        """Number of the row in its file, from 0."""
        return self._table.locate(self.index)[1]


class PromptTable:
    """All usable prompts of one split, in the order of the files.

    tokens int32, offsets int64: row k's ids are `tokens[offsets[k]:offsets[k + 1]]`. kept: number of each usable row
    over all files. packed: the data came with token ids. notes: sentences about what was read, dropped or cut.
    counts: rows read, dropped, truncated, blank.
    """

    def __init__(self, prompt_key: str, renderer: PromptRenderer) -> None:
        self.prompt_key = prompt_key
        self.renderer = renderer
        self.store = RowStore()
        self.tokens = array("i")
        self.offsets = array("q", [0])
        self.kept = array("q")
        self.truncated: set[int] = set()
        self.packed = False
        self.columns: dict[str, None] = {}
        self.notes: tuple[str, ...] = ()
        self.counts: dict[str, int] = {}
        self.starts: list[tuple[int, DataFile]] = []

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, place: int) -> PromptRow:
        if not 0 <= place < len(self.kept):
            raise IndexError(f"prompt {place} of {len(self.kept)}")
        return PromptRow(self, place)

    def __iter__(self) -> Iterator[PromptRow]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each prompt, int64."""
        return np.diff(np.asarray(self.offsets, dtype=np.int64))

    def locate(self, index: int) -> tuple[DataFile, int]:
        """File and row in it of a row number over all files."""
        start, file = next((s, f) for s, f in reversed(self.starts) if s <= index)
        return file, index - start


class PromptStream:
    """Which rows make up which step: a pure function of seed and step, so that a resumed run cannot drift.

    Every epoch goes through all rows once, in an order of its own when shuffled. A batch that an epoch cannot fill
    goes on with the next one's rows. With fewer rows than `batch_size`, a batch is one epoch.
    """

    def __init__(self, num_rows: int, batch_size: int, shuffle: bool, seed: int) -> None:
        if num_rows < 1 or batch_size < 1:
            raise DataError(f"a stream of batches of {batch_size} out of {num_rows} prompts")
        self.num_rows = num_rows
        self.batch_size = min(batch_size, num_rows)
        self.shuffle = shuffle
        self.seed = seed
        self._orders: dict[int, np.ndarray] = {}

    def batch(self, step: int) -> list[int]:
        """Rows of training step `step`, counted from 0."""
        first = step * self.batch_size
        return [int(self._order(p // self.num_rows)[p % self.num_rows]) for p in range(first, first + self.batch_size)]

    def epoch(self, step: int) -> int:
        """Epoch of the first row of a step."""
        return step * self.batch_size // self.num_rows

    def _order(self, epoch: int) -> np.ndarray:
        """Rows in the order of an epoch; the last two are remembered.

        RandomState is the generator whose stream NumPy keeps for good.
        """
        if epoch not in self._orders:
            order = np.arange(self.num_rows)
            if self.shuffle:
                digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=4).digest()
                order = np.random.RandomState(int.from_bytes(digest, "little")).permutation(self.num_rows)
            for old in [e for e in self._orders if e < epoch - 1 or e > epoch]:
                del self._orders[old]
            self._orders[epoch] = order
        return self._orders[epoch]


def prompts_per_step(data: Data, rollout: Rollout) -> int:
    """Prompts that a step asks for: data.batch_size, and what rollout.overprovision adds."""
    return math.ceil(data.batch_size * rollout.overprovision)


def load_prompts(data: Data, rollout: Rollout, tokenizer: Any, split: Split) -> PromptTable:
    """Read, render, tokenise and check all prompts of a split.

    Raises:
        DataError: files or rows that cannot be used (all of them), prompts over the limit with overlong: error,
            prompts without tokens, or nothing left.
        ConfigError: no room for a prompt, or no files for the split.
    """
    spec = data.train_files if split == "train" else data.val_files
    if spec is None:
        raise ConfigError(Fault(where=f"data.{split}_files", found="not set"))
    limit = prompt_limit(data, rollout)
    renderer = PromptRenderer(
        tokenizer,
        apply_chat_template=data.apply_chat_template,
        system_prompt=data.system_prompt,
        chat_template_kwargs=data.chat_template_kwargs,
    )
    where = f"data.{split}_files"
    tables = open_tables(expand(spec, where))
    build = _Build(PromptTable(data.prompt_key, renderer), limit, data.overlong)
    if is_packed(tables):
        check_tokenizer(tables, tokenizer_digest(tokenizer))
        build.table.packed = True
    else:
        tables.require_column(data.prompt_key, "set data.prompt_key")
    for file, schema in tables.schemas:
        if not build.table.packed:
            build.add_schema(file, schema)
    for chunk in tables.chunks(build.log):
        build.add(chunk)
    return build.finish(split, where, tables.unified.notes if tables.unified else ())


class _Build:
    """Fills a PromptTable chunk by chunk and says at the end what is wrong with it."""

    def __init__(self, table: PromptTable, limit: int, overlong: str) -> None:
        self.table = table
        self.limit = limit
        self.overlong = overlong
        self.log = FaultLog()
        self.bad = RowFaults()
        self.long = RowFaults()
        self.kinds = Kinds()
        self.shortest = self.longest = 0
        self.num_long = self.num_blank = 0
        self.blank_rows: list[int] = []

    def add_schema(self, file: DataFile, schema: pa.Schema) -> None:
        """Note the columns of a parquet file."""
        self.kinds.add_schema(file, schema)
        self.table.columns.update(dict.fromkeys(schema.names))

    def add(self, chunk: Chunk) -> None:
        """Take the rows of a chunk."""
        table = self.table
        if chunk.first == 0:
            table.starts.append((len(table.store), chunk.file))
        if table.packed:
            self._add_packed(chunk)
            return
        for record in chunk.records:
            self.kinds.add_record(chunk.file, record)
            table.columns.update(dict.fromkeys(record))
        start = len(table.store)
        table.store.append(chunk)
        prompts = chunk.column(table.prompt_key)
        for at in range(0, len(prompts), ENCODE_ROWS):
            rendered = table.renderer.render(prompts[at : at + ENCODE_ROWS])
            for i, (text, ids) in enumerate(zip(rendered, table.renderer.token_ids(rendered)), at):
                self._row(chunk, i, start + i, text, ids)

    def _add_packed(self, chunk: Chunk) -> None:
        """Take the rows in the bins of a chunk."""
        table = self.table
        start = len(table.store)
        rows, ids = unpack(chunk, start - table.starts[-1][0], table.prompt_key)
        table.columns.update(dict.fromkeys(rows.batch.schema.names))
        table.store.append(rows)
        for i, one in enumerate(ids):
            self._row(rows, i, start + i, Rendered(), one)

    def _row(self, chunk: Chunk, i: int, index: int, text: Rendered, ids: list[int]) -> None:
        if text.fault or not ids:
            missing = chunk.records and self.table.prompt_key not in chunk.records[i]
            reason = f"no key {self.table.prompt_key!r}" if missing else text.fault or "the prompt has no tokens"
            self.bad.add(chunk.file, chunk.name(i), reason)
            return
        if text.blank:
            self.num_blank += 1
            self.blank_rows.append(index)
        self.shortest = min(self.shortest or len(ids), len(ids))
        self.longest = max(self.longest, len(ids))
        if len(ids) > self.limit:
            self.num_long += 1
            if self.overlong != "truncate_left":
                self.long.add(chunk.file, chunk.name(i), f"over the limit of {self.limit:,} prompt tokens")
                return
            self.table.truncated.add(index)
            ids = ids[-self.limit :]
        self.table.tokens.extend(ids)
        self.table.offsets.append(len(self.table.tokens))
        self.table.kept.append(index)

    def finish(self, split: Split, where: str, notes: Sequence[str]) -> PromptTable:
        """The table, closed; raises DataError with everything that was found."""
        table, rows = self.table, len(self.table.store)
        table.store.close()
        self.kinds.check(self.log)
        self.bad.report(self.log, fix="mend or remove the rows; prompts are strings or lists of {role, content}")
        if self.overlong == "error":
            fix = f"longest has {self.longest:,}; raise data.max_length, or set data.overlong to drop or truncate_left"
            self.long.report(self.log, fix=fix)
        self.log.raise_if_any()
        if not rows:
            raise DataError(Fault(where=where, found="0 rows", allowed="at least one prompt"))
        if not len(table):
            found = f"{rows:,} of {rows:,} rows filtered, limit {self.limit:,}, shortest is {self.shortest:,}"
            raise DataError(Fault(where=where, found=found, fix="raise data.max_length or data.max_prompt_length"))
        dropped = self.num_long if self.overlong == "drop" else 0
        table.counts = {"rows": rows, "dropped": dropped, "truncated": len(table.truncated), "blank": self.num_blank}
        table.notes = (*self._notes(split, dropped), *(f"{split}: {n}" for n in notes))
        return table

    def _notes(self, split: Split, dropped: int) -> list[str]:
        lengths, files = self.table.lengths, len(self.table.starts)
        out = [
            f"{split}: {len(lengths):,} prompts from {files} {'file' if files == 1 else 'files'}, "
            f"{lengths.min():,} to {lengths.max():,} tokens (median {int(np.median(lengths)):,})"
        ]
        if dropped:
            out.append(
                f"{split}: {dropped:,} of {dropped + len(lengths):,} prompts dropped, over {self.limit:,} tokens"
            )
        if self.table.truncated:
            cut = len(self.table.truncated)
            out.append(f"{split}: {cut:,} prompts over {self.limit:,} tokens lost their beginning")
        if self.blank_rows:
            out.append(f"{split}: prompts without content of their own in {name_rows(self.blank_rows)}")
        if self.table.store.spilled:
            out.append(f"{split}: rows beyond {self.table.store.memory_bytes:,} bytes are in a temporary file")
        return out


def prompt_limit(data: Data, rollout: Rollout) -> int:
    """Longest prompt in tokens.

    Raises:
        ConfigError: nothing is left beside the answer.
    """
    if data.max_prompt_length is not None:
        return data.max_prompt_length
    limit = data.max_length - rollout.max_new_tokens
    if limit < 1:
        found = f"{data.max_length}, and rollout.max_new_tokens {rollout.max_new_tokens} leaves no room for a prompt"
        raise ConfigError(Fault(where="data.max_length", found=found, fix="raise the one or lower the other"))
    return limit


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
