"""Log-prob and entropy of tokens from hidden states and the head's weight, without the [N, V] logits.

z = (hidden @ weight.T + bias) / temperature, logprob = z[target] - logsumexp(z), entropy = -sum(p * log p).

The work is cut over the vocabulary and over tokens: per cut the maximum m, the sum s of exp(z - m) and
the sum u of exp(z - m) * (z - m) are merged into running ones. Backward computes each cut's logits again. Sums are fp32
whatever the inputs are. Half precision on CUDA goes to `head_triton.py`; this file has the torch path for any device,
and the one autograd function.

Source: online softmax, Milakov and Gimelshein 2018 (arXiv 1805.02867).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from rlspeed.errors import LayoutError

# largest temporary of the torch path, in elements of fp32 (64 MiB)
CHUNK_ELEMENTS = 1 << 24

Reduce = Callable[[torch.Tensor], torch.Tensor]
Design = Literal["fused", "fp32", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Shape of the fused product: tile [tokens, words], inner step, warps, pipeline stages, row band of the tile order.

    persistent: one program per multiprocessor walks over tiles, instead of one program per tile. specialize: loads by a
    warp of their own; `warps` then counts those of one of the groups that compute.
    """

    tokens: int = 128
    words: int = 256
    inner: int = 64
    warps: int = 8
    stages: int = 3
    band: int = 16
    persistent: bool = False
    specialize: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlan:
    """How the head works in half precision on CUDA; the designs are described in `head_triton.py`.

    forward_words, backward_words: words per cut; tokens: most tokens in one buffer; row_block: logits of one token that
    the passes over a finished cut read at once.
    """

    forward: Design = "fp32"
    backward: Design = "fp32"
    forward_words: int = 8448
    backward_words: int = 16896
    tokens: int = 8192
    row_block: int = 2048
    tile: Tile = Tile()


