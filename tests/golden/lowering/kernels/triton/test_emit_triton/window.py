"""Attention forward in Triton, written by frisket for

    causal & window(w)
    s0 = w

Head size 128, bfloat16, 8 query heads to a key head.
attention_forward: grid (q tiles, heads, batch), tiles of 128 queries by 64 keys, num_warps=8, num_stages=3.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(8)
DIM = tl.constexpr(128)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def placed(end, origin, first, last):
    """The end of what a row sees, counted from the call's first position, as far as it is in first..last."""
    return (tl.minimum(tl.maximum(end, origin + first), origin + last) - origin).to(tl.int32)


@triton.jit
def one_of(columns, least, many):
    """Whether columns of a tile are among `many` from `least` on, in two instructions: bits 1 and 2 stand apart, as
    in `up_to`."""
    return ((columns & ~6) - (least - (columns & 6))).to(tl.uint32) < many.to(tl.uint32)


@triton.jit(do_not_specialize=["heads", "q_len", "kv_len", "q_origin", "k_origin", "KV_LEN", "s0"])
def attention_forward(
    Q, K, V, Out,  # [batch, heads, length, dim], any strides
    Lse,  # float32 [batch, heads, q_len], contiguous
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_ob, stride_oh, stride_os, stride_od,
    scale, heads, q_len, kv_len,
    q_origin, k_origin,  # of this call in the whole problem
    KV_LEN,
    s0,
    ORIGIN_PER_BATCH: tl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # powers of two
):
    head, batch = tl.program_id(1), tl.program_id(2)
    place = batch * heads + head
    row = tl.num_programs(0) - 1 - tl.program_id(0)  # longest first
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

    q_first = q_origin + start
    q_last = q_origin + tl.minimum(start + BLOCK_Q, q_len) - 1
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

    row0 = q - s0 + 1
    # The first of the call's keys that a query may see, and the number of those up to the last.
    least = placed(row0, k_origin, 0, kv_len)
    many = tl.maximum(placed(q, k_origin, -1, kv_len - 1) + 1 - least, 0)
    unit = scale * LOG2E
    top = tl.full([BLOCK_Q], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, DIM], tl.float32)
    query = tl.load(Q + rows[:, None] * stride_qs + d[None, :] * stride_qd, mask=present[:, None], other=0.0)

    # Partial tiles, before and behind the full ones: the mask is a predicate.
    for j in range(lo, hi - full_hi + full_lo):
        tile = tl.where(j < full_lo, j, j - full_lo + full_hi)
        inside = columns < kv_len - tile * BLOCK_K
        at = tl.cast(tile * BLOCK_K, tl.int64)
        keys = tl.load(K + at * stride_ks + key_at, mask=inside[None, :], other=0.0)
        score = tl.dot(query, keys)
        # q >= k & q - k < s0
        visible = one_of(columns[None, :], least - tile * BLOCK_K, many)
        score = tl.where(visible, score, -INFINITY)
        peak = tl.maximum(top, tl.max(score, 1) * unit)
        p = tl.exp2(score * unit - peak[:, None])
        rescale = tl.exp2(top - peak)
        total = total * rescale + tl.sum(p, 1)
        values = tl.load(V + at * stride_vs + value_at, mask=inside[:, None], other=0.0)
        acc = tl.dot(p.to(values.dtype), values, acc * rescale[:, None])
        top = peak
    # Full tiles: every position is visible.
    for tile in range(full_lo, full_hi):
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

    lse = (top + tl.log2(total)) * LN2
    weight = 1.0 / total
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start.to(tl.int64) * stride_os
    out_at = rows[:, None] * stride_os + d[None, :] * stride_od
    tl.store(Out + out_at, (acc * weight[:, None]).to(Out.dtype.element_ty), mask=present[:, None])
    row_at = place.to(tl.int64) * q_len + start + rows
    tl.store(Lse + row_at, lse, mask=present)
