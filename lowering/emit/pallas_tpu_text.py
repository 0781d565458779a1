"""The text of the Pallas TPU kernel, with holes: what `pallas_tpu.emit` fills in."""

from __future__ import annotations

from string import Template
from typing import Any


def filled(skeleton: str, **holes: Any) -> str:
    """The skeleton with its holes filled: `$name` within a line by a text, alone on a line by lines, which
    take its indentation (no lines: the line goes)."""
    out: list[str] = []
    for line in skeleton.splitlines():
        hole = line.strip().removeprefix("$")
        if line.strip().startswith("$") and isinstance(holes.get(hole), list):
            pad = line[: len(line) - len(line.lstrip())]
            out += [f"{pad}{x}".rstrip() for x in holes[hole]]
        else:
            out.append(Template(line).substitute({n: x for n, x in holes.items() if not isinstance(x, list)}))
    return "\n".join(out).strip("\n") + "\n"


TURN = '''
def turn(row):
    """[1, n] as [n, 1]; n is a multiple of the 128 lanes."""
    return jnp.broadcast_to(row, (128, row.shape[1])).T[:, :1]
'''

LOOK = """
def look(table, *index):
    return table[tuple(jnp.clip(i, 0, n - 1) for i, n in zip(index, table.shape))]
"""

PICK = '''
def pick(table, shape, *index):
    """table[index], clamped, by trying each entry: the table is flat and in scalar memory."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    ends = [(jnp.clip(i, 0, n - 1), n, stride) for i, n, stride in zip(index, shape, strides)]
    base = sum(i * stride for i, _, stride in ends if jnp.ndim(i) == 0)
    moving = [(i, n, stride) for i, n, stride in ends if jnp.ndim(i) > 0]
    wanted = 0
    for i, n, _ in moving:
        wanted = wanted * n + i

    def attempt(entry, found):
        at, rest = base, entry
        for _, n, stride in reversed(moving):
            at, rest = at + lax.rem(rest, Int(n)) * stride, lax.div(rest, Int(n))
        return jnp.where(wanted == entry, table[at], found)

    entries = math.prod(n for _, n, _ in moving)
    return lax.fori_loop(Int(0), Int(entries), attempt, jnp.zeros(wanted.shape, table.dtype))
'''

SKELETON = '''
"""Attention forward on TPU (Pallas, Mosaic), written by frisket."""
# What it computes:
#
$text

import functools
$math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK_Q, BLOCK_K = $block_q, $block_k
GROUP = $group  # query heads to a key head
SCALE = $scale
EXACT = lax.Precision.$exact
LEAST = -3.4028234663852886e38  # the running maximum starts finite: -inf - LEAST is -inf, never NaN
Int, Float = jnp.int32, jnp.float32
$prelude


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
    $refs,
    out_ref, lse_ref, top, total, $kept, *, $shapes
):
    batch, head, tile, step = (pl.program_id(axis) for axis in range(4))
    steps = pl.num_programs(3)
    key_tile, inside, full = locate(batch, head, tile, step, first_row, count, records)

    @pl.when(step == 0)
    def start():
        top[...] = jnp.full(top.shape, LEAST, Float)
        total[...] = jnp.zeros(total.shape, Float)
        acc[...] = jnp.zeros(acc.shape, Float)
        $turned

    def visit(partial):
        $here
        v = v_ref[0, 0]
        s = lax.dot_general(
            q_ref[0, 0], k_ref[0, 0], (((1,), (1,)), ((), ())), precision=EXACT, preferred_element_type=Float
        )
        s = s * SCALE
        $score
        if partial:  # the mask
            $seen
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
    $cast
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    tiles = pl.cdiv(q_len, BLOCK_Q)
    first_row = jnp.asarray(slice_of, Int).reshape(batch, heads) * tiles
    count, records = jnp.asarray(count, Int), jnp.asarray(records, Int)
    q_origin, k_origin = (jnp.broadcast_to(jnp.asarray(x, Int), (batch,)) for x in origin[2:])
    $before
    scalars = ($passed)

    def at_query(b, h, tile, step, *_):
        return b, h, tile, 0

    def at_key(b, h, tile, step, first_row, count, records, *_):
        return b, lax.div(h, Int(GROUP)), locate(b, h, tile, step, first_row, count, records)[0], 0
    $blocks

    out, lse = pl.pallas_call(
        functools.partial(kernel, $static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=$number,
            grid=(batch, heads, tiles, steps),
            in_specs=[
                pl.BlockSpec((1, 1, BLOCK_Q, dim), at_query),
                pl.BlockSpec((1, 1, BLOCK_K, dim), at_key),
                pl.BlockSpec((1, 1, BLOCK_K, v_dim), at_key),
                $specs
            ],
            out_specs=[
                pl.BlockSpec((1, 1, BLOCK_Q, v_dim), at_query),
                pl.BlockSpec((1, 1, 1, BLOCK_Q), lambda b, h, tile, step, *_: (b, h, 0, tile)),
            ],
            scratch_shapes=[
                pltpu.VMEM((BLOCK_Q, 1), Float),
                pltpu.VMEM((BLOCK_Q, 1), Float),
                pltpu.VMEM((BLOCK_Q, v_dim), Float),
                $scratch
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
    )($operands)
    return out.swapaxes(1, 2), lse[:, :, 0]
'''

PER_QUERY = """
def per_query(x):
    return pl.BlockSpec(
        (1, 1, 1, BLOCK_Q), lambda b, h, tile, step, *_: (share(b, x, 0), share(h, x, 1), 0, tile)
    )
"""

PER_KEY = """
def per_key(x):
    def at(b, h, *rest):
        return share(b, x, 0), share(h, x, 1), 0, at_key(b, h, *rest)[2]

    return pl.BlockSpec((1, 1, 1, BLOCK_K), at)
"""

PER_PAIR = """
def per_pair(x):
    def at(b, h, tile, *rest):
        return share(b, x, 0), share(h, x, 1), tile, at_key(b, h, tile, *rest)[2]

    return pl.BlockSpec((1, 1, BLOCK_Q, BLOCK_K), at)
"""

SHARE = """
def share(i, x, axis):
    return jnp.minimum(i, x.shape[axis] - 1)  # one for all, or one each
"""
