$# The record of a row, from formulas.
$if closed:

    $include corners
    $formulas
    # Some query of the tile sees keys first..last, every one sees full_first..full_last.
    $bounds
    hi = (tl.maximum(last, -1) + BLOCK_K) // BLOCK_K
    lo = tl.minimum(first // BLOCK_K, hi)
    full_lo = tl.minimum((tl.minimum(full_first, kv_len) + BLOCK_K - 1) // BLOCK_K, hi)
    full_lo = tl.maximum(full_lo, lo)
    full_hi = tl.minimum(tl.maximum(full_last + 1, 0) // BLOCK_K, hi)
    full_hi = tl.maximum(full_hi, full_lo)
    $if wide:
        lo = lo.to(tl.int32)
        full_lo = full_lo.to(tl.int32)
        full_hi = full_hi.to(tl.int32)
        hi = hi.to(tl.int32)
    $blank
