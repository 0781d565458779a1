"""Symbolic derivatives of a plan's score mod, and how each captured gradient is summed.

With s the scaled dot product, m(s) the modified score, p = exp(m(s) - lse), and cotangents `dout`, `dlse`:

    delta = rowsum(dout * out) - dlse
    dm    = p * (kept / (1 - rate) * (dout @ v.T) - delta)      the cotangent of m(s), 0 where masked
    ds    = dm * slope;   dq = scale * ds @ k;   dk = scale * ds.T @ q;   dv = (kept / (1 - rate) * p).T @ dout
    a captured value x read at index i(b, h, q, k):   dx[i] += dm * weight

(Dao, FlashAttention-2, arXiv 2307.08691, for the plain score. The sink of a row is one more logit without a value:
its gradient is -exp(sink - lse) * delta, summed over rows.)

Where p is 0 (masked, or m(s) is -inf) all of these are 0, whatever slope and weight are there. For example log(score)
has an infinite slope at 0, and 0 * inf is NaN. `Backward.guard` says when a kernel has to select after the product.

>>> from frisket.dsl.sugar import function, h, k, q, score
>>> from frisket.dsl.ir import lookup
>>> backward = derivatives(function("tanh", score) + lookup("slope", (h,), FLOAT) * (k - q))
>>> backward.slope
1.0 - tanh(score) * tanh(score)
>>> backward.gradients
(Gradient(source='slope', index=(h,), weight=float(k - q), over='head'),)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from frisket.dsl.errors import LoweringError
from frisket.dsl.evaluate import unroll
from frisket.dsl.ir import (
    COORDINATES,
    SCORE,
    TOTAL,
    TRUE,
    Expr,
    build,
    conj,
    disj,
    fold,
    lit,
    literal_value,
    param,
    substitute,
    uses,
    var,
    walk,
)
from frisket.dsl.sugar import eq, function, ne, where
from frisket.dsl.transfer import finite
from frisket.dsl.types import FLOAT, INT
from frisket.grammar.memo import memo

from .plan import Geometry, LoopPlan
from .simplify import Simplifier
from .simplify.affine import is_int_comparison

Over = Literal["head", "row", "column", "diagonal", "scatter"]


@dataclass(frozen=True)
class Gradient:
    """The gradient of one lookup site of a Float table (`source` is its name in the plan), or of a Float slot.

    `over` says on which coordinates `index` depends, and so how `dm * weight` is summed before it is scattered.
    Sums run in a fixed order, so results repeat bit for bit.
    "head": on b and h at most, buffer [batch, heads]. "row": b, h, q, buffer [batch, heads, q_len];
    "column": b, h, k, buffer [batch, heads, kv_len]. "diagonal": b, h and q - k, buffer
    [batch, heads, q_len + kv_len - 1], entry q - k + kv_len - 1 in local positions. "scatter": anything else, added
    to the table's own shape at once."""

    source: str
    index: tuple[Expr, ...]  # of a table; empty for a slot
    weight: Expr  # d m(s) / d x, in b h q k score, sizes, slots and tables; simplified
    over: Over

    def coordinates(self, geometry: Geometry, along: Callable[[Any, tuple[int, ...]], Any]) -> dict[str, Any]:
        """The global `b h q k` of every entry of the buffer, as far as it depends on them, and the sizes.

        `along(start, shape)` counts from `start` along the first axis of `shape`."""
        b0, h0, q0, k0 = geometry.origin
        ones = (1,) * (self.over != "head")
        env: dict[str, Any] = {**geometry.named_sizes}
        env |= {"b": along(b0, (geometry.batch, 1, *ones)), "h": along(h0, (geometry.heads, *ones))}
        if self.over == "row":
            env["q"] = along(q0, (geometry.q_len,))
        elif self.over == "column":
            env["k"] = along(k0, (geometry.kv_len,))
        elif self.over == "diagonal":  # the first key, and a query at the entry's distance from it
            env["q"] = along(q0, (geometry.q_len + geometry.kv_len - 1,)) - (geometry.kv_len - 1)
            env["k"] = along(k0, (1,))
        return env


