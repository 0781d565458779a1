"""The flat planner in C++: bit for bit the spans of the same planner in numpy."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support import masks
from support.lowering import brute
from support.lowering.planner_numpy import NUMPY
from support.tiers import thinned

import frisket as fk
from frisket.dsl import ir
from frisket.dsl.errors import EvaluationError
from frisket.dsl.evaluate import OPERATORS as MEANING
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import FALSE, build, lit, lookup, param, result_type, walk
from frisket.dsl.ir import random as random_
from frisket.dsl.sugar import eq, k, q
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.analysis.layout import bind, grid_of
from frisket.lowering.analysis.runs import from_records
from frisket.lowering.plan import Problem
from frisket.lowering.planner import arrays
from frisket.lowering.planner import cpp as text
from frisket.lowering.planner import planner as flat
from frisket.lowering.simplify import simplify
from frisket.runtime.machine import cpp_build as native_build
from frisket.runtime.machine.modules import load_source
from frisket.runtime.plans import run as flat_native
from lowering.planner import golden_planners

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())
DOC = frozenset({"doc"})
PLAIN = Path(brute.__file__).parents[1] / "native/plain_g++"
UNARY = {"neg", "abs", "sign", "bitnot", "not", "int", "float", "floor", "isfinite"} | ir.FLOAT_FUNCTIONS


@pytest.fixture(autouse=True, scope="module")
def _no_optimizations():
    """Where the default tests optimize less, planners are compiled without any: they are long, and run for no time."""
    with pytest.MonkeyPatch.context() as patch:
        if os.path.basename(os.environ.get("CXX", "")) == "quick_g++":
            patch.setenv("CXX", str(PLAIN))
        yield


def planner(case, sorted_):
    mask = simplify(bind(case.mask, case.tables))
    limits = {m: float(np.abs(t).max()) for m, t in case.tables.items() if t.dtype.kind == "i"}
    limits |= {m: abs(x) for m, x in case.params.items()} | dict.fromkeys("qk", 400)
    return mask, flat.planner(mask, sorted_, limits)


def without_ids(plan):
    """The planner that numpy has, which asks nothing of ids."""
    return replace(plan, disjoint=FALSE)


def compiled(plans):
    """One library for many planners: the prelude is compiled once."""
    names = [f"plan{i}" for i in range(len(plans))]
    source = "\n".join([text.prelude(), *(text.function(p, n) for p, n in zip(plans, names, strict=True))])
    library = native_build.library(source)
    found = [getattr(library, n) for n in names]
    for f in found:
        f.restype, f.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    return found


def agree(run, plan, mask, case, room=64, records=None):
    """Whether C++ gave numpy's spans; False: the interpreter refuses the mask there."""
    grid, _ = grid_of(mask, case.problem, case.block)
    at = grid.b, grid.h, grid.q, grid.k
    n = records or plan.records(-(-case.kv_len // case.block[1]))
    try:
        want = load_source(arrays.emit(plan, NUMPY, True))["plan_spans"](
            *(np.asarray(x, np.int64).reshape(-1, 1, 1) for x in at), case.sizes, case.params, case.tables,
            q_len=case.q_len, kv_len=case.kv_len, block=case.block, room=room, records=n,
        )  # fmt: skip
    except EvaluationError:
        return False
    place = flat_native.SpanRequest(at, case.problem, case.block, room=room, records=n)
    found = flat_native.called(run, plan, place, {**case.params, **case.tables})
    for got, right in zip(found, want, strict=True):
        np.testing.assert_array_equal(got, right, err_msg=str(mask))
    return True


def compare(cases):
    """Cases of (mask case, sorted tables, room) in one library; how many were compared."""
    made = [(mask, without_ids(plan)) for mask, plan in (planner(case, sorted_) for case, sorted_, _ in cases)]
    runs = compiled([plan for _, plan in made])
    return sum(
        agree(run, plan, mask, case, room)
        for run, (mask, plan), (case, _, room) in zip(runs, made, cases, strict=True)
    )  # fmt: skip


def test_cpp_planner_equals_numpy_on_written_masks():
    rng = random.Random("written")
    cases = [(masks.case(m, rng), s, 64) for m in masks.written().values() for s in (frozenset(), DOC)]
    told = {
        without_ids(planner(case, s)[1]): (case, s, room) for case, s, room in cases
    }  # most masks have no sorted table
    assert compare(list(told.values())) == len(told)
    assert len(told) > 50


def one_random(rng):
    return masks.case(masks.random_mask(rng), rng), rng.choice([frozenset(), DOC]), rng.choice([64, 64, 8, 6])


def test_cpp_planner_equals_numpy_on_random_masks():
    rng = random.Random("random")
    assert compare([(case, DOC, 64) for case in masks.short_tables()] + [one_random(rng) for _ in range(20)]) > 39


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_cpp_planner_equals_numpy_on_many_random_masks(seed):
    rng = random.Random(f"many {seed}")
    assert compare([one_random(rng) for _ in range(250)]) > 160


def columns_case(keep, q_len, block):
    n = len(keep)
    return masks.Case(lookup("keep", (k,), masks.BOOL), q_len, n, 1, 1, block, sizes=(1, 1, q_len, n),
                      tables={"keep": keep})  # fmt: skip


@pytest.mark.exhaustive
def test_room_and_records_run_out():
    """One planner, rows of many lengths and pieces, and never enough room."""
    rng = np.random.default_rng(0)
    mask, plan = planner(columns_case(np.ones(8, bool), 8, (4, 4)), frozenset())
    (run,) = compiled([plan])
    for _ in range(15):
        keep = np.repeat(rng.random(60) < 0.6, rng.choice([1, 2, 4, 30, 90], 60))
        case = columns_case(keep, int(rng.integers(1, 9)), (4, int(rng.integers(1, 5))))
        for room in (3, 5, 16, 64, 400):
            assert agree(run, plan, mask, case, room, records=int(rng.choice([1, 2, 5, 200])))


LITERALS = {
    "2147483647": 2**31 - 1, "2147483648L": 2**31, "-5": -5, "INT64_MIN": -(2**63), "true": True, "false": False,
    "4294967296.0": 2.0**32, "-0.5": -0.5, "INF": np.inf, "-INF": -np.inf, "NOT_A_NUMBER": np.nan,
}  # fmt: skip


@pytest.mark.parametrize("written", LITERALS)
def test_cpp_planner_literals_keep_their_value(written):
    assert text.LANGUAGE.literal(LITERALS[written]).text == written


def test_operators_of_operators_are_bracketed_where_they_must_be():
    """Every operator written between its operands, inside every other one, on its left and on its right."""
    atoms = {"a": (INT, 13), "b": (INT, 6), "c": (INT, 3), "u": (FLOAT, 0.5), "v": (FLOAT, -3.0), "w": (FLOAT, 1.25),
             "p": (BOOL, True), "r": (BOOL, False), "s": (BOOL, True)}  # fmt: skip
    leaves = {type: [param(n, type) for n, (t, _) in atoms.items() if t is type] for type in (INT, FLOAT, BOOL)}
    infix = [op for op, row in text.ROWS.items() if re.fullmatch(r"\{\} \S+ \{\}", row)]

    def written(e):
        return text.Text(e.name) if e.op == "param" else text._operator(e, [written(x) for x in e.args])

    made = []
    for (outer, inner), of_inner, of_outer in itertools.product(itertools.product(infix, infix), leaves, leaves):
        kept = result_type(inner, (of_inner, of_inner))
        if kept is of_outer and result_type(outer, (of_outer, of_outer)):
            low, last = build(inner, *leaves[of_inner][:2]), leaves[of_outer][2]
            made += [build(outer, low, last), build(outer, last, low)]
    assert len(made) > 150
    types = {INT: "int64_t", FLOAT: "double", BOOL: "bool"}
    names = [f"volatile {types[t]} {n} = {str(value).lower()};" for n, (t, value) in atoms.items()]
    body = [f"out[{i}] = {written(e).text};" for i, e in enumerate(made)]
    lines = [text.prelude(), 'extern "C" void frisket_all(double *out) {', *names, *body, "}"]
    run, out = native_build.library("\n".join(lines)).frisket_all, np.zeros(len(made))
    run(out.ctypes.data_as(ctypes.c_void_p))
    for e, found in zip(made, out, strict=True):
        assert found == evaluate(e, {n: value for n, (_, value) in atoms.items()}), e


INTS = [-(2**40), -100, -64, -7, -3, -1, 0, 1, 2, 3, 5, 31, 32, 63, 64, 100, 2**40]
FLOATS = [-np.inf, -1e30, -90.0, -3.5, -1.0, -0.25, -0.0, 0.0, 1e-30, 0.3, 0.5, 1.0, 2.75, 40.0, 1e30, np.inf, np.nan]
GRID = {INT: INTS, FLOAT: FLOATS, BOOL: [False, True]}
LITERAL = {INT: int, FLOAT: float, BOOL: bool}
NARROW = {"mul": range(-9, 10), "shl": range(-3, 15), "pow": range(8)}  # Ints whose results fit


def test_cpp_planner_operators_equal_the_reference():
    """Over a grid of awkward values, beside the interpreter."""
    names = {INT: "xyz", FLOAT: "uvw", BOOL: "rst"}
    some = [(op, types) for op in sorted(set(MEANING) - {"random"}) for n in (1, 2, 3)
            for types in itertools.product((BOOL, INT, FLOAT), repeat=n)
            if n == (1 if op in UNARY else 3 if op == "where" else 2) and result_type(op, types)]  # fmt: skip
    some += [("random", (INT,) * n) for n in (1, 2, 3)]
    body, wanted = [], []
    for op, types in some:
        leaves = [param(names[t][i], t) for i, t in enumerate(types)]
        e = random_(*leaves) if op == "random" else build(op, *leaves)
        grid = np.meshgrid(*(NARROW.get(op, GRID[t]) if t is INT else GRID[t] for t in types), indexing="ij")
        env = {leaf.name: x.ravel() for leaf, x in zip(leaves, grid, strict=True)}
        with np.errstate(all="ignore"):
            wanted.append((op, types, np.broadcast_to(evaluate(e, env), grid[0].size), env))
        values = {
            t: ", ".join(written(lit(LITERAL[t](x))) for x in (NARROW.get(op, INTS) if t is INT else GRID[t]))
            for t in types
        }
        text_of = written(e)
        body += [f"{{ double *to = out[{len(wanted) - 1}];"]
        kinds = [(text.TYPES[leaf.type], leaf) for leaf in leaves]
        body += [f"static const {kind} all_{x.name}[] = {{{values[x.type]}}};" for kind, x in kinds]
        body += [f"for ({kind} {x.name} : all_{x.name})" for kind, x in kinds]
        body += [f"*to++ = (double)({text_of}); }}"]
    lines = [text.prelude(), 'extern "C" void frisket_all(double **out) {', *body, "}"]
    out = [np.zeros(len(want)) for _, _, want, _ in wanted]
    places = np.array([x.ctypes.data for x in out], np.int64)
    native_build.library("\n".join(lines)).frisket_all(places.ctypes.data_as(ctypes.c_void_p))
    for found, (op, types, want, env) in zip(out, wanted, strict=True):
        if op in ("int", "floor") and types == (FLOAT,):
            want = np.clip(want, -(2**62), 2**62)
        np.testing.assert_allclose(found, want.astype(float), rtol=1e-12, err_msg=f"{op} {types} {env}")


def written(e):
    if e.op == "param":
        return e.name
    if e.op == "lit":
        return text.LANGUAGE.literal(e.name).text
    return text._operator(e, [text.Text(written(a)) for a in e.args]).text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [1, 2, 31, 4096, 4097, 5000])
def test_ranges_of_tables(n):
    """Tables short and long, with rows: searched entry by entry, and in blocks."""
    rng = np.random.default_rng(n)
    masked = [
        eq(lookup("doc", (q,)), lookup("doc", (k,))),
        lookup("t", (masks.h, q)) >= lookup("t", (masks.h, k)),
        lookup("real", (k, masks.h), masks.FLOAT) < lookup("real", (q, masks.h), masks.FLOAT),
    ]
    real = np.where(rng.random((n, 2)) < 0.01, np.nan, rng.standard_normal((n, 2)))
    tables = {
        "doc": np.sort(rng.integers(0, 1 + n // 40, n)),
        "t": rng.integers(-9, 99, (2, n)).cumsum(1),
        "real": real,
    }
    cases = [
        (masks.Case(m, n, n, 1, 2, (32, 16), sizes=(1, 2, n, n), tables=tables), s, 64)
        for m in masked for s in (frozenset(), DOC)
    ]  # fmt: skip
    assert compare(cases) == 6


def test_cpp_planner_ranges_of_nearly_all_entries():
    cases = masks.rare_entries()
    mask, plan = planner(cases[0], frozenset())
    (run,) = compiled([plan])
    assert all(agree(run, plan, mask, case) for case in cases)


def test_cpp_planner_boxes_of_tables_equal_numpy():
    rng = np.random.default_rng(3)
    n = 190
    table, line = rng.integers(-99, 99, (2, 3, 9, 21)), np.arange(n) // 9 % 5
    at = masks.b, masks.h
    mask = lookup("t", (*at, q // 21, k // 9)) >= lookup("t", (*at, k // 21, q // 9))
    spaces = lookup("t", (masks.b, q // 60, q // 21, k // 9)) >= 4
    cases = [
        (masks.Case(m, n, n, 2, 3, (8, 4), sizes=(2, 3, n, n), tables={"t": table, "line": line}), frozenset(), 64)
        for m in (mask, spaces, mask & (lookup("line", (k,)) < lookup("line", (q,))))
    ]
    assert compare(cases) == 3


def one(table, *at):
    return lookup(table, at)


MASKS_OF_IDS = {
    "documents": (q >= k) & eq(one("doc", q), one("doc", k)),
    "by head": eq(one("t", masks.h, q), one("t", masks.h, k)),
    "two tables": eq(one("doc", q), one("other", k)) & (q - k < 90),
    "beside a window": (q - k < 20) & (q >= k) | eq(one("doc", q), one("doc", k)) & (k < 100),
    "either": eq(one("doc", q), one("doc", k)) | eq(one("other", q), one("other", k)),
    "both": eq(one("doc", q), one("doc", k)) & (eq(one("other", q), one("other", k)) | (k < 3)),
}


def case_of_ids(name, n, tables):
    used = {x.name for x in walk(MASKS_OF_IDS[name]) if x.op == "lookup"}
    return masks.Case(MASKS_OF_IDS[name], n, n, 1, 2, (24, 16), sizes=(1, 2, n, n), tables={t: tables[t] for t in used})


@cache
def planners_of_ids():
    """(plan, its function) with what it asks of ids and without, by the name of the mask; in one library."""
    tables = {"doc": np.full(1, 5000), "t": np.full((1, 1), 5000), "other": np.full(1, 5000)}
    plans = {name: planner(case_of_ids(name, 700, tables), frozenset())[1] for name in MASKS_OF_IDS}
    both = [[plan, without_ids(plan)] for plan in plans.values()]
    runs = iter(compiled([plan for pair in both for plan in pair]))
    return {name: [(plan, next(runs)) for plan in pair] for name, pair in zip(plans, both, strict=True)}


@pytest.mark.parametrize("ids", [7, 64, 5000])
@pytest.mark.parametrize("name", thinned(MASKS_OF_IDS))
def test_ids_in_any_order(name, ids):
    """No tile with a visible pair is left out, and hardly one without: ranges of ids alone leave out few."""
    rng, n = np.random.default_rng(ids), 700
    other = rng.permutation(ids)[: n // 25]
    tables = {
        "doc": rng.integers(-9, ids - 9, n // 20).repeat(20),
        "t": rng.integers(0, ids, (2, n // 28)).repeat(28, 1),
        "other": other.repeat(n // len(other) + 1)[:n],
    }
    case = case_of_ids(name, n, tables)
    mask, _ = planner(case, frozenset())
    problem = Problem(n, n, 1, 2, case.origin, case.sizes)
    grid, slice_of = grid_of(mask, problem, case.block)
    truth = brute.kinds(case.mask, n, n, **case.options)
    read = []
    for made, run in planners_of_ids()[name]:
        at = grid.b, grid.h, grid.q, grid.k
        place = flat_native.SpanRequest(at, problem, case.block, room=64, records=22)
        bounds, count, _ = flat_native.called(run, made, place, case.tables)
        runs, kinds = from_records(bounds, count), np.zeros((*count.shape, grid.columns), np.uint8)
        for s, row, start, stop, kind in zip(runs.slice, runs.row, runs.start, runs.stop, runs.kind, strict=True):
            kinds[s, row, start:stop] = kind
        kinds = kinds[slice_of]
        assert ((kinds == truth) | (kinds == 1)).all()
        read.append((kinds > 0).sum())
    assert read[0] <= read[1]
    assert read[0] <= 1.1 * (truth > 0).sum()


@pytest.mark.parametrize("name", golden_planners.NAMES)
def test_golden_cpp_planner(name, golden):
    made = golden_planners.made(name)
    golden_planners.check(golden, name, ".cpp", text.function)
    assert text.emit(made).endswith(text.function(made))


# -- in use -----------------------------------------------------------------------------------------------


@pytest.fixture
def watched(monkeypatch):
    """How often a planner in C++ ran."""
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    ran = []
    real = flat_native.called
    monkeypatch.setattr(flat_native, "called", lambda *a: ran.append(1) or real(*a))
    return ran


def documents(torch, n):
    """Documents of 10 tokens as tables that take some care to read."""
    doc = torch.arange(n) // 10
    spaced = torch.stack([doc, doc], 1)[:, 0]
    return {
        "int64": doc, "int16": doc.short(), "uint8": doc.to(torch.uint8), "strided": spaced,
        "a parameter": torch.nn.Parameter(doc, requires_grad=False),
    }  # fmt: skip


def test_tables_of_torch(watched, monkeypatch):
    torch = pytest.importorskip("torch")
    att = fk.compile("causal & same(doc)")
    found = [att.plan(100, 100, flat=True, doc=x).spans((16, 16)) for x in documents(torch, 100).values()]
    assert len(watched) == 2 * len(found)  # for the tile of a call too
    monkeypatch.setenv("FRISKET_BACKEND", "library")
    want = att.plan(100, 100, flat=True, doc=torch.arange(100) // 10).spans((16, 16))
    assert len(watched) == 2 * len(found)
    for got in found:
        torch.testing.assert_close(got.bounds, want.bounds)
        torch.testing.assert_close(got.count, want.count)
        assert got.overflow.dtype == torch.bool


def test_real_tables_of_torch(watched):
    torch = pytest.importorskip("torch")
    att = fk.compile("x[k] < 0.5")
    x = torch.rand(64).bfloat16().requires_grad_()
    seen = [att.plan(64, 64, flat=True, x=t).spans((16, 16)).bounds for t in (x, x.float().detach(), x.double())]
    assert watched
    torch.testing.assert_close(seen[0], seen[1])
    torch.testing.assert_close(seen[0], seen[2])


def test_tensors_without_memory_take_the_torch_planner(watched):
    """Fake tensors and those of a transform: nothing of theirs may be read."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    att = fk.compile("causal & same(doc)")
    doc = torch.arange(100) // 10
    with FakeTensorMode() as mode:
        att.plan(100, 100, flat=True, doc=mode.from_tensor(doc))
    torch.func.vmap(lambda x: att.plan(100, 100, flat=True, doc=x).spans((16, 16)).bounds)(torch.stack([doc, doc]))
    assert not watched


@pytest.mark.exhaustive
def test_tables_of_jax(watched):
    jax = pytest.importorskip("jax")
    att = fk.compile("causal & same(doc)")
    doc = jax.device_put(np.arange(100, dtype=np.int32) // 10)

    def bounds(doc):
        return att.plan(100, 100, flat=True, doc=doc).spans((16, 16)).bounds

    got = bounds(doc)
    assert watched
    ran = len(watched)
    want = jax.jit(bounds)(doc)  # traced: planned by XLA
    assert len(watched) == ran
    np.testing.assert_array_equal(got, want)
