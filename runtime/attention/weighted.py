"""Checks and results of a call of weighted attention, whose kernels give (out, total, count)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np

from frisket.dsl.errors import ParameterError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import COUNT, SCORE, Expr, names_of, to_float
from frisket.grammar.memo import memo
from frisket.lowering.dense import coordinates
from frisket.lowering.plan import KV_INPUTS, NOWHERE, PAGES, Geometry, KernelInputs, LoopPlan, Problem, make_plan
from frisket.lowering.simplify import ProgramExprs, simplify
from frisket.runtime.calls.arrays import NATURAL, framework_of, origin_of, symbolic
from frisket.runtime.calls.options import CallArgs, call_values, flag
from frisket.runtime.calls.program import check_used
from frisket.runtime.machine.parameters import stand_in, traced
from frisket.runtime.masks.mask import Divide
from frisket.runtime.plans.device import results
from frisket.runtime.plans.run import kernel_tables


class Sums(NamedTuple):
    """The sums of weighted rows over the keys of one call; `frisket.merge_sums` adds those of disjoint keys.

    >>> import frisket as fk, torch
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4)
    >>> out, sums = fk.attention(q, k, v, "causal", weight="sigmoid(score)", divide="count", return_sums=True)
    >>> sums.numerator.shape, sums.total.shape, sums.count[0, 0].tolist()
    (torch.Size([1, 2, 8, 4]), torch.Size([1, 2, 8]), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    >>> torch.allclose(out, sums.numerator / sums.count[..., None])
    True

    All are float32, float64 with float64. Gradients flow through `numerator` and `total`.
    """

    numerator: Any  # in the shape of out: the sum of `weight * v[j]` over the keys j that the query sees
    total: Any  # [batch, heads, q_len]: the sum of `weight`, before dropout
    count: Any  # [batch, heads, q_len]: the number of keys that the query sees, exact up to 2**24


# by framework, what rows are divided by: of `KernelInputs`, total and count; modules that import a framework add theirs
DIVISORS: dict[str, Callable[[KernelInputs, Any, Any], Any]] = {}


def no_sinks() -> ParameterError:
    return ParameterError(
        "sinks are logits of a softmax, and this program has a weight\n  add them to `divide`, such as `total + 1`"
    )


def check_weighted(exprs: ProgramExprs, sinks: Any, lse: bool, top: bool) -> None:
    """Refuse sinks and results that only a softmax has."""
    if sinks is not None:
        raise no_sinks()
    if top:
        raise ParameterError("return_max belongs to a softmax, and this program has a weight\n  leave out return_max")
    if lse and not exprs.has_lse:
        raise ParameterError(
            "return_lse is the logarithm of what a row is divided by, and that is not proved here to be "
            "the sum of positive numbers\n  leave out return_lse, or divide positive weights by `total`"
        )


def check_sums(weight: Any, sums: Any, plan: Any, lse: bool, top: bool) -> None:
    """Refuse `return_sums` of a softmax, with a plan and with other results."""
    flag(sums, "return_sums")
    if weight is None:
        raise ParameterError(
            "return_sums belongs to programs with a weight, and this one is a softmax\n"
            "  give return_lse=True, and frisket.merge joins the parts"
        )
    if plan is not None:
        raise ParameterError("return_sums takes no plan: a plan is for rows that are divided\n  leave out plan")
    if lse or top:
        what = "return_lse" if lse else "return_max"
        raise ParameterError(f"return_sums gives (out, sums) alone\n  leave out {what}")


def weighted_results(outputs: tuple[Any, ...], lse: bool, top: bool) -> Any:
    """out, or (out, lse): the logarithm of the sum of a row's weights, -inf where the row sees no key."""
    out, total, *_ = outputs
    if lse:
        xp = module_of(total)
        empty = total <= 0  # -inf where the call has no keys
        total = xp.where(empty, -xp.inf, xp.log(xp.where(empty, xp.ones_like(total), total)))
    return results((out, total), lse, top)


# -- rows by their sums -------------------------------------------------------------------------------------------


def average() -> Divide:
    """The divisor of a call whose sums are asked for: kernels count keys for it. It is 0 only where no key is visible,
    so `sums_of` undoes it."""
    return Divide(to_float(COUNT))


def sums_of(outputs: tuple[Any, ...], layout: str) -> Sums:
    """The sums of rows that kernels have divided by `average`, from (out, total, count)."""
    out, total, count = outputs
    xp = module_of(total)
    none = count <= 0  # -inf where the call has no keys
    total, count = (xp.where(none, xp.zeros_like(x), x) for x in (total, constant(count)))
    return Sums(cast(out, total.dtype) * of_rows(count, layout), total, count)


def no_sums(inputs: str) -> ParameterError:
    return ParameterError(f"return_sums is not for {inputs}\n  leave it out, or give padded tensors to a call outside")


def summed(att: Any, request: CallArgs, run: Callable[[Any, CallArgs], tuple[Any, ...]]) -> tuple[Any, Sums]:
    """(out, sums) of a call: kernels give the sums, and operators of the framework divide the rows. `run` gives (out,
    total, count) of an attention and a call."""
    q, k, v, origin, params = request.q, request.k, request.v, request.origin, request.params
    # a graph holds one operator for a call, whose results are divided rows
    if symbolic(q, k, v, *params.values()):
        raise no_sums("graphs of torch.fx.symbolic_trace")
    check_used([n for n in params if n not in KV_INPUTS], att.program.names)
    framework, dtype = framework_of(q), q.dtype
    layout = request.layout or NATURAL.get(str(framework), "bshd")
    pages, tokens = params.get(PAGES), k.shape[-2 if layout == "bhsd" else -3]
    if str(dtype).removeprefix("torch.") == "float16" and pages is None:  # sums leave its range; means of a pool fit
        single = module_of(q).float32 if framework != "jax" else np.float32
        q, k, v = (cast(x, single) if x.dtype == dtype else x for x in (q, k, v))
    # names that `divide` alone reads are no names of the undivided program
    known = att.undivided.program.names
    mine = {n: x for n, x in params.items() if n in KV_INPUTS or n in known}
    outputs = run(att.undivided, request._replace(q=q, k=k, v=v, params=mine))
    sums, divide, values = sums_of(outputs, layout), att.program.divide, {}
    if divide is not None:
        every = {**att.program.scalars, **att.constants, **att.traced, **params}
        values = {n: every[n] for n in names_of(divide.expr) if n in every}
    kv_len = tokens if pages is None else tokens * pages.shape[1]
    problem = problem_of(sums.total, origin, request.sizes, kv_len)
    return divided(sums, divide, values, layout, problem, dtype if q is not request.q else outputs[0].dtype), sums


def merge_weighted(
    att: Any, parts: Sequence[tuple[Any, Sums]], values: Mapping[str, Any], layout: str, sizes: Any
) -> tuple[Any, Sums]:
    """(out, sums) of the rows of `att` by those of disjoint keys. `values` are those of a call."""
    (out, first), *others = parts
    sums = Sums(*(reduce(add, column) for column in zip(first, *(x for _, x in others), strict=True)))
    known = {**att.program.scalars, **att.constants, **att.traced, **values}
    return divided(sums, att.program.divide, known, layout, problem_of(sums.total, None, sizes), out.dtype), sums


def merged_results(out: Any, stats: Any, params: Mapping[str, Any]) -> Any:
    """The results of a call of these `params`, from out and the lse or the `Sums` of all parts."""
    return (out, stats) if params.get("return_sums") or params.get("return_lse") else out


def keywords_of_part(att: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call whose results are merged with others: they ask for lse or, where there is none, for sums.
    They hold for the part what `params` ask of the whole."""
    # an lse is one number of a row where sums are a numerator in float32 too
    if att.program.exprs.has_lse and not params.get("return_sums"):
        return {**params, "return_lse": True, "return_sums": False}
    check_weighted(att.program.exprs, params.get("sinks"), bool(params.get("return_lse")), False)
    return {**params, "return_lse": False, "return_sums": True}


def problem_of(total: Any, origin: Any, sizes: Any, kv_len: int = 0) -> Problem:
    """The problem of rows with these totals, which may have no axis of the batch."""
    batch, heads, q_len = (1,) * (3 - total.ndim) + tuple(total.shape)
    # JAX's divisors read a traced origin as it is
    start = NOWHERE if origin is None else origin if any(map(traced, origin)) else origin_of(origin)
    return Problem(q_len, kv_len, batch, heads, start, sizes)


def divided(
    sums: Sums, divide: Divide | None, values: Mapping[str, Any], layout: str, problem: Problem, dtype: Any
) -> Any:
    """The rows of these sums, in `dtype`: numerator / divide(total, count), 0 where that is 0 and where no key is
    visible. `values` are those of the names in `divide`. Derivatives are those of a call."""
    numerator, total, count = sums
    xp, empty = module_of(total), count == 0
    if divide is not None:
        d = _divisor(divide, values, total, count, problem)
        empty = empty | (d == 0)
    # selected before the division: a row without a divisor may hold NaN, and then its gradients were NaN
    out = xp.where(of_rows(empty, layout), xp.zeros_like(numerator), numerator)
    if divide is not None:
        out = out / of_rows(xp.where(empty, xp.ones_like(d), d), layout)
    return cast(out, dtype)


@memo(64)
def _plan_of(divide: Expr) -> LoopPlan:
    """The divisor as kernels have it."""
    return make_plan(ProgramExprs(weight=SCORE, divide=simplify(divide)))


def _divisor(divide: Divide, values: Mapping[str, Any], total: Any, count: Any, problem: Problem) -> Any:
    """The divisors of rows, in the shape of their `total`."""
    if problem.sizes is None and any(map(traced, problem.origin)):
        text = "origin is traced by jax.jit or another transform, and sums of rows do not tell the whole problem\n"
        raise ParameterError(f"{text}  give its lengths: sizes=(B, H, Q_LEN, KV_LEN)")
    _, values = call_values(total, None, values)
    divide.bind(**{n: stand_in(values[n]) for n in divide.unbound if n in values}).require_bound()
    shape, shape_of_total = (problem.batch, problem.heads, problem.q_len), total.shape
    total, count = (x.reshape(shape) for x in (total, count))
    framework, values = str(framework_of(total)), {**divide.params, **values}
    geometry = Geometry(*shape[:2], shape[1], shape[2], 0, 1, 1, 1.0, problem.origin, problem.sizes)
    plan = _plan_of(divide.expr)
    inputs = KernelInputs(plan, None, geometry, None, plan.slot_values(values), {})
    # numpy has no kernels, and no table of them
    if framework == "numpy":
        assert plan.divide is not None
        env = {**coordinates(geometry.problem), **inputs.slots, "total": total[..., None], "count": count[..., None]}
        return np.broadcast_to(evaluate(plan.divide, env, plan.table_values(values))[..., 0], shape).reshape(
            shape_of_total
        )
    inputs.tables = kernel_tables(plan, framework, values, max(geometry.full), getattr(total, "device", None))
    return DIVISORS[framework](inputs, total, count).reshape(shape_of_total)


# -- arrays of any framework ---------------------------------------------------------------------------------------


def module_of(x: Any) -> Any:
    """The module of an array's operators: numpy, torch or jax.numpy."""
    framework = framework_of(x)
    return np if framework == "numpy" else sys.modules["torch"] if framework == "torch" else sys.modules["jax"].numpy


def of_rows(x: Any, layout: str) -> Any:
    """Numbers of rows [batch, heads, q_len] as factors of out, which has the axes of `layout`."""
    return (x if layout == "bhsd" else x.swapaxes(-1, -2))[..., None]


def cast(x: Any, dtype: Any) -> Any:
    return x.to(dtype) if framework_of(x) == "torch" else x.astype(dtype)


def constant(x: Any) -> Any:
    """`x`, without gradients."""
    framework = framework_of(x)
    if framework == "torch":
        return x.detach()
    return sys.modules["jax"].lax.stop_gradient(x) if framework == "jax" else x
