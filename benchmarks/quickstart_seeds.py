"""Train the quickstart with several seeds and record where each started, where it ended and how long it took.

    python benchmarks/quickstart_seeds.py [OUT.json] [--seeds 0 1 2]     # OUT: benchmarks/records/quickstart.json

Each seed is one `rlspeed train quickstart` in a process of its own, from the start of Python to its end: imports,
checks, validations, checkpoints, export and plots are in its seconds. Accuracy is that of greedy answers to the
held-out prompts. Exit code 1 when a seed starts above 0.5, ends below 0.9 or takes more than 120 s; the record is
written all the same. `load_before` tells whether the machine was free: wall seconds of a busy machine say little, CPU
seconds say more, and on a busy machine OMP_NUM_THREADS=1 keeps threads from waiting for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlspeed.bench.record import code_state, write_json

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "records" / "quickstart.json"
START_AT_MOST, END_AT_LEAST, SECONDS_AT_MOST = 0.5, 0.9, 120.0
METRIC = "val-core/two_digit_sums/acc/mean@1"


def train(seed: int, folder: Path) -> dict[str, Any]:
    """One run; its course of accuracy, its wall and CPU seconds.

    Raises:
        SystemExit: the run failed; its output is shown.
    """
    command = [sys.executable, "-m", "rlspeed", "train", "quickstart", f"run.seed={seed}", f"run.dir={folder}"]
    load = os.getloadavg()[0]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise SystemExit(f"seed {seed}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    course = {str(r["step"]): r[METRIC] for r in rows if METRIC in r}
    values = list(course.values())
    cpu = (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)
    return {
        "seed": seed,
        "accuracy_start": values[0],
        "accuracy_end": values[-1],
        "accuracy_by_step": course,
        "steps": max(r["step"] for r in rows),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "load_before": round(load, 2),
    }


def record(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The runs with what they ran on."""
    commit, dirty = code_state()
    return {
        "schema": 1,
        "benchmark": "quickstart_seeds",
        "commit": commit,
        "dirty": dirty,
        "device": f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores",
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "versions": {"python": platform.python_version()} | {n: version(n) for n in ("torch", "transformers")},
        "metric": f"{METRIC}: share of right greedy answers to the held-out prompts",
        "runs": runs,
    }


def main() -> int:
    """Run, write, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=OUT)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as tmp:
        for seed in options.seeds:
            runs.append(train(seed, Path(tmp) / str(seed)))
            print(json.dumps(runs[-1]), flush=True)
    write_json(options.out, record(runs))
    bad = [
        run["seed"]
        for run in runs
        if run["accuracy_start"] > START_AT_MOST
        or run["accuracy_end"] < END_AT_LEAST
        or run["seconds"] > SECONDS_AT_MOST
    ]
    print(f"wrote {options.out}" + (f"; outside the limits: seeds {bad}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
