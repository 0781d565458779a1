"""The native forward kernel beside the interpreter: masks, score mods, dtypes, shapes, strides, special numbers."""

import math
import zlib
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from support.native import call as native_call
from support.tiers import default_only

from frisket.lowering import dense
from frisket.lowering import pipeline as bind
from frisket.lowering.kernels.cpp import forward as cpp
from frisket.lowering.plan import RATE, SEED, Geometry, Target
from frisket.runtime.calls.program import program_of
from frisket.runtime.machine import cpp_build as native_build

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())

R = np.random.default_rng(5)
DOC = np.sort(R.integers(0, 6, 300))
TO = {"bfloat16": native_call.bfloat16, "float16": np.float16, "float32": np.float32, "float64": np.float64}
# of 1 + |wanted|: weights are rounded to bfloat16 as well, sums and scores never
NEAR = {"float32": 4e-6, "float64": 1e-13, "bfloat16": 8e-3, "float16": 1e-3}


def normal(*shape):
    return R.standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Case:
    mask: str | None = "causal"
    score: str | None = None
    params: dict = field(default_factory=dict)
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    q_len: int = 150
    kv_len: int = 150
    dim: int = 64
    v_dim: int = 64
    dtype: str = "float32"
    tile: tuple = (48, 64)
    origin: tuple = (0, 0, 0, 0)
    sinks: tuple | None = None
    rate: float | None = None
    precision: str = "ieee"
    scale: float | None = None

    def but(self, **changes):
        return replace(self, **changes)


