"""Parts of the run's ranks as worlds of their own, and streams of tokens between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlspeed.engine.exchange import Stream, exchange_streams
from rlspeed.engine.world import World, part_world
from rlspeed.errors import LayoutError
from tests.dist.spawn import run_ranks

LENGTHS = (3, 0, 5, 1, 2)
# number i is computed on SOURCES[i]; the second stream goes the other way
SOURCES, TARGETS = (0, 1, 0, 2, 3), ((2,), (0, 3), (2, 3), (2, 0), (0, 1))


def world_of(rank: int, size: int) -> World:
    return World(rank=rank, size=size, local_rank=rank, device=torch.device("cpu"), mesh=None)


def values_of(number: int, stream: int) -> torch.Tensor:
    """Numbers that fp32 cannot hold in fewer bits, other ones in each sequence and stream."""
    return torch.arange(LENGTHS[number]) / 3.0 + 10.0 * number + 100.0 * stream


def exchanged(rank: int) -> Any:
    world = world_of(rank, 4)
    one = Stream(
        held={n: values_of(n, 1) for n, source in enumerate(SOURCES) if source == rank},
        lengths=LENGTHS,
        sources=SOURCES,
        targets=TARGETS,
    )
    back = Stream(
        held={n: values_of(n, 2) for n, wanted in enumerate(TARGETS) if wanted[0] == rank},
        lengths=LENGTHS,
        sources=[wanted[0] for wanted in TARGETS],
        targets=[(source,) for source in SOURCES],
    )
    return exchange_streams(world, [one, back])


def test_streams_arrive_where_they_are_wanted_and_nowhere_else(tmp_path: Path) -> None:
    for rank, (one, back) in enumerate(run_ranks(exchanged, 4, tmp_path)):
        assert {n for n, wanted in enumerate(TARGETS) if rank in wanted} == one.keys()
        assert {n for n, source in enumerate(SOURCES) if source == rank} == back.keys()
        assert all(torch.equal(v, values_of(n, 1)) for n, v in one.items())
        assert all(torch.equal(v, values_of(n, 2)) for n, v in back.items())


def test_one_rank_keeps_what_it_has_and_a_wrong_length_is_refused() -> None:
    held = {0: torch.ones(3)}
    (got,) = exchange_streams(world_of(0, 1), [Stream(held=held, lengths=[3], sources=[0], targets=[(0,)])])
    assert got[0] is held[0]
    with pytest.raises(LayoutError, match="3 values, planned 2"):
        exchange_streams(world_of(0, 1), [Stream(held=held, lengths=[2], sources=[0], targets=[(0,)])])


def parts(rank: int) -> Any:
    world = world_of(rank, 4)
    pair, alone, whole = part_world(world, [3, 1]), part_world(world, [2]), part_world(world, range(4))
    assert whole is world
    told = None if pair is None else (pair.rank, pair.size, pair.gather_objects(rank), pair.sum([float(rank)]))
    return told, None if alone is None else (alone.rank, alone.size, alone.members, alone.gather_objects(rank))


def test_part_of_the_ranks_is_a_world(tmp_path: Path) -> None:
    """Ranks count in ascending order, whatever order they are written in; the others are told nothing."""
    pairs, alones = zip(*run_ranks(parts, 4, tmp_path))
    assert pairs == (None, (0, 2, [1, 3], [4.0]), None, (1, 2, [1, 3], [4.0]))
    assert alones == (None, None, (0, 1, None, [2]), None)
