"""One mask is one Expr: neither the user's names nor the order of operands that commute make another."""

from __future__ import annotations

import random

import pytest
from support import masks
from support.lowering.expressions import Everything

from frisket.dsl import ir
from frisket.dsl.ir import Expr, build, renamed
from frisket.dsl.program import read
from frisket.dsl.show import show
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.simplify import canonical, simplify

SWAPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}
PAIRS = frozenset({"add", "mul", "bitand", "bitor", "bitxor", "xor", "min", "max"})

# one mask a row, written in several ways; then what it is called
ALIKE = {
    ("q >= k & doc[q] == doc[k]", "seg[k] == seg[q] & k <= q"): "q >= k & t0[q] == t0[k]",
    ("-2 <= q - k", "q - k >= -2", "k - q <= 2", "q + 2 >= k", "~(q - k < -2)"): "q - k >= -2",
    ("-2 <= x[q]", "x[q] >= -2", "y[q] > -3"): "t0[q] >= -2",
    ("a[q] >= c[q] & d[k] > 1", "y[q] <= z[q] & 1 < x[k]"): "t0[q] <= t1[q] & t2[k] >= 2",
    ("(a[q] > 0 | c[q] > 0) & a[k] > 0", "c[k] > 0 & (c[q] > 0 | d[q] > 0)", "(c[q] > 0 | d[q] > 0) & d[k] > 0"):
        "t0[k] >= 1 & (t0[q] >= 1 | t1[q] >= 1)",
    ("a[q] == c[k] & c[q] == a[k]", "x[q] == y[k] & x[k] == y[q]"): "t0[q] == t1[k] & t1[q] == t0[k]",
    ("q - k < w & q - k > -v", "-w < q - k & v > q - k"): "q - k > -s0 & q - k < s1",
    ("min(q, min(w, v)) >= k", "k <= min(v, min(q, w))"): "q >= k & k <= s0 & k <= s1",
    ("abs(a[q] - c[k]) < 3", "abs(a[k] - c[q]) < 3"): "t0[q] - t1[k] >= -2 & t0[q] - t1[k] <= 2",
    ("a[q] * c[k] * w > 0", "w * (a[k] * c[q]) > 0"): "s0 * t0[q] * t1[k] >= 1",
    ("abs(w - v) % 3 == b", "abs(x - y) % 3 == b"): "b == abs(s0 - s1) % 3",
}  # fmt: skip


@pytest.mark.parametrize("texts", ALIKE, ids=lambda t: t[0])
def test_texts_of_one_mask_have_one_canonical_expr(texts):
    found = {canonical(read(t, kind="mask").mask).expr for t in texts}
    assert [show(e) for e in found] == [ALIKE[texts]]


def test_names_lead_back():
    found = canonical(read("doc[q] == doc[k] & q - k < w & q < limit[b]", kind="mask").mask)
    assert found.names == {"s0": "w", "t0": "doc", "t1": "limit"}
    back = renamed(found.expr, found.names)
    assert simplify(back) is simplify(read("doc[q] == doc[k] & q - k < w & q < limit[b]", kind="mask").mask)


def shuffled(e: Expr, rng: random.Random) -> Expr:
    """`e` with operands that commute in another order, comparisons turned round, sums of Ints regrouped."""
    done: dict[Expr, Expr] = {}
    for node in ir.walk(e):
        args = [done[a] for a in node.args]
        if node.op in ("and", "or"):
            rng.shuffle(args)
            done[node] = build(node.op, *args)
        elif node.op in SWAPPED and rng.random() < 0.5:
            done[node] = build(SWAPPED[node.op], *args[::-1])
        elif node.op in PAIRS and rng.random() < 0.5:
            left, right = args
            if node.type is INT and right.op == node.op and rng.random() < 0.5:  # x + (y + z) is (x + y) + z
                left, right = build(node.op, left, right.args[0]), right.args[1]
            done[node] = build(node.op, right, left)
        else:
            done[node] = ir.rebuild(node, tuple(args))
    return done[e]


def other_names(e: Expr, rng: random.Random) -> Expr:
    scalars, tables = ir.free_names(e)
    extents = [n.name[0] for n in ir.walk(e) if n.op == "extent"]
    names = sorted({*scalars, *tables, *extents})
    return renamed(e, dict(zip(names, rng.sample([f"n{i}" for i in range(30)], len(names)), strict=True)))


def known_limit(e: Expr) -> bool:
    """Numbers near 64 bits stay where they were written, and `&` of a literal and two more Ints becomes division
    before the three are put in order."""
    large = any(n.op == "lit" and n.type is INT and abs(n.name) >= 2**61 for n in ir.walk(e))
    return large or any(n.op == "bitand" and any(a.op == "bitand" for a in n.args) for n in ir.walk(e))


def one_case(seed: tuple) -> None:
    rng = random.Random(f"canonical {seed}")
    everything = Everything(rng)
    e = masks.random_mask(rng, depth=4) if seed[-1] % 2 else everything.of(rng.choice([BOOL, INT, FLOAT]), 4)
    found = canonical(e)
    assert canonical(found.expr).expr is found.expr
    assert simplify(found.expr) is found.expr
    other = shuffled(other_names(e, rng), rng)
    again = canonical(other)
    assert again.expr is found.expr or known_limit(e), (show(e), show(other), show(found.expr), show(again.expr))


@pytest.mark.parametrize("part", range(5))
def test_neither_names_nor_order_matter(part):
    for seed in range(60):
        one_case((part, seed))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_neither_names_nor_order_matter_often(part):
    for seed in range(2000):
        one_case(("slow", part, seed))
