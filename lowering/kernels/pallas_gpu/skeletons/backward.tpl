$# The text of the backward kernels for Hopper, with holes that `pallas_gpu.backward.emit` fills.
$# `products_interpreted`: Mosaic GPU's interpreter lacks forms of wgmma, and reads and writes only inside of an array.
$# `pairs_turned`: values of pairs where keys lie down a tile.

$part head
"""Attention backward on Hopper (Pallas, Mosaic GPU), written by frisket: $what."""
# What it differentiates:
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
$shared
$narrow


def walk(slice_, row, count, records, border, full, carry):
    """`carry` through the tiles of a row, which is the number of it in `count` and `records`: of each record those that
    are not full, then those that are. The warpgroup that reads goes the same way as those that compute."""

    def record(i, carry):
        lo, full_lo, full_hi, hi = (records[slice_, row, i, end] for end in range(4))

        def outside(j, carry):
            return border(jnp.where(j < full_lo, j, j - full_lo + full_hi), carry)

        carry = lax.fori_loop(lo, hi - full_hi + full_lo, outside, carry)
        return lax.fori_loop(full_lo, full_hi, full, carry)

    return lax.fori_loop(Int(0), count[slice_, row, 0], record, carry)


def finish(steps, free):
    """No program ends before the last signals to it have come."""

    def last(step, carry):
        plgpu.barrier_wait(free.at[slot_of(step)])
        return carry

    lax.fori_loop(jnp.maximum(steps - STAGES, 0), steps, last, None)

$part products
def with_products(use, *pairs):
    """`use` of functions that give a @ b.T of every pair, plus a tile where there is a third: all are begun at once,
    and each is waited for where its function is called, in order."""

    def begun(*sums):
        for total, (_, _, *start) in zip(sums, pairs, strict=True):
            if start:
                total[...] = start[0]
        for total, (a, b, *_) in zip(sums, pairs, strict=True):
            plgpu.wgmma(total, a, transposed(b))
        behind = reversed(range(len(pairs)))
        return use(*(functools.partial(plgpu.wgmma_accumulator_load, s, wait_n=n) for s, n in zip(sums, behind)))

    return pl.run_scoped(begun, *(plgpu.ACC(TILE, Float) for _ in pairs))


def added(totals, *pairs):
    """totals[i] + a @ b of every pair, where `a` is in registers."""

    def products(sums):
        for total, (a, b) in zip(sums, pairs, strict=True):
            plgpu.wgmma(total, a, b)

    return pl.run_state(products)(tuple(plgpu.ACC.init(total) for total in totals))


