$part kernel
$jit
def attention_decode(
    $tensors
    $if parted:
        Acc,  # float32 [$parts_of_rows, dim]: values of each part by their weights
        Tops, Totals,  # float32 [$parts_of_rows]: largest scores, and sums of weights  $if not weighted
        Totals,  # float32 [$parts_of_rows]: sums of weights  $if weighted
        Counts,  # int32 [$parts_of_rows]: visible keys  $if counting
    $else:
        Out,  # [batch, heads, length, dim], any strides
        $include shared.lse_arrays
    Parts,  # int32 [tiles of heads, rows of tiles, 2]: the first of a row's programs, and how many it has  $if balanced
    $include shared.strides
    scale, $numbers,
    $include shared.parameters
):
    row = tl.program_id(0)  $if not parted
    $if parted and not balanced:
        rows_of_tiles = tl.num_programs(0) // splits
        part, row = tl.program_id(0) // rows_of_tiles, tl.program_id(0) % rows_of_tiles
    PACK: tl.constexpr = $pack  $if partly
    $own_head, batch = tl.program_id(1)$heads_of_program, tl.program_id(2)  $if not balanced
    $own_head = tl.program_id(0)$heads_of_program  $if balanced
    kv_head = first_head // GROUP  $if partly
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
            of_sequences = tiles_seen(
                first + lanes, rows_of_tiles, batches, heads, $first_head, Spans, Count, SliceOf, records
            )
            every += tl.sum(of_sequences, 0)
        share = tl.maximum(tl.cdiv(every, batches * splits), 1)  # of a part, of all rows of a sequence
        batch, part, parts, row = -1, 0, 0, 0
        begun = 0
        for first in range(0, batches, LANES):
            of_sequences = tiles_seen(
                first + lanes, rows_of_tiles, batches, heads, $first_head, Spans, Count, SliceOf, records
            )
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
    $include forward.axes
    # Offsets are 64 bits where they are scalars, 32 within a tile.
    Q += batch.to(tl.int64) * stride_qb
    query_at = head.to(tl.int64) * stride_qh + (start + rows).to(tl.int64) * stride_qs
    $include forward.pointers
    present = $present
    $for head:
        query$mark = tl.load(Q + query_at[:, None] + $d[None, :] * stride_qd$mask)

    $include forward.begin
    $if tabled and parted:

        tiles = 0
        for i in range(tl.load(Count + entry)):
            record = Spans + (entry.to(tl.int64) * records + i) * 4
            tiles += tl.load(record + 3) - tl.load(record)
        # This part's share of the tiles that the row sees.
        begin, end = part * tiles // $parts, (part + 1) * tiles // $parts

    $include shared.walk:
        $include forward.tile

    $if parted:
        $if again:
            # The rows once more, written in another way: the compiler would keep the first ones through the loops.
            packed = tl.arange(BLOCK_Q, 2 * BLOCK_Q) - BLOCK_Q
            rows, head = packed // $packed_heads, $first_head + packed % $packed_heads
            present = $present
        queries = tl.minimum(q_len, QUERIES)  $if balanced
        row_at = (program.to(tl.int64) * heads + head) * queries + rows  $if balanced
        row_at = ((part.to(tl.int64) * tl.num_programs(2) + batch) * heads + head) * q_len + start + rows  $if not balanced
        $include forward.sums_of_part
    $else:
        $if weighted:
            $include shared.divided
        $else:
            $include shared.lse
            weight = $rescale / $whole
        Out += batch.to(tl.int64) * stride_ob
        out_at = head.to(tl.int64) * stride_oh + (start + rows).to(tl.int64) * stride_os
        $for values:
            acc$mark = tl.where(empty, 0.0, acc$mark / divisor)  $if divide
            out = (acc$mark$survived).to(Out.dtype.element_ty)  $if weighted
            out = (acc$mark * weight[:, None]).to(Out.dtype.element_ty)  $if not weighted
            tl.store(Out + out_at[:, None] + $d[None, :] * stride_od, out$mask)
        row_at = (batch.to(tl.int64) * heads + head) * q_len + start + rows
        $include shared.store_lse

$part combine
$# The kernel that combines the parts of rows, of attention_decode or of attention_forward.
$jit  $if weighted
@triton.jit(do_not_specialize=[$varying])  $if not weighted
def attention_combine(
    Acc, Tops, Totals,  # the parts, of $source  $if not weighted
    $if weighted:
        Acc, Totals,  # the parts, of $source
        Counts,  # their visible keys  $if counting
    $if listed:
        Rows,  # int32 [slices, rows in parts, 3]: a row of tiles, the first place of its sums, and how many parts it has
        SliceOf, At,  # int32 [batch, heads]: the slice, and the first place of a head's sums
    Parts,  # int32 [tiles of heads, rows of tiles, 2]: the first of a row's parts, and how many it has  $if balanced
    Out,  # [batch, heads, q_len, dim], any strides
    $include shared.lse_arrays
    stride_ob, stride_oh, stride_os, stride_od,
    heads, q_len, $number,  $if not balanced
    heads, q_len,  $if balanced
    queries, pack,  # of a tile, and the heads in it  $if balanced
    $if weighted:
        $scalars
        ORIGIN_PER_BATCH: tl.constexpr,  # q_origin is int32 [batch]  $if moved
):
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    $if listed:
        place = batch * heads + head
        $include shared.listed
    row_at = (batch.to(tl.int64) * heads + head) * q_len + row
    rows = tl.num_programs(2).to(tl.int64) * heads * q_len  # of one part  $if split
    $if balanced:
        rows_of_tiles = tl.cdiv(q_len, queries)
        at_row = Parts + ((head // pack * tl.num_programs(2) + batch) * rows_of_tiles + row // queries) * 2
        begin, splits = tl.load(at_row), tl.load(at_row + 1)
        rows = heads.to(tl.int64) * tl.minimum(q_len, queries)  # of one program
        first_at = begin * rows + head * tl.minimum(q_len, queries) + row % queries
        rows *= rows_of_tiles  # from a part of a row to its next part
    $d = tl.arange(0, $dim)
    top = tl.cast(LOWEST, tl.float32)  $if not weighted
    count = tl.cast(0, tl.int32)  $if weighted and counting
    total = tl.cast(0.0, tl.float32)
    acc = tl.zeros([$dim], tl.float32)

    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        at = part * rows + $part_at
        tops = tl.load(Tops + at, mask=part < splits, other=LOWEST)  $if not weighted
        totals = tl.load(Totals + at, mask=part < splits, other=0.0)
        values = tl.load(Acc + at[:, None] * $v_dim + $d[None, :]$load)
        $if weighted:
            count += tl.sum(tl.load(Counts + at, mask=part < splits, other=0), 0)  $if counting
            total += tl.sum(totals, 0)
            acc += tl.sum(values, 0)
        $else:
            peak = tl.maximum(top, tl.max(tops, 0))
            weight = tl.exp2(tops - peak)
            rescale = tl.exp2(top - peak)
            total = total * rescale + tl.sum(weight * totals, 0)
            acc = acc * rescale + tl.sum(weight[:, None] * values, 0)
            top = peak

    $if weighted:
        $include shared.values
        $line_of_b
        $line_of_h
        $line_of_q
        $include shared.divided
    $else:
        $include shared.lse
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + row.to(tl.int64) * stride_os
    out = acc * ($rescale / total)  $if not weighted
    out = tl.where(empty, 0.0, acc / divisor)  $if weighted and divide
    out = acc  $if weighted and not divide
    tl.store(Out + $d * stride_od, out.to(Out.dtype.element_ty)$store)
    $include shared.store_lse
