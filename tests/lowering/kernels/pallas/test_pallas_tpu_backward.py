"""The Pallas TPU kernels of the backward: gradients in interpreters against float64, visits, text, lowering."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu
from support import attention_cases as cases
from support.attention_cases import CASES, Case, Source, causal
from support.jax import gradients as jax_gradients
from support.jax.gradients import LEARNED, compare, jitted, normal
from support.kernel_names import unknown_names
from support.tiers import default_only

import frisket as fk
from frisket.dsl import ir
from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import lookup
from frisket.dsl.sugar import b, function, h, k, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering.derive import backward_of
from frisket.lowering.kernels.pallas_tpu import backward as emitted
from frisket.lowering.kernels.pallas_tpu.walk import TpuOptions
from frisket.lowering.plan import (
    Cotangents,
    ForwardResults,
    Geometry,
    KernelInputs,
    ProgramFacts,
    Target,
    make_plan,
    survives,
)
from frisket.lowering.planner.planner import DeviceSpans
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.pallas_tpu import jax as runtime
from frisket.runtime.machine import modules

MORE = {
    "other-heads": Case(
        causal & (q - k < 90 * (h + 1)), score + lookup("x", (h, k), FLOAT) * score, heads=4, kv_heads=2, q_len=290,
        kv_len=290, tables={"x": normal(4, 290)},
    ),  # a group whose heads see different tiles
    "distances-of-both": Case(
        causal, score * lookup("x", (b, q - k), FLOAT) + lookup("y", (h, q - k), FLOAT), heads=4, kv_heads=2, batch=2,
        q_len=260, kv_len=400, sizes=(2, 4, 500, 900), origin=(0, 0, np.array([140, 9]), np.array([0, 5])),
        tables={"x": normal(2, 500), "y": normal(4, 300)},
    ),
}  # fmt: skip
ALL = CASES | LEARNED | MORE


ONE_PROGRAM = jitted(runtime.backward)


def run(case, made=None, block=(128, 128), backward=ONE_PROGRAM, **options):
    """{name: gradient} of the kernels, and of the interpreter."""
    return jax_gradients.run(backward, case, Target("pallas-tpu", *block), made, Source(case), **options)


MASKED = (
    "documents-by-batch", "gqa", "v-wider", "empty-rows", "nothing", "holes", "decode", "crop", "visible-minus-inf",
    "masked-nan", "relation", "bool-by-head", "scaled",
)  # fmt: skip
ALONE = [pytest.param(n, marks=pytest.mark.slow) for n in CASES if n not in MASKED]  # like others in all but the mask


@pytest.mark.parametrize("name", [*default_only([*MASKED, *LEARNED, *MORE], "nested"), *ALONE])
def test_pallas_tpu_gradients_equal_the_reference(name):
    compare(*run(ALL[name]))


@pytest.mark.parametrize("group", [1, 2])
def test_texts_know_every_name(group):
    target = emitted.with_tiles(Target("pallas-tpu", 128, 128))
    g = Geometry(1, 4 * group, 4, 256, 256, 16, 16, 0.25)
    for name, case in {**LEARNED, **MORE}.items():
        plan = cases.plan(case)
        wanted = {"q", "k", "v", *(gradient.source for gradient in backward_of(plan).gradients)}
        for kind in (emitted.TpuQueryGradients, emitted.TpuKeyGradients):
            source = emitted.gradients_kernel(kind, plan, target, g, "float32", wanted)
            assert not unknown_names(source.text), name


UNEQUAL = {"by-diagonal": (384, 128), "plane-by-head": (256, 128), "by-column": (128, 384)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "block"), UNEQUAL.items())
def test_pallas_tpu_gradients_in_unequal_tiles(name, block):
    compare(*run(ALL[name], block=block))


@pytest.mark.exhaustive
def test_each_kernel_has_tiles_of_its_own():
    case = ALL["by-column"]
    target = Target(
        "pallas-tpu", 256, 256, dq=Target("pallas-tpu", 128, 256), dkv=Target("pallas-tpu", 256, 128)
    )  # fmt: skip
    compare(*jax_gradients.run(runtime.backward, case, target, None, Source(case)))


@pytest.mark.parametrize("name", default_only(["scalar-twice", "empty-rows", "plane-by-head"], "scalar-twice"))
def test_pallas_tpu_gradients_with_sinks_and_dropout(name):
    case = ALL[name]
    limits = dict.fromkeys((*ir.COORDINATES, *case.tables, *case.slots), 2.0**14)
    made = make_plan(ProgramExprs(case.mask, case.score), facts=ProgramFacts(limits=limits), keep_mask=survives())
    sinks = np.array([0.5, -np.inf, 3.0, 0.0], np.float32)[: case.heads]
    compare(*run(case, made, sinks=sinks, rate=0.3, with_lse=name != "by-diagonal"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "dtype"), [
    ("by-column", "bfloat16"), ("by-diagonal", "float16"), ("gqa", "float16"), ("empty-rows", "bfloat16"),
])  # fmt: skip
def test_pallas_tpu_gradients_in_half_precision_are_near(name, dtype):
    got, want = run(ALL[name].but(dtype=dtype))
    assert {got[n].dtype for n in "qkv"} == {jnp.dtype(dtype)}
    assert all(x.dtype == jnp.float32 for n, x in got.items() if n not in "qkv")
    compare(got, want, 2e-2 if dtype == "bfloat16" else 4e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wanted", ["q", "v", "t0"])
def test_pallas_tpu_computes_requested_gradients_alone(wanted):
    compare(*run(ALL["by-column"], wanted={wanted}))


def test_kernels_of_nothing_are_not_there():
    case = ALL["by-column"]
    made, g, target = cases.plan(case), cases.geometry(case), Target("pallas-tpu", 128, 128)
    assert emitted.gradients_kernel(emitted.TpuKeyGradients, made, target, g, "float32", {"q"}) is None
    assert emitted.gradients_kernel(emitted.TpuQueryGradients, made, target, g, "float32", {"k", "v", "t0"}) is None
    values_alone = emitted.gradients_kernel(emitted.TpuKeyGradients, made, target, g, "float32", {"v"})
    assert values_alone.results == ("v",)
    assert "v_ref" not in values_alone.text.replace("dv_ref", "")


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_pallas_tpu_hidden_nan_reaches_no_gradient(place):
    """Query 5 sees nothing and nobody sees key 5: 0 times what they hold is not 0."""
    mask = fk.mask("causal & q != 5 & k != 5")
    case = Case(mask.expr, q_len=20, kv_len=20, dim=8, v_dim=8)
    arrays = [normal(1, 20, 2, 8) for _ in range(4)]
    inputs = cases.kernel_inputs(case, Target("pallas-tpu", 128, 128), spans=Source(case))
    out, lse = normal(1, 20, 2, 8), np.zeros((1, 2, 20), np.float32)
    lse[:, :, 5], out[:, 5] = -np.inf, 0

    def gradients(held):
        given = [np.copy(x) for x in arrays]
        given[place][:, 5] = held
        *qkv, dout = map(jax.device_put, given)
        results = ForwardResults(*map(jax.device_put, (out, lse)))
        return runtime.backward(inputs, *qkv, results, Cotangents(dout), grad_names=frozenset("qkv"))

    found, right = gradients(np.nan), gradients(0.0)
    for name in "qkv":
        np.testing.assert_allclose(found[name], right[name], rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_pallas_tpu_gradients_repeat_and_do_not_recompile():
    """A window of another length has another number of steps."""
    case = CASES["window"].but(
        score=score + lookup("x", (h,), FLOAT) * score, tables={"x": normal(2)}, dim=24, v_dim=24
    )
    eager = {"backward": runtime.backward}
    first, _ = run(case, **eager)
    made = cases.plan(case)
    g, target = runtime.of_text(cases.geometry(case)), Target("pallas-tpu", 128, 128)
    common = made, target, g, "float32", frozenset(first), TpuOptions()
    kernels = [runtime._gradient_kernel(n, *common)[0] for n in ("dq", "dkv")]
    before = [f._cache_size() for f in kernels]
    assert min(before) > 0
    compare(*run(case.but(slots={"w": 290}), **eager))
    assert [f._cache_size() for f in kernels] == before
    again, _ = run(case, **eager)
    assert all((np.asarray(first[n]) == np.asarray(again[n])).all() for n in first)


# -- in the interpreter that knows of memory --------------------------------------------------------

CAREFUL = ("documents-by-batch", "other-heads", "gqa", "by-diagonal", "plane-by-head")


@pytest.mark.parametrize("name", default_only(CAREFUL))
def test_pallas_tpu_backward_has_no_races_or_reads_outside(name, monkeypatch):
    """Scratch and what lies behind the edges of blocks are NaN there, and copies happen when they are waited for."""
    careful = pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan", dma_execution_mode="on_wait"
    )
    monkeypatch.setattr(runtime, "interpreter", lambda platform: careful)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    case = ALL[name].but(dim=16, v_dim=24)
    case = case.but(q_len=min(case.q_len, 290), kv_len=min(case.kv_len, 290))
    try:
        compare(*run(case))
        assert not interpret_pallas_call.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


MASKS = {
    "causal": {}, "causal & window(200)": {}, "causal & same(doc)": {"doc": np.repeat(np.arange(9), 80)[:500]},
    "prefix_lm(300)": {}, "q // 150 == k // 150 & causal": {},
}  # fmt: skip


@pytest.mark.parametrize("text", default_only(MASKS, "causal & same(doc)"))
def test_pallas_tpu_backward_visits_the_visible_tiles(text, monkeypatch):
    """By dq once each, by dk and dv once for each head of a group; full ones without the mask."""
    layout = fk.mask(text, **MASKS[text]).layout(500, 500, batch=1, heads=4, block=(128, 128))
    visits = {"attention_dq": np.zeros((1, 4, 4, 4), int), "attention_dkv": np.zeros((1, 4, 4, 4), int)}
    line = "    def visit(partial):\n"
    note = "        jax.debug.callback(seen, batch, head, q_tile, k_tile, partial)\n"

    def load(source):
        assert source.count(line) == 1
        entry = "attention_dq" if "def attention_dq(" in source else "attention_dkv"

        def seen(batch, head, q_tile, k_tile, partial):
            visits[entry][batch, head, q_tile, k_tile] += 1 if partial else 2

        return modules.load_source(source.replace(line, line + note), seen=seen)

    monkeypatch.setattr(runtime, "load_source", load)
    runtime._gradient_kernel.memo.clear()
    made = make_plan(
        ProgramExprs(layout.mask), facts=ProgramFacts(limits=dict.fromkeys([*ir.COORDINATES, *MASKS[text]], 2.0**14))
    )
    x, y, rows = (np.zeros(s, np.float32) for s in ((1, 500, 4, 16), (1, 500, 2, 16), (1, 4, 500)))

    class Spans:
        def rows(self, block):
            return layout.spans

        def columns(self, block):
            return layout.transposed.spans

    g, target = Geometry(1, 4, 2, 500, 500, 16, 16, 0.25), Target("pallas-tpu", 128, 128)
    inputs = KernelInputs(made, Spans(), g, target, made.slot_values({}), made.table_values(MASKS[text]))
    wanted = frozenset("qkv")
    found = runtime.backward(inputs, x, y, y, ForwardResults(x, rows), Cotangents(x), grad_names=wanted)
    jax.block_until_ready(found)
    jax.effects_barrier()
    runtime._gradient_kernel.memo.clear()
    for seen in visits.values():
        np.testing.assert_array_equal(seen, layout.kinds())
    assert seen.sum() > 0


@pytest.mark.exhaustive
def test_traced_spans_and_origins():
    case = ALL["distances-of-both"]
    made, g = cases.plan(case), cases.geometry(case)
    spans = Source(case)

    class Traced:
        def __init__(self, arrays):
            self.arrays = arrays

        def rows(self, block):
            return DeviceSpans(*self.arrays[:2], None, spans.rows(block).slice_of)

        def columns(self, block):
            return DeviceSpans(*self.arrays[2:], None, spans.columns(block).slice_of)

    def backward(inputs, *arrays, grad_names):
        def call(walks, origin, slots, tables):
            placed = replace(inputs.geometry, origin=(0, 0, *origin))
            traced = replace(inputs, spans=Traced(walks), geometry=placed, slots=slots, tables=tables)
            return runtime.backward(traced, *arrays, grad_names=grad_names)

        block = (inputs.target.block_q, inputs.target.block_k)
        walks = [x for s in (spans.rows(block), spans.columns(block)) for x in (s.bounds, s.count)]
        return jax.jit(call)(walks, inputs.geometry.origin[2:], inputs.slots, inputs.tables)

    compare(*jax_gradients.run(backward, case, Target("pallas-tpu", 128, 128), made, spans))
    assert g.origin[2].shape == (2,)


# -- lowering for a TPU, text, errors ---------------------------------------------------------------

LONG = {
    "causal": Case(causal),
    "window": Case(causal & (q - k < 1024)),
    "softcap": Case(causal, 30.0 * function("tanh", score / 30.0)),
    "relative": Case(causal, score + lookup("x", (h, q - k), FLOAT), tables={"x": np.zeros((8, 4096), np.float32)}),
    "columns": Case(causal, score + lookup("x", (h, k), FLOAT), tables={"x": np.zeros((8, 4096), np.float32)}),
    "plane": Case(causal, score + lookup("x", (q, k), FLOAT), tables={"x": np.zeros((4096, 4096), np.float32)}),
}


def lowered(case, length, dim, dtype):
    """A backward of everything over `length` tokens, exported for a TPU."""
    g = Geometry(1, 8, 4, length, length, dim, dim, dim**-0.5)
    made = make_plan(
        ProgramExprs(case.mask, case.score),
        facts=ProgramFacts(limits=dict.fromkeys([*ir.COORDINATES, *case.tables], 2.0**14)),
    )
    layout = fk.mask("causal").layout(length, length, batch=1, heads=8, block=(512, 512))

    class Spans:
        def rows(self, block):
            return layout.spans

        def columns(self, block):
            return layout.transposed.spans

    wanted = frozenset("qkv") | {g.source for g in backward_of(made).gradients}

    of = made, Spans(), g, Target("pallas-tpu", 512, 512), made.slot_values({}), made.table_values(case.tables)
    inputs = KernelInputs(*of, platform="tpu")

    def call(q, k, v, out, lse, dout):
        return runtime.backward(inputs, q, k, v, ForwardResults(out, lse), Cotangents(dout), grad_names=wanted)

    x, y = (jax.ShapeDtypeStruct((1, length, heads, dim), dtype) for heads in (8, 4))
    return export.export(jax.jit(call), platforms=["tpu"])(
        x, y, y, x, jax.ShapeDtypeStruct((1, 8, length), jnp.float32), x
    )


@pytest.mark.parametrize(
    "which", default_only([f"{n} {d}" for n in LONG for d in (64, 128, 256)], "relative 64", "columns 128")
)  # fmt: skip
def test_pallas_tpu_backward_lowers_for_a_tpu(which):
    name, dim = which.split()
    text = lowered(LONG[name], 4096, int(dim), "bfloat16").mlir_module()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == (3 if name == "plane" else 2)


@pytest.mark.parametrize("name", ["window", "by-column", "diagonal-of-buckets"])
def test_golden_pallas_tpu_backward(name, golden):
    case = ALL[name]
    text = str(case.mask) if case.score is None else f"mask: {case.mask}\nscore: {case.score}"
    made = replace(cases.plan(case), text=text)
    wanted = {"q", "k", "v", *(g.source for g in backward_of(made).gradients)}
    args = made, Target("pallas-tpu", 128, 128), cases.geometry(case), "bfloat16", wanted
    source = emitted.emit(*args)
    assert source == emitted.emit(*args)
    golden(f"{name.replace('-', '_')}.py", source)


def test_pallas_tpu_backward_refuses_unsupported_calls():
    case = ALL["by-diagonal"]
    made = cases.plan(case)
    long = replace(cases.geometry(case), q_len=1 << 20, kv_len=1 << 20)
    shapes = {"t0": (2, 75)}
    assert runtime.refuses_gradients(made, long, "float32", shapes, frozenset("qkv")) == ""
    assert runtime.refuses_gradients(made, long, "float32", shapes, frozenset({"t0"})) == (
        "the gradient of `x` by q - k takes 2097152 sums of a TPU kernel's memory, at most 1048576; take shorter parts "
        'of the sequence, or backend="xla"'
    )
    with pytest.raises(LoweringError, match="TPUs have no float64"), jax.enable_x64(True):
        run(CASES["causal"].but(dtype="float64"))
