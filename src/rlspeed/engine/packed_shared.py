"""PackedBatch with shared prompts: a prompt once, its answers after it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate

import torch

from rlspeed.engine.attention_shared import SharedPrefixes
from rlspeed.engine.packed import PackedBatch
from rlspeed.errors import LayoutError
from rlspeed.planning.prefixes import PrefixLayout, lay_out


def pack_shared(
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    groups: Sequence[Hashable],
    *,
    sequence_ids: Sequence[int] | None = None,
    trains: Sequence[bool] | None = None,
) -> PackedBatch:
    """Lay sequences (prompt + response token ids) back to back; neighbours of the same group share their prompt.

    prompt_lengths: tokens of each sequence's prompt. groups: of each sequence. trains: False masks a whole sequence out
    of the loss. Tokens that train come in the order of the sequences, as in `pack_sequences`.

    Raises:
        LayoutError: no sequence, lists of unequal length, a prompt or an answer without tokens, or a group with
            several prompts.
    """
    count = len(sequences)
    ids = list(range(count)) if sequence_ids is None else list(sequence_ids)
    keep = [True] * count if trains is None else list(trains)
    if not (count and len(prompt_lengths) == len(groups) == len(ids) == len(keep) == count):
        raise LayoutError(
            f"packing {count} sequences: {len(prompt_lengths)} prompt lengths, {len(groups)} groups, {len(ids)} ids, "
            f"{len(keep)} flags"
        )
    layout = lay_out(groups, prompt_lengths, [len(s) - p for s, p in zip(sequences, prompt_lengths)])
    flat: list[int] = []
    mask: list[bool] = []
    for family in layout.families:
        prompt = list(sequences[family.members[0]][: family.prompt])
        flat.extend(prompt)
        mask.extend([False] * family.prompt)
        for member in family.members:
            if list(sequences[member][: family.prompt]) != prompt:
                raise LayoutError(f"shared prefixes: sequence {ids[member]} has another prompt than its group")
            answer = sequences[member][family.prompt :]
            flat.extend(answer)
            mask.extend([keep[member]] * len(answer))
    return PackedBatch(
        input_ids=torch.tensor(flat, dtype=torch.int64),
        positions=torch.cat([torch.arange(s, s + n) for s, n in zip(layout.starts, layout.lengths)]),
        cu_seqlens=_bounds(layout.lengths),
        sequence_ids=tuple(ids[i] if i >= 0 else -1 for i in layout.owners),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        max_seqlen=max(layout.lengths),
        lengths=layout.lengths,
        prefixes=_prefixes(layout),
    )


def _prefixes(layout: PrefixLayout) -> SharedPrefixes:
    """The layout's spans as tensors."""
    spans = layout.spans()
    return SharedPrefixes(
        answer_index=torch.cat([torch.arange(*answers) for _, answers in spans]),
        prompt_index=torch.cat([torch.arange(*prompt) for prompt, _ in spans]),
        cu_answers=_bounds(layout.answers),
        cu_prompts=_bounds(layout.prompts),
        answers=layout.answers,
        prompts=layout.prompts,
        predecessors=torch.tensor(layout.predecessors(), dtype=torch.int64),
    )


def _bounds(lengths: Sequence[int]) -> torch.Tensor:
    """[S+1] int32."""
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
