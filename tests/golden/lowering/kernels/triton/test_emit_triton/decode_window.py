"""Attention of few queries in Triton, written by frisket for

    causal & window(w)
    s0 = w

Head size 128, bfloat16, 8 query heads to a key head.
attention_decode: grid (q tiles * splits, heads / 8, batch), tiles of 16 packed queries by 64 keys,
    num_warps=4, num_stages=3.
attention_combine: grid (q_len, heads, batch).
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(8)
HEAD_DIM = tl.constexpr(128)
DIM = tl.constexpr(128)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PARTS = tl.constexpr(16)
LOWEST = tl.constexpr(-3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def bounded(i, n):
    return tl.minimum(tl.maximum(i, 0), n)


@triton.jit(do_not_specialize=["heads", "q_len", "kv_len", "splits", "q_origin", "k_origin", "KV_LEN", "s0"])
def attention_decode(
    Q, K, V,  # [batch, heads, length, dim], any strides
    Acc,  # float32 [splits, batch, heads, q_len, dim]: values of each part by their weights
    Tops, Totals,  # float32 [splits, batch, heads, q_len]: largest scores, and sums of weights
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    scale, heads, q_len, kv_len, splits,
    q_origin, k_origin,  # of this call in the whole problem
    KV_LEN,
    s0,
    ORIGIN_PER_BATCH: tl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # powers of two
):
    rows_of_tiles = tl.num_programs(0) // splits
    part, row = tl.program_id(0) // rows_of_tiles, tl.program_id(0) % rows_of_tiles
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    # A tile holds QUERIES queries of each of the GROUP heads that share a key head.
    QUERIES: tl.constexpr = BLOCK_Q // GROUP
    start = row * QUERIES
    packed = tl.arange(0, BLOCK_Q)
    rows, head = packed // GROUP, kv_head * GROUP + packed % GROUP
    columns = tl.arange(0, BLOCK_K)
    d = tl.arange(0, DIM)

    # Offsets are 64 bits where they are scalars, 32 within a tile.
    Q += batch.to(tl.int64) * stride_qb
    query_at = head.to(tl.int64) * stride_qh + (start + rows).to(tl.int64) * stride_qs
    K += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    V += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    key_at = columns[None, :] * stride_ks + d[:, None] * stride_kd
    value_at = columns[:, None] * stride_vs + d[None, :] * stride_vd
    present = (packed < QUERIES * GROUP) & (start + rows < q_len)
    query = tl.load(Q + query_at[:, None] + d[None, :] * stride_qd, mask=present[:, None], other=0.0)

    if ORIGIN_PER_BATCH:
        q_origin = tl.load(q_origin + batch)
        k_origin = tl.load(k_origin + batch)
    q = (q_origin + start + rows)[:, None]

    q_first = q_origin + start
    q_last = q_origin + tl.minimum(start + QUERIES, q_len) - 1
    k_first = k_origin
    k_last = k_origin + kv_len - 1
    # Some query of the tile sees keys first..last, every one sees full_first..full_last.
    first = tl.maximum(q_first - s0 + 1, k_first) - k_first
    full_first = tl.maximum(q_last - s0 + 1, k_first) - k_first
    full_last = tl.minimum(q_first, k_last) - k_first
    last = tl.minimum(tl.minimum(q_last, KV_LEN - 1), k_last) - k_first
    hi = (tl.maximum(last, -1) + BLOCK_K) // BLOCK_K
    lo = tl.minimum(first // BLOCK_K, hi)
    full_lo = tl.minimum((tl.minimum(full_first, kv_len) + BLOCK_K - 1) // BLOCK_K, hi)
    full_lo = tl.maximum(full_lo, lo)
    full_hi = tl.minimum(tl.maximum(full_last + 1, 0) // BLOCK_K, hi)
    full_hi = tl.maximum(full_hi, full_lo)

    unit = scale * LOG2E
    top = tl.full([BLOCK_Q], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, DIM], tl.float32)

    tiles = hi - lo
    # This part's share of the tiles that the row sees.
    begin, end = part * tiles // splits, (part + 1) * tiles // splits
    border, full = full_lo - lo + hi - full_hi, full_hi - full_lo
    # Partial tiles, before and behind the full ones: the mask is a predicate.
    for j in range(lo + bounded(begin, border), lo + bounded(end, border)):
        tile = tl.where(j < full_lo, j, j - full_lo + full_hi)
        inside = tile * BLOCK_K + columns < kv_len
        at = tl.cast(tile * BLOCK_K, tl.int64)
        keys = tl.load(K + at * stride_ks + key_at, mask=inside[None, :], other=0.0)
        score = tl.dot(query, keys)
        k = (k_origin + tile * BLOCK_K + columns)[None, :]
        # q >= k & q - k < s0
        visible = inside[None, :]
        visible &= q >= k
        visible &= q - k < s0
        score = tl.where(visible, score, -INFINITY)
        peak = tl.maximum(top, tl.max(score, 1) * unit)
        p = tl.exp2(score * unit - peak[:, None])
        rescale = tl.exp2(top - peak)
        total = total * rescale + tl.sum(p, 1)
        values = tl.load(V + at * stride_vs + value_at, mask=inside[:, None], other=0.0)
        acc = tl.dot(p.to(values.dtype), values, acc * rescale[:, None])
        top = peak
    begin, end = begin - border, end - border
    # Full tiles: every position is visible.
    for tile in range(full_lo + bounded(begin, full), full_lo + bounded(end, full)):
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

    row_at = ((part.to(tl.int64) * tl.num_programs(2) + batch) * heads + head) * q_len + start + rows
    tl.store(Tops + row_at, top, mask=present)
    tl.store(Totals + row_at, total, mask=present)
    out_at = row_at[:, None] * HEAD_DIM + d[None, :]
    tl.store(Acc + out_at, acc, mask=present[:, None])


@triton.jit(do_not_specialize=["heads", "q_len", "splits"])
def attention_combine(
    Acc, Tops, Totals,  # the parts, of attention_decode
    Out,  # [batch, heads, q_len, dim], any strides
    Lse,  # float32 [batch, heads, q_len], contiguous
    stride_ob, stride_oh, stride_os, stride_od,
    heads, q_len, splits,
):
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row_at = (batch.to(tl.int64) * heads + head) * q_len + row
    rows = tl.num_programs(2).to(tl.int64) * heads * q_len  # of one part
    d = tl.arange(0, DIM)
    top = tl.cast(LOWEST, tl.float32)
    total = tl.cast(0.0, tl.float32)
    acc = tl.zeros([DIM], tl.float32)

    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        at = part * rows + row_at
        tops = tl.load(Tops + at, mask=part < splits, other=LOWEST)
        totals = tl.load(Totals + at, mask=part < splits, other=0.0)
        values = tl.load(Acc + at[:, None] * HEAD_DIM + d[None, :], mask=part[:, None] < splits, other=0.0)
        peak = tl.maximum(top, tl.max(tops, 0))
        weight = tl.exp2(tops - peak)
        rescale = tl.exp2(top - peak)
        total = total * rescale + tl.sum(weight * totals, 0)
        acc = acc * rescale + tl.sum(weight[:, None] * values, 0)
        top = peak

    lse = (top + tl.log2(total)) * LN2
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + row.to(tl.int64) * stride_os
    out = acc * (1.0 / total)
    tl.store(Out + d * stride_od, out.to(Out.dtype.element_ty))
    tl.store(Lse + row_at, lse)
