"""The Pallas forward kernel for Hopper: its expressions as plain JAX, its numbers and races in Mosaic GPU's
interpreter, its walk, what it refuses, and its lowering for a GPU. What compilers make of it:
`tests/compiled/pallas_gpu.py`."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support import attention_cases as cases
from support.attention_cases import CASES, Case, causal
from support.pallas_cases import operator_cases

from frisket.dsl import ir
from frisket.dsl.errors import LoweringError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import OPERATORS, lookup
from frisket.dsl.sugar import function, h, k, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering import dense
from frisket.lowering.derive import backward_of
from frisket.lowering.dtypes import Operand
from frisket.lowering.kernels.pallas_gpu import backward as pallas_gpu_backward
from frisket.lowering.kernels.pallas_gpu import forward as pallas_gpu
from frisket.lowering.kernels.pallas_gpu.expr import Expressions
from frisket.lowering.kernels.pallas_gpu.kernel import TEXT
from frisket.lowering.kernels.text import filled
from frisket.lowering.plan import RATE, SEED, Geometry, Pages, Problem, ProgramFacts, Target, make_plan, survives
from frisket.lowering.planner.planner import DeviceSpans
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.pallas_gpu import jax as runtime
from frisket.runtime.machine.modules import load_source

REFUSED = {"relation", "switch"} & {name for name, c in CASES.items() if "sees" in c.tables}
BLOCK = (128, 64)


def run(case, platform="cpu", sinks=None, dropout=False):
    made = cases.plan(case)
    if dropout:
        made = make_plan(
            ProgramExprs(case.mask, case.score),
            "",
            ProgramFacts(limits=dict.fromkeys([*ir.COORDINATES, *ir.SIZES], 1e4)),
            keep_mask=survives(),
        )
    g = cases.geometry(case)
    target = runtime.target(made, g, case.dtype, case.block)
    slots = made.slot_values({**case.slots, SEED: 3, RATE: 0.25} if dropout else case.slots)
    inputs = cases.kernel_inputs(case, target, made, slots=slots, sinks=sinks, platform=platform)
    return runtime.forward(inputs, *cases.arrays(case))


def half(name, **changes):
    return CASES[name].but(**{"dtype": "bfloat16", "block": BLOCK, **changes})


# -- expressions, as plain JAX ------------------------------------------------------------------------


def tiles_of(case, root, made, s, down="q"):
    """`root` of the plan over all pairs of a head, worked out tile by tile by the text a kernel has; `s` are scores."""
    of_scores = "score" in ir.uses(root)
    e = Expressions([made.score, root] if of_scores else [root], down, score=made.score if of_scores else None)
    g = cases.geometry(case)
    s = s / np.float32(g.scale) if e.products else s
    source = pallas_gpu.emit(made, Target("", *BLOCK), g, "bfloat16", interpreted=True)
    names = load_source(
        source.replace("TILE = HALF, BLOCK_K", f"TILE = {'HALF, BLOCK_K' if down == 'q' else '64, BLOCK_Q'}")
    )
    names |= {
        "load": lambda ref, axis: ref.get(),
        "pl": SimpleNamespace(ds=lambda at, n: slice(at, at + n), cdiv=lambda a, b: -(-a // b)),
    }
    if down == "k":
        names["HALF"] = 64
        exec(filled(TEXT["distances"], down="k", other="q"), names)  # as the backward has them
    found, value = e.written(root, "x")
    operands = ", ".join(e.operands(made))
    before = [*e.inputs.before(made), *e.lined(), f"return {operands},"]
    inside = [*e.definitions(made), f"def values(batch, head, start, line, tile, order, s, {operands}):"]
    inside += [f"    {line}" for line in (*e.once(made), *e.each(made, root), *found, f"return {value}")]
    head = "def operands(origin, sizes, slots, tables, batch, heads, q_len, kv_len):\n"
    names |= load_source(
        head + "\n".join(f"    {line}" for line in before), **{n: names[n] for n in names if n[0] != "_"}
    )
    exec("\n".join(inside), names)
    slots, arrays = list(cases.slots(case, made).values()), list(cases.tables(case, made).values())
    own, other, rows, columns = (g.q_len, g.kv_len, *BLOCK) if down == "q" else (g.kv_len, g.q_len, BLOCK[1], BLOCK[0])
    half = rows // 2 if down == "q" else 64
    order = np.zeros((1, -(-own // rows)))
    wide = np.zeros((g.batch, g.heads, -(-own // rows) * rows, -(-other // columns) * columns), s.dtype)
    wide[:, :, :own, :other] = s if down == "q" else s.swapaxes(2, 3)
    tiles = []  # where, and the arguments of the text
    for b_, h_, start, tile in np.ndindex(g.batch, g.heads, wide.shape[2] // half, wide.shape[3] // columns):
        line = slice(start * half, (start + 1) * half)
        at = b_, h_, line, slice(tile * columns, (tile + 1) * columns)
        tiles.append((at, (b_, h_, start * half, line, tile, order)))

    @jax.jit  # one program for all tiles
    def of_tiles(wide):
        given = names["operands"](g.origin, g.full, slots, arrays, g.batch, g.heads, g.q_len, g.kv_len)
        return [names["values"](*place, wide[at], *given) for at, place in tiles]

    out = np.zeros(wide.shape, object)
    for (at, _), found in zip(tiles, of_tiles(wide), strict=True):
        out[at] = np.asarray(found)
    out = out[:, :, :own, :other]
    out = out * e.factor if root is made.score else out
    return out if down == "q" else out.swapaxes(2, 3)


def check_text(case, down="q", atol=2e-6):
    made = cases.plan(case)
    g = cases.geometry(case)
    shape = (g.batch, g.heads, g.q_len, g.kv_len)
    s = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    env = dense.coordinates(g.problem) | case.slots
    seen = dense.visible(ir.TRUE if case.mask is None else case.mask, env, case.tables, shape)
    if made.mask is not None:
        np.testing.assert_array_equal(tiles_of(case, made.mask, made, s, down).astype(bool), seen)
    if made.score is not None:
        with np.errstate(all="ignore"):
            want = np.broadcast_to(evaluate(case.score, {**env, "score": s}, case.tables), shape).astype(np.float32)
        got = tiles_of(case, made.score, made, s, down).astype(np.float32)
        np.testing.assert_allclose(np.where(seen, got, 0), np.where(seen, want, 0), rtol=2e-5, atol=atol)


@pytest.mark.parametrize("name", ["crop", "relative-bias"])
def test_texts_are_their_expressions(name):
    check_text(half(name, dtype="float32", q_len=70, kv_len=70))


@pytest.mark.parametrize("down", ["q", "k"])
def test_pallas_gpu_slope_of_a_cap_is_that_of_scores(down):
    case = CASES["softcap"].but(q_len=70, kv_len=70)
    made, g = cases.plan(case), cases.geometry(case)
    s = 9 * np.random.default_rng(0).standard_normal((g.batch, g.heads, g.q_len, g.kv_len)).astype(np.float32)
    slope = backward_of(made).slope
    got = tiles_of(case, slope, made, s, down).astype(np.float32)
    np.testing.assert_allclose(got, evaluate(slope, {"score": s}, {}), rtol=2e-5, atol=2e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(CASES.keys() - REFUSED))
def test_pallas_gpu_texts_equal_their_expression(name):
    # its 20 * tanh is a difference from 20: off by the rounding of numbers of that size
    bound = {"atol": 20 * np.finfo(np.float32).eps} if name == "softcap" else {}
    check_text(half(name, dtype="float32"), **bound)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["documents", "relative-bias", "alibi", "origin-by-batch"])
def test_texts_of_transposed_tiles(name):
    check_text(half(name, dtype="float32"), down="k")


SMALL = {"q_len": 40, "kv_len": 40, "heads": 1, "kv_heads": 1, "block": BLOCK}


def check_operator(op):
    for case in operator_cases(op):
        check_text(case.but(**SMALL))


@pytest.mark.parametrize("op", ["floor", "floordiv", "not", "tanh"])
def test_operators_that_mosaic_lacks(op):
    check_operator(op)


@pytest.mark.parametrize(
    ("mask", "capped", "approximate"),
    [
        (causal, 5.0 * function("tanh", score / 5.0), True),
        (causal, 5.0 * function("tanh", function("sin", score)), False),  # beside sin, nothing is approximate
        (function("tanh", ir.param("c", FLOAT) * (q - k)) > 0.5, score, False),  # it decides what is seen
    ],
)
def test_tanh_is_the_machines_where_that_is_near_enough(mask, capped, approximate):
    case = Case(mask, capped, slots={"c": 0.1})
    made, g = cases.plan(case), Geometry(1, 1, 1, 9, 9, 64, 64, 1.0)
    target = runtime.target(made, g, "bfloat16")
    text = pallas_gpu.emit(made, target, g, "bfloat16")
    assert ("tanh_approximate" in text) == approximate
    assert ("def tanh(x)" in text) != approximate
    with jax.default_matmul_precision("highest"):
        target = runtime.target(made, g, "bfloat16")
    assert "tanh_approximate" not in pallas_gpu.emit(made, target, g, "bfloat16")


@pytest.mark.parametrize("what", ["forward", "q", "k"])
def test_pallas_gpu_scales_scores_in_the_factors_of_a_cap(what):
    """The scale joins the division of a soft cap, and its product that of the softmax, forward and backward alike."""
    made, g = cases.plan(CASES["softcap"]), Geometry(1, 1, 1, 9, 9, 64, 64, 0.125)
    target = Target("", 128, 64) if what != "k" else Target("", 64, 128)
    if what == "forward":
        text = pallas_gpu.emit(made, target, g, "bfloat16")
        assert "UNIT = 20.0 * 1.4426950408889634" in text
    else:
        text = pallas_gpu_backward.emit(made, target, g, {what})
        assert "exponent(modified, 20.0 * LOG2E" in text
    assert "y0 = SCALE * 0.05" in text
    assert "tanh(s * y0)" in text
    assert "/ 20.0" not in text
    assert "s * SCALE" not in text


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_operators_have_their_meaning(op):
    check_operator(op)


# -- the kernel, interpreted --------------------------------------------------------------------------


@pytest.fixture
def races(monkeypatch):
    """The interpreter looks for races; whether it found some."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    monkeypatch.setattr(runtime, "simulator", lambda make=runtime.simulator: make(detect_races=True))
    yield lambda: gpu_callbacks.get_races().races_found
    gpu_callbacks.reset_gpu_interpret_mode_state()


