"""Gradients by query of attention on TPU (Pallas, Mosaic), written by frisket."""
# What it computes:
#
#     mask: q >= k
#     score: score + x[h, k] * score

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK_Q, BLOCK_K = 128, 128
GROUP = 2  # query heads to a key head
SCALE = 0.1767766952966369
EXACT = lax.Precision.DEFAULT
Int, Float = jnp.int32, jnp.float32
def look(table, *index):
    return table[tuple(jnp.clip(i, 0, n - 1) for i, n in zip(index, table.shape))]


def share(i, x, axis):
    return jnp.minimum(i, x.shape[axis] - 1)  # one for all, or one each


def per_key(x, place):
    """Blocks of x [.., .., 1, kv_len] that belong to the tile of keys."""

    def at(*step):
        b, h, _, k_tile = place(*step)
        return share(b, x, 0), share(h, x, 1), 0, k_tile

    return pl.BlockSpec((1, 1, 1, BLOCK_K), at)


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
    slice_of, words, ints, q_origin, k_origin, q_ref, k_ref, v_ref, dout_ref, of_rows_ref, of_key0_ref, of_key1_ref,
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
        s = rows_by_rows(q_ref[0, 0], k_ref[0, 0]) * SCALE
        m = jnp.broadcast_to(s + of_key0_ref[0, 0] * s, s.shape)
        if partial:  # the mask
            m = jnp.where(q >= k, m, -jnp.inf)
            if kv_len % BLOCK_K:  # memory behind the last key may hold anything
                inside = lax.broadcasted_iota(Int, (1, BLOCK_K), 1) < kv_len - k_tile * BLOCK_K
                m = jnp.where(inside, m, -jnp.inf)
        p = jnp.exp(m - wide(lse[...], BLOCK_K))
        p = jnp.where(m == -jnp.inf, 0, p)  # even if lse is NaN
        dp = rows_by_rows(dout_ref[0, 0], v_ref[0, 0])
        dm = p * (dp - wide(delta[...], BLOCK_K))
        dm = jnp.where(p == 0, 0, dm)
        ds = dm * of_key1_ref[0, 0]
        ds = jnp.where(p == 0, 0, ds)
        keys = finite(k_ref[0, 0]) if partial else k_ref[0, 0]
        dq[...] += rows_by_columns(ds, keys)

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
    t0 = jnp.asarray(tables[0], Float)
    ints = jnp.stack([jnp.asarray(x, Int) for x in (*origin[:2], *sizes)])
    h = jnp.asarray(origin[1], Int) + jnp.arange(heads, dtype=Int).reshape(1, -1, 1, 1)
    k = jnp.asarray(origin[3], Int).reshape(-1, 1, 1, 1) + jnp.arange(kv_len, dtype=Int)
    of_key0 = look(t0, h, k)
    of_key1 = look(t0, h, k) + 1.0
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
        return b, lax.div(h, Int(GROUP)), k_tile, 0

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
                per_key(of_key0, place),
                per_key(of_key1, place),
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
    )(*scalars, query, key, value, dout, of_rows, of_key0, of_key1)
    return [found[0].swapaxes(1, 2)]


"""Gradients by key of attention on TPU (Pallas, Mosaic), written by frisket."""
# What it computes:
#
#     mask: q >= k
#     score: score + x[h, k] * score

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK_Q, BLOCK_K = 128, 128
GROUP = 2  # query heads to a key head
SCALE = 0.1767766952966369
EXACT = lax.Precision.DEFAULT
Int, Float = jnp.int32, jnp.float32
def look(table, *index):
    return table[tuple(jnp.clip(i, 0, n - 1) for i, n in zip(index, table.shape))]


def turned(row):
    """[1, n] as [n, 1]; n is a multiple of the 128 lanes."""
    return jnp.broadcast_to(row, (128, row.shape[1])).T[:, :1]


def share(i, x, axis):
    return jnp.minimum(i, x.shape[axis] - 1)  # one for all, or one each


