$# The text of Pallas kernels for Hopper, with holes: shared parts, and the forward of `pallas_gpu.forward.emit`.
$# `interpreted` and `products_interpreted` are for Mosaic GPU's interpreter: it has no layouts, reads and writes only
$# inside of an array, and multiplies only operands in shared memory.

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

$part pairs

def paved(values):
    """Values of pairs, whole tiles long both ways."""
    q_len, kv_len = values.shape[2:]
    return jnp.pad(values, ((0, 0), (0, 0), (0, -q_len % BLOCK_Q), (0, -kv_len % BLOCK_K)))


def of_pair(values, batch, head, start, tile):
    here = (*owner(values, batch, head), pl.ds(start, TILE[0]), pl.ds(tile * BLOCK_K, BLOCK_K))
    return load(values.at[here], None)

$part distances

def distances(q_len, kv_len):
    """$across - $down, in local positions, from the last rows of tiles to the last columns."""
    q_ends, k_ends = pl.cdiv(q_len, BLOCK_Q) * BLOCK_Q, pl.cdiv(kv_len, BLOCK_K) * BLOCK_K
    return jnp.arange(1 - ${down}_ends, 1 + ${across}_ends, dtype=Int)


def windows(values):
    """[.., .., HALF, n] of values per distance [.., .., 1, length], each row one distance behind the row above, so
    that every tile is a rectangle of it, whose rows begin where 16 bytes do."""
    n = values.shape[-1] - HALF
    return jnp.concatenate([values[..., HALF - 1 - i : HALF - 1 - i + n] for i in range(HALF)], 2)


def of_distance(values, batch, head, apart):
    return load(values.at[(*owner(values, batch, head), slice(None), pl.ds(apart, TILE[1]))], None)

$part forward
"""Attention forward on Hopper (Pallas, Mosaic GPU), written by frisket."""
# What it computes:
#
$text

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

BLOCK_Q, BLOCK_K = $block_q, $block_k
HALF = BLOCK_Q // 2  # queries of one of the two warpgroups that compute
TILE = HALF, BLOCK_K
DIM, DIM_V = $dim, $dim_v  # whole swizzles of 64
GROUP = $group  # query heads to a key head
STAGES = $stages  # tiles of keys that are read ahead
SCALE = $scale
UNIT = $unit  # the softmax is to base 2
$shared
$products
$prelude


