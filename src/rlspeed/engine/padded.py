"""The padded form of a packed batch: only for the baseline that packed training is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlspeed.engine.packed import PackedBatch
from rlspeed.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedView:
    """Rows of equal length, padded on the right; padding tokens are computed and thrown away.

    input_ids, attention_mask, positions: [S, L] with L the longest sequence. rows, columns [T]: place of each packed
    token.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def of(cls, batch: PackedBatch) -> PaddedView:
        """Lay the sequences of `batch` out as rows."""
        device = batch.input_ids.device
        lengths = torch.tensor(batch.lengths, device=device)
        rows = torch.repeat_interleave(torch.arange(len(batch.lengths), device=device), lengths)
        columns = batch.positions
        shape = (len(batch.lengths), batch.max_seqlen)
        ids = torch.zeros(shape, dtype=torch.int64, device=device)
        ids[rows, columns] = batch.input_ids
        mask = torch.arange(batch.max_seqlen, device=device)[None] < lengths[:, None]
        positions = torch.arange(batch.max_seqlen, device=device).expand(shape)
        return cls(input_ids=ids, attention_mask=mask.long(), positions=positions, rows=rows, columns=columns)

    def flatten(self, values: torch.Tensor) -> torch.Tensor:
        """[S, L, ...] back to [T, ...], in the packed order."""
        return values[self.rows, self.columns]


def response_window(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The head's work when answers are padded to the longest: every row pays for the longest answer of the batch.

    Returns index [S * R] into the packed tokens (R: the longest answer; padding repeats the row's last token) and
    keep [S * R] bool, True where the slot is a token that trains, in packed order.
    """
    device = batch.input_ids.device
    starts = batch.cu_seqlens[:-1].long()
    lengths = torch.tensor(batch.lengths, device=device)
    masked = torch.segment_reduce(batch.loss_mask.float(), "sum", lengths=lengths).long()
    first = lengths - masked
    width = int(masked.max()) if masked.numel() else 0
    offset = first[:, None] + torch.arange(width, device=device)[None]
    keep = offset < lengths[:, None]
    index = starts[:, None] + torch.minimum(offset, lengths[:, None] - 1)
    return index.reshape(-1).clamp_min(1), keep.reshape(-1)


def conventional_row(
    prompt: list[int], response: list[int], *, pad: int, prompt_width: int, response_width: int
) -> dict[str, list[int]]:
    """One row as verl's files and workers lay it out: the prompt padded on its left, the response on its right.

    Returns input_ids, attention_mask and position_ids of prompt_width + response_width entries and response_mask of
    response_width entries. The masks come from the lengths; pad ids inside the prompt or response change nothing.
    For comparing with other trainers' batches; training here uses `PaddedView`.

    Raises:
        LayoutError: the prompt or the response is longer than its width.
    """
    if len(prompt) > prompt_width or len(response) > response_width:
        raise LayoutError(
            f"prompt of {len(prompt)} and response of {len(response)} tokens "
            f"in widths {prompt_width} and {response_width}"
        )
    left, right = prompt_width - len(prompt), response_width - len(response)
    mask = [0] * left + [1] * (len(prompt) + len(response)) + [0] * right
    positions, seen = [], 0
    for bit in mask:
        seen += bit
        positions.append(max(seen - 1, 0))
    return {
        "input_ids": [pad] * left + prompt + response + [pad] * right,
        "attention_mask": mask,
        "position_ids": positions,
        "response_mask": mask[prompt_width:],
    }
