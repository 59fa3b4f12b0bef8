"""The table of prompts and the stream of batches."""

from __future__ import annotations

import json

import pytest

from rlspeed.config.schema import Data, Rollout
from rlspeed.data.prompts import PromptStream, load_prompts, prompt_limit
from rlspeed.data.store import RowStore
from rlspeed.errors import ConfigError, DataError


def load(tokenizer, path, split="train", **keys):
    data = Data(train_files=str(path), val_files=str(path), **{"max_prompt_length": 100, **keys})
    return load_prompts(data, Rollout(), tokenizer, split)


VERL = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "a b"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"index": 3, "split": "train"},
}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_verl_rows_come_as_they_are(tmp_path, tokenizer, kit, kind):
    write = kit.write_parquet if kind == "parquet" else kit.write_jsonl
    table = load(tokenizer, write(tmp_path / f"a.{kind}", [VERL, {**VERL, "extra_info": None}]))
    row = table[0]
    assert row.prompt == VERL["prompt"]
    assert row.text == "<user> a b <eos> <assistant>"
    assert list(row.token_ids) == tokenizer(row.text)["input_ids"]
    assert (row.data_source, row.ground_truth, row.extra_info) == ("gsm8k", "7", VERL["extra_info"])
    assert row.columns["ability"] == "math"
    assert "prompt" not in row.columns
    assert table[1].extra_info == table[1].columns["extra_info"] == {}
    assert (row.index, row.file_row, row.file.path.name) == (0, 0, f"a.{kind}")


def test_trl_rows_pass_all_columns_on(tmp_path, tokenizer, kit):
    rows = [{"prompt": "a b", "solution": "7", "level": 2}, {"prompt": [{"role": "user", "content": "a"}], "n": [1]}]
    table = load(tokenizer, kit.write_jsonl(tmp_path / "a.jsonl", rows))
    assert [r.ground_truth for r in table] == ["7", None]
    assert table[0].columns == {"solution": "7", "level": 2, "n": None}
    assert table[1].columns == {"solution": None, "level": None, "n": [1]}
    assert table[0].data_source is None
    assert table[0].extra_info == {}


def test_json_strings_are_tolerated(tmp_path, tokenizer, kit):
    row = {**VERL, "reward_model": {"ground_truth": '{"x": 1}'}, "extra_info": '{"index": 3}'}
    got = load(tokenizer, kit.write_jsonl(tmp_path / "a.jsonl", [row]))[0]
    assert got.ground_truth == '{"x": 1}'
    assert got.extra_info == {"index": 3}


def test_what_a_caller_changes_does_not_come_back(tmp_path, tokenizer, kit):
    table = load(tokenizer, kit.write_parquet(tmp_path / "a.parquet", [VERL]))
    row = table[0]
    row.extra_info["index"] = 99
    row.columns["reward_model"]["ground_truth"] = "8"
    row.prompt[0]["content"] = "changed"
    again = table[0]
    assert again.extra_info["index"] == 3
    assert again.columns["reward_model"]["ground_truth"] == "7"
    assert again.prompt == VERL["prompt"]


def test_long_prompts_are_an_error_that_names_the_rows(tmp_path, tokenizer, kit):
    """data-09"""
    path = kit.write_jsonl(tmp_path / "a.jsonl", [{"prompt": kit.words(n)} for n in (5, 12, 8, 20)])
    with pytest.raises(DataError) as caught:
        load(tokenizer, path, max_prompt_length=8)
    text = str(caught.value)
    assert "a.jsonl: rows 1 (line 2), 3 (line 4)" in text
    assert "limit of 8" in text
    assert "longest has 20" in text


def test_truncate_left_cuts_what_generator_and_trainer_share(tmp_path, tokenizer, kit):
    """data-09: ids[4:] of 12, and a count."""
    path = kit.write_jsonl(tmp_path / "a.jsonl", [{"prompt": kit.words(12)}, {"prompt": kit.words(3)}])
    table = load(tokenizer, path, max_prompt_length=8, overlong="truncate_left")
    assert list(table[0].token_ids) == tokenizer(kit.words(12))["input_ids"][4:]
    assert table[0].text == " ".join(kit.words(12).split()[4:])
    assert [r.truncated for r in table] == [True, False]
    assert table.counts["truncated"] == 1
    assert any("1 prompts over 8" in n for n in table.notes)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("form", ["string", "messages"])
def test_the_limit_holds_for_every_form_and_split(tmp_path, tokenizer, kit, split, form):
    """data-10: a 20-token prompt, as a string and as a message list, limit 10."""
    prompts = {"string": [kit.words(20), "a"], "messages": [kit.chat(("user", kit.words(17))), kit.chat(("user", "a"))]}
    path = kit.write_jsonl(tmp_path / "a.jsonl", [{"prompt": p} for p in prompts[form]])
    table = load(tokenizer, path, split, max_prompt_length=10, overlong="drop")
    assert table.counts["dropped"] == 1
    assert [r.index for r in table] == [1]
    assert any("1 of 2 prompts dropped" in n for n in table.notes)


def test_nothing_left_is_an_error(tmp_path, tokenizer, kit):
    """data-11"""
    path = kit.write_jsonl(tmp_path / "a.jsonl", [{"prompt": kit.words(n)} for n in (9, 5, 7)])
    with pytest.raises(DataError, match="3 of 3 rows filtered, limit 4, shortest is 5"):
        load(tokenizer, path, max_prompt_length=4, overlong="drop")
    empty = kit.write_jsonl(tmp_path / "b.jsonl", [])
    with pytest.raises(DataError, match="0 rows"):
        load(tokenizer, empty)


