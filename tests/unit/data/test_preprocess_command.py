"""`rlspeed preprocess` as users run it."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from rlspeed.commands.preprocess import app
from typer.testing import CliRunner

from rlspeed.errors import ConfigError, DataError


def invoke(*words):
    result = CliRunner().invoke(app, [str(w) for w in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def data(tmp_path, kit):
    rows = [{"prompt": kit.chat(("user", kit.words(n)))} for n in (9, 2, 5, 7)]
    return kit.write_jsonl(tmp_path / "a.jsonl", rows)


def test_sort(tmp_path, data, tokenizer_dir):
    target = tmp_path / "o.jsonl"
    done = invoke("sort", data, "-o", target, "--tokenizer", tokenizer_dir, "--descending", "--json")
    report = json.loads(done.stdout)
    assert (report["rows_in"], report["rows_out"], report["tokens"]) == (4, 4, 35)
    sizes = [len(json.loads(line)["prompt"][0]["content"].split()) for line in target.read_text().splitlines()]
    assert sizes == [9, 7, 5, 2]
    text = invoke(
        "sort", data, "-o", target, "--tokenizer", tokenizer_dir, "--overwrite", "--max-length", 9, "--overlong", "drop"
    )
    assert "dropped, too long" in text.stdout


def test_pack(tmp_path, data, tokenizer_dir):
    target = tmp_path / "o.parquet"
    done = invoke("pack", data, "-o", target, "--tokenizer", tokenizer_dir, "--capacity", 16, "--json")
    report = json.loads(done.stdout)
    assert (report["bins"], report["tokens_out"]) == (3, 35)
    assert pq.read_table(target).column_names == ["input_ids", "cu_seqlens", "row_ids"]
    text = invoke(
        "pack", data, "-o", target, "--tokenizer", tokenizer_dir, "--capacity", 16, "--ranks", 2, "--overwrite"
    )
    assert "filled" in text.stdout
    assert "mean work" in text.stdout


def test_stats(tmp_path, data, tokenizer_dir):
    done = invoke("stats", data, "--tokenizer", tokenizer_dir, "--json", "--png", tmp_path / "h.png")
    found = json.loads(done.stdout)
    assert (found["rows"], found["max"], found["max_length"]) == (4, 12, 12 + 512)
    assert sum(found["histogram"]["counts"]) == 4
    text = invoke("stats", data, "--tokenizer", tokenizer_dir, "--max-new-tokens", 20).stdout
    for part in ("median", "p95", "tokens wasted", "packed into bins", "data.max_length", "packing.capacity", "#"):
        assert part in text
    assert (tmp_path / "h.png").exists()


def test_options_that_cannot_be_are_refused(tmp_path, data, tokenizer_dir):
    words = ("sort", data, "-o", tmp_path / "o.jsonl", "--tokenizer", tokenizer_dir)
    with pytest.raises(ConfigError, match="--bucket"):
        invoke(*words, "--bucket", "--descending")
    with pytest.raises(ConfigError, match="JSON object"):
        invoke(*words, "--chat-template-kwargs", "[1]")
    with pytest.raises(DataError, match="does not exist"):
        invoke("sort", tmp_path / "none.parquet", *words[2:])
    assert invoke(*words, "--overlong", "sometimes").exit_code == 2


def test_a_process_of_its_own_imports_no_torch_and_errors_have_no_traceback(tmp_path, kit, data, tokenizer_dir):
    bad = kit.write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "a"}, {"prompt": None}])
    code = (
        "import sys\n"
        "from rlspeed.commands.console import errors_to_exit_codes\n"
        "from rlspeed.commands.preprocess import app\n"
        "try:\n"
        "    with errors_to_exit_codes():\n"
        "        app(sys.argv[1:])\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules\n"
    )
    for source, rc in ((data, 0), (bad, 2)):
        words = ["sort", str(source), "-o", str(tmp_path / f"{rc}.jsonl"), "--tokenizer", str(tokenizer_dir)]
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == rc, done.stderr
        assert "Traceback" not in done.stderr
    assert "row 1 (line 2)" in done.stderr
    assert not (tmp_path / "2.jsonl").exists()
