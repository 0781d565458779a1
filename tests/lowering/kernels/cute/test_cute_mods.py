"""The CuTe functions of masks and score mods: their text, and their values, which are those of the interpreter at every
position; the functions run on tests/support/flash/cute.py."""

import json
from pathlib import Path

import cases
import numpy as np
import pytest
from support.attention_cases import CASES
from support.attention_cases import plan as plan_of
from support.flash.cute import Scalar, Table, functions, vector
from support.pallas_cases import operator_cases

import frisket as fk
from frisket.dsl import ir
from frisket.dsl.errors import LoweringError
from frisket.dsl.evaluate import OPERATORS, evaluate
from frisket.dsl.ir import SIZES, build, lit, lookup, param
from frisket.dsl.sugar import eq, function, h, k, maximum, minimum, q, score, where
from frisket.dsl.types import BOOL, FLOAT
from frisket.lowering.derive import backward_of
from frisket.lowering.kernels.cute.mods import emit
from frisket.lowering.plan import Pages, ProgramFacts, make_plan, survives
from frisket.lowering.simplify import ProgramExprs

LENGTH, PAST = 130, 37  # lanes past the last query and key, as tiles have them
MASKS, MODS = cases.masks(LENGTH), cases.mods(LENGTH)
COMPILED = Path(__file__).parents[4] / "benchmarks" / "results" / "compiled"
causal = q >= k
GOLDEN = {
    "documents": make_plan(
        ProgramExprs(causal & (q - k < param("w")) & eq(lookup("doc", (q,)), lookup("doc", (k,)))),
        "causal & window(w) & same(doc)",
    ),
    "softcap": make_plan(ProgramExprs(causal, 50.0 * function("tanh", score / 50.0)), "causal\nsoftcap(50)"),
    "alibi": make_plan(ProgramExprs(causal, score + lookup("slope", (h,), FLOAT) * (k - q)), "causal\nalibi(slope)"),
    "relative_bias": make_plan(
        ProgramExprs(score=score + lookup("bias", (h, k - q + 512), FLOAT)), "relative_bias(bias)"
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_cute_functions_of_masks_and_score_mods(name, golden):
    golden(f"{name}.py", emit(GOLDEN[name]).text)


def test_cute_divisions_that_decide_a_position_stay():
    """A quotient by a number is a product, but where its last bit may decide what is seen."""
    near = ir.to_float(q - k) / 3.0 < 7.0
    text = emit(make_plan(ProgramExprs(near, score / 3.0))).text
    assert "/ 3.0 < 7.0" in text
    assert f"score * {1 / 3.0!r}" in text


def values(made, plan, env, slots, tables):
    """The values of a printed module's functions at the positions of `env`."""
    known = {**slots, **env}
    scalars = [known[n] for n in made.scalars]
    typed = [Scalar(np.float32(x) if isinstance(x, float) else np.int32(x)) for x in scalars]
    narrow = {n: np.asarray(t) for n, t in tables.items()}
    aux = [Table(t.astype(np.float32 if t.dtype.kind == "f" else np.int32)) for t in (narrow[n] for n in made.tables)]
    at = [vector(np.broadcast_to(env[n], env["shape"])) for n in "bhqk"]
    found = functions(made.text)
    given = (*at, None, aux, typed)
    s, grad = vector(env["score"], np.float32), vector(env["grad"], np.float32)
    firsts = {"score_mod": (s,), "score_mod_bwd": (grad, s)}
    values = {n: found[n](*firsts.get(n, ()), *given).array for n in made.functions}
    return {n: np.broadcast_to(x, env["shape"]) for n, x in values.items()}


def compare(made_plan, slots, tables, batch, heads, q_len, kv_len, origin=(0, 0, 0, 0), sizes=None):
    """Hold the functions against the interpreter; lanes past the ends read nothing out of range."""
    rng = np.random.default_rng(4)
    shape = (batch, heads, q_len + PAST, kv_len + PAST)
    env = dict(zip("bhqk", np.ogrid[tuple(slice(n) for n in shape)], strict=True))
    env |= dict(zip(SIZES, sizes or (batch, heads, q_len, kv_len), strict=True)) | {"shape": shape}
    env["score"] = (3 * rng.standard_normal(shape)).astype(np.float32)
    env["grad"] = rng.standard_normal(shape).astype(np.float32)
    slots = {n: x.item() if hasattr(x, "item") else x for n, x in slots.items()}
    firsts = {f"first {n}": x for n, x in zip("bhqk", origin, strict=True)}
    made = emit(made_plan, placed=frozenset(n for n, x in zip("bhqk", origin, strict=True) if x))
    got = values(made, made_plan, env, slots | firsts, tables)
    inside = (slice(None), slice(None), slice(q_len), slice(kv_len))
    known = {n: x for n, x in env.items() if n not in ("shape", "grad")} | slots
    known |= {"q": env["q"][:, :, :q_len], "k": env["k"][..., :kv_len], "score": env["score"][inside]}
    known |= {n: known[n] + x for n, x in zip("bhqk", origin, strict=True)}
    whole = np.empty(shape)[inside].shape
    assert [*got] == ["mask_mod"] * (made_plan.mask is not None) + ["score_mod", "score_mod_bwd"] * (
        made_plan.score is not None
    )
    visible = np.ones(whole, bool)
    if made_plan.mask is not None:
        visible = np.broadcast_to(evaluate(made_plan.mask, known, tables), whole)
        np.testing.assert_array_equal(got["mask_mod"][inside], visible)
    if made_plan.score is not None:
        with np.errstate(over="ignore"):
            right = np.broadcast_to(np.float32(evaluate(made_plan.score, known, tables)), whole)
        np.testing.assert_allclose(got["score_mod"][inside][visible], right[visible], rtol=2e-5, atol=2e-5)
        slope = backward_of(made_plan).slope
        steep = 1.0 if slope is None else evaluate(slope, known, tables)
        right = np.broadcast_to(np.float32(steep * env["grad"][inside]), whole)[visible]
        np.testing.assert_allclose(got["score_mod_bwd"][inside][visible], right, rtol=2e-5, atol=2e-5)


def of_library(att, case):
    """The plan of a library entry and the values that its calls have."""
    work = att.plan(case.q_len, case.kv_len, case.batch, case.heads).work((128, 128))
    return work.plan, work.slots, {n: np.asarray(t) for n, t in work.tables.items()}


@pytest.mark.parametrize("name", MASKS)
def test_cute_mask_functions_equal_the_reference(name):
    case = MASKS[name]
    plan, slots, tables = of_library(fk.compile(case.mask), case)
    compare(plan, slots, tables, case.batch, case.heads, case.q_len, case.kv_len)


@pytest.mark.parametrize("name", MODS)
def test_cute_score_functions_equal_the_reference(name):
    case = MODS[name]
    plan, slots, tables = of_library(fk.compile("causal", case.score), case)
    compare(plan, slots, tables, case.batch, case.heads, case.q_len, case.kv_len)


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if all(type(x) is int for x in c.origin)])
def test_cute_functions_take_slots_tables_and_origins(name):
    """Slots, tables of Bools, sizes, parts of a larger problem."""
    case = CASES[name]
    made = plan_of(case)
    if made.int64:
        pytest.skip("integers of 64 bits are refused")
    sizes = case.sizes or (case.batch, case.heads, case.q_len, case.kv_len)
    place = case.batch, case.heads, case.q_len, case.kv_len, case.origin, sizes
    compare(made, made.slot_values(case.slots), made.table_values(case.tables), *place)


