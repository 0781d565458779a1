"""Intervals of Ints without shapes or bindings, from the signs of coordinates and sizes.

>>> from frisket.dsl.sugar import q
>>> interval(q % 8)
(0, 7)
"""

from __future__ import annotations

from frisket.dsl.ir import COORDINATES, SIZES, Expr
from frisket.dsl.types import BOOL, INT

from .affine import linear, write

Interval = tuple[int | None, int | None]  # inclusive; None: unbounded on that side
UNKNOWN: Interval = (None, None)


def interval(e: Expr) -> Interval:
    """Inclusive ends of the values `e` can take at any position of any problem."""
    stack = [] if e.interval else [e]  # an Expr may be deeper than Python's stack
    while stack:
        node = stack[-1]
        missing = [a for a in node.args if a.interval is None]
        stack.extend(missing)
        if not missing:
            stack.pop()
            node.interval = _interval(node, [a.interval for a in node.args])
    known: Interval = e.interval
    return known


def _interval(e: Expr, args: list[Interval]) -> Interval:
    if e.type is not INT:
        return UNKNOWN
    if e.op == "lit":
        return (int(e.name), int(e.name))
    if e.op == "var":
        return (0, None) if e.name in COORDINATES else (1, None) if e.name in SIZES else UNKNOWN
    if e.op == "extent":
        return (1, None)
    if e.op == "add":
        return _sum(args[0], args[1])
    if e.op == "sub":
        return _sum(args[0], _minus(args[1]))
    if e.op == "neg":
        return _minus(args[0])
    if e.op == "mul":
        return _square(args[0]) if e.args[0] is e.args[1] else _product(args[0], args[1])
    if e.op == "abs":
        lo, hi = args[0]
        ends = None if lo is None or hi is None else max(abs(lo), abs(hi))
        return (lo if lo is not None and lo > 0 else 0, ends)
    if e.op in ("min", "max"):
        return _extreme(e.op, args[0], args[1])
    if e.op == "where":
        return _hull(args[1], args[2])
    if e.op == "int" and e.args[0].type is BOOL:
        return (0, 1)
    if e.op in ("floordiv", "mod") and e.args[1].op == "lit" and e.args[1].name > 0:
        return _divided(e.op, args[0], e.args[1].name)
    if e.op == "sign":
        lo, hi = args[0]
        return (1 if lo and lo > 0 else 0 if lo == 0 else -1, -1 if hi is not None and hi < 0 else 1)
    if e.op == "bitand" and any(a[0] is not None and a[0] >= 0 for a in args):
        return (0, min((a[1] for a in args if a[0] is not None and a[0] >= 0 and a[1] is not None), default=None))
    if e.op == "segment" or (e.op in ("bitor", "bitxor") and all(a[0] is not None and a[0] >= 0 for a in args)):
        return (0, None)
    return UNKNOWN


def natural(e: Expr) -> bool:
    """Whether e >= 0 at every position."""
    lo = interval(e)[0]
    return lo is not None and lo >= 0


def ordered(a: Expr, b: Expr) -> bool:
    """Whether a >= b at every position."""
    lo, hi = interval(a)[0], interval(b)[1]
    if lo is not None and hi is not None and lo >= hi:
        return True
    least = interval(write(linear(a) - linear(b)))[0]  # of q + 1 and q, or q and q - k
    return least is not None and least >= 0


def _sum(a: Interval, b: Interval) -> Interval:
    return (
        None if a[0] is None or b[0] is None else a[0] + b[0],
        None if a[1] is None or b[1] is None else a[1] + b[1],
    )


def _minus(a: Interval) -> Interval:
    return (None if a[1] is None else -a[1], None if a[0] is None else -a[0])


def _product(a: Interval, b: Interval) -> Interval:
    if None not in (*a, *b):
        corners = [s * t for s in a for t in b]  # type: ignore[operator]
        return (min(corners), max(corners))
    nonnegative = all(i[0] is not None and i[0] >= 0 for i in (a, b))
    return (a[0] * b[0], None) if nonnegative else UNKNOWN  # type: ignore[operator]


def _square(a: Interval) -> Interval:
    lo, hi = a
    ends = None if lo is None or hi is None else max(lo * lo, hi * hi)
    return (lo * lo if lo is not None and lo > 0 else 0, ends)


def _extreme(op: str, a: Interval, b: Interval) -> Interval:
    if op == "max":
        lows = [i[0] for i in (a, b) if i[0] is not None]
        return (max(lows, default=None), None if None in (a[1], b[1]) else max(a[1], b[1]))  # type: ignore[type-var]
    return _minus(_extreme("max", _minus(a), _minus(b)))


def _hull(a: Interval, b: Interval) -> Interval:
    lo = None if a[0] is None or b[0] is None else min(a[0], b[0])
    return (lo, None if a[1] is None or b[1] is None else max(a[1], b[1]))


def _divided(op: str, a: Interval, d: int) -> Interval:
    lo, hi = a
    if op == "floordiv":
        return (None if lo is None else lo // d, None if hi is None else hi // d)
    if lo is not None and hi is not None and lo // d == hi // d:
        return (lo % d, hi % d)
    return (0, d - 1)
