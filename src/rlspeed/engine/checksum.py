"""Checksums of weights at both ends of a transfer.

A checksum is the sum over all elements of bits times (2 index + 1), modulo 2^64: a changed, lost or exchanged element
changes it. It is computed where the numbers lie, 8 bytes per piece travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rlspeed.engine.mover import Freight, start

# elements that are summed at once: their 64-bit copies take 16 MiB
_BLOCK = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Checksum of a tensor's bits in row-major order, an int64 scalar on its device."""
    flat = tensor.contiguous().reshape(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, flat.numel(), _BLOCK):
        part = flat[first : first + _BLOCK].to(torch.int64)
        index = torch.arange(first, first + part.numel(), dtype=torch.int64, device=tensor.device)
        total += (part * (2 * index + 1)).sum()
    return total


def compare(
    sent: Sequence[tuple[int, torch.Tensor]],
    received: Sequence[tuple[int, torch.Tensor]],
    *,
    group: dist.ProcessGroup | None,
    members: Sequence[int],
    device: torch.device,
) -> list[int]:
    """Numbers of the entries of `received` whose checksum is not the sender's.

    sent: (receiver, checksum) of everything that this rank gave, received: (sender, checksum) of everything it got; for
    each pair of ranks both sides list the same pieces in the same order. Every rank of the group calls it.
    """
    if len(members) == 1:
        return []
    out = [[c for peer, c in sent if peer == rank] for rank in members]
    places = [[i for i, (peer, _) in enumerate(received) if peer == rank] for rank in members]
    flat = [c for part in out for c in part]
    send = torch.stack(flat).to(device) if flat else torch.empty(0, dtype=torch.int64, device=device)
    theirs = torch.empty(len(received), dtype=torch.int64, device=device)
    freight = Freight("all_to_all", tuple(8 * len(p) for p in out), tuple(8 * len(p) for p in places))
    start(freight, send.view(torch.uint8), theirs.view(torch.uint8), group, 0).wait()
    order = [i for part in places for i in part]
    if not order:
        return []
    mine = torch.stack([received[i][1] for i in order]).to(device)
    return sorted(order[i] for i in (mine != theirs).nonzero(as_tuple=True)[0].tolist())
