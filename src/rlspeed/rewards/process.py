"""The parent's side of one worker process: starting, calling with a time-out, ending."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Pipe
from typing import Any

from rlspeed.errors import ConfigError, Fault
from rlspeed.rewards.types import FunctionSpec, Job, Outcome

START_SECONDS = 300.0
SLICE_SECONDS = 0.25
STOP_SECONDS = 2.0
BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[3]); "
    "from rlspeed.rewards.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)


CALLED = "called"


class WorkerTimeout(Exception):
    """No answer within the time-out."""


class WorkerDied(Exception):
    """The process is gone; the message says how. called: whether the function may have been called."""

    def __init__(self, how: str, *, called: bool = True) -> None:
        super().__init__(how)
        self.called = called


class Worker:
    """One worker process. Not thread-safe; started and used by one lane.

    It is the leader of its own session: what a function starts dies with it, and Ctrl-C at the terminal does not
    reach it.
    """

    def __init__(self, specs: Sequence[FunctionSpec], timeout: float, memory_bytes: int | None = None) -> None:
        self._specs = specs
        self.connection, child = Pipe(duplex=True)
        self._flags: list[tuple[bool, bool]] | None = None
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT, str(child.fileno()), str(os.getpid()), json.dumps(sys.path)],
                pass_fds=[child.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            child.close()
        with contextlib.suppress(OSError):
            self.connection.send((tuple(specs), timeout, memory_bytes))

    def ready(self) -> list[tuple[bool, bool]]:
        """Wait until the functions are loaded; for each function (whole batch, async).

        Raises:
            ConfigError: the functions cannot be loaded, with all faults.
        """
        if self._flags is not None:
            return self._flags
        try:
            word, content = self._receive(START_SECONDS)
        except (WorkerDied, WorkerTimeout) as error:
            self.kill()
            names = ", ".join(s.path for s in self._specs)
            why = (
                f"did not load its functions within {START_SECONDS:g} s"
                if isinstance(error, WorkerTimeout)
                else str(error)
            )
            raise ConfigError(
                Fault(
                    where="reward.functions",
                    found=f"worker process loading {names} {why}",
                    fix="see its output above",
                )
            ) from None
        if word == "faults":
            self.stop()
            raise ConfigError([Fault(where=w, found=f, allowed=a, fix=x) for w, f, a, x in content])
        flags: list[tuple[bool, bool]] = content
        self._flags = flags
        return flags

    def call(self, job: Job, timeout: float) -> Outcome:
        """Run one job.

        Raises:
            WorkerTimeout, WorkerDied: no outcome; the worker is of no more use.
            ConfigError: a restarted worker could not load the functions.
        """
        self.ready()
        try:
            self.connection.send(job)
            self._receive(timeout)
        except OSError:
            raise WorkerDied(self.death(), called=False) from None
        except WorkerDied as error:
            raise WorkerDied(str(error), called=False) from None
        outcome: Outcome = self._receive(timeout)
        return outcome

    def _receive(self, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        try:
            while not self.connection.poll(max(0.0, min(SLICE_SECONDS, deadline - time.monotonic()))):
                # a child of the worker may keep the connection open after the worker's death
                if self.exit_code() is not None and not self.connection.poll(0):
                    raise WorkerDied(self.death())
                if time.monotonic() > deadline:
                    raise WorkerTimeout
            return self.connection.recv()
        except (EOFError, OSError):
            raise WorkerDied(self.death()) from None

    def exit_code(self) -> int | None:
        """Exit code, -signal, or None while it runs; a dead one is not reaped, so its id stays ours until `kill`."""
        if self.process.returncode is not None:
            return self.process.returncode
        if not hasattr(os, "waitid"):
            return self.process.poll()
        try:
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # reaped by another thread just now
            return -int(signal.SIGKILL) if self.process.returncode is None else self.process.returncode
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def death(self) -> str:
        """How the process ended."""
        code = self._wait(1.0)
        if code is None:
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def stop(self) -> None:
        """Close the connection, give the process a moment to end by itself, then kill it."""
        self.connection.close()
        self._wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the process and everything that it started in its session."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        with contextlib.suppress(OSError):  # closed by another thread just now
            self.connection.close()

    def _wait(self, seconds: float) -> int | None:
        deadline = time.monotonic() + seconds
        while (code := self.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return code
