"""Cotangents of weighted rows, as any backward of kernels takes them, in JAX's operators.

A kernel divides a row's sum of weighted values by d = divide(total, count). With g = dout / d and s = sum(g * out) the
cotangent of a weight is g @ v - s * divide'(total) + dtotal. So a backward of kernels takes g in the place of dout. The
other two terms, one number a row, take the place of dlse. It reads neither out nor total.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from frisket.dsl.evaluate import unroll
from frisket.dsl.ir import TOTAL, Expr
from frisket.lowering.derive import backward_of_divide, formula_of
from frisket.lowering.kernels.jnp_expr import evaluate
from frisket.lowering.plan import Cotangents, ForwardResults, KernelInputs

from .differentiable import elementwise
from .tiles import int64_enabled

Array = Any  # a jax.Array, traced or not


def row_cotangents(
    inputs: KernelInputs, results: ForwardResults, cotangents: Cotangents, grad_names: frozenset[str]
) -> tuple[Cotangents, dict[str, Array]]:
    """The cotangents that a backward of kernels takes, from those of out [batch, q_len, heads, v_dim] and of total
    [batch, heads, q_len], and the gradients of what `divide` reads. `results` has total as lse, and the count of keys
    as lse_residual."""
    import jax.numpy as jnp

    plan, total, dout, dtotal = inputs.plan, results.lse, cotangents.dout, cotangents.dlse
    dtotal = jnp.zeros_like(total) if dtotal is None else dtotal
    out = results.out.astype(total.dtype)
    unseen = (total == 0) & (out == 0).all(-1).swapaxes(1, 2)  # a row that sees nothing may have any cotangent
    g = jnp.where(unseen.swapaxes(1, 2)[..., None], jnp.nan_to_num(dout, nan=0, posinf=0, neginf=0), dout)
    dtotal = jnp.where(unseen, jnp.nan_to_num(dtotal, nan=0, posinf=0, neginf=0), dtotal)
    if plan.divide is None:
        return Cotangents(g.astype(dout.dtype), dtotal), {}
    count = results.lse_residual
    env = {**_positions(inputs), "total": total, "count": count.astype(jnp.int32)}

    def value(e: Expr) -> Array:
        return jnp.broadcast_to(
            evaluate(e, env, inputs.tables, int64=plan.int64, float64=total.dtype == jnp.float64), total.shape
        )

    backward, divisor = backward_of_divide(plan), value(unroll(plan.divide))
    empty = (divisor == 0) | ((count == 0) if plan.counts else False)
    g = jnp.where(empty.swapaxes(1, 2)[..., None], 0, g / jnp.where(empty, 1, divisor).swapaxes(1, 2)[..., None])
    s = (g * out).sum(-1).swapaxes(1, 2)
    dtotal = dtotal - jnp.where(empty, 0, s if backward.slope is None else s * value(backward.slope))
    grads: dict[str, Array] = {}
    for gradient in backward.gradients:
        if gradient.source not in grad_names:
            continue
        parts = jnp.where(empty, 0, -s * value(gradient.weight))
        if not gradient.index:
            part: Array = parts.sum()
        else:
            shape = np.shape(inputs.tables[gradient.source])
            index = (jnp.clip(value(e), 0, n - 1) for e, n in zip(gradient.index, shape, strict=True))
            part = jnp.zeros(shape, parts.dtype).at[tuple(index)].add(parts)
        grads[gradient.source] = grads[gradient.source] + part if gradient.source in grads else part
    return Cotangents(g.astype(dout.dtype), dtotal), grads


def divisor(inputs: KernelInputs, total: Array, count: Array) -> Array:
    """The divisors of rows, by their sums [batch, heads, q_len]. It reads `divide`, slots, tables and shapes of the
    inputs. Where no key is visible there are no derivatives."""
    import jax.numpy as jnp

    assert inputs.plan.divide is not None
    wide = {"int64": inputs.plan.int64 and int64_enabled(), "float64": total.dtype == jnp.float64}
    formula, sources = formula_of(inputs.plan.divide)
    env = {n: jnp.asarray(x) for n, x in _positions(inputs).items()} | {"count": count.astype(jnp.int32)}
    leaves = tuple(total if e is TOTAL else evaluate(e, env, inputs.tables, **wide) for e in sources)
    return elementwise(formula, **wide)(env, dict(inputs.tables), count == 0, leaves)


def _positions(inputs: KernelInputs) -> dict[str, Any]:
    """Sizes, slots, and b, h and q in shapes that broadcast to [batch, heads, q_len]."""
    import jax.numpy as jnp

    g = inputs.geometry
    places: dict[str, Any] = {**g.named_sizes, **inputs.slots}
    for axis, (name, n) in enumerate((("b", g.batch), ("h", g.heads), ("q", g.q_len))):
        along = jnp.arange(n, dtype=jnp.int32).reshape([-1 if i == axis else 1 for i in range(3)])
        places[name] = jnp.asarray(g.origin[axis]).reshape(-1, 1, 1) + along
    return places
