"""Gradients of captured tensors in Triton, written by frisket for

    causal
    score + bias[bucket[q, k], h]

Head size 64, bfloat16, 4 query heads to a key head.
attention_total: grid (q tiles, heads, batch), tiles of 64 queries by 64 keys, num_warps=8, num_stages=1.
attention_scatter: grid (q tiles, heads, batch), tiles of 64 queries by 64 keys, num_warps=8, num_stages=1.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(4)
DIM = tl.constexpr(64)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def step(i, size, stride):
    return tl.minimum(tl.maximum(i, 0), size - 1).to(tl.int64) * stride


@triton.jit
def clamp(i, size):
    return tl.minimum(tl.maximum(i, 0), size - 1)


@triton.jit(
    do_not_specialize=[
        "heads", "q_len", "kv_len", "records", "h_origin", "q_origin", "k_origin", "bucket_size0",
        "bucket_size1", "bias_size0", "bias_size1",
    ]
)
def attention_total(
    Q, K, V, DOut,  # [batch, heads, length, dim], any strides
    Stats,  # float32 [batch, heads, q_len, 4], contiguous: lse, factor and delta, of attention_delta
    Total,  # float32 [batch, heads, q tiles]: the sum of the magnitudes of all that is added
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    scale, heads, q_len, kv_len,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles
    Count,  # int32 [slices, rows]: records in use
    SliceOf,  # int32 [batch, heads]
    records,
    h_origin, q_origin, k_origin,  # of this call in the whole problem
    bucket, bucket_size0, bucket_size1, bucket_stride0, bucket_stride1,
    bias, bias_size0, bias_size1, bias_stride0, bias_stride1,
    ORIGIN_PER_BATCH: tl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # powers of two
):
    head, batch = tl.program_id(1), tl.program_id(2)
    place = batch * heads + head
    distinct = tl.load(SliceOf + place) * tl.num_programs(0)
    row = tl.program_id(0)
    entry = distinct + row
    start = row * BLOCK_Q
    rows = tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_K)
    d = tl.arange(0, DIM)
    kv_head = head // GROUP
    q_at = Q + tl.cast(batch, tl.int64) * stride_qb + tl.cast(head, tl.int64) * stride_qh
    k_at = K + tl.cast(batch, tl.int64) * stride_kb + tl.cast(kv_head, tl.int64) * stride_kh
    v_at = V + tl.cast(batch, tl.int64) * stride_vb + tl.cast(kv_head, tl.int64) * stride_vh
    dout_at = DOut + tl.cast(batch, tl.int64) * stride_gb + tl.cast(head, tl.int64) * stride_gh

    if ORIGIN_PER_BATCH:
        q_origin = tl.load(q_origin + batch)
        k_origin = tl.load(k_origin + batch)
    h = h_origin + head
    present = start + rows < q_len
    at = tl.cast(start, tl.int64)
    query = tl.load(
        q_at + at * stride_qs + (rows[:, None] * stride_qs + d[None, :] * stride_qd),
        mask=present[:, None], other=0.0,
    )
    dout = tl.load(
        dout_at + at * stride_gs + (rows[:, None] * stride_gs + d[None, :] * stride_gd),
        mask=present[:, None], other=0.0,
    )
    at_q = at + tl.cast(place, tl.int64) * q_len
    lse = tl.load(Stats + (at_q + rows) * 4, mask=present, other=0.0)[:, None]
    factor = tl.load(Stats + (at_q + rows) * 4 + 1, mask=present, other=0.0)[:, None]
    delta = tl.load(Stats + (at_q + rows) * 4 + 2, mask=present, other=0.0)[:, None]
    q = (q_origin + start + rows)[:, None]
    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)

    for i in range(tl.load(Count + entry)):
        record = Spans + (entry.to(tl.int64) * records + i) * 4
        lo, full_lo = tl.load(record), tl.load(record + 1)
        full_hi, hi = tl.load(record + 2), tl.load(record + 3)
        for tile in range(lo, hi):
            inside = tile * BLOCK_K + columns < kv_len
            at = tl.cast(tile * BLOCK_K, tl.int64)
            keys = tl.load(
                k_at + at * stride_ks + (columns[:, None] * stride_ks + d[None, :] * stride_kd),
                mask=inside[:, None], other=0.0,
            )
            score = tl.dot(query, tl.trans(keys))
            values = tl.load(
                v_at + at * stride_vs + (columns[:, None] * stride_vs + d[None, :] * stride_vd),
                mask=inside[:, None], other=0.0,
            )
            dp = tl.dot(dout, tl.trans(values))
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            # q >= k
            visible = present[:, None] & inside[None, :]
            visible &= q >= k
            # score + bias[bucket[q, k], h]
            bucket_q_k = tl.load(
                bucket + step(q, bucket_size0, bucket_stride0) + clamp(k, bucket_size1) * bucket_stride1,
                mask=visible,
            )
            bias_bucket_q_k_h = tl.load(
                bias + step(bucket_q_k, bias_size0, bias_stride0) + clamp(h, bias_size1) * bias_stride1,
                mask=visible,
            ).to(tl.float32)
            modified = score * scale + bias_bucket_q_k_h
            p = tl.where(visible, tl.exp2(modified * LOG2E - lse) * factor, 0.0)
            # Where p is 0, dm is 0, even beside infinity.
            dm = tl.where(p == 0.0, 0.0, p * (dp - delta))
            total += tl.abs(dm)
    tl.store(Total + place * tl.num_programs(0) + row, tl.sum(total))


@triton.jit(
    do_not_specialize=[
        "heads", "q_len", "kv_len", "records", "h_origin", "q_origin", "k_origin", "bucket_size0",
        "bucket_size1", "bias_size0", "bias_size1",
    ]
)
def attention_scatter(
    Q, K, V, DOut,  # [batch, heads, length, dim], any strides
    Stats,  # float32 [batch, heads, q_len, 4], contiguous: lse, factor and delta, of attention_delta
    Counted,  # int64, contiguous: the gradient of bias[bucket[q, k], h], in units
    PerUnit,  # float32: how many units make 1, a power of two
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    scale, heads, q_len, kv_len,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles
    Count,  # int32 [slices, rows]: records in use
    SliceOf,  # int32 [batch, heads]
    records,
    h_origin, q_origin, k_origin,  # of this call in the whole problem
    bucket, bucket_size0, bucket_size1, bucket_stride0, bucket_stride1,
    bias, bias_size0, bias_size1, bias_stride0, bias_stride1,
    ORIGIN_PER_BATCH: tl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # powers of two
):
    head, batch = tl.program_id(1), tl.program_id(2)
    place = batch * heads + head
    distinct = tl.load(SliceOf + place) * tl.num_programs(0)
    row = tl.program_id(0)
    entry = distinct + row
    start = row * BLOCK_Q
    rows = tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_K)
    d = tl.arange(0, DIM)
    kv_head = head // GROUP
    q_at = Q + tl.cast(batch, tl.int64) * stride_qb + tl.cast(head, tl.int64) * stride_qh
    k_at = K + tl.cast(batch, tl.int64) * stride_kb + tl.cast(kv_head, tl.int64) * stride_kh
    v_at = V + tl.cast(batch, tl.int64) * stride_vb + tl.cast(kv_head, tl.int64) * stride_vh
    dout_at = DOut + tl.cast(batch, tl.int64) * stride_gb + tl.cast(head, tl.int64) * stride_gh

    if ORIGIN_PER_BATCH:
        q_origin = tl.load(q_origin + batch)
        k_origin = tl.load(k_origin + batch)
    h = h_origin + head
    present = start + rows < q_len
    at = tl.cast(start, tl.int64)
    query = tl.load(
        q_at + at * stride_qs + (rows[:, None] * stride_qs + d[None, :] * stride_qd),
        mask=present[:, None], other=0.0,
    )
    dout = tl.load(
        dout_at + at * stride_gs + (rows[:, None] * stride_gs + d[None, :] * stride_gd),
        mask=present[:, None], other=0.0,
    )
    at_q = at + tl.cast(place, tl.int64) * q_len
    lse = tl.load(Stats + (at_q + rows) * 4, mask=present, other=0.0)[:, None]
    factor = tl.load(Stats + (at_q + rows) * 4 + 1, mask=present, other=0.0)[:, None]
    delta = tl.load(Stats + (at_q + rows) * 4 + 2, mask=present, other=0.0)[:, None]
    q = (q_origin + start + rows)[:, None]
    per = tl.load(PerUnit)

    for i in range(tl.load(Count + entry)):
        record = Spans + (entry.to(tl.int64) * records + i) * 4
        lo, full_lo = tl.load(record), tl.load(record + 1)
        full_hi, hi = tl.load(record + 2), tl.load(record + 3)
        for tile in range(lo, hi):
            inside = tile * BLOCK_K + columns < kv_len
            at = tl.cast(tile * BLOCK_K, tl.int64)
            keys = tl.load(
                k_at + at * stride_ks + (columns[:, None] * stride_ks + d[None, :] * stride_kd),
                mask=inside[:, None], other=0.0,
            )
            score = tl.dot(query, tl.trans(keys))
            values = tl.load(
                v_at + at * stride_vs + (columns[:, None] * stride_vs + d[None, :] * stride_vd),
                mask=inside[:, None], other=0.0,
            )
            dp = tl.dot(dout, tl.trans(values))
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            # q >= k
            visible = present[:, None] & inside[None, :]
            visible &= q >= k
            # score + bias[bucket[q, k], h]
            bucket_q_k = tl.load(
                bucket + step(q, bucket_size0, bucket_stride0) + clamp(k, bucket_size1) * bucket_stride1,
                mask=visible,
            )
            bias_bucket_q_k_h = tl.load(
                bias + step(bucket_q_k, bias_size0, bias_stride0) + clamp(h, bias_size1) * bias_stride1,
                mask=visible,
            ).to(tl.float32)
            modified = score * scale + bias_bucket_q_k_h
            p = tl.where(visible, tl.exp2(modified * LOG2E - lse) * factor, 0.0)
            # Where p is 0, dm is 0, even beside infinity.
            dm = tl.where(p == 0.0, 0.0, p * (dp - delta))
            to = tl.cast(clamp(bucket_q_k, bias_size0), tl.int64)
            to = to * bias_size1 + clamp(h, bias_size1)
            # A sum of integers does not depend on their order.
            counted = tl.floor(dm * per + 0.5).to(tl.int64)
            tl.atomic_add(Counted + to, counted, mask=dm != 0.0, sem="relaxed")
