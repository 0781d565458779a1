"""Attention forward, long rows in parts in Triton, written by frisket for

    abs(q - k) <= 256 | k < 64 | q < 64
    s0 = 256
    s1 = 64

Head size 128, bfloat16, 4 query heads to a key head.
attention_forward: grid (q tiles, heads, batch), tiles of 128 queries by 64 keys, num_warps=8, num_stages=3.
attention_combine: grid (queries of rows in parts, heads, batch).
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(4)
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


@triton.jit(do_not_specialize=["heads", "q_len", "kv_len", "records", "q_origin", "k_origin", "s0", "s1"])
def attention_forward(
    Q, K, V, Out,  # [batch, heads, length, dim], any strides
    Lse,  # float32 [batch, heads, q_len], contiguous
    Low,  # the rounding error of Lse
    Sinks,  # float32 [heads]: one more logit in the denominator
    Acc,  # float32 [places, BLOCK_Q, dim]: of the parts of rows, values by their weights
    Tops, Totals,  # float32 [places, BLOCK_Q]: largest scores, and sums of weights
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_ob, stride_oh, stride_os, stride_od,
    scale, heads, q_len, kv_len,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles
    Count,  # int32 [slices, rows]: records in use
    SliceOf,  # int32 [batch, heads]
    Parts,  # int32 [slices, programs, 4]: a row, the place of a part's sums or -1, and which tiles of the row to walk
    At,  # int32 [batch, heads]: the first place of a head's sums
    records,
    q_origin, k_origin,  # of this call in the whole problem
    s0, s1,
    ORIGIN_PER_BATCH: tl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # powers of two
):
    head, batch = tl.program_id(1), tl.program_id(2)
    place = batch * heads + head
    of_slice = tl.load(SliceOf + place)
    program = Parts + (of_slice * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * 4
    row, sums = tl.load(program), tl.load(program + 1)
    begin, end = tl.load(program + 2), tl.load(program + 3)
    if row < 0:
        return  # another head has more programs
    distinct = of_slice * tl.cdiv(q_len, BLOCK_Q)
    entry = distinct + row
    start = row * BLOCK_Q
    rows = tl.arange(0, BLOCK_Q)
    kv_head = head // GROUP
    columns = tl.arange(0, BLOCK_K)
    d = tl.arange(0, DIM)

    # Offsets are 64 bits where they are scalars, 32 within a tile.
    Q += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + start.to(tl.int64) * stride_qs
    K += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    V += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    key_at = columns[None, :] * stride_ks + d[:, None] * stride_kd
    value_at = columns[:, None] * stride_vs + d[None, :] * stride_vd
    present = start + rows < q_len

    if ORIGIN_PER_BATCH:
        q_origin = tl.load(q_origin + batch)
        k_origin = tl.load(k_origin + batch)
    q = (q_origin + start + rows)[:, None]
    row0 = q < s1
    unit = scale * LOG2E
    top = tl.full([BLOCK_Q], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, DIM], tl.float32)
    used = tl.load(Count + entry)
    record = Spans + entry.to(tl.int64) * records * 4
    lo, full_lo = tl.load(record), tl.load(record + 1)
    full_hi, hi = tl.load(record + 2), tl.load(record + 3)
    query = tl.load(Q + rows[:, None] * stride_qs + d[None, :] * stride_qd, mask=present[:, None], other=0.0)

    for i in range(used):
        if i > 0:
            record = Spans + (entry.to(tl.int64) * records + i) * 4
            lo, full_lo = tl.load(record), tl.load(record + 1)
            full_hi, hi = tl.load(record + 2), tl.load(record + 3)
        border, full = full_lo - lo + hi - full_hi, full_hi - full_lo
        # Partial tiles, before and behind the full ones: the mask is a predicate.
        for j in range(lo + bounded(begin, border), lo + bounded(end, border)):
            tile = tl.where(j < full_lo, j, j - full_lo + full_hi)
            inside = columns < kv_len - tile * BLOCK_K
            at = tl.cast(tile * BLOCK_K, tl.int64)
            keys = tl.load(K + at * stride_ks + key_at, mask=inside[None, :], other=0.0)
            score = tl.dot(query, keys)
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            column0 = k < s1
            # abs(q - k) <= s0 | k < s1 | q < s1
            visible = inside[None, :]
            visible &= (tl.abs(q - k) <= s0) | column0 | row0
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
        begin, end = begin - full, end - full

    if sums >= 0:
        # The sums of a part: attention_combine combines those of a row, in their order.
        row_at = (tl.load(At + place) + sums).to(tl.int64) * BLOCK_Q + rows
        tl.store(Tops + row_at, top, mask=present)
        tl.store(Totals + row_at, total, mask=present)
        out_at = row_at[:, None] * HEAD_DIM + d[None, :]
        tl.store(Acc + out_at, acc, mask=present[:, None])
        return
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
    weight = rescale / total
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start.to(tl.int64) * stride_os
    out_at = rows[:, None] * stride_os + d[None, :] * stride_od
    tl.store(Out + out_at, (acc * weight[:, None]).to(Out.dtype.element_ty), mask=present[:, None])
    row_at = place.to(tl.int64) * q_len + start + rows
    tl.store(Lse + row_at, lse, mask=present)
    tl.store(Low + row_at, low, mask=present)


@triton.jit(do_not_specialize=["heads", "q_len", "queries"])
def attention_combine(
    Acc, Tops, Totals,  # the parts, of attention_forward
    Rows,  # int32 [slices, rows in parts, 3]: a row of tiles, the first place of its sums, and how many parts it has
    SliceOf, At,  # int32 [batch, heads]: the slice, and the first place of a head's sums
    Out,  # [batch, heads, q_len, dim], any strides
    Lse,  # float32 [batch, heads, q_len], contiguous
    Low,  # the rounding error of Lse
    Sinks,  # float32 [heads]: one more logit in the denominator
    stride_ob, stride_oh, stride_os, stride_od,
    heads, q_len, queries,
):
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = batch * heads + head
    listed = Rows + (tl.load(SliceOf + place) * (tl.num_programs(0) // queries) + row // queries) * 3
    within, splits = row % queries, tl.load(listed + 2)
    row = tl.load(listed) * queries + within
    if (splits == 0) | (row >= q_len):
        return  # another head has more rows in parts
    rows = tl.cast(queries, tl.int64)  # of one part
    first_at = (tl.load(At + place) + tl.load(listed + 1)) * rows + within
    row_at = (batch.to(tl.int64) * heads + head) * q_len + row
    d = tl.arange(0, DIM)
    top = tl.cast(LOWEST, tl.float32)
    total = tl.cast(0.0, tl.float32)
    acc = tl.zeros([DIM], tl.float32)

    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        at = part * rows + first_at
        tops = tl.load(Tops + at, mask=part < splits, other=LOWEST)
        totals = tl.load(Totals + at, mask=part < splits, other=0.0)
        values = tl.load(Acc + at[:, None] * HEAD_DIM + d[None, :], mask=part[:, None] < splits, other=0.0)
        peak = tl.maximum(top, tl.max(tops, 0))
        weight = tl.exp2(tops - peak)
        rescale = tl.exp2(top - peak)
        total = total * rescale + tl.sum(weight * totals, 0)
        acc = acc * rescale + tl.sum(weight[:, None] * values, 0)
        top = peak

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
    tl.store(Out + d * stride_od, out.to(Out.dtype.element_ty))
    tl.store(Lse + row_at, lse)
    tl.store(Low + row_at, low)
