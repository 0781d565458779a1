$jit
def attention_diagonal(
    $include captured_signature
):
    head, batch = tl.program_id(1), tl.program_id(2)
    place = batch * heads + head
    distinct = tl.load(SliceOf + place) * tl.cdiv(q_len, BLOCK_Q)  $if tabled
    $include backward_axes
    # Tiles on one block diagonal: row - tile is shift. A part is `share` rows of tiles.
    diagonals = tl.cdiv(q_len, BLOCK_Q) + tl.cdiv(kv_len, BLOCK_K) - 1
    part, diagonal = tl.program_id(0) // diagonals, tl.program_id(0) % diagonals
    shift = diagonal + 1 - tl.cdiv(kv_len, BLOCK_K)
    begin = tl.maximum(part * share, shift)
    end = tl.minimum((part + 1) * share, tl.cdiv(q_len, BLOCK_Q))
    end = tl.minimum(end, shift + tl.cdiv(kv_len, BLOCK_K))
    $include captured_arrays

    $include scalars
    $include backward_factors
    $hoisted
    $for totals:
        $total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)

    for row in range(begin, end):
        tile = row - shift
        start = row * BLOCK_Q
        $include seen
        if $seen:  $if masked
            $include captured_queries
            $include captured_keys
            $coordinates
            $row_and_column
            $include captured_cotangent
            $for totals:
                $weight
                $total += $share

    # Row i is turned by i places. Column c then holds the diagonal c below the main one, in rows from c on, and the
    # diagonal BLOCK_K - c above it.
    turned = (rows[:, None] - columns[None, :]) & (BLOCK_K - 1)
    ahead = rows[:, None] >= columns[None, :]
    parts = tl.num_programs(0) // diagonals
    $for totals:
        moved = tl.gather($total, turned, 1)
        to = (tl.cast($at, tl.int64) * parts + part) * 2 * diagonals + diagonal
        to = Sums + to * BLOCK_K + columns
        tl.store(to, tl.sum(tl.where(ahead, moved, 0.0), 0))
        tl.store(to + diagonals * BLOCK_K, tl.sum(tl.where(ahead, 0.0, moved), 0))
