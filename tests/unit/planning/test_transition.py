"""The actor between training and generation: the paper's volumes, the groups at intervals, zero bytes where aligned."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from rlspeed.config.schema import Profile
from rlspeed.errors import ConfigError, LayoutError
from rlspeed.planning.devices import Placement
from rlspeed.planning.layout import Layout, Mesh
from rlspeed.planning.reshard import TensorRequest, least_bytes, plan_reshard
from rlspeed.planning.shape import ModelShape
from rlspeed.planning.transition import (
    actor_way,
    interval_generation,
    own_generation,
    received_bytes,
    training_layout,
    transition_requests,
)

QWEN_7B = ModelShape.from_config(
    {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    }
)
LLAMA_SMALL = ModelShape(
    family="llama", hidden=64, layers=2, heads=8, kv_heads=4, head_dim=8, intermediate=96, vocab=128, tied=True
)


@pytest.mark.parametrize("name", ["t4p2d1_tg2pg1", "t4p1d2_tg2pg1", "t8p1d2_tg1pg1"])
def test_hybridflow_table_2(conformance: dict[str, dict], name: str) -> None:
    """Received, peak and redundant share of the model per rank, counted in plans of a model of (layers, rows).

    The three engines differ in their layouts alone: DS-Chat gathers over all ranks, HybridFlow-V over a training
    replica (both hold the whole model at their peak), HybridFlow goes straight to generation shards at intervals.
    """
    case = conformance[f"reshard/table2_{name}"]
    t, p, d, tg, pg = (case["input"][k] for k in ("t", "p", "d", "tg", "pg"))
    world, shape = t * p * d, (16, 16)
    size = shape[0] * shape[1]
    mesh = Mesh.of(range(world), d=d, p=p, t=t)
    train = Layout(mesh=mesh, cuts=(("p",), ("t",)))
    all_ranks = Layout(mesh=mesh, cuts=(("p",), ("t", "d")))
    whole = Layout(mesh=mesh, cuts=((), ()))
    interval = Layout(mesh=mesh.split("t", tg, "mt").split("p", pg, "mp"), cuts=(("p",), ("t",)))

    def largest(layout: Layout) -> float:
        return max(r.num_elements for r in layout.regions(shape).values()) / size

    def outside(src: Layout, generation: Layout) -> float:
        """Training elements that do not lie in the rank's generation shard, where they would be used again."""
        held, wanted = src.regions(shape), generation.regions(shape)
        kept = {rank: held[rank].meet(wanted[rank]) for rank in mesh.ranks}
        return max(held[r].num_elements - (k.num_elements if k else 0) for r, k in kept.items()) / size

    expected = case["expected"]
    for engine, src, at_peak in (
        ("ds_chat", all_ranks, whole),
        ("hybridflow_v", train, whole),
        ("hybridflow", train, interval),
    ):
        want, comm = expected[engine], max(least_bytes(shape, src, at_peak, 1).values()) / size
        # the first two keep their training shard beside the generation weights; at intervals it is part of them
        redundant = outside(src, interval) if engine == "hybridflow" else largest(src)
        found = (comm, largest(at_peak), redundant)
        assert found == pytest.approx((want["comm"], want["peak"], want["redundancy"]), abs=case["abs_tol"]), engine
    if tg * pg > 1:  # groups of neighbours: some rank would have to keep its training shard as well
        grid = Mesh.of(range(world), rest=world // (tg * pg), pg=pg, tg=tg)
        assert outside(train, Layout(mesh=grid, cuts=(("pg",), ("tg",)))) > 0


def test_rank_groups(conformance: dict[str, dict]) -> None:
    """reshard/rank_groups: generation groups at the interval t / tg, so rank r holds shard floor((r mod t) tg / t)."""
    case = conformance["reshard/rank_groups"]
    given, expected = case["input"], case["expected"]
    t, d, tg = given["t"], given["d"], given["tg"]
    train = Mesh.of(range(given["world"]), dp_shard=d, tp=t)
    generation = interval_generation(train, tg)

    def as_lists(groups: tuple[tuple[int, ...], ...]) -> list[list[int]]:
        return [list(g) for g in groups]

    assert as_lists(train.groups("tp")) == expected["train_tp"]
    assert as_lists(generation.groups()) == expected["gen_tp"]
    assert as_lists(generation.mesh.groups("micro_dp")) == expected["micro_dp"]
    vanilla = own_generation(tuple(range(given["world"])), tg)
    assert as_lists(vanilla.groups()) == expected["vanilla_gen_tp_with_redundancy"]
    shard = Layout(mesh=generation.mesh, cuts=(generation.axes,))
    for rank in range(given["world"]):
        assert shard.region((tg,), rank).offset[0] == (rank % t) * tg // t


@pytest.mark.parametrize(("tg", "gigabytes"), [(1, 13.3), (2, 5.7), (4, 1.9)])
def test_aligned_fsdp_bytes(tg: int, gigabytes: float) -> None:
    """Qwen2.5-7B over 8 ranks in bf16: M / tg (1 - tg / 8) per rank, and each rank sends as much as any other."""
    train = Mesh.of(range(8), dp_shard=8, tp=1)
    plan = plan_reshard(transition_requests(QWEN_7B, train, interval_generation(train, tg), aligned=True))
    received = set(plan.bytes_received().values())
    assert received_bytes(QWEN_7B, train, interval_generation(train, tg), aligned=True) == plan.bytes_received()
    assert len(received) == 1
    assert received == set(plan.bytes_sent().values())
    assert received.pop() / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(("dp_shard", "tp", "tg"), [(4, 1, 4), (2, 2, 4), (1, 4, 4), (2, 2, 2)])
def test_aligned_fsdp_to_tensor_parallel_moves_nothing(dp_shard: int, tp: int, tg: int) -> None:
    """FSDP(N) over TP to TP on the same devices: 0 bytes where the shard is already the generation's slice."""
    train = Mesh.of(range(dp_shard * tp), dp_shard=dp_shard, tp=tp)
    plan = plan_reshard(transition_requests(LLAMA_SMALL, train, interval_generation(train, tg), aligned=True))
    assert tg == tp * dp_shard or plan.num_bytes > 0
    if tg == tp * dp_shard:
        assert plan.num_bytes == 0
        assert all(m.is_local for t in plan.tensors for m in t.moves)


def test_default_fsdp_moves_the_row_wise_matrices_and_norms() -> None:
    """Without shard placement the same transition costs exactly o_proj, down_proj and the norms, less what stays."""
    train = Mesh.of(range(4), dp_shard=4, tp=1)
    plan = plan_reshard(transition_requests(LLAMA_SMALL, train, interval_generation(train, 4), aligned=False))
    moving = {t.name.split(".")[-2] for t in plan.tensors if any(not m.is_local for m in t.moves)}
    assert moving == {"o_proj", "down_proj", "input_layernorm", "post_attention_layernorm", "norm"}


def test_cut_order_of_fsdp_over_tensor_parallel() -> None:
    """Rank (dp 1, tp 0) holds the second half of the first half: tensor parallel is the outer cut."""
    weight = next(w for w in LLAMA_SMALL.weights() if w.name.endswith("q_proj.weight"))
    layout = training_layout(weight, Mesh.of(range(4), dp_shard=2, tp=2), aligned=False)
    assert layout.cuts == (("tp", "dp_shard"), ())
    assert layout.region(weight.shape, 2).offset == (16, 0)
    assert layout.region(weight.shape, 1).offset == (32, 0)


def test_dev_10_key_and_value_heads_are_replicated_never_halved() -> None:
    """dev-10: 32 heads, 4 KV heads of 128, tp 8: ranks 0 and 1 hold KV head 0, ranks 2 and 3 head 1, and so on."""
    shape = ModelShape(
        family="llama", hidden=4096, layers=1, heads=32, kv_heads=4, head_dim=128, intermediate=64, vocab=64
    )
    generation = own_generation(tuple(range(8)), 8)
    requests = transition_requests(shape, Mesh.of(range(8), dp_shard=8, tp=1), generation, aligned=True)
    layout = next(r.dst for r in requests if r.name.endswith("k_proj.weight"))
    for rank in range(8):
        region = layout.region((512, 4096), rank)
        assert (region.offset[0], region.shape[0]) == (rank // 2 * 128, 128)


def test_to_ranks_outside_the_training_group() -> None:
    """Disjoint groups: everything travels, at the lower bound, from the training ranks alone."""
    train = Mesh.of(range(4), dp_shard=4, tp=1)
    plan = plan_reshard(transition_requests(LLAMA_SMALL, train, own_generation((4, 5), 2), aligned=False))
    whole = [t for t in plan.tensors if t.name.endswith("norm.weight") or "layernorm" in t.name]
    cut = sum(2 * w.num_elements for w in LLAMA_SMALL.weights() if w.tp_dim is not None)
    norms = 2 * sum(t.shape[0] for t in whole)
    assert plan.num_bytes == cut + 2 * norms
    assert {a for a, _ in plan.bytes_by_pair()} == {0, 1, 2, 3}


def test_degrees_that_do_not_fit_are_refused() -> None:
    train = Mesh.of(range(8), dp_shard=4, tp=2)
    for tp in (3, 5, 16):
        with pytest.raises(LayoutError):
            interval_generation(train, tp)
    with pytest.raises(LayoutError):
        own_generation(tuple(range(6)), 4)
    fsdp = Mesh.of(range(8), dp_shard=8, tp=1)
    with pytest.raises(LayoutError, match="28 heads over dp_shard = 8"):
        transition_requests(QWEN_7B, fsdp, interval_generation(fsdp, 8), aligned=True)


def test_weight_table_counts_the_parameters() -> None:
    """Qwen2.5-7B has 7,615,616,512 parameters (its model card: 7.61 B); tied heads count once."""
    assert QWEN_7B.num_params == 7_615_616_512
    for shape in (QWEN_7B, LLAMA_SMALL):
        assert shape.num_params == sum(w.num_elements for w in shape.weights())
    assert QWEN_7B.kv_elements_per_token == 2 * 28 * 4 * 128


def test_config_faults_are_all_named() -> None:
    with pytest.raises(ConfigError, match="mamba"):
        ModelShape.from_config({"model_type": "mamba"})
    with pytest.raises(ConfigError) as caught:
        ModelShape.from_config({"model_type": "llama", "hidden_size": 8})
    assert len(caught.value.faults) == 4


def test_names_are_those_of_the_request() -> None:
    layout = Layout(mesh=Mesh.of([0], tp=1), cuts=((), ()))
    request = TensorRequest(name="a.weight", shape=(2, 3), wire_dtype="bf16", src=layout, dst=layout)
    (tensor,) = plan_reshard([request]).tensors
    assert (tensor.name, tensor.shape, tensor.wire_dtype) == ("a.weight", (2, 3), "bf16")
    assert plan_reshard([request]).bytes_copied() == {0: 12}


def test_the_way_of_a_run() -> None:
    """Slices only for a generator that takes them; aligned only where that saves something and divides evenly."""
    actor = Placement(device="cpu", ranks=(0, 1, 2, 3))

    def way_of(shape: ModelShape, *, tp: int, **own: bool) -> tuple[int, bool]:
        profile = Profile.model_validate({"model": {"path": "m", "actor": own}, "data": {"train_files": "d"}})
        with patch("rlspeed.planning.transition.generator_placement", lambda *_: replace(actor, tp=tp)):
            way = actor_way(profile, actor, shape)
        return way.generation.tp, way.aligned

    uneven = replace(LLAMA_SMALL, intermediate=98)  # 98 columns of down_proj over four ranks
    assert way_of(LLAMA_SMALL, tp=1) == (1, False)
    assert way_of(LLAMA_SMALL, tp=4) == (4, True)
    assert way_of(uneven, tp=2) == (2, False)
    assert way_of(LLAMA_SMALL, tp=4, use_vllm_for_generation=True) == (1, False)
    assert way_of(LLAMA_SMALL, tp=4, use_3d_hybrid_engine=False) == (1, False)
