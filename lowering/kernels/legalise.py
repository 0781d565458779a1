"""Expr to Expr: every operator that a language does not have is written in operators that it has.

`DECOMPOSITIONS` defines an operator by others, once for all languages; a language that has a row for an operator keeps
it. So a new operator needs one definition here, and a row only where a target has an instruction for it.

>>> from frisket.dsl.sugar import function, score
>>> from frisket.lowering.kernels.language import SHARED, Language, calls
>>> toy = Language("toy", SHARED | calls("{}", "sin:sin cos:cos"))
>>> legalise(function("tan", score), toy)
sin(score) / cos(score)

Six operators exist only in what `legalise` returns. `quotient` and `remainder` round to 0, `floor_quotient` and
`floor_remainder` round down; the divisor is not 0. `lshift` and `rshift` are by an amount within the word. A language
with a row for these takes them where the guards of `floordiv`, `mod`, `shl` and `shr` are known to hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from frisket.dsl.errors import EvaluationError
from frisket.dsl.evaluate import OPERATORS, evaluate
from frisket.dsl.ir import TRUE, Expr, build, conj, disj, lit, make, rebuild, walk
from frisket.dsl.sugar import eq, function, maximum, minimum, ne, where
from frisket.dsl.transfer import integral
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.dsl.work import wrapping
from frisket.lowering.simplify.affine import natural

from .language import SHIFTS, Language

Definition = Callable[[Expr, Language], Expr]


def legalise(root: Expr, language: Language, known: Iterable[Expr] = ()) -> Expr:
    """An equal Expr in operators that the language has a row for. An operator without a row or a definition stays, and
    so do the nodes of `known`, which have names."""
    if "wrapping_add" in language.operators:  # plain integers may not wrap there
        root = wrapping(root)
    done = {e: e for e in known}
    _legalise(root, language, done, lambda e: e)
    return done[root]


def _legalise(root: Expr, language: Language, done: dict[Expr, Expr], tidy: Callable[[Expr], Expr]) -> None:
    # what a definition is made of is legal already: it is not walked again
    for node in walk(root, below=lambda e: () if e in done else e.args):
        if node in done:
            continue
        e = tidy(rebuild(node, tuple(done[a] for a in node.args)))
        if e not in done and (written := _written(e, node, language)) is not e:
            _legalise(written, language, done, _tidied)
            done[e] = done[written]
        done[node] = done.setdefault(e, e)


def _written(e: Expr, before: Expr, language: Language) -> Expr:
    """The definition of an operator by others; the Expr itself where the language has it. Its operands are legal, and
    those of `before` are as they were, in operators of which more is known."""
    if e.op in _GUARDED and (unguarded := _GUARDED[e.op](e, before, language)) is not None:
        return unguarded
    if e.op in language.operators or e.op not in DECOMPOSITIONS:
        return e
    return DECOMPOSITIONS[e.op](e, language)


def folded(e: Expr) -> Expr:
    """The literal that an operator of literals is; any other Expr itself."""
    if not e.args or e.op not in OPERATORS or any(a.op != "lit" for a in e.args):
        return e
    try:
        value = evaluate(e, {}).item()
    except EvaluationError:  # the value leaves 64 bits: the operator stays as it is
        return e
    return lit(bool(value) if e.type is BOOL else value)


def _tidied(e: Expr) -> Expr:
    """A node of a definition with what its literals decide."""
    if e.op == "where" and e.args[0].op == "lit":
        return e.args[1] if e.args[0].name else e.args[2]
    if e.op in ("and", "or"):
        return conj(*e.args) if e.op == "and" else disj(*e.args)
    return folded(e)


def _marked(op: str, *args: Expr) -> Expr:
    """An operator of languages that is none of ours."""
    return make(op, args, None, INT)


# -- operators whose guards a literal, or what is known of an operand, makes idle ----------------------


def _divided(e: Expr, before: Expr, language: Language) -> Expr | None:
    x, n = e.args
    if n.op != "lit" or n.name == 0:
        return None
    kind = "quotient" if e.op == "floordiv" else "remainder"
    if f"floor_{kind}" in language.operators:
        return _marked(f"floor_{kind}", x, n)
    # of such operands both ways of rounding are one
    return _marked(kind, x, n) if kind in language.operators and n.name > 0 and natural(before.args[0]) else None


def _shifted(e: Expr, before: Expr, language: Language) -> Expr | None:
    x, n = e.args
    if n.op != "lit":
        return None
    by, op = n.name, "lshift" if e.op == "shl" else "rshift"
    if op == "rshift" and language.bits <= by < 64:
        by = language.bits - 1  # only the sign is left
    if language.operators.get(op) != SHIFTS[op]:  # a function may want a vector, and not a number
        return None
    return _marked(op, x, lit(by)) if 0 <= by < language.bits else 0 * x  # a plain 0 has no shape


_GUARDED = {"floordiv": _divided, "mod": _divided, "shl": _shifted, "shr": _shifted}


# -- definitions ------------------------------------------------------------------------------------------


def _floordiv(e: Expr, language: Language) -> Expr:
    x, y = e.args
    zero = eq(y, 0)
    divisor = where(zero, 1, y)
    if "floor_quotient" in language.operators:
        return where(zero, 0, _marked("floor_quotient", x, divisor))
    quotient = _marked("quotient", x, divisor)
    down = ne(quotient * divisor, x) & _opposed(x, divisor, y)
    return where(zero, 0, where(down, quotient - 1, quotient))


def _mod(e: Expr, language: Language) -> Expr:
    x, y = e.args
    zero = eq(y, 0)
    divisor = where(zero, 1, y)
    if "floor_remainder" in language.operators:
        return where(zero, 0, _marked("floor_remainder", x, divisor))
    if "floor_quotient" in language.operators:
        return where(zero, 0, x - _marked("floor_quotient", x, divisor) * divisor)
    rest = _marked("remainder", x, divisor)
    positive = y.op == "lit" and y.name > 0
    off = rest < 0 if positive else ne(rest, 0) & _opposed(rest, divisor, y)
    return where(zero, 0, where(off, rest + divisor, rest))


def _opposed(x: Expr, divisor: Expr, y: Expr) -> Expr:
    """Whether one of two numbers is below 0, and the other is not; `divisor` is `y`, or 1 for 0."""
    if y.op == "lit":
        return x < 0 if y.name >= 0 else x >= 0
    return build("xor", x < 0, divisor < 0)


def _shl(e: Expr, language: Language) -> Expr:
    x, y = e.args
    if y.op == "lit":  # a product: 2**31 is no Int of 32 bits, and -(2**31) has its bits
        n: int = y.name
        if not 0 <= n < language.bits:
            return 0 * x
        return x * (1 << n if n < language.bits - 1 else -(1 << n))
    inside = (y >= 0) & (y < language.bits)
    return where(inside, _marked("lshift", x, where(inside, y, 0)), 0)


def _shr(e: Expr, language: Language) -> Expr:
    x, y = e.args
    if y.op == "lit":  # by as many factors as fit
        if not 0 <= y.name < 64:
            return 0 * x
        by: int = min(y.name, language.bits - 1)
        most = language.bits - 2
        return x // (1 << by) if by <= most else x // (1 << most) // (1 << by - most)
    inside = (y >= 0) & (y < 64)
    return where(inside, _marked("rshift", x, minimum(where(inside, y, 0), language.bits - 1)), 0)


def _wrap(e: Expr, language: Language) -> Expr:
    x, bits = e.args
    over = language.bits - minimum(maximum(bits, 0), language.bits)
    return x << over >> over


def _sign(e: Expr, language: Language) -> Expr:
    x, one = e.args[0], 1 if e.type is INT else 1.0
    return where(x > 0 * one, one, where(x < 0 * one, -one, x))  # NaN stays NaN, and a zero keeps its sign


def _random(e: Expr, language: Language) -> Expr:
    """A draw as a chain of words, each computed as early as its counter is known."""
    state = make("seeded", e.args[:1])
    for counter in e.args[1:]:
        state = make("stirred", (state, counter))
    return make("uniform", (state,), None, FLOAT)


def _floor(e: Expr, language: Language) -> Expr:
    x, whole = e.args[0], build("int", e.args[0])
    over = build("float", whole) - x  # 1 or more where `int` is at its end
    return whole - build("int", (over > 0.0) & (over < 1.0))


def _log1p(e: Expr, language: Language) -> Expr:
    # W. Kahan: the rounding error of 1 + x cancels in the quotient
    x = e.args[0]
    y = 1.0 + x
    log, lost = function("log", y), eq(y, 1.0)
    near = log * (x / where(lost, 1.0, y - 1.0))
    return where(abs(x) < 0.5, where(lost, x, near), log)


def _pow(e: Expr, language: Language) -> Expr:
    """The power of two Floats as C's `pow` has it."""
    x, y = e.args
    negative = (x < 0.0) | (eq(x, 0.0) & (1.0 / x < 0.0))
    if (n := integral(y)) is not None:
        size = function("exp2", y * function("log2", abs(x)))
        return where(eq(n, 0), 1.0, where(negative, where(eq(n & 1, 1), -size, size), size))
    # an Int holds it, and Floats beyond it are even: float32 from 2**25 on, float64 from 2**54 on
    even = 2.0 ** (language.bits - 2)
    near = minimum(maximum(y, -even), even)
    integer = build("int", near)
    whole = eq(build("float", integer), near)
    odd = whole & eq(integer & 1, 1)
    size = function("exp2", y * function("log2", abs(x)))
    size = where(eq(abs(x), 1.0) & eq(y, y), 1.0, size)
    signed = where(negative & odd, -size, size)
    signed = where((x < 0.0) & (x > -math.inf) & ~whole, math.nan, signed)
    return where(eq(y, 0.0) | eq(x, 1.0), 1.0, signed)


