"""Native kernels of rows that are no softmax, beside the interpreter: forward, decoding and gradients."""

from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np
import pytest
from lowering.kernels.cpp.test_cpp_backward import folded, named
from lowering.kernels.cpp.test_cpp_forward import TO, exact
from support.native import call as native_call
from support.tiers import default_only

from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import TOTAL
from frisket.lowering import dense, pipeline
from frisket.lowering.derive import derivatives
from frisket.lowering.plan import RATE, SEED, Geometry, Target
from frisket.runtime.calls.program import program_of
from frisket.runtime.machine import cpp_build as native_build

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())

GAMMA = np.array([0.97, 0.9, 0.5, 0.99], np.float32)
SIGMOID = "sigmoid(score + bias)", None, {"bias": -3.5}
RELU = "relu(score) ** 2", "count", {}
RETENTION = "score * gamma[h] ** (q - k)", "max(abs(total), 1)", {"gamma": GAMMA}
OFF_BY_ONE = "exp(min(score, 8))", "total + 1", {}
LINEAR = "score", None, {}
EXP = "exp(score)", "total * 2", {}
STEEP = "exp(score * a + c)", "total", {}
LEARNED = (
    "a * tanh(score) ** 2 + c[h] * score + 0.1 * z[q // 3, k // 5]",
    None,
    {
        "a": 0.5,
        "c": np.array([0.3, -0.2, 0.1, 1.0], np.float32),
        "z": np.random.default_rng(4).standard_normal((50, 30)).astype(np.float32),
    },
)


@dataclass(frozen=True)
class Case:
    weight: tuple
    mask: str | None = "causal"
    params: dict = field(default_factory=dict)
    score: str | None = None
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 150
    kv_len: int = 150
    dim: int = 64
    v_dim: int = 64
    dtype: str = "float32"
    tile: tuple = (48, 64)
    origin: tuple = (0, 0, 0, 0)
    rate: float | None = None
    precision: str = "ieee"

    def but(self, **changes):
        return replace(self, **changes)


@dataclass
class Made:
    """What a kernel is called with, in the order of `test_cpp_backward`, and what it should find."""

    case: Case
    work: object
    args: tuple
    forward: tuple
    call: dense.DenseCall
    dout: np.ndarray
    dtotal: np.ndarray


def rounded(dtype, x):
    x = np.asarray(x)
    return (
        x.astype(np.float64) if dtype == "float64" else exact(TO[dtype](x.astype(np.float32)), dtype).astype(np.float32)
    )


def made_of(case: Case, change=None) -> Made:
    draw = np.random.default_rng(1)
    weight, divide, of_weight = case.weight
    program = program_of(case.mask, case.score, case.params | of_weight, weight=weight, divide=divide)
    program = replace(program, double=case.dtype == "float64")
    scale = case.dim**-0.5
    g = Geometry(
        case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, case.dim, case.v_dim, scale, case.origin
    )
    work = pipeline.work(program, g.problem, case.tile, proofs=True, dropout=case.rate is not None)
    shapes = [(case.heads, case.q_len, case.dim), (case.kv_heads, case.kv_len, case.dim),
              (case.kv_heads, case.kv_len, case.v_dim)]  # fmt: skip
    arrays = [draw.standard_normal((case.batch, *s)).astype(np.float32) for s in shapes]
    q, k, v = (TO[case.dtype](x) for x in (change(*arrays) if change else arrays))
    dout = rounded(case.dtype, draw.standard_normal((case.batch, case.heads, case.q_len, case.v_dim)))
    dtotal = draw.standard_normal((case.batch, case.heads, case.q_len))
    drop = {} if case.rate is None else {SEED: 5, RATE: float(np.float32(case.rate))}
    slots = {s.name: drop.get(s.source, work.slots[s.name]) for s in work.plan.slots}
    seed = {s.name: drop[s.source] for s in work.plan.slots if s.source in drop}
    params = {**program.scalars, **drop, **seed}
    call = dense.DenseCall(program.exprs, scale, params, program.tables, g.problem, keep_mask=work.plan.keep_mask,
                           rate=case.rate or 0.0)  # fmt: skip
    args = work.plan, work.spans, g, q, k, v, None, None, None, None, slots, work.tables
    target = Target("cpp", *case.tile, precision=case.precision)
    return Made(case, work, (*args, target, case.dtype), (*args[:6], slots, work.tables, target, case.dtype), call,
                dout, dtotal)  # fmt: skip


def wide(made):
    return [np.asarray(exact(x, made.case.dtype), np.float64) for x in made.args[3:6]]


