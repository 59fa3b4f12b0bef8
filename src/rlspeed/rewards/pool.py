"""All reward functions of a run behind one door: submit answers as they finish, collect their scores.

The pool owns the policy for failures: a function that raises, gives no answer in time, or returns something that is
not a number stops the run with the sample named, or masks the sample. It never invents a number. A call is made twice
only where its worker process died, once, and failures stop the run.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rlspeed.errors import Fault, RewardError
from rlspeed.rewards.lanes import AsyncLane, ThreadLane, drain, hung_reason
from rlspeed.rewards.load import LoadedFunction, load_functions, specs_of
from rlspeed.rewards.process import Worker
from rlspeed.rewards.process_lanes import AsyncProcessLane, ProcessLane
from rlspeed.rewards.totals import Answer, failure_fault, too_many_fault, total_score
from rlspeed.rewards.types import Job, Outcome, RunState, Sample, Score

if TYPE_CHECKING:
    from rlspeed.config.schema import Reward

TICK_SECONDS = 0.1


class RewardPool:
    """Scores answers with the configured functions.

    Functions that take one answer (verl's signature) start when it is submitted; those that take whole batches start
    at `collect`. With `cfg.workers` 0 plain functions run in one thread of this process; else in that many worker
    processes. Async functions run all at once in one event loop, in this process or in a worker process.

    Not thread-safe: one thread submits and collects. Close it, or use it as a context manager.
    """

    def __init__(self, cfg: Reward, *, max_steps: int | None = None) -> None:
        """Load the functions.

        max_steps: for functions that ask for TRL's `trainer_state`.

        Raises:
            ConfigError: all faults of all functions.
        """
        self._cfg = cfg
        self._max_steps = max_steps
        self._specs = specs_of(cfg)
        self._results: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._samples: list[Sample] = []
        self._open: dict[int, tuple[int, range]] = {}
        self._answers: dict[tuple[int, int], Answer] = {}
        self._metrics: dict[str, list[float]] = {}
        self._out_of_use: str | None = None
        self._closed = False
        self._functions: list[LoadedFunction] = []
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread_lane: ThreadLane | None = None
        self._process_lanes: list[ProcessLane] = []
        self._async_lane: AsyncLane | AsyncProcessLane | None = None
        self._is_async: list[bool] = []
        self._whole_batch: list[bool] = []
        if self._specs:
            if cfg.workers:
                self._start_processes()
            else:
                self._start_threads()

    @property
    def names(self) -> tuple[str, ...]:
        """The functions' names, as in Score.parts."""
        return tuple(spec.name for spec in self._specs)

    @property
    def takes_batches(self) -> bool:
        """Some function takes all answers of a step at once: it is given them in the order of submission."""
        return any(self._whole_batch)

    def submit(self, sample: Sample) -> None:
        """Start scoring one answer; its score comes from the next `collect`, in the order of submission.

        Raises:
            RewardError: the pool is closed, or a function hangs in its thread.
        """
        self._check_usable()
        position = len(self._samples)
        self._samples.append(sample)
        for function, whole in enumerate(self._whole_batch):
            if not whole:
                self._start_job(function, range(position, position + 1), RunState())

    def collect(self, *, step: int | None = None) -> list[Score]:
        """Scores of all answers submitted since the last call, in their order.

        step: the training step, for functions that ask for TRL's `trainer_state`.

        Raises:
            RewardError: a function failed and `on_failure` is stop; more failures than `max_failed_share`; a worker
            process
                that died twice; a function that hangs in a thread. What was submitted is forgotten then.
        """
        self._check_usable()
        try:
            state = RunState(global_step=step, max_steps=self._max_steps)
            for function, whole in enumerate(self._whole_batch):
                if whole and self._samples:
                    self._start_job(function, range(len(self._samples)), state)
            while self._open:
                self._take()
            scores = [self._total(position) for position in range(len(self._samples))]
            self._check_policy(scores)
            return scores
        finally:
            self._forget()  # after an error: also what is still under way

    def score(self, samples: Iterable[Sample], *, step: int | None = None) -> list[Score]:
        """`submit` each and `collect`.

        Raises:
            RewardError: as `collect`.
            ValueError: answers that were submitted before are still to be collected.
        """
        if self._samples:
            raise ValueError(f"{len(self._samples)} submitted answers have not been collected")
        for sample in samples:
            self.submit(sample)
        return self.collect(step=step)

    def take_metrics(self) -> dict[str, float]:
        """Means of what the functions logged by TRL's `log_metric` since the last call."""
        metrics = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        self._metrics = {}
        return metrics

    def close(self) -> None:
        """End threads and worker processes; waits for no function. Closing twice is no error."""
        if self._closed:
            return
        self._closed = True
        self._out_of_use = self._out_of_use or "the reward pool is closed"
        self._forget()
        if self._thread_lane is not None:
            self._thread_lane.close()
        for _ in self._process_lanes:
            self._jobs.put(None)
        for lane in self._process_lanes:
            lane.close()
        if self._async_lane is not None:
            self._async_lane.close()
        for function in self._functions:
            function.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start_threads(self) -> None:
        timeout = self._cfg.timeout_seconds
        self._functions = load_functions(self._specs)
        self._whole_batch = [f.whole_batch for f in self._functions]
        self._is_async = [f.is_async for f in self._functions]
        if not all(self._is_async):
            self._thread_lane = ThreadLane(self._functions, self._results, timeout)
        if any(self._is_async):
            self._async_lane = AsyncLane(self._functions, self._results, timeout)

    def _start_processes(self) -> None:
        """The functions are loaded in the workers alone; the first one tells what they are."""
        timeout, repeat = self._cfg.timeout_seconds, self._cfg.on_failure == "stop"

        def start() -> Worker:
            return Worker(self._specs, timeout)

        first: Worker | None = start()
        assert first is not None
        flags = first.ready()
        self._whole_batch = [whole for whole, _ in flags]
        self._is_async = [is_async for _, is_async in flags]
        if not all(self._is_async):
            for _ in range(self._cfg.workers):
                self._process_lanes.append(ProcessLane(start, self._jobs, self._results, timeout, first, repeat=repeat))
                first = None
        if any(self._is_async):
            self._async_lane = AsyncProcessLane(start, self._results, timeout, first, repeat=repeat)

    def _start_job(self, function: int, positions: range, state: RunState) -> None:
        samples = tuple(self._samples[p] for p in positions)
        job = Job(id=next(self._ids), function=function, samples=samples, state=state)
        self._open[job.id] = (function, positions)
        if self._is_async[function]:
            assert self._async_lane is not None
            self._async_lane.submit(job)
        elif self._thread_lane is not None:
            self._thread_lane.submit(job)
        else:
            self._jobs.put(job)

    def _take(self) -> None:
        """Wait a little for one outcome and book it."""
        try:
            outcome = self._results.get(timeout=TICK_SECONDS)
        except queue.Empty:
            self._check_hung()
            return
        if outcome.job not in self._open:
            return
        function, positions = self._open.pop(outcome.job)
        for name, values in outcome.metrics.items():
            self._metrics.setdefault(name, []).extend(values)
        for position, value, failure, extra in zip(positions, outcome.values, outcome.failures, outcome.extras):
            self._answers[function, position] = Answer(value=value, failure=failure, extra=extra)
        failed = [i for i, failure in enumerate(outcome.failures) if failure is not None]
        if failed and (outcome.fatal or self._cfg.on_failure == "stop"):
            raise RewardError(self._fault(function, positions, outcome.failures))

    def _fault(self, function: int, positions: range, failures: Sequence[str | None]) -> Fault:
        """The first reason, with all samples of the call that failed for it."""
        why = next(f for f in failures if f is not None)
        samples = [self._samples[p] for p, f in zip(positions, failures) if f == why]
        return failure_fault(self._specs[function], samples, why, self._cfg.workers)

    def _check_hung(self) -> None:
        """A function that holds a thread of this process beyond the time-out: no policy can go on from there."""
        for lane in (self._thread_lane, self._async_lane):
            if not isinstance(lane, (ThreadLane, AsyncLane)):
                continue
            job = lane.overdue()
            if job is not None and job.id in self._open:
                why = hung_reason(self._cfg.timeout_seconds)
                fault = failure_fault(self._specs[job.function], job.samples, why, 0)
                self._out_of_use = str(fault)
                raise RewardError(fault)

    def _total(self, position: int) -> Score:
        answers = [self._answers[function, position] for function in range(len(self._specs))]
        return total_score(self._specs, answers, model_follows=self._cfg.model.path is not None)

    def _check_policy(self, scores: Sequence[Score]) -> None:
        """Raise for samples that nothing scored (stop), or for too many failed ones (mask)."""
        failed = [(sample, score) for sample, score in zip(self._samples, scores) if score.failed is not None]
        if not failed:
            return
        sample, score = failed[0]
        first = Fault(where=sample.label, found=str(score.failed))
        if self._cfg.on_failure == "stop":
            raise RewardError(first)
        fault = too_many_fault(self._samples, scores, self._cfg.max_failed_share)
        if fault is not None:
            raise RewardError([fault, first])

    def _forget(self) -> None:
        """Drop what was submitted; late outcomes of it are not known any more."""
        abandoned = bool(self._open)
        self._samples, self._open, self._answers = [], {}, {}
        if not abandoned:
            return
        drain(self._jobs)
        for lane in (self._thread_lane, self._async_lane):
            if lane is not None:
                lane.drop()

    def _check_usable(self) -> None:
        if self._out_of_use is not None:
            raise RewardError(Fault(where="reward", found=self._out_of_use))
