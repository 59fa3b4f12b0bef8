"""Who hangs is judged from what the ranks said last: no rank moves, one waits, and those that miss are named."""

from __future__ import annotations

from rlspeed.planning.hang import Beat, Hang, judge


def beat(rank: int, waits: str = "", **given: object) -> Beat:
    """A rank that has not moved for 20 s, in phase gen of step 3."""
    return Beat(**{"rank": rank, "step": 3, "phase": "gen", "still": 20.0, "waits": waits} | given)  # type: ignore[arg-type]


def late(*beats: Beat) -> tuple[int, ...] | None:
    found = judge(beats, 10.0)
    return found.late if found else None


def test_those_who_do_not_wait_are_late_when_nobody_moves() -> None:
    assert late(beat(0, "all_gather"), beat(1), beat(2, "all_gather")) == (1,)
    assert late(beat(0, "barrier"), beat(1, still=1.0)) is None, "rank 1 goes on: it will come"
    assert late(beat(0), beat(1)) is None, "a long phase in which nobody waits"
    assert late(beat(0, "all_gather"), beat(1, done=True), beat(2)) == (2,), "a rank that has ended is not waited for"
    assert late(beat(0, "all_gather"), beat(1, "broadcast")) == ()


def test_a_rank_that_cannot_speak_is_late_whatever_it_said_last() -> None:
    assert late(beat(0, "all_gather"), beat(1, "barrier", still=0.1, silent=15.0)) == (1,)
    assert late(beat(0, "all_gather"), beat(1, "barrier", still=0.1, silent=5.0)) is None


def test_on_gpus_calls_are_compared_and_the_last_of_a_chain_is_named() -> None:
    """Rank 0 waits for 1 in group a, 1 for 2 in group b; rank 3 has no part in either and is at its own work."""
    beats = (
        beat(0, calls={"a": 7}),
        beat(1, calls={"a": 6, "b": 5}),
        beat(2, calls={"b": 4}),
        beat(3, calls={"c": 90}),
    )
    assert late(*beats) == (2,)
    assert late(beat(0, calls={"a": 7}), beat(1, calls={"a": 7})) is None


def test_the_report_names_phase_ranks_and_places() -> None:
    beats = [beat(r, "all_gather", phase="reward") for r in (0, 1, 2, 5)] + [beat(3, phase="gen"), beat(4, phase="gen")]
    found = judge(beats, 10.0)
    assert isinstance(found, Hang)
    head, *places = found.report.splitlines()
    assert head.startswith("hang in step 3, phase reward: ranks 3-4 have not come where ranks 0-2, 5 wait; ")
    assert [line.strip() for line in places] == [
        "ranks 3-4: step 3, phase gen, waits in no collective that is known",
        "ranks 0-2, 5: step 3, phase reward, waits in all_gather",
    ]


def test_a_beat_survives_the_store() -> None:
    told = beat(1, "barrier", calls={"a": 3}, number=9)
    assert Beat.load(told.dump()) == told
