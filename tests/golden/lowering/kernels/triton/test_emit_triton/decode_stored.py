"""Attention of few queries in Triton, written by frisket for

    stored

Head size 128, bfloat16, keys and values int8, 4 query heads to a key head.
attention_decode: grid (q tiles * splits, heads / 4, batch), tiles of 16 packed queries by 64 keys,
    num_warps=4, num_stages=3.
attention_combine: grid (q_len, heads, batch).
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
def step(i, size, stride):
    return tl.minimum(tl.maximum(i, 0), size - 1).to(tl.int64) * stride


@triton.jit
def clamp(i, size):
    return tl.minimum(tl.maximum(i, 0), size - 1)


@triton.jit
def bounded(i, n):
    return tl.minimum(tl.maximum(i, 0), n)


@triton.jit(
    do_not_specialize=[
        "heads", "q_len", "kv_len", "splits", "pool", "records", "b_origin", "h_origin", "q_origin",
        "k_origin", "start__size", "end__size", "pages_size0", "pages_size1", "k_scale_size0",
        "k_scale_size1", "k_scale_size2", "v_scale_size0", "v_scale_size1", "v_scale_size2",
        "pages_stride0", "k_scale_stride0", "k_scale_stride1", "v_scale_stride0", "v_scale_stride1",
    ]
)
def attention_decode(
    Q,  # [batch, heads, length, dim], any strides
    K, V,  # [pages, heads, tokens of a page, dim], any strides
    Acc,  # float32 [splits, batch, heads, q_len, dim]: values of each part by their weights
    Tops, Totals,  # float32 [splits, batch, heads, q_len]: largest scores, and sums of weights
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    scale, heads, q_len, kv_len, splits, pool,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles
    Count,  # int32 [slices, rows]: records in use
    SliceOf,  # int32 [batch, heads]
    records,
    b_origin, h_origin, q_origin, k_origin,  # of this call in the whole problem
    start_, start__size, start__stride,
    end_, end__size, end__stride,
    pages, pages_size0, pages_size1, pages_stride0, pages_stride1,
    k_scale, k_scale_size0, k_scale_size1, k_scale_size2, k_scale_stride0, k_scale_stride1, k_scale_stride2,
    v_scale, v_scale_size0, v_scale_size1, v_scale_size2, v_scale_stride0, v_scale_stride1, v_scale_stride2,
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
    d = tl.arange(0, DIM)

    # Offsets are 64 bits where they are scalars, 32 within a tile.
    Q += batch.to(tl.int64) * stride_qb
    query_at = head.to(tl.int64) * stride_qh + (start + rows).to(tl.int64) * stride_qs
    paged = pages + batch.to(tl.int64) * pages_stride0
    K += kv_head.to(tl.int64) * stride_kh
    V += kv_head.to(tl.int64) * stride_vh
    key_at = columns[None, :] * stride_ks + d[:, None] * stride_kd
    value_at = columns[:, None] * stride_vs + d[None, :] * stride_vd
    present = (packed < QUERIES * GROUP) & (start + rows < q_len)
    query = tl.load(Q + query_at[:, None] + d[None, :] * stride_qd, mask=present[:, None], other=0.0)

    if ORIGIN_PER_BATCH:
        q_origin = tl.load(q_origin + batch)
        k_origin = tl.load(k_origin + batch)
    b = b_origin + batch
    h_first = h_origin + kv_head * GROUP
    q = (q_origin + start + rows)[:, None]
    start__b = tl.load(start_ + clamp(b, start__size) * start__stride)
    end__b = tl.load(end_ + clamp(b, end__size) * end__stride)
    fixed0 = h_first >> 2
    row0 = q + start__b
    top = tl.full([BLOCK_Q], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, DIM], tl.float32)

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
            page = tl.load(paged + clamp(tile * BLOCK_K // 64, pages_size1) * pages_stride1)
            page = clamp(page, pool).to(tl.int64)
            at = tl.cast(tile * BLOCK_K % 64, tl.int64)
            keys = tl.load(
                K + page * stride_kb + at * stride_ks + key_at,
                mask=inside[None, :], other=0.0,
            ).to(Q.dtype.element_ty)
            score = tl.dot(query, keys)
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            k_scale_page_at_token = tl.load(
                k_scale
                + page * k_scale_stride0
                + step(fixed0, k_scale_size1, k_scale_stride1)
                + (tile * BLOCK_K % 64 + columns)[None, :] * k_scale_stride2,
            ).to(tl.float32)
            column0 = scale * k_scale_page_at_token
            # k <= q + start_[b] & k < end_[b]
            visible = inside[None, :]
            visible &= k <= row0
            visible &= k < end__b
            # score * k_scale[pages[b, k // 64], h // 4, k % 64]
            score = score * column0
            score = tl.where(visible, score, -INFINITY)
            # Values that no query sees may never have been written: a NaN there must not reach the sums.
            seen = tl.max((visible & present[:, None]).to(tl.int32), 0) > 0
            peak = tl.maximum(top, tl.max(score, 1) * LOG2E)
            p = tl.exp2(score * LOG2E - peak[:, None])
            rescale = tl.exp2(top - peak)
            total = total * rescale + tl.sum(p, 1)
            # v_scale[pages[b, k // 64], h // 4, k % 64]
            scaled = tl.load(
                v_scale
                + page * v_scale_stride0
                + step(fixed0, v_scale_size1, v_scale_stride1)
                + (tile * BLOCK_K % 64 + columns)[None, :] * v_scale_stride2,
            ).to(tl.float32)
            p = tl.where(visible, p * scaled, 0.0)
            values = tl.load(
                V + page * stride_vb + at * stride_vs + value_at,
                mask=seen[:, None], other=0.0,
            ).to(Q.dtype.element_ty)
            acc = tl.dot(p.to(values.dtype), values, acc * rescale[:, None])
            top = peak
        begin, end = begin - border, end - border
        # Full tiles: every position is visible.
        for tile in range(full_lo + bounded(begin, full), full_lo + bounded(end, full)):
            page = tl.load(paged + tile * BLOCK_K // 64 * pages_stride1)
            page = clamp(page, pool).to(tl.int64)
            at = tl.cast(tile * BLOCK_K % 64, tl.int64)
            keys = tl.load(K + page * stride_kb + at * stride_ks + key_at).to(Q.dtype.element_ty)
            score = tl.dot(query, keys)
            k_scale_page_at_token = tl.load(
                k_scale
                + page * k_scale_stride0
                + step(fixed0, k_scale_size1, k_scale_stride1)
                + (tile * BLOCK_K % 64 + columns)[None, :] * k_scale_stride2,
            ).to(tl.float32)
            column0 = scale * k_scale_page_at_token
            # score * k_scale[pages[b, k // 64], h // 4, k % 64]
            score = score * column0
            peak = tl.maximum(top, tl.max(score, 1) * LOG2E)
            p = tl.exp2(score * LOG2E - peak[:, None])
            rescale = tl.exp2(top - peak)
            total = total * rescale + tl.sum(p, 1)
            # v_scale[pages[b, k // 64], h // 4, k % 64]
            scaled = tl.load(
                v_scale
                + page * v_scale_stride0
                + step(fixed0, v_scale_size1, v_scale_stride1)
                + (tile * BLOCK_K % 64 + columns)[None, :] * v_scale_stride2,
            ).to(tl.float32)
            p *= scaled
            values = tl.load(V + page * stride_vb + at * stride_vs + value_at).to(Q.dtype.element_ty)
            acc = tl.dot(p.to(values.dtype), values, acc * rescale[:, None])
            top = peak
        begin, end = begin - full, end - full

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

    # A row without a visible key gives 0, and lse -inf.
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, -INFINITY, (top + tl.log2(total)) * LN2)
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + row.to(tl.int64) * stride_os
    out = acc * (1.0 / total)
    tl.store(Out + d * stride_od, out.to(Out.dtype.element_ty))
    tl.store(Lse + row_at, lse)
