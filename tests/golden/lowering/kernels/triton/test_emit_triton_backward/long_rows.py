"""Attention backward in Triton, written by frisket for

    abs(q - k) <= 256 | k < 64 | q < 64
    score * gain[h] + gate[h, k]
    s0 = 256
    s1 = 64

Head size 128 (values 96), bfloat16, 4 query heads to a key head.
attention_delta: grid (query tiles, heads, batch), tiles of 32 queries, num_warps=4.
attention_dq: grid (query tiles, heads, batch), tiles of 128 queries by 64 keys, num_warps=8, num_stages=2.
attention_dq_sums: grid (rows of tiles in parts, heads, batch).
attention_dkv: grid (key tiles, key heads, batch), tiles of 128 keys by 64 queries, num_warps=8, num_stages=2.
attention_dkv_sums: grid (rows of tiles in parts, heads, batch).
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(4)
HEAD_DIM = tl.constexpr(128)
V_DIM = tl.constexpr(96)
DIM = tl.constexpr(128)
DIM_V = tl.constexpr(128)
LOG2E = tl.constexpr(1.4426950408889634)
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
    e = tl.arange(0, DIM_V)
    present = start + rows < q_len
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start.to(tl.int64) * stride_os
    out = tl.load(
        Out + rows[:, None] * stride_os + e[None, :] * stride_od,
        mask=present[:, None] & (e[None, :] < V_DIM), other=0.0,
    ).to(tl.float32)
    DOut += batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh + start.to(tl.int64) * stride_gs
    dout = tl.load(
        DOut + rows[:, None] * stride_gs + e[None, :] * stride_gd,
        mask=present[:, None] & (e[None, :] < V_DIM), other=0.0,
    ).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    at = (batch * heads + head).to(tl.int64) * q_len + start + rows
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
        "heads", "q_len", "kv_len", "records", "h_origin", "q_origin", "k_origin", "s0", "s1", "gain_size",
        "gate_size0", "gate_size1", "gate_stride0",
    ]
)
def attention_dq(
    Q, K, V, DOut,  # [batch, heads, length, dim], any strides
    Stats,  # float32 [batch, heads, q_len, 4], contiguous: lse, factor and delta, of attention_delta
    DQ,  # [batch, heads, q_len, dim], contiguous
    Dgain,  # float32 [batch, heads, q_len]: the gradient of gain[h], summed over keys
    Acc,  # float32 [places, BLOCK_Q, 129]: sums of the parts of rows
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    scale, heads, q_len, kv_len,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles
    Count,  # int32 [slices, rows]: records in use
    SliceOf,  # int32 [batch, heads]
    Parts,  # int32 [slices, programs, 4]: a row, the place of a part's sums or -1, and which tiles of the row to walk
    At,  # int32 [batch, heads]: the first place of a head's sums
    records,
    h_origin, q_origin, k_origin,  # of this call in the whole problem
    s0, s1,
    gain, gain_size, gain_stride,
    gate, gate_size0, gate_size1, gate_stride0, gate_stride1,
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
    columns = tl.arange(0, BLOCK_K)
    d = tl.arange(0, DIM)
    e = tl.arange(0, DIM_V)
    kv_head = head // GROUP

    # Offsets are 64 bits where they are scalars, 32 within a tile.
    Q += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + start.to(tl.int64) * stride_qs
    K += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    V += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    DOut += batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh + start.to(tl.int64) * stride_gs
    at_q = place.to(tl.int64) * q_len + start
    key_at = columns[:, None] * stride_ks + d[None, :] * stride_kd
    value_at = columns[:, None] * stride_vs + e[None, :] * stride_vd
    present = start + rows < q_len
    query = tl.load(Q + rows[:, None] * stride_qs + d[None, :] * stride_qd, mask=present[:, None], other=0.0)
    dout = tl.load(
        DOut + rows[:, None] * stride_gs + e[None, :] * stride_gd,
        mask=present[:, None] & (e[None, :] < V_DIM), other=0.0,
    )
    lse = tl.load(Stats + (at_q + rows) * 4, mask=present, other=0.0)[:, None]
    factor = tl.load(Stats + (at_q + rows) * 4 + 1, mask=present, other=0.0)[:, None]
    delta = tl.load(Stats + (at_q + rows) * 4 + 2, mask=present, other=0.0)[:, None]
    delta *= factor

    if ORIGIN_PER_BATCH:
        q_origin = tl.load(q_origin + batch)
        k_origin = tl.load(k_origin + batch)
    h = h_origin + head
    q = (q_origin + start + rows)[:, None]
    gain_h = tl.load(gain + clamp(h, gain_size) * gain_stride).to(tl.float32)
    fixed0 = scale * gain_h
    row0 = q < s1
    dq = tl.zeros([BLOCK_Q, DIM], tl.float32)
    dgain = tl.zeros([BLOCK_Q], tl.float32)

    for i in range(tl.load(Count + entry)):
        record = Spans + (entry.to(tl.int64) * records + i) * 4
        lo, full_lo = tl.load(record), tl.load(record + 1)
        full_hi, hi = tl.load(record + 2), tl.load(record + 3)
        edge = lo
        border, full = full_lo - lo + hi - full_hi, full_hi - full_lo
        # Partial tiles, before and behind the full ones: the mask is a predicate.
        for j in range(lo + bounded(begin, border), lo + bounded(end, border)):
            tile = tl.where(j < full_lo, j, j - full_lo + full_hi)
            edge = tile
            inside = tile * BLOCK_K + columns < kv_len
            at = tl.cast(tile * BLOCK_K, tl.int64)
            keys = tl.load(K + at * stride_ks + key_at, mask=inside[:, None], other=0.0)
            values = tl.load(V + at * stride_vs + value_at, mask=inside[:, None] & (e[None, :] < V_DIM), other=0.0)
            score = tl.dot(query, tl.trans(keys))
            dp = tl.dot(dout, tl.trans(values))
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            column0 = k < s1
            gate_h_k = tl.load(
                gate + step(h, gate_size0, gate_stride0) + clamp(k, gate_size1) * gate_stride1,
            ).to(tl.float32)
            # abs(q - k) <= s0 | k < s1 | q < s1
            visible = inside[None, :]
            visible &= (tl.abs(q - k) <= s0) | column0 | row0
            # score * gain[h] + gate[h, k]
            modified = score * fixed0 + gate_h_k
            p = tl.where(visible, tl.exp2(modified * LOG2E - lse), 0.0)
            dm = p * (dp * factor - delta)
            # The gradient of gain[h].
            weight = score * scale
            dgain += tl.sum(tl.where(p == 0.0, 0.0, dm * weight), 1)
            # The derivative of the score mod.
            ds = tl.where(p == 0.0, 0.0, dm * gain_h)
            dq = tl.dot(ds.to(keys.dtype), keys, dq)
        begin, end = begin - border, end - border
        # Full tiles: every position is visible.
        # `edge` is below `hi`, which the compiler does not know: so it computes the first addresses of the full tiles after the
        # border tiles, and does not hold them in tens of registers.
        full_lo = tl.where(edge < hi, full_lo, hi)
        for tile in range(full_lo + bounded(begin, full), full_lo + bounded(end, full)):
            at = tl.cast(tile * BLOCK_K, tl.int64)
            keys = tl.load(K + at * stride_ks + key_at)
            values = tl.load(V + at * stride_vs + value_at, mask=e[None, :] < V_DIM, other=0.0)
            score = tl.dot(query, tl.trans(keys))
            dp = tl.dot(dout, tl.trans(values))
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            gate_h_k = tl.load(
                gate + step(h, gate_size0, gate_stride0) + clamp(k, gate_size1) * gate_stride1,
            ).to(tl.float32)
            # score * gain[h] + gate[h, k]
            modified = score * fixed0 + gate_h_k
            p = tl.exp2(modified * LOG2E - lse)
            dm = p * (dp * factor - delta)
            # The gradient of gain[h].
            weight = score * scale
            dgain += tl.sum(tl.where(p == 0.0, 0.0, dm * weight), 1)
            # The derivative of the score mod.
            ds = tl.where(p == 0.0, 0.0, dm * gain_h)
            dq = tl.dot(ds.to(keys.dtype), keys, dq)
        begin, end = begin - full, end - full

    if sums >= 0:
        # The sums of a part: attention_dq_sums adds those of a row up, in their order.
        part_at = (tl.load(At + place) + sums).to(tl.int64) * BLOCK_Q + rows
        tl.store(Acc + part_at[:, None] * 129 + d[None, :], dq, mask=present[:, None])
        tl.store(Acc + part_at * 129 + 128, dgain, mask=present)
        return
    DQ += at_q * HEAD_DIM
    out_at = rows[:, None] * HEAD_DIM + d[None, :]
    tl.store(DQ + out_at, (dq * scale).to(query.dtype), mask=present[:, None])
    tl.store(Dgain + at_q + rows, dgain, mask=present)


@triton.jit(do_not_specialize=["q_len", "queries"])
def attention_dq_sums(
    Acc,  # float32 [places, queries, 129]: sums of the parts of rows
    Rows,  # int32 [slices, rows in parts, 3]: a row of tiles, the first place of its sums, and how many parts it has
    SliceOf, At,  # int32 [batch, heads]: the slice, and the first place of a head's sums
    DQ,  # [batch, heads, q_len, dim], contiguous
    Dgain,  # float32 [batch, heads, q_len]: the gradient of gain[h], summed over keys
    scale, q_len, queries,
):
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = batch * tl.num_programs(1) + head
    listed = Rows + (tl.load(SliceOf + place) * (tl.num_programs(0) // queries) + row // queries) * 3
    within, splits = row % queries, tl.load(listed + 2)
    row = tl.load(listed) * queries + within
    if (splits == 0) | (row >= q_len):
        return  # another head has more rows in parts
    rows = tl.cast(queries, tl.int64)  # of one part
    first_at = (tl.load(At + place) + tl.load(listed + 1)) * rows + within
    row_at = place.to(tl.int64) * q_len + row
    d = tl.arange(0, 128)
    total = tl.zeros([128], tl.float32)
    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        at = (part * rows + first_at) * 129
        values = tl.load(Acc + at[:, None] + d[None, :], mask=part[:, None] < splits, other=0.0)
        total += tl.sum(values, 0)
    total *= scale
    tl.store(DQ + row_at * 128 + d, total.to(DQ.dtype.element_ty))
    share = tl.cast(0.0, tl.float32)
    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        at = (part * rows + first_at) * 129 + 128
        share += tl.sum(tl.load(Acc + at, mask=part < splits, other=0.0), 0)
    tl.store(Dgain + row_at, share)


@triton.jit(
    do_not_specialize=[
        "heads", "q_len", "kv_len", "records", "h_origin", "q_origin", "k_origin", "s0", "s1", "gain_size",
        "gate_size0", "gate_size1", "gate_stride0",
    ]
)
def attention_dkv(
    Q, K, V, DOut,  # [batch, heads, length, dim], any strides
    Stats,  # float32 [batch, heads, q_len, 4], contiguous: lse, factor and delta, of attention_delta
    DK, DV,  # [batch, key heads, kv_len, dim], contiguous
    Dgate,  # float32 [batch, heads, kv_len]: the gradient of gate[h, k], summed over queries
    Acc,  # float32 [places, BLOCK_K, 228]: sums of the parts of rows
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    scale, heads, q_len, kv_len,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in query tiles
    Count,  # int32 [slices, rows]: records in use
    SliceOf,  # int32 [batch, heads]
    Parts,  # int32 [slices, programs, 4]: a row, the place of a part's sums or -1, and which tiles of the row to walk
    At,  # int32 [batch, heads]: the first place of a head's sums
    records,
    h_origin, q_origin, k_origin,  # of this call in the whole problem
    s0, s1,
    gain, gain_size, gain_stride,
    gate, gate_size0, gate_size1, gate_stride0, gate_stride1,
    ORIGIN_PER_BATCH: tl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # powers of two
):
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    of_slice = tl.load(SliceOf + batch * heads + kv_head * GROUP)
    program = Parts + (of_slice * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * 4
    row = tl.load(program)
    if row < 0:
        return  # another head has more programs
    start = row * BLOCK_K
    rows = tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_K)
    d = tl.arange(0, DIM)
    e = tl.arange(0, DIM_V)
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
        V + columns[:, None] * stride_vs + e[None, :] * stride_vd,
        mask=present[:, None] & (e[None, :] < V_DIM), other=0.0,
    )

    if ORIGIN_PER_BATCH:
        q_origin = tl.load(q_origin + batch)
        k_origin = tl.load(k_origin + batch)
    dk = tl.zeros([BLOCK_K, DIM], tl.float32)
    dv = tl.zeros([BLOCK_K, DIM_V], tl.float32)

    for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
        place = batch * heads + head
        entry = of_slice * tl.cdiv(kv_len, BLOCK_K) + row
        begin, end = tl.load(program + 2), tl.load(program + 3)
        queries = Q + tl.cast(head, tl.int64) * stride_qh
        douts = DOut + tl.cast(head, tl.int64) * stride_gh
        at_q = tl.cast(place, tl.int64) * q_len
        h = h_origin + head
        k = (k_origin + start + columns)[:, None]
        gain_h = tl.load(gain + clamp(h, gain_size) * gain_stride).to(tl.float32)
        fixed0 = scale * gain_h
        column0 = k < s1
        gate_h_k = tl.load(
            gate + step(h, gate_size0, gate_stride0) + clamp(k, gate_size1) * gate_stride1,
        ).to(tl.float32)
        dgate = tl.zeros([BLOCK_K], tl.float32)

        for i in range(tl.load(Count + entry)):
            record = Spans + (entry.to(tl.int64) * records + i) * 4
            lo, full_lo = tl.load(record), tl.load(record + 1)
            full_hi, hi = tl.load(record + 2), tl.load(record + 3)
            edge = lo
            border, full = full_lo - lo + hi - full_hi, full_hi - full_lo
            # Partial tiles, before and behind the full ones: the mask is a predicate.
            for j in range(lo + bounded(begin, border), lo + bounded(end, border)):
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
                    douts + (at + rows)[:, None] * stride_gs + e[None, :] * stride_gd,
                    mask=inside[:, None] & (e[None, :] < V_DIM), other=0.0,
                )
                dp = tl.dot(values, tl.trans(dout))
                # Several numbers a query in one load: vectors in a product's layout take 16 loads a thread each.
                stats = tl.load(Stats + (at_q + at) * 4 + stats_at, mask=inside[:, None], other=0.0)
                pairs = tl.split(tl.reshape(stats, [BLOCK_Q, 2, 2]))
                lse, delta = tl.split(pairs[0])
                factor, _ = tl.split(pairs[1])
                q = (q_origin + tile * BLOCK_Q + rows)[None, :]
                row0 = q < s1
                # abs(q - k) <= s0 | k < s1 | q < s1
                visible = inside[None, :]
                visible &= (tl.abs(q - k) <= s0) | column0 | row0
                # score * gain[h] + gate[h, k]
                modified = score * fixed0 + gate_h_k
                p = tl.exp2(modified * LOG2E - lse[None, :]) * factor[None, :]
                p = tl.where(visible, p, 0.0)
                dv = tl.dot(p.to(dout.dtype), dout, dv)
                dm = p * (dp - delta[None, :])
                # The gradient of gate[h, k].
                dgate += tl.sum(dm, 1)
                # The derivative of the score mod.
                ds = tl.where(p == 0.0, 0.0, dm * gain_h)
                dk = tl.dot(ds.to(query.dtype), query, dk)
            begin, end = begin - border, end - border
            # Full tiles: every position is visible.
            # `edge` is below `hi`, which the compiler does not know: so it computes the first addresses of the full tiles after the
            # border tiles, and does not hold them in tens of registers.
            full_lo = tl.where(edge < hi, full_lo, hi)
            for tile in range(full_lo + bounded(begin, full), full_lo + bounded(end, full)):
                at = tl.cast(tile * BLOCK_Q, tl.int64)
                query = tl.load(queries + (at + rows)[:, None] * stride_qs + d[None, :] * stride_qd)
                score = tl.dot(keys, tl.trans(query))
                dout = tl.load(
                    douts + (at + rows)[:, None] * stride_gs + e[None, :] * stride_gd,
                    mask=e[None, :] < V_DIM, other=0.0,
                )
                dp = tl.dot(values, tl.trans(dout))
                # Several numbers a query in one load: vectors in a product's layout take 16 loads a thread each.
                stats = tl.load(Stats + (at_q + at) * 4 + stats_at)
                pairs = tl.split(tl.reshape(stats, [BLOCK_Q, 2, 2]))
                lse, delta = tl.split(pairs[0])
                factor, _ = tl.split(pairs[1])
                # score * gain[h] + gate[h, k]
                modified = score * fixed0 + gate_h_k
                p = tl.exp2(modified * LOG2E - lse[None, :]) * factor[None, :]
                dv = tl.dot(p.to(dout.dtype), dout, dv)
                dm = p * (dp - delta[None, :])
                # The gradient of gate[h, k].
                dgate += tl.sum(dm, 1)
                # The derivative of the score mod.
                ds = tl.where(p == 0.0, 0.0, dm * gain_h)
                dk = tl.dot(ds.to(query.dtype), query, dk)
            begin, end = begin - full, end - full

        sums = tl.load(SliceOf + batch * heads + kv_head * GROUP) * tl.num_programs(0) + tl.program_id(0)
        sums = tl.load(Parts + sums.to(tl.int64) * 4 + 1)
        if sums >= 0:
            part_at = (tl.load(At + batch * tl.num_programs(1) + kv_head) + sums).to(tl.int64) * BLOCK_K + columns
            tl.store(Acc + part_at * 228 + 224 + head - kv_head * GROUP, dgate, mask=present)
        else:
            at_k = tl.cast(place, tl.int64) * kv_len + start
            tl.store(Dgate + at_k + columns, dgate, mask=present)

    sums = tl.load(SliceOf + batch * heads + kv_head * GROUP) * tl.num_programs(0) + tl.program_id(0)
    sums = tl.load(Parts + sums.to(tl.int64) * 4 + 1)
    if sums >= 0:
        # The sums of a part: attention_dkv_sums adds those of a row up, in their order.
        part_at = (tl.load(At + batch * tl.num_programs(1) + kv_head) + sums).to(tl.int64) * BLOCK_K + columns
        tl.store(Acc + part_at[:, None] * 228 + d[None, :], dk, mask=present[:, None])
        tl.store(Acc + part_at[:, None] * 228 + (128 + e[None, :]), dv, mask=present[:, None] & (e[None, :] < V_DIM))
        return

    own = (batch * tl.num_programs(1) + kv_head).to(tl.int64) * kv_len + start
    DK += own * HEAD_DIM
    out_at = columns[:, None] * HEAD_DIM + d[None, :]
    tl.store(DK + out_at, (dk * scale).to(keys.dtype), mask=present[:, None])
    DV += own * V_DIM
    out_at = columns[:, None] * V_DIM + e[None, :]
    tl.store(DV + out_at, dv.to(keys.dtype), mask=present[:, None] & (e[None, :] < V_DIM))


@triton.jit(do_not_specialize=["kv_len", "queries"])
def attention_dkv_sums(
    Acc,  # float32 [places, queries, 228]: sums of the parts of rows
    Rows,  # int32 [slices, rows in parts, 3]: a row of tiles, the first place of its sums, and how many parts it has
    SliceOf, At,  # int32 [batch, heads]: the slice, and the first place of a head's sums
    DK, DV,  # [batch, heads, kv_len, dim], contiguous
    Dgate,  # float32 [batch, heads, kv_len]: the gradient of gate[h, k], summed over queries
    scale, kv_len, queries,
):
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = batch * tl.num_programs(1) + head
    listed = Rows + (tl.load(SliceOf + place * GROUP) * (tl.num_programs(0) // queries) + row // queries) * 3
    within, splits = row % queries, tl.load(listed + 2)
    row = tl.load(listed) * queries + within
    if (splits == 0) | (row >= kv_len):
        return  # another head has more rows in parts
    rows = tl.cast(queries, tl.int64)  # of one part
    first_at = (tl.load(At + place) + tl.load(listed + 1)) * rows + within
    row_at = place.to(tl.int64) * kv_len + row
    d = tl.arange(0, 128)
    total = tl.zeros([128], tl.float32)
    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        at = (part * rows + first_at) * 228
        values = tl.load(Acc + at[:, None] + d[None, :], mask=part[:, None] < splits, other=0.0)
        total += tl.sum(values, 0)
    total *= scale
    tl.store(DK + row_at * 128 + d, total.to(DK.dtype.element_ty))
    e = tl.arange(0, 128)
    total = tl.zeros([128], tl.float32)
    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        at = (part * rows + first_at) * 228 + 128
        values = tl.load(
            Acc + at[:, None] + e[None, :],
            mask=(part[:, None] < splits) & (e[None, :] < 96), other=0.0,
        )
        total += tl.sum(values, 0)
    tl.store(DV + row_at * 96 + e, total.to(DV.dtype.element_ty), mask=e < 96)
    for i in range(GROUP):
        share = tl.cast(0.0, tl.float32)
        for first in range(0, splits, PARTS):
            part = first + tl.arange(0, PARTS)
            at = (part * rows + first_at) * 228 + 224 + i
            share += tl.sum(tl.load(Acc + at, mask=part < splits, other=0.0), 0)
        tl.store(Dgate + (place * GROUP + i).to(tl.int64) * kv_len + row, share)
