"""The ends of the Ints of an expression, and `wrap` where an Int may leave the dtype that it has in a framework.

Integers of torch, numpy and JAX wrap at their dtype. Elsewhere Ints are exact, and the Expr is that of the text:

>>> from frisket.dsl.sugar import k, q
>>> ids = ir.lookup("ids", (q,))
>>> Widths({"ids": np.array([7, 2**30], np.int32)}).wrapped((ids * 5 > 4) & (k * 2**62 > 5) & (k * 8 > 5))
wrap(ids[q] * 5, 32) > 4 & wrap(k * 4611686018427387904, 64) > 5 & k * 8 > 5
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import ir
from .forms import MAX_RANGE
from .ir import COORDINATES, SIZES, Expr, build, lit, literal_value
from .program import entries_of
from .transfer import interval_of, magnitude
from .types import BOOL, INT
from .work import RING

# Positions are assumed to stay below the second in products and shifts with a number, below the first elsewhere.
MAX_POSITION, MAX_SCALED_POSITION = 1 << 14, 1 << 20
AS_POSITIONS = frozenset({"bound", "extent", "floor", "int"})  # operators with values as large as positions


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
            high = {a: lit(a.name - 2**64) for a in e.args if 2**63 <= literal_value(a, 0) < 2**64}
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
