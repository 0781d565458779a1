"""The Pallas TPU forward kernel: its numbers in the interpreter, its text, and its lowering for a TPU."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu
from support import attention_cases as cases
from support.attention_cases import CASES, Case, causal
from support.pallas_cases import LENGTH, LONG, causal_walk, long_plan, operator_cases, shapes_of
from support.tiers import default_only

import frisket as fk
from frisket.dsl import ir
from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import OPERATORS, lookup
from frisket.dsl.sugar import b, h, k, q, score
from frisket.dsl.types import BOOL, FLOAT
from frisket.lowering import dense
from frisket.lowering.kernels.inputs import TableInputs
from frisket.lowering.kernels.pallas_tpu import forward as pallas_tpu
from frisket.lowering.kernels.pallas_tpu import walk as pallas_walk
from frisket.lowering.plan import RATE, SEED, Geometry, ProgramFacts, Target, make_plan, survives
from frisket.lowering.planner.planner import DeviceSpans
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.pallas_tpu import jax as runtime
from frisket.runtime.machine.modules import load_source

TARGET = Target("pallas-tpu", 128, 128)
rng = np.random.default_rng(11)
MORE = {
    # of any size: more entries than a kernel would try, at tiles of two sizes, with origins of every batch entry
    "distances": Case(
        causal & lookup("near", (q - k,), BOOL), score + lookup("bias", (h, (k - q) // 2 + 700), FLOAT), q_len=300,
        kv_len=400, batch=2, sizes=(2, 2, 600, 900), origin=(0, 0, np.array([50, 0]), np.array([30, 7])),
        tables={"near": rng.random(640) < 0.9, "bias": rng.standard_normal((2, 1500)).astype(np.float32)},
    ),
    "distances-by-batch": Case(
        None, score * lookup("gain", (b, abs(q - k)), FLOAT) + lookup("slope", (h,), FLOAT) * (k - q), q_len=200,
        kv_len=140, batch=2, tables={
            "gain": rng.random((2, 2000)).astype(np.float32), "slope": np.array([0.1, 0.02], np.float32),
        },
    ),
    "plane-by-batch": Case(
        causal, score + lookup("plane", (b, q, k), FLOAT), q_len=150, kv_len=150, batch=2,
        tables={"plane": rng.standard_normal((2, 150, 150)).astype(np.float32)},
    ),
    "other-heads": Case(causal & (q - k < 90 * (h + 1)), heads=4, kv_heads=2, q_len=290, kv_len=290),
    "gqa-empty-rows": CASES["gqa"].but(mask=causal & (k > 20)),
}  # fmt: skip
ALL = CASES | MORE


def run(case, made=None, **options):
    inputs = cases.kernel_inputs(case, Target("pallas-tpu", *case.block), made, **options)
    return runtime.forward(inputs, *cases.arrays(case))


# heads in groups are below: in half precision, with sinks, and where races are looked for
OFTEN = "window documents-by-batch empty-rows crop bias-plane relation".split()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", default_only(ALL, *OFTEN))
def test_pallas_tpu_cases_equal_the_reference(name):
    case = ALL[name].but(block=(128, 128))
    cases.check(case, *run(case)[:2])


def test_a_value_of_one_number_more_than_the_lanes():
    case = CASES["causal"].but(block=(128, 128), dim=16, v_dim=129)
    cases.check(case, *run(case)[:2])


UNEQUAL = [f"{name} {tile}" for name in ("window", "distances", "distances-by-batch") for tile in ("1x2", "2x1")]


@pytest.mark.parametrize("which", default_only(UNEQUAL, "window 2x1"))
def test_pallas_tpu_tiles_may_have_unequal_sides(which):
    name, tile = which.split()
    case = ALL[name].but(block=tuple(128 * int(n) for n in tile.split("x")))
    cases.check(case, *run(case)[:2])


@pytest.mark.parametrize("block", [(128, 256), pytest.param((256, 128), marks=pytest.mark.exhaustive)], ids=str)
def test_distances_where_rows_are_rolled_alike(block, monkeypatch):
    """As TPUs before v5 do."""
    monkeypatch.setattr(runtime, "strided", lambda platform: False)
    case = MORE["distances"].but(block=block)
    cases.check(case, *run(case)[:2])


HALVES = {
    "window bfloat16", "documents bfloat16", "gqa bfloat16", "distances bfloat16", "softcap float16",
    "empty-rows bfloat16", "causal float16",
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("which", default_only(sorted(HALVES), "gqa bfloat16", "softcap float16"))
def test_pallas_tpu_half_precision_is_near_the_reference(which):
    name, dtype = which.split()
    case = ALL[name].but(dtype=dtype, block=(128, 128))
    out, lse, top = run(case)
    cases.check(case, out, lse)
    assert (lse.dtype, top.dtype) == (jnp.float32, jnp.float32)


@pytest.mark.parametrize(
    "name", default_only(["gqa", "empty-rows", "softcap", "visible-minus-inf", "gqa-empty-rows"], "gqa-empty-rows")
)
def test_pallas_tpu_sinks_dropout_and_largest_scores(name):
    case, rate = ALL[name].but(block=(128, 128)), 0.25
    sinks = np.array([0.5, -np.inf, 3.0, -1.0, 0.0, 80.0], np.float32)[: case.heads]
    made = make_plan(
        ProgramExprs(case.mask, case.score),
        facts=ProgramFacts(limits=dict.fromkeys(ir.COORDINATES, 2.0**14)),
        keep_mask=survives(),
    )
    drop = {SEED: 7, RATE: rate}
    out, lse, top = run(case, made, slots=made.slot_values(drop), sinks=jax.device_put(sinks))
    arrays = [np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in cases.arrays(case)]
    kept = ir.renamed(made.keep_mask, {s.name: s.source for s in made.slots if s.source})
    given = {"scale": case.dim**-0.5, "params": drop, "tables": {}}
    want = dense.attention(
        *arrays, dense.DenseCall(ProgramExprs(case.mask, case.score), sinks=sinks, keep_mask=kept, rate=rate, **given)
    )
    np.testing.assert_allclose(np.asarray(out).transpose(0, 2, 1, 3), want[0], atol=2e-6)
    np.testing.assert_allclose(lse, want[1], atol=2e-6, rtol=2e-6)
    np.testing.assert_allclose(
        top, dense.top(*arrays[:2], dense.DenseCall(ProgramExprs(case.mask, case.score), **given)), atol=2e-6, rtol=2e-6
    )


# -- in the interpreter that knows of memory --------------------------------------------------------

CAREFUL = ("documents", "window", "empty-rows", "gqa", "distances", "other-heads", "relation", "short-keys")
OFTEN = [("gqa", "of the host")]


@pytest.mark.parametrize(("name", "traced"), [
    pytest.param(*case, marks=() if case in OFTEN else pytest.mark.exhaustive)
    for case in product(CAREFUL, ["of the host", "traced"])
])  # fmt: skip
def test_pallas_tpu_forward_has_no_races_or_reads_outside(name, traced):
    """Scratch and what lies behind the edges of blocks are NaN there, and copies happen when they are waited for."""
    case = ALL[name].but(block=(128, 128), dim=16, v_dim=24)
    case = case.but(q_len=min(case.q_len, 300), kv_len=min(case.kv_len, 300))
    made, g = cases.plan(case), cases.geometry(case)
    spans = cases.spans(case)
    if traced == "traced":
        spans = DeviceSpans(*map(jax.device_put, (spans.bounds, spans.count)), None, spans.slice_of)
    heads = g.heads // g.kv_heads if name == "gqa" else 1  # of a program
    module = load_source(pallas_tpu.emit(made, TARGET, g, "float32", pallas_tpu.ForwardOptions(program_heads=heads)))
    careful = pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan", dma_execution_mode="on_wait"
    )
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    def call(q, k, v, bounds, count):
        given = spans if traced != "traced" else DeviceSpans(bounds, count, None, spans.slice_of)
        return module["attention_forward"](
            q, k, v, pallas_walk.walk(given, -(-g.kv_len // 128), parts=heads), g.origin, g.full,
            list(cases.slots(case, made).values()), list(cases.tables(case, made).values()), interpret=careful,
        )  # fmt: skip

    try:
        got = jax.jit(call)(*cases.arrays(case), spans.bounds, spans.count)
        cases.check(case, *got[:2])
        assert not interpret_pallas_call.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


MASKS = {
    "causal": {}, "causal & window(200)": {}, "causal & same(doc)": {"doc": np.repeat(np.arange(9), 80)[:700]},
    "prefix_lm(300)": {}, "q // 150 == k // 150 & causal": {},
}  # fmt: skip


def counting(source, seen):
    """The module with a note of every visit, and of every block of keys that is fetched."""
    line = "    def visit(partial):\n"
    note = "        jax.debug.callback(seen, batch, head, q_tile, k_tile, partial)\n"
    assert source.count(line) == 1
    return load_source(source.replace(line, line + note), seen=seen)["attention_forward"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", default_only(MASKS, "causal & window(200)", "causal & same(doc)"))
def test_pallas_tpu_forward_visits_the_visible_tiles(text):
    params = MASKS[text]
    layout = fk.mask(text, **params).layout(700, 700, batch=1, heads=2, block=(128, 128))
    visits = np.zeros((1, 2, 6, 6), int)

    def seen(b, h, q_tile, k_tile, partial):
        visits[b, h, q_tile, k_tile] += 1 if partial else 2

    made = make_plan(
        ProgramExprs(layout.mask), facts=ProgramFacts(limits=dict.fromkeys([*ir.COORDINATES, *params], 2.0**14))
    )
    g = Geometry(1, 2, 2, 700, 700, 16, 16, 0.25)
    attend = counting(pallas_tpu.emit(made, TARGET, g, "float32"), seen)
    x = np.zeros((1, 700, 2, 16), np.float32)
    tables = [params[t.source] for t in made.tables]
    slots = list(made.slot_values({}).values())
    walk = pallas_walk.walk(layout.spans, 6)
    jax.block_until_ready(attend(x, x, x, walk, g.origin, g.full, slots, tables, interpret=True))
    jax.effects_barrier()
    np.testing.assert_array_equal(visits, layout.kinds())
    assert visits.sum() > 0


# -- what compiles anew -----------------------------------------------------------------------------


def test_pallas_tpu_new_slots_and_tables_do_not_recompile():
    """Windows of other lengths, and documents that begin elsewhere: other numbers of steps, the same kernel."""

    def compiled(case):
        made = cases.plan(case)
        options = pallas_tpu.ForwardOptions()
        return runtime.kernel(pallas_tpu.emit, made, TARGET, cases.geometry(case), "float32", options)._cache_size()

    window = CASES["window"].but(block=(128, 128), dim=24, v_dim=24)
    cases.check(window, *run(window)[:2])
    before = compiled(window)
    for width in (3, 290):
        case = window.but(slots={"w": width})
        cases.check(case, *run(case)[:2])
    assert compiled(window) == before == 1


def test_pallas_tpu_takes_traced_tables_in_one_program():
    doc = np.repeat(np.arange(5), 60)
    draw = np.random.default_rng(3)
    x = [draw.standard_normal((1, 300, 2, 16), np.float32) for _ in range(3)]

    attend = fk.compile("causal & same(doc)", backend="pallas-tpu", tile=(128, 128))
    call = jax.jit(lambda q, k, v, doc: attend(q, k, v, doc=doc))

    for table in (doc, np.repeat(np.arange(3), 100)):
        want = fk.reference(*x, "causal & same(doc)", doc=table, layout="bshd")
        np.testing.assert_allclose(call(*x, table), want, atol=2e-6)
    assert call._cache_size() == 1


# -- lowering for a TPU -----------------------------------------------------------------------------


def lowered(case, length, dim, dtype, block=(512, 512)):
    """(jaxpr, exported module) of a causal-shaped walk over `length` tokens."""
    geometry, made = Geometry(1, 8, 4, length, length, dim, dim, dim**-0.5), long_plan(case)
    module = load_source(pallas_tpu.emit(made, Target("pallas-tpu", *block), geometry, dtype))

    def call(walk, *qkv):
        return module["attention_forward"](
            *qkv, walk, geometry.origin, geometry.full, list(made.slot_values({}).values()),
            [made.table_values(case.tables)[t.name] for t in made.tables],
        )  # fmt: skip

    walk = causal_walk(geometry, block)
    shapes = [jax.ShapeDtypeStruct((1, length, heads, dim), dtype) for heads in (8, 4, 4)]
    return jax.make_jaxpr(call)(walk, *shapes), export.export(jax.jit(call), platforms=["tpu"])(
        shapes_of(walk), *shapes
    )


def pallas_call(jaxpr):
    return next(e for e in jaxpr.eqns if e.primitive.name == "pallas_call")


@pytest.mark.parametrize("which", default_only(
    [f"{name} {dim}" for name in LONG for dim in (64, 128, 256)], "documents 128", "relative bias 64"
))  # fmt: skip
def test_long_sequences_lower_with_blocks_of_one_tile(which):
    name, dim, length = which[: which.rindex(" ")], int(which.split()[-1]), LENGTH
    jaxpr, exported = lowered(LONG[name], length, dim, "bfloat16")
    assert "tpu_custom_call" in exported.mlir_module()
    grid = pallas_call(jaxpr.jaxpr).params["grid_mapping"]
    assert grid.num_dynamic_grid_bounds == 1
    blocks = [tuple(getattr(n, "block_size", n) for n in m.block_shape) for m in grid.block_mappings]
    assert blocks[:3] == [(1, 1, 512, dim)] * 3
    assert max(n for block in blocks for n in block) == (1024 if name == "relative bias" else 512)


def test_lowers_under_shard_map():
    """With its check of varying axes on: the kernel is each device's own."""
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    attend = fk.compile("causal & window(200)", backend="pallas-tpu")
    halves = jax.sharding.PartitionSpec("x")
    call = jax.shard_map(lambda x: attend(x, x, x), mesh=mesh, in_specs=halves, out_specs=halves)
    exported = export.export(jax.jit(call), platforms=["tpu"])(jax.ShapeDtypeStruct((2, 300, 2, 64), "bfloat16"))
    assert exported.mlir_module().count("tpu_custom_call") == 1


