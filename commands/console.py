"""What users see: results on stdout, talk and errors on stderr, errors without tracebacks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from rlspeed.errors import RlspeedError

out = Console()
talk = Console(stderr=True)


@contextmanager
def errors_to_exit_codes() -> Iterator[None]:
    """Print an RlspeedError fault by fault and exit with its code; Ctrl-C exits with 130."""
    try:
        yield
    except RlspeedError as error:
        print_error(error)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        talk.print("interrupted")
        raise SystemExit(130) from None


def print_error(error: RlspeedError) -> None:
    """Each fault with where, found, allowed and fix; with several ranks, whose error it is."""
    rank = os.environ.get("RANK")
    prefix = f"rank {rank}: " if rank is not None else ""
    count = len(error.faults)
    head = f"{prefix}error" if count == 1 else f"{prefix}{count} errors"
    talk.print(Text(head, style="bold red"))
    for fault in error.faults:
        line = Text("  ")
        line.append(fault.where, style="bold")
        line.append(f": {fault.found}")
        talk.print(line, soft_wrap=True)
        if fault.allowed:
            talk.print(Text(f"      allowed: {fault.allowed}"), soft_wrap=True)
        if fault.fix:
            talk.print(Text(f"      fix: {fault.fix}", style="green"), soft_wrap=True)
