$# Parts that several Triton kernels have; what one kernel alone has stands in its own file. Holes are filled by
$# `writer.Writer.holes` unless a part says otherwise.

$part module
$# The head of a module, filled by `module.module`.
"""$title in Triton, written by frisket for

    $plan

$dims.
$launches
"""

import triton
import triton.language as tl

$constants

$part gradient_signature
Stats,  # float32 [batch, heads, q_len, 4], contiguous: lse, factor and delta, of attention_delta  $if not weighted
Stats,  # float32 [batch, heads, q_len], contiguous: the cotangent of each row's sum of weights  $if weighted
$results
$buffers
Acc,  # float32 [places, $own_block, $numbers_of_part]: sums of the parts of rows  $if listed
$include strides
scale, $numbers,
$include parameters

$part parameters
$# What every kernel with rows of tiles takes behind its tensors and strides.
$if tabled:
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in $walked tiles
    Count, Order,  # int32 [slices, rows]: records in use; rows in order of work  $if ordered
    Count,  # int32 [slices, rows]: records in use  $if not ordered
    SliceOf,  # int32 [batch, heads]
$if listed:
    Parts,  # int32 [slices, programs, 4]: a row, the place of a part's sums or -1, and which tiles of the row to walk
    At,  # int32 [batch, heads]: the first place of a head's sums
$scalars
ORIGIN_PER_BATCH: tl.constexpr,  # q_origin and k_origin are int32 [batch]  $if moved
NEAR: tl.constexpr,  # the entries of a table that a tile reads are within 2**31 of one another  $if near
BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,  # powers of two

$part strides
$for strides:
    stride_${tensor}b, stride_${tensor}h, stride_${tensor}s, stride_${tensor}d,

$part lse_arrays
Lse,  # float32 [batch, heads, q_len], contiguous
Top,  # the largest scores, as Lse  $if row_max
Low,  # the rounding error of Lse  $if lse_residual
Sinks,  # float32 [heads]: one more logit in the denominator  $if sinks

$part row
$# The program's tile, among those of all heads and batches: the grid is (rows, heads, batch), or (heads, rows, batch),
$# where the longest rows of all heads come before the shorter ones of any.
head, batch = tl.program_id($of_head), tl.program_id(2)
place = batch * heads + head
$if listed:
    $include part
    distinct = of_slice * $rows_of_slice
$else:
    distinct = tl.load(SliceOf + place) * tl.num_programs($of_row)  $if tabled
    row = tl.load(Order + distinct + tl.program_id($of_row))  # longest first  $if ordered and tabled
    row = tl.num_programs($of_row) - 1 - tl.program_id($of_row)  # longest first  $if ordered and not tabled
    row = tl.program_id($of_row)  $if not ordered
entry = distinct + row  $if tabled

$part part
$# The program's row of tiles, or its part of one, among those of the head that is at `$place`.
of_slice = tl.load(SliceOf + $place)
program = Parts + (of_slice * tl.num_programs($of_row) + tl.program_id($of_row)).to(tl.int64) * 4
row, sums = tl.load(program), tl.load(program + 1)  $if not swapped
row = tl.load(program)  $if swapped
begin, end = tl.load(program + 2), tl.load(program + 3)  $if not several
if row < 0:
    return  # another head has more programs

