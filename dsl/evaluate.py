"""The meaning of the language: a numpy interpreter of Expr, small enough to be believed by reading.

>>> import numpy as np
>>> from frisket.dsl.sugar import q, k
>>> q_idx, k_idx = np.ogrid[:2, :3]
>>> evaluate(q >= k, {"q": q_idx, "k": k_idx})
array([[ True, False, False],
       [ True,  True, False]])

Int is int64 here and leaving 64 bits is an error; Float is float64. A division by zero and a shift outside
0..63 give 0; a lookup out of range is clamped to the table (architecture: fixed meanings).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import BudgetError, EvaluationError
from .ir import Expr, build, connect, find, make, named, nest, substitute, var, walk
from .ir import lit as literal
from .types import BOOL, FLOAT, INT, Type
from .work import modular, outside, steps

Array = NDArray[Any]
DTYPES: dict[Type, Any] = {BOOL: np.bool_, INT: np.int64, FLOAT: np.float64}
_INT_LIMIT = 2.0**63
MOST = 1 << 34  # steps that the reductions of one evaluation may take: half a minute or so
_AT_ONCE = 1 << 16  # values of a reduction's body held together


def evaluate(
    root: Expr,
    env: Mapping[str, Any],
    tables: Mapping[str, Any] | None = None,
    hooks: Mapping[str, Callable[..., Array]] | None = None,
) -> Array:
    """The value of `root`, broadcast over the arrays of `env` (variable and parameter names).

    `tables` are numpy arrays; `hooks` add operators of the analysis. Raises `EvaluationError` for a name
    without a value and for an Int outside 64 bits, `BudgetError` for reductions that would take more than `MOST` steps.
    """
    with np.errstate(all="ignore"):  # infinities and NaN are values of the language, not warnings
        return _Evaluation(env, tables or {}, hooks or {})(root, {})


class _Evaluation:
    """The state of one evaluation: the values of names, and the steps that its reductions have taken."""

    def __init__(
        self, env: Mapping[str, Any], tables: Mapping[str, Any], hooks: Mapping[str, Callable[..., Array]]
    ) -> None:
        self.env, self.tables, self.hooks = env, tables, hooks
        self.spent = 0

    def __call__(self, root: Expr, bound: Mapping[Expr, Array]) -> Array:
        order, wrapping = outside(root), modular(root)
        last = {a: i for i, node in enumerate(order) for a in node.args}
        values: dict[Expr, Array] = {}
        for i, node in enumerate(order):
            if node.op == "reduce":
                # bounds vary with no position
                values[node] = self._reduced(node, [int(values[a]) for a in node.args[:2]], bound)
            else:
                args = [values[a] for a in node.args]
                values[node] = MODULAR[node.op](*args) if node in wrapping else self._value(node, args, bound)
            for a in node.args:
                if last[a] == i and a is not root:
                    values.pop(a, None)  # memory follows what is still needed
        return values[root]

    def _value(self, node: Expr, args: list[Array], bound: Mapping[Expr, Array]) -> Array:
        if node.op in self.hooks:
            return self.hooks[node.op](node, *args)
        if node.op in _NAMED:
            return _NAMED[node.op](self, node, args, bound)
        try:
            return OPERATORS[node.op](*args)
        except EvaluationError:  # an operator knows numbers alone: the error is raised again with its clause
            raise leaves_64_bits(node) from None

    def _literal(self, node: Expr, *_: Any) -> Array:
        # numpy would raise an error that names no clause
        if node.type is INT and not -(2**63) <= node.name < 2**63:
            raise leaves_64_bits(node)
        return np.asarray(node.name, DTYPES[node.type])

    def _name(self, node: Expr, *_: Any) -> Array:
        if node.name not in self.env:
            raise EvaluationError(f"`{node.name}` has no value")
        return np.asarray(self.env[node.name]).astype(DTYPES[node.type], copy=False)

    def _extent(self, node: Expr, *_: Any) -> Array:
        return np.asarray(table_array(self.tables, node.name[0]).shape[node.name[1]])

    def _segment(self, node: Expr, args: list[Array], *_: Any) -> Array:
        table = table_array(self.tables, node.name)
        place = np.searchsorted(table, args[0], side="right") - 1
        return np.clip(place, 0, max(len(table) - 2, 0))  # past either end: the nearest segment

    def _lookup(self, node: Expr, indices: list[Array], *_: Any) -> Array:
        table = table_array(self.tables, node.name)
        if table.ndim != len(indices):
            raise EvaluationError(f"`{node.name}` has {table.ndim} axes, indexed with {len(indices)}")
        clamped = tuple(np.clip(i, 0, n - 1) for i, n in zip(indices, table.shape, strict=True))
        return np.asarray(table[clamped]).astype(DTYPES[node.type], copy=False)

    def _with_ends(self, body: Expr) -> Expr:
        """The body with numbers as bounds of its reductions, so that steps can be counted: `extent(t, 0)` is one."""
        ends = {a for n in find(body, "reduce") for a in n.args[:2] if a.op != "lit"}
        return substitute(body, {a: literal(int(self(a, {}))) for a in ends}) if ends else body

    def _reduced(self, node: Expr, ends: list[int], bound: Mapping[Expr, Array]) -> Array:
        """The value of a reduction: the body is evaluated for many values at a time, along a new first axis."""
        (kind, height), (start, stop), body = node.name, ends, node.args[2]
        if start >= stop:
            return np.asarray(_of_nothing(kind, start, stop, node.type).name, DTYPES[node.type])
        read = [*(bound[n] for n in walk(body) if n in bound)]
        read += [np.asarray(self.env[n.name]) for n in find(body, "var", "param") if n.name in self.env]
        shape = np.broadcast_shapes(*(x.shape for x in read))
        positions = math.prod(shape)
        if not bound:  # inner reductions are part of the outermost
            self.spent += positions * steps(self._with_ends(body)) * (stop - start)
        if self.spent > MOST:
            raise BudgetError(
                f"`{kind}` over {stop - start:,} values would take {self.spent:,} steps at {positions:,} positions, "
                f"more than {MOST:,}\n  ask for fewer positions, or put the inner reduction in a table"
            )
        bound_var, fold = make("bound", (), height), OPERATORS[JOIN[kind]]
        # few positions take many values at once, many positions a few: memory stays the same
        width = max(1, _AT_ONCE // max(positions, 1))
        total: Array | None = None
        for first in range(start, stop, width):
            several = np.arange(first, min(first + width, stop)).reshape(-1, *(1,) * len(shape))
            part = self(body, {**bound, bound_var: several})
            if part.ndim <= len(shape):  # the body does not read its variable
                part = part[None]
            if kind == "sum":
                part = np.broadcast_to(part, (len(several), *part.shape[1:]))
                parts = list(part)  # one after the other, as written: Floats depend on it
            else:
                parts = [_ALL_AT_ONCE[kind].reduce(part, axis=0)]
            for x in parts:
                total = x if total is None else fold(total, x)
        assert total is not None
        return total


# What is no operator: the value of a node, from the evaluation, the values of its indices, and those of variables of
# reductions.
_NAMED: dict[str, Callable[..., Array]] = {
    "lit": _Evaluation._literal,
    "var": _Evaluation._name,
    "param": _Evaluation._name,
    "bound": lambda run, node, args, bound: bound[node],
    "extent": _Evaluation._extent,
    "segment": _Evaluation._segment,
    "lookup": _Evaluation._lookup,
}


def table_array(tables: Mapping[str, Any], name: str) -> Array:
    if name not in tables:
        raise EvaluationError(f"table `{name}` has no value")
    return np.asarray(tables[name])


def decided(e: Expr, scalars: Mapping[str, Any]) -> Expr:
    """The Expr without equations of literals and of known numbers alone. `left == -1 | q - k <= left` is
    `q - k <= left` where `left` is 64. Other comparisons stay: a kernel serves both of their results."""
    known: dict[Expr, Expr] = {}
    for n in walk(e):
        if n.op in ("eq", "ne") and all(leaf[0] == "param" and leaf[1] in scalars for leaf in named(n)):
            if not find(n, "bound"):  # the variable of a reduction has no value outside of it
                known[n] = literal(bool(evaluate(n, scalars, {})))
        elif n.op in ("and", "or") and any(a in known for a in n.args):
            known[n] = connect(n.op, (known.get(a, a) for a in n.args))
    return substitute(e, known) if known else e


def unrolled(root: Expr, env: Mapping[str, Any], tables: Mapping[str, Any]) -> Expr:
    """The body of an Expr with its reductions written out: bounds are literals, extents of tables, or parameters."""
    if not find(root, "reduce", "extent"):
        return root
    sizes = {n: literal(int(table_array(tables, n.name[0]).shape[n.name[1]])) for n in find(root, "extent")}
    return unroll(substitute(root, sizes), env)


JOIN = {"any": "or", "all": "and", "sum": "add", "min": "min", "max": "max"}
_ALL_AT_ONCE = {"any": np.logical_or, "all": np.logical_and, "min": np.minimum, "max": np.maximum}


def _of_nothing(kind: str, start: int, stop: int, type: Type) -> Expr:
    """The value of a reduction over an empty range."""
    if kind in ("min", "max"):
        raise EvaluationError(f"{kind} over the empty range {start}..{stop}")
    return literal({"any": False, "all": True}[kind] if type is BOOL else 0.0 if type is FLOAT else 0)


def unroll(root: Expr, env: Mapping[str, Any] | None = None) -> Expr:
    """Write reductions with known bounds out as chains of operators."""
    while True:
        reductions = find(root, "reduce")
        if not reductions:
            return root
        # the last in walk order has no reduction above it: outer binders go first
        node = reductions[-1]
        kind, height = node.name
        start, stop = (int(evaluate(a, env or {})) for a in node.args[:2])
        terms = [substitute(node.args[2], {make("bound", (), height): literal(j)}) for j in range(start, stop)]
        while kind in ("min", "max") and len(terms) > 2:  # a balanced tree, whose depth fits the stack
            terms = [build(JOIN[kind], *pair) for pair in zip(terms[::2], terms[1::2])] + terms[len(terms) // 2 * 2 :]
        whole = nest(JOIN[kind], terms) if terms else _of_nothing(kind, start, stop, node.type)
        root = substitute(root, {node: whole})


# -- operators ------------------------------------------------------------------------------------


def leaves_64_bits(clause: Expr, place: str = "", *whole: Expr) -> EvaluationError:
    """The error for a clause of an expression whose integers leave 64 bits."""
    remedy = f"bound its factors, for example by `%`; integers wrap as in torch in `wrap({clause!r}, 64)`"
    if clause.op == "shl":
        fields = [e.args for e in find((clause, *whole), "bitand") if clause in e.args]
        bits = next((a for args in fields for a in args if a is not clause), var("x"))
        remedy = f"to test a bit write `({build('shr', bits, clause.args[1])!r}) & 1`"
    error = EvaluationError(f"an integer leaves 64 bits in `{clause!r}`{place}\n  {remedy}")
    error.clause = clause
    return error


def _within(estimate: Array) -> None:
    if np.any(np.abs(estimate) >= _INT_LIMIT):
        raise EvaluationError("an integer leaves 64 bits")


def _checked(fn: Callable[..., Any]) -> Callable[..., Array]:
    """Int arithmetic that refuses to wrap. Each of these operations is largest at ends of its operands' ranges; where
    that says too little, the same operation in floating point detects the overflow."""

    def run(*args: Array) -> Array:
        if args[0].dtype == np.int64:
            # ends are integers of Python, which do not wrap; an empty array has none
            ends = [(int(x.min()), int(x.max())) for x in args if x.size]
            if len(ends) == len(args) and any(abs(fn(*corner)) >= _INT_LIMIT / 2 for corner in product(*ends)):
                _within(fn(*(x.astype(np.float64) for x in args)))
        return np.asarray(fn(*args))

    return run


def _pow(x: Array, y: Array) -> Array:
    if x.dtype == np.int64:
        _within(np.power(x.astype(np.float64), y))
        return np.power(x, y)
    return np.asarray(np.float_power(x, y))


def _floordiv(x: Array, y: Array) -> Array:
    # a positive number needs no test for 0 at every position, and a power of two no division
    if y.ndim == 0 and y > 0:
        return x >> int(y).bit_length() - 1 if _power_of_two(y) else np.floor_divide(x, y)
    return np.where(y == 0, 0, np.floor_divide(x, np.where(y == 0, 1, y)))


def _mod(x: Array, y: Array) -> Array:
    if y.ndim == 0 and y > 0:
        return np.asarray(x & y - 1 if _power_of_two(y) else x - np.floor_divide(x, y) * y)
    return np.where(y == 0, 0, np.remainder(x, np.where(y == 0, 1, y)))


def _power_of_two(y: Array) -> bool:  # of y above 0
    return bool(y & y - 1 == 0)


def _shift(shift: Callable[..., Any]) -> Callable[..., Array]:
    def run(x: Array, y: Array) -> Array:
        ok = (y >= 0) & (y < 64)
        # a shift by a negative number or by 64 and more is undefined in C
        return np.where(ok, shift(x, np.where(ok, y, 0)), 0)

    return run


_shifted, _shr = _shift(np.left_shift), _shift(np.right_shift)


def _shl(x: Array, y: Array) -> Array:
    _within(np.where((y >= 0) & (y < 64), x * np.exp2(np.clip(y, 0, 63)), 0))  # in floats, which do not wrap
    return _shifted(x, y)


def _int(x: Array) -> Array:
    if x.dtype == np.bool_:
        return x.astype(np.int64)
    # C leaves the cast of NaN, and of a float past 64 bits, undefined
    return np.asarray(np.trunc(np.clip(np.nan_to_num(x), -(2.0**62), 2.0**62)), np.int64)


_erf = np.vectorize(math.erf, otypes=[np.float64])  # numpy has no erf
_MASK = 0xFFFFFFFF


def _mix(x: Array) -> Array:
    """The finaliser of MurmurHash3 (A. Appleby, public domain) on 32-bit words kept in int64."""
    x = np.bitwise_xor(x, x >> 16)
    x = _times(x, 0x85EBCA6B)
    x = np.bitwise_xor(x, x >> 13)
    x = _times(x, 0xC2B2AE35)
    return np.asarray(np.bitwise_xor(x, x >> 16))


def _times(x: Array, factor: int) -> Array:
    # a 32 x 32 bit product does not fit int64: multiply the halves
    return np.asarray((((x >> 16) * factor << 16) + (x & 0xFFFF) * factor) & _MASK)


def uniform(*counters: Array) -> Array:
    """A 24-bit uniform in [0, 1) from 32-bit counters, the same on every backend:
    x = mix(seed + c). For each counter: x = mix(x ^ (counter * 0x9E3779B1 mod 2^32))."""
    x = _mix((counters[0] + 0x9E3779B9) & _MASK)
    for c in counters[1:]:
        x = _mix(x ^ _times(c & _MASK, 0x9E3779B1))
    return np.asarray(x >> 8).astype(np.float64) * 2.0**-24  # 24 bits are exact in float32, which kernels draw in


def _wrap(x: Array, bits: Array) -> Array:
    over = 64 - np.clip(bits, 0, 64)
    return _shr(_shifted(x, over), over)


OPERATORS: dict[str, Callable[..., Array]] = {"neg": _checked(operator.neg), "abs": _checked(abs), "sign": np.sign}
OPERATORS |= {"add": _checked(operator.add), "sub": _checked(operator.sub), "mul": _checked(operator.mul)}
OPERATORS |= {"div": np.divide, "floordiv": _floordiv, "mod": _mod, "pow": _pow, "min": np.minimum, "max": np.maximum}
OPERATORS |= {"bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor, "bitnot": np.invert}
OPERATORS |= {"shl": _shl, "shr": _shr, "wrap": _wrap}
OPERATORS |= {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
OPERATORS |= {"eq": np.equal, "ne": np.not_equal}
OPERATORS |= {"and": lambda *a: reduce(np.logical_and, a), "or": lambda *a: reduce(np.logical_or, a)}
OPERATORS |= {"xor": np.logical_xor, "not": np.logical_not, "where": np.where}
OPERATORS |= {"int": _int, "float": lambda x: x.astype(np.float64), "floor": lambda x: _int(np.floor(x))}
OPERATORS |= {"exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "log1p": np.log1p}
OPERATORS |= {"tanh": np.tanh, "sigmoid": lambda x: 0.5 * (1 + np.tanh(0.5 * x)), "erf": lambda x: _erf(x)}
OPERATORS |= {"sin": np.sin, "cos": np.cos, "tan": np.tan, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x)}
OPERATORS |= {"isfinite": np.isfinite, "random": uniform}
# as OPERATORS, modulo 2**64
MODULAR: dict[str, Callable[..., Array]] = {"neg": np.negative, "add": np.add, "sub": np.subtract, "mul": np.multiply}
MODULAR |= {"pow": np.power, "shl": _shifted}
