$# The module of every Pallas TPU kernel, with holes that `pallas_tpu.kernel` fills: one function for a step of the grid,
$# and an entry that computes inputs, says which blocks of each array a step reads, and calls it.

$part module
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
$definitions


$locate
$above


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
$below


$signature
    $doc
    batch, q_len, heads, dim = query.shape
    $shapes
    $cast
    $arrays = (x.swapaxes(1, 2) for x in ($arrays))
    $of_rows
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

    $at_key

    $at_row

    $found = pl.pallas_call(
        functools.partial(kernel, $given),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=$number,
            grid=(batch, $programs, steps),
            in_specs=[
                pl.BlockSpec((1, $together, BLOCK_Q, dim), at_query),
                $in_specs
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

$part cast
dtype = query.dtype  # float16, which TPUs neither compute nor write

$part at_key
def at_key(b, h, *step):
    _, _, _, k_tile = place(b, h, *step)
    return b, $kv_head, k_tile, 0
