# mypy: ignore-errors
"""Triton kernels of the head: what happens to logits while they are in registers, or right after a matrix product.

All of them see z = (product + bias) * inv_temperature in fp32. Columns outside of the vocabulary count as z = -1e30,
whose exp() is 0, so no term can become 0 * inf. Rows of z are tokens, columns are words.
"""

from __future__ import annotations

import triton
import triton.language as tl

# below every logit, and far enough from fp32's end that differences stay finite
LOWEST = tl.constexpr(-1.0e30)
# the number of tokens differs from pack to pack: code of its own for multiples of 16 would be compiled, for seconds,
# when the first such pack turns up in the middle of a run
TOKENS = ("N",)


@triton.jit
def _place(tile, num_rows, num_columns, GROUP: tl.constexpr):
    """Row and column of a tile when tiles are visited in bands of GROUP rows, so that a band's inputs stay in L2."""
    band = GROUP * num_columns
    first = (tile // band) * GROUP
    rows = tl.minimum(num_rows - first, GROUP)
    inside = tile % band
    return first + inside % rows, inside // rows


@triton.jit
def _product(
    h,
    w,
    n0,
    v0,
    N,
    V,
    K,
    stride_h,
    stride_w,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):
    """hidden[n0:] @ weight[v0:].T, one tile [BLOCK_N, BLOCK_V] fp32; h and w are descriptors (TMA) or pointers."""
    acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    if TMA:
        for k in tl.range(0, K, BLOCK_K, warp_specialize=SPECIALIZE):
            a = h.load([n0, k])
            b = w.load([v0, k])
            acc = tl.dot(a, b.T, acc)
    else:
        rows = tl.minimum(n0 + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
        columns = tl.minimum(v0 + tl.arange(0, BLOCK_V), V - 1).to(tl.int64)
        inner = tl.arange(0, BLOCK_K)
        a_ptrs = h + rows[:, None] * stride_h + inner[None, :]
        b_ptrs = w + columns[None, :] * stride_w + inner[:, None]
        for k in range(0, K, BLOCK_K):
            a = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0.0)
            b = tl.load(b_ptrs, mask=inner[:, None] < K - k, other=0.0)
            acc = tl.dot(a, b, acc)
            a_ptrs += BLOCK_K
            b_ptrs += BLOCK_K
    return acc


@triton.jit
def _scaled(acc, bias, columns, V, inv_temperature, HAS_BIAS: tl.constexpr):
    """z of a tile from its product."""
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
    return tl.where(columns[None, :] < V, acc * inv_temperature, LOWEST)


@triton.jit(do_not_specialize=TOKENS)
def fused_stats_kernel(
    h,
    w,
    bias,
    targets,
    part_m,
    part_s,
    part_u,
    z_target,
    N,
    V,
    K,
    stride_h,
    stride_w,
    inv_temperature,
    HAS_BIAS: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):
    """Matrix product whose tiles end as three sums per token: part_* [tiles over V, N]; z_target [N] where met."""
    num_rows = tl.cdiv(N, BLOCK_N)
    num_columns = tl.cdiv(V, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_rows * num_columns, tl.num_programs(0)):
        row, column = _place(tile, num_rows, num_columns, GROUP)
        n0 = row * BLOCK_N
        v0 = column * BLOCK_V
        acc = _product(h, w, n0, v0, N, V, K, stride_h, stride_w, BLOCK_N, BLOCK_V, BLOCK_K, TMA, SPECIALIZE)
        columns = v0 + tl.arange(0, BLOCK_V)
        z = _scaled(acc, bias, columns, V, inv_temperature, HAS_BIAS)
        rows = n0 + tl.arange(0, BLOCK_N)
        inside = rows < N
        target = tl.load(targets + rows, mask=inside, other=-1)
        here = (target >= v0) & (target < tl.minimum(v0 + BLOCK_V, V))
        if tl.max(here.to(tl.int32), 0) > 0:
            picked = tl.sum(tl.where(columns[None, :] == target[:, None], z, 0.0), 1)
            tl.store(z_target + rows, picked, mask=inside & here)
        m = tl.max(z, 1)
        d = z - m[:, None]
        e = tl.exp(d)
        out = column.to(tl.int64) * N + rows
        tl.store(part_m + out, m, mask=inside)
        tl.store(part_s + out, tl.sum(e, 1), mask=inside)
        if WITH_ENTROPY:
            tl.store(part_u + out, tl.sum(e * d, 1), mask=inside)


@triton.jit(do_not_specialize=TOKENS)
def merge_stats_kernel(
    part_m,
    part_s,
    part_u,
    m_out,
    s_out,
    u_out,
    N,
    num_parts,
    WITH_ENTROPY: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sums per tile to sums per token: part_* [num_parts, N] to [N], each moved to the common maximum."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    m = tl.full((BLOCK_N,), LOWEST, dtype=tl.float32)
    s = tl.zeros((BLOCK_N,), dtype=tl.float32)
    u = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for p in range(0, num_parts, BLOCK_P):
        parts = p + tl.arange(0, BLOCK_P)
        place = parts.to(tl.int64)[:, None] * N + rows[None, :]
        mask = (parts < num_parts)[:, None] & inside[None, :]
        pm = tl.load(part_m + place, mask=mask, other=LOWEST)
        ps = tl.load(part_s + place, mask=mask, other=0.0)
        top = tl.maximum(m, tl.max(pm, 0))
        shift = pm - top[None, :]
        scale = tl.exp(shift)
        old = m - top
        keep = tl.exp(old)
        if WITH_ENTROPY:
            pu = tl.load(part_u + place, mask=mask, other=0.0)
            u = keep * (u + s * old) + tl.sum(scale * (pu + ps * shift), 0)
        s = keep * s + tl.sum(scale * ps, 0)
        m = top
    tl.store(m_out + rows, m, mask=inside)
    tl.store(s_out + rows, s, mask=inside)
    tl.store(u_out + rows, u, mask=inside)


@triton.jit
def _gradient(z, columns, target, lse, entropy, g, g_entropy, inv_temperature, WITH_ENTROPY: tl.constexpr):
    """Gradient of the logits: (g * (1[column = target] - p) - g_H * p * (log p + H)) / temperature."""
    log_p = z - lse
    p = tl.exp(log_p)
    factor = -g
    if WITH_ENTROPY:
        factor = factor - g_entropy * (log_p + entropy)
    return (p * factor + tl.where(columns == target, g, 0.0)) * inv_temperature


@triton.jit(do_not_specialize=TOKENS)
def fused_gradient_kernel(
    h,
    w,
    bias,
    targets,
    lse,
    entropy,
    grad,
    grad_entropy,
    dz,
    N,
    V,
    K,
    stride_h,
    stride_w,
    stride_dz,
    inv_temperature,
    HAS_BIAS: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):
    """Matrix product whose tiles are written as gradients of the logits: dz [N, V] in the inputs' dtype."""
    num_rows = tl.cdiv(N, BLOCK_N)
    num_columns = tl.cdiv(V, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_rows * num_columns, tl.num_programs(0)):
        row, column = _place(tile, num_rows, num_columns, GROUP)
        n0 = row * BLOCK_N
        v0 = column * BLOCK_V
        acc = _product(h, w, n0, v0, N, V, K, stride_h, stride_w, BLOCK_N, BLOCK_V, BLOCK_K, TMA, SPECIALIZE)
        columns = v0 + tl.arange(0, BLOCK_V)
        z = _scaled(acc, bias, columns, V, inv_temperature, HAS_BIAS)
        rows = n0 + tl.arange(0, BLOCK_N)
        inside = rows < N
        target = tl.load(targets + rows, mask=inside, other=-1)
        top = tl.load(lse + rows, mask=inside, other=0.0)
        g = tl.load(grad + rows, mask=inside, other=0.0)
        spread = top
        g_entropy = g
        if WITH_ENTROPY:
            spread = tl.load(entropy + rows, mask=inside, other=0.0)
            g_entropy = tl.load(grad_entropy + rows, mask=inside, other=0.0)
        d = _gradient(
            z,
            columns[None, :],
            target[:, None],
            top[:, None],
            spread[:, None],
            g[:, None],
            g_entropy[:, None],
            inv_temperature,
            WITH_ENTROPY,
        )
        place = rows.to(tl.int64)[:, None] * stride_dz + columns[None, :]
        mask = inside[:, None] & (columns < V)[None, :]
        tl.store(dz + place, d.to(dz.dtype.element_ty), mask=mask)


@triton.jit
def row_stats_kernel(
    logits,
    bias,
    targets,
    m_out,
    s_out,
    u_out,
    z_target,
    v0,
    width,
    stride,
    inv_temperature,
    HAS_BIAS: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: merge the logits of words v0..v0+width-1 into the running m, s, u; pick z_target."""
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * stride
    m = LOWEST
    s = 0.0
    u = 0.0
    if not FIRST:
        m = tl.load(m_out + row)
        s = tl.load(s_out + row)
        u = tl.load(u_out + row)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < width
        z = tl.load(line + columns, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            z += tl.load(bias + v0 + columns, mask=mask, other=0.0).to(tl.float32)
        z = tl.where(mask, z * inv_temperature, LOWEST)
        top = tl.maximum(m, tl.max(z, 0))
        d = z - top
        e = tl.exp(d)
        old = m - top
        keep = tl.exp(old)
        if WITH_ENTROPY:
            u = keep * (u + s * old) + tl.sum(e * d, 0)
        s = keep * s + tl.sum(e, 0)
        m = top
    tl.store(m_out + row, m)
    tl.store(s_out + row, s)
    tl.store(u_out + row, u)
    target = tl.load(targets + row) - v0
    if (target >= 0) & (target < width):
        picked = tl.load(line + target).to(tl.float32)
        if HAS_BIAS:
            picked += tl.load(bias + v0 + target).to(tl.float32)
        tl.store(z_target + row, picked * inv_temperature)


@triton.jit
def row_gradient_kernel(
    logits,
    bias,
    targets,
    lse,
    entropy,
    grad,
    grad_entropy,
    dz,
    v0,
    width,
    stride,
    stride_dz,
    inv_temperature,
    HAS_BIAS: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: logits of words v0..v0+width-1 to their gradients; dz may be the memory of the logits."""
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * stride
    out = dz + row.to(tl.int64) * stride_dz
    target = tl.load(targets + row) - v0
    top = tl.load(lse + row)
    g = tl.load(grad + row)
    spread = top
    g_entropy = g
    if WITH_ENTROPY:
        spread = tl.load(entropy + row)
        g_entropy = tl.load(grad_entropy + row)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < width
        z = tl.load(line + columns, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            z += tl.load(bias + v0 + columns, mask=mask, other=0.0).to(tl.float32)
        z = tl.where(mask, z * inv_temperature, LOWEST)
        d = _gradient(z, columns, target, top, spread, g, g_entropy, inv_temperature, WITH_ENTROPY)
        tl.store(out + columns, d.to(dz.dtype.element_ty), mask=mask)
