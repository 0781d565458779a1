"""The affine normal form of Int expressions and of their comparisons, and the Expr of a normal form.

>>> from frisket.dsl.sugar import q, k
>>> write_relation(*relation("lt", q - k, lit(256)))
q - k <= 255
>>> write_relation(*relation("ge", q + 1, k + 1))
q >= k

The order of the operands of commutative operators is readable, and independent of how a mask was written. Structure
decides first, then literals, and names only where nothing else tells two operands apart. So neither the order of
writing nor (but for such ties, see `canonical`) the user's names change a mask.

>>> from frisket.dsl.sugar import k, q
>>> sorted([q - k < 256, (k < 4) | (q >= k), q >= k], key=sort_key)
[q >= k, q - k < 256, k < 4 | q >= k]

Ints are compared without shapes or bindings, by the intervals of `dsl/transfer.py`.

>>> natural(q % 8), ordered(q + 1, q)
(True, True)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from frisket.dsl.ir import COMPARISONS, COORDINATES, FALSE, SIZES, TRUE, Expr, build, fill, lit, literal_value, walk
from frisket.dsl.transfer import interval
from frisket.dsl.types import BOOL, INT
from frisket.grammar.memo import memo

# the analysis writes rectangles in q0 q1 k0 k1 (first and last query and key)
VARIABLES = {name: i for i, name in enumerate(("q", "q0", "q1", "k", "k0", "k1", "b", "h", *SIZES))}
_QUERY = {0, 1, 2}
_KEY = {3, 4, 5}
_OTHER = 20  # `score` and the analysis' own variables
NAMED = frozenset({"param", "lookup", "segment", "extent"})  # operators whose name is the user's
_AFFINE = frozenset({"lit", "var", "param", "extent", "bound", "add", "sub", "neg", "mul"})
_KEPT = 8  # literals and names compared one by one; beyond them a digest decides


@dataclass(frozen=True, slots=True)
class _Known:
    """The properties of a node that decide the order; made from the properties of its arguments."""

    key: tuple[Any, ...]
    short: tuple[Any, ...]
    variables: tuple[int, ...]  # variables, by rank
    plain: bool  # an affine Int
    tables: bool
    shape: bytes  # digest without literals and names
    whole: bytes  # digest with them
    literals: tuple[Any, ...]
    names: tuple[str, ...]


def sort_key(e: Expr) -> tuple[Any, ...]:
    """The sort key of a node, comparable with the key of any node of the same type; the same in every process.

    Int and Float: variables (q before k), then parameters, then the rest by the variables held, literals last.
    Bool: bounds on positions, then other comparisons, those of tables, what is no comparison, and what is made of
    several. Inside each kind those of both q and k first, then by depth and operator.
    """
    key: tuple[Any, ...] = fill(e, "rank", _look).key
    return key


def _look(e: Expr, args: list[_Known]) -> _Known:
    variables = {i for a in args for i in a.variables}
    if e.op == "var":
        variables.add(VARIABLES.get(e.name, _OTHER))
    plain = e.type is INT and e.op in _AFFINE and all(a.plain for a in args)
    tables = e.op in ("lookup", "segment") or any(a.tables for a in args)
    order = tuple(sorted(variables))
    sides = (not variables.isdisjoint(_QUERY)) + (not variables.isdisjoint(_KEY)) if e.type is BOOL else 0
    short = (_rank(e, args, tables), -sides, order, e.depth, e.op)
    name, literal = user_name(e), literal_value(e)
    label = str(e.name[1]) if e.op == "extent" else str(e.name) if name is None and literal is None else ""
    shape = digest(e.op, str(e.type), label, *(a.shape for a in args))
    comparable = (0, 0) if literal != literal else (1, literal)  # NaN compares with nothing, and a sort needs an order
    literals = _gather(a.literals for a in args) if literal is None else (comparable,)
    names = _gather([() if name is None else (name,), *(a.names for a in args)])
    bits = b"" if literal is None else _bits(literal)
    whole = digest(shape, bits, name or "", *(a.whole for a in args))
    numbered = tuple(by_length(n) for n in names)
    key = (short, label if e.op == "var" else "", tuple(a.short for a in args), shape, literals, numbered, whole)
    return _Known(key, short, order, plain, tables, shape, whole, literals, names)


_LEAF_RANKS = {"lit": 50, "param": 30}
_BOOL_RANKS = {"xor": 35, "not": 35, "where": 35, "and": 36, "or": 36}


def _rank(e: Expr, args: list[_Known], tables: bool) -> int:
    if e.op == "var":
        return VARIABLES.get(e.name, _OTHER)
    if is_int_comparison(e):
        return 31 if all(a.plain for a in args) else 33 if tables else 32
    return _LEAF_RANKS.get(e.op) or (_BOOL_RANKS.get(e.op, 34) if e.type is BOOL else 40)


def user_name(e: Expr) -> str | None:
    """The user's name that a node reads, of a parameter or table; None for other nodes."""
    if e.op not in NAMED:
        return None
    return str(e.name[0] if e.op == "extent" else e.name)