WINDOW = Case("causal & q - k < w", None, {"w": 100}, 1, 4, 2, 300, 300)
# test_cpp_backward.py and test_cpp_weights.py take this kernel too: the same program, head sizes and tiles
EVERY_TABLE = Case(
    "doc[q] == doc[k] & q >= k | flag[k] & pair[b, k // 2]",
    "score * c + bias[h, q - k] + far[k - q + 299] + row[q] * score + col[h, k + 3] + sl[h] + plane[b, h, q, k]"
    " + z[q // 3, k // 5]",
    {"doc": DOC, "flag": R.random(300) < 0.1, "pair": R.random((2, 150)) < 0.5, "bias": normal(4, 300),
     "far": normal(500), "row": normal(300), "col": normal(4, 290), "sl": normal(4), "plane": normal(2, 4, 300, 300),
     "z": normal(100, 60), "c": 0.7},
    2, 4, 2, 200, 200, 24, 80, tile=(48, 32),
)  # fmt: skip
TURNED = {"bias": normal(300, 4).T, "col": normal(290, 4).T}
BLOCKS = Case("q // w == k // w & (q - k) % d == 0 | k >> 5 == q // 3 % 4", None, {"w": 17, "d": 3}, dim=16)
RESIDUES = Case(
    "causal & ((q - k) % d == r | (q - k) // 5 % 3 == 1 & (k - 3 * q) % n < 2)",
    None,
    {"d": 3, "r": 2, "n": -7},
    heads=4,
    kv_heads=2,
    q_len=131,
    kv_len=203,
    dim=16,
    origin=(0, 0, 72, 0),
)
# every query sees one interval of keys: those of another block for each 8 queries, of 8 keys with 8 nobody sees between
BLOCKS_APART = Case("q // 8 * 16 <= k & k < q // 8 * 16 + 8", heads=4, kv_heads=2, q_len=131, kv_len=250, dim=24)
DROPPED = Case(
    BLOCKS.mask, "score + x[q, k] * score", BLOCKS.params | {"x": normal(200, 200)}, 1, 2, 2, 200, 200, 40, 24,
    "float64", rate=0.3, sinks=(0.5, -0.5),
)  # fmt: skip
WIDE = Case("(q * 5000000000 + k * 4999999999) % 7 < 4 & q >= k", "score - float((q - k) * 3000000000) * 1e-10")
CASES = {
    "window": WINDOW,
    "residues": RESIDUES,
    "no-such-residue": RESIDUES.but(mask="(q - k) % d == r", params={"d": 3, "r": 3}, sinks=(0, 1, 2, 3)),
    "residues-one-query": RESIDUES.but(q_len=1, origin=(0, 0, 202, 0)),
    "residues-by-head": RESIDUES.but(mask="(q - k) % gap[h] == 0", params={"gap": np.array([1, 2, 5, 0])}),
    "residues-far-away": RESIDUES.but(mask="window(90) & (q - k) % 7 == r", params={"r": 5},
                                      origin=(0, 0, 3 * 2**33 + 60, 3 * 2**33)),
    "intervals": BLOCKS_APART,
    "intervals-float16": BLOCKS_APART.but(dtype="float16", v_dim=40),
    "intervals-bfloat16": BLOCKS_APART.but(dtype="bfloat16"),
    "intervals-float64": BLOCKS_APART.but(dtype="float64"),
    "intervals-by-head": BLOCKS_APART.but(mask="k >= q + 3 * h & k < q + 50 * h"),
    "intervals-of-some-queries": BLOCKS_APART.but(mask="q % 3 > 0 & k >= q"),
    "intervals-by-batch": BLOCKS_APART.but(mask="causal & q < n[b] & k < n[b]", params={"n": np.array([97, 0])},
                                           batch=2),
    "intervals-far-away": BLOCKS_APART.but(mask="window(40)", origin=(0, 0, 3 * 2**33 + 9, 3 * 2**33)),
    "window-one-tile": WINDOW.but(q_len=40, kv_len=33),
    "crop": WINDOW.but(q_len=70, kv_len=131, origin=(1, 0, 90, 7)),
    "origin-by-batch": WINDOW.but(batch=2, q_len=70, origin=(0, 0, np.array([90, 210]), np.array([0, 5]))),
    "many-query-heads": WINDOW.but(heads=6, kv_heads=1, q_len=190, kv_len=301),
    "whole-tiles": WINDOW.but(q_len=240, kv_len=256),
    "sinks": WINDOW.but(sinks=(0.0, 1.0, 30.0, -math.inf)),
    "negative-scale": WINDOW.but(scale=-0.2),
    "one-query": WINDOW.but(q_len=1, origin=(0, 0, 299, 0)),
    "two-queries-wide-tiles": WINDOW.but(q_len=2, kv_len=700, origin=(0, 0, 690, 0), params={"w": 600}, tile=(48, 128)),
    "many-parts": WINDOW.but(q_len=2, kv_len=3000, origin=(0, 0, 2990, 0), params={"w": 2900}, sinks=(0, 1, 2, 3)),
    "group-of-heads": WINDOW.but(q_len=7, heads=40, kv_len=1500, origin=(0, 0, 1400, 0), params={"w": 1400}),
    "nothing-visible": WINDOW.but(origin=(0, 0, 0, 300), sinks=(0, 1, -math.inf, 3)),
    "one-query-nothing": WINDOW.but(q_len=1, origin=(0, 0, 0, 300)),
    "empty-rows": Case("q > k & k > 20", heads=4, q_len=300, kv_len=300, dim=40, v_dim=24),
    "heads-differ": Case("causal & q - k < 20 * (h + 1)", "score - 0.1 * (h + 1) * (q - k)", heads=6, kv_heads=2),
    "heads-differ-one-query": Case("q >= k + h", "score - 0.1 * (h + 1) * (q - k)", heads=6, kv_heads=2, q_len=3,
                                   kv_len=900, origin=(0, 0, 700, 0)),
    "heads-visit-other-tiles": Case("q >= k + 300 * h", heads=4, q_len=2, kv_len=900, origin=(0, 0, 700, 0)),
    "everything": Case(None, dim=128, v_dim=80, q_len=70, kv_len=130, tile=(50, 32)),
    "softcap": Case("causal", "20 * tanh(score / 20)", tile=(48, 128)),
    "every-table": EVERY_TABLE,
    "every-table-one-query": EVERY_TABLE.but(q_len=1, origin=(0, 0, 250, 0)),
    "transposed-tables": EVERY_TABLE.but(params=EVERY_TABLE.params | TURNED),
    "blocks": BLOCKS,
    "division-by-zero": BLOCKS.but(params={"w": 0, "d": 0}),
    "dilated": Case("causal & (q - k) % 4 == 0 & q - k < 200", q_len=300, kv_len=300, tile=(64, 64)),
    "neighbourhood": Case("abs(q // 16 - k // 16) <= 2 & abs(q % 16 - k % 16) <= 2", q_len=256, kv_len=256),
    "minus-infinity": Case("causal", "score + where(k % 3 == 0 | q < 9, -inf, 0.0)"),
    "wide-integers": WIDE,
    "wide-integers-float64": WIDE.but(dtype="float64"),
    "float64": Case("q // 16 == k // 16 | q > k + 7", "score + x[q, k] * score", {"x": normal(200, 200)}, 1, 2, 2, 200,
                    200, 40, 24, "float64"),
    "float64-one-query": Case("q >= k", dtype="float64", q_len=1, kv_len=700, dim=20, v_dim=5, origin=(0, 0, 699, 0)),
    "float64-dropout": DROPPED,
    "float64-dropout-of-all": DROPPED.but(rate=1.0),
    "float64-dropout-of-none": DROPPED.but(rate=0.0),
    "float64-division-by-zero": DROPPED.but(params=DROPPED.params | {"w": 0, "d": 0}),
    "bfloat16": WINDOW.but(dtype="bfloat16"),
    "bfloat16-one-query": WINDOW.but(dtype="bfloat16", q_len=1, kv_len=900, origin=(0, 0, 890, 0), params={"w": 800}),
    "bfloat16-odd-sizes": EVERY_TABLE.but(dtype="bfloat16", dim=41, v_dim=19, tile=(20, 16)),
    "float16": WINDOW.but(dtype="float16", dim=24, v_dim=40),
    "dropout": Case("causal", None, {}, 2, 2, 1, 130, 130, rate=0.3, sinks=(0.5, -0.5)),
    "dropout-of-all": Case("causal", None, {}, 2, 2, 1, 130, 130, rate=1.0),
    "dropout-many-parts": Case("causal", None, {}, 2, 2, 1, 2, 3000, rate=0.3, sinks=(0.5, -0.5),
                               origin=(0, 0, 2990, 0)),
    "dropout-bfloat16": Case("causal", "score * c", {"c": 0.9}, 2, 2, 1, 130, 130, rate=0.3, dtype="bfloat16"),
    "dim-256": Case("causal", dim=256, v_dim=256, q_len=70, kv_len=70, tile=(32, 32)),
    "dim-8": Case("causal", dim=8, v_dim=8, tile=(7, 16)),
}  # fmt: skip


