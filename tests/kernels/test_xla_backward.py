"""The XLA executor's gradients against the interpreter's, over every mask and score mod."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attention_cases as cases
from support.attention_cases import CASES, Case, causal

import frisket as fk
from frisket.dsl import ir
from frisket.dsl.ir import lookup
from frisket.dsl.sugar import b, function, h, k, q, score, where
from frisket.dsl.types import FLOAT, INT
from frisket.lowering import dense, xla_backward, xla_schedule
from frisket.lowering.derive import backward_of
from frisket.lowering.flat import DeviceSpans
from frisket.lowering.plan import RATE, SEED, Spans, Target, make_plan
from frisket.lowering.xla_captured import plane_of

draw = np.random.default_rng(11)


def normal(*shape):
    return draw.standard_normal(shape).astype(np.float32)


plane = lookup("x", (h, q, k), FLOAT)
LEARNED = {
    "one-scalar": Case(causal, score * ir.param("c", FLOAT), slots={"c": 0.7}),
    "scalar-twice": Case(causal, ir.param("c", FLOAT) * function("tanh", score / ir.param("c", FLOAT)),
                         slots={"c": 2.5}, heads=4, kv_heads=2),
    "by-row": Case(causal, score * lookup("x", (b, q), FLOAT), tables={"x": normal(2, 150)}, batch=2),
    "by-column": Case(causal, score + lookup("x", (h, k), FLOAT) * score, tables={"x": normal(4, 150)}, heads=4,
                      kv_heads=2),
    "by-diagonal": Case(causal & (q - k < 70), score + lookup("x", (h, q - k), FLOAT), q_len=130, kv_len=160,
                        origin=(0, 0, 30, 0), tables={"x": normal(2, 75)}),
    "diagonal-of-buckets": Case(causal, score + lookup("x", ((q - k) // 16, h), FLOAT), heads=6, kv_heads=2, batch=2,
                                tables={"x": normal(9, 6)}),
    "plane": Case(causal, score + plane, q_len=140, tables={"x": normal(2, 140, 150)}),
    "plane-by-head": Case(causal & (q - k < 20 * (h + 1)), score + plane, heads=4, kv_heads=2, q_len=140,
                          tables={"x": normal(4, 140, 150)}),
    "plane-shifted-and-turned": Case(
        causal, score + lookup("x", (k + 3, b, q), FLOAT), heads=4, kv_heads=2, batch=3, q_len=100,
        tables={"x": normal(160, 3, 100)},
    ),
    "nested": Case(causal, score + lookup("x", (lookup("doc", (q,), INT) % 3, lookup("doc", (k,), INT) % 3), FLOAT),
                   tables={"x": normal(3, 3), "doc": cases.DOC}),
    "clamped": Case(causal, score + lookup("x", (q - k,), FLOAT) + lookup("x", (k,), FLOAT), tables={"x": normal(20)}),
    "weight-infinite-behind-the-mask": Case(
        causal, score + function("log", lookup("x", (k,), FLOAT) + where(k > q, -9.0, 3.0)),
        tables={"x": draw.random(150).astype(np.float32)},
    ),
    "origin-by-batch": Case(
        causal, score + lookup("x", (k - q + 200,), FLOAT) + lookup("y", (q,), FLOAT), batch=2, kv_len=200,
        sizes=(2, 2, 200, 205), origin=(0, 0, np.array([50, 13]), np.array([0, 5])),
        tables={"x": normal(260), "y": normal(210)},
    ),
}  # fmt: skip
ALL = {**CASES, **LEARNED}
QUICK = (
    "documents-by-batch", "empty-rows", "crop", "visible-minus-inf", "scalar-twice", "by-row", "by-column",
    "diagonal-of-buckets", "plane-by-head", "nested", "weight-infinite-behind-the-mask", "origin-by-batch",
)  # fmt: skip


def run(case, made=None, sinks=None, with_lse=True, wanted=None, rate=None, spans=None):
    """{name: gradient} of the executor, and of the interpreter."""
    made = made or cases.plan(case)
    drop = {} if rate is None else {SEED: 5, RATE: rate}
    slots, tables = made.slot_values({**case.slots, **drop}), cases.tables(case, made)
    args = made, spans or cases.spans(case), cases.geometry(case), *cases.arrays(case)
    given = options(case, made, sinks, drop)
    out, lse = dense.attention(*map(turned, args[3:]), case.mask, case.score, **given)
    random, real = np.random.default_rng(2), jnp.float64 if case.dtype == "float64" else jnp.float32
    dout = jnp.asarray(random.standard_normal(out.shape).transpose(0, 2, 1, 3), case.dtype)
    dlse = jnp.asarray(random.standard_normal(lse.shape), real) if with_lse else None
    wanted = {"q", "k", "v", *(g.source for g in backward_of(made).gradients)} if wanted is None else wanted
    got = xla_backward.backward(
        *args, jnp.asarray(out.transpose(0, 2, 1, 3), case.dtype), jnp.asarray(lse, real), dout, dlse, slots, tables,
        Target("xla", *case.block), wanted=frozenset(wanted), sinks=None if sinks is None else jnp.asarray(sinks),
    )  # fmt: skip
    assert got.keys() == set(wanted)
    return got, oracle(case, made, dout, dlse, given)


def turned(x):
    return np.asarray(x, np.float64).transpose(0, 2, 1, 3)


def options(case, made, sinks, drop):
    kept = made.kept
    if kept is not None:  # in the user's names
        kept = ir.renamed(kept, {s.name: s.source for s in made.slots if s.source in (SEED, RATE)})
    return {
        "scale": case.dim**-0.5, "params": {**case.slots, **drop}, "tables": case.tables, "origin": case.origin,
        "sizes": case.sizes, "sinks": sinks, "kept": kept, "rate": drop.get(RATE, 0.0),
    }  # fmt: skip


def oracle(case, made, dout, dlse, given):
    found = dense.gradients(*map(turned, cases.arrays(case)), case.mask, case.score, turned(dout), dlse, **given)
    wanted = {n: found["d" + n].transpose(0, 2, 1, 3) for n in "qkv"}
    wanted |= {t.name: found["dtables"][t.source] for t in made.tables if t.source in found["dtables"]}
    return wanted | {s.name: found["dscalars"][s.source] for s in made.slots if s.source in found["dscalars"]}


def compare(got, want, tolerance=2e-5):
    for name, x in got.items():
        y = want[name]
        assert x.shape == y.shape, name
        size = max(1.0, float(np.abs(y).max()))
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=0, atol=tolerance * size, err_msg=name)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ALL])
def test_every_case(name):
    compare(*run(ALL[name]))


@pytest.mark.parametrize("name", ["window", pytest.param("empty-rows", marks=pytest.mark.slow), "by-diagonal"])
def test_sinks_dropout_and_short_chunks(name, monkeypatch):
    """Full chunks without the predicate, partial ones, one head at a time."""
    monkeypatch.setattr(xla_schedule, "WIDEST", 64)
    monkeypatch.setattr(xla_schedule, "CELLS", 64 * 64)
    case = ALL[name].but(block=(32, 32))
    made = make_plan(
        case.mask, case.score, limits=dict.fromkeys((*ir.COORDINATES, *case.tables), 2.0**14), dropout=True
    )
    compare(*run(case, made, sinks=np.array([0.5, -np.inf], np.float32), rate=0.3, with_lse=name == "window"))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_half_precision(dtype):
    got, want = run(LEARNED["by-column"].but(dtype=dtype))
    assert {got[n].dtype for n in "qkv"} == {jnp.dtype(dtype)}
    assert got["t0"].dtype == jnp.float32
    compare(got, want, 2e-2 if dtype == "bfloat16" else 4e-3)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_what_is_not_finite_and_hidden_reaches_no_gradient(place):
    """Query 5 sees nothing and nobody sees key 5: 0 times what they hold is not 0."""
    att = fk.compile("causal & q != 5 & k != 5", backend="xla")
    arrays = [jnp.asarray(normal(1, 20, 2, 8)) for _ in range(4)]

    def gradients(held):
        given = [x.at[:, 5].set(held) if i == place else x for i, x in enumerate(arrays)]
        return jax.vjp(att, *given[:3])[1](given[3])

    for mine, right in zip(gradients(jnp.nan), gradients(0.0), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-6)


def test_float64():
    with jax.enable_x64(True):
        got, want = run(LEARNED["scalar-twice"].but(dtype="float64"))
        assert {x.dtype for x in got.values()} == {jnp.dtype("float64")}
        compare(got, want, 1e-13)


def test_new_values_compile_nothing_and_repeat_bit_for_bit():
    xla_backward._compiled.cache_clear()
    case = LEARNED["nested"]
    first, _ = run(case)
    again, _ = run(case)
    run(case.but(tables={**case.tables, "doc": np.roll(cases.DOC, 2)}))
    assert (xla_backward._compiled.cache_info().misses, xla_backward._compiled.cache_info().hits) == (1, 2)
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
def test_tiles_of_a_table_are_added_whole_where_nothing_is_clamped(name, tables, origin, expected):
    case = LEARNED[name].but(origin=origin, tables={**LEARNED[name].tables, **tables})
    made = cases.plan(case)
    (gradient,) = backward_of(made).gradients
    shape = case.tables["x"].shape
    assert plane_of(gradient, cases.geometry(case), cases.slots(case, made), shape) == expected


def test_spans_on_the_device():
    case = CASES["documents-by-batch"]
    host = cases.spans(case)
    spans = DeviceSpans(jnp.asarray(host.bounds), jnp.asarray(host.count), None, host.slice_of)
    compare(*run(case, spans=spans))


def temporaries(length):
    """Bytes that the backward of a window holds beside its inputs and outputs."""
    case = Case(causal & (q - k < 300), q_len=length, kv_len=length, heads=4, kv_heads=4)
    tiles = np.arange(length // 256)
    bounds = np.stack([np.maximum(tiles - 2, 0), tiles + 1, tiles + 1, tiles + 1], 1)[None, :, None]
    spans = Spans(bounds.astype(np.int32), np.ones((1, len(tiles)), np.int32), np.zeros((1, 4), np.int32))
    made, target = cases.plan(case), Target("xla", 256, 256)

    def call(q, k, v, out, lse):
        return xla_backward.backward(
            made, spans, cases.geometry(case), q, k, v, out, lse, out, None, cases.slots(case, made), {}, target,
            wanted=frozenset("qkv"),
        )  # fmt: skip

    arrays = [jax.ShapeDtypeStruct((1, length, 4, 32), jnp.float32)] * 4
    compiled = jax.jit(call).lower(*arrays, jax.ShapeDtypeStruct((1, 4, length), jnp.float32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_keys_alone():
    """float32 dk and dv as they are summed, and tiles; no scores, and nothing twice."""
    short, long = temporaries(2048), temporaries(8192)
    assert long - short < 2.2 * (8192 - 2048) * 4 * 32 * 4
