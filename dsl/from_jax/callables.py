"""Converts a JAX function of positions to Expr, through its jaxpr.

Of its equations calls are inlined, constants named, and parts without positions computed at once. `jax.make_jaxpr` runs
the function once on int32 scalars (and a float32 score); `dsl/from_jax/arrays.py` and `dsl/from_jax/scalars.py` say
what the primitives mean. Captured arrays are the constants of the jaxpr: the very objects the function closes over,
which is how they get their names back. Captured scalars become run-time parameters.

JAX is imported by the caller who wrote the function, never by frisket first.

jax.numpy's code for `//`, `%`, softplus and the like becomes the one operator meant. JAX has division towards zero and
no softplus; jnp puts them together from smaller primitives. What it puts together differs between versions, so the
patterns are made by tracing jnp's own functions on holes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise, product
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

import numpy as np

from frisket.dsl import ir
from frisket.dsl.errors import TraceError
from frisket.dsl.from_python.closure import reached
from frisket.dsl.from_python.numpy_functions import Naming
from frisket.dsl.from_python.symbol import Symbol
from frisket.dsl.from_python.user_line import NO_TRUTH, fail, instead, line, package, raised_at
from frisket.dsl.ir import Expr, build, lit, to_float
from frisket.dsl.operators import MADE_OF
from frisket.dsl.types import FLOAT, INT, Type
from frisket.dsl.widths import Widths
from frisket.dsl.work import RING
from frisket.grammar.memo import memo

from .arrays import MAX_WRITTEN, SHAPED, Array, Reductions, axis_slice, broadcast, only_units, row, scalar, stacked
from .scalars import REASONS, SCALARS, Refused, argument, choose, literal, type_of


class Reader:
    """A reader of the equations of a jaxpr. `rewritten` finds the one operator that jnp writes as several."""

    def __init__(
        self,
        naming: Naming,
        names: Sequence[tuple[str, Any]] = (),
        rewritten: Callable[[Expr], Expr] = lambda e: e,
        widths: Widths | None = None,
    ) -> None:
        self.naming, self.names, self.rewritten, self.widths = naming, names, rewritten, widths
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.offsets: dict[tuple[int, int], tuple[Array, Any]] = {}  # for searchsorted, by the id of an array and side
        self.shaped = {**SHAPED, **Reductions(self.shapes).table()}

    # -- captured arrays --

    def constant(self, value: Any) -> Array:
        """A captured array, or an array that the function made of numbers."""
        import jax

        traced = isinstance(value, jax.core.Tracer)  # a traced array has no entries to compare
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
            # entries bound the values; a traced array has none to read
            if self.widths is not None and known is not None:
                self.widths.values[name] = array
            return ir.lookup(name, i, type) if shape else ir.param(name, type)

        known = None if isinstance(array, jax.core.Tracer) else lambda: array if values is None else values
        return Array(shape, element, known, source)

    # -- equations --

    def run(self, jaxpr: Any, consts: Sequence[Array], inputs: Sequence[Array], outermost: bool = True) -> list[Array]:
        env: dict[Any, Array] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

        def read(v: Any) -> Array:
            # a literal of a jaxpr is no variable
            return _number(v.val, v.aval.dtype) if hasattr(v, "val") else env[v]

        for eqn in jaxpr.eqns:
            try:
                out = self.equation(eqn, [read(v) for v in eqn.invars])
            except Refused as error:
                if not outermost:  # inner equations may be jnp's: the outermost one has the user's line
                    raise
                raise TraceError(f"{error}\n  {_place(eqn)}".rstrip()) from None
            env.update(zip(eqn.outvars, out, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, inputs: list[Array]) -> list[Array]:
        name = eqn.primitive.name
        known = (bool(inputs) or name == "iota") and all(x.is_known for x in inputs)
        # a loop over captured arrays alone is computed by JAX itself
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
            if known:  # JAX computes what the language cannot say
                return self.computed(eqn, inputs)
            raise
        values = (lambda: _compute(eqn, inputs)[0]) if known else None
        return [_array_of(name, eqn.outvars[0].aval.shape, element, inputs, values)]

    def element(self, eqn: Any, inputs: list[Array]) -> Any:
        name = eqn.primitive.name
        if name in self.shaped:
            return self.shaped[name](eqn.params, *inputs)
        if name not in SCALARS:
            raise Refused(f"`{name}` of positions has no counterpart in the language")
        meaning = partial(SCALARS[name], eqn)
        for v in eqn.invars:
            type_of(v.aval.dtype)  # a dtype without a counterpart is refused here, at its equation
        if len(inputs) > 0 and not eqn.outvars[0].aval.shape:
            e = self.result(eqn, meaning(*(x.at() for x in inputs)))
            return lambda _: e
        meaning(*(ir.var(f"operand {n}", type_of(v.aval.dtype)) for n, v in enumerate(eqn.invars)))  # refuse it here
        return broadcast(lambda *xs: self.result(eqn, meaning(*xs)), inputs)

    def result(self, eqn: Any, e: Expr) -> Expr:
        """The element that an equation gives, reduced to JAX's dtype where it may leave it."""
        e, dtype = self.rewritten(e), eqn.outvars[0].aval.dtype
        casts = eqn.primitive.name in ("not", "convert_element_type") and eqn.invars[0].aval.dtype.kind in "iu"
        leaves = e.type is INT and dtype.kind in "iu" and (casts or e.op in RING)
        return self.widths.fitted(e, dtype) if leaves and self.widths is not None else e

    def inlined(self, inner: Any, inputs: list[Array]) -> list[Array]:
        jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
        return self.run(jaxpr, [self.constant(c) for c in consts], inputs, outermost=False)

    def cond(self, eqn: Any, inputs: list[Array]) -> list[Array]:
        which, *operands = inputs
        branches = [self.inlined(b, operands) for b in eqn.params["branches"]]

        def element(results: Sequence[Array], i: tuple[Expr, ...]) -> Expr:
            return choose(which.at(), *(r.at(i) for r in results))

        results = zip(*branches, strict=True)
        return [_array_of("cond", r[0].shape, partial(element, r), [which, *r], None) for r in results]

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
        return [axis_slice(inputs[0], eqn.params["axis"], *ends) for ends in pairwise([0, *ends])]

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
        values = _compute(eqn, inputs)
        return [self.table(source, v) if source or v.shape else _number(v, v.dtype) for v in values]


