"""Attention forward in Triton, written by frisket for

    stored

Head size 128, bfloat16, keys and values int8, 4 query heads to a key head.
attention_forward: grid (q tiles, heads, batch), tiles of 128 queries by 64 keys, num_warps=8, num_stages=3.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(4)
DIM = tl.constexpr(128)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))


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


@triton.jit(
    do_not_specialize=[
        "heads", "q_len", "kv_len", "pool", "records", "b_origin", "h_origin", "q_origin", "k_origin",
        "start__size", "end__size", "pages_size0", "pages_size1", "k_scale_size0", "k_scale_size1",
        "k_scale_size2", "v_scale_size0", "v_scale_size1", "v_scale_size2", "pages_stride0",
        "k_scale_stride0", "k_scale_stride1", "v_scale_stride0", "v_scale_stride1",
    ]
)
def attention_forward(
    Q, Out,  # [batch, heads, length, dim], any strides
    K, V,  # [pages, heads, tokens of a page, dim], any strides
    Lse,  # float32 [batch, heads, q_len], contiguous
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_ob, stride_oh, stride_os, stride_od,
    scale, heads, q_len, kv_len, pool,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles
    Count, Order,  # int32 [slices, rows]: records in use; rows in order of work
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
    head, batch = tl.program_id(1), tl.program_id(2)
    place = batch * heads + head
    distinct = tl.load(SliceOf + place) * tl.num_programs(0)
    row = tl.load(Order + distinct + tl.program_id(0))  # longest first
    entry = distinct + row
    start = row * BLOCK_Q
    rows = tl.arange(0, BLOCK_Q)
    kv_head = head // GROUP
    columns = tl.arange(0, BLOCK_K)
    d = tl.arange(0, DIM)

    # Offsets are 64 bits where they are scalars, 32 within a tile.
    Q += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + start.to(tl.int64) * stride_qs
    paged = pages + batch.to(tl.int64) * pages_stride0
    K += kv_head.to(tl.int64) * stride_kh
    V += kv_head.to(tl.int64) * stride_vh
    key_at = d[:, None] * stride_kd
    value_at = d[None, :] * stride_vd
    present = start + rows < q_len

    if ORIGIN_PER_BATCH:
        q_origin = tl.load(q_origin + batch)
        k_origin = tl.load(k_origin + batch)
    b = b_origin + batch
    h = h_origin + head
    q = (q_origin + start + rows)[:, None]
    fixed0 = h >> 2
    start__b = tl.load(start_ + clamp(b, start__size) * start__stride)
    fixed1 = tl.load(end_ + clamp(b, end__size) * end__stride) - 1
    row0 = tl.minimum(q + start__b, fixed1)
    # The last of the call's keys that a query may see.
    most = placed(row0, k_origin, -1, kv_len - 1)
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
        # Partial tiles, before and behind the full ones: the mask is a predicate.
        for j in range(lo, hi - full_hi + full_lo):
            tile = tl.where(j < full_lo, j, j - full_lo + full_hi)
            inside = columns < kv_len - tile * BLOCK_K
            at = tile * BLOCK_K + columns
            page = tl.load(paged + clamp(at // 16, pages_size1) * pages_stride1)
            page = clamp(page, pool).to(tl.int64)
            at = at % 16
            keys = tl.load(
                K + (page * stride_kb + at * stride_ks)[None, :] + key_at,
                mask=inside[None, :], other=0.0,
            ).to(Q.dtype.element_ty)
            score = tl.dot(query, keys)
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            pages_b_at = tl.load(
                pages + step(b, pages_size0, pages_stride0) + clamp(k >> 6, pages_size1) * pages_stride1,
            )
            column0 = k & 63
            k_scale_pages_b_at_at_at = tl.load(
                k_scale
                + step(pages_b_at, k_scale_size0, k_scale_stride0)
                + step(fixed0, k_scale_size1, k_scale_stride1)
                + clamp(column0, k_scale_size2) * k_scale_stride2,
            ).to(tl.float32)
            column1 = scale * k_scale_pages_b_at_at_at
            # k <= q + start_[b] & k < end_[b]
            visible = up_to(columns[None, :], most - tile * BLOCK_K)
            # score * k_scale[pages[b, k // 64], h // 4, k % 64]
            score = score * column1
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
                + step(pages_b_at, v_scale_size0, v_scale_stride0)
                + step(fixed0, v_scale_size1, v_scale_stride1)
                + clamp(column0, v_scale_size2) * v_scale_stride2,
            ).to(tl.float32)
            p = tl.where(visible, p * scaled, 0.0)
            values = tl.load(
                V + (page * stride_vb + at * stride_vs)[:, None] + value_at,
                mask=seen[:, None], other=0.0,
            ).to(Q.dtype.element_ty)
            acc = tl.dot(p.to(values.dtype), values, acc * rescale[:, None])
            top = peak
        # Full tiles: every position is visible.
        for tile in range(full_lo, full_hi):
            at = tile * BLOCK_K + columns
            page = tl.load(paged + at // 16 * pages_stride1)
            page = clamp(page, pool).to(tl.int64)
            at = at % 16
            keys = tl.load(K + (page * stride_kb + at * stride_ks)[None, :] + key_at).to(Q.dtype.element_ty)
            score = tl.dot(query, keys)
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            pages_b_at = tl.load(
                pages + step(b, pages_size0, pages_stride0) + clamp(k >> 6, pages_size1) * pages_stride1,
            )
            column0 = k & 63
            k_scale_pages_b_at_at_at = tl.load(
                k_scale
                + step(pages_b_at, k_scale_size0, k_scale_stride0)
                + step(fixed0, k_scale_size1, k_scale_stride1)
                + clamp(column0, k_scale_size2) * k_scale_stride2,
            ).to(tl.float32)
            column1 = scale * k_scale_pages_b_at_at_at
            # score * k_scale[pages[b, k // 64], h // 4, k % 64]
            score = score * column1
            peak = tl.maximum(top, tl.max(score, 1) * LOG2E)
            p = tl.exp2(score * LOG2E - peak[:, None])
            rescale = tl.exp2(top - peak)
            total = total * rescale + tl.sum(p, 1)
            # v_scale[pages[b, k // 64], h // 4, k % 64]
            scaled = tl.load(
                v_scale
                + step(pages_b_at, v_scale_size0, v_scale_stride0)
                + step(fixed0, v_scale_size1, v_scale_stride1)
                + clamp(column0, v_scale_size2) * v_scale_stride2,
            ).to(tl.float32)
            p *= scaled
            values = tl.load(V + (page * stride_vb + at * stride_vs)[:, None] + value_at).to(Q.dtype.element_ty)
            acc = tl.dot(p.to(values.dtype), values, acc * rescale[:, None])
            top = peak

    # A row without a visible key gives 0, and lse -inf.
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, -INFINITY, (top + tl.log2(total)) * LN2)
    weight = 1.0 / total
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start.to(tl.int64) * stride_os
    out_at = rows[:, None] * stride_os + d[None, :] * stride_od
    tl.store(Out + out_at, (acc * weight[:, None]).to(Out.dtype.element_ty), mask=present[:, None])
    row_at = place.to(tl.int64) * q_len + start + rows
    tl.store(Lse + row_at, lse, mask=present)
