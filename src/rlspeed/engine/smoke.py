"""A trial of the process groups of a device map: start its ranks, one collective per group, one tiny reshard.

The parent starts one process per rank on this machine and listens to what each reports. Ranks that wait for another
rank cannot tell which one is missing; the parent can, since the missing rank's reports are behind those of all
others.
"""

from __future__ import annotations

import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlspeed.errors import DeviceError, Fault, RlspeedError
from rlspeed.planning.devices import DeviceMap, Role
from rlspeed.planning.layout import Region
from rlspeed.planning.reshard import ReshardPlan, TensorRequest, plan_reshard
from rlspeed.planning.shape import WeightShape
from rlspeed.planning.transition import generation_layout, generation_mesh, training_layout, training_mesh

_SHAPE = (48, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeSpec:
    """What every rank does. groups: (name, ranks), made in this order. plan: None when there is no actor."""

    world_size: int
    cuda: bool
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    plan: ReshardPlan | None
    timeout_seconds: float
    rendezvous: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeResult:
    """What was tried: names of the groups, bytes that the reshard moved, seconds from start to end."""

    backend: str
    groups: tuple[str, ...]
    moved_bytes: int
    seconds: float


Worker = Callable[[int, SmokeSpec, Any], None]


def run_smoke(
    devices: DeviceMap, *, cuda: bool, timeout_seconds: float = 120.0, worker: Worker | None = None
) -> SmokeResult:
    """Start the ranks of `devices` on this machine and try every group.

    cuda: NCCL on the visible GPUs, one per rank; False: gloo on the CPU. worker: what each process runs, the trial
    unless given.

    Raises:
        DeviceError: a rank failed or did not answer in time; it is named with the step that it did not reach.
    """
    began = time.monotonic()
    groups = _distinct(devices.groups())
    with tempfile.TemporaryDirectory(prefix="rlspeed-smoke-") as folder:
        spec = SmokeSpec(
            world_size=devices.world_size,
            cuda=cuda,
            groups=groups,
            plan=_tiny_plan(devices),
            timeout_seconds=timeout_seconds,
            rendezvous=f"file://{Path(folder) / 'rendezvous'}",
        )
        faults = _run_ranks(spec, worker or trial)
    if faults:
        raise DeviceError(faults)
    return SmokeResult(
        backend="nccl" if cuda else "gloo",
        groups=tuple(name for name, _ in groups),
        moved_bytes=spec.plan.num_bytes if spec.plan else 0,
        seconds=time.monotonic() - began,
    )


def trial(rank: int, spec: SmokeSpec, reports: Any) -> None:
    """One rank: join, one all-reduce per group, the tiny reshard. Puts (rank, step, text) into `reports` as it goes."""
    try:
        reports.put((rank, 0, "joining all ranks"))
        device = torch.device("cuda", rank) if spec.cuda else torch.device("cpu")
        if spec.cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if spec.cuda else "gloo",
            init_method=spec.rendezvous,
            rank=rank,
            world_size=spec.world_size,
            timeout=timedelta(seconds=2 * spec.timeout_seconds),  # the parent speaks first
            device_id=device if spec.cuda else None,
        )
        handles = [dist.new_group(list(ranks)) for _, ranks in spec.groups]
        for step, ((name, ranks), handle) in enumerate(zip(spec.groups, handles), start=1):
            reports.put((rank, step, f"all-reduce in group {name}"))
            if rank in ranks:
                total = torch.tensor([float(rank)], device=device)
                dist.all_reduce(total, group=handle)
                if float(total) != float(sum(ranks)):
                    raise RuntimeError(f"group {name}: ranks {ranks} sum to {float(total)}")
        reports.put((rank, len(spec.groups) + 1, "reshard of a small tensor"))
        if spec.plan is not None:
            carry_out(spec.plan, rank, device)
        dist.barrier()
        reports.put((rank, len(spec.groups) + 2, "done"))
        dist.destroy_process_group()
    except Exception:
        reports.put((rank, -1, traceback.format_exc(limit=1).strip().splitlines()[-1]))


