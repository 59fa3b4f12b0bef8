"""Laws of the packed form: layout, masks, and packed = padded = one by one for every supported family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlspeed.engine.packed import PackedBatch, pack_sequences
from rlspeed.engine.padded import PaddedView, conventional_row, response_window
from rlspeed.errors import LayoutError
from rlspeed.models.build import PolicyModel, ValueModel, load_causal_lm

CASES = {
    c["id"]: c for c in json.loads((Path(__file__).parents[2] / "conformance" / "cases.json").read_text())["cases"]
}
SEQUENCES = [[5, 6, 7, 8, 9, 2], [10, 11, 12], [13, 14, 15, 16, 17, 18, 19, 20, 21], [22, 23]]
PROMPTS = [2, 1, 5, 1]
# fp32 on CPU: the same dot products over at most 96 terms in another order, 1e-6 relative on log-probs of about 5
ATOL = 1e-5


def test_layout_conformance() -> None:
    case = CASES["pack/layout"]
    batch = pack_sequences(case["input"]["sequences"], [1, 1, 1])
    want = case["expected"]
    assert batch.input_ids.tolist() == want["input_ids"]
    assert batch.cu_seqlens.tolist() == want["cu_seqlens"]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.positions.tolist() == want["position_ids"]
    assert batch.max_seqlen == want["max_seqlen"]
    # a token trains when its predecessor predicts it: the mask is the valid-label mask moved by one
    assert [*batch.loss_mask.tolist()[1:], False] == [bool(x) for x in want["valid_label_mask"]]


def test_padding_conventions_conformance() -> None:
    case = CASES["pack/padding_conventions"]
    given = case["input"]
    row = conventional_row(
        given["prompt"], given["response"], pad=given["pad"], prompt_width=given["P"], response_width=given["R"]
    )
    assert row == case["expected"]
    with pytest.raises(LayoutError, match="widths 1 and 5"):
        conventional_row(given["prompt"], given["response"], pad=0, prompt_width=1, response_width=5)


def test_targets_never_cross_a_boundary() -> None:
    """pack-04: three scored tokens for 10,11,12 | 20,21, and none for a sequence of one."""
    batch = pack_sequences([[10, 11, 12], [20, 21], [30]], [1, 1, 1])
    index = batch.response_index()
    assert batch.input_ids[index].tolist() == [11, 12, 21]
    assert batch.input_ids[index - 1].tolist() == [10, 11, 20]
    assert batch.segment_ids().tolist() == [0, 0, 1]


def test_lengths_come_from_the_generator_not_from_ids() -> None:
    """pack-17, pack-19, pack-20, pack-21: end and pad ids inside or after an answer change no mask."""
    batch = pack_sequences([[5, 6, 2, 7, 8, 2], [9, 9, 3]], [3, 1])
    assert batch.loss_mask.tolist() == [False, False, False, True, True, True, False, True, True]
    assert batch.cu_seqlens.tolist() == [0, 6, 9]


def test_tail_is_one_masked_sequence() -> None:
    batch = pack_sequences([[1, 2, 3], [4, 5]], [1, 1], multiple=4)
    assert batch.num_tokens == 8
    assert batch.sequence_ids == (0, 1, -1)
    assert batch.lengths == (3, 2, 3)
    assert not batch.loss_mask[5:].any()


def test_spare_bin_and_masked_sequence() -> None:
    spare = pack_sequences([], [])
    assert (spare.num_tokens, spare.sequence_ids, int(spare.loss_mask.sum())) == (1, (-1,), 0)
    batch = pack_sequences([[1, 2, 3], [4, 5, 6]], [1, 1], trains=[False, True])
    assert batch.segment_ids().tolist() == [1, 1]


def test_put_and_get_a_stream() -> None:
    batch = pack_sequences([[1, 2, 3], [4, 5, 6]], [1, 2])
    batch.put("advantages", torch.tensor([1.0, 2.0, 3.0]))
    assert batch.streams["advantages"].tolist() == [0.0, 1.0, 2.0, 0.0, 0.0, 3.0]
    assert batch.get("advantages").tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("sequences", "prompts"), [([[1], []], [1, 1]), ([[1, 2]], [1, 1])], ids=["empty sequence", "unequal lists"]
)
def test_bad_input_is_refused(sequences: list[list[int]], prompts: list[int]) -> None:
    with pytest.raises(LayoutError):
        pack_sequences(sequences, prompts)


def test_wrong_max_seqlen_is_refused() -> None:
    good = pack_sequences([[1, 2, 3]], [1])
    with pytest.raises(LayoutError, match="longest sequence 3"):
        PackedBatch(
            input_ids=good.input_ids,
            positions=good.positions,
            cu_seqlens=good.cu_seqlens,
            sequence_ids=good.sequence_ids,
            loss_mask=good.loss_mask,
            max_seqlen=2,
            lengths=good.lengths,
        )


def test_padded_view_round_trip() -> None:
    batch = pack_sequences(SEQUENCES, PROMPTS)
    view = PaddedView.of(batch)
    assert view.input_ids.shape == (4, 9)
    assert torch.equal(view.flatten(view.input_ids), batch.input_ids)
    assert view.attention_mask.sum(1).tolist() == [6, 3, 9, 2]
    index, keep = response_window(batch)
    assert torch.equal(index[keep], batch.response_index())
    assert index.numel() == 4 * 4, "every row pays for the longest answer"


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def policies(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> tuple[PolicyModel, PolicyModel]:
    """The same weights behind packed and behind padded training."""
    path = str(tiny_models[request.param])
    packed = load_causal_lm(path, dtype=torch.float32, attention="packed")
    padded = load_causal_lm(path, dtype=torch.float32, attention="sdpa")
    return PolicyModel(packed, backend="sdpa", padded=False), PolicyModel(padded, backend="sdpa", padded=True)


def test_packed_equals_padded_equals_one_by_one(policies: tuple[PolicyModel, PolicyModel]) -> None:
    """pack-06: one-by-one is the truth, computed by transformers alone; log-probs, entropy, gradients agree."""
    packed, padded = policies
    batch = pack_sequences(SEQUENCES, PROMPTS)
    results = {}
    for name, model in (("packed", packed), ("padded", padded)):
        logprobs, entropy = model(batch)
        weights = torch.linspace(-1, 1, logprobs.numel())
        ((logprobs * weights).sum() + 0.3 * entropy.sum()).backward()
        results[name] = (logprobs.detach(), entropy.detach(), [p.grad.clone() for p in model.parameters()])
    alone = []
    with torch.no_grad():
        for tokens, prompt in zip(SEQUENCES, PROMPTS):
            logp = padded.causal_lm(torch.tensor([tokens])).logits[0].log_softmax(-1)
            alone.extend(logp[t - 1, tokens[t]] for t in range(prompt, len(tokens)))
    torch.testing.assert_close(results["packed"][0], torch.stack(alone), atol=ATOL, rtol=0)
    torch.testing.assert_close(results["packed"][0], results["padded"][0], atol=ATOL, rtol=0)
    torch.testing.assert_close(results["packed"][1], results["padded"][1], atol=ATOL, rtol=0)
    for a, b in zip(results["packed"][2], results["padded"][2]):
        # gradients sum over all tokens; one more digit of room
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_values_packed_equal_padded(tiny_models: dict[str, Path]) -> None:
    path = str(tiny_models["llama"])
    models = []
    for attention, padded in (("packed", False), ("sdpa", True)):
        model = ValueModel(
            load_causal_lm(path, dtype=torch.float32, attention=attention), backend="sdpa", padded=padded
        )
        torch.manual_seed(1)
        torch.nn.init.normal_(model.value_head.weight)
        models.append(model)
    batch = pack_sequences(SEQUENCES, PROMPTS)
    torch.testing.assert_close(models[0](batch), models[1](batch), atol=ATOL, rtol=0)


def test_one_sequence_never_moves_another(policies: tuple[PolicyModel, PolicyModel]) -> None:
    """pack-01: changing a token of the first sequence changes the others' log-probs and gradients by exactly 0."""
    packed, _ = policies
    before = packed(pack_sequences(SEQUENCES, PROMPTS))[0]
    changed = [[50, *SEQUENCES[0][1:]], *SEQUENCES[1:]]
    after = packed(pack_sequences(changed, PROMPTS))[0]
    own = len(SEQUENCES[0]) - PROMPTS[0]
    assert not torch.equal(before[:own], after[:own])
    assert torch.equal(before[own:], after[own:])


def test_micro_batches_add_up(policies: tuple[PolicyModel, PolicyModel]) -> None:
    """num-01: any cut of the same sequences into bins gives the same gradient."""
    packed, _ = policies

    def gradient(cuts: list[list[int]]) -> list[torch.Tensor]:
        packed.zero_grad()
        for cut in cuts:
            packed(pack_sequences([SEQUENCES[i] for i in cut], [PROMPTS[i] for i in cut]))[0].sum().backward()
        return [p.grad.clone() for p in packed.parameters()]

    whole = gradient([[0, 1, 2, 3]])
    for cuts in ([[0], [1], [2], [3]], [[3, 1], [0, 2]], [[2], [0, 1, 3], []]):
        for a, b in zip(whole, gradient(cuts)):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
