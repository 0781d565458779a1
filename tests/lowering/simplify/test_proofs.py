"""Every rule is proved. The instances come from the rule table, so a new row is proved or fails here.

Rules on Ints and Bools by z3, on many instances each; where z3 gives up, on small values, all of them. Rules on
Floats on every combination of special values, bit for bit.
"""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import z3

from frisket.dsl.errors import EvaluationError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import Expr, build, walk
from frisket.dsl.show import show
from frisket.dsl.sugar import eq, k, ne, q
from frisket.dsl.types import BOOL, FLOAT
from frisket.lowering.simplify import RULES
from frisket.lowering.simplify.affine import (
    NEGATE,
    interval,
    is_int_comparison,
    linear,
    ordered,
    relation,
    write,
    write_relation,
)
from frisket.lowering.simplify.rules_boolean import _implies, _negated, _refutes, negate
from lowering.simplify import rule_cases, z3_terms
from lowering.simplify.rule_cases import instances, x

FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 5e-324, 1e308, -1e308, math.inf, -math.inf, math.nan]
SMALL = [-9, -4, -3, -1, 0, 1, 2, 5, 8]
NATURAL = [0, 1, 2, 3, 5, 7, 8, 13]
# rules that z3 cannot be asked about, each with the reason; they are tested on values
NOT_FOR_Z3 = {
    "fold": "literals alone: the interpreter is the definition",
}
# rules that may change the sign of a zero, each with the reason
ZERO_SIGN = {
    "order-chain": "which of 0.0 and -0.0 min and max give is open on every backend",
    "min-self": "as above",
}


LONG = {("same-remainder", "eq"), ("same-remainder", "ne")}  # seconds of z3


def all_rules():
    rules = [pytest.param(r, marks=pytest.mark.exhaustive) if (r.name, r.op) in LONG else r for r in RULES]
    return pytest.mark.parametrize("rule", rules, ids=lambda r: f"{r.name} {r.op}")


def check(rule, many):
    """z3 proves one instance at least, and refutes none; what it leaves open keeps its values."""
    rng = random.Random(f"{rule.name} {rule.op}")
    found = instances(rule, rng, many)
    assert found, "the row applies to nothing that rule_cases makes: add an atom there"
    outcomes = {on(rule, before, after) for before, after in found}
    asked = any(z3_terms.provable(*pair) for pair in found)
    assert asked or float_inside(*found[0]) or rule.name in NOT_FOR_Z3, "give a reason in NOT_FOR_Z3"
    assert "proved" in outcomes or not asked


def on(rule, before: Expr, after: Expr) -> str:
    assert before.type is after.type
    if z3_terms.provable(before, after):
        answer = z3_terms.prove(before, after)
        assert answer in ("proved", "unknown"), (show(before), show(after), answer)
        if answer == "proved":
            return answer
    compare(rule, before, after)
    return "compared"


def float_inside(*roots):
    return any(e.type is FLOAT for e in walk(*roots))


def values_of(e: Expr):
    if e.type is BOOL:
        return [False, True]
    if e.type is FLOAT:
        return FLOATS
    return NATURAL if e.op == "var" else SMALL


def compare(rule, before: Expr, after: Expr) -> None:
    """All values of the leaves at once, as the axes of one array."""
    leaves = sorted({e for e in walk(before, after) if e.op in ("var", "param")}, key=str)
    axes = np.meshgrid(*(np.array(values_of(e)) for e in leaves), indexing="ij", sparse=True)
    env = {e.name: axis for e, axis in zip(leaves, axes, strict=True)}
    tables = {"doc": np.array([0, 0, 1, 1, 2, 4, 4, -3]), "off": np.array([0, 2, 3, 8]), "seen": np.arange(8) % 3 == 1}
    try:
        want = evaluate(before, env, tables)
    except EvaluationError:
        return
    got = evaluate(after, env, tables)
    want, got = np.broadcast_arrays(want, got)
    same = want == got
    if want.dtype.kind == "f":
        same |= np.isnan(want) & np.isnan(got)
        if rule.name not in ZERO_SIGN:
            same &= (np.signbit(want) == np.signbit(got)) | np.isnan(want)
    assert same.all(), (show(before), show(after))


@all_rules()
def test_rule_is_proved(rule):
    check(rule, 6)


@pytest.mark.slow
@all_rules()
def test_rule_is_proved_on_many(rule):
    check(rule, 60)


# -- what the rules build on --------------------------------------------------------------------------


def sample(atoms, seed, count):
    rng = random.Random(seed)
    return [[rng.choice(atoms) for _ in range(2)] for _ in range(count)]


