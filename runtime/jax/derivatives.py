"""How the primitives of attention are differentiated: by a tangent primitive that has a transpose.

The tangents of a forward are `frisket_tangent` of the forward's results and of the tangents of its arrays. Reverse mode
never runs it: its transpose is `frisket_backward`, so first gradients are two kernels, a forward and a backward. Where
it does run, and where a backward or a tangent is differentiated once more, JAX differentiates `differentiable.py`, as
often as it is asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as _checkpoint_name
from jax.interpreters import ad
from jax.sharding import AxisType

from frisket.dsl.errors import BackwardError
from frisket.grammar.memo import memo
from frisket.lowering.plan import Cotangents, ForwardResults
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.calls.arrays import refuse_gradients

from .call import RESULTS, placed
from .primitives import LOCAL, TANGENT, WHOLE, Task, bound

__all__ = ["LSE", "OUT", "Task", "bound", "of_sinks"]  # what is bound from here has its rules

OUT, LSE = "frisket out", "frisket lse"  # for jax.checkpoint_policies.save_only_these_names
SAVED = {"out": OUT, "lse": LSE, "lse_residual": LSE, "softmax_stats": LSE}  # what a backward takes, by these names
checkpoint_name: Any = _checkpoint_name  # JAX leaves some of its functions untyped
_auto_axes: Any = jax.sharding.auto_axes
_instantiated: Any = ad.instantiate_zeros

NO_HESSIAN = BackwardError(
    "a derivative of a gradient of attention over several devices is asked for (fk.parallel); there are first "
    "derivatives, by jax.grad and jax.vjp\n  where no second ones are needed wrap the gradient in jax.lax.stop_gradient"
)


def _of_forward(primitive: Any, primals: Sequence[Any], tangents: Sequence[Any], *, task: Task) -> Any:
    call, arrays = task.call, dict(zip(task.names, primals, strict=True))
    if call.stored:
        refuse_gradients(call.geometry.kv_dtype, arrays, "jax")
    flow = {"q", "k", "v", "sinks", *call.places}
    some = {n: t for n, t in zip(task.names, tangents, strict=True) if n in flow and type(t) is not ad.Zero}
    values = primitive.bind(*primals, task=replace(task, lse_residual=True))
    results = {n: checkpoint_name(x, SAVED[n]) if n in SAVED else x for n, x in zip(RESULTS, values, strict=True)}
    zeros = {n: _zero(x) for n, x in results.items()}  # the largest score is not differentiable
    if some:
        operands = arrays | {n: results[n] for n in SAVED} | {TANGENT + n: t for n, t in some.items()}
        batched = {n: [m[i] for _, m in task.levels] for i, n in enumerate(task.names)}
        batched |= {TANGENT + n: batched[n] for n in some}
        levels = _levels(task, operands, batched)
        inner = Task(call, tuple(operands), levels=levels, tangents=tuple(some))
        zeros |= dict(zip(inner.results, bound(inner, *operands.values()), strict=True))
    return [results[n] for n in task.results], [zeros[n] for n in task.results]


def _zero(x: Any) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _levels(task: Task, names: Any, batched: dict[str, list[bool]]) -> Any:
    """The levels of a task like this one with operands of these names; results of a task have all levels."""
    return tuple(
        (n, tuple(batched[x][i] if x in batched else True for x in names)) for i, (n, _) in enumerate(task.levels)
    )


@usual_promotion()
def _transposed(cotangents: Sequence[Any], *operands: Any, task: Task) -> list[Any]:
    """The backward, as the transpose of the tangents."""
    linear = {TANGENT + n: n for n in task.tangents}
    arrays = {n: x for n, x in zip(task.names, operands, strict=True) if n not in linear}
    batched = {n: [m[i] for _, m in task.levels] for i, n in enumerate(task.names)}
    dout, dlse = cotangents
    arrays["dout"] = _instantiated(dout)
    arrays |= {} if type(dlse) is ad.Zero else {"dlse": dlse}
    gradients: dict[str, Any] = {}
    if inner := tuple(sorted({*task.tangents} - {"sinks"})):
        levels = _levels(task, arrays, batched)
        gradients = dict(
            zip(inner, bound(Task(task.call, tuple(arrays), inner, levels), *arrays.values()), strict=True)
        )
    if "sinks" in task.tangents:
        rows = {n: arrays[n] for n in ("sinks", "out", "lse", "lse_residual", "dout", "dlse") if n in arrays}
        of_rows = replace(task, names=tuple(rows), levels=_levels(task, rows, batched))
        gradients["sinks"] = of_rows.mapped(_of_sink_rows)(*rows.values())

    def one(name: str) -> Any:
        """The cotangent of the tangent of this array, the sum over instances that share it."""
        shared = tuple(i for i, m in enumerate(batched[TANGENT + name]) if not m)
        gradient = gradients[name].sum(shared) if shared else gradients[name]
        return placed(gradient, operands[task.names.index(TANGENT + name)].aval)

    return [one(linear[n]) if n in linear else None for n in task.names]


def _through_form(primitive: Any, primals: Sequence[Any], tangents: Sequence[Any], *, task: Task) -> Any:
    """The rule of a backward, and of tangents: results by the kernel, their derivatives by JAX's own operators. These
    are functions of the arrays and of what comes from outside, not of the forward's results."""
    if task.parted:
        raise NO_HESSIAN
    results = primitive.bind(*primals, task=task)
    flow = {"q", "k", "v", "sinks", *task.call.places, "dout", "dlse", *(TANGENT + n for n in task.tangents)}
    places = [i for i, n in enumerate(task.names) if n in flow and type(tangents[i]) is not ad.Zero]
    if not places:
        return results, list(map(_zero, results))

    run = _differentiable(task)
    shardings: Any = tuple(jax.typeof(x).sharding for x in results)
    if AxisType.Explicit in shardings[0].mesh.axis_types:  # no operator inside says how its result is split
        run = _auto_axes(run, out_sharding=shardings)

    def of_some(*some: Any) -> Any:
        operands = list(primals)
        for i, x in zip(places, some, strict=True):
            operands[i] = x
        return run(*operands)

    _, derivatives = jax.jvp(of_some, [primals[i] for i in places], [tangents[i] for i in places])
    return results, list(derivatives)


