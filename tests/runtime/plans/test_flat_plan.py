"""Plans whose tables are traced or live on a device: under jit, shared by layers, without a copy."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.tiers import default_only

import frisket as fk
from frisket.caches.jax import KVCache
from frisket.dsl.errors import LoweringError, ParameterError, ShapeError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import INT, walk
from frisket.lowering.analysis.runs import from_records
from frisket.lowering.analysis.table import derived_table
from frisket.lowering.plan import LoopPlan, make_plan
from frisket.lowering.simplify import ProgramExprs, simplify
from frisket.runtime.attention import report as module
from frisket.runtime.backends.base import RECORDS, register
from frisket.runtime.machine.cpp_build import reason
from frisket.runtime.plans import run as flat_run

S = 300
RNG = np.random.default_rng(0)
Q, K, V = (jnp.asarray(RNG.standard_normal((2, S, 2, 16)).astype(np.float32)) for _ in range(3))
DOCS = [np.sort(RNG.integers(0, n, S)).astype(np.int32) for n in (1, 3, 5, 20, 299)] + [
    RNG.integers(0, 4, S).astype(np.int32)
]
OFF = np.array([0, 17, 160, 161, S], np.int32)
WIDE = "x[q] - x[k] > w", "score + x[k] % 3"  # in 64 bits, if x has large entries


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=3e-6)


def dense(mask, q=Q, **params):
    return fk.reference(*(np.asarray(x) for x in (q, K, V)), mask, layout="bshd", **params)


@pytest.mark.exhaustive
def test_documents_that_change_every_step():
    """One compilation serves them all, sorted or not."""
    att, traced = fk.compile("causal & same(doc)", tile=(64, 32)), []

    @jax.jit
    def step(q, k, v, doc):
        traced.append(1)
        return att(q, k, v, doc=doc)

    for doc in DOCS:
        out = step(Q, K, V, doc)
        close(out, dense("causal & same(doc)", doc=doc))
    close(out, att(Q, K, V, doc=doc))
    assert len(traced) == 1
    assert step._cache_size() == 1


TRACED = {
    "causal & document(off)": {"off": OFF},
    "causal & window(w)": {"w": 40},
    "padding(len)": {"len": np.array([100, 250])},
    "causal & (same(doc) | sinks(n)) & q - k < left[h]": {"doc": DOCS[2], "n": 3, "left": np.array([20, 200])},
    "global_tokens(t) | window(9)": {"t": RNG.random(S) < 0.02},
    "q >= k & k >= start[q]": {"start": np.maximum(np.arange(S) - RNG.integers(0, 90, S), 0)},
    "param doc: sorted int[Q_LEN]\nmask = causal & same(doc)": {"doc": DOCS[3]},
}


@pytest.mark.parametrize("mask", default_only(TRACED, [*TRACED][3]))
def test_masks_with_traced_parameters(mask):
    params = TRACED[mask]
    found = jax.jit(lambda p: fk.attention(Q, K, V, mask, return_lse=True, **p))(params)
    for got, exact in zip(found, dense(mask, return_lse=True, **params), strict=True):
        close(got, exact)


@pytest.mark.exhaustive
def test_score_tables_may_be_traced_too():
    """The mask alone decides the layout; without a traced table in it the host does."""
    bias = RNG.standard_normal((2, S)).astype(np.float32)
    text = "score + bias[h, k]"
    out = jax.jit(lambda b: fk.attention(Q, K, V, "causal", text, bias=b))(bias)
    close(out, fk.attention(Q, K, V, "causal", text, bias=bias))
    assert "plan_spans" not in str(jax.make_jaxpr(lambda b: fk.attention(Q, K, V, "causal", text, bias=b))(bias))


def layers(att, n):
    def run(q, k, v, doc):
        plan = att.plan(S, S, 2, 2, doc=doc)
        for _ in range(n):
            q = att(q, k, v, plan=plan)
        return q

    return run


def test_a_plan_is_made_once_and_shared():
    att = fk.compile("causal & same(doc)")
    text = str(jax.make_jaxpr(layers(att, 3))(Q, K, V, DOCS[2]))
    assert (text.count("name=plan_spans"), text.count("frisket_forward[")) == (1, 3)


@pytest.mark.exhaustive
def test_layers_that_share_a_plan_equal_the_reference():
    att, want = fk.compile("causal & same(doc)"), Q
    for _ in range(2):
        want = dense("causal & same(doc)", want, doc=DOCS[2]).astype(np.float32)
    close(jax.jit(layers(att, 2))(Q, K, V, DOCS[2]), want)


@pytest.mark.exhaustive
def test_plans_are_pytrees():
    """A plan leaves one jitted function and enters another, and a scan closes over it."""
    att = fk.compile("causal & same(doc)")
    planned = jax.jit(lambda doc: att.plan(S, S, 2, 2, doc=doc))
    plan = planned(DOCS[3])
    assert repr(plan) == "FlatPlan(mask = causal & same(doc), 300 x 300, batch 2, 2 heads)"
    assert not plan.overflow
    attend = jax.jit(lambda q, plan: att(q, K, V, plan=plan))
    close(attend(Q, plan), dense("causal & same(doc)", doc=DOCS[3]))
    attend(Q, planned(DOCS[1]))
    assert attend._cache_size() == 1
    looped = jax.jit(lambda q, plan: jax.lax.scan(lambda x, _: (att(x, K, V, plan=plan), None), q, None, length=2)[0])
    close(looped(Q, plan), attend(attend(Q, plan), plan))
    again = jax.tree.map(lambda x: x, plan)
    close(attend(Q, again), attend(Q, plan))


@pytest.mark.exhaustive
def test_a_table_per_batch_entry_by_vmap():
    att = fk.compile("causal & same(doc)")
    each = jax.jit(jax.vmap(lambda q, k, v, doc: att(q[None], k[None], v[None], doc=doc)[0]))
    out = each(Q, K, V, np.stack(DOCS[2:4]))
    close(out, dense("causal & ids[b, q] == ids[b, k]", ids=np.stack(DOCS[2:4])))


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", [pytest.param(100, marks=pytest.mark.exhaustive), np.array([100, 50])])
def test_origins_and_crops(start):
    """Positions are global, whoever plans."""
    same, q = "causal & same(doc)", jnp.asarray(np.asarray(Q)[:, 100:221])
    att, where = fk.compile(same, tile=(32, 32)), {"origin": (0, 0, start, 0), "sizes": (2, 2, S, S)}
    close(jax.jit(lambda doc: att(q, K, V, doc=doc, **where))(DOCS[2]), dense(same, q, doc=DOCS[2], **where))


# -- torch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("doc", DOCS)
def test_torch_tables_planned_by_torch(doc):
    q, k, v = (torch.from_numpy(np.array(x)).swapaxes(1, 2) for x in (Q, K, V))
    att = fk.compile("causal & same(doc)", tile=(32, 16))
    plan = att.plan(S, S, 2, 2, flat=True, doc=torch.from_numpy(doc))
    host = att.plan(S, S, 2, 2, doc=torch.from_numpy(doc))
    assert (type(plan).__name__, type(host).__name__) == ("FlatPlan", "Plan")
    found = plan.spans((32, 16))
    assert found.bounds.dtype == found.count.dtype == torch.int32
    if not plan.overflow:
        want = host.work((32, 16)).spans
        assert (found.count.sum(), want.count.sum()) == (want.count.sum(),) * 2
    close(att(q, k, v, plan=plan), att(q, k, v, plan=host))


@pytest.mark.parametrize("how", ["counted", "by numpy"])
def test_tables_that_are_written_to_after_they_were_planned(how):
    q, doc, bias = torch.randn(1, 1, 600, 8), torch.arange(600) // 40, torch.zeros(600)
    att = fk.compile("causal & same(doc)", "score + bias[k]")
    plan = att.plan(600, 600, flat=True, doc=doc, bias=bias)
    for _ in range(2):
        att(q, q, q, plan=plan)
    bias += torch.randn(600)  # which the mask does not read
    torch.testing.assert_close(att(q, q, q, plan=plan), att(q, q, q, doc=doc, bias=bias))
    (doc if how == "counted" else doc.numpy())[:] = 0
    with pytest.raises(ParameterError, match=r"table `doc` has changed since it was planned\n  make another plan"):
        att(q, q, q, plan=plan)
    torch.testing.assert_close(
        att(q, q, q, plan=plan.with_tables({"doc": doc, "bias": bias})), att(q, q, q, doc=doc, bias=bias)
    )


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(reason()), reason="no compiler")
@pytest.mark.parametrize("made", [torch.tensor, jnp.asarray])
def test_wider_tables_after_a_plan_of_narrow_ones(made):
    """The kernel counts in 64 bits then: differences of 2**30 and -2**30 are beyond 32."""
    rng, at = np.random.default_rng(2), np.arange(24)
    arrays = [rng.normal(size=(1, 2, 24, dim)).astype("f") for dim in (8, 8, 64)]
    att = fk.compile(*WIDE, backend="cpp", w=1)
    plan = att.plan(24, 24, heads=2, flat=True, x=made(at.astype("i")))
    for x in (at, (1 << 30) * (at % 3 - 1), -at):
        found = att(*map(made, arrays), plan=plan.with_tables({"x": made(x.astype("i"))}), layout="bhsd")
        close(found, fk.reference(*arrays, *WIDE, layout="bhsd", x=x, w=1))


def test_flat_plan_shows_the_text_of_its_planner():
    plan = fk.compile("causal & same(doc)").plan(S, S, flat=True, doc=torch.from_numpy(DOCS[0]))
    assert "def plan_spans(" in plan.planner
    assert plan.planner == plan.planner


@pytest.mark.parametrize("array", [torch.tensor, pytest.param(jnp.asarray, marks=pytest.mark.exhaustive)])
def test_a_tile_of_another_size_is_planned_when_it_is_met(array):
    plan = fk.compile("causal & same(doc)").plan(S, S, 2, 2, flat=True, doc=array(DOCS[2]))
    att, (q, k, v) = fk.compile("causal & same(doc)", tile=(16, 64)), (array(np.asarray(x)) for x in (Q, K, V))
    close(att(q, k, v, plan=plan, layout="bshd"), dense("causal & same(doc)", doc=DOCS[2]))


# -- transposed -----------------------------------------------------------------------------------------------


def tiles(spans, columns):
    """Kinds [slices, rows, columns] of the tiles of records."""
    runs = from_records(np.asarray(spans.bounds), np.asarray(spans.count))
    grid = np.zeros((*spans.count.shape, columns), np.uint8)
    for s, row, start, stop, kind in zip(runs.slice, runs.row, runs.start, runs.stop, runs.kind, strict=True):
        grid[s, row, start:stop] = kind
    return grid[spans.slice_of]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("convert", "backend"), [(torch.from_numpy, None), (torch.from_numpy, "library"), (jnp.asarray, None)]
)
@pytest.mark.parametrize("doc", [DOCS[2], DOCS[5]])
def test_columns_are_planned_with_queries_and_keys_exchanged(doc, convert, backend, monkeypatch):
    """What no row of queries reads, no column of keys is read by; and the other way round."""
    if backend:
        monkeypatch.setenv("FRISKET_BACKEND", backend)
    mask, where = "q >= k & q - k < 90 & same(doc)", {"origin": (0, 0, 20, 0), "sizes": (2, 2, S, S)}
    plan = fk.compile(mask).plan(S - 50, S - 10, 2, 2, flat=True, doc=convert(doc), **where)
    want = fk.mask(mask, doc=doc).layout(S - 50, S - 10, 2, 2, block=(64, 32), **where)
    found = tiles(plan.columns((64, 32)), want.rows).swapaxes(2, 3)
    np.testing.assert_array_equal(found, tiles(plan.rows((64, 32)), want.columns))
    np.testing.assert_array_equal(found, want.kinds())


@pytest.mark.parametrize("text", ["causal & window(70)", "causal & same(doc)"])
def test_columns_of_what_the_host_knows(text):
    """Columns of a plan, and of a flat plan whose tables only the score mod reads."""
    doc = {"doc": DOCS[2]} if "doc" in text else {}
    att = fk.compile(text, "score + bias[k]", **doc)
    for plan in (
        att.plan(S, S, 2, 2, bias=np.zeros(S, np.float32)), att.plan(S, S, 2, 2, flat=True, bias=torch.zeros(S))
    ):  # fmt: skip
        kinds = fk.mask(text, **doc).layout(S, S, 2, 2, block=(64, 32)).kinds()
        np.testing.assert_array_equal(tiles(plan.rows((64, 32)), 10), kinds)
        np.testing.assert_array_equal(tiles(plan.columns((64, 32)), 5).swapaxes(2, 3), kinds)
        assert plan.columns((64, 32)) is plan.columns((64, 32))


# -- facts and mistakes ---------------------------------------------------------------------------------------

SORTED = "param doc: sorted int[Q_LEN]\nmask = causal & same(doc)"
UNSORTED = r"^`doc` is declared sorted and entry \[\d+\] is \d+ after \d+; sort the entries, or drop `sorted`$"


def test_declared_facts_are_checked_on_the_host():
    with pytest.raises(ParameterError, match=UNSORTED):
        fk.mask(SORTED, doc=DOCS[-1])
    with pytest.raises(ParameterError):
        fk.compile(SORTED)(Q, K, V, doc=DOCS[-1])
    with pytest.raises(ParameterError):
        fk.mask(SORTED, doc=DOCS[-1].astype(np.uint8))
    assert fk.mask(SORTED, doc=DOCS[3]).params["doc"][0] == DOCS[3][0]


def test_declared_facts_are_checked_on_the_device(monkeypatch):
    monkeypatch.setenv("FRISKET_CHECK", "1")
    made = jax.jit(lambda doc: fk.compile(SORTED).plan(S, S, doc=doc).overflow)

    def run(doc):
        made(doc).block_until_ready()
        jax.effects_barrier()

    run(DOCS[3])
    with pytest.raises(Exception, match="declared sorted"):
        run(DOCS[-1])
    with pytest.raises(RuntimeError, match="declared sorted"):
        fk.compile(SORTED).plan(S, S, flat=True, doc=torch.from_numpy(DOCS[-1]))


def test_calls_under_jit_are_checked_when_they_run(monkeypatch):
    monkeypatch.setenv("FRISKET_CHECK", "1")
    att, seen = fk.compile("causal & same(doc)"), []
    report = module.report

    def watched(*args, **terms):
        seen.append(report(*args, **terms))
        return seen[-1]

    monkeypatch.setattr(module, "report", watched)
    jax.jit(lambda q, doc: att(q.astype("bfloat16"), *(x.astype("bfloat16") for x in (K, V)), doc=doc))(Q, DOCS[2])
    jax.jit(lambda q: att(q, K, V, doc=DOCS[2]))(Q)
    jax.effects_barrier()
    assert [r.dtype for r in seen] == ["bfloat16", "float32"]
    assert all(r.good for r in seen)


@pytest.mark.parametrize(
    ("mask", "params", "error", "message"),
    [
        ("same(doc)", {"doc": np.zeros((2, S), int)}, ParameterError,
         "`doc` is a table with 1 axis in the text, the value is a table with 2 axes"),
        ("same(doc)", {"doc": np.zeros(S, np.float32)}, ParameterError,
         "`doc` is Int in the text, the value is Float; declare it: `param doc: float[_]`"),
        ("same(doc)", {"doc": np.zeros(0, int)}, ParameterError, "table `doc` is empty"),
        ("same(doc)", {"doc": DOCS[0], "docs": DOCS[0]}, ParameterError,
         "`docs` is given and no mask, score mod or weight uses it; did you mean `doc`?"),
        ("same(doc) & k < n[h]", {"doc": DOCS[0]}, ParameterError, "`n` has no value; give it: n=<array>"),
        ("segment(off, q + 1) == segment(off, k)", {"off": OFF}, LoweringError,
         "`segment(off, q + 1)` asks a traced table of offsets for something other than a position\n"
         "  give the offsets as values of the host, or the segment of every position as a table"),
    ],
)  # fmt: skip
def test_traced_plans_refuse_bad_tables(mask, params, error, message):
    att = fk.compile(mask)
    with pytest.raises(error) as caught:
        jax.jit(lambda p: att(Q, K, V, **p))(params)
    assert str(caught.value) == message


def test_a_plan_for_other_lengths():
    att = fk.compile("same(doc)")
    with pytest.raises(ShapeError, match="the plan is for"):
        jax.jit(lambda doc: att(Q, K, V, plan=att.plan(S, S, 1, 2, doc=doc)))(DOCS[0])
    with pytest.raises(LoweringError, match="the dense reference needs values"):
        jax.jit(lambda doc: fk.attention(Q, K, V, "same(doc)", backend="dense", doc=doc))(DOCS[0])


def plan_and_tables(att, framework, length, **values):
    """A flat plan and the tables that its kernel reads; JAX makes them in one program."""
    plans = []

    def tables(values):
        plans.append(att.plan(length, length, flat=True, **values).work((64, 64)).plan)
        return flat_run.kernel_tables(plans[0], framework, values, length, None)

    made = (jax.jit(tables) if framework == "jax" else tables)(values)
    return plans[0], made


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_offsets_in_fewer_bits_than_positions_need(framework):
    off = np.array([0, 17, 90, 120], np.int8)  # the last document goes on to the end
    given = jnp.asarray(off) if framework == "jax" else torch.from_numpy(off)
    _, found = plan_and_tables(fk.compile("document(off)"), framework, S, off=given)
    np.testing.assert_array_equal(found["t0"], np.searchsorted(off[1:-1], np.arange(S), "right"))


NATIVE = pytest.mark.skipif(bool(reason()), reason="no compiler")
LARGE = [("torch", "aten", n) for n in ("int32", "int64", "uint32")]
LARGE += [pytest.param("torch", "cpp", "int64", marks=NATIVE), pytest.param("jax", "cpp", "uint32", marks=NATIVE)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("framework", "backend", "dtype"), LARGE)
def test_entries_past_the_largest_that_kernels_expect(framework, backend, dtype):
    """A flat plan of tables on the host sees that entries, or what the mask makes of them, need 64 bits."""
    ends = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**61), 2**32), "uint32": (2**31, 2**32 - 1)}[dtype]
    x = np.array([*ends, 0, 2])[np.arange(64) % 4]
    given = jnp.asarray(x.astype(dtype)) if framework == "jax" else torch.from_numpy(x.astype(dtype))
    q, v = np.ones((1, 1, 64, 8), np.float32), np.eye(64, dtype=np.float32)[None, None]
    q, v = map(jnp.asarray if framework == "jax" else torch.from_numpy, (q, v))
    for program, seen in ((WIDE, np.subtract.outer(x, x) > 1), (("x[q] >= x[k]",), x[:, None] >= x)):
        att, w = fk.compile(*program, backend=backend), {"w": 1} if program == WIDE else {}
        plan = att.plan(64, 64, flat=True, x=given, **w)
        out = att(q, q, v, plan=plan, layout="bhsd")
        np.testing.assert_array_equal(np.asarray(out)[0, 0] > 0, seen)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", ["aten", pytest.param("cpp", marks=NATIVE)])
@pytest.mark.parametrize("flat", [None, True])
def test_ids_at_both_ends_of_int64(backend, flat):
    """The largest and the least int64 stand for no document or the last: they are compared, not computed with."""
    x = torch.tensor([-(2**63), 2**63 - 1, 0, 2**63 - 2]).repeat_interleave(16)
    q, v = torch.ones(1, 1, 64, 8), torch.eye(64)[None, None]
    for text, seen in (("same(x)", x[:, None] == x), ("x[q] >= x[k]", x[:, None] >= x)):
        att = fk.compile(text, backend=backend)
        assert torch.equal(att(q, q, v, plan=att.plan(64, 64, flat=flat, x=x))[0, 0] > 0, seen)
    att = fk.compile("x[q] * 2 > x[k]", backend=backend)
    with pytest.raises(fk.FrisketError, match=r"leaves? 64 bits"):
        att.plan(64, 64, flat=flat, x=x).work((64, 64))


WHOLE = {
    "abs(x[q] - x[k]) < 4": lambda x, at: abs(x[:, None] - x) < 4,
    "x[q] * 4 >= x[k]": lambda x, at: x[:, None] * 4 >= x,
    "k < x[q] + 1 & q < x[k] + 1": lambda x, at: (at < x[:, None] + 1) & (at[:, None] < x + 1),
    "x[q] >= x[k]": lambda x, at: x[:, None] >= x,
}

INTS = ("int32", "uint32")
ONES, EYE = (jnp.asarray(x.astype(np.float32)) for x in (np.ones((1, 64, 1, 8)), np.eye(64)[None, :, None]))


def value_and_transpose(run, v):
    """`run(v)`, in which a query sees the keys that are not 0, and its transpose, in which keys see queries."""
    out, pull = jax.vjp(run, v)
    return out, pull(v)[0]


@pytest.mark.skipif(bool(reason()), reason="no compiler")
@pytest.mark.parametrize(("text", "dtype"), [
    pytest.param(*case, marks=() if case == ("abs(x[q] - x[k]) < 4", "int32") else pytest.mark.exhaustive)
    for case in product(WHOLE, INTS)
])  # fmt: skip
def test_traced_entries_may_be_any_that_their_dtype_holds(text, dtype):
    """Native kernels computed with entries from 2^28 on in 32 bits, which wrapped, under `jax.jit` alone."""
    ends = np.iinfo(dtype)
    x = np.array([ends.min, ends.max, 2**29, 5])[np.arange(64) % 4]
    att = fk.compile(text, backend="cpp")
    call = jax.jit(lambda x: value_and_transpose(lambda v: att(ONES, ONES, v, x=x), EYE))
    out, transpose = map(np.asarray, call(x.astype(dtype)))
    seen = WHOLE[text](x, np.arange(64))
    np.testing.assert_array_equal(out[0, :, 0] > 0, seen)
    np.testing.assert_array_equal(transpose[0, :, 0].T > 0, seen)


FAR = (2**31 - 1, 2**31 - 9, 7, -(2**31) + 1)
FAR_NUMBERS = {
    "window(w)": lambda w, at: abs(at[:, None] - at) < w,
    "causal & k < w": lambda w, at: (at <= at[:, None]) & (at < w),
    "k > w": lambda w, at: at + 0 * at[:, None] > w,
    "k <= w + 2": lambda w, at: at + 0 * at[:, None] <= w + 2,
    "k <= q + w": lambda w, at: at <= at[:, None] + w,
    "k < w + u": lambda w, at: at + 0 * at[:, None] < w + 9,
}


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(reason()), reason="no compiler")
@pytest.mark.parametrize("text", default_only(FAR_NUMBERS, "window(w)"))
def test_traced_numbers_may_be_any_that_their_dtype_holds(text):
    """`window(w)` with w = 2**31 - 1 hid keys that it shows: native kernels added positions to it in 32 bits."""
    att, more = fk.compile(text, backend="cpp"), {"u": jnp.int32(9)} if "u" in text.split() else {}
    call = jax.jit(lambda w: value_and_transpose(lambda v: att(ONES, ONES, v, w=w, **more), EYE))
    for w in FAR:
        out, transpose = map(np.asarray, call(np.int32(w)))
        seen = FAR_NUMBERS[text](w, np.arange(64))
        np.testing.assert_array_equal(out[0, :, 0] > 0, seen)
        np.testing.assert_array_equal(transpose[0, :, 0].T > 0, seen)


@pytest.mark.parametrize("text", [*FAR_NUMBERS, *WHOLE])
def test_far_numbers_leave_no_integer_of_a_kernel(text):
    """Without a kernel: mask and ends of rows show what calls show, and no Int of a kernel of 32 bits leaves them."""
    at = np.arange(64)
    x = np.array([-(2**31), 2**31 - 1, 2**29, 5])[at % 4]
    plan = make_plan(ProgramExprs(simplify(fk.mask(text).expr)))
    plan = plan.holding({n.name: 2.0**31 - (n in plan.slots) for n in (*plan.slots, *plan.tables) if n.source})
    ends = [(row, axis) for row, axis in ((plan.by_query, "k"), (plan.by_key, "q")) if row]
    for w in FAR:
        env = {"q": at[:, None], "k": at[None, :], **plan.slot_values({"w": w, "u": 9})}
        tables = plan.table_values({"x": x})
        seen = FAR_NUMBERS[text](w, at) if text in FAR_NUMBERS else WHOLE[text](x, at)
        parts = [plan.mask, *(e for row, _ in ends for e in (row.first, row.last, row.asks, row.rest) if e is not None)]
        values = {e: evaluate(e, env, tables) for e in walk(*parts)}
        assert plan.int64 or all(np.abs(x).max() < 2**31 for e, x in values.items() if e.type is INT)
        np.testing.assert_array_equal(np.broadcast_to(values[plan.mask], seen.shape), seen)
        for row, axis in ends:
            shown = values[row.asks] & values[row.rest]
            if row.first is not None:
                shown = shown & (env[axis] >= values[row.first])
            if row.last is not None:
                shown = shown & (env[axis] <= values[row.last])
            np.testing.assert_array_equal(np.broadcast_to(shown, seen.shape), seen)


@pytest.mark.skipif(bool(reason()), reason="no compiler")
@pytest.mark.parametrize("mask", ["causal & window(256)", "q - k < w"])
def test_positions_of_a_cache_stay_in_32_bits(mask, monkeypatch):
    """Kernels of 64 bits took up to twice the time: a cache knows that it has fewer than 2^28 tokens."""

    class PlannedError(Exception):
        """Raised before the kernel is built."""

    def planned(*args):
        raise PlannedError(holding(*args).int64)

    holding = LoopPlan.holding
    monkeypatch.setattr(LoopPlan, "holding", planned)
    cache, values = KVCache.create(2, 64, 2, 16), {"w": 9} if mask.endswith("w") else {}
    q, k, v = (jnp.asarray(np.ones((2, 1, heads, 16), np.float32)) for heads in (4, 2, 2))
    att = fk.compile(mask, backend="cpp")
    with pytest.raises(PlannedError, match="False"):
        jax.jit(lambda cache: cache.attention(att, q, k, v, **values))(cache)


RUNS = {
    "same(x)": np.repeat([0, 1, 2, 5, 9], [3, 40, 1, 100, 6]),
    "causal & same(x)": np.zeros(150),
    "x[q] >= x[k]": np.arange(150) // 2,
    "document(x)": np.array([0, 9, 9, 70, 120]),
    "document(x) & causal": np.array([0, 5, 90, 120]),
    "document(x) & window(4)": np.array([0, 7]),
}
IN_JAX = [("document(x)", "jax", "int8"), ("same(x)", "jax", "int32"), ("document(x) & window(4)", "jax", "int32")]


DTYPES = ["int8", "uint8", "int32", "int64", "uint32"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mask", "framework", "dtype"), [
    # JAX compiles each: some of int32, and int8 of offsets
    pytest.param(*case, marks=() if case in IN_JAX or case[1] == "torch" else pytest.mark.exhaustive)
    for case in product(RUNS, ["jax", "torch"], DTYPES)
])  # fmt: skip
def test_ends_of_runs_are_those_of_the_host(mask, framework, dtype):
    """A table that is declared sorted has the ends of its runs made where it lives."""
    table = RUNS[mask].astype(dtype)
    given = jnp.asarray(table) if framework == "jax" else torch.from_numpy(table)
    att = fk.compile(mask if "document" in mask else f"param x: sorted int[Q_LEN]\nmask = {mask}")
    plan, found = plan_and_tables(att, framework, 150, x=given)
    assert plan.run_tables
    for use in plan.run_tables:
        want = derived_table(table, use.derived)
        at = np.minimum(np.arange(150), len(want) - 1)
        np.testing.assert_array_equal(np.asarray(found[use.name]), want[at])
    length = min(150, int(table[-1])) if "document" in mask else 150  # the host refuses offsets that end before
    for use in att.plan(length, length, x=table).work((64, 64)).plan.run_tables:
        assert use in plan.run_tables


def test_undeclared_table_is_compared_entry_by_entry():
    plan = fk.compile("same(x)").plan(150, 150, x=torch.zeros(150, dtype=torch.int32), flat=True).work((64, 64)).plan
    assert not plan.run_tables
    assert plan.by_query is None


@pytest.mark.parametrize("framework", [jnp.asarray, torch.from_numpy])
def test_tables_too_short_are_refused_where_the_mask_shows_it(framework):
    short = framework(DOCS[2][:20])
    with pytest.raises(ParameterError, match="table `doc` has 20 entries on axis 0 and is read at `q` = 0"):
        fk.compile("causal & same(doc)").plan(S, S, doc=short, flat=True)
    with pytest.raises(ParameterError, match="table `s` has 20 entries on axis 0 and is read at `k` = 0"):
        fk.compile("causal", "score + s[k]").plan(S, S, s=short, flat=True).work((64, 64))
    fk.compile("q < 20 & k < 20 & same(doc)").plan(S, S, doc=short, flat=True)  # hidden beyond
    with pytest.raises(ParameterError, match="`doc` is an array of complex64; give an array of bool, int or float"):
        fk.compile("same(doc)").plan(S, S, doc=framework(np.ones(S, np.complex64)), flat=True)


@pytest.mark.parametrize("place", [{"sizes": [1, 2, 90, 90]}, {"origin": [0, 0, 3, 0], "sizes": np.full(4, 90)}])
def test_plans_of_kernels_that_load_tables_take_any_place(place):
    """Such a plan is remembered by its place, and an array has no hash."""
    was = RECORDS["aten"]
    doc = torch.arange(90) // 20
    att = fk.compile("causal & doc[q] == doc[k]", backend="aten")
    register(replace(was, loads=True))
    try:
        plan = att.plan(60, 60, 1, 2, doc=doc, flat=True, **place)
    finally:
        register(was)
    q, k, v = torch.randn(3, 1, 2, 60, 16)
    torch.testing.assert_close(att(q, k, v, plan=plan), att(q, k, v, doc=doc, **place))
