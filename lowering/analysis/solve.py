"""Solves the clauses of a mask for k. The mask is taken apart into disjuncts, conjunctions of clauses.

A clause that compares Ints is solved in three ways. `isolated` solves it for the one term that moves with k.
`position_bound` gives a bound on q, k or q - k where the clause bounds only one of them; a `System` holds such bounds
of a conjunction. `solve` gives bounds on k that vary with q, `k >= A(q)` and `k <= B(q)`: the curves of a mask.

>>> from frisket.dsl.sugar import eq, k, q
>>> disjuncts((q >= k) & ((k < 4) | (q - k < 256)))
[q >= k & k < 4, q >= k & q - k < 256]
>>> position_bound(q - k < 256)[:2], isolated(3 * k <= q).limit
(('d', 'le'), Linear(terms=((q // 3, 1),), const=0))

`q // n >= k // n` is `k <= q // n * n + n - 1`. `doc[q] == doc[k]` is `first(q) <= k <= last(q)`, the run of equal
entries that holds q, where the equal entries of the table are adjacent.

Where curves never decrease, the queries of a row of tiles may together see one interval of keys, as they do under
bounds on q - k. They do if, for one offset o, all lower bounds are at most `q + o` and all upper bounds at least
`q + o`. Every key between the ends of the row is then seen by query `k - o`, or by the first or last query of the row.

>>> [(c.side, c.value) for c in solve(eq(q // 8, k // 8))]
[('low', 8 * (q // 8)), ('high', 8 * (q // 8) + 7)]

The keys that one query sees have a first and a last key, and conditions that are left (`ends_of`). Kernels compute the
two ends once per query and compare every key of a partial tile with them, instead of evaluating the whole mask for
every pair. With `axis="q"` the interval is that of the queries which see one key.

>>> ends = ends_of((q >= k) & (q - k < 256) & eq(k % 4, 1))
>>> ends.first, ends.last, ends.rest
(q - 255, q, k % 4 == 1)
>>> ends_of(q >= k, axis="q").first
k

Some masks have ends only by a fact of a table: `doc[q] == doc[k]` shows one interval where equal entries are adjacent.

>>> from frisket.dsl.ir import lookup
>>> same = eq(lookup("doc", (q,)), lookup("doc", (k,)))
>>> sorted(facts_of(same)), ends_of(same)
([('has_runs', 'doc'), ('is_sorted', 'doc')], None)
>>> ends_of(same, facts=frozenset({("has_runs", "doc")})).last
run_last(q)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import product
from typing import Literal, TypeVar

from frisket.dsl.ir import FALSE, TRUE, Expr, build, clauses, conj, disj, lit, make, substitute, uses, var, walk
from frisket.dsl.sugar import where
from frisket.dsl.transfer import interval
from frisket.dsl.types import BOOL, INT
from frisket.grammar.memo import memo
from frisket.lowering.simplify import simplify
from frisket.lowering.simplify.affine import FLIP, Linear, is_int_comparison, linear, relation, write
from frisket.lowering.simplify.rules_boolean import negate

Q, K = var("q"), var("k")
MAX_DISJUNCTS = 24  # conjunctions a disjunctive form may have before its parts are judged alone
DEEP, LARGE = 100, 2048  # of an expression that is reasoned about: nesting, operators
_TURNS = 40  # nesting of an `xor` whose sides are reasoned about: each is asked for both truths
T = TypeVar("T")
Conjunctions = list[tuple[T, ...]]  # one of them holds, and of that one every part


def depends(e: Expr) -> frozenset[str]:
    """The coordinates among q and k that an Expr reads."""
    return uses(e) & {"q", "k"}


# -- disjuncts ------------------------------------------------------------------------------------


def beyond(e: Expr) -> bool:
    """Whether an Expr is too large (depth over DEEP, operators over LARGE) to know more than values at positions."""
    return e.depth > DEEP or _size(e) > LARGE


@memo(group="expressions")
def _size(e: Expr) -> int:
    return sum(1 for _ in walk(e))


def disjoined(
    e: Expr, read: Callable[[Expr], Conjunctions[T] | None], logic: Callable[[Expr], Expr | None]
) -> Conjunctions[T] | None:
    """The disjunction of conjunctions that equals `e`; None past MAX_DISJUNCTS, or where a part is `beyond`.

    `read` gives those of a part as it stands. Where it gives None, the operands of `and` and `or` are read, or the
    `logic` of another operator; a part that has none makes the answer None."""
    if beyond(e):
        return None
    if (whole := read(e)) is not None:
        return whole
    if e.op not in ("and", "or"):
        other = logic(e)
        return None if other is None else disjoined(other, read, logic)
    either = e.op == "or"
    out: Conjunctions[T] = [] if either else [()]
    for a in e.args:
        options = disjoined(a, read, logic)
        if options is None:
            return None
        many = len(out) + len(options) if either else len(out) * len(options)
        if many > MAX_DISJUNCTS:
            return None
        out = [*out, *options] if either else [x + y for x, y in product(out, options)]
    return out if either else [x for x in out if FALSE not in x]  # a contradiction shows nothing


def disjuncts(e: Expr) -> list[Expr] | None:
    """The disjunction of conjunctions equal to `e`, as a list; None past MAX_DISJUNCTS, or if it is `beyond`."""
    conjunctions = disjoined(e, _literal, as_logic)
    return None if conjunctions is None else [conj(*x) for x in conjunctions]


def _literal(e: Expr) -> Conjunctions[Expr] | None:
    if e.op == "ne" and is_int_comparison(e):  # two half-planes are bounds, a hole is not
        return [(half,) for half in sides_of_hole(e)]
    return None if e.op in ("and", "or") or as_logic(e) is not None else [(e,)]


def sides_of_hole(e: Expr) -> tuple[Expr, Expr]:
    """The two sides of the hole that `x != y` leaves."""
    return simplify(build("lt", *e.args)), simplify(build("gt", *e.args))


@memo(group="expressions")
def as_logic(e: Expr) -> Expr | None:
    """An equivalent Expr with `and` and `or` on top, for operators that hide them; None for others."""
    if e.op == "where" and e.type is BOOL:
        c, x, y = e.args
        return disj(conj(c, x), conj(negate(c), y))
    # comparisons of Bools have become `xor`
    inner = e.args[0] if e.op == "not" else e
    if inner.op != "xor" or e.depth > _TURNS:
        return None
    x, y = inner.args if inner is e else (negate(inner.args[0]), inner.args[1])
    return simplify(disj(conj(x, negate(y)), conj(negate(x), y)))


# -- one comparison ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Isolated:
    """A comparison solved for the one term that moves: `factor * atom op value`, where the factor is above 0 and op is
    one of `ge le eq ne`. Where the atom is k, this is a bound on the key."""

    op: str
    atom: Expr
    factor: int
    value: Linear

    @property
    def halves(self) -> tuple[Isolated, ...]:
        """The bounds that the comparison is made of: an equation is one on either side."""
        return (replace(self, op="ge"), replace(self, op="le")) if self.op == "eq" else (self,)

    @property
    def limit(self) -> Linear:
        """The value for the atom alone: value / factor, rounded up for `ge` and down for `le`."""
        if self.factor == 1:
            return self.value
        sign = -1 if self.op == "ge" else 1
        return linear(write(self.value.times(sign)) // lit(self.factor)).times(sign)

    def inside_quotient(self) -> Linear:
        """The form to compare with 0 for x, where the atom is x // n and n > 0: `x // n >= y` is `x >= y n`, and
        `x // n <= y` is `x <= y n + n - 1`."""
        x, n = self.atom.args
        limit = self.limit
        size = linear(n)
        if size.terms:
            scaled = sum((linear(a * n).times(f) for a, f in limit.terms), size.times(limit.const))
        else:
            scaled = limit.times(size.const)
        return linear(x) - (scaled if self.op == "ge" else scaled + size - Linear((), 1))


def on_key(e: Expr) -> bool:
    return "k" in uses(e)


def isolate(op: str, form: Linear, moves: Callable[[Expr], object] = on_key) -> Isolated | None:
    """The comparison `form op 0` solved for the one atom that moves; None where several atoms do, or none."""
    moving = [(a, f) for a, f in form.terms if moves(a)]
    if len(moving) != 1:
        return None
    (atom, factor), rest = moving[0], form.without(moving[0][0])
    return Isolated(op, atom, factor, -rest) if factor > 0 else Isolated(FLIP[op], atom, -factor, rest)


def isolated(e: Expr, moves: Callable[[Expr], object] = on_key) -> Isolated | None:
    """A comparison of Ints solved for the one atom that moves; None for other Exprs, and for `!=`."""
    if not is_int_comparison(e) or e.op == "ne":  # a hole bounds neither side
        return None
    return isolate(*relation(e.op, *e.args), moves)


def is_positive(e: Expr) -> bool:
    """Whether an Int is a literal above 0."""
    return e.op == "lit" and e.type is INT and e.name > 0


def by_literal(op: str, e: Expr) -> bool:
    """Whether an Int is x // n (`floordiv`) or x % n (`mod`) of a literal n above 0."""
    return e.op == op and is_positive(e.args[1])


