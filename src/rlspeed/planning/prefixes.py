"""Shared prefixes: where the answers to one prompt lie in a bin so that the prompt is stored and computed once.

A bin is laid out as [prompt, answer, answer, ..., prompt, answer, ...]. Each of these is a segment of its own (causal
attention inside); the answers of a prompt lie side by side, so one span of queries looks at one span of keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from rlspeed.errors import LayoutError
from rlspeed.planning.balance import PROXY_LINEAR, PROXY_QUADRATIC, partition
from rlspeed.planning.packing import pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One prompt and those of its answers that share it.

    prompt: tokens of the prompt. answers: tokens of each answer. members: the answers' places in the caller's lists.
    """

    prompt: int
    answers: tuple[int, ...]
    members: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, once, and of all answers."""
        return self.prompt + sum(self.answers)

    @property
    def saved(self) -> int:
        """Tokens that a plain pack would hold more."""
        return self.prompt * (len(self.answers) - 1)

    @property
    def cost(self) -> float:
        """Work in the unit of `balance.workload`: every token once, each answer's attention from the prompt on."""
        pairs = self.prompt**2 + sum((self.prompt + n) ** 2 - self.prompt**2 for n in self.answers)
        return PROXY_LINEAR * self.tokens + PROXY_QUADRATIC * pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLayout:
    """One bin: families one after the other, each its prompt and then its answers.

    Raises:
        LayoutError: a prompt without tokens, a family without answers, an answer without tokens.
    """

    families: tuple[Family, ...]

    def __post_init__(self) -> None:
        for family in self.families:
            if family.prompt < 1 or not family.answers or min(family.answers) < 1:
                raise LayoutError(
                    f"shared prefixes: a prompt of {family.prompt} tokens with answers of {list(family.answers)}; "
                    "both need tokens"
                )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each segment, in order."""
        return tuple(n for f in self.families for n in (f.prompt, *f.answers))

    @property
    def owners(self) -> tuple[int, ...]:
        """For each segment the place of its answer in the caller's lists; -1 for a prompt."""
        return tuple(i for f in self.families for i in (-1, *f.members))

    @property
    def starts(self) -> tuple[int, ...]:
        """Position of each segment's first token: 0 for a prompt, the prompt's length for its answers."""
        return tuple(n for f in self.families for n in (0, *(f.prompt for _ in f.answers)))

    @property
    def prompts(self) -> tuple[int, ...]:
        """Tokens of each prompt: the keys that the answers share."""
        return tuple(f.prompt for f in self.families)

    @property
    def answers(self) -> tuple[int, ...]:
        """Tokens of all answers of each prompt together: the queries that look at it."""
        return tuple(sum(f.answers) for f in self.families)

    @property
    def num_tokens(self) -> int:
        """Tokens of the bin."""
        return sum(f.tokens for f in self.families)

    def predecessors(self) -> list[int]:
        """For each token the place of the token before it in its sequence: the prompt's last token for an answer's
        first, itself for a prompt's first."""
        out: list[int] = []
        for family in self.families:
            first = len(out)
            out.extend(range(first - 1, first + family.prompt - 1))
            out[first] = first
            last = first + family.prompt - 1
            for length in family.answers:
                start = len(out)
                out.extend([last, *range(start, start + length - 1)])
        return out

    def spans(self) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
        """For each family the places start..end-1 of its prompt (keys) and of its answers (queries)."""
        ends = list(accumulate(f.tokens for f in self.families))
        return tuple(
            ((end - f.tokens, end - f.tokens + f.prompt), (end - f.tokens + f.prompt, end))
            for f, end in zip(self.families, ends)
        )


def lay_out(groups: Sequence[Hashable], prompts: Sequence[int], answers: Sequence[int]) -> PrefixLayout:
    """The layout of one bin: neighbours of the same group share their prompt.

    groups, prompts, answers: of each sequence its group, and the tokens of its prompt and of its answer.

    Raises:
        LayoutError: lists of unequal length, one group with prompts of several lengths, or a part without tokens.
    """
    if not len(groups) == len(prompts) == len(answers):
        raise LayoutError(f"shared prefixes: {len(groups)} groups, {len(prompts)} prompts, {len(answers)} answers")
    return PrefixLayout(families=_families(range(len(groups)), groups, prompts, answers))


def tokens_saved(bins: Iterable[Sequence[int]], groups: Sequence[Hashable], prompts: Sequence[int]) -> int:
    """Tokens that bins of sequence numbers hold less than a plain pack; groups, prompts: of each sequence number."""
    return sum(
        (len(run) - 1) * prompts[run[0]]
        for numbers in bins
        for run in (list(members) for _, members in groupby(numbers, key=lambda n: groups[n]))
    )


def share_bins(
    groups: Sequence[Hashable], prompts: Sequence[int], answers: Sequence[int], capacity: int
) -> list[tuple[int, ...]]:
    """Bins of at most `capacity` tokens over all sequences; a group is split, its prompt repeated, only where it is
    longer than a bin.

    Returns places in the lists, each once; in a bin those of one group are neighbours.

    Raises:
        LayoutError: a prompt with its longest answer is over the capacity, or a part without tokens.
    """
    return _fill(_families(range(len(groups)), groups, prompts, answers, most=capacity), capacity)


def deal_and_share(
    groups: Sequence[Hashable], prompts: Sequence[int], answers: Sequence[int], capacity: int, shares: int
) -> list[list[tuple[int, ...]]]:
    """Bins of each share of the data, the shares evened by work; as `share_bins` otherwise.

    Whole groups are dealt, cut where one is longer than a bin or than an even share of the tokens.
    """
    whole = _families(range(len(groups)), groups, prompts, answers)
    longest = max((f.prompt + max(f.answers) for f in whole), default=1)
    most = min(capacity, max(longest, -(-sum(f.tokens for f in whole) // shares)))
    parts = _families(range(len(groups)), groups, prompts, answers, most=most)
    dealt = partition([f.cost for f in parts], shares)
    return [_fill([parts[i] for i in part], capacity) for part in dealt]


def _fill(families: Sequence[Family], capacity: int) -> list[tuple[int, ...]]:
    """Families into bins; the members of each bin."""
    plan = pack([f.tokens for f in families], capacity)
    return [tuple(i for f in b for i in families[f].members) for b in plan.bins]


def _families(
    places: Iterable[int],
    groups: Sequence[Hashable],
    prompts: Sequence[int],
    answers: Sequence[int],
    most: int | None = None,
) -> tuple[Family, ...]:
    """Neighbours of one group as one family, or as several of at most `most` tokens."""
    out: list[Family] = []
    for group, run in groupby(places, key=lambda i: groups[i]):
        members = list(run)
        prompt = prompts[members[0]]
        if any(prompts[i] != prompt for i in members):
            raise LayoutError(f"shared prefixes: group {group} has prompts of {sorted({prompts[i] for i in members})}")
        if most is None or prompt + sum(answers[i] for i in members) <= most:
            cuts = [tuple(members)]
        elif prompt + max(answers[i] for i in members) > most:
            raise LayoutError(
                f"shared prefixes: a prompt of {prompt} tokens and its longest answer of "
                f"{max(answers[i] for i in members)} do not fit into {most}"
            )
        else:
            plan = pack([answers[i] for i in members], most - prompt)
            cuts = [tuple(members[j] for j in b) for b in plan.bins]
        out.extend(Family(prompt=prompt, answers=tuple(answers[i] for i in cut), members=cut) for cut in cuts)
    return tuple(out)
