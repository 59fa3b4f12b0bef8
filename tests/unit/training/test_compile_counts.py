"""Compiled blocks are compiled once for packs of all sizes, so packs are not filled up to fixed sizes."""

from __future__ import annotations

from functools import partialmethod

import pytest
import torch
import torch._dynamo.utils
from torch import nn

from rlspeed.engine.packed import pack_sequences
from rlspeed.engine.parallelize import compile_blocks
from rlspeed.models.build import PolicyModel, load_causal_lm


def graphs() -> int:
    """Graphs compiled since the last reset."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.timeout(300)
def test_packs_of_all_sizes_share_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted without making machine code. The attention is called from between two graphs of a block; after the
    first packs of several sequences, of a single token (a spare bin) and of one sequence nothing is compiled again.
    """
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = PolicyModel(
        load_causal_lm("quickstart", dtype=torch.float32, attention="packed"), backend="sdpa", padded=False
    )
    compile_blocks([*model.causal_lm.model.layers, model.causal_lm.model.norm])

    def run(*lengths: int) -> int:
        batch = pack_sequences([[5 + i % 60 for i in range(n)] for n in lengths], [1] * len(lengths))
        with torch.no_grad():
            model(batch)
        logprobs, _ = model(batch)
        logprobs.sum().backward()
        return graphs()

    first = run(7, 3, 12)
    assert 0 < first <= 12
    run(1)
    warm = run(5)
    assert warm <= 3 * first
    later = ((9, 9, 2, 4), (33,), (2, 3), (61, 1, 1), (17, 30, 8, 8, 8), (1,))
    assert [run(*lengths) for lengths in later] == [warm] * len(later)
    # the count is real: a block that is told to specialise is compiled for each size
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in model.causal_lm.model.layers:
        block.compile(dynamic=False)
    before = run(7, 3, 12)
    assert run(5, 6) > before
    torch._dynamo.reset()