@pytest.mark.parametrize("op", default_only(OPERATORS, "floordiv", "erf", "where", "random"))
def test_pallas_tpu_operators_lower_for_a_tpu(op):
    found = list(operator_cases(op))
    assert found
    for case in found:
        _, exported = lowered(case, 256, 32, "float32", (128, 128))
        assert "tpu_custom_call" in exported.mlir_module()


def test_pallas_tpu_scales_scores_of_16_bits_in_a_factor():
    """A soft cap takes one factor for the scale and its division; float32 keeps the order that is written."""
    case = CASES["softcap"]
    made, g = cases.plan(case), cases.geometry(case)
    half, single = (pallas_tpu.emit(made, TARGET, g, dtype) for dtype in ("bfloat16", "float32"))
    assert "y0 = SCALE * 0.05" in half
    assert "jnp.tanh(s * y0) * 20.0" in half
    assert "s = s * SCALE" not in half
    assert "s = s * SCALE" in single
    assert "20.0 * jnp.tanh(s / 20.0)" in single


def test_pallas_tpu_scales_scores_once_that_are_terms():
    text = pallas_tpu.emit(cases.plan(CASES["alibi"]), TARGET, cases.geometry(CASES["alibi"]), "bfloat16")
    assert text.count("* SCALE") == 1
    assert "s = s * SCALE" in text


