"""When a run hangs, and who is missing: a judgement from what every rank last said about itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a rank says about itself, every second or so.

    still: seconds since it last moved: began or ended a phase, called a collective, or asked whether to stop. waits:
    the collective that its main thread stands in, empty when it stands elsewhere. calls: by group, the collectives that
    it has put into a GPU's queue, where standing in one is not seen; empty on a CPU. silent: seconds without a beat, as
    the reader measured.
    """

    rank: int
    step: int
    phase: str
    still: float
    number: int = 0
    waits: str = ""
    calls: Mapping[str, int] = field(default_factory=dict)
    done: bool = False
    silent: float = 0.0

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str | bytes) -> Beat:
        """What `dump` made."""
        return Beat(**json.loads(text))

    @property
    def motionless(self) -> float:
        """Seconds without a move, as far as is known."""
        return self.still + self.silent

    def mute(self, limit: float) -> bool:
        """True when its thread has not told for so long that more than a slow moment holds it."""
        return self.silent > limit / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """late: the ranks that have not come where `waiting` wait; empty when all wait. report: what to print."""

    late: tuple[int, ...]
    waiting: tuple[int, ...]
    report: str


def judge(beats: Sequence[Beat], limit: float) -> Hang | None:
    """The hang, when no rank has moved for `limit` seconds and one waits for another; None when the run goes on.

    The place is where others wait. Ranks that have ended count for nothing. Where all are at their own work nobody
    waits, and that may take its time. On GPUs a rank waits when it has called a collective that another member of the
    group has not, and is late when it only misses calls: of ranks that wait for each other in a chain the last one is
    named.
    """
    here = [b for b in beats if not b.done]
    if not here or any(b.motionless < limit for b in here):
        return None
    most: dict[str, int] = {}
    least: dict[str, int] = {}
    for beat in here:
        for group, count in beat.calls.items():
            most[group] = max(count, most.get(group, count))
            least[group] = min(count, least.get(group, count))
    ahead = {b.rank for b in here for g, n in b.calls.items() if n > least[g]}
    behind = {b.rank for b in here for g, n in b.calls.items() if n < most[g]}
    mute = {b.rank for b in here if b.mute(limit)}  # what it said last is old
    waiting = ({b.rank for b in here if b.waits} | ahead) - mute
    if not waiting:
        return None
    late = mute or (behind - ahead) or {b.rank for b in here} - waiting
    waiting -= late
    return Hang(late=tuple(sorted(late)), waiting=tuple(sorted(waiting)), report=_report(here, late, waiting, limit))


def _report(beats: Sequence[Beat], late: set[int], waiting: set[int], limit: float) -> str:
    """A headline, then each place where ranks stand, the late ones first."""
    first = next((b for b in beats if b.rank in waiting), beats[0])
    seconds = min(b.motionless for b in beats)
    place = f"step {first.step}, phase {first.phase}"
    if late:
        has = "has" if len(late) == 1 else "have"
        wait = "waits" if len(waiting) == 1 else "wait"
        head = f"hang in {place}: {_ranks(late)} {has} not come where {_ranks(waiting)} {wait}"
    else:
        head = f"hang in {place}: all ranks wait, in different collectives or on a broken network"
    lines = [f"{head}; no rank has moved for {seconds:.0f} s (run.hang_timeout_seconds is {limit:g})"]
    places: dict[str, list[int]] = {}
    for beat in sorted(beats, key=lambda b: (b.rank not in late, b.rank)):
        places.setdefault(_place(beat, limit), []).append(beat.rank)
    lines += [f"    {_ranks(ranks)}: {where}" for where, ranks in places.items()]
    return "\n".join(lines)


def _place(beat: Beat, limit: float) -> str:
    where = f"step {beat.step}, phase {beat.phase}"
    if beat.mute(limit):
        return f"{where} at its last sign of life; since then its interpreter is held, or its node is gone"
    return f"{where}, waits in {beat.waits}" if beat.waits else f"{where}, waits in no collective that is known"


def _ranks(ranks: set[int] | Sequence[int]) -> str:
    """`rank 1`, or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
