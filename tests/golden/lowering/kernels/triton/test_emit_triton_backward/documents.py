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
def one_of(columns, least, many):
    """Whether columns of a tile are among `many` from `least` on, in two instructions: bits 1 and 2 stand apart, as
    in `up_to`."""
    return ((columns & ~6) - (least - (columns & 6))).to(tl.uint32) < many.to(tl.uint32)


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
    Stats,  # float32 [batch, heads, q_len, 4]: lse in log2, a factor, rowsum(dout * out) - dlse, nothing
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
    # A row that sees no key has no gradient, even where dout is NaN.
    empty = lse == -INFINITY
    delta, lse = tl.where(empty, 0.0, delta), tl.where(empty, 0.0, lse)
    low = tl.load(Low + at, mask=present, other=0.0)
    # A weight is exp2(score - lse) * factor: the factor makes up for the rounding of lse.
    near = tl.maximum(lse * LOG2E, LOWEST)  # the forward's product: a maximum is not joined to the sum
    lse = near + low * LOG2E
    factor = tl.exp2(lse - near - low * LOG2E)
    tl.store(Stats + at * 4, lse, mask=present)
    tl.store(Stats + at * 4 + 1, factor, mask=present)
    tl.store(Stats + at * 4 + 2, delta, mask=present)


