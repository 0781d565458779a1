"""Derivatives of score mods, row by row and at random, beside central differences in float64."""

from __future__ import annotations

import math
import random

import cases
import numpy as np
import pytest
from support.lowering import expressions
from support.lowering.expressions import Everything

from frisket.dsl import ir
from frisket.dsl.errors import EvaluationError, LoweringError
from frisket.dsl.evaluate import OPERATORS, evaluate, unroll
from frisket.dsl.ir import Expr, build, lit, lookup, param, to_float, walk
from frisket.dsl.show import show
from frisket.dsl.sugar import b, eq, function, h, k, maximum, minimum, q, score, where
from frisket.dsl.types import BOOL, FLOAT
from frisket.lowering.dense import coordinates
from frisket.lowering.derive import DERIVATIVES, FLAT, backward_of, derivatives, formula_of, over
from frisket.lowering.pipeline import work
from frisket.lowering.plan import Problem
from frisket.lowering.simplify import simplify
from frisket.runtime.calls.program import program_of

RNG = np.random.default_rng(3)
X, Y = param("x", FLOAT), param("y", FLOAT)


# -- every row of the table -----------------------------------------------------------------------


def operands(op: str) -> tuple[Expr, ...]:
    if op == "where":
        return (X * Y > 0.1, X, Y)
    two = ir.result_type(op, (FLOAT, FLOAT)) is not None and op in ("add", "sub", "mul", "div", "pow", "min", "max")
    return (X, Y) if two else (X,)


def slopes(e: Expr, env: dict) -> dict[str, float]:
    found = derivatives(e)
    return {g.source: float(evaluate(g.weight, env)) for g in found.gradients}


def differences(e: Expr, env: dict, name: str, step: float = 1e-6) -> float:
    up, down = (evaluate(e, env | {name: env[name] + d}) for d in (step, -step))
    return float(up - down) / (2 * step)


def test_derivative_table_has_each_float_operator():
    floats = {
        op for op in OPERATORS if op not in ("random", "and", "or", "float")
        and any(
            ir.result_type(op, types[:n]) is FLOAT
            for types in ((FLOAT, FLOAT, FLOAT), (BOOL, FLOAT, FLOAT)) for n in (1, 2, 3) if n > 1 or op != "where"
            if not (op == "where" and n < 3)
        )
    }  # fmt: skip
    assert floats == set(DERIVATIVES) | (FLAT - {"float", "random"})


@pytest.mark.parametrize("op", sorted(DERIVATIVES))
def test_derivative_of_an_operator_equals_central_differences(op):
    e = build(op, *operands(op))
    positive = op in ("log", "log2", "sqrt", "rsqrt", "pow")
    compared = 0
    for _ in range(40):
        x, y = RNG.standard_normal(2) * 1.5
        if positive:
            x = abs(x) + 0.05
        if op == "log1p":
            x = abs(x) - 0.9
        env = {"x": x, "y": y}
        if (op in ("min", "max", "where") and abs(x - y) < 1e-3) or abs(x * y - 0.1) < 1e-3:
            continue
        got = slopes(e, env)
        for name in "xy"[: sum(a.type is FLOAT for a in e.args)]:
            want = differences(e, env, name)
            assert got[name] == pytest.approx(want, rel=1e-6, abs=1e-7), (op, env, name)
            compared += 1
    assert compared > 30


