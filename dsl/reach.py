"""The ends of the Ints of an expression, and `wrap` where an Int may leave the dtype that it has in a framework.

Integers of torch, numpy and JAX wrap at their dtype. Elsewhere Ints are exact, and the Expr is that of the text:

>>> from frisket.dsl.sugar import k, q
>>> ids = ir.lookup("ids", (q,))
>>> Widths({"ids": np.array([7, 2**30], np.int32)}).wrapped((ids * 5 > 4) & (k * 2**62 > 5) & (k * 8 > 5))
wrap(ids[q] * 5, 32) > 4 & wrap(k * 4611686018427387904, 64) > 5 & k * 8 > 5
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from . import ir
from .forms import MAX_RANGE
from .ir import COORDINATES, SIZES, Expr, build, lit
from .program import entries_of
from .types import BOOL, INT
from .work import RING

# Positions are assumed to stay below the second in products and shifts with a number, below the first elsewhere.
MAX_POSITION, MAX_SCALED_POSITION = 1 << 14, 1 << 20
AS_POSITIONS = frozenset({"bound", "extent", "floor", "int"})  # operators with values as large as positions

Interval = tuple[int | None, int | None]  # inclusive; None: unbounded on that side
UNKNOWN: Interval = (None, None)


def interval_of(e: Expr, args: list[Interval]) -> Interval:
    """The ends of the values of an Int, from those of its arguments."""
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
        return _square(args[0]) if e.args[0] is e.args[1] else _product(args[0], args[1])  # x * x is never below 0
    if e.op == "abs":
        lo, hi = args[0]
        return (lo if lo is not None and lo > 0 else 0, None if lo is None or hi is None else max(abs(lo), abs(hi)))
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
    # bits of an operand without a sign bound those of the result
    if e.op == "bitand" and any(a[0] is not None and a[0] >= 0 for a in args):
        return (0, min((a[1] for a in args if a[0] is not None and a[0] >= 0 and a[1] is not None), default=None))
    if e.op == "wrap" and e.args[1].op == "lit" and e.args[1].name >= 1:
        half = 1 << min(e.args[1].name, 64) - 1
        return (-half, half - 1)
    if e.op == "segment" or (e.op in ("bitor", "bitxor") and all(a[0] is not None and a[0] >= 0 for a in args)):
        return (0, None)
    return UNKNOWN


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
    # with an end missing, only the signs are known
    nonnegative = all(i[0] is not None and i[0] >= 0 for i in (a, b))
    return (a[0] * b[0], None) if nonnegative else UNKNOWN  # type: ignore[operator]


def _square(a: Interval) -> Interval:
    lo, hi = a
    return (lo * lo if lo is not None and lo > 0 else 0, None if lo is None or hi is None else max(lo * lo, hi * hi))


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


def magnitude(e: Expr, args: list[float], limits: Mapping[str, float]) -> float:
    """The largest magnitude of an Int, from those of its arguments and of names; 2**28 for a name without a limit."""
    if e.op == "lit":
        return abs(float(e.name))
    if e.op in ("var", "param", "lookup"):
        return limits.get(e.name, 2.0**28)
    if e.op in ("add", "sub"):
        return args[0] + args[1]
    if e.op in ("neg", "abs"):  # the least number of a dtype has none
        return args[0] + 1
    if e.op == "mul":
        return args[0] * args[1]
    if e.op == "mod":  # of the sign of the divisor, and smaller
        return args[1]
    if e.op in ("floordiv", "shr") and e.args[1].op == "lit":
        # rounding to minus infinity moves a negative quotient away from 0
        return args[0] / (max(args[1], 1) if e.op == "floordiv" else 2.0 ** min(args[1], 63)) + 1
    if e.op == "pow":
        # the power itself may overflow a float; past 64 bits the size does not matter
        return float(args[0] ** args[1]) if args[0] <= 1 or args[1] * np.log2(args[0]) < 64 else 2.0**64
    if e.op == "shl":
        return float(args[0] * 2.0 ** min(args[1], 63))
    if e.op in ("bitand", "bitor", "bitxor", "bitnot"):
        # the result may have any bit up to the largest operand's
        return float(2.0 ** np.ceil(np.log2(max(args) + 1)) - 1)
    if e.op == "wrap":
        return 2.0 ** ((min(e.args[1].name, 64) if e.args[1].op == "lit" else 64) - 1) - 1
    if e.op in ("int", "floor") and e.args[0].type is not BOOL:
        return 2.0**30  # a Float turned Int: kernels clamp it to 32 bits
    return max(args, default=1.0)


class Widths:
    """The ends and dtypes of the Ints of one traced function. Entries of `values`, its tables by name, bound what is
    read from them, if they are `readable`."""

    def __init__(self, values: dict[str, Any], readable: bool = True) -> None:
        self.values, self.readable = values, readable
        self.ends: dict[tuple[Expr, int], tuple[float, float]] = {}  # by what positions stay below
        self.dtypes: dict[Expr, Any] = {}

    def wrapped(self, root: Expr) -> Expr:
        """The Expr with the integers of torch and numpy: those of a table have its dtype, positions int64."""
        return ir.transform(root, self._rewritten)

    def _rewritten(self, e: Expr) -> Expr:
        dtype, done = self._dtype(e), e
        if e.type is INT and (e.op in RING or e.op in ("bitand", "bitor", "bitxor")):
            high = {a: lit(a.name - 2**64) for a in e.args if a.op == "lit" and 2**63 <= a.name < 2**64}
            e = ir.rebuild(e, tuple(high.get(a, a) for a in e.args))  # torch reads 1 << 63 as -2**63
            done = self.fitted(e, dtype or np.int64) if e.op in RING else e
        self.dtypes[done] = dtype
        return done

    def fitted(self, e: Expr, dtype: Any) -> Expr:
        """An Int reduced to a dtype, unless its ends are within. uint64 has values that no Int has: it stays exact."""
        info = np.iinfo(dtype)
        most = MAX_SCALED_POSITION if e.op in ("mul", "shl") and any(a.op == "lit" for a in e.args) else MAX_POSITION
        low, high = self.ends[e, MAX_SCALED_POSITION] = self._ends(e, most)
        if (info.min <= low and high <= info.max) or info.max >= 2**63:
            return e
        if e.op in RING:  # of sums and products, the outermost alone is reduced
            outer = [a.args[0] if a.op == "wrap" and a.args[1].name >= info.bits else a for a in e.args]
            # the count of a shift and an exponent are no part of the ring: all their bits matter
            outer[1:] = e.args[1:] if e.op in ("shl", "pow") else outer[1:]
            e = ir.rebuild(e, tuple(outer))
        if e.op in RING or info.min < 0:
            e = build("wrap", e, lit(info.bits if info.min < 0 else 64))
        # an unsigned dtype has no sign to extend: the bits above its largest value are cut off
        e = e if info.min < 0 else build("bitand", e, lit(int(info.max)))
        self.ends[e, MAX_POSITION] = self.ends[e, MAX_SCALED_POSITION] = int(info.min), int(info.max)
        return e

    def _dtype(self, e: Expr) -> Any:
        """The dtype of an Int in torch and numpy; None for numbers of Python, which take that of the other operand."""
        if e.op in ("lookup", "param") and e.type is INT and e.name in self.values:
            return np.dtype(str(self.values[e.name].dtype).removeprefix("torch."))
        of_float = e.op == "int" and e.args[0].type is not BOOL
        if of_float or e.op in ("var", "param", "lookup", "segment", "extent", "floor", "reduce"):
            return np.dtype(np.int64)
        dtypes = [self.dtypes[a] for a in e.args if a.type is INT and self.dtypes.get(a)]
        return np.result_type(*dtypes) if dtypes else None

    def _ends(self, e: Expr, most: int) -> tuple[float, float]:
        if (e, most) in self.ends or e.type is not INT:
            return self.ends.get((e, most), (0, 1))
        args: Any = [self._ends(a, most) for a in e.args]
        low, high = interval_of(e, args)
        if e.op in ("lookup", "param") and self.readable and e.name in self.values:
            entries = np.asarray(entries_of(self.values[e.name]))
            low, high = (int(entries.min()), int(entries.max())) if entries.size else (0, 0)
        size = magnitude(e, [float(max(-a, b)) for a, b in args], dict.fromkeys((*COORDINATES, *SIZES), float(most)))
        size = size * MAX_RANGE if e.op == "reduce" else most if e.op in AS_POSITIONS else size
        self.ends[e, most] = (-size if low is None else low, size if high is None else high)
        return self.ends[e, most]
