"""From the answers of a step to packed bins on the ranks that train them: one table, a plan per site, one exchange."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rlspeed.engine.exchange import exchange_rows
from rlspeed.engine.packed import PackedBatch, pack_sequences
from rlspeed.engine.packed_shared import pack_shared
from rlspeed.engine.world import World
from rlspeed.planning.balance import deal
from rlspeed.planning.packing import pack
from rlspeed.planning.prefixes import deal_and_share, share_bins
from rlspeed.rollout.types import Rollout
from rlspeed.training.grid import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of the step as every rank knows it; its position in the table is its sequence number.

    group: position of its prompt in the step's batch. row: the prompt's row in the data. holder: rank that has the
    tokens. score: weighted sum of all rewards, 0 when scoring failed. reward: score plus penalties. trains: False
    leaves it out of the loss. truncated: it ran into the length limit.
    """

    group: int
    row: int
    sample_id: int
    holder: int
    prompt_tokens: int
    response_tokens: int
    score: float
    reward: float
    failed: bool
    trains: bool
    truncated: bool

    @property
    def tokens(self) -> int:
        """Prompt and response."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """Sequences of one optimizer step and where they train.

    targets: for each sequence number in it, the share of the data. bins[share]: sequence numbers of each bin; all
    shares have equally many bins.
    """

    numbers: tuple[int, ...]
    targets: dict[int, int]
    bins: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Laid:
    """A step's answers as one site works on them.

    share_of: for each sequence number, the share of the data. per_minibatch: this rank's bins, none outside of the
    site.
    """

    site: Site
    plans: Sequence[MiniBatch]
    share_of: Mapping[int, int]
    per_minibatch: Sequence[Sequence[PackedBatch]]

    @property
    def batches(self) -> list[PackedBatch]:
        """This rank's bins of all mini-batches."""
        return [b for part in self.per_minibatch for b in part]

    def without(self, numbers: set[int]) -> Laid:
        """The same bins, in which the sequences `numbers` train no token."""
        if not numbers:
            return self
        parts = [[_without(batch, numbers) for batch in part] for part in self.per_minibatch]
        return replace(self, per_minibatch=parts)


def _without(batch: PackedBatch, numbers: set[int]) -> PackedBatch:
    """A bin whose streams lie as before."""
    keep = torch.tensor([n not in numbers for n in batch.sequence_ids], device=batch.loss_mask.device)
    lengths = torch.tensor(batch.lengths, device=keep.device)
    return replace(batch, loss_mask=batch.loss_mask & keep.repeat_interleave(lengths))


def gather_table(world: World, mine: Sequence[Answer]) -> list[Answer]:
    """All ranks' answers in one order that does not depend on the number of ranks."""
    rows = [a for part in world.gather_objects(list(mine)) for a in part]
    return sorted(rows, key=lambda a: (a.group, a.sample_id))


def plan_minibatches(
    table: Sequence[Answer],
    *,
    shares: Sequence[Sequence[int]],
    groups_per_minibatch: int | None,
    balance: bool,
    capacity: int | None,
    micro_batch_size: int,
    seed: int,
    shared: bool = False,
) -> list[MiniBatch]:
    """Cut the step into optimizer steps, deal each one's sequences to the shares and fill bins.

    shares: ranks of each share of the data (`Grid.shares`). groups_per_minibatch: prompts per optimizer step, None for
    all. balance: deal by cost; otherwise a sequence stays in the share of the rank that holds it, unless it is held by
    ranks outside of the shares. capacity: tokens per
    bin; None means padded training with `micro_batch_size` sequences per micro-batch. seed: order of the prompts when
    there are several mini-batches. shared: answers of one prompt are kept together and hold it once per bin.
    """
    share_of = {rank: share for share, ranks in enumerate(shares) for rank in ranks}
    groups = sorted({a.group for a in table})
    size = groups_per_minibatch or len(groups)
    if size < len(groups):
        random.Random(seed).shuffle(groups)
    plans = []
    for start in range(0, len(groups), size):
        chosen = set(groups[start : start + size])
        numbers = tuple(i for i, a in enumerate(table) if a.group in chosen)
        deals = balance or any(a.holder not in share_of for a in table)
        homes = None if deals else [share_of[table[i].holder] for i in numbers]
        if shared and capacity is not None:
            bins = _shared_bins(table, numbers, homes, len(shares), capacity)
        else:
            bins = _plain_bins(table, numbers, homes, len(shares), capacity, micro_batch_size)
        most = max(len(b) for b in bins)
        plans.append(
            MiniBatch(
                numbers=numbers,
                targets={n: share for share, own in enumerate(bins) for b in own for n in b},
                bins=tuple(tuple(b) + ((),) * (most - len(b)) for b in bins),
            )
        )
    return plans


