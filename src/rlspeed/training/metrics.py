"""The metrics of one step: every rank adds sums and counts, one exchange makes numbers of them.

Nothing is averaged before all ranks are in: a mean is the sum of all contributions over the count of all.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlspeed.algorithms.loss import DENOMINATORS, LossOut
from rlspeed.engine.room import run_peak
from rlspeed.training.declared import declaration

# every rank's value, in rank order; engine/world.py has the real one
Gather = Callable[[Any], list[Any]]

GIB = float(1 << 30)
MOST_RANKS = 64  # that have metrics of their own

# phases whose cost goes with prompt and response tokens; that of "gen" goes with the generated ones
TOKEN_PHASES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


class StepMetrics:
    """Contributions of this rank to the metrics of one step.

    Tensors stay on their device until `reduce`, so adding one does not wait for the device.
    """

    def __init__(self) -> None:
        self._added: list[tuple[str, float | Tensor, float]] = []
        self._updates: dict[str, int] = {}

    def add(self, name: str, value: float | Tensor, count: float | None = None) -> None:
        """Add a contribution to metric `name`.

        value: number or 0-d tensor; for a mean the *sum* over `count` items, else the value itself. count: items in
        the sum; given for means and for nothing else.

        Raises:
            LookupError: `name` is not declared.
            ValueError: a mean without count, or a count for another reduction.
        """
        metric = declaration(name)
        if (metric.reduction == "mean") != (count is not None):
            raise ValueError(f"{name} is a {metric.reduction}: a mean needs a count, nothing else takes one")
        if isinstance(value, Tensor):
            value = value.detach()
        self._added.append((name, value, 1.0 if count is None else float(count)))

    def add_spread(self, prefix: str, values: Tensor) -> None:
        """Add `prefix`/mean, /max and /min of a stream [N]; an empty one adds nothing."""
        if values.numel() == 0:
            return
        v = values.detach().double()
        self.add(f"{prefix}/mean", v.sum(), v.numel())
        self.add(f"{prefix}/max", v.max())
        self.add(f"{prefix}/min", v.min())

    def add_loss(self, role: str, out: LossOut) -> None:
        """Add what a loss reports, as `role`/name; to be called for each micro-batch on each rank."""
        for name, value in out.metrics.items():
            self.add(f"{role}/{name}", value, out.tokens if DENOMINATORS[name] == "tokens" else None)

    def add_update(self, role: str, *, grad_norm: float, lr: float, empty: bool) -> None:
        """Add one optimizer step of `role`; to be called on every rank. An empty one is counted and not averaged in."""
        self.add(f"{role}/empty_updates", float(empty))
        self._updates.setdefault(role, 0)
        if not empty:
            self._updates[role] += 1
            self.add(f"{role}/grad_norm", grad_norm)
            self.add(f"{role}/lr", lr)

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Add `timing_s/phase` for each phase; the slowest rank counts."""
        for phase, value in seconds.items():
            self.add(f"timing_s/{phase}", value)

    def add_idle(self, rank: int, seconds: Mapping[str, float], idled: Mapping[str, float]) -> None:
        """Add the busy share of the step of `rank`, this one, and in which phase it waited for others.

        seconds, idled: of each phase, of the clock; nothing is added without timing_s/step.
        """
        whole = seconds.get("step", 0.0)
        if whole > 0 and rank < MOST_RANKS:
            self.add(f"busy/{rank}", 1.0 - min(sum(idled.values()) / whole, 1.0))
            for phase, value in idled.items():
                self.add(f"idle_s/{rank}/{phase}", value)

    def add_memory(self, device: torch.device) -> None:
        """Add this rank's memory peak: of the device, and of the process's resident memory."""
        if device.type == "cuda":
            allocated, reserved = run_peak(device)
            self.add("perf/max_memory_allocated_gb", allocated / GIB)
            self.add("perf/max_memory_reserved_gb", reserved / GIB)
        self.add("perf/max_rss_gb", resident_peak_bytes() / GIB)

    def reduce(self, gather: Gather) -> dict[str, float]:
        """The metrics of the step, the same on every rank, sorted by name; to be called on every rank.

        gather: gives every rank's value in rank order (`World.gather_objects`). Ranks may have added different names.
        """
        ranks: list[tuple[dict[str, _Total], dict[str, int]]] = gather((self._totals(), self._updates))
        names = sorted({name for totals, _ in ranks for name in totals})
        out: dict[str, float] = {}
        for name in names:
            parts = [totals[name] for totals, _ in ranks if name in totals]
            match declaration(name).reduction:
                case "mean":
                    count = sum(p.count for p in parts)
                    if count > 0:
                        out[name] = sum(p.total for p in parts) / count
                case "per_update":
                    updates = max(counts.get(name.split("/")[0], 0) for _, counts in ranks)
                    if updates > 0:
                        out[name] = sum(p.total for p in parts) / updates
                case "global":
                    out[name] = parts[0].total / parts[0].count
                case "sum":
                    out[name] = sum(p.total for p in parts)
                case "max":
                    out[name] = max(p.high for p in parts)
                case "min":
                    out[name] = min(p.low for p in parts)
        memory_rank = _largest([totals for totals, _ in ranks], "perf/max_memory_allocated_gb", "perf/max_rss_gb")
        if memory_rank is not None:
            out["perf/max_memory_rank"] = float(memory_rank)
        out.update(performance(out, ranks=len(ranks)))
        if out.get("transition/weights_s", 0.0) > 0:
            moved = out["transition/bytes_received"] + out["transition/bytes_copied"]
            movers = sum("transition/bytes_received" in totals for totals, _ in ranks)
            out["transition/gb_per_s"] = moved / movers / out["transition/weights_s"] / 1e9
        return dict(sorted(out.items()))

    def _totals(self) -> dict[str, _Total]:
        totals: dict[str, _Total] = {}
        for (name, _, count), value in zip(self._added, _numbers([v for _, v, _ in self._added])):
            totals.setdefault(name, _Total()).add(value, count)
        return totals


