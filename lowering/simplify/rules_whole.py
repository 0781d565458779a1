"""Rules: comparisons of Float arithmetic on whole numbers become comparisons of Ints.

An Int beside a Float is converted, so that `abs(floor(q / 6) - k // 6) <= 1.0` arrives as Float arithmetic on whole
numbers: exact there as in Ints, where the Ints are positions.
"""

from __future__ import annotations

import math

from frisket.dsl.ir import Expr, build, lit
from frisket.dsl.types import FLOAT

from .pattern import rule
from .rules_select import position

EXACT = frozenset({"add", "sub", "mul", "neg", "abs", "min", "max"})  # of Ints as of whole Floats


def whole(e: Expr) -> Expr | None:
    """The Int that a Float is made of, or None."""
    if e.op == "float":
        return e.args[0] if position(e.args[0]) else None
    if e.op == "lit":
        # past 2**31 a literal is no position, and sums of it may not be exact
        return lit(int(e.name)) if math.isfinite(e.name) and e.name.is_integer() and abs(e.name) < 2**31 else None
    # bounded, as `whole` walks the tree and not the graph
    parts = [p for p in map(whole, e.args) if p is not None] if e.op in EXACT and e.depth < 40 else []
    return build(e.op, *parts) if e.args and len(parts) == len(e.args) else None


def compare(e: Expr) -> Expr | None:
    """A comparison of whole Floats as one of Ints: float(x) - float(y) <= 1.0 is x - y <= 1."""
    x, y = whole(e.args[0]), whole(e.args[1])
    return None if x is None or y is None else build(e.op, x, y)


RULES = [rule("whole-comparison", op, compare, of=FLOAT) for op in ("lt", "le", "gt", "ge", "eq", "ne")]
