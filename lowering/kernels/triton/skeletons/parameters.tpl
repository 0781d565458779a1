Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in $walked tiles  $if tabled
Count, Order,  # int32 [slices, rows]: records in use; rows in order of work  $if tabled and ordered
Count,  # int32 [slices, rows]: records in use  $if tabled and not ordered
SliceOf,  # int32 [batch, heads]  $if tabled
$if listed:
    Parts,  # int32 [slices, programs, 4]: a row, the place of a part's sums or -1, and which tiles of the row to walk
    At,  # int32 [batch, heads]: the first place of a head's sums
records,  $if tabled
$origins  # of this call in the whole problem  $if origins
$sizes  $if sizes
$slots  $if slots
$tables
ORIGIN_PER_BATCH: tl.constexpr,  # q_origin and k_origin are int32 [batch]  $if moved
NEAR: tl.constexpr,  # the entries of a table that a tile reads are within 2**31 of one another  $if near
BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # powers of two
