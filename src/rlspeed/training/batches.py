"""From the answers of a step to packed bins on the ranks that train them: one table, one plan, one exchange."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlspeed.engine.exchange import exchange_rows
from rlspeed.engine.packed import PackedBatch, pack_sequences
from rlspeed.engine.packed_shared import pack_shared
from rlspeed.engine.world import World
from rlspeed.planning.balance import deal
from rlspeed.planning.packing import pack
from rlspeed.planning.prefixes import deal_and_share, share_bins
from rlspeed.rollout.types import Rollout


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
    all. balance: deal by cost; otherwise a sequence stays in the share of the rank that holds it. capacity: tokens per
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
        homes = None if balance else [share_of[table[i].holder] for i in numbers]
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
    plans: Sequence[MiniBatch],
    shares: Sequence[Sequence[int]],
    *,
    multiple: int = 1,
    shared: bool = False,
) -> list[list[PackedBatch]]:
    """Exchange the sequences and lay this rank's bins out, per mini-batch; stream `rollout_logprobs` comes along.

    rollouts: this rank's answers by sequence number. shares: ranks of each share; all of them get the share's bins.
    multiple: rows are filled up to a multiple of it. A spare bin (none of its own sequences) is masked tokens.
    shared: neighbours of one group share their prompt (then multiple is 1).
    """
    targets = {n: r for plan in plans for n, r in plan.targets.items()}
    rows = {n: (r.prompt_ids + r.response_ids, r.logprobs) for n, r in rollouts.items()}
    held = exchange_rows(
        world,
        rows,
        [(a.tokens, a.response_tokens) for a in table],
        [a.holder for a in table],
        [shares[targets[n]] for n in range(len(table))],
    )
    share = next(i for i, ranks in enumerate(shares) if world.rank in ranks)
    return [
        [_packed(table, held, numbers, multiple, shared).to(world.device) for numbers in plan.bins[share]]
        for plan in plans
    ]


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
