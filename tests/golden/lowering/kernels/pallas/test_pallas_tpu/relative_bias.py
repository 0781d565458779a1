"""Attention forward on TPU (Pallas, Mosaic), written by frisket."""
# What it computes:
#
#     mask: q >= k
#     score: score + bias[h, k - q + 40]

import functools
import math

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
LEAST = -3.4028234663852886e38  # the running maximum starts finite: -inf - LEAST is -inf, never NaN


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


def locate(b, h, step, slice_of, words, programs, room, tile_bits):
    """(row, tile) of a step; whether it visits that tile, the tile is FULL, the row starts, the row ends."""
    places = slice_of.shape[0]
    own = 0 if places == 1 else h if places == programs else b * programs + h
    word = words[step] if words.shape[0] == room else words[slice_of[own] * room + step]
    tile, row = word >> 4 & (1 << tile_bits) - 1, word >> tile_bits + 4
    return (row, tile), (word & 1 != 0, word & 2 != 0, word & 4 != 0, word & 8 != 0)


def kernel(
    slice_of, words, ints, q_origin, k_origin, q_ref, k_ref, v_ref, of_distance0_ref,
    out_ref, lse_ref, top_ref, top, total, acc, *, at, kv_len
):
    batch, head, step = (pl.program_id(axis) for axis in range(3))
    (q_tile, k_tile), (visits, full, starts, ends) = at(batch, head, step, slice_of, words)

    @pl.when(starts)
    def start():
        top[...] = jnp.full(top.shape, LEAST, Float)
        total[...] = jnp.zeros(total.shape, Float)
        acc[...] = jnp.zeros(acc.shape, Float)

    def visit(partial):
        q = q_origin[batch] + q_tile * BLOCK_Q + lax.broadcasted_iota(Int, (BLOCK_Q, 1), 0)
        k = k_origin[batch] + k_tile * BLOCK_K + lax.broadcasted_iota(Int, (1, BLOCK_K), 1)
        v = v_ref[0, 0]
        s = lax.dot_general(
            q_ref[0, 0], k_ref[0, 0], (((1,), (1,)), ((), ())), precision=EXACT, preferred_element_type=Float
        )
        s = s * SCALE
        s = jnp.broadcast_to(s + skewed(of_distance0_ref[0, 0, 0]), s.shape)
        if partial:  # the mask
            s = jnp.where(q >= k, s, -jnp.inf)
            if kv_len % BLOCK_K:  # memory behind the last key may hold anything
                behind = kv_len - k_tile * BLOCK_K
                s = jnp.where(lax.broadcasted_iota(Int, (1, BLOCK_K), 1) < behind, s, -jnp.inf)
                v = jnp.where(lax.broadcasted_iota(Int, (BLOCK_K, 1), 0) < behind, v, jnp.zeros_like(v))
        new = jnp.maximum(top[...], s.max(axis=1, keepdims=True))
        p = jnp.exp(s - wide(new, BLOCK_K))
        shrink = jnp.exp(top[...] - new)
        total[...] = total[...] * shrink + p.sum(axis=1, keepdims=True)
        acc[...] = acc[...] * wide(shrink, acc.shape[-1]) + lax.dot_general(
            p.astype(v.dtype), v, (((1,), (0,)), ((), ())), precision=EXACT, preferred_element_type=Float
        )
        top[...] = new

    @pl.when(visits & full)
    def visit_full():
        visit(partial=False)

    @pl.when(visits & jnp.logical_not(full))
    def visit_partial():
        visit(partial=True)

    @pl.when(ends)
    def finish():
        most, whole = top[...], total[...]
        top_ref[0, 0] = laid(jnp.where(whole == 0, -jnp.inf, most))
        nothing = whole == 0
        out_ref[0, 0] = (acc[...] / wide(jnp.where(nothing, 1, whole), acc.shape[-1])).astype(out_ref.dtype)
        lse = most + jnp.log(whole)
        lse_ref[0, 0] = laid(jnp.where(nothing, -jnp.inf, lse))


def laid(column):
    """[BLOCK_Q, 128], 128 times one column, as [1, BLOCK_Q]."""
    return column.T[:1]


def wide(column, width):
    """[n, 128], 128 times one column, as [n, width]: a number in all lanes is not broadcast at every use."""
    return jnp.tile(column, (1, pl.cdiv(width, 128)))[:, :width]


def attention_forward(query, key, value, walk, origin, sizes, slots=(), tables=(), sinks=None, interpret=False):
    """(out [batch, q_len, heads, v_dim], lse, top [batch, heads, q_len]) of arrays
    [batch, length, heads, dim]."""
    batch, q_len, heads, dim = query.shape
    kv_len, v_dim = value.shape[1], value.shape[3]
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    steps, slice_of, words = walk
    q_tiles, k_tiles = pl.cdiv(q_len, BLOCK_Q), pl.cdiv(kv_len, BLOCK_K)
    q_origin, k_origin = (jnp.broadcast_to(jnp.asarray(x, Int), (batch,)) for x in origin[2:])
    s0 = jnp.asarray(slots[0], Int)
    t0 = jnp.asarray(tables[0], Float)
    ints = jnp.stack([jnp.asarray(x, Int) for x in (*origin[:2], *sizes, s0)])
    h = jnp.asarray(origin[1], Int) + jnp.arange(heads, dtype=Int).reshape(1, -1, 1, 1)
    apart = distances(q_len, kv_len)
    k_of = jnp.asarray(origin[3], Int).reshape(-1, 1, 1, 1) + jnp.maximum(apart, 0)
    q_of = jnp.asarray(origin[2], Int).reshape(-1, 1, 1, 1) - jnp.minimum(apart, 0)
    of_distance0 = windows(look(t0, h, k_of - q_of + s0))
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

    def at_row(b, h, *step):
        _, _, q_tile, _ = place(b, h, *step)
        return b, h, 0, q_tile

    out, *rows = pl.pallas_call(
        functools.partial(kernel, at=at, kv_len=kv_len),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(batch, heads, steps),
            in_specs=[
                pl.BlockSpec((1, 1, BLOCK_Q, dim), at_query),
                pl.BlockSpec((1, 1, BLOCK_K, dim), at_key),
                pl.BlockSpec((1, 1, BLOCK_K, v_dim), at_key),
                per_distance(of_distance0, place, q_len),
            ],
            out_specs=[
                pl.BlockSpec((1, 1, BLOCK_Q, v_dim), at_query),
                *[pl.BlockSpec((1, 1, 1, BLOCK_Q), at_row)] * 2,
            ],
            scratch_shapes=[
                pltpu.VMEM((BLOCK_Q, 128), Float),
                pltpu.VMEM((BLOCK_Q, 128), Float),
                pltpu.VMEM((BLOCK_Q, v_dim), Float),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, q_len, v_dim), query.dtype),
            *[jax.ShapeDtypeStruct((batch, heads, 1, q_len), Float)] * 2,
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(*scalars, query, key, value, of_distance0)
    return out.swapaxes(1, 2), *(row[:, :, 0] for row in rows)
