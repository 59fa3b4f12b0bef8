"""`python -m rlspeed` and `torchrun -m rlspeed`: the same command tree as the `rlspeed` script."""

from rlspeed.commands import main

if __name__ == "__main__":
    main()
