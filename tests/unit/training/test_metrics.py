from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlspeed.algorithms import loss
from rlspeed.training import declared, metrics
from rlspeed.training.metrics import StepMetrics

ROOT = Path(__file__).parents[3]


def reduce_ranks(ranks: Sequence[StepMetrics]) -> dict[str, float]:
    """What every rank would get: the contributions are collected first, then each rank reduces the same list."""
    sent: list[Any] = []

    def collect(value: Any) -> list[Any]:
        sent.append(value)
        return [value]

    for rank in ranks:
        rank.reduce(collect)
    results = [rank.reduce(lambda _: sent) for rank in ranks]
    assert all(r == results[0] for r in results)
    return results[0]


def test_num_02_a_mean_is_over_all_tokens_of_all_ranks():
    """num-02: one token of 4 on rank 0, tokens 1, 1, 2 on rank 1: 2.0, not the mean of means 2.667."""
    a, b = StepMetrics(), StepMetrics()
    a.add("actor/entropy", torch.tensor(4.0), 1)
    b.add("actor/entropy", 4.0, 3)
    assert reduce_ranks([a, b])["actor/entropy"] == 2.0


def test_reductions_and_ranks_that_add_nothing():
    a, b = StepMetrics(), StepMetrics()
    a.add_spread("critic/values", torch.tensor([1.0, 3.0]))
    a.add_spread("critic/values", torch.tensor([-2.0]))
    b.add_spread("critic/values", torch.zeros(0))
    b.add("reward/failed", 2)
    b.add("rollout_corr/logprob_diff_max", torch.tensor(0.5))
    a.add("training/epoch", 3)
    out = reduce_ranks([a, b])
    assert out["critic/values/mean"] == pytest.approx(2 / 3)
    assert (out["critic/values/max"], out["critic/values/min"]) == (3.0, -2.0)
    assert (out["reward/failed"], out["rollout_corr/logprob_diff_max"], out["training/epoch"]) == (2.0, 0.5, 3.0)


def test_losses_are_sums_over_micro_batches_and_means_over_updates():
    """Two updates with losses 1 + 2 (two ranks) and 5 (one rank): mean 4; clipped share over all tokens."""
    a, b = StepMetrics(), StepMetrics()

    def out(value: float, clipped: int, tokens: int) -> loss.LossOut:
        sums = {"pg_loss": torch.tensor(value), "pg_clipfrac": torch.tensor(float(clipped))}
        return loss.LossOut(loss=torch.tensor(value), metrics=sums, tokens=tokens)

    a.add_loss("actor", out(1.0, 1, 4))
    b.add_loss("actor", out(2.0, 0, 2))
    a.add_loss("actor", out(5.0, 2, 4))
    b.add_loss("actor", out(0.0, 0, 0))
    for rank in (a, b):
        rank.add_update("actor", grad_norm=2.0, lr=0.1, empty=False)
        rank.add_update("actor", grad_norm=4.0, lr=0.3, empty=False)
        rank.add_update("actor", grad_norm=0.0, lr=0.3, empty=True)
    got = reduce_ranks([a, b])
    assert got["actor/pg_loss"] == 4.0
    assert got["actor/pg_clipfrac"] == pytest.approx(0.3)
    assert (got["actor/grad_norm"], got["actor/lr"]) == (3.0, pytest.approx(0.2))
    assert got["actor/empty_updates"] == pytest.approx(1 / 3)


def test_num_05_a_step_without_tokens_is_counted_as_empty():
    """num-05: no loss to report, and it says so."""
    step = StepMetrics()
    step.add_update("actor", grad_norm=0.0, lr=0.1, empty=True)
    assert reduce_ranks([step]) == {"actor/empty_updates": 1.0}
    step.add("actor/entropy", 0.0, 0)
    assert "actor/entropy" not in reduce_ranks([step])


def test_every_loss_metric_is_declared_with_its_denominator():
    roles = {"vf_loss": "critic", "vf_clipfrac": "critic", "vpred_mean": "critic"}
    for name, denominator in loss.DENOMINATORS.items():
        reduction = declared.declaration(f"{roles.get(name, 'actor')}/{name}").reduction
        assert reduction == {"tokens": "mean", "updates": "per_update"}[denominator]


def test_undeclared_and_misused_metrics_raise():
    step = StepMetrics()
    with pytest.raises(LookupError, match="critic/scores/mean"):
        step.add("critic/scores/mean", 1.0, 1)
    with pytest.raises(ValueError, match="needs a count"):
        step.add("actor/entropy", 1.0)
    with pytest.raises(ValueError, match="needs a count"):
        step.add("reward/failed", 1.0, 2)
    with pytest.raises(LookupError):
        metrics.split({"timing_s/gen/extra": 1.0})


def test_nan_is_shown_whatever_the_order():
    for values in ([math.nan, 1.0], [1.0, math.nan]):
        step = StepMetrics()
        for v in values:
            step.add("rollout_corr/logprob_diff_max", v)
        assert math.isnan(reduce_ranks([step])["rollout_corr/logprob_diff_max"])


