"""Which request runs when: the queue, the lanes, their pages, and who gives way when pages run out. No tensors.

A request becomes a lane when a lane and the pages for its prompt are free. Every answer to a prompt shares the pages
that the prompt fills. When a lane needs a page and none is free, the lane that was admitted last goes back to the head
of the queue with the tokens it has; it is computed again later and draws the same tokens, since each position has its
own random number.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlspeed.rollout.pages import PagePool, Prefix, fork
from rlspeed.rollout.types import Prompt, Rollout


@dataclass(slots=True, eq=False)
class Lane:
    """One answer on its way.

    order: place in the caller's list. limit: most new tokens. reach: highest position (counted from 0) that steps
    already launched may have come to. done: nothing more is accepted.
    """

    order: int
    prompt: Prompt
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    reach: int = 0
    serial: int = 0
    done: bool = False

    @property
    def known(self) -> tuple[int, ...]:
        """Prompt and answer so far."""
        return self.prompt.token_ids + tuple(self.tokens)

    @property
    def start(self) -> int:
        """Position of the answer's first token."""
        return len(self.prompt.token_ids)

    @property
    def end(self) -> int:
        """Position of the last token allowed."""
        return self.start + self.limit - 1


@dataclass(slots=True)
class Admitted:
    """What a round of admissions must compute: sequences to prefill into pages, pages to copy, lanes to start.

    prefixes[i] goes with sequences[i]; each lane starts from the logits of its prefix.
    """

    sequences: list[tuple[int, ...]] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    sources: list[Prefix] = field(default_factory=list)


def order_of(prompts: Sequence[Prompt], expected: Mapping[tuple[int, ...], float] | None = None) -> list[int]:
    """Places of the prompts in the order of admission: answers to a prompt beside one another.

    expected: mean answer length of prompts seen before; the longest go first, since what starts last ends last. A
    prompt never seen counts as the longest.
    """
    if not expected:
        return sorted(range(len(prompts)), key=lambda i: (prompts[i].prompt_id, i))
    never = float("inf")
    return sorted(
        range(len(prompts)),
        key=lambda i: (-expected.get(prompts[i].token_ids, never), prompts[i].prompt_id, i),
    )


class Enough:
    """Whether enough prompts are complete. wanted: how many, None for all; missing: answers still out, by prompt."""

    def __init__(self, missing: Counter[int], wanted: int | None) -> None:
        self.missing = missing
        self.wanted = wanted
        self.complete: list[tuple[int, int]] = []  # look of the host, prompt

    @property
    def reached(self) -> bool:
        """The wanted number is there."""
        return self.wanted is not None and len(self.complete) >= self.wanted

    def count(self, prompt_id: int, look: int) -> None:
        """One more answer to a prompt is complete, seen when the host looked for the `look`-th time."""
        self.missing[prompt_id] -= 1
        if not self.missing[prompt_id]:
            self.complete.append((look, prompt_id))

    def of(self, done: dict[int, Rollout]) -> dict[int, Rollout]:
        """The answers that count."""
        if self.wanted is None:
            return done
        chosen = {prompt for _, prompt in sorted(self.complete)[: self.wanted]}
        return {i: rollout for i, rollout in done.items() if rollout.prompt_id in chosen}


def enough_of(prompts: Sequence[Prompt], wanted: int | None) -> Enough:
    """The count at the start of a call."""
    return Enough(Counter(p.prompt_id for p in prompts), wanted)


