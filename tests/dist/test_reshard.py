"""Live shards of every training layout arrive bit for bit, and nothing travels but what the plan lists.

One world of four gloo ranks works through all cases. Exact equality: bf16 of the same fp32 number is the same bits,
whoever rounds it. The bytes are counted at torch's collectives, not by the mover itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from rlspeed.engine import mover
from rlspeed.engine.parallelize import parallelize
from rlspeed.engine.reshard import Resharder, empty_targets
from rlspeed.engine.transit import Transit
from rlspeed.engine.world import device_mesh
from rlspeed.errors import LayoutError, RunError
from rlspeed.models.tp_rules import rules_for
from rlspeed.models.weights import live_weights, reshard_requests, weight_specs, weights_of
from rlspeed.planning.layout import Mesh
from rlspeed.planning.reshard import ReshardPlan, plan_reshard
from rlspeed.planning.transition import GenerationMesh, interval_generation, own_generation
from tests.dist.spawn import run_ranks
from tests.dist.tiny import tiny_batch, tiny_module

WORLD = 4
AXES = ("dp_replicate", "dp_shard", "sp", "tp")
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training layout on its ranks, and the generator's tensor parallel degree on its own."""

    train: tuple[int, ...] = (0, 1, 2, 3)
    degrees: tuple[int, int, int, int]
    aligned: bool = False
    gen: tuple[int, ...] = (0, 1, 2, 3)
    gen_tp: int
    family: str = "qwen2"
    kv_heads: int = 4
    bucket_bytes: int = 4096
    keep_old: bool = True

    def __str__(self) -> str:
        cuts = [f"{n}{d}" for n, d in zip(("copies", "dp", "sp", "tp"), self.degrees) if d > 1]
        where = "" if self.gen == self.train else f"-on-{''.join(map(str, self.gen))}"
        flags = "-aligned" * self.aligned + "-in-place" * (not self.keep_old)
        return f"{'-'.join(cuts)}-to-tp{self.gen_tp}{where}-kv{self.kv_heads}{flags}-{self.bucket_bytes}"


FOUR = ((1, 4, 1, 1), (1, 1, 1, 4), (1, 1, 4, 1), (1, 2, 1, 2), (1, 2, 2, 1), (1, 1, 2, 2), (2, 2, 1, 1))
TWO = ((1, 2, 1, 1), (1, 1, 1, 2), (1, 1, 2, 1))
CASES = (
    *(Case(degrees=d, gen_tp=tp) for d in FOUR for tp in (1, 2, 4)),
    *(Case(degrees=d, gen_tp=tp, aligned=True, keep_old=False) for d in FOUR[:1] + FOUR[3:5] for tp in (1, 2, 4)),
    # to ranks outside of the training group, and to more ranks than it has
    *(Case(train=(0, 1), degrees=d, gen=(2, 3), gen_tp=tp) for d in TWO for tp in (1, 2)),
    *(Case(train=(0, 1), degrees=d, gen=(0, 1, 2, 3), gen_tp=4, keep_old=False) for d in TWO),
    *(Case(train=(1, 2), degrees=d, gen=(3,), gen_tp=1) for d in TWO[:1]),
    # fewer KV heads than ranks, on either side
    Case(degrees=(1, 1, 1, 4), kv_heads=2, gen_tp=2, family="qwen3"),
    Case(degrees=(1, 2, 1, 2), kv_heads=1, gen_tp=4, family="qwen3"),
    Case(degrees=(1, 4, 1, 1), kv_heads=2, gen_tp=4, aligned=True, family="qwen3"),
    # one large bucket, and buckets smaller than a matrix
    Case(degrees=(1, 2, 1, 2), gen_tp=4, bucket_bytes=1 << 24),
    Case(degrees=(1, 4, 1, 1), gen_tp=1, bucket_bytes=100, keep_old=False),
)


def generation_of(case: Case) -> GenerationMesh:
    if case.gen == case.train:
        try:
            return interval_generation(training_ranks(case), case.gen_tp)
        except LayoutError:  # copies of a smaller training group: neighbours
            pass
    return own_generation(case.gen, case.gen_tp)


