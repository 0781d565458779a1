"""Attention forward in Triton, written by frisket for

    causal & same_by_batch(doc)
    softcap(50) + slope[h] * (k - q)
    seed = seed of dropout
    rate = rate of dropout

Head size 96 (values 80), bfloat16, keys and values float8_e4m3fn, 4 query heads to a key head.
attention_forward: grid (q tiles, heads, batch), tiles of 128 queries by 64 keys, num_warps=8, num_stages=3.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(4)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
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
def placed(end, origin, first, last):
    """The end of what a row sees, counted from the call's first position, as far as it is in first..last."""
    return (tl.minimum(tl.maximum(end, origin + first), origin + last) - origin).to(tl.int32)


@triton.jit
def up_to(columns, most):
    """Whether columns of a tile are at most `most`. Bits 1 and 2 of a column tell the threads of a warp apart where
    products leave their results, and the others are constants of a thread's registers: apart, a comparison takes one
    instruction."""
    return (columns & ~6) <= most - (columns & 6)


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
        "heads", "q_len", "kv_len", "records", "b_origin", "h_origin", "q_origin", "k_origin", "seed",
        "rate", "doc_size0", "doc_size1", "slope_size", "doc_stride0",
    ]
)
def attention_forward(
    Q, K, V, Out,  # [batch, heads, length, dim], any strides
    Lse,  # float32 [batch, heads, q_len], contiguous
    Top,  # the largest scores, as Lse
    Low,  # the rounding error of Lse
    Sinks,  # float32 [heads]: one more logit in the denominator
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_ob, stride_oh, stride_os, stride_od,
    scale, heads, q_len, kv_len,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles
    Count, Order,  # int32 [slices, rows]: records in use; rows in order of work
    SliceOf,  # int32 [batch, heads]
    records,
    b_origin, h_origin, q_origin, k_origin,  # of this call in the whole problem
    seed, rate,
    doc, doc_size0, doc_size1, doc_stride0, doc_stride1,
    slope, slope_size, slope_stride,
    ORIGIN_PER_BATCH: tl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # powers of two
):
    head, batch = tl.program_id(1), tl.program_id(2)
    place = batch * heads + head
    distinct = tl.load(SliceOf + place) * tl.num_programs(0)
    row = tl.load(Order + distinct + tl.program_id(0))  # longest first
    entry = distinct + row
    start = row * BLOCK_Q
    rows = tl.arange(0, BLOCK_Q)
    kv_head = head // GROUP
    columns = tl.arange(0, BLOCK_K)
    d0, d1 = tl.arange(0, 64), 64 + tl.arange(0, 32)
    e0, e1 = tl.arange(0, 64), 64 + tl.arange(0, 16)

    # Offsets are 64 bits where they are scalars, 32 within a tile.
    Q += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + start.to(tl.int64) * stride_qs
    K += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    V += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    key_at0 = columns[None, :] * stride_ks + d0[:, None] * stride_kd
    key_at1 = columns[None, :] * stride_ks + d1[:, None] * stride_kd
    value_at0 = columns[:, None] * stride_vs + e0[None, :] * stride_vd
    value_at1 = columns[:, None] * stride_vs + e1[None, :] * stride_vd
    present = start + rows < q_len

    if ORIGIN_PER_BATCH:
        q_origin = tl.load(q_origin + batch)
        k_origin = tl.load(k_origin + batch)
    rate = tl.cast(rate, tl.float32)
    b = b_origin + batch
    h = h_origin + head
    q = (q_origin + start + rows)[:, None]
    fixed0 = scale * 0.02
    slope_h = tl.load(slope + clamp(h, slope_size) * slope_stride).to(tl.float32)
    doc_b_q = tl.load(doc + step(b, doc_size0, doc_stride0) + clamp(q, doc_size1) * doc_stride1)
    row0 = (q - (q_origin + start)).to(tl.float32)
    # The last of the call's keys that a query may see.
    most = placed(q, k_origin, -1, kv_len - 1)
    top = tl.full([BLOCK_Q], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc0 = tl.zeros([BLOCK_Q, 64], tl.float32)
    acc1 = tl.zeros([BLOCK_Q, 16], tl.float32)
    used = tl.load(Count + entry)
    record = Spans + entry.to(tl.int64) * records * 4
    lo, full_lo = tl.load(record), tl.load(record + 1)
    full_hi, hi = tl.load(record + 2), tl.load(record + 3)
    query0 = tl.load(
        Q + rows[:, None] * stride_qs + d0[None, :] * stride_qd,
        mask=present[:, None], other=0.0,
    )
    query1 = tl.load(
        Q + rows[:, None] * stride_qs + d1[None, :] * stride_qd,
        mask=present[:, None], other=0.0,
    )

    for i in range(used):
        if i > 0:
            record = Spans + (entry.to(tl.int64) * records + i) * 4
            lo, full_lo = tl.load(record), tl.load(record + 1)
            full_hi, hi = tl.load(record + 2), tl.load(record + 3)
        # Partial tiles, before and behind the full ones: the mask is a predicate.
        for j in range(lo, hi - full_hi + full_lo):
            tile = tl.where(j < full_lo, j, j - full_lo + full_hi)
            inside = columns < kv_len - tile * BLOCK_K
            at = tl.cast(tile * BLOCK_K, tl.int64)
            keys0 = tl.load(
                K + at * stride_ks + key_at0,
                mask=inside[None, :], other=0.0,
            ).to(tl.float32).to(Q.dtype.element_ty)
            keys1 = tl.load(
                K + at * stride_ks + key_at1,
                mask=inside[None, :], other=0.0,
            ).to(tl.float32).to(Q.dtype.element_ty)
            score = tl.dot(query0, keys0)
            score = tl.dot(query1, keys1, score)
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            doc_b_k = tl.load(doc + step(b, doc_size0, doc_stride0) + clamp(k, doc_size1) * doc_stride1)
            column0 = (k - (q_origin + start)).to(tl.float32)
            # q >= k & doc[b, q] == doc[b, k]
            visible = up_to(columns[None, :], most - tile * BLOCK_K)
            visible &= doc_b_q == doc_b_k
            # 50 * tanh(score / 50) + slope[h] * (k - q)
            score = tanh(score * fixed0) * 50.0 + (column0 - row0) * slope_h
            score = tl.where(visible, score, -INFINITY)
            peak = tl.maximum(top, tl.max(score, 1) * LOG2E)
            p = tl.exp2(score * LOG2E - peak[:, None])
            rescale = tl.exp2(top - peak)
            total = total * rescale + tl.sum(p, 1)
            # random(seed, b, h, q, k) >= rate
            p = tl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, p, 0.0)
            values0 = tl.load(
                V + at * stride_vs + value_at0,
                mask=inside[:, None], other=0.0,
            ).to(tl.float32).to(Q.dtype.element_ty)
            values1 = tl.load(
                V + at * stride_vs + value_at1,
                mask=inside[:, None], other=0.0,
            ).to(tl.float32).to(Q.dtype.element_ty)
            acc0 = tl.dot(p.to(values0.dtype), values0, acc0 * rescale[:, None])
            acc1 = tl.dot(p.to(values1.dtype), values1, acc1 * rescale[:, None])
            top = peak
        # Full tiles: every position is visible.
        for tile in range(full_lo, full_hi):
            at = tl.cast(tile * BLOCK_K, tl.int64)
            keys0 = tl.load(K + at * stride_ks + key_at0).to(tl.float32).to(Q.dtype.element_ty)
            keys1 = tl.load(K + at * stride_ks + key_at1).to(tl.float32).to(Q.dtype.element_ty)
            score = tl.dot(query0, keys0)
            score = tl.dot(query1, keys1, score)
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            column0 = (k - (q_origin + start)).to(tl.float32)
            # 50 * tanh(score / 50) + slope[h] * (k - q)
            score = tanh(score * fixed0) * 50.0 + (column0 - row0) * slope_h
            peak = tl.maximum(top, tl.max(score, 1) * LOG2E)
            p = tl.exp2(score * LOG2E - peak[:, None])
            rescale = tl.exp2(top - peak)
            total = total * rescale + tl.sum(p, 1)
            # random(seed, b, h, q, k) >= rate
            p = tl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, p, 0.0)
            values0 = tl.load(V + at * stride_vs + value_at0).to(tl.float32).to(Q.dtype.element_ty)
            values1 = tl.load(V + at * stride_vs + value_at1).to(tl.float32).to(Q.dtype.element_ty)
            acc0 = tl.dot(p.to(values0.dtype), values0, acc0 * rescale[:, None])
            acc1 = tl.dot(p.to(values1.dtype), values1, acc1 * rescale[:, None])
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
    weight = rescale / (total * (1.0 - rate))
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start.to(tl.int64) * stride_os
    out_at = rows[:, None] * stride_os + e0[None, :] * stride_od
    tl.store(Out + out_at, (acc0 * weight[:, None]).to(Out.dtype.element_ty), mask=present[:, None])
    out_at = rows[:, None] * stride_os + e1[None, :] * stride_od
    tl.store(Out + out_at, (acc1 * weight[:, None]).to(Out.dtype.element_ty), mask=present[:, None])
    row_at = place.to(tl.int64) * q_len + start + rows
    tl.store(Lse + row_at, lse, mask=present)
    tl.store(Top + row_at, largest, mask=present)
    tl.store(Low + row_at, low, mask=present)
