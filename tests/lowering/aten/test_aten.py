"""torch's library calls against the reference: every operator, every kind of mask, shape and stride."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from support.lowering import brute
from support.tiers import thinned

from frisket.dsl import ir
from frisket.dsl.evaluate import OPERATORS as MEANING
from frisket.dsl.evaluate import evaluate
from frisket.dsl.sugar import b, eq, function, h, k, q, score, where
from frisket.dsl.transfer import distance_only
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering import dense
from frisket.lowering.aten import flash as aten_flash
from frisket.lowering.aten import forward as aten
from frisket.lowering.aten import tiles as aten_tiles
from frisket.lowering.aten.expr import TileProgram, operators
from frisket.lowering.aten.steps import steps
from frisket.lowering.kernels.legalise import DECOMPOSITIONS
from frisket.lowering.plan import Geometry, KernelInputs, Spans, Target, make_plan
from frisket.lowering.simplify import ProgramExprs

INTS = np.array([-(2**40), -129, -64, -7, -3, -1, 0, 1, 2, 3, 5, 63, 64, 100, 2**31, 2**40])
FLOATS = np.array([-np.inf, -1e30, -3.5, -1.0, -0.25, -0.0, 0.0, 1e-3, 0.5, 1.0, 2.75, 40.0, 1e30, np.inf, np.nan])
BOOLS = np.array([False, True])
VALUES = {INT: INTS, FLOAT: FLOATS, BOOL: BOOLS}
# operators whose Int results must stay in 64 bits
SMALL = {"mul": np.arange(-9, 10), "shl": np.arange(-3, 40), "pow": np.arange(0, 8)}


def signatures(op):
    """Every list of argument types the operator takes."""
    for n in (1, 2, 3):
        for types in itertools.product((BOOL, INT, FLOAT), repeat=n):
            try:
                if n in arity(op) and ir.result_type(op, types) is not None:
                    yield types
            except IndexError:
                continue


def arity(op):
    if op in ("and", "or"):
        return (2, 3)
    if op == "where":
        return (3,)
    unary = {"neg", "abs", "sign", "bitnot", "not", "int", "float", "floor", "isfinite"} | ir.FLOAT_FUNCTIONS
    return (1,) if op in unary else (2,)


CASES = [(op, types) for op in sorted(set(MEANING) - {"random"}) for types in signatures(op)]


def test_aten_operator_table_is_complete():
    assert set(MEANING) <= {*operators(), *DECOMPOSITIONS}


@pytest.mark.parametrize(("op", "types"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)))
def test_aten_operators_have_the_values_of_the_reference(op, types):
    values = [SMALL[op] if t is INT and op in SMALL else VALUES[t] for t in types]
    grids = np.meshgrid(*values, indexing="ij")
    names = [f"x{i}" for i in range(len(types))]
    node = ir.build(op, *(ir.var(n, t) for n, t in zip(names, types)))
    env = dict(zip(names, grids))
    want = evaluate(node, env)
    got = TileProgram(node, torch.float64)({n: torch.from_numpy(np.array(x)) for n, x in env.items()}, {}).numpy()
    if want.dtype.kind == "f":
        assert_close(got, want)
    else:
        np.testing.assert_array_equal(got, want)


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


def test_random_is_equal_bit_for_bit():
    e = ir.random(ir.param("seed"), b, h, q, k)
    env = {"seed": 77, "b": 1, "h": 3, "q": np.arange(40)[:, None], "k": np.arange(-20, 40)}
    tensors = {n: torch.tensor(x) for n, x in env.items()}
    np.testing.assert_array_equal(TileProgram(e, torch.float32)(tensors, {}).numpy(), evaluate(e, env))


def test_lookups_clamp_and_literals_need_no_tensor():
    e = ir.lookup("t", (q + k,)) + 1
    table = np.array([10, 20, 30])
    env = {"q": np.arange(-3, 4)[:, None], "k": np.arange(3)}
    got = TileProgram(e, torch.float32)(
        {n: torch.from_numpy(x) for n, x in env.items()}, {"t": torch.from_numpy(table)}
    )
    np.testing.assert_array_equal(got.numpy(), evaluate(e, env, {"t": table}))
    assert TileProgram(ir.TRUE, torch.float32)({}, {}).item() is True


def test_aten_score_is_overwritten_only_after_its_last_use():
    e = score + function("tanh", score) * score
    s = torch.randn(3, 4)
    want = s + s.tanh() * s
    torch.testing.assert_close(TileProgram(e, torch.float32)({"score": s.clone()}, {}), want)


@pytest.mark.parametrize(
    ("e", "answer"),
    [
        (q >= k, True), (q - k < 5, True), ((q + 3 >= k) & (k - q > -9), True), (q < 5, False),
        (eq((q - k) % 3, 0), True), (eq(q % 3, k % 3), False), (q - 2 * k < 0, False), (2 * q - 2 * k < 0, True),
        ((q - k) * h < 3, False), (eq(ir.lookup("t", (q - k,)), 1), True),
    ],
)  # fmt: skip
def test_aten_finds_score_mods_of_the_distance_alone(e, answer):
    assert distance_only(e) is answer


# -- whole calls ----------------------------------------------------------------------------------

RNG = np.random.default_rng(3)
DOC = np.sort(RNG.integers(0, 7, 700))
TABLES = {"doc": DOC, "slope": np.array([0.5, 0.25, 0.1, 0.05]), "bias": RNG.standard_normal((40, 40))}
causal = q >= k


def doc(x):
    return ir.lookup("doc", (x,))


MASKS = {
    "none": None,
    "causal": causal,
    "window": causal & (q - k < 40),
    "band": abs(q - k) < 30,
    "documents": causal & eq(doc(q), doc(k)),
    "sinks": causal & ((q - k < 20) | (k < 5)),
    "dilated": eq((q - k) % 32, 0),
    "by-head": causal & (q - k < 20 * (h + 1)),
    "by-half-groups": causal & ((h < 1) | (q - k < 9)),
    "by-batch": causal & (eq(b, 0) | (q - k < 50)),
    "empty-rows": causal & (q > 60),
    "nothing": q < 0,
    "random": ir.random(ir.lit(3), b, h, q, k) < 0.3,
    "prefix": k < 33,
    "shifted": q + 64 >= k,
}
SCORES = {
    "none": None,
    "softcap": 5.0 * function("tanh", score / 5.0),
    "alibi": score + ir.lookup("slope", (h,), FLOAT) * ir.to_float(k - q),
    "nan-outside": score + function("log", ir.to_float(q - k + 1)),
    "hidden": where(q >= k, score, -math.inf),
    "bias": score + ir.lookup("bias", (q, k), FLOAT),
    "constant": ir.to_float(k) * 0.01,
}
SHAPES = {
    "gqa": Geometry(2, 4, 2, 130, 170, 16, 24, 0.25),
    "square": Geometry(1, 4, 4, 300, 300, 16, 16, 0.25),
    "long-keys": Geometry(1, 4, 1, 70, 400, 8, 8, 0.3),
    "long-queries": Geometry(1, 4, 4, 400, 90, 8, 8, 0.3),
}


def run(mask, mod, g, *, block=(32, 32), dtype="float32", tables=TABLES, change=None, shared=False):
    """((out, lse), the reference's)."""
    plan = make_plan(ProgramExprs(mask, mod))
    spans = brute.spans(
        ir.TRUE if mask is None else mask, g.q_len, g.kv_len, batch=g.batch, heads=g.heads, block=block,
        origin=g.origin, sizes=g.sizes, tables=tables,
    )  # fmt: skip
    if shared and not (plan.uses_head or plan.uses_batch):
        spans = Spans(spans.bounds[:1], spans.count[:1], np.zeros_like(spans.slice_of))
    rng = np.random.default_rng(0)
    shapes = (
        (g.batch, g.heads, g.q_len, g.head_dim), (g.batch, g.kv_heads, g.kv_len, g.head_dim),
        (g.batch, g.kv_heads, g.kv_len, g.v_dim),
    )  # fmt: skip
    qkv = [torch.from_numpy(rng.standard_normal(s)).to(getattr(torch, dtype)) for s in shapes]
    if change:
        qkv = change(*qkv)
    given = {n: torch.from_numpy(t) for n, t in plan.table_values(tables).items()}
    inputs = KernelInputs(plan, spans, g, Target("aten", *block), plan.slot_values({}), given)
    got = aten.forward(inputs, *qkv)[:2]
    want = dense.attention(
        *(x.double().numpy() for x in qkv),
        dense.DenseCall(ProgramExprs(mask, mod), scale=g.scale, params={}, tables=tables, problem=g.problem),
    )
    return [x.double().numpy() for x in got], want


def check(got, want, tolerance=3e-6):
    for mine, right in zip(got, want):
        np.testing.assert_allclose(mine, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mod", ["none", "softcap", "alibi"])
@pytest.mark.parametrize("mask", thinned(MASKS))
def test_aten_masks_and_score_mods_equal_the_reference(mask, mod, shape):
    check(*run(MASKS[mask], SCORES[mod], SHAPES[shape], shared=shape != "square"), tolerance=1e-5)


@pytest.mark.parametrize("mod", SCORES)
@pytest.mark.parametrize("mask", ["causal", "documents", "window"])
def test_score_mods_in_float64(mod, mask):
    check(*run(MASKS[mask], SCORES[mod], SHAPES["square"], dtype="float64", shared=True), tolerance=1e-12)


@pytest.mark.parametrize("block", [(64, 32), (32, 64), (48, 16), (512, 512)])
def test_aten_tiles_may_have_unequal_sides(block):
    for mask in ("causal", "sinks", "documents", "prefix"):
        check(*run(MASKS[mask], None, SHAPES["square"], block=block, shared=True), tolerance=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 1.6e-2)])