def _erf(e: Expr, language: Language) -> Expr:
    # M. Abramowitz, I. Stegun, 7.1.26: off by 1.5e-7
    x = e.args[0]
    t = 1.0 / (1.0 + 0.3275911 * abs(x))
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    size = 1.0 - series * function("exp", -x * x)
    return where(x < 0.0, -size, size)


def _tanh(e: Expr, language: Language) -> Expr:
    # S. Moshier, Cephes tanhf: a polynomial near 0, where 1 - 2 / (1 + exp(2x)) would cancel
    x = e.args[0]
    z = x * x
    series = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
    near = (series - 3.33332819422e-1) * z * x + x
    return where(abs(x) < 0.625, near, 1.0 - 2.0 / (1.0 + function("exp", 2.0 * x)))


def _sqrt(e: Expr, language: Language) -> Expr:
    if "rsqrt" not in language.operators:
        return e
    x = e.args[0]
    return where(eq(x, 0.0) | eq(x, math.inf), x, x * function("rsqrt", x))


def _rsqrt(e: Expr, language: Language) -> Expr:
    return 1.0 / function("sqrt", e.args[0]) if "sqrt" in language.operators else e


def _extreme(e: Expr, language: Language) -> Expr:
    x, y = e.args
    first = build("le" if e.op == "min" else "ge", x, y)
    return where(first if e.type is INT else first | ne(x, x), x, y)  # NaN wins


