"""The evaluator of the page against the interpreter, and its explanations against `explain`."""

import itertools
import math
import random
import struct

import numpy as np
import pytest
from support.lowering import expressions

from frisket.dsl import ir
from frisket.dsl.errors import EvaluationError
from frisket.dsl.evaluate import OPERATORS, evaluate
from frisket.dsl.explain import explain
from frisket.dsl.ir import build, lit, walk
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.runtime.draw import html
from runtime.draw import javascript

pytestmark = pytest.mark.skipif(javascript.WHY_NOT is not None, reason=str(javascript.WHY_NOT))

# every value of every program; what JSON has no word for goes as text
VALUES = """async (programs) => {
  const said = (x) => typeof x === "bigint" || (typeof x === "number" && !Number.isFinite(x)) ? String(x) : x;
  const out = [];
  for (const { program, at } of programs) {
    const mask = await unpackedMask(program);
    out.push(at.map((position) => {
      try {
        return said(mask.run(...position));
      } catch (error) {
        if (!(error instanceof NoValue)) throw error;
        return { error: error.message };
      }
    }));
  }
  return out;
}"""


def in_javascript(cases):
    """Values of (expr, scalars, tables, positions) there."""
    given = [{"program": html.program(e, s, t), "at": at} for e, s, t, at in cases]
    return javascript.run(VALUES, given)


def here(e, scalars, tables, at):
    env = {**scalars, **dict(zip("bhqk", at))}
    try:
        return evaluate(e, env, tables).item()
    except EvaluationError as error:
        return error


def same(want, got, type):
    if isinstance(want, EvaluationError) or isinstance(got, dict):
        return isinstance(got, dict) and str(want).startswith(got["error"])
    if type is INT:
        return want == int(got)
    if type is BOOL:
        return want is got
    got = float(got)
    # the functions of C and of JavaScript may differ in their last bits
    return (math.isnan(want) and math.isnan(got)) or want == got or math.isclose(want, got, rel_tol=1e-12)


def check(cases):
    compare(cases, in_javascript(cases))


def compare(cases, answers):
    for (e, scalars, tables, positions), found in zip(cases, answers, strict=True):
        for at, got in zip(positions, found, strict=True):
            want = here(e, scalars, tables, at)
            assert same(want, got, e.type), f"{e!r} at {at}: {want!r} here, {got!r} there"


INTS = [0, 1, -1, 2, -7, 31, 63, 64, 2**31 - 1, 2**31, -(2**31), 2**53 - 1, 2**53 + 1, -(2**53), 2**62, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 4.5, 7.25, 1e-9, 1e16, -2.5e300, math.inf, -math.inf, math.nan]
SAMPLES = {INT: [lit(n) for n in INTS], FLOAT: [lit(x) for x in FLOATS], BOOL: [lit(True), lit(False)]}
SHAPES = {
    op: n for ops, n in (("neg abs sign bitnot not int float floor isfinite", 1), ("where", 3)) for op in ops.split()
}


def applications(op):
    """The operator over every combination of samples it takes."""
    if op == "random":
        small = SAMPLES[INT][:8]
        return [ir.random(*args) for args in itertools.product(small, small)] + [ir.random(lit(n)) for n in INTS]
    if op == "pow":
        ints = [build(op, x, lit(n)) for x in SAMPLES[INT] for n in (0, 1, 2, 3, 7, 70)]
        return ints + [build(op, *args) for args in itertools.product(SAMPLES[FLOAT], repeat=2)]
    count = SHAPES.get(op, 1 if op in ir.FLOAT_FUNCTIONS else 2)
    found = []
    for types in itertools.product((BOOL, INT, FLOAT), repeat=count):
        try:
            build(op, *(SAMPLES[t][0] for t in types))
        except TypeError:
            continue
        found += [build(op, *args) for args in itertools.product(*(SAMPLES[t] for t in types))]
    if op == "wrap":
        ints = itertools.product("add sub mul shl".split(), SAMPLES[INT], SAMPLES[INT], (8, 32, 64))
        found += [build(op, build(inner, x, y), lit(bits)) for inner, x, y, bits in ints]
    return found


@pytest.fixture(scope="module")
def applied():
    """For every operator: cases, and their values in JavaScript."""
    cases = {op: [(e, {}, {}, [(0, 0, 0, 0)]) for e in applications(op)] for op in OPERATORS}
    answers = iter(in_javascript([case for some in cases.values() for case in some]))
    return {op: (some, list(itertools.islice(answers, len(some)))) for op, some in cases.items()}


@pytest.mark.parametrize("op", OPERATORS)
def test_javascript_operators_equal_the_reference(applied, op):
    cases, answers = applied[op]
    assert len(cases) >= 2
    compare(cases, answers)


