"""Gradients of captured tensors in Triton, written by frisket for

    causal & same(doc)
    score + bias[h, q, k + 3]
    s0 = 3

Head size 64, bfloat16, 4 query heads to a key head.
attention_plane: grid (q tiles * k tiles, heads, 1), tiles of 64 queries by 64 keys, num_warps=8, num_stages=1.
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
        "heads", "q_len", "kv_len", "batches", "records", "b_origin", "h_origin", "q_origin", "k_origin",
        "s0", "doc_size0", "doc_size1", "bias_size0", "bias_size1", "bias_size2", "doc_stride0",
    ]
)
def attention_plane(
    Q, K, V, DOut,  # [batch, heads, length, dim], any strides
    Stats,  # float32 [batch, heads, q_len, 4], contiguous: lse, factor and delta, of attention_delta
    Into,  # float32, contiguous: the gradient of bias[h, q, k + s0]
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    scale, heads, q_len, kv_len, batches,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles
    Count,  # int32 [slices, rows]: records in use
    SliceOf,  # int32 [batch, heads]
    records,
    b_origin, h_origin, q_origin, k_origin,  # of this call in the whole problem
    s0,
    doc, doc_size0, doc_size1, doc_stride0, doc_stride1,
    bias, bias_size0, bias_size1, bias_size2, bias_stride0, bias_stride1, bias_stride2,
    ORIGIN_PER_BATCH: tl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # powers of two
):
    head = tl.program_id(1)
    row, tile = tl.program_id(0) // tl.cdiv(kv_len, BLOCK_K), tl.program_id(0) % tl.cdiv(kv_len, BLOCK_K)
    start = row * BLOCK_Q
    rows = tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_K)
    d = tl.arange(0, DIM)
    h = h_origin + head
    q = (q_origin + start + rows)[:, None]
    k = (k_origin + tile * BLOCK_K + columns)[None, :]
    column0 = k + s0
    to = tl.cast(clamp(h, bias_size0), tl.int64)
    to = to * bias_size1 + clamp(q, bias_size1)
    to = to * bias_size2 + clamp(column0, bias_size2)
    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)

    for batch in range(batches):
        place = batch * heads + head
        distinct = tl.load(SliceOf + place) * tl.cdiv(q_len, BLOCK_Q)
        b = b_origin + batch
        seen = 0
        entry = tl.cast(distinct + row, tl.int64)
        for i in range(tl.load(Count + entry)):
            record = Spans + (entry * records + i) * 4
            seen += ((tl.load(record) <= tile) & (tile < tl.load(record + 3))).to(tl.int32)
        if seen > 0:
            kv_head = head // GROUP
            q_at = Q + tl.cast(batch, tl.int64) * stride_qb + tl.cast(head, tl.int64) * stride_qh
            k_at = K + tl.cast(batch, tl.int64) * stride_kb + tl.cast(kv_head, tl.int64) * stride_kh
            v_at = V + tl.cast(batch, tl.int64) * stride_vb + tl.cast(kv_head, tl.int64) * stride_vh
            dout_at = DOut + tl.cast(batch, tl.int64) * stride_gb + tl.cast(head, tl.int64) * stride_gh
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
            doc_b_q = tl.load(doc + step(b, doc_size0, doc_stride0) + clamp(q, doc_size1) * doc_stride1)
            doc_b_k = tl.load(doc + step(b, doc_size0, doc_stride0) + clamp(k, doc_size1) * doc_stride1)
            # q >= k & doc[b, q] == doc[b, k]
            visible = present[:, None] & inside[None, :]
            visible &= q >= k
            visible &= doc_b_q == doc_b_k
            # score + bias[h, q, k + s0]
            bias_h_q_at = tl.load(
                bias
                + step(h, bias_size0, bias_stride0)
                + step(q, bias_size1, bias_stride1)
                + clamp(column0, bias_size2) * bias_stride2,
                mask=visible,
            ).to(tl.float32)
            modified = score * scale + bias_h_q_at
            p = tl.where(visible, tl.exp2(modified * LOG2E - lse) * factor, 0.0)
            # Where p is 0, dm is 0, even beside infinity.
            dm = tl.where(p == 0.0, 0.0, p * (dp - delta))
            total += dm
    present = start + rows < q_len
    inside = tile * BLOCK_K + columns < kv_len
    tl.store(Into + to, total, mask=present[:, None] & inside[None, :])