def allowed(want, near, dtype):
    unit = 1e-13 if dtype == "float64" else 1e-6
    return 2 * np.abs(np.asarray(near, np.float64) - want).max() + unit * max(1.0, np.abs(want).max())


def near(made, what, *more):
    """What dense attention gives in the dtype of the call."""
    call = replace(made.call, rounded=partial(rounded, made.case.dtype))
    return what(*(np.asarray(x, np.float32) for x in wide(made)), call, *more)


def off(got, want):
    with np.errstate(all="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        return np.nan_to_num(np.where(same, 0, np.abs(got - want)), nan=np.inf).max()


def counts(made):
    _, m = dense._scores(*dense._per_query_head(dense.exactly, *wide(made)[:2]), made.call)
    return (~np.isneginf(m)).sum(-1)


def check_forward(made, **options):
    want = dense.attention(*wide(made), made.call)
    close = near(made, dense.attention) if made.case.dtype != "float64" else want
    g = made.case
    norm = np.full((g.batch, g.heads, g.q_len, 2), 7, np.float64 if g.dtype == "float64" else np.float32)
    norm = native_call.placed(norm)
    out, total, count = native_call.forward(*made.forward, norm=norm, **options)
    assert not norm.any()  # no softmax is known
    out = np.asarray(exact(out, made.case.dtype), np.float64)
    for name, got, w, n in zip(("out", "total"), (out, total), want, close, strict=True):
        worst, most = off(got, w), allowed(w, n, made.case.dtype)
        assert worst <= most, f"{name}: off by {worst:.2e}, {most:.2e} allowed"
    if made.work.plan.counts:
        assert np.array_equal(count, counts(made))


def cotangents(made):
    """What a kernel gets in the places of dout and dlse: dout / d, and what the sum of weights adds to a weight's."""
    q, k, _ = dense._per_query_head(dense.exactly, *wide(made))
    rows = dense._weighted_rows(q, k, made.call)
    out, _ = dense.attention(*wide(made), made.call)
    g, divide = dense._over(np.asarray(made.dout, np.float64), rows.divisor), made.call.exprs.divide
    slope = 0.0 if divide is None else derivatives(divide, TOTAL).slope
    slope = 1.0 if slope is None else slope if isinstance(slope, float) else evaluate(slope, rows.env, made.call.tables)
    c = made.dtotal - np.broadcast_to((g * out).sum(-1, keepdims=True) * slope, rows.divisor.shape)[..., 0]
    return g, np.where(np.isneginf(rows.m).all(-1), 0, c)


def check_backward(made, **options):
    dtype = made.case.dtype
    want = named(dense.gradients(*wide(made), made.call, made.dout, made.dtotal))
    close = want
    if dtype != "float64":
        close = named(near(made, dense.gradients, made.dout.astype(np.float32), made.dtotal))
    g, c = cotangents(made)
    g = g if dtype == "float64" else TO[dtype](g.astype(np.float32))
    args = list(made.args)
    # the kernel reads neither out nor lse
    args[6:10] = None, np.full(c.shape, np.nan), g, c
    found = native_call.backward(*args, **options)
    sums = folded(made.case, made, found)
    assert set(sums) == set(want)
    for name, got in sums.items():
        worst, most = off(np.asarray(got, np.float64), want[name]), allowed(want[name], close[name], dtype)
        assert worst <= most, f"{name}: off by {worst:.2e}, {most:.2e} allowed"


HOLES = np.random.default_rng(2).standard_normal((150, 150)).astype(np.float32)
HOLES[:, ::3] = HOLES[5] = -np.inf  # the score of these pairs hides them
WINDOW = Case(SIGMOID, "causal & q - k < w", {"w": 70}, q_len=131, kv_len=203, origin=(0, 0, 72, 0))
RAGGED = Case(RELU, "causal & k < n[b]", {"n": np.array([97, 0])}, batch=2, rate=0.3, v_dim=40)
DECAYED = Case(RETENTION, kv_heads=4, dtype="bfloat16")
EMPTY = Case(OFF_BY_ONE, "q > k & k > 20", q_len=100, kv_len=120, dim=40, v_dim=24, dtype="float16")
CASES = {
    "sigmoid": WINDOW,
    "sigmoid-one-query": WINDOW.but(q_len=1, origin=(0, 0, 202, 0)),
    "sigmoid-nothing-visible": WINDOW.but(origin=(0, 0, 0, 300)),
    "relu": RAGGED,
    "relu-many-parts": RAGGED.but(q_len=2, kv_len=3000, origin=(0, 0, 2990, 0), params={"n": np.array([2995, 0])}),
    "retention": DECAYED,
    "retention-seven-queries": DECAYED.but(q_len=7, kv_len=1500, origin=(0, 0, 1490, 0)),
    "off-by-one": EMPTY,
    "off-by-one-two-queries": EMPTY.but(q_len=2, kv_len=700, origin=(0, 0, 699, 0)),
    "linear": Case(LINEAR, "causal & q - k < w", {"w": 100, "x": HOLES}, score="score + x[q, k]"),
    "softmax": Case(EXP, "causal", {"x": HOLES}, score="score + x[q, k]"),
    "captured": Case(LEARNED, "causal", kv_heads=1),
}
EXHAUSTIVE = {"linear", "softmax", "captured"}
PROGRAMS = {"sigmoid": SIGMOID, "relu": RELU, "retention": RETENTION, "off-by-one": OFF_BY_ONE, "linear": LINEAR}
MASKS = {
    "sigmoid": ("causal", {}),
    "relu": ("causal & q - k < w", {"w": 60}),
    "retention": ("causal & k < n[b]", {"n": np.array([90])}),
    "off-by-one": (None, {}),
    "linear": ("q > k & (q - k) % 3 != 1", {}),
}


def drawn(name, dtype):
    rate = {"float64": 0.3, "bfloat16": 0.2}.get(dtype)
    return Case(PROGRAMS[name], *MASKS[name], q_len=131, kv_len=170, dim=40, v_dim=32, dtype=dtype, rate=rate)


@cache
def made_by_name(name):
    return made_of(CASES[name])


@pytest.mark.parametrize("name", default_only(CASES, *CASES.keys() - EXHAUSTIVE))
def test_native_weighted_forward_equals_the_reference(name):
    made = made_by_name(name)
    check_forward(made)
    if name.startswith("relu"):
        out, total, _ = native_call.forward(*made.forward, threads=1)
        assert not out[1].any()  # its queries see nothing
        assert not total[1].any()


@pytest.mark.parametrize("name", default_only(CASES, "sigmoid", "sigmoid-nothing-visible", "relu", "relu-many-parts"))
def test_native_weighted_gradients_equal_the_reference(name):
    check_backward(made_by_name(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", TO)
@pytest.mark.parametrize("name", PROGRAMS)
def test_native_weighted_kernels_of_each_dtype(name, dtype):
    made = made_of(drawn(name, dtype))
    check_forward(made)
    check_backward(made)


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", [v for v in native_build.VARIANTS if v != "native"])
def test_native_weighted_kernels_on_other_instruction_sets(variant):
    if why := native_build.lacking(variant):
        pytest.skip(why)
    for name in ("sigmoid", "relu", "retention", "relu-many-parts"):
        check_forward(made_by_name(name), variant=variant)
        check_backward(made_by_name(name), variant=variant)


SIX = Case(STEEP, "causal", q_len=150, kv_len=150, kv_heads=4, tile=(64, 64), precision="bf16x6")


@pytest.mark.exhaustive
@pytest.mark.parametrize("slope", [1.0, 60.0, -60.0])
@pytest.mark.parametrize("shift", [0.0, 60.0, -60.0, 80.0])
def test_terms_of_bfloat16_hold_no_weights_of_any_size(slope, shift):
    """What a matrix unit multiplies in terms has to be near 1: other weights are multiplied by vectors."""
    weight, divide, _ = STEEP
    case = SIX.but(weight=(weight, divide, {"a": slope, "c": shift}))
    check_forward(made_of(case, lambda q, k, v: (q / 8, k / 8, v)))


def zeros(q, k, v):
    q[:, :, 9] = 0
    return q, k, v


def zeros_beside_nan(q, k, v):
    k[:, :, 97:], v[:, :, 97:] = np.nan, np.inf
    return zeros(q, k, v)


@pytest.mark.parametrize("name", default_only(("sigmoid", "relu", "linear"), "relu"))
def test_native_weights_of_hidden_pairs_do_not_matter(name):
    """What no query sees may hold anything; and a score of 0, whose weight is 0, has the slope that it has."""
    case = CASES[name].but(batch=2, mask=RAGGED.mask, q_len=150, kv_len=150, origin=RAGGED.origin)
    case = case.but(params={"n": np.array([97, 0])} | {n: x for n, x in case.params.items() if n != "w"})
    plain, other = made_of(case, zeros), made_of(case, zeros_beside_nan)
    check_forward(plain)
    check_backward(plain)
    for x, y in zip(native_call.forward(*other.forward), native_call.forward(*plain.forward), strict=True):
        assert np.array_equal(x, y)
    g, c = cotangents(plain)
    cotangent = None, c, g.astype(np.float32), c
    found, want = (native_call.backward(*m.args[:6], *cotangent, *m.args[10:]) for m in (other, plain))
    assert all(np.array_equal(found[n], want[n]) for n in want)