nan, inf = math.nan, math.inf
EDGES = [  # expression, x, y, derivative by x, by y: what torch gives
    (abs(X), 0.0, 1.0, 0.0, 0.0),
    (function("sqrt", X), 0.0, 1.0, inf, 0.0),
    (function("log", X), 0.0, 1.0, inf, 0.0),
    (X / Y, 1.0, inf, 0.0, 0.0),
    (X**Y, 0.0, 0.0, 0.0, 0.0),
    (X**Y, 0.0, 2.0, 0.0, 0.0),
    (X**Y, 0.0, 1.0, 1.0, 0.0),
    (X**Y, 2.0, 0.0, 0.0, math.log(2)),
    (X**0.0, 0.0, 1.0, 0.0, 0.0),
    (X**2.0, -3.0, 1.0, -6.0, 0.0),
    (X**3.0, -2.0, 1.0, 12.0, 0.0),
    (X**-1.0, 2.0, 1.0, -0.25, 0.0),
    (maximum(X, Y), 1.0, 1.0, 0.5, 0.5),
    (minimum(X, Y), 1.0, 1.0, 0.5, 0.5),
    (maximum(X, 0.0), 0.0, 1.0, 0.0, 0.0),  # torch.relu
    (maximum(0.0, X), 0.0, 1.0, 0.0, 0.0),
    (minimum(maximum(X, -1.0), 1.0), 0.5, 1.0, 1.0, 0.0),
    (minimum(maximum(X, -1.0), 1.0), 3.0, 1.0, 0.0, 0.0),
    (build("sign", X) * Y, 2.0, 3.0, 0.0, 1.0),
    (X * X, 3.0, 1.0, 6.0, 0.0),
    (X + X, 3.0, 1.0, 2.0, 0.0),
    (X * Y * X, 3.0, 2.0, 12.0, 9.0),
    # branches not taken, whose slopes are infinite or NaN
    (where(X > 0.0, function("sqrt", X), 0.0), 0.0, 1.0, 0.0, 0.0),
    (where(X > 0.0, function("log", X) * Y, Y), -1.0, 2.0, 0.0, 1.0),
    (where(X > 0.0, Y * function("rsqrt", X), X), 0.0, 2.0, 1.0, 0.0),
    (where(eq(Y, 0.0), 0.0, X / Y), 2.0, 0.0, 0.0, 0.0),
    (maximum(function("log", X), Y), 0.0, 1.0, 0.0, 1.0),
    (minimum(X / Y, 5.0), 1.0, 0.0, 0.0, 0.0),
    (where(X > 0.0, function("exp", X * 1e3), X), -1.0, 1.0, 1.0, 0.0),
    # the operand that both branches share
    (where(X > 0.0, function("log", X), X) + X, 2.0, 1.0, 1.5, 0.0),
    (where(X > 0.0, function("log", X), X) + X, 0.0, 1.0, 2.0, 0.0),
    (function("log", maximum(X, 0.0)), 0.0, 1.0, 0.0, 0.0),
    (function("sigmoid", X), -1e4, 1.0, 0.0, 0.0),
    (function("tanh", X), 1e4, 1.0, 0.0, 0.0),
]


@pytest.mark.parametrize("edge", EDGES, ids=lambda t: f"{t[0]} at {t[1]}, {t[2]}")
def test_derivative_at_an_edge_is_the_listed_one(edge):
    e, x, y, dx, dy = edge
    got = {"x": 0.0, "y": 0.0} | slopes(e, {"x": x, "y": y})
    assert got == pytest.approx({"x": dx, "y": dy}, nan_ok=True)


def test_derivatives_through_ints_and_bools_are_zero():
    t = lookup("t", (h,), FLOAT)
    step = to_float(build("floor", t)) + where(t > 0.5, 1.0, 2.0) + build("sign", t) + to_float(build("int", X))
    found = derivatives(score + step)
    assert found.slope is None
    assert found.gradients == ()
    assert derivatives(to_float(q - k)).slope is lit(0.0)


def test_a_reduction_is_written_out_first():
    with pytest.raises(LoweringError, match="`reduce` has no derivative; write it out before asking for gradients"):
        derivatives(ir.reduce("sum", lit(0), lit(3), lambda j: score * to_float(j)))