def exact(x, dtype):
    return native_call.from_bfloat16(x) if dtype == "bfloat16" else x


@dataclass
class Problem:
    """What the kernel is called with, and what it should find."""

    case: Case
    plan: object
    spans: object
    geometry: Geometry
    arrays: tuple
    slots: dict
    tables: dict
    want: tuple
    sinks: object

    def run(self, **options):
        c = self.case
        target = Target("cpp", *c.tile, precision=c.precision)
        return native_call.forward(
            self.plan, self.spans, self.geometry, *self.arrays, self.slots, self.tables, target, c.dtype,
            sinks=self.sinks, **options,
        )  # fmt: skip


def problem(case: Case, change=None) -> Problem:
    """`change(q, k, v)` alters the arrays before they are rounded, and gives those to use."""
    draw = np.random.default_rng(1)
    program = program_of(case.mask, case.score, case.params)
    scale = case.dim**-0.5 if case.scale is None else case.scale
    g = Geometry(
        case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, case.dim, case.v_dim, scale, case.origin
    )
    work = bind.work(program, g.problem, case.tile, proofs=True, dropout=case.rate is not None)
    shapes = [(case.heads, case.q_len, case.dim), (case.kv_heads, case.kv_len, case.dim),
              (case.kv_heads, case.kv_len, case.v_dim)]  # fmt: skip
    arrays = [draw.standard_normal((case.batch, *s)).astype(np.float32) for s in shapes]
    arrays = [TO[case.dtype](x) for x in (change(*arrays) if change else arrays)]
    drop = {} if case.rate is None else {SEED: 5, RATE: float(np.float32(case.rate))}
    slots = {s.name: drop.get(s.source, work.slots[s.name]) for s in work.plan.slots}
    options = {"scale": g.scale, "params": {**program.scalars, **drop}, "tables": program.tables, "problem": g.problem}
    if case.rate is not None:
        seed = {s.name: drop[s.source] for s in work.plan.slots if s.source in drop}
        options |= {"keep_mask": work.plan.keep_mask, "rate": case.rate, "params": {**options["params"], **seed}}
    sinks = None if case.sinks is None else np.array(case.sinks, float)
    wide = [np.asarray(exact(x, case.dtype), np.float64) for x in arrays]
    out, lse = dense.attention(*wide, dense.DenseCall(program.exprs, sinks=sinks, **options))
    top = dense.top(
        *wide[:2],
        dense.DenseCall(program.exprs, **{n: x for n, x in options.items() if n not in ("keep_mask", "rate")}),
    )
    return Problem(case, work.plan, work.spans, g, tuple(arrays), slots, work.tables, (out, lse, top), sinks)


