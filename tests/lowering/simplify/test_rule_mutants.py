"""Small mistakes in the rules, two or more in every family: a sign, an off-by-one, a guard left out. The proofs of
test_proofs notice every one."""

from __future__ import annotations

import dataclasses
import math

import pytest
from support.tiers import default_only

from frisket.dsl.ir import FALSE, build, disj, lit
from frisket.grammar.memo import clear as forget
from frisket.lowering.simplify import (
    RULES,
    affine,
    rules_boolean,
    rules_compare,
    rules_division,
    rules_order,
    rules_select,
)
from frisket.lowering.simplify.affine import Linear
from frisket.lowering.simplify.rules_division import minus
from lowering.simplify import test_proofs

# a slip in a row: (rule, what of it, wrong)
ROWS = {
    "mod of mod without its guard": ("mod-of-mod", "when", lambda x, m, n: m.name > 0 < n.name),
    "div of mod one too far": ("div-of-mod", "when", lambda x, m, n: 0 < m.name <= n.name + 1),
    "a ceiling one too high": ("div-turns", "after", lambda x, n: -((minus(x) + n.name) // n)),
    "a negative divisor keeps the sign": ("mod-by-negative", "after", lambda x, n: minus(x) % lit(-n.name)),
    "a small dividend at its edge": ("mod-of-small", "when", lambda x, n: rules_division.inside(x, lit(n.name + 1))),
    "the larger is the smaller": ("min-decided", "when", lambda x, y: affine.ordered(y, x)),
    "a clamp turned round without its guard": ("clamp-low-first", "when", None),
    "every abs is natural": ("abs-of-natural", "when", None),
    "mod-bound at its edge": ("mod-bound", "when", lambda x, m, n: m.name > 0 and not 0 < n.name < m.name),
    "choices joined by the wrong word": ("where-of-where", "after", {"op": "or"}),
    "a flag turned round": ("float-of-choice", "after", {"op": "not"}),
    "quotients of negatives round to zero": (
        "int-of-quotient", "when", lambda x, c: rules_select.whole_divisor(x, c)),
}  # fmt: skip


def slipped(rule, part, wrong):
    if isinstance(wrong, dict):
        return dataclasses.replace(rule, after=WRITTEN[rule.name])
    return dataclasses.replace(rule, **{part: wrong})


WRITTEN = {
    "where-of-where": lambda p, r, s, t: build("where", build("or", p, r), s, t),
    "float-of-choice": lambda p, *rest: build("where", p, lit(0.0), lit(1.0)),
}


def noticed(rules, many):
    """A wrong value is told, by its own words and not because nothing was found to try."""
    told = []
    for rule in rules:
        try:
            test_proofs.check(rule, many)
        except AssertionError as error:
            told.append(str(error))
    assert [t for t in told if "applies to nothing" not in t]


@pytest.mark.parametrize("name", ROWS)
def test_a_slip_in_a_row_is_noticed(name):
    which, part, wrong = ROWS[name]
    noticed([slipped(r, part, wrong) for r in RULES if r.name == which], 40)


def keeps_constant(form, d):
    whole, rest = SOUND["_split"](form, d)
    return whole, Linear(rest.terms, rest.const + 1)


def reduced_up(form, d):
    g, rest = SOUND["_reduced"](form, d)
    return g, Linear(rest.terms, -(-form.const // g))


def wide_root(rel, x, value):
    root = math.isqrt(max(value, 0)) + 1
    return abs(x) <= root if rel == "le" else abs(x) >= root


def late_quotient(rel, a, d, bound):
    return SOUND["_quotient"](rel, a, d, bound if rel != "le" else bound - 1)


# a slip in what rules share: (module, name, wrong, rules that use it)
PARTS = {
    "a remainder gains one": (rules_division, "_split", keeps_constant, {"div-splits", "mod-splits"}),
    "a lost part is rounded up": (rules_division, "_reduced", reduced_up, {"div-reduces"}),
    "two equal factors are one": (rules_order, "IDEMPOTENT", {"min", "max", "mul"}, {"order-chain"}),
    "a literal is lost": (rules_order, "_literals_joined", lambda op, parts: parts[:-1], {"order-chain"}),
    "comparisons do not turn round": (rules_order, "MIRRORED", {o: o for o in affine.NEGATE}, {"order-comparison"}),
    "a square root too wide": (rules_compare, "_square_is", wide_root, {"see-through"}),
    "a quotient's bound is early": (rules_compare, "_quotient", late_quotient, {"see-through"}),
    "the smaller of two is both": (rules_compare, "conj", disj, {"see-through"}),
    "not is not counted": (rules_boolean, "_upright", lambda e: (SOUND["_upright"](e)[0], False), {"xor"}),
    "the else branch holds too": (rules_boolean, "_under", lambda c, e: FALSE if c is e else e, {"choose"}),
    "a bound implies looser and tighter": (
        rules_boolean, "_implies", lambda a, b: a.args[1:] == b.args[1:], {"absorb", "resolve"}),
    "the looser bound is kept": (
        rules_boolean, "_intersect", lambda f: [("ge", min(b for _, b in f))], {"merge-bounds"}),
    "whole numbers round the wrong way": (rules_select.math, "ceil", math.floor, {"compare-positions"}),
}  # fmt: skip
SOUND = {
    "_split": rules_division._split, "_reduced": rules_division._reduced, "_quotient": rules_compare._quotient,
    "_upright": rules_boolean._upright,
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    default_only(
        PARTS,
        *PARTS.keys() - {"whole numbers round the wrong way", "a square root too wide", "a quotient's bound is early",
                         "two equal factors are one"},
    ),
)  # fmt: skip
def test_a_slip_in_what_rules_share_is_noticed(name, monkeypatch):
    module, attribute, wrong, rules = PARTS[name]
    monkeypatch.setattr(module, attribute, wrong)
    forget()
    try:
        noticed([r for r in RULES if r.name in rules], 60)
    finally:
        monkeypatch.undo()
        forget()


def test_rule_families_each_have_two_mutants():
    modules = {r.name: r.origin.split(":")[0].rsplit(".")[-1] for r in RULES}
    told = [modules[row[0]] for row in ROWS.values()] + [modules[min(part[3])] for part in PARTS.values()]
    for family in sorted(set(modules.values())):
        assert told.count(family) >= 2, family
