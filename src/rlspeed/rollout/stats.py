"""How a call of generate went: tokens, latency, the tail."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

TAIL_SHARE = 0.1  # the tail starts when fewer than this share of the most lanes is live


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """One call of generate.

    tokens: answer tokens. prefill_tokens: prompt tokens computed (a shared prompt counts once). seconds: of the call.
    latency_*: seconds between two tokens of a sequence (mean, standard deviation, 99th percentile over chunks of
    steps). tail_seconds: with fewer than a tenth of the most lanes live. preempted: sequences that gave way for lack of
    cache and were computed again.
    """

    tokens: int = 0
    prefill_tokens: int = 0
    seconds: float = 0.0
    latency_mean: float = 0.0
    latency_std: float = 0.0
    latency_p99: float = 0.0
    tail_seconds: float = 0.0
    preempted: int = 0


class StatsKeeper:
    """Collects while a call runs."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.prefilled = 0
        self.chunks: list[tuple[int, int, float]] = []  # steps, live lanes, seconds

    def prefill(self, tokens: int) -> None:
        """Prompt tokens computed."""
        self.prefilled += tokens

    def chunk(self, steps: int, live: int, now: float) -> None:
        """Steps accepted at `now`; `live` lanes were live when they began."""
        self.chunks.append((steps, live, now - self.last))
        self.last = now

    def summary(self, tokens: int, preempted: int) -> GenerationStats:
        """Of everything collected."""
        gaps = sorted(seconds / steps for steps, live, seconds in self.chunks if live)
        most = max((live for _, live, _ in self.chunks), default=0)
        return GenerationStats(
            tokens=tokens,
            prefill_tokens=self.prefilled,
            seconds=time.perf_counter() - self.start,
            latency_mean=statistics.fmean(gaps) if gaps else 0.0,
            latency_std=statistics.pstdev(gaps) if gaps else 0.0,
            latency_p99=gaps[min(len(gaps) - 1, math.ceil(0.99 * len(gaps)) - 1)] if gaps else 0.0,
            tail_seconds=sum(s for _, live, s in self.chunks if 0 < live < TAIL_SHARE * most),
            preempted=preempted,
        )
