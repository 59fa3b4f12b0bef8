"""Ulysses sequence parallel: each rank keeps a slice of the packed row; around attention tokens and heads change sides.

P ranks, T tokens in the row, t = T / P. Outside of attention rank p works on the tokens p t .. (p + 1) t - 1 with all
heads; inside it works on all T tokens with one P-th of the heads, so sequences may cross the slices as they like:

```
                 heads 0 1 2 3                                      heads 0 1   2 3
               +---------------+                                  +-------+ +-------+
  rank 0       | tokens of p 0 |        first all-to-all          | all   | | all   |
               +---------------+   q, k, v joined in one message  | tokens| | tokens|
  rank 1       | tokens of p 1 |   ---------------------------->  |       | |       |
               +---------------+   <----------------------------  +-------+ +-------+
                                       second all-to-all:          rank 0    rank 1
                                   the output, back to slices
```

Per rank and layer (P - 1) / P of t (Hq + 2 Hkv + Hq) D elements go out in the forward pass, and as many in the
backward pass, which is the same two exchanges in reverse order.

Constraints. T is a multiple of P (`pack_sequences(multiple=P)` fills the row up with a masked tail). The query heads of
a tensor parallel rank are a multiple of P. Its KV heads are a multiple of P, or P is a multiple of them: then each KV
head goes to P / Hkv ranks. Everything else is refused by `check_heads`.

Each rank computes the log-probs of its own positions; the per-token numbers (4 bytes each) are gathered, so that every
rank of the group then has the whole row's and computes the same loss. The backward pass of that gather keeps the own
slice: each rank's gradients come from its tokens alone, and their sum over the group is the gradient.

Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlspeed.errors import Fault, LayoutError

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def check_heads(heads: int, kv_heads: int, degree: int, where: str = "sequence parallel") -> list[Fault]:
    """Why `degree` ranks cannot share the heads of one tensor parallel rank; nothing when they can."""
    faults = []
    if heads % degree:
        found = f"{heads} query heads on a tensor parallel rank over {degree} ranks"
        faults.append(Fault(where=where, found=found, allowed="a degree that divides the query heads"))
    if kv_heads % degree and degree % kv_heads:
        found = f"{kv_heads} KV heads on a tensor parallel rank over {degree} ranks"
        faults.append(Fault(where=where, found=found, allowed="a divisor or a multiple of the KV heads"))
    return faults


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """The ranks that share one packed row. size: how many; rank: this one's place."""

    group: dist.ProcessGroup
    size: int
    rank: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> SequenceParallel:
        """The group as seen from this process."""
        return SequenceParallel(group, dist.get_world_size(group), dist.get_rank(group))

    def span(self, num_tokens: int) -> tuple[int, int]:
        """First token of this rank's slice and the one after its last.

        Raises:
            LayoutError: num_tokens is no multiple of the group's size.
        """
        if num_tokens % self.size:
            raise LayoutError(
                Fault(
                    where="sequence parallel",
                    found=f"a packed row of {num_tokens} tokens over {self.size} ranks",
                    allowed=f"a multiple of {self.size}",
                    fix=f"pack with multiple={self.size}",
                )
            )
        width = num_tokens // self.size
        return self.rank * width, (self.rank + 1) * width

    def slice(self, stream: torch.Tensor) -> torch.Tensor:
        """This rank's part [T / P] of a stream [T]."""
        start, end = self.span(stream.shape[0])
        return stream[start:end]

    def gather(self, values: torch.Tensor, places: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Values [N] at the row's `places` [N], from each rank's values [n] at its own ones, in order.

        All ranks of the group call it with the same places, also those that have none. The gradient of a rank's
        values is that of the result at its places: every rank goes on with the same numbers, so nothing is summed.
        """
        start, end = self.span(num_tokens)
        _, own = own_places(self, places, num_tokens)
        dense = values.new_zeros(end - start).index_put((own,), values)
        whole: torch.Tensor = _Gather.apply(dense, self)  # type: ignore[no-untyped-call]
        return whole[places]

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Attention of the whole row: q [t, Hq, D], k and v [t, Hkv, D] of this slice to its output [t, Hq, D].

        attend: ([T, Hq / P, D], [T, h, D], [T, h, D]) to [T, Hq / P, D], with h = max(Hkv / P, 1).

        Raises:
            LayoutError: heads that cannot be shared out evenly.
        """
        faults = check_heads(q.shape[1], k.shape[1], self.size)
        if faults:
            raise LayoutError(faults)
        if k.shape[1] < self.size:
            copies = self.size // k.shape[1]
            k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        wide, narrow = q.shape[1] // self.size, k.shape[1] // self.size
        parts = [x.unflatten(1, (self.size, -1)) for x in (q, k, v)]
        joined = torch.cat(parts, dim=2).transpose(0, 1).contiguous()  # [P, t, wide + 2 narrow, D], by receiver
        q, k, v = self._swap(joined).flatten(0, 1).split([wide, narrow, narrow], dim=1)
        out = attend(q, k, v)
        back = self._swap(out.reshape(self.size, -1, *out.shape[1:]))  # [P, t, wide, D], by the heads' rank
        return back.transpose(0, 1).flatten(1, 2)

    def _swap(self, parts: torch.Tensor) -> torch.Tensor:
        """Part p of dimension 0 to rank p."""
        out: torch.Tensor = _Swap.apply(parts, self.group)  # type: ignore[no-untyped-call]
        return out


def own_places(
    sp: SequenceParallel | None, places: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor | slice, torch.Tensor]:
    """Which of the row's `places` [N] are in this rank's slice, and where in the slice they are [n].

    The first answer selects from [N]; without sequence parallel it is everything.
    """
    if sp is None:
        return slice(None), places
    start, end = sp.span(num_tokens)
    mine = (places >= start) & (places < end)
    return mine, places[mine] - start


class _Swap(torch.autograd.Function):
    """all_to_all_single of equal parts; its transpose is itself."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(grad, ctx.group), None


def _all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = parts.contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    return out


class _Gather(torch.autograd.Function):
    """The slices [t] of all ranks as one row [T]; backward takes the own slice."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, sp: SequenceParallel) -> torch.Tensor:
        ctx.sp = sp
        whole = part.new_empty(part.shape[0] * sp.size)
        dist.all_gather(list(whole.chunk(sp.size)), part.contiguous(), group=sp.group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.sp.slice(grad), None
