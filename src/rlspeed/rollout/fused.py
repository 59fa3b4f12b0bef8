"""The decode step's kernels (kernels.py) as operations on tensors; CUDA only."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from rlspeed.rollout import kernels
from rlspeed.rollout.decode import Decoder
from rlspeed.rollout.paged import PagedCache
from rlspeed.rollout.sampling import filtered
from rlspeed.rollout.types import SamplingParams

VOCABULARY_SPLITS = 16  # fixed: the noise of a word depends on the cuts, and lanes must not


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of the device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def attention_splits(lanes: int, kv_heads: int, processors: int) -> int:
    """Cuts of each sequence: a power of two that gives every multiprocessor four programs, 2 at least, 32 at most.

    Two even when there are lanes enough: lengths differ, and a long sequence in one piece would be the last to end.
    """
    wanted = max(2, 4 * processors // max(1, lanes * kv_heads))
    return min(32, triton.next_power_of_2(wanted))


class TritonOps:
    """`decode.DecodeOps` by Triton. Fixed shapes only depend on the lane count, so a graph can hold every call."""

    graphs = True

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.device = decoder.embed.device
        self.where = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.size = 0
        self.group = decoder.heads // decoder.kv_heads
        self.rows = max(16, triton.next_power_of_2(self.group))  # the tensor cores' smallest tile
        self.wide = max(16, triton.next_power_of_2(decoder.width))
        self.silu = type(decoder.act).__name__ in ("SiLU", "SiLUActivation")
        self._cache: PagedCache | None = None

    def bind(self, cache: PagedCache | None) -> None:
        """Use this cache from now on; None gives it up."""
        self._cache = cache
        if cache is not None:
            self.where.fill_(cache.data.data_ptr())
            self.size = cache.size

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta [B, H], and that normalised."""
        out = torch.empty_like(x)
        total = x if delta is None else torch.empty_like(x)
        width = x.shape[1]
        kernels.add_norm_kernel[(x.shape[0],)](
            x,
            x if delta is None else delta,
            weight,
            total,
            out,
            width,
            self.decoder.eps,
            ADD=delta is not None,
            BLOCK=triton.next_power_of_2(width),
            num_warps=4 if width <= 4096 else 8,
        )
        return total, out

    def attend(self, layer: int, qkv: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """qkv [B, (Hq + 2 Hkv) D] to attention's output [B, Hq D]; the token's key and value are kept."""
        q = torch.empty(qkv.shape[0], self.decoder.heads, self.decoder.width, dtype=qkv.dtype, device=self.device)
        self._rotate(layer, qkv, positions, table, q, None)
        return self._attention(layer, q, positions, table)

    def keep(self, layer: int, qkv: Tensor, positions: Tensor, pages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, (Hq + 2 Hkv) D] to rotated q, rotated k, v; keys and values go to the pages [T] int32."""
        d, tokens = self.decoder, qkv.shape[0]
        q, k, v = (
            torch.empty(tokens, heads, d.width, dtype=qkv.dtype, device=self.device)
            for heads in (d.heads, d.kv_heads, d.kv_heads)
        )
        self._rotate(layer, qkv, positions, pages, q, (k, v))
        return q, k, v

    def _rotate(
        self, layer: int, qkv: Tensor, positions: Tensor, table: Tensor, q: Tensor, kv: tuple[Tensor, Tensor] | None
    ) -> None:
        d = self.decoder
        weights = d.layers[layer]
        norm = weights.q_norm is not None
        k, v = (q, q) if kv is None else kv
        kernels.rotate_kernel[(qkv.shape[0], d.heads + 2 * d.kv_heads)](
            qkv,
            q,
            k,
            v,
            self.where,
            table,
            positions,
            d.cos,
            d.sin,
            weights.q_norm if norm else q,
            weights.k_norm if norm else q,
            d.eps,
            layer,
            len(d.layers),
            table.stride(0),
            heads=d.heads,
            kv_heads=d.kv_heads,
            NORM=norm,
            PACKED=kv is not None,
            G=self.size,
            D=d.width,
            HALF=triton.next_power_of_2(d.width // 2),
            num_warps=1,
        )

    def _attention(self, layer: int, q: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        d, lanes = self.decoder, q.shape[0]
        splits = attention_splits(lanes, d.kv_heads, multiprocessors(self.device))
        out = torch.empty(lanes, d.heads * d.width, dtype=q.dtype, device=self.device)
        pieces = (lanes, d.kv_heads, splits)
        part = torch.empty(*pieces, self.rows, self.wide, dtype=torch.float32, device=self.device)
        stat = torch.empty(*pieces, 2, self.rows, dtype=torch.float32, device=self.device)
        kernels.attend_kernel[pieces](
            q,
            part,
            stat,
            self.where,
            table,
            positions,
            d.scale,
            layer,
            len(d.layers),
            table.stride(0),
            kv_heads=d.kv_heads,
            GROUP=self.group,
            ROWS=self.rows,
            SPLITS=splits,
            G=self.size,
            D=d.width,
            DP=self.wide,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=4,
            num_stages=3 if q.dtype != torch.float32 else 2,
        )
        kernels.merge_kernel[(lanes * d.kv_heads, self.group)](
            part,
            stat,
            out,
            GROUP=self.group,
            ROWS=self.rows,
            SPLITS=splits,
            D=d.width,
            DP=self.wide,
            num_warps=1 if splits <= 8 else 2,
        )
        return out

    def gated(self, gate_up: Tensor) -> Tensor:
        """act(gate) * up of [B, 2 I]."""
        if not self.silu:
            gate, up = gate_up.chunk(2, -1)
            return self.decoder.act(gate) * up
        lanes, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(lanes, inner, dtype=gate_up.dtype, device=self.device)
        block = 1024
        kernels.gated_kernel[(lanes, triton.cdiv(inner, block))](gate_up, out, inner, BLOCK=block, num_warps=4)
        return out

    def draw(self, logits: Tensor, sampling: SamplingParams, seeds: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """As `sampling.draw`, with Gumbel noise: tokens [B] int64 and log-probs [B] fp32 from logits [B, V] fp32."""
        lanes, words = logits.shape
        greedy = sampling.temperature == 0.0
        inverse = 1.0 if greedy else 1.0 / sampling.temperature
        filters = not greedy and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)
        kept = filtered(logits * inverse, sampling).contiguous() if filters else logits
        splits = VOCABULARY_SPLITS
        best = torch.empty(lanes, splits, dtype=torch.float32, device=self.device)
        best_at = torch.empty(lanes, splits, dtype=torch.int32, device=self.device)
        stat = torch.empty(lanes, splits, 2, dtype=torch.float32, device=self.device)
        kernels.draw_kernel[(lanes, splits)](
            logits,
            kept,
            seeds,
            places,
            best,
            best_at,
            stat,
            words,
            triton.cdiv(words, splits),
            inverse,
            0.0 if greedy else 1.0,
            FILTER=filters,
            SPLITS=splits,
            BLOCK=512,
            num_warps=4,
        )
        tokens = torch.empty(lanes, dtype=torch.int64, device=self.device)
        logprobs = torch.empty(lanes, dtype=torch.float32, device=self.device)
        kernels.choose_kernel[(lanes,)](
            logits, best, best_at, stat, tokens, logprobs, words, inverse, SPLITS=splits, num_warps=1
        )
        return tokens, logprobs
