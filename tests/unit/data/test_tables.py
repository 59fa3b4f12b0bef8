"""Reading parquet and JSONL: bytes in, rows out, every fault by file and row."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlspeed.data import tables
from rlspeed.data.files import FaultLog, expand
from rlspeed.data.schema import Kinds, unify
from rlspeed.data.tables import open_tables, to_rows
from rlspeed.errors import DataError


def read(*paths, columns=None):
    log = FaultLog()
    opened = open_tables(expand(list(paths), "in"))
    chunks = list(opened.chunks(log, columns))
    log.raise_if_any()
    return [row for chunk in chunks for row in to_rows(chunk.batch)]


def test_bom_crlf_blank_lines_and_a_missing_last_newline_read_as_if_plain(tmp_path):
    """data-15"""
    rows = [{"prompt": "x\u2028y", "n": 1}, {"prompt": "\u00e9", "n": 2}]
    lines = [json.dumps(r, ensure_ascii=False).encode() for r in rows]
    plain, odd = tmp_path / "plain.jsonl", tmp_path / "odd.jsonl"
    plain.write_bytes(b"\n".join(lines) + b"\n")
    odd.write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(lines))
    assert read(odd) == read(plain) == rows
    packed = tmp_path / "odd.jsonl.gz"
    packed.write_bytes(gzip.compress(odd.read_bytes()))
    assert read(packed) == rows


def test_lines_longer_than_a_block_come_whole(tmp_path, kit):
    path = kit.write_jsonl(tmp_path / "a.jsonl", [{"p": "x" * 9_000_000}, {"p": "y"}, {"p": "z" * 5_000_000}])
    assert [len(r["p"]) for r in read(path)] == [9_000_000, 1, 5_000_000]


def test_json_values_are_never_retyped(tmp_path, kit):
    """data-12: 7 stays 7 beside 7.5, beside a text and beside nothing."""
    rows = [{"a": 7}, {"a": 7.5}, {"a": "7 apples"}, {"a": [1]}, {"a": []}, {"a": None}, {"a": 10**30}]
    got = read(kit.write_jsonl(tmp_path / "a.jsonl", rows))
    assert got == rows
    assert type(got[0]["a"]) is int


def test_bad_lines_are_all_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"p": 1}\n{"p": \n"text"\n{"p": "\xff"}\n[1]\n{"p": "\\ud800"}\n{"p": 2}\n')
    with pytest.raises(DataError) as caught:
        read(path)
    text = str(caught.value)
    assert len(caught.value.faults) == 5
    for number, why in ((2, "not JSON"), (3, "string"), (4, "not UTF-8"), (5, "array"), (6, "surrogate")):
        assert any(f"line {number}" in f.where and why in f.found for f in caught.value.faults), (number, text)


def test_a_json_array_says_how_to_make_lines_of_it(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[\n{"p": 1}]')
    with pytest.raises(DataError, match="jq -c"):
        read(path)


@pytest.mark.parametrize("damage", ["empty", "truncated", "magic", "text"])
def test_damaged_parquet_is_named(tmp_path, kit, damage):
    path = kit.write_parquet(tmp_path / "a.parquet", [{"p": "x" * 100}] * 50)
    data = path.read_bytes()
    cut = {"empty": b"", "truncated": data[:-20], "magic": data[:-4] + b"XXXX", "text": b"prompt\nx\n" * 9}
    path.write_bytes(cut[damage])
    with pytest.raises(DataError) as caught:
        read(path)
    assert "a.parquet" in caught.value.faults[0].where


def test_a_damaged_page_is_named_by_row_group_and_column(tmp_path):
    table = pa.table({"good": list(range(2000)), "bad": [f"text {i}" for i in range(2000)]})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=1000, compression="zstd", use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(1).column(1)
    data = bytearray(path.read_bytes())
    start = column.data_page_offset
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(bytes(data))
    with pytest.raises(DataError) as caught:
        read(path)
    assert "row group 1, column bad" in caught.value.faults[0].where


def test_shards_that_say_the_same_are_one_table(tmp_path):
    """data-03: string, large_string, dictionary; list and large_list; null; nullability; struct fields."""
    struct_a, struct_b = pa.struct([("x", pa.int32())]), pa.struct([("y", pa.string()), ("x", pa.int64())])
    shards = [
        pa.table(
            [pa.array(["a"]), pa.array([[1]], pa.list_(pa.int32())), pa.array([{"x": 1}], struct_a), pa.nulls(1)],
            schema=pa.schema(
                [
                    pa.field("prompt", pa.string(), nullable=False),
                    ("ids", pa.list_(pa.int32())),
                    ("s", struct_a),
                    ("n", pa.null()),
                ],
                metadata={"made": "by hand"},
            ),
        ),
        pa.table(
            {
                "prompt": pa.array(["b"], pa.large_string()),
                "ids": pa.array([[2, 3]], pa.large_list(pa.int32())),
                "s": pa.array([{"y": "z", "x": 2}], struct_b),
                "n": pa.array([5], pa.int8()),
            }
        ),
        pa.table({"prompt": pa.array(["c", "c"]).dictionary_encode(), "extra": [1, None]}),
    ]
    paths = []
    for i, shard in enumerate(shards):
        paths.append(tmp_path / f"{i}.parquet")
        pq.write_table(shard, paths[-1])
    opened = open_tables(expand(paths, "in"))
    schema = opened.unified.schema
    assert schema.field("prompt").type == pa.large_string()
    assert schema.field("prompt").nullable
    assert schema.field("ids").type == pa.large_list(pa.field("element", pa.int32()))
    assert schema.field("s").type == pa.struct([("x", pa.int64()), ("y", pa.string())])
    assert schema.field("n").type == pa.int8()
    assert schema.metadata == {b"made": b"by hand"}
    assert any("prompt" in n and "large_string" in n for n in opened.unified.notes)
    rows = read(*paths)
    assert [r["prompt"] for r in rows] == ["a", "b", "c", "c"]
    assert [r["ids"] for r in rows] == [[1], [2, 3], None, None]
    assert [r["s"] for r in rows] == [{"x": 1, "y": None}, {"x": 2, "y": "z"}, None, None]
    assert [r["n"] for r in rows] == [None, 5, None, None]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (pa.string(), pa.struct([("a", pa.int32())])),
        (pa.int64(), pa.string()),
        (pa.int64(), pa.float64()),
        (pa.list_(pa.string()), pa.string()),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.uint64(), pa.int64()),
        (pa.decimal128(10, 2), pa.decimal128(10, 3)),
    ],
)
def test_real_conflicts_are_one_error_with_both_files_and_the_column(tmp_path, left, right):
    """data-03, data-12: nothing is retyped to make shards fit."""
    for name, kind in (("a", left), ("b", left), ("c", right)):
        pq.write_table(pa.table({"ok": [1], "col": pa.array([None], kind)}), tmp_path / f"{name}.parquet")
    with pytest.raises(DataError) as caught:
        open_tables(expand(tmp_path, "in"))
    assert len(caught.value.faults) == 1
    text = str(caught.value)
    assert "'col'" in text
    assert "a.parquet" in text
    assert "c.parquet" in text


def test_equal_schemas_stay_as_they_are(tmp_path):
    schema = pa.schema(
        [
            pa.field("d", pa.dictionary(pa.int8(), pa.string())),
            pa.field("t", pa.timestamp("ms", "UTC"), metadata={"k": "v"}),
        ],
        metadata={"a": "b"},
    )
    files = expand([_touch(tmp_path, n) for n in ("a.parquet", "b.parquet")], "in")
    merged = unify(files, [schema, schema])
    assert merged.schema.equals(schema, check_metadata=True)
    assert merged.notes == ()


def _touch(folder, name):
    path = folder / name
    path.write_bytes(b"")
    return path


def test_nested_and_rare_types_come_as_plain_values(tmp_path, kit):
    rows = [
        {
            "when": datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
            "price": decimal.Decimal("1.50"),
            "deep": {"list": [{"a": None, "b": [1, 2]}]},
            "nothing": None,
        }
    ]
    assert read(kit.write_parquet(tmp_path / "a.parquet", rows)) == rows


def test_long_rows_come_in_small_batches(tmp_path, monkeypatch, kit):
    """data-16: a batch is bounded by bytes, also when dictionary pages hide how long the texts are."""
    monkeypatch.setattr(tables, "CHUNK_BYTES", 100_000)
    rows = [{"p": "x" * 10}] * 200 + [{"p": "y" * 50_000}] * 40
    path = kit.write_parquet(tmp_path / "a.parquet", rows)
    log = FaultLog()
    sizes = [(c.first, c.num_rows, c.batch.nbytes) for c in open_tables(expand(path, "in")).chunks(log)]
    assert sum(n for _, n, _ in sizes) == 240
    assert [first for first, _, _ in sizes] == [sum(n for _, n, _ in sizes[:i]) for i in range(len(sizes))]
    assert sum(b > 400_000 for _, _, b in sizes) <= 1
    assert read(path) == rows


def test_only_the_wanted_columns_are_read(tmp_path, kit):
    path = kit.write_parquet(tmp_path / "a.parquet", [{"a": 1, "b": 2, "c": 3}])
    assert read(path, columns=["c", "a"]) == [{"c": 3, "a": 1}]


def test_files_whose_columns_hold_other_kinds_do_not_go_together(tmp_path, kit):
    one = expand(kit.write_jsonl(tmp_path / "a.jsonl", []), "in")[0]
    two = expand(kit.write_jsonl(tmp_path / "b.jsonl", []), "in")[0]
    kinds, log = Kinds(), FaultLog()
    kinds.add_record(one, {"a": "x", "b": 1, "c": None})
    kinds.add_record(two, {"a": {"k": 1}, "b": 1.5, "c": "x"})
    kinds.check(log)
    assert [f.where for f in log.faults] == ["column 'a'"]
    assert "a.jsonl" in log.faults[0].found
    assert "b.jsonl" in log.faults[0].found


@pytest.mark.slow
def test_nested_texts_beyond_two_gib_in_one_row_group(tmp_path):
    """data-01: list<struct<string>> with more text than 32-bit offsets reach, one row group."""
    text = "x" * (1 << 20)
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    path = tmp_path / "big.parquet"
    with pq.ParquetWriter(path, pa.schema([("prompt", kind)]), compression="zstd") as writer:
        piece = pa.RecordBatch.from_pylist(
            [{"prompt": [{"role": "user", "content": text}]}] * 100, schema=pa.schema([("prompt", kind)])
        )
        writer.write_table(pa.Table.from_batches([piece] * 23), row_group_size=2300)
    assert pq.ParquetFile(path).num_row_groups == 1
    log = FaultLog()
    count = 0
    for chunk in open_tables(expand(path, "in")).chunks(log):
        assert chunk.batch.nbytes < 4 * tables.CHUNK_BYTES + (1 << 21)
        count += chunk.num_rows
    assert count == 2300


def test_a_column_name_that_is_no_text_is_a_data_error(tmp_path, kit):
    """Found by the fuzz tests: the footer's bytes were changed."""
    path = kit.write_parquet(tmp_path / "a.parquet", [{"prompt": "a", "qqqqqqqq": 1}])
    path.write_bytes(path.read_bytes().replace(b"qqqqqqqq", b"qqq\x99qqqq"))
    with pytest.raises(DataError, match="not a readable parquet file"):
        open_tables(expand(path, "in"))


def test_texts_that_are_no_utf8_name_their_column(tmp_path):
    """Found by the fuzz tests: arrow reads them, and Python cannot."""
    path = tmp_path / "a.parquet"
    table = pa.table({"prompt": ["a"], "note": ["zzzz"]})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    path.write_bytes(path.read_bytes().replace(b"zzzz", b"z\xffzz"))
    with pytest.raises(DataError, match="column note: no text"):
        read(path)
