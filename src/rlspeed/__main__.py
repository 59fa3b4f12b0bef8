"""`python -m rlspeed` and `torchrun -m rlspeed`: the same command tree as the `rlspeed` script."""

import os

from rlspeed.commands import main

if __name__ == "__main__":
    if "RLSPEED_LAUNCHER_PID" in os.environ:
        from rlspeed.engine.launch import die_with_launcher

        die_with_launcher()
    main()