def default_plan(hidden: torch.Tensor) -> HeadPlan:
    """The fastest design for hidden [N, H] by benchmarks/records/h200/head.json.

    On Hopper the fused product needs the least time and memory at all three shapes of the record (61.9 against 63.5 ms
    forward and backward at H = 4,096). Its tiles are read in units of 16 bytes; other devices and widths take the cuts.
    """
    fits = hidden.device.type == "cuda" and hidden.shape[-1] % 8 == 0
    if fits and torch.cuda.get_device_capability(hidden.device) == (9, 0):
        return HeadPlan(forward="fused", backward="fused")
    return HeadPlan()


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """This rank's rows of a head that is cut over the vocabulary.

    start, end: the rows `weight` holds are tokens start..end-1 of the whole vocabulary. reduce_max, reduce_sum:
    all-reduce of a tensor over the ranks that hold the other rows; they return the result.
    """

    start: int
    end: int
    reduce_max: Reduce
    reduce_sum: Reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Per token, fp32 [N]: maximum m of z, s = sum of exp(z - m), u = sum of exp(z - m) * (z - m), z at the target.

    z_target is 0 where the target is not among the rows of weight.
    """

    m: torch.Tensor
    s: torch.Tensor
    u: torch.Tensor
    z_target: torch.Tensor


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    with_entropy: bool = False,
    shard: VocabularyShard | None = None,
    plan: HeadPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of `targets` and entropies of their distributions.

    hidden [N, H] and weight [V, H] of one dtype (bf16, fp16, fp32, fp64 on CPU); targets [N] int64 in 0..V-1; bias [V].
    shard: weight (and bias) are a part of the vocabulary; targets are then ids of the whole one.
    plan: how to work on CUDA; None: `default_plan`.

    Returns logprobs [N] fp32 and entropy [N] fp32 (None unless with_entropy). Both carry gradients to hidden, weight
    and bias, for any upstream gradient per token. N = 0 gives empty outputs that still have a graph. The same call with
    and without gradients gives the same bits.

    Raises:
        LayoutError: shapes or dtypes that do not fit, a temperature that is not positive, a target outside of the
            vocabulary (checked on CPU; on a GPU the host does not wait for it).
    """
    _check(hidden, weight, targets, temperature, bias, shard)
    with torch.autocast(hidden.device.type, enabled=False):
        outputs: tuple[torch.Tensor, torch.Tensor | None] = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, float(temperature), with_entropy, shard, plan or default_plan(hidden)
        )
    return outputs


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    bias: torch.Tensor | None,
    shard: VocabularyShard | None,
) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise LayoutError(
            f"head: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}; "
            "they must be [N, H], [V, H], [N]"
        )
    if isinstance(weight, DTensor):
        raise LayoutError(
            "head: weight is a sharded DTensor; call the head inside the forward of the module that owns it"
        )
    if hidden.dtype != weight.dtype:
        raise LayoutError(
            f"head: hidden is {hidden.dtype}, weight is {weight.dtype}; a cast of either would be hidden work"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise LayoutError(f"head: bias {tuple(bias.shape)} for {weight.shape[0]} rows of weight")
    if targets.dtype != torch.int64:
        raise LayoutError(f"head: targets are {targets.dtype}, not int64")
    if not temperature > 0:
        raise LayoutError(f"head: temperature {temperature}; greedy decoding has no log-probs, use 1.0 to score it")
    if shard is not None and shard.end - shard.start != weight.shape[0]:
        raise LayoutError(f"head: shard {shard.start}..{shard.end} with {weight.shape[0]} rows of weight")
    if shard is None and targets.device.type == "cpu" and targets.numel():
        low, high = targets.aminmax()
        if low < 0 or high >= weight.shape[0]:
            raise LayoutError(f"head: targets {int(low)}..{int(high)} outside of 0..{weight.shape[0] - 1}")


class _LinearLogprob(torch.autograd.Function):
    """The head as one node of the graph; keeps [N] values and its inputs, nothing of size V."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        shard: VocabularyShard | None,
        plan: HeadPlan,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if shard is not None:
            targets = targets - shard.start
        if _runs_in_triton(hidden):
            from rlspeed.engine import head_triton

            m, s, u, z_target = head_triton.stats(hidden, weight, targets, temperature, bias, with_entropy, plan)
            stats = Stats(m=m, s=s, u=u, z_target=z_target)
        else:
            stats = torch_stats(hidden, weight, targets, temperature, bias, with_entropy)
        if shard is not None:
            stats = merge_shards(stats, shard)
        log_s = stats.s.log()
        logprobs = (stats.z_target - stats.m) - log_s
        entropy = log_s - stats.u / stats.s if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, stats.m + log_s, entropy)
        ctx.temperature = temperature
        ctx.shard = shard
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 8
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        wants = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2])
        work = (hidden, weight, targets, ctx.temperature, bias, lse, entropy, grad_logprobs, grad_entropy, wants)
        if _runs_in_triton(hidden):
            from rlspeed.engine import head_triton

            grads = head_triton.gradients(*work, ctx.plan)
        else:
            grads = torch_gradients(*work)
        d_hidden, d_weight, d_bias = grads
        if ctx.shard is not None and d_hidden is not None:
            d_hidden = ctx.shard.reduce_sum(d_hidden)
        if d_hidden is not None:
            d_hidden = d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def _runs_in_triton(hidden: torch.Tensor) -> bool:
    """Half precision on CUDA; fp32 there is for debugging, and no tokens need no kernel."""
    return hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16) and hidden.shape[0] > 0


def merge_shards(stats: Stats, shard: VocabularyShard) -> Stats:
    """Statistics over the whole vocabulary from those of each rank's rows: three small all-reduces over [N]."""
    m = shard.reduce_max(stats.m.clone())
    shift = stats.m - m
    scale = shift.exp()
    s = shard.reduce_sum(stats.s * scale)
    u = shard.reduce_sum(scale * (stats.u + stats.s * shift))
    return Stats(m=m, s=s, u=u, z_target=shard.reduce_sum(stats.z_target.clone()))


def _cuts(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
    """Rows of weight and tokens per tile, so that neither the tile's logits nor a cast copy passes CHUNK_ELEMENTS.

    A weight that is used as it is needs no cut over the vocabulary: fewer passes over the tokens.
    """
    tokens, width = hidden.shape
    vocab = weight.shape[0]
    wide = vocab if weight.dtype == _work_dtype(weight) else min(vocab, max(256, CHUNK_ELEMENTS // max(width, 1)))
    return wide, max(1, min(max(tokens, 1), CHUNK_ELEMENTS // max(wide, 1)))


def _work_dtype(tensor: torch.Tensor) -> torch.dtype:
    """fp32 arithmetic for anything narrower; fp64 stays fp64 (gradient checks)."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _tile_logits(h: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """z [n, v] of a tile; h and w already in the working dtype."""
    z = h @ w.T
    if bias is not None:
        z += bias
    return z if temperature == 1.0 else z.div_(temperature)


def torch_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    bias: torch.Tensor | None,
    with_entropy: bool,
) -> Stats:
    """Statistics of z over the rows of `weight`; a target outside of them counts as not here."""
    work = _work_dtype(hidden)
    tokens = hidden.shape[0]
    m = torch.full((tokens,), -torch.inf, dtype=work, device=hidden.device)
    s, u, z_target = (torch.zeros(tokens, dtype=work, device=hidden.device) for _ in range(3))
    wide, rows = _cuts(hidden, weight)
    for v0 in range(0, weight.shape[0], wide):
        w = weight[v0 : v0 + wide].to(work)
        b = None if bias is None else bias[v0 : v0 + wide].to(work)
        for n0 in range(0, tokens, rows):
            part = slice(n0, n0 + rows)
            z = _tile_logits(hidden[part].to(work), w, b, temperature)
            local = targets[part] - v0
            here = (local >= 0) & (local < w.shape[0])
            picked = z.gather(1, local.clamp(0, w.shape[0] - 1)[:, None])[:, 0]
            z_target[part] += torch.where(here, picked, 0.0)
            top = torch.maximum(m[part], z.amax(1))
            z -= top[:, None]
            e = z.exp()
            old = m[part] - top
            keep = old.exp()
            if with_entropy:
                # the old sum u was taken around the old maximum; exp(-inf) * -inf of the first cut is 0, not NaN
                moved = torch.where(keep > 0, keep * (u[part] + s[part] * old), 0.0)
                u[part] = moved + torch.linalg.vecdot(e, z)
            s[part] = keep * s[part] + e.sum(1)
            m[part] = top
    return Stats(m=m, s=s, u=u, z_target=z_target)


def torch_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    bias: torch.Tensor | None,
    lse: torch.Tensor,
    entropy: torch.Tensor | None,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    wants: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of hidden (fp32 [N, H], still partial when the vocabulary is cut), weight [V, H] and bias [V].

    dz_j = g * (1[j = target] - p_j) - g_H * p_j * (log p_j + H); the logits' gradient is dz / temperature.
    lse [N]: log-sum-exp of z; entropy [N]: H; grad_logprobs, grad_entropy [N]: g, g_H. wants: which of the three.
    """
    work = _work_dtype(hidden)
    tokens, width = hidden.shape
    grad_logprobs = grad_logprobs.to(work)
    d_hidden = torch.zeros(tokens, width, dtype=work, device=hidden.device) if wants[0] else None
    d_weight = torch.empty_like(weight) if wants[1] else None
    d_bias = torch.empty_like(bias) if wants[2] and bias is not None else None
    wide, rows = _cuts(hidden, weight)
    for v0 in range(0, weight.shape[0], wide):
        cut = slice(v0, v0 + wide)
        w = weight[cut].to(work)
        b = None if bias is None else bias[cut].to(work)
        w_sum = torch.zeros_like(w) if wants[1] else None
        b_sum = w.new_zeros(w.shape[0]) if wants[2] else None
        for n0 in range(0, tokens, rows):
            part = slice(n0, n0 + rows)
            h = hidden[part].to(work)
            log_p = _tile_logits(h, w, b, temperature).sub_(lse[part, None])
            d = log_p.exp()
            factor = -grad_logprobs[part, None]
            if grad_entropy is not None and entropy is not None:
                factor = factor - grad_entropy[part, None] * log_p.add_(entropy[part, None])
            d *= factor
            local = targets[part] - v0
            here = (local >= 0) & (local < w.shape[0])
            d.scatter_add_(
                1, local.clamp(0, w.shape[0] - 1)[:, None], torch.where(here, grad_logprobs[part], 0.0)[:, None]
            )
            if temperature != 1.0:
                d.div_(temperature)
            if d_hidden is not None:
                d_hidden[part].addmm_(d, w)
            if w_sum is not None:
                w_sum.addmm_(d.T, h)
            if b_sum is not None:
                b_sum += d.sum(0)
        if d_weight is not None and w_sum is not None:
            d_weight[cut] = w_sum
        if d_bias is not None and b_sum is not None:
            d_bias[cut] = b_sum
    return d_hidden, d_weight, d_bias
