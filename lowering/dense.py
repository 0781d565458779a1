"""Dense attention and its gradients in float64 by the interpreter: the oracle of every kernel.

Arrays are laid out [batch, heads, length, dim]; query head h reads key head `h // (heads // kv_heads)`. `kept` is an
Expr that says which weights survive dropout (their names' values are among `params`), at `rate`, taken as a float32;
`sinks` [heads] are logits without a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.evaluate import evaluate, unrolled
from frisket.dsl.ir import Expr

from .derive import derivatives
from .plan import Origin, Sizes, whole

Array = NDArray[Any]


def coordinates(
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    origin: tuple[Any, Any, Any, Any] = (0, 0, 0, 0),
    sizes: tuple[int, int, int, int] | None = None,
) -> dict[str, Any]:
    """Values of `b h q k B H Q_LEN KV_LEN` over a crop, shaped to broadcast as [batch, heads, q, k].

    The q and k entries of `origin` may be vectors with one entry per batch.
    """
    b0, h0, q0, k0 = origin
    full = sizes or whole(origin, (batch, heads, q_len, kv_len))

    def along(start: Any, n: int, axis: int) -> Array:
        shape = [1, 1, 1, 1]
        shape[axis] = n
        base = np.asarray(start, np.int64)
        return base.reshape(-1, 1, 1, 1) + np.arange(n).reshape(shape)

    names = ("B", "H", "Q_LEN", "KV_LEN")
    return {
        "b": along(b0, batch, 0), "h": along(h0, heads, 1),
        "q": along(q0, q_len, 2), "k": along(k0, kv_len, 3),
        **dict(zip(names, full, strict=True)),
    }  # fmt: skip


def visible(mask: Expr, env: Mapping[str, Any], tables: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
    """The dense mask, bool [batch, heads, q_len, kv_len]."""
    return np.broadcast_to(evaluate(mask, env, tables), shape).astype(bool)


@dataclass(frozen=True)
class _Rows:
    """What attention and its gradients share, all float64 [batch, heads, q_len, kv_len] unless it says otherwise."""

    env: dict[str, Any]  # values of the coordinates, sizes, parameters, and of `score` before the mod
    p: Array  # exp(m - lse): 0 where masked or m is -inf
    drop: Array  # what dropout multiplies a weight with: 0 or 1 / (1 - rate)
    top: Array  # [batch, heads, q_len]: the largest visible m, -inf where there is none
    lse: Array  # [batch, heads, q_len]


def _rows(
    q: Array, k: Array, mask: Expr | None, score: Expr | None, *, scale: float, params: Mapping[str, Any],
    tables: Mapping[str, Any], origin: Origin, sizes: Sizes | None, sinks: Any, kept: Expr | None, rate: float,
) -> _Rows:  # fmt: skip
    shape = (*q.shape[:3], k.shape[2])
    env = {**coordinates(*shape, origin, sizes), **params}
    seen = np.ones(shape, bool) if mask is None else visible(mask, env, tables, shape)
    sink = np.full((shape[1], 1), -np.inf) if sinks is None else np.asarray(sinks, np.float64)[:, None]
    env["score"] = m = np.einsum("bhqd,bhkd->bhqk", q, k) * scale
    if score is not None:
        m = np.broadcast_to(evaluate(score, env, tables), shape)
    m = np.where(seen, m, -np.inf)
    top = m.max(axis=-1, initial=-np.inf)
    highest = np.maximum(top, sink)
    shift = np.where(np.isneginf(highest), 0.0, highest)
    lse = np.log(np.exp(m - shift[..., None]).sum(axis=-1) + np.exp(sink - shift)) + shift
    p = np.exp(m - np.where(np.isneginf(lse), 0.0, lse)[..., None])
    drop = np.ones(shape)
    if kept is not None:
        survives = np.broadcast_to(evaluate(kept, env, tables), shape)
        drop = np.where(survives, 1 / (1 - float(np.float32(rate))), 0.0)
    return _Rows(env, p, drop, top, lse)


def _per_query_head(q: Array, *others: Array) -> list[Array]:
    """Float64, keys and values repeated for the query heads that share them."""
    heads = q.shape[1]
    return [np.repeat(x, heads // x.shape[1], axis=1).astype(np.float64) for x in (q, *others)]


def attention(
    q: Array, k: Array, v: Array, mask: Expr | None, score: Expr | None, *, scale: float, params: Mapping[str, Any],
    tables: Mapping[str, Any], origin: Origin = (0, 0, 0, 0), sizes: Sizes | None = None, sinks: Any = None,
    kept: Expr | None = None, rate: float = 0.0,
) -> tuple[Array, Array]:  # fmt: skip
    """(output [batch, heads, q_len, v_dim], lse [batch, heads, q_len]), float64."""
    q, k, v = _per_query_head(*(np.asarray(x) for x in (q, k, v)))
    with np.errstate(all="ignore"):
        rows = _rows(
            q, k, mask, score, scale=scale, params=params, tables=tables, origin=origin, sizes=sizes, sinks=sinks,
            kept=kept, rate=rate,
        )  # fmt: skip
        return np.einsum("bhqk,bhkd->bhqd", rows.drop * rows.p, v), rows.lse


def top(
    q: Array, k: Array, mask: Expr | None, score: Expr | None, *, scale: float, params: Mapping[str, Any],
    tables: Mapping[str, Any], origin: Origin = (0, 0, 0, 0), sizes: Sizes | None = None,
) -> Array:  # fmt: skip
    """The largest visible modified score of each row [batch, heads, q_len], -inf where there is none."""
    q, k = _per_query_head(*(np.asarray(x) for x in (q, k)))
    with np.errstate(all="ignore"):
        return _rows(
            q, k, mask, score, scale=scale, params=params, tables=tables, origin=origin, sizes=sizes, sinks=None,
            kept=None, rate=0.0,
        ).top  # fmt: skip


def gradients(
    q: Array, k: Array, v: Array, mask: Expr | None, score: Expr | None, dout: Array, dlse: Array | None = None, *,
    scale: float, params: Mapping[str, Any], tables: Mapping[str, Any], origin: Origin = (0, 0, 0, 0),
    sizes: Sizes | None = None, sinks: Any = None, kept: Expr | None = None, rate: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Gradients of `sum(dout * out) + sum(dlse * lse)`: "dq", "dk", "dv", "dsinks" in the shapes of what they are
    of, "dtables" and "dscalars" by name, for the Float tables and scalars the score mod is differentiable in.

    The formulas are those of `lowering.derive`, position by position.
    """
    kv_heads = k.shape[1]
    dout = np.asarray(dout, np.float64)
    q, k, v = _per_query_head(*(np.asarray(x) for x in (q, k, v)))
    with np.errstate(all="ignore"):
        rows = _rows(
            q, k, mask, score, scale=scale, params=params, tables=tables, origin=origin, sizes=sizes, sinks=sinks,
            kept=kept, rate=rate,
        )  # fmt: skip
        weights = rows.drop * rows.p
        delta = (dout * np.einsum("bhqk,bhkd->bhqd", weights, v)).sum(-1)
        delta -= 0.0 if dlse is None else np.asarray(dlse, np.float64)
        dm = rows.p * (rows.drop * np.einsum("bhqd,bhkd->bhqk", dout, v) - delta[..., None])

        def times(x: Expr | None) -> Array:
            factor = 1.0 if x is None else evaluate(x, rows.env, tables)
            return np.where(rows.p == 0, 0.0, dm * factor)

        found = None if score is None else derivatives(unrolled(score, rows.env, tables))
        ds = times(None if found is None else found.slope)
        grads: dict[str, Any] = {
            "dq": scale * np.einsum("bhqk,bhkd->bhqd", ds, k),
            "dk": _per_key_head(scale * np.einsum("bhqk,bhqd->bhkd", ds, q), kv_heads),
            "dv": _per_key_head(np.einsum("bhqk,bhqd->bhkd", weights, dout), kv_heads),
            "dsinks": None if sinks is None else _dsinks(np.asarray(sinks, np.float64), rows.lse, delta),
            "dtables": {}, "dscalars": {},
        }  # fmt: skip
        for g in () if found is None else found.gradients:
            parts = times(g.weight)
            if not g.index:
                grads["dscalars"][g.source] = grads["dscalars"].get(g.source, 0.0) + parts.sum()
                continue
            into = grads["dtables"].setdefault(g.source, np.zeros(np.shape(tables[g.source])))
            at = [np.clip(evaluate(e, rows.env, tables), 0, n - 1) for e, n in zip(g.index, into.shape, strict=True)]
            np.add.at(into, tuple(np.broadcast_to(i, parts.shape) for i in at), parts)
        return grads


def _per_key_head(x: Array, kv_heads: int) -> Array:
    batch, heads, *rest = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads, *rest).sum(2)


def _dsinks(sinks: Array, lse: Array, delta: Array) -> Array:
    share = np.exp(sinks[:, None] - np.where(np.isneginf(lse), 0.0, lse))  # 0 where the sink is -inf
    return -np.asarray(np.where(share == 0, 0.0, share * delta).sum((0, 2)))
