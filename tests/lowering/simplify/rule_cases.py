"""Instances of the rules, made from the table: what a row is written on, and what it makes of it.

for before, after in instances(rule, rng, 20): ...
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from frisket.dsl.ir import NEG_INF, SCORE, Expr, build, lit, lookup, param, segment, substitute, walk
from frisket.dsl.sugar import b, eq, h, k, maximum, minimum, ne, q, where
from frisket.dsl.types import BOOL, FLOAT, INT, Type
from frisket.lowering.simplify import Rule

x, y, w = (param(n) for n in "xyw")
flag, other = (param(n, BOOL) for n in ("flag", "other"))
u, v = (param(n, FLOAT) for n in "uv")
doc = lookup("doc", (q,))

NUMBERS = [0, 1, 2, 3, 4, 8, -1, -2, -3, -4, 5, 6, 7, 9, 12, 16, -8, -9, 64, 255]
FLOATS = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 3.0, 7.5, -2.5, 1e-310, 1e30, 3.0e38]
SPECIAL = [float("inf"), float("-inf"), float("nan")]
INTS = [
    x, y, q, k, q - k, w, q % 8, q // 4, k - q, doc, 2 * q, q % 8 + 9, -1 - q % 8, 4 * q + 6 * k + 2, x // 4, x % 4,
    q + 1, lookup("doc", (k,)), segment("off", k), 4 * (q // 4), q - q % 4, q % 12 + k, abs(q - k), minimum(x, y),
    maximum(q, k),
    build("int", flag), where(flag, 1, 0), where(flag, x, y), 3 * x - 5, -x, x // 4 + 1, q * q, x * y, h, b + 2,
    segment("off", q), build("sign", q - k), maximum(x, 3), minimum(q, 5), abs(x),
]  # fmt: skip
BOOLS = [
    flag, other, q >= k, q - k < 5, k < 4, q > k, q - k <= x, ~flag, eq(doc, lookup("doc", (k,))), q < k, ne(q, k),
    eq(q, k), q >= 3, x < y, lookup("seen", (k,), BOOL), eq(q % 4, 0), flag & (q >= k), (k < 4) | flag, k >= 2,
    (q >= k) & (q - k < 5), where(flag, q >= k, k < 4), build("xor", flag, other), build("xor", q >= k, flag),
    lit(True), lit(False), q - k >= -2, q - k <= 9, eq(q - k, 3), (q >= k) | (k < 9), (q < k) & flag, eq(x, y),
    lookup("doc", (k,)) > x, ne(doc, lookup("doc", (k,))),
]  # fmt: skip
FLOATERS = [
    u,
    v,
    SCORE,
    build("float", q),
    build("float", x),
    u * v,
    -u,
    where(flag, 1.0, 0.0),
    where(flag, 0.0, NEG_INF),
]
ATOMS: dict[Type, list[Expr]] = {INT: INTS, BOOL: BOOLS, FLOAT: FLOATERS}
LITERALS = {INT: NUMBERS, BOOL: [True, False], FLOAT: FLOATS}
RESULTS = {  # operators with arguments of these types
    "not": [(BOOL,)], "xor": [(BOOL, BOOL)], "where": [(BOOL, t, t) for t in (BOOL, INT, FLOAT)],
    "int": [(BOOL,), (FLOAT,)], "float": [(INT,)], "floor": [(FLOAT,)], "isfinite": [(FLOAT,)], "div": [(FLOAT, FLOAT)],
    "pow": [(INT, INT), (FLOAT, FLOAT)],
}  # fmt: skip
UNARY = frozenset({"neg", "abs", "sign", "bitnot"})
ON_INTS = frozenset({"floordiv", "mod", "bitand", "bitor", "bitxor", "shl", "shr", "bitnot"})


def instances(rule: Rule, rng: random.Random, count: int) -> list[tuple[Expr, Expr]]:
    """Up to `count` different nodes that the rule changes, with what it changes them to."""
    found: dict[Expr, Expr] = {}
    for node in itertools.islice(candidates(rule, rng), 400 * count):
        after = rule.apply(node)
        if after is not None and node not in found:
            found[node] = after
            if len(found) >= count:
                break
    return list(found.items())


def candidates(rule: Rule, rng: random.Random) -> Iterator[Expr]:
    if isinstance(rule.before, str):
        yield from nodes(rule.before, rng)
        return
    holes = sorted({n for n in walk(rule.before) if n.op == "hole"}, key=lambda n: str(n.name))
    while True:
        reach = rng.choice((3, 8, 40))  # simple ones first and often
        yield substitute(rule.before, {n: filler(n, rng, reach) for n in holes}) if holes else rule.before


def filler(hole: Expr, rng: random.Random, reach: int) -> Expr:
    if hole.name[1]:
        return lit(rng.choice(LITERALS[hole.type][: 4 * reach]))
    return rng.choice(ATOMS[hole.type][:reach])


def nodes(op: str, rng: random.Random) -> Iterator[Expr]:
    """Nodes of one operator over atoms, literals, and each other."""
    while True:
        if op in ("and", "or"):
            dual = "or" if op == "and" else "and"
            terms = [rng.choice(BOOLS[: rng.choice((8, 40))]) for _ in range(rng.randint(2, 4))]
            if rng.random() < 0.6:
                terms.append(build(dual, *rng.sample(BOOLS, rng.randint(2, 3))))
            if rng.random() < 0.3:
                terms.append(build(dual, *rng.sample(terms, 2)))
            yield build(op, *terms)
            continue
        args = tuple(operand(t, op, rng) for t in rng.choice(types(op)))
        yield build(op, *args) if op != "pow" or args[0].type is FLOAT else build(op, args[0], lit(rng.randrange(4)))


def types(op: str) -> list[tuple[Type, ...]]:
    if op in RESULTS:
        return RESULTS[op]
    if op in ("eq", "ne"):
        return [(INT, INT), (INT, INT), (BOOL, BOOL), (FLOAT, FLOAT)]
    if op in ON_INTS:
        return [(INT,) if op in UNARY else (INT, INT)]
    count = 1 if op in UNARY else 2
    if op in ("lt", "le", "gt", "ge", "add", "sub", "mul", "min", "max", "neg", "abs", "sign"):
        return [(INT,) * count, (INT,) * count, (FLOAT,) * count]
    return [(FLOAT,)]


def operand(type: Type, op: str, rng: random.Random) -> Expr:
    kind = rng.random()
    if kind < 0.3:
        return lit(rng.choice(LITERALS[type] + (SPECIAL if type is FLOAT else [])))
    if kind < 0.7 or type is BOOL:
        return rng.choice(ATOMS[type])
    inner = op if op in ("min", "max", "add", "sub", "mul", "bitand", "bitor", "bitxor") else rng.choice(("add", "sub"))
    if op in ON_INTS and type is not INT:
        inner = "add"
    return build(inner, rng.choice(ATOMS[type]), rng.choice([*ATOMS[type], lit(LITERALS[type][3])]))
