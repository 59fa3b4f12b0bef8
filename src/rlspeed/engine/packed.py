"""PackedBatch: several sequences back to back, the only form of tokens from rollout to loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from rlspeed.engine.attention_shared import SharedPrefixes
from rlspeed.errors import LayoutError


# no slots: the cached indices below live in the instance
@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Tokens of S sequences in one row, without padding between them.

    input_ids [T] int64; positions [T] int64, restarting at 0 in each sequence.
    cu_seqlens [S+1] int32: sequence s is tokens cu_seqlens[s]..cu_seqlens[s+1]-1; the only source of boundaries.
    sequence_ids: number of each sequence in the step, `-1` for a masked tail that only fills the row up.
    loss_mask [T] bool: tokens that train; False at each first token and in the tail.
    max_seqlen: longest sequence, from cu_seqlens.
    streams: named [T] float32 tensors beside the tokens (old_logprobs, advantages, ...), finite where loss_mask is
    True.
    prefixes: set where answers share their prompt (`pack_shared`); "sequence" then means a prompt (id -1) or an answer,
    positions go on after the prompt, and an answer's first token trains.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    sequence_ids: tuple[int, ...]
    loss_mask: torch.Tensor
    max_seqlen: int
    lengths: tuple[int, ...]
    streams: dict[str, torch.Tensor] = field(default_factory=dict)
    prefixes: SharedPrefixes | None = None

    def __post_init__(self) -> None:
        tokens = self.input_ids.numel()
        if self.positions.numel() != tokens or self.loss_mask.numel() != tokens:
            raise LayoutError(
                f"packed batch: {tokens} tokens, {self.positions.numel()} positions, {self.loss_mask.numel()} masks"
            )
        if any(n < 1 for n in self.lengths) or sum(self.lengths) != tokens:
            raise LayoutError(f"packed batch: lengths {self.lengths} do not cut {tokens} tokens into sequences")
        if len(self.sequence_ids) != len(self.lengths) or self.cu_seqlens.numel() != len(self.lengths) + 1:
            raise LayoutError("packed batch: sequence ids, lengths and cu_seqlens disagree")
        if self.max_seqlen != max(self.lengths, default=0):
            raise LayoutError(
                f"packed batch: max_seqlen {self.max_seqlen}, longest sequence {max(self.lengths, default=0)}"
            )

    @property
    def num_tokens(self) -> int:
        """T, the tail included."""
        return self.input_ids.numel()

    @property
    def num_sequences(self) -> int:
        """S, the tail included."""
        return len(self.lengths)

    def response_index(self) -> torch.Tensor:
        """Positions [N] int64 of the tokens that train, in order."""
        return self._response_index

    def source_index(self) -> torch.Tensor:
        """For each token that trains, the position [N] int64 whose hidden state predicts it."""
        if self.prefixes is None:
            return self._response_index - 1
        return self.prefixes.predecessors[self._response_index]

    def segment_ids(self) -> torch.Tensor:
        """For each token that trains, the number [N] int64 of its sequence in this batch."""
        return self._segment_ids

    @cached_property
    def _response_index(self) -> torch.Tensor:
        # found once, on the host when the batch was made there: the host would wait for a GPU to count them
        return self.loss_mask.nonzero(as_tuple=True)[0]

    @cached_property
    def _segment_ids(self) -> torch.Tensor:
        lengths = torch.tensor(self.lengths, device=self.input_ids.device)
        per_token = torch.repeat_interleave(torch.arange(len(self.lengths), device=lengths.device), lengths)
        return per_token[self._response_index]

    def put(self, name: str, values: torch.Tensor) -> None:
        """Keep `values` [N] of the tokens that train as stream `name` [T] float32, zero elsewhere."""
        stream = torch.zeros(self.num_tokens, dtype=torch.float32, device=self.input_ids.device)
        stream[self._response_index] = values.detach().float()
        self.streams[name] = stream

    def get(self, name: str) -> torch.Tensor:
        """Stream `name` at the tokens that train, [N] float32."""
        return self.streams[name][self._response_index]

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch on another device, its indices too: whoever computes with it there waits for nothing."""
        moved = PackedBatch(
            input_ids=self.input_ids.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=True),
            sequence_ids=self.sequence_ids,
            loss_mask=self.loss_mask.to(device, non_blocking=True),
            max_seqlen=self.max_seqlen,
            lengths=self.lengths,
            streams={k: v.to(device, non_blocking=True) for k, v in self.streams.items()},
            prefixes=None if self.prefixes is None else self.prefixes.to(device),
        )
        vars(moved)["_response_index"] = self._response_index.to(device, non_blocking=True)
        vars(moved)["_segment_ids"] = self._segment_ids.to(device, non_blocking=True)
        return moved


def pack_sequences(
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    *,
    sequence_ids: Sequence[int] | None = None,
    trains: Sequence[bool] | None = None,
    multiple: int = 1,
    pad_id: int = 0,
) -> PackedBatch:
    """Lay sequences (prompt + response token ids) back to back.

    prompt_lengths: tokens of each sequence that do not train (at least 1 is masked in any case, the first has no
    predecessor). trains: False masks a whole sequence out of the loss. multiple: T is filled up to a multiple of it by
    one masked tail sequence of `pad_id`, at least one token long when no sequence is given (a spare bin that keeps
    ranks in step).

    Raises:
        LayoutError: an empty sequence, or lists of unequal length.
    """
    count = len(sequences)
    ids = list(range(count)) if sequence_ids is None else list(sequence_ids)
    keep = [True] * count if trains is None else list(trains)
    if not (len(prompt_lengths) == len(ids) == len(keep) == count):
        raise LayoutError(
            f"packing {count} sequences: {len(prompt_lengths)} prompt lengths, {len(ids)} ids, {len(keep)} flags"
        )
    empty = [str(i) for i, s in zip(ids, sequences) if len(s) == 0]
    if empty:
        raise LayoutError(f"sequences without tokens: {', '.join(empty)}")
    flat: list[int] = []
    mask: list[bool] = []
    lengths: list[int] = []
    for tokens, prompt, train in zip(sequences, prompt_lengths, keep):
        first = max(int(prompt), 1)
        flat.extend(tokens)
        mask.extend([False] * min(first, len(tokens)) + [train] * max(len(tokens) - first, 0))
        lengths.append(len(tokens))
    tail = -len(flat) % multiple if flat else max(multiple, 1)
    if tail:
        flat.extend([pad_id] * tail)
        mask.extend([False] * tail)
        lengths.append(tail)
        ids.append(-1)
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    bounds[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return PackedBatch(
        input_ids=torch.tensor(flat, dtype=torch.int64),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=bounds,
        sequence_ids=tuple(ids),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        max_seqlen=max(lengths),
        lengths=tuple(lengths),
    )