def test_prompts_without_tokens_are_errors_at_load(tmp_path, tokenizer, kit):
    """data-13: by row; blank ones that still render are kept and reported."""
    rows = ["a", "", kit.chat(("user", "")), None, "   "]
    path = kit.write_jsonl(tmp_path / "a.jsonl", [{"prompt": p} for p in rows] + [{"text": "a"}])
    with pytest.raises(DataError) as caught:
        load(tokenizer, path)
    found = {f.found: f.where for f in caught.value.faults}
    assert found["the prompt has no tokens"].endswith("rows 1 (line 2), 4 (line 5)")
    assert found["the prompt is null"].endswith("row 3 (line 4)")
    assert found["no key 'prompt'"].endswith("row 5 (line 6)")
    table = load(tokenizer, kit.write_jsonl(tmp_path / "b.jsonl", [{"prompt": p} for p in (rows[0], rows[2])]))
    assert len(table) == 2
    assert any(n.endswith("without content of their own in row 1") for n in table.notes)


def test_a_missing_column_names_those_that_are_there(tmp_path, tokenizer, kit):
    path = kit.write_parquet(tmp_path / "a.parquet", [{"question": "a"}])
    with pytest.raises(DataError, match="question"):
        load(tokenizer, path)
    assert len(load(tokenizer, path, prompt_key="question")) == 1


def test_files_are_one_table_in_order(tmp_path, tokenizer, kit):
    kit.write_parquet(tmp_path / "a.parquet", [{"prompt": "a", "n": 0}, {"prompt": "b", "n": 1}])
    kit.write_jsonl(tmp_path / "b.jsonl", [{"prompt": "c", "n": 2}])
    table = load(tokenizer, tmp_path)
    assert [r.columns["n"] for r in table] == [0, 1, 2]
    assert [(r.file.path.name, r.file_row) for r in table] == [("a.parquet", 0), ("a.parquet", 1), ("b.jsonl", 0)]
    kit.write_jsonl(tmp_path / "c.jsonl", [{"prompt": "c", "n": {"x": 1}}])
    with pytest.raises(DataError, match="'n'"):
        load(tokenizer, tmp_path)


def test_no_room_for_a_prompt_is_a_fault_of_the_configuration():
    assert prompt_limit(Data(train_files="x", max_length=1024), Rollout(max_new_tokens=512)) == 512
    with pytest.raises(ConfigError, match="leaves no room"):
        prompt_limit(Data(train_files="x", max_length=512), Rollout(max_new_tokens=512))


def test_rows_beyond_the_limit_of_memory_come_from_a_file_without_a_name(tmp_path, tokenizer, kit, monkeypatch):
    """data-16"""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("rlspeed.data.tables.MAX_CHUNK_ROWS", 10)
    monkeypatch.setattr("rlspeed.data.prompts.RowStore", lambda: RowStore(memory_bytes=2000))
    rows = [{"prompt": kit.words(1 + i % 5), "n": i, "deep": {"a": [i]}} for i in range(95)]
    kit.write_parquet(tmp_path / "a.parquet", rows)
    kit.write_jsonl(tmp_path / "b.jsonl", rows)
    table = load(tokenizer, [str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")][0])
    mixed = load_prompts(
        Data(train_files=[str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")], max_prompt_length=50),
        Rollout(),
        tokenizer,
        "train",
    )
    assert table.store.spilled
    assert [r.columns for r in table] == [{"n": r["n"], "deep": r["deep"]} for r in rows]
    assert [r.columns["n"] for r in mixed] == [*range(95), *range(95)]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_every_epoch_has_each_prompt_once_and_every_batch_is_full():
    stream = PromptStream(10, 4, True, 7)
    drawn = [i for step in range(15) for i in stream.batch(step)]
    epochs = [drawn[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(e) == list(range(10)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 6
    assert all(len(stream.batch(step)) == 4 for step in range(15))
    assert [stream.epoch(step) for step in range(6)] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("stop", [7, 5, 1])
def test_a_resumed_stream_goes_on_as_the_unbroken_one(stop):
    """life-01: 10 prompts, batch 2; stopped inside epoch 2, at the end of epoch 1, at the start."""
    whole = PromptStream(10, 2, True, 0)
    unbroken = [whole.batch(step) for step in range(15)]
    resumed = PromptStream(10, 2, True, 0)
    assert [resumed.batch(step) for step in range(stop, 15)] == unbroken[stop:]
    assert [whole.batch(step) for step in (14, 3, 9)] == [unbroken[14], unbroken[3], unbroken[9]]
    assert PromptStream(10, 2, True, 1).batch(0) != unbroken[0]


def test_the_order_of_a_seed_is_fixed_for_good():
    """A checkpoint made today must go on in the same order with tomorrow's libraries."""
    assert PromptStream(10, 5, True, 0).batch(0) == [6, 2, 7, 5, 0]
    assert PromptStream(10, 5, False, 0).batch(3) == [5, 6, 7, 8, 9]


def test_fewer_prompts_than_a_batch_make_an_epoch_a_batch():
    stream = PromptStream(3, 8, True, 0)
    assert sorted(stream.batch(0)) == sorted(stream.batch(5)) == [0, 1, 2]
    assert stream.epoch(5) == 5


def test_packaged_prompts_are_named_when_they_are_missing(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr("rlspeed.data.files.resource_files", lambda name: tmp_path)
    with pytest.raises(DataError, match="packaged file"):
        load(tokenizer, "quickstart:train")
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "train.parquet").write_bytes(_parquet(tmp_path, json.loads('[{"prompt": "a"}]')))
    assert len(load(tokenizer, "quickstart:train")) == 1


def _parquet(folder, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), folder / "x.parquet")
    return (folder / "x.parquet").read_bytes()
