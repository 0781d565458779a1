$part kernel
$# dk, dv, and sums of captured gradients over queries. Tensors are [keys, queries]: so neither p nor ds has to be
$# transposed before it is multiplied. `inner`: the product of dout and v is computed, which dv alone does not take.
$jit
def $name(
    $arrays,  # $of_arrays
    $include shared.gradient_signature
):
    $if grouped:
        kv_head, batch = tl.program_id($of_head), tl.program_id(2)
        $if listed:
            $include shared.part
        $if tabled and ordered:
            first = tl.load(SliceOf + batch * heads + kv_head * GROUP) * tl.num_programs($of_row)
            row = tl.load(Order + first + tl.program_id($of_row))  # longest first, by the first head of the group
        row = tl.program_id($of_row)  $if unordered
    $else:
        $include shared.row
    start = row * BLOCK_K
    $include shared.gradient_axes
    stats_at = rows[:, None] * 4 + tl.arange(0, $numbers_a_load)[None, :]  $if not weighted

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

    $include shared.values
    $line_of_b
    $include shared.gradient_factors
    dk = tl.zeros([BLOCK_K, DIM], tl.float32)  $if dk
    dv = tl.zeros([BLOCK_K, $dim_e], tl.float32)  $if dv
    $blank  $if grouped
    for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):  $if grouped
        place = batch * heads + head  $if grouped
        entry = tl.load(SliceOf + place) * tl.num_programs($of_row) + row  $if grouped and tabled and not listed
        $if several and listed:
            entry = of_slice * $rows_of_slice + row
            begin, end = tl.load(program + 2), tl.load(program + 3)
        $if not described:
            queries = Q + tl.cast(head, tl.int64) * stride_qh
            douts = DOut + tl.cast(head, tl.int64) * stride_gh
        at_q = tl.cast(place, tl.int64) * q_len
        $line_of_h
        $own
        $hoisted
        $zeros

        $include shared.walk:
            at = tl.cast(tile * BLOCK_Q, tl.int64)
            $if described:
                query = Q.load([batch, head, tile * BLOCK_Q, 0]).reshape([BLOCK_Q, DIM])
            $else:
                query = tl.load(queries + (at + rows)[:, None] * stride_qs + d[None, :] * stride_qd$walked_d)
            score = tl.dot(keys, tl.trans(query)$precision)$scale
            $if dout:
                dout = DOut.load([batch, head, tile * BLOCK_Q, 0]).reshape([BLOCK_Q, $dim_e])  $if described
                dout = tl.load(douts + (at + rows)[:, None] * stride_gs + $e[None, :] * stride_gd$walked_e)  $if not described
            dp = tl.dot(values, tl.trans(dout)$precision)  $if inner
            $if weighted:
                added = tl.load(Stats + at_q + at + rows$stats)[None, :]  $if inner
            $else:
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
            p = tl.exp2($exponent - lse[None, :]) * factor[None, :]  $if not weighted
            p = tl.where(visible, p, 0.0)  $if border and not weighted
            p = tl.where(visible, modified, 0.0)  $if border and weighted and dv
            p = modified  $if not border and weighted and dv
            $dropout
            dv = tl.dot($dv_product)  $if dv
            $if inner and by_pairs and not weighted:
                delta, _ = tl.split(tl.load(Stats + (at_q + at) * 4 + 2 + stats_at$stats))
            $dm = p * (dp$kept - delta[None, :])  $if inner and not weighted
            $include shared.of_weights
            $sums
            $derivative
            dk = tl.dot($dk_product)  $if dk
        $if stores:

            $if listed:
                $include place_of_sums
                if sums >= 0:
                    part_at = (tl.load(At + $own_place) + sums).to(tl.int64) * BLOCK_K + columns
                    $partial_totals
            else:  $if listed
                at_k = tl.cast(place, tl.int64) * kv_len + start
                $stores
    $if results and listed:

        $include place_of_sums
        if sums >= 0:
            # The sums of a part: ${name}_sums adds those of a row up, in their order.
            part_at = (tl.load(At + $own_place) + sums).to(tl.int64) * BLOCK_K + columns
            $partial
            return
    $if results:

        own = $own_row
        $if dk:
            DK += own * HEAD_DIM
            out_at = columns[:, None] * $row_step_of_k + d[None, :]
            tl.store(DK + out_at, (dk * scale).to(keys.dtype)$store_d)
        $if dv:
            DV += own * $v_dim
            out_at = columns[:, None] * $row_step_of_v + $e[None, :]
            tl.store(DV + out_at, dv.to(keys.dtype)$store_e)

$part place_of_sums
$# The place of a part's sums, or -1. It is loaded behind the loops, so that it takes none of their registers.
sums = tl.load(SliceOf + $place) * tl.num_programs($of_row) + tl.program_id($of_row)
sums = tl.load(Parts + sums.to(tl.int64) * 4 + 1)

$part sums
$# The kernel that adds the sums of the parts of rows up, filled by `PartSums.kernel`; dq has such parts too.
@triton.jit(do_not_specialize=["$length", "queries"])
def $name(
    Acc,  # float32 [places, queries, $numbers]: sums of the parts of rows
    Rows,  # int32 [slices, rows in parts, 3]: a row of tiles, the first place of its sums, and how many parts it has
    SliceOf, At,  # int32 [batch, heads]: the slice, and the first place of a head's sums
    $results,  # [batch, heads, $length, dim], contiguous  $if results
    $buffers
    scale, $length, queries,
):
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = batch * tl.num_programs(1) + head
    $include shared.listed
    row_at = place.to(tl.int64) * $length + row
    $for arrays:
        $d = tl.arange(0, $dim)
        total = tl.zeros([$dim], tl.float32)
        for first in range(0, splits, PARTS):
            part = first + tl.arange(0, PARTS)
            at = (part * rows + first_at) * $numbers$offset
            values = tl.load(Acc + at[:, None] + $d[None, :]$load)
            total += tl.sum(values, 0)
        total *= scale  $if scaled
        tl.store($result + row_at * $width + $d, total.to($result.dtype.element_ty)$store)
    $for totals:
        for i in range(GROUP):  $if several
            share = tl.cast(0.0, tl.float32)
            for first in range(0, splits, PARTS):
                part = first + tl.arange(0, PARTS)
                at = (part * rows + first_at) * $numbers$offset
                share += tl.sum(tl.load(Acc + at, mask=part < splits, other=0.0), 0)
            tl.store($place_of_total, share)
