"""Attention forward on TPU (Pallas, Mosaic), written by frisket."""
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
LEAST = -3.4028234663852886e38  # the running maximum starts finite: -inf - LEAST is -inf, never NaN
Int, Float = jnp.int32, jnp.float32


def locate(b, h, tile, step, first_row, count, records):
    """(key tile, inside, full) of a step. A record is (first step, key tile - step, full from, full to)."""
    row = first_row[b, h] + tile
    number = records.shape[0] // count.shape[0] // 4
    step_inside = jnp.minimum(step, jnp.maximum(count[row] - 1, 0))  # later steps repeat the last tile

    def later(i, at):
        here = (row * number + i) * 4
        return jnp.where(records[here] <= step_inside, here, at)

    at = lax.fori_loop(Int(1), Int(number), later, row * number * 4)
    full = (records[at + 2] <= step_inside) & (step_inside < records[at + 3])
    return step_inside + records[at + 1], step < count[row], full


def kernel(
    first_row, count, records, ints, q_origin, k_origin, q_ref, k_ref, v_ref,
    out_ref, lse_ref, top, total, acc, *, kv_len
):
    batch, head, tile, step = (pl.program_id(axis) for axis in range(4))
    steps = pl.num_programs(3)
    key_tile, inside, full = locate(batch, head, tile, step, first_row, count, records)

    @pl.when(step == 0)
    def start():
        top[...] = jnp.full(top.shape, LEAST, Float)
        total[...] = jnp.zeros(total.shape, Float)
        acc[...] = jnp.zeros(acc.shape, Float)

    def visit(partial):
        q = q_origin[batch] + tile * BLOCK_Q + lax.broadcasted_iota(Int, (BLOCK_Q, 1), 0)
        k = k_origin[batch] + key_tile * BLOCK_K + lax.broadcasted_iota(Int, (1, BLOCK_K), 1)
        s0 = ints[6]
        v = v_ref[0, 0]
        s = lax.dot_general(
            q_ref[0, 0], k_ref[0, 0], (((1,), (1,)), ((), ())), precision=EXACT, preferred_element_type=Float
        )
        s = s * SCALE
        if partial:  # the mask
            s = jnp.where((q >= k) & (q - k < s0), s, -jnp.inf)
            if kv_len % BLOCK_K:  # what lies behind the last key is nothing, not zero
                behind = kv_len - key_tile * BLOCK_K
                s = jnp.where(lax.broadcasted_iota(Int, (1, BLOCK_K), 1) < behind, s, -jnp.inf)
                v = jnp.where(lax.broadcasted_iota(Int, (BLOCK_K, 1), 0) < behind, v, jnp.zeros_like(v))
        new = jnp.maximum(top[...], s.max(axis=1, keepdims=True))
        p = jnp.exp(s - new)
        shrink = jnp.exp(top[...] - new)
        total[...] = total[...] * shrink + p.sum(axis=1, keepdims=True)
        acc[...] = acc[...] * shrink + lax.dot_general(
            p.astype(v.dtype), v, (((1,), (0,)), ((), ())), precision=EXACT, preferred_element_type=Float
        )
        top[...] = new

    @pl.when(inside & full)
    def visit_full():
        visit(partial=False)

    @pl.when(inside & jnp.logical_not(full))
    def visit_partial():
        visit(partial=True)

    @pl.when(step == steps - 1)
    def finish():
        whole = total[...]
        out_ref[0, 0] = (acc[...] / jnp.where(whole == 0, 1, whole)).astype(out_ref.dtype)
        lse = jnp.where(whole == 0, -jnp.inf, top[...] + jnp.log(whole))
        lse_ref[0, 0] = jnp.broadcast_to(lse, (BLOCK_Q, 128)).T[:1]


def attention_forward(
    query, key, value, steps, slice_of, count, records, origin, sizes, slots=(), tables=(), interpret=False
):
    """(out [batch, q_len, heads, v_dim], lse [batch, heads, q_len]) of arrays [batch, length, heads, dim]."""
    batch, q_len, heads, dim = query.shape
    kv_len, v_dim = value.shape[1], value.shape[3]
    dtype = query.dtype
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    tiles = pl.cdiv(q_len, BLOCK_Q)
    first_row = jnp.asarray(slice_of, Int).reshape(batch, heads) * tiles
    count, records = jnp.asarray(count, Int), jnp.asarray(records, Int)
    q_origin, k_origin = (jnp.broadcast_to(jnp.asarray(x, Int), (batch,)) for x in origin[2:])
    s0 = jnp.asarray(slots[0], Int)
    ints = [*origin[:2], *sizes, s0]
    ints = jnp.stack([jnp.asarray(x, Int) for x in ints])
    scalars = (first_row, count, records, ints, q_origin, k_origin)

    def at_query(b, h, tile, step, *_):
        return b, h, tile, 0

    def at_key(b, h, tile, step, first_row, count, records, *_):
        return b, lax.div(h, Int(GROUP)), locate(b, h, tile, step, first_row, count, records)[0], 0

    out, lse = pl.pallas_call(
        functools.partial(kernel, kv_len=kv_len),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(batch, heads, tiles, steps),
            in_specs=[
                pl.BlockSpec((1, 1, BLOCK_Q, dim), at_query),
                pl.BlockSpec((1, 1, BLOCK_K, dim), at_key),
                pl.BlockSpec((1, 1, BLOCK_K, v_dim), at_key),
            ],
            out_specs=[
                pl.BlockSpec((1, 1, BLOCK_Q, v_dim), at_query),
                pl.BlockSpec((1, 1, 1, BLOCK_Q), lambda b, h, tile, step, *_: (b, h, 0, tile)),
            ],
            scratch_shapes=[
                pltpu.VMEM((BLOCK_Q, 1), Float),
                pltpu.VMEM((BLOCK_Q, 1), Float),
                pltpu.VMEM((BLOCK_Q, v_dim), Float),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, q_len, v_dim), dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, q_len), Float),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
    )(*scalars, query, key, value)
    return out.swapaxes(1, 2), lse[:, :, 0]
