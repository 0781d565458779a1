"""The XLA executor against dense attention by the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attention_cases as cases
from support.attention_cases import CASES, Case, causal
from support.tiers import default_only

from frisket.dsl import ir
from frisket.dsl.errors import LoweringError
from frisket.dsl.sugar import k, q
from frisket.lowering import dense
from frisket.lowering.plan import RATE, SEED, ProgramFacts, Spans, Target, make_plan, survives
from frisket.lowering.simplify import ProgramExprs
from frisket.lowering.xla import forward as xla
from frisket.lowering.xla import tiles as xla_tiles


def inputs_of(case, made=None, **fields):
    fields = {"spans": cases.spans(case), **fields}
    return cases.kernel_inputs(case, Target("xla", *case.block), made, **fields)


def run(case, made=None, **changes):
    case = case.but(**changes)
    return xla.forward(inputs_of(case, made), *cases.arrays(case))[:2]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    default_only(
        CASES, "causal", "documents-by-batch", "gqa", "empty-rows", "nothing", "crop", "origin-by-batch",
        "relative-bias", "masked-nan", "visible-minus-inf",
    ),
)  # fmt: skip
def test_xla_cases_equal_the_reference(name):
    cases.check(CASES[name], *run(CASES[name]))


HALVES = ("window bfloat16", "documents float16", "gqa bfloat16", "softcap float16", "empty-rows bfloat16")


@pytest.mark.parametrize("which", default_only(HALVES, "gqa bfloat16", "softcap float16"))
def test_xla_half_precision_is_near_the_reference(which):
    name, dtype = which.split()
    case = CASES[name].but(dtype=dtype)
    cases.check(case, *run(case))


@pytest.mark.parametrize(
    "which", default_only(["window 32x64", "window 512x512", "holes 128x32", "holes 256x128"],
                          "window 32x64", "holes 256x128"),
)  # fmt: skip
def test_xla_takes_tiles_of_any_size(which):
    name, block = which.split()
    case = CASES[name].but(block=tuple(map(int, block.split("x"))))
    cases.check(case, *run(case))


@pytest.mark.parametrize(
    "name",
    default_only(
        "causal window documents gqa empty-rows crop short-keys softcap alibi bias-plane masked-nan visible-minus-inf "
        "random".split(),
        "gqa", "empty-rows", "softcap",
    ),
)  # fmt: skip
def test_a_loop_over_chunks(name, monkeypatch):
    """As long rows have it: full chunks without the predicate, and partial ones."""
    assert schedule(name).once
    monkeypatch.setattr(xla_tiles, "WIDEST", 64)
    monkeypatch.setattr(xla_tiles, "CELLS", 64 * 64 * 2)
    cases.check(CASES[name], *run(CASES[name]))


def schedule(name):
    case = CASES[name]
    return xla_tiles.schedule(cases.spans(case), cases.geometry(case), case.block)


@pytest.mark.parametrize(
    "name", default_only(["gqa", "empty-rows", "softcap", "visible-minus-inf"], "gqa", "empty-rows")
)
def test_xla_sinks_dropout_and_largest_scores(name):
    case, rate = CASES[name], 0.25
    sinks = np.array([0.5, -np.inf, 3.0, -1.0, 0.0, 80.0], np.float32)[: case.heads]
    limits = dict.fromkeys(ir.COORDINATES, 2.0**14)
    made = make_plan(ProgramExprs(case.mask, case.score), facts=ProgramFacts(limits=limits), keep_mask=survives())
    drop = {SEED: 7, RATE: rate}
    inputs = inputs_of(case, made, slots=made.slot_values(drop), tables={}, sinks=jax.device_put(sinks))
    out, lse, top = xla.forward(inputs, *cases.arrays(case))
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_heads", [8, 1])
def test_few_queries_take_wide_chunks(kv_heads):
    last = {"origin": (0, 0, 4090, 0), "sizes": (2, 8, 4096, 4096)}
    case = Case(causal & (q - k < 3900), q_len=3, kv_len=4096, batch=2, heads=8, kv_heads=kv_heads, **last)
    work = xla_tiles.schedule(cases.spans(case), cases.geometry(case), case.block)
    assert [b.width for b in work.bodies] == [1984 if kv_heads == 8 else 3968]
    cases.check(case, *run(case))


@pytest.mark.exhaustive
def test_many_heads_take_turns():
    case = CASES["gqa"].but(q_len=300, kv_len=300, heads=24, kv_heads=8, batch=3, block=(256, 128))
    work = xla_tiles.schedule(cases.spans(case), cases.geometry(case), case.block)
    assert (work.batches, work.heads, len(work.rows)) == (1, 6, 3 * 4 * 2)
    cases.check(case, *run(case))


def test_float64_under_x64():
    with jax.enable_x64(True):
        case = CASES["documents"].but(dtype="float64")
        out, lse = run(case)
        assert lse.dtype == jnp.float64
        np.testing.assert_allclose(np.asarray(out), cases.reference(case)[0], atol=1e-13)
        np.testing.assert_allclose(np.asarray(lse), cases.reference(case)[1], atol=1e-13)


def test_wide_indices_need_x64():
    case = Case(causal & ((q * 2**20) * 2**20 >= k))
    made = make_plan(ProgramExprs(case.mask), facts=ProgramFacts(limits={"q": 2.0**16}))
    assert made.int64
    with pytest.raises(LoweringError) as caught:
        run(case, made)
    assert str(caught.value) == (
        "an index of this mask may leave 32 bits and JAX has 64-bit integers switched off; "
        'set jax.config.update("jax_enable_x64", True) or shrink the numbers in the mask'
    )
    with jax.enable_x64(True):
        cases.check(case, *run(case, made))


def test_nan_and_infinity_behind_the_mask_stay_there():
    case = CASES["causal"].but(q_len=64, kv_len=200)
    q_, *plain = cases.arrays(case)
    bad_k, bad_v = map(np.array, plain)
    for x, infinite in ((bad_k, 100), (bad_v, 90)):
        x[:, 64:], x[:, infinite:] = np.nan, np.inf
    for v in (plain[1], bad_v):
        got = xla.forward(inputs_of(case), q_, bad_k, v)
        cases.check(case, *got[:2])


def test_xla_new_tables_do_not_recompile():
    xla._compiled.memo.clear()
    case = CASES["documents"]
    made = cases.plan(case)
    for shift in range(3):
        moved = case.but(tables={"doc": np.roll(cases.DOC, shift)})
        cases.check(moved, *run(moved, made))
    info = xla._compiled.memo.info()
    assert (info.misses, info.hits) == (1, 2)


def test_xla_forward_can_be_traced():
    case = CASES["documents"]
    made, spans = cases.plan(case), cases.spans(case)

    @jax.jit
    def call(doc, *qkv):
        return xla.forward(inputs_of(case, made, spans=spans, tables={"t0": doc}), *qkv)[:2]

    cases.check(case, *call(cases.DOC, *cases.arrays(case)))


def test_slots_and_origins_may_be_traced():
    case = CASES["window"]
    made, shape = cases.plan(case), cases.geometry(case)

    @jax.jit
    def call(w, start, *qkv):
        placed = type(shape)(**{**vars(shape), "origin": (0, 0, start, start), "sizes": (1, 2, 1300, 1300)})
        inputs = inputs_of(case, made, geometry=placed, slots=made.slot_values({"w": w}), tables={})
        return xla.forward(inputs, *qkv)[:2]

    cases.check(case, *call(40, 1000, *cases.arrays(case)))


def test_xla_schedule_covers_each_tile_range_once(monkeypatch):
    monkeypatch.setattr(xla_tiles, "WIDEST", 48)
    monkeypatch.setattr(xla_tiles, "CELLS", 48 * 16 * 2)
    rng = np.random.default_rng(3)
    for _ in range(40):
        rows, tiles, block = 5, 17, 16
        kinds = rng.choice(3, (rows, tiles), p=rng.dirichlet([1, 1, 1]))
        kinds[:, -1] = np.minimum(kinds[:, -1], 1)  # a ragged tile is never FULL
        spans = spans_of(kinds)
        case = Case(q_len=rows * block, kv_len=tiles * block - 3)
        work = xla_tiles.schedule(spans, cases.geometry(case), (block, block))
        seen = np.zeros((rows, case.kv_len), int)
        for body, ends, chunks in zip(work.bodies, work.ends, work.chunks):
            for r in range(rows):
                assert not work.once or ends[r + 1] - ends[r] == 1
                for start, first, stop in chunks[ends[r] : ends[r + 1]]:
                    if work.once and first == stop:
                        continue  # a row that sees nothing
                    assert 0 <= start <= first < stop <= start + body.width <= case.kv_len
                    if not body.partial:
                        assert (first, stop) == (start, start + body.width)
                    seen[r, first:stop] += 10 if body.partial else 1
        want = np.repeat(np.array([0, 10, 1])[kinds], block, axis=1)[:, : case.kv_len]
        assert ((seen == want) | ((want == 1) & (seen == 10))).all()  # a short record may be taken whole


def spans_of(kinds):
    from support.lowering.brute import _row

    found = [_row(r) for r in kinds]
    bounds = np.zeros((1, len(found), max(map(len, found)) or 1, 4), np.int32)
    for r, records in enumerate(found):
        for i, record in enumerate(records):
            bounds[0, r, i] = record
    return Spans(bounds, np.array([[len(r) for r in found]], np.int32), np.zeros((1, 2), np.int32))


def temporaries(length):
    case = Case(causal & (q - k < 300), q_len=length, kv_len=length, heads=1, kv_heads=1)
    tiles = np.arange(length // 256)
    bounds = np.stack([np.maximum(tiles - 2, 0), tiles + 1, tiles + 1, tiles + 1], 1)
    spans = Spans(
        bounds[None, :, None].astype(np.int32), np.ones((1, len(tiles)), np.int32), np.zeros((1, 1), np.int32)
    )

    inputs = cases.kernel_inputs(case, Target("xla", 256, 256), spans=spans)

    def call(*qkv):
        return xla.forward(inputs, *qkv)

    shape = jax.ShapeDtypeStruct((1, length, 1, 32), jnp.float32)
    compiled = jax.jit(call).lower(shape, shape, shape).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_length():
    """Tiles only: no copy of Q, K, V or the output is ever made whole."""
    assert temporaries(2048) == temporaries(8192) < 2**21


def test_a_constant_mask_is_no_special_case():
    made = make_plan(ProgramExprs(ir.FALSE))
    out, lse = run(CASES["nothing"], made)
    assert not np.asarray(out).any()
    assert np.isneginf(np.asarray(lse)).all()