def check(made: Problem, found) -> None:
    near = (NEAR[made.case.dtype], *[NEAR["float64" if made.case.dtype == "float64" else "float32"]] * 2)
    for name, got, want, allowed in zip(("out", "lse", "top"), found, made.want, near, strict=True):
        got = np.asarray(exact(got, made.case.dtype) if name == "out" else got, np.float64)
        with np.errstate(all="ignore"):
            off = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0, np.abs(got - want) / (1 + np.abs(want)))
        worst = np.nan_to_num(off, nan=np.inf).max()
        assert worst <= allowed, f"{name}: off by {worst:.2e}, {allowed:.2e} allowed"


RARE = ("wide-integers-float64", "dropout-bfloat16", "float64-one-query", "dilated", "heads-differ", "dim-8")


# cases of one kernel are in one tier: the default run has one of each dtype, way to products and kind of lookup
EXHAUSTIVE = (
    "residues-far-away", "residues-by-head", "no-such-residue", "intervals", "intervals-bfloat16", "intervals-float64",
    "intervals-by-head",
    "intervals-of-some-queries", "intervals-by-batch", "intervals-far-away", "two-queries-wide-tiles",
    "neighbourhood", "heads-differ-one-query", "softcap", "dim-256", "empty-rows", "everything",
    "heads-visit-other-tiles", "minus-infinity", "bfloat16-odd-sizes", "wide-integers", "blocks", "division-by-zero",
    "float64", "float16", "dropout", "dropout-of-all", "dropout-many-parts",
)  # fmt: skip
MARKS = dict.fromkeys(RARE, pytest.mark.slow) | dict.fromkeys(EXHAUSTIVE, pytest.mark.exhaustive)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in CASES])
def test_native_forward_equals_the_reference(name):
    made = problem(CASES[name])
    check(made, made.run())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("name", ["window", "many-parts", "bfloat16"])
def test_threads_change_no_bit(name, threads):
    made = problem(CASES[name])
    for got, want in zip(made.run(threads=threads), made.run(threads=2), strict=True):
        assert got.tobytes() == want.tobytes()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["window", "one-query", "bfloat16", "bfloat16-one-query", "intervals-float16"])
def test_native_forward_takes_arrays_of_any_strides(name):
    """Arrays [batch, length, heads, dim] seen as [batch, heads, length, dim], and with gaps between rows."""
    made = problem(CASES[name])
    want = made.run()
    apart = tuple(np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in made.arrays)
    gaps = []
    for x in made.arrays:
        room = np.full((*x.shape[:3], x.shape[3] + 5), 3, x.dtype)
        room[..., 2:-3] = x
        gaps.append(room[..., 2:-3])
    for arrays in (apart, tuple(gaps)):
        for got, wanted in zip(replace(made, arrays=arrays).run(), want, strict=True):
            assert got.tobytes() == wanted.tobytes()


def test_native_forward_can_leave_out_the_largest_scores():
    made = problem(WINDOW)
    out, _, top = made.run(want_top=False)
    assert out.tobytes() == made.run()[0].tobytes()
    assert (top == 7).all()


# -- special numbers -----------------------------------------------------------------------------------


