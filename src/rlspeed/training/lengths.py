"""Answer lengths of benchmarks: drawn from the answer's own seed, so that weights and precision cannot change them."""

from __future__ import annotations

import math
from typing import Literal

from rlspeed.training.seeds import seed_of

FixedLengths = Literal["none", "whole", "uniform", "long_tail"]

# of the log-normal: its median as a share of the limit, and the standard deviation of the logarithm. One answer in
# about 27 runs into the limit and the mean is a quarter of it, as with models that reason
MEDIAN, SIGMA = 1.0 / 6.0, 1.0


def fixed_length(kind: FixedLengths, seed: int, limit: int) -> int | None:
    """Tokens of the answer with this seed, from 1 to `limit`; None where its own end decides."""
    if kind == "none":
        return None
    if kind == "whole":
        return limit
    if kind == "uniform":
        return 1 + seed_of(seed, 0) % limit
    drawn = limit * MEDIAN * math.exp(SIGMA * _normal(seed))
    return max(1, min(limit, round(drawn)))


def _normal(seed: int) -> float:
    """A standard normal number (Box and Muller 1958)."""
    first, second = ((seed_of(seed, i) + 1) / ((1 << 63) + 1) for i in (1, 2))
    return math.sqrt(-2.0 * math.log(first)) * math.cos(2.0 * math.pi * second)
