"""Facts about the values of expressions: one table for each fact, with a row for each operator that keeps the fact.

A row computes the fact of a node from the node and the facts of its arguments; `ir.fold` and `ir.fill` bring the facts
up from the leaves. What a missing row means is said at each table.

>>> from frisket.dsl.sugar import k, q
>>> interval(q % 8 + 1), drift(q - k)[q - k], drift(q + k)[q + k]
((1, 8), 0, 2)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import add
from typing import Any, TypeAlias

import numpy as np

from frisket.grammar.memo import memo

from .ir import COMPARISONS, COORDINATES, SCORE, SIZES, TOTAL, Expr, build, fill, fold, lit, literal_value, uses
from .types import BOOL, FLOAT, INT

Row: TypeAlias = Callable[..., Any]  # (node, *facts of its arguments) to the fact of the node
Interval = tuple[int | None, int | None]  # inclusive; None: unbounded on that side
UNKNOWN: Interval = (None, None)


# -- the ends of an Int -----------------------------------------------------------------------------


def interval(e: Expr) -> Interval:
    """Inclusive ends of the values `e` can take at any position of any problem."""
    known: Interval = fill(e, "interval", interval_of)
    return known


def interval_of(e: Expr, args: list[Interval]) -> Interval:
    """The ends of the values of an Int, from those of its arguments."""
    row = INTERVAL.get(e.op) if e.type is INT else None
    return UNKNOWN if row is None else row(e, *args)


def _known(join: Callable[[int, int], int], a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else join(a, b)


def _sum(a: Interval, b: Interval) -> Interval:
    return _known(add, a[0], b[0]), _known(add, a[1], b[1])


def _minus(a: Interval) -> Interval:
    return (None if a[1] is None else -a[1], None if a[0] is None else -a[0])


def _product(e: Expr, a: Interval, b: Interval) -> Interval:
    if e.args[0] is e.args[1]:  # x * x is never below 0
        lo, hi = _absolute(a)
        return (lo * lo, None if hi is None else hi * hi)
    if None not in (*a, *b):
        corners = [s * t for s in a for t in b]  # type: ignore[operator]
        return (min(corners), max(corners))
    # with an end missing, only the signs are known
    return (a[0] * b[0], None) if _natural(a) and _natural(b) else UNKNOWN  # type: ignore[operator]


def _absolute(a: Interval) -> tuple[int, int | None]:
    lo, hi = a
    return (lo if lo is not None and lo > 0 else 0, None if lo is None or hi is None else max(abs(lo), abs(hi)))


def _larger(a: Interval, b: Interval) -> Interval:
    lows = [i[0] for i in (a, b) if i[0] is not None]
    return max(lows, default=None), _known(max, a[1], b[1])


def _quotient(e: Expr, a: Interval, b: Interval) -> Interval:
    lo, hi, d = *a, literal_value(e.args[1], 0)
    return UNKNOWN if d <= 0 else (None if lo is None else lo // d, None if hi is None else hi // d)


def _remainder(e: Expr, a: Interval, b: Interval) -> Interval:
    lo, hi, d = *a, literal_value(e.args[1], 0)
    if d <= 0:
        return UNKNOWN
    return (lo % d, hi % d) if lo is not None and hi is not None and lo // d == hi // d else (0, d - 1)


def _sign(a: Interval) -> Interval:
    lo, hi = a
    return (1 if lo and lo > 0 else 0 if lo == 0 else -1, -1 if hi is not None and hi < 0 else 1)


def _common_bits(e: Expr, *args: Interval) -> Interval:
    # bits of an operand without a sign bound those of the result
    bounds = [a[1] for a in args if _natural(a)]
    return (0, min((b for b in bounds if b is not None), default=None)) if bounds else UNKNOWN


def _all_bits(e: Expr, *args: Interval) -> Interval:
    return (0, None) if all(map(_natural, args)) else UNKNOWN


def _wrapped(e: Expr, a: Interval, b: Interval) -> Interval:
    half = 1 << min(bits, 64) - 1 if (bits := literal_value(e.args[1], 0)) >= 1 else None
    return UNKNOWN if half is None else (-half, half - 1)


def _natural(a: Interval) -> bool:
    """Whether no value of an interval is below 0."""
    return a[0] is not None and a[0] >= 0


# Of an Int; an operator without a row has no ends that are known.
INTERVAL: dict[str, Row] = {
    "lit": lambda e: (int(e.name), int(e.name)),
    "var": lambda e: (0, None) if e.name in COORDINATES else (1, None) if e.name in SIZES else UNKNOWN,
    "extent": lambda e: (1, None),
    "segment": lambda e, a: (0, None),
    "add": lambda e, a, b: _sum(a, b),
    "sub": lambda e, a, b: _sum(a, _minus(b)),
    "neg": lambda e, a: _minus(a),
    "mul": _product,
    "abs": lambda e, a: _absolute(a),
    "max": lambda e, a, b: _larger(a, b),
    "min": lambda e, a, b: _minus(_larger(_minus(a), _minus(b))),
    "where": lambda e, p, a, b: (_known(min, a[0], b[0]), _known(max, a[1], b[1])),
    "int": lambda e, a: (0, 1) if e.args[0].type is BOOL else UNKNOWN,
    "floordiv": _quotient,
    "mod": _remainder,
    "sign": lambda e, a: _sign(a),
    "bitand": _common_bits,
    "bitor": _all_bits,
    "bitxor": _all_bits,
    "wrap": _wrapped,
}


# -- the size of an Int -----------------------------------------------------------------------------


def magnitude(e: Expr, args: list[float], limits: Mapping[str, float]) -> float:
    """The largest magnitude of an Int, from those of its arguments and of names; 2**28 for a name without a limit."""
    if e.op in ("var", "param", "lookup"):
        return limits.get(e.name, 2.0**28)
    row = MAGNITUDE.get(e.op)
    return max(args, default=1.0) if row is None else row(e, *args)


def _of_quotient(divisor: Callable[[float], float]) -> Row:
    # rounding to minus infinity moves a negative quotient away from 0
    return lambda e, x, y: x / divisor(y) + 1 if e.args[1].op == "lit" else max(x, y)


def _of_power(e: Expr, x: float, y: float) -> float:
    # the power itself may overflow a float; past 64 bits the size does not matter
    return float(x**y) if x <= 1 or y * np.log2(x) < 64 else 2.0**64


def _of_bits(e: Expr, *args: float) -> float:
    # the result may have any bit up to the largest operand's
    return float(2.0 ** np.ceil(np.log2(max(args) + 1)) - 1)


def _of_cast(e: Expr, x: float) -> float:
    return x if e.args[0].type is BOOL else 2.0**30  # a Float turned Int: kernels clamp it to 32 bits


# Of an Int; an operator without a row has the size of its largest argument.
MAGNITUDE: dict[str, Row] = {
    "lit": lambda e: abs(float(e.name)),
    "add": lambda e, x, y: x + y,
    "sub": lambda e, x, y: x + y,
    "neg": lambda e, x: x + 1,  # the least number of a dtype has no negative
    "abs": lambda e, x: x + 1,
    "mul": lambda e, x, y: x * y,
    "mod": lambda e, x, y: y,  # of the sign of the divisor, and smaller
    "floordiv": _of_quotient(lambda y: max(y, 1)),
    "shr": _of_quotient(lambda y: 2.0 ** min(y, 63)),
    "pow": _of_power,
    "shl": lambda e, x, y: float(x * 2.0 ** min(y, 63)),
    **dict.fromkeys(("bitand", "bitor", "bitxor", "bitnot"), _of_bits),
    "wrap": lambda e, x, bits: 2.0 ** (min(literal_value(e.args[1], 64), 64) - 1) - 1,
    "int": _of_cast,
    "floor": _of_cast,
}


# -- what q and k do together -------------------------------------------------------------------------


def drift(root: Expr) -> dict[Expr, int | None]:
    """The step of each node when q and k both move by one: 0 for one that only sees their distance, None if unknown."""
    return fold(root, _drift)


def _drift(e: Expr, args: list[int | None]) -> int | None:
    if None in args:
        return None
    if not any(args):  # what sees nothing that moves stays, whatever its operator
        return int(e.op == "var" and e.name in ("q", "k"))
    row = DRIFT.get(e.op)
    return None if row is None else row(e, *args)


def _product_drift(e: Expr, x: int, y: int) -> int | None:
    # the product of two moving Ints changes by no fixed step
    by = [(a.name, step) for a, step in zip(e.args, (y, x), strict=True) if e.type is INT and a.op == "lit"]
    return int(by[0][0]) * by[0][1] if by else None


def _alike(step: Callable[[int], int]) -> Row:
    """The row of an operator of two Ints whose result depends on how they stand to each other."""
    return lambda e, x, y: step(x) if x == y and e.args[0].type is INT else None


# Of a node with arguments that move; an operator without a row moves by no fixed step.
DRIFT: dict[str, Row] = {
    "add": lambda e, x, y: x + y,
    "sub": lambda e, x, y: x - y,
    "neg": lambda e, x: -x,
    "mul": _product_drift,
    **dict.fromkeys(COMPARISONS, _alike(lambda step: 0)),
    **dict.fromkeys(("min", "max"), _alike(lambda step: step)),
}


@memo(group="expressions")
def distance_only(root: Expr) -> bool:
    """Whether `root` depends on q and k through q - k alone (and b, h, score do not occur)."""
    return not uses(root) & {"b", "h", "score"} and drift(root)[root] == 0


# -- Floats without NaN and infinity ------------------------------------------------------------------

DEEPEST = 200  # the facts of deeper Floats are not looked for


def finite(e: Expr, tables: Mapping[str, bool]) -> bool:
    """Whether an Expr is provably neither NaN nor infinite, where scores and totals are; `tables` says which tables
    are finite."""

    def step(n: Expr, args: list[bool]) -> bool:
        if n.type is INT or n in (SCORE, TOTAL):
            return True
        return tables.get(n.name, False) if n.op == "lookup" else n.op in FINITE and FINITE[n.op](n, *args)

    return e.type is INT or (e.depth <= DEEPEST and fold(e, step)[e])


def positive(e: Expr) -> bool:
    """Whether a Float is provably > 0 and finite."""
    return e.depth <= DEEPEST and fold(e, lambda n, args: n.op in POSITIVE and bool(POSITIVE[n.op](n, *args)))[e]


def nonnegative(e: Expr) -> bool:
    """Whether a Float is provably >= 0 wherever it is no NaN."""
    return e.depth <= DEEPEST and fold(e, lambda n, args: n.op in NONNEGATIVE and bool(NONNEGATIVE[n.op](n, *args)))[e]


def within_one(e: Expr) -> bool:
    """Whether a Float is provably at most 1 in magnitude wherever it is no NaN."""
    return e.depth <= DEEPEST and fold(e, lambda n, args: n.op in WITHIN_ONE and bool(WITHIN_ONE[n.op](n, *args)))[e]


def _all(e: Expr, *args: bool) -> bool:
    return all(args)


# Of a Float; an operator without a row may give NaN or an infinity. A product of finite float32 values is taken as
# finite, like `score` itself.
FINITE: dict[str, Row] = {
    "lit": lambda e: bool(abs(e.name) < math.inf),
    "random": lambda e, *args: True,
    "where": lambda e, p, x, y: x and y,
    # a quotient by 0 is infinite or NaN
    "div": lambda e, x, y: x and e.args[1].op == "lit" and e.args[1].name not in (0.0, math.inf),
    **dict.fromkeys("add sub mul neg abs min max sign tanh sigmoid sin cos erf float".split(), _all),
}

# Of a Float; an operator without a row may give 0, a negative number, NaN or an infinity.
POSITIVE: dict[str, Row] = {
    "lit": lambda e: 0 < e.name < math.inf,
    "float": lambda e, x: (interval(e.args[0])[0] or 0) > 0,
    **dict.fromkeys(("add", "mul", "div"), _all),
}

# Of a Float; an operator without a row may give a negative number.
NONNEGATIVE: dict[str, Row] = {
    "lit": lambda e: e.name >= 0,
    "float": lambda e, x: (interval(e.args[0])[0] or 0) >= 0 and interval(e.args[0])[0] is not None,
    "max": lambda e, x, y: x or y,
    "mul": lambda e, x, y: (x and y) or e.args[0] is e.args[1],
    "pow": lambda e, x, y: x or (e.args[1].op == "lit" and e.args[1].name % 2 == 0),
    "where": lambda e, p, x, y: x and y,
    **dict.fromkeys(("exp", "exp2", "sigmoid", "abs", "sqrt", "random"), lambda e, *args: True),
    **dict.fromkeys(("add", "min", "div"), _all),
}

# Of a Float; an operator without a row may give a number beyond -1 and 1.
WITHIN_ONE: dict[str, Row] = {
    "lit": lambda e: abs(e.name) <= 1,
    "where": lambda e, p, x, y: x and y,
    **dict.fromkeys(("sigmoid", "tanh", "sin", "cos", "erf", "sign", "random"), lambda e, *args: True),
    **dict.fromkeys(("mul", "neg", "abs", "min", "max"), _all),
}


# -- Floats that are whole numbers --------------------------------------------------------------------

EXACT = frozenset({"add", "sub", "mul", "neg", "abs", "min", "max"})  # of Ints as of whole Floats


def integral(e: Expr, fits: Callable[[Expr], bool] = lambda e: True) -> Expr | None:
    """The Int that a Float is made of: `q + 1` of `float(q) + 1.0`. None where it is made of something else, or where
    an Int in it does not fit."""
    if e.op == "float":
        return e.args[0] if fits(e.args[0]) else None
    if e.op == "lit":
        whole = lit(int(e.name)) if e.type is FLOAT and math.isfinite(e.name) and e.name == int(e.name) else None
        return whole if whole is not None and fits(whole) else None
    parts = [integral(a, fits) for a in e.args] if e.op in EXACT and e.type is FLOAT else [None]
    known = [p for p in parts if p is not None]
    return build(e.op, *known) if len(known) == len(parts) else None