def test_text_of_slopes():
    cap = lit(50.0)
    for c in (cap, ir.to_float(lit(50))):
        slope = derivatives(c * function("tanh", score / c)).slope
        assert show(slope) == "1.0 - tanh(score / 50.0) * tanh(score / 50.0)"
    relu = derivatives(function("log", maximum(score, 0.0) + 1.0))
    assert show(relu.slope) == "where(score > 0.0, 1.0 / (max(score, 0.0) + 1.0), 0.0)"
    assert relu.guard
    assert not derivatives(cap * function("tanh", score / cap)).guard


# -- random expressions -----------------------------------------------------------------------------

SHAPE = (2, 2, 5, 6)
TABLES = {
    "doc": np.array([0, 3, 4, 9, 9, 12]), "pair": RNG.integers(-9, 9, (5, 4)), "slope": RNG.standard_normal(5),
    "bias": RNG.standard_normal((2, 2, 3, 3)), "seen": np.arange(7) % 3 == 0, "near": RNG.random((4, 5)) < 0.5,
}  # fmt: skip
ENV = coordinates(Problem(*SHAPE[2:], *SHAPE[:2])) | {
    "w": 3,
    "n": -2,
    "p": 0.75,
    "x": -1.5,
    "flag": True,
    "deep": False,
}
SCORES = RNG.standard_normal(SHAPE)


def value(e: Expr, move: str, by: float) -> np.ndarray:
    env, tables = {**ENV, "score": SCORES}, dict(TABLES)
    if move in tables:
        tables[move] = tables[move] + by
    else:
        env[move] = env[move] + by
    return np.broadcast_to(evaluate(e, env, tables), SHAPE)


def directional(e: Expr, move: str) -> np.ndarray:
    """The derivative of `e` at every position, when a name's value (all of a table's) moves by 1."""
    found, env = derivatives(e), {**ENV, "score": SCORES}
    if move == "score":
        return np.broadcast_to(1.0 if found.slope is None else evaluate(found.slope, env, TABLES), SHAPE)
    parts = [evaluate(g.weight, env, TABLES) for g in found.gradients if g.source == move]
    return np.broadcast_to(sum(parts, np.zeros(SHAPE)), SHAPE)


TAME = {lit(1e16): lit(1.5), lit(-2.5e30): lit(-2.5), lit(1e-5): lit(0.3)}  # sums with these have no digits left


def fuzz(seed: object) -> tuple[int, int]:
    """(positions where a derivative that is not 0 was compared, positions where it is NaN for nothing)."""
    rng = random.Random(f"derive {seed}")
    e = ir.substitute(Everything(rng).of(FLOAT, rng.randrange(2, 6)), TAME)
    compared = poisoned = 0
    try:
        e = unroll(ir.substitute(e, {n: lit(TABLES[n.name[0]].shape[n.name[1]]) for n in walk(e) if n.op == "extent"}))
        for name in ("score", "p", "x", "slope", "bias"):
            if not any(n.name == name for n in walk(e)):
                continue
            got = directional(rng.choice((e, simplify(e))), name)
            middle = value(e, name, 0.0)
            with np.errstate(all="ignore"):
                ends = {by: value(e, name, by) for by in (-2e-5, -1e-5, 1e-5, 2e-5)}
                coarse, fine = ((ends[s] - ends[-s]) / (2 * s) for s in (2e-5, 1e-5))
                bent = np.abs(ends[1e-5] + ends[-1e-5] - 2 * middle) / 1e-5  # a step or a pole between
                size = 1 + np.abs(middle)
                noise = 1e-10 * size / 1e-5
                smooth = np.isfinite(fine) & (np.abs(coarse - fine) <= 1e-6 * np.abs(fine) + noise) & (size < 1e8)
                smooth &= bent <= 1e-2 * np.abs(fine) + noise
                near = np.abs(got - fine) <= 1e-4 * np.abs(fine) + 10 * noise
            lost = smooth & ~np.isfinite(got)
            assert (near | lost | ~smooth).all(), (show(e), name)
            compared += int((smooth & near & (np.abs(fine) > 1e-3)).sum())
            poisoned += int(lost.sum())
    except EvaluationError:
        pass
    return compared, poisoned


