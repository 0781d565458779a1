"""The XLA executor's gradients against the interpreter's, over every mask and score mod."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attention_cases as cases
from support.attention_cases import CASES, Case, causal
from support.jax import gradients as jax_gradients
from support.jax.gradients import LEARNED, compare, jitted, normal

import frisket as fk
from frisket.dsl import ir
from frisket.dsl.sugar import k, q
from frisket.lowering.derive import backward_of
from frisket.lowering.plan import Cotangents, ForwardResults, ProgramFacts, Spans, Target, make_plan, survives
from frisket.lowering.planner.planner import DeviceSpans
from frisket.lowering.simplify import ProgramExprs
from frisket.lowering.xla import backward as xla_backward
from frisket.lowering.xla import tiles as xla_tiles
from frisket.lowering.xla.captured import plane_of

ALL = {**CASES, **LEARNED}
QUICK = ("documents-by-batch", "empty-rows", "visible-minus-inf", "scalar-twice", "by-column", "plane-by-head")
CI = ("crop", "by-row", "diagonal-of-buckets", "nested", "weight-infinite-behind-the-mask", "origin-by-batch")


def run(case, made=None, spans=None, **options):
    """{name: gradient} of the executor, and of the interpreter."""
    target = Target("xla", *case.block)
    backward = jitted(xla_backward.backward)
    return jax_gradients.run(backward, case, target, made, spans or cases.spans(case), **options)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.exhaustive if n in CI else pytest.mark.slow) for n in ALL],
)
def test_xla_gradients_equal_the_reference(name):
    compare(*run(ALL[name]))


@pytest.mark.parametrize("name", ["window", pytest.param("empty-rows", marks=pytest.mark.slow), "by-diagonal"])
def test_sinks_dropout_and_short_chunks(name, monkeypatch):
    """Full chunks without the predicate, partial ones, one head at a time."""
    monkeypatch.setattr(xla_tiles, "WIDEST", 64)
    monkeypatch.setattr(xla_tiles, "CELLS", 64 * 64)
    case = ALL[name].but(block=(32, 32))
    made = make_plan(
        ProgramExprs(case.mask, case.score),
        facts=ProgramFacts(limits=dict.fromkeys((*ir.COORDINATES, *case.tables), 2.0**14)),
        keep_mask=survives(),
    )
    compare(*run(case, made, sinks=np.array([0.5, -np.inf], np.float32), rate=0.3, with_lse=name == "window"))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_xla_gradients_in_half_precision_are_near(dtype):
    got, want = run(LEARNED["by-column"].but(dtype=dtype))
    assert {got[n].dtype for n in "qkv"} == {jnp.dtype(dtype)}
    assert got["t0"].dtype == jnp.float32
    compare(got, want, 2e-2 if dtype == "bfloat16" else 4e-3)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_xla_hidden_nan_reaches_no_gradient(place):
    """Query 5 sees nothing and nobody sees key 5: 0 times what they hold is not 0."""
    att = fk.compile("causal & q != 5 & k != 5", backend="xla")
    arrays = [normal(1, 20, 2, 8) for _ in range(4)]
    vjp = jax.jit(lambda q, k, v, dout: jax.vjp(att, q, k, v)[1](dout))

    def gradients(number):
        arrays[place][:, 5] = number
        return vjp(*arrays)

    for mine, right in zip(gradients(np.nan), gradients(0.0), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-6)


def test_xla_gradients_in_float64_equal_the_reference():
    with jax.enable_x64(True):
        got, want = run(LEARNED["scalar-twice"].but(dtype="float64"))
        assert {x.dtype for x in got.values()} == {jnp.dtype("float64")}
        compare(got, want, 1e-13)


@pytest.mark.exhaustive
def test_xla_gradients_repeat_and_do_not_recompile():
    xla_backward._compiled.memo.clear()
    case = LEARNED["nested"]
    first, _ = run(case)
    again, _ = run(case)
    run(case.but(tables={**case.tables, "doc": np.roll(cases.DOC, 2)}))
    assert (xla_backward._compiled.memo.info().misses, xla_backward._compiled.memo.info().hits) == (1, 2)
    assert all((np.asarray(first[n]) == np.asarray(again[n])).all() for n in first)


@pytest.mark.parametrize(
    ("name", "tables", "origin", "expected"),
    [
        ("plane", {}, (0, 0, 0, 0), (("h", 0), ("q", 0), ("k", 0))),
        ("plane-shifted-and-turned", {}, (0, 0, 0, 0), (("k", 3), ("b", 0), ("q", 0))),
        ("plane-shifted-and-turned", {}, (0, 0, 1, 0), None),  # the last query is clamped
        ("plane", {"x": normal(1, 140, 150)}, (0, 0, 0, 0), None),
        ("nested", {}, (0, 0, 0, 0), None),
    ],
)
def test_xla_adds_whole_tiles_of_a_table_without_clamps(name, tables, origin, expected):
    case = LEARNED[name].but(origin=origin, tables={**LEARNED[name].tables, **tables})
    made = cases.plan(case)
    (gradient,) = backward_of(made).gradients
    shape = case.tables["x"].shape
    assert plane_of(gradient, cases.kernel_inputs(case, Target("xla", *case.block), made), shape) == expected


def test_spans_on_the_device():
    case = CASES["documents-by-batch"]
    host = cases.spans(case)
    spans = DeviceSpans(*map(jax.device_put, (host.bounds, host.count)), None, host.slice_of)
    compare(*run(case, spans=spans))


def temporaries(length):
    """Bytes that the backward of a window holds beside its inputs and outputs."""
    case = Case(causal & (q - k < 300), q_len=length, kv_len=length, heads=4, kv_heads=4)
    tiles = np.arange(length // 256)
    bounds = np.stack([np.maximum(tiles - 2, 0), tiles + 1, tiles + 1, tiles + 1], 1)[None, :, None]
    spans = Spans(bounds.astype(np.int32), np.ones((1, len(tiles)), np.int32), np.zeros((1, 4), np.int32))
    inputs = cases.kernel_inputs(case, Target("xla", 256, 256), spans=spans)

    def call(q, k, v, out, lse):
        given = ForwardResults(out, lse), Cotangents(out)
        return xla_backward.backward(inputs, q, k, v, *given, grad_names=frozenset("qkv"))

    arrays = [jax.ShapeDtypeStruct((1, length, 4, 32), jnp.float32)] * 4
    compiled = jax.jit(call).lower(*arrays, jax.ShapeDtypeStruct((1, 4, length), jnp.float32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_keys_alone():
    """float32 dk and dv as they are summed, and tiles; no scores, and nothing twice."""
    short, long = temporaries(2048), temporaries(8192)
    assert long - short < 2.2 * (8192 - 2048) * 4 * 32 * 4
