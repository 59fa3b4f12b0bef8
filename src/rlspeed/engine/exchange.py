"""Move whole sequences between ranks, by a plan that every rank computed alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    outgoing = [
        [n for n, t in enumerate(targets) if r in t and holders[n] == world.rank != r] for r in range(world.size)
    ]
    incoming = [
        [n for n, h in enumerate(holders) if h == r != world.rank and world.rank in targets[n]]
        for r in range(world.size)
    ]
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
