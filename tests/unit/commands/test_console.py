"""What a user sees of an error: its faults on stderr, an exit code, no traceback; and colours only where wanted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from rlspeed.commands.console import errors_to_exit_codes

from rlspeed.errors import ConfigError, Fault, RunError


def shown(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as caught, errors_to_exit_codes():
        raise error
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def test_every_fault_is_shown_as_it_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets are no markup, and long lines are not broken (they are searched and copied)."""
    long = "x" * 200
    faults = [
        Fault(where="a.yaml:3", found="[bold]b[/bold] is [0, 1]", allowed="c", fix="d"),
        Fault(where=long, found=long),
    ]
    code, out, err = shown(ConfigError(faults), capsys)
    assert (code, out) == (2, "")
    assert err == f"2 errors\n  a.yaml:3: [bold]b[/bold] is [0, 1]\n      allowed: c\n      fix: d\n  {long}: {long}\n"


def test_exit_codes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(RunError("x"), capsys)[0] == 1
    assert shown(KeyboardInterrupt(), capsys)[::2] == (130, "interrupted\n")
    monkeypatch.setenv("RANK", "3")
    assert shown(ConfigError("x"), capsys)[2].startswith("rank 3: error\n")


def test_errors_of_our_own_are_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError), errors_to_exit_codes():
        raise ZeroDivisionError


@pytest.mark.parametrize(("variable", "coloured"), [("NO_COLOR", False), ("UNUSED", True)])
def test_no_color(variable: str, coloured: bool) -> None:
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {
        "FORCE_COLOR": "1",
        "TERM": "xterm",
        variable: "1",
    }
    words = [sys.executable, "-m", "rlspeed", "train", "no-such-profile"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no-such-profile" in done.stderr
    assert ("\x1b[1;31m" in done.stderr) == coloured
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_gets_no_traceback() -> None:
    """`rlspeed train ... --dry-run | head -1`."""
    words = [sys.executable, "-u", "-m", "rlspeed", "train", "quickstart", "--dry-run"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("name = ")
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
        process.wait(60)