DIRECTIONS = {(1, 0): "q", (0, 1): "k", (1, -1): "d"}  # by the factors of q and of k; d is q - k


@memo(group="expressions")
def position_bound(e: Expr) -> tuple[str, str, Linear] | None:
    """A comparison of Ints as a bound on q, k or q - k. It is (one of q, k and d, one of ge, le and eq,
    the bound). The bound reads neither q nor k."""
    if not is_int_comparison(e) or e.op == "ne":  # a hole bounds neither side
        return None
    op, form = relation(e.op, *e.args)
    direction = DIRECTIONS.get((form.coefficient(Q), form.coefficient(K)))
    rest = form.without(Q, K)
    return None if direction is None or any(depends(a) for a, _ in rest.terms) else (direction, op, -rest)


@dataclass(frozen=True)
class System:
    """One conjunction: bounds on q, k and q - k (Exprs that vary with neither), and the remaining terms."""

    low: dict[str, list[Expr]] = field(default_factory=lambda: {"q": [], "k": [], "d": []})
    high: dict[str, list[Expr]] = field(default_factory=lambda: {"q": [], "k": [], "d": []})
    fixed: list[Expr] = field(default_factory=list)  # conditions that do not vary over the rectangle
    rest: list[Expr] = field(default_factory=list)


