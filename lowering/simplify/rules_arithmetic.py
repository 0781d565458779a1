"""Int arithmetic: folding, affine normal form, division, remainder, shifts and masks of bits."""

from __future__ import annotations

from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import FLOAT_FUNCTIONS, ONE, ZERO, Expr, build, lit
from frisket.dsl.sugar import maximum, minimum
from frisket.dsl.types import INT

from .affine import Linear, linear, write
from .facts import interval
from .pattern import m, n, rule, x, y


def fold(node: Expr) -> Expr | None:
    """Every operator of literals is the literal the interpreter gives, if it has one."""
    if not node.args or any(a.op != "lit" for a in node.args) or node.op in ("random", "lookup", "segment"):
        return None
    try:
        return lit(evaluate(node, {}).item())
    except ValueError:  # it leaves 64 bits: the emitter will say so
        return None


def affine(node: Expr) -> Expr | None:
    return write(linear(node)) if node.type is INT else None


def divide(a: Expr, d: Expr) -> Expr | None:
    """(d*a + r) // d is a + r // d."""
    if d.name <= 0:
        return None
    whole, rest = _split(linear(a), d.name)
    if not whole.terms and not whole.const:
        return None
    return write(whole + linear(build("floordiv", write(rest), d)))


def remainder(a: Expr, d: Expr) -> Expr | None:
    """(d*a + r) % d is r % d."""
    if d.name <= 0:
        return None
    whole, rest = _split(linear(a), d.name)
    return build("mod", write(rest), d) if whole.terms or whole.const else None


def _split(form: Linear, d: int) -> tuple[Linear, Linear]:
    """form = d * whole + rest, with 0 <= every coefficient and constant of rest < d where it is not an
    atom with a smaller coefficient already."""
    whole = [(a, f // d) for a, f in form.terms if f % d == 0]
    rest = [(a, f) for a, f in form.terms if f % d]
    return Linear(tuple(whole), form.const // d), Linear(tuple(rest), form.const % d)


def recombine(node: Expr) -> Expr | None:
    """(a // d) * d + a % d is a."""
    if node.type is not INT:
        return None
    form = linear(node)
    for atom, f in form.terms:
        if atom.op == "mod":
            quotient = build("floordiv", *atom.args)
            d = atom.args[1]
            if d.op == "lit" and d.name and form.coefficient(quotient) == f * d.name:
                return write(form.without(atom, quotient) + linear(atom.args[0]).times(f))
    return None


def inside(a: Expr, d: Expr) -> bool:
    """0 <= a < d at every position."""
    lo, hi = interval(a)
    return lo is not None and lo >= 0 and hi is not None and hi < d.name


def natural(a: Expr) -> bool:
    """a >= 0 at every position."""
    lo = interval(a)[0]
    return lo is not None and lo >= 0


def merged_divisors(a: Expr, d: Expr, e: Expr) -> Expr:
    """(a // d) // e is a // (d * e)."""
    return a // lit(d.name * e.name)


def ordered(a: Expr, b: Expr) -> bool:
    """a >= b at every position."""
    lo, hi = interval(a)[0], interval(b)[1]
    return lo is not None and hi is not None and lo >= hi


def turn(e: Expr) -> Expr | None:
    """abs(k - q) is abs(q - k): one sign."""
    terms = linear(e.args[0]).terms
    return abs(write(-linear(e.args[0]))) if terms and terms[0][1] < 0 else None


def power_of_two(d: Expr) -> bool:
    return bool(d.name > 0 and d.name & (d.name - 1) == 0)


def small_shift(s: Expr) -> bool:
    return bool(0 <= s.name < 62)


FOLDED = (
    "add sub mul neg abs sign min max pow floordiv mod bitand bitor bitxor bitnot shl shr int float floor "
    "lt le gt ge eq ne isfinite div"
).split() + sorted(FLOAT_FUNCTIONS)

RULES = [
    *(rule("fold", op, fold) for op in FOLDED),
    *(rule("recombine-div-mod", op, recombine) for op in ("add", "sub")),
    *(rule("affine", op, affine) for op in ("add", "sub", "neg", "mul")),
    # division and remainder by literals
    rule("div-by-one", x // 1, x),
    rule("div-by-zero", x // 0, ZERO),
    rule("mod-by-one", x % 1, ZERO),
    rule("mod-by-zero", x % 0, ZERO),
    rule("div-of-small", x // n, lambda x, n: ZERO, inside),
    rule("mod-of-small", x % n, x, inside),
    rule("div-of-div", (x // m) // n, merged_divisors, lambda x, m, n: m.name > 0 and n.name > 0),
    rule("mod-of-mod", (x % m) % n, x % n, lambda x, m, n: n.name > 0 and m.name % n.name == 0 and m.name > 0),
    rule("div-of-mod", (x % m) // n, ZERO, lambda x, m, n: 0 < m.name <= n.name),
    rule("div-splits", x // n, divide),
    rule("mod-splits", x % n, remainder),
    # shifts and masks of bits are divisions and remainders
    rule("shl-is-mul", x << n, lambda x, n: x * (1 << n.name), lambda x, n: small_shift(n)),
    rule("shr-is-div", x >> n, lambda x, n: x // (1 << n.name), lambda x, n: small_shift(n)),
    rule("low-bits-are-mod", x & n, lambda x, n: x % (n.name + 1), lambda x, n: power_of_two(lit(n.name + 1))),
    rule("bitxor-self", x ^ x, ZERO),
    rule("bitor-zero", x | 0, x),
    rule("bitxor-zero", x ^ 0, x),
    rule("bitnot-twice", ~~x, x),
    rule("bitnot-is-affine", ~x, -1 - x),
    # absolute value, minimum, maximum
    rule("abs-of-natural", abs(x), x, natural),
    rule("abs-of-negative", abs(-x), abs(x)),
    rule("abs-canonical", "abs", lambda e: turn(e) if e.type is INT else None),
    rule("sign-of-positive", build("sign", x), ONE, lambda x: (interval(x)[0] or 0) > 0),
    rule("min-decided", minimum(x, y), y, ordered),
    rule("min-decided", minimum(y, x), y, lambda y, x: ordered(x, y)),
    rule("max-decided", maximum(x, y), x, ordered),
    rule("max-decided", maximum(y, x), x, lambda y, x: ordered(x, y)),
    rule("min-absorbs-max", minimum(x, maximum(x, y)), x),
    rule("max-absorbs-min", maximum(x, minimum(x, y)), x),
    rule("min-literals", minimum(minimum(x, m), n), lambda x, m, n: minimum(x, min(m.name, n.name))),
    rule("max-literals", maximum(maximum(x, m), n), lambda x, m, n: maximum(x, max(m.name, n.name))),
    rule("pow-zero", x ** 0, ONE),
    rule("pow-one", x ** 1, x),
    rule("square", x ** 2, x * x),
]  # fmt: skip
