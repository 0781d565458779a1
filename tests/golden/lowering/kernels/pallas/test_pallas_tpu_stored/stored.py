"""Attention forward on TPU (Pallas, Mosaic), written by frisket."""
# What it computes:
#
#     stored

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK_Q, BLOCK_K = 128, 128
GROUP = 2  # query heads to a key head
SCALE = 0.25
EXACT = lax.Precision.DEFAULT
Int, Float = jnp.int32, jnp.float32
LEAST = -3.4028234663852886e38  # the running maximum starts finite: -inf - LEAST is -inf, never NaN
PAGE, ROWS = 16, 16  # tokens of a page, and of it in a block
PARTS = 8  # pages in a tile of keys


def together(dtype, *refs):
    """The pages of a tile, converted each by itself."""
    return jnp.concatenate([ref[0, 0].astype(dtype) for ref in refs])


def look(table, *index):
    return table[tuple(jnp.clip(i, 0, n - 1) for i, n in zip(index, table.shape))]


def turned(row):
    """[1, n] as [n, 1]; n is a multiple of the 128 lanes."""
    return jnp.broadcast_to(row, (128, row.shape[1])).T[:, :1]


def share(i, x, axis):
    return jnp.minimum(i, x.shape[axis] - 1)  # one for all, or one each


def per_query(x, place):
    """Blocks of x [.., .., 1, q_len] that belong to the tile of queries."""

    def at(*step):
        b, h, q_tile, _ = place(*step)
        return share(b, x, 0), share(h, x, 1), 0, q_tile

    return pl.BlockSpec((1, 1, 1, BLOCK_Q), at)


def per_key(x, place):
    """Blocks of x [.., .., 1, kv_len] that belong to the tile of keys."""

    def at(*step):
        b, h, _, k_tile = place(*step)
        return share(b, x, 0), share(h, x, 1), 0, k_tile

    return pl.BlockSpec((1, 1, 1, BLOCK_K), at)


def locate(b, h, step, slice_of, words, programs, room, tile_bits):
    """(row, tile) of a step; whether it visits that tile, the tile is FULL, the row starts, the row ends."""
    places = slice_of.shape[0]
    own = 0 if places == 1 else h if places == programs else b * programs + h
    word = words[step] if words.shape[0] == room else words[slice_of[own] * room + step]
    tile, row = word >> 4 & (1 << tile_bits) - 1, word >> tile_bits + 4
    return (row, tile), (word & 1 != 0, word & 2 != 0, word & 4 != 0, word & 8 != 0)