@memo(group="expressions")
def system(term: Expr) -> System:
    """The literals of a conjunction, sorted into a System."""
    out = System()
    for e in clauses(term):
        if not depends(e):
            out.fixed.append(e)
        elif (bound := position_bound(e)) is None:
            out.rest.append(e)
        else:
            direction, op, value = bound
            for side in SIDES[op]:
                getattr(out, side)[direction].append(write(value))
    return out


SIDES = {"ge": ("low",), "le": ("high",), "eq": ("low", "high")}


# -- bounds on k by q -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A bound `k >= value` (low) or `k <= value` (high), provided `needs` holds. `value` may vary with q, and never
    decreases where `rising` holds (FALSE: not known). `near` is an affine Expr that is never below the value of a low
    bound and never above that of a high one; None: not known."""

    side: Literal["low", "high"]
    value: Expr
    near: Expr | None
    rising: Expr
    needs: Expr


def solve(e: Expr) -> tuple[Curve, ...] | None:
    """The bounds on k that are equivalent to an Int comparison, or None."""
    return _curves(isolated(e), TRUE)


def _curves(solved: Isolated | None, needs: Expr) -> tuple[Curve, ...] | None:
    curves = [None] if solved is None else [_of_half(half, needs) for half in solved.halves]
    return None if None in curves else tuple(c for half in curves for c in half or ())


def _of_half(half: Isolated, needs: Expr) -> tuple[Curve, ...] | None:
    atom, op, limit = half.atom, half.op, half.limit
    if atom is K:
        value = write(limit)
        return (Curve("low" if op == "ge" else "high", value, _near(limit, op, needs), rising(value), needs),)
    if by_literal("floordiv", atom):
        return _curves(isolate(op, half.inside_quotient()), needs)
    if atom.op == "floordiv" and not depends(n := atom.args[1]) and n.op != "lit":
        return _curves(isolate(op, half.inside_quotient()), conj(needs, n > 0))
    return _of_table(atom, op, limit, needs) if atom.op in ("lookup", "segment") else None


def _near(form: Linear, op: str, needs: Expr) -> Expr | None:
    """An affine Expr never below (ge) or above (le) a form, if `needs` holds; None if an atom has no affine bound."""
    conditions = clauses(needs)
    total = Linear((), form.const)
    for a, f in form.terms:
        if "q" not in depends(a) or a is Q:  # exact: such a term bounds itself
            total += Linear(((a, f),), 0)
        elif f == 1 and a.op in ENDS_OF_RUNS and (a.op in _FIRST) == (op == "ge"):
            total += linear(a.args[-1])  # a run's first is at or before the position, its last at or after it
        elif by_literal("floordiv", a) and f == a.args[1].name:
            total += linear(a.args[0]) - Linear((), 0 if op == "ge" else f - 1)  # x - n + 1 <= x // n * n <= x
        elif f == 1 and a.op == "mul" and a.args[0].op == "floordiv" and a.args[0].args[1] is (n := a.args[1]):
            if (n > 0) not in conditions and (interval(n)[0] or 0) <= 0:
                return None  # x // n * n is above x where n < 0
            total += linear(a.args[0].args[0]) - (Linear((), 0) if op == "ge" else linear(n) - Linear((), 1))
        else:
            return None
    return write(total)


_FIRST = ("run_first", "segment_first")
ENDS_OF_RUNS = (*_FIRST, "run_last", "segment_last")  # kernels read these from a derived table


def _of_table(atom: Expr, op: str, other: Linear, needs: Expr) -> tuple[Curve, ...] | None:
    """Bounds on the position x from bounds on the entry `T[.., x]`, for tables that never decrease. That is a fact of
    the table, so it becomes a condition; offsets of segments have it."""
    *fixed, x = atom.args
    if any(depends(a) for a in fixed):  # with another index that moves, an entry is no function of k alone
        return None
    kind = "segment" if atom.op == "segment" else "run"
    mate = other.terms[0][0] if len(other.terms) == 1 and other.terms[0][1] == 1 else None
    if mate is not None and mate.op == atom.op and mate.name == atom.name and mate.args[:-1] == atom.args[:-1]:
        if kind == "run":
            needs = conj(needs, make("is_sorted", (), atom.name, BOOL))
        first, last = (linear(make(f"{kind}_{end}", mate.args, atom.name, INT)) for end in ("first", "last"))
        one = Linear((), 1)
        # entries are Ints: one that is larger by 1 or more is past the run
        known = {("ge", 0): first, ("ge", 1): last + one, ("le", 0): last, ("le", -1): first - one}
        bound = known.get((op, other.const))
        return None if bound is None else _curves(isolate(op, linear(x) - bound), needs)
    if kind == "segment" or fixed:  # a table of several axes has no rank of a value
        return None
    needs = conj(needs, make("is_sorted", (), atom.name, BOOL))
    rank = make("rank_first" if op == "ge" else "rank_last", (write(other),), atom.name, INT)
    return _curves(isolate(op, linear(x) - linear(rank)), needs)


def equation_sides(e: Expr) -> tuple[Expr, Expr] | None:
    """The sides of `x == y(k)`, where x does not read k and y does not read q."""
    if e.op == "eq":
        for mine, theirs in (e.args, e.args[::-1]):
            if "k" not in uses(mine) and depends(theirs) == {"k"}:
                return mine, theirs
    return None


def sides_of_ids(e: Expr) -> tuple[Expr, Expr] | None:
    """The lookups of `T[q] == U[k]`, that of q first; b and h may stand before q and k. None for other Exprs."""
    sides = equation_sides(e)
    if sides is None or any(s.op != "lookup" or s.type is not INT for s in sides):
        return None
    (*before, at_q), (*others, at_k) = (s.args for s in sides)
    return sides if at_q is Q and at_k is K and {*before, *others} <= {var("b"), var("h")} else None


def solve_equal_entries(e: Expr, condition: Expr = TRUE) -> tuple[Curve, ...] | None:
    """The bounds of `T[.., x(q)] == T[.., x(k)]` where equal entries are adjacent, in any order of values. Where the
    mask also has a condition on the query alone, such as `image[q] > 0`, `condition` is that one. Entries that no query
    has which meets it may be anywhere."""
    sides = equation_sides(e)
    if sides is None or any(s.op != "lookup" for s in sides):
        return None
    mine, theirs = sides
    # the other indices have to name one row of the table
    if mine.name != theirs.name or mine.args[:-1] != theirs.args[:-1]:
        return None
    plain = mine.args == (Q,) and condition is not TRUE
    needs = make("has_runs", (), (mine.name, condition) if plain else mine.name, BOOL)
    x, ends = linear(theirs.args[-1]), [make(f"run_{end}", mine.args, mine.name, INT) for end in ("first", "last")]
    low, high = (_curves(isolate(op, x - linear(end)), needs) for op, end in zip(("ge", "le"), ends, strict=True))
    return None if low is None or high is None else low + high


@memo(group="expressions")
def rising(e: Expr) -> Expr:
    """A condition under which `e` never decreases in q; FALSE where none is known."""
    if "q" not in depends(e) or e is Q:
        return TRUE
    form = linear(e)
    if form.terms != ((e, 1),):
        # a sum rises where its parts do, and a falling part may undo that
        return conj(*(rising(a) if f > 0 or "q" not in depends(a) else FALSE for a, f in form.terms))
    return _RISES[e.op](e) if e.op in _RISES else FALSE


def _along_last(e: Expr) -> Expr:
    return FALSE if any(depends(a) for a in e.args[:-1]) else rising(e.args[-1])


def _by_factor(e: Expr) -> Expr:
    # a factor or divisor of the query may fall
    return FALSE if "q" in depends(e.args[1]) else conj(rising(e.args[0]), e.args[1] > 0)


def _sorted_entry(e: Expr) -> Expr:
    return conj(rising(e.args[0]), make("is_sorted", (), e.name, BOOL)) if len(e.args) == 1 else FALSE


_RISES: dict[str, Callable[[Expr], Expr]] = {
    **dict.fromkeys(("min", "max"), lambda e: conj(*map(rising, e.args))),
    **dict.fromkeys(("mul", "floordiv"), _by_factor),
    **dict.fromkeys((*ENDS_OF_RUNS, "segment", "rank_first", "rank_last"), _along_last),
    "lookup": _sorted_entry,
}


Fact = tuple[str, str]  # one of FACTS, or "segment" for offsets, and the name of the table
FACTS = ("has_runs", "is_sorted")
_TURN = {Q: K, K: Q}


@dataclass(frozen=True)
class Ends:
    """The positions that one row (a query, or a key with `axis="q"`) sees: from `first` to `last`, inclusive, where
    `rest` holds. `first` and `last` are Exprs in the row's coordinate, None where there is no bound. `asks` is a
    condition on the row alone: a row that fails it sees nothing."""

    first: Expr | None
    last: Expr | None
    asks: Expr
    rest: Expr


@memo(group="expressions")
def ends_of(mask: Expr, axis: str = "k", facts: frozenset[Fact] = frozenset()) -> Ends | None:
    """The ends of a simplified mask along an axis, None where no term is a bound. `facts` are the facts of `facts_of`
    that hold; a term that needs another one stays in `rest`."""
    lows: list[Curve] = []
    highs: list[Curve] = []
    asks, rest = TRUE, TRUE
    for term in clauses(mask):
        e = term if axis == "k" else substitute(term, _TURN)
        bounds = next((curves for curves in _solved(e) if _needs(curves) <= facts), None)
        if "k" not in uses(e):  # a condition on the query alone bounds no key
            asks = conj(asks, term)
        elif bounds is None:
            rest = conj(rest, term)
        else:
            lows += [c for c in bounds if c.side == "low"]
            highs += [c for c in bounds if c.side == "high"]
    if not (lows or highs):
        return None
    first, last = (_one(_decisive(curves), op, axis) for curves, op in ((lows, "max"), (highs, "min")))
    return Ends(first, last, asks, rest)


@memo(group="expressions")
def facts_of(mask: Expr) -> frozenset[Fact]:
    """The facts of tables that would turn more terms of a mask into ends, along either axis."""
    turned = substitute(mask, _TURN)
    fact_sets = (_needs(curves) for e in (*clauses(mask), *clauses(turned)) if "k" in uses(e) for curves in _solved(e))
    return frozenset(f for needs in fact_sets if _UNKNOWN not in needs for f in needs)


_UNKNOWN: Fact = ("", "")  # stands for a condition that is no fact of a table, which no call knows to hold


def _solved(e: Expr) -> Iterator[tuple[Curve, ...]]:
    """The bounds on k that each way to solve a term finds."""
    for way in (solve, solve_equal_entries, _either):
        if (curves := way(e)) is not None:
            yield curves


def _either(e: Expr) -> tuple[Curve, ...] | None:
    """The bound of a disjunction of bounds on the same side: `q >= k | k < n` is `k <= max(q, n - 1)`. A term that does
    not read k lifts a lower bound to 0: `k >= q | q < n` is `k >= where(q < n, 0, q)`."""
    solutions = [solve(a) for a in e.args if "k" in uses(a)] if e.op == "or" else []
    curves = [c for x in solutions for c in x or ()]
    if not solutions or None in solutions or len(curves) != len(solutions) or len({c.side for c in curves}) != 1:
        return None
    side, alone = curves[0].side, [a for a in e.args if "k" not in uses(a)]
    if alone and side == "high":  # no number is known to be at or past every position
        return None
    value = reduce(partial(build, "max" if side == "high" else "min"), (c.value for c in curves))
    value = where(disj(*alone), 0, value) if alone else value
    return (Curve(side, value, None, FALSE, conj(*(c.needs for c in curves))),)


def _needs(curves: tuple[Curve, ...]) -> frozenset[Fact]:
    """The facts of tables that some bounds need; `_UNKNOWN` among them where they need something else."""
    conditions = {n for c in curves for n in clauses(c.needs)}
    facts = {(n.op, n.name) if n.op in FACTS and isinstance(n.name, str) else _UNKNOWN for n in conditions}
    for n in walk(*(c.value for c in curves)):
        if n.op.startswith("segment_"):  # a table of segments counts positions from 0
            least, _ = interval(n.args[0])
            facts.add(("segment", n.name) if least is not None and least >= 0 else _UNKNOWN)
        elif n.op.startswith("rank_"):
            facts.add(_UNKNOWN)
    return frozenset(facts)


def _decisive(curves: list[Curve]) -> list[Curve]:
    """The bounds that no other one implies: with `k <= q`, `k <= last(q)` says nothing, as q's run ends no sooner."""
    return [c for c in curves if not any(c is not other and _implied(c, other) for other in curves)]


def _implied(c: Curve, other: Curve) -> bool:
    if c.near is None or c.near is c.value:
        return False
    gap = linear(other.value) - linear(c.near)
    return not gap.terms and (gap.const >= 0 if c.side == "low" else gap.const <= 0)


def _one(curves: list[Curve], op: str, axis: str) -> Expr | None:
    values = [c.value if axis == "k" else substitute(c.value, _TURN) for c in curves]
    return reduce(partial(build, op), values) if values else None
