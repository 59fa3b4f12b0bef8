"""Seeds of everything that is drawn, as a pure function of the run's seed and the place: nothing to save, nothing to
drift.
"""

from __future__ import annotations

MASK = (1 << 64) - 1


def seed_of(*parts: int) -> int:
    """A 63-bit seed from any integers, by splitmix64 steps (Steele, Lea and Flood 2014)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & MASK)) & MASK
        state = (state + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state >> 1
