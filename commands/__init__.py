"""The `rlspeed` command tree; each command imports what it needs when it runs, so that help is instant."""

from __future__ import annotations

from typing import Annotated

import typer

from rlspeed import __version__

from .bench import app as bench
from .check_devices import check_devices
from .console import errors_to_exit_codes
from .preprocess import app as preprocess
from .train import train

app = typer.Typer(
    name="rlspeed",
    help="Fast RLHF training of language models: resharding, bf16 and packed sequences in one engine.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)
app.command("check-devices")(check_devices)
app.add_typer(preprocess, name="preprocess")
app.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rlspeed {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the script and of `python -m rlspeed`."""
    with errors_to_exit_codes():
        app()
