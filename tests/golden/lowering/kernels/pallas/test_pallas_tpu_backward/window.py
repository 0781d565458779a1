"""Gradients by query of attention on TPU (Pallas, Mosaic), written by frisket."""
# What it computes:
#
#     q >= k & q - k < w

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK_Q, BLOCK_K = 128, 128
GROUP = 1  # query heads to a key head
SCALE = 0.1767766952966369
EXACT = lax.Precision.DEFAULT
Int, Float = jnp.int32, jnp.float32
def upright(row):
    """[1, n] as [n, 128], 128 times one column; n is a multiple of the 128 lanes."""
    return jnp.broadcast_to(row, (128, row.shape[1])).T


def wide(column, width):
    """[n, 128], 128 times one column, as [n, width]: a number in all lanes is not broadcast at every use."""
    return jnp.tile(column, (1, pl.cdiv(width, 128)))[:, :width]


def finite(x):
    """What a hidden position's 0 may be multiplied with: 0 times NaN or infinity is NaN."""
    wide = x.astype(Float)
    return jnp.where(jnp.isfinite(wide), wide, 0).astype(x.dtype)


def locate(b, h, step, slice_of, words, programs, room, tile_bits):
    """(row, tile) of a step; whether it visits that tile, the tile is FULL, the row starts, the row ends."""
    places = slice_of.shape[0]
    own = 0 if places == 1 else h if places == programs else b * programs + h
    word = words[step] if words.shape[0] == room else words[slice_of[own] * room + step]
    tile, row = word >> 4 & (1 << tile_bits) - 1, word >> tile_bits + 4
    return (row, tile), (word & 1 != 0, word & 2 != 0, word & 4 != 0, word & 8 != 0)


def rows_by_rows(x, y):
    """[n, d] times [m, d]: [n, m]."""
    return lax.dot_general(x, y, (((1,), (1,)), ((), ())), precision=EXACT, preferred_element_type=Float)


def rows_by_columns(x, y):
    """[n, m] times [m, d]: [n, d]."""
    x = x.astype(y.dtype)
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=EXACT, preferred_element_type=Float)


def kernel(
    slice_of, words, ints, q_origin, k_origin, q_ref, k_ref, v_ref, dout_ref, of_rows_ref,
    dq_ref, lse, delta, dq, *, at, q_len, kv_len
):
    batch, head, step = (pl.program_id(axis) for axis in range(3))
    (q_tile, k_tile), (visits, full, starts, ends) = at(batch, head, step, slice_of, words)

    @pl.when(starts)
    def start():
        lse[...] = upright(of_rows_ref[0, 0, 0:1])
        delta[...] = upright(of_rows_ref[0, 0, 1:2])
        dq[...] = jnp.zeros(dq.shape, Float)

    def visit(partial):
        q = q_origin[batch] + q_tile * BLOCK_Q + lax.broadcasted_iota(Int, (BLOCK_Q, 1), 0)
        k = k_origin[batch] + k_tile * BLOCK_K + lax.broadcasted_iota(Int, (1, BLOCK_K), 1)
        s0 = ints[6]
        s = rows_by_rows(q_ref[0, 0], k_ref[0, 0]) * SCALE
        m = s
        if partial:  # the mask
            m = jnp.where((q >= k) & (q - k < s0), m, -jnp.inf)
            if kv_len % BLOCK_K:  # memory behind the last key may hold anything
                inside = lax.broadcasted_iota(Int, (1, BLOCK_K), 1) < kv_len - k_tile * BLOCK_K
                m = jnp.where(inside, m, -jnp.inf)
        p = jnp.exp(m - wide(lse[...], BLOCK_K))
        if partial:
            p = jnp.where(m == -jnp.inf, 0, p)  # even if lse is NaN
        dp = rows_by_rows(dout_ref[0, 0], v_ref[0, 0])
        dm = p * (dp - wide(delta[...], BLOCK_K))
        if partial:
            dm = jnp.where(p == 0, 0, dm)
        keys = finite(k_ref[0, 0]) if partial else k_ref[0, 0]
        dq[...] += rows_by_columns(dm, keys)

    @pl.when(visits & full)
    def visit_full():
        visit(partial=False)

    @pl.when(visits & jnp.logical_not(full))
    def visit_partial():
        visit(partial=True)

    @pl.when(ends)
    def finish():
        dq_ref[0, 0] = (dq[...] * SCALE).astype(dq_ref.dtype)