def test_aten_half_precision_is_near_the_reference(dtype, tolerance):
    got, want = run(MASKS["documents"], SCORES["softcap"], SHAPES["gqa"], dtype=dtype, shared=True)
    check(got[:1], want[:1], tolerance)
    check(got[1:], want[1:], 1e-5)  # scores, and with them the lse, are float32 whatever the arrays are


@pytest.mark.parametrize("mask", ["causal", "window", "documents", "by-batch"])
@pytest.mark.parametrize("origin", [(1, 2, 37, 0), (0, 0, 64, 64), (0, 0, np.array([10, 200]), np.array([0, 64]))])
def test_crops_in_global_coordinates(mask, origin):
    g = Geometry(2, 2, 2, 100, 260, 8, 8, 0.3, origin, (4, 4, 600, 600))
    check(*run(MASKS[mask], SCORES["alibi"], g), tolerance=1e-5)


def test_large_triangles_take_the_fused_kernel_and_agree():
    g = Geometry(1, 4, 2, 600, 600, 16, 16, 0.25)
    for mask in (causal, q + 64 >= k, None):
        check(*run(mask, None, g, block=(64, 64), shared=True), tolerance=1e-5)
    near = causal & (q - k < 600)  # a triangle in these lengths, with another text
    check(*run(near, None, g, block=(64, 64), shared=True), tolerance=1e-5)


