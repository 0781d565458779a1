"""Layouts proved: z3 shows that `always`, `never` and the intervals of a row of tiles are right about every mask of the
library, for all lengths, rectangles and contents of tables.

A mask is proved twice: with numbers as parameters of any value, and with the numbers of `benchmarks/cases.py`, which
the rules simplify further. Integers have no end here; frisket refuses masks whose Ints may leave 64 bits.

The limit of z3 counts its own steps, so no result depends on the machine. What it cannot settle is listed by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import reduce
from itertools import product
from pathlib import Path

import cases
import numpy as np
import pytest
import z3

import frisket as fk
from frisket.dsl.ir import FALSE, Expr, conj, lit, lookup, make, substitute, var
from frisket.dsl.sugar import maximum, minimum
from frisket.dsl.types import BOOL, INT
from frisket.grammar.memo import clear as forget
from frisket.lowering.analysis import intervals, layout, rows
from frisket.lowering.analysis.intervals import K0, K1, Q0, Q1
from frisket.lowering.analysis.layout import bind_in_part
from frisket.lowering.analysis.questions import always, never
from frisket.lowering.analysis.rows import row_intervals
from frisket.lowering.analysis.table import Table
from frisket.lowering.analysis.tiles import Scope
from frisket.lowering.simplify import simplify
from frisket.lowering.simplify.rules_boolean import negate
from lowering.analysis import test_mutants
from lowering.simplify.z3_terms import TableTerms

# Steps of z3 for a claim: a tenth of a second, or some seconds. They differ with z3's version and with the order of
# terms, which is another in each process: what is listed as open must not be proved in the few.
FEW, MANY = 150_000, 6_000_000
LENGTH = 64  # tokens of the cases: it decides how many columns tables have and which numbers are written, no more
QUESTIONS = ("always", "never", "rows")
Q, K = var("q"), var("k")
INSIDE = conj(Q >= Q0, Q <= Q1, K >= K0, K <= K1)
BLOCK = z3.IntVal(64)  # keys of a tile
PAGE = Path(__file__).parents[3] / "docs/how-it-works.md"


def parameters(text: str, params: dict) -> tuple[str, dict]:
    """A text with a parameter in the place of each number."""
    params = dict(params)

    def put(number: re.Match) -> str:
        params[name := f"p{len(params)}"] = (float if "." in number[0] else int)(number[0])
        return name

    return re.sub(r"(?<![\w.])-?\d+(\.\d+)?\b", put, text), params


FORMS = {}  # "signature, with parameters": (text, params)
for signature, case in cases.masks(LENGTH).items():
    FORMS[f"{signature} with parameters"] = parameters(case.text, case.params)
    if FORMS[f"{signature} with parameters"][0] != case.text:
        FORMS[f"{signature} with numbers"] = case.text, case.params


def mask_of(form: str) -> Expr:
    text, params = FORMS[form]
    return simplify(bind_in_part(fk.mask(text, **params).expr, params))


# -- claims ---------------------------------------------------------------------------------------

Claim = tuple[list, object]  # what is assumed, and what then holds


def claims(mask: Expr, question: str, terms: TableTerms) -> Iterator[Claim]:
    if question == "rows":
        yield from claims_of_rows(mask, terms)
        return
    condition = (always if question == "always" else never)(mask)
    if condition is not FALSE:
        seen = terms(mask)
        yield [terms(INSIDE), terms(condition)], seen if question == "always" else z3.Not(seen)


def claims_of_rows(mask: Expr, terms: TableTerms) -> Iterator[Claim]:
    """A query sees exactly the keys of its intervals. A pair that some query of a row sees lies in a visible interval,
    one that some query does not see lies in a hidden one, or outside the full one. Values called rising rise."""
    found = row_intervals(mask)
    if found is None:
        return
    needs = [terms(INSIDE), terms(found.needs)]
    at = {Q0: Q, Q1: Q}
    one = [(substitute(first, at), substitute(last, at)) for first, last in found.visible]
    yield needs, within(terms, one) == terms(mask)
    for value, condition in found.rises:
        yield [terms(condition), terms(Q <= Q1)], terms(value) <= terms(substitute(value, {Q: Q1}))
    if found.rowwise:
        needs += rising(mask, found.rises, terms)
        yield needs, z3.Implies(terms(mask), within(terms, found.visible))
        if found.full is not None:
            yield needs, z3.Implies(within(terms, [found.full]), terms(mask))
        else:
            yield needs, z3.Implies(z3.Not(terms(mask)), within(terms, found.hidden))


def within(terms: TableTerms, pairs):
    return z3.Or(*(z3.And(terms(first) <= terms(K), terms(K) <= terms(last)) for first, last in pairs))


def rising(mask: Expr, values, terms: TableTerms) -> list:
    """That values do not decrease from query to query, of those queries that formulas name."""
    named = {Q0: 0, Q: 0, Q1: 0}
    for term in [*(rows._terms(mask) or ()), *(rows._terms(simplify(negate(mask))) or ())]:
        named |= {reduce(maximum, term.system.low["q"], Q0): 0, reduce(minimum, term.system.high["q"], Q1): 0}
    return [
        z3.Implies(terms(conj(x >= Q0, x <= y, y <= Q1)), terms(substitute(v, {Q: x})) <= terms(substitute(v, {Q: y})))
        for v, _ in values for x in named for y in named if x is not y
    ]  # fmt: skip


# -- z3 -------------------------------------------------------------------------------------------


def solve(*parts, limit: int = MANY) -> tuple[str, str]:
    """("unsat", "sat" or "unknown", the model), in a context of z3's that nothing was asked in before."""
    solver = z3.Solver()
    solver.add(*parts)
    fresh = z3.Solver(ctx=z3.Context())
    fresh.set("rlimit", limit)
    fresh.from_string(solver.to_smt2())
    answer = fresh.check()
    return str(answer), str(fresh.model()) if answer == z3.sat else ""