def carry_out(plan: ReshardPlan, rank: int, device: torch.device) -> None:
    """Move known numbers by the plan and check what arrives; every rank of the world calls it.

    Raises:
        RuntimeError: a wrong number.
    """
    for tensor in plan.tensors:
        whole = torch.arange(float(torch.Size(tensor.shape).numel()), device=device).reshape(tensor.shape)
        everything = Region(offset=(0,) * len(tensor.shape), shape=tensor.shape)
        wanted = tensor.dst.regions(tensor.shape)
        out = torch.full(wanted[rank].shape, -1.0, device=device) if rank in wanted else None
        sends, receives = [], []
        for move in tensor.moves:
            piece = whole[move.region.slices(everything)].contiguous()
            if move.is_local and move.dst == rank and out is not None:
                out[move.region.slices(wanted[rank])] = piece
            elif move.src == rank:
                sends.append(dist.P2POp(dist.isend, piece, move.dst))
            elif move.dst == rank:
                receives.append((dist.P2POp(dist.irecv, torch.empty_like(piece), move.src), move.region))
        ops = sends + [op for op, _ in receives]
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        for op, region in receives:
            if out is not None:
                out[region.slices(wanted[rank])] = op.tensor
        if out is not None and not torch.equal(out, whole[wanted[rank].slices(everything)]):
            raise RuntimeError(f"reshard: rank {rank} did not get the right numbers")


def _run_ranks(spec: SmokeSpec, worker: Worker) -> list[Fault]:
    """Start the processes, follow their reports until all are done, one fails or the time is over."""
    context = mp.get_context("spawn")
    reports = context.Queue()
    processes = [context.Process(target=worker, args=(r, spec, reports), daemon=True) for r in range(spec.world_size)]
    for process in processes:
        process.start()
    seen = dict.fromkeys(range(spec.world_size), (-1, "nothing, not even its start"))
    last = len(spec.groups) + 2
    deadline = time.monotonic() + spec.timeout_seconds
    failed: Fault | None = None
    try:
        while any(step < last for step, _ in seen.values()):
            try:
                rank, step, text = reports.get(timeout=0.2)
            except queue.Empty:
                dead = [r for r, p in enumerate(processes) if not p.is_alive() and seen[r][0] < last]
                if dead and reports.empty():
                    return [_died(r, processes[r].exitcode, seen[r][1]) for r in dead]
                if time.monotonic() > deadline:
                    return [failed] if failed else _silent(seen, spec.timeout_seconds)
                continue
            if step >= 0:
                seen[rank] = (step, text)
            elif failed is None:
                fix = "read the message, mend it and try again"
                failed = Fault(where=f"rank {rank}", found=f"failed at {seen[rank][1]}: {text}", fix=fix)
                seen[rank] = (last, text)
                # a rank that died without a word makes others fail: give the parent time to see it
                deadline = min(deadline, time.monotonic() + 2.0)
            else:
                seen[rank] = (last, text)
        return [failed] if failed else []
    finally:
        for process in processes:
            process.join(timeout=5.0 if failed is None and min(step for step, _ in seen.values()) >= last else 0.1)
            if process.is_alive():
                process.kill()
                process.join()


def _silent(seen: dict[int, tuple[int, str]], timeout_seconds: float) -> list[Fault]:
    """The ranks that are furthest behind; all others wait for them."""
    behind = min(step for step, _ in seen.values())
    faults = []
    for rank, (step, text) in seen.items():
        if step == behind:
            waiting = [str(r) for r, (s, _) in seen.items() if s > behind]
            others = f"; ranks {', '.join(waiting)} wait" if waiting else ""
            found = f"no answer in {timeout_seconds:.0f} s, last heard: {text}{others}"
            fix = "see whether its process runs and its device answers (nvidia-smi)"
            faults.append(Fault(where=f"rank {rank}", found=found, fix=fix))
    return faults


def _died(rank: int, code: int | None, text: str) -> Fault:
    return Fault(
        where=f"rank {rank}", found=f"ended with exit code {code}, last heard: {text}", fix="read its output above"
    )


def _distinct(groups: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Groups of two ranks and more, those with the same ranks under one name."""
    names: dict[tuple[int, ...], list[str]] = {}
    for name, ranks in groups:
        if len(ranks) > 1:
            names.setdefault(tuple(sorted(ranks)), []).append(name)
    return tuple((" = ".join(found), ranks) for ranks, found in names.items())


def _tiny_plan(devices: DeviceMap) -> ReshardPlan | None:
    """A small matrix from the actor's training layout to the generator's."""
    actor, rollout = devices.roles.get(Role.ACTOR), devices.roles.get(Role.ROLLOUT)
    if actor is None or rollout is None:
        return None
    weight = WeightShape(name="small", shape=_SHAPE, tp_dim=1)  # a row-wise matrix: the cuts differ
    try:
        train = training_mesh(actor)
        src = training_layout(weight, train, aligned=False)
        dst = generation_layout(weight, generation_mesh(actor, rollout))
    except RlspeedError:  # the map's own check has said what is wrong with it
        return None
    return plan_reshard([TensorRequest(name="small", shape=_SHAPE, wire_dtype="fp32", src=src, dst=dst)])
