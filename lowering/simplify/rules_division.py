"""Rules of Int division, remainder, shifts and bit masks. Both round to minus infinity, and by 0 they give 0."""

from __future__ import annotations

import math

from frisket.dsl.ir import ZERO, Expr, build, lit, literal_value
from frisket.dsl.sugar import eq, ne
from frisket.dsl.transfer import interval
from frisket.dsl.types import INT

from .affine import Linear, is_affine, linear, write
from .pattern import m, n, rule, x, y, z

_WIDEST = 2**62  # literals made here stay below


def divide(a: Expr, d: Expr) -> Expr | None:
    """Divide a sum: (d*a + r) // d is a + r // d."""
    whole, rest = _split(linear(a), d.name)
    return write(whole + linear(build("floordiv", write(rest), d))) if whole.terms or whole.const else None


def remainder(a: Expr, d: Expr) -> Expr | None:
    """Remainder of a sum: (d*a + r) % d is r % d."""
    whole, rest = _split(linear(a), d.name)
    return build("mod", write(rest), d) if whole.terms or whole.const else None


def _split(form: Linear, d: int) -> tuple[Linear, Linear]:
    """Split form = d * whole + rest, with 0 <= every coefficient and constant of rest < d where it is not an atom with
    a smaller coefficient already. Where d is not positive all is rest."""
    if d <= 0:
        return Linear((), 0), form
    whole = [(a, f // d) for a, f in form.terms if f % d == 0]
    rest = [(a, f) for a, f in form.terms if f % d]
    return Linear(tuple(whole), form.const // d), Linear(tuple(rest), form.const % d)


def _reduced(form: Linear, d: int) -> tuple[int, Linear]:
    """The common factor g of the terms and of d, and form // g (floored: a remainder below g is lost). g is 1 where d
    is not positive, or there are no terms."""
    g = math.gcd(d, *(f for _, f in form.terms)) if d > 0 and form.terms else 1
    return g, Linear(tuple((a, f // g) for a, f in form.terms), form.const // g)


def divide_by_less(a: Expr, d: Expr) -> Expr | None:
    """Reduce a quotient: (6*a + 5) // 4 is (3*a + 2) // 2; the lost half never reaches the next multiple."""
    g, rest = _reduced(linear(a), d.name)
    return build("floordiv", write(rest), lit(d.name // g)) if g > 1 else None


def remainder_of_less(a: Expr, d: Expr) -> Expr | None:
    """Reduce a remainder: (4*a + 1) % 8 is 4 * (a % 2) + 1."""
    form = linear(a)
    g, rest = _reduced(form, d.name)
    return None if g == 1 else g * build("mod", write(rest), lit(d.name // g)) + form.const % g


def divide_again(a: Expr, d: Expr) -> Expr | None:
    """Join quotients: (a // m + c) // n is (a + c*m) // (m*n)."""
    form = linear(a)
    if d.name <= 0 or len(form.terms) != 1 or form.terms[0][1] != 1:
        return None
    atom = form.terms[0][0]
    m = literal_value(atom.args[1], 0) if atom.op == "floordiv" else 0
    # the product of the divisors has to fit 64 bits
    if not 0 < m * d.name < _WIDEST:
        return None
    return build("floordiv", write(linear(atom.args[0]) + Linear((), form.const * m)), lit(m * d.name))


def remainder_sees_through(a: Expr, d: Expr) -> Expr | None:
    """Drop an inner remainder: (a % m + b) % n is (a + b) % n where n divides m."""
    if d.name <= 0:
        return None
    form = linear(a)
    for atom, f in form.terms:
        m = literal_value(atom.args[1], 0) if atom.op == "mod" else 0
        if m > 0 and f * m % d.name == 0:
            return build("mod", write(form.without(atom) + linear(atom.args[0]).times(f)), d)
    return None


def recombine(node: Expr) -> Expr | None:
    form = recombined(linear(node))
    return None if form is None else write(form)


def recombined(form: Linear) -> Linear | None:
    """Recombine quotient and remainder: a // d * d + a % d is a. A - a % d is a // d * d; a - a // d * d is a % d."""
    for atom, f in form.terms:
        if atom.op not in ("mod", "floordiv") or not literal_value(atom.args[1]):
            continue
        whole, d = linear(atom.args[0]), atom.args[1]
        if atom.op == "mod":
            quotient = build("floordiv", *atom.args)
            if form.coefficient(quotient) == f * d.name:
                return form.without(atom, quotient) + whole.times(f)
            if _holds(form, whole, -f):
                return form.without(atom) + whole.times(f) - Linear(((quotient, f * d.name),), 0)
        elif f % d.name == 0 and _holds(form, whole, -f // d.name):
            g = -f // d.name
            return form.without(atom) - whole.times(g) + Linear(((build("mod", *atom.args), g),), 0)
    return None


def _holds(form: Linear, part: Linear, times: int) -> bool:
    return bool(part.terms) and all(form.coefficient(a) == times * f for a, f in part.terms)


def inside(a: Expr, d: Expr) -> bool:
    """Whether 0 <= a < d at every position."""
    lo, hi = interval(a)
    return lo is not None and lo >= 0 and hi is not None and hi < d.name


def merged_divisors(a: Expr, d: Expr, e: Expr) -> Expr:
    """Merge divisors: (a // d) // e is a // (d * e)."""
    return a // lit(d.name * e.name)


def bits(a: Expr, d: Expr) -> Expr | None:
    """Bit masks as arithmetic: x & 12 is 4 * (x // 4 % 4), a run of bits; and x & -8 is 8 * (x // 8)."""
    mask = int(d.name)
    low = mask & -mask
    # in two's complement -8 has all bits but the lowest three
    if mask < 0 and -mask == low < _WIDEST:
        return low * (a // low)
    if not 0 < mask < _WIDEST:
        return None
    run = mask // low
    # a mask with a gap between its bits is no single run
    return low * (a // low % (run + 1)) if run & (run + 1) == 0 else None


def affine_pair(a: Expr, d: Expr, b: Expr) -> bool:
    return is_affine(a) and is_affine(b)


def turned_down(a: Expr) -> bool:
    """Whether the first term of `a` is negative: then -a is written, which has the same multiples."""
    terms = linear(a).terms
    return bool(terms) and terms[0][1] < 0


def ceiling(a: Expr, d: Expr) -> bool:
    """Whether a // d is written as -(-a // d), that is minus a rounded up."""
    # the first term gives the sign, so that equal quotients are written alike
    return 0 < d.name < _WIDEST and turned_down(a)


def minus(a: Expr) -> Expr:
    return write(-linear(a))


def negative(a: Expr, d: Expr) -> bool:
    return bool(-_WIDEST < d.name < 0)


def small_shift(a: Expr, s: Expr) -> bool:
    return bool(0 <= s.name < 62)  # larger factors may leave 64 bits in sums


def no_shift(a: Expr, s: Expr) -> bool:
    return not 0 <= s.name <= 63


RULES = [
    *(rule("recombine-div-mod", op, recombine, of=INT) for op in ("add", "sub")),
    rule("div-by-one", x // 1, x),
    rule("div-by-zero", x // 0, ZERO),
    rule("mod-by-one", x % 1, ZERO),
    rule("mod-by-zero", x % 0, ZERO),
    rule("div-by-negative", x // n, lambda x, n: minus(x) // lit(-n.name), negative),
    rule("mod-by-negative", x % n, lambda x, n: -(minus(x) % lit(-n.name)), negative),
    rule("div-of-small", x // n, lambda x, n: ZERO, inside),
    rule("mod-of-small", x % n, x, inside),
    rule("div-of-div", (x // m) // n, merged_divisors, lambda x, m, n: m.name > 0 and n.name > 0),
    rule("mod-of-mod", (x % m) % n, x % n, lambda x, m, n: n.name > 0 and m.name % n.name == 0 and m.name > 0),
    rule("div-of-mod", (x % m) // n, ZERO, lambda x, m, n: 0 < m.name <= n.name),
    rule("div-splits", x // n, divide),
    rule("mod-splits", x % n, remainder),
    rule("div-reduces", x // n, divide_by_less),
    rule("mod-reduces", x % n, remainder_of_less),
    rule("div-merges", x // n, divide_again),
    rule("mod-sees-through", x % n, remainder_sees_through),
    rule("div-turns", x // n, lambda x, n: -((minus(x) + (n.name - 1)) // n), ceiling),
    # which multiples: one sign, and one remainder instead of two
    *(rule("same-remainder", is_(x % z, y % z), is_((x - y) % z, 0), affine_pair) for is_ in (eq, ne)),
    rule("multiple-sign", eq(x % y, 0), lambda x, y: eq(minus(x) % y, 0), lambda x, y: turned_down(x)),
    rule("multiple-sign", ne(x % y, 0), lambda x, y: ne(minus(x) % y, 0), lambda x, y: turned_down(x)),
    *(rule("abs-divides", is_(abs(x) % y, 0), is_(x % y, 0)) for is_ in (eq, ne)),
    # shifts and masks of bits are divisions and remainders
    rule("shl-is-mul", x << n, lambda x, n: x * (1 << n.name), small_shift),
    rule("shr-is-div", x >> n, lambda x, n: x // (1 << n.name), small_shift),
    rule("shl-outside", x << n, ZERO, no_shift),
    rule("shr-outside", x >> n, ZERO, no_shift),
    rule("bitand-zero", x & 0, ZERO),
    rule("bitand-ones", x & -1, x),
    rule("bits-are-div-mod", x & n, bits),
    rule("bitxor-self", x ^ x, ZERO),
    rule("bitor-zero", x | 0, x),
    rule("bitxor-zero", x ^ 0, x),
    rule("bitnot-twice", ~~x, x),
    rule("bitnot-is-affine", ~x, -1 - x),
    *(rule("bitxor-equal", is_(x ^ y, 0), is_(x, y)) for is_ in (eq, ne)),
    *(rule("bitxor-equal", is_(x ^ m, n), lambda x, m, n, is_=is_: is_(x, m.name ^ n.name)) for is_ in (eq, ne)),
]