# -- text and errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["window", "documents", "relative-bias"])
def test_golden_pallas_tpu_forward(name, golden):
    case = CASES[name]
    text = str(case.mask) if case.score is None else f"mask: {case.mask}\nscore: {case.score}"
    made = replace(cases.plan(case), text=text)
    source = pallas_tpu.emit(made, TARGET, cases.geometry(case), "bfloat16")
    assert source == pallas_tpu.emit(made, TARGET, cases.geometry(case), "bfloat16")
    golden(f"{name.replace('-', '_')}.py", source)


def refused(case, dtype="float32", target=TARGET, made=None):
    with pytest.raises(LoweringError) as caught:
        pallas_tpu.emit(made or cases.plan(case), target, cases.geometry(case), dtype)
    return str(caught.value)


def test_pallas_tpu_refuses_what_a_tpu_lacks():
    assert refused(CASES["causal"], "float64") == (
        'TPUs have no float64; use float32 or bfloat16, or backend="xla" on CPU'
    )
    assert refused(CASES["causal"], target=Target("pallas-tpu", 64, 128)) == (
        "TPU tiles are multiples of 128, not 64 x 128; pass tile=(128, 128) or a multiple"
    )
    wide = replace(cases.plan(CASES["causal"]), int64=True)
    assert refused(CASES["causal"], made=wide) == (
        "an index of this mask may leave 32 bits and TPU kernels have no 64-bit integers; "
        'shrink the numbers in the mask, or use backend="xla"'
    )
    g = cases.geometry(CASES["causal"])
    assert runtime.refuses(wide, g, "float32", {}) == refused(CASES["causal"], made=wide)
    assert runtime.refuses(cases.plan(CASES["causal"]), g, "bfloat16", {}) == ""


