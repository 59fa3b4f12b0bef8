"""What `parallelize` refuses, and the arithmetic of slices; what it does on several ranks is in tests/dist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlspeed.engine.parallelize import _spread_faults, _uncut, grad_norm
from rlspeed.engine.ulysses import SequenceParallel, own_places
from rlspeed.errors import LayoutError
from rlspeed.models.build import PolicyModel, ValueModel, load_causal_lm
from rlspeed.models.tp_rules import rules_for


def model(tiny_models: dict[str, Path], kind: type[Any] = PolicyModel, *, padded: bool = False) -> Any:
    lm = load_causal_lm(str(tiny_models["qwen2"]), dtype=torch.float32, attention="packed")
    return kind(lm, backend="sdpa", padded=padded)


def sequence_parallel(size: int, rank: int) -> SequenceParallel:
    """A rank's view of a group; nothing here communicates."""
    return SequenceParallel(None, size, rank)  # type: ignore[arg-type]


def test_sequence_parallel_needs_packed_rows_and_whole_heads(tiny_models: dict[str, Path]) -> None:
    module = model(tiny_models, padded=True)
    faults = _spread_faults(module, rules_for(module), {"sp": 3, "tp": 1}, aligned=False)
    assert [f.found for f in faults] == [
        "padded training",
        "4 query heads on a tensor parallel rank over 3 ranks",
        "2 KV heads on a tensor parallel rank over 3 ranks",
    ]
    packed = model(tiny_models)
    assert _spread_faults(packed, rules_for(packed), {"sp": 4, "tp": 1}, aligned=False) == []
    assert _spread_faults(packed, rules_for(packed), {"sp": 2, "tp": 2}, aligned=False) == []
    # one query head is left on each tensor parallel rank
    assert len(_spread_faults(packed, rules_for(packed), {"sp": 2, "tp": 4}, aligned=False)) == 1


def test_aligned_fsdp_needs_an_even_division(tiny_models: dict[str, Path]) -> None:
    """o_proj reads 48 columns, down_proj 96: over 32 ranks the first cannot be cut evenly, over 9 neither can."""
    module = model(tiny_models)
    rules = rules_for(module)
    assert _spread_faults(module, rules, {"dp_shard": 16}, aligned=True) == []
    assert len(_spread_faults(module, rules, {"dp_shard": 16, "tp": 2}, aligned=True)) == 1
    assert len(_spread_faults(module, rules, {"dp_shard": 9}, aligned=True)) == 2
    assert _spread_faults(module, rules, {"dp_shard": 9}, aligned=False) == []


def test_only_norms_and_the_value_head_stay_whole(tiny_models: dict[str, Path]) -> None:
    """Biases of q, k and v are cut with their matrices; a matrix among these would be summed over ranks each step."""
    policy, value = model(tiny_models), model(tiny_models, ValueModel)
    for module, extra in ((policy, set()), (value, {"value_head.weight", "value_head.bias"})):
        whole = {id(p) for p in _uncut(module, rules_for(module))}
        names = {n for n, p in module.named_parameters() if id(p) in whole}
        assert {n for n in names if not n.endswith("norm.weight")} == extra
        assert len(names) == 2 * 2 + 1 + len(extra)


def test_a_row_that_does_not_divide_is_refused_with_the_multiple() -> None:
    with pytest.raises(LayoutError, match=r"(?s)10 tokens over 4 ranks.*pack with multiple=4"):
        sequence_parallel(4, 1).span(10)


def test_every_place_belongs_to_one_slice() -> None:
    """The token at a slice's first position is scored by the rank before: its hidden state predicts it."""
    places = torch.tensor([0, 2, 3, 4, 7])
    seen = []
    for rank in range(4):
        sp = sequence_parallel(4, rank)
        mine, own = own_places(sp, places, 8)
        start, end = sp.span(8)
        assert torch.equal(own + start, places[mine])
        assert bool(((own >= 0) & (own < end - start)).all())
        seen += places[mine].tolist()
    assert seen == places.tolist()
    chosen, own = own_places(None, places, 8)
    assert chosen == slice(None)
    assert own is places


def test_norm_of_plain_gradients() -> None:
    """3-4-5, in fp32 also for bf16 gradients; nothing to sum gives 0."""
    a, b = (torch.nn.Parameter(torch.zeros(2, dtype=d)) for d in (torch.float32, torch.bfloat16))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0], dtype=torch.bfloat16)
    assert float(grad_norm([a, b])) == 5.0
    assert grad_norm([a, b]).dtype == torch.float32
    assert float(grad_norm([torch.nn.Parameter(torch.zeros(1))])) == 0.0
