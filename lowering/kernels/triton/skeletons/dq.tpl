$# dq, and sums of captured gradients over keys.
$jit
def attention_dq(
    Q, K, V, DOut,  # tensor descriptors of [batch, heads, length, dim], in blocks of a head's tile  $if described
    Q, K, V, DOut,  # [batch, heads, length, dim], any strides  $if not described
    Stats,  # float32 [batch, heads, q_len, 4], contiguous: lse, factor and delta, of attention_delta
    DQ,  # [batch, q_len, heads, dim], contiguous  $if dq and by_length
    DQ,  # [batch, heads, q_len, dim], contiguous  $if dq and not by_length
    $buffers
    Acc,  # float32 [places, BLOCK_Q, $numbers_of_part]: sums of the parts of rows  $if listed
    stride_qb, stride_qh, stride_qs, stride_qd,  $if not described
    stride_kb, stride_kh, stride_ks, stride_kd,  $if not described
    stride_vb, stride_vh, stride_vs, stride_vd,  $if not described
    stride_gb, stride_gh, stride_gs, stride_gd,  $if not described
    scale, $numbers,
    $include parameters
):
    $include row
    start = row * BLOCK_Q
    $include backward_axes
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
    $include stats
    delta *= factor

    $include scalars
    $own
    $include closed_form
    $hoisted
    $include backward_factors
    dq = tl.zeros([BLOCK_Q, DIM], tl.float32)  $if dq
    $zeros

    lo, full_lo = 0, 0  $if everything
    full_hi, hi = kv_len // BLOCK_K, tl.cdiv(kv_len, BLOCK_K)  $if everything
    for i in range(tl.load(Count + entry)):  $if tabled
        $include record
        edge = lo
        border, full = full_lo - lo + hi - full_hi, full_hi - full_lo  $if listed
        $for tiles:
            # $which
            $if not border:
                $include after_border
            for $tile in range($range):
                tile = tl.where(j < full_lo, j, j - full_lo + full_hi)  $if border and masked
                tile = full_hi + j  $if border and not masked
                edge = tile  $if border
                inside = tile * BLOCK_K + columns < kv_len  $if border
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
                p = tl.where(visible, tl.exp2($exponent - lse), 0.0)  $if border
                p = tl.exp2($exponent - lse)  $if not border
                $dropout
                $dm = p * (dp * kept * factor - delta)  $if dropped
                $dm = p * (dp * factor - delta)  $if not dropped
                $sums
                $derivative
                dq = tl.dot($ds.to(keys.dtype), keys, dq$precision)  $if dq
            begin, end = begin - border, end - border  $if listed and border
            begin, end = begin - full, end - full  $if listed and not border

    $if listed:
        if sums >= 0:
            # The sums of a part: attention_dq_sums adds those of a row up, in their order.
            part_at = (tl.load(At + place) + sums).to(tl.int64) * BLOCK_Q + rows
            $partial
            $partial_totals
            return
    $if dq and by_length:
        DQ += ((tl.cast(batch, tl.int64) * q_len + start) * heads + head) * HEAD_DIM
        out_at = rows[:, None] * (heads * HEAD_DIM) + d[None, :]
    $if dq and not by_length:
        DQ += at_q * HEAD_DIM
        out_at = rows[:, None] * HEAD_DIM + d[None, :]
    tl.store(DQ + out_at, (dq * scale).to(query.dtype)$store_d)  $if dq
    $stores