@pytest.mark.parametrize("name", OPERATORS)
def test_cute_operators_equal_the_reference(name):
    for case in operator_cases(name):
        made = plan_of(case)
        length = 12 if name == "pow" else 60  # powers of 60 leave float32
        compare(made, made.slot_values({}), {}, 1, case.heads, length, length)


HIDDEN = {"hidden": np.arange(80) % 3 == 0}
hidden = lookup("hidden", (k,), BOOL)


@pytest.mark.parametrize(
    "mask",
    [
        causal & ~hidden,
        ~hidden & causal,
        ~(hidden & causal),
        ~(hidden | causal) & (k > 3),
        ~hidden ^ causal,
        ~hidden | causal,
        causal & ~(hidden ^ causal),
        where(~hidden, causal, hidden),
        causal & ~(ir.to_float(q) / 3 > ir.to_float(k)),
    ],
)
def test_a_negation_inside_other_operators(mask):
    """Python reads `a & b ^ True` as `(a & b) ^ True`."""
    made = make_plan(ProgramExprs(mask, where(mask, score, 0.5 * score)))
    compare(made, made.slot_values({}), made.table_values(HIDDEN), 1, 2, 40, 40)


NUMBERS = [
    (k - q) // 7 > q - 9, eq((k - q) % 7, 3), eq((k - q) % -4, -1), eq(lit(7) % (k - 20), q), eq(k // (q - 30), -2),
    eq((k - q) % (q - 30), 2), lit(1) << k % 9 > q * 5, (q - k) >> (k - 5) > -1, eq((q - k) >> 40, -1),
    eq(k >> 31, 0), minimum(lit(3), k) < q, eq(where(q > k, lit(1), lit(0)), q % 2), ~(k & 3) < -3,
    ~eq(q % 3, k % 3) | ~(q > 5), eq(q % 4, 1), lit(True), eq(ir.random(lit(3), q, lit(2)) < 0.5, k > 3),
    maximum(score, lit(0.5)) > 0.6, lit(2.0) ** score > 1.1, where(k > q, lit(0.0), lit(1.0)) > score,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(NUMBERS)), ids=map(str, NUMBERS))
