"""The figures in docs/design/resharding.md are what docs/resharding_figures.py computes, and right where known."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rlspeed.planning.transition import interval_generation, received_bytes

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    """docs/resharding_figures.py as a module."""
    spec = importlib.util.spec_from_file_location("resharding_figures", ROOT / "docs" / "resharding_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["one node", "four ranks", "llama in nodes"])
def test_tables_of_the_note(figures: ModuleType, name: str) -> None:
    assert figures.stated(name) == figures.as_table(figures.TABLES[name]())


def test_several_nodes(figures: ModuleType) -> None:
    """All rows but the two that take the planner 9 s each: cut over 1,024 ranks."""
    lines = figures.stated("several nodes").splitlines()
    wanted = figures.as_table(figures.several_nodes(most=64)).splitlines()
    left_out = [line for line in lines if line.startswith("| 1,024 | 1024 | aligned")]
    assert len(left_out) == 2
    assert [line for line in lines if line not in left_out] == wanted


@pytest.mark.slow
def test_cut_over_a_thousand_ranks(figures: ModuleType) -> None:
    assert figures.stated("several nodes") == figures.as_table(figures.several_nodes())


def test_plans_have_the_formulae_s_bytes(figures: ModuleType) -> None:
    """Aligned at intervals M / tg (1 - tg / N), but for whole norms; all of a rank's slice between neighbours of 64."""
    size = 2 * figures.QWEN.num_params / 1e9
    for ranks in (8, 64):
        got = figures.cost(figures.Case(shape=figures.QWEN, tp=4, ranks=ranks, cut=ranks, how="intervals"))
        assert got.received == pytest.approx(size / 4 * (1 - 4 / ranks), rel=1e-3)
    apart = figures.cost(figures.Case(shape=figures.QWEN, tp=4, ranks=64, cut=64, how="neighbours"))
    assert apart.crossed == pytest.approx(size / 4, rel=0.01)
    assert apart.milliseconds == pytest.approx(1e3 * apart.crossed / 50, rel=0.01)


def test_the_counted_bytes_are_the_plans(figures: ModuleType) -> None:
    """`received_bytes`, which makes no plan, beside the plans of the script."""
    case = figures.Case(shape=figures.QWEN, tp=4, ranks=64, cut=64, how="intervals")
    train, _ = case.meshes()
    counted = received_bytes(figures.QWEN, train, interval_generation(train, 4), aligned=True)
    assert max(counted.values()) / 1e9 == pytest.approx(figures.cost(case).received, rel=1e-9)


def test_the_picture_is_drawn(figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cost that takes no planner; the real one is in docs/images."""
    monkeypatch.setattr(figures, "cost", lambda case: figures.Cost(received=1.0, crossed=0.0, milliseconds=2.0))
    figures.draw(tmp_path / "resharding.png")
    assert (tmp_path / "resharding.png").read_bytes().startswith(b"\x89PNG")
    assert (ROOT / "docs" / "images" / "resharding.png").is_file()
