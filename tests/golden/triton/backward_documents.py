"""Attention backward in Triton, written by frisket for

    causal & same(doc)
    softcap(50) + slope[h] * (k - q) + gate[h, k]
    seed = seed of dropout
    rate = rate of dropout

Head size 80 (values 64), float16.
attention_delta: grid (query tiles, heads, batch), tiles of 32 queries, num_warps=4.
attention_dq: grid (query tiles, heads, batch), tiles of 128 queries by 64 keys, num_warps=8, num_stages=2.
attention_dkv: grid (key tiles, key heads, batch), tiles of 128 keys by 64 queries, num_warps=8, num_stages=2.
"""

import triton
import triton.language as tl

HEAD_DIM = tl.constexpr(80)
V_DIM = tl.constexpr(64)
DIM = tl.constexpr(128)
DIM_V = tl.constexpr(64)
LOG2E = tl.constexpr(1.4426950408889634)
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


@triton.jit(do_not_specialize=["heads", "q_len"])
def attention_delta(
    Out, DOut,  # [batch, heads, q_len, dim], any strides
    Lse, Low, DLse,  # float32 [batch, heads, q_len], contiguous
    Lse2, Low2, Delta,  # the same: lse and low in units of log2, and rowsum(dout * out) - dlse
    stride_ob, stride_oh, stride_os, stride_od,
    stride_gb, stride_gh, stride_gs, stride_gd,
    heads, q_len,
    BLOCK_Q: tl.constexpr,  # powers of two
):
    head, batch = tl.program_id(1), tl.program_id(2)
    start = tl.program_id(0) * BLOCK_Q
    rows = tl.arange(0, BLOCK_Q)
    e = tl.arange(0, DIM_V)
    present = start + rows < q_len
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start.to(tl.int64) * stride_os
    out = tl.load(
        Out + rows[:, None] * stride_os + e[None, :] * stride_od,
        mask=present[:, None], other=0.0,
    ).to(tl.float32)
    DOut += batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh + start.to(tl.int64) * stride_gs
    dout = tl.load(
        DOut + rows[:, None] * stride_gs + e[None, :] * stride_gd,
        mask=present[:, None], other=0.0,
    ).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    at = (batch * heads + head).to(tl.int64) * q_len + start + rows
    delta -= tl.load(DLse + at, mask=present, other=0.0)
    lse = tl.load(Lse + at, mask=present, other=0.0)
    # A row that sees nothing has no gradient, whatever comes back.
    empty = lse == -INFINITY
    delta, lse = tl.where(empty, 0.0, delta), tl.where(empty, 0.0, lse)
    low = tl.load(Low + at, mask=present, other=0.0)
    tl.store(Delta + at, delta, mask=present)
    tl.store(Lse2 + at, lse * LOG2E, mask=present)
    tl.store(Low2 + at, low * LOG2E, mask=present)


