"""Int and Bool Exprs as z3 terms, with frisket's meaning: Ints without end, // and % round down, by 0 they give 0, a
shift outside 0..63 gives 0, a lookup is some function of an index brought into the table.

Two ways: `Terms()` on mathematical integers, `Terms(bits=20)` on words, for masks of bits; there every variable
is kept so small that nothing overflows. `TableTerms()` has what the analysis of layouts adds: minima and maxima of
tables, ends of runs, facts of tables.

    prove(before, after) -> "proved", "unknown", or the values that tell them apart
"""

from __future__ import annotations

from itertools import permutations, product
from operator import eq

import z3

from frisket.dsl.ir import COORDINATES, SIZES, Expr, substitute, var, walk
from frisket.dsl.types import BOOL, FLOAT, INT

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
            "floordiv": lambda: self.floordiv(x, y),
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

    def floordiv(self, x, y):
        return z3.If(y == 0, self.number(0), self.quotient(x, y))

    def quotient(self, x, y):
        """x / y rounded down, for y != 0. z3 rounds so that the remainder is not negative; words round to 0."""
        if self.bits is None:
            return z3.If(y > 0, x / y, (-x) / (-y))
        inexact = z3.And(z3.SRem(x, y) != 0, (x < 0) != (y < 0))
        return x / y - z3.If(inexact, self.number(1), self.number(0))

    def clamped(self, name: str, args):
        """Indices of a table, brought into it."""
        out = []
        for axis, i in enumerate(args):
            last = self.variable(f"last {name} {axis}", 0)
            out.append(z3.If(i < 0, self.number(0), z3.If(i > last, last, i)))
        return out

    def lookup(self, e: Expr, args):
        sort = z3.IntSort() if self.bits is None else z3.BitVecSort(self.bits)
        result = z3.BoolSort() if e.type is BOOL else sort
        value = z3.Function(f"{e.op} {e.name}", *[sort] * len(args), result)(*self.clamped(e.name, args))
        if self.bits is not None and e.type is INT:
            self.facts += [value <= SMALL, value >= -SMALL]
        if e.op == "segment":
            self.facts.append(value >= 0)
        return value


FLOATS = z3.DeclareSort("Float")
ENDS = frozenset({"run_first", "run_last", "segment_first", "segment_last", "rank_first", "rank_last"})


