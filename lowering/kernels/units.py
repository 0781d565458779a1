"""Score mods of 16-bit inputs, rewritten so that constant factors are multiplied before the loops.

A kernel has `score`, the product of a query and a key, and `scale`. For float32 inputs it computes `score * scale` and
then the score mod, operator by operator. For 16-bit inputs the text may round in other places, if each rounding
is one of float32. That is 2**-24 of a value, where an input was rounded by 2**-12 (float16) or 2**-9 (bfloat16). So

- `scale` joins the factors that are the same at every position, and they become one factor, computed once: `score / c`
  is `score * (scale * (1 / c))`. A factor with a value for each key or query takes them too. So does the scale of a
  stored key: `score * (scale * k_scale[k])` takes a multiplication for a key and one for a pair;
- a quotient by a number that is the same at every position is a product with its reciprocal, at most 1.5 * 2**-23 of
  the quotient away. A division by a number that varies with the position stays, and so does a division that decides an
  Int or a Bool. Where a target's scalars do not divide, only a quotient by a literal is a product;
- `exp(x)` is `exp2(x * LOG2E)`, for which GPUs have an instruction;
- `float(k - q)` is a difference of two Floats, counted from the first position of the program's own tile: whole
  numbers, exact up to distances of 2**24 tokens.

A last literal factor, the 50 of `50 * tanh(...)`, joins the factor of the softmax, whose base is 2.

Tables read by distance have one vector for each tile of queries and keys, instead of one load for each position. The
index of `bias[h, q - k]`, with or without a clamp or buckets, is the same along a diagonal of a tile. A tile of BLOCK_Q
queries and BLOCK_K keys has BLOCK_Q + BLOCK_K - 1 diagonals. Their entries are loaded once: for one key `k_line` and as
many queries `q_line` as there are diagonals, one at each distance. Every position then takes the entry of its diagonal
out of shared memory. The values equal those of one load for each position, bit for bit.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from frisket.dsl.ir import SCORE, Expr, build, find, fold, lit, make, rebuild, substitute, uses, var, walk
from frisket.dsl.show import show
from frisket.dsl.transfer import interval
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.derive import over
from frisket.lowering.simplify import ProgramExprs

from . import expr
from .expr import COLUMN, LEVELS, POSITION, ROW, SCALAR, decisive, levels

SCALE = var("scale", FLOAT)
START = var("start")  # the position at which the program's own tile begins
LOG2E = math.log2(math.e)
FORMS = frozenset({"div", "exp", "float"})  # operators with a cheaper form that not every target has
COMMON = 2.0**-60, 2.0**60  # between these, products and reciprocals of factors neither overflow nor lose digits


class Rounding(Protocol):
    """The part of `Dims` that says how much rounding a score mod bears."""

    @property
    def half(self) -> bool: ...


def machine(e: Expr, dims: Rounding, when: Mapping[str, int] = LEVELS, *, gathers: bool = True) -> Expr:
    """A score mod, one of its derivatives or a weight in the operators that machines have, with the units of 16-bit
    inputs where `dims` has these. With `gathers`, tables by distance are read as one vector a tile."""
    e = expr.machine(e)
    e = in_products(e, when) if dims.half else e
    return by_distance(e, when) if gathers else e


def in_products(
    root: Expr, when: Mapping[str, int] = LEVELS, forms: Collection[str] = FORMS, scale: Expr | None = SCALE
) -> Expr:
    """An Expr in which `score` is the scaled product, rewritten so that `score` is the product itself and `scale` a
    factor, if there is one. `when` gives the levels of coordinates, `forms` the operators of `FORMS` that are
    rewritten: quotients by numbers that are no literals, exp, distances.

    >>> from frisket.dsl.sugar import function
    >>> in_products(50.0 * function("tanh", SCORE / 50.0), {"score": 3})
    tanh(score * (scale * 0.02)) * 50.0
    >>> in_products(SCORE * var("k_scale", FLOAT), {"score": 3, "k_scale": 2})
    score * (scale * k_scale)
    """
    scaled = root if scale is None else substitute(root, {SCORE: SCORE * scale})
    deciding = decisive([scaled])
    done: dict[Expr, Expr] = {}
    for node in walk(scaled):
        rebuilt = rebuild(node, tuple(done[a] for a in node.args))
        # what decides an Int or a Bool keeps the rounding of the language: it may decide a tile
        done[node] = rebuilt if node.type is not FLOAT or node in deciding else _merged(rebuilt, when, forms)
    return done[scaled]


def factored(score: Expr, others: Iterable[Expr], forms: Collection[str]) -> tuple[dict[Expr, Expr], bool]:
    """A score mod and other expressions of scores as a kernel computes them, by what they were, and whether of
    products. They are not where the score mod has the scaled product itself as a term, `score + bias`: a kernel then
    multiplies by the scale first, and once.

    >>> from frisket.dsl.sugar import function
    >>> factored(50.0 * function("tanh", SCORE / 50.0), (), FORMS)
    ({50.0 * tanh(score / 50.0): tanh(score * (scale * 0.02)) * 50.0}, True)
    >>> factored(SCORE / 50.0 + 50.0 * function("tanh", SCORE), (), FORMS)
    ({score / 50.0 + 50.0 * tanh(score): score * 0.02 + tanh(score) * 50.0}, False)
    """
    read = {e: expr.machine(e) for e in (score, *others) if "score" in uses(e)}
    merged = {e: in_products(x, forms=forms) for e, x in read.items()}
    if SCORE * SCALE not in walk(merged.get(score, score)):
        return merged, True
    return {e: cheaper(x, forms) for e, x in read.items()}, False


def cheaper(root: Expr, forms: Collection[str] = ()) -> Expr:
    """An equal Expr with its constant factors merged, and with products for quotients; `root` itself where that leaves
    the same operators, if in another order.

    >>> cheaper(2.0 * SCORE / 50.0 + 1.0), cheaper(2.0 * SCORE)
    (score * 0.04 + 1.0, 2.0 * score)
    """
    merged = in_products(root, forms=forms, scale=None)
    one, other = (Counter(n.op for n in walk(e)) for e in (root, merged))
    return root if one == other else merged


def _merged(e: Expr, when: Mapping[str, int], forms: Collection[str]) -> Expr:
    """An Expr with its constant factors merged; those of its arguments already are."""
    if e.op == "exp" and "exp" in forms:  # the machine has an instruction for powers of 2 alone
        return build("exp2", _times(e.args[0], lit(LOG2E), when))
    if e.op == "float" and "float" in forms:
        return _distance(e, when)
    if e.op not in ("mul", "div"):
        return e
    x, y = e.args
    if e.op == "mul" and _level(x, when) < _level(y, when):  # the factor second, whichever way it is written
        x, y = y, x
    if e.op == "mul" and _level(x, when) == POSITION and _level(y, when) in (ROW, COLUMN):
        return _times_line(e, x, y, when)  # the constant goes to the line, which has fewer entries than the tile
    # a factor that varies, or a product of constants, moves nowhere
    if _level(y, when) != SCALAR or _level(x, when) == SCALAR:
        return e
    if e.op == "div":
        if "div" not in forms and not _common(y):
            return e
        # one reciprocal instead of a division per position
        y = lit(1.0 / y.name) if _common(y) else build("div", lit(1.0), y)
    return _times(x, y, when)


def _times(x: Expr, factor: Expr, when: Mapping[str, int]) -> Expr:
    """`x * factor`; where x is itself a product with a factor, the two factors become one."""
    if x.op == "mul":
        for rest, inner in (x.args, x.args[::-1]):
            if _level(inner, when) == SCALAR and _level(rest, when) != SCALAR:
                # a product of extreme factors could overflow where the chain does not
                both = _common(inner) and _common(factor)
                return build("mul", rest, lit(inner.name * factor.name) if both else build("mul", inner, factor))
    return build("mul", x, factor)


def _times_line(e: Expr, x: Expr, line: Expr, when: Mapping[str, int]) -> Expr:
    """`e`, which is `x * line`, where `line` has a value for each key or query: it takes a constant factor of x."""
    if x.op == "mul":
        for rest, inner in (x.args, x.args[::-1]):
            if _level(inner, when) == SCALAR and _level(rest, when) == POSITION:
                return build("mul", rest, build("mul", inner, line))
    return e


def _common(x: Expr) -> bool:
    return x.op == "lit" and COMMON[0] <= abs(x.name) <= COMMON[1]


def _distance(e: Expr, when: Mapping[str, int]) -> Expr:
    """`float(k - q)` with one conversion for each key and each query, instead of one for each pair."""
    (inner,) = e.args
    if inner.op == "abs":
        return build("abs", gap) if (gap := _distance(build("float", inner.args[0]), when)).op == "sub" else e
    if inner.op != "sub" or {x.name for x in inner.args if x.op == "var"} != {"q", "k"}:
        return e
    if {_level(x, when) for x in inner.args} != {ROW, COLUMN}:
        return e
    return build("sub", *(build("float", x - START) for x in inner.args))


def _level(e: Expr, when: Mapping[str, int]) -> int:
    return levels(e, when=when)[e]


def last_factor(e: Expr) -> tuple[Expr, float]:
    """A score mod without its last factor, a positive literal, and that literal; 1 where there is none."""
    if e.op == "mul":
        for x, y in (e.args, e.args[::-1]):
            if _common(y) and y.name > 0:
                return x, y.name
    return e, 1.0


HALF = 65504.0  # the largest float16
Ends = tuple[float, float]
MONOTONE: dict[str, Callable[[float], float]] = {
    "neg": lambda x: -x,
    "exp": lambda x: math.exp(min(x, 700.0)) if x < math.inf else x,
    "exp2": lambda x: 2.0 ** min(x, 1000.0) if x < math.inf else x,
    "sqrt": lambda x: math.sqrt(max(x, 0.0)),
}
WITHIN: dict[str, Ends] = {"sigmoid": (0.0, 1.0), **dict.fromkeys("tanh erf sin cos sign".split(), (-1.0, 1.0))}
CORNERS: dict[str, Callable[[float, float], float]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "min": min, "max": max,
}  # fmt: skip


def largest(e: Expr) -> float:
    """A bound of the magnitude of a Float, whatever the score is; infinity where none is known.

    >>> from frisket.dsl.sugar import function
    >>> largest(2.0 * function("sigmoid", SCORE)), largest(SCORE)
    (2.0, inf)
    """
    low, high = fold(e, _ends)[e]
    return max(-low, high)


def overflow_fact(exprs: ProgramExprs, values: Mapping[str, Any]) -> str:
    """A sentence about an exponential of a weight that may be infinite in float32, or an empty text. `values` are those
    of parameters.

    >>> from frisket.dsl.sugar import function, minimum
    >>> overflow_fact(ProgramExprs(weight=function("exp", SCORE)), {})
    '`exp(score)` is infinite in float32 where `score` is above 88; bound it, such as by min(..., 60)'
    >>> overflow_fact(ProgramExprs(weight=function("exp", minimum(SCORE, 8.0))), {})
    ''
    """
    if exprs.weight is None:
        return ""
    weight = exprs.weight_of_score(True)
    known = {n: lit(float(values[n.name])) for n in find(weight, "param") if n.type is FLOAT and n.name in values}
    weight = substitute(weight, known)
    ends: dict[Expr, Ends] = fold(weight, _ends)
    for e in walk(weight):
        most, exponent = _exponent_limit(e), e.args[-1] if e.args else e
        if "score" in uses(exponent) and ends[exponent][1] > most:
            where = f"`{show(e)}` is infinite in float32 where `{show(exponent)}` is above {most:.0f}"
            return f"{where}; bound it, such as by min(..., {min(60, int(most * 0.7))})"
    return ""


def _exponent_limit(e: Expr) -> float:
    """The largest exponent of an exponential that is finite in float32; infinity for other operators."""
    if e.op in ("exp", "exp2"):
        return 88.0 if e.op == "exp" else 127.0
    base = e.args[0].name if e.op == "pow" and e.args[0].op == "lit" else 0
    return 127.0 / math.log2(base) if base > 1 else math.inf


def _ends(e: Expr, args: list[Ends]) -> Ends:
    points: list[float] = []
    if e.op == "lit" and e.type is FLOAT:
        points = [e.name]
    elif e.op == "float":
        points = [math.nan if x is None else float(x) for x in interval(e.args[0])]
    elif e.op in WITHIN:
        return WITHIN[e.op]
    elif e.op in MONOTONE:
        points = [MONOTONE[e.op](x) for x in args[0]]
    elif e.op == "pow" and e.args[1].op == "lit" and e.args[1].name % 2 == 0:
        points = [0.0, math.inf]
    elif e.op in CORNERS and e.args[0] is e.args[1] and e.op == "mul":
        points = [0.0, *(x * x for x in args[0])]
    elif e.op in CORNERS and e.type is FLOAT:
        points = [CORNERS[e.op](x, y) for x in args[0] for y in args[1]]
    elif e.op == "abs" and e.type is FLOAT:
        points = [0.0, *map(abs, args[0])]
    elif e.op == "where" and e.type is FLOAT:
        points = [*args[1], *args[2]]
    return (min(points), max(points)) if points and not any(map(math.isnan, points)) else (-math.inf, math.inf)


Q_LINE, K_LINE, HERE = var("q_line"), var("k_line"), var("here")
LINE = {Q_LINE: var("q"), K_LINE: var("k")}
ALONG = {Q_LINE.name: COLUMN, K_LINE.name: COLUMN, HERE.name: POSITION}  # levels: a vector for each tile
GATHERED = "gathered"


def by_distance(root: Expr, when: Mapping[str, int]) -> Expr:
    """An Expr whose outermost lookups by distance are read from the vector of the tile's diagonals.

    >>> from frisket.dsl.ir import lookup
    >>> from frisket.dsl.sugar import k, q
    >>> [n.op for n in walk(by_distance(lookup("bias", (q - k,)), {"q": 1, "k": 2}))]
    ['var', 'var', 'sub', 'lookup', 'var', 'gathered']
    """
    lookups = [n for n in walk(root) if n.op == "lookup" and _along(n, when)]
    below = {x for n in lookups for a in n.args for x in walk(a)}
    gathered = {n: _gathered(n) for n in lookups if n not in below}
    return substitute(root, gathered) if gathered else root


def _along(e: Expr, when: Mapping[str, int]) -> bool:
    """Whether a lookup depends on `q - k`, and otherwise only on values that are single in a program."""
    return over((e,)) == "diagonal" and all(when.get(n, SCALAR) == SCALAR for n in uses(e) & {"b", "h"})


def _gathered(e: Expr) -> Expr:
    line = substitute(e, {x: y for y, x in LINE.items()})
    if e.type is not BOOL:
        return make(GATHERED, (line, HERE), None, e.type)
    return build("ne", make(GATHERED, (build("int", line), HERE), None, INT), lit(0))
