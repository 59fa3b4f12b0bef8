"""Streams of tokens between the sites of a step: what one role computed goes to the roles that need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlspeed.engine.exchange import Stream, exchange_streams
from rlspeed.engine.packed import PackedBatch
from rlspeed.engine.world import World
from rlspeed.planning.devices import Role
from rlspeed.training.batches import Answer, Laid


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """Stream `name` from the bins of one site to those of another."""

    name: str
    source: Laid
    target: Laid


def journeys(bins: Mapping[Role, Laid], kl_where: str) -> list[Journey]:
    """What the actor needs for its loss and for the credit, and the critic for the credit, from other ranks."""
    ways = [(Role.CRITIC, Role.ACTOR, "values"), (Role.REFERENCE, Role.ACTOR, "ref_logprobs")]
    if kl_where == "reward":
        ways += [(Role.ACTOR, Role.CRITIC, "old_logprobs"), (Role.REFERENCE, Role.CRITIC, "ref_logprobs")]
    return [
        Journey(name=name, source=bins[source], target=bins[target])
        for source, target, name in ways
        if source in bins and target in bins
    ]


def bring(world: World, table: Sequence[Answer], journeys: Sequence[Journey]) -> None:
    """Put each stream on the bins of its target, by one exchange; every rank of the run calls it.

    A sequence comes from the first rank of the share that computed it. Journeys within one site are none.
    """
    far = [j for j in journeys if j.source.site is not j.target.site]
    if not far:
        return
    lengths = [a.response_tokens if a.trains else 0 for a in table]
    streams = []
    for journey in far:
        source, target = journey.source, journey.target
        held = by_sequence(source.batches, journey.name, lengths) if source.site.leads else {}
        streams.append(
            Stream(
                held=held,
                lengths=lengths,
                sources=[source.site.shares[source.share_of[n]][0] for n in range(len(table))],
                targets=[target.site.shares[target.share_of[n]] for n in range(len(table))],
            )
        )
    for journey, got in zip(far, exchange_streams(world, streams)):
        lay_out(journey.target.batches, journey.name, got)


def by_sequence(batches: Sequence[PackedBatch], name: str, lengths: Sequence[int]) -> dict[int, torch.Tensor]:
    """A stream of the bins as one tensor [tokens that train] per sequence number."""
    out: dict[int, torch.Tensor] = {}
    for batch in batches:
        numbers = [n for n in batch.sequence_ids if n >= 0]
        out.update(zip(numbers, batch.get(name).split([lengths[n] for n in numbers])))
    return out


def lay_out(batches: Sequence[PackedBatch], name: str, values: dict[int, torch.Tensor]) -> None:
    """The inverse of `by_sequence`: put the stream on the bins."""
    for batch in batches:
        own = [values[n] for n in batch.sequence_ids if n >= 0]
        batch.put(name, torch.cat(own) if own else torch.zeros(0, device=batch.input_ids.device))