INTERPRETED = {
    "window": {"q_len": 200, "kv_len": 200, "heads": 1, "kv_heads": 1},
    "documents": {"q_len": 200, "kv_len": 200, "heads": 1, "kv_heads": 1},
    "gqa": {"heads": 2, "kv_heads": 1, "batch": 1, "dtype": "float16"},
    "empty-rows": {"heads": 1, "kv_heads": 1},
    "holes": {"q_len": 130, "kv_len": 320, "heads": 1, "kv_heads": 1},  # several runs to a row
    "softcap": {"heads": 1, "kv_heads": 1},
    "relative-bias": {},
    "bias-plane": {},
    "v-wider": {"heads": 1, "kv_heads": 1, "v_dim": 80},
    "origin-by-batch": {"heads": 1, "kv_heads": 1},
    "nothing": {"heads": 1, "kv_heads": 1},
}


class Accumulator:
    """What `wgmma` adds to, in numpy; it is read when it is waited for."""

    def __init__(self, shape, kind=float):
        self.value, self.added = np.zeros(shape, kind), 0

    @staticmethod
    def init(value):
        made = Accumulator(())
        made.value = np.array(value)
        return made

    def __getitem__(self, _):
        return self.value

    def __setitem__(self, _, value):
        assert not self.added, "written behind a product"
        self.value = np.array(value)