$part listed
$# The program's row among those that are in parts: the numbers of its first part, and how far those of others stand.
listed = Rows + (tl.load(SliceOf + $of_place) * (tl.num_programs(0) // queries) + row // queries) * 3
within, splits = row % queries, tl.load(listed + 2)
row = tl.load(listed) * queries + within
if (splits == 0) | (row >= $length):
    return  # another head has more rows in parts
rows = tl.cast(queries, tl.int64)  # of one part
first_at = (tl.load(At + place) + tl.load(listed + 1)) * rows + within

$part all_tiles
$# The tiles of a row where there is no mask.
$if everything:
    lo, full_lo = 0, 0
    full_hi, hi = $walked_len // $walked_block, tl.cdiv($walked_len, $walked_block)

$part record
$if tabled:
    record = Spans + (entry.to(tl.int64) * records + i) * 4
    lo, full_lo = tl.load(record), tl.load(record + 1)
    full_hi, hi = tl.load(record + 2), tl.load(record + 3)

$part scalars
$# Origins, sizes, slots, `b` and `h` as the expressions read them.
$include values
$line_of_b
$line_of_h

$part values
$if vectors:
    if ORIGIN_PER_BATCH:
        $vectors
$conversions

$part corners
q_first = ${open}q_origin + start$close
q_last = ${open}q_origin + tl.minimum(start + $queries, q_len) - 1$close
k_first = k_origin$wide
k_last = ${open}k_origin + kv_len - 1$close

$part closed_form
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

$part lse
$# `lse` of a row from its largest score and sum of weights.
largest = tl.where(total == 0.0, -INFINITY, top * LN2)  $if row_max and guard
largest = top * LN2  $if row_max and not guard
$if sinks:
    # The sink is one more logit, without a value.
    sink = tl.load(Sinks + head) * LOG2E
    peak = tl.maximum(top, sink)
    rescale = tl.exp2(top - peak)
    total = total * rescale + tl.exp2(sink - peak)
    top = peak
$if guard:
    # A row without a visible key gives 0, and lse -inf.
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, -INFINITY, (top + tl.log2(total)) * LN2)
$else:
    lse = (top + tl.log2(total)) * LN2
$if lse_residual:
    # By the product that attention_delta stores: a maximum is not joined to the sum without rounding.
    near = tl.maximum(lse * LOG2E, LOWEST)
    low = (top - near + tl.log2(total)) * LN2
    low = tl.where(empty, 0.0, low)  $if guard

$part of_weights
$# The cotangents of a tile of weights: 0 where a pair is hidden, and not where a weight is.
$if weighted and inner:
    $dm = dp$kept + added
    $dm = tl.where(visible, $dm, 0.0)  $if border

$part divided
$# Of a weighted row the sum of weights stands in the place of lse, and the number of visible keys in that of the largest
$# score. A row whose divisor is 0, or that sees no key, is 0.
lse = total
largest = tl.zeros_like(total)  $if row_max and not counting
largest = count.to(tl.float32)  $if row_max and counting
low = tl.zeros_like(total)  $if lse_residual
$divide_lines
$if divide:
    _, divisor = tl.broadcast(total$of_sums, tl.cast($divide, tl.float32))
    empty = divisor == 0.0  $if not counting
    empty = (divisor == 0.0) | (count$of_sums == 0)  $if counting
    divisor = tl.where(empty, 1.0, divisor)

$part store_lse
tl.store(Lse + row_at, lse$of_rows)
tl.store(Top + row_at, largest$of_rows)  $if row_max
tl.store(Low + row_at, low$of_rows)  $if lse_residual

$part gradient_axes
rows = tl.arange(0, BLOCK_Q)
columns = tl.arange(0, BLOCK_K)
d = tl.arange(0, DIM)
e = tl.arange(0, DIM_V)  $if apart

$part gradient_factors
unit = $in_unit * LOG2E  $if in_unit
survivor = 1.0 / $survival  $if survival

$part stats
$# The numbers of attention_delta for a tile of queries; `at_q` counts its first row over all heads.
added = tl.load(Stats + at_q + rows, mask=present, other=0.0)[:, None]  $if weighted
lse = tl.load(Stats + (at_q + rows) * 4, mask=present, other=0.0)[:, None]  $if not weighted
factor = tl.load(Stats + (at_q + rows) * 4 + 1, mask=present, other=0.0)[:, None]  $if not weighted
delta = tl.load(Stats + (at_q + rows) * 4 + 2, mask=present, other=0.0)[:, None]  $if not weighted

$part walk
$# The tiles of a row, or of a part of one, where `$body` works on one tile. Partial tiles of a range come before its full
$# ones. `ranges` is the number of ranges in the table; `loaded`: the first of them is known before the loop.
$include all_tiles
for i in range($ranges):  $if tabled
    if i > 0:  $if tabled and loaded
        $include record
    edge = lo  $if edges
    $counts
    $for tiles:
        # $which
        $if edges and not border:
            $include after_border
        for $tile in $over($range$hints):
            $tile_of_step
            $body
        $past

$part after_border
# `edge` is below `hi`, which the compiler does not know: so it computes the first addresses of the full tiles after the
# border tiles, and does not hold them in tens of registers.
full_lo = tl.where(edge < hi, full_lo, hi)