def _of_one(define: Callable[[Expr], Expr]) -> Definition:
    return lambda e, language: define(e.args[0])


# Operators by others. Every language has add sub mul div neg abs, comparisons, and or, where, int and float. It also
# has exp log sin cos, one of sqrt and rsqrt, and one of quotient and floor_quotient.
DECOMPOSITIONS: dict[str, Definition] = {
    **{f.__name__[1:]: f for f in (_floordiv, _mod, _shl, _shr, _wrap, _sign, _random, _floor, _pow)},
    **{f.__name__[1:]: f for f in (_log1p, _erf, _tanh, _sqrt, _rsqrt)},
    **dict.fromkeys(("min", "max"), _extreme),
    "not": _of_one(lambda x: build("xor", x, TRUE)),
    "xor": lambda e, language: ne(*e.args),
    "bitnot": _of_one(lambda x: -1 - x),
    "isfinite": _of_one(lambda x: abs(x) < math.inf),
    "tan": _of_one(lambda x: function("sin", x) / function("cos", x)),
    "sigmoid": _of_one(lambda x: 1.0 / (1.0 + function("exp", -x))),
    "exp2": _of_one(lambda x: function("exp", x * math.log(2.0))),
    "log2": _of_one(lambda x: function("log", x) * math.log2(math.e)),
}