def training_ranks(case: Case) -> Mesh:
    copies, dp, sp, tp = case.degrees
    return Mesh.of(case.train, dp_replicate=copies, dp_shard=dp * sp, tp=tp)


@contextmanager
def counted() -> Iterator[dict[int, int]]:
    """Bytes that this rank hands to torch for each other place in the group, summed over calls."""
    sent: dict[int, int] = {}
    me = {"rank": -1}

    def add(place: int, count: int) -> None:
        if place != me["rank"]:
            sent[place] = sent.get(place, 0) + count

    def all_to_all(out: Any, tensor: Any, get: Any, give: Any, group: Any = None, async_op: bool = False) -> Any:
        me["rank"] = dist.get_rank(group)
        for place, count in enumerate(give):
            add(place, count * tensor.element_size())
        return original_all_to_all(out, tensor, get, give, group=group, async_op=async_op)

    def all_gather(out: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        me["rank"] = dist.get_rank(group)
        for place in range(dist.get_world_size(group)):
            add(place, tensor.numel() * tensor.element_size())
        return original_all_gather(out, tensor, group=group, async_op=async_op)

    def batch(ops: list[Any]) -> Any:
        for op in ops:
            if op.op is dist.isend:
                add(op.group_peer, op.tensor.numel() * op.tensor.element_size())
        return original_batch(ops)

    original_all_to_all, original_batch = dist.all_to_all_single, dist.batch_isend_irecv
    original_all_gather = mover._ALL_GATHER
    with (
        patch.object(dist, "all_to_all_single", all_to_all),
        patch.object(dist, "batch_isend_irecv", batch),
        patch.object(mover, "_ALL_GATHER", all_gather),
    ):
        yield sent


class Stage:
    """A case on this rank: the spread module where it trains, the plan, and the generator's tensors."""

    def __init__(self, case: Case, rank: int, meshes: dict[Any, Any], groups: dict[Any, Any]) -> None:
        self.case, self.rank = case, rank
        self.group = groups[tuple(sorted({*case.train, *case.gen}))]
        whole = tiny_module("policy", case.family, tied=case.family == "qwen2", kv_heads=case.kv_heads)
        self.specs = weight_specs(whole, whole.causal_lm.config)
        self.whole = {n: p.detach().clone() for n, p in live_weights(whole).items()}
        self.module = None
        if rank in case.train:
            self.module = whole
            parallelize(
                whole,
                meshes[case.train, case.degrees],
                rules_for(whole),
                compute=torch.float32,
                reduce=torch.float32,
                aligned=case.aligned,
            )
        self.plan = self.plan_for(aligned=case.aligned)
        self.targets = empty_targets(self.plan, rank, torch.bfloat16, CPU)
        for target in self.targets.values():
            target.fill_(7.0)

    def plan_for(self, *, aligned: bool) -> ReshardPlan:
        generation = generation_of(self.case)
        return plan_reshard(
            reshard_requests(self.specs, training_ranks(self.case), generation, aligned=aligned, wire_dtype="bf16")
        )

    def resharder(self, **changes: Any) -> Resharder:
        given: dict[str, Any] = {
            "plan": self.plan,
            "rank": self.rank,
            "sources": weights_of(self.module) if self.module is not None else dict,
            "targets": self.targets,
            "group": self.group,
            "device": CPU,
            "bucket_bytes": self.case.bucket_bytes,
            "keep_old": self.case.keep_old,
        }
        given |= changes
        return Resharder(given.pop("plan"), **given)

    def wrong(self, factor: float = 1.0) -> list[str]:
        """Names of the targets that are not the model's weights times `factor`, in bf16, bit for bit."""
        out = []
        for tensor in self.plan.tensors:
            if self.rank in tensor.dst.mesh.ranks:
                region = tensor.dst.region(tensor.shape, self.rank)
                part = tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape))
                expected = (self.whole[tensor.name][part] * factor).bfloat16()
                if not torch.equal(self.targets[tensor.name].view(torch.int16), expected.view(torch.int16)):
                    out.append(tensor.name)
        return out


