"""What a file's lengths say: how long rows are, what padding would cost, which limits to choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from rlspeed.data.atomic import atomic_file
from rlspeed.data.files import DataFile, FaultLog
from rlspeed.data.measure import Progress, measure, no_progress
from rlspeed.data.render import PromptRenderer
from rlspeed.data.tables import open_tables
from rlspeed.data.token_rows import has_ids, measure_ids
from rlspeed.errors import DataError, Fault
from rlspeed.planning.packing import pack

CAPACITIES = (4096, 8192, 16384, 32768, 65536, 131072)
GOOD_FILL = 0.99
ROUND_TO = 64
_PACK_SAMPLE = 200_000

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """Tokens that are computed but are no data, for one way of batching. share: of all tokens computed."""

    name: str
    tokens: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Lengths in tokens of `rows` rows. suggestions: `max_prompt_length`, `max_length`, `capacity`, each None without
    rows; over: rows above the suggested limit."""

    rows: int = 0
    tokens: int = 0
    min: int = 0
    mean: float = 0.0
    median: int = 0
    p95: int = 0
    p99: int = 0
    max: int = 0
    waste: tuple[Waste, ...] = ()
    max_prompt_length: int | None = None
    max_length: int | None = None
    capacity: int | None = None
    over: int = 0
    sampled: bool = False
    notes: tuple[str, ...] = ()


def quantile(lengths: Lengths, share: float) -> int:
    """The smallest length that at least `share` of the rows do not exceed."""
    ordered = np.sort(lengths)
    return int(ordered[max(0, math.ceil(share * len(ordered)) - 1)])


def summarise(lengths: Lengths, *, batch_size: int, response_tokens: int, notes: Sequence[str] = ()) -> Stats:
    """Everything about lengths [N] (all at least 1) that the table shows.

    batch_size: rows that are padded to each other. response_tokens: room for the answer that max_length adds to a
    prompt; 0 when rows are whole sequences.

    The suggestion is the 95th percentile, rounded up to a multiple of 64, plus the room for the answer: a twentieth of
    the rows pays for it by being cut or dropped, and no padding or memory is planned for the rare long ones.
    """
    if not len(lengths):
        return Stats(notes=tuple(notes))
    p95 = quantile(lengths, 0.95)
    prompt = min(_round_up(p95), int(lengths.max())) if response_tokens else _round_up(p95)
    limit = prompt + response_tokens
    kept = lengths[lengths <= prompt]
    sample = kept
    if len(kept) > _PACK_SAMPLE:
        sample = np.random.RandomState(0).choice(kept, _PACK_SAMPLE, replace=False)
    capacity, fill = _capacity(sample, limit)
    tokens = int(lengths.sum())
    waste = (
        _waste("padded to the longest row", len(lengths) * int(lengths.max()), tokens),
        _waste(f"padded in batches of {batch_size}, input order", _padded(lengths, batch_size), tokens),
        _waste(f"padded in batches of {batch_size}, sorted", _padded(np.sort(lengths), batch_size), tokens),
        _waste(f"packed into bins of {capacity:,}", round(int(kept.sum()) / fill), int(kept.sum())),
    )
    return Stats(
        rows=len(lengths),
        tokens=tokens,
        min=int(lengths.min()),
        mean=tokens / len(lengths),
        median=quantile(lengths, 0.5),
        p95=p95,
        p99=quantile(lengths, 0.99),
        max=int(lengths.max()),
        waste=waste,
        max_prompt_length=prompt,
        max_length=limit,
        capacity=capacity,
        over=len(lengths) - len(kept),
        sampled=len(sample) < len(kept),
        notes=tuple(notes),
    )


