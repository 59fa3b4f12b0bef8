"""A benchmark's numbers from a run's own metrics.jsonl and timings.jsonl: warm-up apart, a sample for each step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlspeed.bench.flops import step_flops
from rlspeed.bench.record import Value
from rlspeed.config.schema import Profile
from rlspeed.errors import DataError, Fault

Row = Mapping[str, float]

# phases of a step: the timing's name, and the name in records and pictures
PHASES = {
    "gen": "generation",
    "reward": "reward",
    "old_log_prob": "log-probs",
    "ref": "reference",
    "values": "values",
    "adv": "advantages",
    "update_weights": "transition",
    "update_critic": "critic update",
    "update_actor": "actor update",
}
OTHER = "other"
PHASE = "phase/"
FILES = ("metrics.jsonl", "timings.jsonl")
# name in the record: (metric, unit, factor)
PLAIN = {
    "tokens_per_second": ("perf/throughput", "tokens/s/device", 1.0),
    "answer_tokens_per_second": ("perf/throughput_response", "tokens/s/device", 1.0),
    "step_seconds": ("timing_s/step", "s", 1.0),
    "critic_step_seconds": ("timing_s/update_critic", "s", 1.0),
    "transition_seconds": ("transition/seconds", "s", 1.0),
    "transition_bytes_received": ("transition/bytes_received", "bytes", 1.0),
    "transition_bytes_copied": ("transition/bytes_copied", "bytes", 1.0),
    "token_latency_mean": ("gen/token_latency/mean", "ms", 1.0),
    "token_latency_std": ("gen/token_latency/std", "ms", 1.0),
    "peak_device_memory": ("perf/max_memory_allocated_gb", "GiB", 1.0),
    "peak_host_memory": ("perf/max_rss_gb", "GiB", 1.0),
    "padding_tokens": ("tokens/padding", "tokens", 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Rows of a run, metrics and timings of a step together. warm_up: the first ones; measured: those that count."""

    warm_up: tuple[Row, ...]
    measured: tuple[Row, ...]


def read_steps(folder: Path, warm_up: int) -> Steps:
    """The training steps of a run folder, the first `warm_up` apart.

    Raises:
        DataError: no such files, or no training step in them.
    """
    by_step: dict[int, dict[str, float]] = {}
    for name in FILES:
        try:
            lines = (folder / name).read_text(encoding="utf-8").splitlines()
            for line in lines:
                row = json.loads(line)
                by_step.setdefault(int(row["step"]), {}).update({k: float(v) for k, v in row.items()})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(Fault(where=str(folder / name), found=f"cannot be read: {error}")) from error
    rows = [row for _, row in sorted(by_step.items()) if "timing_s/step" in row]
    if not rows:
        raise DataError(Fault(where=str(folder), found="no training step", allowed="a run of `rlspeed train`"))
    return Steps(warm_up=tuple(rows[:warm_up]), measured=tuple(rows[warm_up:]))


def values_of(
    rows: Sequence[Row], *, profile: Profile | None = None, devices: int = 1, peak: float | None = None
) -> dict[str, Value]:
    """The values of the measured steps `rows`; a number that some step lacks is left out.

    profile, devices, peak (FLOP/s of one device): for FLOP/s and MFU; without them there are none.
    """
    out: dict[str, Value] = {}
    for name, (metric, unit, factor) in PLAIN.items():
        _add(out, name, unit, [row[metric] * factor for row in rows if metric in row], len(rows))
    on_device = all("perf/max_memory_allocated_gb" in row for row in rows)
    if on_device:
        out.pop("peak_host_memory", None)
    out |= phases_of(rows)
    ratio = [
        row["gen/token_latency/std"] / row["gen/token_latency/mean"]
        for row in rows
        if row.get("gen/token_latency/mean")
    ]
    _add(out, "token_latency_deviation", "of the mean", ratio, len(rows))
    _add(out, "gpu_utilisation", "%", [row["gpu_utilisation"] for row in rows if "gpu_utilisation" in row], len(rows))
    if profile is not None:
        out |= _flops(rows, profile, devices, peak)
    return out


def phases_of(rows: Sequence[Row]) -> dict[str, Value]:
    """Seconds of each phase that some step has, and of what is left of the step."""
    out: dict[str, Value] = {}
    here = [p for p in PHASES if any(f"timing_s/{p}" in row for row in rows)]
    for phase in here:
        samples = [row.get(f"timing_s/{phase}", 0.0) for row in rows]
        _add(out, f"{PHASE}{PHASES[phase]}", "s", samples, len(rows))
    rest = [max(0.0, row["timing_s/step"] - sum(row.get(f"timing_s/{p}", 0.0) for p in here)) for row in rows]
    _add(out, f"{PHASE}{OTHER}", "s", rest, len(rows))
    return out


def _flops(rows: Sequence[Row], profile: Profile, devices: int, peak: float | None) -> dict[str, Value]:
    """FLOP/s of step and updates per device, and both as shares of the peak where it is known."""
    out: dict[str, Value] = {}
    step, update = [], []
    for row in rows:
        flops = step_flops(row, profile)
        seconds = row.get("timing_s/update_actor", 0.0) + row.get("timing_s/update_critic", 0.0)
        if flops is None or not seconds:
            return {}
        step.append(flops.total / row["timing_s/step"] / devices)
        update.append(flops.update / seconds / devices)
    _add(out, "step_tflops", "TFLOP/s/device", [s / 1e12 for s in step], len(rows))
    _add(out, "update_tflops", "TFLOP/s/device", [u / 1e12 for u in update], len(rows))
    if peak:
        _add(out, "mfu_step", "of the peak", [s / peak for s in step], len(rows))
        _add(out, "mfu_update", "of the peak", [u / peak for u in update], len(rows))
    return out


def _add(out: dict[str, Value], name: str, unit: str, samples: Sequence[float], wanted: int) -> None:
    if samples and len(samples) == wanted:
        out[name] = Value(unit=unit, samples=tuple(samples))