def test_products_of_a_gpu():
    """The text that is for a GPU alone, with stand-ins for what Mosaic GPU's interpreter does not know."""
    begun = []

    def wgmma(total, a, b):
        total.value, total.added = total.value + np.asarray(a) @ np.asarray(b), total.added + 1
        begun.append(total)

    def waited(total, wait_n):
        assert begun[len(begun) - 1 - wait_n] is total, "another product is waited for"
        return total.value

    def run_state(work):
        def found(start):
            work(start)
            return tuple(x.value for x in start) if isinstance(start, tuple) else start.value

        return found

    names = {
        "plgpu": SimpleNamespace(wgmma=wgmma, wgmma_accumulator_load=waited, ACC=Accumulator), "functools": functools,
        "pl": SimpleNamespace(run_state=run_state, run_scoped=lambda work, *sums: work(*sums)), "jnp": jnp,
        "TILE": (4, 5), "Float": float, "transposed": np.transpose,
    }  # fmt: skip
    forward, backward = dict(names), dict(names)
    exec(pallas_gpu.TEXT["products"], forward)
    exec(pallas_gpu_backward.TEXT["products"], backward)
    exec(TEXT["on_device"], common := dict(names))
    draw, called = np.random.default_rng(0), []
    a, b, c, d, e = (draw.standard_normal(x) for x in ((4, 3), (5, 3), (4, 5), (5, 7), (4, 7)))
    meanwhile = lambda: called.append(len(begun))  # noqa: E731
    np.testing.assert_allclose(forward["scores_of"](a, b, meanwhile), a @ b.T)
    np.testing.assert_allclose(forward["gathered"](e, c, d, meanwhile), e + c @ d)
    assert called == [1, 2], "other work runs beside a product"
    found = backward["with_products"](lambda *read: [x() for x in read], (a, b), (2 * a, b, c))
    np.testing.assert_allclose(found, [a @ b.T, c + 2 * a @ b.T])
    found = backward["added"]((e, 2 * e), (c, d), (c, 3 * d))
    np.testing.assert_allclose(found, [e + c @ d, 2 * e + 3 * c @ d])
    x = draw.standard_normal((2, 13, 3, 40))
    at = common["padded"](x, 64)
    assert at.shape == (2, 16, 3, 64)
    np.testing.assert_allclose(at[:, :13, :, :40], x, rtol=1e-6)
    assert np.abs(at).sum() == pytest.approx(np.abs(x).sum(), rel=1e-5)


