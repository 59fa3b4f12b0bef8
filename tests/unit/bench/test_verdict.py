"""What a spread can tell."""

from __future__ import annotations

import math

import pytest

from rlspeed.bench.record import Value
from rlspeed.bench.verdict import judge, rank_quantile, ratio_interval, student_t


def value(*samples: float) -> Value:
    return Value(unit="s", samples=samples)


def test_rep_03_fewer_than_three_measured_steps_give_no_verdict() -> None:
    """rep-03: however far apart they are; three are enough."""
    few = judge(value(10.0, 10.1), value(1.0, 1.1), more_is_better=False)
    assert (few.call, few.low) == ("too few steps", None)
    assert few.ratio == pytest.approx(0.1045, abs=1e-4)
    assert judge(value(10.0, 10.1, 9.9), value(1.0, 1.1, 1.05), more_is_better=False).call == "better"


@pytest.mark.parametrize(("more", "call"), [(True, "worse"), (False, "better")])
def test_direction(more: bool, call: str) -> None:
    assert judge(value(2.0, 2.1, 1.9), value(1.0, 1.1, 0.9), more_is_better=more).call == call


def test_what_the_spread_hides_cannot_be_told() -> None:
    wide = judge(value(1.0, 2.0, 3.0), value(1.2, 2.4, 3.3), more_is_better=False)
    assert wide.call == "cannot tell"
    assert wide.low is not None
    assert wide.high is not None
    assert wide.low < 1.0 < wide.high
    tiny = judge(value(1.0, 1.0, 1.0), value(1.01, 1.01, 1.01), more_is_better=False)
    assert tiny.call == "cannot tell", "under two percent nothing is told"
    assert judge(value(5.0, 5.0, 5.0), value(5.0, 5.0, 5.0), more_is_better=False).call == "same"


def test_zeros_have_no_ratio_and_a_verdict_all_the_same() -> None:
    gone = judge(value(7.0, 8.0, 9.0), value(0.0, 0.0, 0.0), more_is_better=False)
    assert (gone.call, gone.ratio) == ("better", 0.0)
    come = judge(value(0.0, 0.0, 0.0), value(7.0, 8.0, 9.0), more_is_better=False)
    assert (come.call, come.ratio) == ("worse", None)
    assert judge(value(0.0, 1.0, 0.0), value(1.0, 1.0, 2.0), more_is_better=False).call == "cannot tell"


def test_three_samples_take_welchs_interval() -> None:
    """Worked by hand: logs -h, 0, h and 1-h, 1, 1+h; variance h^2 each, standard error h sqrt(2/3), 4 degrees."""
    h = 0.1
    low, high = ratio_interval([math.exp(x) for x in (-h, 0, h)], [math.exp(1 + x) for x in (-h, 0, h)])
    half = 2.776 * h * math.sqrt(2 / 3)
    assert (math.log(low), math.log(high)) == pytest.approx((1 - half, 1 + half))


def test_one_slow_step_among_many_decides_nothing() -> None:
    """Twelve steps of about 2 s and twelve of about 1 s, one of which took 29 s: its process is faster all the same."""
    slow = value(*(2.0 + 0.01 * i for i in range(12)))
    fast = value(*(1.0 + 0.01 * i for i in range(11)), 29.0)
    assert judge(slow, fast, more_is_better=False).call == "better"
    assert judge(slow, value(*slow.samples[:-1], 29.0), more_is_better=False).call == "cannot tell"


def test_quantiles_of_mann_and_whitneys_u() -> None:
    """R's qwilcox(0.025, n, m): published tables give the critical values 0 for 4 x 4, 2 for 5 x 5, 37 for 12 x 12."""
    assert [rank_quantile(n, m) for n, m in ((3, 3), (3, 4), (3, 5), (4, 4), (5, 5), (12, 12))] == [0, 0, 1, 1, 3, 38]
    exact, approximate = rank_quantile(20, 20), 20 * 20 / 2 - 1.96 * math.sqrt(400 * 41 / 12)
    assert abs(exact - approximate) < 2
    assert rank_quantile(30, 30) == math.ceil(450 - 1.96 * math.sqrt(900 * 61 / 12))
    assert rank_quantile(7, 4) == rank_quantile(4, 7)


def test_the_interval_is_that_of_ordered_differences() -> None:
    """Five beside five: the third smallest and the third largest of the 25 differences of logarithms."""
    a, b = [1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 5.0, 7.0, 11.0]
    ratios = sorted(y / x for x in a for y in b)
    assert ratio_interval(a, b) == pytest.approx((ratios[2], ratios[-3]))


def test_students_t() -> None:
    """Scipy's stats.t.ppf(0.975, df) at the table's ends and between its points."""
    for freedom, wanted in ((1.0, 12.706), (0.5, 12.706), (7.0, 2.365), (12.0, 2.179), (45.0, 2.014), (1e9, 1.960)):
        assert student_t(freedom) == pytest.approx(wanted, abs=0.004)