def kernel(
    $refs,
    q_ref, k_ref, v_ref, out_ref, lse_ref, top_ref,$low_ref
    query, keys, values, ends,$room q_ready, k_ready, v_ready, k_free, v_free, turn, *, kv_len
):
    batch, head, wg = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("wg")
    distinct, place = slice_of[batch, head], lax.axis_index("row")
    row = order[distinct, place]
    runs, steps = (count[distinct, place, i] for i in range(2))

    def run(i):
        """lo <= full_lo <= full_hi <= hi: the tiles of a run, of which full_lo to full_hi need no mask."""
        return (records[distinct, place, i, end] for end in range(4))

    @pl.when(wg < 2)
    def compute():
        plgpu.set_max_registers(240, action="increase")
        start = row * BLOCK_Q + wg * HALF
        line = pl.ds(start, HALF)
        plgpu.copy_gmem_to_smem(q_ref.at[batch, line, head], query.at[wg], q_ready.at[wg])
        plgpu.barrier_wait(q_ready.at[wg])
        $once

        def take_turns():
            """The warpgroups compute in turn: one multiplies while the other computes its softmax."""
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        @pl.when(steps > 0)
        def first():
            plgpu.barrier_wait(k_ready.at[0])

        pl.when(wg == 1)(take_turns)

        def visit(tile, carry, partial):
            acc, top, total, step = carry
            slot = slot_of(step)
            s = scores_of(query.at[wg], keys.at[slot], take_turns)
            plgpu.barrier_arrive(k_free.at[slot])
            $score
            if partial:
                $seen
                if kv_len % BLOCK_K:  # behind the last key
                    behind = steps_along(1) >= kv_len - tile * BLOCK_K
                    s = jnp.where(across(behind), -jnp.inf, s)
            peak = jnp.maximum(top, s.max(axis=1) * UNIT)
            shrink = jnp.exp2(top - peak)
            p = jnp.exp2(exponent(s, UNIT, down(peak)))
            acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
            total *= shrink
            if DIM_V <= 128:  # beyond that registers are short: the sum is found after the turn
                total += p.sum(axis=1)
            weights = p
            $kept
            weights = weights.astype(values.dtype)
            if DIM_V <= 128:
                acc, total, peak, weights = lax.optimization_barrier((acc, total, peak, weights))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_ready.at[slot])
            plgpu.barrier_wait(turn)
            if DIM_V > 128:
                total += p.sum(axis=1)

            def wait_for_keys():
                @pl.when(step + 1 < steps)
                def more():
                    plgpu.barrier_wait(k_ready.at[slot_of(step + 1)])

            acc = gathered(acc, weights, values.at[slot], wait_for_keys)
            plgpu.barrier_arrive(v_free.at[slot])
            return acc, peak, total, step + 1

        def walk(i, carry):
            lo, full_lo, full_hi, hi = run(i)

            def border(j, carry):
                return visit(jnp.where(j < full_lo, j, j - full_lo + full_hi), carry, partial=True)

            carry = lax.fori_loop(lo, hi - full_hi + full_lo, border, carry)
            return lax.fori_loop(full_lo, full_hi, functools.partial(visit, partial=False), carry)

        nothing = zeros(HALF, DIM_V), zeros(HALF) + LOWEST, zeros(HALF), Int(0)
        acc, top, total, _ = lax.fori_loop(Int(0), runs, walk, nothing)
        pl.when(wg == 0)(take_turns)

        $# The kernel works in exponents of 2, which the machine has an instruction for.
        largest = top * LN2  $if not guard
        largest = jnp.where(total == 0.0, -jnp.inf, top * LN2)  $if guard
        weight = 1.0  $if not sinks
        $if sinks:
            sink = sinks[head] * LOG2E  # one more logit, without a value
            peak = jnp.maximum(top, sink)
            weight = jnp.exp2(top - peak)
            total = total * weight + jnp.exp2(sink - peak)
            top = peak
        $if guard:
            empty = total == 0.0  # a row without a visible key gives 0, and lse -inf
            total = jnp.where(empty, 1.0, total)
        lse = (top + jnp.log2(total)) * LN2  $if not guard
        lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) * LN2)  $if guard
        $if lse_residual:
            # by the product that the backward begins with, rounded, so that no compiler joins it to the sum
            low = $low  $if not guard
            low = jnp.where(empty, 0.0, $low)  $if guard
        $# One division per row instead of one per entry of the accumulator.
        weight = weight / $divisor
        ends[wg, 0] = lse
        ends[wg, 1] = largest
        ends[wg, 2] = low  $if lse_residual
        ${result}[wg] = (acc * lax.broadcast_in_dim(weight, acc.shape, [0])).astype(query.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(${result}.at[wg], out_ref.at[batch, line, head])
        plgpu.copy_smem_to_gmem(ends.at[wg, 0], lse_ref.at[batch, head, line])
        plgpu.copy_smem_to_gmem(ends.at[wg, 1], top_ref.at[batch, head, line])
        plgpu.copy_smem_to_gmem(ends.at[wg, 2], low_ref.at[batch, head, line])  $if lse_residual
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == 2)
    def read():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, Int(GROUP))

        def walk(i, step):
            lo, full_lo, full_hi, hi = run(i)
            full = hi - full_hi + full_lo  # from here on: in the order of those that compute

            def fetch(j, step):
                tile = jnp.where(j < full_lo, j, jnp.where(j < full, j - full_lo + full_hi, j - full + full_lo))
                here = batch, pl.ds(tile * BLOCK_K, BLOCK_K), kv_head
                slot = slot_of(step)

                def free(barrier):
                    @pl.when(step >= STAGES)
                    def used():
                        plgpu.barrier_wait(barrier.at[slot])

                free(k_free)
                plgpu.copy_gmem_to_smem(k_ref.at[here], keys.at[slot], k_ready.at[slot])
                free(v_free)
                plgpu.copy_gmem_to_smem(v_ref.at[here], values.at[slot], v_ready.at[slot])
                return step + 1

            return lax.fori_loop(lo, hi, fetch, step)

        lax.fori_loop(Int(0), runs, walk, Int(0))

        def last(step, carry):
            plgpu.barrier_wait(k_free.at[slot_of(step)])
            plgpu.barrier_wait(v_free.at[slot_of(step)])
            return carry

        lax.fori_loop(jnp.maximum(steps - STAGES, 0), steps, last, None)  # no signal is left over