def kernel(
    slice_of, words, ints, q_origin, k_origin, pages, q_ref, k0_ref, k1_ref, k2_ref, k3_ref, k4_ref, k5_ref, k6_ref,
    k7_ref, v0_ref, v1_ref, v2_ref, v3_ref, v4_ref, v5_ref, v6_ref, v7_ref, of_query0_ref, of_key0_ref, of_key1_ref,
    of_key2_ref,
    out_ref, lse_ref, top_ref, top, total, acc, of_query0, *, at, q_len, kv_len
):
    batch, head, step = (pl.program_id(axis) for axis in range(3))
    (q_tile, k_tile), (visits, full, starts, ends) = at(batch, head, step, slice_of, words)

    @pl.when(starts)
    def start():
        top[...] = jnp.full(top.shape, LEAST, Float)
        total[...] = jnp.zeros(total.shape, Float)
        acc[...] = jnp.zeros(acc.shape, Float)
        of_query0[...] = turned(of_query0_ref[0, 0])

    def visit(partial):
        k = k_origin[batch] + k_tile * BLOCK_K + lax.broadcasted_iota(Int, (1, BLOCK_K), 1)
        v = together(q_ref.dtype, v0_ref, v1_ref, v2_ref, v3_ref, v4_ref, v5_ref, v6_ref, v7_ref)
        s = lax.dot_general(
            q_ref[0, 0], together(q_ref.dtype, k0_ref, k1_ref, k2_ref, k3_ref, k4_ref, k5_ref, k6_ref, k7_ref), (((1,), (1,)), ((), ())), precision=EXACT, preferred_element_type=Float
        )
        s = jnp.broadcast_to(jnp.tanh(s * of_key1_ref[0, 0] * 0.05) * 20.0, s.shape)
        if partial:  # the mask
            seen = jnp.broadcast_to((k <= of_query0[...]) & (of_key0_ref[0, 0] != 0), s.shape)
            s = jnp.where(seen, s, -jnp.inf)
            # Values that no query sees may never have been written: a NaN there must not reach the sums.
            rows = q_tile * BLOCK_Q + lax.broadcasted_iota(Int, (BLOCK_Q, 1), 0) < q_len
            some = jnp.where(seen & rows, 1.0, 0.0).max(axis=0, keepdims=True)
            v = jnp.where(turned(some) > 0, v, jnp.zeros_like(v))
            if kv_len % BLOCK_K:  # memory behind the last key may hold anything
                behind = kv_len - k_tile * BLOCK_K
                s = jnp.where(lax.broadcasted_iota(Int, (1, BLOCK_K), 1) < behind, s, -jnp.inf)
                v = jnp.where(lax.broadcasted_iota(Int, (BLOCK_K, 1), 0) < behind, v, jnp.zeros_like(v))
        new = jnp.maximum(top[...], s.max(axis=1, keepdims=True))
        p = jnp.exp(s - wide(new, BLOCK_K))
        shrink = jnp.exp(top[...] - new)
        total[...] = total[...] * shrink + p.sum(axis=1, keepdims=True)
        p = p * of_key2_ref[0, 0] if not partial else jnp.where(p > 0, p * of_key2_ref[0, 0], 0.0)
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
    kv_len, v_dim = tables[2].shape[1] * PAGE, value.shape[3]
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    steps, slice_of, words = walk
    q_tiles, k_tiles = pl.cdiv(q_len, BLOCK_Q), pl.cdiv(kv_len, BLOCK_K)
    q_origin, k_origin = (jnp.broadcast_to(jnp.asarray(x, Int), (batch,)) for x in origin[2:])
    t0 = jnp.asarray(tables[0], Int)
    t1 = jnp.asarray(tables[1], Int)
    t2 = jnp.asarray(tables[2], Int)
    t3 = jnp.asarray(tables[3], Float)
    t4 = jnp.asarray(tables[4], Float)
    ints = jnp.stack([jnp.asarray(x, Int) for x in (*origin[:2], *sizes)])
    b = jnp.asarray(origin[0], Int) + jnp.arange(batch, dtype=Int).reshape(-1, 1, 1, 1)
    h = jnp.asarray(origin[1], Int) + jnp.arange(heads, dtype=Int).reshape(1, -1, 1, 1)
    q = jnp.asarray(origin[2], Int).reshape(-1, 1, 1, 1) + jnp.arange(q_len, dtype=Int)
    k = jnp.asarray(origin[3], Int).reshape(-1, 1, 1, 1) + jnp.arange(kv_len, dtype=Int)
    of_query0_0 = look(t0, b)
    of_query0 = q + of_query0_0
    of_key0_0 = look(t1, b)
    of_key0 = (k < of_key0_0).astype(Int)
    of_key1_0 = h >> 1
    of_key1 = SCALE * look(t3, look(t2, b, k >> 4), k & 15, of_key1_0)
    of_key2_0 = h >> 1
    of_key2 = look(t4, look(t2, b, k >> 4), k & 15, of_key2_0)
    pages = jnp.clip(t2, 0, key.shape[0] - 1)  # entries that are not read may be anything
    scalars = (slice_of, words.reshape(-1), ints, q_origin, k_origin, pages.reshape(-1))
    at = functools.partial(locate, programs=heads, room=words.shape[1], tile_bits=(k_tiles - 1).bit_length())

    def place(b, h, step, *scalars):
        """(batch, query head, tile of queries, tile of keys) of a step."""
        (q_tile, k_tile), _ = at(b, h, step, *scalars[:2])
        return b, h, q_tile, k_tile

    def at_query(b, h, *step):
        _, _, q_tile, _ = place(b, h, *step)
        return b, h, q_tile, 0

    def at_page(part):
        def at(*step):
            b, h, *step = step
            _, _, _, k_tile = place(b, h, *step)
            token = k_tile * BLOCK_K + part * PAGE
            entry = jnp.minimum(lax.div(token, Int(PAGE)), pages.shape[1] - 1)
            page = step[6][b * pages.shape[1] + entry]
            return page, lax.div(h, Int(GROUP)), lax.div(lax.rem(token, Int(PAGE)), Int(ROWS)), 0

        return at

    def at_row(b, h, *step):
        _, _, q_tile, _ = place(b, h, *step)
        return b, h, 0, q_tile

    out, *rows = pl.pallas_call(
        functools.partial(kernel, at=at, q_len=q_len, kv_len=kv_len),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(batch, heads, steps),
            in_specs=[
                pl.BlockSpec((1, 1, BLOCK_Q, dim), at_query),
                *(pl.BlockSpec((1, 1, ROWS, dim), at_page(part)) for part in range(PARTS)),
                *(pl.BlockSpec((1, 1, ROWS, v_dim), at_page(part)) for part in range(PARTS)),
                per_query(of_query0, place),
                per_key(of_key0, place),
                per_key(of_key1, place),
                per_key(of_key2, place),
            ],
            out_specs=[
                pl.BlockSpec((1, 1, BLOCK_Q, v_dim), at_query),
                *[pl.BlockSpec((1, 1, 1, BLOCK_Q), at_row)] * 2,
            ],
            scratch_shapes=[
                pltpu.VMEM((BLOCK_Q, 128), Float),
                pltpu.VMEM((BLOCK_Q, 128), Float),
                pltpu.VMEM((BLOCK_Q, v_dim), Float),
                pltpu.VMEM((BLOCK_Q, 1), Int),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, q_len, v_dim), query.dtype),
            *[jax.ShapeDtypeStruct((batch, heads, 1, q_len), Float)] * 2,
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(*scalars, query, *[key] * PARTS, *[value] * PARTS, of_query0, of_key0, of_key1, of_key2)
    return out.swapaxes(1, 2), *(row[:, :, 0] for row in rows)