def _gather(parts: Any) -> tuple[Any, ...]:
    out: dict[Any, None] = {}
    for part in parts:
        out.update(dict.fromkeys(part))
        if len(out) >= _KEPT:
            break
    return tuple(out)[:_KEPT]


def by_length(name: str) -> tuple[int, str]:
    """A sort key of names by which s2 comes before s10."""
    return len(name), name


def _bits(value: Any) -> bytes:
    return struct.pack("<d", value) if isinstance(value, float) else str(value).encode()


def digest(*parts: str | bytes) -> bytes:
    state = blake2b(digest_size=12)
    for part in parts:
        # a name may hold half a surrogate, which UTF-8 refuses
        raw = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        # with its length first: ("ab", "c") and ("a", "bc") differ
        state.update(len(raw).to_bytes(4, "little") + raw)
    return state.digest()


Terms = tuple[tuple[Expr, int], ...]  # (atom, coefficient), coefficients not 0, in canonical order
# the analysis writes rectangles in q0 q1 k0 k1 (first and last query and key)
MOVING = (*COORDINATES, "q0", "q1", "k0", "k1")


@dataclass(frozen=True)
class Linear:
    """The affine form `sum(coefficient * atom) + const`."""

    terms: Terms
    const: int

    def __neg__(self) -> Linear:
        return self.times(-1)

    def __add__(self, other: Linear) -> Linear:
        return _collect((*self.terms, *other.terms), self.const + other.const)

    def __sub__(self, other: Linear) -> Linear:
        return self + -other

    def times(self, factor: int) -> Linear:
        if factor == 0:
            return Linear((), 0)
        return Linear(tuple((a, f * factor) for a, f in self.terms), self.const * factor)

    @property
    def large(self) -> bool:
        """Whether numbers are so large that sums in another order may leave 64 bits."""
        return abs(self.const) >= _LARGEST or any(abs(f) >= _LARGEST for _, f in self.terms)

    def coefficient(self, atom: Expr) -> int:
        return next((f for a, f in self.terms if a is atom), 0)

    def without(self, *atoms: Expr) -> Linear:
        return Linear(tuple(t for t in self.terms if t[0] not in atoms), self.const)


def _collect(terms: Iterable[tuple[Expr, int]], const: int) -> Linear:
    total: dict[Expr, int] = {}
    for atom, factor in terms:
        total[atom] = total.get(atom, 0) + factor
    nonzero = [(a, f) for a, f in total.items() if f]
    # one term is in order, and the key of a node costs more than a sum
    if len(nonzero) > 1:
        nonzero.sort(key=lambda t: sort_key(t[0]))
    return Linear(tuple(nonzero), const)


_LARGEST = 2**61
_WIDEST = 64  # terms of one form: sums beyond are taken in parts, so that work grows with their length


@memo(group="expressions")
def linear(e: Expr) -> Linear:
    """The affine form of an Int expression; parts that are not affine, and sums of very many terms, become atoms."""
    row = _FORMS.get(e.op)
    return Linear(((e, 1),), 0) if row is None else row(e)


def _added(e: Expr, left: Linear, right: Linear) -> Linear:
    both = left + right if len(left.terms) + len(right.terms) <= _WIDEST else None
    # of numbers so large another order of the sum may leave 64 bits, which the text itself does not
    return Linear(((e, 1),), 0) if both is None or both.large else both


def _multiple(e: Expr) -> Linear:
    for factor, other in (e.args, e.args[::-1]):
        if factor.op == "lit":
            many = linear(other).times(factor.name)
            return Linear(((e, 1),), 0) if many.large else many
    return Linear(((e, 1),), 0)


_FORMS: dict[str, Callable[[Expr], Linear]] = {
    "lit": lambda e: Linear((), e.name),
    "add": lambda e: _added(e, linear(e.args[0]), linear(e.args[1])),
    "sub": lambda e: _added(e, linear(e.args[0]), -linear(e.args[1])),
    "neg": lambda e: -linear(e.args[0]),
    "mul": _multiple,
}