def by_source(
    gradients: Sequence[Gradient], buffers: Sequence[Any], tables: Mapping[str, Any],
    fold: Callable[[Gradient, Any, tuple[int, ...]], Any],
) -> dict[str, Any]:  # fmt: skip
    """The gradient of every table and slot that `gradients` name: {"t0": of the table's shape, "s1": 0-d}.

    A value read at several places has one entry in `gradients` for each: their buffers are brought to the table's shape
    by `fold` and added in the order given."""
    sums: dict[str, Any] = {}
    for gradient, buffer in zip(gradients, buffers, strict=True):
        part = fold(gradient, buffer, tuple(tables[gradient.source].shape) if gradient.index else ())
        sums[gradient.source] = sums[gradient.source] + part if gradient.source in sums else part
    return sums


@dataclass(frozen=True)
class Backward:
    """The part of a backward kernel's description that is not in the plan."""

    slope: Expr | None  # d m(s) / d s in b h q k score, sizes, slots, tables; None: 1
    gradients: tuple[Gradient, ...]

    @cached_property
    def guard(self) -> bool:
        """Whether a slope or weight may be NaN or infinite: then products with it are 0 by selection where p is 0."""
        parts = [g.weight for g in self.gradients] + ([] if self.slope is None else [self.slope])
        return not all(finite(e, {}) for e in parts)


@memo(group="programs")
def backward_of(plan: LoopPlan) -> Backward:
    """The derivatives of a plan's score mod, in the plan's own names."""
    return Backward(None, ()) if plan.score is None else derivatives(plan.score)


@memo(group="programs")
def backward_of_divide(plan: LoopPlan) -> Backward:
    """The derivatives of what weighted rows are divided by: the slope is by `total`."""
    return Backward(_ZERO, ()) if plan.divide is None else derivatives(unroll(plan.divide), TOTAL)


def differentiable_names(plan: LoopPlan) -> frozenset[str]:
    """The plan's names of the tables and slots that gradients flow to."""
    return frozenset(g.source for b in (backward_of(plan), backward_of_divide(plan)) for g in b.gradients)


def captured(plan: LoopPlan, grad_names: Collection[str]) -> list[tuple[int, Gradient]]:
    """The captured gradients of the tables and slots in `grad_names`, with their numbers in `backward_of(plan)`."""
    return [(i, g) for i, g in enumerate(backward_of(plan).gradients) if g.source in grad_names]


def derivatives(score: Expr, by: Expr = SCORE) -> Backward:
    """The derivatives of a score mod, a weight or a divisor, reductions written out: by `score` or `total`, by every
    Float parameter and at every lookup of a Float table."""
    by_leaf = leaf_derivatives(score)
    slope = by_leaf.pop(by, _ZERO)
    gradients = (Gradient(leaf.name, leaf.args, weight, over(leaf.args)) for leaf, weight in by_leaf.items())
    return Backward(None if slope is _ONE else slope, tuple(gradients))


def leaf_derivatives(score: Expr) -> dict[Expr, Expr]:
    """The derivatives of a score mod by its leaves, simplified; those that are 0 everywhere are left out.

    A parameter reached through Int or Bool alone (floor, comparisons, the condition of `where`) has none."""
    simplified = Simplifier()
    by_leaf = {leaf: simplified(cotangent) for leaf, cotangent in _cotangents(score).items()}
    return {leaf: derivative for leaf, derivative in by_leaf.items() if derivative is not _ZERO}


@dataclass(frozen=True)
class Formula:
    """An Expr as a function of Floats, which are its parameters `leaf 0`, `leaf 1` and so on.

    A derivative is simplified, which may rewrite the index of a lookup. So entries of tables are parameters as well."""

    expr: Expr
    count: int

    @cached_property
    def derivatives(self) -> tuple[Formula | None, ...]:
        """The derivative by each leaf, as a formula of the same leaves; None where it is 0 everywhere."""
        by_leaf = leaf_derivatives(self.expr)
        of_leaves = (by_leaf.get(_leaf(i)) for i in range(self.count))
        return tuple(None if e is None else Formula(e, self.count) for e in of_leaves)