MANY = {"cond": Reader.cond, "scan": Reader.scan, "split": Reader.split}


def _array_of(name: str, shape: tuple[int, ...], element: Any, inputs: Sequence[Array], known: Any) -> Array:
    source = next((x.source for x in inputs if x.source), "")
    pieces = bool(shape) and (any(x.pieces for x in inputs) or name in ("concatenate", "stack"))
    return Array(tuple(shape), element, known, source, pieces)


def _number(value: Any, dtype: Any) -> Array:
    e = literal(value, dtype)
    return Array((), lambda _: e, lambda: np.asarray(value).astype(dtype))


def _called(eqn: Any) -> Any:
    """The inner jaxpr of jit, custom_jvp_call, remat and similar equations; nothing for other equations."""
    if eqn.primitive.name in ("scan", "while"):  # their bodies run many times
        return None
    return next((eqn.params[n] for n in ("jaxpr", "call_jaxpr", "fun_jaxpr") if n in eqn.params), None)


ONCE = frozenset({"dot_general", "rev"})


def _computed_once(eqn: Any) -> bool:
    """Whether the result of an equation on captured arrays is better a table than read element by element."""
    name = eqn.primitive.name
    old = tuple(eqn.invars[0].aval.shape) if eqn.invars else ()
    if name == "slice":
        return any(n not in (1, m) for n, m in zip(eqn.outvars[0].aval.shape, old, strict=True))
    if name == "reshape":
        return not only_units(old, eqn.outvars[0].aval.shape)
    if name in ("concatenate", "stack"):  # captured scalars in one array stay parameters
        return any(v.aval.size > 1 for v in eqn.invars)
    return name in ONCE or (name.startswith(("reduce_", "arg", "cum")) and name != "reduce_precision")


