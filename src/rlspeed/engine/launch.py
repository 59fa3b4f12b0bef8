"""Start one process per device through torch's elastic launcher; all end together."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

SHUTDOWN_SECONDS = 10  # what the others get to leave when one process failed, before they are killed
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)


def launch(words: Sequence[str], processes: int) -> int:
    """Run `python -m rlspeed train WORDS` in `processes` processes on this node; returns the exit code.

    The port is chosen when it is bound, so several runs on one host do not meet. The first process that fails ends the
    others; its own error is already on stderr, so only its rank and code are added. SIGTERM goes to all processes, and
    when each of them has saved and left with 0 the code is 0. When this process is killed, each of them is too
    (`rlspeed.__main__`).
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    os.environ["RLSPEED_LAUNCHER_PID"] = str(os.getpid())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"rlspeed-{os.getpid()}",
        max_restarts=0,
        monitor_interval=0.1,
    )
    if sys.platform.startswith("linux"):
        config.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"  # the agent's; the others are passed on
    command = ["-m", "rlspeed", "train", *words]
    try:
        with _signals_passed_on():
            elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        rank, code = first_to_fail({r: (f.timestamp, f.exitcode) for r, f in error.failures.items()})
        print(f"rank {rank} ended first, {how(code)}; all ranks were stopped", file=sys.stderr)
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + error.sigval
    return 0


def first_to_fail(failures: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """The rank that took the others with it, and its exit code.

    failures: second of the end and exit code by rank, in the order in which they were noticed. Ranks that lose a
    neighbour leave in the same second; one that a signal killed did not leave because of another. SIGTERM, and SIGKILL
    later on, are what the agent ends the others with.
    """
    start = min(second for second, _ in failures.values())
    early = {r: code for r, (second, code) in failures.items() if second <= start + 1}
    killed = [r for r, code in early.items() if code < 0 and code != -signal.SIGTERM]
    rank = killed[0] if killed else min(failures, key=lambda r: failures[r][0])
    return rank, failures[rank][1]


def how(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"with exit code {code}"
    hint = " (when nobody did it: the kernel, out of memory; see dmesg)" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"


@contextmanager
def _signals_passed_on() -> Iterator[None]:
    """SIGTERM and SIGUSR1 ask every process to save and leave, and this one waits for them, however long it takes.

    The elastic agent would kill them after a while and raise; it keeps the other signals.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    before = {number: signal.signal(number, _pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(number: int, frame: FrameType | None) -> None:
    for pid in children():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def children(parent: int | None = None) -> list[int]:
    """Processes whose parent is `parent` (this process when None), from /proc."""
    wanted = os.getpid() if parent is None else parent
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # the command's name, in brackets, may hold anything; state and parent come after it
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[1]) == wanted and fields[0] != "Z":
                    found.append(int(entry.name))
    return found