def masked_keys(q, k, v):
    """NaN and inf in keys that no query sees: every third one."""
    k[:, :, ::3], k[:, :, ::6] = np.nan, np.inf
    return q, k, v


SPECIAL = Case("causal & k % 3 != 0", heads=1, kv_heads=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("q_len", [150, 1, 5])
@pytest.mark.parametrize("score", [None, "20 * tanh(score / 20)"])
def test_masked_scores_do_not_matter(score, q_len):
    case = SPECIAL.but(score=score, q_len=q_len, origin=(0, 0, 150 - q_len, 0))
    made = problem(case, masked_keys)
    made.want = problem(case).want
    check(made, made.run())


@pytest.mark.parametrize("q_len", [131, 1])
@pytest.mark.parametrize(
    "name", default_only(("intervals", "intervals-float16", "intervals-bfloat16"), "intervals-float16")
)
def test_keys_between_intervals_do_not_matter(name, q_len):
    def change(q, k, v):
        for x in (k, v):
            x.reshape(-1, x.shape[-2], x.shape[-1])[:, np.arange(x.shape[-2]) % 16 >= 8] = np.nan
        return q, k, v

    case = CASES[name].but(q_len=q_len)
    made = problem(case, change)
    made.want = problem(case).want
    check(made, made.run())


@pytest.mark.parametrize("q_len", [150, 1])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_visible_special_numbers(number, q_len):
    """Rows that see them are what the interpreter makes of them; the others do not notice."""

    def change(q, k, v):
        k[:, :, 100, 5] = number
        q[..., 5] = abs(q[..., 5])
        return q, k, v

    made = problem(WINDOW.but(heads=1, kv_heads=1, q_len=q_len, kv_len=150, origin=(0, 0, 150 - q_len, 0)), change)
    out, lse, top = made.run()
    check(made, (out, lse, top))
    assert np.isnan(out).any() == (number != -np.inf)


# -- other machines --------------------------------------------------------------------------------------

VARIANTS = [v for v in native_build.VARIANTS if v != "native"]


@pytest.mark.parametrize(("name", "variant"), [("every-table", "scalar"),
                                               *[pytest.param(*x, marks=pytest.mark.exhaustive) for x in (
                                                   ("bfloat16-one-query", "avx2"), ("bfloat16", "avx2"),
                                                   ("intervals", "avx2"),
                                                   ("intervals-float64", "scalar"), ("residues", "avx2"),
                                                   ("float64", "scalar"), ("intervals-far-away", "avx512"),
                                                   ("softcap", "avx512"),
                                               )]])  # fmt: skip
def test_native_forward_runs_on_other_instruction_sets(name, variant):
    if why := native_build.lacking(variant):
        pytest.skip(why)
    made = problem(CASES[name])
    check(made, made.run(variant=variant))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", CASES)
def test_native_forward_runs_each_case_on_each_instruction_set(name, variant):
    if why := native_build.lacking(variant):
        pytest.skip(why)
    made = problem(CASES[name])
    check(made, made.run(variant=variant))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TO)
@pytest.mark.parametrize("dim", [8, 16, 20, 33, 72, 96, 112, 160, 192])
def test_native_forward_takes_head_sizes_of_all_remainders(dim, dtype):
    for case in (WINDOW, WINDOW.but(q_len=3, origin=(0, 0, 290, 0))):
        made = problem(case.but(dim=dim, v_dim=max(8, zlib.crc32(b"%d" % dim) % 100), dtype=dtype))
        check(made, made.run())


@pytest.mark.slow
@pytest.mark.parametrize("tile", [(1, 16), (6, 48), (13, 80), (128, 128), (192, 256), (64, 32)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_forward_takes_tiles_of_any_size(tile, dtype):
    made = problem(EVERY_TABLE.but(tile=tile, dtype=dtype))
    check(made, made.run())


def test_native_forward_source_is_deterministic():
    made = problem(EVERY_TABLE)
    kernel = made.plan, Target("cpp", 48, 64), cpp.CppArrays(24, 24, "float32")
    texts = {cpp.CppKernel(*kernel).source() for _ in range(2)}
    assert len(texts) == 1
