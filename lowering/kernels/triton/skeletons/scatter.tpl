$# Two kernels that walk the tiles of keys of a tile of queries: `total` sums magnitudes of shares, which give the unit
$# of the fixed point; then `scatter` adds the shares to a table.
$jit
def $name(
    $include captured_signature
):
    $include row
    start = row * BLOCK_Q
    $include backward_axes
    $include captured_arrays

    $include scalars
    $include backward_factors
    $include captured_queries
    $own
    $include closed_form
    $hoisted
    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)  $if total
    per = tl.load(PerUnit)  $if fixed

    lo, full_lo = 0, 0  $if everything
    full_hi, hi = kv_len // BLOCK_K, tl.cdiv(kv_len, BLOCK_K)  $if everything
    for i in range(tl.load(Count + entry)):  $if tabled
        $include record
        for tile in range(lo, hi):
            $include captured_keys
            $row_and_column
            $include captured_cotangent
            $weight
            share = $share  $if weighed
            total += tl.abs($added)  $if total
            $into
            $if fixed:
                # A sum of integers does not depend on their order.
                counted = tl.floor($added * per + 0.5).to(tl.int64)
                tl.atomic_add(Counted + to, counted, mask=$added != 0.0, sem="relaxed")
            tl.atomic_add(Into + to, $added, mask=$added != 0.0, sem="relaxed")  $if atomic
    tl.store(Total + place * tl.num_programs($of_row) + row, tl.sum(total))  $if total