def carry_out(case: Case, rank: int, meshes: dict[Any, Any], groups: dict[Any, Any]) -> dict[str, Any]:
    """Two pushes of a case, the second after every weight was halved."""
    stage = Stage(case, rank, meshes, groups)
    resharder = stage.resharder(verify="checksum")
    with counted() as sent, patch.object(Transit, "check", lambda self: None):
        pushed = resharder.push(1)
    members = dist.get_process_group_ranks(stage.group)
    by_rank = {members[place]: count for place, count in sent.items() if count}
    first = stage.wrong()
    if stage.module is not None:
        with torch.no_grad():  # a forward leaves FSDP2's root gathered: its copy is not what is sent
            stage.module(tiny_batch(0))
            for parameter in live_weights(stage.module).values():
                parameter.mul_(0.5)
    resharder.push(2)
    pairs = {(s, d): n for (s, d), n in stage.plan.bytes_by_pair().items() if s == rank}
    return {
        "first": first,
        "second": stage.wrong(0.5),
        "sent": {(rank, dst): count for dst, count in by_rank.items()},
        "planned": pairs,
        "own_count": (pushed.sent_bytes, pushed.received_bytes),
        "plan_count": (stage.plan.bytes_sent()[rank], stage.plan.bytes_received()[rank]),
        "total": stage.plan.num_bytes,
        "version": resharder.version,
        "buckets": pushed.buckets,
        "held": pushed.held_bytes,
        "how": sorted({b.how for b in resharder._route.cut.buckets}),
    }


