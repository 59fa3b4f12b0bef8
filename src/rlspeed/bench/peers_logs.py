"""Metric logs of verl and TRL as records, so that `bench compare` can put them beside ours.

verl: lines of its `file` logger (`{"step": n, "data": {...}}`) or of its console (`step:n - name:value - ...`). Its
names are ours (`timing_s/*`, `perf/*`). TRL: `trainer_state.json` of a GRPO or RLOO run. Its `step_time` is that of
generation, forward and backward, without the optimizer's step; `num_tokens` counts prompts and answers since the start,
over all processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlspeed.bench.record import Record, Value, unplaced_record
from rlspeed.bench.runlog import Row, values_of
from rlspeed.errors import DataError, Fault

CONSOLE = re.compile(r"\bstep:(\d+) - (.+)$")
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
TRL_STATE = "trainer_state.json"


def verl_record(path: Path, *, warm_up: int) -> Record:
    """A record of verl's JSON lines or console output; the first `warm_up` steps do not count.

    Raises:
        DataError: it cannot be read, or has no step with `timing_s/step` after the warm-up.
    """
    text = _read(path)
    rows = [row for row in (*_json_rows(text), *_console_rows(text)) if "timing_s/step" in row]
    measured = [_with_answers(row) for row in rows[warm_up:]]
    if not measured:
        found = f"{len(rows)} step(s) with timing_s/step, {warm_up} of warm-up"
        raise DataError(Fault(where=str(path), found=found, allowed="verl's file log or console output"))
    values = values_of(measured)
    for theirs, ours in (("perf/mfu/actor", "mfu_update"),):
        samples = tuple(row[theirs] for row in measured if theirs in row)
        if len(samples) == len(measured):
            values[ours] = Value(unit="of the peak", samples=samples)
    return _record("verl", path, values, rows[:warm_up], "timing_s/step")


def trl_record(path: Path, *, warm_up: int, devices: int = 1) -> Record:
    """A record of TRL's trainer_state.json. devices: processes of the run, for rates per device.

    Raises:
        DataError: it cannot be read, or has no `step_time` after the warm-up.
    """
    try:
        history = json.loads(_read(path))["log_history"]
        rows = [{k: float(v) for k, v in h.items() if isinstance(v, (int, float))} for h in history]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(Fault(where=str(path), found=f"no {TRL_STATE}: {error!r}")) from error
    steps = [row for row in rows if "step_time" in row]
    if len(steps) <= warm_up:
        found = f"{len(steps)} step(s) with step_time, {warm_up} of warm-up"
        raise DataError(Fault(where=str(path), found=found, allowed="the state of a TRL run with logging_steps=1"))
    values = {"step_seconds": Value(unit="s", samples=tuple(row["step_time"] for row in steps[warm_up:]))}
    rates = tuple(_trl_rates(steps, warm_up, devices))
    if rates:
        values["tokens_per_second"] = Value(unit="tokens/s/device", samples=rates)
    return _record("trl", path, values, steps[:warm_up], "step_time", processes=devices)


def is_trl_state(path: Path) -> bool:
    """Whether a JSON file is one that TRL (transformers' Trainer) writes."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and isinstance(content.get("log_history"), list)


def _trl_rates(steps: Sequence[Row], warm_up: int, devices: int) -> Iterator[float]:
    """Prompt and answer tokens per second and device of each generation, which serves the steps up to the next one.

    How many answers a step has is not in the log, so there is no rate of answer tokens.
    """
    before = 0.0
    windows: list[tuple[float, float, int]] = []  # seconds, tokens, first step
    for number, step in enumerate(steps):
        total = step.get("num_tokens", 0.0)
        if total > before:
            windows.append((0.0, total - before, number))
            before = total
        if windows:
            seconds, tokens, first = windows[-1]
            windows[-1] = (seconds + step["step_time"], tokens, first)
    for seconds, tokens, first in windows:
        if first >= warm_up and seconds > 0:
            yield tokens / seconds / devices


def _json_rows(text: str) -> Iterator[dict[str, float]]:
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        try:
            content = json.loads(line)
        except ValueError:
            continue
        data = content.get("data", content)
        if isinstance(data, Mapping):
            row = {k: float(v) for k, v in data.items() if isinstance(v, (int, float))}
            yield {"step": float(content.get("step", 0)), **row}


def _console_rows(text: str) -> Iterator[dict[str, float]]:
    """`(TaskRunner pid=1) step:3 - timing_s/step:12.3 - perf/mfu/actor:np.float64(0.4) - ...`."""
    for line in text.splitlines():
        match = CONSOLE.search(line)
        if match is None:
            continue
        row = {"step": float(match[1])}
        for part in match[2].split(" - "):
            name, _, value = part.rpartition(":")
            bare = re.sub(r"^\w+\.\w+\((.*)\)$", r"\1", value.strip())
            if name and NUMBER.fullmatch(bare):
                row[name.strip()] = float(bare)
        yield row


def _with_answers(row: Row) -> dict[str, float]:
    """verl has no rate of answer tokens; it follows from mean lengths."""
    out = dict(row)
    answer, prompt = row.get("response_length/mean"), row.get("prompt_length/mean")
    if answer is not None and prompt is not None and "perf/throughput" in row:
        out["perf/throughput_response"] = row["perf/throughput"] * answer / (answer + prompt)
    return out


def _record(
    name: str, path: Path, values: Mapping[str, Value], warm_up: Sequence[Row], seconds: str, *, processes: int = 1
) -> Record:
    """What is not in a log is said to be unknown."""
    extra: dict[str, Any] = {
        "kind": "train",
        "log": str(path),
        "processes": processes,
        "warm_up_step_seconds": [[row[seconds] for row in warm_up]],
    }
    return unplaced_record(name, values, extra)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(Fault(where=str(path), found=f"cannot be read: {error}")) from error
