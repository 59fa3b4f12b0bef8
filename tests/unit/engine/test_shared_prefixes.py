"""Shared prompts are the plain pack: attention, log-probs, entropies, values, losses and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlspeed.algorithms import loss
from rlspeed.engine.attention import varlen_attention
from rlspeed.engine.attention_shared import shared_attention
from rlspeed.engine.packed import PackedBatch, pack_sequences
from rlspeed.engine.packed_shared import pack_shared
from rlspeed.errors import LayoutError
from rlspeed.models.attention_hook import packed_attention_kwargs
from rlspeed.models.build import PolicyModel, ValueModel, load_causal_lm

PROMPT_A, PROMPT_B, PROMPT_C = [5, 6, 7, 8, 9], [40, 41], [60]
ROWS = [
    *([*PROMPT_A, *answer] for answer in ([11, 12, 13, 2], [14], [15, 16, 17, 18, 19, 20, 2])),
    [*PROMPT_B, 21, 22, 2],
    *([*PROMPT_C, *answer] for answer in ([23, 24], [25, 26, 27])),
]
PROMPTS, GROUPS = [5, 5, 5, 2, 1, 1], [0, 0, 0, 1, 2, 2]
# fp32 on CPU: the same dot products in another order, as in test_packed
ATOL = 1e-5


def both(**options) -> tuple[PackedBatch, PackedBatch]:
    return pack_sequences(ROWS, PROMPTS, **options), pack_shared(ROWS, PROMPTS, GROUPS, **options)


def test_layout() -> None:
    plain, shared = both(sequence_ids=[10, 11, 12, 13, 14, 15])
    assert shared.num_tokens == plain.num_tokens - 2 * 5 - 1
    assert shared.sequence_ids == (-1, 10, 11, 12, -1, 13, -1, 14, 15)
    assert torch.equal(shared.input_ids[shared.response_index()], plain.input_ids[plain.response_index()])
    assert torch.equal(shared.positions[shared.response_index()], plain.positions[plain.response_index()])
    assert torch.equal(shared.input_ids[shared.source_index()], plain.input_ids[plain.source_index()])
    assert torch.equal(plain.source_index(), plain.response_index() - 1)
    owners = [shared.sequence_ids[s] for s in shared.segment_ids().tolist()]
    assert owners == [plain.sequence_ids[s] for s in plain.segment_ids().tolist()]
    moved = shared.to("meta")
    assert moved.prefixes is not None
    assert moved.source_index().device.type == moved.prefixes.cu_prompts.device.type == "meta"


def test_sequences_that_do_not_train() -> None:
    plain, shared = both(trains=[True, False, True, True, False, True])
    assert torch.equal(shared.input_ids[shared.response_index()], plain.input_ids[plain.response_index()])


def test_impossible_packs_are_told() -> None:
    with pytest.raises(LayoutError, match="another prompt"):
        pack_shared([[1, 2, 3], [1, 9, 3]], [2, 2], [0, 0])
    with pytest.raises(LayoutError, match="packing 1 sequences"):
        pack_shared([[1, 2]], [1], [])
    shared = both()[1]
    q = torch.zeros(shared.num_tokens, 1, 8)
    with pytest.raises(LayoutError, match="sliding window of 4"):
        shared_attention(q, q, q, shared.cu_seqlens, shared.lengths, shared.prefixes, window=4, backend="sdpa")
    with pytest.raises(LayoutError, match="together with sequence parallel"):
        packed_attention_kwargs(shared.cu_seqlens, shared.lengths, shared.max_seqlen, "sdpa", object(), shared.prefixes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_is_that_of_whole_sequences(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Outputs and gradients of q, k, v: what several copies of a prompt's token get is added up."""
    plain, shared = both()
    torch.manual_seed(0)
    # where each token of the plain pack lies in the shared one
    place, start = [], {}
    for row, (group, prompt) in enumerate(zip(GROUPS, PROMPTS)):
        segment = shared.sequence_ids.index(row)
        own = int(shared.cu_seqlens[segment])
        if group not in start:
            start[group] = own - prompt
        place.extend([*range(start[group], start[group] + prompt), *range(own, own + shared.lengths[segment])])
    index = torch.tensor(place)
    assert torch.equal(shared.input_ids[index], plain.input_ids)
    leaves = [torch.randn(shared.num_tokens, n, 8, dtype=dtype).requires_grad_() for n in (heads, kv_heads, kv_heads)]
    want = varlen_attention(
        *(x[index] for x in leaves), plain.cu_seqlens, plain.lengths, max_seqlen=plain.max_seqlen, backend="sdpa"
    )
    assert shared.prefixes is not None
    got = shared_attention(*leaves, shared.cu_seqlens, shared.lengths, shared.prefixes, backend="sdpa")
    limit = 1e-12 if dtype == torch.float64 else ATOL
    torch.testing.assert_close(got[index], want, atol=limit, rtol=0)
    upstream = torch.randn_like(got)[index]
    expected = torch.autograd.grad(want, leaves, upstream)
    for a, b in zip(torch.autograd.grad(got[index], leaves, upstream), expected):
        torch.testing.assert_close(a, b, atol=limit, rtol=0)


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def policy(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> PolicyModel:
    path = str(tiny_models[request.param])
    return PolicyModel(load_causal_lm(path, dtype=torch.float32, attention="packed"), backend="sdpa", padded=False)


def test_model_loss_and_gradients_are_those_of_the_plain_pack(policy: PolicyModel) -> None:
    """Each family, grouped heads: log-probs, entropies, the policy loss by sequences and every gradient."""
    results = []
    for batch in both():
        policy.zero_grad()
        logprobs, entropy = policy(batch)
        assert entropy is not None
        spread = torch.linspace(-1, 1, logprobs.numel())
        weights = loss.token_weights(
            "seq-mean-token-mean",
            batch.segment_ids(),
            batch.num_sequences,
            loss.GlobalCounts(tokens=logprobs.numel(), sequences=len(ROWS)),
        )
        out = loss.ppo_policy_loss(
            logprobs, logprobs.detach() + 0.1 * spread, spread, weights, clip_low=0.2, clip_high=0.2, dual_clip=3.0
        ).plus(loss.entropy_bonus(entropy, weights, coef=0.01))
        out.loss.backward()
        grads = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
        results.append((logprobs.detach(), entropy.detach(), out.loss.detach(), grads))
    (logprobs, entropy, total, grads), shared = results[0], results[1]
    torch.testing.assert_close(shared[0], logprobs, atol=ATOL, rtol=0)
    torch.testing.assert_close(shared[1], entropy, atol=ATOL, rtol=0)
    torch.testing.assert_close(shared[2], total, atol=1e-6, rtol=0)
    assert len(grads) == len(list(policy.parameters()))
    assert max(float(g.abs().max()) for g in grads) > 1e-2, "gradients that are not nothing"
    for a, b in zip(shared[3], grads):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_values_are_those_of_the_plain_pack(tiny_models: dict[str, Path]) -> None:
    lm = load_causal_lm(str(tiny_models["llama"]), dtype=torch.float32, attention="packed")
    model = ValueModel(lm, backend="sdpa", padded=False)
    torch.nn.init.normal_(model.value_head.weight)
    plain, shared = both()
    torch.testing.assert_close(model(shared), model(plain), atol=ATOL, rtol=0)


def test_one_answer_never_moves_another(policy: PolicyModel) -> None:
    """Changing a token of one answer leaves every other answer's log-probs as they are, bit for bit."""
    before = policy(both()[1])[0]
    changed = [[*ROWS[0][:5], 50, *ROWS[0][6:]], *ROWS[1:]]
    after = policy(pack_shared(changed, PROMPTS, GROUPS))[0]
    assert not torch.equal(before[:4], after[:4])
    assert torch.equal(before[4:], after[4:])
