"""Attention backward in Triton, written by frisket for

    causal & window(w)
    s0 = w

Head size 128, bfloat16, 8 query heads to a key head.
attention_delta: grid (query tiles, heads, batch), tiles of 32 queries, num_warps=4.
attention_dq: grid (query tiles, heads, batch), tiles of 128 queries by 64 keys, num_warps=8, num_stages=2.
attention_dkv: grid (key tiles, key heads, batch), tiles of 128 keys by 64 queries, num_warps=8, num_stages=2.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(8)
HEAD_DIM = tl.constexpr(128)
DIM = tl.constexpr(128)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def placed(end, origin, first, last):
    """The end of what a row sees, counted from the call's first position, as far as it is in first..last."""
    return (tl.minimum(tl.maximum(end, origin + first), origin + last) - origin).to(tl.int32)


@triton.jit
def one_of(columns, least, many):
    """Whether columns of a tile are among `many` from `least` on, in two instructions: bits 1 and 2 stand apart, as
    in `up_to`."""
    return ((columns & ~6) - (least - (columns & 6))).to(tl.uint32) < many.to(tl.uint32)


@triton.jit(do_not_specialize=["heads", "q_len"])
def attention_delta(
    Out, DOut,  # [batch, heads, q_len, dim], any strides
    Lse, Low,  # float32 [batch, heads, q_len], contiguous
    Stats,  # float32 [batch, heads, q_len, 4]: lse in log2, a factor, rowsum(dout * out), nothing
    stride_ob, stride_oh, stride_os, stride_od,
    stride_gb, stride_gh, stride_gs, stride_gd,
    heads, q_len,
    BLOCK_Q: tl.constexpr,  # powers of two
):
    head, batch = tl.program_id(1), tl.program_id(2)
    start = tl.program_id(0) * BLOCK_Q
    rows = tl.arange(0, BLOCK_Q)
    d = tl.arange(0, DIM)
    present = start + rows < q_len
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start.to(tl.int64) * stride_os
    out = tl.load(
        Out + rows[:, None] * stride_os + d[None, :] * stride_od,
        mask=present[:, None], other=0.0,
    ).to(tl.float32)
    DOut += batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh + start.to(tl.int64) * stride_gs
    dout = tl.load(
        DOut + rows[:, None] * stride_gs + d[None, :] * stride_gd,
        mask=present[:, None], other=0.0,
    ).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    at = (batch * heads + head).to(tl.int64) * q_len + start + rows
    lse = tl.load(Lse + at, mask=present, other=0.0)
    low = tl.load(Low + at, mask=present, other=0.0)
    # A weight is exp2(score - lse) * factor: the factor makes up for the rounding of lse.
    near = tl.maximum(lse * LOG2E, LOWEST)  # the forward's product: a maximum is not joined to the sum
    lse = near + low * LOG2E
    factor = tl.exp2(lse - near - low * LOG2E)
    tl.store(Stats + at * 4, lse, mask=present)
    tl.store(Stats + at * 4 + 1, factor, mask=present)
    tl.store(Stats + at * 4 + 2, delta, mask=present)


