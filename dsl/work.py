"""The cost of evaluating an expression, in steps: a budget of steps means the same on every machine.

One step is one operator at one position. A reduction costs its body once for every value; nested reductions multiply:

>>> from frisket.dsl.ir import lit, reduce
>>> from frisket.dsl.sugar import eq, k, q
>>> steps(q >= k), steps(reduce("any", lit(0), lit(100), lambda j: eq(q + j, k)))
(3, 602)
"""

from __future__ import annotations

from frisket.grammar.memo import memo

from .ir import Expr, fold, make, rebuild, walk

# operators that take as long as several others: divisions by 0 and overflow are looked for, tables searched
HEAVY: dict[str, int] = {"mod": 4, "floordiv": 4, "pow": 8, "random": 24, "erf": 64, "segment": 8, "lookup": 2}
_ENDS = [f"{how}_{end}" for how in ("run", "segment", "rank") for end in ("first", "last")]
HEAVY |= dict.fromkeys(["range_min", "range_max", *_ENDS], 24)  # the analysis searches a table


RING = frozenset("neg add sub mul shl pow".split())  # remainders of operands by 2**64 decide that of the result


@memo(group="expressions")
def modular(*roots: Expr) -> frozenset[Expr]:
    """The nodes that are allowed to overflow 64 bits: all their uses are sums, products or choices that end in `wrap`.

    >>> from frisket.dsl.ir import build, lit
    >>> from frisket.dsl.sugar import q
    >>> modular(build("wrap", q * 2**62, lit(64)) >> 1)
    frozenset({q * 4611686018427387904})
    """
    order = [*walk(*roots)]
    if all(e.op != "wrap" for e in order):
        return frozenset()
    exact = set(roots)
    for e in reversed(order):  # users before their arguments
        for i, a in enumerate(e.args):
            exponent = i == 1 and e.op in ("shl", "pow", "wrap")  # all bits of it matter, not the low 64 alone
            if exponent or not (e.op == "wrap" or (e not in exact and (e.op in RING or (e.op == "where" and i)))):
                exact.add(a)
    return frozenset(e for e in order if e.op in RING and e not in exact)


def wrapping(root: Expr) -> Expr:
    """An Expr with `wrapping_add` and so on for `modular` nodes, for languages whose plain integers may not wrap."""
    ring = modular(root)

    def step(e: Expr, args: list[Expr]) -> Expr:
        return make(f"wrapping_{e.op}", tuple(args)) if e in ring else rebuild(e, tuple(args))

    return fold(root, step)[root] if ring else root


@memo(group="expressions")
def steps(root: Expr) -> int:
    """The number of steps the expression takes at one position."""
    total = 0
    for e in outside(root):
        if e.op == "reduce":
            lo, hi = e.args[:2]  # where they are no literals, the steps of one value
            total += (max(0, hi.name - lo.name) if lo.op == hi.op == "lit" else 1) * (steps(e.args[2]) + 1)
        else:
            total += HEAVY.get(e.op, 1)
    return total


def outside(*roots: Expr) -> list[Expr]:
    """Every distinct node outside the bodies of reductions, arguments before their users."""
    return [*walk(*roots, below=lambda e: e.args[:2] if e.op == "reduce" else e.args)]