def meshes_and_groups(cases: tuple[Case, ...]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Everything that makes process groups, in the same order on all ranks."""
    meshes: dict[Any, Any] = {}
    groups: dict[Any, Any] = {}
    for case in cases:
        key = (case.train, case.degrees)
        if key not in meshes:
            meshes[key] = device_mesh(Mesh.of(case.train, **dict(zip(AXES, case.degrees))), "cpu")
        union = tuple(sorted({*case.train, *case.gen}))
        if union not in groups:
            groups[union] = dist.new_group(list(union))
    return meshes, groups


def refused(work: Callable[[], object], kind: type[Exception]) -> str:
    """The message with which `work` fails."""
    try:
        work()
    except kind as error:
        return str(error)
    return ""


def failures(rank: int, meshes: dict[Any, Any], groups: dict[Any, Any]) -> dict[str, Any]:
    """What goes wrong on purpose; every rank tells what it saw."""
    case = Case(degrees=(1, 2, 1, 2), gen_tp=4)
    stage = Stage(case, rank, meshes, groups)
    out: dict[str, Any] = {}
    out["other cut"] = refused(lambda: stage.resharder(plan=stage.plan_for(aligned=True)), LayoutError)
    short = {n: t for n, t in stage.targets.items() if "q_proj.weight" not in n or rank}
    out["missing"] = refused(lambda: stage.resharder(targets=short), LayoutError)
    more = weights_of(stage.module)
    extra = lambda: more() | ({"model.adapter": torch.ones(2)} if rank == 1 else {})  # noqa: E731
    out["not in the plan"] = refused(lambda: stage.resharder(sources=extra), LayoutError)

    resharder = stage.resharder(verify="checksum")
    resharder.push(1)
    with torch.no_grad():
        for parameter in live_weights(stage.module).values():
            parameter.mul_(2.0)

    def spoil(self: Transit, number: int) -> Any:
        got = received(self, number)
        if rank == 2 and number == 0:
            got[0].view(-1)[0] += 1.0
        return got

    received = Transit._received
    with patch.object(Transit, "_received", spoil):
        out["spoiled"] = refused(lambda: resharder.push(2), RunError)
    out["after spoiled"] = (resharder.version, stage.wrong())

    def no_memory(self: Transit, number: int) -> None:
        if rank == 3:
            raise torch.OutOfMemoryError("no memory left")
        pack(self, number)

    pack = Transit._pack
    with patch.object(Transit, "_pack", no_memory):
        out["failed"] = refused(lambda: resharder.push(2), RunError)
    out["after failed"] = (resharder.version, stage.wrong())

    def broken(*args: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    with patch("rlspeed.engine.transit.start", broken):
        out["broken"] = refused(lambda: resharder.push(2), RunError)
    out["after broken"] = (resharder.version, stage.wrong())
    resharder.push(2)
    out["at last"] = (resharder.version, stage.wrong(2.0))

    in_place = stage.resharder(keep_old=False)
    out["before the first"] = refused(in_place.require_version, RunError)
    with patch.object(Transit, "_pack", no_memory):
        out["failed in place"] = refused(lambda: in_place.push(1), RunError)
    out["after failed in place"] = refused(in_place.require_version, RunError)
    in_place.push(1)
    out["mended"] = in_place.require_version()
    return out


def all_cases(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    meshes, groups = meshes_and_groups(CASES)
    found = {}
    for case in CASES:
        if rank in {*case.train, *case.gen}:
            try:
                found[str(case)] = carry_out(case, rank, meshes, groups)
            except Exception as error:
                raise RuntimeError(f"case {case}") from error
    dist.barrier()
    return found, failures(rank, meshes, groups)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """By rank: what each case gave, and what the failures on purpose did."""
    return run_ranks(all_cases, WORLD, tmp_path_factory.mktemp("reshard"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_arrive_bit_for_bit_with_the_planned_bytes(results: Any, case: Case) -> None:
    ranks = [found[str(case)] for found, _ in results if str(case) in found]
    assert len(ranks) == len({*case.train, *case.gen})
    for found in ranks:
        assert found["first"] == []
        assert found["second"] == []
        assert found["sent"] == found["planned"]
        assert found["own_count"] == found["plan_count"]
        assert found["version"] == 2
    _, dp, sp, tp = case.degrees
    if case.aligned and case.gen_tp == dp * sp * tp and case.kv_heads >= case.gen_tp:
        assert ranks[0]["total"] == 0
    if case.gen_tp == 1 and case.degrees == (1, 4, 1, 1):
        assert "all_gather" in ranks[0]["how"]
    if case.gen != case.train:
        assert ranks[0]["how"] == ["pairs"]


def test_a_plan_that_is_not_the_models_is_refused_at_bind(results: Any) -> None:
    """The plan of aligned FSDP2 for a model that is not: the weight is named with both regions, on every rank.

    It catches a torch release that cuts in another order, before the first wrong number moves. A weight that the
    generator lacks on one rank alone, and one that the plan does not know (sync-09: everything that trains is sent;
    sync-10: missing and extra names are one error), stop all ranks too.
    """
    for _, seen in results:
        assert "o_proj.weight: training holds [" in seen["other cut"]
        assert "planned [" in seen["other cut"]
        assert "rank 0: model.layers.0.self_attn.q_proj.weight: generation has no such tensor" in seen["missing"]
        assert "model.layers.1.self_attn.q_proj.weight" in seen["missing"]
        assert "rank 1: model.adapter: training has it and the plan does not know it" in seen["not in the plan"]


def test_checksums_refuse_what_arrived_changed(results: Any) -> None:
    """One element changed in one rank's receive buffer: all ranks refuse, and the first version stays, bit for bit."""
    for _, seen in results:
        assert "rank 2: " in seen["spoiled"]
        assert "is not what arrived" in seen["spoiled"]
        assert "the old weights stay in force" in seen["spoiled"]
        assert seen["after spoiled"] == (1, [])


def test_a_failed_transfer_leaves_the_old_version_in_force(results: Any) -> None:
    """One rank out of memory, and a connection that breaks: no rank hangs, none has new weights; the next push works.

    In place there is no old version to keep: then there is none at all, and generating is refused.
    """
    for _, seen in results:
        assert "rank 3: OutOfMemoryError: no memory left" in seen["failed"]
        assert seen["after failed"] == (1, [])
        assert "the transfer broke off: Connection closed by peer" in seen["broken"]
        assert seen["after broken"] == (1, [])
        assert seen["at last"] == (2, [])
        assert "weights of no version" in seen["before the first"]
        assert "the generator has no usable weights now" in seen["failed in place"]
        assert "weights of no version" in seen["after failed in place"]
        assert seen["mended"] == 1
