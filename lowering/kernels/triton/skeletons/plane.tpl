$jit
def attention_plane(
    $include captured_signature
):
    head = tl.program_id(1)  $if not all_heads
    batch = tl.program_id(2)  $if not all_batches
    row, tile = tl.program_id(0) // tl.cdiv(kv_len, BLOCK_K), tl.program_id(0) % tl.cdiv(kv_len, BLOCK_K)
    start = row * BLOCK_Q
    $include backward_axes
    $include values
    $include backward_factors
    h = ${open}h_origin + head$close  $if by_head and not all_heads
    b = ${open}b_origin + batch$close  $if by_batch and not all_batches
    $coordinates
    $into
    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)

    for batch in range(batches):  $if all_batches
        for head in range(heads):  $if all_heads
            place = batch * heads + head
            distinct = tl.load(SliceOf + place) * tl.cdiv(q_len, BLOCK_Q)  $if tabled
            b = ${open}b_origin + batch$close  $if by_batch and all_batches
            h = ${open}h_origin + head$close  $if by_head and all_heads
            $include seen
            if $seen:  $if masked
                $include captured_arrays
                $include captured_queries
                $include captured_keys
                $row_and_column
                $include captured_cotangent
                $weight
                total += $share
    present = start + rows < q_len
    inside = tile * BLOCK_K + columns < kv_len
    tl.store(Into + to, total, mask=present[:, None] & inside[None, :])