COMPARISONS = [
    *(e for e in rule_cases.BOOLS if is_int_comparison(e)),
    q - k >= 7, k - q >= 4, q + 3 < k, x <= -5, x >= 8, eq(x, 3), ne(x, 3), 3 * q >= 2 * k + x, 4 * q + 6 * k >= 5,
]  # fmt: skip


def prove_claim(claim, *roots):
    terms = z3_terms.terms_for(*roots)
    answer = z3_terms.holds(terms, claim(terms))
    assert answer in ("proved", "unknown"), ([show(e) for e in roots], answer)
    return answer == "proved"


def test_implications_between_bounds_are_proved():
    """Whatever one bound is said to imply, exclude, or leave over, it does: over all pairs."""
    said = 0
    for a, c in itertools.product(COMPARISONS, repeat=2):
        if _implies(a, c):
            said += prove_claim(lambda t, a=a, c=c: z3.Implies(t(a), t(c)), a, c)
        if _refutes(a, c, "and"):
            said += prove_claim(lambda t, a=a, c=c: z3.Not(z3.And(t(a), t(c))), a, c)
        if _refutes(a, c, "or"):
            said += prove_claim(lambda t, a=a, c=c: z3.Or(t(a), t(c)), a, c)
    assert said > 100


def test_affine_forms_say_the_same():
    for a, c in sample(rule_cases.INTS, "affine", 30):
        for e in (a + c, a - c, -a, 3 * a - c, a * c):
            prove_claim(lambda t, e=e: t(e) == t(write(linear(e))), e)
        for op in NEGATE:
            e = build(op, a, c)
            prove_claim(lambda t, e=e: t(e) == t(write_relation(*relation(e.op, *e.args))), e)


def test_negations_of_bools_are_proved():
    for e in rule_cases.BOOLS:
        for no in (negate(e), _negated(e)):
            prove_claim(lambda t, e=e, no=no: t(e) != t(no), e, no)


def test_intervals_of_ints_are_proved():
    told = 0
    for a, c in sample(rule_cases.INTS, "intervals", 60):
        for e in (
            a,
            build("add", a, c),
            build("sub", a, c),
            build("mul", a, c),
            build("min", a, c),
            build("max", a, c),
        ):
            lo, hi = interval(e)
            if lo is not None:
                told += prove_claim(lambda t, e=e, lo=lo: t(e) >= lo, e)
            if hi is not None:
                told += prove_claim(lambda t, e=e, hi=hi: t(e) <= hi, e)
        if ordered(a, c):
            told += prove_claim(lambda t, a=a, c=c: t(a) >= t(c), a, c)
    assert told > 60


def test_z3_means_what_the_interpreter_means():
    """The translation itself, against the interpreter, on every operator."""
    rng = random.Random("z3")
    for op in sorted(set(z3_terms.BITWISE) | {"floordiv", "mod", "min", "max", "abs", "sign", "mul", "pow"}):
        for _ in range(12):
            node = next(rule_cases.nodes(op, rng))
            if not z3_terms.provable(node) or any(e.op in ("lookup", "segment") for e in walk(node)):
                continue
            env = {
                e.name: rng.choice(NATURAL if e.op == "var" else SMALL) for e in walk(node) if e.op in ("var", "param")
            }
            env = {n: bool(v % 2) if n in ("flag", "other") else v for n, v in env.items()}
            try:
                want = evaluate(node, env).item()
            except EvaluationError:
                continue
            if abs(want) >= 2**18:
                continue
            terms = z3_terms.Terms(bits=40) if any(e.op in z3_terms.BITWISE for e in walk(node)) else z3_terms.Terms()
            value = terms(node)
            fixed = [terms.done[e] == env[e.name] for e in walk(node) if e.op in ("var", "param")]
            solver = z3.Solver()
            solver.add(*fixed, value != want)
            assert solver.check() == z3.unsat, (show(node), env)


def test_a_missing_guard_is_noticed():
    """The proofs can fail: rows with a slip in them are told."""
    from frisket.lowering.simplify.pattern import m, n, rule
    from frisket.lowering.simplify.pattern import x as hole

    slips = [
        rule("unguarded", (hole % m) % n, hole % n),
        rule("off by one", hole // n, lambda x, n: (x + 1) // n, lambda x, n: n.name > 1),
        rule("sign", abs(hole) % n, hole % n, lambda x, n: n.name > 0),
        rule("round to zero", hole // n, lambda x, n: -(-x // n), lambda x, n: n.name > 0),
    ]
    for slip in slips:
        with pytest.raises(AssertionError):
            check(slip, 12)
