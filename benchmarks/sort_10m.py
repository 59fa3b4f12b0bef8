"""Sorting a large parquet file against bare tokenisation plus bare reading and writing, side by side in one run.

    python benchmarks/sort_10m.py --rows 10000000 --tokenizer DIR --work /big/disk

makes a parquet of verl's columns with about 500 bytes a row (10 million rows: about 5 GB of text), then measures, each
in a process of its own:

1. the floor: `tokenizers` encode_batch_fast over the rendered texts, held in memory batch by batch, and pyarrow reading
   and writing the file in batches, nothing else;
2. `rlspeed preprocess sort` of the file: wall time and the process's largest resident set;
3. the floor again, so that drift of the machine shows.

On a machine that others use too, read the ratio of CPU seconds (all threads, start-up included for the sort): wall time
depends on what else runs. The load before and after is in the record.

It checks that the output is an ordered permutation of the input and writes one JSON record.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

BATCH_ROWS = 16384
ENCODE_ROWS = 4096  # the library is fastest with calls of a few MB of text
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", MESSAGES),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("index", pa.int64()), ("split", pa.string())])),
    ]
)


def make_words(draw: np.random.RandomState, count: int = 20000) -> np.ndarray:
    """A vocabulary of made-up words of 2 to 12 letters."""
    letters = np.array(list("etaoinshrdlucmfwypvbgkqjxz"))
    weights = 1.0 / np.arange(1, 27) ** 0.7
    picks = draw.choice(letters, size=(count, 12), p=weights / weights.sum())
    sizes = draw.randint(2, 13, count)
    return np.array(["".join(row[:size]) for row, size in zip(picks, sizes)], dtype=object)


def make_file(path: Path, rows: int, seed: int = 0) -> None:
    """Questions of log-normal length (median about 60 words), frequent words more often."""
    draw = np.random.RandomState(seed)
    words = make_words(draw)
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for first in range(0, rows, 100_000):
            count = min(100_000, rows - first)
            sizes = np.clip(draw.lognormal(4.1, 0.6, count), 3, 3000).astype(int)
            flat = words[np.minimum(draw.zipf(1.25, int(sizes.sum())) - 1, len(words) - 1)]
            ends = np.cumsum(sizes)
            texts = [" ".join(flat[e - n : e]) + f" number {first + i}?" for i, (e, n) in enumerate(zip(ends, sizes))]
            index = np.arange(first, first + count)
            content = pa.StructArray.from_arrays(
                [pa.array(["user"] * count), pa.array(texts, pa.string())], fields=list(MESSAGES.value_type)
            )
            offsets = pa.array(np.arange(count + 1, dtype=np.int32))
            answers = pa.array([str(i % 1000) for i in index])
            rule, split = pa.array(["rule"] * count), pa.array(["train"] * count)
            columns = [
                pa.array(["made-up"] * count),
                pa.ListArray.from_arrays(offsets, content, type=MESSAGES),
                pa.array(["math"] * count),
                pa.StructArray.from_arrays([rule, answers], names=["style", "ground_truth"]),
                pa.StructArray.from_arrays([pa.array(index), split], names=["index", "split"]),
            ]
            writer.write_table(pa.table(columns, schema=SCHEMA), row_group_size=100_000)


def texts_of(path: Path, tokenizer: Any) -> Iterator[list[str]]:
    """The rendered prompts, batch by batch."""
    for batch in pq.ParquetFile(path).iter_batches(BATCH_ROWS, columns=["prompt"]):
        chats = batch.column(0).to_pylist()
        yield tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)


def floor(path: Path, scratch: Path, tokenizer_dir: str) -> dict[str, float]:
    """Seconds of bare encoding (rendering not counted) and of bare reading and writing."""
    from rlspeed.data.render import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_dir, without_torch=True)
    backend = tokenizer.backend_tokenizer
    encode, cpu, tokens = 0.0, 0.0, 0
    for texts in texts_of(path, tokenizer):
        start, start_cpu = time.perf_counter(), time.process_time()
        for at in range(0, len(texts), ENCODE_ROWS):
            encoded = backend.encode_batch_fast(texts[at : at + ENCODE_ROWS], add_special_tokens=False)
            tokens += sum(len(e) for e in encoded)
            del encoded
        encode += time.perf_counter() - start
        cpu += time.process_time() - start_cpu
    start, start_cpu = time.perf_counter(), time.process_time()
    handle = pq.ParquetFile(path)
    with pq.ParquetWriter(scratch, handle.schema_arrow, compression="zstd") as writer:
        for group in range(handle.num_row_groups):
            batches = list(handle.iter_batches(BATCH_ROWS, row_groups=[group]))
            writer.write_table(pa.Table.from_batches(batches), row_group_size=100_000)
    copied = time.perf_counter() - start
    cpu += time.process_time() - start_cpu
    scratch.unlink()
    return {
        "encode_seconds": encode,
        "read_write_seconds": copied,
        "seconds": encode + copied,
        "cpu_seconds": cpu,
        "tokens": tokens,
    }


def floor_in_child(path: Path, scratch: Path, tokenizer_dir: str) -> dict[str, float]:
    """The floor in a fresh process."""
    command = [sys.executable, __file__, "--floor", str(path), str(scratch), "--tokenizer", tokenizer_dir]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def sort_in_child(path: Path, output: Path, tokenizer_dir: str) -> dict[str, Any]:
    """`rlspeed preprocess sort` as users run it: its report, wall seconds and largest resident set."""
    command = [sys.executable, "-m", "rlspeed", "preprocess", "sort", str(path), "-o", str(output)]
    with tempfile.TemporaryFile() as out:
        start = time.perf_counter()
        child = subprocess.Popen([*command, "--tokenizer", tokenizer_dir, "--json"], stdout=out)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"preprocess sort ended with {child.returncode}")
        out.seek(0)
        report = json.loads(out.read())
    return {
        "seconds": seconds,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "report": report,
    }


def check(path: Path, output: Path, tokenizer_dir: str, rows: int) -> None:
    """Every row once (by its index), lengths ascending, the schema unchanged."""
    from rlspeed.data.render import PromptRenderer, load_tokenizer

    renderer = PromptRenderer(load_tokenizer(tokenizer_dir, without_torch=True))
    assert pq.read_schema(output).equals(pq.read_schema(path), check_metadata=True)
    seen, last = np.zeros(rows, dtype=np.int8), 0
    for number, batch in enumerate(pq.ParquetFile(output).iter_batches(BATCH_ROWS, columns=["prompt", "extra_info"])):
        index = batch.column("extra_info").field(0).to_numpy()
        seen[index] += 1
        if number % 20 == 0:  # a sample of the lengths; tokenising everything once more would double the run
            lengths = renderer.lengths(renderer.render(batch.column("prompt").to_pylist()))
            assert lengths == sorted(lengths)
            assert lengths[0] >= last
            last = lengths[-1]
    assert (seen == 1).all()


def main() -> None:
    """Parse, measure, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--record", type=Path)
    parser.add_argument("--floor", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.floor:
        print(json.dumps(floor(args.floor[0], args.floor[1], args.tokenizer)))
        return
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        source, output, scratch = (Path(folder) / n for n in ("in.parquet", "out.parquet", "copy.parquet"))
        make_file(source, args.rows)
        before = floor_in_child(source, scratch, args.tokenizer)
        print("floor", before, file=sys.stderr, flush=True)
        ours = sort_in_child(source, output, args.tokenizer)
        print("sort", ours, file=sys.stderr, flush=True)
        after = floor_in_child(source, scratch, args.tokenizer)
        print("floor", after, file=sys.stderr, flush=True)
        check(source, output, args.tokenizer, args.rows)
        size = source.stat().st_size
    load.append(os.getloadavg()[0])
    bare = (before["seconds"] + after["seconds"]) / 2
    bare_cpu = (before["cpu_seconds"] + after["cpu_seconds"]) / 2
    record = {
        "name": "sort",
        "date": datetime.date.today().isoformat(),
        "rows": args.rows,
        "file_bytes": size,
        "tokens": int(before["tokens"]),
        "tokenizer": Path(args.tokenizer).name,
        "floor": [before, after],
        "sort": ours,
        "load": load,
        "cpu_ratio": ours["cpu_seconds"] / bare_cpu,
        "ratio": ours["seconds"] / bare,
        "ratio_range": [
            ours["seconds"] / max(before["seconds"], after["seconds"]),
            ours["seconds"] / min(before["seconds"], after["seconds"]),
        ],
        "peak_rss_gib": ours["peak_rss_bytes"] / 2**30,
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
        "versions": versions(),
    }
    text = json.dumps(record, indent=2) + "\n"
    if args.record:
        args.record.write_text(text)
    print(text)


def versions() -> dict[str, str]:
    """Of the libraries that matter here, and the commit."""
    from importlib.metadata import version

    found = {name: version(name) for name in ("pyarrow", "tokenizers", "transformers", "numpy", "rlspeed")}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return {**found, "commit": commit.stdout.strip()}


if __name__ == "__main__":
    main()
