"""A measured process from outside: its steps as they end, and how busy the GPUs were during each."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlspeed.errors import Fault, RunError

POLL_SECONDS = 0.2
LAST_LINES = 12


@dataclass(slots=True)
class Seen:
    """What was seen. ends: seconds since the start at which each step's line was there. utilisation: (seconds, mean
    over the GPUs in %) of each look.
    """

    ends: dict[int, float] = field(default_factory=dict)
    utilisation: list[tuple[float, float]] = field(default_factory=list)

    def of_step(self, step: int) -> float | None:
        """Mean utilisation between the end of the step before and its own; None without a look in between."""
        if step not in self.ends or step - 1 not in self.ends:
            return None
        found = [share for at, share in self.utilisation if self.ends[step - 1] < at <= self.ends[step]]
        return sum(found) / len(found) if found else None


def run_watched(
    command: Sequence[str],
    folder: Path,
    on_step: Callable[[int, float], None],
    utilisation: Callable[[], float | None] = lambda: None,
) -> Seen:
    """Run `command` to its end; its output goes to `folder`/log.txt. on_step: gets each training step and its seconds.
    utilisation: of the GPUs in %, None where it is not known.

    Raises:
        RunError: it failed; the last lines of its output are in the message.
    """
    log = folder / "log.txt"
    timings = folder / "run" / "timings.jsonl"
    seen, start = Seen(), time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                _note(seen, utilisation(), time.perf_counter() - start)
                _look(seen, timings, time.perf_counter() - start, on_step)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    _look(seen, timings, time.perf_counter() - start, on_step)
    if process.returncode:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        found = f"ended with exit code {process.returncode}:\n" + "\n".join(tail)
        raise RunError(Fault(where=str(folder), found=found, fix=f"see {log}"))
    return seen


def _note(seen: Seen, share: float | None, now: float) -> None:
    if share is not None:
        seen.utilisation.append((now, share))


def _look(seen: Seen, timings: Path, now: float, on_step: Callable[[int, float], None]) -> None:
    try:
        lines = timings.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # half a line: the next look has it
            continue
        if row.get("step") not in seen.ends and ("timing_s/step" in row or row.get("step") == 0):
            seen.ends[row["step"]] = now
            if "timing_s/step" in row:
                on_step(row["step"], row["timing_s/step"])