@memo(group="expressions")
def write(form: Linear) -> Expr:
    """The one expression for an affine form: positive terms first, the constant last."""
    ordered = sorted(form.terms, key=lambda t: t[1] < 0)
    result: Expr | None = None
    for atom, factor in ordered:
        term = atom if abs(factor) == 1 else build("mul", lit(abs(factor)), atom)
        if result is None:
            result = term if factor > 0 else build("neg", atom) if factor == -1 else build("mul", lit(factor), atom)
        else:
            result = build("add" if factor > 0 else "sub", result, term)
    if result is None:
        return lit(form.const)
    if form.const:
        result = build("add" if form.const > 0 else "sub", result, lit(abs(form.const)))
    return result


@memo(group="expressions")
def varies(e: Expr) -> bool:
    """Whether a value depends on b, h, q or k, or on the ends of a rectangle."""
    return any((n.op == "var" and n.name in MOVING) or n.op in ("bound", "hole") for n in walk(e))


# a comparison of Ints is `form REL 0` with REL one of ge, le, eq, ne
FLIP = {"ge": "le", "le": "ge", "eq": "eq", "ne": "ne"}
NEGATE = {"ge": "lt", "gt": "le", "le": "gt", "lt": "ge", "eq": "ne", "ne": "eq"}


@memo(group="expressions")
def relation(op: str, left: Expr, right: Expr) -> tuple[str, Linear]:
    """The comparison `left op right` as (rel, form) meaning `form rel 0`, in canonical direction: the first varying
    atom has a positive coefficient, coefficients have no common divisor, bounds are not strict."""
    form = linear(left) - linear(right)
    if op in ("lt", "gt"):  # Int: x < 0 is x + 1 <= 0
        form = Linear(form.terms, form.const + (1 if op == "lt" else -1))
        op = "le" if op == "lt" else "ge"
    # terms are in canonical order, so the first that varies gives equal relations one sign
    lead = next((f for a, f in form.terms if varies(a)), form.terms[0][1] if form.terms else 1)
    if lead < 0:
        op, form = FLIP[op], -form
    g = math.gcd(*(f for _, f in form.terms)) if form.terms else 1
    # an equation whose constant the divisor does not divide holds nowhere: `write_relation` says so
    if g > 1 and (op not in ("eq", "ne") or form.const % g == 0):
        const = -(-form.const // g) if op == "le" else form.const // g
        form = Linear(tuple((a, f // g) for a, f in form.terms), const)
    return op, form


@memo(group="expressions")
def write_relation(op: str, form: Linear) -> Expr:
    if not form.terms:
        value = {"ge": form.const >= 0, "le": form.const <= 0, "eq": form.const == 0, "ne": form.const != 0}
        return TRUE if value[op] else FALSE
    g = math.gcd(*(f for _, f in form.terms))
    if op in ("eq", "ne") and form.const % g:
        return FALSE if op == "eq" else TRUE
    moving = tuple(t for t in form.terms if varies(t[0])) or form.terms
    fixed = tuple(t for t in form.terms if t not in moving)
    bound = -Linear(fixed, form.const)  # moving `op` bound
    strict = {"le": ("lt", -1), "ge": ("gt", 1)}.get(op)
    has_minus = any(f < 0 for _, f in moving)
    if not fixed and has_minus and strict and bound.const == strict[1]:
        # `q - k <= -1` is written `q < k`: a bound one past 0 is a strict bound of 0
        op, bound = strict[0], Linear((), 0)
    if not fixed and has_minus and bound.const == 0:
        right = tuple((a, -f) for a, f in moving if f < 0)
        return build(op, write(Linear(tuple(t for t in moving if t[1] > 0), 0)), write(Linear(right, 0)))
    if fixed and strict and bound.const == strict[1]:
        op, bound = strict[0], Linear(bound.terms, 0)
    return build(op, write(Linear(moving, 0)), write(bound))


@memo(group="expressions")
def is_affine(e: Expr) -> bool:
    """Whether an Expr is made of variables, parameters and literals by sums and literal factors alone."""
    return all(a.op in ("var", "param", "extent", "bound") for a, _ in linear(e).terms)


def is_int_comparison(e: Expr) -> bool:
    return e.op in COMPARISONS and e.args[0].type is INT


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
