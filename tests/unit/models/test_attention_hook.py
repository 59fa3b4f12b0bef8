"""transformers models with rlspeed's packed attention: packed equals one by one, boundaries only by argument."""

from __future__ import annotations

import pytest
import torch

from rlspeed.errors import LayoutError
from rlspeed.models.attention_hook import PACKED_ATTENTION, packed_attention_kwargs, register_attention

FAMILIES = ["llama", "qwen2", "qwen3", "qwen2-window"]


def tiny(family, attention):
    """A two-layer model of the family in fp32; weights depend on the family only."""
    import transformers

    register_attention()
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family.partition("-")[0]]
    extra = {}
    if family == "qwen2-window":
        extra = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attn_implementation=attention,
        **extra,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    assert model.config._attn_implementation == attention
    # fresh norms and biases are the same for every layer and hide mistakes
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def pack(sequences):
    lengths = tuple(len(s) for s in sequences)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    ids = torch.tensor([x for s in sequences for x in s])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return ids, positions, packed_attention_kwargs(bounds, lengths, max(lengths), "sdpa")


SEQUENCES = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18], [1, 2, 3]]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_one_by_one(family):
    """Each family hands the boundaries down to every layer: packed logits are those of single sequences (1e-5)."""
    ids, positions, kwargs = pack(SEQUENCES)
    with torch.no_grad():
        got = tiny(family, PACKED_ATTENTION)(input_ids=ids, position_ids=positions, use_cache=False, **kwargs).logits[0]
        single = tiny(family, "eager")
        want = torch.cat([single(input_ids=torch.tensor([s]), use_cache=False).logits[0] for s in SEQUENCES])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_pack_01_later_documents_do_not_see_earlier_ones(family):
    """pack-01 through a whole model: another first token, not one bit of difference in documents 2 to 4; gradient 0."""
    model = tiny(family, PACKED_ATTENTION)
    ids, positions, kwargs = pack(SEQUENCES)
    embedded = model.model.embed_tokens(ids).detach().requires_grad_()
    out = model(inputs_embeds=embedded, position_ids=positions, use_cache=False, **kwargs).logits[0]
    (grad,) = torch.autograd.grad(out[4:].square().sum(), embedded)
    assert (grad[0, :4] == 0).all()
    assert (grad[0, 4:] != 0).any()
    changed = ids.clone()
    changed[0, 0] = 50
    with torch.no_grad():
        after = model(input_ids=changed, position_ids=positions, use_cache=False, **kwargs).logits[0]
    assert torch.equal(after[4:], out[4:].detach())


def test_pack_09_window_reaches_the_layer():
    """pack-09: a model with a window of 4 in one layer; a far token changes nothing, in a model without it does."""
    for family, same in (("qwen2-window", True), ("qwen2", False)):
        model = tiny(family, PACKED_ATTENTION)
        model.config.num_hidden_layers = 1
        ids, positions, kwargs = pack([list(range(12))])
        changed = ids.clone()
        changed[0, 0] = 50
        with torch.no_grad():
            a = model(input_ids=ids, position_ids=positions, use_cache=False, **kwargs).logits[0]
            b = model(input_ids=changed, position_ids=positions, use_cache=False, **kwargs).logits[0]
        assert torch.equal(a[4:], b[4:]) == same


def test_boundaries_are_never_inferred():
    """Without boundaries every layer would be right for some packs and wrong for others; so it raises."""
    model = tiny("llama", PACKED_ATTENTION)
    ids, positions, kwargs = pack(SEQUENCES)
    with pytest.raises(LayoutError, match="never inferred"):
        model(input_ids=ids, position_ids=positions, use_cache=False)
    for name in kwargs:
        with pytest.raises(LayoutError, match="never inferred"):
            model(input_ids=ids, position_ids=positions, use_cache=False, **(kwargs | {name: None}))


def test_pack_11_positions_are_not_boundaries():
    """pack-11: positions that start at 2 shift the rotary angles and nothing else: relative attention is unchanged."""
    model = tiny("llama", PACKED_ATTENTION)
    ids, positions, kwargs = pack(SEQUENCES)
    with torch.no_grad():
        a = model(input_ids=ids, position_ids=positions, use_cache=False, **kwargs).logits
        b = model(input_ids=ids, position_ids=positions + 2, use_cache=False, **kwargs).logits
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_packed_is_refused():
    """Two rows, a cache, dropout: each would be silently wrong."""
    model = tiny("llama", PACKED_ATTENTION)
    ids, positions, kwargs = pack(SEQUENCES)
    with pytest.raises(LayoutError, match="2 rows"):
        model(input_ids=ids.repeat(2, 1), position_ids=positions.repeat(2, 1), use_cache=False, **kwargs)
    dropping = tiny("llama", PACKED_ATTENTION).train()
    for layer in dropping.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(LayoutError, match="dropout"):
        dropping(input_ids=ids, position_ids=positions, use_cache=False, **kwargs)
    with pytest.raises(LayoutError, match="sum to"):
        model(input_ids=ids[:, 1:], position_ids=positions[:, 1:], use_cache=False, **kwargs)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_no_mask_is_built(family, monkeypatch):
    """A [T, T] mask for 16k tokens would be 256 MB, and looking for packing in positions would stop the host."""
    from transformers import masking_utils

    calls = []
    original = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(
        masking_utils, "find_packed_sequence_indices", lambda positions: calls.append(positions) or original(positions)
    )
    model = tiny(family, PACKED_ATTENTION)
    seen = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
    ids, positions, kwargs = pack(SEQUENCES)
    with torch.no_grad():
        model(input_ids=ids, position_ids=positions, use_cache=False, **kwargs)
    assert seen == [None, None]
    assert calls == []


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_compiled_blocks_do_not_recompile_for_another_pack(family):
    """Other lengths and another number of sequences in a pack of the same size: no new graph after the first pack.

    Boundaries given as a tuple or a tensor of their own would be guarded and cost a compilation for each new count.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = tiny(family, PACKED_ATTENTION)
    plain = tiny(family, PACKED_ATTENTION)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    graphs = []
    for lengths in ([7, 3, 10], [20], [1, 1, 5, 6, 7], [10, 10], [2] * 10):
        ids, positions, kwargs = pack([list(range(1, n + 1)) for n in lengths])
        out = model(input_ids=ids, position_ids=positions, use_cache=False, **kwargs).logits
        out.sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
        want = plain(input_ids=ids, position_ids=positions, use_cache=False, **kwargs).logits
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    assert graphs[0] > 0
    assert graphs == graphs[:1] * 5
