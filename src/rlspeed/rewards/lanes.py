"""Where calls run inside one process: a thread for plain functions, an event loop in a thread for async ones.

A lane takes jobs and puts outcomes; it raises nothing. Both threads are daemons: a function that never returns cannot
keep the process from ending.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from rlspeed.rewards.call import call_async, call_sync, no_answer
from rlspeed.rewards.load import LoadedFunction
from rlspeed.rewards.types import Job, Outcome

LOOP_GRACE_SECONDS = 5.0


class Sink(Protocol):
    """Takes finished outcomes, from any thread."""

    def put(self, outcome: Outcome, /) -> object:
        """Take one."""
        ...


class ThreadLane:
    """Plain functions, one after another, in one daemon thread."""

    def __init__(self, functions: Sequence[LoadedFunction], results: Sink, timeout: float) -> None:
        self._functions = functions
        self._results = results
        self._timeout = timeout
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._current: tuple[Job, float] | None = None
        self._thread = threading.Thread(target=self._run, name="reward-functions", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def overdue(self) -> Job | None:
        """The job whose call has taken longer than the time-out; nothing can end it."""
        current = self._current
        return current[0] if current is not None and time.monotonic() - current[1] > self._timeout else None

    def drop(self) -> None:
        """Forget the jobs that have not started."""
        drain(self._jobs)

    def close(self) -> None:
        """Let the thread end, unless a function holds it."""
        self.drop()
        self._jobs.put(None)
        if self._current is None:
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._current = (job, time.monotonic())
            outcome = call_sync(self._functions[job.function], job)
            self._current = None
            self._results.put(outcome)


class AsyncLane:
    """Async functions, all at once, in one event loop that lives as long as the lane."""

    def __init__(self, functions: Sequence[LoadedFunction], results: Sink, timeout: float) -> None:
        self._functions = functions
        self._results = results
        self._timeout = timeout
        self._pending: dict[int, tuple[Job, float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: None)
        self._thread = threading.Thread(target=self._run, name="reward-async", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Start a job; its time runs from now."""
        self._pending[job.id] = (job, time.monotonic())
        self._loop.call_soon_threadsafe(self._start, job)

    def overdue(self) -> Job | None:
        """A job that not even the loop's own time-out could end: some function blocks the loop."""
        limit = time.monotonic() - self._timeout - LOOP_GRACE_SECONDS
        return next((job for job, start in list(self._pending.values()) if start < limit), None)

    def drop(self) -> None:
        """Cancel the calls that run."""
        self._pending.clear()
        self._loop.call_soon_threadsafe(self._cancel)

    def close(self) -> None:
        """Cancel everything and end the thread, unless a function blocks it."""
        self.drop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=0.5))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def _start(self, job: Job) -> None:
        task = self._loop.create_task(self._finish(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, job: Job) -> None:
        try:
            outcome = await call_async(self._functions[job.function], job, self._timeout)
        except asyncio.CancelledError:
            return
        finally:
            self._pending.pop(job.id, None)
        self._results.put(outcome)


def hung_reason(timeout: float) -> str:
    """Why a lane of this process is lost."""
    return f"{no_answer(timeout)}, and a call in a thread cannot be ended"


def drain(jobs: queue.SimpleQueue[Job | None]) -> None:
    """Take everything out of a queue of jobs."""
    while True:
        try:
            jobs.get_nowait()
        except queue.Empty:
            return
