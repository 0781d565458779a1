$# The forward kernel for Hopper, with holes that `pallas_gpu.forward` fills.

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

$part kernel
def kernel(
    $values,  $if not sinks
    $values, sinks,  $if sinks
    q_ref, k_ref, v_ref, out_ref, lse_ref, top_ref,$low_ref
    query, keys, values, ends,$room q_ready, k_ready, v_ready, k_free, v_free, turn, *, length
):
    batch, head, wg = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("wg")
    distinct, place = slice_of[batch, head], lax.axis_index("tile")
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
                if length % BLOCK_K:  # behind the last key
                    behind = steps_along(1) >= length - tile * BLOCK_K
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

$part arguments
query, key, value, slice_of, order, count, records, origin, sizes, slots=(), tables=(),$sinks_argument interpret=None

$part doc
"""(out, lse, largest score$named) of query, key and value [batch, length, heads, dim].

$part of_rows
sinks = jnp.asarray(sinks, Float)  $if sinks

$part padded
query = padded(query, BLOCK_Q)

$part out_types
jax.ShapeDtypeStruct((batch, query.shape[1], heads, DIM_V), query.dtype),
*[jax.ShapeDtypeStruct((batch, heads, order.shape[1] * BLOCK_Q), Float)] * $rows,

$part scratch_types
tiles(2, HALF, DIM),
tiles(STAGES, BLOCK_K, DIM),
tiles(STAGES, BLOCK_K, DIM_V),
plgpu.SMEM((2, $rows, HALF), Float),
tiles(2, HALF, DIM_V),  $if room
signals(2, 1),
signals(STAGES, 1),
signals(STAGES, 1),
signals(STAGES, 2),
signals(STAGES, 2),
signals(1, 2),
