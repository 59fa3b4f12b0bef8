from __future__ import annotations

import pytest
import torch

from rlspeed.algorithms import segments
from rlspeed.errors import LayoutError


def test_whiten_reference(case):
    c = case("masked_whiten/basic")
    values, mask = torch.tensor(c.input["values"]), torch.tensor(c.input["mask"]).bool()
    chosen = values[mask]
    count, total = segments.count_and_sum(chosen)
    c.close(total / count, "mean")
    square = segments.centred_square_sum(chosen, total / count)
    c.close(segments.unbiased_variance(square, count), "var_unbiased")
    c.close(segments.whiten(values, mask), "whitened")
    c.close(segments.whiten(values, mask, shift=False), "whitened_no_shift")


def test_whiten_ignores_nan_outside_of_the_mask(case):
    c = case("masked_whiten/basic")
    values, mask = torch.tensor(c.input["values"]), torch.tensor(c.input["mask"]).bool()
    values[~mask] = torch.nan
    c.close(segments.whiten(values, mask), "whitened")


def test_whiten_of_one_value():
    """One value has no variance: refused when strict, 0 (or itself) in training, never inf."""
    values, mask = torch.tensor([3.0, 7.0]), torch.tensor([True, False])
    with pytest.raises(ValueError, match="at least two"):
        segments.whiten(values, mask, strict=True)
    assert segments.whiten(values, mask).tolist() == [0.0, 0.0]
    assert segments.whiten(values, mask, shift=False).tolist() == [3.0, 0.0]
    assert segments.whiten(torch.tensor([])).tolist() == []


def test_num_13_mean_and_variance_use_the_same_mask():
    """num-13: a mean over all slots would give 1, not 2."""
    out = segments.whiten(torch.tensor([1.0, 3.0, 0.0, 0.0]), torch.tensor([1, 1, 0, 0]))
    torch.testing.assert_close(out, torch.tensor([-0.70710678, 0.70710678, 0.0, 0.0]))


@pytest.mark.parametrize("seed", range(5))
def test_whitening_in_parts_equals_the_whole(seed):
    """num-14: statistics added over ranks, one of them without any value, are those of all values."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(50, generator=generator) * 3 + 100
    cuts = torch.randint(0, 51, (3,), generator=generator).sort().values.tolist()
    parts = [*torch.tensor_split(values, cuts), torch.tensor([])]
    first = [segments.count_and_sum(p) for p in parts]
    count, mean = sum(n for n, _ in first), sum(s for _, s in first) / 50
    variance = segments.unbiased_variance(sum(segments.centred_square_sum(p, mean) for p in parts), count)
    out = torch.cat([segments.standardise(p, mean, variance) for p in parts])
    torch.testing.assert_close(out, segments.whiten(values), atol=1e-6, rtol=0)
    assert float(out.mean().abs()) < 1e-5
    assert float(out.std()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("seed", range(10))
def test_sums_and_means_equal_a_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (8,), generator=generator)
    ids = torch.repeat_interleave(torch.arange(8), lengths)
    values = torch.randn(ids.numel(), generator=generator)
    sums, means = segments.segment_sum(values, ids, 8), segments.segment_mean(values, ids, 8)
    for s, n in enumerate(lengths.tolist()):
        part = values[ids == s]
        assert float(sums[s]) == pytest.approx(float(part.double().sum()), abs=1e-6)
        assert float(means[s]) == pytest.approx(float(part.double().mean()) if n else 0.0, abs=1e-6)
    assert segments.segment_lengths(ids, 8).tolist() == lengths.tolist()
    want_last = [int((ids == s).nonzero().max()) for s, n in enumerate(lengths.tolist()) if n]
    assert segments.last_index(ids).tolist() == want_last


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 1.0])
def test_scan_equals_a_loop(decay):
    generator = torch.Generator().manual_seed(0)
    ids = torch.repeat_interleave(torch.arange(7), torch.tensor([1, 9, 0, 4, 33, 2, 16]))
    values = torch.randn(ids.numel(), generator=generator)
    want = values.double().clone()
    for t in range(ids.numel() - 2, -1, -1):
        if ids[t] == ids[t + 1]:
            want[t] += decay * want[t + 1]
    torch.testing.assert_close(segments.suffix_scan(values, ids, decay), want.float())


def test_streams_that_do_not_belong_together_are_refused():
    ids = torch.tensor([0, 0, 1])
    with pytest.raises(LayoutError, match="beside 3 segment ids"):
        segments.segment_sum(torch.ones(2), ids, 2)
    with pytest.raises(LayoutError, match="must rise"):
        segments.segment_sum(torch.ones(3), torch.tensor([0, 1, 0]), 2)
    with pytest.raises(LayoutError, match="at most 0"):
        segments.segment_sum(torch.ones(3), ids, 1)
    with pytest.raises(LayoutError, match="int64"):
        segments.segment_sum(torch.ones(3), ids.int(), 2)


def test_empty_stream():
    none = torch.zeros(0, dtype=torch.int64)
    assert segments.segment_sum(torch.ones(0), none, 3).tolist() == [0.0, 0.0, 0.0]
    assert segments.segment_mean(torch.ones(0), none, 0).tolist() == []
    assert segments.last_index(none).tolist() == []
    assert segments.suffix_scan(torch.ones(0), none, 1.0).tolist() == []


def test_mask_from_end(case):
    c = case("mask/from_eos")
    mask = segments.mask_from_end(torch.tensor(c.input["response"]), c.input["eos"])
    c.close(mask, "mask")


def test_bf16_values_are_summed_exactly(case):
    """dtype/bf16_accumulation: a bf16 accumulator stalls at 4.0; every reduction here sums in fp32 or more."""
    c = case("dtype/bf16_accumulation")
    values = torch.full((c.input["n"],), c.input["x"], dtype=torch.bfloat16)
    naive = torch.zeros((), dtype=torch.bfloat16)
    for v in values:
        naive = naive + v
    c.close(naive, "bf16_sum")
    exact = float(values[0]) * values.numel()
    ids = torch.zeros(values.numel(), dtype=torch.int64)
    assert exact == pytest.approx(c.expected["exact"], rel=4e-3)
    assert float(segments.segment_sum(values, ids, 1)[0]) == pytest.approx(exact, rel=1e-7)
    assert segments.count_and_sum(values)[1] == pytest.approx(exact, rel=1e-12)
    assert float(segments.suffix_scan(values, ids, 1.0)[0]) == pytest.approx(exact, rel=1e-7)
