"""The errors that a user may see: each says where, what was found, what is allowed and what to do.

A `Fault` is one such finding; an `RlspeedError` carries one or many, because every check in rlspeed collects all faults
of its input before it raises. `commands/console.py` prints them and exits with `exit_code`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One problem in the user's input.

    where: file and key, row, rank or device that the problem belongs to.
    found: what is there, as the user wrote it.
    allowed: what may be there (empty when the message says all).
    fix: what to do about it.
    """

    where: str
    found: str
    allowed: str = ""
    fix: str = ""

    def __str__(self) -> str:
        parts = [f"{self.where}: {self.found}"]
        if self.allowed:
            parts.append(f"allowed: {self.allowed}")
        if self.fix:
            parts.append(f"fix: {self.fix}")
        return "\n    ".join(parts)


class RlspeedError(Exception):
    """Base of all errors that are the user's to mend; never shown with a traceback."""

    exit_code = 2

    def __init__(self, faults: Fault | str | Iterable[Fault]) -> None:
        if isinstance(faults, str):
            faults = [Fault(where="rlspeed", found=faults)]
        elif isinstance(faults, Fault):
            faults = [faults]
        self.faults: tuple[Fault, ...] = tuple(faults)
        super().__init__("\n".join(str(f) for f in self.faults))


class ConfigError(RlspeedError):
    """The configuration cannot be used: unknown key, wrong type, impossible combination."""


class DeviceError(RlspeedError):
    """The devices asked for are not there, clash, or cannot do what is asked."""


class LayoutError(RlspeedError):
    """A plan (packing, layout, reshard) cannot be made from what was given."""


class DataError(RlspeedError):
    """A data file or a row in it cannot be used."""


class RewardError(RlspeedError):
    """A reward function or model failed; the message names it and the sample."""


class RunError(RlspeedError):
    """A running job had to stop: failed check, failed transfer, broken checkpoint."""

    exit_code = 1