@triton.jit(do_not_specialize=["heads", "q_len", "kv_len", "q_origin", "k_origin", "s0"])
def attention_dq(
    Q, K, V, DOut,  # [batch, heads, length, dim], any strides
    Stats,  # float32 [batch, heads, q_len, 4], contiguous: lse, factor and delta, of attention_delta
    DQ,  # [batch, heads, q_len, dim], contiguous
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    scale, heads, q_len, kv_len,
    q_origin, k_origin,  # of this call in the whole problem
    s0,
    ORIGIN_PER_BATCH: tl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # powers of two
):
    head, batch = tl.program_id(1), tl.program_id(2)
    place = batch * heads + head
    row = tl.num_programs(0) - 1 - tl.program_id(0)  # longest first
    start = row * BLOCK_Q
    rows = tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_K)
    d = tl.arange(0, DIM)
    kv_head = head // GROUP

    # Offsets are 64 bits where they are scalars, 32 within a tile.
    Q += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + start.to(tl.int64) * stride_qs
    K += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    V += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    DOut += batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh + start.to(tl.int64) * stride_gs
    at_q = place.to(tl.int64) * q_len + start
    key_at = columns[:, None] * stride_ks + d[None, :] * stride_kd
    value_at = columns[:, None] * stride_vs + d[None, :] * stride_vd
    present = start + rows < q_len
    query = tl.load(Q + rows[:, None] * stride_qs + d[None, :] * stride_qd, mask=present[:, None], other=0.0)
    dout = tl.load(
        DOut + rows[:, None] * stride_gs + d[None, :] * stride_gd,
        mask=present[:, None], other=0.0,
    )
    lse = tl.load(Stats + (at_q + rows) * 4, mask=present, other=0.0)[:, None]
    factor = tl.load(Stats + (at_q + rows) * 4 + 1, mask=present, other=0.0)[:, None]
    delta = tl.load(Stats + (at_q + rows) * 4 + 2, mask=present, other=0.0)[:, None]
    delta *= factor

    if ORIGIN_PER_BATCH:
        q_origin = tl.load(q_origin + batch)
        k_origin = tl.load(k_origin + batch)
    q = (q_origin + start + rows)[:, None]

    q_first = q_origin + start
    q_last = q_origin + tl.minimum(start + BLOCK_Q, q_len) - 1
    k_first = k_origin
    k_last = k_origin + kv_len - 1
    # Some query of the tile sees keys first..last, every one sees full_first..full_last.
    first = tl.maximum(q_first - s0 + 1, k_first) - k_first
    full_first = tl.maximum(q_last - s0 + 1, k_first) - k_first
    full_last = tl.minimum(q_first, k_last) - k_first
    last = tl.minimum(q_last, k_last) - k_first
    hi = (tl.maximum(last, -1) + BLOCK_K) // BLOCK_K
    lo = tl.minimum(first // BLOCK_K, hi)
    full_lo = tl.minimum((tl.minimum(full_first, kv_len) + BLOCK_K - 1) // BLOCK_K, hi)
    full_lo = tl.maximum(full_lo, lo)
    full_hi = tl.minimum(tl.maximum(full_last + 1, 0) // BLOCK_K, hi)
    full_hi = tl.maximum(full_hi, full_lo)

    row0 = q - s0 + 1
    # The first of the call's keys that a query may see, and the number of those up to the last.
    least = placed(row0, k_origin, 0, kv_len)
    many = tl.maximum(placed(q, k_origin, -1, kv_len - 1) + 1 - least, 0)
    unit = scale * LOG2E
    dq = tl.zeros([BLOCK_Q, DIM], tl.float32)

    edge = lo
    # Partial tiles, before and behind the full ones: the mask is a predicate.
    for j in range(lo, hi - full_hi + full_lo):
        tile = tl.where(j < full_lo, j, j - full_lo + full_hi)
        edge = tile
        inside = tile * BLOCK_K + columns < kv_len
        at = tl.cast(tile * BLOCK_K, tl.int64)
        keys = tl.load(K + at * stride_ks + key_at, mask=inside[:, None], other=0.0)
        values = tl.load(V + at * stride_vs + value_at, mask=inside[:, None], other=0.0)
        score = tl.dot(query, tl.trans(keys))
        dp = tl.dot(dout, tl.trans(values))
        # q >= k & q - k < s0
        visible = one_of(columns[None, :], least - tile * BLOCK_K, many)
        p = tl.where(visible, tl.exp2(score * unit - lse), 0.0)
        ds = p * (dp * factor - delta)
        dq = tl.dot(ds.to(keys.dtype), keys, dq)
    # Full tiles: every position is visible.
    # `edge` is below `hi`, which the compiler does not know: so it computes the first addresses of the full tiles after the
    # border tiles, and does not hold them in tens of registers.
    full_lo = tl.where(edge < hi, full_lo, hi)
    for tile in range(full_lo, full_hi):
        at = tl.cast(tile * BLOCK_K, tl.int64)
        keys = tl.load(K + at * stride_ks + key_at)
        values = tl.load(V + at * stride_vs + value_at)
        score = tl.dot(query, tl.trans(keys))
        dp = tl.dot(dout, tl.trans(values))
        p = tl.exp2(score * unit - lse)
        ds = p * (dp * factor - delta)
        dq = tl.dot(ds.to(keys.dtype), keys, dq)

    DQ += at_q * HEAD_DIM
    out_at = rows[:, None] * HEAD_DIM + d[None, :]
    tl.store(DQ + out_at, (dq * scale).to(query.dtype), mask=present[:, None])


@triton.jit(do_not_specialize=["heads", "q_len", "kv_len", "records", "q_origin", "k_origin", "s0"])
def attention_dkv(
    Q, K, V, DOut,  # [batch, heads, length, dim], any strides
    Stats,  # float32 [batch, heads, q_len, 4], contiguous: lse, factor and delta, of attention_delta
    DK, DV,  # [batch, key heads, kv_len, dim], contiguous
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    scale, heads, q_len, kv_len,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in query tiles
    Count, Order,  # int32 [slices, rows]: records in use; rows in order of work
    SliceOf,  # int32 [batch, heads]
    records,
    q_origin, k_origin,  # of this call in the whole problem
    s0,
    ORIGIN_PER_BATCH: tl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # powers of two
):
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    first = tl.load(SliceOf + batch * heads + kv_head * GROUP) * tl.num_programs(0)
    row = tl.load(Order + first + tl.program_id(0))  # longest first, by the first head of the group
    start = row * BLOCK_K
    rows = tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_K)
    d = tl.arange(0, DIM)
    stats_at = rows[:, None] * 4 + tl.arange(0, 4)[None, :]

    # Offsets are 64 bits where they are scalars, 32 within a tile.
    Q += batch.to(tl.int64) * stride_qb
    DOut += batch.to(tl.int64) * stride_gb
    K += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh + start.to(tl.int64) * stride_ks
    V += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh + start.to(tl.int64) * stride_vs
    present = start + columns < kv_len
    keys = tl.load(
        K + columns[:, None] * stride_ks + d[None, :] * stride_kd,
        mask=present[:, None], other=0.0,
    )
    values = tl.load(
        V + columns[:, None] * stride_vs + d[None, :] * stride_vd,
        mask=present[:, None], other=0.0,
    )

    if ORIGIN_PER_BATCH:
        q_origin = tl.load(q_origin + batch)
        k_origin = tl.load(k_origin + batch)
    unit = scale * LOG2E
    dk = tl.zeros([BLOCK_K, DIM], tl.float32)
    dv = tl.zeros([BLOCK_K, DIM], tl.float32)

    for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
        place = batch * heads + head
        entry = tl.load(SliceOf + place) * tl.num_programs(0) + row
        queries = Q + tl.cast(head, tl.int64) * stride_qh
        douts = DOut + tl.cast(head, tl.int64) * stride_gh
        at_q = tl.cast(place, tl.int64) * q_len
        k = (k_origin + start + columns)[:, None]

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
                    mask=inside[:, None], other=0.0,
                )
                score = tl.dot(keys, tl.trans(query))
                dout = tl.load(
                    douts + (at + rows)[:, None] * stride_gs + d[None, :] * stride_gd,
                    mask=inside[:, None], other=0.0,
                )
                dp = tl.dot(values, tl.trans(dout))
                # Several numbers a query in one load: vectors in a product's layout take 16 loads a thread each.
                stats = tl.load(Stats + (at_q + at) * 4 + stats_at, mask=inside[:, None], other=0.0)
                pairs = tl.split(tl.reshape(stats, [BLOCK_Q, 2, 2]))
                lse, delta = tl.split(pairs[0])
                factor, _ = tl.split(pairs[1])
                q = (q_origin + tile * BLOCK_Q + rows)[None, :]
                # q >= k & q - k < s0
                visible = inside[None, :]
                visible &= q >= k
                visible &= q - k < s0
                p = tl.exp2(score * unit - lse[None, :]) * factor[None, :]
                p = tl.where(visible, p, 0.0)
                dv = tl.dot(p.to(dout.dtype), dout, dv)
                ds = p * (dp - delta[None, :])
                dk = tl.dot(ds.to(query.dtype), query, dk)
            # Full tiles: every position is visible.
            # `edge` is below `hi`, which the compiler does not know: so it computes the first addresses of the full tiles after the
            # border tiles, and does not hold them in tens of registers.
            full_lo = tl.where(edge < hi, full_lo, hi)
            for tile in range(full_lo, full_hi):
                at = tl.cast(tile * BLOCK_Q, tl.int64)
                query = tl.load(queries + (at + rows)[:, None] * stride_qs + d[None, :] * stride_qd)
                score = tl.dot(keys, tl.trans(query))
                dout = tl.load(douts + (at + rows)[:, None] * stride_gs + d[None, :] * stride_gd)
                dp = tl.dot(values, tl.trans(dout))
                # Several numbers a query in one load: vectors in a product's layout take 16 loads a thread each.
                stats = tl.load(Stats + (at_q + at) * 4 + stats_at)
                pairs = tl.split(tl.reshape(stats, [BLOCK_Q, 2, 2]))
                lse, delta = tl.split(pairs[0])
                factor, _ = tl.split(pairs[1])
                p = tl.exp2(score * unit - lse[None, :]) * factor[None, :]
                dv = tl.dot(p.to(dout.dtype), dout, dv)
                ds = p * (dp - delta[None, :])
                dk = tl.dot(ds.to(query.dtype), query, dk)

    own = (batch * tl.num_programs(1) + kv_head).to(tl.int64) * kv_len + start
    DK += own * HEAD_DIM
    out_at = columns[:, None] * HEAD_DIM + d[None, :]
    tl.store(DK + out_at, (dk * scale).to(keys.dtype), mask=present[:, None])
    DV += own * HEAD_DIM
    out_at = columns[:, None] * HEAD_DIM + d[None, :]
    tl.store(DV + out_at, dv.to(keys.dtype), mask=present[:, None])
