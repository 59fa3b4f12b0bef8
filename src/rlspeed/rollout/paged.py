"""The key-value cache in pages, and decode steps in plain torch over it (any device; what CUDA kernels are tested
against).

Shapes: B lanes, Hq query heads, Hkv KV heads, D head width, G tokens in a page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from rlspeed.rollout.decode import Decoder


class PagedCache:
    """`data` [pages, layers, 2 (key, value), Hkv, G, D]: one page is one contiguous piece of memory."""

    def __init__(
        self, pages: int, layers: int, kv_heads: int, size: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.data = torch.empty(pages, layers, 2, kv_heads, size, width, dtype=dtype, device=device)
        self.size = size
        self.data[0].zero_()

    @staticmethod
    def page_bytes(layers: int, kv_heads: int, size: int, width: int, dtype: torch.dtype) -> int:
        """Bytes of one page."""
        return layers * 2 * kv_heads * size * width * dtype.itemsize

    def write(self, layer: int, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v [T, Hkv, D] of T tokens to their places: pages and offsets [T] int64."""
        self.data[pages, layer, 0, :, offsets] = k
        self.data[pages, layer, 1, :, offsets] = v

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole pages (source, target)."""
        if copies:
            source, target = torch.tensor(copies, device=self.data.device).T
            self.data[target] = self.data[source]


class TorchOps:
    """The parts of a decode step that CUDA has kernels for, in torch operations."""

    graphs = False

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.cache: PagedCache | None = None

    def bind(self, cache: PagedCache | None) -> None:
        """Use this cache from now on; None gives it up."""
        self.cache = cache

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta [B, H], and that normalised."""
        if delta is not None:
            x = x + delta
        return x, self.decoder.rms(x, weight)

    def attend(self, layer: int, qkv: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """qkv [B, (Hq + 2 Hkv) D] as it leaves the projection, to attention's output [B, Hq D].

        positions [B]: of the token; its key and value are kept. table [B, pages of a sequence] int32.
        """
        assert self.cache is not None
        d, cache = self.decoder, self.cache
        cos, sin = d.tables(positions)
        q, k, v = d.heads_of(layer, qkv, cos, sin)
        rows = table.gather(1, (positions // cache.size)[:, None].long())[:, 0].long()
        cache.write(layer, rows, positions.long() % cache.size, k, v)
        q = q.view(-1, d.kv_heads, d.heads // d.kv_heads, d.width)  # the heads of one KV head stand as its queries
        if table.shape[1] == 1 and q.device.type == "cpu":
            out = self._one_by_one(layer, q, rows.tolist(), positions.tolist())
        else:
            out = self._gathered(layer, q, positions, table)
        return out.reshape(q.shape[0], -1)

    def keep(self, layer: int, qkv: Tensor, positions: Tensor, pages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, (Hq + 2 Hkv) D] to rotated q, rotated k, v; keys and values go to the pages [T] int32."""
        assert self.cache is not None
        q, k, v = self.decoder.heads_of(layer, qkv, *self.decoder.tables(positions))
        self.cache.write(layer, pages.long(), positions % self.cache.size, k, v)
        return q, k, v.contiguous()

    def _one_by_one(self, layer: int, q: Tensor, pages: list[int], positions: list[int]) -> Tensor:
        """Where a sequence is one page: no copy, no mask, nothing read beyond its length."""
        assert self.cache is not None
        out = torch.empty_like(q)
        for b, (page, position) in enumerate(zip(pages, positions)):
            k, v = self.cache.data[page, layer, :, :, : position + 1]
            out[b] = F.scaled_dot_product_attention(q[b], k, v, scale=self.decoder.scale)
        return out

    def _gathered(self, layer: int, q: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        assert self.cache is not None
        picked = self.cache.data[table.long(), layer]  # [B, P, 2, Hkv, G, D]
        k, v = picked.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        seen = torch.arange(k.shape[2], device=q.device)[None] <= positions[:, None]
        v = v.masked_fill(~seen[:, None, :, None], 0.0)  # pages are not initialised: 0 times NaN is NaN
        k = k.masked_fill(~seen[:, None, :, None], 0.0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None], scale=self.decoder.scale)

    def gated(self, gate_up: Tensor) -> Tensor:
        """act(gate) * up of [B, 2 I]."""
        gate, up = gate_up.chunk(2, -1)
        return self.decoder.act(gate) * up
