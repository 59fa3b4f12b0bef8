"""What a person sees of a run: a live panel on a terminal, one plain line per step elsewhere, nothing above rank 0."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

HISTORY = 40
BLOCKS = tuple(chr(c) for c in range(0x2581, 0x2589))

# phases in the order of a step, each with its colour; others come after them
PHASE_STYLES = {
    "gen": "cyan",
    "reward": "bright_magenta",
    "old_log_prob": "blue",
    "ref": "magenta",
    "values": "bright_blue",
    "adv": "white",
    "update_critic": "yellow",
    "update_actor": "green",
    "update_weights": "red",
}
OTHER_STYLE = "bright_black"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One number of the panel: label, the metrics that may give it (the first that is there), format and style."""

    label: str
    names: tuple[str, ...]
    form: str
    style: str = ""


HEADLINES = (
    Headline(label="reward", names=("critic/score/mean",), form=".3f", style="bold green"),
    Headline(label="kl", names=("actor/kl", "actor/reward_kl_penalty", "actor/ppo_kl"), form=".4f"),
    Headline(label="entropy", names=("actor/entropy",), form=".3f"),
    Headline(label="length", names=("response_length/mean",), form=".0f"),
    Headline(label="grad norm", names=("actor/grad_norm",), form=".3f"),
    Headline(label="tokens/s", names=("perf/processed_tokens_per_s",), form=",.0f", style="bold cyan"),
)


