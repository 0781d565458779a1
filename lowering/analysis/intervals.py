"""Abstract interpretation over a rectangle of (query, key): the ends of every Int and Float, as Exprs.

A rectangle is `q0 <= q <= q1`, `k0 <= k <= k1` in global coordinates, ends inclusive; b and h are fixed. The
ends of `e` are Exprs in `q0 q1 k0 k1 b h`, sizes, parameters and table minima and maxima. So one text
serves the host driver, a kernel's prologue and a planner on a device.

>>> from frisket.dsl.sugar import q, k
>>> r = ends(q - k)
>>> (r.lo, r.hi)
(q0 - k1, q1 - k0)

Soundness is one-sided: an end may be too wide (None: unbounded), never too narrow.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

from frisket.dsl.ir import FALSE, TRUE, ZERO, Expr, build, disj, lit, make, to_float, var
from frisket.dsl.sugar import eq, maximum, minimum, ne, where
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.grammar.memo import memo
from frisket.lowering.simplify.affine import Linear, linear, write

from .solve import depends, is_positive

Q0, Q1, K0, K1 = (var(n) for n in ("q0", "q1", "k0", "k1"))


@dataclass(frozen=True)
class Range:
    """The range `lo <= value <= hi` of an Int or Float. `attained`: both ends are values at some point of the
    rectangle. `dense`: every integer between two attained values is a value too (neighbouring points differ by at most
    1). `nan`: a Float that may be NaN somewhere, which then lies outside the ends."""

    lo: Expr | None
    hi: Expr | None
    attained: bool = False
    dense: bool = False
    nan: Expr = FALSE

    @property
    def point(self) -> bool:
        return self.lo is self.hi and self.lo is not None


TOP = Range(None, None, nan=TRUE)
BEYOND_INTS = 2**62  # beyond every Int that fits


def point(e: Expr) -> Range:
    return Range(e, e, attained=True, dense=True, nan=ne(e, e) if e.type is FLOAT else FALSE)


@memo(group="expressions")
def ends(e: Expr) -> Range:
    """The range of an Int or Float over the rectangle."""
    if not depends(e):
        return point(e)
    if e.op == "var":
        return Range(Q0, Q1, True, True) if e.name == "q" else Range(K0, K1, True, True)
    if e.type is INT:
        form = linear(e)
        if form.terms != ((e, 1),):  # otherwise `e` is an atom: its operator decides
            return _affine(form)
    return TRANSFER[e.op](e) if e.op in TRANSFER else TOP


def independent(*parts: Expr) -> bool:
    """Whether no two values vary with the same variable, so that they combine freely."""
    variables = [depends(p) for p in parts]
    return sum(map(len, variables)) == len(frozenset().union(*variables))


def _affine(form: Linear) -> Range:
    atoms = [ends(a) for a, _ in form.terms]
    free = independent(*(a for a, _ in form.terms))
    return Range(
        _total(form, [r.lo if f > 0 else r.hi for (_, f), r in zip(form.terms, atoms, strict=True)]),
        _total(form, [r.hi if f > 0 else r.lo for (_, f), r in zip(form.terms, atoms, strict=True)]),
        attained=free and all(r.attained for r in atoms),
        dense=free and all(r.dense and (abs(f) == 1 or r.point) for (_, f), r in zip(form.terms, atoms, strict=True)),
    )


def _total(form: Linear, picked: list[Expr | None]) -> Expr | None:
    total = Linear((), form.const)
    for (_, f), end in zip(form.terms, picked, strict=True):
        if end is None:
            return None
        total = total + linear(end).times(f)
    return write(total)


# -- transfer functions ---------------------------------------------------------------------------


def _extreme(pick: Callable[[Expr, Expr], Expr], *xs: Expr | None) -> Expr | None:
    """The least or greatest of some ends, unbounded where one of them is."""
    known = [x for x in dict.fromkeys(xs) if x is not None]
    return None if None in xs else reduce(pick, known)


def _lifted(of: Callable[..., Expr], *xs: Expr | None) -> Expr | None:
    """A function of ends, unbounded where one of them is."""
    return None if None in xs else of(*xs)


def _neg(e: Expr) -> Range:
    r = ends(e.args[0])
    return Range(_lifted(operator.neg, r.hi), _lifted(operator.neg, r.lo), r.attained, r.dense, r.nan)


def _float_result(e: Expr, lo: Expr | None, hi: Expr | None, attained: bool = False) -> Range:
    """The range of Float arithmetic, with NaN only from NaN or where infinities meet: then an end is not finite."""
    if e.type is INT:
        return Range(lo, hi, attained)
    # an unknown end may be infinite, and inf - inf is NaN
    if lo is None or hi is None:
        return TOP
    wild = [build("not", build("isfinite", x)) for x in (lo, hi)]
    return Range(lo, hi, nan=disj(*(ends(a).nan for a in e.args), *wild))


def _sum(e: Expr) -> Range:  # Float only: Int goes through affine forms
    x, y = (ends(a) for a in e.args)
    join, lo, hi = (operator.add, y.lo, y.hi) if e.op == "add" else (operator.sub, y.hi, y.lo)
    return _float_result(e, _lifted(join, x.lo, lo), _lifted(join, x.hi, hi))


def _mul(e: Expr) -> Range:
    x, y = (ends(a) for a in e.args)
    if x.lo is None or x.hi is None or y.lo is None or y.hi is None:
        return TOP
    corners = (x.lo * y.lo, x.lo * y.hi, x.hi * y.lo, x.hi * y.hi)
    lo, hi = (_extreme(pick, *corners) for pick in (minimum, maximum))
    return _float_result(e, lo, hi, independent(*e.args) and x.attained and y.attained)


def _div(e: Expr) -> Range:
    x, d = ends(e.args[0]), e.args[1]
    if d.op != "lit" or not d.name or x.lo is None or x.hi is None:  # a division by 0 gives infinity or NaN
        return TOP
    lo, hi = (x.lo, x.hi) if d.name > 0 else (x.hi, x.lo)
    return _float_result(e, lo / d, hi / d)


def _floordiv(e: Expr) -> Range:
    x, y = (ends(a) for a in e.args)
    d = e.args[1]
    if is_positive(d):
        # every integer between is a quotient too
        return Range(_lifted(operator.floordiv, x.lo, d), _lifted(operator.floordiv, x.hi, d), x.attained, x.dense)
    if x.lo is None or x.hi is None:
        return TOP
    # |x // y| <= |x| whatever y is (x // 0 is 0); a divisor of one sign gives the corners
    wide = maximum(-x.lo, x.hi) if x.lo is not x.hi else abs(x.lo)
    if y.lo is None or y.hi is None:
        return Range(minimum(-wide, -1), maximum(wide, 0))
    safe = (y.lo > 0) | (y.hi < 0)
    corners = (x.lo // y.lo, x.lo // y.hi, x.hi // y.lo, x.hi // y.hi)
    lo, hi = (reduce(pick, dict.fromkeys(corners)) for pick in (minimum, maximum))
    return Range(where(safe, lo, minimum(-wide, -1)), where(safe, hi, maximum(wide, 0)))


def _mod(e: Expr) -> Range:
    """The range of x % d: 0 <= x % d < d for d > 0, and the remainders of the ends when both have the same quotient."""
    x, y = (ends(a) for a in e.args)
    if y.lo is None or y.hi is None:
        return TOP
    lo, hi = minimum(y.lo + 1, 0), maximum(y.hi - 1, 0)
    if not y.point or x.lo is None or x.hi is None:
        return Range(lo, hi)
    d = y.lo
    same = eq(x.lo // d, x.hi // d) & (d > 0)
    # values without a gap that pass a multiple of d leave d - 1 and 0 behind
    passed = x.attained and x.dense and is_positive(d)
    return Range(where(same, x.lo % d, lo), where(same, x.hi % d, hi), attained=passed)


def _abs(e: Expr) -> Range:
    r = ends(e.args[0])
    zero = ZERO if e.type is INT else lit(0.0)
    if r.lo is None or r.hi is None:
        return Range(zero, None, nan=r.nan)
    lo = maximum(maximum(r.lo, -r.hi), zero)
    # the least is attained only if 0 is, when the values pass through it
    return Range(lo, maximum(-r.lo, r.hi), r.attained and r.dense, r.dense, r.nan)


def _sign(e: Expr) -> Range:
    r = ends(e.args[0])
    if e.type is FLOAT:
        return TOP
    lo = lit(-1) if r.lo is None else build("sign", r.lo)
    return Range(lo, lit(1) if r.hi is None else build("sign", r.hi), r.attained, r.dense)


def _minmax(e: Expr) -> Range:
    x, y = (ends(a) for a in e.args)
    free = e.type is INT and independent(*e.args) and x.attained and y.attained
    if e.op == "min":
        lo, hi = _extreme(minimum, x.lo, y.lo), _either(x.hi, y.hi, minimum)
    else:
        lo, hi = _either(x.lo, y.lo, maximum), _extreme(maximum, x.hi, y.hi)
    return Range(lo, hi, free, x.dense and y.dense, disj(x.nan, y.nan))


def _either(x: Expr | None, y: Expr | None, pick: Callable[[Expr, Expr], Expr]) -> Expr | None:
    # min(x, y) <= x even where y is unbounded; of Floats, y may be NaN there, which lies outside the ends
    return pick(x, y) if x is not None and y is not None else x if y is None else y


ASK: dict[str, Callable[[Expr], Expr]] = {}  # `always` and `never`: questions.py, which reads ranges, adds them


def _where(e: Expr) -> Range:
    cond, yes, no = e.args
    x, y = ends(yes), ends(no)
    # a condition that is certain over the rectangle leaves one branch
    sure, not_ = ASK["always"](cond), ASK["never"](cond)

    def side(a: Expr | None, b: Expr | None, hull: Callable[[Expr, Expr], Expr]) -> Expr | None:
        return None if a is None or b is None else where(sure, a, where(not_, b, hull(a, b)))

    return Range(side(x.lo, y.lo, minimum), side(x.hi, y.hi, maximum), nan=disj(x.nan, y.nan))


def _int(e: Expr) -> Range:
    inner = e.args[0]
    if inner.type is BOOL:
        return Range(where(ASK["always"](inner), 1, 0), where(ASK["never"](inner), 0, 1), attained=False, dense=True)
    return _rounded(e)


def _rounded(e: Expr) -> Range:
    """The range of `floor` and `int` of a Float; NaN becomes 0, so a range that may hold NaN is everything."""
    r = ends(e.args[0])

    def end(x: Expr | None, far: int) -> Expr | None:
        return None if x is None else where(r.nan, far, build(e.op, x)) if r.nan is not FALSE else build(e.op, x)

    return Range(end(r.lo, -BEYOND_INTS), end(r.hi, BEYOND_INTS))


def _monotone(e: Expr) -> Range:
    """The range of functions that never decrease; below its domain one gives NaN, and then so does its lower end."""
    r = ends(e.args[0])
    if r.lo is None or r.hi is None:
        return TOP
    lo, hi = build(e.op, r.lo), build(e.op, r.hi)
    return Range(lo, hi, nan=disj(r.nan, ne(lo, lo), ne(hi, hi)))


def _float(e: Expr) -> Range:
    r = ends(e.args[0])
    return Range(_lifted(to_float, r.lo), _lifted(to_float, r.hi), r.attained)


def _lookup(e: Expr) -> Range:
    lows, highs = table_box(e)
    lo = make("range_min", (*lows, *highs), e.name, e.type)
    # one varying index that passes every position meets the minimum and the maximum
    varying = [a for a in e.args if depends(a)]
    r = ends(varying[0])
    exact = len(varying) == 1 and r.attained and r.dense and e.type is INT
    hi = make("range_max", (*lows, *highs), e.name, e.type)
    return Range(lo, hi, exact, nan=disj(ne(lo, lo), ne(hi, hi)) if e.type is FLOAT else FALSE)


def table_box(e: Expr) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
    """The first and last index per axis of a lookup; an unknown end is the table's (queries clamp)."""
    ranges = [ends(a) for a in e.args]
    far = lit(BEYOND_INTS)
    return (
        tuple(r.lo if r.lo is not None else ZERO for r in ranges),
        tuple(r.hi if r.hi is not None else far for r in ranges),
    )


