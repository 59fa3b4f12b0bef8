"""One call of one reward function: its arguments, its result checked, every failure caught with its reason.

Nothing here raises for what a user's function does. A function is called once for a job, never again.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rlspeed.rewards.load import LoadedFunction
from rlspeed.rewards.signature import STANDARD
from rlspeed.rewards.types import Job, Outcome, RunState, Sample
from rlspeed.rewards.values import BadValue, items, loggable, number, number_or_dict, plain, trace

Entry = tuple[float | None, dict[str, Any]]


class CallLog:
    """What a function says through TRL's `log_extra` and `log_metric` during one call."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """One value for each answer, written with the sample."""
        self.columns.setdefault(str(column), []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """A number of the whole batch; averaged over the step."""
        logged = number(value)
        assert logged is not None
        self.metrics.setdefault(str(name), []).append(logged)


def arguments(fn: LoadedFunction, job: Job, log: CallLog) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of the call; every value is a private copy."""
    samples = job.samples
    if fn.kind == "openrlhf":
        queries = [s.prompt_text + s.response_text for s in samples]
        labels = [plain(s.ground_truth) for s in samples]
        return [queries, [s.prompt_text for s in samples], labels], plain(fn.spec.kwargs)
    if fn.kind == "verl":
        sample = samples[0]
        values: dict[str, Any] = {
            "data_source": sample.data_source,
            "solution_str": sample.response_text,
            "ground_truth": plain(sample.ground_truth),
            "extra_info": plain(sample.extra_info or {}),
        }
    elif fn.kind == "verl_batch":
        values = {
            "data_sources": [s.data_source for s in samples],
            "solution_strs": [s.response_text for s in samples],
            "ground_truths": [plain(s.ground_truth) for s in samples],
            "extra_infos": [plain(s.extra_info or {}) for s in samples],
        }
    else:
        values = _trl_arguments(fn, samples, job.state, log)
    values.update(plain(fn.spec.kwargs))
    return [], {name: value for name, value in values.items() if fn.takes(name)}


def _trl_arguments(fn: LoadedFunction, samples: Sequence[Sample], state: RunState, log: CallLog) -> dict[str, Any]:
    """TRL's call: every column of the data as a list; a column that some rows lack holds None there."""
    rows = [
        {"data_source": s.data_source, "ground_truth": s.ground_truth, "extra_info": s.extra_info, **s.columns}
        for s in samples
    ]
    names = {name for row in rows for name in row if fn.takes(name)} - {"prompt", "completion"} - set(STANDARD["trl"])
    values: dict[str, Any] = {name: [plain(row.get(name)) for row in rows] for name in sorted(names)}
    return values | {
        "prompts": [plain(s.prompt) for s in samples],
        "completions": [completion(s) for s in samples],
        "completion_ids": [list(s.response_ids) for s in samples],
        "trainer_state": state,
        "log_extra": log.log_extra,
        "log_metric": log.log_metric,
    }


def completion(sample: Sample) -> str | list[dict[str, str]]:
    """TRL's form of an answer: text for a text prompt, one assistant message for a message list."""
    if isinstance(sample.prompt, str):
        return sample.response_text
    return [{"role": "assistant", "content": sample.response_text}]


def call_sync(fn: LoadedFunction, job: Job) -> Outcome:
    """Call a plain function in this thread."""
    log = CallLog()
    try:
        args, kwargs = arguments(fn, job, log)
        result = fn.function(*args, **kwargs)
        if inspect.isawaitable(result):
            getattr(result, "close", lambda: None)()
            raise BadValue("got a coroutine, expected a result; write the function with `async def`")
        return outcome(fn, job, result, log)
    except BaseException as error:
        return Outcome.of_failure(job, reason(error))
    finally:
        _clear_alarm()


async def call_async(fn: LoadedFunction, job: Job, timeout: float) -> Outcome:
    """Await an async function for at most `timeout` seconds; one that ignores its cancellation is left behind."""
    log = CallLog()

    async def guarded() -> Outcome:
        try:
            args, kwargs = arguments(fn, job, log)
            return outcome(fn, job, await fn.function(*args, **kwargs), log)
        except BaseException as error:  # SystemExit would end the event loop of all calls
            return Outcome.of_failure(job, reason(error))

    task = asyncio.ensure_future(guarded())
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout)
    finally:
        task.cancel()  # does nothing to a finished one
    return task.result() if done else Outcome.of_failure(job, no_answer(timeout))


def outcome(fn: LoadedFunction, job: Job, result: Any, log: CallLog) -> Outcome:
    """The result read by the rules of the signature. A bad entry fails its sample, a bad list all samples.

    Raises:
        BadValue: the result as a whole is not what the signature says.
    """
    count = len(job.samples)
    entries = read(fn, result, count)
    extras: list[dict[str, Any]] = [{} for _ in range(count)]
    for column, logged in log.columns.items():
        for extra, value in zip(extras, items(logged, count, f"log_extra({column!r}) with a list")):
            extra[column] = loggable(value)
    values: list[float | None] = []
    failures: list[str | None] = []
    for extra, entry in zip(extras, entries):
        if isinstance(entry, str):
            values.append(None)
            failures.append(entry)
        else:
            values.append(entry[0])
            failures.append(None)
            extra.update(entry[1])
    return Outcome(
        job=job.id, values=tuple(values), failures=tuple(failures), extras=tuple(extras), metrics=log.metrics
    )


def read(fn: LoadedFunction, result: Any, count: int) -> list[Entry | str]:
    """One (value, further values) for each sample, or the reason why that sample's entry is none.

    Raises:
        BadValue: as `outcome`.
    """
    if fn.kind == "verl":
        return [number_or_dict(result)]
    if fn.kind == "verl_batch":
        return [_entry(number_or_dict, x) for x in items(result, count)]
    if fn.kind == "trl":
        return [_entry(lambda x: (number(x, none_allowed=True), {}), x) for x in items(result, count)]
    if not isinstance(result, dict):
        return [_entry(lambda x: (number(x), {}), x) for x in items(result, count, "a dict with 'rewards', or a list")]
    if "rewards" not in result:
        raise BadValue(f"got a dict without 'rewards' (keys: {sorted(map(str, result))}), expected 'rewards' in it")
    entries = [_entry(lambda x: (number(x), {}), x) for x in items(result["rewards"], count, "'rewards' with a list")]
    logs = dict(result.get("extra_logs") or {})
    if result.get("scores") is not None:
        logs["scores"] = result["scores"]
    for name, logged in logs.items():
        single = isinstance(logged, (bool, int, float, str)) or getattr(logged, "shape", None) == ()
        spread = [logged] * count if single else items(logged, count, f"extra_logs[{name!r}] with a list")
        for entry, value in zip(entries, spread):
            if not isinstance(entry, str):
                entry[1][str(name)] = loggable(value)
    return entries


def _entry(reader: Callable[[Any], Entry], value: Any) -> Entry | str:
    try:
        return reader(value)
    except BadValue as error:
        return f"returned a bad value: {error}"


def reason(error: BaseException) -> str:
    """Why a call failed, with the user's own traceback when the function raised."""
    if isinstance(error, BadValue):
        return f"returned a bad value: {error}"
    if isinstance(error, asyncio.CancelledError):
        return "was cancelled"
    return f"raised {type(error).__name__}\n{trace(error)}"


def no_answer(timeout: float) -> str:
    """The reason of a call that took too long."""
    return f"gave no answer within {timeout:g} s (reward.timeout_seconds)"


def _clear_alarm() -> None:
    """End an alarm that the function set and left behind: it would strike another call."""
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)