def _split(places: int, homes: Sequence[int], shares: int) -> list[list[int]]:
    """The places 0..places-1 of each share, by the share that each has its home in."""
    return [[j for j in range(places) if homes[j] == s] for s in range(shares)]


def _plain_bins(
    table: Sequence[Answer],
    numbers: Sequence[int],
    homes: Sequence[int] | None,
    shares: int,
    capacity: int | None,
    micro_batch_size: int,
) -> list[list[tuple[int, ...]]]:
    """Bins of each share, every sequence by itself; homes: None to deal by cost."""
    lengths = [table[i].tokens for i in numbers]
    dealt = deal(lengths, shares) if homes is None else _split(len(numbers), homes, shares)
    return [
        _bins([numbers[j] for j in share], [lengths[j] for j in share], capacity, micro_batch_size) for share in dealt
    ]


def _shared_bins(
    table: Sequence[Answer], numbers: Sequence[int], homes: Sequence[int] | None, shares: int, capacity: int
) -> list[list[tuple[int, ...]]]:
    """As `_plain_bins`, answers of one prompt beside each other."""

    def lists(places: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        rows = [table[numbers[j]] for j in places]
        return [a.group for a in rows], [a.prompt_tokens for a in rows], [a.response_tokens for a in rows]

    if homes is None:
        dealt = deal_and_share(*lists(range(len(numbers))), capacity, shares)
        return [[tuple(numbers[j] for j in b) for b in bins] for bins in dealt]
    out = []
    for own in _split(len(numbers), homes, shares):
        bins = share_bins(*lists(own), capacity)
        out.append([tuple(numbers[own[j]] for j in b) for b in bins])
    return out


def _bins(numbers: list[int], lengths: list[int], capacity: int | None, micro_batch_size: int) -> list[tuple[int, ...]]:
    """Bins of one share: packed by tokens, or `micro_batch_size` sequences each in padded training."""
    if not numbers:
        return []
    if capacity is None:
        return [tuple(numbers[i : i + micro_batch_size]) for i in range(0, len(numbers), micro_batch_size)]
    return [tuple(numbers[j] for j in b) for b in pack(lengths, capacity).bins]


def build_batches(
    world: World,
    table: Sequence[Answer],
    rollouts: dict[int, Rollout],
    planned: Sequence[tuple[Site, Sequence[MiniBatch]]],
    *,
    multiple: int = 1,
    shared: bool = False,
) -> list[Laid]:
    """Exchange the sequences once for all sites and lay this rank's bins out; stream `rollout_logprobs` comes along.

    rollouts: this rank's answers by sequence number. planned: each site with its mini-batches; all ranks of a share get
    its bins. multiple: rows are filled up to a multiple of it. A spare bin (none of its own sequences) is masked
    tokens. shared: neighbours of one group share their prompt (then multiple is 1).
    """
    shares = [{n: share for plan in plans for n, share in plan.targets.items()} for _, plans in planned]
    held = exchange_rows(
        world,
        {n: (r.prompt_ids + r.response_ids, r.logprobs) for n, r in rollouts.items()},
        [(a.tokens, a.response_tokens) for a in table],
        [a.holder for a in table],
        [
            sorted({rank for (site, _), own in zip(planned, shares) for rank in site.shares[own[n]]})
            for n in range(len(table))
        ],
    )
    out = []
    for (site, plans), own in zip(planned, shares):
        parts: list[list[PackedBatch]] = [[] for _ in plans]
        if site.share is not None:
            parts = [
                [_packed(table, held, numbers, multiple, shared).to(world.device) for numbers in plan.bins[site.share]]
                for plan in plans
            ]
        out.append(Laid(site=site, plans=plans, share_of=own, per_minibatch=parts))
    return out


def _packed(
    table: Sequence[Answer],
    held: dict[int, tuple[list[int], list[float]]],
    numbers: Sequence[int],
    multiple: int,
    shared: bool,
) -> PackedBatch:
    """One bin with the generator's log-probs beside the tokens."""
    rows, prompts = [held[n][0] for n in numbers], [table[n].prompt_tokens for n in numbers]
    trains = [table[n].trains for n in numbers]
    if shared and numbers:
        batch = pack_shared(rows, prompts, [table[n].group for n in numbers], sequence_ids=numbers, trains=trains)
    else:
        batch = pack_sequences(rows, prompts, sequence_ids=numbers, trains=trains, multiple=multiple)
    flat = [x for n in numbers if table[n].trains for x in held[n][1]]
    batch.put("rollout_logprobs", torch.tensor(flat, dtype=torch.float32))
    return batch
