"""Spans of few queries are those of the analysis, at every position."""

import numpy as np
import pytest
from support.tiers import thinned

import frisket as fk
from frisket.lowering.analysis.layout import SLICES, analyse, bind, decode_spans
from frisket.lowering.analysis.table import Table
from frisket.lowering.analysis.tiles import Scope
from frisket.lowering.plan import Problem
from frisket.lowering.simplify import ProgramExprs, prepare, simplify

rng = np.random.default_rng(5)
DOC = np.repeat([4, 1, 7, 2, 9], [30, 1, 50, 70, 49])
SORTED = np.sort(DOC)
TABLES = {
    "doc": DOC,
    "sorted_doc": SORTED,
    "off": np.array([0, 30, 31, 81, 151, 200]),
    "pad": np.array([200, 90, 31]),
    "per_batch": np.stack([DOC, SORTED, np.arange(200) // 33]),
    "start": np.array([0, 7, 64]),
    "gain": rng.random(200),
    "on": np.array([True, False]),
}
SOLVED = [
    "causal",
    "window(40)",
    "causal & window(17)",
    "sinks(4) | causal & window(30)",
    "sinks(4) & causal | causal & window(30)",
    "prefix(70)",
    "chunked(16)",
    "q // 16 >= k // 16",
    "causal & !window(20)",
    "k < 50 | k >= 100 & k < 120 | q == k",
    "q < 100",
    "causal & q >= 20 & q < 90",
    "k < pad[b] & causal",
    "k >= start[b] & causal & k < pad[b]",
    "causal & (on[h] | window(9))",
    "false",
    "same(doc)",
    "causal & same(doc)",
    "causal & same(sorted_doc) & window(12)",
    "segment(off, q) == segment(off, k)",
    "causal & segment(off, q) == segment(off, k)",
    "causal & per_batch[b, q] == per_batch[b, k]",
    "q - k < 10 + where(q > n, 1, 0) & causal",
    "causal & k * 2 < n",
]
PLACES = [(q_len, at) for q_len in (1, 2, 5, 16) for at in (0, 1, 7, 29, 31, 32, 64, 79, 80, 101, 150, 184)]


def ready(text):
    mask = fk.mask(text, **{n: t for n, t in (TABLES | {"n": 90}).items() if n in fk.mask(text).unbound})
    expr = simplify(bind(prepare(ProgramExprs(mask.expr)).visible, mask.tables))
    return mask, expr, decode_spans(expr, mask.scalars, {n: Table(t) for n, t in mask.tables.items()})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", thinned(SOLVED))
def test_spans_of_few_queries(text):
    mask, expr, made = ready(text)
    assert made is not None
    met = 0
    for q_len, at in PLACES:
        for batch, heads, kv_len, block, origin in (
            (1, 1, 200, (96, 64), (0, 0, at, 0)),
            (1, 2, at + q_len, (16, 32), (0, 0, at, 0)),
            (3, 2, 128, (q_len, 16), (0, 0, at, 72)),
            (3, 1, 100, (24, 8), (0, 0, np.array([at, 3, 90]), np.array([0, 5, 100]))),
            (2, 1, 100, (24, 8), (1, 1, np.array([at, at]), 0)),
        ):
            problem = Problem(q_len, kv_len, batch, heads, origin, (3, 2, 200, 200))
            scope = Scope({**problem.named_sizes, **mask.scalars}, {n: Table(t) for n, t in mask.tables.items()})
            want, have = analyse(expr, problem, block, scope), made.spans(problem, block)
            assert all(stop <= size for stop, size in zip(problem.ends, problem.full, strict=True))
            if want.method not in ("closed form", "bounds"):
                assert have is None
                continue
            met += 1
            assert have is not None
            assert made.formula == want.bounds
            for name in ("bounds", "count", "slice_of"):
                a, b = getattr(have, name), getattr(want.spans, name)
                assert a.dtype == b.dtype
                assert a.tolist() == b.tolist(), (name, q_len, at, origin)
    assert met


@pytest.mark.parametrize("text", ["(q ^ k) % 3 == 0", "causal & doc[q] >= 3", "doc[q] < doc[k]", "gain[q] > 0.5"])
def test_masks_without_closed_spans_leave_the_few_query_path(text):
    _, _, made = ready(text)
    assert made is None or made.spans(Problem(4, 200, origin=(0, 0, 28, 0), sizes=(1, 1, 200, 200)), (96, 64)) is None


def test_rows_and_slices_have_a_limit():
    _, _, made = ready("causal & k < pad[b]")
    where = {"origin": (0, 0, 20, 0), "sizes": (99, 1, 200, 200)}
    assert made.spans(Problem(9, 200, 3, **where), (8, 64)) is None
    assert made.spans(Problem(8, 200, SLICES + 1, **where), (8, 64)) is None
    assert made.spans(Problem(8, 200, 3, **where), (8, 64)) is not None
