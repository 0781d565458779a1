$# One tile of keys: scores, their weights by the online softmax, and the weights' product with values.
tile = tl.where(j < full_lo, j, j - full_lo + full_hi)  $if border and masked
tile = full_hi + j  $if border and not masked
inside = $within  $if border
at = tl.cast(tile * BLOCK_K, tl.int64)  $if not paged and not described
at = tile * BLOCK_K + columns  $if numbered
$# A page number is the user's: a number outside of the pool is read as one inside.
page = tl.load(paged + clamp($key // $page_size, $pages_size) * $pages_stride)  $if paged and border
page = tl.load(paged + $key // $page_size * $pages_stride)  $if paged and not border
page = clamp(page, pool).to(tl.int64)  $if paged
at = at % $page_size  $if numbered
at = tl.cast(tile * BLOCK_K % $page_size, tl.int64)  $if paged and not numbered
$for head:
    keys$mark = tl.load(K + $first_key + key_at$mark$mask)$cast  $if not described
    keys = K.load([batch, $kv_head, tile * BLOCK_K, 0]).reshape([BLOCK_K, DIM]).T  $if described
$for head:
    score = tl.dot(query$mark, keys$mark$sum$precision)$scale
$column
$visible
$score_mod
score = tl.where(visible, score, -INFINITY)  $if border
$if border and unwritten:
    # Values that no query sees may never have been written: a NaN there must not reach the sums.
    seen = tl.max((visible & present[:, None]).to(tl.int32), 0) > 0
peak = tl.maximum(top, tl.max(score, 1) * $unit)
p = tl.exp2(score * $unit - peak[:, None])
rescale = tl.exp2(top - peak)
total = total * rescale + tl.sum(p, 1)
$dropout
$weight
scaled = $scaled  $if weighed
p = tl.where(visible, p * scaled, 0.0)  $if weighed and border
p *= scaled  $if weighed and not border
$for values:
    values$mark = tl.load(V + $first_value + value_at$mark$mask)$cast  $if not described
    values = V.load([batch, $kv_head, tile * BLOCK_K, 0]).reshape([BLOCK_K, $width])  $if described
$for values:
    acc$mark = tl.dot(p.to(values$mark.dtype), values$mark, acc$mark * rescale[:, None]$precision)
top = peak