def test_a_ragged_causal_kernel(races):
    case = half("causal", q_len=72, kv_len=72, heads=1, kv_heads=1)
    cases.check(case, *run(case)[:2])
    assert not races()


OFTEN = ("empty-rows", "holes", "relative-bias")  # the interpreter takes up to a minute for a case
TIERS = {n: pytest.mark.exhaustive if n in OFTEN else pytest.mark.slow for n in INTERPRETED}


@pytest.mark.parametrize("name", [pytest.param(n, marks=tier) for n, tier in TIERS.items()])
def test_pallas_gpu_forward_equals_the_reference_without_races(name, races):
    case = half(name, **INTERPRETED[name])
    out, lse, top = run(case)
    cases.check(case, out, lse)
    assert not races()
    seen = np.asarray(lse) > -np.inf
    assert (np.asarray(top)[~seen] == -np.inf).all()
    assert (np.asarray(top)[seen] <= np.asarray(lse)[seen] + 1e-3).all()
    arrays = [np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in cases.arrays(case)[:2]]
    options = {"scale": case.dim**-0.5, "params": case.slots, "tables": case.tables, "problem": case.problem}
    want = dense.top(*arrays, dense.DenseCall(ProgramExprs(case.mask, case.score), **options))
    np.testing.assert_allclose(top, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_pallas_gpu_forward_with_sinks_and_dropout(races):
    case = half("empty-rows", q_len=130, kv_len=70, heads=1, kv_heads=1)
    sinks = np.array([0.5], np.float32)
    plain, lse, _ = (np.asarray(x, np.float64) for x in run(case))
    out, with_sink, _ = (np.asarray(x, np.float64) for x in run(case, sinks=sinks))
    np.testing.assert_allclose(with_sink, np.logaddexp(lse, 0.5), rtol=1e-5, atol=1e-5)
    share = np.exp(lse - with_sink)
    np.testing.assert_allclose(out, plain * share.transpose(0, 2, 1)[..., None], atol=1e-2)
    assert not races()


@pytest.mark.exhaustive
def test_dropout_keeps_what_other_backends_keep(races):
    case = half("causal", q_len=64, kv_len=64, heads=1, kv_heads=1)
    found = np.asarray(run(case, dropout=True)[0], np.float64)
    shape = (1, 1, 64, 64)
    env = dense.coordinates(Problem(*shape[2:], *shape[:2])) | {"seed": 3}
    draw = evaluate(ir.random(ir.param("seed"), *(ir.var(n) for n in "bhqk")), env, {})
    q_, k_, v_ = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in cases.arrays(case))
    s = np.where(np.tri(64, dtype=bool), q_ @ k_.swapaxes(2, 3) * case.dim**-0.5, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p = np.where(draw >= np.float32(0.25), p, 0) / p.sum(-1, keepdims=True) / 0.75
    np.testing.assert_allclose(found, (p @ v_).transpose(0, 2, 1, 3), atol=3e-2)


# -- lowered for a GPU --------------------------------------------------------------------------------


def lowered(case, **options):
    made = cases.plan(case)
    g = cases.geometry(case)
    target = runtime.target(made, g, case.dtype, **options)
    inputs = cases.kernel_inputs(case, target, made, platform="cuda")
    tables = inputs.tables
    call = jax.jit(lambda q, k, v, tables: runtime.forward(replace(inputs, tables=tables), q, k, v))
    allowed = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    return export.export(call, platforms=["cuda"], disabled_checks=allowed)(*cases.arrays(case), tables)


def wide(name, dim, dtype="bfloat16"):
    return CASES[name].but(dim=dim, v_dim=dim, dtype=dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "dim", "dtype"), [
    ("documents", 128, "float16"), ("softcap", 256, "bfloat16"),
    pytest.param("holes", 64, "bfloat16", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_lowers_for_a_gpu(name, dim, dtype):
    assert "mosaic_gpu" in lowered(wide(name, dim, dtype)).mlir_module()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(CASES.keys() - REFUSED))
def test_pallas_gpu_cases_lower_for_a_gpu(name):
    lowered(wide(name, 128))


@pytest.mark.slow
@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_pallas_gpu_operators_lower_for_a_gpu(op):
    for case in operator_cases(op):
        lowered(case.but(**{**SMALL, "dtype": "bfloat16", "dim": 64, "v_dim": 64}))


# -- the walk -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["window", "documents", "holes", "empty-rows", "heads-and-batches"])
def test_pallas_gpu_walk_visits_exactly_the_visible_tiles(name):
    case = half(name)
    spans = cases.spans(case)
    walk = pallas_gpu.walked(spans)
    lengths = spans.bounds[..., 3] - spans.bounds[..., 0]
    np.testing.assert_array_equal(walk.count[..., 0], spans.count)
    np.testing.assert_array_equal(walk.count[..., 1], lengths.sum(-1))
    steps = np.take_along_axis(walk.count[..., 1], walk.order, -1)
    assert (np.diff(steps, axis=-1) <= 0).all()
    np.testing.assert_array_equal(np.sort(walk.order, -1), np.arange(walk.order.shape[-1]) + 0 * walk.order)
    for ordered in (pallas_gpu.GpuWalk._replace, pallas_gpu.GpuWalk.in_order):  # as it is, too
        traced = jax.jit(
            lambda bounds, count, o=ordered: o(pallas_gpu.walked(DeviceSpans(bounds, count, None, spans.slice_of)))[1:]
        )
        for mine, theirs in zip(traced(spans.bounds, spans.count), ordered(walk)[1:], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    for place, row in np.ndenumerate(walk.order):
        placed = walk.in_order()
        np.testing.assert_array_equal(placed.count[place], walk.count[place[0], row])
        np.testing.assert_array_equal(placed.records[place], walk.records[place[0], row])


# -- what is refused, and tiles -----------------------------------------------------------------------


def refusal(case, dtype="bfloat16", **changes):
    made = cases.plan(case)
    return runtime.refuses(made, replace(cases.geometry(case), **changes), dtype, {})


def test_pallas_gpu_kernel_refuses_unsupported_calls():
    assert refusal(CASES["causal"]) == ""
    assert "multiply bfloat16 and float16, not float32" in refusal(CASES["causal"], "float32")
    assert "head dims of kernels for Hopper are at most 256, not 320" in refusal(CASES["causal"], head_dim=320)
    assert "`sees` is indexed by q and k together" in refusal(CASES["relation"])
    assert "may leave 32 bits" in refusal(Case(causal & (q * q * q * q > k)))
    assert refusal(CASES["causal"], k=Operand("int8"), v=Operand("int8")) == (
        'kernels for Hopper read keys and values as they are, and this call has those of int8; use backend="triton"'
    )
    for what, plan in (
        ("pages of them", make_plan(ProgramExprs(causal), pages=Pages("pages", 64))),
        ("scales of values", make_plan(ProgramExprs(causal), value_scale=lookup("v_scale", (k,), FLOAT))),
        ("some that may never have been written", make_plan(ProgramExprs(causal), unwritten=True)),
    ):
        assert what in runtime.refuses(plan, cases.geometry(CASES["causal"]), "bfloat16", {})
    far = Case(score=score + lookup("bias", (h, q - k), FLOAT), tables={"bias": np.zeros((2, 9), np.float32)})
    assert "values by q - k take" in refusal(far, q_len=2**20, kv_len=2**20)
    with pytest.raises(LoweringError, match="not float32"):
        run(CASES["causal"])


@pytest.mark.parametrize("tile", [(64, 64), (128, 32), (192, 128), (128, 512), (256, 256)])
def test_tiles_that_there_are_not(tile):
    made, g = cases.plan(CASES["causal"]), Geometry(1, 1, 1, 9, 9, 256, 256, 1.0)
    with pytest.raises(LoweringError, match=r"pass (tile=\(128, 128\)|a smaller tile)"):
        pallas_gpu.emit(made, runtime.target(made, g, "bfloat16", tile), g, "bfloat16")


@pytest.mark.parametrize("dim", [32, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("narrow", [False, True])
def test_default_tiles_fit(dim, narrow):
    made, g = cases.plan(CASES["causal"]), Geometry(1, 1, 1, 9, 9, dim, dim, 1.0)
    target = runtime.target(made, g, "bfloat16", narrow=narrow)
    pallas_gpu.check_tile(target, g)
    assert target.num_stages >= 2


def test_pallas_gpu_text_contains_no_length():
    case = half("window")
    made = cases.plan(case)
    target = runtime.target(made, cases.geometry(case), "bfloat16")
    sources = {
        pallas_gpu.emit(made, target, replace(cases.geometry(case), q_len=n, kv_len=2 * n), "bfloat16", sinks=True)
        for n in (64, 999)
    }
    assert len(sources) == 1
    source = sources.pop()
    assert "999" not in source
    assert max(map(len, source.splitlines())) <= 120


def test_a_call_without_keys():
    case = half("causal", kv_len=0)
    out, lse, top = run(case)
    assert not np.asarray(out, np.float32).any()
    assert (np.asarray(lse) == -np.inf).all()
    assert (np.asarray(top) == -np.inf).all()


def test_more_batch_entries_than_a_grid_has():
    plan, wanted = make_plan(ProgramExprs(), ""), frozenset("q")
    reasons = [
        pallas_gpu_backward.refused(plan, Geometry(batch, 2, 2, 64, 64, 64, 64, 0.125), "bfloat16", {}, wanted)
        for batch in (65_535, 65_536)
    ]
    assert reasons == ["", "the backward for Hopper has at most 65535 batch entries, not 65536; give it parts of them"]
