"""Gradients by query of attention on TPU (Pallas, Mosaic), written by frisket."""
# What it computes:
#
#     mask: q >= k
#     score: score + x[(q - k) // 16, h]

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK_Q, BLOCK_K = 128, 128
GROUP = 3  # query heads to a key head
SCALE = 0.1767766952966369
EXACT = lax.Precision.DEFAULT
Int, Float = jnp.int32, jnp.float32
def look(table, *index):
    return table[tuple(jnp.clip(i, 0, n - 1) for i, n in zip(index, table.shape))]


def share(i, x, axis):
    return jnp.minimum(i, x.shape[axis] - 1)  # one for all, or one each


STRIDE = math.gcd(BLOCK_Q, BLOCK_K)  # from one window to the next


def distances(q_len, kv_len):
    """k - q, in local positions, along all windows; a tile's begins at its last row and first column."""
    q_ends, k_ends = pl.cdiv(q_len, BLOCK_Q) * BLOCK_Q, pl.cdiv(kv_len, BLOCK_K) * BLOCK_K
    return jnp.arange(1 - q_ends, 1 + k_ends, dtype=Int)


def windows(x):
    """[.., .., n, 1, BLOCK_Q + BLOCK_K]: one window every STRIDE entries of x [.., .., 1, length]."""
    parts = x.reshape(*x.shape[:2], -1, STRIDE)
    many = (BLOCK_Q + BLOCK_K) // STRIDE
    number = parts.shape[2] - many + 1
    return jnp.concatenate([parts[:, :, i : i + number] for i in range(many)], -1)[:, :, :, None]


