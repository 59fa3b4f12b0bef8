"""What `rlspeed bench compare` is given: records, folders of records, runs, and logs of verl and TRL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlspeed.bench.peers_logs import TRL_STATE, is_trl_state, trl_record, verl_record
from rlspeed.bench.record import Record, read_record, unplaced_record
from rlspeed.bench.run import label
from rlspeed.bench.runlog import read_steps, values_of
from rlspeed.config.load import load_profile
from rlspeed.errors import DataError, Fault, RlspeedError

ORDER = ("baseline", "hybrid", "packed", "full")
ALLOWED = "a record, a folder of records, a run folder, verl's log (.jsonl, .log, .txt), or TRL's trainer_state.json"


def load_all(items: Sequence[str], *, warm_up: int, peer_devices: int = 1) -> tuple[list[Record], list[str]]:
    """Records and a name for each, all different.

    warm_up: steps of runs and logs that do not count (records have theirs apart). peer_devices: of TRL's run.

    Raises:
        DataError: items that are not there or are none of these; all are named.
    """
    found: list[tuple[Record, Path]] = []
    faults: list[Fault] = []
    for item in items:
        try:
            found += load(Path(item), warm_up=warm_up, peer_devices=peer_devices)
        except RlspeedError as error:
            faults += error.faults
    if faults:
        raise DataError(faults)
    return [record for record, _ in found], name_all(found)


def load(path: Path, *, warm_up: int, peer_devices: int = 1) -> list[tuple[Record, Path]]:
    """The records that one item means, with their files."""
    if path.is_dir():
        return _folder(path, warm_up, peer_devices)
    if not path.is_file():
        raise DataError(Fault(where=str(path), found="is not there", allowed=ALLOWED))
    if path.suffix == ".json":
        if is_trl_state(path):
            return [(trl_record(path, warm_up=warm_up, devices=peer_devices), path)]
        return [(read_record(path), path)]
    return [(verl_record(path, warm_up=warm_up), path)]


def _folder(path: Path, warm_up: int, peer_devices: int) -> list[tuple[Record, Path]]:
    if (path / "timings.jsonl").is_file():
        return [(run_record(path, warm_up=warm_up), path)]
    if (path / TRL_STATE).is_file():
        return [(trl_record(path / TRL_STATE, warm_up=warm_up, devices=peer_devices), path)]
    files = sorted(path.glob("*.json"), key=_place)
    if not files:
        raise DataError(Fault(where=str(path), found="a folder without records", allowed=ALLOWED))
    return [(read_record(file), file) for file in files]


def _place(file: Path) -> tuple[int, str]:
    """The packaged profiles in their order, then everything else."""
    stem = file.stem.partition("-x")[0]
    return (ORDER.index(stem) if stem in ORDER else len(ORDER), file.stem)


def run_record(folder: Path, *, warm_up: int) -> Record:
    """A record of a run folder of `rlspeed train`; the machine it ran on is not known.

    Raises:
        DataError: no run there, or no step after the warm-up.
    """
    steps = read_steps(folder, warm_up)
    if not steps.measured:
        found = f"{len(steps.warm_up)} step(s), {warm_up} of warm-up"
        raise DataError(Fault(where=str(folder), found=found, fix="--warm-up 0, or a longer run"))
    try:
        profile = load_profile(str(folder)).profile
    except RlspeedError:
        profile = None
    extra = {"kind": "train", "log": str(folder), "warm_up_step_seconds": [[r["timing_s/step"] for r in steps.warm_up]]}
    values = values_of(steps.measured, profile=profile)
    name = "run" if profile is None else profile.run.name or profile.name
    return unplaced_record(name, values, extra)


def name_all(found: Sequence[tuple[Record, Path]]) -> list[str]:
    """Each record by its name and ranks; where these are not enough, by its file."""
    names = [label(r.name, int(r.extra.get("processes", 1))) for r, _ in found]
    names = [str(path.with_suffix("")) if names.count(n) > 1 else n for n, (_, path) in zip(names, found)]
    return [f"{n} ({i + 1})" if names.count(n) > 1 else n for i, n in enumerate(names)]