def _segment(e: Expr) -> Range:
    r = ends(e.args[0])
    if r.lo is None or r.hi is None:
        return Range(ZERO, None)
    lo, hi = (make("segment", (x,), e.name, INT) for x in (r.lo, r.hi))
    return Range(lo, hi, attained=r.attained)


def _bitand(e: Expr) -> Range:
    tops = [r for r in (ends(a) for a in e.args) if r.lo is not None and r.lo.op == "lit" and r.lo.name >= 0]
    highs = [r.hi for r in tops if r.hi is not None]
    return Range(ZERO, highs[0] if highs else None) if tops else TOP


def _shift(e: Expr) -> Range:
    by = e.args[1]
    if by.op != "lit" or not 0 <= by.name < 62:
        return TOP
    factor = lit(1 << by.name)
    return ends(build("mul", e.args[0], factor) if e.op == "shl" else build("floordiv", e.args[0], factor))


TRANSFER: Mapping[str, Callable[[Expr], Range]] = (
    {"neg": _neg, "add": _sum, "sub": _sum, "mul": _mul, "div": _div, "floordiv": _floordiv, "mod": _mod}
    | {"abs": _abs, "sign": _sign, "min": _minmax, "max": _minmax, "where": _where, "int": _int, "float": _float}
    | {"floor": _rounded, **dict.fromkeys("exp exp2 log log2 log1p sqrt tanh sigmoid".split(), _monotone)}
    | {"lookup": _lookup, "segment": _segment, "bitand": _bitand, "shl": _shift, "shr": _shift}
)