def per_key(x, place):
    """Blocks of x [.., .., 1, kv_len] that belong to the tile of keys."""

    def at(*step):
        b, h, _, k_tile = place(*step)
        return share(b, x, 0), share(h, x, 1), 0, k_tile

    return pl.BlockSpec((1, 1, 1, BLOCK_K), at)


def finite(x):
    """What a hidden position's 0 may be multiplied with: 0 times NaN or infinity is NaN."""
    wide = x.astype(Float)
    return jnp.where(jnp.isfinite(wide), wide, 0).astype(x.dtype)


def laid(column):
    """[n, 1] as [1, n]; n is a multiple of the 128 lanes."""
    return jnp.broadcast_to(column, (column.shape[0], 128)).T[:1]


def locate(b, h, step, slice_of, words, programs, room, tile_bits):
    """(row, part, tile) of a step; whether it visits that tile, the tile is FULL, the row starts, the row ends."""
    places = slice_of.shape[0]
    own = 0 if places == 1 else h if places == programs else b * programs + h
    word = words[step] if words.shape[0] == room else words[slice_of[own] * room + step]
    tile, row = word >> 4 & (1 << tile_bits) - 1, word >> tile_bits + 4
    part, row = row & 1, row >> 1
    return (row, part, tile), (word & 1 != 0, word & 2 != 0, word & 4 != 0, word & 8 != 0)


def rows_by_rows(x, y):
    """[n, d] times [m, d]: [n, m]."""
    return lax.dot_general(x, y, (((1,), (1,)), ((), ())), precision=EXACT, preferred_element_type=Float)


def rows_by_columns(x, y):
    """[n, m] times [m, d]: [n, d]."""
    x = x.astype(y.dtype)
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=EXACT, preferred_element_type=Float)


def kernel(
    slice_of, words, ints, q_origin, k_origin, q_ref, k_ref, v_ref, dout_ref, of_rows_ref, of_key0_ref, of_key1_ref,
    dk_ref, dv_ref, sum0_ref, of_key0, of_key1, dk, dv, sum0, *, at, q_len, kv_len
):
    batch, kv_head, step = (pl.program_id(axis) for axis in range(3))
    (k_tile, part, q_tile), (visits, full, starts, ends) = at(batch, kv_head, step, slice_of, words)
    head = kv_head * GROUP + part

    @pl.when(starts)
    def start():
        dk[...] = jnp.zeros(dk.shape, Float)
        dv[...] = jnp.zeros(dv.shape, Float)
        sum0[...] = jnp.zeros(sum0.shape, Float)

    def visit(partial):
        of_key0[...] = turned(of_key0_ref[0, 0])
        of_key1[...] = turned(of_key1_ref[0, 0])
        q = q_origin[batch] + q_tile * BLOCK_Q + lax.broadcasted_iota(Int, (1, BLOCK_Q), 1)
        k = k_origin[batch] + k_tile * BLOCK_K + lax.broadcasted_iota(Int, (BLOCK_K, 1), 0)
        s = rows_by_rows(k_ref[0, 0], q_ref[0, 0]) * SCALE
        m = jnp.broadcast_to(s + of_key0[...] * s, s.shape)
        if partial:  # the mask
            m = jnp.where(q >= k, m, -jnp.inf)
            if q_len % BLOCK_Q:  # memory behind the last query may hold anything
                inside = lax.broadcasted_iota(Int, (1, BLOCK_Q), 1) < q_len - q_tile * BLOCK_Q
                m = jnp.where(inside, m, -jnp.inf)
        p = jnp.exp(m - of_rows_ref[0, 0, 0:1])
        p = jnp.where(m == -jnp.inf, 0, p)  # even if lse is NaN
        douts = dout_ref[0, 0]
        if partial and q_len % BLOCK_Q:
            inside = lax.broadcasted_iota(Int, (BLOCK_Q, 1), 0) < q_len - q_tile * BLOCK_Q
            douts = jnp.where(inside, douts, jnp.zeros_like(douts))
        dv[...] += rows_by_columns(p, douts)
        dp = rows_by_rows(v_ref[0, 0], dout_ref[0, 0])
        dm = p * (dp - of_rows_ref[0, 0, 1:2])
        dm = jnp.where(p == 0, 0, dm)
        ds = dm * of_key1[...]
        ds = jnp.where(p == 0, 0, ds)
        queries = finite(q_ref[0, 0]) if partial else q_ref[0, 0]
        dk[...] += rows_by_columns(ds, queries)
        d0 = dm * s
        d0 = jnp.where(p == 0, 0, d0)
        sum0[part] += d0.sum(axis=1, keepdims=True)

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
        for i in range(GROUP):
            sum0_ref[0, 0, i : i + 1] = laid(sum0[i])


