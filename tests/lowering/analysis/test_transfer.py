"""Every transfer function contains every concrete value, over all small rectangles; what it calls attained or
dense is. The questions built on them are one-sided."""

from __future__ import annotations

import itertools
import random
from functools import cache

import numpy as np
import pytest
from support import masks
from support.tiers import thinned

from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import FLOAT_FUNCTIONS, KV_LEN, Expr, build, lit, lookup, segment
from frisket.dsl.sugar import eq, k, q
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.analysis.intervals import TRANSFER, ends
from frisket.lowering.analysis.questions import always, mixed, never, some
from frisket.lowering.analysis.table import Table
from frisket.lowering.analysis.tiles import Scope
from frisket.lowering.simplify import simplify

N = 6
TABLES = {
    "t": np.array([4, -2, 7, 0, 0, -5, 1, 3]), "g": np.arange(30).reshape(5, 6)[::-1] % 7 - 3,
    "f": np.array([0.5, np.nan, -1.0, np.inf, 2.0, -np.inf, 0.0]), "off": np.array([0, 2, 3, 7]),
    "s": np.arange(8) % 3 == 1, "m": np.eye(7, 6) > 0,
}  # fmt: skip
INT_ATOMS = [q - 2, 3 - k, q - k, 2 * q - 3, lit(-4), lookup("t", (k,))]
FLOAT_ATOMS = [build("float", q - 2), build("float", k) * 0.5, lookup("f", (k,), FLOAT), lit(-1.5)]
BOOLS = [q >= k, k < 3, (q - k) % 2 >= 1]


def expressions_of(op: str) -> list[Expr]:
    """The operator over atoms that share variables, do not, vary, do not, and hold NaN and inf."""
    if op == "lookup":
        two = [lookup("g", (q, k)), lookup("g", (lit(2), q - k))]
        return [lookup("t", (a,)) for a in INT_ATOMS] + two + [FLOAT_ATOMS[2]]
    if op == "segment":
        return [segment("off", a) for a in INT_ATOMS]
    if op == "where":
        return [build("where", c, x, y) for c in BOOLS for x, y in itertools.permutations(INT_ATOMS[:4], 2)]
    if op == "int":
        return [build("int", x) for x in (*BOOLS, *FLOAT_ATOMS)]
    if op in ("floor", *FLOAT_FUNCTIONS):
        return [build(op, x) for x in FLOAT_ATOMS]
    if op in ("neg", "abs", "sign", "float"):
        return [build(op, x) for x in INT_ATOMS + (FLOAT_ATOMS if op != "float" else [])]
    if op in ("shl", "shr"):
        return [build(op, x, lit(n)) for x in INT_ATOMS for n in (0, 1, 3)]
    pairs = [] if op == "div" else list(itertools.product(INT_ATOMS, INT_ATOMS))
    out = [build(op, x, y) for x, y in pairs]
    if op in ("floordiv", "mod"):
        return out + [build(op, x, lit(n)) for x in INT_ATOMS for n in (-3, -1, 1, 2, 5)]
    if op == "bitand":
        return out + [build(op, x, lit(5)) for x in INT_ATOMS]
    return out + [build(op, x, y) for x, y in itertools.product(FLOAT_ATOMS, FLOAT_ATOMS)]


@cache
def rectangles():
    sides = [(a, b) for a in range(N) for b in range(a, N)]
    pairs = np.array(list(itertools.product(sides, sides)))
    return pairs[:, 0, 0], pairs[:, 0, 1], pairs[:, 1, 0], pairs[:, 1, 1]


def corners():
    q0, q1, k0, k1 = rectangles()
    return {"q0": q0, "q1": q1, "k0": k0, "k1": k1, "b": 0, "h": 0, "KV_LEN": 9}


QUERIES, KEYS = np.arange(N)[:, None], np.arange(N)[None, :]


@cache
def inside_of_rectangles():
    q0, q1, k0, k1 = (x[:, None, None] for x in rectangles())
    return (q0 <= QUERIES) & (q1 >= QUERIES) & (k0 <= KEYS) & (k1 >= KEYS)


def dense_values(e):
    """`e` at every point of every rectangle: [rectangles, N, N], and which points lie inside."""
    inside = inside_of_rectangles()
    value = evaluate(e, {"q": QUERIES, "k": KEYS, "b": 0, "h": 0, "KV_LEN": 9}, TABLES)
    return np.broadcast_to(value, inside.shape), inside


@pytest.fixture(scope="module")
def scope():
    return Scope({}, {n: Table(t) for n, t in TABLES.items()})


@pytest.mark.parametrize("op", TRANSFER)
def test_ends_contain_every_value(op, scope):
    for e in expressions_of(op):
        contains(e, scope)


def contains(e, scope):
    r = ends(e)
    value, inside = dense_values(e)
    n = len(value)

    def end(x):
        return np.broadcast_to(scope.value(x, corners()), (n,))

    may_be_nan = end(r.nan)
    if e.type is FLOAT:
        nan = (np.isnan(value) & inside).any(axis=(1, 2))
        assert (may_be_nan | ~nan).all(), e
        inside = inside & ~np.isnan(value)
    low = np.where(inside, value, np.inf).min(axis=(1, 2))
    high = np.where(inside, value, -np.inf).max(axis=(1, 2))
    sure = ~may_be_nan if e.type is FLOAT else np.ones(n, bool)
    if r.lo is not None:
        assert (end(r.lo) <= low)[sure].all(), e
    if r.hi is not None:
        assert (end(r.hi) >= high)[sure].all(), e
    if r.attained and e.type is INT:
        assert (end(r.lo) == low).all(), e
        assert (end(r.hi) == high).all(), e
    if r.dense and e.type is INT:
        for i in range(0, n, 7):
            seen = np.unique(value[i][inside[i]])
            assert len(seen) == seen[-1] - seen[0] + 1, e