def test_a_table_too_large_to_try():
    """A table of pairs that are told apart by more than their distance; by the distance any size will do."""
    sees = np.ones((33, 32), bool)
    case = CASES["relation"].but(tables={"doc": cases.DOC, "sees": sees}, block=(128, 128))
    with pytest.raises(LoweringError) as caught:
        run(case)
    assert str(caught.value) == (
        "`sees` is indexed by q and k together and a TPU kernel would have to try 1056 entries, at most 1024. "
        'Index it by q, by k or by q - k alone, shrink it, or use backend="xla"'
    )
    made = cases.plan(case)
    assert runtime.refuses(made, cases.geometry(case), "float32", {"t0": (400,), "t1": (33, 32)}) == str(caught.value)


def test_how_lookups_reach_the_kernel():
    slope, doc = lookup("slope", (h,), FLOAT), lookup("doc", (k,))
    found = TableInputs((
        score + slope * (k - q) + slope * lookup("bias", (h, abs(q - k) // 2), FLOAT)
        + lookup("plane", (h, q, k + 3), FLOAT) + lookup("last", (lookup("doc", (q,)), k - q), FLOAT),
        lookup("live", (doc,), BOOL),
    ))  # fmt: skip
    assert {str(e).splitlines()[-1]: name for e, name in found.outside().items()} == {
        "slope[h]": "of_head0", "live[doc[k]]": "of_key0", "slope[h] * bias[h, abs(q - k) >> 1]": "of_distance0",
        "plane[h, q, k + 3]": "of_pair0", "doc[q]": "of_query0",
    }  # fmt: skip
    assert list(found.picked) == ["last"]


def test_pallas_tpu_default_tiles_fit_vector_memory():
    def tiles(q_len, kv_len, dim=64, dtype="bfloat16", **options):
        g = Geometry(1, 1, 1, q_len, kv_len, dim, dim, 1.0)
        target = runtime.target(cases.plan(CASES["causal"]), g, dtype, **options)
        return target.block_q, target.block_k

    assert tiles(4096, 4096) == (512, 512)
    assert tiles(8192, 8192) == (512, 1024)
    assert tiles(1, 300) == (128, 384)
    assert tiles(8192, 8192, 256) == tiles(8192, 8192, 128, "float32") == (512, 1024)
    assert tiles(8192, 8192, 192, "float32") == tiles(8192, 8192, 256, "float16") == (512, 512)  # of vector memory
    assert tiles(8192, 8192, narrow=True) == (256, 256)
    assert tiles(4096, 4096, tile=(128, 256)) == (128, 256)