def attention_forward(
    query, key, value, slice_of, order, count, records, origin, sizes, $arguments
):
    """(out, lse, largest score$named) of query, key and value [batch, length, heads, dim].

    `slice_of` [batch, heads], `order` [slices, rows], `count` [slices, rows, 2] (runs, tiles) and `records` [slices,
    rows, runs, 4] are those of `GpuWalk.in_order`; `origin` and `sizes` place the call in the whole problem.
    """
    batch, q_len, heads, _ = query.shape
    kv_len, v_dim, dtype, rows = key.shape[1], value.shape[3], query.dtype, order.shape[1]
    $before
    query, key, value = padded(query, BLOCK_Q, DIM), padded(key, BLOCK_K, DIM), padded(value, BLOCK_K, DIM_V)
    per_query = jax.ShapeDtypeStruct((batch, heads, rows * BLOCK_Q), Float)
    out, *found = plgpu.kernel(
        functools.partial(kernel, kv_len=kv_len),
        out_type=[jax.ShapeDtypeStruct((batch, query.shape[1], heads, DIM_V), dtype), *[per_query] * $rows],
        scratch_types=[
            plgpu.SMEM((2, HALF, DIM), dtype, transforms=TILED),
            plgpu.SMEM((STAGES, BLOCK_K, DIM), dtype, transforms=TILED),
            plgpu.SMEM((STAGES, BLOCK_K, DIM_V), dtype, transforms=TILED),
            plgpu.SMEM((2, $rows, HALF), Float),
            plgpu.SMEM((2, HALF, DIM_V), dtype, transforms=TILED),  $if own_result
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(batch, heads, rows),
        grid_names=("batch", "head", "row"),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=$fast, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
    )($operands, query, key, value)
    return out[:, :q_len, :, :v_dim], *(x[..., :q_len] for x in found)

$part products

def scores_of(rows, keys, meanwhile):
    """rows @ keys.T; `meanwhile` runs while the tensor cores do."""

    def product(found):
        plgpu.wgmma(found, rows, transposed(keys))
        meanwhile()
        return found[...]

    return pl.run_scoped(product, plgpu.ACC(TILE, Float))


def gathered(acc, weights, values, meanwhile):
    """acc + weights @ values, where `weights` and `acc` are in registers."""

    def product(found):
        plgpu.wgmma(found, weights, values)
        meanwhile()

    return pl.run_state(product)(plgpu.ACC.init(acc))


def padded(x, block, dim):
    """With zeros behind its dims, and its length in eights, as swizzles have them; behind it, zeros are read."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, dim - x.shape[3])))

$part products_interpreted

def product(a, b, axes):
    found = lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=Float)
    plgpu.commit_smem()  # orders these reads before writes of TMA
    return found


def scores_of(rows, keys, meanwhile):
    meanwhile()
    return product(rows[...], keys[...], ((1,), (1,)))


def gathered(acc, weights, values, meanwhile):
    meanwhile()
    return acc + product(weights, values[...], ((1,), (0,)))


def padded(x, block, dim):
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, dim - x.shape[3])))
