"""The interval of keys that a query sees, beside the mask asked of every pair."""

import numpy as np
import pytest
from support.attention_cases import DOCUMENTS, facts
from support.attention_cases import same_doc as same

from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import TRUE, lookup, param
from frisket.dsl.sugar import eq, h, k, q
from frisket.lowering.analysis.solve import ends_of
from frisket.lowering.plan import ProgramFacts, make_plan
from frisket.lowering.simplify import ProgramExprs, simplify

N = 40
TABLES = {"end": np.random.default_rng(3).integers(-2, N + 2, N), "start": np.array([5]), "size": np.array([-3, 4])}
MASKS = {
    "causal": q >= k,
    "window": (q >= k) & (q - k < 7),
    "strict": (q > k) & (q - k <= param("w")),
    "both sides": (q - k <= 3) & (k - q <= 5),
    "chunks": (q >= k) & eq(q // 8, k // 8),
    "steps": 3 * k <= 2 * q + 1,
    "behind a constant": (k >= 4) & (k < param("n")) & (q >= 9),
    "a query alone": (q % 3 > 0) & (k <= q),
    "a head alone": (h > 0) & (k <= q),
    "ends from a table": (k < lookup("end", (q,))) & (k >= q - 6),
    "one key": eq(q, k),
    "prefix": (q >= k) | (k < 6),
    "window of a prefix": ((q >= k) | (k < param("w"))) & (q - k < 9),
    "first rows see all": (k >= q - 3) | (q < 9) | eq(q % 3, 0),
    "either window": (q - k < 7) | (q - 2 * k < 4) | (k >= 30),
    "chunks behind a query": (k >= q // lookup("size", (h,)) * lookup("size", (h,))) & (k >= q),
    "dilated": (q >= k) & (q - k < 12) & eq((q - k) % 4, 0),
}


def seen(e, at):
    return np.broadcast_to(evaluate(e, at | {"w": 5, "n": 30}, TABLES), (N, N))


@pytest.mark.parametrize("axis", "kq")
@pytest.mark.parametrize("name", MASKS)
def test_ends_are_the_mask(name, axis):
    mask = simplify(MASKS[name])
    found = ends_of(mask, axis)
    if (name, axis) in {("first rows see all", "q"), ("either window", "q")}:
        assert found is None  # no end for the keys that all queries see, or for remainders
        return
    assert found is not None
    left = {("dilated", "k"), ("dilated", "q"), ("ends from a table", "q"), ("a query alone", "q"),
            ("chunks behind a query", "q")}  # fmt: skip
    assert (found.rest is TRUE) == ((name, axis) not in left)
    for head in (0, 1):
        at = {"q": np.arange(N)[:, None], "k": np.arange(N)[None, :], "h": head}
        other = at[axis]
        made = seen(found.rest, at) & seen(found.asks, at)
        if found.first is not None:
            made = made & (other >= seen(found.first, at))
        if found.last is not None:
            made = made & (other <= seen(found.last, at))
        assert (made == seen(mask, at)).all()


@pytest.mark.parametrize("axis", "kq")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_ends_of_runs_are_the_mask(name, axis):
    case, proven = DOCUMENTS[name]
    mask = simplify(case.mask)
    made = make_plan(ProgramExprs(mask), facts=ProgramFacts(table_facts=facts(case.but(mask=mask))))
    ends = made.by_query if axis == "k" else made.by_key
    if not proven:
        assert not made.run_tables
        return
    tables = {n: np.asarray(t) for n, t in made.table_values(case.tables).items()}
    at = {"q": np.arange(N)[:, None], "k": np.arange(N)[None, :], "b": case.batch - 1}
    slots = made.slot_values({})

    def value(e):
        return np.broadcast_to(evaluate(e, at | slots, tables), (N, N))

    assert (ends.rest is TRUE) == ((name, axis) != ("padding", "q"))
    shown = value(ends.asks) & value(ends.rest)
    if ends.first is not None:
        shown = shown & (at[axis] >= value(ends.first))
    if ends.last is not None:
        shown = shown & (at[axis] <= value(ends.last))
    assert (shown == np.broadcast_to(evaluate(mask, at, case.tables), (N, N))).all()


def test_ends_of_runs_stay_within_the_integers():
    """Twice the end of a run without an end passes 32 bits where positions are far; then entries are compared."""
    halves = eq(lookup("doc", (q // 16,)), lookup("doc", (k // 16,)))
    near, far = ({"q": reach, "k": reach, "doc": 9} for reach in (2**20, 2**29))
    held = frozenset({("has_runs", "doc")})
    assert make_plan(ProgramExprs(same), facts=ProgramFacts(limits=near, table_facts=held)).run_tables
    assert not make_plan(ProgramExprs(same), facts=ProgramFacts(limits=far, table_facts=held)).run_tables
    assert (
        make_plan(ProgramExprs(halves), facts=ProgramFacts(limits=near, table_facts=held)).by_query is None
    )  # 16 * 2**28


def test_masks_without_bounds_have_no_ends():
    assert ends_of(simplify(eq((q - k) % 4, 0))) is None
    assert ends_of(eq(lookup("doc", (q,)), lookup("doc", (k,)))) is None


def test_ends_that_leave_the_integers_of_the_mask_are_none():
    """`k <= q + s0` may pass 2**31 where `q - k >= -s0` does not."""
    made = make_plan(ProgramExprs(k - q <= param("w")), facts=ProgramFacts(limits={"w": 2**31 - 1}))
    assert not made.int64
    assert made.by_query is None
    assert make_plan(ProgramExprs(k - q <= param("w")), facts=ProgramFacts(limits={"w": 2**20})).by_query is not None
