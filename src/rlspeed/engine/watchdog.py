"""A thread in each rank that ends a run which hangs or has lost a rank, and says who is missing and in which phase.

Each rank puts what it does into the store where the ranks met, so it is known when no collective works any more. Who
hangs is decided by `planning.hang`; here are the thread, the notes and the end of the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import platform
import sys
import threading
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rlspeed.engine.world import World
from rlspeed.errors import Fault, RlspeedError, RunError
from rlspeed.planning.hang import Beat, judge

KEY = "rlspeed/watch"
VERDICT, TOLD = f"{KEY}/verdict", f"{KEY}/told"
STORE_FAILURES = 3
# what a rank gets to leave by itself, with its own words, when another one is gone; and to tell where it stands
LEAVE_SECONDS, STACK_SECONDS = 5.0, 3.0
EXIT_CODE = RunError.exit_code
LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "socket closed", "timed out waiting")
_COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}"


class Following(Protocol):
    """The phase clock of the run (`training.clock.Clock`)."""

    current: str
    step: int
    moves: int
    broken: str


class Asked(Protocol):
    """The stop flag (`training.stop.StopFlag`); it counts how often it was asked."""

    asked: int


class Watchdog:
    """Watches this rank and the others while it is entered; nothing in a world of one, or with a limit of 0.

    A rank that dies ends the others within seconds, also on other nodes; so does one that leaves with an error. When no
    rank has moved for the limit and one waits, the first to see it prints the report with the Python stacks of the
    missing ranks, and all processes end with exit code 1: a main thread that stands in a collective cannot be asked.
    """

    def __init__(self, world: World, limit_seconds: float, asked: Asked) -> None:
        self._world = world
        self._limit = limit_seconds
        self._asked = asked
        self._clock: Following | None = None
        self._interval = min(max(1.0, world.size / 256), limit_seconds / 6)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = None
        self._number = 0
        self._mark: tuple[int, ...] = ()
        self._moved = time.monotonic()
        self._heard: dict[int, tuple[int, float]] = {}
        self._neighbours: dict[int, int] = {}

    def follow(self, clock: Following) -> None:
        """Take step and phase from this clock."""
        self._clock = clock

    def __enter__(self) -> Watchdog:
        if self._world.size > 1 and self._limit:
            assert self._world.store is not None
            # a connection of its own: the other's waits block it
            self._store = self._world.store.clone()  # type: ignore[attr-defined]
            self._store.set_timeout(timedelta(seconds=30.0))
            places = self._world.gather_objects((_place(), os.getpid()))
            rank = self._world.rank
            self._neighbours = {
                r: pid for r, (place, pid) in enumerate(places) if place == places[rank][0] and r != rank
            }
            self._publish(self._look())
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self._over.set()
        self._thread.join(2 * LEAVE_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        lost = self._lost(error)
        with contextlib.suppress(RuntimeError):
            if isinstance(error, Exception):
                first = str(lost or error).partition("\n")[0]
                what = first if lost or isinstance(error, RlspeedError) else f"{type(error).__name__}: {first}"
                self._decide("failed", f"rank {self._world.rank} ended: {what}")
            self._publish(replace(self._look(), done=True))
        if lost is not None:
            raise lost from error

    def _run(self) -> None:
        failures = 0
        while not self._over.wait(self._interval):
            try:
                self._watch()
                failures = 0
            except RuntimeError as error:  # of the store, whose connection is gone with the process that keeps it
                failures += 1
                if failures == STORE_FAILURES and not self._over.is_set():
                    self._end(f"the process that keeps the store of the run is gone: {str(error).splitlines()[0]}")

    def _watch(self) -> None:
        """One beat: tell, then see what others told."""
        beat = self._look()
        self._publish(beat)
        # prints where this process stands when it cannot beat, as code that holds the interpreter stops this thread too
        faulthandler.dump_traceback_later(max(self._limit - self._interval, self._limit / 2))
        if self._store.check([VERDICT]):
            return self._obey(json.loads(self._store.get(VERDICT)))
        gone = self._gone()
        if gone:
            return self._decide("gone", gone)
        if beat.still >= self._limit / 4:
            beats = self._read()
            hang = judge(beats, self._limit) if beats else None
            if hang is not None:
                self._decide("hang", hang.report, late=hang.late)

    def _look(self) -> Beat:
        """What this rank does now."""
        calls, all_calls = _calls(self._world.device)
        clock = self._clock
        mark = (clock.moves if clock else 0, self._asked.asked, all_calls)
        now = time.monotonic()
        if mark != self._mark:
            self._mark, self._moved = mark, now
        self._number += 1
        return Beat(
            rank=self._world.rank,
            step=clock.step if clock else 0,
            phase=clock.current if clock else "start",
            still=now - self._moved,
            number=self._number,
            waits=_waits_in(_main_frame()),
            calls=calls,
        )

    def _publish(self, beat: Beat) -> None:
        self._store.set(f"{KEY}/{self._world.rank}", beat.dump())

    def _read(self) -> list[Beat]:
        """The last beat of every rank; none before all have told one."""
        keys = [f"{KEY}/{rank}" for rank in range(self._world.size)]
        if not self._store.check(keys):
            return []
        now, out = time.monotonic(), []
        for beat in map(Beat.load, self._store.multi_get(keys)):
            number, since = self._heard.get(beat.rank, (-1, now))
            if number != beat.number:
                since = now
                self._heard[beat.rank] = (beat.number, now)
            out.append(replace(beat, silent=now - since))
        return out

    def _gone(self) -> str:
        """Ranks of this launcher whose process is dead without having said that it is done."""
        for rank in [r for r, pid in self._neighbours.items() if not _alive(pid)]:
            pid = self._neighbours.pop(rank)
            if not Beat.load(self._store.get(f"{KEY}/{rank}")).done:
                return f"rank {rank} is gone without a word (process {pid} on {platform.node()})"
        return ""

    def _lost(self, error: BaseException | None) -> RunError | None:
        """The words for a collective that failed since another rank is gone; None for other errors."""
        if not isinstance(error, RuntimeError) or not any(text in str(error).lower() for text in LOST):
            return None
        end = time.monotonic() + 1.0
        gone = ""
        with contextlib.suppress(RuntimeError):
            while not gone and time.monotonic() < end:
                if self._store.check([VERDICT]):
                    gone = json.loads(self._store.get(VERDICT))["text"]
                else:
                    gone = self._gone()
                    time.sleep(0.05)
        found = gone or f"a collective failed, as when another rank is gone: {str(error).splitlines()[0]}"
        return RunError(
            Fault(where=self._where(), found=found, fix="see the output of that rank or the launcher's last line")
        )

    def _where(self) -> str:
        """Step and phase of this rank, the one that broke when an error is on its way."""
        clock = self._clock
        return f"step {clock.step}, phase {clock.broken or clock.current}" if clock else "start"

    def _decide(self, kind: str, text: str, late: tuple[int, ...] = ()) -> None:
        """Tell all ranks why the run ends; the first word holds."""
        verdict = {"kind": kind, "text": text, "late": late, "by": self._world.rank}
        self._store.compare_set(VERDICT, "", json.dumps(verdict))

    def _obey(self, verdict: dict[str, Any]) -> None:
        """End this process: after the report of a hang, or when it has not left by itself."""
        rank, late = self._world.rank, verdict["late"]
        if verdict["kind"] != "hang":
            if not self._over.wait(LEAVE_SECONDS):
                self._end(verdict["text"])
            return
        if rank in late:
            self._store.set(f"{KEY}/stack/{rank}", _stacks())
        wait = STACK_SECONDS + 2 * self._interval
        if rank == verdict["by"]:
            keys = {r: f"{KEY}/stack/{r}" for r in late[:4]}
            self._until(list(keys.values()), wait)
            stacks = [self._stack(r, key) for r, key in keys.items()]
            _say("\n".join([f"rank {rank}: error", f"  {verdict['text']}", *stacks]))
            self._store.set(TOLD, "1")
        else:
            self._until([TOLD], 3 * wait)
            time.sleep(self._interval)
        if not self._over.is_set():
            self._end("")

    def _stack(self, rank: int, key: str) -> str:
        if self._store.check([key]):
            return f"  rank {rank} stands in\n{self._store.get(key).decode()}"
        return f"  rank {rank} cannot tell where it stands; it may have printed it by itself, under Timeout"

    def _until(self, keys: list[str], seconds: float) -> None:
        """Wait for notes."""
        end = time.monotonic() + seconds
        while not self._store.check(keys) and time.monotonic() < end:
            time.sleep(0.05)

    def _end(self, text: str) -> None:
        """End this process at once; the main thread may stand in a call that never returns."""
        if text:
            _say(f"rank {self._world.rank}: ends in {self._where()}, since {text}")
        sys.stdout.flush()
        os._exit(EXIT_CODE)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _calls(device: torch.device) -> tuple[dict[str, int], int]:
    """Collectives that this rank has called: on a GPU by group, and the sum over all groups.

    A group is known by its name and its ranks. On a CPU the calls of a group are a sign of life and no more: gloo
    counts messages between two ranks among them.
    """
    by_group: dict[str, int] = {}
    for group, name in list(distributed_c10d._world.pg_names.items()):
        try:
            count = group._get_backend(device)._get_sequence_number_for_group()  # type: ignore[attr-defined]
            ranks = dist.get_process_group_ranks(group)
        except (RuntimeError, ValueError, KeyError):  # none for this device, or about to be ended
            continue
        by_group[f"{name}:{ranks[0]}-{ranks[-1]}:{len(ranks)}"] = count
    return (by_group if device.type == "cuda" else {}), sum(by_group.values())


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _waits_in(frame: FrameType | None) -> str:
    """The function of torch.distributed in which the main thread stands; empty when it stands elsewhere.

    Its innermost frames: a function further out may only have called the model, as FSDP's hooks do.
    """
    for _ in range(3):
        if frame is None:
            return ""
        code = frame.f_code
        if _COLLECTIVES in code.co_filename:
            return code.co_name
        if f"{os.sep}torch{os.sep}" not in code.co_filename:
            return ""
        frame = frame.f_back
    return ""


def _stacks() -> str:
    """Where the main thread stands, and the threads of the reward functions, as text."""
    names = {t.ident: t.name for t in threading.enumerate()}
    main = threading.main_thread().ident
    out = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if ident == main or names.get(ident, "").startswith("reward"):
            lines = "".join(traceback.format_stack(frame)[-8:]).rstrip()
            out.append(
                f"    thread {names.get(ident, '?')}\n" + "\n".join(f"    {line}" for line in lines.splitlines())
            )
    return "\n".join(out)


def _place() -> str:
    """Where process numbers mean the same: the host, and on Linux the namespace."""
    with contextlib.suppress(OSError):
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    return platform.node()


def _alive(pid: int) -> bool:
    """False for a process that is gone or only waits to be reaped."""
    if not sys.platform.startswith("linux"):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
