$# The text of the Pallas TPU kernels of the backward, with holes that `pallas_tpu.backward` fills.

$part skeleton
$definitions


$locate


def rows_by_rows(x, y):
    """[n, d] times [m, d]: [n, m]."""
    return lax.dot_general(x, y, (((1,), (1,)), ((), ())), precision=EXACT, preferred_element_type=Float)


def rows_by_columns(x, y):
    """[n, m] times [m, d]: [n, d]."""
    x = x.astype(y.dtype)
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=EXACT, preferred_element_type=Float)


def kernel(
    $refs
    $outputs, $scratch, *, $static
):
    batch, $program, step = (pl.program_id(axis) for axis in range(3))
    ($located), (visits, full, starts, ends) = at(batch, $program, step, $walk)
    $head
    $clear

    @pl.when(starts)
    def start():
        $start

    def visit(partial):
        $visit

    @pl.when(visits & full)
    def visit_full():
        visit(partial=False)

    @pl.when(visits & jnp.logical_not(full))
    def visit_partial():
        visit(partial=True)
    $finish


def $entry(
    query, key, value, dout, lse, delta, walk, origin, sizes, slots=(), tables=(), $arguments
):
    """Of arrays [batch, length, heads, dim], and lse and delta [batch, heads, q_len] where no lse is -inf. The
    rounding error of lse, `low`, is in dout and delta, which are multiplied by exp(-low):

    $said
    """
    batch, q_len, heads, dim = query.shape
    kv_len, kv_heads, v_dim = value.shape[1:]
    $cast
    query, key, value, dout = (x.swapaxes(1, 2) for x in (query, key, value, dout))
    of_rows = jnp.stack([lse, delta], 2)
    steps, $walk = walk
    q_tiles, k_tiles = pl.cdiv(q_len, BLOCK_Q), pl.cdiv(kv_len, BLOCK_K)
    $before
    scalars = ($passed)
    at = functools.partial(locate, $sizes)

    def place(b, h, step, *scalars):
        """(batch, query head, tile of queries, tile of keys) of a step."""
        ($located), _ = at(b, h, step, *scalars[:$tables])
        return $placed

    def at_query(b, h, *step):
        _, $query, q_tile, _ = place(b, h, *step)
        return b, $of_query, q_tile, 0

    def at_key(b, h, *step):
        _, _, _, k_tile = place(b, h, *step)
        return b, $kv_head, k_tile, 0

    def along(of):
        """The same tile of an array with the positions along."""

        def at(*step):
            b, h, tile, _ = of(*step)
            return b, h, 0, tile

        return at

    found = pl.pallas_call(
        functools.partial(kernel, $given),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=$number,
            grid=(batch, $programs, steps),
            in_specs=[
                pl.BlockSpec((1, $together, BLOCK_Q, dim), at_query),
                pl.BlockSpec((1, 1, BLOCK_K, dim), at_key),
                $of_values
                pl.BlockSpec((1, $together, BLOCK_Q, v_dim), at_query),
                pl.BlockSpec((1, $together, 2, BLOCK_Q), along(at_query)),
                $specs
            ],
            out_specs=[
                $out_specs
            ],
            scratch_shapes=[
                $scratch_shapes
            ],
        ),
        out_shape=[
            $out_shapes
        ],
        $aliases
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )($operands)
    return $result

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
