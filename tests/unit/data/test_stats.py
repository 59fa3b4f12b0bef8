"""What is said about lengths."""

from __future__ import annotations

import numpy as np
import pytest

from rlspeed.data.files import expand
from rlspeed.data.render import PromptRenderer
from rlspeed.data.stats import bars, draw, histogram, measure_files, quantile, summarise
from rlspeed.errors import DataError


def test_quantiles_are_lengths_that_occur():
    lengths = np.arange(1, 101)
    assert [quantile(lengths, q) for q in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert quantile(np.array([7]), 0.95) == 7


def test_waste_of_each_way_of_batching():
    """Rows of 1, 3, 2, 4 tokens in batches of 2: to the longest 6, in input order 2, sorted 2; worked by hand."""
    found = summarise(np.array([1, 3, 2, 4]), batch_size=2, response_tokens=0)
    assert [w.tokens for w in found.waste[:3]] == [4 * 4 - 10, 2 * 3 + 2 * 4 - 10, 2 * 2 + 2 * 4 - 10]
    assert found.waste[0].share == pytest.approx(6 / 16)


def test_the_suggestion_is_the_95th_percentile_and_room_for_the_answer():
    lengths = np.concatenate([np.full(95, 100), np.full(5, 5000)])
    found = summarise(lengths, batch_size=8, response_tokens=512)
    assert (found.max_prompt_length, found.max_length, found.over) == (128, 640, 5)
    whole = summarise(lengths, batch_size=8, response_tokens=0)
    assert whole.max_length == 128
    assert found.capacity >= found.max_length


def test_a_log_normal_file_packs_well():
    """Median 300, P95 1,536: the numbers of the guide."""
    lengths = (
        np.random.RandomState(0).lognormal(np.log(300), np.log(1536 / 300) / 1.645, 20000).clip(1).astype(np.int64)
    )
    found = summarise(lengths, batch_size=32, response_tokens=0)
    assert 1400 < found.max_length < 1700
    shares = [w.share for w in found.waste]
    assert shares[0] > shares[1] > 0.4
    assert shares[3] < 0.01


def test_no_rows_suggest_nothing():
    found = summarise(np.zeros(0, np.int64), batch_size=8, response_tokens=8)
    assert (found.rows, found.max_length, found.waste) == (0, None, ())


@pytest.mark.parametrize("lengths", [[5], [5, 5, 5], [1, 2], [1, 50, 3000], list(range(10, 60))])
def test_the_histogram_counts_every_row_once(lengths):
    counts, edges = histogram(np.array(lengths))
    assert sum(counts) == len(lengths)
    assert len(edges) == len(counts) + 1
    assert edges[0] <= min(lengths) < max(lengths) + 1 <= edges[-1]
    assert all(line.isascii() for line in bars(np.array(lengths)))


def test_the_picture_is_a_png(tmp_path):
    lengths = np.array([1, 5, 9, 200, 3000])
    draw(lengths, summarise(lengths, batch_size=2, response_tokens=0), tmp_path / "h.png")
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")


def test_lengths_of_files(tmp_path, kit, tokenizer):
    path = kit.write_jsonl(tmp_path / "a.jsonl", [{"prompt": kit.words(3)}, {"prompt": ""}, {"prompt": kit.words(2)}])
    renderer = PromptRenderer(tokenizer)
    with pytest.raises(DataError, match="row 1"):
        measure_files(expand(path, "in"), renderer, "prompt", "error")
    lengths, whole, notes = measure_files(expand(path, "in"), renderer, "prompt", "drop")
    assert (lengths.tolist(), whole, len(notes)) == ([3, 2], False, 1)
    ids = kit.write_parquet(tmp_path / "b.parquet", [{"input_ids": [1, 2], "attention_mask": [1, 0]}])
    assert measure_files(expand(ids, "in"), None, "prompt", "error")[:2] == (np.array([1]), True)
