from __future__ import annotations

import io

import pytest
from rich.console import Console

from rlspeed.training.display import Display, duration, sparkline

VALUES = {
    "critic/score/mean": 0.5123,
    "actor/kl": 0.00123,
    "response_length/mean": 231.4,
    "perf/processed_tokens_per_s": 51234.4,
    "timing_s/step": 10.0,
    "timing_s/update_actor": 3.0,
    "timing_s/gen": 6.5,
    "val-core/openai/gsm8k/acc/mean@1": 0.25,
}


class Ticks:
    """A clock that is told the time."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    return Display(console=Console(file=out, force_terminal=False, width=60), clock=Ticks()), out


def test_without_a_terminal_each_step_is_one_line():
    display, out = plain()
    display.start(3, 0, "runs/[x]")
    with display.phase("gen"):
        display.note("two ranks")
    display.step(1, VALUES)
    display.step(2, {"critic/score/mean": 1.0})
    display.step(3, VALUES)
    display.close()
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["run runs/[x]: 3 of 3 steps to go", "two ranks"]
    assert lines[2] == (
        "step 1/3 | reward 0.512 | kl 0.0012 | length 231 | tokens/s 51,234 | val gsm8k acc mean@1 0.250"
        " | gen 6.50s | update_actor 3.00s | eta 0:20"
    )
    assert lines[3] == "step 2/3 | reward 1.000 | eta 0:10"
    assert "eta" not in lines[4]
    assert len(lines) == 5
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_panel_shows_state_and_phase():
    out, clock = io.StringIO(), Ticks()
    display = Display(console=Console(file=out, force_terminal=True, width=120, height=40), clock=clock)
    display.start(20, 5, "runs/x")
    for step in range(6, 11):
        display.step(step, VALUES | {"critic/score/mean": float(step)})
    with display.phase("update_actor"):
        display.progress(3, 8)
        clock.now += 2.0
        reader = Console(file=io.StringIO(), width=120, record=True)
        reader.print(display._panel())
        text = reader.export_text()
    display.note("a note")
    display.close()
    display.close()
    for part in ("step 10/20", "0:02 gone, 1:40 left", "10.000", "51,234", "gsm8k acc mean@1 0.250", "gen 6.5s"):
        assert part in text
    assert "update_actor 2s, 3 of 8" in text
    assert "a note" in out.getvalue()
    assert out.getvalue().endswith("\x1b[?25h"), "the cursor is given back"


def test_other_ranks_are_silent():
    out = io.StringIO()
    display = Display(enabled=False, console=Console(file=out, force_terminal=True))
    display.start(2, 0, "runs/x")
    with display.phase("gen"):
        display.progress(1, 2)
    display.step(1, VALUES)
    display.note("hidden")
    display.close()
    assert out.getvalue() == ""


def test_phases_end_when_the_block_raises():
    display, _ = plain()
    display.start(2, 0, "x")
    with pytest.raises(ValueError, match="boom"), display.phase("gen"):
        raise ValueError("boom")
    assert display._phases == []


def test_time_left_is_by_the_median_step():
    """One slow step (compilation, a checkpoint) does not move the estimate."""
    display, _ = plain()
    display.start(10, 0, "x")
    assert display.seconds_left() is None
    for step, seconds in enumerate((100.0, 1.0, 1.0), start=1):
        display.step(step, {"timing_s/step": seconds})
    assert display.seconds_left() == 7.0


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_sparkline():
    assert sparkline([0.0, 7.0, float("nan"), 3.5]) == "\u2581\u2588 \u2585"
    assert sparkline([2.0, 2.0]) == "\u2581\u2581"
    assert sparkline([]) == ""