def test_rep_07_memory_is_that_of_the_largest_rank_with_its_number():
    """rep-07: rank 1 holds more; on CPU it is the resident peak, labelled so, and never 0."""
    ranks = [StepMetrics() for _ in range(3)]
    for rank, extra in zip(ranks, (0.0, 0.2, 0.1)):
        rank.add("perf/max_rss_gb", 1.0 + extra)
    out = reduce_ranks(ranks)
    assert (out["perf/max_rss_gb"], out["perf/max_memory_rank"]) == (1.2, 1.0)
    ranks[2].add("perf/max_memory_allocated_gb", 5.0)
    ranks[1].add("perf/max_memory_allocated_gb", 4.0)
    assert reduce_ranks(ranks)["perf/max_memory_rank"] == 2.0
    real = StepMetrics()
    real.add_memory(torch.device("cpu"))
    got = reduce_ranks([real])
    assert 0.01 < got["perf/max_rss_gb"] < 1000
    assert "perf/max_memory_allocated_gb" not in got


def test_throughput_reference():
    cases = json.loads((ROOT / "tests/conformance/cases.json").read_text())["cases"]
    case = next(c for c in cases if c["id"] == "metrics/throughput")
    given = case["input"]
    values = {
        "tokens/prompt": given["prompt_tokens"],
        "tokens/response": given["response_tokens"],
        "timing_s/step": given["step_seconds"],
    }
    out = metrics.performance(values, ranks=given["n_gpus"])
    assert out["perf/throughput"] == pytest.approx(case["expected"]["throughput"], abs=case["abs_tol"])
    assert out["perf/throughput_response"] == pytest.approx(case["expected"]["response_only"], abs=case["abs_tol"])


def test_rep_01_padding_is_in_no_rate():
    """rep-01: rows of 3 and 10 tokens, 5 of them trained, in 1 s, padded (7 pads) or packed: the same two rates."""
    rates = []
    for padding in (7, 0):
        step = StepMetrics()
        step.add("tokens/prompt", 8)
        step.add("tokens/response", 5)
        step.add("tokens/trained", 5)
        step.add("tokens/padding", padding)
        step.add_seconds({"step": 1.0})
        out = reduce_ranks([step])
        assert out["tokens/padding"] == padding
        rates.append((out["perf/processed_tokens_per_s"], out["perf/trained_tokens_per_s"]))
    assert rates == [(13.0, 5.0), (13.0, 5.0)]


def test_rep_09_tokens_are_those_of_all_ranks_and_micro_batches():
    """rep-09: 2 ranks, 4 micro-batches each of 1000 tokens: 8000 per step, 4000 per rank and second in 1 s."""
    ranks = [StepMetrics(), StepMetrics()]
    for rank in ranks:
        for _ in range(4):
            rank.add("tokens/response", 1000)
        rank.add_seconds({"step": 1.0})
    out = reduce_ranks(ranks)
    assert (out["perf/total_num_tokens"], out["perf/throughput"]) == (8000.0, 4000.0)


def test_phase_times_are_those_of_the_slowest_rank():
    a, b = StepMetrics(), StepMetrics()
    a.add_seconds({"gen": 1.0, "update_actor": 3.0, "save_checkpoint": 1.0, "step": 4.0})
    b.add_seconds({"gen": 2.0, "update_actor": 1.0, "step": 4.5})
    a.add("tokens/prompt", 100)
    b.add("tokens/response", 400)
    out = reduce_ranks([a, b])
    assert (out["timing_s/gen"], out["timing_s/update_actor"], out["perf/time_per_step"]) == (2.0, 3.0, 4.5)
    assert out["timing_per_token_ms/gen"] == pytest.approx(5.0)
    assert out["timing_per_token_ms/update_actor"] == pytest.approx(6.0)
    assert not {"timing_per_token_ms/step", "timing_per_token_ms/save_checkpoint"} & set(out)


def test_split_keeps_the_clock_out_of_the_repeatable_file():
    values = {"actor/pg_loss": 1.0, "timing_s/gen": 2.0, "perf/throughput": 3.0, "tokens/trained": 4.0}
    values |= {"val-core/openai/gsm8k/acc/mean@8": 0.5}
    repeatable, clock = metrics.split(values)
    assert sorted(repeatable) == ["actor/pg_loss", "tokens/trained", "val-core/openai/gsm8k/acc/mean@8"]
    assert sorted(clock) == ["perf/throughput", "timing_s/gen"]


def test_seqlen_balance():
    out = metrics.seqlen_balance([10, 30], [20, 20])
    assert out["global_seqlen/minmax_diff"] == 20.0
    assert (out["global_seqlen/balanced_min"], out["global_seqlen/mean"]) == (20.0, 20.0)
    assert all(declared.declaration(name) for name in out)


def test_no_name_has_two_declarations():
    names = [m.name for section in declared.SECTIONS.values() for m in section]
    assert len(names) == len(set(names))
    assert all(m.meaning.endswith(".") for section in declared.SECTIONS.values() for m in section)


def test_reference_page_is_up_to_date():
    page = ROOT / "docs/reference/metrics.md"
    assert page.read_text() == declared.metrics_reference(), "write it again: the command is in its first lines"