def attention_dq(
    query, key, value, dout, lse, delta, walk, origin, sizes, slots=(), tables=(), interpret=False
):
    """Of arrays [batch, length, heads, dim], and lse and delta [batch, heads, q_len] where no lse is -inf. The
    rounding error of lse, `low`, is in dout and delta, which are multiplied by exp(-low):

    dq [batch, q_len, heads, dim]
    """
    batch, q_len, heads, dim = query.shape
    kv_len, kv_heads, v_dim = value.shape[1:]
    query, key, value, dout = (x.swapaxes(1, 2) for x in (query, key, value, dout))
    of_rows = jnp.stack([lse, delta], 2)
    steps, slice_of, words = walk
    q_tiles, k_tiles = pl.cdiv(q_len, BLOCK_Q), pl.cdiv(kv_len, BLOCK_K)
    q_origin, k_origin = (jnp.broadcast_to(jnp.asarray(x, Int), (batch,)) for x in origin[2:])
    s0 = jnp.asarray(slots[0], Int)
    ints = jnp.stack([jnp.asarray(x, Int) for x in (*origin[:2], *sizes, s0)])
    scalars = (slice_of, words.reshape(-1), ints, q_origin, k_origin)
    at = functools.partial(locate, programs=heads, room=words.shape[1], tile_bits=(k_tiles - 1).bit_length())

    def place(b, h, step, *scalars):
        """(batch, query head, tile of queries, tile of keys) of a step."""
        (q_tile, k_tile), _ = at(b, h, step, *scalars[:2])
        return b, h, q_tile, k_tile

    def at_query(b, h, *step):
        _, _, q_tile, _ = place(b, h, *step)
        return b, h, q_tile, 0

    def at_key(b, h, *step):
        _, _, _, k_tile = place(b, h, *step)
        return b, h, k_tile, 0

    def along(of):
        """The same tile of an array with the positions along."""

        def at(*step):
            b, h, tile, _ = of(*step)
            return b, h, 0, tile

        return at

    found = pl.pallas_call(
        functools.partial(kernel, at=at, q_len=q_len, kv_len=kv_len),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(batch, heads, steps),
            in_specs=[
                pl.BlockSpec((1, 1, BLOCK_Q, dim), at_query),
                pl.BlockSpec((1, 1, BLOCK_K, dim), at_key),
                pl.BlockSpec((1, 1, BLOCK_K, v_dim), at_key),
                pl.BlockSpec((1, 1, BLOCK_Q, v_dim), at_query),
                pl.BlockSpec((1, 1, 2, BLOCK_Q), along(at_query)),
            ],
            out_specs=[
                pl.BlockSpec((1, 1, BLOCK_Q, dim), at_query),
            ],
            scratch_shapes=[
                pltpu.VMEM((BLOCK_Q, 128), Float),
                pltpu.VMEM((BLOCK_Q, 128), Float),
                pltpu.VMEM((BLOCK_Q, dim), Float),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, q_len, dim), query.dtype),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(*scalars, query, key, value, dout, of_rows)
    return [found[0].swapaxes(1, 2)]


"""Gradients by key of attention on TPU (Pallas, Mosaic), written by frisket."""
# What it computes:
#
#     q >= k & q - k < w

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK_Q, BLOCK_K = 128, 128
GROUP = 1  # query heads to a key head
SCALE = 0.1767766952966369
EXACT = lax.Precision.DEFAULT
Int, Float = jnp.int32, jnp.float32
def finite(x):
    """What a hidden position's 0 may be multiplied with: 0 times NaN or infinity is NaN."""
    wide = x.astype(Float)
    return jnp.where(jnp.isfinite(wide), wide, 0).astype(x.dtype)


def locate(b, h, step, slice_of, words, programs, room, tile_bits):
    """(row, tile) of a step; whether it visits that tile, the tile is FULL, the row starts, the row ends."""
    places = slice_of.shape[0]
    own = 0 if places == 1 else h if places == programs else b * programs + h
    word = words[step] if words.shape[0] == room else words[slice_of[own] * room + step]
    tile, row = word >> 4 & (1 << tile_bits) - 1, word >> tile_bits + 4
    return (row, tile), (word & 1 != 0, word & 2 != 0, word & 4 != 0, word & 8 != 0)


def rows_by_rows(x, y):
    """[n, d] times [m, d]: [n, m]."""
    return lax.dot_general(x, y, (((1,), (1,)), ((), ())), precision=EXACT, preferred_element_type=Float)


def rows_by_columns(x, y):
    """[n, m] times [m, d]: [n, d]."""
    x = x.astype(y.dtype)
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=EXACT, preferred_element_type=Float)