class Schedule:
    """Queue, lanes and pages of one call of generate.

    slots: most lanes. budget: most tokens of one prefill (a longer prompt goes alone). chunk: steps between two looks.
    """

    def __init__(self, waiting: Sequence[Lane], pool: PagePool, *, slots: int, budget: int, chunk: int) -> None:
        self.waiting = deque(waiting)
        self.pool, self.slots, self.budget, self.chunk = pool, slots, budget, chunk
        self.lanes: list[Lane] = []
        self.preempted = 0
        self._prefixes: dict[tuple[int, ...], Prefix] = {}
        self._wanted = Counter(lane.prompt.token_ids for lane in waiting)
        self._serial = 0

    def admit(self) -> Admitted:
        """Take requests from the queue while lanes, pages and the prefill budget allow."""
        out = Admitted()
        tokens = 0
        reserve = sum(self._soon(lane) for lane in self.lanes)
        while self.waiting and len(self.lanes) < self.slots:
            lane = self.waiting[0]
            prefix = None if lane.tokens else self._prefixes.get(lane.prompt.token_ids)
            length = len(lane.known)
            if prefix is None and out.sequences and tokens + length > self.budget:
                break
            if not self._room(lane, prefix, reserve):
                break
            if prefix is None:
                prefix = self._compute(lane, out)
                tokens += length
            self._start(self.waiting.popleft(), prefix, out)
            reserve += self._soon(lane)
        return out

    def _target(self, lane: Lane, reach: int) -> int:
        """Pages of the lane when the next chunk of steps starts from `reach`."""
        return self.pool.needed(min(lane.end, reach + self.chunk) + 1)

    def _soon(self, lane: Lane) -> int:
        """Pages that the lane needs for the next chunk of steps, beside those it has."""
        return max(0, self._target(lane, lane.reach) - len(lane.pages))

    def _room(self, lane: Lane, prefix: Prefix | None, reserve: int) -> bool:
        """Whether the lane can start and go a chunk of steps, with `reserve` pages left for the others."""
        length = len(lane.known)
        need = self._target(lane, length)
        if prefix is not None:
            need -= length // self.pool.size
        elif not lane.tokens and self._wanted[lane.prompt.token_ids] > 1:
            need += 1  # its last page is copied for each answer
        while self.pool.free < need + reserve:
            idle = next((p for p in self._prefixes.values() if p is not prefix), None)
            if self.lanes or idle is None:
                return False
            self._drop(idle)
        return True

    def _drop(self, prefix: Prefix) -> None:
        """Forget a computed prompt; answers that wait for it compute it again."""
        self._prefixes = {k: p for k, p in self._prefixes.items() if p is not prefix}
        self.pool.release(prefix.pages)
        prefix.pages = []

    def _compute(self, lane: Lane, out: Admitted) -> Prefix:
        """A prefix for the lane; a prompt that others wait for is kept for them."""
        known = lane.known
        shared = not lane.tokens
        waiting = self._wanted[lane.prompt.token_ids] if shared else 1
        prefix = Prefix(length=len(known), pages=self.pool.take(self.pool.needed(len(known))), waiting=waiting)
        if shared and waiting > 1:
            self._prefixes[lane.prompt.token_ids] = prefix
        out.sequences.append(known)
        out.prefixes.append(prefix)
        return prefix

    def _start(self, lane: Lane, prefix: Prefix, out: Admitted) -> None:
        if not lane.tokens:
            self._wanted[lane.prompt.token_ids] -= 1
        lane.pages, copy = fork(self.pool, prefix)
        if copy is not None:
            out.copies.append(copy)
        if prefix.waiting == 0:
            self._prefixes.pop(lane.prompt.token_ids, None)
        lane.reach = len(lane.known)  # position of the token that admission draws
        lane.serial = self._serial
        self._serial += 1
        out.lanes.append(lane)
        out.sources.append(prefix)
        self.lanes.append(lane)

    def runnable(self) -> bool:
        """Whether further steps can draw anything: some lane is not known to have come to its end."""
        return any(not lane.done and lane.reach < lane.end for lane in self.lanes)

    def grow(self) -> bool:
        """Give every lane the pages for the next chunk of steps; False: not enough are free, and nothing was taken."""
        wanted = [self._soon(lane) for lane in self.lanes]
        if sum(wanted) > self.pool.free:
            return False
        for lane, more in zip(self.lanes, wanted):
            lane.reach = min(lane.end, lane.reach + self.chunk)
            lane.pages += self.pool.take(more)
        return True

    def give_way(self) -> None:
        """Make room: drop a prompt that is kept for answers in the queue, else send the last lane back to the queue.

        To be called when all that was drawn has been accepted.

        Raises:
            ValueError: a single lane is left and nothing can be freed; the pool is too small for it.
        """
        if self._prefixes:
            self._drop(next(reversed(self._prefixes.values())))
            return
        if len(self.lanes) < 2:
            raise ValueError("the key-value cache cannot hold one sequence")
        lane = max(self.lanes, key=lambda x: x.serial)
        self.lanes.remove(lane)
        self.pool.release(lane.pages)
        lane.pages = []
        if not lane.tokens:
            self._wanted[lane.prompt.token_ids] += 1
        self.waiting.appendleft(lane)
        self.preempted += 1

    def retire(self) -> bool:
        """Take finished lanes out; the last lanes move into the gaps. True if anything changed."""
        lanes, before = self.lanes, len(self.lanes)
        i = 0
        while i < len(lanes):
            if not lanes[i].done:
                i += 1
                continue
            self.pool.release(lanes[i].pages)
            lanes[i].pages = []
            last = lanes.pop()
            if i < len(lanes):
                lanes[i] = last
        return len(lanes) != before
