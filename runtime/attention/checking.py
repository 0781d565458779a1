"""A call beside the float64 interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from frisket.lowering import dense
from frisket.lowering.plan import Geometry
from frisket.runtime.calls.arrays import Arrays, framework_of, from_numpy, to_numpy, turn
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.calls.stored_kv import meant
from frisket.runtime.plans.call import Call, dropout_terms
from frisket.runtime.plans.device import checked_program

from .report import CheckedGradients, Report, compared, differentiated


def oracle(
    arrays: Arrays, g: Geometry, program: CallProgram, rate: float = 0.0, seed: Any = None, sinks: Any = None,
    live: Mapping[str, Any] = MappingProxyType({}),
) -> Any:  # fmt: skip
    """(out [batch, heads, q_len, v_dim], lse, top [batch, heads, q_len]) in float64."""
    program.require_bound()
    q, k, v = meant(arrays, live)
    mask, score = program.exprs
    terms = dropout_terms(program, rate, seed)
    terms["params"] |= program.scalars
    place: dict[str, Any] = {"scale": g.scale, "tables": program.tables, "origin": g.origin, "sizes": g.full}
    sinks = None if sinks is None else to_numpy(sinks)
    out, lse = dense.attention(q, k, v, mask, score, sinks=sinks, **terms, **place)
    return out, lse, dense.top(q, k, mask, score, params=terms["params"], **place)


def interpreted(call: Call) -> tuple[Any, Any, Any]:
    """The backend "dense": the interpreter on the arrays of a framework."""
    given = call.given
    out, *rows = oracle(given, call.geometry, call.plan.program, call.rate, call.seed, call.sinks, call.live)
    real = "float64" if given.dtype == "float64" else "float32"
    lse, top = (from_numpy(x, given.q, real) for x in rows)
    return from_numpy(turn(out, "bhsd", given.layout), given.q), lse, top


def report(call: Call, out: Any, lse: Any) -> Report:
    """The result of a call beside the interpreter's."""
    return _compared(call, call.plan.program, out, lse)


def _compared(
    call: Call, program: CallProgram, out: Any, lse: Any, cotangents: CheckedGradients | None = None
) -> Report:
    out = turn(to_numpy(out), call.given.layout, "bhsd")
    terms = dropout_terms(program, call.rate, call.seed)
    return compared(
        call.given, call.geometry, program, out, to_numpy(lse), sinks=call.sinks, cotangents=cotangents, live=call.live,
        **terms,
    )  # fmt: skip


def report_gradients(attend: Callable[..., Any], call: Call, params: Mapping[str, Any]) -> Report:
    """The result of a call and its gradients beside the interpreter's. `attend` gives (out, lse)."""
    learned = {n: x for n, x in params.items() if n in call.plan.program.learnable and framework_of(x)}
    fixed = {n: x for n, x in params.items() if n not in learned}
    given = call.given
    inputs = {"q": given.q, "k": given.k, "v": given.v, **learned}
    if call.sinks is not None:
        inputs["sinks"] = call.sinks
    found = differentiated(given.framework, lambda learned: attend(**learned, **fixed, seed=call.seed), inputs)
    return _compared(call, call.plan.program, *found)


def learned_values(program: CallProgram, like: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """The Float parameters that only the score mod reads, as arrays beside `like`: gradients flow to those."""
    have = {**program.scalars, **program.tables, **params}
    real = "float64" if str(like.dtype).endswith("float64") else "float32"
    names = [n for n in program.learnable if n in have and n not in ("q", "k", "v")]
    return {
        n: have[n] if framework_of(have[n]) not in (None, "numpy") else from_numpy(np.asarray(have[n]), like, real)
        for n in sorted(names)
    }


def report_later(call: Call, out: Any, lse: Any) -> None:
    """A check under `jax.jit`: the callback compares once the values are there, and raises from there."""
    import jax

    given, plan = call.given, call.plan
    values = plan.given

    def look(qkv: Any, out: Any, lse: Any, values: dict[str, Any], seed: Any, sinks: Any, live: Any) -> None:
        q, k, v = (np.asarray(x) for x in qkv)
        plain = checked_program(plan, {n: np.asarray(x) for n, x in values.items()})
        here = replace(call, given=replace(given, q=q, k=k, v=v), seed=seed, sinks=sinks, live=live)
        _compared(here, plain, out, lse).require()

    jax.debug.callback(look, (given.q, given.k, given.v), out, lse, values, call.seed, call.sinks, dict(call.live))
