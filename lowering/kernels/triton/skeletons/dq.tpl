$part delta
$# What both gradient kernels read of a query. `dlse` names a cotangent of lse.
@triton.jit(do_not_specialize=["heads", "q_len"])  $if not apart
@triton.jit(do_not_specialize=["heads", "q_len", "length"])  $if apart
def attention_delta(
    Out, DOut,  # [batch, heads, q_len, dim], any strides
    Lse, Low$and_dlse,  # float32 [batch, heads, q_len], contiguous
    Stats,  # float32 [batch, heads, q_len, 4]: lse in log2, a factor, rowsum(dout * out)$less_dlse, nothing  $if not apart
    Stats,  # float32 [3, batch, heads, length]: lse in log2, a factor, rowsum(dout * out)$less_dlse  $if apart
    stride_ob, stride_oh, stride_os, stride_od,
    stride_gb, stride_gh, stride_gs, stride_gd,
    heads, q_len,  $if not apart
    heads, q_len, length,  $if apart
    BLOCK_Q: tl.constexpr,  # powers of two
):
    head, batch = tl.program_id(1), tl.program_id(2)
    start = tl.program_id(0) * BLOCK_Q
    rows = tl.arange(0, BLOCK_Q)
    $e = tl.arange(0, $dim)
    present = start + rows < q_len
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start.to(tl.int64) * stride_os
    out = tl.load(Out + rows[:, None] * stride_os + $e[None, :] * stride_od$mask).to(tl.float32)
    DOut += batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh + start.to(tl.int64) * stride_gs
    dout = tl.load(DOut + rows[:, None] * stride_gs + $e[None, :] * stride_gd$mask).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    at = (batch * heads + head).to(tl.int64) * q_len + start + rows
    delta -= tl.load(DLse + at, mask=present, other=0.0)  $if and_dlse
    lse = tl.load(Lse + at, mask=present, other=0.0)
    $if guard:
        # A row that sees no key has no gradient, even where dout is NaN.
        empty = lse == -INFINITY
        delta, lse = tl.where(empty, 0.0, delta), tl.where(empty, 0.0, lse)
    low = tl.load(Low + at, mask=present, other=0.0)
    # A weight is exp2(score - lse) * factor: the factor makes up for the rounding of lse.
    near = tl.maximum(lse * LOG2E, LOWEST)  # the forward's product: a maximum is not joined to the sum
    lse = near + low * LOG2E
    factor = tl.exp2(lse - near - low * LOG2E)
    $if apart:
        # Rows past the queries up to `length` are 0: their weights are, and no NaN is to be multiplied by them.
        at = (batch * heads + head).to(tl.int64) * length + start + rows
        plane = (tl.num_programs(2) * heads).to(tl.int64) * length
        tl.store(Stats + at, lse, mask=start + rows < length)
        tl.store(Stats + at + plane, factor, mask=start + rows < length)
        tl.store(Stats + at + 2 * plane, delta, mask=start + rows < length)
    $else:
        tl.store(Stats + at * 4, lse, mask=present)
        tl.store(Stats + at * 4 + 1, factor, mask=present)
        tl.store(Stats + at * 4 + 2, delta, mask=present)

$part kernel
$# dq, and sums of captured gradients over keys.
$jit
def attention_dq(
    Q, K, V, DOut,  # $of_arrays
    $include shared.gradient_signature
):
    $include shared.row
    start = row * BLOCK_Q
    $include shared.gradient_axes
    kv_head = head // GROUP  $if grouped

    $if not described:
        # Offsets are 64 bits where they are scalars, 32 within a tile.
        Q += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + start.to(tl.int64) * stride_qs
        K += batch.to(tl.int64) * stride_kb + $kv_head.to(tl.int64) * stride_kh
        V += batch.to(tl.int64) * stride_vb + $kv_head.to(tl.int64) * stride_vh
        DOut += batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh + start.to(tl.int64) * stride_gs
    at_q = place.to(tl.int64) * q_len + start
    $if not described:
        key_at = columns[:, None] * stride_ks + d[None, :] * stride_kd
        value_at = columns[:, None] * stride_vs + $e[None, :] * stride_vd
    present = start + rows < q_len
    $if described:
        query = Q.load([batch, head, start, 0]).reshape([BLOCK_Q, DIM])  # 0 past the lengths
        dout = DOut.load([batch, head, start, 0]).reshape([BLOCK_Q, $dim_e])
    $else:
        query = tl.load(Q + rows[:, None] * stride_qs + d[None, :] * stride_qd$own_d)
        dout = tl.load(DOut + rows[:, None] * stride_gs + $e[None, :] * stride_gd$own_e)
    $include shared.stats
    delta *= factor  $if not weighted

    $include shared.scalars
    $own
    $include shared.closed_form
    $hoisted
    $include shared.gradient_factors
    dq = tl.zeros([BLOCK_Q, DIM], tl.float32)  $if dq
    $zeros

    $include shared.walk:
        $if described:
            keys = K.load([batch, $kv_head, tile * BLOCK_K, 0]).reshape([BLOCK_K, DIM])
            values = V.load([batch, $kv_head, tile * BLOCK_K, 0]).reshape([BLOCK_K, $dim_e])
        $else:
            at = tl.cast(tile * BLOCK_K, tl.int64)
            keys = tl.load(K + at * stride_ks + key_at$walked_d)
            values = tl.load(V + at * stride_vs + value_at$walked_e)
        score = tl.dot(query, tl.trans(keys)$precision)$scale
        dp = tl.dot(dout, tl.trans(values)$precision)
        $column
        $visible
        $score_mod
        p = tl.where(visible, tl.exp2($exponent - lse), 0.0)  $if border and not weighted
        p = tl.exp2($exponent - lse)  $if not border and not weighted
        $dropout
        $dm = p * (dp$kept * factor - delta)  $if not weighted
        $include shared.of_weights
        $sums
        $derivative
        dq = tl.dot($dq_product)  $if dq

    $if listed:
        if sums >= 0:
            # The sums of a part: attention_dq_sums adds those of a row up, in their order.
            part_at = (tl.load(At + place) + sums).to(tl.int64) * BLOCK_Q + rows
            $partial
            $partial_totals
            return
    $if dq:
        DQ += $own_row * HEAD_DIM
        out_at = rows[:, None] * $row_step + d[None, :]
        tl.store(DQ + out_at, (dq * scale).to(query.dtype)$store_d)
    $stores