def outcome(mask: Expr, question: str, limit: int = MANY) -> str:
    """The outcome of all claims: "proved", "open" where z3 settles one not, "silent" where there is none."""
    terms = TableTerms()
    stated = list(claims(mask, question, terms))
    axioms = [*terms.facts, *terms.axioms()]
    answers = [solve(*axioms, *assumed, z3.Not(claim), limit=limit) for assumed, claim in stated]
    assert all(answer != "sat" for answer, _ in answers), (question, mask, answers)
    if not answers:
        return "silent"
    return "proved" if all(answer == "unsat" for answer, _ in answers) else "open"


# -- what is not proved ---------------------------------------------------------------------------

PRODUCTS = "`//` and `%` by products of parameters"
CASES = "many cases: minima of products, or digits of digits"
BOTH = ("always", "never")
OPEN = {  # signature: (questions open with parameters, questions open with numbers, why)
    "natten1d(size, n, dilation, stride, is_causal)": (BOTH, (), PRODUCTS),
    "natten2d(rows, cols, kernel_rows, kernel_cols, dilation_rows, dilation_cols, stride_rows, stride_cols, "
    "causal_rows, causal_cols)": (BOTH, (), PRODUCTS),
    "tiled_natten(rows, cols, kernel_rows, kernel_cols, tile_rows, tile_cols)": (BOTH, BOTH, CASES),
    "tiled_natten(rows, cols, kernel_rows, kernel_cols, q_tile_rows, q_tile_cols, k_tile_rows, k_tile_cols)": (
        BOTH, BOTH, CASES,
    ),
    "morton(rows, cols, kernel_rows, kernel_cols)": (BOTH, BOTH, "sums of thirty bits of a position"),
    "sta2d(rows, cols, kernel_rows, kernel_cols, tile_rows, tile_cols)": (BOTH, (), PRODUCTS),
    "sta2d(rows, cols, kernel_rows, kernel_cols, tile_rows, tile_cols, text)": (BOTH, (), PRODUCTS),
    "natten3d(frames, rows, cols, kernel_frames, kernel_rows, kernel_cols)": (BOTH, BOTH, CASES),
    "natten3d(frames, rows, cols, kernel_frames, kernel_rows, kernel_cols, dilation_frames, dilation_rows, "
    "dilation_cols, stride_frames, stride_rows, stride_cols, causal_frames, causal_rows, causal_cols)": (
        BOTH, BOTH, CASES,
    ),
    "sta3d(frames, rows, cols, kernel_frames, kernel_rows, kernel_cols, tile_frames, tile_rows, tile_cols)": (
        BOTH, (), PRODUCTS,
    ),
    "sta3d(frames, rows, cols, kernel_frames, kernel_rows, kernel_cols, tile_frames, tile_rows, tile_cols, text)": (
        BOTH, (), PRODUCTS,
    ),
    "svg_temporal(p, t, frames, w)": (("always",), (), PRODUCTS),
    "topk_indices(index, t)": (("rows",), (), "unions of tiles of any size"),
    "topk_indices(index, t, size)": (("rows",), (), "unions of tiles of any size"),
}  # fmt: skip
NO_ANSWER = {"full": ("never",), "random_keep(seed, p)": BOTH}  # the answer is false, which claims nothing
NO_INTERVALS = frozenset({  # keys of a query are not a few intervals, so a row has no formula
    "mini_causal(n)", "dilated(w, g)", "strided(n)", "random_keep(seed, p)", "global_tokens(t)", "global_window(t, w)",
    "qk_sparse(kept_q, kept_k)", "tree(anc, p)", "svg_temporal(p, t, frames, w)", "cross_image(iv, img)",
    "topk_tiles(map, t)", "topk_tiles(map, t, size)",
    *(s for s in cases.masks(LENGTH) if re.match(r"natten[23]d|tiled_natten|morton|sta[23]d|natten1d.*dilation", s)),
})  # fmt: skip