@memo(group="kernels")
def _differentiable(task: Task) -> Callable[..., Any]:
    """A task in JAX's own operators, which JAX compiles once."""
    return jax.jit(task.differentiable)


for _forward, _backward, _tangent in (WHOLE, LOCAL):
    ad.primitive_jvps[_forward] = partial(_of_forward, _forward)
    ad.primitive_jvps[_backward] = partial(_through_form, _backward)
    ad.primitive_jvps[_tangent] = partial(_through_form, _tangent)
    ad.primitive_transposes[_tangent] = _transposed


def _of_sink_rows(sinks: Any, out: Any, lse: Any, lse_residual: Any, dout: Any, dlse: Any = None) -> Any:
    return of_sinks(sinks, ForwardResults(out, lse, lse_residual), Cotangents(dout, dlse))


def of_sinks(sinks: Any, results: ForwardResults, cotangents: Cotangents) -> Any:
    """-sum of exp(sink - lse - lse_residual) * delta over batch entries and queries."""
    lse, dout, dlse, real = results.lse, cotangents.dout, cotangents.dlse, results.lse.dtype
    delta = (dout.astype(real) * results.out.astype(real)).sum(-1).transpose(0, 2, 1) - (0 if dlse is None else dlse)
    finite_lse = jnp.nan_to_num(jnp.where(lse == -jnp.inf, 0, lse), nan=jnp.nan)  # inf - inf is 0 here: all weight
    share = jnp.exp(jnp.nan_to_num(sinks.astype(real)[:, None], nan=jnp.nan) - finite_lse - results.lse_residual)
    return -jnp.where(share == 0, 0, share * delta).sum((0, 2)).astype(sinks.dtype)
