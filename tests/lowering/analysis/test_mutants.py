"""Twenty small mistakes, one at a time: a sign, an off-by-one, a swapped bound. The checks notice every one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support import masks
from support.tiers import default_only

from frisket.dsl.ir import TRUE, build, conj, disj, make
from frisket.dsl.sugar import eq, k, minimum, q
from frisket.dsl.types import BOOL
from frisket.grammar.memo import clear as forget
from frisket.lowering.analysis import intervals as abstract
from frisket.lowering.analysis import layout as driver
from frisket.lowering.analysis import questions, rows, runs, solve, tiles
from frisket.lowering.analysis.intervals import K0, K1, Q0, Q1, Range, ends
from frisket.lowering.analysis.table import Table
from frisket.lowering.simplify import affine, engine, rules_boolean, rules_compare
from frisket.lowering.simplify.affine import Linear
from lowering.analysis import test_layout_exact, test_transfer
from lowering.simplify import test_simplify

NAMES = (
    "causal-window sinks-window documents chunked every-other by-head padding dilated tile-map global bottom-right "
    "complement xor neighbourhood documents-window scattered-documents clamped-documents other-table first-document "
    "early-documents per-query-window quotients pooled-documents mixed-documents"
)


def battery():
    """A short form of the other tests of this folder: labels, ranges, values."""
    for text in test_simplify.TEXTS:
        test_simplify.test_texts_simplify_to_the_listed_text(text)
    env, bound = test_simplify.grid(), test_simplify.tables()
    for seed in range(30):
        mask = masks.random_mask(random.Random(f"mutant {seed}"), depth=3)
        try:
            before = test_simplify.evaluate(mask, env, bound)
        except ValueError:
            continue
        assert test_simplify.same(before, test_simplify.evaluate(engine.simplify(mask), env, bound))
    test_transfer.test_bounds_on_q_k_and_their_difference_are_exact(scope())
    for op in abstract.TRANSFER:
        test_transfer.test_ends_contain_every_value(op, scope())
    for seed in range(12):
        test_transfer.test_questions_are_one_sided(seed, scope())
    for mask in (eq(k % 3, 0), (q - k) % 4 >= 2, (k // 2) % 3 < 1):
        test_transfer.one_sided(mask, scope())
    for name in NAMES.split():
        rng = random.Random(f"mutant {name}")
        for _ in range(3):
            test_layout_exact.check(masks.case(masks.written()[name], rng))


def scope():
    return tiles.Scope({}, {n: tiles.Table(t) for n, t in test_transfer.TABLES.items()})


def flipped_affine(form):
    found = sound["_affine"](form)
    return Range(found.hi, found.lo, found.attained, found.dense)


def wide_floordiv(e):
    x, d = ends(e.args[0]), e.args[1]
    if d.op != "lit" or x.lo is None:
        return sound["_floordiv"](e)
    return Range(x.lo // d + 1, x.hi // d, x.attained, x.dense)


def loose_mod(e):
    found = sound["_mod"](e)
    return Range(found.lo, None if found.hi is None else found.hi - 1)


def abs_forgets_zero(e):
    r = ends(e.args[0])
    found = sound["_abs"](e)
    return found if r.lo is None or r.hi is None else Range(minimum(abs(r.lo), abs(r.hi)), found.hi)


def dense_products(e):
    found = sound["_mul"](e)
    return Range(found.lo, found.hi, found.attained, dense=True)


def attained_remainders(e):
    found = sound["_mod"](e)
    return Range(found.lo, found.hi, attained=True)


def strict_infeasible(s):
    found = sound["infeasible"](s)
    return make(found.op, tuple(build("ge", *a.args) if a.op == "gt" else a for a in found.args), None, BOOL)


def forgets_difference(s):
    return disj(*(lo > hi for x, first, last in (("q", Q0, Q1), ("k", K0, K1))
                  for lo in (first, *s.low[x]) for hi in (last, *s.high[x]) if (lo, hi) != (first, last)))  # fmt: skip


def eager_disjuncts(e):
    found = sound["disjuncts"](e)
    return found[:1] if found and e.op == "or" else found


def short_period(e):
    found = sound["_truth"](e)
    return None if found is None else max(1, found - 1)


def one_key_too_far(term):
    first, last = sound["_everywhere"](term)
    return first, last + 1


def late_first(term):
    first, last = sound["_visible"](term)
    return first + 1, last


def short_run(table, end, index):
    return sound["run"](table, end, index) - (end == "last")


def clamped_run(table, end, index):
    return np.clip(sound["run"](table, end, index), 0, table.array.shape[-1] - 1)


def rank_of_the_next(table, end, value):
    return sound["rank"](table, end, value + (end == "first"))


def short_quotient(isolated):
    form = sound["inside_quotient"](isolated)
    return Linear(form.terms, form.const + (isolated.op == "le"))


def greedy_sweep(seen, hidden, columns):
    return sound["sweep"](seen, hidden[:, 1:], columns)


def no_ragged_edge(grid):
    return tiles.outside(grid) * 0


def careless_implication(a, b):
    return a is b or a.args[1:] == b.args[1:]


def drifting_relation(op, left, right):
    rel, form = sound["relation"](op, left, right)
    return rel, Linear(form.terms, form.const + (1 if op == "gt" else 0))


def upper_bound_drifts(op, form):
    return sound["write_relation"](op, Linear(form.terms, form.const - (op == "le")))


MUTANTS = {
    "affine ends swapped": (abstract, "_affine", flipped_affine),
    "floor division rounds up": ("TRANSFER", "floordiv", wide_floordiv),
    "remainder stops one short": ("TRANSFER", "mod", loose_mod),
    "abs forgets zero": ("TRANSFER", "abs", abs_forgets_zero),
    "products are dense": ("TRANSFER", "mul", dense_products),
    "remainders attain their ends": ("TRANSFER", "mod", attained_remainders),
    "a touching bound excludes": (questions, "infeasible", strict_infeasible),
    "bounds on the difference are ignored": (questions, "infeasible", forgets_difference),
    "a disjunction keeps its first term": (questions, "disjuncts", eager_disjuncts),
    "one key short of a period": (questions, "_truth", short_period),
    "full one key too far": (rows, "_everywhere", one_key_too_far),
    "the first key is missed": (rows, "_visible", late_first),
    "a hidden interval is forgotten": (driver, "sweep", greedy_sweep),
    "runs end one short": (Table, "run", short_run),
    "runs end with the table": (Table, "run", clamped_run),
    "ranks are of the next value": (Table, "rank", rank_of_the_next),
    "tables always have runs": (Table, "has_runs", True),
    "tables are always sorted": (Table, "sorted", True),
    "chunks end one short": (solve.Isolated, "inside_quotient", short_quotient),
    "rows are one interval, come what may": (driver, "_holds", lambda *_: True),
    "the ragged edge is full": (driver, "outside_of", no_ragged_edge),
    "strict comparisons drift": (rules_compare, "relation", drifting_relation),
    "upper bounds drift": (rules_compare, "write_relation", upper_bound_drifts),
    "q may be negative... or positive": (rules_compare, "interval", lambda e: (1, affine.interval(e)[1])),
    "an intersection keeps the looser bound": (rules_boolean, "_intersect", lambda f: [("ge", min(b for _, b in f))]),
    "anything implies anything of its form": (rules_boolean, "_implies", careless_implication),
    "a record swallows its neighbour": (runs, "FULL", 1),
    "partial tiles are called full": (tiles, "PARTIAL", 2),
    "never is always": (questions, "_never_literal", lambda e: TRUE),
    "eq is found between the ends": (questions, "_some_attained", lambda e: conj(TRUE)),
    "and is or": (affine, "FLIP", {"ge": "ge", "le": "le", "eq": "eq", "ne": "ne"}),
}  # fmt: skip

sound = {
    "_affine": abstract._affine, "_floordiv": abstract._floordiv, "_mod": abstract._mod, "_abs": abstract._abs,
    "_mul": abstract._mul, "infeasible": questions.infeasible, "disjuncts": questions.disjuncts,
    "_truth": questions._truth, "_everywhere": rows._everywhere, "_visible": rows._visible, "run": Table.run,
    "rank": Table.rank, "inside_quotient": solve.Isolated.inside_quotient, "sweep": rows.sweep,
    "relation": affine.relation, "write_relation": affine.write_relation,
}  # fmt: skip


@pytest.mark.exhaustive
def test_analysis_battery_passes_on_the_unchanged_code():
    forget()
    battery()
    assert len(MUTANTS) >= 20


NOTICED_SOON = "affine ends swapped", "and is or", "a disjunction keeps its first term"


@pytest.mark.parametrize("name", default_only(MUTANTS, *NOTICED_SOON))
def test_a_mistake_is_noticed(name, monkeypatch):
    where, attribute, wrong = MUTANTS[name]
    if where == "TRANSFER":
        monkeypatch.setitem(abstract.TRANSFER, attribute, wrong)
    else:
        monkeypatch.setattr(where, attribute, wrong)
    forget()
    try:
        with pytest.raises((AssertionError, TypeError, ValueError, IndexError, RuntimeError)):
            battery()
    finally:
        monkeypatch.undo()
        forget()
