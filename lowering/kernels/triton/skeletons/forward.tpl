$part kernel
$jit
def attention_forward(
    $tensors
    $include shared.lse_arrays
    $if listed:
        Acc,  # float32 [places, BLOCK_Q, dim]: of the parts of rows, values by their weights
        Tops, Totals,  # float32 [places, BLOCK_Q]: largest scores, and sums of weights  $if not weighted
        Totals,  # float32 [places, BLOCK_Q]: sums of weights  $if weighted
        Counts,  # int32 [places, BLOCK_Q]: visible keys  $if counting
    $include shared.strides
    scale, $numbers,
    $include shared.parameters
):
    $include shared.row
    start = row * BLOCK_Q
    rows = tl.arange(0, BLOCK_Q)
    kv_head = head // GROUP  $if grouped
    $include axes
    $if not described:
        # Offsets are 64 bits where they are scalars, 32 within a tile.
        Q += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + start.to(tl.int64) * stride_qs
        $include pointers
    present = start + rows < q_len

    $include begin
    $if tabled:
        $# The first record of a row, loaded together with their number: a row has room for one at least.
        used = tl.load(Count + entry)
        record = Spans + entry.to(tl.int64) * records * 4
        lo, full_lo = tl.load(record), tl.load(record + 1)
        full_hi, hi = tl.load(record + 2), tl.load(record + 3)
    $if described:
        query = Q.load([batch, head, start, 0]).reshape([BLOCK_Q, DIM])  # 0 past the lengths
    $else:
        $for head:
            query$mark = tl.load(Q + rows[:, None] * stride_qs + $d[None, :] * stride_qd$mask)

    $include shared.walk:
        $include tile

    $if listed:
        if sums >= 0:
            # The sums of a part: attention_combine combines those of a row, in their order.
            row_at = (tl.load(At + place) + sums).to(tl.int64) * BLOCK_Q + rows
            $include sums_of_part
            return
    $if weighted:
        $include shared.divided
    $else:
        $include shared.lse
        weight = $rescale / $whole
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start.to(tl.int64) * stride_os
    $for values:
        out_at = rows[:, None] * stride_os + $d[None, :] * stride_od
        acc$mark = tl.where(empty, 0.0, acc$mark / divisor)  $if divide
        tl.store(Out + out_at, (acc$mark$survived).to(Out.dtype.element_ty)$mask)  $if weighted
        tl.store(Out + out_at, (acc$mark * weight[:, None]).to(Out.dtype.element_ty)$mask)  $if not weighted
    row_at = place.to(tl.int64) * q_len + start + rows
    $include shared.store_lse

$part axes
columns = tl.arange(0, BLOCK_K)
$axes
$blank

$part pointers
$# To keys and values of a key head; of a tile they are then some rows further.
paged = $pages + batch.to(tl.int64) * $pages_step  $if paged
K += $batch_of_k$kv_head.to(tl.int64) * stride_kh
V += $batch_of_v$kv_head.to(tl.int64) * stride_vh  $if not shared_values
$for head:
    key_at$mark = $key_columns$d[:, None] * stride_kd
$if not shared_values:
    $for values:
        value_at$mark = $value_columns$d[None, :] * stride_vd

$part begin
$include shared.scalars
$rows_of_q
$include shared.closed_form
$hoisted
unit = $in_unit * LOG2E  $if in_unit
top = tl.full([BLOCK_Q], LOWEST, tl.float32)  $if not weighted
count = $counted_before  $if counting
total = tl.zeros([BLOCK_Q], tl.float32)
$for values:
    acc$mark = tl.zeros([BLOCK_Q, $width], tl.float32)

$part sums_of_part
tl.store(Tops + row_at, top, mask=present)  $if not weighted
tl.store(Counts + row_at, count, mask=present)  $if counting
tl.store(Totals + row_at, total, mask=present)
$for values:
    out_at = row_at[:, None] * $v_dim + $d[None, :]
    tl.store(Acc + out_at, acc$mark$survived$mask)

$part tile
$# One tile of keys: scores, their weights by the online softmax, and the weights' product with values.
$if described:
    keys = K.load([batch, $kv_head, tile * BLOCK_K, 0]).reshape([BLOCK_K, DIM]).T
$else:
    at = tl.cast(tile * BLOCK_K, tl.int64)  $if not paged
    at = tile * BLOCK_K + columns  $if numbered
    $if paged:
        $# A page number is the user's: a number outside of the pool is read as one inside.
        page = tl.load(paged + $number_of_page * $pages_stride)
        page = clamp(page, pool).to(tl.int64)
        at = $place_in_page
    $if seen_first:
        $include of_mask
        # A NaN in keys that no query sees must not reach the sums: they are values too.
        $include seen
    $for head:
        keys$mark = tl.load(K + $first_key + key_at$mark$mask)$cast
$for head:
    score = tl.dot(query$mark, keys$mark$sum$precision)$scale
$if not seen_first:
    $include of_mask
$score_mod
score = tl.where(visible, score, -INFINITY)  $if border and not weighted
$if border and unwritten and not seen_first:
    # Values that no query sees may never have been written: a NaN there must not reach the sums.
    $include seen
$if weighted:
    p = tl.where(visible, p, 0.0)  $if border
    total += tl.sum(p, 1)
    $count
$else:
    peak = tl.maximum(top, tl.max(score, 1) * $unit)
    p = tl.exp2(score * $unit - peak[:, None])
    rescale = tl.exp2(top - peak)
    total = total * rescale + tl.sum(p, 1)
$dropout
$weight
$for values:
    values$mark = keys$key_mark.T  $if shared_values
    values$mark = tl.load(V + $first_value + value_at$mark$mask)$cast  $if not described and not shared_values
    values = V.load([batch, $kv_head, tile * BLOCK_K, 0]).reshape([BLOCK_K, $width])  $if described
$for values:
    acc$mark = tl.dot($product)
top = peak  $if not weighted

$part of_mask
$column
$visible

$part seen
seen = tl.max((visible & present[:, None]).to(tl.int32), 0) > 0
