$jit
def attention_decode(
    Q, K, V,  # [batch, heads, length, dim], any strides  $if not paged
    Q,  # [batch, heads, length, dim], any strides  $if paged
    K, V,  # [pages, heads, tokens of a page, dim], any strides  $if paged
    $if balanced:
        Acc,  # float32 [programs, heads, queries, dim]: values of each part by their weights
        Tops, Totals,  # float32 [programs, heads, queries]: largest scores, and sums of weights
        Parts,  # int32 [tiles of heads, rows of tiles, 2]: the first of a row's programs, and how many it has
    $if parted and not balanced:
        Acc,  # float32 [splits, batch, heads, q_len, dim]: values of each part by their weights
        Tops, Totals,  # float32 [splits, batch, heads, q_len]: largest scores, and sums of weights
    $if not parted:
        Out,  # [batch, heads, length, dim], any strides
        Lse,  # float32 [batch, heads, q_len], contiguous
        Top,  # the largest scores, as Lse  $if row_max
        Low,  # the rounding error of Lse  $if lse_residual
        Sinks,  # float32 [heads]: one more logit in the denominator  $if sinks
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_ob, stride_oh, stride_os, stride_od,  $if not parted
    scale, $numbers,
    $include parameters
):
    rows_of_tiles = tl.num_programs(0) // splits  $if parted and not balanced
    part, row = tl.program_id(0) // rows_of_tiles, tl.program_id(0) % rows_of_tiles  $if parted and not balanced
    row = tl.program_id(0)  $if not parted
    PACK: tl.constexpr = $pack  $if partly
    first_head, batch = tl.program_id(1) * PACK, tl.program_id(2)  $if partly and not balanced
    first_head = tl.program_id(0) * PACK  $if partly and balanced
    kv_head = first_head // GROUP  $if partly
    $own_head, batch = tl.program_id(1), tl.program_id(2)  $if not partly and not balanced
    $own_head = tl.program_id(0)  $if not partly and balanced
    entry = tl.load(SliceOf + batch * heads + $first_head) * $rows_of_tiles + row  $if tabled and not balanced
    $if packs:
        # A tile holds QUERIES queries of each of $of_heads heads that share a key head.
        QUERIES: tl.constexpr = BLOCK_Q // $packed_heads
    $if balanced:

        # A sequence has a program for each share of the tiles that its rows see in the mean, and at least one for each
        # row. These lines find the sequence, row and part of this program. Rows that read the same keys are neighbours.
        # Programs of all heads come before the next program of a head. Programs without a row start last, when they
        # delay no others.
        program = tl.program_id(1)
        QUERIES: tl.constexpr = BLOCK_Q  $if not packs
        rows_of_tiles = tl.cdiv(q_len, QUERIES)
        lanes = tl.arange(0, LANES)
        every = 0
        for first in range(0, batches, LANES):
            $tiles_seen
            every += tl.sum(of_sequences, 0)
        share = tl.maximum(tl.cdiv(every, batches * splits), 1)  # of a part, of all rows of a sequence
        batch, part, parts, row = -1, 0, 0, 0
        begun = 0
        for first in range(0, batches, LANES):
            $tiles_seen
            # A part may be an eighth longer than the share: sequences that are about as long have as many.
            needed = tl.maximum(tl.cdiv(of_sequences, share + share // 8), 1)
            needed = tl.where(first + lanes < batches, needed, 0)
            before = begun + (tl.cumsum(needed, 0) - needed) * rows_of_tiles
            behind = program - before
            own = (behind >= 0) & (behind < needed * rows_of_tiles)
            batch += tl.sum(tl.where(own, first + lanes + 1, 0), 0)
            part += tl.sum(tl.where(own, behind // rows_of_tiles, 0), 0)
            row += tl.sum(tl.where(own, behind % rows_of_tiles, 0), 0)
            parts += tl.sum(tl.where(own, needed, 0), 0)
            begun += tl.sum(needed, 0) * rows_of_tiles
        if batch < 0:
            return  # all rows have their programs
        at_row = Parts + ((tl.program_id(0) * batches + batch) * rows_of_tiles + row) * 2
        if part == 0:
            tl.store(at_row, program)
            tl.store(at_row + 1, parts)
        entry = tl.load(SliceOf + batch * heads + $first_head) * rows_of_tiles + row
    $if packs:
        start = row * QUERIES
        packed = tl.arange(0, BLOCK_Q)
        rows, head = packed // $packed_heads, $first_head + packed % $packed_heads
    $else:
        start = row * BLOCK_Q
        rows = tl.arange(0, BLOCK_Q)
        kv_head = head // GROUP  $if grouped
    $include forward_arrays
    Q += batch.to(tl.int64) * stride_qb
    query_at = head.to(tl.int64) * stride_qh + (start + rows).to(tl.int64) * stride_qs
    $include forward_keys
    present = (packed < QUERIES * $packed_heads) & (start + rows < q_len)  $if packs
    present = start + rows < q_len  $if not packs
    $for head:
        query$mark = tl.load(Q + query_at[:, None] + $d[None, :] * stride_qd$mask)

    $include scalars
    h = (h_origin + head)[:, None]$wide  $if by_head and packs
    h_first = ${open}h_origin + $first_head$close  $if by_group
    $rows_of_q
    $include closed_form
    $hoisted
    $include forward_sums
    $if tabled and parted:

        tiles = 0
        for i in range(tl.load(Count + entry)):
            record = Spans + (entry.to(tl.int64) * records + i) * 4
            tiles += tl.load(record + 3) - tl.load(record)
        # This part's share of the tiles that the row sees.
        begin, end = part * tiles // $parts, (part + 1) * tiles // $parts

    lo, full_lo = 0, 0  $if everything
    full_hi, hi = kv_len // BLOCK_K, tl.cdiv(kv_len, BLOCK_K)  $if everything
    for i in range(tl.load(Count + entry)):  $if tabled
        $include record
        $if parted and not tabled:
            tiles = hi - lo
            # This part's share of the tiles that the row sees.
            begin, end = part * tiles // splits, (part + 1) * tiles // splits
        border, full = full_lo - lo + hi - full_hi, full_hi - full_lo  $if parted
        $for tiles:
            # $which
            for $tile in range($range):
                $include forward_tile
            begin, end = begin - border, end - border  $if parted and border
            begin, end = begin - full, end - full  $if parted and tabled and not border

    $if not parted:
        $include lse
        weight = $rescale / $whole
        Out += batch.to(tl.int64) * stride_ob
        out_at = head.to(tl.int64) * stride_oh + (start + rows).to(tl.int64) * stride_os
        $for values:
            out = (acc$mark * weight[:, None]).to(Out.dtype.element_ty)
            tl.store(Out + out_at[:, None] + $d[None, :] * stride_od, out$mask)
        row_at = (batch.to(tl.int64) * heads + head) * q_len + start + rows
        tl.store(Lse + row_at, lse, mask=present)
        tl.store(Top + row_at, largest, mask=present)  $if row_max
        tl.store(Low + row_at, low, mask=present)  $if lse_residual
    $else:
        $if balanced:
            queries = tl.minimum(q_len, QUERIES)
            row_at = (program.to(tl.int64) * heads + head) * queries + rows
        row_at = ((part.to(tl.int64) * tl.num_programs(2) + batch) * heads + head) * q_len + start + rows  $if not balanced
        tl.store(Tops + row_at, top, mask=present)
        tl.store(Totals + row_at, total, mask=present)
        $for values:
            out_at = row_at[:, None] * $v_dim + $d[None, :]
            tl.store(Acc + out_at, acc$mark$survived$mask)