@triton.jit(
    do_not_specialize=[
        "heads", "q_len", "kv_len", "records", "b_origin", "h_origin", "q_origin", "k_origin", "seed",
        "rate", "doc_size0", "doc_size1", "slope_size", "gate_size0", "gate_size1", "doc_stride0",
        "gate_stride0",
    ]
)
def attention_dq(
    Q, K, V, DOut,  # [batch, heads, length, dim], any strides
    Lse, Low, Delta,  # float32 [batch, heads, q_len], contiguous: of attention_delta
    DQ,  # [batch, heads, q_len, dim], contiguous
    Dslope,  # float32 [batch, heads, q_len]: the gradient of slope[h], summed over keys
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    scale, heads, q_len, kv_len,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles
    Count, Order,  # int32 [slices, rows]: records in use; rows in order of work
    SliceOf,  # int32 [batch, heads]
    records,
    b_origin, h_origin, q_origin, k_origin,  # of this call in the whole problem
    seed, rate,
    doc, doc_size0, doc_size1, doc_stride0, doc_stride1,
    slope, slope_size, slope_stride,
    gate, gate_size0, gate_size1, gate_stride0, gate_stride1,
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
    columns = tl.arange(0, BLOCK_K)
    d = tl.arange(0, DIM)
    e = tl.arange(0, DIM_V)

    # Offsets are 64 bits where they are scalars, 32 within a tile.
    Q += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + start.to(tl.int64) * stride_qs
    K += batch.to(tl.int64) * stride_kb + head.to(tl.int64) * stride_kh
    V += batch.to(tl.int64) * stride_vb + head.to(tl.int64) * stride_vh
    DOut += batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh + start.to(tl.int64) * stride_gs
    at_q = place.to(tl.int64) * q_len + start
    key_at = columns[:, None] * stride_ks + d[None, :] * stride_kd
    value_at = columns[:, None] * stride_vs + e[None, :] * stride_vd
    present = start + rows < q_len
    query = tl.load(
        Q + rows[:, None] * stride_qs + d[None, :] * stride_qd,
        mask=present[:, None] & (d[None, :] < HEAD_DIM), other=0.0,
    )
    dout = tl.load(
        DOut + rows[:, None] * stride_gs + e[None, :] * stride_gd,
        mask=present[:, None], other=0.0,
    )
    lse = tl.load(Lse + at_q + rows, mask=present, other=0.0)[:, None]
    low = tl.load(Low + at_q + rows, mask=present, other=0.0)[:, None]
    delta = tl.load(Delta + at_q + rows, mask=present, other=0.0)[:, None]

    if ORIGIN_PER_BATCH:
        q_origin = tl.load(q_origin + batch)
        k_origin = tl.load(k_origin + batch)
    rate = tl.cast(rate, tl.float32)
    b = b_origin + batch
    h = h_origin + head
    q = (q_origin + start + rows)[:, None]
    slope_h = tl.load(slope + clamp(h, slope_size) * slope_stride).to(tl.float32)
    doc_b_q = tl.load(doc + step(b, doc_size0, doc_stride0) + clamp(q, doc_size1) * doc_stride1)
    survivor = 1.0 / (1.0 - rate)
    dq = tl.zeros([BLOCK_Q, DIM], tl.float32)
    dslope = tl.zeros([BLOCK_Q], tl.float32)

    for i in range(tl.load(Count + entry)):
        record = Spans + (entry.to(tl.int64) * records + i) * 4
        lo, full_lo = tl.load(record), tl.load(record + 1)
        full_hi, hi = tl.load(record + 2), tl.load(record + 3)
        # Border tiles, before and behind the full ones: the mask is a predicate.
        for j in range(lo, hi - full_hi + full_lo):
            tile = tl.where(j < full_lo, j, j - full_lo + full_hi)
            inside = tile * BLOCK_K + columns < kv_len
            at = tl.cast(tile * BLOCK_K, tl.int64)
            keys = tl.load(K + at * stride_ks + key_at, mask=inside[:, None] & (d[None, :] < HEAD_DIM), other=0.0)
            values = tl.load(V + at * stride_vs + value_at, mask=inside[:, None], other=0.0)
            score = tl.dot(query, tl.trans(keys)) * scale
            dp = tl.dot(dout, tl.trans(values))
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            doc_b_k = tl.load(doc + step(b, doc_size0, doc_stride0) + clamp(k, doc_size1) * doc_stride1)
            gate_h_k = tl.load(
                gate + step(h, gate_size0, gate_stride0) + clamp(k, gate_size1) * gate_stride1,
            ).to(tl.float32)
            # q >= k & doc[b, q] == doc[b, k]
            visible = inside[None, :]
            visible &= q >= k
            visible &= doc_b_q == doc_b_k
            # 50.0 * tanh(score / 50.0) + slope[h] * (k - q) + gate[h, k]
            x0 = tanh(score / 50.0)
            x1 = (k - q).to(tl.float32)
            modified = 50.0 * x0 + slope_h * x1 + gate_h_k
            p = tl.where(visible, tl.exp2(modified * LOG2E - lse - low), 0.0)
            # random(seed, b, h, q, k) >= rate
            kept = tl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, survivor, 0.0)
            dm = p * (dp * kept - delta)
            # The gradient of slope[h].
            dslope += tl.sum(dm * x1, 1)
            # The derivative of the score mod.
            derivative = 1.0 - x0 * x0
            ds = dm * derivative
            dq = tl.dot(ds.to(keys.dtype), keys, dq)
        # Full tiles: every position is visible.
        for tile in range(full_lo, full_hi):
            at = tl.cast(tile * BLOCK_K, tl.int64)
            keys = tl.load(K + at * stride_ks + key_at, mask=d[None, :] < HEAD_DIM, other=0.0)
            values = tl.load(V + at * stride_vs + value_at)
            score = tl.dot(query, tl.trans(keys)) * scale
            dp = tl.dot(dout, tl.trans(values))
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            gate_h_k = tl.load(
                gate + step(h, gate_size0, gate_stride0) + clamp(k, gate_size1) * gate_stride1,
            ).to(tl.float32)
            # 50.0 * tanh(score / 50.0) + slope[h] * (k - q) + gate[h, k]
            x0 = tanh(score / 50.0)
            x1 = (k - q).to(tl.float32)
            modified = 50.0 * x0 + slope_h * x1 + gate_h_k
            p = tl.exp2(modified * LOG2E - lse - low)
            # random(seed, b, h, q, k) >= rate
            kept = tl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, survivor, 0.0)
            dm = p * (dp * kept - delta)
            # The gradient of slope[h].
            dslope += tl.sum(dm * x1, 1)
            # The derivative of the score mod.
            derivative = 1.0 - x0 * x0
            ds = dm * derivative
            dq = tl.dot(ds.to(keys.dtype), keys, dq)

    DQ += at_q * HEAD_DIM
    out_at = rows[:, None] * HEAD_DIM + d[None, :]
    tl.store(DQ + out_at, (dq * scale).to(query.dtype), mask=present[:, None] & (d[None, :] < HEAD_DIM))
    tl.store(Dslope + at_q + rows, dslope, mask=present)


