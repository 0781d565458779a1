"""Attention forward in Triton, written by frisket for

    every key visible, plain scores

Head size 128, bfloat16.
attention_forward: grid (q tiles, heads, batch), tiles of 128 queries by 64 keys, num_warps=8, num_stages=3.
"""

import triton
import triton.language as tl

DIM = tl.constexpr(128)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["heads", "q_len", "kv_len"])
def attention_forward(
    Q, K, V, Out,  # [batch, heads, length, dim], any strides
    Lse,  # float32 [batch, heads, q_len], contiguous
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_ob, stride_oh, stride_os, stride_od,
    scale, heads, q_len, kv_len,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # powers of two
):
    head, batch = tl.program_id(1), tl.program_id(2)
    place = batch * heads + head
    row = tl.num_programs(0) - 1 - tl.program_id(0)  # longest first
    start = row * BLOCK_Q
    rows = tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_K)
    d = tl.arange(0, DIM)

    # Offsets are 64 bits where they are scalars, 32 within a tile.
    Q += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + start.to(tl.int64) * stride_qs
    K += batch.to(tl.int64) * stride_kb + head.to(tl.int64) * stride_kh
    V += batch.to(tl.int64) * stride_vb + head.to(tl.int64) * stride_vh
    key_at = columns[None, :] * stride_ks + d[:, None] * stride_kd
    value_at = columns[:, None] * stride_vs + d[None, :] * stride_vd
    present = start + rows < q_len

    unit = scale * LOG2E
    top = tl.full([BLOCK_Q], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, DIM], tl.float32)
    query = tl.load(Q + rows[:, None] * stride_qs + d[None, :] * stride_qd, mask=present[:, None], other=0.0)

    lo, full_lo = 0, 0
    full_hi, hi = kv_len // BLOCK_K, tl.cdiv(kv_len, BLOCK_K)
    # The ragged edge: a last tile that is not full.
    for j in range(hi - full_hi):
        tile = full_hi + j
        inside = columns < kv_len - tile * BLOCK_K
        at = tl.cast(tile * BLOCK_K, tl.int64)
        keys = tl.load(K + at * stride_ks + key_at, mask=inside[None, :], other=0.0)
        score = tl.dot(query, keys)
        visible = inside[None, :]
        score = tl.where(visible, score, -INFINITY)
        peak = tl.maximum(top, tl.max(score, 1) * unit)
        p = tl.exp2(score * unit - peak[:, None])
        rescale = tl.exp2(top - peak)
        total = total * rescale + tl.sum(p, 1)
        values = tl.load(V + at * stride_vs + value_at, mask=inside[:, None], other=0.0)
        acc = tl.dot(p.to(values.dtype), values, acc * rescale[:, None])
        top = peak
    # Full tiles: every position is visible.
    for tile in range(full_lo, full_hi):
        at = tl.cast(tile * BLOCK_K, tl.int64)
        keys = tl.load(K + at * stride_ks + key_at)
        score = tl.dot(query, keys)
        peak = tl.maximum(top, tl.max(score, 1) * unit)
        p = tl.exp2(score * unit - peak[:, None])
        rescale = tl.exp2(top - peak)
        total = total * rescale + tl.sum(p, 1)
        values = tl.load(V + at * stride_vs + value_at)
        acc = tl.dot(p.to(values.dtype), values, acc * rescale[:, None])
        top = peak

    lse = (top + tl.log2(total)) * LN2
    weight = 1.0 / total
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start.to(tl.int64) * stride_os
    out_at = rows[:, None] * stride_os + d[None, :] * stride_od
    tl.store(Out + out_at, (acc * weight[:, None]).to(Out.dtype.element_ty), mask=present[:, None])
    row_at = place.to(tl.int64) * q_len + start + rows
    tl.store(Lse + row_at, lse, mask=present)
