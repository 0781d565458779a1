"""The backward kernels for Hopper: gradients in Mosaic GPU's interpreter, lowering without a GPU, tiles read."""

from __future__ import annotations

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import export
from support.attention_cases import DOC, Case, Source, arrays, causal, geometry, kernel_inputs, plan, reference

import frisket as fk
from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import lookup
from frisket.dsl.sugar import eq, function, h, k, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering import dense
from frisket.lowering.derive import backward_of
from frisket.lowering.kernels.pallas_gpu import backward as kernels
from frisket.lowering.plan import (
    RATE,
    SEED,
    Cotangents,
    ForwardResults,
    Geometry,
    KernelInputs,
    Target,
    make_plan,
    survives,
)
from frisket.lowering.planner.planner import DeviceSpans
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.pallas_gpu import jax as runtime
from frisket.runtime.machine import modules

OLD = tuple(int(n) for n in jax.__version__.split(".")[:2]) < (0, 11)
SMALL = Case(heads=1, kv_heads=1, dim=64, v_dim=64, dtype="bfloat16", q_len=150, kv_len=150)
INTERPRETED = {
    "causal, ragged, grouped": SMALL.but(mask=causal, heads=2),
    "documents, softcap": SMALL.but(
        mask=causal & eq(lookup("doc", (q,)), lookup("doc", (k,))), score=5.0 * function("tanh", score / 5.0),
        tables={"doc": DOC}, dtype="float16",
    ),
    "two runs in a row": SMALL.but(mask=causal & ((q - k < 40) | (k < 30)), q_len=300, kv_len=300),
    "rows without keys, ALiBi": SMALL.but(
        mask=(k < 60) & (q % 64 >= 40) & (q < 100), score=score + lookup("slope", (h,), FLOAT) * (k - q), batch=2,
        heads=2, kv_heads=2, tables={"slope": np.array([0.5, 0.125], np.float32)},
    ),
    "everything, a scale per query, dims apart": SMALL.but(
        score=score * lookup("scale", (q,), FLOAT), v_dim=128, kv_len=130,
        tables={"scale": np.linspace(0.5, 1.5, 150, dtype=np.float32)},
    ),
    "a bias of positions": SMALL.but(
        mask=causal, score=score + lookup("bias", (q, k), FLOAT) + lookup("apart", (q - k,), FLOAT), q_len=100,
        kv_len=100,
        tables={"bias": np.random.default_rng(3).standard_normal((100, 100)).astype(np.float32),
                "apart": np.linspace(0, 1, 100, dtype=np.float32)},
    ),
}  # fmt: skip


def wanted(case: Case) -> frozenset[str]:
    """What these kernels find."""
    found = backward_of(plan(case)).gradients
    return frozenset("qkv") | {g.source for g in found if g.over in ("head", "row")}


def cotangents(case: Case):
    out, lse = reference(case)
    draw = np.random.default_rng(5)
    dout, dlse = (draw.standard_normal(x.shape) for x in (out, lse))
    return out.astype(case.dtype), lse.astype(np.float32), dout.astype(case.dtype), dlse.astype(np.float32)


def call(case: Case, *given, platform: str):
    inputs = kernel_inputs(case, Target("pallas-mosaic-gpu", 128, 128), platform=platform)
    return gradients(inputs, given, wanted(case))


def gradients(inputs: KernelInputs, given, names: frozenset[str]):
    """The gradients of `given`: q, k and v, what `cotangents` makes of a case."""
    *qkv, out, lse, dout, dlse = given
    return runtime.backward(inputs, *qkv, ForwardResults(out, lse), Cotangents(dout, dlse), grad_names=names)