def _compute(eqn: Any, inputs: Sequence[Array]) -> list[Any]:
    """The results of an equation on captured arrays alone."""
    import jax

    values = [x.values() for x in inputs]
    arrays = [jax.numpy.asarray(x, v.aval.dtype) for x, v in zip(values, eqn.invars, strict=True)]
    with jax.ensure_compile_time_eval():  # else an outer jax.jit would trace it
        out = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _searches(eqn: Any, side: str) -> bool:
    """Whether an equation called searchsorted is JAX's own with this side, not another function of that name."""
    import jax

    kinds = [argument(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    reference = jax.make_jaxpr(lambda a, x: jax.numpy.searchsorted(a, x, side=side))(*kinds)
    return str(reference.eqns[0].params.get("jaxpr")) == str(eqn.params["jaxpr"])


# -- the user's line -----------------------------------------------------------------------------------

_OURS = (str(Path(__file__).parents[1]), os.sep + "jax" + os.sep, os.sep + "jaxlib" + os.sep)
_STANDARD = os.path.dirname(os.__file__)


def _is_users(file: str) -> bool:
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return not standard and not any(part in file for part in _OURS)


def _place(eqn: Any) -> str:
    """The line of the user's code that wrote an equation."""
    trace = getattr(eqn.source_info, "traceback", None)
    places = ((f.file_name, f.line_num) for f in (trace.frames if trace is not None else ()) if _is_users(f.file_name))
    return next((line(*place) for place in places), "")


def _power(x: Expr, y: Expr) -> Expr:
    if x is lit(2):  # the shift is exact, a power of Floats is not
        return build("shl", ir.ONE, y)
    raise Refused("an integer to a power that varies; make one of them a float, or write `2 ** x`")


X, Y = "first hole", "second hole"

# (how jnp is asked, the type of its arguments, how many, what is meant)
WRITTEN: list[tuple[str, Type, int, Callable[..., Expr]]] = [
    ("numpy.floor_divide", INT, 2, lambda x, y: build("floordiv", x, y)),
    ("numpy.remainder", INT, 2, lambda x, y: build("mod", x, y)),
    ("numpy.power", INT, 2, _power),
    ("numpy.trunc", FLOAT, 1, lambda x: to_float(build("int", x))),
    ("numpy.log2", FLOAT, 1, lambda x: build("log2", x)),
    ("nn.softplus", FLOAT, 1, MADE_OF["softplus"]),
    ("nn.gelu", FLOAT, 1, MADE_OF["gelu"]),
]


@memo(group="once")
def patterns(wide: bool) -> dict[str, list[tuple[Expr, tuple[Expr, ...], Callable[..., Expr]]]]:
    """The patterns by operator at the root: (jnp's code, holes of the pattern, the operator meant). `wide`: those of
    int64 too."""
    import jax

    by_op: dict[str, list[tuple[Expr, tuple[Expr, ...], Callable[..., Expr]]]] = {}
    for (where, type, count, meant), whole in product(WRITTEN, ("int32", "int64")[: 1 + wide]):
        module, name = where.split(".")
        function = getattr(getattr(jax, module), name)
        if name == "gelu":  # jax.nn.gelu approximates by tanh unless told not to
            function = partial(function, approximate=False)
        kind = argument((), whole if type is INT else "float32")
        closed = jax.make_jaxpr(function)(*[kind] * count)
        holes = tuple(ir.var(n, type) for n in (X, Y)[:count])
        reader = Reader(lambda wish, array: wish)
        (out,) = reader.run(closed.jaxpr, [reader.constant(c) for c in closed.consts], [scalar(e) for e in holes])
        by_op.setdefault(out.at().op, []).append((out.at(), holes, meant))
    return by_op


def replaced(e: Expr) -> Expr:
    """The operator meant by `e`, where `e` is jnp's code for an operator."""
    for pattern, holes, meant in patterns(sys.modules["jax"].config.jax_enable_x64).get(e.op, ()):
        bound: dict[Expr, Expr] = {}
        if _fits(pattern, e, holes, bound):
            return meant(*(bound[h] for h in holes))
    return e


def _fits(pattern: Expr, e: Expr, holes: tuple[Expr, ...], bound: dict[Expr, Expr]) -> bool:
    if pattern in holes:
        return e.type is pattern.type and bound.setdefault(pattern, e) is e
    e = e.args[0] if e.op == "wrap" else e  # patterns have no ends, and so no `wrap`
    if pattern is e:
        return True
    if (pattern.op, pattern.type, pattern.name, len(pattern.args)) != (e.op, e.type, e.name, len(e.args)):
        return False
    return bool(pattern.args) and all(_fits(p, a, holes, bound) for p, a in zip(pattern.args, e.args))


# -- which functions are JAX's ----------------------------------------------------------------------


def reaches_jax(fn: Any) -> bool:
    """Whether a function uses JAX: a module, function or array of it is in its closure, globals, defaults, or those
    of the functions it calls. A global counts only if the code reads it."""
    return "jax" in sys.modules and any(_is_jax(x) for _, x, _ in reached(fn))


def _is_jax(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    type_module = type(value).__module__  # of an array, a jitted function, a ufunc
    return any(isinstance(n, str) and n.split(".")[0] in ("jax", "jaxlib") for n in (name, type_module))


def raised_in_jax(error: BaseException) -> bool:
    """Whether JAX was called: with a symbol, it raises."""
    return any(package(frame) in ("jax", "jaxlib") for frame, _ in walk_tb(error.__traceback__))


# -- tracing ----------------------------------------------------------------------------------------


def call(fn: Callable[..., Any], args: Sequence[Symbol], keywords: Mapping[str, Symbol], naming: Naming) -> Any:
    """The result of `fn` for these symbols: a symbol, or whatever is no number. `naming` names the captured arrays."""
    import jax

    exprs = [s.expr for s in (*args, *keywords.values())]
    whole = str(jax.dtypes.canonicalize_dtype(np.int64))  # int64 exists only under jax_enable_x64
    kinds = [argument((), "float32" if e.type is FLOAT else whole) for e in exprs]

    def flat(*xs: Any) -> Any:
        return fn(*xs[: len(args)], **dict(zip(keywords, xs[len(args) :])))

    try:
        closed, result = jax.make_jaxpr(flat, return_shape=True)(*kinds)
    except TraceError:
        raise
    except (TypeError, IndexError, ValueError, AttributeError, OverflowError, NotImplementedError) as error:
        fail(_explained(error, raised_at(error)), error)
    if not hasattr(result, "dtype"):
        return result  # nothing, or several
    if result.shape:
        size = "x".join(map(str, result.shape))
        raise TraceError(f"the function returns an array ({size}); return one number or Bool: index or reduce it")
    arrays = [(n, x) for n, x, _ in reached(fn) if n and hasattr(x, "shape") and hasattr(x, "dtype")]
    reader = Reader(naming, arrays, replaced, Widths({}))
    (out,) = reader.run(closed.jaxpr, [reader.constant(c) for c in closed.consts], [scalar(e) for e in exprs])
    return Symbol(out.at())


# -- errors at the user's line ----------------------------------------------------------------------


def _explained(error: Exception, where: str) -> str:
    """The message of an error that JAX or the function raised."""
    name = type(error).__name__
    if name == "TracerBoolConversionError":
        return f"{NO_TRUTH}: {instead(where, 'jnp')}"
    if name == "TracerIntegerConversionError":
        return "a position is not a number while the function is traced: no range(), no Python indexing"
    if name == "TracerArrayConversionError":
        return "numpy meets a position that JAX traces: use jax.numpy, and index `jnp.asarray(x)` for a numpy array x"
    if name == "ConcretizationTypeError":
        return "a position has no value while the function is traced: leave float() and int() out, or use .astype"
    return f"{name}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")