TABLES = {
    "doc": np.sort(np.random.default_rng(1).integers(0, 9, 40)),
    "pair": np.random.default_rng(2).integers(-5, 9, (4, 6)),
    "slope": np.random.default_rng(3).standard_normal(5).astype(np.float32),
    "bias": np.random.default_rng(4).standard_normal((2, 3, 4, 5)),
    "seen": np.random.default_rng(5).random(7) < 0.5,
    "near": np.random.default_rng(6).random((5, 5)) < 0.5,
}
SCALARS = {
    "w": 7,
    "n": -3,
    "p": 0.75,
    "x": -1.5,
    "flag": True,
    "deep": False,
    "B": 3,
    "H": 4,
    "Q_LEN": 40,
    "KV_LEN": 50,
}


def steady(e):
    """Sines of small numbers only: of a huge one, the last bit of the number is everything."""
    if e.op not in ("sin", "cos", "tan"):
        return e
    return build(e.op, build("min", build("max", e.args[0], lit(-50.0)), lit(50.0)))


def anything(seed, count):
    for i in range(count):
        rng = random.Random(1_000_003 * seed + i)
        e = expressions.Everything(rng, with_score=False).of(rng.choice([BOOL, INT, FLOAT]), rng.randint(1, 5))
        e = ir.transform(e, steady)
        at = [tuple(rng.randrange(n) for n in (3, 4, 40, 50)) for _ in range(4)]
        yield e, SCALARS, TABLES, [at[0], at[0][:3] + at[1][3:], at[0][:2] + at[2][2:], at[3]]


def test_javascript_of_random_expressions_equals_the_reference():
    cases = list(anything(0, 500))
    assert {n.op for e, *_ in cases for n in walk(e)} >= set(OPERATORS) - {"rsqrt", "wrap"}
    check(cases)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_random_expressions(seed):
    check(list(anything(seed, 2500)))


LARGE = np.array([2**40, -(2**60), 2**62, 5])
KINDS = {
    "i1": np.array([-3, 7, 100], np.int8), "i4": np.array([2**31 - 1, -(2**31), 0, 17], np.int32), "i8": LARGE,
    "f2": np.array([0.5, -2.0], np.float16), "f4": np.array([0.1, 1e30], np.float32), "f8": np.array([0.1, -1e300]),
    "bool": np.array([True, False, True]),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_tables_arrive_as_they_are(kind):
    table = KINDS[kind]
    type = {"b": BOOL, "f": FLOAT}.get(table.dtype.kind, INT)
    e = ir.lookup("t", (ir.var("k") - 1,), type)  # clamped at both ends
    check([(e, {}, {"t": table}, [(0, 0, 0, k) for k in range(len(table) + 3)])])


EXPLAINED = """async (programs) => {
  const out = [];
  for (const { program, at } of programs) {
    const mask = await unpackedMask(program);
    out.push(at.map((position) => mask.explain(...position)));
  }
  return out;
}"""


def test_explanations_are_the_same():
    given, want = [], []
    for seed in range(50):
        rng = random.Random(seed)
        case = expressions.random_mask(rng, 30, 40, 2, 3)
        scalars = {**case.params, "B": 2, "H": 3, "Q_LEN": 30, "KV_LEN": 40}
        at = [tuple(rng.randrange(n) for n in (2, 3, 30, 40)) for _ in range(6)]
        given.append({"program": html.program(case.expr, scalars, case.tables), "at": at})
        nodes = list(walk(case.expr))
        for position in at:
            found = explain(case.expr, {**scalars, **dict(zip("bhqk", position))}, case.tables)
            clauses = [nodes.index(c) for c in found.clauses]
            want.append({"visible": found.visible, "clauses": clauses, "because": found.because})
    got = [answer for answers in javascript.run(EXPLAINED, given) for answer in answers]
    assert got == want
    assert {answer["visible"] for answer in got} == {True, False}


def test_numbers_are_printed_as_python_prints_them():
    rng = np.random.default_rng(0)
    bits = [struct.unpack("<d", rng.bytes(8))[0] for _ in range(2000)]
    short = [float(f"{m}e{e}") for m in ("1", "-2.5", "1.2345", "9.99") for e in range(-8, 25)]
    numbers = [x for x in [0.0, -0.0, 1.0, 1e16, 123456789012345.6, *bits, *short] if math.isfinite(x)]
    texts = javascript.run("async (given) => given.map((x) => printed(Number(x), 'F'))", [repr(x) for x in numbers])
    assert texts == [repr(x) for x in numbers]
    whole = javascript.run("async (given) => given.map((x) => printed(-x * 0, 'I') + printed(BigInt(x), 'I'))", [5])
    assert whole == ["05"]
