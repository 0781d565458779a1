"""Statistics of weights in JAX's own operators, one row of tiles at a time."""

from __future__ import annotations

from typing import Any

from frisket.lowering.plan import KernelInputs

from .differentiable import XlaForm
from .tiles import ZERO, Numbers, XlaTiles, added, prepared

Array = Any  # a jax.Array, traced or not


def statistics(
    form: XlaForm, lse: Array | None, *, columns: bool, entropy: bool, argmax: bool, top: int
) -> dict[str, Array]:
    """The statistics that are asked for, by name: columns [batch, kv_heads, group, kv_len], others [batch, heads,
    q_len, ...]. `lse` [batch, heads, q_len] is that of a call, or None."""
    import jax
    import jax.numpy as jnp

    t = form.t
    lse = None if lse is None else t.padded(lse.astype(t.static.dtype), 2)
    total = t.full((t.batch, t.heads, -(-t.kv_len // form.block_k) + 1, form.block_k), 0.0) if columns else None

    def step(total: Array | None, place: Any) -> Any:
        r, tiles, _ = place
        lines, of_keys = jax.checkpoint(row, prevent_cse=False)(form.arrays, lse, *place)
        if total is not None:
            b, h, _ = t.place(r)
            shape = (t.static.batches, t.static.heads, *total.shape[2:])
            mine = jax.lax.dynamic_slice(total, (b, h, ZERO, ZERO), shape)
            mine = mine.at[:, :, tiles].add(of_keys.reshape(*shape[:2], len(tiles), -1))
            total = jax.lax.dynamic_update_slice(total, mine, (b, h, ZERO, ZERO))
        return total, lines

    def row(arrays: dict[str, Array], lse: Array | None, r: Array, tiles: Array, records: Any) -> Any:
        tile_row = t.row(r)
        s, hidden, env = form.products(arrays, tile_row, tiles, records)
        if t.static.plan.weighted:
            p = form.shares(s, hidden, env, arrays)
            # a key that weighs nothing may be in a tile that is not read
            m = jnp.where(p > 0, p, -jnp.inf)
            return largest_of(m, p, tiles), p.sum(3) if columns else None
        m, hidden = form.scores(s, hidden, env, arrays)
        largest = jax.lax.stop_gradient(m).max(-1)
        if (sink := form.sinks(arrays, tile_row)) is not None:
            largest = jnp.maximum(largest, jax.lax.stop_gradient(sink))
        base = largest if lse is None else t.lines(lse, tile_row)
        base = jnp.where(base == -jnp.inf, 0, base)  # -inf - -inf is NaN
        log = jnp.where(hidden, 0, m - base[..., None])
        p = jnp.where(hidden, 0, jnp.exp(log))
        if sink is not None:
            log_sink = jnp.where(sink == -jnp.inf, 0, sink - base)
            p_sink = jnp.where(sink == -jnp.inf, 0, jnp.exp(log_sink))
        if lse is None:
            sums = p.sum(-1) if sink is None else p.sum(-1) + p_sink
            sums = jnp.where(sums == 0, 1, sums)
            p, log = p / sums[..., None], log - jnp.log(sums)[..., None]
            if sink is not None:
                p_sink, log_sink = p_sink / sums, log_sink - jnp.log(sums)
        lines = {}
        if entropy:
            lines["entropy"] = -(p * log).sum(-1)
            lines["entropy"] -= 0 if sink is None else p_sink * log_sink
        return lines | largest_of(m, p, tiles), p.sum(3) if columns else None

    def largest_of(m: Array, p: Array, tiles: Array) -> dict[str, Array]:
        """The keys with the largest `m`, -1 where it is -inf, and their weights."""
        if not (argmax or top):
            return {}
        # of equal scores the first one counts, as in `lax.top_k`
        score, at = jax.lax.top_k(jax.lax.stop_gradient(m), min(max(top, argmax), m.shape[-1]))
        key = jnp.where(score == -jnp.inf, -1, form.local(tiles)[at])
        weight = jnp.where(score == -jnp.inf, 0, jnp.take_along_axis(p, at, -1))
        lines = {"argmax": key[..., 0], "argmax_weight": weight[..., 0]} if argmax else {}
        if top:
            more = [(0, 0)] * 4 + [(0, max(0, top - key.shape[-1]))]
            lines |= {"top": jnp.pad(key, more, constant_values=-1), "top_weight": jnp.pad(weight, more)}
        return lines

    parts = []
    for place in form.places():
        total, lines = jax.lax.scan(step, total, place)
        parts.append(lines)
    sums = {n: form.lines([x[n] for x in parts]) for n in parts[0]}
    if total is not None:
        total = total.reshape(t.batch, t.kv_heads, t.group, -1)
        sums["columns"] = total[..., : t.kv_len]
    return sums


def columns(inputs: KernelInputs, q: Array, k: Array, lse: Array) -> Array:
    """The weights exp(score - lse) of each key, summed over the queries of each head: [batch, heads, kv_len]. It has no
    derivative: its loops are those of the forward."""
    import jax
    import jax.numpy as jnp

    static, numbers = prepared(inputs, q.dtype == jnp.float64)
    t = XlaTiles(static, Numbers(*jax.tree.map(jnp.asarray, tuple(numbers))), q, k)
    q, lse = t.padded(q), t.padded(lse.astype(static.dtype), 2, -jnp.inf)

    def row(r: Array, total: Array) -> Array:
        tile_row = t.row(r)
        q_tile, base = t.queries(q, tile_row) * static.scale, t.lines(lse, tile_row)
        base = jnp.where(base == -jnp.inf, jnp.inf, base)[..., None]  # weights of a row that sees nothing are 0

        def step(body: Any, chunk: Any, total: Array) -> Array:
            s = t.scores(tile_row, body, chunk, q_tile, t.keys(k, tile_row, chunk[0], body.width))[0]
            part = jnp.exp(s - base).sum(3).reshape(static.batches, -1, body.width)
            return added(total, part, (tile_row.b, tile_row.h, chunk[0]))

        return t.visit(r, step, total)

    return jax.lax.fori_loop(0, t.steps, row, t.full((t.batch, t.heads, t.kv_len), 0.0))
