"""Records made up for comparisons, and the folder of a run with given step times."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlspeed.bench.record import Record, Value

MACHINE = {"cpu": "some CPU", "cores": 2, "host_memory_bytes": 1 << 34, "gpus": []}


@pytest.fixture
def make_record() -> Callable[..., Record]:
    """A record with these samples of tokens_per_second, and whatever else is given."""

    def make(name: str, rates: Sequence[float], **changes: Any) -> Record:
        values = {"tokens_per_second": Value(unit="tokens/s/device", samples=tuple(rates))}
        values |= changes.pop("values", {})
        fields: dict[str, Any] = {
            "machine": MACHINE,
            "versions": {"torch": "2.13"},
            "commit": "c" * 40,
            "dirty": False,
            "profile": name,
            "data": "d",
        }
        return Record(name=name, values=values, **(fields | changes))

    return make


@pytest.fixture
def make_run() -> Callable[[Path, Sequence[float]], Path]:
    """A run folder whose steps took these seconds, with 1000 tokens (400 of answers) each."""

    def make(folder: Path, seconds: Sequence[float]) -> Path:
        folder.mkdir(parents=True)
        metrics = [
            {"step": i, "tokens/prompt": 600.0, "tokens/response": 400.0, "tokens/squares": 5e4, "tokens/padding": 7.0}
            for i in range(1, len(seconds) + 1)
        ]
        timings = [{"step": 0, "timing_s/checks": 1.0}]
        timings += [
            {
                "step": i,
                "timing_s/step": s,
                "timing_s/gen": s / 2,
                "timing_s/update_actor": s / 4,
                "perf/throughput": 1000.0 / s,
                "perf/throughput_response": 400.0 / s,
                "perf/max_rss_gb": 1.0,
            }
            for i, s in enumerate(seconds, 1)
        ]
        for name, rows in (("metrics.jsonl", metrics), ("timings.jsonl", timings)):
            (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
        return folder

    return make
