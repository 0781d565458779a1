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


@triton.jit(do_not_specialize=["heads", "q_len"])
def attention_delta(
    Out, DOut,  # [batch, heads, q_len, dim], any strides
    Lse, Low,  # float32 [batch, heads, q_len], contiguous
    Lse2, Low2, Delta,  # the same: lse and low in units of log2, and rowsum(dout * out)
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
    tl.store(Delta + at, delta, mask=present)
    tl.store(Lse2 + at, lse * LOG2E, mask=present)
    tl.store(Low2 + at, low * LOG2E, mask=present)


@triton.jit(do_not_specialize=["heads", "q_len", "kv_len", "q_origin", "k_origin", "s0"])
def attention_dq(
    Q, K, V, DOut,  # [batch, heads, length, dim], any strides
    Lse, Low, Delta,  # float32 [batch, heads, q_len], contiguous: of attention_delta
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
    lse = tl.load(Lse + at_q + rows, mask=present, other=0.0)[:, None]
    low = tl.load(Low + at_q + rows, mask=present, other=0.0)[:, None]
    delta = tl.load(Delta + at_q + rows, mask=present, other=0.0)[:, None]

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

    unit = scale * LOG2E
    dq = tl.zeros([BLOCK_Q, DIM], tl.float32)

    # Border tiles, before and behind the full ones: the mask is a predicate.
    for j in range(lo, hi - full_hi + full_lo):
        tile = tl.where(j < full_lo, j, j - full_lo + full_hi)
        inside = tile * BLOCK_K + columns < kv_len
        at = tl.cast(tile * BLOCK_K, tl.int64)
        keys = tl.load(K + at * stride_ks + key_at, mask=inside[:, None], other=0.0)
        values = tl.load(V + at * stride_vs + value_at, mask=inside[:, None], other=0.0)
        score = tl.dot(query, tl.trans(keys))
        dp = tl.dot(dout, tl.trans(values))
        k = (k_origin + tile * BLOCK_K + columns)[None, :]
        # q >= k & q - k < s0
        visible = inside[None, :]
        visible &= q >= k
        visible &= q - k < s0
        p = tl.where(visible, tl.exp2(score * unit - lse - low), 0.0)
        ds = p * (dp - delta)
        dq = tl.dot(ds.to(keys.dtype), keys, dq)
    # Full tiles: every position is visible.
    for tile in range(full_lo, full_hi):
        at = tl.cast(tile * BLOCK_K, tl.int64)
        keys = tl.load(K + at * stride_ks + key_at)
        values = tl.load(V + at * stride_vs + value_at)
        score = tl.dot(query, tl.trans(keys))
        dp = tl.dot(dout, tl.trans(values))
        p = tl.exp2(score * unit - lse - low)
        ds = p * (dp - delta)
        dq = tl.dot(ds.to(keys.dtype), keys, dq)

    DQ += at_q * HEAD_DIM
    out_at = rows[:, None] * HEAD_DIM + d[None, :]
    tl.store(DQ + out_at, (dq * scale).to(query.dtype), mask=present[:, None])


@triton.jit(do_not_specialize=["heads", "q_len", "kv_len", "records", "q_origin", "k_origin", "s0"])
def attention_dkv(
    Q, K, V, DOut,  # [batch, heads, length, dim], any strides
    Lse, Low, Delta,  # float32 [batch, heads, q_len], contiguous: of attention_delta
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
            # Border tiles, before and behind the full ones: the mask is a predicate.
            for j in range(lo, hi - full_hi + full_lo):
                tile = tl.where(j < full_lo, j, j - full_lo + full_hi)
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
                delta = tl.load(Delta + at_q + at + rows, mask=inside, other=0.0)[None, :]
                dp = tl.dot(values, tl.trans(dout), tl.broadcast_to(-delta, [BLOCK_K, BLOCK_Q]))
                q = (q_origin + tile * BLOCK_Q + rows)[None, :]
                # q >= k & q - k < s0
                visible = inside[None, :]
                visible &= q >= k
                visible &= q - k < s0
                lse = tl.load(Lse + at_q + at + rows, mask=inside, other=0.0)[None, :]
                low = tl.load(Low + at_q + at + rows, mask=inside, other=0.0)[None, :]
                p = tl.where(visible, tl.exp2(score * unit - lse - low), 0.0)
                ds = p * dp
                dk = tl.dot(ds.to(query.dtype), query, dk)
                dv = tl.dot(p.to(dout.dtype), dout, dv)
            # Full tiles: every position is visible.
            for tile in range(full_lo, full_hi):
                at = tl.cast(tile * BLOCK_Q, tl.int64)
                query = tl.load(queries + (at + rows)[:, None] * stride_qs + d[None, :] * stride_qd)
                score = tl.dot(keys, tl.trans(query))
                dout = tl.load(douts + (at + rows)[:, None] * stride_gs + d[None, :] * stride_gd)
                delta = tl.load(Delta + at_q + at + rows)[None, :]
                dp = tl.dot(values, tl.trans(dout), tl.broadcast_to(-delta, [BLOCK_K, BLOCK_Q]))
                lse = tl.load(Lse + at_q + at + rows)[None, :]
                low = tl.load(Low + at_q + at + rows)[None, :]
                p = tl.exp2(score * unit - lse - low)
                ds = p * dp
                dk = tl.dot(ds.to(query.dtype), query, dk)
                dv = tl.dot(p.to(dout.dtype), dout, dv)

    own = (batch * tl.num_programs(1) + kv_head).to(tl.int64) * kv_len + start
    DK += own * HEAD_DIM
    out_at = columns[:, None] * HEAD_DIM + d[None, :]
    tl.store(DK + out_at, (dk * scale).to(keys.dtype), mask=present[:, None])
    DV += own * HEAD_DIM
    out_at = columns[:, None] * HEAD_DIM + d[None, :]
    tl.store(DV + out_at, dv.to(keys.dtype), mask=present[:, None])
