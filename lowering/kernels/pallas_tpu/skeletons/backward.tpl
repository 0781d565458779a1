$# The work of the Pallas TPU kernels of the backward, with holes that `pallas_tpu.backward` fills.

$part above
def rows_by_rows(x, y):
    """[n, d] times [m, d]: [n, m]."""
    return lax.dot_general(x, y, (((1,), (1,)), ((), ())), precision=EXACT, preferred_element_type=Float)


def rows_by_columns(x, y):
    """[n, m] times [m, d]: [n, d]."""
    x = x.astype(y.dtype)
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=EXACT, preferred_element_type=Float)

$part tile
$here
s = rows_by_rows(q_ref[0, $part], k_ref[0, 0])$scale  $if down
s = rows_by_rows(k_ref[0, 0], q_ref[0, $part])$scale  $if not down
$score
if partial:  # the mask
    seen = jnp.ones(s.shape, Float)  $if weighted
    $hide
    $if down:
        if kv_len % BLOCK_K:  # memory behind the last key may hold anything
            inside = lax.broadcasted_iota(Int, (1, BLOCK_K), 1) < kv_len - k_tile * BLOCK_K
            m = jnp.where(inside, m, -jnp.inf)  $if not weighted
            seen = jnp.where(inside, seen, 0.0)  $if weighted
    $else:
        if q_len % BLOCK_Q:  # memory behind the last query may hold anything
            inside = lax.broadcasted_iota(Int, (1, BLOCK_Q), 1) < q_len - q_tile * BLOCK_Q
            m = jnp.where(inside, m, -jnp.inf)  $if not weighted
            seen = jnp.where(inside, seen, 0.0)  $if weighted
$if weighted:
    p = jnp.where(seen == 0, 0, m) if partial else m  $if dv
$else:
    p = jnp.exp(m - wide(lse[$own], BLOCK_K))  $if down
    p = jnp.exp(m - of_rows_ref[0, 0, 0:1])  $if not down
    if partial:  $if not careful
        p = jnp.where(m == -jnp.inf, 0, p)  # even if lse is NaN
$survivors
$# p is done with before dp is computed; rows behind the last query may hold NaN, and 0 times NaN is NaN
$if dv:
    douts = dout_ref[0, 0]
    if partial and q_len % BLOCK_Q:
        inside = lax.broadcasted_iota(Int, (BLOCK_Q, 1), 0) < q_len - q_tile * BLOCK_Q
        douts = jnp.where(inside, douts, jnp.zeros_like(douts))
    dv[...] += rows_by_columns(p$kept, douts)
$if inner:
    dp = rows_by_rows(dout_ref[0, $part], v_ref[0, 0])  $if down
    dm = p * (dp$kept - wide(delta[$own], BLOCK_K))  $if down and not weighted
    dm = dp$kept - wide(delta[$own], BLOCK_K)  $if down and weighted
    dp = rows_by_rows(v_ref[0, 0], dout_ref[0, $part])  $if not down
    dm = p * (dp$kept - of_rows_ref[0, 0, 1:2])  $if not down and not weighted
    dm = dp$kept - of_rows_ref[0, 0, 1:2]  $if not down and weighted
    $if weighted:
        if partial:
            dm = jnp.where(seen == 0, 0, dm)
    $else:
        if partial:  $if not careful
            dm = jnp.where(p == 0, 0, dm)

$part present
present = $added
if q_len % BLOCK_Q:  # nothing is behind the last query
    inside = lax.broadcasted_iota(Int, (BLOCK_Q, 1), 0) < q_len - q_tile * BLOCK_Q
    present = jnp.where(inside, present, 0)

$part distance
summed = by_distance(present)
line = k_tile * (BLOCK_K // 128) + (q_tiles - 1 - q_tile) * (BLOCK_Q // 128)
for i in range((BLOCK_Q + BLOCK_K) // 128):
    ${name}_ref[0, 0, pl.ds(line + i, 1)] += summed[:, 128 * i : 128 * (i + 1)]

$part signature
def $entry(
    query, key, value, dout, lse, delta, walk, origin, sizes, slots=(), tables=(), $arguments
):

$part of_rows
of_rows = jnp.stack([lse, delta], 2)

$part doc
"""Of arrays [batch, length, heads, dim], and lse and delta [batch, heads, q_len] where no lse is -inf. The
rounding error of lse, `low`, is in dout and delta, which are multiplied by exp(-low):

$results
"""

$part at_row
def along(of):
    """The same tile of an array with the positions along."""

    def at(*step):
        b, h, tile, _ = of(*step)
        return b, h, 0, tile

    return at

$part finite
def finite(x):
    """What a hidden position's 0 may be multiplied with: 0 times NaN or infinity is NaN."""
    wide = x.astype(Float)
    return jnp.where(jnp.isfinite(wide), wide, 0).astype(x.dtype)

$part laid
def laid(column):
    """[n, 1] as [1, n]; n is a multiple of the 128 lanes."""
    return jnp.broadcast_to(column, (column.shape[0], 128)).T[:1]

$part by_distance
def by_distance(x):
    """[n, m] summed along k - q: [1, n + m], entry k - q + n."""
    n, m = x.shape
    x = jnp.concatenate([x, jnp.zeros((n, n), Float)], axis=1)
    while len(x) > 1:  # the lower half moves up, and so to the left
        if len(x) % 2:
            x = jnp.concatenate([x, jnp.zeros((1, n + m), Float)])
        half = len(x) // 2
        x = x[:half] + pltpu.roll(x[half:], n + m - half, 1)
    return pltpu.roll(x, n, 1)

$part by_difference
def by_difference(sums, q_len, kv_len):
    """[.., .., q_len + kv_len - 1], entry q - k + kv_len - 1, of sums by k - q from that of the last row's end."""
    first = pl.cdiv(q_len, BLOCK_Q) * BLOCK_Q
    return sums.reshape(*sums.shape[:2], -1)[..., first - q_len + 1 : first + kv_len][..., ::-1]