def measure_files(
    files: Sequence[DataFile],
    renderer: PromptRenderer | None,
    prompt_key: str,
    bad_rows: Literal["error", "drop"],
    progress: Progress = no_progress,
) -> tuple[Lengths, bool, tuple[str, ...]]:
    """Lengths of all usable rows, whether rows are whole sequences of ids, and what there is to say.

    Raises:
        DataError: input that cannot be used.
    """
    tables, log = open_tables(files), FaultLog()
    whole = has_ids(tables)
    if whole:
        measured = measure_ids(tables, log, progress)
    elif renderer is None:
        found = "the files hold no input_ids, and there is no tokenizer to make them"
        raise DataError(Fault(where="--tokenizer", found=found, fix="name the tokenizer's directory"))
    else:
        measured = measure(tables, renderer, prompt_key, log, progress)
    if bad_rows == "error":
        measured.bad.report(log, fix="mend or remove the rows, or use --bad-rows drop")
    log.raise_if_any()
    left_out = len(measured.bad_index)
    notes = (f"{left_out:,} rows without a usable prompt are not counted",) if left_out else ()
    return measured.lengths[measured.lengths > 0].astype(np.int64), whole, notes


def histogram(lengths: Lengths, bins: int = 20) -> tuple[list[int], list[float]]:
    """Counts and the edges between them; lengths over 1 at ratio 20 and more get edges that grow geometrically."""
    low, high = int(lengths.min()), int(lengths.max())
    if high == low:
        return [len(lengths)], [low, low + 1]
    count = min(bins, high - low + 1)
    edges = np.linspace(low, high + 1, count + 1)
    if high / max(low, 1) >= 20:
        edges = np.geomspace(max(low, 1), high + 1, count + 1)
    edges = np.unique(np.ceil(edges))
    counts, _ = np.histogram(lengths, edges)
    return counts.tolist(), edges.tolist()


def bars(lengths: Lengths, width: int = 50, bins: int = 20) -> list[str]:
    """The histogram as lines of text: range, bar, rows."""
    counts, edges = histogram(lengths, bins)
    most = max(counts)
    digits = len(f"{int(edges[-1]) - 1:,}")
    lines = []
    for count, low, high in zip(counts, edges, edges[1:]):
        bar = "#" * max(round(width * count / most), 1 if count else 0)
        last = int(high) - 1
        lines.append(f"{int(low):>{digits},} - {last:>{digits},}  {bar:<{width}} {count:,}")
    return lines


def draw(lengths: Lengths, stats: Stats, target: Path) -> None:
    """The histogram as a PNG, with the quantiles marked.

    Raises:
        DataError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    counts, edges = histogram(lengths, 60)
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    axes.stairs(counts, edges, fill=True, color="#4c78a8", alpha=0.85)
    if edges[-1] / max(edges[0], 1) >= 20:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda v, _: f"{int(v):,}"))
        axes.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    marks = (("median", stats.median, "#222222"), ("P95", stats.p95, "#d95f02"), ("P99", stats.p99, "#a50f15"))
    for name, value, colour in marks:
        axes.axvline(value, color=colour, linewidth=1.2, linestyle="--", label=f"{name}: {value:,}")
    axes.set_xlabel("tokens per row")
    axes.set_ylabel("rows")
    axes.set_title(f"{stats.rows:,} rows, {stats.tokens:,} tokens, longest {stats.max:,}", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda v, _: f"{int(v):,}"))
    axes.legend(frameon=False)
    figure.tight_layout()
    with atomic_file(target) as path:
        figure.savefig(path, format="png")
    plt.close(figure)


def _round_up(value: int) -> int:
    return -(-value // ROUND_TO) * ROUND_TO


def _padded(lengths: Lengths, batch_size: int) -> int:
    """Tokens computed when consecutive batches are padded to their longest row."""
    return sum(int(part.max()) * len(part) for part in np.split(lengths, range(batch_size, len(lengths), batch_size)))


def _waste(name: str, computed: int, tokens: int) -> Waste:
    return Waste(name=name, tokens=computed - tokens, share=(computed - tokens) / computed if computed else 0.0)


def _capacity(lengths: Lengths, limit: int) -> tuple[int, float]:
    """The smallest usual capacity that holds the limit and is filled well, with its fill; else the fullest one."""
    best = (max(limit, CAPACITIES[0]), 0.0)
    for capacity in [c for c in CAPACITIES if c >= limit] or [_round_up(limit)]:
        fill = pack(lengths.tolist(), capacity).fill
        if fill >= GOOD_FILL:
            return capacity, fill
        if fill > best[1]:
            best = (capacity, fill)
    return best
