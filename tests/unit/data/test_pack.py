"""Packing files: whole rows, each once, boundaries right, nothing lost without a count."""

from __future__ import annotations

import hashlib
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlspeed.config.schema import Data, Rollout
from rlspeed.data import permute
from rlspeed.data.files import expand
from rlspeed.data.pack import PackOptions, pack_files, plan_bins
from rlspeed.data.prompts import load_prompts
from rlspeed.data.render import PromptRenderer, load_tokenizer, tokenizer_digest
from rlspeed.errors import DataError, LayoutError

FAST = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def run(inputs, output, renderer=None, **options):
    return pack_files(expand(inputs, "in"), output, renderer, PackOptions(overwrite=True, **options))


def write_ids(path, rows, schema=None):
    schema = schema or pa.schema([("input_ids", pa.list_(pa.int64()))])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


def unpacked(path):
    """{row id: ids} of a packed file, its boundaries checked."""
    out = {}
    for row in pq.read_table(path).to_pylist():
        ends = row["cu_seqlens"]
        assert ends[0] == 0
        assert ends[-1] == len(row["input_ids"])
        assert len(ends) == len(row["row_ids"]) + 1
        for index, a, b in zip(row["row_ids"], ends, ends[1:]):
            assert index not in out
            out[index] = row["input_ids"][a:b]
    return out


def test_rows_over_the_capacity_are_named_or_counted(tmp_path):
    """pack-14: capacity 3, lengths 4, 2, 3, 1."""
    source = write_ids(tmp_path / "a.parquet", [{"input_ids": list(range(n))} for n in (4, 2, 3, 1)])
    with pytest.raises(DataError, match=r"row 0: length 4 > 3"):
        run(source, tmp_path / "o.parquet", capacity=3)
    assert os.listdir(tmp_path) == ["a.parquet"]
    dropped = run(source, tmp_path / "o.parquet", capacity=3, overlong="drop")
    assert (dropped.tokens_in, dropped.tokens_out, dropped.tokens_dropped, dropped.dropped_overlong) == (10, 6, 4, 1)
    assert unpacked(tmp_path / "o.parquet") == {1: [0, 1], 2: [0, 1, 2], 3: [0]}
    cut = run(source, tmp_path / "o.parquet", capacity=3, overlong="truncate_left")
    assert (cut.tokens_in, cut.tokens_out, cut.tokens_dropped, cut.truncated) == (10, 9, 1, 1)
    assert unpacked(tmp_path / "o.parquet")[0] == [1, 2, 3]
    assert (cut.bins, cut.lower_bound, cut.fill) == (3, 3, 1.0)


def test_lengths_come_from_the_mask_never_from_the_ids(tmp_path):
    """pack-17, pack-19, pack-20: pad = eos inside and after, left padding, an end by the other eos id, no end."""
    rows = [
        {"input_ids": [5, 6, 2, 7, 8, 2, 2, 2], "attention_mask": [1] * 6 + [0] * 2},
        {"input_ids": [0, 0, 5, 6, 7], "attention_mask": [0, 0, 1, 1, 1]},
        {"input_ids": [9, 8, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0]},
        {"input_ids": [9, 3, 0, 0, 0], "attention_mask": [1, 1, 0, 0, 0]},
        {"input_ids": [4, 4, 4, 2, 2], "attention_mask": None},
    ]
    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("attention_mask", pa.list_(pa.int8()))])
    run(write_ids(tmp_path / "a.parquet", rows, schema), tmp_path / "o.parquet", capacity=16)
    got = unpacked(tmp_path / "o.parquet")
    assert [got[i] for i in range(5)] == [[5, 6, 2, 7, 8, 2], [5, 6, 7], [9, 8, 7], [9, 3], [4, 4, 4, 2, 2]]


