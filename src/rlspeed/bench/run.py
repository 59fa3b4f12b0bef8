"""`rlspeed bench run`: profiles one after the other, each in a process of its own, on the same work."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlspeed.bench.compose import Candidate, compose_all, work, write_config
from rlspeed.bench.flops import peak_flops
from rlspeed.bench.nvml import GpuWatch
from rlspeed.bench.record import Record, new_record, write_record
from rlspeed.bench.runlog import Row, read_steps, values_of
from rlspeed.bench.watch import run_watched
from rlspeed.errors import ConfigError, Fault, RlspeedError
from rlspeed.planning.probe import probe_machine
from rlspeed.training.lengths import FixedLengths

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What to measure.

    profiles, words, on: as `compose_all` takes them. folder: of records, logs and configurations. warm_up: first steps
    of each process that do not count; steps: those that do. repeats: processes of each profile, in turn, so that a slow
    minute of the machine meets all of them. processes: numbers of ranks to try each with.
    """

    profiles: tuple[str, ...]
    folder: Path
    words: tuple[str, ...] = ()
    on: str | None = None
    warm_up: int = 2
    steps: int = 5
    repeats: int = 1
    processes: tuple[int, ...] = (1,)
    lengths: FixedLengths = "long_tail"


@dataclass(slots=True)
class _Measured:
    """Rows of all processes of one candidate on one number of ranks."""

    warm_up: list[list[float]]
    rows: list[Row]


def run_profiles(options: RunOptions, progress: Progress = lambda _: None) -> tuple[list[Record], list[Fault]]:
    """Measure; returns one record for each profile and number of ranks, and what failed.

    Each record is written to `folder`/NAME.json (`NAME-x2.json` for two ranks). A profile with a process that failed
    (the baseline may need more memory than there is) has no record; the others are measured all the same.

    Raises:
        ConfigError: numbers out of range, or faults of the configurations, before anything runs.
    """
    _check(options)
    candidates = compose_all(
        options.profiles,
        options.words,
        on=options.on,
        lengths=options.lengths,
        steps=options.warm_up + options.steps,
        world_size=max(options.processes),
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, int], _Measured] = {}
    failed: dict[tuple[str, int], tuple[Fault, ...]] = {}
    load = os.getloadavg()[0]
    for repeat, ranks, candidate in itertools.product(range(options.repeats), options.processes, candidates):
        key = (candidate.name, ranks)
        if key in failed:
            continue
        found.setdefault(key, _Measured([], []))
        try:
            _measure(candidate, ranks, repeat, options, found[key], progress)
        except RlspeedError as error:
            failed[key] = error.faults
            progress(f"{label(*key)}: failed")
    records = []
    for candidate, ranks in itertools.product(candidates, options.processes):
        if (candidate.name, ranks) in failed:
            continue
        record = _record(candidate, ranks, found[candidate.name, ranks], options, load)
        write_record(options.folder / f"{label(candidate.name, ranks)}.json", record)
        records.append(record)
    return records, [fault for faults in failed.values() for fault in faults]


def label(name: str, ranks: int) -> str:
    """`packed`, or `packed-x2` on two ranks."""
    return name if ranks == 1 else f"{name}-x{ranks}"


def _check(options: RunOptions) -> None:
    least = {"warm_up": 0, "steps": 1, "repeats": 1}
    faults = [
        Fault(where=f"--{name.replace('_', '-')}", found=str(getattr(options, name)), allowed=f"at least {low}")
        for name, low in least.items()
        if getattr(options, name) < low
    ]
    if not options.profiles:
        faults.append(Fault(where="PROFILE", found="none", allowed="at least one"))
    if not options.processes or min(options.processes) < 1 or len(set(options.processes)) < len(options.processes):
        found = ",".join(map(str, options.processes))
        faults.append(Fault(where="--processes", found=found, allowed="different numbers from 1 on: 1,2,4"))
    if faults:
        raise ConfigError(faults)


def _measure(
    candidate: Candidate, ranks: int, repeat: int, options: RunOptions, into: _Measured, progress: Progress
) -> None:
    """One process (or launcher) from its start to its end."""
    name = label(candidate.name, ranks)
    folder = options.folder / "runs" / f"{name}-{repeat + 1}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = write_config(candidate, folder)
    command = [sys.executable, "-m", "rlspeed", "train", str(config)]
    if ranks > 1:
        command += ["--nproc-per-node", str(ranks)]
    progress(f"{name}: process {repeat + 1} of {options.repeats}")

    def on_step(step: int, seconds: float) -> None:
        what = "warm-up" if step <= options.warm_up else f"step {step - options.warm_up} of {options.steps}"
        progress(f"{name}: {what}: {seconds:.3f} s")

    gpus = GpuWatch([d.uuid for d in probe_machine().devices[:ranks]])
    seen = run_watched(command, folder, on_step, gpus.sample)
    steps = read_steps(folder / "run", options.warm_up)
    into.warm_up.append([row["timing_s/step"] for row in steps.warm_up])
    for row in steps.measured:
        share = seen.of_step(int(row["step"]))
        into.rows.append(row if share is None else {**row, "gpu_utilisation": share})


def _record(candidate: Candidate, ranks: int, measured: _Measured, options: RunOptions, load: float) -> Record:
    profile = candidate.profile
    extra: dict[str, Any] = {
        "kind": "train",
        "processes": ranks,
        "warm_up_step_seconds": measured.warm_up,
        "repeats": options.repeats,
        "steps": options.steps,
        "switches": list(candidate.switches),
        "words": list(options.words),
        "on": options.on,
        "model": profile.model.path,
        "work": work(profile),
        "tokens": [[int(r["tokens/prompt"]), int(r["tokens/response"])] for r in measured.rows],
        "load_before": round(load, 2),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "default"),
    }
    values = values_of(measured.rows, profile=profile, devices=ranks, peak=peak_flops(probe_machine()))
    return new_record(candidate.name, values, profile=candidate.digest, data=candidate.data, extra=extra)
