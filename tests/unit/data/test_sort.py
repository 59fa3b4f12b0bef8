"""Sorting: an exact permutation, ordered, of the same schema; policies; nothing half-written."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlspeed.data import permute
from rlspeed.data.files import FaultLog, expand
from rlspeed.data.render import PromptRenderer
from rlspeed.data.sort import SortOptions, plan_order, sort_files
from rlspeed.data.tables import open_tables, to_rows
from rlspeed.errors import DataError

FAST = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return PromptRenderer(tokenizer)


def run(renderer, inputs, output, **options):
    return sort_files(expand(inputs, "in"), output, renderer, SortOptions(overwrite=True, **options))


def rows_of(path):
    """Rows through a plain reader, row group by row group."""
    handle = pq.ParquetFile(path)
    groups = range(handle.num_row_groups)
    return [r for g in groups for b in handle.iter_batches(97, row_groups=[g]) for r in b.to_pylist()]


def expected(renderer, rows, key="prompt"):
    lengths = renderer.lengths(renderer.render([r[key] for r in rows]))
    return [rows[i] for i in sorted(range(len(rows)), key=lambda i: lengths[i])]


RICH = pa.schema(
    [
        pa.field(
            "prompt",
            pa.list_(pa.struct([("role", pa.dictionary(pa.int8(), pa.string())), ("content", pa.large_string())])),
        ),
        pa.field("n", pa.int32(), nullable=False, metadata={"unit": "rows"}),
        pa.field("kind", pa.dictionary(pa.int8(), pa.string())),
        pa.field("price", pa.decimal128(12, 2)),
        pa.field("when", pa.timestamp("us", "UTC")),
        pa.field("nothing", pa.null()),
        pa.field(
            "deep", pa.large_list(pa.struct([("a", pa.list_(pa.int16())), ("b", pa.map_(pa.string(), pa.int8()))]))
        ),
        pa.field("raw", pa.binary()),
    ],
    metadata={"made": "by hand", "huggingface": "{}"},
)


def rich_rows(kit, lengths):
    day = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    return [
        {
            "prompt": kit.chat(("system", "s"), ("user", kit.words(n))),
            "n": i,
            "kind": None if i % 5 == 0 else f"k{i % 3}",
            "price": decimal.Decimal(i) / 4,
            "when": day + datetime.timedelta(seconds=i),
            "nothing": None,
            "deep": None if i % 7 == 0 else [{"a": [i % 100, None], "b": [("x", i % 9)]}, {"a": None, "b": None}],
            "raw": bytes([i % 256, 0]),
        }
        for i, n in enumerate(lengths)
    ]


def write_rich(path, rows, **kwargs):
    flat = pa.Table.from_pylist(rows, schema=_without_dictionaries(RICH))
    pq.write_table(flat.cast(RICH), path, **kwargs)
    return path


def _without_dictionaries(schema):
    fields = {
        "prompt": pa.list_(pa.struct([("role", pa.string()), ("content", pa.large_string())])),
        "kind": pa.string(),
    }
    return pa.schema([f.with_type(fields.get(f.name, f.type)) for f in schema], metadata=schema.metadata)


@pytest.mark.parametrize("memory_bytes", [1 << 30, 3000])
def test_every_column_and_all_metadata_come_through(tmp_path, kit, renderer, monkeypatch, memory_bytes):
    """data-17: three row groups, nested and rare types; in memory and through scratch files."""
    monkeypatch.setattr(permute, "PART_BYTES", 5000)
    lengths = np.random.RandomState(0).randint(1, 30, 300)
    rows = rich_rows(kit, lengths)
    source = write_rich(tmp_path / "a.parquet", rows, row_group_size=100, compression="gzip")
    target = tmp_path / "out.parquet"
    monkeypatch.setattr("rlspeed.data.tables.MAX_CHUNK_ROWS", 37)
    report = run(renderer, source, target, memory_bytes=memory_bytes)
    assert rows_of(target) == expected(renderer, rows)
    before, after = pq.ParquetFile(source), pq.ParquetFile(target)
    assert after.schema_arrow.equals(before.schema_arrow, check_metadata=True)
    meta = after.metadata
    assert max(meta.row_group(i).num_rows for i in range(meta.num_row_groups)) <= 100
    assert meta.row_group(0).column(0).compression == "GZIP"
    assert (report.rows_in, report.rows_out, report.tokens) == (300, 300, int((lengths + 6).sum()))
    assert sorted(os.listdir(tmp_path)) == ["a.parquet", "out.parquet"]


PROMPTS = st.one_of(
    st.text(st.sampled_from("ab \u00e9"), min_size=1, max_size=20).filter(lambda s: s.strip()),
    st.lists(st.sampled_from(["a", "b c", "d e f"]), min_size=1, max_size=3),
)
EXTRA = st.fixed_dictionaries(
    {
        "s": st.one_of(st.none(), st.text(max_size=5)),
        "l": st.one_of(st.none(), st.lists(st.integers(-5, 5), max_size=3)),
        "d": st.one_of(st.none(), st.sampled_from(["x", "y"])),
    }
)
SCHEMA = pa.schema(
    [
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("s", pa.large_string()),
        ("l", pa.list_(pa.int8())),
        ("d", pa.dictionary(pa.int32(), pa.string())),
    ]
)


@FAST
@given(
    shards=st.lists(
        st.lists(
            st.tuples(st.lists(st.sampled_from(["a", "b c", "d e f"]), min_size=1, max_size=3), EXTRA), max_size=12
        ),
        min_size=1,
        max_size=3,
    ),
    descending=st.booleans(),
    memory=st.sampled_from([1, 1 << 30]),
)
def test_output_is_a_sorted_permutation_with_the_same_schema(tmp_path_factory, renderer, shards, descending, memory):
    folder = tmp_path_factory.mktemp("sort")
    rows = []
    for i, shard in enumerate(shards):
        made = [{"prompt": [{"role": "user", "content": t} for t in texts], **extra} for texts, extra in shard]
        rows.extend(made)
        flat = SCHEMA.set(3, pa.field("d", pa.string()))
        pq.write_table(pa.Table.from_pylist(made, schema=flat).cast(SCHEMA), folder / f"{i}.parquet", row_group_size=5)
    target = folder / "out" / "o.parquet"
    target.parent.mkdir()
    order = "descending" if descending else "ascending"
    run(renderer, [folder / f"{i}.parquet" for i in range(len(shards))], target, order=order, memory_bytes=memory)
    lengths = renderer.lengths(renderer.render([r["prompt"] for r in rows]))
    sign = -1 if descending else 1
    assert rows_of(target) == [rows[i] for i in sorted(range(len(rows)), key=lambda i: sign * lengths[i])]
    assert pq.ParquetFile(target).schema_arrow.equals(pq.ParquetFile(folder / "0.parquet").schema_arrow)


@FAST
@given(texts=st.lists(PROMPTS, max_size=20), newline=st.sampled_from(["\n", "\r\n"]))
def test_jsonl_lines_move_as_they_are(tmp_path_factory, renderer, texts, newline):
    """data-12, data-15: the bytes of each line stay, whatever the columns hold."""
    folder = tmp_path_factory.mktemp("lines")
    values = [7, 7.5, "7 apples", [1], [], None, {"a": {}}, 10**25]
    rows = [
        {
            "v": values[i % len(values)],
            "prompt": t if isinstance(t, str) else [{"role": "user", "content": x} for x in t],
        }
        for i, t in enumerate(texts)
    ]
    lines = [json.dumps(r, ensure_ascii=i % 2 == 0) for i, r in enumerate(rows)]
    (folder / "a.jsonl").write_bytes(newline.join(lines).encode())
    run(renderer, folder / "a.jsonl", folder / "o.jsonl")
    lengths = renderer.lengths(renderer.render([r["prompt"] for r in rows]))
    order = sorted(range(len(rows)), key=lambda i: lengths[i])
    assert (folder / "o.jsonl").read_bytes() == "".join(lines[i] + "\n" for i in order).encode()


def test_jsonl_becomes_parquet_only_when_nothing_is_retyped(tmp_path, kit, renderer):
    """data-12"""
    rows = [{"prompt": "a b", "x": {"y": [1]}, "z": 1}, {"prompt": "a", "x": {"y": []}, "z": None}, {"prompt": "b"}]
    report = run(renderer, kit.write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "o.parquet")
    assert report.rows_out == 3
    got = rows_of(tmp_path / "o.parquet")
    assert got == [{**rows[1]}, {"prompt": "b", "x": None, "z": None}, rows[0]]
    assert pq.read_schema(tmp_path / "o.parquet").field("z").type == pa.int64()
    for second in (7.5, "7 apples", [7]):
        path = kit.write_jsonl(tmp_path / "b.jsonl", [{"prompt": "a", "v": 7}, {"prompt": "a", "v": second}])
        with pytest.raises(DataError, match=r"b\.jsonl: line 2, column 'v'"):
            run(renderer, path, tmp_path / "no.parquet")
    assert not (tmp_path / "no.parquet").exists()


def test_parquet_becomes_jsonl_with_dates_as_text(tmp_path, kit, renderer):
    rows = [{"prompt": "a b", "d": datetime.date(2024, 1, 2)}, {"prompt": "a", "d": None}]
    report = run(renderer, kit.write_parquet(tmp_path / "a.parquet", rows), tmp_path / "o.jsonl")
    got = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert got == [{"prompt": "a", "d": None}, {"prompt": "a b", "d": "2024-01-02"}]
    assert any("text" in n for n in report.notes)
    binary = kit.write_parquet(tmp_path / "b.parquet", [{"prompt": "a", "raw": b"x"}])
    with pytest.raises(DataError, match="'raw'"):
        run(renderer, binary, tmp_path / "no.jsonl")


def test_mixed_formats_become_one_file(tmp_path, kit, renderer):
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    kit.write_parquet(tmp_path / "in" / "a.parquet", [{"prompt": "a b c", "n": 1}])
    kit.write_jsonl(tmp_path / "in" / "b.jsonl", [{"prompt": "a", "n": 2}])
    for name in ("o.parquet", "o.jsonl"):
        run(renderer, tmp_path / "in", tmp_path / "out" / name)
    want = [{"prompt": "a", "n": 2}, {"prompt": "a b c", "n": 1}]
    assert rows_of(tmp_path / "out" / "o.parquet") == want
    assert [json.loads(x) for x in (tmp_path / "out" / "o.jsonl").read_text().splitlines()] == want


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_length_column_comes_only_on_request(tmp_path, kit, renderer, kind):
    write = kit.write_parquet if kind == "parquet" else kit.write_jsonl
    source = write(tmp_path / f"a.{kind}", [{"prompt": "a b c"}, {"prompt": "a"}])
    for name, want in ((None, None), ("tokens", [1, 3])):
        run(renderer, source, tmp_path / f"o.{kind}", length_column=name)
        log = FaultLog()
        chunks = open_tables(expand(tmp_path / f"o.{kind}", "in")).chunks(log)
        rows = [r for c in chunks for r in to_rows(c.batch)]
        assert [r.get("tokens") for r in rows] == (want or [None, None])
        assert list(rows[0]) == ["prompt"] + (["tokens"] if name else [])
    with pytest.raises(DataError, match="has a column 'prompt' already"):
        run(renderer, source, tmp_path / f"o.{kind}", length_column="prompt")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_overlong_policies(tmp_path, kit, renderer, kind):
    """data-09 for files: named, dropped, cut from the left in their own form, or kept; all counted."""
    parts = [{"role": "system", "content": "s t"}, {"role": "user", "content": kit.words(20)}]
    rows = [{"prompt": parts, "n": 0}, {"prompt": kit.chat(("user", "a")), "n": 1}]
    write = kit.write_parquet if kind == "parquet" else kit.write_jsonl
    source, target = write(tmp_path / f"a.{kind}", rows), tmp_path / f"o.{kind}"

    def got():
        return rows_of(target) if kind == "parquet" else [json.loads(x) for x in target.read_text().splitlines()]

    with pytest.raises(DataError, match="row 0") as caught:
        run(renderer, source, target, max_length=10)
    assert "longest has 27" in str(caught.value)
    assert not target.exists()
    assert run(renderer, source, target, max_length=10, overlong="drop").dropped_overlong == 1
    assert [r["n"] for r in got()] == [1]
    assert run(renderer, source, target, max_length=10, overlong="keep").kept_overlong == 1
    assert [r["n"] for r in got()] == [1, 0]
    report = run(renderer, source, target, max_length=10, overlong="truncate_left", length_column="tokens")
    assert report.truncated == 1
    cut = got()[1]
    assert cut["tokens"] == 10
    assert [m["role"] for m in cut["prompt"]] == ["system", "user"]
    assert kit.words(20).endswith(cut["prompt"][1]["content"])
    assert renderer.lengths(renderer.render([cut["prompt"]])) == [10]
    with pytest.raises(DataError, match="without any text"):
        run(renderer, source, target, max_length=4, overlong="truncate_left")


def test_rows_without_a_usable_prompt(tmp_path, kit, renderer):
    """data-13: named by row, or dropped, or kept as length 0; nothing is lost silently."""
    prompts = ["a b", "", None, kit.chat(("user", "")), "   ", [{"content": "x"}], [], "a"]
    path = kit.write_jsonl(tmp_path / "a.jsonl", [{"prompt": p, "n": i} for i, p in enumerate(prompts)])
    with pytest.raises(DataError) as caught:
        run(renderer, path, tmp_path / "o.jsonl")
    text = str(caught.value)
    assert "rows 1 (line 2), 4 (line 5)" in text
    assert "row 2 (line 3)" in text
    assert "row 5 (line 6)" in text
    assert not (tmp_path / "o.jsonl").exists()

    def order():
        return [json.loads(x)["n"] for x in (tmp_path / "o.jsonl").read_text().splitlines()]

    report = run(renderer, path, tmp_path / "o.jsonl", bad_rows="drop")
    assert (report.rows_out, report.dropped_bad) == (4, 4)
    assert order() == [6, 7, 0, 3]
    assert any("2 prompts have no content" in n for n in report.notes)
    run(renderer, path, tmp_path / "o.jsonl", bad_rows="keep")
    assert order() == [1, 2, 4, 5, 6, 7, 0, 3]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_no_rows_make_a_valid_empty_file(tmp_path, kit, renderer, kind):
    """data-11"""
    schema = pa.schema([("prompt", pa.string()), ("n", pa.int8())], metadata={"a": "b"})
    source = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(schema.empty_table(), source)
    else:
        source.write_text("")
    report = run(renderer, source, tmp_path / f"o.{kind}")
    assert (report.rows_in, report.rows_out) == (0, 0)
    if kind == "parquet":
        assert pq.read_schema(tmp_path / "o.parquet").equals(schema, check_metadata=True)
        assert pq.read_table(tmp_path / "o.parquet").num_rows == 0
    else:
        assert (tmp_path / "o.jsonl").read_bytes() == b""


def test_bad_input_is_refused_with_everything_named_and_nothing_written(tmp_path, kit, renderer):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n{"prompt": null}\n[]\n')
    with pytest.raises(DataError) as caught:
        run(renderer, tmp_path / "in", tmp_path / "o.jsonl")
    assert {f.where.rsplit(": ", 1)[1] for f in caught.value.faults} == {"line 2", "line 4", "row 1 (line 3)"}
    assert os.listdir(tmp_path) == ["in"]


def test_outputs_are_looked_at_before_any_work(tmp_path, kit, renderer):
    source = kit.write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    for target, why in (
        (tmp_path / "no" / "o.jsonl", "does not exist"),
        (tmp_path / "o.csv", "ends in"),
        (tmp_path, "directory"),
    ):
        with pytest.raises(DataError, match=why):
            run(renderer, source, target)
    with pytest.raises(DataError, match="exists"):
        sort_files(expand(source, "in"), source, renderer, SortOptions())
    assert run(renderer, source, source).rows_out == 1


def test_equal_lengths_keep_their_order_in_both_directions():
    lengths = np.array([3, 1, 3, 2, 1], np.int32)
    assert plan_order(lengths, "ascending").tolist() == [1, 4, 3, 0, 2]
    assert plan_order(lengths, "descending").tolist() == [0, 2, 3, 1, 4]


def test_buckets_waste_little_and_their_lengths_do_not_run_in_a_saw_tooth():
    """data-19: log-normal lengths, batch 8."""
    lengths = np.random.RandomState(3).lognormal(5, 0.6, 1003).astype(np.int32)
    order = plan_order(lengths, "bucket", bucket_rows=8, seed=1, longest_first=True)
    assert sorted(order.tolist()) == list(range(1003))
    batches = lengths[order][:1000].reshape(-1, 8)
    assert 1 - batches.sum() / (batches.max(axis=1) * 8).sum() < 0.04  # in input order it is 0.54
    means = batches.mean(axis=1)
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.25
    assert batches[0].max() == lengths.max()
    assert lengths[order][-3:].max() <= batches.min()
    assert (np.diff(batches, axis=1) < 0).any()
    assert order.tolist() == plan_order(lengths, "bucket", bucket_rows=8, seed=1, longest_first=True).tolist()
    assert order.tolist() != plan_order(lengths, "bucket", bucket_rows=8, seed=2, longest_first=True).tolist()


INTERRUPTED = """
import os, signal, sys, threading
# a shell that starts its jobs in the background hands SIGINT down ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from rlspeed.data import permute, sort
from rlspeed.data.files import expand
from rlspeed.data.render import PromptRenderer, load_tokenizer
renderer = PromptRenderer(load_tokenizer(sys.argv[1], without_torch=True))
def progress(phase, done, total):
    if phase == sys.argv[4]:
        print("there", flush=True)
        signal.pause()
