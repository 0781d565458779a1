"""Attention of few queries in Triton, written by frisket for

    causal & same_by_batch(doc)
    softcap(50) + slope[h] * (k - q)
    seed = seed of dropout
    rate = rate of dropout

Head size 96 (values 80), bfloat16, 3 query heads to a key head.
attention_decode: grid (q tiles * splits, heads / 3, batch), tiles of 16 packed queries by 64 keys,
    num_warps=4, num_stages=3.
attention_combine: grid (q_len, heads, batch).
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(3)
V_DIM = tl.constexpr(80)
DIM_V = tl.constexpr(128)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PARTS = tl.constexpr(16)
LOWEST = tl.constexpr(-3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def mix(x):
    # A. Appleby, MurmurHash3 finaliser.
    x = tl.mul(x ^ (x >> 16), 0x85EBCA6B, sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 13), 0xC2B2AE35, sanitize_overflow=False)
    return x ^ (x >> 16)


@triton.jit
def step(i, size, stride):
    return tl.minimum(tl.maximum(i, 0), size - 1).to(tl.int64) * stride


@triton.jit
def clamp(i, size):
    return tl.minimum(tl.maximum(i, 0), size - 1)


@triton.jit
def bounded(i, n):
    return tl.minimum(tl.maximum(i, 0), n)


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def seeded(x):
    return mix(tl.add(tl.cast(x, tl.uint32), 0x9E3779B9, sanitize_overflow=False))


@triton.jit
def stirred(x, counter):
    return mix(x ^ tl.mul(tl.cast(counter, tl.uint32), 0x9E3779B1, sanitize_overflow=False))


@triton.jit
def uniform(x):
    """24 bits as a number in [0, 1); the same on every backend."""
    return (x >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit(
    do_not_specialize=[
        "heads", "q_len", "kv_len", "splits", "records", "b_origin", "h_origin", "q_origin", "k_origin",
        "seed", "rate", "doc_size0", "doc_size1", "slope_size", "doc_stride0",
    ]
)
def attention_decode(
    Q, K, V,  # [batch, heads, length, dim], any strides
    Acc,  # float32 [splits, batch, heads, q_len, dim]: values of each part by their weights
    Tops, Totals,  # float32 [splits, batch, heads, q_len]: largest scores, and sums of weights
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    scale, heads, q_len, kv_len, splits,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles
    Count,  # int32 [slices, rows]: records in use
    SliceOf,  # int32 [batch, heads]
    records,
    b_origin, h_origin, q_origin, k_origin,  # of this call in the whole problem
    seed, rate,
    doc, doc_size0, doc_size1, doc_stride0, doc_stride1,
    slope, slope_size, slope_stride,
    ORIGIN_PER_BATCH: tl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # powers of two
):
    rows_of_tiles = tl.num_programs(0) // splits
    part, row = tl.program_id(0) // rows_of_tiles, tl.program_id(0) % rows_of_tiles
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    entry = tl.load(SliceOf + batch * heads + kv_head * GROUP) * rows_of_tiles + row
    # A tile holds QUERIES queries of each of the GROUP heads that share a key head.
    QUERIES: tl.constexpr = BLOCK_Q // GROUP
    start = row * QUERIES
    packed = tl.arange(0, BLOCK_Q)
    rows, head = packed // GROUP, kv_head * GROUP + packed % GROUP
    columns = tl.arange(0, BLOCK_K)
    d0, d1 = tl.arange(0, 64), 64 + tl.arange(0, 32)
    e0, e1 = tl.arange(0, 64), 64 + tl.arange(0, 16)

    # Offsets are 64 bits where they are scalars, 32 within a tile.
    Q += batch.to(tl.int64) * stride_qb
    query_at = head.to(tl.int64) * stride_qh + (start + rows).to(tl.int64) * stride_qs
    K += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    V += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    key_at0 = columns[None, :] * stride_ks + d0[:, None] * stride_kd
    key_at1 = columns[None, :] * stride_ks + d1[:, None] * stride_kd
    value_at0 = columns[:, None] * stride_vs + e0[None, :] * stride_vd
    value_at1 = columns[:, None] * stride_vs + e1[None, :] * stride_vd
    present = (packed < QUERIES * GROUP) & (start + rows < q_len)
    query0 = tl.load(Q + query_at[:, None] + d0[None, :] * stride_qd, mask=present[:, None], other=0.0)
    query1 = tl.load(Q + query_at[:, None] + d1[None, :] * stride_qd, mask=present[:, None], other=0.0)

    if ORIGIN_PER_BATCH:
        q_origin = tl.load(q_origin + batch)
        k_origin = tl.load(k_origin + batch)
    rate = tl.cast(rate, tl.float32)
    b = b_origin + batch
    h = (h_origin + head)[:, None]
    q = (q_origin + start + rows)[:, None]
    fixed0 = scale * 0.02
    doc_b_q = tl.load(doc + step(b, doc_size0, doc_stride0) + clamp(q, doc_size1) * doc_stride1)
    slope_h = tl.load(slope + clamp(h, slope_size) * slope_stride).to(tl.float32)
    row0 = (q - (q_origin + start)).to(tl.float32)
    top = tl.full([BLOCK_Q], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc0 = tl.zeros([BLOCK_Q, 64], tl.float32)
    acc1 = tl.zeros([BLOCK_Q, 16], tl.float32)

    tiles = 0
    for i in range(tl.load(Count + entry)):
        record = Spans + (entry.to(tl.int64) * records + i) * 4
        tiles += tl.load(record + 3) - tl.load(record)
    # This part's share of the tiles that the row sees.
    begin, end = part * tiles // splits, (part + 1) * tiles // splits

    for i in range(tl.load(Count + entry)):
        record = Spans + (entry.to(tl.int64) * records + i) * 4
        lo, full_lo = tl.load(record), tl.load(record + 1)
        full_hi, hi = tl.load(record + 2), tl.load(record + 3)
        border, full = full_lo - lo + hi - full_hi, full_hi - full_lo
        # Partial tiles, before and behind the full ones: the mask is a predicate.
        for j in range(lo + bounded(begin, border), lo + bounded(end, border)):
            tile = tl.where(j < full_lo, j, j - full_lo + full_hi)
            inside = tile * BLOCK_K + columns < kv_len
            at = tl.cast(tile * BLOCK_K, tl.int64)
            keys0 = tl.load(K + at * stride_ks + key_at0, mask=inside[None, :], other=0.0)
            keys1 = tl.load(K + at * stride_ks + key_at1, mask=inside[None, :], other=0.0)
            score = tl.dot(query0, keys0)
            score = tl.dot(query1, keys1, score)
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            doc_b_k = tl.load(doc + step(b, doc_size0, doc_stride0) + clamp(k, doc_size1) * doc_stride1)
            column0 = (k - (q_origin + start)).to(tl.float32)
            # q >= k & doc[b, q] == doc[b, k]
            visible = inside[None, :]
            visible &= q >= k
            visible &= doc_b_q == doc_b_k
            # 50 * tanh(score / 50) + slope[h] * (k - q)
            score = tanh(score * fixed0) * 50.0 + slope_h * (column0 - row0)
            score = tl.where(visible, score, -INFINITY)
            peak = tl.maximum(top, tl.max(score, 1) * LOG2E)
            p = tl.exp2(score * LOG2E - peak[:, None])
            rescale = tl.exp2(top - peak)
            total = total * rescale + tl.sum(p, 1)
            # random(seed, b, h, q, k) >= rate
            p = tl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, p, 0.0)
            values0 = tl.load(V + at * stride_vs + value_at0, mask=inside[:, None], other=0.0)
            values1 = tl.load(V + at * stride_vs + value_at1, mask=inside[:, None], other=0.0)
            acc0 = tl.dot(p.to(values0.dtype), values0, acc0 * rescale[:, None])
            acc1 = tl.dot(p.to(values1.dtype), values1, acc1 * rescale[:, None])
            top = peak
        begin, end = begin - border, end - border
        # Full tiles: every position is visible.
        for tile in range(full_lo + bounded(begin, full), full_lo + bounded(end, full)):
            at = tl.cast(tile * BLOCK_K, tl.int64)
            keys0 = tl.load(K + at * stride_ks + key_at0)
            keys1 = tl.load(K + at * stride_ks + key_at1)
            score = tl.dot(query0, keys0)
            score = tl.dot(query1, keys1, score)
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            column0 = (k - (q_origin + start)).to(tl.float32)
            # 50 * tanh(score / 50) + slope[h] * (k - q)
            score = tanh(score * fixed0) * 50.0 + slope_h * (column0 - row0)
            peak = tl.maximum(top, tl.max(score, 1) * LOG2E)
            p = tl.exp2(score * LOG2E - peak[:, None])
            rescale = tl.exp2(top - peak)
            total = total * rescale + tl.sum(p, 1)
            # random(seed, b, h, q, k) >= rate
            p = tl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, p, 0.0)
            values0 = tl.load(V + at * stride_vs + value_at0)
            values1 = tl.load(V + at * stride_vs + value_at1)
            acc0 = tl.dot(p.to(values0.dtype), values0, acc0 * rescale[:, None])
            acc1 = tl.dot(p.to(values1.dtype), values1, acc1 * rescale[:, None])
            top = peak
        begin, end = begin - full, end - full

    row_at = ((part.to(tl.int64) * tl.num_programs(2) + batch) * heads + head) * q_len + start + rows
    tl.store(Tops + row_at, top, mask=present)
    tl.store(Totals + row_at, total, mask=present)
    out_at = row_at[:, None] * V_DIM + e0[None, :]
    tl.store(Acc + out_at, acc0 * (1.0 / (1.0 - rate)), mask=present[:, None])
    out_at = row_at[:, None] * V_DIM + e1[None, :]
    tl.store(Acc + out_at, acc1 * (1.0 / (1.0 - rate)), mask=present[:, None])


@triton.jit(do_not_specialize=["heads", "q_len", "splits"])
def attention_combine(
    Acc, Tops, Totals,  # the parts, of attention_decode
    Out,  # [batch, heads, q_len, dim], any strides
    Lse,  # float32 [batch, heads, q_len], contiguous
    Top,  # the largest scores, as Lse
    Low,  # the rounding error of Lse
    Sinks,  # float32 [heads]: one more logit in the denominator
    stride_ob, stride_oh, stride_os, stride_od,
    heads, q_len, splits,
):
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row_at = (batch.to(tl.int64) * heads + head) * q_len + row
    rows = tl.num_programs(2).to(tl.int64) * heads * q_len  # of one part
    e = tl.arange(0, DIM_V)
    top = tl.cast(LOWEST, tl.float32)
    total = tl.cast(0.0, tl.float32)
    acc = tl.zeros([DIM_V], tl.float32)

    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        at = part * rows + row_at
        tops = tl.load(Tops + at, mask=part < splits, other=LOWEST)
        totals = tl.load(Totals + at, mask=part < splits, other=0.0)
        values = tl.load(
            Acc + at[:, None] * V_DIM + e[None, :],
            mask=(part[:, None] < splits) & (e[None, :] < V_DIM), other=0.0,
        )
        peak = tl.maximum(top, tl.max(tops, 0))
        weight = tl.exp2(tops - peak)
        rescale = tl.exp2(top - peak)
        total = total * rescale + tl.sum(weight * totals, 0)
        acc = acc * rescale + tl.sum(weight[:, None] * values, 0)
        top = peak

    largest = tl.where(total == 0.0, -INFINITY, top * LN2)
    # The sink is one more logit, without a value.
    sink = tl.load(Sinks + head) * LOG2E
    peak = tl.maximum(top, sink)
    rescale = tl.exp2(top - peak)
    total = total * rescale + tl.exp2(sink - peak)
    top = peak
    # A row without a visible key gives 0, and lse -inf.
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, -INFINITY, (top + tl.log2(total)) * LN2)
    # By the product that attention_delta stores: a maximum is not joined to the sum without rounding.
    near = tl.maximum(lse * LOG2E, LOWEST)
    low = (top - near + tl.log2(total)) * LN2
    low = tl.where(empty, 0.0, low)
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + row.to(tl.int64) * stride_os
    out = acc * (rescale / total)
    tl.store(Out + e * stride_od, out.to(Out.dtype.element_ty), mask=e < V_DIM)
    tl.store(Lse + row_at, lse)
    tl.store(Top + row_at, largest)
    tl.store(Low + row_at, low)
