"""Compute the figures of docs/design/resharding.md with the planner, and draw docs/images/resharding.png.

python docs/resharding_figures.py --write     # put the tables into the note and draw the picture (half a minute)
python docs/resharding_figures.py --check     # exit code 1 and the names of the tables that say something else

Every byte is counted in a plan that `plan_reshard` made, at the busiest rank. Times are lower bounds, bytes over the
bandwidth of an H100's links one way: 450 GB/s between the devices of a node (NVLink 4), 50 GB/s between nodes for each
device (400 Gb/s). Gathering everything is taken at its best: what comes from other nodes enters a node once, by all of
its links together.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlspeed.planning.layout import Layout, Mesh
from rlspeed.planning.reshard import TensorRequest, plan_reshard
from rlspeed.planning.shape import ModelShape, WeightShape
from rlspeed.planning.transition import (
    GenerationMesh,
    generation_layout,
    interval_generation,
    own_generation,
    training_layout,
)

DOCS = Path(__file__).resolve().parent
NOTE, PICTURE = DOCS / "design" / "resharding.md", DOCS / "images" / "resharding.png"
NODE = 8
IN_NODE, BETWEEN_NODES = 450e9, 50e9
QWEN = ModelShape(
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
LLAMA = ModelShape(
    family="llama", hidden=4096, layers=32, heads=32, kv_heads=32, head_dim=128, intermediate=11008, vocab=32000
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """GB into the busiest rank, of these from other nodes, and the milliseconds that the links need at least."""

    received: float
    crossed: float
    milliseconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way from training to generation. cut: over how many ranks; the others hold copies. how: of the groups."""

    shape: ModelShape
    tp: int
    ranks: int
    cut: int
    how: str  # intervals, neighbours or gather
    aligned: bool = True

    def meshes(self) -> tuple[Mesh, GenerationMesh]:
        """Training's and generation's."""
        train = Mesh.of(range(self.ranks), dp_replicate=self.ranks // self.cut, dp_shard=self.cut, tp=1)
        if self.how == "neighbours":
            return train, own_generation(tuple(range(self.ranks)), self.tp)
        return train, interval_generation(train, self.tp)


@cache
def cost(case: Case) -> Cost:
    """What a transition costs."""
    return gathered(case) if case.how == "gather" else planned(case)


def gathered(case: Case) -> Cost:
    """Every parameter whole on every rank, in fp32."""
    size = 4.0 * case.shape.num_params
    received = size * (case.cut - 1) / case.cut
    entering = size * (case.cut - min(NODE, case.cut)) / case.cut  # a node, over the links of its devices
    seconds = max(received / IN_NODE, entering / (NODE * BETWEEN_NODES))
    crossed = entering / NODE if case.cut > NODE else 0.0
    return Cost(received=received / 1e9, crossed=crossed / 1e9, milliseconds=1e3 * seconds)


def planned(case: Case) -> Cost:
    """The plan's bytes in bf16. Weights of one kind share their moves, so each kind is planned once and multiplied."""
    train, generation = case.meshes()
    inside: Counter[tuple[str, int]] = Counter()
    crossed: Counter[tuple[str, int]] = Counter()
    for (shape, dim, heads), count in Counter((w.shape, w.tp_dim, w.heads) for w in case.shape.weights()).items():
        weight = WeightShape(name="w", shape=shape, tp_dim=dim, heads=heads)
        src = training_layout(weight, train, aligned=case.aligned)
        request = TensorRequest(
            name="w", shape=shape, wire_dtype="bf16", src=src, dst=generation_layout(weight, generation)
        )
        for (a, b), size in plan_reshard([request], ranks_per_node=NODE).bytes_by_pair().items():
            load = inside if a // NODE == b // NODE else crossed
            load["out", a] += count * size
            load["in", b] += count * size
    seconds = max(max(inside.values(), default=0) / IN_NODE, max(crossed.values(), default=0) / BETWEEN_NODES)
    received = [inside["in", rank] + crossed["in", rank] for rank in range(case.ranks)]
    return Cost(
        received=max(received) / 1e9,
        crossed=max(crossed["in", rank] for rank in range(case.ranks)) / 1e9,
        milliseconds=1e3 * seconds,
    )


def one_node() -> list[list[str]]:
    """Qwen2.5-7B over the 8 ranks of a node, GB received per rank."""
    ways = (("intervals", True), ("intervals", False), ("neighbours", True), ("gather", False))
    rows = [["generation tp", "aligned, intervals", "default cuts, intervals", "aligned, neighbours", "gather fp32"]]
    for tp in (1, 2, 4):
        costs = [cost(Case(shape=QWEN, tp=tp, ranks=8, cut=8, how=how, aligned=a)) for how, a in ways]
        rows.append([str(tp), *(f"{c.received:.2f}" for c in costs)])
    return rows


def several_nodes(*, most: int = 1024) -> list[list[str]]:
    """Qwen2.5-7B to tensor parallel 4; most: plans that are cut over more ranks are left out."""
    rows = [["devices", "cut over", "way", "received, GB", "from other nodes, GB", "links, ms"]]
    for ranks in (8, 64, 1024):
        for cut in dict.fromkeys((ranks, NODE)):
            copies = f"{cut}, copied {ranks // cut} times" if ranks > cut else str(cut)
            for name, how, aligned in WAYS:
                if cut > most and how != "gather":
                    continue
                if cut > NODE and not aligned and how != "gather":
                    continue  # 2 % more than aligned ones: one row less to read
                got = cost(Case(shape=QWEN, tp=4, ranks=ranks, cut=cut, how=how, aligned=aligned))
                numbers = (f"{got.received:.2f}", f"{got.crossed:.2f}", f"{got.milliseconds:.1f}")
                rows.append([f"{ranks:,}", copies, name, *numbers])
    return rows


WAYS = (
    ("gather everything in fp32", "gather", False),
    ("default cuts, intervals", "intervals", False),
    ("aligned, neighbours", "neighbours", True),
    ("aligned, intervals", "intervals", True),
)


def llama_in_nodes() -> list[list[str]]:
    """Llama-2-7B to tensor parallel 8, cut over a node of 8 and copied to the others."""
    rows = [["devices", "gather everything in fp32, GB", "default cuts, GB", "aligned, GB"]]
    for ranks in (8, 64, 1024):
        ways = (("gather", False), ("intervals", False), ("intervals", True))
        costs = [cost(Case(shape=LLAMA, tp=8, ranks=ranks, cut=8, how=how, aligned=a)) for how, a in ways]
        rows.append([f"{ranks:,}", *(f"{c.received:.2f}" for c in costs)])
    return rows


def on_four_ranks() -> list[list[str]]:
    """Qwen2.5-7B on four ranks to tensor parallel 4: GB received, by how training lies."""
    rows = [["training", "default cuts, GB", "aligned, GB"]]
    for dp, tp in ((4, 1), (2, 2)):
        train = Mesh.of(range(4), dp_shard=dp, tp=tp)
        numbers = []
        for aligned in (False, True):
            most: Counter[int] = Counter()
            for w in QWEN.weights():
                src, dst = (
                    training_layout(w, train, aligned=aligned),
                    generation_layout(w, interval_generation(train, 4)),
                )
                request = TensorRequest(name="w", shape=w.shape, wire_dtype="bf16", src=src, dst=dst)
                most.update(plan_reshard([request]).bytes_received())
            numbers.append(f"{max(most.values()) / 1e9:.2f}")
        rows.append([f"FSDP2 {dp} x tp {tp}", *numbers])
    return rows


TABLES: dict[str, Callable[..., list[list[str]]]] = {
    "one node": one_node,
    "four ranks": on_four_ranks,
    "several nodes": several_nodes,
    "llama in nodes": llama_in_nodes,
}


def as_table(rows: list[list[str]]) -> str:
    """Rows as a Markdown table, numbers to the right."""
    number = [all(re.fullmatch(r"[\d.,]+", row[i]) for row in rows[1:]) for i in range(len(rows[0]))]
    rule = ["---:" if right else "---" for right in number]
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:]))