class _Total:
    """Sum, count and extremes of one rank's contributions to one metric."""

    __slots__ = ("count", "high", "low", "total")

    def __init__(self) -> None:
        self.total = self.count = 0.0
        self.high, self.low = float("-inf"), float("inf")

    def add(self, value: float, count: float) -> None:
        self.total += value
        self.count += count
        # a nan wins over every number, in whichever order they come
        self.high = value if value != value else max(self.high, value)
        self.low = value if value != value else min(self.low, value)


def _numbers(values: list[float | Tensor]) -> list[float]:
    """Python numbers of all values, with one wait for each device."""
    out = [0.0 if isinstance(v, Tensor) else float(v) for v in values]
    by_device: dict[torch.device, list[int]] = {}
    for i, v in enumerate(values):
        if isinstance(v, Tensor):
            by_device.setdefault(v.device, []).append(i)
    for index in by_device.values():
        read = torch.stack([v.double() for v in (values[i] for i in index) if isinstance(v, Tensor)]).tolist()
        for i, number in zip(index, read):
            out[i] = number
    return out


def _largest(ranks: list[dict[str, _Total]], *names: str) -> int | None:
    """Lowest rank with the largest value of the first of `names` that any rank has."""
    for name in names:
        peaks = {r: totals[name].high for r, totals in enumerate(ranks) if name in totals}
        if peaks:
            return max(peaks, key=lambda r: (peaks[r], -r))
    return None


def performance(values: Mapping[str, float], *, ranks: int) -> dict[str, float]:
    """Rates of a step from its reduced `tokens/*` and `timing_s/*`; padding is in none of them.

    perf/throughput = (prompt + response tokens of the step) / (seconds * ranks), as verl defines it; generated tokens
    are reported apart, because prompt tokens inflate that number. Without tokens or without timing_s/step there is no
    rate.
    """
    seconds = values.get("timing_s/step", 0.0)
    prompt, response = values.get("tokens/prompt", 0.0), values.get("tokens/response", 0.0)
    total = prompt + response
    out: dict[str, float] = {}
    if total > 0:
        out["perf/total_num_tokens"] = total
    if seconds > 0:
        out["perf/time_per_step"] = seconds
    if total > 0 and seconds > 0:
        out["perf/throughput"] = total / (seconds * ranks)
        out["perf/throughput_response"] = response / (seconds * ranks)
        out["perf/processed_tokens_per_s"] = total / seconds
        out["perf/trained_tokens_per_s"] = values.get("tokens/trained", 0.0) / seconds
    for phase, tokens in (("gen", response), *((p, total) for p in TOKEN_PHASES)):
        if f"timing_s/{phase}" in values and tokens > 0:
            out[f"timing_per_token_ms/{phase}"] = values[f"timing_s/{phase}"] * 1000.0 / tokens
    return out


def split(values: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """The values that data, seed and weights decide (metrics.jsonl), and those of clock and memory (timings.jsonl).

    Raises:
        LookupError: a name is not declared.
    """
    clock = {name: value for name, value in values.items() if declaration(name).clock}
    return {name: value for name, value in values.items() if name not in clock}, clock


def seqlen_balance(before: list[int], after: list[int]) -> dict[str, float]:
    """`global_seqlen/*` from the tokens of each rank before and after balancing."""
    return {
        "global_seqlen/min": float(min(before)),
        "global_seqlen/max": float(max(before)),
        "global_seqlen/minmax_diff": float(max(before) - min(before)),
        "global_seqlen/balanced_min": float(min(after)),
        "global_seqlen/balanced_max": float(max(after)),
        "global_seqlen/mean": sum(after) / len(after),
    }


def resident_peak_bytes() -> int:
    """Largest resident memory of this process since it started."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
