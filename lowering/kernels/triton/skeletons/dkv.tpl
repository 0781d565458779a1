$# dk, dv, and sums of captured gradients over queries. Tensors are [keys, queries]: so neither p nor ds has to be
$# transposed before it is multiplied.
$jit
def $name(
    $arrays,  # tensor descriptors of [batch, heads, length, dim], in blocks of a head's tile  $if described
    $arrays,  # [batch, heads, length, dim], any strides  $if not described
    Stats,  # float32 [batch, heads, q_len, 4], contiguous: lse, factor and delta, of attention_delta
    $results,  # [batch, kv_len, key heads, dim], contiguous  $if results and by_length
    $results,  # [batch, key heads, kv_len, dim], contiguous  $if results and not by_length
    $buffers
    Acc,  # float32 [places, BLOCK_K, $numbers_of_part]: sums of the parts of rows  $if listed
    stride_qb, stride_qh, stride_qs, stride_qd,  $if not described
    stride_kb, stride_kh, stride_ks, stride_kd,  $if not described
    stride_vb, stride_vh, stride_vs, stride_vd,  $if inner and not described
    stride_gb, stride_gh, stride_gs, stride_gd,  $if not described
    scale, $numbers,
    $include parameters
):
    $if grouped:
        kv_head, batch = tl.program_id($of_head), tl.program_id(2)
        $if listed:
            $include part
        $if tabled and ordered:
            first = tl.load(SliceOf + batch * heads + kv_head * GROUP) * tl.num_programs($of_row)
            row = tl.load(Order + first + tl.program_id($of_row))  # longest first, by the first head of the group
        row = tl.program_id($of_row)  $if not tabled and not listed
        row = tl.program_id($of_row)  $if tabled and not ordered and not listed
    $else:
        $include row
    start = row * BLOCK_K
    $include backward_axes
    stats_at = rows[:, None] * 4 + tl.arange(0, $numbers_a_load)[None, :]

    $if not described:
        # Offsets are 64 bits where they are scalars, 32 within a tile.
        Q += batch.to(tl.int64) * stride_qb
        DOut += batch.to(tl.int64) * stride_gb
        K += batch.to(tl.int64) * stride_kb + $kv_head.to(tl.int64) * stride_kh + start.to(tl.int64) * stride_ks
        $if inner:
            V += batch.to(tl.int64) * stride_vb + $kv_head.to(tl.int64) * stride_vh + start.to(tl.int64) * stride_vs
    present = start + columns < kv_len
    $if described:
        keys = K.load([batch, $kv_head, start, 0]).reshape([BLOCK_K, DIM])  # 0 past the lengths
        values = V.load([batch, $kv_head, start, 0]).reshape([BLOCK_K, $dim_e])  $if inner
    $else:
        keys = tl.load(K + columns[:, None] * stride_ks + d[None, :] * stride_kd$own_d)
        values = tl.load(V + columns[:, None] * stride_vs + $e[None, :] * stride_vd$own_e)  $if inner

    $include values
    b = ${open}b_origin + batch$close  $if by_batch
    $include backward_factors
    dk = tl.zeros([BLOCK_K, DIM], tl.float32)  $if dk
    dv = tl.zeros([BLOCK_K, $dim_e], tl.float32)  $if dv
    $blank  $if grouped
    for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):  $if grouped
        place = batch * heads + head  $if grouped
        entry = tl.load(SliceOf + place) * tl.num_programs($of_row) + row  $if grouped and tabled and not listed
        $if several and listed:
            entry = of_slice * $rows_of_slice + row
            begin, end = tl.load(program + 2), tl.load(program + 3)
        queries = Q + tl.cast(head, tl.int64) * stride_qh  $if not described
        douts = DOut + tl.cast(head, tl.int64) * stride_gh  $if not described
        at_q = tl.cast(place, tl.int64) * q_len
        h = ${open}h_origin + head$close  $if by_head
        $own
        $hoisted
        $zeros

        lo, full_lo = 0, 0  $if everything
        full_hi, hi = q_len // BLOCK_Q, tl.cdiv(q_len, BLOCK_Q)  $if everything
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
                    inside = tile * BLOCK_Q + rows < q_len  $if border
                    at = tl.cast(tile * BLOCK_Q, tl.int64)
                    $if described:
                        query = Q.load([batch, head, tile * BLOCK_Q, 0]).reshape([BLOCK_Q, DIM])
                    $else:
                        query = tl.load(queries + (at + rows)[:, None] * stride_qs + d[None, :] * stride_qd$walked_d)
                    score = tl.dot(keys, tl.trans(query)$precision)$scale
                    $if dout and described:
                        dout = DOut.load([batch, head, tile * BLOCK_Q, 0]).reshape([BLOCK_Q, $dim_e])
                    $if dout and not described:
                        dout = tl.load(douts + (at + rows)[:, None] * stride_gs + $e[None, :] * stride_gd$walked_e)
                    dp = tl.dot(values, tl.trans(dout)$precision)  $if inner
                    # Several numbers a query in one load: vectors in a product's layout take 16 loads a thread each.
                    $if by_pairs:
                        lse, factor = tl.split(tl.load(Stats + (at_q + at) * 4 + stats_at$stats))
                    $else:
                        stats = tl.load(Stats + (at_q + at) * 4 + stats_at$stats)
                        pairs = tl.split(tl.reshape(stats, [BLOCK_Q, 2, 2]))
                        lse, delta = tl.split(pairs[0])
                        factor, _ = tl.split(pairs[1])
                    $column
                    $visible
                    $score_mod
                    p = tl.exp2($exponent - lse[None, :]) * factor[None, :]
                    p = tl.where(visible, p, 0.0)  $if border
                    $dropout
                    dv = tl.dot((p * kept).to(dout.dtype), dout, dv$precision)  $if dv and dropped
                    dv = tl.dot(p.to(dout.dtype), dout, dv$precision)  $if dv and not dropped
                    $if inner and by_pairs:
                        delta, _ = tl.split(tl.load(Stats + (at_q + at) * 4 + 2 + stats_at$stats))
                    $dm = p * (dp * kept - delta[None, :])  $if inner and dropped
                    $dm = p * (dp - delta[None, :])  $if inner and not dropped
                    $sums
                    $derivative
                    dk = tl.dot($ds.to(query.dtype), query, dk$precision)  $if dk
                begin, end = begin - border, end - border  $if listed and border
                begin, end = begin - full, end - full  $if listed and not border
        $if stores and listed:

            $include part_sums
            if sums >= 0:
                part_at = (tl.load(At + $own_place) + sums).to(tl.int64) * BLOCK_K + columns
                $partial_totals
            else:
                at_k = tl.cast(place, tl.int64) * kv_len + start
                $stores
        $if stores and not listed:

            at_k = tl.cast(place, tl.int64) * kv_len + start
            $stores
    $if results and listed:

        $include part_sums
        if sums >= 0:
            # The sums of a part: ${name}_sums adds those of a row up, in their order.
            part_at = (tl.load(At + $own_place) + sums).to(tl.int64) * BLOCK_K + columns
            $partial
            return
    $if results:

        own = (tl.cast(batch, tl.int64) * kv_len + start) * tl.num_programs($of_head) + $kv_head  $if by_length
        own = (batch * tl.num_programs($of_head) + $kv_head).to(tl.int64) * kv_len + start  $if not by_length
        $if dk:
            DK += own * HEAD_DIM
            out_at = columns[:, None] * (tl.num_programs($of_head) * HEAD_DIM) + d[None, :]  $if by_length
            out_at = columns[:, None] * HEAD_DIM + d[None, :]  $if not by_length
            tl.store(DK + out_at, (dk * scale).to(keys.dtype)$store_d)
        $if dv:
            DV += own * $v_dim
            out_at = columns[:, None] * (tl.num_programs($of_head) * $v_dim) + $e[None, :]  $if by_length
            out_at = columns[:, None] * $v_dim + $e[None, :]  $if not by_length
            tl.store(DV + out_at, dv.to(keys.dtype)$store_e)
