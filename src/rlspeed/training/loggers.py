"""Where the numbers of a run go: metrics.jsonl and timings.jsonl always, TensorBoard and wandb when asked for.

The two files are the record of the run. A line is on the disk before `log` returns, and a resumed run cuts both back
to its checkpoint, so that a step is never there twice.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from rlspeed.errors import ConfigError, Fault, RunError
from rlspeed.training.metrics import split
from rlspeed.training.rundir import write_text

LoggerName = Literal["tensorboard", "wandb"]

METRICS_FILE = "metrics.jsonl"
TIMINGS_FILE = "timings.jsonl"


class JsonLines:
    """A file of one JSON object per line, each with an integer `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append {"step": step, **values}, and wait for the disk. A value that is not finite becomes null."""
        row = {"step": step, **{k: v if math.isfinite(v) else None for k, v in values.items()}}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """All objects in the file; none when there is no file. A last line that was cut off by a crash is left out.

        Raises:
            RunError: a line before the last is no JSON object with a step.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").split("\n")
        # after the last newline comes "" or what a crash left of a line
        rows = []
        for number, line in enumerate(lines[:-1], start=1):
            try:
                row = json.loads(line)
                row["step"] = int(row["step"])
            except (ValueError, TypeError, KeyError) as error:
                raise RunError(
                    Fault(
                        where=f"{self.path}, line {number}",
                        found="not a JSON object with a step",
                        fix="mend or delete the line, then resume again",
                    )
                ) from error
            rows.append(row)
        return rows

    def truncate_after(self, step: int) -> int:
        """Drop the lines of later steps and a line that was cut off, all or none; returns how many went.

        Raises:
            RunError: as `rows`.
        """
        if not self.path.exists():
            return 0
        rows = self.rows()
        text = self.path.read_text(encoding="utf-8")
        kept = [line for line, row in zip(text.split("\n"), rows) if row["step"] <= step]
        wanted = "".join(line + "\n" for line in kept)
        if wanted == text:
            return 0
        write_text(self.path, wanted)
        return len(rows) - len(kept) + (not text.endswith("\n"))


class Sink(Protocol):
    """A further place for the numbers."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step."""

    def close(self) -> None:
        """Write out what is held back."""


class TensorBoardSink:
    """Event files in `folder`/tensorboard."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        _need("tensorboard", "tensorboard")
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(
            log_dir=str(folder / "tensorboard"), purge_step=None if resume_step is None else resume_step + 1
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is held back."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run with its files in `folder`/wandb; offline unless WANDB_MODE says otherwise.

    A resumed run goes on under the id kept in `folder`/wandb_id.
    """

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        wandb = _need("wandb", "wandb")
        known = folder / "wandb_id"
        run_id = known.read_text(encoding="utf-8").strip() if known.exists() else None
        self._run = wandb.init(
            project="rlspeed",
            name=run_name,
            dir=str(folder),
            config=dict(config),
            id=run_id,
            resume="allow" if run_id else None,
            mode=os.environ.get("WANDB_MODE", "offline"),
        )
        known.write_text(str(self._run.id) + "\n", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write out what is held back."""
        self._run.finish()


class Loggers:
    """All places that a run's numbers go to; does nothing on ranks other than 0."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[LoggerName] = (),
        *,
        run_name: str = "run",
        config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
        enabled: bool = True,
    ) -> None:
        """Open them.

        folder: the run folder. config: what wandb shows beside the curves. resume_step: last step of the checkpoint
        that the run goes on from; later lines are dropped. enabled: False opens and writes nothing.

        Raises:
            ConfigError: a logger whose package is not installed; all of them at once.
            RunError: a file to go on with cannot be read.
        """
        self._metrics = JsonLines(folder / METRICS_FILE)
        self._timings = JsonLines(folder / TIMINGS_FILE)
        self._enabled = enabled
        self._sinks: list[Sink] = []
        if not enabled:
            return
        if resume_step is not None:
            self.truncate_after(resume_step)
        faults: list[Fault] = []
        for name in names:
            try:
                if name == "tensorboard":
                    self._sinks.append(TensorBoardSink(folder, resume_step))
                else:
                    self._sinks.append(WandbSink(folder, run_name, config or {}))
            except ConfigError as error:
                faults.extend(error.faults)
        if faults:
            self.close()
            raise ConfigError(faults)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step, to metrics.jsonl or timings.jsonl as declared, and all to the further loggers.

        Raises:
            LookupError: a metric that is not declared.
        """
        repeatable, clock = split(values)
        if not self._enabled:
            return
        if repeatable:
            self._metrics.write(step, repeatable)
        if clock:
            self._timings.write(step, clock)
        for sink in self._sinks:
            sink.log(step, values)

    def truncate_after(self, step: int) -> None:
        """Drop what was written for later steps than `step`.

        Raises:
            RunError: a file cannot be read.
        """
        if self._enabled:
            self._metrics.truncate_after(step)
            self._timings.truncate_after(step)

    def close(self) -> None:
        """Write out what is held back; safe to call twice."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()


def _need(module: str, extra: str) -> Any:
    """The module, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            Fault(where="run.loggers", found=f"{module} is not installed", fix=f"pip install 'rlspeed[{extra}]'")
        ) from error
