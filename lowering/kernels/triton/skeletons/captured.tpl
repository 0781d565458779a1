$part signature
Q, K, V, DOut,  # [batch, heads, length, dim], any strides
$include shared.gradient_signature

$part arrays
$# Where the arrays of `batch` and `head` begin.
kv_head = head // GROUP  $if grouped
q_at = Q + tl.cast(batch, tl.int64) * stride_qb + tl.cast(head, tl.int64) * stride_qh
k_at = K + tl.cast(batch, tl.int64) * stride_kb + tl.cast($kv_head, tl.int64) * stride_kh
v_at = V + tl.cast(batch, tl.int64) * stride_vb + tl.cast($kv_head, tl.int64) * stride_vh
dout_at = DOut + tl.cast(batch, tl.int64) * stride_gb + tl.cast(head, tl.int64) * stride_gh

$part queries
present = start + rows < q_len
at = tl.cast(start, tl.int64)
query = tl.load(q_at + at * stride_qs + (rows[:, None] * stride_qs + d[None, :] * stride_qd)$own_d)
dout = tl.load(dout_at + at * stride_gs + (rows[:, None] * stride_gs + $e[None, :] * stride_gd)$own_e)
at_q = at + tl.cast(place, tl.int64) * q_len
$include shared.stats

$part keys
inside = tile * BLOCK_K + columns < kv_len
at = tl.cast(tile * BLOCK_K, tl.int64)
keys = tl.load(k_at + at * stride_ks + (columns[:, None] * stride_ks + d[None, :] * stride_kd)$walked_d)
score = tl.dot(query, tl.trans(keys)$precision)$scale
values = tl.load(v_at + at * stride_vs + (columns[:, None] * stride_vs + $e[None, :] * stride_vd)$walked_e)
dp = tl.dot(dout, tl.trans(values)$precision)

$part cotangent
$# dm, the cotangent of the modified score. The mask is a predicate on every tile, full ones too.
$visible
$score_mod
p = tl.where(visible, tl.exp2($exponent - lse) * factor, 0.0)  $if not weighted
$dropout
$if weighted:
    dm = tl.where(visible, dp$kept + added, 0.0)
$else:
    # Where p is 0, dm is 0, even beside infinity.
    dm = tl.where(p == 0.0, 0.0, p * (dp$kept - delta))

$part seen
$# Whether the mask shows any of the tile `tile` of row `row`, which begins at `start`.
$if closed:
    $include shared.corners
    $formulas
    # Some query of the tile sees keys first..last.
    $bounds
$if tabled:
    seen = 0
    entry = tl.cast(distinct + row, tl.int64)
    for i in range(tl.load(Count + entry)):
        record = Spans + (entry * records + i) * 4
        seen += ((tl.load(record) <= tile) & (tile < tl.load(record + 3))).to(tl.int32)

$part diagonal
$jit
def attention_diagonal(
    $include signature
):
    head, batch = tl.program_id(1), tl.program_id(2)
    place = batch * heads + head
    distinct = tl.load(SliceOf + place) * tl.cdiv(q_len, BLOCK_Q)  $if tabled
    $include shared.gradient_axes
    # Tiles on one block diagonal: row - tile is shift. A part is `share` rows of tiles.
    diagonals = tl.cdiv(q_len, BLOCK_Q) + tl.cdiv(kv_len, BLOCK_K) - 1
    part, diagonal = tl.program_id(0) // diagonals, tl.program_id(0) % diagonals
    shift = diagonal + 1 - tl.cdiv(kv_len, BLOCK_K)
    begin = tl.maximum(part * share, shift)
    end = tl.minimum((part + 1) * share, tl.cdiv(q_len, BLOCK_Q))
    end = tl.minimum(end, shift + tl.cdiv(kv_len, BLOCK_K))
    $include arrays

    $include shared.scalars
    $include shared.gradient_factors
    $hoisted
    $for totals:
        $total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)

    for row in range(begin, end):
        tile = row - shift
        start = row * BLOCK_Q
        $include seen
        if $seen:  $if masked
            $include queries
            $include keys
            $coordinates
            $row_and_column
            $include cotangent
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

$part plane
$jit
def attention_plane(
    $include signature
):
    head = tl.program_id(1)  $if not all_heads
    batch = tl.program_id(2)  $if not all_batches
    row, tile = tl.program_id(0) // tl.cdiv(kv_len, BLOCK_K), tl.program_id(0) % tl.cdiv(kv_len, BLOCK_K)
    start = row * BLOCK_Q
    $include shared.gradient_axes
    $include shared.values
    $include shared.gradient_factors
    $line_of_h  $if not all_heads
    $line_of_b  $if not all_batches
    $coordinates
    $into
    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)

    for batch in range(batches):  $if all_batches
        for head in range(heads):  $if all_heads
            place = batch * heads + head
            distinct = tl.load(SliceOf + place) * tl.cdiv(q_len, BLOCK_Q)  $if tabled
            $line_of_b  $if all_batches
            $line_of_h  $if all_heads
            $include seen
            if $seen:  $if masked
                $include arrays
                $include queries
                $include keys
                $row_and_column
                $include cotangent
                $weight
                total += $share
    present = start + rows < q_len
    inside = tile * BLOCK_K + columns < kv_len
    tl.store(Into + to, total, mask=present[:, None] & inside[None, :])

$part scatter
$# Two kernels that walk the tiles of keys of a tile of queries: `total` sums magnitudes of shares, which give the unit
$# of the fixed point; then `scatter` adds the shares to a table.
$jit
def $name(
    $include signature
):
    $include shared.row
    start = row * BLOCK_Q
    $include shared.gradient_axes
    $include arrays

    $include shared.scalars
    $include shared.gradient_factors
    $include queries
    $own
    $include shared.closed_form
    $hoisted
    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)  $if total
    per = tl.load(PerUnit)  $if fixed

    $include shared.all_tiles
    for i in range(tl.load(Count + entry)):  $if tabled
        $include shared.record
        for tile in range(lo, hi):
            $include keys
            $row_and_column
            $include cotangent
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
