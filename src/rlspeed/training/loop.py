"""A run from its configuration to its last checkpoint: set-up, steps, validation, stop and resume."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlspeed.algorithms.kl import AdaptiveKL
from rlspeed.config.load import LoadedProfile
from rlspeed.engine.watchdog import Watchdog
from rlspeed.engine.world import World, start_world
from rlspeed.errors import RunError
from rlspeed.planning.devices import Role
from rlspeed.planning.report import as_it_runs, on_host
from rlspeed.training import checkpoint, rundir
from rlspeed.training.checks import check_gap
from rlspeed.training.clock import Clock
from rlspeed.training.collect import Collected
from rlspeed.training.display import Display
from rlspeed.training.export import export_hf
from rlspeed.training.loggers import METRICS_FILE, JsonLines, Loggers
from rlspeed.training.metrics import StepMetrics
from rlspeed.training.plots import write_plots
from rlspeed.training.ppo_step import StepResult, ppo_step
from rlspeed.training.profile import StepProfiler
from rlspeed.training.setup import Setup, build, startup_checks
from rlspeed.training.stop import StopFlag, StopRequested
from rlspeed.training.timeline import Lane, Span
from rlspeed.training.validate import validate


def train(loaded: LoadedProfile) -> int:
    """Run the whole job on this rank; returns the exit code (0 also after SIGTERM, when the checkpoint is written).

    Raises:
        RlspeedError: anything that is the user's to mend.
    """
    profile = loaded.profile
    mesh = profile.devices.actor.device_mesh if profile.devices.actor else None
    use_cpu = mesh == ["cpu"] or on_host(profile)
    world = start_world(use_cpu=use_cpu, hang_timeout_seconds=profile.run.hang_timeout_seconds)
    try:
        with StopFlag(world) as stop, Watchdog(world, profile.run.hang_timeout_seconds, stop) as watchdog:
            return Job(loaded, world, stop, watchdog).run()
    finally:
        world.close()


class Job:
    """One run on this rank: the state that changes from step to step is `step` and `kl`."""

    def __init__(self, loaded: LoadedProfile, world: World, stop: StopFlag, watchdog: Watchdog) -> None:
        self.profile, stands_in = as_it_runs(loaded.profile)
        self.world = world
        self.stop = stop
        self.clock = Clock(world.device)
        watchdog.follow(self.clock)
        stop.waiting = self.clock.idle
        self.step = 0
        self.total_tokens = 0
        self.ahead: Collected | None = None
        self.notes: list[str] = list(stands_in)
        _seed_everything(self.profile.run.seed)
        self.display = Display(enabled=world.is_main)
        self.setup: Setup = build(self.profile, world, stop, self.clock)
        name = self.profile.run.name or self.profile.name
        self.dir: Path = rundir.open_run_dir(world, name, self.profile.run.dir, resume=self.profile.run.resume)
        cfg = self.profile.algorithm.kl
        self.kl = AdaptiveKL(coef=cfg.coef, target=cfg.target, horizon=cfg.horizon)
        resumed = self._resume()
        if world.is_main:
            rundir.write_text(self.dir / rundir.RESOLVED, loaded.dump())
        self.profiler = StepProfiler(self.dir, self.profile.run.profile_steps, self.setup.total_steps, world)
        self.loggers = Loggers(
            self.dir,
            self.profile.run.loggers,
            run_name=name,
            config=self.profile.model_dump(mode="json"),
            resume_step=self.step if resumed else None,
            enabled=world.is_main,
        )
        self.validated: set[int] = world.broadcast_object(self._validated_steps())

    def run(self) -> int:
        """All steps that are left; always closes what it opened."""
        try:
            return self._run()
        finally:
            self.display.close()
            self.loggers.close()
            self.setup.parts.collector.close()

    def _run(self) -> int:
        self.display.start(self.setup.total_steps, self.step, str(self.dir))
        for note in (*self.notes, *self.setup.notes):
            self.display.note(note)
        try:
            if self.profile.run.startup_checks:
                with self._phase("checks"):
                    for note in startup_checks(self.setup):
                        self.display.note(note)
            self._validate_if_due()
            while self.step < self.setup.total_steps:
                self._one_step()
        except StopRequested:
            return self._stopped()
        return self._finish()

    def _one_step(self) -> None:
        """A training step with its log line, then what is due after it: a validation, a checkpoint."""
        self.stop.agree()
        number = self.clock.step = self.step + 1
        metrics = StepMetrics()
        with self.profiler.step(number), self.clock.phase("step"):
            result = ppo_step(
                self.setup.parts,
                number,
                self.setup.stream.batch(self.step),
                self.kl.coef,
                metrics,
                ahead=self.ahead,
                following=self._following(number),
            )
            self.ahead = result.ahead
            with self.clock.idle():
                self.world.barrier()  # the step has one end, so that what was idle shows
        self.profiler.draw_ranks(number, self._lanes(number))
        self._after_step(number, metrics, result)
        self._compare(self._log(metrics), number)
        for path in self.profiler.written:
            self.display.note(f"profile: {path}")
        self._validate_if_due()
        if self.profile.run.save_every and number % self.profile.run.save_every == 0:
            self._save()

    def _lanes(self, number: int) -> list[Lane]:
        """What this rank did in the step, and the reward model in its thread; nothing where no picture is asked for."""
        beside = self.setup.parts.collector.take_spans()
        if number not in self.profiler.steps:
            return []
        grid, rank = self.setup.parts.grid, self.world.rank
        roles = ", ".join(str(role) for role, site in grid.sites.items() if site.here)
        own = [Span(name=n, start=a, end=b) for n, a, b in self.clock.spans if n != "step"]
        end = self.clock.spans[-1][2]
        lanes = [Lane(label=f"rank {rank}: {roles or 'no role'}", spans=own)]
        if beside:
            scored = [Span(name="reward", start=a, end=b) for a, b in beside]
            lanes.append(Lane(label=f"rank {rank}: reward model", spans=scored))
        return [lane.before(end) for lane in lanes]

    def _following(self, number: int) -> Sequence[int] | None:
        """Prompts that are answered one step ahead; None where every step answers its own."""
        last = number == self.setup.total_steps
        return self.setup.stream.batch(number) if self.profile.rollout.one_step_off and not last else None

    def _compare(self, values: Mapping[str, float], number: int) -> None:
        """Generator against trainer on the step's own answers: rollout.parity_alarm says whether a gap ends the run."""
        if values.get("rollout_corr/staleness"):
            return  # other weights are meant to have other log-probs; the correction is for that
        try:
            check_gap(values, number, self.profile.rollout.parity_tolerance)
        except RunError as error:
            if self.profile.rollout.parity_alarm == "stop":
                raise
            self.display.note(f"warning: {error.faults[0].where}: {error.faults[0].found}")

    def _after_step(self, number: int, metrics: StepMetrics, result: StepResult) -> None:
        """Count the step, move the controller, write sampled answers."""
        self.step = number
        cfg = self.profile.algorithm.kl
        if cfg.where == "reward" and cfg.controller == "adaptive":
            self.kl = self.kl.updated(result.mean_kl, len(result.table))
        self.total_tokens += sum(a.tokens for a in result.table)
        metrics.add("training/epoch", float(self.setup.stream.epoch(number - 1)))
        self._write_answers(
            "rollouts", self.setup.parts.collector.dump(self.setup.train_table, result.collected, number)
        )

    def _validate_if_due(self) -> None:
        """Validation at the start, at the end and every run.validate_every steps, unless its line is written already.

        The line is separate from the step's, so that a run which was stopped inside a validation makes up for it on
        resume.
        """
        every = self.profile.run.validate_every
        due = self.step in (0, self.setup.total_steps) or (every and self.step % every == 0)
        if self.setup.val_table is None or not due or self.step in self.validated:
            return
        metrics = StepMetrics()
        with self._phase("testing"):
            collected = validate(self.setup.parts, self.setup.val_table, self.step, metrics)
        self._log(metrics)
        self.validated.add(self.step)
        rows = self.setup.parts.collector.dump(self.setup.val_table, collected, self.step)
        self._write_answers("validation", rows)

    def _write_answers(self, folder: str, rows: list[dict[str, Any]]) -> None:
        count = self.profile.run.log_rollouts
        if self.world.rank == self.setup.parts.grid.home.first and count:
            rundir.write_jsonl(self.dir / folder / f"{self.step}.jsonl", rows[:count])

    def _log(self, metrics: StepMetrics) -> dict[str, float]:
        idled = self.clock.idled
        seconds = self.clock.take()
        metrics.add_seconds(seconds)
        if self.world.size > 1:
            metrics.add_idle(self.world.rank, seconds, idled)
        metrics.add_memory(self.world.device)
        values = metrics.reduce(self.world.gather_objects)
        self.loggers.log(self.step, values)
        self.display.step(self.step, values)
        return values

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Time and show a phase."""
        with self.clock.phase(name), self.display.phase(name):
            yield

    def _roles(self) -> Mapping[str, checkpoint.RoleState]:
        grid, roles = self.setup.parts.grid, self.setup.parts.roles
        own = {Role.ACTOR: roles.actor_or_none, Role.CRITIC: roles.critic}
        return {
            str(role): checkpoint.RoleState(members=grid.sites[role].members, role=held)
            for role, held in own.items()
            if role in grid.sites
        }

    def _save(self) -> Path:
        with self._phase("save_checkpoint"):
            self.setup.parts.handover.to_training()
            self.setup.parts.handover.settle()
            progress = checkpoint.Progress(
                step=self.step,
                kl_coef=self.kl.coef,
                optimizer_steps=checkpoint.optimizer_steps(self.world, self._roles()),
                policy_version=self.setup.parts.handover.version,
                total_tokens=self.total_tokens,
            )
            return checkpoint.save(
                self.dir, self.world, self._roles(), progress, keep=self.profile.run.keep_checkpoints
            )

    def _resume(self) -> bool:
        """Go on from the last complete checkpoint; without one, from the start."""
        if not self.profile.run.resume:
            return False
        folder, skipped = self.world.broadcast_object(checkpoint.find_last(self.dir))
        for note in skipped:
            self.notes.append(note)
        if folder is not None:
            progress = checkpoint.load(folder, self.world, self._roles())
            self.step, self.total_tokens = progress.step, progress.total_tokens
            self.kl = AdaptiveKL(coef=progress.kl_coef, target=self.kl.target, horizon=self.kl.horizon)
            self.setup.parts.handover.restored(progress.policy_version)
            self.notes.append(f"resumed from {folder}")
        return True

    def _validated_steps(self) -> set[int]:
        """Steps whose validation line is in metrics.jsonl."""
        rows = JsonLines(self.dir / METRICS_FILE).rows()
        return {row["step"] for row in rows if any(k.startswith("val-") for k in row)}

    def _stopped(self) -> int:
        """Answer to SIGTERM: a checkpoint of the last finished step."""
        folder = self._save()
        self.display.note(f"stopped on request after step {self.step}; go on with: rlspeed train {self.dir} --resume")
        self.display.note(f"checkpoint: {folder}")
        return 0

    def _finish(self) -> int:
        """Last checkpoint, Hugging Face directory, plots."""
        if self.profile.run.save_last:
            self.display.note(f"checkpoint: {self._save()}")
        if self.profile.run.save_hf:
            with self._phase("export"):
                parts = self.setup.parts
                target = export_hf(
                    parts.roles,
                    self.setup.tokenizer,
                    self.dir / "hf",
                    self.world,
                    parts.grid.home,
                    self.setup.precision,
                )
            self.display.note(f"model: {target}")
        if self.profile.run.plots and self.world.is_main:
            for picture in write_plots(self.dir):
                self.display.note(f"plot: {picture}")
        return 0


def _seed_everything(seed: int) -> None:
    """Seeds of libraries that draw for themselves; answers are drawn from `seeds.seed_of`."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