def padded(x, block):
    """The array with zeros behind its end: a length in eights, a width in 64s, as swizzles have them."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, -x.shape[3] % 64)))

$part products_interpreted
def dot(a, b, axis):
    found = lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=Float)
    plgpu.commit_smem()  # orders these reads before writes of TMA
    return found


def with_products(use, *pairs):
    return use(*(functools.partial(lambda a, b, *start: sum(start, dot(a[...], b[...], 1)), *pair) for pair in pairs))


def added(totals, *pairs):
    return tuple(total + dot(a, b[...], 0) for total, (a, b) in zip(totals, pairs, strict=True))


def padded(x, block):
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, -x.shape[3] % 64)))

$part pairs_turned

def paved(values):
    """Values of pairs, keys first, whole tiles long both ways."""
    q_len, kv_len = values.shape[2:]
    return jnp.pad(values.swapaxes(2, 3), ((0, 0), (0, 0), (0, -kv_len % BLOCK_K), (0, -q_len % BLOCK_Q)))


def of_pair(values, batch, head, start, tile):
    here = (*owner(values, batch, head), pl.ds(start, TILE[0]), pl.ds(tile * BLOCK_Q, BLOCK_Q))
    return load(values.at[here], None)

$part queries
def kernel($refs):
    batch, head, place, wg = (lax.axis_index(name) for name in ("batch", "head", "tile", "wg"))
    slice_ = slice_of[batch, head]
    row = order[slice_, place]

    @pl.when(wg < 2)
    def compute():
        plgpu.set_max_registers(240, action="increase")
        start = row * BLOCK_Q + wg * HALF
        line = pl.ds(start, HALF)
        here = batch, line, head
        plgpu.copy_gmem_to_smem(q_ref.at[here], query.at[wg], own_ready.at[wg])
        plgpu.copy_gmem_to_smem(dout_ref.at[here], dout.at[wg], own_ready.at[wg])
        lse, low, delta = (load(ref.at[batch, head, line], 0) for ref in (lse_ref, low_ref, delta_ref))
        $once
        plgpu.barrier_wait(own_ready.at[wg])

        def visit(tile, carry, border):
            step, $sums = carry
            slot = slot_of(step)
            plgpu.barrier_wait(ready.at[slot])

            def cotangents(scores, inner):
                s = scores()
                $weights
                dp = inner()
                $cotangents
                return $found

            $names = with_products(cotangents, (query.at[wg], key.at[slot]), (dout.at[wg], value.at[slot]))
            (dq,) = added((dq,), (ds, key.at[slot]))  $if dq
            $for summed:
                $total = $total + $part
            plgpu.barrier_arrive(free.at[slot])
            return step + 1, $sums

        border, full = (functools.partial(visit, border=border) for border in (True, False))
        _, $sums = walk(slice_, place, count, records, border, full, (Int(0), $zeros))
        query[wg] = (dq * SCALE).astype(query.dtype)  $if dq
        $for summed:
            $buffer[wg] = $total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(query.at[wg], dq_ref.at[here])  $if dq
        $for summed:
            plgpu.copy_smem_to_gmem($buffer.at[wg], ${buffer}_ref.at[batch, head, line])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == 2)
    def memory():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, Int(GROUP))

        def fetch(tile, step):
            slot, there = slot_of(step), (batch, pl.ds(tile * BLOCK_K, BLOCK_K), kv_head)
            pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(free.at[slot]))
            plgpu.copy_gmem_to_smem(k_ref.at[there], key.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[there], value.at[slot], ready.at[slot])
            return step + 1

        finish(walk(slice_, place, count, records, fetch, fetch, Int(0)), free)

$part keys
def kernel($refs):
    batch, kv_head, tile, wg = (lax.axis_index(name) for name in ("batch", "kv_head", "tile", "wg"))
    row = order[slice_of[batch, kv_head * GROUP], tile]  # longest first, by the first head of the group

    def heads(of_head, carry):
        """The query heads of the key head, one after the other: nothing is added to by two programs."""

        def one(i, carry):
            head = kv_head * GROUP + i
            return of_head(head, slice_of[batch, head], carry)

        return lax.fori_loop(Int(0), Int(GROUP), one, carry)

    @pl.when(wg < 2)
    def compute():
        plgpu.set_max_registers(240, action="increase")
        start = row * BLOCK_K + wg * HALF
        line = pl.ds(start, HALF)
        here = batch, line, kv_head
        plgpu.copy_gmem_to_smem(k_ref.at[here], key.at[wg], own_ready.at[wg])
        plgpu.copy_gmem_to_smem(v_ref.at[here], value.at[wg], own_ready.at[wg])  $if dk
        plgpu.barrier_wait(own_ready.at[wg])

        def of_head(head, slice_, carry):
            $once

            def visit(tile, carry, border):
                step, $sums = carry
                slot = slot_of(step)
                plgpu.barrier_wait(ready.at[slot])

                delta = load(deltas.at[slot], 1)  $if dk and starts

                def cotangents($products):
                    s = scores()
                    lse, low = load(lses.at[slot], 1), load(lows.at[slot], 1)
                    $weights
                    dp = inner()  $if dk
                    delta = load(deltas.at[slot], 1)  $if dk and not starts
                    $cotangents
                    return $found

                $names = with_products(cotangents, $pairs)
                $sums = added($sums, $factors)
                plgpu.commit_smem()  # lse and its like were read as any memory is, and TMA writes there next
                plgpu.barrier_arrive(free.at[slot])
                return step + 1, $sums

            border, full = (functools.partial(visit, border=border) for border in (True, False))
            return walk(slice_, row, count, records, border, full, carry)

        _, $sums = heads(of_head, (Int(0), $zeros))
        key[wg] = (dk * SCALE).astype(key.dtype)  $if dk
        value[wg] = dv.astype(value.dtype)  $if dv
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(key.at[wg], dk_ref.at[here])  $if dk
        plgpu.copy_smem_to_gmem(value.at[wg], dv_ref.at[here])  $if dv
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == 2)
    def memory():
        plgpu.set_max_registers(24, action="decrease")

        def of_head(head, slice_, step):
            def fetch(tile, step):
                slot, line = slot_of(step), pl.ds(tile * BLOCK_Q, BLOCK_Q)
                pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(free.at[slot]))
                plgpu.copy_gmem_to_smem(q_ref.at[batch, line, head], query.at[slot], ready.at[slot])
                plgpu.copy_gmem_to_smem(dout_ref.at[batch, line, head], dout.at[slot], ready.at[slot])
                plgpu.copy_gmem_to_smem(lse_ref.at[batch, head, line], lses.at[slot], ready.at[slot])
                plgpu.copy_gmem_to_smem(low_ref.at[batch, head, line], lows.at[slot], ready.at[slot])
                plgpu.copy_gmem_to_smem(delta_ref.at[batch, head, line], deltas.at[slot], ready.at[slot])  $if dk
                return step + 1

            return walk(slice_, row, count, records, fetch, fetch, step)

        finish(heads(of_head, Int(0)), free)

$part call

def $name(
    query, key, value, dout, lse, low, delta, slice_of, order, count, records, origin, sizes, slots, tables,
    interpret=None,
):
    """$doc, of arrays [batch, length, heads, dim], and `lse` (inf of a row without keys), `low`, what rounding
    took from it, both to base 2, and `delta` [batch, heads, q_len].

    `slice_of` [batch, heads], `order` [slices, rows], `count` [slices, rows, 2] (runs, tiles) and `records` [slices,
    rows, runs, 4] are those of `pallas_gpu.walked`; `origin` and `sizes` place the call in the whole problem.
    """
    batch, q_len, heads, dim = query.shape
    _, kv_len, kv_heads, v_dim = value.shape
    $before
    behind = ((0, 0), (0, 0), (0, -q_len % BLOCK_Q))
    lse, low, delta = jnp.pad(lse, behind, constant_values=jnp.inf), jnp.pad(low, behind), jnp.pad(delta, behind)
    query, dout = padded(query, BLOCK_Q), padded(dout, BLOCK_Q)
    key, value = padded(key, BLOCK_K), padded(value, BLOCK_K)

    def tiles(number, length, dim):
        return plgpu.SMEM((number, length, dim), query.dtype, transforms=TILED)

    def signals(number, arrivals):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)

    found = plgpu.kernel(
        functools.partial(kernel, length=$length),
        out_type=(
            jax.ShapeDtypeStruct(query.shape, query.dtype),  $if dq
            $for summed:
                jax.ShapeDtypeStruct(lse.shape, Float),
            jax.ShapeDtypeStruct(value.shape, value.dtype),  $if dv
            jax.ShapeDtypeStruct(key.shape, key.dtype),  $if dk
        ),
        grid=(batch, ${head}s, order.shape[1]),
        grid_names=("batch", "$head", "tile"),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            tiles(2, HALF, DIM),
            tiles(2, HALF, DIM_V),
            tiles(STAGES, $across, DIM),
            tiles(STAGES, $across, DIM_V),
            $for vectors:
                plgpu.SMEM($shape, Float),
            signals(2, $own_loads),
            signals(STAGES, $loads),
            signals(STAGES, 2),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=$fast, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )($operands)
    return $returned
