$jit
def attention_forward(
    Q, K, V,  # tensor descriptors of [batch, heads, length, dim], in blocks of a head's tile  $if described
    Out,  # [batch, heads, length, dim], any strides  $if described
    Q, K, V, Out,  # [batch, heads, length, dim], any strides  $if not paged and not described
    Q, Out,  # [batch, heads, length, dim], any strides  $if paged
    K, V,  # [pages, heads, tokens of a page, dim], any strides  $if paged
    Lse,  # float32 [batch, heads, q_len], contiguous
    Top,  # the largest scores, as Lse  $if row_max
    Low,  # the rounding error of Lse  $if lse_residual
    Sinks,  # float32 [heads]: one more logit in the denominator  $if sinks
    $if listed:
        Acc,  # float32 [places, BLOCK_Q, dim]: of the parts of rows, values by their weights
        Tops, Totals,  # float32 [places, BLOCK_Q]: largest scores, and sums of weights
    stride_qb, stride_qh, stride_qs, stride_qd,  $if not described
    stride_kb, stride_kh, stride_ks, stride_kd,  $if not described
    stride_vb, stride_vh, stride_vs, stride_vd,  $if not described
    stride_ob, stride_oh, stride_os, stride_od,
    scale, $numbers,
    $include parameters
):
    $include row
    start = row * BLOCK_Q
    rows = tl.arange(0, BLOCK_Q)
    kv_head = head // GROUP  $if grouped
    $include forward_arrays
    $if not described:
        Q += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + start.to(tl.int64) * stride_qs
        $include forward_keys
    present = start + rows < q_len

    $include scalars
    $rows_of_q
    $include closed_form
    $hoisted
    $include forward_sums
    $include first_record
    query = Q.load([batch, head, start, 0]).reshape([BLOCK_Q, DIM])  # 0 past the lengths  $if described
    $for head:
        query$mark = tl.load(Q + rows[:, None] * stride_qs + $d[None, :] * stride_qd$mask)  $if not described

    lo, full_lo = 0, 0  $if everything
    full_hi, hi = kv_len // BLOCK_K, tl.cdiv(kv_len, BLOCK_K)  $if everything
    for i in range(used):  $if tabled
        $include next_record
        border, full = full_lo - lo + hi - full_hi, full_hi - full_lo  $if listed
        $for tiles:
            # $which
            for $tile in range($range):
                $include forward_tile
            begin, end = begin - border, end - border  $if listed and border
            begin, end = begin - full, end - full  $if listed and not border

    $if listed:
        if sums >= 0:
            # The sums of a part: attention_combine combines those of a row, in their order.
            row_at = (tl.load(At + place) + sums).to(tl.int64) * BLOCK_Q + rows
            tl.store(Tops + row_at, top, mask=present)
            tl.store(Totals + row_at, total, mask=present)
            $for values:
                out_at = row_at[:, None] * $v_dim + $d[None, :]
                tl.store(Acc + out_at, acc$mark$survived$mask)
            return
    $include lse
    weight = $rescale / $whole
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start.to(tl.int64) * stride_os
    $for values:
        out_at = rows[:, None] * stride_os + $d[None, :] * stride_od
        tl.store(Out + out_at, (acc$mark * weight[:, None]).to(Out.dtype.element_ty)$mask)
    row_at = place.to(tl.int64) * q_len + start + rows
    tl.store(Lse + row_at, lse, mask=present)
    tl.store(Top + row_at, largest, mask=present)  $if row_max
    tl.store(Low + row_at, low, mask=present)  $if lse_residual