def expected(form: str, question: str) -> str:
    signature, _, variant = form.rpartition(" with ")
    if question in NO_ANSWER.get(signature, ()) or (question == "rows" and signature in NO_INTERVALS):
        return "silent"
    with_parameters, with_numbers, _ = OPEN.get(signature, ((), (), ""))
    return "open" if question in (with_parameters if variant == "parameters" else with_numbers) else "proved"


LONG = {"natten2d", "block_diffusion", "svg_temporal", "topk_tiles", "topk_indices"}  # a second of z3


def questions() -> Iterator:
    """All questions; the ones that stay open take seconds."""
    for form, question in product(FORMS, QUESTIONS):
        slow = expected(form, question) == "open" or form.split("(")[0] in LONG
        yield pytest.param(form, question, marks=pytest.mark.exhaustive if slow else ())


@pytest.mark.filterwarnings("ignore:`sliding_window")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("form", "question"), list(questions()))
def test_claims_of_layouts_are_proved(form, question):
    want = expected(form, question)
    assert outcome(mask_of(form), question, FEW if want == "open" else MANY) == want


def test_open_claims_are_of_the_library():
    assert {*OPEN, *NO_ANSWER, *NO_INTERVALS} <= set(cases.masks(LENGTH))


# -- tiles of a row -------------------------------------------------------------------------------


class Way:
    """One way through a function of symbols: the comparisons on it, with the answers that were given."""

    def __init__(self, answers: tuple[bool, ...]) -> None:
        self.forced, self.answers, self.conditions = answers, [], []

    def ask(self, condition) -> bool:
        n = len(self.answers)
        self.answers.append(self.forced[n] if n < len(self.forced) else True)
        self.conditions.append(condition if self.answers[-1] else z3.Not(condition))
        return self.answers[-1]


class Symbol:
    """An integer of z3 on a path, for functions of Python's integers."""

    def __init__(self, term, path: Way) -> None:
        self.term, self.path = term, path

    def _made(self, term):
        return Symbol(term, self.path)

    def __add__(self, other):
        return self._made(self.term + of(other))

    def __neg__(self):
        return self._made(-self.term)

    def __floordiv__(self, other):  # by a positive number
        return self._made(self.term / of(other))

    def __lt__(self, other):
        return self.path.ask(self.term < of(other))

    def __le__(self, other):
        return self.path.ask(self.term <= of(other))

    def __gt__(self, other):
        return self.path.ask(self.term > of(other))

    def __ge__(self, other):
        return self.path.ask(self.term >= of(other))


def of(x):
    return x.term if isinstance(x, Symbol) else z3.IntVal(x)


def paths(run):
    """All results of a function of a path, with the conditions on the way."""
    todo = [()]
    while todo:
        path = Way(todo.pop())
        result = run(path)
        yield path.conditions, result
        todo += [(*path.answers[:i], not path.answers[i]) for i in range(len(path.forced), len(path.answers))]


def refuted_tiles(cut: bool, block) -> Iterator[str]:
    """The answers of z3 other than "unsat" about the tiles of a row, from the first and last keys of `Bounds`."""
    ends = z3.Ints("first last full_first full_last")
    first, last, full_first, full_last = ends
    key, tile = z3.Ints("key tile")
    inside = [block > 0, key >= 0, block * tile <= key, key < block * tile + block, first >= 0]
    for conditions, row in paths(
        lambda path: layout._one_interval([Symbol(x, path) for x in ends], Symbol(block, path), cut)
    ):
        seen, full = z3.And(first <= key, key <= last), z3.And(full_first <= key, key <= full_last)
        claim = z3.Not(seen)
        if row:
            lo, full_lo, full_hi, hi = map(of, row[0])
            claim = z3.And(
                lo <= full_lo, full_lo <= full_hi, full_hi <= hi, z3.Implies(seen, z3.And(lo <= tile, tile < hi)),
                z3.Implies(z3.And(full_lo <= tile, tile < full_hi), z3.And(full, not cut)),
            )  # fmt: skip
        answer, _ = solve(*conditions, *inside, z3.Not(claim))
        if answer != "unsat":
            yield answer


