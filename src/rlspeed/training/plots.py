"""Pictures of a run from its two JSON-lines files: reward and validation, KL, lengths, tokens/s, phase times."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlspeed.training.loggers import METRICS_FILE, TIMINGS_FILE, JsonLines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN, RED, PURPLE, TEAL, YELLOW, PINK = (
    "#2f6fde",
    "#e8833a",
    "#2e9e6b",
    "#d64545",
    "#8a5cd1",
    "#2aa5b8",
    "#e3b341",
    "#d36ba6",
)

# phases in the order of a step, with the same colour in every run; others come after them
PHASES = {
    "gen": BLUE,
    "reward": PINK,
    "old_log_prob": TEAL,
    "ref": PURPLE,
    "values": RED,
    "adv": YELLOW,
    "update_critic": ORANGE,
    "update_actor": GREEN,
    "update_weights": "#9aa5b1",
}
OTHER_PHASES = ("#52606d", "#b8a07e", "#7f9c6c", "#a4b8e0", "#cbd2d9")

# more steps than this are drawn as areas, not as bars
MOST_BARS = 60

STYLE: Any = {
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": FAINT,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.grid.axis": "y",
    "axes.xmargin": 0.02,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.labelcolor": INK,
}

Rows = Mapping[int, Mapping[str, float]]
Panel = Callable[["Axes", Rows], bool]


def write_plots(run_dir: Path) -> list[Path]:
    """Draw what the run's files have data for into `run_dir`/plots; returns the files written, the overview first.

    Raises:
        RunError: a file of the run cannot be read.
    """
    rows = read_run(run_dir)
    folder = run_dir / "plots"
    figures: dict[str, Sequence[Panel]] = {"overview": [p for panels in FIGURES.values() for p in panels], **FIGURES}
    written = (_draw(folder / f"{name}.png", panels, rows) for name, panels in figures.items())
    return [path for path in written if path is not None]


def read_run(run_dir: Path) -> dict[int, dict[str, float]]:
    """All numbers of a run by step; what was not finite is left out.

    Raises:
        RunError: a file of the run cannot be read.
    """
    merged: dict[int, dict[str, float]] = {}
    for name in (METRICS_FILE, TIMINGS_FILE):
        for row in JsonLines(run_dir / name).rows():
            values = {k: v for k, v in row.items() if k != "step" and v is not None}
            merged.setdefault(row["step"], {}).update(values)
    return dict(sorted(merged.items()))


def _draw(path: Path, panels: Sequence[Panel], rows: Rows) -> Path | None:
    """One picture with the panels that have data, None when none has."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(STYLE):
        probe = Figure().add_subplot()
        alive = [p for p in panels if p(probe, rows)]
        if not alive:
            return None
        columns = min(len(alive), 3 if len(alive) > 4 else 2)
        lines = -(-len(alive) // columns)
        size = (5.6 * columns + (2.4 if columns == 1 else 0), 3.5 * lines)
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.14))
        canvas, grid = FigureCanvasAgg(figure), figure.add_gridspec(lines, columns)
        for i, panel in enumerate(alive):
            line, column = divmod(i, columns)
            # the last panel takes what is left of its line
            axes = figure.add_subplot(grid[line, column:] if panel is alive[-1] else grid[line, column])
            panel(axes, rows)
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        canvas.print_figure(str(temporary), format="png", dpi=130, facecolor="white")
    os.replace(temporary, path)
    return path


