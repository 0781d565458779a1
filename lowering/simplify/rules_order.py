"""Rules: operands of commutative operators in one order. Two operands of a Float operator change places; they are never
regrouped, so every score is the same to the last bit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import reduce
from operator import and_, or_, xor
from typing import Any

from frisket.dsl.ir import Expr, build, lit, nest
from frisket.dsl.types import FLOAT

from .affine import linear, ordered, sort_key
from .pattern import rule

LONGEST = 64  # operands sorted together, so that work grows with the length of a chain
_COMPARED = 16  # operands of min and max that are compared pair by pair
IDEMPOTENT = frozenset({"min", "max", "bitand", "bitor"})
_JOIN: dict[str, Callable[[Any, Any], Any]] = {"min": min, "max": max, "bitand": and_, "bitor": or_, "bitxor": xor}
MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def terms_in_order(node: Expr) -> Expr | None:
    """The terms of a conjunction or disjunction, sorted."""
    args = sorted(node.args, key=sort_key)
    return None if tuple(args) == node.args else build(node.op, *args)


def chain(node: Expr) -> list[Expr]:
    """The operands of nested uses of one operator; of very many operands, the last ones and the rest as one."""
    out: list[Expr] = []
    stack = [node]
    while stack:
        e = stack.pop()
        if e.op == node.op and len(out) + len(stack) < LONGEST:
            stack.extend(reversed(e.args))
        else:
            out.append(e)
    return out


def chain_in_order(node: Expr) -> Expr | None:
    """A chain of an Int operator: sorted, nested to the left; repeats of min max & | are dropped, those of ^ cancel."""
    if node.type is FLOAT:
        return pair_in_order(node)
    parts = chain(node)
    # the rest of a very long chain may repeat what this part holds, so nothing is dropped
    if len(parts) >= LONGEST:
        return None
    if node.op == "mul" and any(a.op == "lit" for a in node.args):  # a literal factor stands first, as in affine forms
        return pair_in_order(node)
    if node.op == "mul" and any(_factor(a) != 1 for a in parts):
        return _factors_first(parts)
    parts = sorted(_literals_joined(node.op, parts), key=sort_key)
    if node.op in IDEMPOTENT:
        parts = list(dict.fromkeys(parts))
    if node.op in ("min", "max") and 2 < len(parts) <= _COMPARED:
        parts = _undominated(node.op, parts)
    if node.op == "bitxor":  # what stands there twice cancels; one pair stays for the rule that says so
        odd = [e for e, n in Counter(parts).items() if n % 2]
        parts = sorted(odd, key=sort_key) if odd and len(parts) > 2 else parts
    new = nest(node.op, parts)
    return None if new is node else new


def _literals_joined(op: str, parts: list[Expr]) -> list[Expr]:
    """Join several literals into one: min(min(x, 3), 5) is min(x, 3)."""
    literals = [a for a in parts if a.op == "lit"]
    if len(literals) < 2 or len(literals) == len(parts):
        return parts
    one = lit(reduce(_JOIN[op], (a.name for a in literals)))
    return [*(a for a in parts if a.op != "lit"), one]


def _undominated(op: str, parts: list[Expr]) -> list[Expr]:
    """Operands without those that are never the smallest (largest): in min(x, y, x + 1) the last."""
    operands: list[Expr] = []
    for i, a in enumerate(parts):
        if not any(ordered(a, o) if op == "min" else ordered(o, a) for o in [*operands, *parts[i + 1 :]]):
            operands.append(a)
    return operands


def _factor(e: Expr) -> int:
    """The factor of an affine form of one term; 0 for a literal."""
    form = linear(e)
    return 1 if len(form.terms) > 1 or (form.terms and form.const) else form.terms[0][1] if form.terms else 0


def _factors_first(parts: list[Expr]) -> Expr | None:
    """Move literal factors to the front: (3 * x) * -y is -3 * (x * y), as in affine forms."""
    factor = math.prod(_factor(a) or a.name for a in parts)
    rest = [linear(a).terms[0][0] if _factor(a) not in (0, 1) else a for a in parts if a.op != "lit"]
    # the product of the factors has to be a literal of 64 bits
    if abs(factor) >= 2**63 or not rest:
        return None
    return build("mul", lit(factor), nest("mul", sorted(rest, key=sort_key)))


def pair_in_order(node: Expr) -> Expr | None:
    """Two operands of a Float operator in order; a literal factor stands first, as in affine forms."""
    left, right = node.args
    if node.op == "mul" and (left.op == "lit") != (right.op == "lit"):
        return None if left.op == "lit" else build("mul", right, left)
    return None if sort_key(left) <= sort_key(right) else build(node.op, right, left)


def comparison_in_order(node: Expr) -> Expr | None:
    """Float comparisons in order: `3.0 > score` is `score < 3.0`, with NaN too. Int comparisons have an affine form."""
    left, right = node.args
    return None if sort_key(left) <= sort_key(right) else build(MIRRORED[node.op], right, left)


RULES = [
    *(rule("order-terms", op, terms_in_order) for op in ("and", "or")),
    *(rule("order-chain", op, chain_in_order) for op in ("mul", "min", "max", "bitand", "bitor", "bitxor")),
    rule("order-sum", "add", pair_in_order, of=FLOAT),
    *(rule("order-comparison", op, comparison_in_order, of=FLOAT) for op in ("lt", "le", "gt", "ge", "eq", "ne")),
]