@triton.jit(
    do_not_specialize=[
        "heads", "q_len", "kv_len", "records", "b_origin", "h_origin", "q_origin", "k_origin", "seed",
        "rate", "doc_size0", "doc_size1", "slope_size", "gate_size0", "gate_size1", "doc_stride0",
        "gate_stride0",
    ]
)
def attention_dq(
    Q, K, V, DOut,  # [batch, heads, length, dim], any strides
    Stats,  # float32 [batch, heads, q_len, 4], contiguous: lse, factor and delta, of attention_delta
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
    lse = tl.load(Stats + (at_q + rows) * 4, mask=present, other=0.0)[:, None]
    factor = tl.load(Stats + (at_q + rows) * 4 + 1, mask=present, other=0.0)[:, None]
    delta = tl.load(Stats + (at_q + rows) * 4 + 2, mask=present, other=0.0)[:, None]
    delta *= factor

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
    survivor = 1.0 / (1.0 - rate)
    dq = tl.zeros([BLOCK_Q, DIM], tl.float32)
    dslope = tl.zeros([BLOCK_Q], tl.float32)

    for i in range(tl.load(Count + entry)):
        record = Spans + (entry.to(tl.int64) * records + i) * 4
        lo, full_lo = tl.load(record), tl.load(record + 1)
        full_hi, hi = tl.load(record + 2), tl.load(record + 3)
        edge = lo
        # Partial tiles, before and behind the full ones: the mask is a predicate.
        for j in range(lo, hi - full_hi + full_lo):
            tile = tl.where(j < full_lo, j, j - full_lo + full_hi)
            edge = tile
            inside = tile * BLOCK_K + columns < kv_len
            at = tl.cast(tile * BLOCK_K, tl.int64)
            keys = tl.load(K + at * stride_ks + key_at, mask=inside[:, None] & (d[None, :] < HEAD_DIM), other=0.0)
            values = tl.load(V + at * stride_vs + value_at, mask=inside[:, None], other=0.0)
            score = tl.dot(query, tl.trans(keys))
            dp = tl.dot(dout, tl.trans(values))
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            doc_b_k = tl.load(doc + step(b, doc_size0, doc_stride0) + clamp(k, doc_size1) * doc_stride1)
            column0 = (k - (q_origin + start)).to(tl.float32)
            gate_h_k = tl.load(
                gate + step(h, gate_size0, gate_stride0) + clamp(k, gate_size1) * gate_stride1,
            ).to(tl.float32)
            # q >= k & doc[b, q] == doc[b, k]
            visible = up_to(columns[None, :], most - tile * BLOCK_K)
            visible &= doc_b_q == doc_b_k
            # 50.0 * tanh(score / 50.0) + slope[h] * (k - q) + gate[h, k]
            x0 = tanh(score * fixed0)
            x1 = column0 - row0
            modified = x0 * 50.0 + x1 * slope_h + gate_h_k
            p = tl.where(visible, tl.exp2(modified * LOG2E - lse), 0.0)
            # random(seed, b, h, q, k) >= rate
            kept = tl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, survivor, 0.0)
            dm = p * (dp * kept * factor - delta)
            # The gradient of slope[h].
            dslope += tl.sum(dm * x1, 1)
            # The derivative of the score mod.
            derivative = 1.0 - x0 * x0
            ds = dm * derivative
            dq = tl.dot(ds.to(keys.dtype), keys, dq)
        # Full tiles: every position is visible.
        # `edge` is below `hi`, which the compiler does not know: so it computes the first addresses of the full tiles after the
        # border tiles, and does not hold them in tens of registers.
        full_lo = tl.where(edge < hi, full_lo, hi)
        for tile in range(full_lo, full_hi):
            at = tl.cast(tile * BLOCK_K, tl.int64)
            keys = tl.load(K + at * stride_ks + key_at, mask=d[None, :] < HEAD_DIM, other=0.0)
            values = tl.load(V + at * stride_vs + value_at)
            score = tl.dot(query, tl.trans(keys))
            dp = tl.dot(dout, tl.trans(values))
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            column0 = (k - (q_origin + start)).to(tl.float32)
            gate_h_k = tl.load(
                gate + step(h, gate_size0, gate_stride0) + clamp(k, gate_size1) * gate_stride1,
            ).to(tl.float32)
            # 50.0 * tanh(score / 50.0) + slope[h] * (k - q) + gate[h, k]
            x0 = tanh(score * fixed0)
            x1 = column0 - row0
            modified = x0 * 50.0 + x1 * slope_h + gate_h_k
            p = tl.exp2(modified * LOG2E - lse)
            # random(seed, b, h, q, k) >= rate
            kept = tl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, survivor, 0.0)
            dm = p * (dp * kept * factor - delta)
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
    Stats,  # float32 [batch, heads, q_len, 4], contiguous: lse, factor and delta, of attention_delta
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
    stats_at = rows[:, None] * 4 + tl.arange(0, 4)[None, :]

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
    fixed0 = scale * 0.02
    slope_h = tl.load(slope + clamp(h, slope_size) * slope_stride).to(tl.float32)
    doc_b_k = tl.load(doc + step(b, doc_size0, doc_stride0) + clamp(k, doc_size1) * doc_stride1)
    column0 = (k - (k_origin + start)).to(tl.float32)
    gate_h_k = tl.load(
        gate + step(h, gate_size0, gate_stride0) + clamp(k, gate_size1) * gate_stride1,
    ).to(tl.float32)
    # The first of the call's queries that a key may see, and the number of those up to the last.
    least = placed(k, q_origin, 0, q_len)
    many = tl.maximum(q_len - 1 + 1 - least, 0)
    dgate = tl.zeros([BLOCK_K], tl.float32)

    for i in range(tl.load(Count + entry)):
        record = Spans + (entry.to(tl.int64) * records + i) * 4
        lo, full_lo = tl.load(record), tl.load(record + 1)
        full_hi, hi = tl.load(record + 2), tl.load(record + 3)
        edge = lo
        # Partial tiles, before and behind the full ones: the mask is a predicate.
        for j in range(lo, hi - full_hi + full_lo):
            tile = tl.where(j < full_lo, j, j - full_lo + full_hi)
            edge = tile
            inside = tile * BLOCK_Q + rows < q_len
            at = tl.cast(tile * BLOCK_Q, tl.int64)
            query = tl.load(
                queries + (at + rows)[:, None] * stride_qs + d[None, :] * stride_qd,
                mask=inside[:, None] & (d[None, :] < HEAD_DIM), other=0.0,
            )
            score = tl.dot(keys, tl.trans(query))
            dout = tl.load(
                douts + (at + rows)[:, None] * stride_gs + e[None, :] * stride_gd,
                mask=inside[:, None], other=0.0,
            )
            dp = tl.dot(values, tl.trans(dout))
            # Several numbers a query in one load: vectors in a product's layout take 16 loads a thread each.
            stats = tl.load(Stats + (at_q + at) * 4 + stats_at, mask=inside[:, None], other=0.0)
            pairs = tl.split(tl.reshape(stats, [BLOCK_Q, 2, 2]))
            lse, delta = tl.split(pairs[0])
            factor, _ = tl.split(pairs[1])
            q = (q_origin + tile * BLOCK_Q + rows)[None, :]
            doc_b_q = tl.load(doc + step(b, doc_size0, doc_stride0) + clamp(q, doc_size1) * doc_stride1)
            row0 = (q - (k_origin + start)).to(tl.float32)
            # q >= k & doc[b, q] == doc[b, k]
            visible = one_of(rows[None, :], least - tile * BLOCK_Q, many)
            visible &= doc_b_q == doc_b_k
            # 50.0 * tanh(score / 50.0) + slope[h] * (k - q) + gate[h, k]
            x0 = tanh(score * fixed0)
            modified = x0 * 50.0 + (column0 - row0) * slope_h + gate_h_k
            p = tl.exp2(modified * LOG2E - lse[None, :]) * factor[None, :]
            p = tl.where(visible, p, 0.0)
            # random(seed, b, h, q, k) >= rate
            kept = tl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, survivor, 0.0)
            dv = tl.dot((p * kept).to(dout.dtype), dout, dv)
            dm = p * (dp * kept - delta[None, :])
            # The gradient of gate[h, k].
            dgate += tl.sum(dm, 1)
            # The derivative of the score mod.
            derivative = 1.0 - x0 * x0
            ds = dm * derivative
            dk = tl.dot(ds.to(query.dtype), query, dk)
        # Full tiles: every position is visible.
        # `edge` is below `hi`, which the compiler does not know: so it computes the first addresses of the full tiles after the
        # border tiles, and does not hold them in tens of registers.
        full_lo = tl.where(edge < hi, full_lo, hi)
        for tile in range(full_lo, full_hi):
            at = tl.cast(tile * BLOCK_Q, tl.int64)
            query = tl.load(
                queries + (at + rows)[:, None] * stride_qs + d[None, :] * stride_qd,
                mask=d[None, :] < HEAD_DIM, other=0.0,
            )
            score = tl.dot(keys, tl.trans(query))
            dout = tl.load(douts + (at + rows)[:, None] * stride_gs + e[None, :] * stride_gd)
            dp = tl.dot(values, tl.trans(dout))
            # Several numbers a query in one load: vectors in a product's layout take 16 loads a thread each.
            stats = tl.load(Stats + (at_q + at) * 4 + stats_at)
            pairs = tl.split(tl.reshape(stats, [BLOCK_Q, 2, 2]))
            lse, delta = tl.split(pairs[0])
            factor, _ = tl.split(pairs[1])
            q = (q_origin + tile * BLOCK_Q + rows)[None, :]
            row0 = (q - (k_origin + start)).to(tl.float32)
            # 50.0 * tanh(score / 50.0) + slope[h] * (k - q) + gate[h, k]
            x0 = tanh(score * fixed0)
            modified = x0 * 50.0 + (column0 - row0) * slope_h + gate_h_k
            p = tl.exp2(modified * LOG2E - lse[None, :]) * factor[None, :]
            # random(seed, b, h, q, k) >= rate
            kept = tl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, survivor, 0.0)
            dv = tl.dot((p * kept).to(dout.dtype), dout, dv)
            dm = p * (dp * kept - delta[None, :])
            # The gradient of gate[h, k].
            dgate += tl.sum(dm, 1)
            # The derivative of the score mod.
            derivative = 1.0 - x0 * x0
            ds = dm * derivative
            dk = tl.dot(ds.to(query.dtype), query, dk)

    at_k = tl.cast(place, tl.int64) * kv_len + start
    tl.store(Dgate + at_k + columns, dgate, mask=present)

    own = (batch * tl.num_programs(1) + head).to(tl.int64) * kv_len + start
    DK += own * HEAD_DIM
    out_at = columns[:, None] * HEAD_DIM + d[None, :]
    tl.store(DK + out_at, (dk * scale).to(keys.dtype), mask=present[:, None] & (d[None, :] < HEAD_DIM))
    DV += own * V_DIM
    out_at = columns[:, None] * V_DIM + e[None, :]
    tl.store(DV + out_at, dv.to(keys.dtype), mask=present[:, None])
