"""Which profile to take for a run, and why: from lengths, devices and memory, by the same planners as the run itself.

What is predicted is what can be counted: tokens that an update computes (padding included), the work of the busiest
rank, and memory by `planning/memory.py`. bf16 makes a step faster too; by how much is left to a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlspeed.bench.compose import compose
from rlspeed.config.schema import Profile
from rlspeed.planning.balance import deal
from rlspeed.planning.machine import Machine
from rlspeed.planning.report import inspect_profile

NAMES = ("baseline", "hybrid", "packed", "full")
# a share of padding that is worth the change; from so many devices on roles and ranks can be apart
WORTH, MANY = 0.10, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Tokens of one step's update. real: of prompts and answers. padded: with micro-batches of rows filled up to their
    longest. in_order, dealt: the busiest rank's share of the mean, sequences in order and dealt by cost.
    """

    real: int
    padded: int
    in_order: float
    dealt: float

    @property
    def waste(self) -> float:
        """Share of the padded update that is padding."""
        return 1.0 - self.real / self.padded

    @property
    def gain(self) -> float:
        """Work of the busiest rank, padded and in order, over that of packed and dealt."""
        return self.padded * self.in_order / (self.real * self.dealt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What one profile needs: the largest device's peak in GiB and whether it fits (None: not known, or a CPU), the
    shortest time of a step at full lengths in seconds (None likewise).
    """

    peak_gib: float | None
    fits: bool | None
    floor_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """profile: the one to take. reasons: why, with numbers. update: of one step. needs: by profile. gain: predicted
    factor of the update beside baseline, without that of bf16.
    """

    profile: str
    reasons: tuple[str, ...]
    update: Update
    needs: dict[str, Needs]
    gain: float

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        u = self.update
        return {
            "profile": self.profile,
            "reasons": list(self.reasons),
            "predicted_update_gain": self.gain,
            "tokens": {"real": u.real, "padded": u.padded, "padding_share": u.waste},
            "busiest_rank": {"in_order": u.in_order, "dealt": u.dealt},
            "profiles": {
                name: {"peak_gib": n.peak_gib, "fits": n.fits, "floor_seconds": n.floor_seconds}
                for name, n in self.needs.items()
            },
        }


def update_of(lengths: Sequence[int], *, ranks: int, micro_batch_size: int) -> Update:
    """Of sequences of these lengths (all at least 1), dealt to `ranks` in order as answers are: group by group."""
    homes = [list(lengths[r::ranks]) for r in range(ranks)]
    padded = 0
    for home in homes:
        for start in range(0, len(home), micro_batch_size):
            rows = home[start : start + micro_batch_size]
            padded += len(rows) * max(rows)
    mean = sum(lengths) / ranks
    shares = deal(lengths, ranks)
    return Update(
        real=sum(lengths),
        padded=padded,
        in_order=max(sum(h) for h in homes) / mean,
        dealt=max(sum(lengths[i] for i in share) for share in shares) / mean,
    )


def needs_of(profile: Profile, machine: Machine, ranks: int) -> Needs:
    """Memory and floors of a profile on `ranks` devices of the machine."""
    report = inspect_profile(profile, machine, world_size=ranks)
    peaks = [f.peak.peak for f in report.forecasts]
    return Needs(
        peak_gib=max(peaks) / 2**30 if peaks else None,
        fits=all(f.fits for f in report.forecasts) if peaks else None,
        floor_seconds=sum(f.seconds for f in report.floors) if report.floors else None,
    )


def choose(update: Update, needs: dict[str, Needs], *, ranks: int, reward_model: bool, lengths_from: str) -> Advice:
    """The rule. lengths_from: where the answers' lengths come from, for the reason."""
    reasons: list[str] = []
    waste = f"{update.waste:.0%} of a padded update is padding ({lengths_from})"
    if update.waste >= WORTH:
        chosen = "packed"
        reasons.append(f"{waste}: packed sequences compute none")
    else:
        chosen = "hybrid"
        reasons.append(f"only {waste}: little to gain from packing, so begin with the simplest")
    hybrid, packed = needs.get("hybrid"), needs.get("packed")
    if chosen == "hybrid" and hybrid is not None and hybrid.fits is False and packed is not None and packed.fits:
        chosen = "packed"
        reasons.append(
            f"hybrid needs {hybrid.peak_gib:.1f} GiB and does not fit, packed needs {packed.peak_gib:.1f} GiB"
        )
    if ranks >= MANY:
        chosen = "full"
        share = update.in_order - 1.0
        reasons.append(f"{ranks} devices: everything on; in order the busiest rank has {share:.0%} more than the mean")
    elif reward_model and chosen == "packed":
        chosen = "full"
        reasons.append("a reward model: it scores on the host and leaves its room on the device to the others")
    if packed is not None and packed.fits is False:
        reasons.append(
            f"packed needs {packed.peak_gib:.1f} GiB and does not fit: see rlspeed check-devices for changes"
        )
    gain = 1.0 if chosen == "hybrid" else update.gain
    return Advice(profile=chosen, reasons=tuple(reasons), update=update, needs=needs, gain=gain)


def recommend(
    config: str,
    words: Sequence[str],
    machine: Machine,
    *,
    ranks: int,
    lengths: Sequence[int],
    lengths_from: str,
) -> Advice:
    """Advice for the configuration `config` (with `words` over it) on `ranks` devices.

    lengths: tokens of the sequences of one step, prompts and answers together.

    Raises:
        ConfigError: a configuration that cannot be used under some of the profiles.
    """
    needs: dict[str, Needs] = {}
    profiles: dict[str, Profile] = {}
    for name in NAMES:
        found = compose(name, words, on=config, lengths="none", steps=1, world_size=ranks)
        profiles[name] = found.profile
        needs[name] = needs_of(found.profile, machine, ranks)
    base = profiles["baseline"]
    update = update_of(lengths, ranks=ranks, micro_batch_size=base.packing.micro_batch_size)
    reward_model = base.reward.model.path is not None
    return choose(update, needs, ranks=ranks, reward_model=reward_model, lengths_from=lengths_from)
