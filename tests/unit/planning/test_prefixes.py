"""Laws of the planner of shared prompts: every answer once, no bin too full, prompts repeated only where needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlspeed.errors import LayoutError
from rlspeed.planning.prefixes import deal_and_share, lay_out, share_bins, tokens_saved

GROUPS = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 20), min_size=1, max_size=6)), max_size=8)


def lists(groups):
    """The three lists of the planner from [(prompt tokens, [answer tokens])]."""
    rows = [(g, prompt, a) for g, (prompt, answers) in enumerate(groups) for a in answers]
    return [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows]


def bin_tokens(numbers, names, prompts, answers):
    """Tokens of a bin counted by hand: each group's prompt once."""
    return sum({names[i]: prompts[i] for i in numbers}.values()) + sum(answers[i] for i in numbers)


@settings(deadline=None)
@given(GROUPS, st.integers(50, 200), st.integers(1, 4))
def test_every_answer_once_and_no_bin_over_its_capacity(groups, capacity, shares):
    names, prompts, answers = lists(groups)
    for bins in (
        share_bins(names, prompts, answers, capacity),
        [b for own in deal_and_share(names, prompts, answers, capacity, shares) for b in own],
    ):
        assert sorted(i for b in bins for i in b) == list(range(len(names)))
        saved = 0
        for b in bins:
            assert bin_tokens(b, names, prompts, answers) <= capacity
            runs = [names[i] for j, i in enumerate(b) if j == 0 or names[b[j - 1]] != names[i]]
            assert len(runs) == len(set(runs)), "answers of one group in a bin are neighbours"
            saved += sum(prompts[i] + answers[i] for i in b) - bin_tokens(b, names, prompts, answers)
        assert tokens_saved(bins, names, prompts) == saved


@settings(deadline=None)
@given(GROUPS)
def test_a_group_that_fits_is_never_split(groups):
    names, prompts, answers = lists(groups)
    bins = share_bins(names, prompts, answers, 200)
    assert len({(names[i], n) for n, b in enumerate(bins) for i in b}) == len(set(names))


@settings(deadline=None)
@given(GROUPS.filter(bool))
def test_positions_predecessors_and_spans_follow_the_sequences(groups):
    names, prompts, answers = lists(groups)
    layout = lay_out(names, prompts, answers)
    assert sum(layout.lengths) == layout.num_tokens == bin_tokens(range(len(names)), names, prompts, answers)
    where = [p for start, n in zip(layout.starts, layout.lengths) for p in range(start, start + n)]
    before = layout.predecessors()
    keys = {i for (a, b), _ in layout.spans() for i in range(a, b)}
    assert keys | {i for _, (a, b) in layout.spans() for i in range(a, b)} == set(range(layout.num_tokens))
    for place, position in enumerate(where):
        if position == 0:
            assert before[place] == place
            assert place in keys
        else:
            assert where[before[place]] == position - 1, "the token before it in its sequence"
    for (first, end), (start, _) in layout.spans():
        assert end == start
        assert before[start] == end - 1
        assert where[first:end] == list(range(end - first))


def test_one_group_by_hand() -> None:
    layout = lay_out("aab", [3, 3, 2], [2, 1, 1])
    assert layout.lengths == (3, 2, 1, 2, 1)
    assert layout.owners == (-1, 0, 1, -1, 2)
    assert layout.starts == (0, 3, 3, 0, 2)
    assert layout.predecessors() == [0, 0, 1, 2, 3, 2, 6, 6, 7]
    assert layout.spans() == (((0, 3), (3, 6)), ((6, 8), (8, 9)))
    assert (layout.prompts, layout.answers) == ((3, 2), (3, 1))
    assert share_bins("aaa", [4, 4, 4], [4, 4, 4], 12) == [(0, 1), (2,)], "the prompt again in a second bin"


def test_shares_are_all_used() -> None:
    """One group of eight on four ranks: cut into even parts, not given to one rank."""
    dealt = deal_and_share([0] * 8, [10] * 8, [10] * 8, 1000, 4)
    assert [sum(map(len, own)) for own in dealt] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("prompts", "answers", "words"),
    [([3, 2], [1, 1], "prompts of"), ([0, 0], [1, 1], "both need tokens"), ([3, 3], [1, 0], "both need tokens")],
)
def test_impossible_groups_are_told(prompts, answers, words) -> None:
    with pytest.raises(LayoutError, match=words):
        lay_out("aa", prompts, answers)


def test_an_answer_that_fits_no_bin_is_told() -> None:
    with pytest.raises(LayoutError, match="do not fit into 12"):
        share_bins("aa", [8, 8], [2, 5], 12)
