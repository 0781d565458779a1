"""Forms: every clause says what its term says, every entry of the library is a form that means the same or none, and
masks that are nearly one are none."""

import random
from itertools import product

import cases
import numpy as np
import pytest

import frisket as fk
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import Expr
from frisket.lowering.dense import coordinates
from frisket.lowering.engines.forms import CLAUSES, Clause, EngineForm, NoForm, form_of
from frisket.lowering.pipeline import simplified_program
from frisket.lowering.plan import Problem
from frisket.lowering.simplify import ProgramExprs, simplify
from frisket.runtime.calls.program import program_of

LENGTHS = [(1, 1), (5, 5), (4, 7), (7, 4)]
RECOGNISED = 36  # of 85 masks; a clause more may raise it


def values(e: Expr, q_len: int, kv_len: int, seed: int) -> np.ndarray:
    """The mask at every position of two batch entries and two heads, with random numbers for what it reads."""
    draw = random.Random(seed)
    env = coordinates(Problem(q_len, kv_len, 2, 2)) | {"B": 2, "H": 2, "Q_LEN": q_len, "KV_LEN": kv_len}
    env |= {n: draw.randint(-3, 8) for n in "rwn"}
    tables = {
        "doc": np.random.default_rng(seed).integers(0, 3, 7),
        "n": np.random.default_rng(seed).integers(-1, 8, 2),
        "at": np.array([0, 2, 5, 7]),
    }
    return np.broadcast_to(evaluate(e, env, tables), (2, 2, q_len, kv_len))


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda c: c.name)
def test_a_clause_says_what_its_term_says(clause: Clause) -> None:
    term = simplify(fk.mask(clause.example).expr)
    found = clause.match(term)
    assert found is not None
    first = next(c for c in CLAUSES if c.match(term) is not None)
    assert first is clause, "an earlier row takes the example, so the row is not tried"
    parts: dict[str, tuple[Expr, ...]] = {}
    for name, value in found:
        parts[name] = (*parts.get(name, ()), value)
    form = EngineForm(**parts)
    for (q_len, kv_len), seed in product(LENGTHS, range(8)):
        np.testing.assert_array_equal(values(form.mask, q_len, kv_len, seed), values(term, q_len, kv_len, seed))


@pytest.mark.parametrize("name", sorted(cases.masks(64)))
def test_a_form_of_the_library_is_the_mask(name: str) -> None:
    case = cases.masks(64)[name]
    mask = case.mask
    simplified = simplified_program(program_of(mask, None, {})).simplified.mask
    found = form_of(ProgramExprs(simplified))
    if isinstance(found, NoForm):
        return
    again = fk.mask(found.mask, **case.params) if simplified is not None else fk.mask("full")
    assert again.equivalent(mask, case.q_len, case.kv_len, batch=case.batch, heads=case.heads)
    dense = mask.dense(case.q_len, case.kv_len, case.batch, case.heads)
    np.testing.assert_array_equal(again.dense(case.q_len, case.kv_len, case.batch, case.heads), dense)
    assert form_of(ProgramExprs(simplify(found.mask))) == found


def test_how_many_entries_are_forms() -> None:
    simplified = (simplified_program(program_of(c.mask, None, {})).simplified.mask for c in cases.masks(64).values())
    assert sum(isinstance(form_of(ProgramExprs(e)), EngineForm) for e in simplified) == RECOGNISED


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("q >= k | k < 64", "`q >= k | k <= 63` bounds neither"),
        ("causal & (q - k) % 3 == 0", "`(q - k) % 3 == 0` bounds neither"),
        ("2 * q >= k", None),
        ("q >= 2 * k", "`q >= 2 * k` bounds neither"),
        ("k < t[h]", "bounds neither"),
        ("doc[q] == doc[k] + 1", "bounds neither"),
        ("doc[h, q] == doc[h, k]", "bounds neither"),
        ("x[q] == x[k] + 0.0", "bounds neither"),
        ("q != k", "`q != k` bounds neither"),
        ("k < t[k]", "bounds neither"),
    ],
)
def test_masks_that_are_nearly_a_form(text: str, said: str | None) -> None:
    found = form_of(ProgramExprs(simplify(fk.mask(text).expr)))
    if said is None:  # a bound by row: true of every query, and no window
        assert isinstance(found, EngineForm)
        assert found.by_rows
        assert not found.low
    else:
        assert isinstance(found, NoForm)
        assert said in str(found)


@pytest.mark.parametrize(
    ("text", "proofs"),
    [
        ("score", ()), ("softcap(50)", ("softcap",)), ("softcap(c)", ("softcap",)), ("2 * score", ("scale",)),
        ("score / 2", ("scale",)), ("score * c", ("scale",)), ("alibi", ("alibi",)), ("alibi(slopes)", ("alibi",)),
        ("score - slopes[h] * abs(q - k)", ("alibi",)), ("score - (q - k) * slopes[h]", ("alibi",)),
        ("softcap(20) + slopes[h] * (q - k)", ("softcap", "alibi")),
        ("20 * tanh(c * score / 20)", ("scale", "softcap")),
    ],
)  # fmt: skip
def test_score_mods_in_parts(text: str, proofs: tuple[str, ...]) -> None:
    expr = simplify(fk.score(text).expr)
    found = form_of(ProgramExprs(score=expr))
    assert isinstance(found, EngineForm), found
    assert found.proofs == ("full", *proofs)
    env = coordinates(Problem(4, 5, 2, 2)) | {"B": 2, "H": 2, "Q_LEN": 4, "KV_LEN": 5, "c": 0.7}
    env["score"] = np.random.default_rng(0).standard_normal((2, 2, 4, 5))
    tables = {"slopes": np.array([0.5, 0.25])}
    want = evaluate(expr, env, tables)
    got = env["score"] if found.score is None else evaluate(found.score, env, tables)
    np.testing.assert_allclose(got, want, rtol=1e-15)


@pytest.mark.parametrize(
    "text",
    ["score + t[q]", "score * t[h]", "tanh(score)", "score + slopes[h] * (q - k) * (q - k)", "score * score",
     "softcap(20) * t[h]", "score + t[k] * (q - k)", "softcap(c) if q > k else score", "50 * tanh(score / 40)"],
)  # fmt: skip
def test_score_mods_that_are_no_form(text: str) -> None:
    assert isinstance(form_of(ProgramExprs(score=simplify(fk.score(text).expr))), NoForm)
