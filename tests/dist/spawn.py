"""Run one function on several gloo ranks of this machine and collect what each returns."""

from __future__ import annotations

import pickle
import queue
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(
    work: Callable[..., Any], world: int, folder: Path, *args: Any, timeout_seconds: float = 240.0
) -> list[Any]:
    """`work(rank, *args)` in `world` processes that share a process group; returns the results by rank.

    work: a function at the top of a module. An error of any rank ends all of them and is raised here with the rank's
    own traceback; so does a rank that dies or says nothing for timeout_seconds.
    """
    context = mp.get_context("spawn")
    answers = context.Queue()
    meeting = folder / f"ranks-{time.monotonic_ns()}"
    processes = [
        context.Process(target=_main, args=(work, rank, world, str(meeting), answers, args), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(processes, answers, timeout_seconds)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _main(work: Callable[..., Any], rank: int, world: int, meeting: str, answers: Any, args: tuple[Any, ...]) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        answers.put((rank, True, pickle.dumps(work(rank, *args))))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        answers.put((rank, False, traceback.format_exc()))


def _collect(processes: list[Any], answers: Any, timeout_seconds: float) -> list[Any]:
    """Results by rank. After the first error the others get two seconds to tell theirs: the cause may come second."""
    found: dict[int, Any] = {}
    errors: list[str] = []
    deadline = time.monotonic() + timeout_seconds
    while len(found) < len(processes):
        try:
            rank, good, answer = answers.get(timeout=0.2)
        except queue.Empty:
            if time.monotonic() > deadline:
                missing = sorted(set(range(len(processes))) - set(found))
                errors = errors or [f"ranks {missing} gave no answer in {timeout_seconds:.0f} s"]
                break
            dead = [r for r, p in enumerate(processes) if r not in found and not p.is_alive()]
            if dead and answers.empty() and not errors:
                errors = [f"rank {r} ended with exit code {processes[r].exitcode}" for r in dead]
                break
            continue
        if good:
            found[rank] = pickle.loads(answer)
        else:
            errors.append(f"rank {rank}:\n{answer}")
            found[rank] = None
            deadline = min(deadline, time.monotonic() + 2.0)
    assert not errors, "\n".join(errors)
    for process in processes:
        process.join(timeout=20.0)
    return [found[rank] for rank in range(len(processes))]
