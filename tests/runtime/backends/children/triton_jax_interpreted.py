"""Run by test_triton_jax.py with TRITON_INTERPRET=1: the Triton kernels as JAX calls them, against the reference."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attention_cases as cases
from support import stored_cases
from support.attention_cases import CASES, Case, causal
from support.jax import gradients as jax_gradients
from support.jax.gradients import LEARNED, compare
from support.stored_cases import STORED, Stored, decode
from support.triton import bf16 as triton_bf16

import frisket as fk
from frisket.dsl import ir
from frisket.dsl.ir import lookup
from frisket.dsl.sugar import b, eq, k, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering import dense
from frisket.lowering.kernels.triton.target import TritonTarget
from frisket.lowering.plan import (
    RATE,
    SEED,
    Bounds,
    Cotangents,
    ForwardResults,
    KernelInputs,
    ProgramFacts,
    make_plan,
    survives,
)
from frisket.lowering.planner.planner import DeviceSpans
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton import grids as triton_grids
from frisket.runtime.backends.triton import jax as triton_jax
from frisket.runtime.backends.triton import tiles as triton_tiles

triton_bf16.install()
DROPPED = {SEED: 11, RATE: 0.3}


def forward(case, made=None, sinks=None, spans=None, **target):
    made = made or cases.plan(case)
    fields = {"spans": spans or cases.Source(case), "slots": made.slot_values({**case.slots, **DROPPED})}
    inputs = cases.kernel_inputs(case, TritonTarget("triton", *case.block, **target), made, sinks=sinks, **fields)
    return triton_jax.forward(inputs, *cases.arrays(case))


def gradients(case, made=None, dv=None, **options):
    target = TritonTarget("triton", *case.block, dv=dv)
    return jax_gradients.run(triton_jax.backward, case, target, made, **options)


def with_dropout(case):
    limits = dict.fromkeys((*ir.COORDINATES, *case.slots, *case.tables), 2.0**14)
    return make_plan(ProgramExprs(case.mask, case.score), facts=ProgramFacts(limits=limits), keep_mask=survives())


def smaller(case):
    """Fewer queries and keys, where no table or place says how many there are."""
    if case.sizes is not None:
        return case
    return case.but(q_len=min(case.q_len, 70), kv_len=min(case.kv_len, 80), block=(32, 32))


@pytest.mark.parametrize("name", CASES)
def test_jax_triton_cases_equal_the_reference(name):
    case = smaller(CASES[name])
    out, lse, _ = forward(case, splits=1)
    cases.check(case, out, lse)


ALL = {**CASES, **{f"learned {n}": case for n, case in LEARNED.items()}}


@pytest.mark.parametrize("name", ALL)
def test_jax_triton_gradients_equal_the_reference(name):
    case = smaller(ALL[name])
    compare(*gradients(case.but(batch=min(case.batch, 2), heads=min(case.heads, 4))))


@pytest.mark.parametrize("name", ["full", "gqa", "v-wider", "learned by-column"])
def test_jax_dv_in_a_separate_kernel_equals_the_reference(name, monkeypatch):
    ran = []
    run = triton_jax.JaxTritonCall.run
    monkeypatch.setattr(triton_jax.JaxTritonCall, "run", lambda *a, go=run, **m: ran.append(a[2].name) or go(*a, **m))
    compare(*gradients(smaller(ALL[name]).but(batch=1), dv=TritonTarget("triton", 16, 64)))
    assert ran == ["attention_delta", "attention_dq", "attention_dkv", "attention_dv"]


@pytest.mark.parametrize("name", ["gqa", "empty-rows", "softcap"])
def test_everything_at_once(name):
    """Sinks, one of them without weight, the largest scores and dropout; and their gradients."""
    case = smaller(CASES[name]).but(heads=4, kv_heads=2, batch=1)
    sinks = np.linspace(-1, 2, case.heads).astype(np.float32)
    sinks[-1] = -np.inf
    made = with_dropout(case)
    out, lse, top = forward(case, made, jnp.asarray(sinks), splits=1)
    arrays = [jax_gradients.turned(x) for x in cases.arrays(case)]
    options = {
        "scale": case.dim**-0.5,
        "params": {**case.slots, **DROPPED},
        "tables": case.tables,
        "problem": case.problem,
        "sinks": sinks,
    }
    want, want_lse = dense.attention(
        *arrays,
        dense.DenseCall(ProgramExprs(case.mask, case.score), keep_mask=survives(), rate=DROPPED[RATE], **options),
    )
    np.testing.assert_allclose(out.transpose(0, 2, 1, 3), want, rtol=0, atol=5e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(
        top,
        dense.top(*arrays[:2], dense.DenseCall(ProgramExprs(case.mask, case.score), **options)),
        rtol=2e-6,
        atol=2e-6,
    )
    compare(*gradients(case, made, sinks=sinks, rate=0.3))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_jax_calls_of_triton_in_half_precision_are_near(dtype):
    case = smaller(LEARNED["by-column"]).but(dtype=dtype, batch=1)
    out, lse, _ = forward(case, splits=1)
    cases.check(case, out, lse)
    got, want = gradients(case)
    assert {got[n].dtype for n in "qkv"} == {jnp.dtype(dtype)}
    assert got["t0"].dtype == jnp.float32
    compare(got, want, 2e-2 if dtype == "bfloat16" else 4e-3)


@pytest.mark.parametrize("splits", [0, 3])
def test_few_queries_of_all_heads_in_parts_of_the_keys(splits):
    case = Case(
        causal & (q - k < ir.param("w")), score + lookup("x", (k,), FLOAT), q_len=5, kv_len=300, heads=4, kv_heads=2,
        slots={"w": 200}, tables={"x": jax_gradients.normal(300)}, origin=(0, 0, 295, 0), sizes=(1, 4, 300, 300),
        block=(16, 32),
    )  # fmt: skip
    out, lse, _ = forward(case, splits=splits)
    cases.check(case, out, lse)


@pytest.mark.parametrize("queries", [1, 5])
def test_sequences_have_parts_in_proportion_to_what_they_see(monkeypatch, queries):
    monkeypatch.setattr(triton_grids, "RAGGED", 0)
    end = lookup("end", (b,))
    case = Case(
        (k <= q + end - queries) & (k < end), q_len=queries, kv_len=300, batch=3, heads=4, kv_heads=2,
        tables={"end": np.array([300, 17, 0])}, block=(16, 32),
    )  # fmt: skip
    asked = []
    whole = triton_grids.shares
    monkeypatch.setattr(triton_grids, "shares", lambda *a: asked.append(whole(*a)) or asked[-1])
    out, lse, _ = forward(case)
    cases.check(case, out, lse)
    assert [x.balanced for x in asked] == [True]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", ["int8", "int8 in pages", "small pages", "float8", "wide float8", "half"])
def test_stored_keys_and_values(name, splits):
    stored = STORED[name]
    made = stored_cases.problem(stored, "bshd")
    tables = {n: jnp.asarray(x) for n, x in made.plan.table_values(made.tables).items()}
    target = TritonTarget("triton", *stored.case.block, splits=splits)
    inputs = cases.kernel_inputs(stored.case, target, made.plan, slots={}, tables=tables)
    out, lse, _ = triton_jax.forward(inputs, *map(jnp.asarray, (made.q, made.k, made.v)))
    assert out.dtype == stored.case.dtype
    stored_cases.check(stored, made, out.transpose(0, 2, 1, 3), lse)
    chosen = triton_tiles.jax_target(made.plan, cases.geometry(stored.case), "bfloat16")
    assert chosen.num_stages == triton_tiles.STORED_STAGES
    assert chosen.decode.block_k == triton_tiles.STORED_OF_FEW[128 if name == "half" else 64]


@pytest.mark.parametrize("queries", [1, 4])
def test_stored_keys_in_parts_in_proportion(monkeypatch, queries):
    asked = []
    whole = triton_grids.shares
    monkeypatch.setattr(triton_grids, "shares", lambda *a: asked.append(whole(*a)) or asked[-1])
    monkeypatch.setattr(triton_grids, "RAGGED", 0)
    stored = Stored(decode((300, 0, 1), queries, kv_len=304), "int8", page=16)
    made = stored_cases.problem(stored, "bshd")
    tables = {n: jnp.asarray(x) for n, x in made.plan.table_values(made.tables).items()}
    target = TritonTarget("triton", *stored.case.block)
    inputs = cases.kernel_inputs(stored.case, target, made.plan, slots={}, tables=tables)
    arrays = [jnp.asarray(x) for x in (made.q, made.k, made.v)]
    first, again = (triton_jax.forward(inputs, *arrays) for _ in range(2))
    stored_cases.check(stored, made, first[0].transpose(0, 2, 1, 3), first[1])
    assert all(map(np.array_equal, first, again))
    assert [x.balanced for x in asked] == [True, True]


@pytest.mark.parametrize("place", [(0, 0, 0, 0), (0, 1, 30, 13)])
def test_closed_form_bounds_read_no_table(place):
    w, q0, q1 = ir.param("w"), ir.var("q0"), ir.var("q1")
    case = Case(causal & (q - k < w), slots={"w": 40}, q_len=90, kv_len=90, block=(32, 32), origin=place,
                sizes=(1, 4, 200, 210))  # fmt: skip
    made = make_plan(ProgramExprs(case.mask), facts=ProgramFacts(bounds=Bounds(q0 - w + 1, q1 - w + 1, q0, q1)))
    inputs = cases.kernel_inputs(case, TritonTarget("triton", 32, 32, splits=1), made, spans=None, tables={})
    out, lse, _ = triton_jax.forward(inputs, *cases.arrays(case))
    cases.check(case, out, lse)


def test_64_bits_where_jax_has_32():
    """A slot and a table beyond 32 bits."""
    far = np.arange(80, dtype=np.int64) << 33
    mask = ((q << 40) - k * 2**33 >= ir.param("w")) & (lookup("far", (q,)) >= lookup("far", (k,)))
    case = Case(mask, slots={"w": 5 * 2**35}, tables={"far": far}, q_len=70, kv_len=70, block=(32, 32))
    made = make_plan(
        ProgramExprs(case.mask), facts=ProgramFacts(limits={"q": 2**12, "k": 2**12, "w": 2**40, "far": 2**42})
    )
    assert made.int64
    with pytest.MonkeyPatch.context() as patch:  # the case's own tables are JAX's, which has cut them
        patch.setattr(cases, "tables", lambda case, made: made.table_values(case.tables))
        out, lse, _ = forward(case, made, splits=1)
        cases.check(case, out, lse)
        compare(*gradients(case, made))


def test_traced_values_make_no_other_kernel():
    """Slots, tables, the origin of every batch entry and spans are arguments of one jitted function."""
    case = Case(
        causal & (q - k < ir.param("w")) & eq(lookup("doc", (q,)), lookup("doc", (k,))), batch=2, q_len=60, kv_len=70,
        slots={"w": 30}, tables={"doc": cases.DOC[:200]}, origin=(0, 0, np.array([20, 7]), np.array([5, 0])),
        sizes=(2, 2, 100, 100), block=(32, 32),
    )  # fmt: skip
    made, g = cases.plan(case), cases.geometry(case)

    @jax.jit
    def run(qkv, slots, tables, origin, rows, columns):
        spans = Given(rows, columns)
        place = replace(g, origin=(0, 0, *origin))
        target = TritonTarget("triton", 32, 32, splits=1)
        inputs = KernelInputs(made, spans, place, target, slots, tables)
        out, lse, _ = triton_jax.forward(inputs, *qkv)
        given = ForwardResults(out, lse), Cotangents(out)
        return out, lse, triton_jax.backward(inputs, *qkv, *given, grad_names=frozenset("qkv"))

    def call(case):
        source = cases.Source(case)
        arrays = (source.rows((32, 32)), source.columns((32, 32)))
        spans = [(jnp.asarray(x.bounds), jnp.asarray(x.count), jnp.asarray(x.slice_of)) for x in arrays]
        origin = tuple(map(jnp.asarray, case.origin[2:]))
        slots = {n: jnp.asarray(x) for n, x in cases.slots(case, made).items()}
        out, lse, found = run(cases.arrays(case), slots, cases.tables(case, made), origin, *spans)
        cases.check(case, out, lse)
        given = jax_gradients.options(case, made, None, {})
        want = dense.gradients(
            *map(jax_gradients.turned, cases.arrays(case)),
            dense.DenseCall(ProgramExprs(case.mask), **given),
            jax_gradients.turned(out),
            None,
        )
        compare(found, {n: want["d" + n].transpose(0, 2, 1, 3) for n in "qkv"})

    call(case)
    kernels = triton_jax._entry.memo.info().misses
    call(case.but(slots={"w": 12}, tables={"doc": np.roll(case.tables["doc"], 3)},
                  origin=(0, 0, np.array([3, 30]), np.array([1, 2]))))  # fmt: skip
    assert triton_jax._entry.memo.info().misses == kernels
    assert run._cache_size() == 1


class Given:
    """A SpanSource of traced arrays."""

    def __init__(self, *sides):
        self.spans = [DeviceSpans(bounds, count, None, slice_of) for bounds, count, slice_of in sides]

    def rows(self, block):
        return self.spans[0]

    def columns(self, block):
        return self.spans[1]


@pytest.mark.parametrize("name", ["nested", "by-column"])
def test_jax_calls_of_triton_repeat_bit_for_bit(name):
    case = smaller(LEARNED[name]).but(q_len=60, kv_len=60)
    first, again = gradients(case)[0], gradients(case)[0]
    assert all((np.asarray(first[n]) == np.asarray(again[n])).all() for n in first)


def test_scalar_beyond_32_bits_is_refused_by_the_kernel():
    case = Case(causal & (q - k < ir.param("w")), slots={"w": 2**40})
    with pytest.raises(triton_jax.ParameterError) as caught:
        forward(case)
    assert str(caught.value) == (
        "1099511627776 needs more than 32 bits, and the kernel was made for numbers of 32\n"
        "  make the plan with this value: att.plan(...), so that its kernel has 64-bit integers"
    )


@pytest.mark.parametrize("text", ["causal & dilated(32, 4)", "causal & same(doc)"])
def test_jax_calls_of_triton_in_an_order_equal_xla(text):
    """Arrays are moved around the kernels, by a formula and by a table, forward and backward."""
    draws = np.random.default_rng(0)
    given = {"doc": draws.permutation(np.arange(64) % 4)} if "doc" in text else {}
    order = fk.reorder(text, 64, block=(16, 16), moving=0, **given)
    assert order.gain > 1
    qkv = [jnp.asarray(draws.standard_normal((1, 64, heads, 16)), jnp.float32) for heads in (2, 1, 1)]
    mod = "score + 0.1 * (k - q)"
    own = fk.compile(text, mod, backend="triton", tile=(16, 16), reorder=order, **given)
    (out, back), (want, of_plain) = (jax.vjp(f, *qkv) for f in (own, fk.compile(text, mod, backend="xla", **given)))
    for x, y in zip((out, *back(jnp.cos(out))), (want, *of_plain(jnp.cos(want))), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
