"""Run by test_triton_interpret.py with TRITON_INTERPRET=1: score mods of 16-bit inputs, whose text moves factors."""

import numpy as np
import pytest
import torch
from support import attention_cases as cases
from support.attention_cases import EMPTY_ROWS, Case, causal
from support.torch import gradients as torch_gradients
from support.torch.gradients import learned
from support.triton import bf16 as triton_bf16
from support.triton.call import check, run

from frisket.dsl import ir
from frisket.dsl.ir import lookup, param
from frisket.dsl.sugar import eq, function, h, k, maximum, minimum, q, score, where
from frisket.dsl.types import BOOL, FLOAT
from frisket.lowering.kernels.triton.forward import emit
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import ProgramFacts, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton import torch as triton_torch

triton_bf16.install()
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")
slope = lookup("t", (h,), FLOAT)
c = param("c", FLOAT)
SLOPES = {"t": np.array([0.5, 0.125, 0.25, 0.01], np.float32)}
SCORES = {
    "softcap": Case(causal, 20 * function("tanh", score / 20)),
    "softcap of a slot": Case(causal, c * function("tanh", score / c), slots={"c": 5.0}),
    "softcap of a negative slot": Case(causal, c * function("tanh", score / c), slots={"c": -5.0}),
    "softcap below 0": Case(causal, -3 * function("tanh", score / 3)),
    "softcap, alibi": Case(causal, 3 * function("tanh", score / 3) + slope * (k - q), tables=SLOPES),
    "distance either way": Case(None, score - slope * abs(q - k), tables=SLOPES),
    "factors": Case(causal, (score * 3 / 7 + 0.5) * 2.5),
    "factor 0": Case(causal, score * 0.0),
    "exp": Case(causal, function("exp", score / 4) - function("exp", -score)),
    "gate": Case(causal, score * function("sigmoid", score / 2) + function("log", 1 + score * score)),
    "decides": Case(causal & (function("tanh", slope / 3) * (q - k) < 1), where(score / 3 > 0, score / 3, score * 2),
                    tables=SLOPES),
    "a number alone": Case(causal & (q - k < 70), c, slots={"c": 5.0}),
    "of rows alone": Case(None, slope * ir.to_float(q), tables=SLOPES),
    "a condition of the head": Case(function("tanh", slope) > 0.1, score + slope, tables=SLOPES, q_len=70),
    "a condition of the head or the key": Case((slope < 0.2) | (k < 40), 2 * score, tables=SLOPES, heads=4, q_len=70),
    "gqa": Case(causal, 9 * function("tanh", score / 9) + slope * (k - q), tables=SLOPES, heads=4, batch=2),
    "empty rows": Case(EMPTY_ROWS, 9 * function("tanh", score / 9), q_len=200),
    "crop": Case(
        causal & (q - k < 50), 2 * function("tanh", score / 2) + slope * (k - q), tables=SLOPES, origin=(1, 1, 37, 11),
        sizes=(4, 4, 500, 500),
    ),
    "origin by batch": Case(
        causal, score + slope * (k - q), tables=SLOPES, batch=2, kv_len=200, sizes=(2, 2, 200, 205),
        origin=(0, 0, np.array([50, 13]), np.array([0, 5])),
    ),
}  # fmt: skip
BIAS = lookup("bias", (h, minimum(maximum(q - k, -9), 50) + 9), FLOAT)
TABLE = {"bias": np.random.default_rng(5).standard_normal((4, 60)).astype(np.float32)}
BUCKET = np.minimum(np.arange(400) // 7, 9).astype(np.int32)
HIDDEN = np.where(np.arange(60) < 9, np.nan, 1 + np.arange(60) / 60).astype(np.float32)  # NaN at negative distances
BY_DISTANCE = {
    "clamped": Case(causal, score + BIAS, tables=TABLE),
    "both ways": Case(None, score + BIAS, tables=TABLE, q_len=70, kv_len=150),
    "gqa": Case(causal, score + BIAS, tables=TABLE, heads=4, batch=2, q_len=130, kv_len=110),
    "buckets": Case(
        causal, score + lookup("bias", (h, lookup("bucket", (maximum(q - k, 0),))), FLOAT),
        tables={**TABLE, "bucket": BUCKET},
    ),
    "mask": Case(
        lookup("seen", (q - k,), BOOL) & eq(lookup("bucket", (abs(q - k),)) % 2, 0), score,
        tables={"seen": np.arange(200) % 3 < 2, "bucket": BUCKET}, q_len=170,
    ),
    "empty rows": Case(EMPTY_ROWS, score + BIAS, tables=TABLE, q_len=200),
    "factor, NaN where hidden": Case(
        causal, score * lookup("bias", (minimum(maximum(q - k, -9), 50) + 9,), FLOAT), tables={"bias": HIDDEN}
    ),
    "and a table of rows": Case(causal, score + BIAS * lookup("t", (q,), FLOAT), tables={**TABLE, "t": learned(150)}),
    "crop": Case(
        causal & (q - k < 50), score + lookup("bias", (h, q - k), FLOAT), tables=TABLE, origin=(1, 1, 37, 11),
        sizes=(4, 4, 500, 500),
    ),
    "origin by batch": Case(
        causal, score + BIAS, tables=TABLE, batch=2, kv_len=200, sizes=(2, 2, 200, 205),
        origin=(0, 0, np.array([50, 13]), np.array([0, 5])),
    ),
}  # fmt: skip
DTYPES = ["float16", "bfloat16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCORES)
def test_triton_score_mods_equal_the_reference(name, dtype):
    case = SCORES[name].but(dtype=dtype)
    check(case, *run(case, tanh="approximate"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_score_mods_of_few_queries(dtype):
    case = SCORES["gqa"].but(
        dtype=dtype, q_len=3, kv_len=300, origin=(0, 0, 297, 0), sizes=(2, 4, 300, 300), block=(16, 64)
    )
    check(case, *run(case, tanh="approximate", splits=3))


@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
@pytest.mark.parametrize("name", BY_DISTANCE)
def test_tables_by_distance(name, dtype):
    case = BY_DISTANCE[name].but(dtype=dtype)
    assert "along(" in emit(cases.plan(case), Target("triton", 32, 32), Dims(32, 32, dtype))
    check(case, *run(case))


@pytest.mark.parametrize("block", [(16, 64), (64, 16), (32, 32)])
def test_tables_by_distance_in_any_tile(block):
    case = BY_DISTANCE["gqa"].but(block=block)
    check(case, *run(case))


def test_tables_by_distance_in_64_bits():
    case = BY_DISTANCE["clamped"]
    made = make_plan(ProgramExprs(case.mask, case.score), facts=ProgramFacts(limits={"q": 2.0**33, "k": 2.0**33}))
    assert made.int64
    check(case, *run(case, made))


@pytest.mark.parametrize("packs", [True, False])
def test_tables_by_distance_of_few_queries(packs):
    mask = causal if packs else causal & (q - k < 200 + h)
    case = Case(mask, score + BIAS, tables=TABLE, heads=4, q_len=3, kv_len=300, origin=(0, 0, 297, 0),
                sizes=(1, 4, 300, 300), block=(16, 64))  # fmt: skip
    check(case, *run(case, splits=3))


class Both(torch_gradients.Both):
    """A case run by the kernels and by the reference."""

    forward, backward = staticmethod(triton_torch.forward), staticmethod(triton_torch.backward)
    stored = ("out",)

    def __init__(self, case, **options):
        super().__init__(case, **options)
        self.spans = cases.Source(case)
        self.target = Target("triton", 32, 32, tanh="approximate")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCORES)
def test_triton_score_mod_gradients_equal_the_reference(name, dtype):
    case = SCORES[name]
    small = {} if case.sizes else {"q_len": min(case.q_len, 90), "kv_len": 70}
    Both(case.but(dtype=dtype, **small)).check_half()


@pytest.mark.parametrize("name", BY_DISTANCE)
def test_gradients_by_distance(name):
    case = BY_DISTANCE[name]
    small = {} if case.sizes else {"q_len": min(case.q_len, 90), "kv_len": 70}
    tables = {"wanted": frozenset("qkv")} if "NaN" in name else {}
    Both(case.but(**small), **tables).check()
    Both(case.but(**small, dtype="bfloat16"), **tables).check_half() if not tables else None


def test_gradients_of_a_table_beside_a_softcap():
    soft = 4 * function("tanh", score / 4) + lookup("bias", (h, q - k), FLOAT)
    case = Case(causal & (q - k < 40), soft, tables={"bias": learned((2, 40))}, q_len=90, kv_len=90, dtype="bfloat16")
    Both(case).check_half()


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_of_the_instruction(dtype, monkeypatch):
    """A soft cap of c whose tanh is off by 2**-11 of its value, up here and down there, moves a score by c * 2**-11 at
    most, and an output by the share that weights change by, 2 * c * 2**-11, of the values' size."""
    cap = 20.0
    case = Case(causal, cap * function("tanh", score / cap), dtype=dtype)

    def worst(*args, **options):
        text = emit(*args, **options)
        assert text.count("return tanh(x)") == 1
        off = "tl.where((x * 8192.0).to(tl.int32) % 2 == 0, 1.0 + 0.00048828125, 1.0 - 0.00048828125)"
        return text.replace("return tanh(x)", f"return tanh(x) * {off}")

    near, _, _ = run(case, tanh="approximate")
    monkeypatch.setattr(triton_torch.triton_forward, "emit", worst)
    far, _, _ = run(case, tanh="approximate", order="forward")  # which asks for another text
    want, _ = cases.reference(case)
    values = float(np.abs(np.asarray(cases.arrays(case)[2], np.float64)).max())
    exact, rough = (np.abs(x.double().numpy().transpose(0, 2, 1, 3) - want).max() for x in (near, far))
    assert not torch.equal(near, far)
    assert rough <= exact + np.expm1(2 * cap * 2.0**-11) * values


def test_float32_keeps_its_text():
    """Of 32 bits no factor moves, and tanh is exact whatever the target says."""
    for case in SCORES.values():
        texts = {
            tanh: emit(cases.plan(case), Target("triton", 32, 32, tanh=tanh), Dims(32, 32, "float32"))
            for tanh in ("exact", "approximate")
        }
        assert texts["exact"] == texts["approximate"]
        assert 'tl.dot(query, keys, input_precision="ieee") * scale' in texts["exact"]


def test_a_mask_decides_by_the_exact_tanh():
    made = make_plan(ProgramExprs(function("tanh", ir.to_float(q) / 9.0) > 0.5, 20 * function("tanh", score / 20)))
    text = emit(made, Target("triton", 32, 32, tanh="approximate"), Dims(32, 32, "float16"))
    assert text.count("tanh_approximate(score") == 2
    assert "tanh(tl.div_rn(q.to(tl.float32), 9.0)) > 0.5" in text
