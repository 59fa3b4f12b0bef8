"""The figures in docs/design/resharding.md are what the planner says."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from rlspeed.planning.layout import Mesh
from rlspeed.planning.reshard import TensorRequest, plan_reshard
from rlspeed.planning.shape import ModelShape, WeightShape
from rlspeed.planning.transition import (
    GenerationMesh,
    generation_layout,
    interval_generation,
    own_generation,
    received_bytes,
    training_layout,
)

NOTE = Path(__file__).parents[3] / "docs" / "design" / "resharding.md"
SHAPE = ModelShape(
    family="qwen2",
    hidden=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    intermediate=18944,
    vocab=152064,
    qkv_bias=True,
)


def rows(heading: str) -> list[list[str]]:
    """Cells of the table whose first column is `heading`."""
    text = NOTE.read_text().partition(f"| {heading} |")[2].partition("\n\n")[0]
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def planned(train: Mesh, generation: GenerationMesh) -> tuple[float, float]:
    """GB received by the busiest rank, and those from other nodes, in plans of each kind of weight."""
    received: Counter[int] = Counter()
    crossed: Counter[int] = Counter()
    for (shape, dim, heads), count in Counter((w.shape, w.tp_dim, w.heads) for w in SHAPE.weights()).items():
        weight = WeightShape(name="w", shape=shape, tp_dim=dim, heads=heads)
        src, dst = training_layout(weight, train, aligned=True), generation_layout(weight, generation)
        request = TensorRequest(name="w", shape=shape, wire_dtype="bf16", src=src, dst=dst)
        for (a, b), size in plan_reshard([request], ranks_per_node=8).bytes_by_pair().items():
            received[b] += count * size
            crossed[b] += count * size * (a // 8 != b // 8)
    return max(received.values()) / 1e9, max(crossed.values()) / 1e9


def test_several_nodes() -> None:
    """All rows but the two that take the planner half a minute (1,024 ranks cut over 1,024), which are counted."""
    found = rows("devices")
    assert len(found) == 9
    for devices, cut, groups, gb, other in found:
        ranks, shards = int(devices), int(cut.split(",")[0])
        train = Mesh.of(range(ranks), dp_replicate=ranks // shards, dp_shard=shards, tp=1)
        make = interval_generation(train, 4) if groups == "intervals" else own_generation(tuple(range(ranks)), 4)
        if shards > 64:
            assert max(received_bytes(SHAPE, train, make, aligned=True).values()) / 1e9 == pytest.approx(
                float(gb), abs=0.005
            )
        else:
            assert planned(train, make) == pytest.approx((float(gb), float(other)), abs=0.005)


def test_one_node() -> None:
    found = rows("generation tp")
    assert len(found) == 3
    train = Mesh.of(range(8), dp_shard=8, tp=1)
    for tp, *cells in found:
        at, own = interval_generation(train, int(tp)), own_generation(tuple(range(8)), int(tp))
        ways = ((at, True), (at, False), (own, True))
        values = [max(received_bytes(SHAPE, train, g, aligned=a).values()) / 1e9 for g, a in ways]
        values.append(4 * SHAPE.num_params * 7 / 8 / 1e9)
        assert [float(c) for c in cells] == pytest.approx(values, abs=0.006)


def test_the_figures_in_the_text() -> None:
    text = re.sub(r"\s+", " ", NOTE.read_text())
    four = Mesh.of(range(4), dp_shard=4, tp=1)
    two = Mesh.of(range(4), dp_shard=2, tp=2)
    for train, words in ((four, "FSDP2(4) to TP(4) receives 0 bytes aligned and 0.85 GB"), (two, "0 and 0.57 GB")):
        aligned = received_bytes(SHAPE, train, interval_generation(train, 4), aligned=True)
        default = received_bytes(SHAPE, train, interval_generation(train, 4), aligned=False)
        assert set(aligned.values()) == {0}
        assert f"{max(default.values()) / 1e9:.2f} GB" in words
        assert words in text
