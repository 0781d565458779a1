$# The backward kernels for Hopper, with holes that `pallas_gpu.backward` fills.

$part loops
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

$part products_interpreted
def dot(a, b, axis):
    found = lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=Float)
    plgpu.commit_smem()  # orders these reads before writes of TMA
    return found


def with_products(use, *pairs):
    return use(*(functools.partial(lambda a, b, *start: sum(start, dot(a[...], b[...], 1)), *pair) for pair in pairs))


def added(totals, *pairs):
    return tuple(total + dot(a, b[...], 0) for total, (a, b) in zip(totals, pairs, strict=True))

$part queries
def kernel($values, q_ref, k_ref, v_ref, dout_ref, lse_ref, low_ref, delta_ref, $refs, query, dout, key, value,$buffers own_ready, ready, free, *, length):
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
                $total = $total + ${total}_here
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
def kernel($values, q_ref, k_ref,$v_ref dout_ref, lse_ref, low_ref,$delta_ref $refs, key, value, query, dout, lses, lows,$deltas own_ready, ready, free, *, length):
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

$part weights
$once
$modified
$# low after the difference, which is small: in lse it would be rounded away
p = jnp.exp2(exponent($exponent) - $low)
if border:
    $hidden
    $# the axis across, whose last tile may be cut; of the own rows those outside are not stored
    if length % $across:
        p = jnp.where(across(tile * $across + steps_along(1) < length), p, 0.0)
$kept

$part arguments
query, key, value, dout, lse, low, delta, slice_of, order, count, records, origin, sizes, slots, tables,
interpret=None,

$part doc
"""$what, of arrays [batch, length, heads, dim], and `lse` (inf of a row without keys), `low`, what rounding
took from it, both to base 2, and `delta` [batch, heads, q_len].

$part of_rows
behind = ((0, 0), (0, 0), (0, -q_len % BLOCK_Q))
lse, low, delta = jnp.pad(lse, behind, constant_values=jnp.inf), jnp.pad(low, behind), jnp.pad(delta, behind)

$part padded
query, dout = padded(query, BLOCK_Q), padded(dout, BLOCK_Q)

$part out_types
$for outputs:
    jax.ShapeDtypeStruct($like.shape, $dtype),

$part scratch_types
tiles(2, HALF, DIM),
tiles(2, HALF, DIM_V),
tiles(STAGES, $across, DIM),
tiles(STAGES, $across, DIM_V),
$for vectors:
    plgpu.SMEM($shape, Float),
signals(2, $own_loads),
signals(STAGES, $loads),
signals(STAGES, 2),
