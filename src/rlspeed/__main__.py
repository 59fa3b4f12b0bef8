"""`python -m rlspeed` and `torchrun -m rlspeed`: the same command tree as the `rlspeed` script."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """In a process that a launcher started: be killed when it dies, however it dies (Linux).

    Called before anything slow, since a launcher that dies earlier is not noticed; its own number is compared where
    `rlspeed train --nproc-per-node` left it.
    """
    started = "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ
    if not started or not sys.platform.startswith("linux"):
        return
    launcher = int(os.environ.get("RLSPEED_LAUNCHER_PID", os.getppid()))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_launcher()
    from rlspeed.commands import main

    main()
