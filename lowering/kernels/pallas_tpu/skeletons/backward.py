"""The text of the Pallas TPU kernels of the backward, with holes that `pallas_tpu.backward` fills."""

from __future__ import annotations

SKELETON = '''
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
    batch, $axis, step = (pl.program_id(axis) for axis in range(3))
    tiles, (visits, full, starts, ends) = at(batch, $axis, step, slice_of, shift, anchor, first, records)
    $located = tiles
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
    query, key, value, dout, lse, low, delta, walk, origin, sizes, slots=(), tables=(), $arguments
):
    """Of arrays [batch, length, heads, dim], and lse, low and delta [batch, heads, q_len] where no lse is
    -inf; low is what rounding took from it:

    $said
    """
    batch, q_len, heads, dim = query.shape
    kv_len, kv_heads, v_dim = value.shape[1:]
    $cast
    query, key, value, dout = (x.swapaxes(1, 2) for x in (query, key, value, dout))
    of_rows = jnp.stack([lse, low, delta], 2)
    steps, slice_of, shift, anchor, first, records = walk
    q_tiles, k_tiles = pl.cdiv(q_len, BLOCK_Q), pl.cdiv(kv_len, BLOCK_K)
    $before
    scalars = ($passed)
    at = functools.partial(locate, $sizes)

    def place(b, h, step, *scalars):
        """(batch, query head, tile of queries, tile of keys) of a step."""
        ($located), _ = at(b, h, step, *scalars[:5])
        return $placed

    def at_query(*step):
        b, h, q_tile, _ = place(*step)
        return b, h, q_tile, 0

    def at_key(*step):
        b, h, _, k_tile = place(*step)
        return b, lax.div(h, Int(GROUP)), k_tile, 0

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
            grid=(batch, $axes, steps),
            in_specs=[
                pl.BlockSpec((1, 1, BLOCK_Q, dim), at_query),
                pl.BlockSpec((1, 1, BLOCK_K, dim), at_key),
                $of_values
                pl.BlockSpec((1, 1, BLOCK_Q, v_dim), at_query),
                pl.BlockSpec((1, 1, 3, BLOCK_Q), along(at_query)),
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
'''

FINITE = '''
def finite(x):
    """What a hidden position's 0 may be multiplied with: 0 times NaN or infinity is NaN."""
    wide = x.astype(Float)
    return jnp.where(jnp.isfinite(wide), wide, 0).astype(x.dtype)
'''

LAID = '''
def laid(column):
    """[n, 1] as [1, n]; n is a multiple of the 128 lanes."""
    return jnp.broadcast_to(column, (column.shape[0], 128)).T[:1]
'''

BY_DISTANCE = '''
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
'''

BY_DIFFERENCE = '''
def by_difference(sums, q_len, kv_len):
    """[.., .., q_len + kv_len - 1], entry q - k + kv_len - 1, of sums by k - q from that of the last row's end."""
    first = pl.cdiv(q_len, BLOCK_Q) * BLOCK_Q
    return sums.reshape(*sums.shape[:2], -1)[..., first - q_len + 1 : first + kv_len][..., ::-1]
'''
