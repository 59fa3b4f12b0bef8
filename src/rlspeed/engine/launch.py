"""Start one process per device through torch's elastic launcher; all end together."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_PR_SET_PDEATHSIG = 1


def launch(words: Sequence[str], processes: int) -> int:
    """Run `python -m rlspeed train WORDS` in `processes` processes on this node; returns the exit code.

    The port is chosen when it is bound, so several runs on one host do not meet. The first process that fails ends the
    others; its own error is already on stderr, so only its rank and code are added. SIGTERM goes to all processes, and
    when each of them has saved and left with 0 the code is 0.
    """
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
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ["RLSPEED_LAUNCHER_PID"] = str(os.getpid())
    command = ["-m", "rlspeed", "train", *words]
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank} ended first, with exit code {failure.exitcode}; all ranks were stopped", file=sys.stderr)
        return failure.exitcode if failure.exitcode and failure.exitcode > 0 else 1
    return 0


def die_with_launcher() -> None:
    """In a child of `launch`: be killed when the launcher dies, however it dies (Linux)."""
    launcher = os.environ.get("RLSPEED_LAUNCHER_PID")
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):
        # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
