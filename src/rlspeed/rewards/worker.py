"""A worker process: loads the reward functions, answers jobs, and dies with its parent.

Plain functions run in the main thread, so they may use signals; async ones in an event loop beside it. The parent
starts it as a program of its own (not by multiprocessing), so nothing of the parent's main module is imported or run
again here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from rlspeed.errors import ConfigError, Fault
from rlspeed.rewards.call import call_sync
from rlspeed.rewards.lanes import AsyncLane
from rlspeed.rewards.load import LoadedFunction, load_functions
from rlspeed.rewards.process import CALLED
from rlspeed.rewards.types import FunctionSpec

PR_SET_PDEATHSIG = 1
WATCH_SECONDS = 0.5


class Replies:
    """The way back to the parent, shared by the main thread and the event loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def put(self, message: Any) -> None:
        """Send; a parent that is gone ends this process."""
        with self._lock:
            try:
                self._connection.send(message)
            except OSError:
                os._exit(1)


def main(fd: int, parent: int) -> None:
    """Serve until the parent closes the connection or dies.

    fd: this end of the parent's socket pair; parent: the parent's process id.
    """
    die_with(parent)
    connection = Connection(fd)
    replies = Replies(connection)
    specs, timeout, memory_bytes = connection.recv()
    if memory_bytes is not None:
        _limit_memory(memory_bytes)
    functions = _load(specs, replies)
    if functions is None:
        return
    lane: AsyncLane | None = None
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            break
        fn = functions[job.function]
        if fn.is_async:
            lane = lane or AsyncLane(functions, replies, timeout)
            lane.submit(job)
        else:
            replies.put(CALLED)  # from here on the parent may not give the job to another worker
            replies.put(call_sync(fn, job))
    if lane is not None:
        lane.close()
    for fn in functions:
        fn.close()
    sys.stdout.flush()
    sys.stderr.flush()


def die_with(parent: int) -> None:
    """Make this process end when its parent does, by whatever death, even while a function is busy.

    The kernel kills us at once on Linux (also when C code holds the interpreter); a watching thread does elsewhere.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _limit_memory(memory_bytes: int) -> None:
    """Turn a runaway allocation into a MemoryError of this process."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _load(specs: Sequence[FunctionSpec], replies: Replies) -> list[LoadedFunction] | None:
    """The loaded functions, their kinds told to the parent; None after telling it what is wrong."""
    try:
        functions = load_functions(specs)
    except ConfigError as error:
        replies.put(("faults", [_as_text(f) for f in error.faults]))
        return None
    replies.put(("ready", [(f.whole_batch, f.is_async) for f in functions]))
    return functions


def _as_text(fault: Fault) -> tuple[str, str, str, str]:
    return fault.where, fault.found, fault.allowed, fault.fix
