"""Carry flat buffers between ranks: one collective per bucket, started now and waited for later. It decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from rlspeed.planning.buckets import How

# the same collective under its newer and its older name
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Freight:
    """What one rank gives and gets in a bucket: bytes to and from each rank of the group, in the group's order.

    In an all_gather every rank gives the same bytes to all others: `give` then has that number for each of them, and
    the send buffer holds it once.
    """

    how: How
    give: tuple[int, ...]
    get: tuple[int, ...]

    @property
    def send_bytes(self) -> int:
        """Size of the send buffer."""
        return max(self.give) if self.how == "all_gather" else sum(self.give)

    @property
    def receive_bytes(self) -> int:
        """Size of the receive buffer; an all_gather also delivers the own part."""
        return self.send_bytes * len(self.get) if self.how == "all_gather" else sum(self.get)

    def starts(self) -> tuple[int, ...]:
        """Where each sender's bytes begin in the receive buffer."""
        if self.how == "all_gather":
            return tuple(self.send_bytes * i for i in range(len(self.get)))
        return (0, *accumulate(self.get))[:-1]


class Transfer:
    """Bytes on their way; `wait` before reading the receive buffer or writing either one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = [w for w in works if w is not None]

    def wait(self) -> None:
        """Return when everything has arrived (on a GPU: when the current stream will see it)."""
        for work in self._works:
            work.wait()
        self._works = []


def start(
    freight: Freight, send: torch.Tensor, receive: torch.Tensor, group: dist.ProcessGroup | None, rank: int
) -> Transfer:
    """Start one bucket. send, receive: uint8 buffers of the freight's sizes. rank: this one's place in the group.

    Every rank of the group calls it for every bucket, in the same order, also with nothing to give or get.
    """
    if freight.how == "all_gather":
        return Transfer([_ALL_GATHER(receive, send, group=group, async_op=True)])
    if freight.how == "all_to_all":
        work = dist.all_to_all_single(receive, send, list(freight.get), list(freight.give), group=group, async_op=True)
        return Transfer([work])
    ops = []
    for peer, part in enumerate(send.split(list(freight.give))):
        if peer != rank and part.numel():
            ops.append(dist.P2POp(dist.isend, part, group=group, group_peer=peer))
    for peer, part in enumerate(receive.split(list(freight.get))):
        if peer != rank and part.numel():
            ops.append(dist.P2POp(dist.irecv, part, group=group, group_peer=peer))
    return Transfer(dist.batch_isend_irecv(ops) if ops else [])