def in_note(name: str) -> re.Pattern[str]:
    """Where table `name` stands in the note."""
    return re.compile(rf"(<!-- computed: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)


def stated(name: str) -> str:
    """Table `name` as the note has it."""
    found = in_note(name).search(NOTE.read_text(encoding="utf-8"))
    assert found is not None, f"{NOTE} has no table {name!r}"
    return found.group(0).split("-->\n", 1)[1].rsplit("\n<!--", 1)[0]


def draw(path: Path) -> None:
    """A row-wise matrix on its way, and what the ways cost on 8, 64 and 1,024 devices."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, 12, height_ratios=(1, 1.35))
    train, generation = Mesh.of(range(4), dp_shard=4, tp=1), interval_generation(Mesh.of(range(4), dp_shard=4, tp=1), 4)
    matrix = WeightShape(name="o_proj", shape=(8, 8), tp_dim=1)
    target = generation_layout(matrix, generation)
    for place, aligned in ((slice(0, 6), False), (slice(6, 12), True)):
        own = training_layout(matrix, train, aligned=aligned)
        _draw_matrix(figure, grid[0, place], own, target, aligned=aligned)
    bars = (
        ("received by the busiest rank, GB", lambda c: c.received, slice(0, 6)),
        ("time on the links at least, ms", lambda c: c.milliseconds, slice(6, 12)),
    )
    for title, value, place in bars:
        _draw_bars(figure.add_subplot(grid[1, place]), title, value)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


COLOURS = ("#2f6fde", "#e8833a", "#2e9e6b", "#8a5cd1")
INK = "#1f2933"


def _draw_matrix(figure: Any, place: Any, own: Layout, target: Layout, *, aligned: bool) -> None:
    """Who holds what in training, and which part of its slice rank 1 has to be sent."""
    axes = figure.add_subplot(place)
    shape = (8, 8)
    for rank, region in own.regions(shape).items():
        (top, left), (rows, columns) = region.offset, region.shape
        axes.add_patch(_box(left, top, columns, rows, facecolor=COLOURS[rank], alpha=0.28, edgecolor="white"))
        axes.text(left + columns / 2, top + rows / 2, f"rank {rank}", ha="center", va="center", fontsize=9, color=INK)
        wanted = target.region(shape, rank)
        (top, left), (rows, columns) = wanted.offset, wanted.shape
        x = left + 10
        axes.add_patch(_box(x, top, columns, rows, facecolor="white", edgecolor=COLOURS[rank], hatch="////", lw=1.2))
        kept = region.meet(wanted)
        if kept is not None:
            (top, left), (rows, columns) = kept.offset, kept.shape
            axes.add_patch(_box(left + 10, top, columns, rows, facecolor=COLOURS[rank], edgecolor="white"))
    lacks = target.region(shape, 1).num_elements - (own.region(shape, 1).meet(target.region(shape, 1))).num_elements
    name = "aligned: Shard(1)" if aligned else "default: Shard(0)"
    axes.set_title(
        f"o_proj, {name}: a rank lacks {lacks} of {shape[0] * shape[1] // 4} parts of its slice", fontsize=10
    )
    axes.text(4, 8.7, "training, FSDP2 over 4", ha="center", va="top", fontsize=9)
    axes.text(14, 8.7, "generation, tp 4: solid kept, hatched sent", ha="center", va="top", fontsize=9)
    axes.set(xlim=(-0.3, 18.3), ylim=(9.6, -0.3), aspect="equal")
    axes.axis("off")


def _box(x: float, y: float, width: float, height: float, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, **style)


def _draw_bars(axes: Any, title: str, value: Callable[[Cost], float]) -> None:
    """Four ways on 8, 64 and 1,024 devices."""
    ways = (
        ("gather everything in fp32, cut over all", "gather", None, "#9aa5b1"),
        ("aligned, cut over all, neighbours", "neighbours", None, COLOURS[1]),
        ("aligned, cut over all, intervals", "intervals", None, COLOURS[0]),
        ("aligned, cut in a node, intervals", "intervals", NODE, COLOURS[2]),
    )
    sizes = (8, 64, 1024)
    for number, (label, how, cut, colour) in enumerate(ways):
        heights = [value(cost(Case(shape=QWEN, tp=4, ranks=n, cut=cut or n, how=how))) for n in sizes]
        at = [i + (number - 1.5) * 0.2 for i in range(len(sizes))]
        drawn = axes.bar(at, heights, 0.19, color=colour, label=label)
        axes.bar_label(drawn, labels=[f"{h:.1f}" for h in heights], fontsize=8, padding=1)
    axes.set_xticks(range(len(sizes)), [f"{n:,} devices" for n in sizes])
    axes.set_title(f"Qwen2.5-7B to tp 4: {title}", fontsize=10)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.3)
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper center")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> int:
    """Write the tables and the picture, or compare the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = [name for name, rows in TABLES.items() if stated(name) != as_table(rows())]
    if options.check:
        for name in stale:
            print(f"{NOTE.name}: table {name!r} is out of date")
        return 1 if stale else 0
    text = NOTE.read_text(encoding="utf-8")
    for name in stale:
        table = as_table(TABLES[name]())
        text = in_note(name).sub(lambda m, table=table: m.group(1) + table + m.group(2), text)
    NOTE.write_text(text, encoding="utf-8")
    draw(PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