def test_exactly_one_end_token_trains_and_none_is_invented(tmp_path):
    """pack-21: pad = eos = 2; a finished answer and one that was cut by length."""
    rows = [
        {"input_ids": [5, 6, 2, 2, 2], "attention_mask": [1, 1, 1, 0, 0], "labels": [-100, 6, 2, -100, -100]},
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [5, 6, 7]},
    ]
    kinds = [("input_ids", pa.int32()), ("attention_mask", pa.int8()), ("labels", pa.int64())]
    schema = pa.schema([(name, pa.list_(kind)) for name, kind in kinds])
    run(write_ids(tmp_path / "a.parquet", rows, schema), tmp_path / "o.parquet", capacity=8)
    row = pq.read_table(tmp_path / "o.parquet").to_pylist()[0]
    assert row["input_ids"] == [5, 6, 2, 5, 6, 7]
    assert row["loss_mask"] == [False, True, True, False, True, True]
    assert sum(m for t, m in zip(row["input_ids"], row["loss_mask"]) if t == 2) == 1


def test_rows_of_ids_that_cannot_be_used_are_named(tmp_path):
    rows = [
        {"input_ids": [1], "attention_mask": [1]},
        {"input_ids": [], "attention_mask": []},
        {"input_ids": None, "attention_mask": None},
        {"input_ids": [1, 2], "attention_mask": [1]},
        {"input_ids": [1, -5], "attention_mask": [1, 1]},
        {"input_ids": [1], "attention_mask": [0]},
    ]
    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("attention_mask", pa.list_(pa.int8()))])
    source = write_ids(tmp_path / "a.parquet", rows, schema)
    with pytest.raises(DataError) as caught:
        run(source, tmp_path / "o.parquet", capacity=8)
    assert [f.where.rsplit(": ", 1)[1] for f in caught.value.faults] == [f"row {i}" for i in range(1, 6)]
    assert run(source, tmp_path / "o.parquet", capacity=8, bad_rows="drop").rows_out == 1
    text = write_ids(tmp_path / "b.parquet", [{"input_ids": ["x"]}], pa.schema([("input_ids", pa.list_(pa.string()))]))
    with pytest.raises(DataError, match="list of integers"):
        run(text, tmp_path / "o.parquet", capacity=8)
    none = write_ids(tmp_path / "c.parquet", [{"p": "x"}], pa.schema([("p", pa.string())]))
    with pytest.raises(DataError, match="no tokenizer"):
        run(none, tmp_path / "o.parquet", capacity=8)