@pytest.fixture
def races(monkeypatch):
    """The interpreter looks for races; whether it found some."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    monkeypatch.setattr(runtime, "simulator", lambda make=runtime.simulator: make(detect_races=True))
    yield lambda: gpu_callbacks.get_races().races_found
    gpu_callbacks.reset_gpu_interpret_mode_state()


@pytest.mark.exhaustive
@pytest.mark.skipif(OLD, reason="Mosaic GPU's interpreter takes minutes for a call before JAX 0.11")
@pytest.mark.parametrize("name", INTERPRETED)
def test_pallas_gpu_gradients_multiply_visible_tiles_alone(name, monkeypatch, races):
    case, multiplied = INTERPRETED[name], []

    def counted(source):
        head = "def with_products(use, *pairs):\n"
        assert head in source
        return modules.load_source(
            source.replace(head, f"{head}    jax.debug.callback(seen)\n"), seen=lambda: multiplied.append(1)
        )

    monkeypatch.setattr(runtime, "load", counted)
    runtime._loaded.memo.clear()
    made, given = plan(case), (*arrays(case), *cotangents(case))
    got = jax.block_until_ready(call(case, *given, platform="cpu"))
    runtime._loaded.memo.clear()
    jax.effects_barrier()
    assert not races()

    def turned(x):
        return np.asarray(x, np.float64).transpose(0, 2, 1, 3)

    query, key, value, _, _, dout, dlse = given
    want = dense.gradients(
        turned(query),
        turned(key),
        turned(value),
        dense.DenseCall(
            ProgramExprs(case.mask, case.score), scale=case.dim**-0.5, params=case.slots, tables=case.tables
        ),
        turned(dout),
        np.asarray(dlse, np.float64),
    )
    for n in "qkv":
        np.testing.assert_allclose(np.asarray(got[n], np.float64), turned(want[f"d{n}"]), atol=0.03, rtol=0.02)
    for t in made.tables:
        if t.name in got:
            np.testing.assert_allclose(got[t.name], want["dtables"][t.source], atol=0.05, rtol=0.02)

    def visible(spans, heads):
        return int(sum((spans.bounds[spans.slice_of[:, h], :, :, 3] - spans.bounds[spans.slice_of[:, h], :, :, 0]).sum()
                       for h in range(heads)))  # fmt: skip

    tiles, source = kernels.tiles(geometry(case)), Source(case)
    both = visible(source.rows(tiles[0]), case.heads) + visible(source.columns(tiles[1]), case.heads)
    assert len(multiplied) == 2 * both  # by two warpgroups


@pytest.mark.parametrize(
    ("name", "dim"),
    [("two runs in a row", 128), *(pytest.param(n, 64, marks=pytest.mark.exhaustive) for n in INTERPRETED),
     *(pytest.param("causal, ragged, grouped", d, marks=pytest.mark.exhaustive) for d in (192, 256))],
)  # fmt: skip
def test_kernels_lower_for_a_gpu_that_is_not_here(name, dim):
    case = INTERPRETED[name].but(dim=dim)
    case = case.but(v_dim=max(dim, case.v_dim))
    given = *arrays(case), *cotangents(case)
    check = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    lowered = export.export(
        jax.jit(lambda *a: call(case, *a, platform="cuda")), platforms=["cuda"], disabled_checks=[check]
    )(*given)
    launches = 1 + (2 if 2 * dim > 256 else 1)  # dq; dk and dv, each alone where both do not fit registers
    text = lowered.mlir_module()
    assert text.count("@mosaic_gpu_v2") == launches
    for scatter in re.findall(r'"stablehlo.scatter".*?stablehlo.return', text, re.S):
        assert "tensor<f32>" not in scatter  # which XLA adds in any order


@pytest.mark.parametrize("name", ["documents, softcap", "two runs in a row"])
def test_layouts_read_no_tile_but_the_visible(name):
    case = INTERPRETED[name]
    rows, columns = kernels.tiles(geometry(case))

    def visible(spans):
        return (spans.bounds[spans.slice_of, :, :, 3] - spans.bounds[spans.slice_of, :, :, 0]).sum((0, 1, 3))

    mask = fk.mask("causal & doc[q] == doc[k]", doc=DOC) if case.tables else fk.mask("causal & (q - k < 40 | k < 30)")

    def laid(block):
        return mask.layout(case.q_len, case.kv_len, block=block)

    np.testing.assert_array_equal(visible(laid(rows).spans), visible(Source(case).rows(rows)))
    np.testing.assert_array_equal(visible(laid(columns).transposed.spans), visible(Source(case).columns(columns)))


def test_spans_may_be_traced():
    """As those planned on a device are: they are operands of the kernels, of which no text depends on them."""
    case = INTERPRETED["two runs in a row"]
    made, given = plan(case), (*arrays(case), *cotangents(case))
    tiles, source = kernels.tiles(geometry(case)), Source(case)
    found = source.rows(tiles[0]), source.columns(tiles[1])

    def call(bounds, counts, *given):
        rows, columns = (DeviceSpans(*traced, None, f.slice_of) for *traced, f in zip(bounds, counts, found))
        planned = SimpleNamespace(rows=lambda block: rows, columns=lambda block: columns)
        inputs = kernel_inputs(case, Target("pallas-mosaic-gpu", 128, 128), made, spans=planned, platform="cuda")
        return gradients(inputs, given, frozenset("qkv"))

    check = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    walks = [f.bounds for f in found], [f.count for f in found]
    lowered = export.export(jax.jit(call), platforms=["cuda"], disabled_checks=[check])(*walks, *given)
    assert lowered.mlir_module().count("@mosaic_gpu_v2") == 2


def test_dropout_scales_what_survives():
    made = make_plan(ProgramExprs(causal), keep_mask=survives())
    text = kernels.emit(made, Target("", 64, 128), Geometry(1, 1, 1, 9, 9, 64, 64, 1.0), "kv")
    assert "(p * kept).astype(query.dtype)" in text
    assert "dm = p * (dp * kept - across(delta))" in text
    assert [s.source for s in made.slots] == [SEED, RATE]


def test_pallas_gpu_backward_refuses_unsupported_calls():
    case = SMALL.but(mask=causal, score=score + lookup("apart", (q - k,), FLOAT), tables={"apart": np.ones(150)})
    made, g = plan(case), geometry(case)
    assert runtime.refuses_gradients(made, g, "bfloat16", {"t0": (150,)}, frozenset("qkv")) == ""
    assert "one per distance of query and key" in runtime.refuses_gradients(
        made, g, "bfloat16", {"t0": (150,)}, frozenset({"q", "t0"})
    )
    assert "not float32" in runtime.refuses_gradients(made, g, "float32", {"t0": (150,)}, frozenset("q"))
    with pytest.raises(LoweringError, match="owns 128 or 256 positions and walks 32, 64 or 128"):
        kernels.emit(made, Target("", 64, 64), g, {"q"})
    with pytest.raises(LoweringError, match="leaves no shared memory"):
        kernels.emit(made, Target("", 128, 64), Geometry(1, 1, 1, 9, 9, 256, 256, 1.0), {"q"})


def test_pallas_gpu_splits_dk_and_dv_that_exceed_registers():
    small, large = (Geometry(1, 1, 1, 9, 9, d, d, 1.0) for d in (128, 256))
    assert kernels.parts(small, {"q", "k", "v"}) == [{"k", "v"}]
    assert kernels.parts(large, {"q", "k", "v"}) == [{"k"}, {"v"}]
    assert kernels.parts(large, {"q"}) == []