class Display:
    """The face of a run; every method may be called on every rank."""

    def __init__(
        self,
        *,
        enabled: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is shown before `start`.

        enabled: False on all ranks but 0. console: where to; standard error when None.
        """
        self._console = console or Console(stderr=True)
        self._enabled = enabled
        self._live: Live | None = None
        self._clock = clock
        self._spinner = Spinner("dots", style="cyan")
        self._total = self._first = self._step = 0
        self._where = ""
        self._began = clock()
        self._values: dict[str, float] = {}
        self._seconds: deque[float] = deque(maxlen=HISTORY)
        self._rewards: deque[float] = deque(maxlen=HISTORY)
        self._phases: list[tuple[str, float]] = []
        self._progress: tuple[int, int] | None = None

    def start(self, total_steps: int, step: int, where: str) -> None:
        """Begin with `step` of `total_steps` done; `where` is the run folder."""
        self._total, self._step, self._first, self._where = total_steps, step, step, where
        self._began = self._clock()
        if not self._enabled:
            return
        if not self._console.is_terminal:
            self._line(f"run {where}: {total_steps - step} of {total_steps} steps to go")
        elif self._live is None:
            self._live = Live(get_renderable=self._panel, console=self._console, refresh_per_second=4, transient=False)
            self._live.start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show `name` as what the run is doing; phases nest, the innermost is shown."""
        self._phases.append((name, self._clock()))
        self._progress = None
        try:
            yield
        finally:
            self._phases.pop()
            self._progress = None

    def progress(self, done: int, total: int) -> None:
        """How far the current phase is."""
        self._progress = (done, total)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Show the metrics of a finished step; the last known value stays where a step has none."""
        self._step = step
        self._values.update(values)
        if values.get("timing_s/step", 0.0) > 0:
            self._seconds.append(values["timing_s/step"])
        if "critic/score/mean" in values:
            self._rewards.append(values["critic/score/mean"])
        if self._enabled and self._live is None:
            self._line(self._plain(values))

    def note(self, text: str) -> None:
        """Show one line of text that stays."""
        if self._enabled and self._live is not None:
            self._console.print(Text(text, style="dim"))
        elif self._enabled:
            self._line(text)

    def close(self) -> None:
        """Leave the last state on the terminal and give it back; safe to call twice."""
        live, self._live = self._live, None
        if live is not None:
            self._phases.clear()
            live.stop()

    def seconds_left(self) -> float | None:
        """Estimate from the median of the recent steps; None before the first."""
        if not self._seconds:
            return None
        return statistics.median(self._seconds) * max(self._total - self._step, 0)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _plain(self, values: Mapping[str, float]) -> str:
        """A step in one line without colour."""
        parts = [f"step {self._step}/{self._total}"]
        for headline in HEADLINES:
            value = _first(values, headline.names)
            if value is not None:
                parts.append(f"{headline.label} {value:{headline.form}}")
        parts += [f"{_short(name)} {value:.3f}" for name, value in _validation(values)]
        parts += [f"{phase} {seconds:.2f}s" for phase, seconds in _phase_seconds(values)]
        left = self.seconds_left()
        if left is not None and self._step < self._total:
            parts.append(f"eta {duration(left)}")
        return " | ".join(parts)

    def _panel(self) -> RenderableType:
        rows: list[RenderableType] = [self._steps_row(), Text(), self._numbers()]
        validation = _validation(self._values)
        if validation:
            text = Text("validation  ", style="dim")
            for name, value in validation:
                text.append(f"{_short(name)} ", style="default")
                text.append(f"{value:.3f}  ", style="bold yellow")
            rows.append(text)
        phases = _phase_seconds(self._values)
        if phases:
            rows += [Text(), _stacked_bar(phases, max(self._console.width - 6, 20)), _legend(phases)]
        rows += [Text(), self._now()]
        title = Text.assemble(("rlspeed ", "bold"), (self._where, "dim"))
        return Panel(Group(*rows), title=title, title_align="left", border_style="cyan", padding=(0, 2))

    def _steps_row(self) -> RenderableType:
        grid = Table.grid(expand=True, padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        left = self.seconds_left()
        times = f"{duration(self._clock() - self._began)} gone"
        if left is not None and self._step < self._total:
            times += f", {duration(left)} left"
        grid.add_row(
            Text(f"step {self._step}/{self._total}", style="bold"),
            ProgressBar(total=max(self._total, 1), completed=self._step, complete_style="cyan"),
            Text(times, style="dim"),
        )
        return grid

    def _numbers(self) -> RenderableType:
        """Labels above values, the course of the reward at the right."""
        grid = Table.grid(padding=(0, 3))
        labels, values = [], []
        for headline in HEADLINES:
            value = _first(self._values, headline.names)
            labels.append(Text(headline.label, style="dim"))
            values.append(Text("-" if value is None else f"{value:{headline.form}}", style=headline.style))
        if len(self._rewards) > 1 and self._console.encoding.lower().startswith("utf"):
            labels.append(Text(f"reward, last {len(self._rewards)} steps", style="dim"))
            values.append(Text(sparkline(self._rewards), style="green"))
        for _ in labels:
            grid.add_column(no_wrap=True)
        grid.add_row(*labels)
        grid.add_row(*values)
        return grid

    def _now(self) -> RenderableType:
        if not self._phases:
            return Text("finished" if self._step >= self._total else "", style="dim")
        name, since = self._phases[-1]
        text = f"{name} {self._clock() - since:.0f}s"
        if self._progress is not None:
            text += f", {self._progress[0]} of {self._progress[1]}"
        self._spinner.update(text=Text(text))
        return self._spinner


def duration(seconds: float) -> str:
    """h:mm:ss or m:ss."""
    total = round(seconds)
    hours, minutes = divmod(total // 60, 60)
    return f"{hours}:{minutes:02d}:{total % 60:02d}" if hours else f"{minutes}:{total % 60:02d}"


def sparkline(values: Iterator[float] | deque[float] | list[float]) -> str:
    """One block per value, scaled to their range; a value that is not a number is a gap."""
    known = [v for v in values if v == v]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    top = len(BLOCKS) - 1
    return "".join(" " if v != v else BLOCKS[round((v - low) / span * top) if span > 0 else 0] for v in values)


def _first(values: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    return next((values[n] for n in names if n in values), None)


def _validation(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """The first three core means of validation."""
    return [(n, v) for n, v in values.items() if n.startswith("val-core/") and "/mean@" in n][:3]


def _short(name: str) -> str:
    """val-core/openai/gsm8k/acc/mean@1 -> gsm8k acc mean@1."""
    parts = name.split("/")
    return " ".join(["val", *parts[-3:]]) if len(parts) >= 4 else name


def _phase_seconds(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Phases of the last step by name, in the order of a step, the whole step left out."""
    found = {n.removeprefix("timing_s/"): v for n, v in values.items() if n.startswith("timing_s/") and v > 0}
    found.pop("step", None)
    order = list(PHASE_STYLES)
    return sorted(found.items(), key=lambda x: (order.index(x[0]) if x[0] in order else len(order), x[0]))


def _stacked_bar(phases: list[tuple[str, float]], width: int) -> Text:
    """Phases side by side, as wide as their share of the time."""
    total = sum(s for _, s in phases)
    bar, drawn, passed = Text(no_wrap=True), 0, 0.0
    for name, seconds in phases:
        passed += seconds
        upto = round(passed / total * width)
        bar.append(" " * (upto - drawn), style=f"on {PHASE_STYLES.get(name, OTHER_STYLE)}")
        drawn = upto
    return bar


def _legend(phases: list[tuple[str, float]]) -> Text:
    text = Text()
    for name, seconds in phases:
        text.append("  ", style=f"on {PHASE_STYLES.get(name, OTHER_STYLE)}")
        text.append(f" {name} {seconds:.1f}s   ", style="dim")
    return text