@FAST
@given(
    lengths=st.lists(st.integers(1, 12), max_size=40),
    ranks=st.integers(1, 3),
    memory=st.sampled_from([1, 1 << 30]),
    keep=st.booleans(),
)
def test_every_row_is_packed_once_and_whole(tmp_path_factory, lengths, ranks, memory, keep):
    folder = tmp_path_factory.mktemp("pack")
    rows = [{"input_ids": [i * 100 + k for k in range(n)], "n": i, "d": f"k{i % 3}"} for i, n in enumerate(lengths)]
    schema = pa.schema(
        [("input_ids", pa.list_(pa.int32())), ("n", pa.int64()), ("d", pa.string())],
    )
    write_ids(folder / "a.parquet", rows, schema)
    before = permute.PART_BYTES
    permute.PART_BYTES = 200
    try:
        report = run(
            folder / "a.parquet", folder / "o.parquet", capacity=12, ranks=ranks, memory_bytes=memory, keep_columns=keep
        )
    finally:
        permute.PART_BYTES = before
    assert unpacked(folder / "o.parquet") == {i: r["input_ids"] for i, r in enumerate(rows)}
    table = pq.read_table(folder / "o.parquet")
    assert report.tokens_in == report.tokens_out == sum(lengths)
    assert all(len(r["input_ids"]) <= 12 for r in table.to_pylist())
    if keep:
        for row in table.to_pylist():
            assert row["rows"] == [{"n": i, "d": f"k{i % 3}"} for i in row["row_ids"]]
    if ranks > 1:
        assert table.column("rank").to_pylist() == list(range(ranks)) * (table.num_rows // ranks)


def test_work_is_even_over_ranks_and_all_have_the_same_number_of_bins():
    lengths = np.random.RandomState(0).lognormal(5.7, 0.8, 2000).clip(1, 4000).astype(np.int32)
    bins = plan_bins(lengths, np.arange(2000), 4096, ranks=4)
    assert len(bins.rows) % 4 == 0
    assert bins.rank_work < 1.001
    assert sorted(i for b in bins.rows for i in b) == list(range(2000))
    with pytest.raises(LayoutError, match="multiple"):
        plan_bins(lengths, np.arange(2000), 4097, multiple=8)


def test_the_manifest_says_where_everything_came_from(tmp_path, kit, tokenizer, tokenizer_dir):
    source = kit.write_jsonl(tmp_path / "a.jsonl", [{"prompt": kit.words(n)} for n in (3, 5, 2)])
    options = PackOptions(capacity=8)
    files = expand(source, "in")
    report = pack_files(files, tmp_path / "o.parquet", PromptRenderer(tokenizer), options, tokenizer_name="tok")
    manifest = json.loads((tmp_path / "o.parquet.manifest.json").read_text())
    assert manifest["tokenizer"] == {"name": "tok", "digest": tokenizer_digest(tokenizer)}
    assert tokenizer_digest(tokenizer) == tokenizer_digest(load_tokenizer(str(tokenizer_dir)))
    assert manifest["files"][0]["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert manifest["settings"]["capacity"] == 8
    assert manifest["result"]["bins"] == report.bins == 2
    inside = json.loads(pq.read_schema(tmp_path / "o.parquet").metadata[b"rlspeed.pack"])
    assert inside["tokenizer"] == manifest["tokenizer"]


def test_plan_only_writes_row_numbers(tmp_path, kit, tokenizer):
    source = kit.write_jsonl(tmp_path / "a.jsonl", [{"prompt": kit.words(n)} for n in (3, 5, 2)])
    run(source, tmp_path / "plan.json", PromptRenderer(tokenizer), capacity=8, plan_only=True)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["bins"] == [[0, 1], [2]]
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "plan.json"]


def test_no_rows_make_a_valid_empty_file(tmp_path, kit, tokenizer):
    """data-11"""
    source = tmp_path / "a.parquet"
    pq.write_table(pa.schema([("prompt", pa.string())]).empty_table(), source)
    report = run(source, tmp_path / "o.parquet", PromptRenderer(tokenizer), capacity=8)
    assert (report.rows_in, report.bins, report.fill) == (0, 0, 1.0)
    assert pq.read_schema(tmp_path / "o.parquet").names == ["input_ids", "cu_seqlens", "row_ids"]
    assert pq.read_table(tmp_path / "o.parquet").num_rows == 0


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_training_reads_packed_files_as_the_rows_they_came_from(tmp_path, kit, tokenizer, kind):
    rows = [
        {"prompt": kit.chat(("user", kit.words(n))), "reward_model": {"ground_truth": str(n)}, "level": n}
        for n in (4, 1, 7, 2, 6)
    ]
    write = kit.write_parquet if kind == "parquet" else kit.write_jsonl
    source = write(tmp_path / f"a.{kind}", rows)
    run(source, tmp_path / "o.parquet", PromptRenderer(tokenizer), capacity=16, keep_columns=True)

    def load(path, tok=tokenizer):
        return load_prompts(Data(train_files=str(path), max_prompt_length=100), Rollout(), tok, "train")

    plain = {r.columns["level"]: r for r in load(source)}
    packed = load(tmp_path / "o.parquet")
    assert len(packed) == 5
    for row in packed:
        want = plain[row.columns["level"]]
        assert row.token_ids == want.token_ids
        assert (row.prompt, row.ground_truth, row.columns) == (want.prompt, want.ground_truth, want.columns)
        assert row.text.split() == want.text.split()
    other = load_tokenizer(str(kit.make_tokenizer(tmp_path / "other", template="{{ messages }}")))
    with pytest.raises(DataError, match="another tokenizer"):
        load(tmp_path / "o.parquet", other)
    with pytest.raises(DataError, match="not packed"):
        load_prompts(
            Data(train_files=[str(tmp_path / "o.parquet"), str(source)], max_prompt_length=100),
            Rollout(),
            tokenizer,
            "train",
        )
    run(source, tmp_path / "bare.parquet", PromptRenderer(tokenizer), capacity=16)
    bare = load(tmp_path / "bare.parquet")
    assert sorted(r.columns["row_id"] for r in bare) == [0, 1, 2, 3, 4]
    assert all(r.prompt == r.text for r in bare)
