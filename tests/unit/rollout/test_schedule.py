"""Pages, queue and lanes without a model: nothing lost, nothing held twice, prompts shared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlspeed.rollout.pages import PagePool, Prefix, fork
from rlspeed.rollout.schedule import Lane, Schedule, order_of
from rlspeed.rollout.types import Prompt


def lane(order: int, prompt: int, length: int, limit: int) -> Lane:
    ids = tuple([100 + prompt] * length)
    return Lane(order=order, prompt=Prompt(prompt_id=prompt, sample_id=order, token_ids=ids, seed=order), limit=limit)


def test_shared_pages_and_the_copy_of_a_partial_one() -> None:
    """Ten tokens in pages of four: two full pages for all three answers, the third page copied twice."""
    pool = PagePool(10, 4)
    prefix = Prefix(length=10, pages=pool.take(3), waiting=3)
    computed = list(prefix.pages)
    one, copy_one = fork(pool, prefix)
    two, copy_two = fork(pool, prefix)
    three, copy_three = fork(pool, prefix)
    assert one[:2] == two[:2] == three[:2] == computed[:2]
    assert copy_one == (computed[2], one[2])
    assert copy_two == (computed[2], two[2])
    assert copy_three is None
    assert three == computed, "the last answer takes the computed page"
    assert pool.free == 9 - 5
    for pages in (one, two, three):
        pool.release(pages)
    assert pool.free == 9
    with pytest.raises(ValueError, match="free already"):
        pool.release([computed[0]])


def test_full_pages_need_no_copy() -> None:
    pool = PagePool(10, 4)
    prefix = Prefix(length=8, pages=pool.take(2), waiting=2)
    pages, copy = fork(pool, prefix)
    assert (pages, copy) == (prefix.pages, None)


def test_the_pool_refuses_what_it_has_not() -> None:
    pool = PagePool(3, 4)
    with pytest.raises(ValueError, match="3 pages wanted, 2 free"):
        pool.take(3)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share([1])
    with pytest.raises(ValueError, match="at least 2"):
        PagePool(1, 4)


def play(schedule: Schedule, ends: dict[int, int]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Run a schedule as the generator does; `ends` gives the tokens each request draws. Checks pages at every step."""
    done: list[int] = []
    computed: list[tuple[int, ...]] = []

    def held() -> None:
        # the next key to be kept is that of the last token drawn
        writable = [x.pages[(len(x.known) - 1) // schedule.pool.size] for x in schedule.lanes if not x.done]
        assert len(set(writable)) == len(writable), "two lanes write to one page"
        assert 0 not in {p for x in schedule.lanes for p in x.pages}

    def draw(lanes: list[Lane], steps: int) -> None:
        for x in lanes:
            for _ in range(steps):
                if not x.done:
                    x.tokens.append(1)
                    x.done = len(x.tokens) == ends[x.order]
                    done.extend([x.order] if x.done else [])

    while schedule.waiting or schedule.lanes:
        while (new := schedule.admit()).lanes:
            computed += new.sequences
            for x in new.lanes:
                assert len(x.pages) >= schedule.pool.needed(len(x.known))
            draw(new.lanes, 1)
        schedule.retire()
        while schedule.runnable() and not schedule.grow():
            schedule.give_way()
        for x in schedule.lanes:
            if schedule.runnable():
                assert len(x.pages) >= schedule.pool.needed(x.reach + 1)
        if schedule.runnable():
            held()
        draw(schedule.lanes, schedule.chunk)
        schedule.retire()
    assert schedule.pool.free == schedule.pool.count - 1, "every page came back"
    return done, computed


@given(
    groups=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5), st.integers(1, 25)), min_size=1, max_size=6),
    size=st.integers(1, 9),
    slots=st.integers(1, 8),
    chunk=st.integers(1, 5),
    spare=st.integers(0, 30),
    budget=st.integers(1, 60),
)
def test_everything_is_generated_once_and_all_pages_come_back(
    groups: list[tuple[int, int, int]], size: int, slots: int, chunk: int, spare: int, budget: int
) -> None:
    lanes = [lane(100 * g + s, g, length, limit) for g, (length, n, limit) in enumerate(groups) for s in range(n)]
    longest = max(-(-(x.end + 1) // size) for x in lanes)
    pool = PagePool(longest + 3 + spare, size)
    schedule = Schedule(lanes, pool, slots=slots, budget=budget, chunk=chunk)
    ends = {x.order: 1 + (x.order * 7) % x.limit for x in lanes}
    done, _ = play(schedule, ends)
    assert sorted(done) == sorted(ends)


def test_a_prompt_is_computed_once_while_memory_lasts() -> None:
    lanes = [lane(s, 0, 10, 20) for s in range(6)]
    schedule = Schedule(lanes, PagePool(60, 4), slots=2, budget=100, chunk=3)
    _, computed = play(schedule, dict.fromkeys(range(6), 20))
    assert computed == [tuple([100] * 10)]
    assert schedule.preempted == 0


def test_the_last_admitted_gives_way_and_comes_back_with_its_tokens() -> None:
    lanes = [lane(s, s, 4, 20) for s in range(3)]
    schedule = Schedule(lanes, PagePool(12, 4), slots=3, budget=100, chunk=2)
    done, computed = play(schedule, dict.fromkeys(range(3), 20))
    assert sorted(done) == [0, 1, 2]
    assert done[0] == 0, "the first admitted is never sent back"
    assert schedule.preempted > 0
    again = [c for c in computed if len(c) > 4]
    assert again, "a sequence that gave way is computed with what it had drawn"


def test_order_puts_the_longest_first_and_the_unknown_before_them() -> None:
    prompts = [lane(i, i, i + 1, 9).prompt for i in range(4)]
    assert order_of(prompts) == [0, 1, 2, 3]
    expected = {prompts[0].token_ids: 5.0, prompts[1].token_ids: 50.0, prompts[3].token_ids: 20.0}
    assert order_of(prompts, expected) == [2, 1, 3, 0]
