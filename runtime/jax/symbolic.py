"""Attention whose batch and lengths are symbols of `jax.export`: one module for all of them, on XLA's operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from frisket.dsl.errors import BackendError, BackwardError, LoweringError, ParameterError, ShapeError
from frisket.dsl.ir import FALSE, OPERATORS, TRUE, Expr, conj, walk
from frisket.lowering.analysis.count import literal
from frisket.lowering.analysis.decide import contexts
from frisket.lowering.analysis.layout import bind as written_out
from frisket.lowering.analysis.rows import Interval
from frisket.lowering.kernels.expr import machine
from frisket.lowering.pipeline import UNDRAWN, finite_tables, limits_of, loop_plan
from frisket.lowering.plan import RATE, SEED, Geometry, KernelInputs, ProgramFacts
from frisket.lowering.planner.planner import planner
from frisket.lowering.simplify import prepare
from frisket.lowering.xla.symbolic import TARGET, forward
from frisket.lowering.xla.tiles import int64_enabled
from frisket.runtime.backends.base import LIBRARY
from frisket.runtime.backends.registry import library
from frisket.runtime.calls.arrays import arrays, named, split_kv_args, turn
from frisket.runtime.calls.options import CallArgs, seed_of, sinks_of
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.machine.settings import Settings
from frisket.runtime.plans.device import split_host_device

MAX_SIZE = 1 << 24  # tokens, batch entries: what integers of 32 bits are tested for
EACH = "\n  export one module for each length, instead of jax.export.symbolic_shape"


def attend(att: Any, request: CallArgs) -> tuple[Any, ...]:
    """(out, lse, top) of a call of symbolic lengths."""
    q, k, v, plan, seed, sinks, _, origin, sizes, layout, params = request
    kv_inputs, params = split_kv_args(params)
    call_arrays = arrays(q, k, v, layout, exported=True)
    for what, x in (("a plan", plan), ("an origin", origin), ("sizes", sizes), ("stored keys and values", kv_inputs)):
        if x or call_arrays.kv_dtype:
            raise ShapeError(f"q has the shape {_shape(q)}, and {what} are for known lengths" + EACH)
    g = call_arrays.geometry(att.options.scale, att.options.enable_gqa)
    backend, only = att.options.backend or Settings.read().backend, library("jax")
    if backend not in (None, only, LIBRARY):
        raise BackendError(f"backend {backend!r} is for known lengths; symbolic ones run on {only!r}" + EACH)
    host, traced = split_host_device(params, None, (), "jax")
    traced = {**{n: x for n, x in att.traced.items() if n not in params}, **traced}
    rate = att.options.dropout
    seed = seed_of(seed, rate, "jax")
    sinks = sinks_of(att.options.sinks if sinks is None else sinks, g.heads, "jax", call_arrays.dtype, None)
    program = att.program.without(traced).bind(host)
    values = {**program.scalars, **program.tables, **traced}
    plan, seen = _planned(program, values, traced, g, bool(rate))
    _check_lengths(program, values, g)
    slots = plan.slot_values({**values, **UNDRAWN, **({SEED: seed, RATE: rate} if rate else {})})
    tables = {t.name: values[t.source] for t in plan.tables}
    q, k, v = (_forward_only.bind(x) for x in call_arrays.transposed("bshd"))
    inputs = KernelInputs(plan, None, g, TARGET, slots, tables, sinks)
    out, lse, highest = forward(inputs, seen, values, q, k, v)
    return call_arrays.as_called(turn(out, "bshd", call_arrays.layout), lse, highest)


def _planned(
    program: CallProgram, values: Mapping[str, Any], traced: Mapping[str, Any], g: Geometry, dropout: bool
) -> tuple[Any, tuple[Interval, ...] | None]:
    """The plan, and the intervals of keys that a row of tiles sees; None: all keys."""
    if missing := [n for p in program.parts for n in p.unbound if n not in traced]:
        raise ParameterError(f"`{missing[0]}` has no value; give it: {missing[0]}=<array>")
    for e in (p.expr for p in program.parts):
        for n in walk(e):
            if n.op == "segment" or (n.op == "extent" and any(map(named, np.shape(values[n.name[0]])))):
                raise LoweringError(f"`{n!r}` is found for known lengths" + EACH)
    sane = finite_tables(program.tables)
    exprs = prepare(program.exprs.changed(lambda e: written_out(e, values)), sane)
    limits = limits_of((MAX_SIZE, g.heads, MAX_SIZE, MAX_SIZE), program.scalars, program.tables)
    plan = loop_plan(program, exprs, ProgramFacts(limits=limits), sane, values, dropout)
    return plan, None if exprs.mask is None else _intervals(exprs.mask, traced, limits)


def _intervals(mask: Expr, traced: Mapping[str, Any], limits: Mapping[str, float]) -> tuple[Interval, ...]:
    magnitudes = {n: 2.0**30 for n, x in traced.items() if "int" in str(x.dtype)}  # positions, lengths
    intervals = planner(mask, frozenset(), {**magnitudes, **limits}, int64_enabled()).seen
    if not intervals or any(n.op not in KNOWN for pair in intervals for e in pair for n in walk(machine(e))):
        text = f"which tiles `{mask!r}` shows is found for known lengths: it does not bound the keys of a query by "
        text += "numbers\n  bounds on k, as in `causal & window(256) & k < lengths[b]`, take symbolic ones;"
        raise LoweringError(text + EACH[2:])
    return intervals


KNOWN = frozenset({*OPERATORS, "lit", "var", "param", "lookup"})


def _check_lengths(program: CallProgram, values: Mapping[str, Any], g: Geometry) -> None:
    """Tables that are read at bare positions are as long as there are positions, or a condition says that positions end
    before them."""
    have = {"b": g.batch, "h": g.heads, "q": g.q_len, "k": g.kv_len}
    seen = TRUE if program.mask is None else program.mask.expr
    reads = [x for p in program.parts for x in contexts(p.expr, ()).items() if x[0].op == "lookup"]
    for n, when in reads:
        for axis, index in enumerate(n.args):
            need = have.get(index.name) if index.op == "var" else None
            length: Any = np.shape(values[n.name])[axis] if n.name in values else None
            fixed = isinstance(length, int)
            if need is not None and not (length >= need if fixed and isinstance(need, int) else length == need):
                if fixed and literal(conj(seen, when, index >= length), program.scalars) is FALSE:
                    continue
                text = f"table `{n.name}` has {length} entries on axis {axis} and is read at `{index.name}`, of which "
                raise ParameterError(f"{text}there are {need}; give the exported function a table of that length")


def _shape(x: Any) -> str:
    return f"({', '.join(map(str, x.shape))})"


def _no_gradient(*_: Any, **__: Any) -> Any:
    text = "a gradient of attention to symbolic lengths is asked for, and there is none"
    raise BackwardError(f"{text}{EACH}: those have gradients")


_forward_only: Any = Primitive("frisket_forward_only")
_forward_only.def_abstract_eval(lambda x: x)
_forward_only.def_impl(lambda x: x)
mlir.register_lowering(_forward_only, lambda ctx, x: [x])
ad.primitive_jvps[_forward_only] = _no_gradient
