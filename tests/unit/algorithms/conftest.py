"""The numeric cases of tests/conformance and the way from padded [B, R] arrays with a mask to response streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

CASES = Path(__file__).parents[2] / "conformance" / "cases.json"


@dataclass(frozen=True)
class Case:
    """One numeric case: its inputs, the expected values and the absolute tolerance that they are known to."""

    input: dict[str, Any]
    expected: dict[str, Any]
    abs_tol: float

    def close(self, found: torch.Tensor | float, name: str) -> None:
        """Assert that `found` is the expected value `name`."""
        self.close_to(found, self.expected[name], name)

    def close_to(self, found: torch.Tensor | float, expected: Any, name: str = "") -> None:
        """Assert that `found` is `expected` within the case's tolerance, shape included."""
        want = torch.as_tensor(expected, dtype=torch.float64)
        have = torch.as_tensor(found).detach().double()
        assert have.shape == want.shape, f"{name}: shape {tuple(have.shape)}, expected {tuple(want.shape)}"
        worst = float((have - want).abs().max())
        assert worst <= self.abs_tol, f"{name}: off by {worst:.3g}, allowed {self.abs_tol:g}\n{have}\n{want}"


@dataclass(frozen=True)
class Stream:
    """Padded [B, R] to flat [N] and back."""

    mask: torch.Tensor

    @property
    def ids(self) -> torch.Tensor:
        """Segment of each token [N]."""
        return self.mask.nonzero()[:, 0]

    @property
    def num(self) -> int:
        """Number of segments, the empty ones included."""
        return self.mask.shape[0]

    def flat(self, values: Any) -> torch.Tensor:
        """The masked-in values [N]."""
        return torch.as_tensor(values, dtype=torch.float32)[self.mask]

    def padded(self, flat: torch.Tensor) -> torch.Tensor:
        """[N] to [B, R] with zeros elsewhere."""
        out = torch.zeros(self.mask.shape)
        out[self.mask] = flat.detach().float()
        return out


@pytest.fixture(scope="session")
def case() -> Callable[[str], Case]:
    """Look a case up by its id."""
    rows = {c["id"]: c for c in json.loads(CASES.read_text())["cases"]}
    return lambda name: Case(rows[name]["input"], rows[name]["expected"], rows[name]["abs_tol"])


@pytest.fixture(scope="session")
def stream() -> Callable[[Any], Stream]:
    """A mask of 0 and 1 as a Stream."""
    return lambda mask: Stream(torch.as_tensor(mask).bool())


@pytest.fixture(scope="session")
def groups() -> Callable[[list[str]], tuple[torch.Tensor, int]]:
    """Group names to ids and their number."""

    def of(names: list[str]) -> tuple[torch.Tensor, int]:
        known = sorted(set(names))
        return torch.tensor([known.index(n) for n in names]), len(known)

    return of
