"""The native backward kernel beside the interpreter's gradients."""

import math
import random
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
from support.native import call as native_call
from support.tiers import default_only

from frisket.lowering import dense, derive
from frisket.lowering import pipeline as bind
from frisket.lowering.kernels.cpp import backward as cpp_backward
from frisket.lowering.kernels.cpp.forward import CppArrays
from frisket.lowering.plan import RATE, SEED, Geometry, Target
from frisket.lowering.plan import Problem as Place
from frisket.runtime.calls.program import program_of
from frisket.runtime.machine import cpp_build as native_build
from lowering.kernels.cpp import test_cpp_forward

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())

R = np.random.default_rng(3)
DOC = np.sort(R.integers(0, 6, 300))


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
    tile: tuple = (64, 64)
    origin: tuple = (0, 0, 0, 0)
    sinks: tuple | None = None
    rate: float | None = None
    precision: str = "ieee"
    with_dlse: bool = True

    def but(self, **changes):
        return replace(self, **changes)


HOLES = normal(150, 150)
HOLES[5] = HOLES[90:100] = 0  # no score of these rows is finite
TABLES = test_cpp_forward.EVERY_TABLE
ALL_KINDS = Case(TABLES.mask, TABLES.score, TABLES.params, 2, 4, 2, 200, 200, 24, 80, tile=TABLES.tile)
WINDOW = Case("causal & q - k < w", None, {"w": 100}, 1, 4, 2, 300, 300, tile=(64, 64))
CASES = {
    "window": WINDOW,
    "residues": WINDOW.but(mask="causal & (q - k) % d == r", params={"d": 3, "r": 2}, q_len=131, kv_len=203,
                           origin=(0, 0, 72, 0)),
    "one-head": WINDOW.but(heads=1, kv_heads=1),
    "many-query-heads": WINDOW.but(heads=6, kv_heads=1, q_len=190, kv_len=301, with_dlse=False),
    "one-query": WINDOW.but(q_len=1, origin=(0, 0, 299, 0)),
    "five-queries": WINDOW.but(q_len=5, origin=(0, 0, 290, 0), batch=2),
    "crop": WINDOW.but(q_len=70, kv_len=131, origin=(1, 0, 90, 7)),
    "origin-by-batch": WINDOW.but(batch=2, q_len=70, origin=(0, 0, np.array([90, 210]), np.array([0, 5]))),
    "short-keys": WINDOW.but(kv_len=5),
    "whole-tiles": WINDOW.but(q_len=256, kv_len=256),
    "everything": Case(None, None, {}, q_len=70, kv_len=130, dim=64, v_dim=24, tile=(32, 32)),
    "empty-rows-and-sinks": Case("q > k & k > 20", None, {}, 1, 4, 2, 300, 300, 40, 24, tile=(48, 64),
                                 sinks=(0.0, 1.0, -1.0, -math.inf)),
    "softcap": Case("causal", "20 * tanh(score / 20)", dim=128, v_dim=64, tile=(50, 64)),
    "all-kinds": ALL_KINDS,
    "empty-rows-of-all-kinds": ALL_KINDS.but(origin=(0, 0, 0, 100), sinks=(0.0, 1.0, -1.0, -math.inf),
                                             params=TABLES.params | {"flag": np.zeros(300, bool)}),
    "all-kinds-one-head": ALL_KINDS.but(heads=1, kv_heads=1, batch=1),
    "slots": Case("q >= k & k % 7 != 3", "c * tanh(score / c) + a * sin(score)", {"c": 2.5, "a": 0.3}, heads=4, dim=16,
                  v_dim=80),
    "minus-infinity": Case("causal", "score + where(k % 3 == 0, -inf, 0.0) + log(x[k])", {"x": abs(normal(150))}),
    "table-of-minus-infinity": Case("causal", "sin(score) + log(x[q, k])", {"x": np.maximum(HOLES, 0)}, v_dim=16),
    "blocks-float64": Case("(q // w) == (k // w) | k % 3 == 0 & q > k + 7", "score + x[q, k] * score",
                           {"w": 17, "x": normal(200, 200)}, 1, 2, 2, 200, 200, 40, 40, "float64"),
    "float64-dropout": Case("q // w == k // w | k % 3 == 0 & q > k + 7", "score + x[q, k] * score",
                            {"w": 17, "x": normal(200, 200)}, 1, 2, 1, 200, 200, 40, 40, "float64",
                            sinks=(0.5, -math.inf), rate=0.3),
    "bfloat16": WINDOW.but(dtype="bfloat16"),
    "bfloat16-odd-sizes": ALL_KINDS.but(dtype="bfloat16", dim=40, v_dim=19),
    "float16": WINDOW.but(dtype="float16", heads=1, kv_heads=1),
    "dropout": Case("causal", None, {}, 2, 2, 1, 130, 130, rate=0.3, sinks=(0.5, -0.5)),
    "dropout-bfloat16": Case("causal", "score * c", {"c": 0.9}, 2, 2, 1, 130, 130, rate=0.3, dtype="bfloat16"),
    "dim-256": Case("causal", dim=256, v_dim=256, q_len=70, kv_len=70, tile=(32, 32)),
    "dim-8": Case("causal", dim=8, v_dim=8, tile=(20, 16)),
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """Everything the kernel is called with, and the gradients it should find, by name."""

    args: tuple
    want: dict
    allowed: dict
    options: dict
    work: object


TO = {"bfloat16": native_call.bfloat16, "float16": np.float16, "float32": np.float32, "float64": np.float64}


def exact(x, dtype):
    return native_call.from_bfloat16(x) if dtype == "bfloat16" else x


def problem(case: Case) -> Problem:
    draw = np.random.default_rng(1)
    program = program_of(case.mask, case.score, case.params)
    g = Geometry(
        case.batch,
        case.heads,
        case.kv_heads,
        case.q_len,
        case.kv_len,
        case.dim,
        case.v_dim,
        case.dim**-0.5,
        case.origin,
    )
    work = bind.work(program, g.problem, case.tile, proofs=True, dropout=case.rate is not None)

    def array(heads, length, dim):
        return TO[case.dtype](draw.standard_normal((case.batch, heads, length, dim)))

    q, k = array(case.heads, case.q_len, case.dim), array(case.kv_heads, case.kv_len, case.dim)
    v, dout = array(case.kv_heads, case.kv_len, case.v_dim), array(case.heads, case.q_len, case.v_dim)
    dlse = draw.standard_normal((case.batch, case.heads, case.q_len)) if case.with_dlse else None
    drop = {} if case.rate is None else {SEED: 5, RATE: float(np.float32(case.rate))}
    slots = {s.name: drop.get(s.source, work.slots[s.name]) for s in work.plan.slots}
    options = {"scale": g.scale, "params": {**program.scalars, **drop}, "tables": program.tables, "problem": g.problem}
    if case.rate is not None:
        seed = {s.name: drop[s.source] for s in work.plan.slots if s.source in drop}
        options |= {"keep_mask": work.plan.keep_mask, "rate": case.rate, "params": {**options["params"], **seed}}
    if case.sinks is not None:
        options["sinks"] = np.array(case.sinks)
    wide = [np.asarray(exact(x, case.dtype), np.float64) for x in (q, k, v)]
    call = dense.DenseCall(program.exprs, **options)
    out, lse = dense.attention(*wide, call)
    cotangents = np.asarray(exact(dout, case.dtype), np.float64), dlse
    want = named(dense.gradients(*wide, call, *cotangents))
    unit = 1e-13 if case.dtype == "float64" else 3e-6
    allowed = {n: unit * max(1.0, np.abs(x).max(), ROUNDING * rows(case) / np.size(x)) for n, x in want.items()}
    if case.dtype in ("bfloat16", "float16"):

        def rounded(x):
            return exact(TO[case.dtype](np.asarray(x, np.float32)), case.dtype).astype(np.float32)

        # these kernels get no residual of out: delta is that of the rounded one
        near = named(dense.gradients(*wide, replace(call, rounded=rounded, stored=("out",)), *cotangents))
        wrong = {n: 2 * np.abs(near[n] - x).max() / max(1.0, np.abs(x).max()) for n, x in want.items()}
        usual = max(wrong[n] for n in "qkv")  # a sum with few entries may be right by luck
        allowed = {n: (max(wrong[n], usual) if n not in "qkv" else wrong[n]) for n in want}
        allowed = {n: (w + 1e-6) * max(1.0, np.abs(want[n]).max()) for n, w in allowed.items()}
    args = (work.plan, work.spans, g, q, k, v, TO[case.dtype](out.astype(np.float32)), lse, dout, dlse, slots)
    if case.dtype == "float64":
        args = (*args[:6], out, *args[7:])
    args = (*args, work.tables, Target("cpp", *case.tile, precision=case.precision), case.dtype)
    return Problem(args, want, allowed, {"sinks": options.get("sinks")}, work)


@cache
def problem_of(name: str) -> Problem:
    return problem(CASES[name])


# An entry of a captured gradient is a sum over many rows, which nearly cancel. Of a row's addends, about 10 in all,
# float32 loses 6e-8: in units of 3e-6, this much.
ROUNDING = 0.2


def rows(case: Case) -> int:
    return case.batch * case.heads * case.q_len


def named(found):
    return {n: found["d" + n] for n in "qkv"} | found["dtables"] | found["dscalars"]


def folded(case: Case, made: Problem, found: dict) -> dict:
    """Buffers of captured gradients, summed into their tables by the interpreter's own lookup."""
    sources = {x.name: x.source for x in (*made.work.plan.slots, *made.work.plan.tables)}
    result = {n: exact(found[n], case.dtype) for n in "qkv" if n in found}
    for n, g in enumerate(derive.backward_of(made.work.plan).gradients):
        if n not in found:
            continue
        name, buffer = sources[g.source], np.asarray(found[n], np.float64)
        if not g.index:
            buffer = buffer.sum()
        elif g.over != "scatter":
            buffer = spread(case, g, buffer, made)
        result[name] = result.get(name, 0.0) + buffer
    return result


def spread(case: Case, g, buffer, made):
    """Entry by entry: at the coordinates that its place in the buffer says, the index of the lookup."""
    from frisket.dsl.evaluate import evaluate

    table = np.zeros(np.shape(made.work.tables[g.source]))
    env = dense.coordinates(made.args[2].problem)
    env |= {n: made.args[10][n] for n in made.args[10]}
    if g.over == "diagonal":
        q0, k0 = (np.asarray(x).reshape(-1, 1, 1) for x in case.origin[2:])
        env["b"], env["h"] = env["b"][..., 0], env["h"][..., 0]
        env["q"] = q0 + np.arange(case.q_len + case.kv_len - 1) - (case.kv_len - 1)
        env["k"] = k0
    else:
        drop = {"head": (2, 2), "row": (3,), "column": (2,)}[g.over]
        for axis in drop:
            env = {n: x.take(0, axis) if np.ndim(x) > axis else x for n, x in env.items()}
    index = [np.clip(evaluate(e, env, made.work.tables), 0, n - 1) for e, n in zip(g.index, table.shape, strict=True)]
    np.add.at(table, tuple(np.broadcast_to(i, buffer.shape) for i in index), buffer)
    return table


def check(case: Case, made: Problem, found: dict) -> None:
    near = folded(case, made, found)
    for name, x in near.items():
        worst = np.abs(np.asarray(x, np.float64) - made.want[name]).max()
        assert worst <= made.allowed[name], f"{name}: off by {worst:.2e}, {made.allowed[name]:.2e} allowed"


# cases of one kernel are in one tier: the default run has one of each dtype
EXHAUSTIVE = {
    "residues", "empty-rows-and-sinks", "blocks-float64", "dropout", "short-keys", "softcap", "minus-infinity",
    "bfloat16-odd-sizes", "dropout-bfloat16", "dim-256", "dim-8", "slots", "table-of-minus-infinity", "float16",
    "everything",
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", default_only(CASES, *CASES.keys() - EXHAUSTIVE))
def test_native_gradients_equal_the_reference_and_repeat(name):
    case, made = CASES[name], problem_of(name)
    found = native_call.backward(*made.args, **made.options)
    assert set(folded(case, made, found)) == set(made.want)
    check(case, made, found)
    again = native_call.backward(*made.args, **made.options)
    assert all(np.array_equal(found[n], again[n]) for n in found)  # bit for bit


VARIANTS = [pytest.param(v, marks=pytest.mark.slow) for v in ("avx512", "avx2", "scalar")]


@pytest.mark.parametrize("name", ["all-kinds", "bfloat16-odd-sizes", "minus-infinity", "dropout", "blocks-float64"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_native_backward_runs_on_every_instruction_set(variant, name):
    _variant(variant, name)


@pytest.mark.exhaustive
def test_a_kernel_of_other_vectors():
    _variant("avx2", "all-kinds")


def _variant(variant, name):
    if why := native_build.lacking(variant):
        pytest.skip(why)
    made = problem_of(name)
    check(CASES[name], made, native_call.backward(*made.args, **made.options, variant=variant))


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_native_backward_repeats_with_any_number_of_threads(threads):
    """Cut into parts or not: right, and the same bits every time."""
    for name in ("one-head", "all-kinds-one-head", "window"):
        made = problem_of(name)
        found = native_call.backward(*made.args, **made.options, threads=threads)
        check(CASES[name], made, found)
        for _ in range(3):
            again = native_call.backward(*made.args, **made.options, threads=threads)
            assert all(np.array_equal(found[n], again[n]) for n in found)


@pytest.mark.parametrize("wanted", [{"q"}, {"k"}, {"v"}, {"q", "v"}, {"v", 2}, {0, 1, 4}])
def test_native_backward_leaves_out_unwanted_gradients(wanted):
    """What is not wanted is left out, and changes nothing."""
    made = problem_of("all-kinds")
    whole = native_call.backward(*made.args, **made.options)
    found = native_call.backward(*made.args, **made.options, wanted=wanted)
    assert set(found) == wanted
    assert all(np.array_equal(found[n], whole[n]) for n in wanted)


MASKS = [
    (None, {}), ("causal", {}), ("causal & q - k < w", {"w": 37}), ("q % 3 >= k % 3", {}), ("k < 40 & q > 9", {}),
    ("causal & doc[q] == doc[k]", {"doc": DOC}), ("abs(q - k) < 9 | k < 5", {}), ("(q - k) % 24 == 0", {}),
    ("q + b >= k & q - k < 20 * (h + 1)", {}),
]  # fmt: skip
SCORES = [
    (None, {}), ("score + sl[h] * (k - q) * 0.01", {"sl": normal(6)}), ("9 * tanh(score / 9)", {}),
    ("score * (1 + 0.1 * col[k]) + row[h, q]", {"col": normal(300), "row": normal(6, 300)}),
    ("score + bias[clamp(q - k, 0, 30)] * c", {"bias": normal(31), "c": 0.3}),
    ("score + table[h, q % 7, k % 5]", {"table": normal(6, 7, 5)}),
    ("where(score > 0, score, a * score)", {"a": 0.2}),
]  # fmt: skip


def drawn(seed):
    """A case with nothing regular about it, and a number of threads."""
    r = random.Random(seed)
    (mask, of_mask), (score, of_score) = r.choice(MASKS), r.choice(SCORES)
    kv_heads, q_len, kv_len = r.choice([1, 2, 3]), r.randint(1, 200), r.randint(1, 200)
    return Case(
        mask, score, of_mask | of_score, r.choice([1, 1, 2]), kv_heads * r.choice([1, 1, 2]), kv_heads, q_len, kv_len,
        r.choice([8, 19, 32, 64, 100]), r.choice([8, 33, 64]), r.choice(["float32", "float32", "bfloat16", "float64"]),
        (r.choice([1, 7, 16, 48, 64, 90]), 16 * r.randint(1, 6)), (0, 0, r.randint(0, 99), r.randint(0, 9)),
        rate=r.choice([None, None, 0.2]),
    ), r.choice([1, 2, 5])  # fmt: skip


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.slow if n else pytest.mark.exhaustive) for n in range(60)]
)
def test_native_gradients_of_random_cases_equal_the_reference(seed):
    case, threads = drawn(seed)
    made = problem(case)
    check(case, made, native_call.backward(*made.args, **made.options, threads=threads))


def test_native_backward_takes_arrays_of_any_strides():
    """Rows' entries are neighbours, everything else may lie anywhere."""
    made = problem_of("window")
    plain = native_call.backward(*made.args, **made.options)
    args = list(made.args)
    for i in (3, 4, 5, 6, 8):
        x = args[i]
        wide = np.full((x.shape[2], x.shape[0], x.shape[1], x.shape[3] + 3), np.nan, x.dtype)
        wide[..., 2:-1] = x.transpose(2, 0, 1, 3)
        args[i] = wide.transpose(1, 2, 0, 3)[..., 2:-1]
        assert args[i].strides[3] == x.itemsize
    found = native_call.backward(*args, **made.options)
    assert all(np.array_equal(found[n], plain[n]) for n in plain)


@pytest.mark.parametrize("name", ["window", "bfloat16", "whole-tiles"])
def test_nan_where_nobody_looks(name):
    """NaN and infinity in keys and values that a row does not see leave its gradients alone, and vice versa."""
    case, made = CASES[name], problem_of(name)
    plain = native_call.backward(*made.args, **made.options)
    args = [np.array(x) if isinstance(x, np.ndarray) else x for x in made.args]
    bad = [TO[case.dtype](np.full(1, x)) for x in (np.nan, np.inf)]
    for i, x in ((4, bad[0]), (5, bad[1])):  # the last key: only the last row sees it
        args[i][:, :, -1] = x
    found = native_call.backward(*args, **made.options)
    seen = case.kv_len - 1 if case.q_len == case.kv_len else None
    assert np.array_equal(found["q"][:, :, :seen], plain["q"][:, :, :seen])
    assert np.array_equal(found["k"][:, :, :150], plain["k"][:, :, :150])
    args = [np.array(x) if isinstance(x, np.ndarray) else x for x in made.args]
    args[3][:, :, 0], args[8][:, :, 1] = bad[1], bad[0]  # the first queries see the first keys alone
    found = native_call.backward(*args, **made.options)
    assert np.array_equal(found["q"][:, :, 2:], plain["q"][:, :, 2:])
    for n in "kv":
        assert np.array_equal(found[n][:, :, 2:], plain[n][:, :, 2:])
        assert np.isnan(exact(found[n][:, :, :2], case.dtype)).any()


def test_golden_native_backward_expressions(golden):
    """What the plan says of itself in the source."""
    work = bind.work(
        program_of("causal", "c * tanh(score / c) + bias[h, q - k]", {"c": 20.0, "bias": normal(2, 64)}),
        Place(64, 64, 1, 2),
        (64, 64),
        proofs=True,
    )
    kernel = cpp_backward.BackwardKernel(work.plan, Target("cpp", 64, 64), CppArrays(64, 64, "float32"))
    golden("relative_bias.cpp", kernel.expressions())
