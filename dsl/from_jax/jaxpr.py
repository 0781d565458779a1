"""Converts a jaxpr's equations to Exprs: calls inlined, constants named, parts without positions computed at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from frisket.dsl import ir
from frisket.dsl.errors import TraceError
from frisket.dsl.from_python.user_line import line
from frisket.dsl.ir import Expr

from .arrays import MAX_WRITTEN, SHAPED, Array, Reductions, broadcast, only_units, row, scalar, stacked, taken
from .scalars import REASONS, SCALARS, Refused, argument, choose, literal, type_of

Naming = Callable[[str, Any], str]  # the name a table gets, from the one it wishes for and its array


class Reader:
    """A reader of the equations of a jaxpr. `rewritten` finds the one operator that jnp writes as several."""

    def __init__(
        self, naming: Naming, names: Sequence[tuple[str, Any]] = (), rewritten: Callable[[Expr], Expr] = lambda e: e
    ) -> None:
        self.naming, self.names, self.rewritten = naming, names, rewritten
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.offsets: dict[tuple[int, int], tuple[Array, Any]] = {}  # for searchsorted, by the id of an array and side
        self.shaped = {**SHAPED, **Reductions(self.shapes).table()}

    # -- captured arrays --

    def constant(self, value: Any) -> Array:
        """A captured array, or an array that the function made of numbers."""
        import jax

        traced = isinstance(value, jax.core.Tracer)
        for name, array in self.names:
            if array is value:
                self.naming(name, array)  # before what is made of it
                return self.table(name, array)
        for name, array in self.names:  # numpy arrays are copied, and cut to 32 bits, on their way into a jaxpr
            if isinstance(array, np.ndarray) and not traced and np.array_equal(array, np.asarray(value)):
                return self.table(name, array, value)
        # an array of JAX that no name leads to is captured all the same; others are made of the function's numbers
        return self.table("table" if isinstance(value, jax.Array) else "", value)

    def table(self, source: str, array: Any, values: Any = None) -> Array:
        """An array as a table, a scalar as a parameter, named when first read; traced arrays are read by elements."""
        import jax

        type = type_of(array.dtype)
        shape = tuple(array.shape)

        def element(i: tuple[Expr, ...]) -> Expr:
            name = self.naming(source or "table", array)
            self.shapes[name] = shape
            return ir.lookup(name, i, type) if shape else ir.param(name, type)

        known = None if isinstance(array, jax.core.Tracer) else lambda: array if values is None else values
        return Array(shape, element, known, source)

    # -- equations --

    def run(self, jaxpr: Any, consts: Sequence[Array], inputs: Sequence[Array], outermost: bool = True) -> list[Array]:
        env: dict[Any, Array] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

        def read(v: Any) -> Array:
            return _literal(v) if hasattr(v, "val") else env[v]

        for eqn in jaxpr.eqns:
            try:
                out = self.equation(eqn, [read(v) for v in eqn.invars])
            except Refused as error:
                if not outermost:
                    raise
                raise TraceError(f"{error}\n  {_place(eqn)}".rstrip()) from None
            env.update(zip(eqn.outvars, out, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, inputs: list[Array]) -> list[Array]:
        name = eqn.primitive.name
        known = (bool(inputs) or name == "iota") and all(x.is_known for x in inputs)
        if name in REASONS and not (known and name == "while"):
            raise Refused(REASONS[name])
        if name in MANY and not known:
            return MANY[name](self, eqn, inputs)
        if (inner := _called(eqn)) is not None:
            return self.search(eqn, inputs) or self.inlined(inner, inputs)
        if known and _computed_once(eqn) and not any(x.pieces for x in inputs):
            return self.computed(eqn, inputs)
        try:
            element = self.element(eqn, inputs)
        except Refused:
            if known:
                return self.computed(eqn, inputs)
            raise
        values = partial(_compute, eqn, inputs) if known else None
        return [_made(name, eqn.outvars[0].aval.shape, element, inputs, values)]

    def element(self, eqn: Any, inputs: list[Array]) -> Any:
        name = eqn.primitive.name
        if name in self.shaped:
            return self.shaped[name](eqn.params, *inputs)
        if name not in SCALARS:
            raise Refused(f"`{name}` of positions has no counterpart in the language")
        meaning = partial(SCALARS[name], eqn)
        for v in eqn.invars:
            type_of(v.aval.dtype)
        if len(inputs) > 0 and not eqn.outvars[0].aval.shape:
            e = self.rewritten(meaning(*(x.at() for x in inputs)))
            return lambda _: e
        meaning(*(ir.var(f"operand {n}", type_of(v.aval.dtype)) for n, v in enumerate(eqn.invars)))  # refuse it here
        return broadcast(lambda *xs: self.rewritten(meaning(*xs)), inputs)

    def inlined(self, inner: Any, inputs: list[Array]) -> list[Array]:
        jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
        return self.run(jaxpr, [self.constant(c) for c in consts], inputs, outermost=False)

    def cond(self, eqn: Any, inputs: list[Array]) -> list[Array]:
        which, *operands = inputs
        branches = [self.inlined(b, operands) for b in eqn.params["branches"]]

        def element(results: Sequence[Array]) -> Any:
            return lambda i: choose(which.at(), *(r.at(i) for r in results))

        return [_made("cond", r[0].shape, element(r), [which, *r], None) for r in zip(*branches, strict=True)]

    def scan(self, eqn: Any, inputs: list[Array]) -> list[Array]:
        """A loop of few turns, written out. Values collected or read turn by turn have one axis more outside."""
        inner, length = eqn.params["jaxpr"], eqn.params["length"]
        if length > MAX_WRITTEN:
            raise Refused(f"a loop of {length} turns, more than {MAX_WRITTEN}; use a reduction or a table")
        ranks = [len(v.aval.shape) for v in inner.jaxpr.invars]
        each = sum(len(x.shape) > r for x, r in zip(inputs, ranks, strict=True))
        outer = [len(v.aval.shape) for v in eqn.outvars]
        carried = sum(len(v.aval.shape) == r for v, r in zip(inner.jaxpr.outvars, outer, strict=True))
        split = len(inputs) - each
        consts, carry, rows = inputs[: split - carried], inputs[split - carried : split], inputs[split:]
        turns: list[list[Array]] = []
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            out = self.inlined(inner, [*consts, *carry, *(row(x, i) for x in rows)])
            carry = out[:carried]
            turns.append(out[carried:])
        if eqn.params["reverse"]:
            turns.reverse()
        return [*carry, *(stacked(ys) for ys in zip(*turns, strict=True))]

    def split(self, eqn: Any, inputs: list[Array]) -> list[Array]:
        ends = accumulate(int(n) for n in eqn.params["sizes"])
        return [taken(inputs[0], eqn.params["axis"], *ends) for ends in pairwise([0, *ends])]

    def search(self, eqn: Any, inputs: list[Array]) -> list[Array] | None:
        """jnp.searchsorted of a position: the segment that holds the position, counted from one more at the front. The
        table gets an end on either side: searchsorted knows places before the first offset and past the last."""
        if eqn.params.get("name") != "searchsorted" or len(inputs) != 2 or not inputs[0].is_known or inputs[1].is_known:
            return None
        side = next((s for s in ("left", "right") if _searches(eqn, s)), None)
        if side is None or inputs[1].shape or len(inputs[0].shape) != 1:
            return None
        offsets = np.asarray(inputs[0].values())
        if offsets.dtype.kind not in "iu":
            raise Refused("searchsorted in an array of floats; the offsets of segments are integers")
        if np.any(offsets[1:] < offsets[:-1]):
            raise Refused("searchsorted in an array that is not sorted")
        step = int(side == "left")  # an entry is below x where it is not above x - 1
        key = id(inputs[0]), step
        if key not in self.offsets:
            far = np.iinfo(np.int32)  # as far as positions go; what lies beyond, like padding, is never passed
            inner = np.clip(offsets.astype(np.int64), far.min, far.max - step) + step
            self.offsets[key] = inputs[0], np.concatenate([[far.min], inner, [far.max]]).astype(np.int32)
        extended = self.offsets[key][1]
        name = self.naming(inputs[0].source, extended)
        self.shapes[name] = extended.shape
        return [scalar(ir.segment(name, inputs[1].at()))]

    def computed(self, eqn: Any, inputs: list[Array]) -> list[Array]:
        """The result of an equation on captured arrays alone, computed now: a table, or a parameter."""
        source = next((x.source for x in inputs if x.source), "")
        values = _compute(eqn, inputs, every=True)
        return [self.table(source, v) if source or v.shape else _number(v, v.dtype) for v in values]


MANY = {"cond": Reader.cond, "scan": Reader.scan, "split": Reader.split}


def _made(name: str, shape: tuple[int, ...], element: Any, inputs: Sequence[Array], known: Any) -> Array:
    source = next((x.source for x in inputs if x.source), "")
    pieces = bool(shape) and (any(x.pieces for x in inputs) or name in ("concatenate", "stack"))
    return Array(tuple(shape), element, known, source, pieces)


def _literal(v: Any) -> Array:
    return _number(v.val, v.aval.dtype)


def _number(value: Any, dtype: Any) -> Array:
    e = literal(value, dtype)
    return Array((), lambda _: e, lambda: np.asarray(value).astype(dtype))


def _called(eqn: Any) -> Any:
    """The inner jaxpr of jit, custom_jvp_call, remat and similar equations; nothing for other equations."""
    if eqn.primitive.name in ("scan", "while"):
        return None
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    return next((eqn.params[n] for n in names if n in eqn.params), None)


ONCE = frozenset({"dot_general", "rev"})


def _computed_once(eqn: Any) -> bool:
    """Whether the result of an equation on captured arrays is better a table than read element by element."""
    name = eqn.primitive.name
    old = tuple(eqn.invars[0].aval.shape) if eqn.invars else ()
    if name == "slice":
        new = eqn.outvars[0].aval.shape
        return any(n not in (1, m) for n, m in zip(new, old, strict=True))
    if name == "reshape":
        return not only_units(old, eqn.outvars[0].aval.shape)
    if name in ("concatenate", "stack"):  # captured scalars beside one another stay parameters
        return any(v.aval.size > 1 for v in eqn.invars)
    return name in ONCE or (name.startswith(("reduce_", "arg", "cum")) and name != "reduce_precision")


def _compute(eqn: Any, inputs: Sequence[Array], every: bool = False) -> Any:
    import jax

    values = [x.values() for x in inputs]
    arrays = [jax.numpy.asarray(x, v.aval.dtype) for x, v in zip(values, eqn.invars, strict=True)]
    with jax.ensure_compile_time_eval():
        out = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))
    results = list(out) if eqn.primitive.multiple_results else [out]
    return results if every else results[0]


def _searches(eqn: Any, side: str) -> bool:
    """Whether an equation called searchsorted is JAX's own with this side, not another function of that name."""
    import jax

    kinds = [argument(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    own = jax.make_jaxpr(lambda a, x: jax.numpy.searchsorted(a, x, side=side))(*kinds)
    return str(own.eqns[0].params.get("jaxpr")) == str(eqn.params["jaxpr"])


# -- the user's line -----------------------------------------------------------------------------------

_OURS = (str(Path(__file__).parents[1]), os.sep + "jax" + os.sep, os.sep + "jaxlib" + os.sep)
_STANDARD = os.path.dirname(os.__file__)


def _is_users(file: str) -> bool:
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return not standard and not any(part in file for part in _OURS)


def _place(eqn: Any) -> str:
    """The line of the user's code that wrote an equation."""
    trace = getattr(eqn.source_info, "traceback", None)
    found = ((f.file_name, f.line_num) for f in (trace.frames if trace is not None else ()) if _is_users(f.file_name))
    return next((line(*place) for place in found), "")
