"""Reductions over response streams: sums and means per segment, moments, whitening; fp64 inside, fp32 out.

A stream is a flat [N] tensor of the tokens that train; `segment_ids` [N] int64, nondecreasing in 0..num_segments-1,
says which sequence each one belongs to. Segments may be empty (a fully masked sequence has no token here).
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from rlspeed.errors import LayoutError

WHITEN_EPS = 1e-8


def check_stream(segment_ids: Tensor, num_segments: int, *streams: Tensor) -> None:
    """Refuse streams that do not belong together; the ids themselves are looked at on CPU only (no device wait).

    Raises:
        LayoutError: unequal shapes, ids that are not int64, fall or leave 0..num_segments-1.
    """
    if segment_ids.ndim != 1 or segment_ids.dtype != torch.int64:
        raise LayoutError(f"segment_ids: {tuple(segment_ids.shape)} {segment_ids.dtype}, must be [N] int64")
    bad = [tuple(s.shape) for s in streams if s.shape != segment_ids.shape]
    if bad:
        raise LayoutError(f"streams {bad} beside {segment_ids.numel()} segment ids")
    if segment_ids.device.type != "cpu" or segment_ids.numel() == 0:
        return
    if int(segment_ids[0]) < 0 or int(segment_ids[-1]) >= num_segments or bool((segment_ids.diff() < 0).any()):
        raise LayoutError(f"segment_ids must rise from 0 to at most {num_segments - 1}")


def segment_bounds(segment_ids: Tensor, num_segments: int) -> Tensor:
    """Offsets [num_segments + 1] int64: segment s is tokens offsets[s]..offsets[s+1]-1 of the stream."""
    edges = torch.arange(num_segments + 1, device=segment_ids.device)
    return torch.searchsorted(segment_ids.contiguous(), edges)


def segment_lengths(segment_ids: Tensor, num_segments: int) -> Tensor:
    """Tokens of each segment [num_segments] int64."""
    return segment_bounds(segment_ids, num_segments).diff()


def segment_sum(values: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Sum of `values` [N] over each segment [num_segments] fp32; 0 for an empty one. The order of addition is fixed."""
    check_stream(segment_ids, num_segments, values)
    if num_segments == 0:
        return values.new_zeros(0, dtype=torch.float32)
    lengths = segment_lengths(segment_ids, num_segments)
    sums = torch.segment_reduce(values.double(), "sum", lengths=lengths, axis=0, unsafe=True, initial=0.0)
    return sums.float()


def segment_mean(values: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Mean of `values` [N] over each segment [num_segments] fp32; 0 for an empty one."""
    lengths = segment_lengths(segment_ids, num_segments)
    return segment_sum(values, segment_ids, num_segments) / lengths.clamp(min=1)


def last_index(segment_ids: Tensor) -> Tensor:
    """Position in the stream of the last token of each segment that has one, in order [<= num_segments] int64."""
    if segment_ids.numel() == 0:
        return segment_ids.new_zeros(0)
    ends = torch.ones_like(segment_ids, dtype=torch.bool)
    ends[:-1] = segment_ids[1:] != segment_ids[:-1]
    return ends.nonzero(as_tuple=True)[0]


def suffix_scan(values: Tensor, segment_ids: Tensor, decay: float) -> Tensor:
    """y_t = values_t + decay * y_{t+1} within each segment [N] fp32, in log2(N) vector steps (recursive doubling).

    After the step of width w, y_t holds the terms t..t+2w-1 of its segment.
    """
    out = values.double()
    width, factor = 1, float(decay)
    while width < out.numel() and factor != 0.0:
        same = segment_ids[:-width] == segment_ids[width:]
        out = torch.cat([out[:-width] + torch.where(same, factor * out[width:], 0.0), out[-width:]])
        width, factor = 2 * width, factor * factor
    return out.float()


def count_and_sum(values: Tensor) -> tuple[int, float]:
    """Number of values and their sum in fp64: first half of whitening, to be added over ranks."""
    return values.numel(), float(values.double().sum())


def centred_square_sum(values: Tensor, mean: float) -> float:
    """Sum of (values - mean)^2 in fp64: second half of whitening, to be added over ranks."""
    return float((values.double() - mean).square().sum())


def unbiased_variance(square_sum: float, count: float) -> float:
    """square_sum / (count - 1); 0 for fewer than two values, so that a lone token whitens to 0 and never to inf."""
    return square_sum / (count - 1.0) if count > 1 else 0.0


def standardise(values: Tensor, mean: float, variance: float, *, shift: bool = True) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8) in fp32, any shape; shift=False adds the mean back."""
    out = (values.double() - mean) / math.sqrt(variance + WHITEN_EPS)
    return (out if shift else out + mean).float()


def whiten(values: Tensor, mask: Tensor | None = None, *, shift: bool = True, strict: bool = False) -> Tensor:
    """Mean 0 and unbiased variance 1 over `values` (any shape) of this process; for several ranks use the parts above.

    mask: bool, the same shape; only values under it count, whatever stands elsewhere (NaN too), and the result is 0
    there. One single value whitens to 0 (its mean with shift=False); none gives zeros.

    Raises:
        ValueError: strict, and fewer than two values: their variance is not defined.
    """
    chosen = values if mask is None else values[mask.bool()]
    count, total = count_and_sum(chosen)
    if strict and count < 2:
        raise ValueError(f"whitening {count} value(s): the variance needs at least two")
    mean = total / max(count, 1)
    variance = unbiased_variance(centred_square_sum(chosen, mean), count)
    out = standardise(chosen, mean, variance, shift=shift)
    if mask is None:
        return out
    full = torch.zeros(values.shape, dtype=torch.float32, device=values.device)
    full[mask.bool()] = out
    return full


def mask_from_end(tokens: Tensor, end_ids: Collection[int]) -> Tensor:
    """True up to and including the first token of `end_ids` in each row; tokens [..., R] integer, result bool."""
    is_end = torch.isin(tokens, torch.tensor(sorted(end_ids), dtype=tokens.dtype, device=tokens.device)).long()
    ends_before: Tensor = is_end.cumsum(-1) - is_end
    return ends_before.eq(0)