def many(seeds: range) -> None:
    counts = np.array([fuzz(i) for i in seeds]).sum(0)
    assert counts[0] > 8 * len(seeds), counts  # most draws have no smooth Float in them
    assert counts[1] < 0.05 * counts[0], counts  # 0 * sqrt(0): torch has NaN there too


def test_derivatives_of_random_expressions():
    many(range(400))


@pytest.mark.slow
def test_more_random_expressions():
    many(range(400, 12_000))


# -- the library ----------------------------------------------------------------------------------

S = 16
MODS = cases.mods(S)


@pytest.mark.parametrize("name", sorted(MODS))
def test_derivatives_of_library_score_mods(name):
    case = MODS[name]
    made = work(program_of(None, case.text, case.make()), Problem(S, S, case.batch, case.heads), (16, 16))
    plan = made.plan
    found = backward_of(plan)
    assert backward_of(plan) is found
    shape = (case.batch, case.heads, S, S)
    tables = {n: t.astype(np.float64) if t.dtype.kind == "f" else t for n, t in made.tables.items()}
    env = {
        **coordinates(Problem(*shape[2:], *shape[:2])),
        **made.slots,
        "score": np.random.default_rng(1).standard_normal(shape) * 3,
    }

    def at(move: str, by: float) -> np.ndarray:
        new, moved = dict(env), dict(tables)
        (new if move in new else moved)[move] = (new if move in new else moved)[move] + by
        return np.broadcast_to(evaluate(plan.score, new, moved), shape)

    want = (at("score", 1e-6) - at("score", -1e-6)) / 2e-6
    got = 1.0 if found.slope is None else evaluate(found.slope, env, tables)
    np.testing.assert_allclose(np.broadcast_to(got, shape), want, rtol=1e-5, atol=1e-6)
    floats = {t.name for t in plan.tables if t.type is FLOAT}
    assert {g.source for g in found.gradients} == floats
    for table in floats:
        sites = [evaluate(g.weight, env, tables) for g in found.gradients if g.source == table]
        want = (at(table, 1e-6) - at(table, -1e-6)) / 2e-6
        np.testing.assert_allclose(np.broadcast_to(sum(sites), shape), want, rtol=1e-5, atol=1e-6)


def test_where_the_library_sums():
    buffers = {}
    for name, case in MODS.items():
        made = work(program_of(None, case.text, case.make()), Problem(S, S, case.batch, case.heads), (16, 16))
        source = {t.name: t.source for t in made.plan.tables}
        for g in backward_of(made.plan).gradients:
            buffers[name.split("(")[0], source[g.source]] = g.over
    assert buffers == {
        ("alibi", "slopes"): "head", ("relative_bias", "table"): "diagonal", ("t5_bias", "table"): "diagonal",
        ("t5_decoder_bias", "table"): "diagonal", ("rope_bias", "qr"): "row", ("rope_bias", "kr"): "column",
        ("sandwich", "rel"): "diagonal", ("sandwich", "c"): "head", ("sigmoid_gate", "gate"): "head",
        ("scale_by", "t"): "head", ("graphormer", "table"): "scatter", ("graphormer_edges", "table"): "scatter",
    }  # fmt: skip


def test_formula_derivatives_read_leaves_and_no_table():
    """Simplification writes the index of a lookup in another way; the entry is a parameter by then."""
    at = minimum(maximum(q - k, 0), 6)
    formula, leaves = formula_of(score * function("cos", lookup("t", (at,), FLOAT)) + param("c", FLOAT))
    assert [e.op for e in leaves] == ["var", "lookup", "param"]
    (by_score, by_entry, by_number) = formula.derivatives
    assert by_score.derivatives[0] is None
    assert by_number.derivatives == (None, None, None)
    for second in (*by_score.derivatives, *by_entry.derivatives):
        assert second is None or not any(e.op == "lookup" for e in walk(second.expr))
    assert show(by_entry.derivatives[0].expr) == "-1.0 * sin(leaf 1)"