SLIDING = {
    "alibi": SCORES["alibi"], "by batch": score - ir.to_float(abs(q - k) * b),
    "in front": ir.to_float(k - q) * 0.3 + score,
    "nan-outside": SCORES["nan-outside"],
}  # fmt: skip
ELSEWHERE = {"softcap": SCORES["softcap"], "bias": SCORES["bias"], "hidden": where(q > k, score, -math.inf)}


@pytest.mark.parametrize("shape", [
    Geometry(2, 4, 2, 300, 300, 16, 16, 0.25), Geometry(1, 4, 1, 131, 400, 8, 8, 0.3),
    Geometry(2, 4, 4, 100, 260, 8, 8, 0.3, (1, 2, 37, 5), (4, 8, 600, 600)),
], ids=["gqa", "long-keys", "crop"])  # fmt: skip
@pytest.mark.parametrize("mod", thinned(SLIDING))
@pytest.mark.parametrize("mask", ["none", "causal", "window", "band", "by-head", "documents", "sinks", "empty-rows"])
def test_biases_by_distance_take_the_flash_kernel(monkeypatch, mask, mod, shape):
    used = []
    real = aten_flash._results
    monkeypatch.setattr(aten_flash, "_results", lambda *a: (used.append(a), real(*a))[1])
    monkeypatch.setattr(aten_flash, "FLASH_ROWS", 1)
    check(*run(MASKS[mask], SLIDING[mod], shape, shared=mod != "by batch"), tolerance=1e-5)
    # the logarithm is NaN for keys ahead, and where a mask hides them is that of a hidden place
    assert bool(used) == (mask in ("causal", "window") or (mask in ("none", "band") and mod != "nan-outside"))


@pytest.mark.parametrize("mod", ELSEWHERE)
def test_aten_sliding_call_leaves_out_most_score_mods(monkeypatch, mod):
    monkeypatch.setattr(aten_flash, "_results", None)
    check(*run(causal, ELSEWHERE[mod], Geometry(1, 4, 2, 600, 600, 16, 16, 0.25), shared=True), tolerance=1e-5)


