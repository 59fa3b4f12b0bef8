"""Move whole sequences between ranks, by a plan that every rank computed alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlspeed.engine.world import World
from rlspeed.errors import LayoutError


def exchange_rows(
    world: World,
    rows: Mapping[int, tuple[Sequence[int], Sequence[float]]],
    lengths: Sequence[tuple[int, int]],
    holders: Sequence[int],
    targets: Sequence[Sequence[int]],
) -> dict[int, tuple[list[int], list[float]]]:
    """Send each sequence from the rank that holds it to the ranks that train it.

    rows: this rank's sequences by number: token ids and one float per response token.
    lengths: for every sequence of the step, (number of ids, number of floats), the same list on all ranks.
    holders, targets: for every sequence of the step, the rank it is on and the ranks it goes to.

    Returns this rank's sequences by number, each exactly once. What stays is not copied over the wire.

    Raises:
        LayoutError: a row's size is not the one that all ranks planned with.
    """
    for number, (ids, floats) in rows.items():
        if (len(ids), len(floats)) != tuple(lengths[number]):
            raise LayoutError(f"sequence {number}: {len(ids)} ids and {len(floats)} floats, planned {lengths[number]}")
    mine = {n: (list(ids), list(floats)) for n, (ids, floats) in rows.items() if world.rank in targets[n]}
    if world.size == 1:
        return mine
    outgoing, incoming = _ways(world, holders, targets)
    ids = _swap([[i for n in part for i in rows[n][0]] for part in outgoing], incoming, lengths, 0, torch.int64, world)
    floats = _swap(
        [[f for n in part for f in rows[n][1]] for part in outgoing], incoming, lengths, 1, torch.float32, world
    )
    i = f = 0
    for part in incoming:
        for number in part:
            num_ids, num_floats = lengths[number]
            mine[number] = (ids[i : i + num_ids], floats[f : f + num_floats])
            i, f = i + num_ids, f + num_floats
    return mine


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One number per token that trains, on its way from the ranks that computed it to those that need it.

    held: of the sequences that this rank is the source of, [n] fp32 each on its device, by sequence number. lengths,
    sources, targets: for every sequence of the step, its tokens, the rank that gives it and the ranks that get it; the
    same on all ranks.
    """

    held: Mapping[int, torch.Tensor]
    lengths: Sequence[int]
    sources: Sequence[int]
    targets: Sequence[Sequence[int]]


def exchange_streams(world: World, streams: Sequence[Stream]) -> list[dict[int, torch.Tensor]]:
    """All streams by one all-to-all; returns for each of them what this rank gets, [n] fp32 by sequence number.

    What stays is not copied; nothing is rounded. Every rank calls it.

    Raises:
        LayoutError: a sequence of another length than all ranks planned with.
    """
    for stream in streams:
        for number, values in stream.held.items():
            if len(values) != stream.lengths[number]:
                raise LayoutError(f"sequence {number}: {len(values)} values, planned {stream.lengths[number]}")
    got = [
        {n: values for n, values in s.held.items() if world.rank in s.targets[n] and s.sources[n] == world.rank}
        for s in streams
    ]
    if world.size == 1 or not streams:
        return got
    ways = [_ways(world, s.sources, s.targets) for s in streams]
    parts, sizes, arriving = [], [], []
    for r in range(world.size):
        own = [s.held[n].float() for s, (out, _) in zip(streams, ways) for n in out[r]]
        parts.extend(own)
        sizes.append(sum(map(len, own)))
        arriving.append([(i, n) for i, (_, incoming) in enumerate(ways) for n in incoming[r]])
    lengths = [[streams[i].lengths[n] for i, n in part] for part in arriving]
    send = torch.cat(parts) if parts else torch.empty(0, device=world.device)
    receive = torch.empty(sum(map(sum, lengths)), dtype=torch.float32, device=world.device)
    dist.all_to_all_single(receive, send, [sum(part) for part in lengths], sizes, group=world.group)
    flat = [size for part in lengths for size in part]
    for (i, number), values in zip([at for part in arriving for at in part], receive.split(flat)):
        got[i][number] = values
    return got


def _ways(
    world: World, holders: Sequence[int], targets: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Numbers of the sequences that go to each rank, and of those that come from each rank; the own ones in neither."""
    outgoing: list[list[int]] = [[] for _ in range(world.size)]
    incoming: list[list[int]] = [[] for _ in range(world.size)]
    for number, (holder, wanted) in enumerate(zip(holders, targets)):
        if holder == world.rank:
            for r in sorted(set(wanted) - {holder}):
                outgoing[r].append(number)
        elif world.rank in wanted:
            incoming[holder].append(number)
    return outgoing, incoming


def _swap(
    parts: list[list],
    incoming: list[list[int]],
    lengths: Sequence[tuple[int, int]],
    which: int,
    dtype: torch.dtype,
    world: World,
) -> list:
    """One all-to-all of flat values; sizes are known on both sides from the plan."""
    send = torch.tensor([x for part in parts for x in part], dtype=dtype, device=world.device)
    sizes = [sum(lengths[n][which] for n in part) for part in incoming]
    receive = torch.empty(sum(sizes), dtype=dtype, device=world.device)
    dist.all_to_all_single(receive, send, sizes, [len(part) for part in parts], group=world.group)
    return receive.tolist()