def attention_dkv(
    query, key, value, dout, lse, delta, walk, origin, sizes, slots=(), tables=(), fold=1, interpret=False
):
    """Of arrays [batch, length, heads, dim], and lse and delta [batch, heads, q_len] where no lse is -inf. The
    rounding error of lse, `low`, is in dout and delta, which are multiplied by exp(-low):

    dk [batch, kv_len, kv_heads, dim]
    dv [batch, kv_len, kv_heads, v_dim]
    that of x[h, k] summed over queries [batch, heads, kv_len]
    """
    batch, q_len, heads, dim = query.shape
    kv_len, kv_heads, v_dim = value.shape[1:]
    query, key, value, dout = (x.swapaxes(1, 2) for x in (query, key, value, dout))
    of_rows = jnp.stack([lse, delta], 2)
    steps, slice_of, words = walk
    q_tiles, k_tiles = pl.cdiv(q_len, BLOCK_Q), pl.cdiv(kv_len, BLOCK_K)
    q_origin, k_origin = (jnp.broadcast_to(jnp.asarray(x, Int), (batch,)) for x in origin[2:])
    t0 = jnp.asarray(tables[0], Float)
    ints = jnp.stack([jnp.asarray(x, Int) for x in (*origin[:2], *sizes)])
    h = jnp.asarray(origin[1], Int) + jnp.arange(heads, dtype=Int).reshape(1, -1, 1, 1)
    k = jnp.asarray(origin[3], Int).reshape(-1, 1, 1, 1) + jnp.arange(kv_len, dtype=Int)
    of_key0 = look(t0, h, k)
    of_key1 = look(t0, h, k) + 1.0
    scalars = (slice_of, words.reshape(-1), ints, q_origin, k_origin)
    at = functools.partial(locate, programs=kv_heads, room=words.shape[1], tile_bits=(q_tiles - 1).bit_length())

    def place(b, h, step, *scalars):
        """(batch, query head, tile of queries, tile of keys) of a step."""
        (k_tile, part, q_tile), _ = at(b, h, step, *scalars[:2])
        return b, h * GROUP + part, q_tile, k_tile

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
                per_key(of_key0, place),
                per_key(of_key1, place),
            ],
            out_specs=[
                pl.BlockSpec((1, 1, BLOCK_K, dim), at_key),
                pl.BlockSpec((1, 1, BLOCK_K, v_dim), at_key),
                pl.BlockSpec((1, 1, GROUP, BLOCK_K), along(at_key)),
            ],
            scratch_shapes=[
                pltpu.VMEM((BLOCK_K, 1), Float),
                pltpu.VMEM((BLOCK_K, 1), Float),
                pltpu.VMEM((BLOCK_K, dim), Float),
                pltpu.VMEM((BLOCK_K, v_dim), Float),
                pltpu.VMEM((GROUP, BLOCK_K, 1), Float),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, kv_heads, kv_len, dim), query.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, kv_len, v_dim), query.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, GROUP, kv_len), Float),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(*scalars, query, key, value, dout, of_rows, of_key0, of_key1)
    return [found[0].swapaxes(1, 2), found[1].swapaxes(1, 2), found[2].reshape(batch, heads, kv_len)]