permute.PART_BYTES = 2000
options = sort.SortOptions(memory_bytes=1000)
sort.sort_files(expand(sys.argv[2], "in"), Path(sys.argv[3]), renderer, options, progress)
"""


@pytest.mark.parametrize(
    ("phase", "how"), [("read", signal.SIGINT), ("write", signal.SIGINT), ("write", signal.SIGKILL)]
)
def test_whatever_ends_the_process_leaves_nothing_behind(tmp_path, kit, tokenizer_dir, phase, how):
    rows = [{"prompt": kit.words(1 + i % 9), "text": "x" * 50} for i in range(400)]
    source = kit.write_parquet(tmp_path / "a.parquet", rows)
    command = [sys.executable, "-c", INTERRUPTED, str(tokenizer_dir), str(source), str(tmp_path / "o.parquet"), phase]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "there\n"
    time.sleep(0.05)
    child.send_signal(how)
    child.communicate(timeout=60)
    assert child.returncode != 0
    assert os.listdir(tmp_path) == ["a.parquet"]


def test_a_full_disk_says_so_and_leaves_nothing(tmp_path, kit, renderer, monkeypatch):
    source = kit.write_parquet(tmp_path / "a.parquet", [{"prompt": "a"}])

    def full(self, table):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlspeed.data.write.TableWriter.write", full)
    with pytest.raises(DataError, match="No space left on device"):
        run(renderer, source, tmp_path / "o.parquet")
    assert os.listdir(tmp_path) == ["a.parquet"]


def test_one_very_long_row(tmp_path, kit, renderer):
    rows = [{"prompt": "a", "blob": "x" * 100_000_000}, {"prompt": "a b", "blob": "y"}]
    source = kit.write_parquet(tmp_path / "a.parquet", rows)
    run(renderer, source, tmp_path / "o.parquet", order="descending")
    assert [len(r["blob"]) for r in rows_of(tmp_path / "o.parquet")] == [1, 100_000_000]


@pytest.mark.slow
def test_more_text_than_32_bit_offsets_reach(tmp_path, renderer):
    """data-02: 1 MiB x 2200 of type string."""
    path = tmp_path / "big.parquet"
    schema = pa.schema([("prompt", pa.string()), ("blob", pa.string())])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for i in range(22):
            texts = [chr(97 + i) * (1 << 20) for _ in range(100)]
            writer.write_batch(
                pa.record_batch([["a b c"[: 1 + 2 * (k % 3)] for k in range(100)], texts], schema=schema)
            )
    run(renderer, path, tmp_path / "o.parquet")
    seen = np.zeros(26, int)
    last = 0
    for batch in pq.ParquetFile(tmp_path / "o.parquet").iter_batches(20):
        for row in batch.to_pylist():
            assert len(row["prompt"]) >= last
            last = len(row["prompt"])
            seen[ord(row["blob"][0]) - 97] += 1
    assert seen.tolist() == [100] * 22 + [0] * 4