def kernel(
    slice_of, words, ints, q_origin, k_origin, q_ref, k_ref, v_ref, dout_ref, of_rows_ref,
    dk_ref, dv_ref, dk, dv, *, at, q_len, kv_len
):
    batch, kv_head, step = (pl.program_id(axis) for axis in range(3))
    (k_tile, q_tile), (visits, full, starts, ends) = at(batch, kv_head, step, slice_of, words)
    head = kv_head

    @pl.when(starts)
    def start():
        dk[...] = jnp.zeros(dk.shape, Float)
        dv[...] = jnp.zeros(dv.shape, Float)

    def visit(partial):
        q = q_origin[batch] + q_tile * BLOCK_Q + lax.broadcasted_iota(Int, (1, BLOCK_Q), 1)
        k = k_origin[batch] + k_tile * BLOCK_K + lax.broadcasted_iota(Int, (BLOCK_K, 1), 0)
        s0 = ints[6]
        s = rows_by_rows(k_ref[0, 0], q_ref[0, 0]) * SCALE
        m = s
        if partial:  # the mask
            m = jnp.where((q >= k) & (q - k < s0), m, -jnp.inf)
            if q_len % BLOCK_Q:  # memory behind the last query may hold anything
                inside = lax.broadcasted_iota(Int, (1, BLOCK_Q), 1) < q_len - q_tile * BLOCK_Q
                m = jnp.where(inside, m, -jnp.inf)
        p = jnp.exp(m - of_rows_ref[0, 0, 0:1])
        if partial:
            p = jnp.where(m == -jnp.inf, 0, p)  # even if lse is NaN
        douts = dout_ref[0, 0]
        if partial and q_len % BLOCK_Q:
            inside = lax.broadcasted_iota(Int, (BLOCK_Q, 1), 0) < q_len - q_tile * BLOCK_Q
            douts = jnp.where(inside, douts, jnp.zeros_like(douts))
        dv[...] += rows_by_columns(p, douts)
        dp = rows_by_rows(v_ref[0, 0], dout_ref[0, 0])
        dm = p * (dp - of_rows_ref[0, 0, 1:2])
        if partial:
            dm = jnp.where(p == 0, 0, dm)
        queries = finite(q_ref[0, 0]) if partial else q_ref[0, 0]
        dk[...] += rows_by_columns(dm, queries)

    @pl.when(visits & full)
    def visit_full():
        visit(partial=False)

    @pl.when(visits & jnp.logical_not(full))
    def visit_partial():
        visit(partial=True)

    @pl.when(ends)
    def finish():
        dv_ref[0, 0] = dv[...].astype(dv_ref.dtype)
        dk_ref[0, 0] = (dk[...] * SCALE).astype(dk_ref.dtype)


def attention_dkv(
    query, key, value, dout, lse, delta, walk, origin, sizes, slots=(), tables=(), fold=1, interpret=False
):
    """Of arrays [batch, length, heads, dim], and lse and delta [batch, heads, q_len] where no lse is -inf. The
    rounding error of lse, `low`, is in dout and delta, which are multiplied by exp(-low):

    dk [batch, kv_len, kv_heads, dim]
    dv [batch, kv_len, kv_heads, v_dim]
    """
    batch, q_len, heads, dim = query.shape
    kv_len, kv_heads, v_dim = value.shape[1:]
    query, key, value, dout = (x.swapaxes(1, 2) for x in (query, key, value, dout))
    of_rows = jnp.stack([lse, delta], 2)
    steps, slice_of, words = walk
    q_tiles, k_tiles = pl.cdiv(q_len, BLOCK_Q), pl.cdiv(kv_len, BLOCK_K)
    q_origin, k_origin = (jnp.broadcast_to(jnp.asarray(x, Int), (batch,)) for x in origin[2:])
    s0 = jnp.asarray(slots[0], Int)
    ints = jnp.stack([jnp.asarray(x, Int) for x in (*origin[:2], *sizes, s0)])
    scalars = (slice_of, words.reshape(-1), ints, q_origin, k_origin)
    at = functools.partial(locate, programs=kv_heads, room=words.shape[1], tile_bits=(q_tiles - 1).bit_length())

    def place(b, h, step, *scalars):
        """(batch, query head, tile of queries, tile of keys) of a step."""
        (k_tile, q_tile), _ = at(b, h, step, *scalars[:2])
        return b, h, q_tile, k_tile

    def at_query(b, h, *step):
        _, head, q_tile, _ = place(b, h, *step)
        return b, head, q_tile, 0

    def at_key(b, h, *step):
        _, _, _, k_tile = place(b, h, *step)
        return b, h, k_tile, 0

    def along(of):
        """The same tile of an array with the positions along."""

        def at(*step):
            b, h, tile, _ = of(*step)
            return b, h, 0, tile

        return at

    found = pl.pallas_call(
        functools.partial(kernel, at=at, q_len=q_len, kv_len=kv_len),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(batch, kv_heads, steps),
            in_specs=[
                pl.BlockSpec((1, 1, BLOCK_Q, dim), at_query),
                pl.BlockSpec((1, 1, BLOCK_K, dim), at_key),
                pl.BlockSpec((1, 1, BLOCK_K, v_dim), at_key),
                pl.BlockSpec((1, 1, BLOCK_Q, v_dim), at_query),
                pl.BlockSpec((1, 1, 2, BLOCK_Q), along(at_query)),
            ],
            out_specs=[
                pl.BlockSpec((1, 1, BLOCK_K, dim), at_key),
                pl.BlockSpec((1, 1, BLOCK_K, v_dim), at_key),
            ],
            scratch_shapes=[
                pltpu.VMEM((BLOCK_K, dim), Float),
                pltpu.VMEM((BLOCK_K, v_dim), Float),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, kv_heads, kv_len, dim), query.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, kv_len, v_dim), query.dtype),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(*scalars, query, key, value, dout, of_rows)
    return [found[0].swapaxes(1, 2), found[1].swapaxes(1, 2)]