def test_numbers_in_the_place_of_vectors(number):
    node = NUMBERS[number]
    scored = "score" in ir.uses(node)
    made = (
        make_plan(ProgramExprs(score=score + build("float", build("int", node))))
        if scored
        else make_plan(ProgramExprs(node))
    )
    compare(made, made.slot_values({}), {}, 1, 1, 60, 60)


def test_hidden_score_with_infinite_slope_has_no_gradient():
    """The weight of a hidden position is 0, and 0 times infinity is NaN."""
    made = emit(make_plan(ProgramExprs(q >= k, function("log", score))))
    zero, grad = (
        functions(made.text)["score_mod_bwd"](vector(g, np.float32), vector(0.0, np.float32), *[None] * 6)
        for g in (0.0, 2.0)
    )
    assert zero.array == 0
    assert np.isinf(grad.array)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (make_plan(ProgramExprs(q >= k), keep_mask=survives()), "no dropout"),
        (make_plan(ProgramExprs(q >= k), unwritten=True), "hidden value, which may be NaN"),
        (make_plan(ProgramExprs(q >= k), pages=Pages("table", 16)), "hidden value|recycled page"),
        (make_plan(ProgramExprs(q * q * q >= k), facts=ProgramFacts(limits={"q": 2.0**20})), "integers of 32 bits"),
        (make_plan(ProgramExprs(q >= k), value_scale=lookup("scale", (k,), FLOAT)), "scale no stored"),
    ],
)
def test_cute_functions_refuse_plans_beyond_one_position(made, words):
    with pytest.raises(LoweringError, match=words) as refused:
        emit(made)
    assert "take backend='triton'" in str(refused.value)


def test_a_window_of_another_width_is_the_same_text():
    one, two = (make_plan(ProgramExprs((q >= k) & (q - k <= n))) for n in (255, 511))
    assert emit(one).body == emit(two).body
    assert emit(one).scalars == ("s0",)


def test_flash_attn_4_results_cover_the_forms_and_the_library():
    """The results that tests/compiled/flash.py wrote: every form of a kernel compiles, and so does every mask tried."""
    forms = json.loads((COMPILED / "flash-attn-4.json").read_text())
    places = {tuple(name.split(", ")[i] for i in (0, -1)) for name in forms}
    assert places == {(arch, way) for arch in ("sm_90", "sm_100") for way in ("forward", "backward")}
    assert len(forms) == 26
    assert set(forms.values()) == {"compiles"}
    library = json.loads((COMPILED / "flash-attn-4-library.json").read_text())
    assert library.keys() <= MASKS.keys() | MODS.keys()
    assert len(library) >= 73
    assert {x["result"] for x in library.values()} == {"compiles"}
