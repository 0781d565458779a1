"""Dense attention in float64 by the interpreter: the oracle of every kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import Expr

from .plan import whole

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


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Expr | None,
    score: Expr | None,
    *,
    scale: float,
    params: Mapping[str, Any],
    tables: Mapping[str, Any],
    origin: tuple[Any, Any, Any, Any] = (0, 0, 0, 0),
    sizes: tuple[int, int, int, int] | None = None,
) -> tuple[Array, Array]:
    """(output [batch, heads, q_len, v_dim], lse [batch, heads, q_len]), float64, from arrays laid out
    [batch, heads, length, dim]. Query head h reads key head `h // (heads // kv_heads)`."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    batch, heads, q_len = q.shape[:3]
    shape = (batch, heads, q_len, k.shape[2])
    env = {**coordinates(*shape, origin, sizes), **params}
    seen = np.ones(shape, bool) if mask is None else visible(mask, env, tables, shape)
    with np.errstate(all="ignore"):
        s = np.einsum("bhqd,bhkd->bhqk", q, k) * scale
        if score is not None:
            s = np.broadcast_to(evaluate(score, {**env, "score": s}, tables), shape)
        s = np.where(seen, s, -np.inf)
        top = s.max(axis=-1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(np.isneginf(top), 0.0, top))
        total = p.sum(axis=-1, keepdims=True)
        out = np.einsum("bhqk,bhkd->bhqd", p / np.where(total == 0, 1.0, total), v)
        lse = (np.log(total) + top)[..., 0]
    return out, lse