@memo(group="programs")
def formula_of(e: Expr) -> tuple[Formula, tuple[Expr, ...]]:
    """An expression, reductions written out, as a formula of its Float leaves, and the leaves: the score or the total,
    parameters and entries of tables."""
    expr = unroll(e)
    leaves = tuple(x for x in walk(expr) if x in (SCORE, TOTAL) or (x.type is FLOAT and x.op in ("param", "lookup")))
    return Formula(substitute(expr, {x: _leaf(i) for i, x in enumerate(leaves)}), len(leaves)), leaves


def _leaf(i: int) -> Expr:
    return param(f"leaf {i}", FLOAT)


# -- reverse mode ---------------------------------------------------------------------------------

_ZERO, _ONE = lit(0.0), lit(1.0)
BITS = 61  # of the sum of all magnitudes in fixed point; rounding of each value is far below what is left of 64


def norm_width(dtype: Any, v_dim: int, device: str = "cpu") -> int:
    """The entries that a forward notes of each row for the backward: two about lse and, of 16 bits, what rounding left
    out of `out`, two numbers an entry. Where one weight is near 1, delta needs it: there p * (dp - delta) cancels."""
    return 2 + (-(-v_dim // 2) if dtype.itemsize == 2 and device == "cpu" else 0)


def _cotangents(score: Expr) -> dict[Expr, Expr]:
    """The derivative of `score` by each of its leaves, in order of first use.

    A cotangent travels as (when, value): 0 unless `when`. The choice stays outside of every product on the way
    down, because 0 times the infinite slope of a branch not taken is NaN."""
    order = list(walk(score))
    differentiable = _differentiable(order)
    at: dict[Expr, tuple[Expr, Expr]] = {score: (TRUE, _ONE)} if score in differentiable else {}
    for node in reversed(order):
        # the index of a lookup is of Ints, which have no derivative
        if node not in at or not node.args or node.op == "lookup":
            continue
        when, value = at[node]
        for arg, part in zip(node.args, DERIVATIVES[node.op](value, node, *node.args), strict=True):
            if arg in differentiable and part is not None:
                passed, chosen = part if isinstance(part, tuple) else (part, TRUE)
                at[arg] = _joined(at.get(arg), (conj(when, chosen), passed))
    leaves = [e for e in order if e in at and (not e.args or e.op == "lookup")]
    return {e: _chosen(*at[e]) for e in leaves}


def _differentiable(order: list[Expr]) -> set[Expr]:
    """The nodes of an Expr that carry a derivative."""
    nodes: set[Expr] = set()
    for e in order:
        if e.type is not FLOAT:
            continue
        if e in (SCORE, TOTAL) or e.op in ("param", "lookup") or (e.op not in FLAT and any(a in nodes for a in e.args)):
            if e.op not in DERIVATIVES and e.args and e.op != "lookup":
                raise LoweringError(f"`{e.op}` has no derivative; write it out before asking for gradients")
            nodes.add(e)
    return nodes


def _joined(one: tuple[Expr, Expr] | None, two: tuple[Expr, Expr]) -> tuple[Expr, Expr]:
    if one is None:
        return two
    if one[0] is two[0]:
        return one[0], one[1] * 2.0 if one[1] is two[1] else one[1] + two[1]
    return disj(one[0], two[0]), _chosen(*one) + _chosen(*two)


def _chosen(when: Expr, value: Expr) -> Expr:
    return value if when is TRUE else where(when, value, _ZERO)


# -- derivatives ----------------------------------------------------------------------------------

Part: TypeAlias = "Expr | tuple[Expr, Expr] | None"  # a cotangent; a cotangent and when it is not 0; 0
Row = Callable[..., tuple[Part, ...]]


def _quotient(c: Expr, y: Expr) -> Expr:
    """The derivative c / y of a quotient; the two literals of `50 * tanh(score / 50)` cancel, Int ones too."""
    divisor = literal_value(y.args[0] if y.op == "float" else y, 0)
    # c * y / y is NaN where y is 0 or infinite
    if c.op == "mul" and y in c.args and divisor and math.isfinite(divisor):
        return c.args[0] if c.args[1] is y else c.args[1]
    return c / y


def _power(c: Expr, out: Expr, x: Expr, y: Expr) -> tuple[Part, ...]:
    """The derivatives of a power, as in torch: 0 by x where y is 0, 0 by y where x is 0 and y is not negative."""
    if y.op == "lit":
        return (c * y * x ** lit(y.name - 1.0), None) if y.name else (None, None)
    return ((c * y * x ** (y - 1.0), ne(y, _ZERO)), (c * out * function("log", x), ~(eq(x, _ZERO) & (y >= 0.0))))


def _extreme(ahead: str) -> Row:
    """The derivatives of a minimum or maximum: all to the operand that is ahead. At a tie to a literal (relu is flat at
    0, as torch's), otherwise half to each, as torch.maximum's."""

    def row(c: Expr, out: Expr, x: Expr, y: Expr) -> tuple[Part, ...]:
        if "lit" in (x.op, y.op):
            return (c, build(ahead, x, y)), (c, build(ahead, y, x))
        half = c * where(eq(x, y), 0.5, 1.0)
        return (half, ~build(ahead, y, x)), (half, ~build(ahead, x, y))

    return row


# Operators that carry Float: the cotangents of their operands from (cotangent, value, operands), with torch's
# conventions. abs and sign are flat at 0, sqrt is infinitely steep there, and so are 1 / x and log(x).
DERIVATIVES: dict[str, Row] = {
    "neg": lambda c, out, x: (-c,),
    "abs": lambda c, out, x: (c * build("sign", x),),
    "add": lambda c, out, x, y: (c, c),
    "sub": lambda c, out, x, y: (c, -c),
    "mul": lambda c, out, x, y: (y, x) if c is _ONE else (c * y, c * x),
    "div": lambda c, out, x, y: (_quotient(c, y), -_quotient(c * out, y)),
    "pow": _power,
    "max": _extreme("gt"),
    "min": _extreme("lt"),
    "where": lambda c, out, p, x, y: (None, (c, p), (c, ~p)),
    "exp": lambda c, out, x: (c * out,),
    "exp2": lambda c, out, x: (c * out * math.log(2.0),),
    "log": lambda c, out, x: (c / x,),
    "log2": lambda c, out, x: (c / (x * math.log(2.0)),),
    "log1p": lambda c, out, x: (c / (1.0 + x),),
    "tanh": lambda c, out, x: (c * (1.0 - out * out),),
    "sigmoid": lambda c, out, x: (c * (out * (1.0 - out)),),
    "sin": lambda c, out, x: (c * function("cos", x),),
    "cos": lambda c, out, x: (-(c * function("sin", x)),),
    "tan": lambda c, out, x: (c * (1.0 + out * out),),
    "sqrt": lambda c, out, x: (c / (2.0 * out),),
    "rsqrt": lambda c, out, x: (c * (-0.5 * (out * out * out)),),
    "erf": lambda c, out, x: (c * (2.0 / math.sqrt(math.pi) * function("exp", -(x * x))),),
}
# Float operators whose derivative is 0 or that take no Float.
FLAT = frozenset({"sign", "float", "random"})


# -- on what an index depends -----------------------------------------------------------------------

Polynomial = dict[tuple[Expr, ...], int]  # products of atoms, in order of their ids, and their factors
_MOST = 64  # products of one polynomial; what has more is an atom


def over(index: tuple[Expr, ...]) -> Over:
    """The least buffer that holds every value of an index.

    >>> from frisket.dsl.sugar import k, q
    >>> over((abs(q - k) // 4,)), over((q // 4 - k // 4,))
    ('diagonal', 'scatter')
    """
    forms, known = fold(index, _polynomial), dict[Expr, frozenset[str]]()
    for e, form in forms.items():
        coordinates = frozenset({e.name} & {"q", "k", "score"}) if e.op == "var" else _together(e.args, known)
        if is_int_comparison(e):
            form = _sum(forms[e.args[0]], forms[e.args[1]], -1)
        if form != {(e,): 1}:  # past _MOST products the form is the node alone, and tells nothing
            # both are sound: the polynomial may cancel a coordinate, the operands may read fewer
            coordinates = min(coordinates, _moves(form, known), key=len)
        known[e] = coordinates
    on = _together(index, known)
    names: dict[frozenset[str], Over] = {
        frozenset(): "head", frozenset("q"): "row", frozenset("k"): "column", frozenset({"q - k"}): "diagonal",
    }  # fmt: skip
    return names.get(on, "scatter")


def alone(entry: Expr) -> str | None:
    """The coordinate that the entry of an index equals, up to a term that is the same at every position and read off no
    table. Then different values of the coordinate are different places.

    >>> from frisket.dsl.sugar import k, q
    >>> alone(3 + q), alone(k // 2), alone(q - k)
    ('q', None, None)
    """
    polynomial = fold(entry, _polynomial)[entry]
    # an atom other than a bare coordinate may have one value at two of them
    moving = [p for p in polynomial if any(e.op == "lookup" or uses(e) & {*COORDINATES, "score"} for e in walk(*p))]
    equal = moving in [[(var(n),)] for n in COORDINATES] and polynomial[moving[0]] == 1
    return str(moving[0][0].name) if equal else None


def _together(nodes: tuple[Expr, ...], known: dict[Expr, frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*(known[e] for e in nodes))


def _polynomial(e: Expr, args: list[Polynomial]) -> Polynomial:
    form = _FORMS[e.op](e, *args) if e.op in _FORMS else None
    return {(e,): 1} if form is None or len(form) > _MOST else form


def _added(sign: int) -> Callable[[Expr, Polynomial, Polynomial], Polynomial | None]:
    """The row of a sum or difference of Ints, or of Ints converted to Float, which are exact."""

    def row(e: Expr, one: Polynomial, two: Polynomial) -> Polynomial | None:
        exact = e.type is INT or all(a.op == "float" for a in e.args)
        return _sum(one, two, sign) if exact else None

    return row


def _multiplied(e: Expr, one: Polynomial, two: Polynomial) -> Polynomial | None:
    # before the work of so many products
    return _product(one, two) if e.type is INT and len(one) * len(two) <= _MOST else None


def _sum(one: Polynomial, two: Polynomial, sign: int) -> Polynomial:
    total = dict(one)
    for product, factor in two.items():
        total[product] = total.get(product, 0) + sign * factor
    return {p: f for p, f in total.items() if f}


def _product(one: Polynomial, two: Polynomial) -> Polynomial:
    total: Polynomial = {}
    for p, f in one.items():
        for r, g in two.items():
            # by id: any order makes equal products equal, and ids compare fastest
            total = _sum(total, {tuple(sorted((*p, *r), key=id)): f * g}, 1)
    return total


_FORMS: dict[str, Callable[..., Polynomial | None]] = {
    "lit": lambda e: {(): e.name} if e.type is INT else None,
    "float": lambda e, x: x,
    "neg": lambda e, x: _sum({}, x, -1) if e.type is INT else None,
    "add": _added(1),
    "sub": _added(-1),
    "mul": _multiplied,
}


def _moves(form: Polynomial, known: dict[Expr, frozenset[str]]) -> frozenset[str]:
    """The coordinates a polynomial depends on; q and k that occur as multiples of q - k count as one."""
    coordinates: set[str] = set()
    steps: dict[tuple[Expr, ...], dict[str, int]] = {}
    for product, factor in form.items():
        places = [i for i, e in enumerate(product) if e.op == "var" and e.name in ("q", "k")]
        # a product of several positions moves with each of them
        if len(places) == 1:
            (at,) = places
            steps.setdefault(product[:at] + product[at + 1 :], {})[product[at].name] = factor
            coordinates |= _together((*product[:at], *product[at + 1 :]), known)
        else:
            coordinates |= _together(product, known)
    for step in steps.values():
        coordinates |= {"q - k"} if step.get("q", 0) == -step.get("k", 0) else set(step)
    return frozenset(coordinates)
