"""Every command of the how-to runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from rlspeed.commands.preprocess import app
from typer.testing import CliRunner

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "sort-and-pack.md"
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for line in block.splitlines()
]


def test_the_page_has_commands():
    assert len(COMMANDS) >= 8
    assert all(c.startswith("rlspeed preprocess ") for c in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_run(tmp_path, monkeypatch, kit, command):
    (tmp_path / "data").mkdir()
    rows = [{"prompt": kit.chat(("user", kit.words(1 + 7 * i % 50))), "answer": str(i)} for i in range(70)]
    kit.write_parquet(tmp_path / "data" / "train.parquet", rows)
    kit.make_tokenizer(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[2:]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    target = words[words.index("-o" if "-o" in words else "--png") + 1]
    assert Path(target).stat().st_size > 0
