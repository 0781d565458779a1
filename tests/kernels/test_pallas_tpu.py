"""The Pallas TPU kernel: its numbers in the interpreter, its text, and its lowering for a TPU."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu
from support import attention_cases as cases
from support.attention_cases import CASES, Case, causal

from frisket.dsl import ir
from frisket.dsl.errors import BackendError, LoweringError, ParameterError
from frisket.dsl.ir import build, lit, lookup, to_float
from frisket.dsl.sugar import eq, function, h, k, q, score
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.emit import pallas_tpu
from frisket.lowering.emit.expr_jnp import JNP
from frisket.lowering.plan import Geometry, Spans, Target, make_plan
from frisket.runtime import jax_op, jax_platforms
from frisket.runtime.modules import load

TARGET = Target("pallas-tpu", 128, 128)


def run(case, made=None):
    made = made or cases.plan(case)
    return jax_op.forward(
        made, cases.spans(case), cases.geometry(case), *cases.arrays(case), cases.slots(case, made),
        cases.tables(case, made), Target("pallas-tpu", *case.block), "pallas-tpu",
    )[:2]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_case(name):
    case = CASES[name].but(block=(128, 128))
    cases.check(case, *run(case))


@pytest.mark.parametrize(("name", "dtype"), [
    ("window", "bfloat16"), ("documents", "bfloat16"), ("gqa", "bfloat16"), ("softcap", "float16"),
    ("empty-rows", "bfloat16"), ("causal", "float16"),
])  # fmt: skip
def test_half_precision(name, dtype):
    case = CASES[name].but(dtype=dtype, block=(128, 128))
    cases.check(case, *run(case))


def test_unequal_tiles():
    case = CASES["window"].but(block=(128, 256))
    cases.check(case, *run(case))


def test_no_races_and_no_read_outside():
    case = CASES["documents"].but(block=(128, 128), q_len=300, kv_len=300, dim=16, v_dim=16)
    made = cases.plan(case)
    module = load(pallas_tpu.emit(made, TARGET, cases.geometry(case), "float32"))
    steps, *walk = pallas_tpu.walk_of(cases.spans(case))
    careful = pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan", dma_execution_mode="on_wait"
    )
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    try:
        got = module["attention_forward"](
            *cases.arrays(case), steps, *walk, (0, 0, 0, 0), (1, 2, 300, 300),
            list(cases.slots(case, made).values()), list(cases.tables(case, made).values()), interpret=careful,
        )  # fmt: skip
        cases.check(case, *got)
        assert not interpret_pallas_call.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


# -- the walk ---------------------------------------------------------------------------------------


def test_the_walk_visits_each_tile_once_and_knows_the_full_ones():
    bounds = np.zeros((2, 2, 2, 4), np.int32)
    bounds[0, 0, 0], bounds[0, 1] = (1, 2, 4, 5), [(0, 0, 2, 2), (7, 8, 8, 8)]
    spans = Spans(bounds, np.array([[1, 2], [0, 0]], np.int32), np.array([[0, 1]], np.int32))
    steps, slice_of, count, records = pallas_tpu.walk_of(spans)
    assert (steps, slice_of.tolist(), count.tolist()) == (4, [0, 1], [4, 3, 0, 0])
    rows = records.reshape(4, 2, 4).tolist()
    never = [2**31 - 1, 0, 0, 0]
    assert rows[:3] == [[[0, 1, 1, 3], never], [[0, 0, 0, 2], [2, 5, 3, 3]], [never, never]]


def test_spans_too_long_for_scalar_memory():
    bounds = np.zeros((1, 4096, 9, 4), np.int32)
    spans = Spans(bounds, np.zeros((1, 4096), np.int32), np.zeros((1, 1), np.int32))
    with pytest.raises(LoweringError) as caught:
        pallas_tpu.walk_of(spans)
    assert str(caught.value) == (
        'the spans of this mask take 576 KiB of a TPU\'s scalar memory, at most 512; use larger tiles, or backend="xla"'
    )


# -- lowering for a TPU -----------------------------------------------------------------------------

LONG = {
    "causal": Case(causal),
    "window": Case(causal & (q - k < 1024)),
    "documents": Case(causal & eq(lookup("doc", (q,)), lookup("doc", (k,)))),
    "softcap": Case(causal, 30.0 * function("tanh", score / 30.0)),
    "alibi": Case(causal, score + lookup("slope", (h,), FLOAT) * (k - q)),
}


def lowered(case, length, dim, dtype, block=(512, 512), tables=None):
    """(jaxpr, exported module) of a causal-shaped walk over `length` tokens."""
    geometry = Geometry(1, 8, 4, length, length, dim, dim, dim**-0.5)
    limits = dict.fromkeys([*ir.COORDINATES, *ir.SIZES, "doc"], 2.0**14)
    made = make_plan(case.mask, case.score, "the text", limits=limits)
    module = load(pallas_tpu.emit(made, Target("pallas-tpu", *block), geometry, dtype))
    tiles = np.arange(-(-length // block[0]))
    bounds = np.stack([0 * tiles, 0 * tiles, tiles, tiles + 1], 1)[None, :, None].astype(np.int32)
    spans = Spans(bounds, np.ones((1, len(tiles)), np.int32), np.zeros((1, 8), np.int32))
    steps, *walk = pallas_tpu.walk_of(spans)

    def call(*qkv):
        return module["attention_forward"](
            *qkv, steps, *walk, geometry.origin, geometry.full, list(made.slot_values({}).values()),
            list(made.table_values(tables or {}).values()),
        )  # fmt: skip

    shapes = [jax.ShapeDtypeStruct((1, length, heads, dim), dtype) for heads in (8, 4, 4)]
    jaxpr = jax.make_jaxpr(call)(*shapes)
    return jaxpr, export.export(jax.jit(call), platforms=["tpu"])(*shapes)


def pallas_call(jaxpr):
    return next(e for e in jaxpr.eqns if e.primitive.name == "pallas_call")


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", LONG)
def test_long_sequences_lower_with_blocks_of_one_tile(name, dim):
    length = 32768
    tables = {"doc": np.arange(length) // 1000, "slope": np.ones(8, np.float32)}
    jaxpr, exported = lowered(LONG[name], length, dim, "bfloat16", tables=tables)
    assert "tpu_custom_call" in exported.mlir_module()
    grid = pallas_call(jaxpr.jaxpr).params["grid_mapping"]
    assert grid.grid == (1, 8, 64, 64)
    blocks = [tuple(getattr(n, "block_size", n) for n in m.block_shape) for m in grid.block_mappings]
    assert blocks[:3] == [(1, 1, 512, dim)] * 3
    assert max(n for block in blocks for n in block) == 512


def operand(type, i):
    return {
        INT: [q, lit(2), k][i], FLOAT: [score, to_float(k - q), to_float(q)][i], BOOL: [q >= k, eq(q % 3, 0), k < 7][i]
    }[type]  # fmt: skip


ARITIES = {
    "where": [(BOOL, BOOL, BOOL), (BOOL, FLOAT, FLOAT)], "random": [(INT, INT)], "and": [(BOOL, BOOL)],
    "or": [(BOOL, BOOL)], "xor": [(BOOL, BOOL)], "not": [(BOOL,)], "int": [(BOOL,), (FLOAT,)],
}  # fmt: skip


def forms(op):
    """Argument types of one operator."""
    if op in ARITIES:
        return ARITIES[op]
    found = []
    for types in [(INT,), (FLOAT,), (INT, INT), (FLOAT, FLOAT)]:
        try:
            if ir.result_type(op, types) is not None and JNP[op].count("{}") == len(types):
                found.append(types)
        except ValueError:
            continue
    return found


@pytest.mark.parametrize("op", JNP)
def test_every_operator_lowers(op):
    assert forms(op)
    for types in forms(op):
        args = [operand(t, i) for i, t in enumerate(types)]
        e = ir.random(*args) if op == "random" else build(op, *args)
        if e.type is BOOL and "score" in ir.uses(e):
            e = ir.substitute(e, {score: to_float(q)})
        case = Case(e) if e.type is BOOL else Case(causal, score + e)
        _, exported = lowered(case, 256, 32, "float32", (128, 128))
        assert "tpu_custom_call" in exported.mlir_module()


# -- text and errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["window", "documents", "relative-bias"])
def test_golden(name, golden):
    case = CASES[name]
    text = str(case.mask) if case.score is None else f"mask: {case.mask}\nscore: {case.score}"
    made = replace(cases.plan(case), text=text)
    source = pallas_tpu.emit(made, TARGET, cases.geometry(case), "bfloat16")
    assert source == pallas_tpu.emit(made, TARGET, cases.geometry(case), "bfloat16")
    golden(f"pallas_{name.replace('-', '_')}.py", source)


def refused(case, dtype="float32", target=TARGET, made=None):
    with pytest.raises(LoweringError) as caught:
        pallas_tpu.emit(made or cases.plan(case), target, cases.geometry(case), dtype)
    return str(caught.value)


def test_what_a_tpu_cannot_do_is_said():
    assert refused(CASES["causal"], "float64") == (
        'TPUs have no float64; use float32 or bfloat16, or backend="xla" on CPU'
    )
    assert refused(CASES["causal"], target=Target("pallas-tpu", 64, 128)) == (
        "TPU tiles are multiples of 128, not 64 x 128; pass tile=(128, 128) or a multiple"
    )
    assert refused(CASES["causal"], made=replace(cases.plan(CASES["causal"]), int64=True)) == (
        "an index of this mask may leave 32 bits and TPU kernels have no 64-bit integers; "
        'shrink the numbers in the mask, or use backend="xla"'
    )


def test_a_table_too_large_to_try():
    case = CASES["relative-bias"].but(tables={"bias": np.zeros((2, 1025), np.float32)}, block=(128, 128))
    with pytest.raises(LoweringError) as caught:
        run(case)
    assert str(caught.value) == (
        "`bias` is indexed by q and k together and a TPU kernel would have to try 1025 entries, at most 1024; "
        'index it by q or k alone, shrink it, or use backend="xla"'
    )


def test_the_door_names_its_backends():
    case, made = CASES["causal"], cases.plan(CASES["causal"])
    args = made, cases.spans(case), cases.geometry(case), *cases.arrays(case), {}, {}, TARGET
    with pytest.raises(BackendError) as caught:
        jax_op.forward(*args, "gluon")
    assert str(caught.value) == "no JAX backend 'gluon'; there are xla, cpp, pallas-tpu, pallas-mosaic-gpu, triton"


def test_numbers_beyond_32_bits_are_refused():
    case = CASES["documents"].but(tables={"doc": cases.DOC.astype(np.int64) + 2**40})
    made = cases.plan(case)
    with pytest.raises(ParameterError) as caught:
        jax_op.forward(
            made, cases.spans(case), cases.geometry(case), *cases.arrays(case), cases.slots(case, made),
            made.table_values(case.tables), Target("xla", 64, 64), "xla",
        )  # fmt: skip
    assert str(caught.value) == (
        "table `doc` holds numbers beyond 32 bits, the kernel has 32-bit integers; renumber it"
    )


def test_default_tiles():
    def tiles(backend, q_len, kv_len):
        geometry = Geometry(1, 1, 1, q_len, kv_len, 64, 64, 1.0)
        target = jax_platforms.target_on(backend, make_plan(None, None), geometry, "float32", None, False)
        return target.block_q, target.block_k

    assert tiles("xla", 4096, 4096) == (256, 128)
    assert tiles("pallas-tpu", 4096, 4096) == (512, 512)
    assert tiles("pallas-tpu", 1, 300) == (128, 384)


def test_bfloat16_stays_bfloat16():
    out, lse = run(CASES["causal"].but(dtype="bfloat16", block=(128, 128)))
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
