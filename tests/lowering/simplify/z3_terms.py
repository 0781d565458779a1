"""Int and Bool Exprs as z3 terms, with frisket's meaning: Ints without end, // and % round down, by 0 they give 0, a
shift outside 0..63 gives 0, a lookup is some function of an index brought into the table.

Two ways: `Terms()` on mathematical integers, `Terms(bits=20)` on words, for masks of bits; there every variable
is kept so small that nothing overflows.

    prove(before, after) -> "proved", "unknown", or the values that tell them apart
"""

from __future__ import annotations

import z3

from frisket.dsl.ir import COORDINATES, SIZES, Expr, walk
from frisket.dsl.types import BOOL, INT

BITWISE = frozenset({"bitand", "bitor", "bitxor", "bitnot", "shl", "shr"})
SMALL = 2**5  # bound of variables in words
TIMEOUT = 700  # milliseconds


class Terms:
    """Translates nodes, and gathers what is assumed of the variables met."""

    def __init__(self, bits: int | None = None) -> None:
        self.bits, self.done, self.facts = bits, {}, []

    def __call__(self, root: Expr):
        for e in walk(root):
            if e not in self.done:
                self.done[e] = self.leaf(e) if not e.args else self.node(e, [self.done[a] for a in e.args])
        return self.done[root]

    def number(self, value: int):
        return z3.IntVal(value) if self.bits is None else z3.BitVecVal(value, self.bits)

    def variable(self, name: str, least: int | None = None):
        if self.bits is None:
            x = z3.Int(name)
        else:
            x = z3.BitVec(name, self.bits)
            self.facts += [x <= SMALL, x >= -SMALL]
        if least is not None:
            self.facts.append(x >= least)
        return x

    def leaf(self, e: Expr):
        if e.op == "lit":
            return z3.BoolVal(e.name) if e.type is BOOL else self.number(e.name)
        if e.type is BOOL:
            return z3.Bool(f"{e.op} {e.name}")
        assert e.type is INT, e.op
        least = 0 if e.name in COORDINATES else 1 if e.name in SIZES or e.op == "extent" else None
        return self.variable(f"{e.op} {e.name}", least if e.op in ("var", "extent") else None)

    def node(self, e: Expr, args):
        if e.op in ("lookup", "segment"):
            return self.lookup(e, args)
        x, y = args[0], args[-1]
        zero = self.number(0)
        simple = {
            "and": lambda: z3.And(*args), "or": lambda: z3.Or(*args), "not": lambda: z3.Not(x), "xor": lambda: x != y,
            "eq": lambda: x == y, "ne": lambda: x != y, "lt": lambda: x < y, "le": lambda: x <= y,
            "gt": lambda: x > y, "ge": lambda: x >= y, "where": lambda: z3.If(*args),
            "add": lambda: x + y, "sub": lambda: x - y, "mul": lambda: x * y, "neg": lambda: -x,
            "abs": lambda: z3.If(x < 0, -x, x), "sign": lambda: self.sign(x),
            "min": lambda: z3.If(x <= y, x, y), "max": lambda: z3.If(x >= y, x, y),
            "int": lambda: z3.If(x, self.number(1), zero), "bitnot": lambda: -1 - x,
            "floordiv": lambda: z3.If(y == 0, zero, self.quotient(x, y)),
            "mod": lambda: z3.If(y == 0, zero, x - y * self.quotient(x, y)),
            "bitand": lambda: x & y, "bitor": lambda: x | y, "bitxor": lambda: x ^ y,
            "shl": lambda: z3.If(self.shifts(y), x << y, zero), "shr": lambda: z3.If(self.shifts(y), x >> y, zero),
            "wrap": lambda: (x + 2 ** (e.args[1].name - 1)) % 2 ** e.args[1].name - 2 ** (e.args[1].name - 1),
        }  # fmt: skip
        if e.op == "pow":
            return self.power(x, e.args[1].name)
        return simple[e.op]()

    def sign(self, x):
        return z3.If(x > 0, self.number(1), z3.If(x < 0, self.number(-1), self.number(0)))

    def power(self, x, n: int):
        out = self.number(1)
        for _ in range(n):
            out = out * x
        return out

    def shifts(self, y):
        return z3.And(y >= 0, y < 64)

    def quotient(self, x, y):
        """x / y rounded down, for y != 0. z3 rounds so that the remainder is not negative; words round to 0."""
        if self.bits is None:
            return z3.If(y > 0, x / y, (-x) / (-y))
        inexact = z3.And(z3.SRem(x, y) != 0, (x < 0) != (y < 0))
        return x / y - z3.If(inexact, self.number(1), self.number(0))

    def lookup(self, e: Expr, args):
        clamped = []
        for axis, i in enumerate(args):
            last = self.variable(f"last {e.name} {axis}", 0)
            clamped.append(z3.If(i < 0, self.number(0), z3.If(i > last, last, i)))
        sort = z3.IntSort() if self.bits is None else z3.BitVecSort(self.bits)
        result = z3.BoolSort() if e.type is BOOL else sort
        value = z3.Function(f"{e.op} {e.name}", *[sort] * len(args), result)(*clamped)
        if self.bits is not None and e.type is INT:
            self.facts += [value <= SMALL, value >= -SMALL]
        if e.op == "segment":
            self.facts.append(value >= 0)
        return value


def provable(*roots: Expr) -> bool:
    """Whether the translation covers these: no Float, no reduction."""
    return all(e.type is not None and e.op not in ("reduce", "random") and str(e.type) != "Float" for e in walk(*roots))


def terms_for(*roots: Expr) -> Terms:
    return Terms(bits=20) if any(e.op in BITWISE for e in walk(*roots)) else Terms()


def prove(before: Expr, after: Expr) -> str:
    """That two Exprs are equal everywhere."""
    terms = terms_for(before, after)
    return holds(terms, terms(before) == terms(after))


def holds(terms: Terms, claim) -> str:
    solver = z3.Solver()
    solver.set("timeout", TIMEOUT)
    solver.add(*terms.facts)
    solver.add(z3.Not(claim))
    found = solver.check()
    return "proved" if found == z3.unsat else "unknown" if found == z3.unknown else f"differ at {solver.model()}"
