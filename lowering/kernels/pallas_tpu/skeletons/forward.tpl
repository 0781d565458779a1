$# The text of the Pallas TPU forward kernel, with holes that `pallas_tpu.forward.emit` fills.

$part head
"""$title on TPU (Pallas, Mosaic), written by frisket."""
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
$sharing
SCALE = $scale
EXACT = lax.Precision.$exact
Int, Float = jnp.int32, jnp.float32

$part skeleton
LEAST = -3.4028234663852886e38  # the running maximum starts finite: -inf - LEAST is -inf, never NaN
$definitions


$locate


def kernel(
    $refs
    out_ref, lse_ref, top_ref,$low_ref top, total, acc, $kept*, $static
):
    batch, $program, step = (pl.program_id(axis) for axis in range(3))
    ($located), (visits, full, starts, ends) = at(batch, $program, step, $walk)
    $head

    @pl.when(starts)
    def start():
        top[$own] = jnp.full(top.$shape, LEAST, Float)
        total[$own] = jnp.zeros(total.$shape, Float)
        acc[$own] = jnp.zeros(acc.$shape, Float)
        $turned

    def visit(partial):
        $here
        $stored
        s = lax.dot_general(
            q_ref[0, $part], $keys, (((1,), (1,)), ((), ())), precision=EXACT, preferred_element_type=Float
        )
        s = s * SCALE
        $score
        if partial:  # the mask
            $seen
            if kv_len % BLOCK_K:  # memory behind the last key may hold anything
                behind = kv_len - k_tile * BLOCK_K
                s = jnp.where(lax.broadcasted_iota(Int, (1, BLOCK_K), 1) < behind, s, -jnp.inf)
                v = jnp.where(lax.broadcasted_iota(Int, (BLOCK_K, 1), 0) < behind, v, jnp.zeros_like(v))
        new = jnp.maximum(top[$own], s.max(axis=1, keepdims=True))
        p = jnp.exp(s - wide(new, BLOCK_K))
        shrink = jnp.exp(top[$own] - new)
        total[$own] = total[$own] * shrink + p.sum(axis=1, keepdims=True)
        $drop
        $weigh
        acc[$own] = acc[$own] * wide(shrink, acc.shape[-1]) + lax.dot_general(
            p.astype(v.dtype), v, (((1,), (0,)), ((), ())), precision=EXACT, preferred_element_type=Float
        )
        top[$own] = new

    @pl.when(visits & full)
    def visit_full():
        visit(partial=False)

    @pl.when(visits & jnp.logical_not(full))
    def visit_partial():
        visit(partial=True)

    @pl.when(ends)
    def finish():
        most, whole = top[$own], total[$own]
        top_ref[0, $part] = laid(jnp.where(whole == 0, -jnp.inf, most))
        $sink
        nothing = whole == 0
        out_ref[0, $part] = ($out / wide(jnp.where(nothing, 1, whole), acc.shape[-1])).astype(out_ref.dtype)
        lse = most + jnp.log(whole)
        lse_ref[0, $part] = laid(jnp.where(nothing, -jnp.inf, lse))
        $low


def laid(column):
    """[BLOCK_Q, 128], 128 times one column, as [1, BLOCK_Q]."""
    return column.T[:1]


$wide


def attention_forward(query, key, value, walk, origin, sizes, slots=(), tables=(), sinks=None, interpret=False):
    """(out [batch, q_len, heads, v_dim], lse, top$named [batch, heads, q_len]) of arrays
    [batch, length, heads, dim]."""
    batch, q_len, heads, dim = query.shape
    $lengths
    $cast
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
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
        _, _, q_tile, _ = place(b, h, *step)
        return b, h, q_tile, 0

    $at_key

    def at_row(b, h, *step):
        _, _, q_tile, _ = place(b, h, *step)
        return b, h, 0, q_tile

    out, *rows = pl.pallas_call(
        functools.partial(kernel, at=at, $given),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=$number,
            grid=(batch, $programs, steps),
            in_specs=[
                pl.BlockSpec((1, $together, BLOCK_Q, dim), at_query),
                $of_keys
                $specs
            ],
            out_specs=[
                pl.BlockSpec((1, $together, BLOCK_Q, v_dim), at_query),
                *[pl.BlockSpec((1, $together, 1, BLOCK_Q), at_row)] * $rows,
            ],
            scratch_shapes=[
                pltpu.VMEM((${shared}BLOCK_Q, 128), Float),
                pltpu.VMEM((${shared}BLOCK_Q, 128), Float),
                pltpu.VMEM((${shared}BLOCK_Q, v_dim), Float),
                $scratch
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, q_len, v_dim), query.dtype),
            *[jax.ShapeDtypeStruct((batch, heads, 1, q_len), Float)] * $rows,
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )($operands)
    return out.swapaxes(1, 2)$narrowed, *(row[:, :, 0] for row in rows)

$part at_key
def at_key(b, h, *step):
    _, _, _, k_tile = place(b, h, *step)
    return b, $kv_head, k_tile, 0

$part together
def together(dtype, *refs):
    """The pages of a tile, converted each by itself."""
    return jnp.concatenate([ref[0, 0].astype(dtype) for ref in refs])

$part at_page
def at_page(part):
    def at(*step):
        b, h, *step = step
        _, _, _, k_tile = place(b, h, *step)
        token = k_tile * BLOCK_K + part * PAGE
        entry = jnp.minimum(lax.div(token, Int(PAGE)), pages.shape[1] - 1)
        page = step[$pages][b * pages.shape[1] + entry]
        return page, $kv_head, lax.div(lax.rem(token, Int(PAGE)), Int(ROWS)), 0

    return at

$part low
# The rounding error of lse: at large scores, all but the largest.
low_ref[0, $part] = laid(jnp.where(nothing, 0, most - lse + jnp.log(whole)))

$part unwritten
# Values that no query sees may never have been written: a NaN there must not reach the sums.
rows = q_tile * BLOCK_Q + lax.broadcasted_iota(Int, (BLOCK_Q, 1), 0) < q_len
some = jnp.where(seen & rows, 1.0, 0.0).max(axis=0, keepdims=True)
v = jnp.where(turned(some) > 0, v, jnp.zeros_like(v))

$part sink
sink = sinks[head]
higher = jnp.maximum(most, sink)
shrink = jnp.exp(most - higher)
most, whole = higher, whole * shrink + jnp.exp(sink - higher)
