"""A reward that costs nothing and says nothing: a number drawn from the answer's text."""

from __future__ import annotations

import zlib


def noise(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """Uniform in [0, 1), the same for the same answer."""
    return zlib.crc32(solution_str.encode()) / 2**32
