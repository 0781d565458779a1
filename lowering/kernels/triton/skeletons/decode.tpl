$jit
def attention_decode(
    Q, K, V,  # [batch, heads, length, dim], any strides  $if not paged
    Q,  # [batch, heads, length, dim], any strides  $if paged
    K, V,  # [pages, heads, tokens of a page, dim], any strides  $if paged
    Acc,  # float32 [splits, batch, heads, q_len, dim]: values of each part by their weights
    Tops, Totals,  # float32 [splits, batch, heads, q_len]: largest scores, and sums of weights
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    scale, $numbers,
    $include parameters
):
    row, part = tl.program_id(0) // splits, tl.program_id(0) % splits
    PACK: tl.constexpr = $pack  $if partly
    first_head, batch = tl.program_id(1) * PACK, tl.program_id(2)  $if partly
    kv_head = first_head // GROUP  $if partly
    $own_head, batch = tl.program_id(1), tl.program_id(2)  $if not partly
    entry = tl.load(SliceOf + batch * heads + $first_head) * (tl.num_programs(0) // splits) + row  $if tabled
    $if packs:
        # A tile holds QUERIES queries of each of $of_heads heads that share a key head.
        QUERIES: tl.constexpr = BLOCK_Q // $packed_heads
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
        query$mark = tl.load(Q + query_at[:, None] + $d[None, :] * stride_qd$present)

    $include scalars
    h = (h_origin + head)[:, None]$wide  $if by_head and packs
    h_first = ${open}h_origin + $first_head$close  $if by_group
    $rows_of_q
    $include closed_form
    $hoisted
    $include forward_sums
    $if tabled:

        tiles = 0
        for i in range(tl.load(Count + entry)):
            record = Spans + (entry.to(tl.int64) * records + i) * 4
            tiles += tl.load(record + 3) - tl.load(record)
        # This part's share of the tiles that the row sees.
        begin, end = part * tiles // splits, (part + 1) * tiles // splits

    lo, full_lo = 0, 0  $if everything
    full_hi, hi = kv_len // BLOCK_K, tl.cdiv(kv_len, BLOCK_K)  $if everything
    for i in range(tl.load(Count + entry)):  $if tabled
        $include record
        $if not tabled:
            tiles = hi - lo
            # This part's share of the tiles that the row sees.
            begin, end = part * tiles // splits, (part + 1) * tiles // splits
        border, full = full_lo - lo + hi - full_hi, full_hi - full_lo
        $for tiles:
            # $which
            for $tile in range($range):
                $include forward_tile
            begin, end = begin - border, end - border  $if border
            begin, end = begin - full, end - full  $if tabled and not border

    row_at = ((part.to(tl.int64) * tl.num_programs(2) + batch) * heads + head) * q_len + start + rows
    tl.store(Tops + row_at, top, mask=present)
    tl.store(Totals + row_at, total, mask=present)
    $for values:
        out_at = row_at[:, None] * $v_dim + $d[None, :]
        tl.store(Acc + out_at, acc$mark$survived$present)