def test_aten_forward_takes_arrays_of_any_strides():
    def twisted(x, y, z):
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
        y = y.transpose(2, 3).contiguous().transpose(2, 3)
        return x, y, torch.cat([z, z], -1)[..., : z.shape[-1]]

    for mask in ("causal", "window", "by-head"):
        check(*run(MASKS[mask], None, SHAPES["gqa"], change=twisted), tolerance=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mod", ["none", "alibi"])
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_aten_hidden_keys_never_reach_results(mask, mod, poison):
    g = Geometry(1, 4, 4, 600, 600, 16, 16, 0.25)

    def poisoned(x, y, z):
        y[:, :, 500:] = poison  # queries below 500 do not see these keys
        return x, y, z

    got, want = run(MASKS[mask], SCORES[mod], g, block=(64, 64), shared=True, change=poisoned)
    assert np.isfinite(got[0][:, :, :500]).all()
    check([x[:, :, :500] for x in got], [x[:, :, :500] for x in want], tolerance=1e-5)


@pytest.mark.parametrize("changed", [None, score * 2.0, score + function("log", ir.to_float(q - k + 1))])
def test_values_that_nobody_sees_may_be_anything(changed):
    """As in the buffer of a cache, behind its tokens."""
    g = Geometry(2, 4, 2, 40, 200, 16, 24, 0.25)

    def filled(x, y, z, tail):
        z[:, :, 40:] = tail
        return x, y, z

    _, want = run(MASKS["causal"], changed, g)
    for tail in (math.nan, math.inf):
        got, reference = run(MASKS["causal"], changed, g, change=partial(filled, tail=tail))
        check(got, want, tolerance=1e-5)
        check(got, reference, tolerance=1e-5)


def test_an_empty_row_is_zero_and_minus_infinity():
    (out, lse), _ = run(MASKS["empty-rows"], None, SHAPES["square"], shared=True)
    assert (out[:, :, :61] == 0).all()
    assert np.isneginf(lse[:, :, :61]).all()
    (out, lse), _ = run(None, where(q >= 10, score, -math.inf), SHAPES["square"], shared=True)
    assert (out[:, :, :10] == 0).all()
    assert np.isneginf(lse[:, :, :10]).all()


def test_wide_rows_are_cut_into_chunks(monkeypatch):
    monkeypatch.setattr(aten, "BUDGET", 4096)
    for mask, mod in itertools.product(("causal", "sinks", "by-head", "empty-rows", "none"), ("none", "softcap")):
        check(*run(MASKS[mask], SCORES[mod], SHAPES["gqa"]), tolerance=1e-5)


def test_rows_that_repeat_are_one_step():
    """A dilated mask has thousands of little spans; a 2-D neighbourhood has one per image row."""
    g = Geometry(1, 1, 1, 4096, 4096, 8, 8, 1.0)
    mask = causal & (q - k < 256)
    found = steps(brute.spans(mask, 4096, 4096, block=(32, 32)), 0, g, (32, 32))
    assert len(found) < 15
    assert sum(s.count * s.height for s in found) == 4096


@pytest.mark.parametrize("op", sorted(ir.FLOAT_FUNCTIONS | {"neg", "abs"}))
def test_overwriting_changes_nothing(op):
    node = ir.build(op, score)
    want = evaluate(node, {"score": FLOATS})
    assert_close(TileProgram(node, torch.float64)({"score": torch.from_numpy(FLOATS.copy())}, {}).numpy(), want)


def test_tanh_keeps_its_digits_near_zero():
    x = np.concatenate([np.logspace(-30, 2, 2000), [0.0, 1e-42]]).astype(np.float32)
    x = np.concatenate([x, -x])
    got = TileProgram(ir.build("tanh", score), torch.float32)({"score": torch.from_numpy(x.copy())}, {}).numpy()
    np.testing.assert_allclose(got, np.tanh(x.astype(np.float64)), rtol=6e-7, atol=1e-40)


def test_a_product_is_added_in_one_pass():
    e = score + ir.lookup("slope", (h,), FLOAT) * ir.to_float(k - q)
    env = {"h": torch.arange(4).view(4, 1, 1), "q": torch.arange(5).view(5, 1), "k": torch.arange(6)}
    scores = torch.randn(4, 5, 6, dtype=torch.float64)
    want = evaluate(e, {n: x.numpy() for n, x in env.items()} | {"score": scores.numpy().copy()}, TABLES)
    got = TileProgram(e, torch.float64)({**env, "score": scores}, {"slope": torch.from_numpy(TABLES["slope"])})
    assert got.data_ptr() == scores.data_ptr()
    assert_close(got.numpy(), want)


def test_strips_are_made_only_where_they_are_small(monkeypatch):
    """A part of the score mod that sees the distance only: looked up from a strip, or worked out block by block."""
    mod = score + function("sin", ir.to_float(q - k))
    check(*run(causal, mod, SHAPES["square"], shared=True), tolerance=1e-5)
    monkeypatch.setattr(aten_tiles, "STRIP", 0)
    check(*run(causal, mod, SHAPES["square"], shared=True), tolerance=1e-5)
