"""Triton kernels of one decode step: residual and norm, rotation and cache, attention over pages, gated MLP, sampling.

Rounding follows the model: a value that transformers rounds to 16 bits is rounded here at the same place.

`where` holds the address of the cache [pages, layers, 2, Hkv, G, D]: the kernels look it up, so a captured graph
outlives the cache that it was captured with.
"""

from __future__ import annotations

import triton
import triton.language as tl

# one code for all layers, also for layer 1 and multiples of 16
LAYER = ("layer",)


@triton.jit
def add_norm_kernel(x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """One row: sum = x + delta; out = sum / rms(sum) * weight. x, delta, sum, out [B, width]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0)
    if ADD:
        delta = tl.load(delta_ptr + row * width + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * width + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * width + at, normed.to(x.dtype), mask=inside)


@triton.jit
def gated_kernel(gate_up_ptr, out_ptr, inner, BLOCK: tl.constexpr):
    """silu(gate) * up; gate_up [B, 2 inner] to out [B, inner]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(gate_up_ptr + row * 2 * inner + at, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * inner + inner + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    act = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * inner + at, (act * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit
def _head_norm(first, second, weight_ptr, at, inside, eps, D: tl.constexpr):
    """The two halves of a head over their root mean square, times the norm's weight."""
    kind = first.dtype
    a, b = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / D + eps)
    wa = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    wb = tl.load(weight_ptr + D // 2 + at, mask=inside, other=0.0).to(tl.float32)
    a = (a * scale).to(kind).to(tl.float32) * wa
    b = (b * scale).to(kind).to(tl.float32) * wb
    return a.to(kind), b.to(kind)


@triton.jit
def _rotated(first, second, cos_ptr, sin_ptr, at, inside, D: tl.constexpr):
    """The two halves of a head, rotated by the angles of its position."""
    kind = first.dtype
    a, b = first.to(tl.float32), second.to(tl.float32)
    ca = tl.load(cos_ptr + at, mask=inside, other=0.0).to(kind).to(tl.float32)
    sa = tl.load(sin_ptr + at, mask=inside, other=0.0).to(kind).to(tl.float32)
    cb = tl.load(cos_ptr + D // 2 + at, mask=inside, other=0.0).to(kind).to(tl.float32)
    sb = tl.load(sin_ptr + D // 2 + at, mask=inside, other=0.0).to(kind).to(tl.float32)
    one = ((a * ca).to(kind).to(tl.float32) - (b * sa).to(kind).to(tl.float32)).to(kind)
    two = ((b * cb).to(kind).to(tl.float32) + (a * sb).to(kind).to(tl.float32)).to(kind)
    return one, two


@triton.jit(do_not_specialize=LAYER)
def rotate_kernel(
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    where_ptr,
    table_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    layer,
    layers,
    table_stride,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    NORM: tl.constexpr,
    PACKED: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
):
    """One head of one token: head norm and rotary embedding; q [B, Hq, D] out, k and v into their page.

    PACKED (prefill): the table holds one page per token, and k and v [B, Hkv, D] are wanted beside the cache.
    """
    lane = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, HALF)
    inside = at < D // 2
    source = qkv_ptr + (lane * (heads + 2 * kv_heads) + head) * D + at
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + D // 2, mask=inside, other=0.0)
    kind = first.dtype
    position = tl.load(positions_ptr + lane)
    if head < heads + kv_heads:
        if NORM:
            norm_ptr = q_norm_ptr if head < heads else k_norm_ptr
            first, second = _head_norm(first, second, norm_ptr, at, inside, eps, D)
        first, second = _rotated(first, second, cos_ptr + position * D, sin_ptr + position * D, at, inside, D)
    if head < heads:
        target = q_ptr + (lane * heads + head) * D + at
        tl.store(target, first, mask=inside)
        tl.store(target + D // 2, second, mask=inside)
    else:
        which = (head - heads) // kv_heads
        kv = (head - heads) % kv_heads
        if PACKED:
            page = tl.load(table_ptr + lane).to(tl.int64)
            beside = (k_ptr if which == 0 else v_ptr) + (lane * kv_heads + kv) * D + at
            tl.store(beside, first, mask=inside)
            tl.store(beside + D // 2, second, mask=inside)
        else:
            page = tl.load(table_ptr + lane * table_stride + position // G).to(tl.int64)
        cache = tl.load(where_ptr).to(tl.pointer_type(kind))
        target = cache + ((((page * layers + layer) * 2 + which) * kv_heads + kv) * G + position % G) * D + at
        tl.store(target, first, mask=inside)
        tl.store(target + D // 2, second, mask=inside)


@triton.jit
def _block(
    q, base, stride, seen, wide, scale, top, total, acc, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One page into the running softmax; stride: from its keys to its values."""
    at = tl.arange(0, G)[:, None] * D + tl.arange(0, DP)[None]
    inside = seen[:, None] & wide[None]
    k = tl.load(base + at, mask=inside, other=0.0)
    v = tl.load(base + stride + at, mask=inside, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * 1.4426950408889634)
    s = tl.where(seen[None], s, -1e30)
    now = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - now[:, None])
    fade = tl.exp2(top - now)
    acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return now, total * fade + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=LAYER)
def attend_kernel(
    q_ptr,
    part_ptr,
    stat_ptr,
    where_ptr,
    table_ptr,
    positions_ptr,
    scale,
    layer,
    layers,
    table_stride,
    kv_heads: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The query heads of one KV head of one lane over one split of its pages.

    q [B, Hkv * GROUP, D]; part [B, Hkv, SPLITS, ROWS, DP] fp32; stat [B, Hkv, SPLITS, 2, ROWS] fp32 (running maximum
    in base 2, and sum).
    """
    lane = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    rows = tl.arange(0, ROWS)
    at = tl.arange(0, DP)
    wide = at < D
    kind = q_ptr.dtype.element_ty
    q_at = q_ptr + ((lane * kv_heads + kv) * GROUP + rows[:, None]) * D + at[None]
    q = tl.load(q_at, mask=(rows[:, None] < GROUP) & wide[None], other=0.0)
    length = tl.load(positions_ptr + lane).to(tl.int32) + 1
    blocks = tl.cdiv(length, G)
    each = tl.cdiv(blocks, SPLITS)
    first = split * each
    last = tl.minimum(first + each, blocks)
    cache = tl.load(where_ptr).to(tl.pointer_type(kind))
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    for block in range(first, last):
        page = tl.load(table_ptr + lane * table_stride + block).to(tl.int64)
        base = cache + ((page * layers + layer) * 2 * kv_heads + kv) * G * D
        seen = block * G + tl.arange(0, G) < length
        top, total, acc = _block(
            q, tl.multiple_of(base, 16), kv_heads * G * D, seen, wide, scale, top, total, acc, G, D, DP, PRECISION
        )
    piece = (lane * kv_heads + kv) * SPLITS + split
    tl.store(part_ptr + (piece * ROWS + rows[:, None]) * DP + at[None], acc)
    tl.store(stat_ptr + piece * 2 * ROWS + rows, top)
    tl.store(stat_ptr + (piece * 2 + 1) * ROWS + rows, total)


@triton.jit
def merge_kernel(
    part_ptr,
    stat_ptr,
    out_ptr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """The splits of one query head into its output; program (lane * Hkv + kv, head of the group)."""
    pair = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    at = tl.arange(0, DP)
    top = tl.load(stat_ptr + (pair * SPLITS + splits) * 2 * ROWS + row)
    total = tl.load(stat_ptr + ((pair * SPLITS + splits) * 2 + 1) * ROWS + row)
    fade = tl.exp2(top - tl.max(top, 0))
    part = tl.load(part_ptr + ((pair * SPLITS + splits[:, None]) * ROWS + row) * DP + at[None])
    out = tl.sum(part * fade[:, None], 0) / tl.sum(total * fade, 0)
    tl.store(out_ptr + (pair * GROUP + row) * D + at, out.to(out_ptr.dtype.element_ty), mask=at < D)


@triton.jit
def _word(ptr, start, word, per_split, words):
    """Logits of words start + word of a row; -inf past the split or the vocabulary."""
    return tl.load(ptr + start + word, mask=(word < per_split) & (start + word < words), other=-float("inf"))


@triton.jit
def _words(ptr, start, word, per_split, words, BLOCK: tl.constexpr):
    """Four blocks of logits behind one another."""
    z0 = _word(ptr, start, word, per_split, words)
    z1 = _word(ptr, start, word + BLOCK, per_split, words)
    z2 = _word(ptr, start, word + 2 * BLOCK, per_split, words)
    z3 = _word(ptr, start, word + 3 * BLOCK, per_split, words)
    return z0, z1, z2, z3


@triton.jit
def _better(best, best_at, z, random, noise, word):
    """Keep the larger of best and z + noise * Gumbel(random)."""
    # 23 random bits and a half: never 0, never 1
    u = ((random >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    z = z - noise * tl.log(-tl.log(u))
    better = z > best
    return tl.where(better, z, best), tl.where(better, word, best_at)


@triton.jit
def draw_kernel(
    logits_ptr,
    kept_ptr,
    seeds_ptr,
    places_ptr,
    best_ptr,
    best_at_ptr,
    stat_ptr,
    words,
    per_split,
    inverse,
    noise,
    FILTER: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One split of the vocabulary of one lane: the largest (scaled logit + Gumbel noise), and log-sum-exp statistics.

    The noise of word w is -log(-log(u)), u a Philox number of (seed, place, w): the argmax over all words is a draw
    from the softmax. kept: logits after the filters (-inf where a word is out); statistics are of `logits`.
    best, best_at [B, SPLITS]; stat [B, SPLITS, 2].
    """
    lane = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    seed = tl.load(seeds_ptr + lane)
    place = tl.load(places_ptr + lane).to(tl.int32)
    at = tl.arange(0, BLOCK)
    zero = tl.zeros_like(at)
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    best_at = tl.zeros([BLOCK], tl.int32)
    start = split * per_split
    logits_ptr += lane * words
    kept_ptr += lane * words
    for step in range(0, per_split, 4 * BLOCK):
        # four numbers of one Philox call serve four blocks of words
        r0, r1, r2, r3 = tl.philox(seed, start + step + at, place + zero, zero, zero, n_rounds=7)
        z0, z1, z2, z3 = _words(logits_ptr, start, step + at, per_split, words, BLOCK)
        z0, z1, z2, z3 = z0 * inverse, z1 * inverse, z2 * inverse, z3 * inverse
        now = tl.maximum(top, tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3)))
        total = (
            total * tl.exp(top - now) + (tl.exp(z0 - now) + tl.exp(z1 - now)) + (tl.exp(z2 - now) + tl.exp(z3 - now))
        )
        top = now
        if FILTER:
            z0, z1, z2, z3 = _words(kept_ptr, start, step + at, per_split, words, BLOCK)
        word = start + step + at
        best, best_at = _better(best, best_at, z0, r0, noise, word)
        best, best_at = _better(best, best_at, z1, r1, noise, word + BLOCK)
        best, best_at = _better(best, best_at, z2, r2, noise, word + 2 * BLOCK)
        best, best_at = _better(best, best_at, z3, r3, noise, word + 3 * BLOCK)
    value, index = tl.max(best, 0, return_indices=True)
    word = tl.sum(tl.where(at == index, best_at, 0), 0)
    peak = tl.max(top, 0)
    tl.store(best_ptr + lane * SPLITS + split, value)
    tl.store(best_at_ptr + lane * SPLITS + split, word)
    tl.store(stat_ptr + (lane * SPLITS + split) * 2, peak)
    tl.store(stat_ptr + (lane * SPLITS + split) * 2 + 1, tl.sum(total * tl.exp(top - peak), 0))


@triton.jit
def choose_kernel(
    logits_ptr,
    best_ptr,
    best_at_ptr,
    stat_ptr,
    tokens_ptr,
    logprobs_ptr,
    words,
    inverse,
    SPLITS: tl.constexpr,
):
    """The splits of one lane into its token and log-prob."""
    lane = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SPLITS)
    best = tl.load(best_ptr + lane * SPLITS + at)
    _, index = tl.max(best, 0, return_indices=True)
    token = tl.load(best_at_ptr + lane * SPLITS + index)
    top = tl.load(stat_ptr + (lane * SPLITS + at) * 2)
    total = tl.load(stat_ptr + (lane * SPLITS + at) * 2 + 1)
    peak = tl.max(top, 0)
    z = tl.load(logits_ptr + lane * words + token) * inverse
    tl.store(tokens_ptr + lane, token.to(tl.int64))
    tl.store(logprobs_ptr + lane, z - peak - tl.log(tl.sum(total * tl.exp(top - peak), 0)))