def _series(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one metric where it is known."""
    steps = [s for s, values in rows.items() if name in values]
    return np.array(steps), np.array([rows[s][name] for s in steps], dtype=np.float64)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the `window` values centred at each; fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - window // 2, 0), np.minimum(index + window // 2 + 1, len(values))
    return np.asarray((sums[high] - sums[low]) / (high - low))


def _line(axes: Axes, rows: Rows, name: str, colour: str, label: str | None = None) -> bool:
    """A metric as a line; when there are many steps, smoothed over the faint raw values."""
    steps, values = _series(rows, name)
    if len(steps) == 0:
        return False
    window = len(steps) // 20
    marker: Any = {"marker": "o", "markersize": 4.5} if len(steps) <= 12 else {}
    if window >= 2:
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        values = smooth(values, window)
    axes.plot(steps, values, color=colour, linewidth=2, label=label, solid_capstyle="round", **marker)
    return True


def _legend(axes: Axes, **options: Any) -> None:
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(**options)


def _reward(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Reward per answer")
    drawn = _line(axes, rows, "critic/score/mean", BLUE, "reward")
    trained, score = _series(rows, "critic/rewards/mean"), _series(rows, "critic/score/mean")
    if drawn and not np.array_equal(trained[1], score[1]):
        _line(axes, rows, "critic/rewards/mean", ORANGE, "with penalties")
    _legend(axes)
    return drawn


def _validation(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Validation")
    names = sorted({n for values in rows.values() for n in values if n.startswith("val-core/") and "/mean@" in n})
    for name, colour in zip(names, (GREEN, PURPLE, ORANGE, TEAL, RED, YELLOW)):
        steps, values = _series(rows, name)
        label = name.removeprefix("val-core/")
        axes.plot(steps, values, color=colour, linewidth=2, marker="o", markersize=5, label=label)
        axes.annotate(
            f"{values[-1]:.3g}", (steps[-1], values[-1]), (0, 7), textcoords="offset points", ha="center", color=INK
        )
    axes.margins(y=0.18)
    axes.legend() if names else None
    return bool(names)


def _kl(axes: Axes, rows: Rows) -> bool:
    axes.set_title("KL (nats per token)")
    reference = [
        _line(axes, rows, "actor/kl", BLUE, "to the reference"),
        _line(axes, rows, "actor/reward_kl_penalty", BLUE, "to the reference, in the reward"),
    ]
    update = _line(axes, rows, "actor/ppo_kl", ORANGE, "old to new policy, in the update")
    gap = _line(axes, rows, "rollout_corr/k3_kl", TEAL, "generator to trainer")
    axes.legend() if any((*reference, update, gap)) else None
    return any((*reference, update, gap))


def _entropy(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Entropy (nats per token)")
    return _line(axes, rows, "actor/entropy", PURPLE)


def _lengths(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Answer length (tokens)")
    drawn = _line(axes, rows, "response_length/mean", BLUE, "mean")
    steps, low = _series(rows, "response_length/min")
    same, high = _series(rows, "response_length/max")
    if drawn and np.array_equal(steps, same):
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.1, linewidth=0, label="shortest to longest")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)
    _legend(axes, loc="upper left", ncols=2)
    return drawn


def _phases(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Time of a step by phase (s)")
    timed = [s for s in rows if "timing_s/step" in rows[s]]
    found = {n.removeprefix("timing_s/") for s in timed for n in rows[s] if n.startswith("timing_s/")} - {"step"}
    if not found:
        return False
    names = [p for p in PHASES if p in found] + sorted(found - set(PHASES))
    colours = [PHASES.get(p, OTHER_PHASES[i % len(OTHER_PHASES)]) for i, p in enumerate(names)]
    heights = np.array([[rows[s].get(f"timing_s/{p}", 0.0) for s in timed] for p in names])
    if len(timed) <= MOST_BARS:
        base = np.zeros(len(timed))
        for name, colour, height in zip(names, colours, heights):
            axes.bar(timed, height, bottom=base, width=0.82, color=colour, label=name)
            base += height
    else:
        axes.stackplot(timed, heights, colors=colours, labels=names, linewidth=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1)
    return True


def _throughput(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Tokens per second, all ranks, no padding")
    drawn = [
        _line(axes, rows, "perf/processed_tokens_per_s", BLUE, "processed"),
        _line(axes, rows, "perf/trained_tokens_per_s", GREEN, "trained"),
    ]
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _legend(axes)
    return any(drawn)


FIGURES: dict[str, Sequence[Panel]] = {
    "reward": (_reward, _validation),
    "kl": (_kl, _entropy),
    "lengths": (_lengths,),
    "throughput": (_throughput,),
    "phases": (_phases,),
}