def per_distance(x, place, length):
    """Windows of x for the tiles; `length` is that of the axis down a tile."""
    last = pl.cdiv(length, BLOCK_Q) - 1

    def at(*step):
        b, h, q_tile, k_tile = place(*step)
        start = (last - q_tile) * (BLOCK_Q // STRIDE) + k_tile * (BLOCK_K // STRIDE)
        return share(b, x, 0), share(h, x, 1), start, 0, 0

    return pl.BlockSpec((1, 1, 1, 1, BLOCK_Q + BLOCK_K), at)


def skewed(window):
    """[BLOCK_Q, BLOCK_K] of a window [1, BLOCK_Q + BLOCK_K]: row i is window[BLOCK_Q - 1 - i :]."""
    wide = jnp.broadcast_to(window, (BLOCK_Q, BLOCK_Q + BLOCK_K))
    return pltpu.roll(wide, BLOCK_K + 1, 1, stride=1, stride_axis=0)[:, :BLOCK_K]


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


def by_difference(sums, q_len, kv_len):
    """[.., .., q_len + kv_len - 1], entry q - k + kv_len - 1, of sums by k - q from that of the last row's end."""
    first = pl.cdiv(q_len, BLOCK_Q) * BLOCK_Q
    return sums.reshape(*sums.shape[:2], -1)[..., first - q_len + 1 : first + kv_len][..., ::-1]


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
    slice_of, words, ints, q_origin, k_origin, q_ref, k_ref, v_ref, dout_ref, of_rows_ref, of_distance0_ref,
    dq_ref, sum0_ref, lse, delta, dq, *, at, q_len, kv_len, q_tiles
):
    batch, head, step = (pl.program_id(axis) for axis in range(3))
    (q_tile, k_tile), (visits, full, starts, ends) = at(batch, head, step, slice_of, words)

    @pl.when(step == 0)
    def clear():
        sum0_ref[0, 0] = jnp.zeros(sum0_ref.shape[2:], Float)

    @pl.when(starts)
    def start():
        lse[...] = upright(of_rows_ref[0, 0, 0:1])
        delta[...] = upright(of_rows_ref[0, 0, 1:2])
        dq[...] = jnp.zeros(dq.shape, Float)

    def visit(partial):
        q = q_origin[batch] + q_tile * BLOCK_Q + lax.broadcasted_iota(Int, (BLOCK_Q, 1), 0)
        k = k_origin[batch] + k_tile * BLOCK_K + lax.broadcasted_iota(Int, (1, BLOCK_K), 1)
        s = rows_by_rows(q_ref[0, 0], k_ref[0, 0]) * SCALE
        m = jnp.broadcast_to(s + skewed(of_distance0_ref[0, 0, 0]), s.shape)
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
        keys = finite(k_ref[0, 0]) if partial else k_ref[0, 0]
        dq[...] += rows_by_columns(dm, keys)
        present = dm
        if q_len % BLOCK_Q:  # nothing is behind the last query
            inside = lax.broadcasted_iota(Int, (BLOCK_Q, 1), 0) < q_len - q_tile * BLOCK_Q
            present = jnp.where(inside, present, 0)
        summed = by_distance(present)
        line = k_tile * (BLOCK_K // 128) + (q_tiles - 1 - q_tile) * (BLOCK_Q // 128)
        for i in range((BLOCK_Q + BLOCK_K) // 128):
            sum0_ref[0, 0, pl.ds(line + i, 1)] += summed[:, 128 * i : 128 * (i + 1)]

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
    that of x[(q - k) // 16, h] summed by distance [batch, heads, q_len + kv_len - 1]
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
    apart = distances(q_len, kv_len)
    k_of = jnp.asarray(origin[3], Int).reshape(-1, 1, 1, 1) + jnp.maximum(apart, 0)
    q_of = jnp.asarray(origin[2], Int).reshape(-1, 1, 1, 1) - jnp.minimum(apart, 0)
    of_distance0 = windows(look(t0, q_of - k_of >> 4, h))
    lines = (q_tiles * BLOCK_Q + k_tiles * BLOCK_K) // 128  # of sums by distance
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
        functools.partial(kernel, at=at, q_len=q_len, kv_len=kv_len, q_tiles=q_tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(batch, heads, steps),
            in_specs=[
                pl.BlockSpec((1, 1, BLOCK_Q, dim), at_query),
                pl.BlockSpec((1, 1, BLOCK_K, dim), at_key),
                pl.BlockSpec((1, 1, BLOCK_K, v_dim), at_key),
                pl.BlockSpec((1, 1, BLOCK_Q, v_dim), at_query),
                pl.BlockSpec((1, 1, 2, BLOCK_Q), along(at_query)),
                per_distance(of_distance0, place, q_len),
            ],
            out_specs=[
                pl.BlockSpec((1, 1, BLOCK_Q, dim), at_query),
                pl.BlockSpec((1, 1, lines, 128), lambda b, h, *_: (b, h, 0, 0)),
            ],
            scratch_shapes=[
                pltpu.VMEM((BLOCK_Q, 128), Float),
                pltpu.VMEM((BLOCK_Q, 128), Float),
                pltpu.VMEM((BLOCK_Q, dim), Float),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, q_len, dim), query.dtype),
            jax.ShapeDtypeStruct((batch, heads, lines, 128), Float),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(*scalars, query, key, value, dout, of_rows, of_distance0)
    return [found[0].swapaxes(1, 2), by_difference(found[1], q_len, kv_len)]


"""Gradients by key of attention on TPU (Pallas, Mosaic), written by frisket."""
# What it computes:
#
#     mask: q >= k
#     score: score + x[(q - k) // 16, h]

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK_Q, BLOCK_K = 128, 128
GROUP = 3  # query heads to a key head
SCALE = 0.1767766952966369
EXACT = lax.Precision.DEFAULT
Int, Float = jnp.int32, jnp.float32
def look(table, *index):
    return table[tuple(jnp.clip(i, 0, n - 1) for i, n in zip(index, table.shape))]


def share(i, x, axis):
    return jnp.minimum(i, x.shape[axis] - 1)  # one for all, or one each


STRIDE = math.gcd(BLOCK_Q, BLOCK_K)  # from one window to the next


def distances(q_len, kv_len):
    """q - k, in local positions, along all windows; a tile's begins at its last row and first column."""
    q_ends, k_ends = pl.cdiv(q_len, BLOCK_Q) * BLOCK_Q, pl.cdiv(kv_len, BLOCK_K) * BLOCK_K
    return jnp.arange(1 - k_ends, 1 + q_ends, dtype=Int)


def windows(x):
    """[.., .., n, 1, BLOCK_Q + BLOCK_K]: one window every STRIDE entries of x [.., .., 1, length]."""
    parts = x.reshape(*x.shape[:2], -1, STRIDE)
    many = (BLOCK_Q + BLOCK_K) // STRIDE
    number = parts.shape[2] - many + 1
    return jnp.concatenate([parts[:, :, i : i + number] for i in range(many)], -1)[:, :, :, None]


def per_distance(x, place, length):
    """Windows of x for the tiles; `length` is that of the axis down a tile."""
    last = pl.cdiv(length, BLOCK_K) - 1

    def at(*step):
        b, h, q_tile, k_tile = place(*step)
        start = (last - k_tile) * (BLOCK_K // STRIDE) + q_tile * (BLOCK_Q // STRIDE)
        return share(b, x, 0), share(h, x, 1), start, 0, 0

    return pl.BlockSpec((1, 1, 1, 1, BLOCK_Q + BLOCK_K), at)


def skewed(window):
    """[BLOCK_K, BLOCK_Q] of a window [1, BLOCK_Q + BLOCK_K]: row i is window[BLOCK_K - 1 - i :]."""
    wide = jnp.broadcast_to(window, (BLOCK_K, BLOCK_Q + BLOCK_K))
    return pltpu.roll(wide, BLOCK_Q + 1, 1, stride=1, stride_axis=0)[:, :BLOCK_Q]


def finite(x):
    """What a hidden position's 0 may be multiplied with: 0 times NaN or infinity is NaN."""
    wide = x.astype(Float)
    return jnp.where(jnp.isfinite(wide), wide, 0).astype(x.dtype)


def locate(b, h, step, slice_of, words, programs, room, tile_bits):
    """(row, part, tile) of a step; whether it visits that tile, the tile is FULL, the row starts, the row ends."""
    places = slice_of.shape[0]
    own = 0 if places == 1 else h if places == programs else b * programs + h
    word = words[step] if words.shape[0] == room else words[slice_of[own] * room + step]
    tile, row = word >> 4 & (1 << tile_bits) - 1, word >> tile_bits + 4
    part, row = row & 3, row >> 2
    return (row, part, tile), (word & 1 != 0, word & 2 != 0, word & 4 != 0, word & 8 != 0)


def rows_by_rows(x, y):
    """[n, d] times [m, d]: [n, m]."""
    return lax.dot_general(x, y, (((1,), (1,)), ((), ())), precision=EXACT, preferred_element_type=Float)


def rows_by_columns(x, y):
    """[n, m] times [m, d]: [n, d]."""
    x = x.astype(y.dtype)
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=EXACT, preferred_element_type=Float)


def kernel(
    slice_of, words, ints, q_origin, k_origin, q_ref, k_ref, v_ref, dout_ref, of_rows_ref, of_distance0_ref,
    dk_ref, dv_ref, dk, dv, *, at, q_len, kv_len
):
    batch, kv_head, step = (pl.program_id(axis) for axis in range(3))
    (k_tile, part, q_tile), (visits, full, starts, ends) = at(batch, kv_head, step, slice_of, words)
    head = kv_head * GROUP + part

    @pl.when(starts)
    def start():
        dk[...] = jnp.zeros(dk.shape, Float)
        dv[...] = jnp.zeros(dv.shape, Float)

    def visit(partial):
        q = q_origin[batch] + q_tile * BLOCK_Q + lax.broadcasted_iota(Int, (1, BLOCK_Q), 1)
        k = k_origin[batch] + k_tile * BLOCK_K + lax.broadcasted_iota(Int, (BLOCK_K, 1), 0)
        s = rows_by_rows(k_ref[0, 0], q_ref[0, 0]) * SCALE
        m = jnp.broadcast_to(s + skewed(of_distance0_ref[0, 0, 0]), s.shape)
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
    t0 = jnp.asarray(tables[0], Float)
    ints = jnp.stack([jnp.asarray(x, Int) for x in (*origin[:2], *sizes)])
    h = jnp.asarray(origin[1], Int) + jnp.arange(heads, dtype=Int).reshape(1, -1, 1, 1)
    apart = distances(q_len, kv_len)
    q_of = jnp.asarray(origin[2], Int).reshape(-1, 1, 1, 1) + jnp.maximum(apart, 0)
    k_of = jnp.asarray(origin[3], Int).reshape(-1, 1, 1, 1) - jnp.minimum(apart, 0)
    of_distance0 = windows(look(t0, q_of - k_of >> 4, h))
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
                per_distance(of_distance0, place, kv_len),
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
    )(*scalars, query, key, value, dout, of_rows, of_distance0)
    return [found[0].swapaxes(1, 2), found[1].swapaxes(1, 2)]
