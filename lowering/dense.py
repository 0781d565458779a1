"""Dense attention and its gradients in float64 by the interpreter: the reference of every kernel.

Arrays are laid out [batch, heads, length, dim]; query head h reads key head `h // (heads // kv_heads)`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ShapeError
from frisket.dsl.evaluate import OPERATORS, evaluate, unrolled
from frisket.dsl.ir import TOTAL, Expr
from frisket.dsl.types import FLOAT

from .derive import Gradient, derivatives
from .plan import Problem
from .simplify import ProgramExprs

Array = NDArray[Any]
Rounded = Callable[[Any], Array]


def exactly(x: Any) -> Array:
    return np.asarray(x, np.float64)


@dataclass(frozen=True, eq=False)
class DenseCall:
    """A call of dense attention without its arrays."""

    exprs: ProgramExprs
    scale: float
    params: Mapping[str, Any]  # values by name
    tables: Mapping[str, Any]
    problem: Problem | None = None  # None: the arrays are the whole problem
    sinks: Any = None  # [heads], logits without a value
    keep_mask: Expr | None = None  # which weights survive dropout; the values of its names are among `params`
    rate: float = 0.0  # of dropout, taken as a float32
    # Goes over every array of a product: with one that rounds to bfloat16, this is what dense attention in bfloat16
    # gives, and how wrong that is. Scores, the steps of a score mod, the softmax, dP and delta = sum(p * dP) are then
    # float32, as in jax.nn and in kernels.
    rounded: Rounded = exactly
    weights: Rounded | None = None  # goes over the softmax in the place of `rounded`
    # Arrays of float32 that are rounded too: "out", from which delta is then taken, "scores", and "lse", for weights.
    stored: Collection[str] = ()


def coordinates(problem: Problem) -> dict[str, Any]:
    """Values of `b h q k B H Q_LEN KV_LEN` over a crop, shaped to broadcast as [batch, heads, q, k]."""

    def along(axis: int) -> Array:
        shape = [1, 1, 1, 1]
        shape[axis] = length = problem.lengths[axis]
        # a vector has one entry per batch
        start = np.asarray(problem.origin[axis], np.int64).reshape(-1, 1, 1, 1)
        return start + np.arange(length).reshape(shape)

    return {**{name: along(axis) for axis, name in enumerate("bhqk")}, **problem.named_sizes}


def check_room(shape: tuple[int, ...], bytes_each: int) -> None:
    """Refuse a dense array that has more bytes than the machine."""
    need, have = np.prod(shape, dtype=float) * bytes_each, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > have:
        raise ShapeError(
            f"a dense array {list(shape)} has {need / 2**30:,.0f} GiB, and this machine has {have / 2**30:,.0f}\n"
            "  take fewer positions, or look at tiles: mask.layout(q_len, kv_len)"
        )


def visible(mask: Expr, env: Mapping[str, Any], tables: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
    """The dense mask, bool [batch, heads, q_len, kv_len]."""
    return np.broadcast_to(evaluate(mask, env, tables), shape).astype(bool)


@dataclass(frozen=True)
class _DenseRows:
    """The dense arrays that attention and its gradients share, [batch, heads, q_len, kv_len] unless noted."""

    env: dict[str, Any]  # values of the coordinates, sizes, parameters, and of `score` before the mod
    p: Array  # the softmax: 0 where masked or m is -inf
    drop: Array  # the factor of a weight under dropout: 0 or 1 / (1 - rate)
    top: Array  # [batch, heads, q_len]: the largest visible m, -inf where there is none
    lse: Array  # [batch, heads, q_len]


def _scores(q: Array, k: Array, call: DenseCall) -> tuple[dict[str, Any], Array]:
    """The values that expressions read, with `score` before the mod, and the modified scores: -inf where hidden."""
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    problem = call.problem or Problem(*shape[2:], *shape[:2])
    rounded, tables, mask, score = call.rounded, call.tables, call.exprs.mask, call.exprs.score
    check_room(shape, 8)
    env = {**coordinates(problem), **call.params}
    seen = np.ones(shape, bool) if mask is None else visible(mask, env, tables, shape)
    scores = rounded if "scores" in call.stored else lambda x: np.asarray(x, q.dtype)
    env["score"] = m = scores(q @ k.swapaxes(-1, -2) * q.dtype.type(call.scale))
    if score is not None:
        m = scores(np.broadcast_to(evaluate(score, env, tables, _steps(rounded)), shape))
    return env, np.where(seen, m, m.dtype.type(-np.inf))


def _rows(q: Array, k: Array, call: DenseCall) -> _DenseRows:
    env, m = _scores(q, k, call)
    shape = m.shape
    sink = np.asarray(np.full(shape[1], -np.inf) if call.sinks is None else call.sinks, q.dtype)[:, None]
    top = m.max(axis=-1, initial=-np.inf)
    shift = _finite(np.maximum(top, sink))  # a row that sees nothing: -inf - -inf is NaN
    p = np.exp(m - shift[..., None])
    total = p.sum(axis=-1) + np.exp(np.where(sink == shift, 0, sink - shift))  # so is inf - inf, of an infinite sink
    lse = np.log(total) + shift
    if "lse" in call.stored:
        p = np.exp(m - _finite(lse)[..., None])
    else:  # a large lse is off by more than p may be in 16 bits
        p /= np.where(total == 0, 1, total)[..., None]
    return _DenseRows(env, p, _drop(env, p, call), top, lse)


def _drop(env: Mapping[str, Any], p: Array, call: DenseCall) -> Array:
    """The factor of each weight under dropout."""
    if call.keep_mask is None:
        return np.ones(p.shape, p.dtype)
    survives = np.broadcast_to(evaluate(call.keep_mask, env, call.tables), p.shape)
    # kernels have the rate as a float32
    drop: Array = np.where(survives, 1 / (1 - p.dtype.type(np.float32(call.rate))), p.dtype.type(0))
    return drop


@dataclass(frozen=True)
class _WeightedRows:
    """The dense arrays of rows that are no softmax, [batch, heads, q_len, kv_len] unless noted."""

    env: dict[str, Any]  # as in `_DenseRows`, and `total` and `count` [batch, heads, q_len, 1]
    m: Array  # modified scores; -inf where hidden
    w: Array  # weights; 0 where hidden
    drop: Array
    divisor: Array  # [batch, heads, q_len, 1]; 0 in rows that see nothing


def _weighted_rows(q: Array, k: Array, call: DenseCall) -> _WeightedRows:
    env, m = _scores(q, k, call)
    steps, hidden = _steps(call.rounded), np.isneginf(m)
    assert call.exprs.weight is not None
    w = np.broadcast_to(evaluate(call.exprs.weight, {**env, "score": m}, call.tables, steps), m.shape)
    w = np.where(hidden, m.dtype.type(0), w)
    count = (~hidden).sum(-1, keepdims=True)
    env |= {"total": w.sum(-1, keepdims=True), "count": count}
    divide = call.exprs.divide
    divisor = 1.0 if divide is None else evaluate(divide, env, call.tables, steps)
    divisor = np.where(count == 0, m.dtype.type(0), np.broadcast_to(divisor, count.shape).astype(m.dtype))
    return _WeightedRows(env, m, w, _drop(env, w, call), divisor)


def _over(x: Array, divisor: Array) -> Array:
    """x / divisor, 0 where the divisor is 0."""
    return np.where(divisor == 0, x.dtype.type(0), x / np.where(divisor == 0, divisor.dtype.type(1), divisor))


def _steps(rounded: Rounded) -> dict[str, Callable[..., Array]]:
    """Operators whose Floats are rounded to the dtype in which `rounded` leaves its numbers; none for float64."""
    dtype = rounded(np.zeros(())).dtype
    if dtype == np.float64:
        return {}

    def step(op: Callable[..., Array], node: Expr, *args: Array) -> Array:
        value = op(*args)
        return value.astype(dtype) if node.type is FLOAT else value

    return {name: partial(step, op) for name, op in OPERATORS.items()}


def _finite(x: Array) -> Array:
    return np.where(np.isneginf(x), x.dtype.type(0), x)


def _per_query_head(rounded: Rounded, q: Array, *others: Array) -> list[Array]:
    """Keys and values repeated for the query heads that share them."""
    return [np.repeat(rounded(x), q.shape[1] // x.shape[1], axis=1) for x in (q, *others)]


def attention(q: Array, k: Array, v: Array, call: DenseCall) -> tuple[Array, Array]:
    """Dense attention: (output [batch, heads, q_len, v_dim], lse [batch, heads, q_len]). Of weighted rows the second is
    the sum of the weights."""
    q, k, v = _per_query_head(call.rounded, q, k, v)
    with np.errstate(all="ignore"):
        if call.exprs.weight is not None:
            weighted = _weighted_rows(q, k, call)
            # anything may stand where no query sees a key
            unseen = np.asarray(np.isneginf(weighted.m).all(axis=2))[..., None]
            product = call.rounded(weighted.drop * weighted.w) @ np.where(unseen, v.dtype.type(0), v)
            return call.rounded(_over(product, weighted.divisor)), weighted.env["total"][..., 0]
        rows = _rows(q, k, call)
        unseen = (rows.p == 0).all(axis=2)[..., None]  # by every query: anything may stand there
        weights = call.rounded(rows.drop * rows.p) if call.weights is None else rows.drop * call.weights(rows.p)
        return call.rounded(weights @ np.where(unseen, v.dtype.type(0), v)), rows.lse


def top(q: Array, k: Array, call: DenseCall) -> Array:
    """The largest visible modified score of each row [batch, heads, q_len], else -inf; numbers are not rounded. Of
    weighted rows the number of visible keys."""
    q, k = _per_query_head(exactly, q, k)
    with np.errstate(all="ignore"):
        if call.exprs.weight is not None:
            return np.asarray(_weighted_rows(q, k, call).env["count"][..., 0], np.float64)
        return _rows(q, k, replace(call, rounded=exactly, stored=())).top


def weights(q: Array, k: Array, call: DenseCall) -> tuple[Array, Array]:
    """The weights [batch, heads, q_len, kv_len] of the softmax before dropout, and lse [batch, heads, q_len]."""
    q, k = _per_query_head(exactly, q, k)
    with np.errstate(all="ignore"):
        rows = _rows(q, k, replace(call, rounded=exactly, stored=()))
    return rows.p, rows.lse


def gradients(q: Array, k: Array, v: Array, call: DenseCall, dout: Array, dlse: Array | None = None) -> dict[str, Any]:
    """Gradients of `sum(dout * out) + sum(dlse * lse)`: "dq", "dk", "dv", "dsinks" in the shapes of the arrays,
    "dtables" and "dscalars" by name, for the Float tables and scalars that a part is differentiable in. Of weighted
    rows `lse` is the sum of the weights.

    The formulas are those of `lowering.derive`, position by position.
    """
    kv_heads, rounded, tables, score = k.shape[1], call.rounded, call.tables, call.exprs.score
    q, k, v = _per_query_head(rounded, q, k, v)
    dout = rounded(dout)
    if call.exprs.weight is not None:
        return _weighted_gradients(q, k, v, call, dout, dlse, kv_heads)
    with np.errstate(all="ignore"):
        rows = _rows(q, k, call)
        weights = rounded(rows.drop * rows.p)
        dp = rows.drop * (dout @ v.swapaxes(-1, -2))
        # where p is near 1, the rounding of out is nearly all of dq
        delta = (dout * rounded(weights @ v) if "out" in call.stored else np.where(rows.p == 0, 0, rows.p * dp)).sum(-1)
        delta = delta if dlse is None else delta - np.asarray(dlse, delta.dtype)
        dm = rows.p * (dp - delta[..., None])

        def times(x: Expr | None) -> Array:
            factor = 1.0 if x is None else evaluate(x, rows.env, tables, _steps(rounded))
            return rounded(np.where(rows.p == 0, 0.0, dm * factor))

        backward = None if score is None else derivatives(unrolled(score, rows.env, tables))
        ds = times(None if backward is None else backward.slope)
        factor = q.dtype.type(call.scale)
        grads: dict[str, Any] = {
            "dq": rounded(ds @ k * factor),
            "dk": rounded(_per_key_head(ds.swapaxes(-1, -2) @ q * factor, kv_heads)),
            "dv": rounded(_per_key_head(weights.swapaxes(-1, -2) @ dout, kv_heads)),
            "dsinks": None if call.sinks is None else _dsinks(np.asarray(call.sinks, q.dtype), rows.lse, delta),
            "dtables": {},
            "dscalars": {},
        }
        for g in () if backward is None else backward.gradients:
            _add_captured(grads, g, times(g.weight), rows.env, tables)
        return grads


def _add_captured(grads: dict[str, Any], g: Gradient, parts: Array, env: Mapping[str, Any], tables: Any) -> None:
    """Add the parts of one gradient of a captured value."""
    if not g.index:
        grads["dscalars"][g.source] = grads["dscalars"].get(g.source, 0.0) + parts.sum()
        return
    shape = np.shape(tables[g.source])
    into = grads["dtables"].setdefault(g.source, np.zeros(shape, parts.dtype))
    at = [np.clip(evaluate(e, env, tables), 0, n - 1) for e, n in zip(g.index, shape, strict=True)]
    # an entry may be read at several positions, which `+=` would add once
    np.add.at(into, tuple(np.broadcast_to(i, parts.shape) for i in at), parts)


def _weighted_gradients(
    q: Array, k: Array, v: Array, call: DenseCall, dout: Array, dtotal: Array | None, kv_heads: int
) -> dict[str, Any]:
    """`gradients` of weighted rows. Let g = dout / divisor and s = sum(g * out). A weight's cotangent is
    g @ v - s * divide'(total), with dropout before the sum over values alone. An entry of `divide` gets -s times its
    derivative."""
    rounded, tables, exprs, factor = call.rounded, call.tables, call.exprs, q.dtype.type(call.scale)
    grads: dict[str, Any] = {"dsinks": None, "dtables": {}, "dscalars": {}}
    with np.errstate(all="ignore"):
        rows = _weighted_rows(q, k, call)
        hidden = np.isneginf(rows.m)
        weights, unseen = rounded(rows.drop * rows.w), np.asarray(hidden.all(axis=2))[..., None]
        g = _over(dout, rows.divisor)
        out = _over(weights @ np.where(unseen, v.dtype.type(0), v), rows.divisor)
        s = (g * out).sum(-1, keepdims=True)
        of_rows = None if dtotal is None else np.asarray(dtotal, s.dtype)[..., None]

        def value(e: Expr, env: Mapping[str, Any]) -> Any:
            return evaluate(e, env, tables, _steps(rounded))

        divided = None if exprs.divide is None else derivatives(unrolled(exprs.divide, rows.env, tables), TOTAL)
        of_total = 0.0 if divided is None else s * (1.0 if divided.slope is None else value(divided.slope, rows.env))
        dw = rows.drop * (g @ v.swapaxes(-1, -2)) - np.where(rows.divisor == 0, 0.0, of_total)
        dw = np.where(hidden, 0.0, dw if of_rows is None else dw + np.where(hidden.all(-1, keepdims=True), 0, of_rows))

        def times(x: Expr | None, cotangent: Array, env: Mapping[str, Any]) -> Array:
            return np.where(hidden, 0.0, cotangent * (1.0 if x is None else value(x, env)))

        env = {**rows.env, "score": rows.m}
        assert exprs.weight is not None
        steps = [(exprs.weight, env), *([] if exprs.score is None else [(exprs.score, rows.env)])]
        for e, env in steps:  # from the weight back to the plain score
            backward = derivatives(unrolled(e, env, tables))
            for x in backward.gradients:
                _add_captured(grads, x, rounded(times(x.weight, dw, env)), env, tables)
            dw = times(backward.slope, dw, env)
        for x in () if divided is None else divided.gradients:
            parts = np.where(rows.divisor == 0, 0.0, -s * value(x.weight, rows.env))
            _add_captured(grads, x, parts, rows.env, tables)
        ds = rounded(dw)
        grads["dq"] = rounded(ds @ k * factor)
        grads["dk"] = rounded(_per_key_head(ds.swapaxes(-1, -2) @ q * factor, kv_heads))
        grads["dv"] = rounded(_per_key_head(weights.swapaxes(-1, -2) @ g, kv_heads))
    return grads


def in_8_bits(p: Array) -> Array:
    """The softmax of kernels with queries of 8 bits, as FlashAttention 3 has it: 256 times the exponential of a score
    less the largest of its row, rounded to float8_e4m3fn.

    >>> in_8_bits(np.array([0.5, 0.29, 1e-7]))
    array([0.5   , 0.28125, 0.    ])
    """
    largest = p.max(axis=-1, keepdims=True, initial=0.0) / 256
    scaled: Array = e4m3(p / np.where(largest == 0, 1, largest)) * largest
    return scaled


def e4m3(x: Array) -> Array:
    """Numbers rounded to float8_e4m3fn, to even; those past its largest, 448, become that."""
    _, exponent = np.frexp(x)
    step = np.exp2(np.maximum(exponent, -5) - 4.0)  # three bits behind the leading one; from 2**-6 down none leads
    rounded: Array = np.clip(np.rint(x / step) * step, -448, 448)
    return rounded


def _per_key_head(x: Array, kv_heads: int) -> Array:
    batch, heads, *rest = x.shape
    return np.asarray(x.reshape(batch, kv_heads, heads // kv_heads, *rest).sum(2))


def _dsinks(sinks: Array, lse: Array, delta: Array) -> Array:
    most = np.finfo(lse.dtype).max  # inf - inf is 0 here: such a sink takes all weight
    share = np.exp(np.minimum(sinks[:, None], most) - np.minimum(_finite(lse), most))
    return -np.asarray(np.where(share == 0, 0.0, share * delta).sum((0, 2)))