@pytest.mark.parametrize("block", [BLOCK, pytest.param(z3.Int("block"), marks=pytest.mark.exhaustive)], ids=str)
@pytest.mark.parametrize("cut", [False, True])
def test_tiles_of_a_row_are_proved(cut, block):
    """No key that some query sees is outside of [lo, hi), and every query sees all keys of [full_lo, full_hi)."""
    assert list(refuted_tiles(cut, block)) == []


# -- the proofs can fail --------------------------------------------------------------------------

PLANTED = {  # a mutant of test_mutants: a form and a question that refute it
    "a touching bound excludes": ("window(w) with parameters", "never"),
    "affine ends swapped": ("mini_causal(n) with parameters", "never"),
    "remainder stops one short": ("mini_causal(n) with numbers", "always"),
    "floor division rounds up": ("chunked(n) with numbers", "never"),
    "never is always": ("dilated(w, g) with numbers", "never"),
    "full one key too far": ("window(w) with parameters", "rows"),
    "the first key is missed": ("causal_document(off) with parameters", "rows"),
    "chunks end one short": ("chunked(n) with parameters", "rows"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_refuted(name, monkeypatch):
    where, attribute, wrong = test_mutants.MUTANTS[name]
    form, question = PLANTED[name]
    if where == "TRANSFER":
        monkeypatch.setitem(intervals.TRANSFER, attribute, wrong)
    else:
        monkeypatch.setattr(where, attribute, wrong)
    forget()
    try:
        with pytest.raises(AssertionError, match="'sat'"):
            outcome(mask_of(form), question)
    finally:
        monkeypatch.undo()
        forget()


@pytest.mark.parametrize("end", [1, 2, 3])
def test_a_wrong_end_of_tiles_is_refuted(end, monkeypatch):
    """The last key a key short, the first full key a key early, the last full key a key late."""
    sound, step = layout._one_interval, {1: -1, 2: -1, 3: 1}[end]
    monkeypatch.setattr(layout, "_one_interval", lambda ends, bk, cut: sound(
        [x + step if i == end else x for i, x in enumerate(ends)], bk, cut
    ))  # fmt: skip
    assert "sat" in refuted_tiles(False, BLOCK)


@pytest.mark.parametrize("seed", range(6))
def test_axioms_hold_of_tables(seed):
    """What z3 is told of tables, against tables; axioms that contradict themselves would prove anything."""
    rng = np.random.default_rng(seed)
    entries = rng.integers(0, 4, rng.integers(1, 9))
    offsets = np.cumsum(np.append(0, rng.integers(0, 4, 3)))
    scope = Scope({}, {"t": Table(np.sort(entries) if seed % 2 else entries), "off": Table(offsets)})
    at = [lit(int(x)) for x in rng.integers(-2, 11, 4)]
    marked = make("has_runs", (), ("t", Q >= 2), BOOL)
    exprs = [make("is_sorted", (), "t", BOOL), make("has_runs", (), "t", BOOL), marked]
    for x in at:
        exprs += [lookup("t", (x,), INT), x // 3, x // -2]
        exprs += [make("segment", (x,), "off", INT)]
        exprs += [make(f"{kind}_{end}", (x,), "t", INT) for kind in ("run", "rank") for end in ("first", "last")]
        exprs += [make(f"segment_{end}", (x,), "off", INT) for end in ("first", "last")]
    low, high = sorted(at, key=lambda x: x.name)[1:3]
    exprs += [make(f"range_{kind}", (low, high), "t", INT) for kind in ("min", "max")]
    terms = TableTerms()
    known = [terms(e) == scope.value(e, {}).item() for e in exprs]
    last = [z3.Int("last t 0") == len(entries) - 1]
    assert solve(*known, *last, *terms.facts, *terms.axioms())[0] == "sat"


# -- the page -------------------------------------------------------------------------------------


def row_of(signature: str) -> str:
    with_parameters, with_numbers, why = OPEN[signature]
    name, arguments = signature.split("(")[0], signature.count(",") + 1
    also = "with numbers too" if with_numbers else "with parameters"
    return f"| `{name}`, {arguments} arguments | {', '.join(with_parameters)} | {also} | {why} |"


def test_page_lists_what_is_not_proved():
    written = re.findall(r"^\| `\w+`, \d+ arguments \|.*\|$", PAGE.read_text(), re.MULTILINE)
    assert written == [row_of(s) for s in OPEN]