class TableTerms(Terms):
    """Terms of layouts, on mathematical integers. Entries of tables, their minima and maxima over ranges, segments, and
    ends of runs, of segments and of ranks are functions; `axioms` says of those met what holds of every table. Nothing
    is known of Floats. Offsets of segments ascend, and positions are within the reach of ends, 2**40."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = []  # (table, index as written, index in the table, value)
        self.ranges = []  # (op, table, first index, last index, value)
        self.segments = []  # (table, position, value)
        self.ends = []  # (op, table, arguments, value)
        self.positions = {}  # of an end: its last argument as an Expr
        self.conditions = {}  # (table, condition): of queries whose equal entries are adjacent
        self.quotients = {}  # (dividend, divisor, value) by the terms of dividend and divisor

    def leaf(self, e: Expr):
        if e.op == "has_runs" and not isinstance(e.name, str):
            return self.conditions.setdefault(e.name, z3.Bool(f"has_runs {e.name}"))
        if e.op in ("is_sorted", "has_runs"):
            return self.fact(e.op, e.name)
        return z3.Const(f"{e.op} {e.name}", FLOATS) if e.type is FLOAT else super().leaf(e)

    def fact(self, fact: str, table: str):
        return z3.Bool(f"{fact} {table}")

    def node(self, e: Expr, args):
        if e.op in ("range_min", "range_max"):
            half = len(args) // 2
            first, last = (self.clamped(e.name, part) for part in (args[:half], args[half:]))
            self.ranges.append((e.op, e.name, first, last, value := self.function(e, first + last)))
        elif e.op == "lookup":
            at = self.clamped(e.name, args)
            self.entries.append((e.name, args, at, value := self.function(e, at)))
        elif e.op == "segment":
            self.segments.append((e.name, args[0], value := self.function(e, args)))
        elif e.op in ENDS:
            self.ends.append((e.op, e.name, args, value := self.function(e, args)))
            self.positions[value] = e.args[-1]
        elif e.type is FLOAT or e.op == "random" or any(a.sort() == FLOATS for a in args):
            value = self.function(e, args)
        else:
            value = super().node(e, args)
        if e.op in ("floordiv", "mod") and e.type is INT:
            self.quotients[args[0].get_id(), args[1].get_id()] = *args, self.floordiv(*args)
        return value

    def function(self, e: Expr, args):
        sort = z3.BoolSort() if e.type is BOOL else z3.IntSort() if e.type is INT else FLOATS
        return z3.Function(f"{e.op} {e.name}", *(a.sort() for a in args), sort)(*args)

    def entry(self, table: str, args):
        """The entry of an Int table at an index."""
        at = self.clamped(table, args)
        return z3.Function(f"lookup {table}", *(a.sort() for a in at), z3.IntSort())(*at)

    def axioms(self) -> list:
        """What holds of the terms met; last of all, since it meets further ones."""
        met = {end: self.met(table, end) for op, table, _, end in self.ends if op == "run_first"}
        return [*self.of_ends(met), *self.of_ranges(), *self.of_sorted(), *self.of_segments(), *self.of_quotients()]

    def met(self, table: str, end):
        """Whether equal entries are adjacent: all of a table, or those of a query that meets a condition."""
        q = var("q")
        conditions = [(e, fact) for (name, e), fact in self.conditions.items() if name == table]
        some = [z3.And(fact, self(substitute(e, {q: self.positions[end]}))) for e, fact in conditions]
        return z3.Or(self.fact("has_runs", table), *some)

    def of_ranges(self):
        """No entry of a range is below its minimum or above its maximum."""
        for (op, name, first, last, end), (table, _, at, value) in product(self.ranges, self.entries):
            if table != name or value.sort() == FLOATS:
                continue
            low, high = (end, value) if op == "range_min" else (value, end)
            within = [z3.And(x <= i, i <= y) for x, i, y in zip(first, at, last, strict=True)]
            yield z3.Implies(z3.And(*within), z3.Implies(low, high) if z3.is_bool(value) else low <= high)

    def of_sorted(self):
        for (one, _, (i, *more), x), (other, _, (j, *_), y) in permutations(self.entries, 2):
            if one == other and not more and z3.is_int(x):
                yield z3.Implies(z3.And(self.fact("is_sorted", one), i <= j), x <= y)

    def of_segments(self):
        yield from (x >= 0 for _, _, x in self.segments)
        yield from (
            z3.Implies(i <= j, x <= y) for (one, i, x), (other, j, y) in permutations(self.segments, 2) if one == other
        )

    def of_ends(self, adjacent):
        """A run is the equal entries around a position, a rank where a sorted table reaches a value."""
        for (one, table, (*row, i), x), (other, name, (*line, j), y) in permutations(self.ends, 2):
            if (one, table) == (other, name):  # none of them decreases
                yield z3.Implies(z3.And(*map(eq, row, line), i <= j), x <= y)
        for op, table, args, end in self.ends:
            kind, side = op.split("_")
            if kind != "rank":
                yield end <= args[-1] if side == "first" else args[-1] <= end
            if kind == "segment":
                mine = z3.Function(f"segment {table}", z3.IntSort(), z3.IntSort())(args[0])
                for name, i, value in self.segments:
                    if name == table:
                        yield (value >= mine) == (i >= end) if side == "first" else (value <= mine) == (i <= end)
                continue
            mine = self.entry(table, args) if kind == "run" else args[0]
            for name, at, _, value in self.entries:
                if name != table:
                    continue
                row = z3.And(*map(eq, at[:-1], args[:-1])) if kind == "run" else z3.BoolVal(True)
                past = (value >= mine) == (at[-1] >= end) if side == "first" else (value <= mine) == (at[-1] <= end)
                yield z3.Implies(z3.And(row, self.fact("is_sorted", table)), past)
                if op == "run_first":
                    last = z3.Function(f"run_last {table}", *(a.sort() for a in args), z3.IntSort())(*args)
                    same = (value == mine) == z3.And(end <= at[-1], at[-1] <= last)
                    yield z3.Implies(z3.And(row, adjacent[end]), same)

    def of_quotients(self):
        """x // n never decreases in x for n > 0 and never increases for n < 0. z3 proves this alone, and finds it
        among other things late; so it is told."""
        for (x, n, a), (y, m, b) in permutations(self.quotients.values(), 2):
            if n.eq(m):
                yield z3.Implies(z3.And(n > 0, x <= y), a <= b)
                yield z3.Implies(z3.And(n < 0, x <= y), a >= b)


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
