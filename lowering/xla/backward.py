"""The backward of the XLA executor: the forward's rows and chunks again, scores recomputed, five matrix products.

Gradients of keys, values and captured tables are carried through the loops and added to in place. Nothing has the
size of the scores, and nothing is differentiated but the score mod's own formula (`lowering.derive`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from frisket.grammar.memo import memo
from frisket.lowering.derive import Gradient, backward_of
from frisket.lowering.plan import Cotangents, ForwardResults, KernelInputs

from .captured import CapturedGradient, Plane, folded, plane_of
from .forward import unpack_out_residual
from .promotion import usual_promotion
from .tiles import Numbers, Static, XlaTiles, added, dot, prepared

if TYPE_CHECKING:
    import jax

Array = Any  # a jax.Array, traced or not


@usual_promotion()
def backward(
    inputs: KernelInputs,
    q: Array,
    k: Array,
    v: Array,
    results: ForwardResults,
    cotangents: Cotangents,
    *,
    grad_names: frozenset[str],
) -> dict[str, jax.Array]:
    """The gradients of `grad_names`, among "q", "k", "v" and the plan's names of tables and slots. They come from the
    cotangents of `out` [batch, q_len, heads, v_dim] and, unless None, of `lse` [batch, heads, q_len]. Those of q, k and
    v have the shapes and dtypes of the arrays, a table's has its shape, a slot's is 0-d, both in float32, or float64
    with float64. `lse` knows of the sinks, so that they are not read again; `softmax_stats` is the forward's fifth
    result."""
    import jax.numpy as jnp

    static, numbers = prepared(inputs, q.dtype == jnp.float64, grad_names)
    gradients, shapes = _captured(static), {n: np.shape(x) for n, x in inputs.tables.items()}
    planes = tuple(
        plane_of(g, inputs, shapes[g.source]) if g.over == "scatter" and g.index else None for g in gradients
    )
    of_rows = results.out, results.lse, results.lse_residual, results.softmax_stats
    arrays = q, k, v, *of_rows, cotangents.dout, cotangents.dlse
    grads, buffers = _compiled(static, planes)(arrays, *numbers)
    if buffers:
        grads |= folded(inputs, gradients, buffers, inputs.plan.int64)
    return dict(grads)


def _captured(static: Static) -> list[Gradient]:
    return [g for g in backward_of(static.plan).gradients if g.source in static.grad_names]


@memo(256)
def _compiled(static: Static, planes: tuple[Plane | None, ...]) -> Any:
    import jax

    def backward_of_attention(arrays: tuple[Any, ...], *numbers: Any) -> Any:
        (q, k, v), results, cotangents = arrays[:3], ForwardResults(*arrays[3:7]), Cotangents(*arrays[7:])
        t = XlaTiles(static, Numbers(*numbers), q, k)
        captured = [CapturedGradient(g, t, plane) for g, plane in zip(_captured(static), planes, strict=True)]
        return _backward(t, captured, (q, k, v), results, cotangents)

    return jax.jit(backward_of_attention)


def _backward(
    t: XlaTiles, captured: list[CapturedGradient], qkv: Any, results: ForwardResults, cotangents: Cotangents
) -> tuple[dict[str, Array], list[Array]]:
    import jax.numpy as jnp
    from jax import lax

    static, (q, k, v) = t.static, qkv
    out, lse, lse_residual, softmax_stats = results.out, results.lse, results.lse_residual, results.softmax_stats
    dout, dlse = cotangents.dout, cotangents.dlse
    slope = backward_of(static.plan).slope
    if static.plan.weighted:  # what the caller makes of out is in both cotangents, see `lowering.xla.weighted`
        out, softmax_stats = jnp.zeros_like(dout), None
    exact = out.astype(static.dtype)
    if softmax_stats is not None and softmax_stats.shape[3] > 2:
        exact = exact + unpack_out_residual(softmax_stats, out).astype(static.dtype)
    delta = (dout.astype(static.dtype) * exact).sum(-1).transpose(0, 2, 1)
    delta = t.padded(delta if dlse is None else delta - dlse, 2)
    lse_residual = t.padded(jnp.zeros_like(lse) if lse_residual is None else lse_residual, 2)
    # a row without keys, and a query beyond the end: exp(score - lse) is 0
    nowhere = float(np.finfo(static.dtype).max)
    lse = t.padded(jnp.where(lse == -jnp.inf, nowhere, lse), 2, nowhere)
    queries, dout = t.padded(q), t.padded(dout)

    def row(r: Array, sums: dict[str, Any]) -> dict[str, Any]:
        tile_row = t.row(r)
        q_tile, dout_tile = t.queries(queries, tile_row) * static.scale, t.queries(dout, tile_row) * t.keep
        lse_tile, residual_tile, delta_tile = (t.lines(x, tile_row)[..., None] for x in (lse, lse_residual, delta))
        # a row that sees nothing may have any cotangent, NaN too
        dout_tile = (
            dout_tile
            if static.plan.weighted
            else jnp.where((lse_tile == nowhere).reshape(*dout_tile.shape[:3], 1), 0, dout_tile)
        )
        plain_q = finite(q_tile)

        def step(body: Any, chunk: Any, state: Any) -> Any:
            (dq, parts), whole = state
            k_tile, v_tile = (t.keys(x, tile_row, chunk[0], body.width) for x in (k, v))
            s, env, seen = t.scores(tile_row, body, chunk, q_tile, k_tile)
            p = s if static.plan.weighted else jnp.exp(s - lse_tile - residual_tile)
            dp = dot(dout_tile, v_tile, (3, 3)).reshape(s.shape)
            weight = p
            if (survivors := t.survivors(env)) is not None:
                weight, dp = jnp.where(survivors, p, 0), jnp.where(survivors, dp, 0)
            if static.plan.weighted:
                p = jnp.broadcast_to(seen, s.shape).astype(s.dtype)  # whether there is a gradient, as for a softmax
                weight = jnp.where(p == 0, 0, weight)
            dm = jnp.where(p == 0, 0, p * (dp - delta_tile))  # 0 times NaN of dp would be NaN
            # a slope may be infinite where the weight is 0
            ds = dm if slope is None else jnp.where(p == 0, 0, dm * t.value(slope, env))
            ds, weight = (x.reshape(*q_tile.shape[:3], body.width) for x in (ds, weight))
            whole, place = dict(whole), (tile_row.b, tile_row.kv, chunk[0], jnp.int32(0))
            if "q" in static.grad_names:
                dq = dq + dot(ds, finite(k_tile), (3, 2))
            if "k" in static.grad_names:
                whole["k"] = added(whole["k"], dot(ds, plain_q, (2, 2)), place)
            if "v" in static.grad_names:
                # sums are laid out by heads, as products give them, and turned once at the end
                whole["v"] = added(whole["v"], dot(weight, dout_tile, (2, 2)), place)
            parts = tuple(c.line(part, p, dm, env) for c, part in zip(captured, parts, strict=True))
            for c, name in zip(captured, names, strict=True):
                whole[name] = c.tile(whole[name], p, dm, env, tile_row, chunk[0])
            return (dq, parts), whole

        dq = t.full(q_tile.shape, 0.0) if "q" in static.grad_names else None
        (dq, parts), sums = t.visit(r, step, ((dq, tuple(c.start() for c in captured)), sums))
        if "q" in static.grad_names:
            sums["q"] = t.put_queries(sums["q"], dq * static.scale, tile_row)
        for c, name, part in zip(captured, names, parts, strict=True):
            sums[name] = c.put(sums[name], part, tile_row)
        return sums

    def finite(x: Array) -> Array:
        """The finite value that may be multiplied with a hidden position's 0: 0 times NaN or infinity is NaN."""
        return jnp.where(jnp.isfinite(x), x, 0)

    names = [f"captured {i}" for i in range(len(captured))]
    begin = {n: c.buffer() for n, c in zip(names, captured, strict=True)}
    if "q" in static.grad_names:
        begin["q"] = t.full(queries.shape, 0.0, q.dtype)
    for n, x in (("k", k), ("v", v)):
        if n in static.grad_names:
            begin[n] = t.full((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), 0.0)
    sums = lax.fori_loop(0, t.steps, row, begin)
    grads = {n: sums[n].transpose(0, 2, 1, 3).astype(k.dtype) for n in ("k", "v") if n in sums}
    if "q" in sums:
        grads["q"] = sums["q"][:, : q.shape[1]]
    return grads, [c.whole(sums[n]) for n, c in zip(names, captured, strict=True)]
