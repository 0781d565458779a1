"""The forward of the XLA executor: online softmax over the visited key tiles, nothing gathered, no S x S array.

One compiled loop over q tiles; inside, one loop per *body* over that row's chunks of keys (`tiles.py`). Where one
chunk is all a row ever has (windows, documents) there is no inner loop. Where the spans themselves are traced, each
row works its chunks out of its records (`tiles.py`). Batch and heads ride in the batch dimensions of `dot_general`,
as many as a step has room for, or go one at a time where the mask differs between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from frisket.grammar.memo import memo
from frisket.lowering.plan import KernelInputs

from .promotion import usual_promotion
from .tiles import Numbers, Static, TileRow, XlaTiles, dot, prepared

if TYPE_CHECKING:
    import jax


@usual_promotion()
def forward(
    inputs: KernelInputs, q: jax.Array, k: jax.Array, v: jax.Array, *, lse_residual: bool = False
) -> tuple[jax.Array, ...]:
    """The forward: (out [batch, q_len, heads, v_dim], lse, top [batch, heads, q_len] in float32, natural log). It takes
    q [batch, q_len, heads, dim], k, v [batch, kv_len, kv_heads, dim] and sinks [heads], one more logit of every row.
    `top` is the largest visible score. With `lse_residual` a fourth array is the rounding error of lse: lse +
    lse_residual is what a backward subtracts from scores of any size. A fifth is then what rounding left out of `out`,
    see `pack_out_residual`. Float64 throughout where q is. The arrays, slots, tables and the origin may be traced, and
    the spans if they are `DeviceSpans`; shapes are the host's."""
    import jax.numpy as jnp

    static, numbers = prepared(inputs, q.dtype == jnp.float64, lse_residual=lse_residual)
    result: tuple[jax.Array, ...] = _compiled(static)(q, k, v, inputs.sinks, *numbers)
    return result


@memo(256)
def _compiled(static: Static) -> Any:
    import jax

    def attention(q: Any, k: Any, v: Any, sinks: Any, *numbers: Any) -> Any:
        return attended(XlaTiles(static, Numbers(*numbers), q, k), q, k, v, sinks)

    return jax.jit(attention)


def attended(t: XlaTiles, q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, ...]:
    """The results of `forward`, row of tiles by row of tiles."""
    import jax.numpy as jnp
    from jax import lax

    static, v_dim = t.static, v.shape[-1]
    q_len, q = q.shape[1], t.padded(q)
    sinks = None if sinks is None else sinks.astype(static.dtype)

    def row(r: Any, results: Any) -> Any:
        tile_row = t.row(r)
        q_tile = t.queries(q, tile_row) * static.scale
        least = t.full(t.part, 0.0 if static.plan.weighted else float(np.finfo(static.dtype).min))
        empty = least, t.full(t.part, 0.0), t.full((*t.part, v_dim), 0.0)

        def step(body: Any, chunk: Any, state: Any) -> Any:
            """Add one chunk of keys to the running (max, sum, accumulator)."""
            top, total, acc = state
            s, env, seen = t.scores(tile_row, body, chunk, q_tile, t.keys(k, tile_row, chunk[0], body.width))
            if static.plan.weighted:  # in the place of `top` the visible keys are counted
                visible = jnp.broadcast_to(t.counted(seen, env), s.shape)
                new, p, shrink = top + visible.sum(-1, dtype=top.dtype), s, jnp.ones_like(top)
            else:
                # `top` starts at the least finite number, so that -inf - top is -inf and never NaN
                new = jnp.maximum(top, s.max(-1))
                p, shrink = jnp.exp(s - new[..., None]), jnp.exp(top - new)
            total = total * shrink + p.sum(-1)
            if (survivors := t.survivors(env)) is not None:
                p = jnp.where(survivors, p, 0)
            v_tile = t.keys(v, tile_row, chunk[0], body.width)
            if body.partial:  # anything may stand where nothing is seen, as in a cache that is used again
                unseen = ~jnp.broadcast_to(seen, p.shape) if static.plan.weighted else p == 0
                v_tile = jnp.where(unseen.all((2, 3))[..., None], 0, v_tile)
            if (weights := t.weights(env)) is not None:
                p = jnp.where(p == 0, 0, p * weights)
            mixed = dot(p.reshape(*q_tile.shape[:3], -1), v_tile, (3, 2)).reshape(acc.shape)
            return new, total, acc * shrink[..., None] + mixed

        return _written(t, tile_row, results, t.visit(r, step, empty), sinks)

    shape = (q.shape[0], q.shape[2], t.length)
    lines = [t.full(shape, x) for x in (-np.inf, -np.inf, *[0.0] * static.lse_residual)]
    # what rounding to 16 bits left out takes a second array, which a backward alone reads
    outs = [t.full((*q.shape[:3], v_dim), 0.0, q.dtype)] * (1 + (static.lse_residual and q.dtype.itemsize == 2))
    outs, lines = lax.fori_loop(0, t.steps, row, (outs, lines))
    out, *rest = (x[:, :q_len] for x in outs)
    lines = [x[..., :q_len] for x in lines]
    if static.lse_residual:
        lines.append(pack_out_residual(*rest) if rest else jnp.zeros((*lines[0].shape, 2), lines[0].dtype))
    return out, *lines


