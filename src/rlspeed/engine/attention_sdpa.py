"""Packed attention by torch's scaled_dot_product_attention: sequences of like length together, in a few calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Sequences computed in one call as rows of `width` tokens.

    index [rows * width] int64: token of the stream in each slot; slots past a row's end repeat the row's own last
    token. kept [tokens] int64: slots that hold a token, in order; None when all do. lengths [rows] int64.
    """

    width: int
    index: np.ndarray
    kept: np.ndarray | None
    lengths: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """All buckets of a pack; order [T] int64 brings the joined bucket outputs back into the order of the stream."""

    buckets: tuple[Bucket, ...]
    order: np.ndarray | None


def bucket_width(length: int) -> int:
    """The row width for a sequence: 1..8 exactly, then four widths to each doubling (at most a quarter of a row is
    spare)."""
    step = 1 << max(length.bit_length() - 3, 0)
    return -(-length // step) * step


@lru_cache(maxsize=16)
def plan_buckets(lengths: tuple[int, ...]) -> BucketPlan:
    """Sort sequences into rows of few widths. The same lengths are asked for by every layer, hence the cache."""
    sizes = np.asarray(lengths, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    widths = np.asarray([bucket_width(int(n)) for n in sizes])
    buckets = []
    streams = []
    for width in np.unique(widths):
        rows = np.nonzero(widths == width)[0]
        # a bucket is as wide as its longest row, so equal lengths have no spare slot
        width = int(sizes[rows].max())
        columns = np.arange(width)
        index = starts[rows, None] + np.minimum(columns, sizes[rows, None] - 1)
        holds = columns < sizes[rows, None]
        kept = None if holds.all() else np.nonzero(holds.reshape(-1))[0]
        buckets.append(Bucket(width=width, index=index.reshape(-1), kept=kept, lengths=sizes[rows]))
        streams.append(index[holds])
    joined = np.concatenate(streams)
    if np.array_equal(joined, np.arange(joined.size)):
        return BucketPlan(buckets=tuple(buckets), order=None)
    return BucketPlan(buckets=tuple(buckets), order=np.argsort(joined))


def run_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[int, ...],
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """`varlen_attention` on any device. q [T, Hq, D]; k, v [T, Hkv, D]; returns [T, Hq, D].

    Rows hold tokens of one sequence only, so nothing can cross a boundary. Slots past a row's end come after all real
    queries (causal) or are masked (not causal): their weight is exactly 0 and so is what flows back through them.
    """
    plan = plan_buckets(lengths)
    outputs = []
    for bucket in plan.buckets:
        whole = len(plan.buckets) == 1 and bucket.kept is None
        index = None if whole else torch.from_numpy(bucket.index).to(q.device)

        def rows(x: torch.Tensor, index: torch.Tensor | None = index, width: int = bucket.width) -> torch.Tensor:
            flat = x if index is None else x.index_select(0, index)
            return flat.reshape(-1, width, *flat.shape[1:]).transpose(1, 2)

        out = _attend(rows(q), rows(k), rows(v), bucket, causal=causal, window=window, scale=scale)
        flat = out.transpose(1, 2).flatten(0, 1)
        if bucket.kept is not None:
            flat = flat.index_select(0, torch.from_numpy(bucket.kept).to(q.device))
        outputs.append(flat)
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if plan.order is None:
        return joined
    return joined.index_select(0, torch.from_numpy(plan.order).to(q.device))


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bucket: Bucket, *, causal: bool, window: int | None, scale: float
) -> torch.Tensor:
    """q [B, Hq, L, D]; k, v [B, Hkv, L, D]; returns [B, Hq, L, D]."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.device.type != "cpu":
        # the memory-efficient CUDA kernel takes equal head counts only; with grouped heads torch would form [L, L]
        # scores
        repeats = q.shape[1] // k.shape[1]
        k, v, grouped = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1), False
    mask = _mask(bucket, causal=causal, window=window, device=q.device)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=grouped
    )


def _mask(bucket: Bucket, *, causal: bool, window: int | None, device: torch.device) -> torch.Tensor | None:
    """True where a query may look; None when `is_causal` or nothing says it all."""
    width = bucket.width
    banded = window is not None and window < width
    if causal and not banded:
        return None
    spare = not causal and bucket.kept is not None
    if not banded and not spare:
        return None
    place = torch.arange(width, device=device)
    mask = torch.ones(width, width, dtype=torch.bool, device=device)
    if banded:
        assert window is not None
        distance = place[:, None] - place[None, :]
        mask = (distance < window) & (distance >= (0 if causal else 1 - window))
    if spare:
        # a spare query may look at anything that is finite; letting it see itself keeps its row from being empty
        real = place[None, :] < torch.from_numpy(bucket.lengths).to(device)[:, None]
        mask = mask & real[:, None, :] | torch.eye(width, dtype=torch.bool, device=device)
        return mask[:, None]
    return mask