def test_transfer_table_lacks_only_the_unbounded_operators():
    """An operator without a transfer function is one whose range nothing is known of, on purpose."""
    unknown = {"bitor", "bitxor", "bitnot", "pow", "random", "sin", "cos", "tan", "erf", "rsqrt"}
    assert not unknown & set(TRANSFER)
    assert FLOAT_FUNCTIONS - set(TRANSFER) <= unknown


def test_answers_are_text():
    mask = simplify((q >= k) & eq(lookup("doc", (q,)), lookup("doc", (k,))) & lookup("map", (q // 16, k), BOOL))
    assert repr(never(mask)) == (
        "q1 < k0 | min(doc[q0..q1]) > max(doc[k0..k1]) | max(doc[q0..q1]) < min(doc[k0..k1])"
        " | ~any(map[q0 // 16..q1 // 16, k0..k1])"
    )
    assert repr(always((q >= k) & (q - k <= 255))) == "q0 >= k1 & q1 - k0 <= 255"


@pytest.mark.parametrize("seed", thinned(range(60)))
def test_questions_are_one_sided(seed, scope):
    rng = random.Random(f"questions {seed}")
    one_sided(simplify(clause(rng, 3)), scope)


def one_sided(mask, scope):
    value, inside = dense_values(mask)
    all_true = (value | ~inside).all(axis=(1, 2))
    any_true = (value & inside).any(axis=(1, 2))
    env = {**corners(), "single": np.ones(len(value), bool), "tk": corners()["k1"] - corners()["k0"] + 1}
    assert not (scope.value(always(mask), env) & ~all_true).any()
    assert not (scope.value(never(mask), env) & any_true).any()
    assert not (scope.value(some(mask), env) & ~any_true).any()
    assert not (scope.value(mixed(mask), env) & (all_true | ~any_true)).any()


def clause(rng, depth):
    """A mask over the atoms above."""
    pick = rng.random()
    if depth and pick < 0.5:
        return build(rng.choice(["and", "or", "xor"]), clause(rng, depth - 1), clause(rng, depth - 1))
    if depth and pick < 0.6:
        return build("not", clause(rng, depth - 1))
    op = rng.choice(["lt", "le", "gt", "ge", "eq", "ne"])
    if rng.random() < 0.2:
        return build(op, rng.choice(FLOAT_ATOMS), rng.choice(FLOAT_ATOMS))
    kind = rng.choice(sorted(set(TRANSFER) - FLOAT_FUNCTIONS - {"div", "floor", "float"}))
    values = [e for e in expressions_of(kind) if e.type is INT]
    return build(op, rng.choice(values), rng.choice([*INT_ATOMS, lit(1), KV_LEN - 5]))


def test_bounds_on_q_k_and_their_difference_are_exact(scope):
    """Conjunctions of such bounds are decided on every rectangle, not merely soundly."""
    for seed in range(80):
        rng = random.Random(f"bounds {seed}")
        sides = [(rng.choice(["ge", "le"]), rng.choice([q, k, q - k]), rng.randrange(-3, 6)) for _ in range(4)]
        parts = [build(op, form, lit(bound)) for op, form, bound in sides]
        mask = simplify(build("and", *parts))
        if mask.type is BOOL and mask.op == "lit":
            continue
        value, inside = dense_values(mask)
        any_true = (value & inside).any(axis=(1, 2))
        np.testing.assert_array_equal(np.broadcast_to(scope.value(never(mask), corners()), any_true.shape), ~any_true)
        all_true = (value | ~inside).all(axis=(1, 2))
        np.testing.assert_array_equal(np.broadcast_to(scope.value(always(mask), corners()), any_true.shape), all_true)


def test_written_masks_are_settled_without_single_elements():
    """How many tiles are settled element by element, per mask; 0 unless a reason is given."""

    reasons = {
        "random": "no structure at all", "bits": "no transfer function for xor of bits",
        "mixed-documents": "documents in pieces", "early-documents": "a gap at the head of each document",
        "tree": "the table is indexed by both coordinates", "tile-map": "tiles of the map that no witness hits",
        "global-tokens": "a token that no witness hits", "bias": "floats", "nan-bias": "NaN has no place in a range",
        "per-query-window": "bounds by table, beside a diagonal",
        "neighbourhood": "columns of the image: k % width and k // width in one tile",
        "log": "NaN below the domain of a logarithm has no place in a range",
        "zero-divisor": "a divisor that may be 0",
        "sliding-varying": "q and q // 2 in one comparison: their ranges are taken apart",
    }  # fmt: skip
    for name, mask in masks.written().items():
        case = masks.case(mask, random.Random(f"settled {name}"))
        case.block, case.origin, case.sizes = (16, 16), (0, 0, 0, 0), (2, 3, 300, 300)
        case.q_len = case.kv_len = 300
        found = case.analysed(simplify(mask))
        assert found.settled == 0 or name in reasons, (name, found.settled)
