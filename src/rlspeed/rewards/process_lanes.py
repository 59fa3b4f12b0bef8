"""Where calls run in worker processes: one lane per worker for plain functions, one lane for all async calls.

A worker that gives no answer in time is killed and replaced; so is one that died. What was under way counts as failed,
but for a worker's first death in a run that stops at failures: its call is made once more by the new worker. A worker
that dies twice without an answer between makes the failure fatal.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable

from rlspeed.rewards.call import no_answer
from rlspeed.rewards.lanes import LOOP_GRACE_SECONDS, Sink, drain
from rlspeed.rewards.process import SLICE_SECONDS, Worker, WorkerDied, WorkerTimeout
from rlspeed.rewards.types import Job, Outcome

MAX_DEATHS = 1
StartWorker = Callable[[], Worker]


def died_reason(how: str, deaths: int) -> str:
    """The reason of a call whose worker process ended."""
    again = "" if deaths <= MAX_DEATHS else f" ({deaths} times in a row; it was restarted once)"
    return f"ended its worker process: the process {how}{again}"


def tell_restart(how: str) -> None:
    """A line for whoever reads the output: a death that costs nothing may be the first of many."""
    print(f"a reward worker process {how}; another one takes over its call", file=sys.stderr, flush=True)


def not_run_reason(error: Exception) -> str:
    """The reason of a call that never reached the function."""
    return f"could not be run in a worker process: {type(error).__name__}: {error}"


class ProcessLane:
    """One worker process for plain functions, fed by a thread from a queue that all such lanes share.

    repeat: whether a call whose worker died is made once more.
    """

    def __init__(
        self,
        start: StartWorker,
        jobs: queue.SimpleQueue[Job | None],
        results: Sink,
        timeout: float,
        worker: Worker | None = None,
        *,
        repeat: bool = False,
    ) -> None:
        self._start = start
        self._jobs = jobs
        self._results = results
        self._timeout = timeout
        self._repeat = repeat
        self._worker = worker
        self._deaths = 0
        self._busy = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="reward-worker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the worker; a call under way ends with it. The queue must hold a None for this lane."""
        self._closing = True
        worker = self._worker
        if self._busy and worker is not None:
            worker.kill()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        if self._worker is None:
            with contextlib.suppress(OSError):
                self._worker = self._start()
        while (job := self._jobs.get()) is not None:
            self._busy = True
            outcome = self._answer(job)
            self._busy = False
            self._results.put(outcome)
        if self._worker is not None:
            self._worker.stop()

    def _answer(self, job: Job) -> Outcome:
        try:
            if self._worker is None:
                self._worker = self._start()
            outcome: Outcome = self._worker.call(job, self._timeout)
        except WorkerTimeout:
            self._replace()
            return Outcome.of_failure(job, no_answer(self._timeout))
        except WorkerDied as error:
            if self._closing:
                return Outcome.of_failure(job, died_reason(str(error), 1))
            self._deaths += 1
            self._replace()
            if self._deaths <= MAX_DEATHS and (self._repeat or not error.called):  # not called: it died idle
                tell_restart(str(error))
                return self._answer(job)
            return Outcome.of_failure(job, died_reason(str(error), self._deaths), fatal=self._deaths > MAX_DEATHS)
        except Exception as error:
            self._replace()
            return Outcome.of_failure(job, not_run_reason(error), fatal=True)
        self._deaths = 0
        return outcome

    def _replace(self) -> None:
        """Kill the worker and start another one; it loads its functions while nobody waits."""
        if self._worker is not None:
            self._worker.kill()
        self._worker = None
        with contextlib.suppress(OSError):
            self._worker = self._start()


class AsyncProcessLane:
    """One worker process that runs all async calls at once in its event loop; repeat: as of `ProcessLane`."""

    def __init__(
        self, start: StartWorker, results: Sink, timeout: float, worker: Worker | None = None, *, repeat: bool = False
    ) -> None:
        self._start = start
        self._results = results
        self._timeout = timeout
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[Job, float]] = {}
        self._deaths = 0
        self._repeat = repeat
        self._repeated: set[int] = set()
        self._worker = worker
        self._read: Worker | None = None
        self._thread = threading.Thread(target=self._send, name="reward-async-send", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; it starts as soon as the worker reads it."""
        self._jobs.put(job)

    def drop(self) -> None:
        """Forget what has not started; answers of the rest are not awaited."""
        drain(self._jobs)
        with self._lock:
            self._pending.clear()

    def close(self) -> None:
        """End the worker."""
        self.drop()
        self._jobs.put(None)
        self._thread.join(timeout=5.0)
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()

    def _send(self) -> None:
        while (job := self._jobs.get()) is not None:
            worker: Worker | None = None
            try:
                worker = self._ready_worker()
                with self._lock:
                    self._pending[job.id] = (job, time.monotonic())
                worker.connection.send(job)
            except OSError as error:
                if worker is None:
                    self._results.put(Outcome.of_failure(job, not_run_reason(error), fatal=True))
                else:
                    self._lost(worker, None)
            except Exception as error:
                with self._lock:
                    self._pending.pop(job.id, None)
                self._results.put(Outcome.of_failure(job, not_run_reason(error), fatal=True))

    def _ready_worker(self) -> Worker:
        with self._lock:
            worker = self._worker
        if worker is None:
            worker = self._start()
        worker.ready()
        with self._lock:
            self._worker = worker
        if self._read is not worker:
            self._read = worker
            threading.Thread(target=self._receive, args=(worker,), name="reward-async-receive", daemon=True).start()
        return worker

    def _receive(self, worker: Worker) -> None:
        """Take answers of one worker until it is lost or closed."""
        while True:
            try:
                if worker.connection.poll(SLICE_SECONDS):
                    self._took(worker.connection.recv())
                gone = worker.exit_code() is not None and not worker.connection.poll(0)
            except (EOFError, OSError):
                gone = True
            if gone:
                return self._lost(worker, None)
            limit = time.monotonic() - self._timeout - LOOP_GRACE_SECONDS
            with self._lock:
                hung = any(start < limit for _, start in self._pending.values())
            if hung:
                return self._lost(
                    worker, f"{no_answer(self._timeout)}: a function blocks the event loop of all async calls"
                )

    def _took(self, outcome: Outcome) -> None:
        with self._lock:
            self._deaths = 0
            self._repeated.discard(outcome.job)
            known = self._pending.pop(outcome.job, None)
        if known is not None:
            self._results.put(outcome)

    def _lost(self, worker: Worker, why: str | None) -> None:
        """The worker is of no more use: every call that was under way has failed."""
        with self._lock:
            if self._worker is not worker:
                return
            self._worker = None
            jobs = [job for job, _ in self._pending.values()]
            self._pending.clear()
            if why is None:
                self._deaths += 1
            died = why is None
            # answers of other calls between two deaths do not clear the call that was there both times
            again = [job for job in jobs if job.id in self._repeated]
            fatal = self._deaths > MAX_DEATHS or (died and bool(again))
            why = why or died_reason(worker.death(), max(self._deaths, 1 + bool(again)))
            repeat = died and self._repeat and not fatal
            self._repeated.update(job.id for job in jobs if repeat)
        how = worker.death() if repeat else ""
        worker.kill()
        if repeat and jobs:
            tell_restart(how)
            for job in jobs:
                self._jobs.put(job)
            return
        for job in jobs:
            self._results.put(Outcome.of_failure(job, why, fatal=fatal))
