$# The module of every Pallas kernel for Hopper, with holes that `pallas_gpu.kernel` fills: constants, functions, a
$# kernel, and an entry that computes inputs, pads arrays to whole tiles and calls it.
$# `interpreted` and `products_interpreted` are for Mosaic GPU's interpreter: it has no layouts, reads and writes only
$# inside of an array, and multiplies only operands in shared memory.

$part head
"""Attention $title on Hopper (Pallas, Mosaic GPU), written by frisket$detail."""
# What it $does:
#
$text

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

BLOCK_Q, BLOCK_K = $block_q, $block_k
HALF = $own // 2  # of the program's own tile: what one of the two warpgroups that compute has
TILE = HALF, $across
DIM, DIM_V = $dim, $dim_v  # whole swizzles of 64
GROUP = $group  # query heads to a key head
STAGES = $stages  # tiles that are read ahead
SCALE = $scale
$unit
$shared
$narrow

$part shared
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
LOWEST = -3.4028234663852886e38  # a running maximum starts finite: -inf - LOWEST is -inf, never NaN
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
LAYOUT = plgpu.Layout.WGMMA
Int, Float = jnp.int32, jnp.float32


def slot_of(step):
    return lax.rem(step, Int(STAGES))


def down(vector):
    """A value per row, over a tile."""
    return lax.broadcast_in_dim(vector, TILE, [0])


def across(vector):
    """A value per column, over a tile."""
    return lax.broadcast_in_dim(vector, TILE, [1])


def tiled(value):
    return jnp.broadcast_to(value, TILE)


def owner(values, batch, head):
    """Where values [1 or batch, 1 or heads, ...] of a batch entry and head lie."""
    return tuple(index if size > 1 else 0 for index, size in zip((batch, head), values.shape))


def of_line(values, batch, head, line, axis):
    """Of values [.., .., length] those along a line of positions."""
    return load(values.at[(*owner(values, batch, head), line)], axis)


def lined(values, block):
    """[.., .., length], whole tiles long, of values [.., .., 1, length]."""
    values = values.reshape(*values.shape[:2], values.shape[-1])
    return jnp.pad(values, ((0, 0), (0, 0), (0, -values.shape[-1] % block)))

$part on_device

def steps_along(axis):
    return plgpu.broadcasted_iota(Int, (TILE[axis],), 0, layout=LAYOUT.reduce(1 - axis))


def load(values, axis):
    """A vector along an axis of a tile, or a tile (axis None), from global memory."""
    beside = () if hasattr(plgpu, "InterpretGPUParams") else ((),)  # JAX 0.10 wants an index beside the reference
    layout = LAYOUT if axis is None else LAYOUT.reduce(1 - axis)
    return plgpu.load(values, *beside, layout=layout, optimized=False)


def transposed(tile):
    if hasattr(plgpu, "InterpretGPUParams"):
        return tile.transpose((1, 0))
    return plgpu.transpose_ref(tile, (1, 0))  # JAX 0.10


def exponent(score, unit, base):
    return score * unit - base


def zeros(*shape):
    return plgpu.layout_cast(jnp.zeros(shape, Float), LAYOUT if len(shape) == 2 else LAYOUT.reduce(1))


def padded(x, block):
    """The array with zeros behind its end: a length in eights, a width in 64s, as swizzles have them."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, -x.shape[3] % 64)))

$part interpreted

def steps_along(axis):
    return lax.broadcasted_iota(Int, (TILE[axis],), 0)


def load(values, axis):
    return values[...]


def exponent(score, unit, base):
    product = score * unit  # rounded here, which XLA on a CPU would do in one kernel and not in another
    return jnp.where(product < LOWEST, -jnp.inf, product) - base


def zeros(*shape):
    return jnp.zeros(shape, Float)


def padded(x, block):
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, -x.shape[3] % 64)))

$part pairs
def paved(values):
    """Values of pairs, whole tiles long both ways."""  $if not turned
    """Values of pairs, keys first, whole tiles long both ways."""  $if turned
    q_len, kv_len = values.shape[2:]
    return jnp.pad(values, ((0, 0), (0, 0), (0, -q_len % BLOCK_Q), (0, -kv_len % BLOCK_K)))  $if not turned
    return jnp.pad(values.swapaxes(2, 3), ((0, 0), (0, 0), (0, -kv_len % BLOCK_K), (0, -q_len % BLOCK_Q)))  $if turned


def of_pair(values, batch, head, start, tile):
    here = (*owner(values, batch, head), pl.ds(start, TILE[0]), pl.ds(tile * $across, $across))
    return load(values.at[here], None)

$part distances
def distances(q_len, kv_len):
    """$other - $down, in local positions, from the last rows of tiles to the last columns."""
    q_ends, k_ends = pl.cdiv(q_len, BLOCK_Q) * BLOCK_Q, pl.cdiv(kv_len, BLOCK_K) * BLOCK_K
    return jnp.arange(1 - ${down}_ends, 1 + ${other}_ends, dtype=Int)


def windows(values):
    """[.., .., HALF, n] of values per distance [.., .., 1, length], each row one distance behind the row above, so
    that every tile is a rectangle of it, whose rows begin where 16 bytes do."""
    n = values.shape[-1] - HALF
    return jnp.concatenate([values[..., HALF - 1 - i : HALF - 1 - i + n] for i in range(HALF)], 2)


def of_distance(values, batch, head, apart):
    return load(values.at[(*owner(values, batch, head), slice(None), pl.ds(apart, TILE[1]))], None)

$part call
def $name(
    $arguments
):
    $doc

    `slice_of` [batch, heads], `order` [slices, rows], `count` [slices, rows, 2] (runs, tiles) and `records` [slices,
    rows, runs, 4] are those of `$walk`; `origin` and `sizes` place the call in the whole problem.
    """
    batch, q_len, heads, dim = query.shape
    _, kv_len, kv_heads, v_dim = value.shape
    $before
    $of_rows
    $padded
    key, value = padded(key, BLOCK_K), padded(value, BLOCK_K)

    def tiles(number, length, dim):
        return plgpu.SMEM((number, length, dim), query.dtype, transforms=TILED)

    def signals(number, arrivals):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)

    found = plgpu.kernel(
        functools.partial(kernel, length=$length),
        out_type=(
            $out_types
        ),
        grid=(batch, ${axis}s, order.shape[1]),
        grid_names=("batch", "$axis", "tile"),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            $scratch_types
        ],
        compiler_params=plgpu.CompilerParams(approx_math=$fast, lowering_semantics=plgpu.LoweringSemantics.$semantics),
        interpret=interpret,
    )($values, $operands)
    return $returned