def pack_out_residual(out_residual: Any) -> Any:
    """The softmax_stats of a forward [batch, heads, q_len, `norm_width`], as native kernels write them. Behind two
    entries without use stands `out_residual` [batch, q_len, heads, v_dim], which rounding left out of `out`: two
    numbers an entry."""
    import jax.numpy as jnp
    from jax import lax

    front = ((0, 0),) * 3
    padded = jnp.pad(out_residual, (*front, (0, out_residual.shape[3] % 2)))
    pairs = padded.reshape(*padded.shape[:3], -1, 2)
    return jnp.pad(lax.bitcast_convert_type(pairs, np.float32).transpose(0, 2, 1, 3), (*front, (2, 0)))


def unpack_out_residual(softmax_stats: Any, out: Any) -> Any:
    """The `out_residual` that `pack_out_residual` wrote, for an `out` of its shape and dtype."""
    from jax import lax

    pairs = lax.bitcast_convert_type(softmax_stats[..., 2:].transpose(0, 2, 1, 3), out.dtype)
    return pairs.reshape(*out.shape[:3], -1)[..., : out.shape[3]]


def _written(t: XlaTiles, tile_row: TileRow, results: Any, state: Any, sinks: Any) -> Any:
    """The result arrays with one row of tiles written."""
    import jax.numpy as jnp
    from jax import lax

    top, total, acc = state
    if t.static.plan.weighted:
        return _divided(t, tile_row, results, state)
    highest = jnp.where(total == 0, -jnp.inf, top)
    if sinks is not None:
        sink = lax.dynamic_slice(sinks, (tile_row.h,), (t.static.heads,)).reshape(1, t.kvs, t.groups, 1)
        peak = jnp.maximum(top, sink)
        # `sink - peak` of an infinite sink is inf - inf, NaN
        shrink, share = jnp.exp(top - peak), jnp.exp(jnp.where(sink == peak, 0, sink - peak))
        top, total, acc = peak, total * shrink + share, acc * shrink[..., None]
    out = acc * (t.keep / jnp.where(total == 0, 1, total))[..., None]
    log = jnp.log(total)
    lse = jnp.where(total == 0, -jnp.inf, top + log)
    rows = lse, highest, jnp.where(jnp.isinf(lse), 0, top - lse + log)
    info = jnp.finfo(results[0][0].dtype)  # type: ignore[no-untyped-call]  # XLA may leave out casts to 16 bits
    parts = out, out - lax.reduce_precision(out, info.nexp, info.nmant)
    outs = [t.put_queries(whole, x, tile_row) for whole, x in zip(results[0], parts)]
    return outs, [t.put_lines(whole, x, tile_row) for whole, x in zip(results[1], rows)]


def _divided(t: XlaTiles, tile_row: TileRow, results: Any, state: Any) -> Any:
    """`_written` of a weighted row, whose state is (count, total, accumulator)."""
    import jax.numpy as jnp

    count, total, acc = state
    divide, out = t.static.plan.divide, acc * t.keep
    if divide is not None:
        env = {**tile_row.env, "total": total[..., None], "count": count[..., None].astype(jnp.int32)}
        divisor = jnp.broadcast_to(t.value(divide, env), out.shape[:-1] + (1,))
        empty = (divisor == 0) | (count == 0)[..., None]
        out = jnp.where(empty, 0, out / jnp.where(empty, 1, divisor))
    outs = [t.put_queries(whole, x, tile_row) for whole, x in zip(results[0], (out, jnp.zeros_like(out)))]
    return outs, [t.put_lines(whole, x, tile_row) for whole, x in zip(results[1], (total, count, count))]