def test_a_learned_cap_is_a_slot():
    made = work(program_of(None, "c * tanh(score / c)", {"c": 2.5}), Problem(S, S), (16, 16))
    (found,) = backward_of(made.plan).gradients
    assert (found.source, found.index, found.over) == (made.plan.slots[0].name, (), "head")


# -- on what an index depends -----------------------------------------------------------------------

C = param("c")
TOGETHER = [
    q - k, k - q, abs(q - k) // 4, (q - k) * (q - k), (q - k) * C, q * C - k * C, C * q - C * k + h, (q + C) - (k - C),
    minimum(maximum(q - k, 0), 5), where(q < k, 16, 0) + where(q >= k + 3, 1, 0), lookup("t", (q - k,)),
    build("int", to_float(q) - to_float(k)), build("floor", function("log", to_float(q - k))), 2 * q - 2 * k,
    h * q - h * k, ir.segment("o", q - k), (q - k) % 8, where(eq(q, k), 1, 2), q * b - b * k + h, C + q - h - k,
    (q - k + C) // C, (q - k) >> 2, (q - k) & 7,
]  # fmt: skip
BUFFERS = {
    "diagonal": TOGETHER,
    "head": [h, b * C, q - q + h, lit(3)],
    "row": [q, q // 4, (q - k) + k, lookup("t", (q,))],
    "column": [k, k * h, k % 3],
    "scatter": [
        q // 4 - k // 4, q + k, q - k + q, q * q - k * k, q * C - k, lookup("t", (q,)) - k, build("floor", score),
        minimum(q, k), q * k, lookup("t", (q, k)), 2 * q - k, (q - k) + q * C - k * C * 2, (q // 2) * 2 - k,
        lookup("d", (q,)) * q - lookup("d", (q,)) * k, where(q > 3, q - k, 0),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("want", "index"), [(o, e) for o, group in BUFFERS.items() for e in group], ids=str)
def test_gradient_buffer_is_indexed_as_listed(want, index):
    assert over((index,)) == want
    assert over((h, simplify(index))) == want


def test_over_of_more_than_one_index():
    assert over(()) == "head"
    assert over((h, q - k)) == "diagonal"
    assert over((q, k)) == "scatter"
    assert over((q, q - k)) == "scatter"


@pytest.mark.parametrize("part", range(4))
def test_gradient_buffer_omits_only_axes_of_no_influence(part):
    """Random indices, evaluated everywhere: they are constant along what `over` says they do not depend on."""
    seen = dict.fromkeys(("head", "row", "column", "diagonal"), 0)
    for seed in range(500):
        rng = random.Random(f"over {part} {seed}")
        case = expressions.Masks(rng, 9, 11, 2, 2)
        e = case.int(4)
        if seed % 2:  # positions that move together
            e = ir.substitute(e, {q: q - k, k: k - q})
        kind = over((e,))
        try:
            value = np.broadcast_to(
                evaluate(e, {**coordinates(Problem(9, 11, 2, 2)), **case.params}, case.tables), (2, 2, 9, 11)
            )
        except EvaluationError:
            continue
        if kind == "diagonal":
            assert (value[..., 1:, 1:] == value[..., :-1, :-1]).all(), show(e)
        elif kind != "scatter":
            axes = {"head": (2, 3), "row": (3,), "column": (2,)}[kind]
            assert (value == np.take(value, [0], axes[-1])).all(), show(e)
            assert len(axes) == 1 or (value == np.take(value, [0], 2)).all(), show(e)
        seen[kind] = seen.get(kind, 0) + 1
    assert min(seen.values()) > 10, seen
