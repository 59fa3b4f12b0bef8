"""A reward model on the host scores answers as they finish, in its own thread, while others are still generated."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from rlspeed.rewards.types import Sample


class Scorer(Protocol):
    """What `RewardModelScorer` offers."""

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """One number for each answer."""
        ...


class StreamScorer:
    """Submit answers one by one, collect their scores in that order.

    Each answer is scored by itself, so that a score does not depend on which answers happened to wait together.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._jobs: queue.SimpleQueue[Sample | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[float | BaseException] = queue.SimpleQueue()
        self._submitted = 0
        self._spans: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._work, name="reward-model", daemon=True)
        self._thread.start()

    @property
    def done(self) -> int:
        """Submitted answers that are scored already."""
        return self._results.qsize()

    def take_spans(self) -> list[tuple[float, float]]:
        """Start and end of each scoring since the last call, by time.perf_counter."""
        out, self._spans = self._spans, []
        return out

    def submit(self, sample: Sample) -> None:
        """Start scoring an answer."""
        self._submitted += 1
        self._jobs.put(sample)

    def collect(self) -> list[float]:
        """Scores of all answers submitted since the last call; waits for those that are missing.

        Raises:
            RewardError: as the scorer does, after all others have come in.
        """
        results = [self._results.get() for _ in range(self._submitted)]
        self._submitted = 0
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [float(r) for r in results if not isinstance(r, BaseException)]

    def close(self) -> None:
        """End the thread after the answer it is at."""
        while not self._jobs.empty():
            self._jobs.get()
        self._jobs.put(None)

    def _work(self) -> None:
        while (sample := self._jobs.get()) is not None:
            start = time.perf_counter()
            try:
                (score,) = self._scorer.score([sample])
                self._results.put(score)
            except BaseException as error:  # told to whoever collects
                self._results.put(error)
            self._spans.append((start, time.perf_counter()))