@triton.jit(
    do_not_specialize=[
        "heads", "q_len", "kv_len", "records", "b_origin", "h_origin", "q_origin", "k_origin", "seed",
        "rate", "doc_size0", "doc_size1", "slope_size", "gate_size0", "gate_size1", "doc_stride0",
        "gate_stride0",
    ]
)
def attention_dkv(
    Q, K, V, DOut,  # [batch, heads, length, dim], any strides
    Lse, Low, Delta,  # float32 [batch, heads, q_len], contiguous: of attention_delta
    DK, DV,  # [batch, key heads, kv_len, dim], contiguous
    Dgate,  # float32 [batch, heads, kv_len]: the gradient of gate[h, k], summed over queries
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    scale, heads, q_len, kv_len,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in query tiles
    Count, Order,  # int32 [slices, rows]: records in use; rows in order of work
    SliceOf,  # int32 [batch, heads]
    records,
    b_origin, h_origin, q_origin, k_origin,  # of this call in the whole problem
    seed, rate,
    doc, doc_size0, doc_size1, doc_stride0, doc_stride1,
    slope, slope_size, slope_stride,
    gate, gate_size0, gate_size1, gate_stride0, gate_stride1,
    ORIGIN_PER_BATCH: tl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # powers of two
):
    head, batch = tl.program_id(1), tl.program_id(2)
    place = batch * heads + head
    distinct = tl.load(SliceOf + place) * tl.num_programs(0)
    row = tl.load(Order + distinct + tl.program_id(0))  # longest first
    entry = distinct + row
    start = row * BLOCK_K
    rows = tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_K)
    d = tl.arange(0, DIM)
    e = tl.arange(0, DIM_V)

    # Offsets are 64 bits where they are scalars, 32 within a tile.
    Q += batch.to(tl.int64) * stride_qb
    DOut += batch.to(tl.int64) * stride_gb
    K += batch.to(tl.int64) * stride_kb + head.to(tl.int64) * stride_kh + start.to(tl.int64) * stride_ks
    V += batch.to(tl.int64) * stride_vb + head.to(tl.int64) * stride_vh + start.to(tl.int64) * stride_vs
    present = start + columns < kv_len
    keys = tl.load(
        K + columns[:, None] * stride_ks + d[None, :] * stride_kd,
        mask=present[:, None] & (d[None, :] < HEAD_DIM), other=0.0,
    )
    values = tl.load(
        V + columns[:, None] * stride_vs + e[None, :] * stride_vd,
        mask=present[:, None], other=0.0,
    )

    if ORIGIN_PER_BATCH:
        q_origin = tl.load(q_origin + batch)
        k_origin = tl.load(k_origin + batch)
    rate = tl.cast(rate, tl.float32)
    b = b_origin + batch
    survivor = 1.0 / (1.0 - rate)
    dk = tl.zeros([BLOCK_K, DIM], tl.float32)
    dv = tl.zeros([BLOCK_K, DIM_V], tl.float32)
    queries = Q + tl.cast(head, tl.int64) * stride_qh
    douts = DOut + tl.cast(head, tl.int64) * stride_gh
    at_q = tl.cast(place, tl.int64) * q_len
    h = h_origin + head
    k = (k_origin + start + columns)[:, None]
    slope_h = tl.load(slope + clamp(h, slope_size) * slope_stride).to(tl.float32)
    doc_b_k = tl.load(doc + step(b, doc_size0, doc_stride0) + clamp(k, doc_size1) * doc_stride1)
    gate_h_k = tl.load(
        gate + step(h, gate_size0, gate_stride0) + clamp(k, gate_size1) * gate_stride1,
    ).to(tl.float32)
    dgate = tl.zeros([BLOCK_K], tl.float32)

    for i in range(tl.load(Count + entry)):
        record = Spans + (entry.to(tl.int64) * records + i) * 4
        lo, full_lo = tl.load(record), tl.load(record + 1)
        full_hi, hi = tl.load(record + 2), tl.load(record + 3)
        # Border tiles, before and behind the full ones: the mask is a predicate.
        for j in range(lo, hi - full_hi + full_lo):
            tile = tl.where(j < full_lo, j, j - full_lo + full_hi)
            inside = tile * BLOCK_Q + rows < q_len
            at = tl.cast(tile * BLOCK_Q, tl.int64)
            query = tl.load(
                queries + (at + rows)[:, None] * stride_qs + d[None, :] * stride_qd,
                mask=inside[:, None] & (d[None, :] < HEAD_DIM), other=0.0,
            )
            score = tl.dot(keys, tl.trans(query)) * scale
            dout = tl.load(
                douts + (at + rows)[:, None] * stride_gs + e[None, :] * stride_gd,
                mask=inside[:, None], other=0.0,
            )
            dp = tl.dot(values, tl.trans(dout))
            q = (q_origin + tile * BLOCK_Q + rows)[None, :]
            doc_b_q = tl.load(doc + step(b, doc_size0, doc_stride0) + clamp(q, doc_size1) * doc_stride1)
            # q >= k & doc[b, q] == doc[b, k]
            visible = inside[None, :]
            visible &= q >= k
            visible &= doc_b_q == doc_b_k
            # 50.0 * tanh(score / 50.0) + slope[h] * (k - q) + gate[h, k]
            x0 = tanh(score / 50.0)
            modified = 50.0 * x0 + slope_h * (k - q).to(tl.float32) + gate_h_k
            lse = tl.load(Lse + at_q + at + rows, mask=inside, other=0.0)[None, :]
            low = tl.load(Low + at_q + at + rows, mask=inside, other=0.0)[None, :]
            p = tl.where(visible, tl.exp2(modified * LOG2E - lse - low), 0.0)
            # random(seed, b, h, q, k) >= rate
            kept = tl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, survivor, 0.0)
            delta = tl.load(Delta + at_q + at + rows, mask=inside, other=0.0)[None, :]
            dm = p * (dp * kept - delta)
            # The gradient of gate[h, k].
            dgate += tl.sum(dm, 1)
            # The derivative of the score mod.
            derivative = 1.0 - x0 * x0
            ds = dm * derivative
            dk = tl.dot(ds.to(query.dtype), query, dk)
            dv = tl.dot((p * kept).to(dout.dtype), dout, dv)
        # Full tiles: every position is visible.
        for tile in range(full_lo, full_hi):
            at = tl.cast(tile * BLOCK_Q, tl.int64)
            query = tl.load(
                queries + (at + rows)[:, None] * stride_qs + d[None, :] * stride_qd,
                mask=d[None, :] < HEAD_DIM, other=0.0,
            )
            score = tl.dot(keys, tl.trans(query)) * scale
            dout = tl.load(douts + (at + rows)[:, None] * stride_gs + e[None, :] * stride_gd)
            dp = tl.dot(values, tl.trans(dout))
            q = (q_origin + tile * BLOCK_Q + rows)[None, :]
            # 50.0 * tanh(score / 50.0) + slope[h] * (k - q) + gate[h, k]
            x0 = tanh(score / 50.0)
            modified = 50.0 * x0 + slope_h * (k - q).to(tl.float32) + gate_h_k
            lse = tl.load(Lse + at_q + at + rows)[None, :]
            low = tl.load(Low + at_q + at + rows)[None, :]
            p = tl.exp2(modified * LOG2E - lse - low)
            # random(seed, b, h, q, k) >= rate
            kept = tl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, survivor, 0.0)
            delta = tl.load(Delta + at_q + at + rows)[None, :]
            dm = p * (dp * kept - delta)
            # The gradient of gate[h, k].
            dgate += tl.sum(dm, 1)
            # The derivative of the score mod.
            derivative = 1.0 - x0 * x0
            ds = dm * derivative
            dk = tl.dot(ds.to(query.dtype), query, dk)
            dv = tl.dot((p * kept).to(dout.dtype), dout, dv)

    at_k = tl.cast(place, tl.int64) * kv_len + start
    tl.store(Dgate + at_k + columns, dgate, mask=present)

    own = (batch * tl.num_programs(1) + head).to(tl.int64) * kv_len + start
    DK += own * HEAD_DIM
    out_at = columns[:, None] * HEAD_DIM + d[None, :]
    tl.store(DK + out_at, (dk * scale).to(keys.dtype), mask=present[:, None] & (d[None, :] < HEAD_DIM))
    DV += own * V_DIM
    out_at = columns[:, None] * V_DIM + e[None, :]
    tl.store(DV + out_at, dv.to(keys.dtype), mask=present[:, None])
