"""Gradients of captured tensors in Triton, written by frisket for

    softcap of score * bias[k - q]
    seed = seed of dropout
    rate = rate of dropout

Head size 64, bfloat16, 4 query heads to a key head.
attention_diagonal: grid (block diagonals * parts, heads, batch), tiles of 64 queries by 64 keys, num_warps=8, num_stages=1.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(4)
DIM = tl.constexpr(64)
LOG2E = tl.constexpr(1.4426950408889634)


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
def span(first, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """`first` and what follows it: as many as a tile has diagonals, up to the next power of two."""
    return first + tl.arange(0, 2 * BLOCK_Q if BLOCK_Q > BLOCK_K else 2 * BLOCK_K)


@triton.jit
def along(line, away, seen=None):
    """For every position the entry of a vector that is `away` from its first; 0 where it is not `seen`."""
    found = tl.reshape(tl.gather(line, tl.ravel(away), 0), away.shape)
    if seen is not None:
        found = tl.where(seen, found, 0)
    return found


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


@triton.jit(
    do_not_specialize=[
        "heads", "q_len", "kv_len", "share", "records", "b_origin", "h_origin", "q_origin", "k_origin",
        "seed", "rate", "doc_size0", "doc_size1", "bias_size", "doc_stride0",
    ]
)
def attention_diagonal(
    Q, K, V, DOut,  # [batch, heads, length, dim], any strides
    Stats,  # float32 [batch, heads, q_len, 4], contiguous: lse, factor and delta, of attention_delta
    Sums,  # float32 [batch, heads, weights, parts, 2, block diagonals, BLOCK_K]: gradients of
    # bias[k - q], by distance
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    scale, heads, q_len, kv_len, share,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles
    Count,  # int32 [slices, rows]: records in use
    SliceOf,  # int32 [batch, heads]
    records,
    b_origin, h_origin, q_origin, k_origin,  # of this call in the whole problem
    seed, rate,
    doc, doc_size0, doc_size1, doc_stride0, doc_stride1,
    bias, bias_size, bias_stride,
    ORIGIN_PER_BATCH: tl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # powers of two
):
    head, batch = tl.program_id(1), tl.program_id(2)
    place = batch * heads + head
    distinct = tl.load(SliceOf + place) * tl.cdiv(q_len, BLOCK_Q)
    rows = tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_K)
    d = tl.arange(0, DIM)
    # Tiles on one block diagonal: row - tile is shift. A part is `share` rows of tiles.
    diagonals = tl.cdiv(q_len, BLOCK_Q) + tl.cdiv(kv_len, BLOCK_K) - 1
    part, diagonal = tl.program_id(0) // diagonals, tl.program_id(0) % diagonals
    shift = diagonal + 1 - tl.cdiv(kv_len, BLOCK_K)
    begin = tl.maximum(part * share, shift)
    end = tl.minimum((part + 1) * share, tl.cdiv(q_len, BLOCK_Q))
    end = tl.minimum(end, shift + tl.cdiv(kv_len, BLOCK_K))
    kv_head = head // GROUP
    q_at = Q + tl.cast(batch, tl.int64) * stride_qb + tl.cast(head, tl.int64) * stride_qh
    k_at = K + tl.cast(batch, tl.int64) * stride_kb + tl.cast(kv_head, tl.int64) * stride_kh
    v_at = V + tl.cast(batch, tl.int64) * stride_vb + tl.cast(kv_head, tl.int64) * stride_vh
    dout_at = DOut + tl.cast(batch, tl.int64) * stride_gb + tl.cast(head, tl.int64) * stride_gh

    if ORIGIN_PER_BATCH:
        q_origin = tl.load(q_origin + batch)
        k_origin = tl.load(k_origin + batch)
    rate = tl.cast(rate, tl.float32)
    b = b_origin + batch
    h = h_origin + head
    unit = 30.0 * LOG2E
    survivor = 1.0 / (1.0 - rate)
    sum0 = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)

    for row in range(begin, end):
        tile = row - shift
        start = row * BLOCK_Q
        seen = 0
        entry = tl.cast(distinct + row, tl.int64)
        for i in range(tl.load(Count + entry)):
            record = Spans + (entry * records + i) * 4
            seen += ((tl.load(record) <= tile) & (tile < tl.load(record + 3))).to(tl.int32)
        if seen > 0:
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
            q = (q_origin + start + rows)[:, None]
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            # One vector of the tile's distances, of which every position takes one.
            q_line = span(q_origin + start - (BLOCK_K - 1), BLOCK_Q, BLOCK_K)
            k_line = k_origin + tile * BLOCK_K
            away = rows[:, None] - columns[None, :] + (BLOCK_K - 1)
            doc_b_q = tl.load(doc + step(b, doc_size0, doc_stride0) + clamp(q, doc_size1) * doc_stride1)
            doc_b_k = tl.load(doc + step(b, doc_size0, doc_stride0) + clamp(k, doc_size1) * doc_stride1)
            bias_at = tl.load(bias + clamp(k_line - q_line, bias_size) * bias_stride).to(tl.float32)
            # q >= k & doc[b, q] == doc[b, k]
            visible = present[:, None] & inside[None, :]
            visible &= q >= k
            visible &= doc_b_q == doc_b_k
            # 30 * tanh(score * bias[k - q] / 30)
            x0 = score * scale
            x1 = along(bias_at, away, visible)
            x2 = tanh(x0 * x1 * 0.03333333333333333)
            modified = x2
            p = tl.where(visible, tl.exp2(modified * unit - lse) * factor, 0.0)
            # random(seed, b, h, q, k) >= rate
            kept = tl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, survivor, 0.0)
            # Where p is 0, dm is 0, even beside infinity.
            dm = tl.where(p == 0.0, 0.0, p * (dp * kept - delta))
            weight = x0 * (1.0 - x2 * x2)
            sum0 += tl.where(p == 0.0, 0.0, dm * weight)

    # Row i is turned by i places. Column c then holds the diagonal c below the main one, in rows from c on, and the
    # diagonal BLOCK_K - c above it.
    turned = (rows[:, None] - columns[None, :]) & (BLOCK_K - 1)
    ahead = rows[:, None] >= columns[None, :]
    parts = tl.num_programs(0) // diagonals
    moved = tl.gather(sum0, turned, 1)
    to = (tl.cast(place, tl.int64) * parts + part) * 2 * diagonals + diagonal
    to = Sums + to * BLOCK_K + columns
    tl.store(to, tl.sum(tl.where(ahead, moved, 0.0), 0))
    tl.store(to + diagonals * BLOCK_K, tl.sum(tl.where(ahead, 0.0, moved), 0))
