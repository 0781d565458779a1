"""Definitions of operators by others: those of Ints and Bools proved by z3, those of Floats within a bound of the
reference, at samples and at all special values."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import z3

from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import OPERATORS, Expr, build, lit, param, random, result_type, to_float, var, walk
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.kernels import inputs, jnp_expr, torch_mask_mod
from frisket.lowering.kernels.cpp import expr as cpp
from frisket.lowering.kernels.cute import mods as cute
from frisket.lowering.kernels.language import FLOORED, SHARED, SHIFTS, TRUNCATED, Language, calls
from frisket.lowering.kernels.legalise import DECOMPOSITIONS, legalise
from frisket.lowering.kernels.pallas_gpu import expr as pallas_gpu
from frisket.lowering.kernels.triton import expr as triton
from frisket.lowering.planner import cpp as planner_cpp
from frisket.lowering.planner import triton as planner_triton

from ..simplify.z3_terms import Terms

BITS, SHORT = 12, 6  # of a word in proofs; by a variable divisor solvers are slow
ROWS = {op: row for op, row in SHARED.items() if op not in ("xor", "bitnot")}
ROWS |= calls("{}", "abs:abs exp:exp log:log sin:sin cos:cos sqrt:sqrt int:int float:float where:pick")
FEW = Language("few", ROWS | SHIFTS | TRUNCATED, bits=BITS)  # what every language has, and no more
OTHERS = {
    "few": FEW,
    "floored": Language("floored", ROWS | FLOORED, bits=BITS),  # no shifts by sign: literals become products
    "mixed": Language("mixed", ROWS | calls("{}, {}", "lshift:left rshift:right")
                      | {"floor_quotient": "{} // {}", "remainder": "{} % {}"}, bits=BITS),
}  # fmt: skip
LANGUAGES = [
    cpp.DOUBLE, cpp.SINGLE, triton.LANGUAGE, triton.language(int64=True), cute.LANGUAGE, jnp_expr.LANGUAGE,
    jnp_expr.WIDE, pallas_gpu.LANGUAGE, inputs.LANGUAGE, torch_mask_mod.LANGUAGE, planner_cpp.LANGUAGE,
    planner_triton.LANGUAGE, FEW,
]  # fmt: skip


# -- Ints and Bools ---------------------------------------------------------------------------------------


class Words(Terms):
    """Words of `BITS`, of any value but the least, whose quotient by -1 is none."""

    def __init__(self, bits: int) -> None:
        super().__init__(bits)
        self.claims = []  # what a guard has to see to

    def variable(self, name: str, least: int | None = None):
        x = z3.BitVec(name, self.bits)
        self.facts.append(x > -(2 ** (self.bits - 1)) if least is None else x >= least)
        return x

    def node(self, e: Expr, args):
        x, y = args[0], args[-1]
        marked = {
            "quotient": lambda: x / y, "remainder": lambda: z3.SRem(x, y), "lshift": lambda: x << y,
            "rshift": lambda: x >> y, "floor_quotient": lambda: self.quotient(x, y),
            "floor_remainder": lambda: x - y * self.quotient(x, y),
        }  # fmt: skip
        if e.op in ("lshift", "rshift"):  # a shift by more is undefined in C
            self.claims.append(z3.And(y >= 0, y < self.bits))
        if e.op in ("quotient", "remainder", "floor_quotient", "floor_remainder"):
            self.claims.append(y != 0)
        return marked[e.op]() if e.op in marked else super().node(e, args)


def proved(before: Expr, language: Language) -> None:
    terms = Words(SHORT if before.op in ("floordiv", "mod") and before.args[1].op != "lit" else BITS)
    after = legalise(before, language)
    assert {n.op for n in walk(after) if n.args} <= language.operators.keys()
    claim = z3.And(terms(before) == terms(after), *terms.claims)
    solver = z3.Solver()
    solver.set("timeout", 20_000)
    solver.add(*terms.facts, z3.Not(claim))
    assert solver.check() == z3.unsat, f"{before!r} is {after!r}"


def of_ints() -> dict[str, Expr]:
    """Every operator of Ints and Bools that has a definition, on variables and by literals."""
    q, x, y, p, r = var("q"), param("x"), param("y"), param("p", BOOL), param("r", BOOL)
    found = {"not": ~p, "xor": p ^ r}
    for op in sorted(DECOMPOSITIONS.keys() - {"random", "wrap"}):
        for operands in ((x,), (x, y)):
            if len(operands) == OPERATORS[op].arity and result_type(op, (INT,) * len(operands)) and op != "pow":
                found[op] = build(op, *operands)
    for op, n in itertools.product(("floordiv", "mod"), (-7, -1, 0, 1, 3, 8)):
        found[f"{op} by {n}"] = build(op, x, lit(n))
        found[f"{op} of a position by {n}"] = build(op, q, lit(n))
    for op, n in itertools.product(("shl", "shr"), (-1, 0, 3, BITS - 1, BITS, 63, 64)):
        found[f"{op} by {n}"] = build(op, x, lit(n))
    return found | {f"wrap to {n}": build("wrap", x, lit(n)) for n in (1, 5, BITS - 2)}


OF_INTS = of_ints()


# a language without any shift has those by literals alone
CASES = [x for x in itertools.product(OF_INTS, OTHERS) if x not in (("shl", "floored"), ("shr", "floored"))]


@pytest.mark.parametrize(("name", "language"), CASES)
def test_definitions_of_ints_are_proved(name, language):
    proved(OF_INTS[name], OTHERS[language])


def test_a_wrong_definition_of_ints_is_noticed(monkeypatch):
    monkeypatch.setitem(DECOMPOSITIONS, "sign", lambda e, language: build("min", e.args[0], lit(1)))
    with pytest.raises(AssertionError, match="sign"):
        proved(OF_INTS["sign"], FEW)


def test_random_is_a_chain_of_words():
    words = Language("words", ROWS | calls("{}", "seeded:seeded uniform:uniform") | calls("{}, {}", "stirred:stirred"))
    root = legalise(random(param("a"), param("b"), param("c")), words)
    assert [n.op for n in walk(root) if n.args] == ["seeded", "stirred", "stirred", "uniform"]
    assert [n.name for n in walk(root) if not n.args] == ["a", "b", "c"]


# -- Floats -----------------------------------------------------------------------------------------------

TINY, HUGE = np.finfo(np.float64).smallest_subnormal, np.finfo(np.float64).max
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, TINY, -TINY, 1e-310, 2.2e-308, HUGE, -HUGE, 2.0**62, -(2.0**62) - 1024]
WHOLE = [1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 2.0**31 + 1, -(2.0**31) - 1, 2.0**53]
SAMPLES = np.concatenate([SPECIAL, WHOLE, np.linspace(-9, 9, 401), np.geomspace(1e-300, 1e300, 301)])
SOME = np.concatenate([SPECIAL, WHOLE, [0.5, -0.5, 0.3, 1e-9, 7.25, -40.75, 300.0]])
# (relative, absolute) distance to the reference in float64; infinities and NaN are equal
BOUNDS = {
    "tanh": (2e-7, 0), "erf": (0, 1.6e-7), "log1p": (1e-15, 0), "pow": (2e-13, 0), "sigmoid": (1e-15, 1e-15),
    "exp2": (3e-13, 0), "log2": (1e-15, 1e-16), "rsqrt": (4e-16, 0), "tan": (1e-15, 0), "sqrt": (4e-16, 0),
    "floor": (0, 0), "isfinite": (0, 0), "sign": (0, 0), "min": (0, 0), "max": (0, 0),
}  # fmt: skip
WIDE = Language("wide", ROWS | {"rsqrt": "rsqrt({})"}, bits=64)


@pytest.mark.parametrize("op", BOUNDS)
def test_definitions_of_floats_are_near_the_reference(op):
    names = "xy"[: OPERATORS[op].arity]
    e = build(op, *(param(n, FLOAT) for n in names))
    rows = {name: row for name, row in WIDE.operators.items() if name != op}
    language = Language("wide", rows, bits=64)
    after = legalise(e, language)
    assert {n.op for n in walk(after) if n.args} <= rows.keys()
    values = np.meshgrid(*[SAMPLES if len(names) == 1 else SOME] * len(names))
    env = dict(zip(names, values, strict=True))
    want, found = evaluate(e, env), evaluate(after, env)
    if want.dtype.kind != "f":
        np.testing.assert_array_equal(found, want)
    else:
        np.testing.assert_allclose(found, want, *BOUNDS[op])


def test_powers_of_whole_exponents_are_near_the_reference():
    """An exponent that is an Int, as a distance is, is not asked whether it is whole."""
    x, n = param("x", FLOAT), param("n")
    values = np.meshgrid(SOME, [0, 1, -1, 2, -2, 3, -7, 40, 2**40 + 1, -(2**50)])
    env = {"x": values[0], "n": values[1].astype(np.int64)}
    language = Language("wide", {name: row for name, row in WIDE.operators.items() if name != "pow"}, bits=64)
    for e in (x ** to_float(n), x ** (to_float(n) - 1.0), x ** (-to_float(n))):
        after = legalise(e, language)
        assert not {"int", "floor"} & {node.op for node in walk(after)}
        np.testing.assert_allclose(evaluate(after, env), evaluate(e, env), *BOUNDS["pow"])


def test_definitions_of_floats_all_have_a_bound():
    of_floats = {op for op in DECOMPOSITIONS if result_type(op, (FLOAT,) * OPERATORS[op].arity) is not None}
    assert of_floats == BOUNDS.keys()


# -- languages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPERATORS)
def test_languages_can_write_all_operators(op):
    leaves = {INT: param("i"), FLOAT: param("x", FLOAT), BOOL: param("p", BOOL)}
    for types in itertools.product(leaves, repeat=OPERATORS[op].arity):
        if result_type(op, types) is None or (op, types) == ("pow", (INT, INT)):
            continue
        e = build(op, *(leaves[t] for t in types))
        for language in LANGUAGES:
            if op == "random" and language is FEW:
                continue
            left = {n.op for n in walk(legalise(e, language)) if n.args} - language.operators.keys()
            assert not left, f"{language.name} has no {left}"


@pytest.mark.parametrize("language", LANGUAGES[:-1], ids=lambda x: x.name)
def test_legal_expressions_stay_as_they_are(language):
    x, y, u = param("x"), param("y"), param("u", FLOAT)
    for e in (x // y + x % 3, x << y >> 2, build("wrap", x, y), build("log1p", u) ** u, random(x, y, lit(3))):
        legal = legalise(e, language)
        assert legalise(legal, language) is legal
