"""The text of the Triton kernels of the backward. Nothing here imports triton."""

import ast
import re
from dataclasses import replace

import pytest
from support.attention_cases import CASES, causal, plan
from support.kernel_names import unreserved
from support.tiers import thinned
from support.torch.gradients import MODS

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import lookup, param, var
from frisket.dsl.sugar import b, eq, function, h, k, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering.derive import backward_of
from frisket.lowering.kernels.triton.backward import emit, sums
from frisket.lowering.kernels.triton.captured import square
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Bounds, ProgramFacts, make_plan, survives
from frisket.lowering.simplify import ProgramExprs

TARGET = Target("triton", 128, 128, 8, 2, dq=Target("triton", 128, 64, 8, 2), dkv=Target("triton", 64, 128, 8, 2))
ARRAYS = frozenset({"q", "k", "v"})
LISTED = frozenset({"attention_dq", "attention_dkv"})
WINDOW = make_plan(
    ProgramExprs(causal & (q - k < param("w"))),
    "causal & window(w)",
    ProgramFacts(
        rows_nonempty=True, bounds=Bounds(var("q0") - param("w") + 1, var("q1") - param("w") + 1, var("q0"), var("q1"))
    ),
)
DOCUMENTS = make_plan(
    ProgramExprs(
        causal & eq(lookup("doc", (b, q)), lookup("doc", (b, k))),
        50.0 * function("tanh", score / 50.0) + lookup("slope", (h,), FLOAT) * (k - q) + lookup("gate", (h, k), FLOAT),
    ),
    "causal & same(doc)\nsoftcap(50) + slope[h] * (k - q) + gate[h, k]",
    keep_mask=survives(),
)
GATED = make_plan(ProgramExprs(causal, score + lookup("by_q", (q,), FLOAT) + lookup("by_k", (k,), FLOAT)))


def everything(made):
    return ARRAYS | {g.source for g in backward_of(made).gradients}


def names(text):
    return [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name.startswith("attention")]


def test_golden_triton_backward(golden):
    golden("window.py", emit(WINDOW, TARGET, Dims(128, 128, "bfloat16", 8), ARRAYS, dlse=False))
    golden("documents.py", emit(DOCUMENTS, TARGET, Dims(80, 64, "float16"), everything(DOCUMENTS)))


def test_golden_triton_backward_with_tensor_descriptors(golden):
    target = replace(TARGET, dkv=Target("triton", 64, 64, 4, 2)).everywhere(descriptors=True)
    golden("descriptors.py", emit(WINDOW, target, Dims(128, 64, "bfloat16", 8), ARRAYS, dlse=False))


def test_golden_triton_backward_of_long_rows_in_parts(golden):
    mask = (abs(q - k) <= 256) | (k < 64) | (q < 64)
    score_mod = score * lookup("gain", (h,), FLOAT) + lookup("gate", (h, k), FLOAT)
    made = make_plan(ProgramExprs(mask, score_mod), "abs(q - k) <= 256 | k < 64 | q < 64\nscore * gain[h] + gate[h, k]")
    dims = Dims(128, 96, "bfloat16", 4)
    golden("long_rows.py", emit(made, TARGET, dims, everything(made), dlse=False, listed=LISTED))


def test_triton_backward_falls_back_to_pointers_per_dtype():
    """Float32 and head sizes in two parts are read by pointers, as everything is by captured gradients."""
    target = TARGET.everywhere(descriptors=True)
    for dims in (Dims(64, 64, "float32"), Dims(96, 64, "float16")):
        assert emit(WINDOW, target, dims, ARRAYS) == emit(WINDOW, TARGET, dims, ARRAYS)
    assert not square(target).descriptors


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", thinned([*CASES, *MODS], 4))
def test_triton_backward_names_are_reserved(name):
    made = replace(plan({**CASES, **MODS}[name]), keep_mask=None)
    text = emit(made, TARGET, Dims(80, 48, "float16", 2), everything(made))
    assert text == emit(made, TARGET, Dims(80, 48, "float16", 2), everything(made))
    assert not unreserved(text, made, [n for s in sums(made, everything(made)) for n in (s.buffer, s.total)])
    assert not [line for line in text.split("\n") if line != line.rstrip() or len(line) > 150]
    assert "atomic" not in text
    if made.mask is not None:
        text = emit(made, TARGET, Dims(80, 48, "float16", 2), everything(made), listed=LISTED)
        assert not unreserved(text, made, [n for s in sums(made, everything(made)) for n in (s.buffer, s.total)])
        assert names(text)[-4:] == ["attention_dq", "attention_dq_sums", "attention_dkv", "attention_dkv_sums"]
        assert "atomic" not in text


@pytest.mark.parametrize(("wanted", "kernels"), [
    ("", ""), ("q", "dq"), ("k", "dkv"), ("v", "dkv"), ("q v", "dq dkv"), ("t0", "dq"), ("t1", "dkv"),
])  # fmt: skip
def test_only_what_is_wanted_is_there(wanted, kernels):
    text = emit(GATED, TARGET, Dims(64, 64, "float16"), set(wanted.split()))
    assert names(text) == ["attention_delta", *(f"attention_{n}" for n in kernels.split())]
    written = {"q": "DQ", "k": "DK", "v": "DV", "t0": "Dby_q", "t1": "Dby_k"}
    assert {n for n, pointer in written.items() if f"tl.store({pointer} " in text} == set(wanted.split())


def test_values_are_read_only_where_their_products_are_used():
    text = emit(make_plan(ProgramExprs(causal)), TARGET, Dims(64, 64, "float16"), {"v"})
    assert not re.search(r"\bV\b|\bdp\b", text[text.index("def attention_dkv") :])


def test_triton_backward_guards_empty_rows_and_infinite_slopes():
    dims = Dims(64, 64, "float16")
    assert "empty" in emit(make_plan(ProgramExprs(causal)), TARGET, dims, ARRAYS)
    assert "empty" not in emit(
        make_plan(ProgramExprs(causal), facts=ProgramFacts(rows_nonempty=True)), TARGET, dims, ARRAYS
    )
    assert "p == 0.0" in emit(make_plan(ProgramExprs(causal, function("sqrt", score))), TARGET, dims, ARRAYS)
    assert "p == 0.0" not in emit(make_plan(ProgramExprs(causal, function("tanh", score))), TARGET, dims, ARRAYS)


def test_triton_backward_sums_each_lookup_of_a_table():
    made = make_plan(ProgramExprs(causal, score + lookup("t", (q,), FLOAT) * lookup("t", (k,), FLOAT)))
    assert [(s.buffer, s.total, s.along) for s in sums(made, {"t0"})] == [("Dt", "dt", "q"), ("Dt_", "dt_", "k")]


def test_a_group_reads_the_records_of_each_of_its_heads():
    alone = emit(make_plan(ProgramExprs(causal & (q - k < h))), TARGET, Dims(64, 64, "float16"), ARRAYS)
    group = emit(make_plan(ProgramExprs(causal & (q - k < h))), TARGET, Dims(64, 64, "float16", 4), ARRAYS)
    assert "for head in" not in alone
    assert (
        "for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):\n        place = batch * heads + head\n" in group
    )


def test_triton_backward_text_refuses_bad_tiles_and_dtypes():
    made = make_plan(ProgramExprs(causal))
    with pytest.raises(LoweringError) as caught:
        emit(made, replace(TARGET, dkv=Target("triton", 24, 64)), Dims(64, 64, "float16"), ARRAYS)
    assert str(caught.value) == "Triton tiles are powers of two from 16 on, block_q is 24; take 64 or 128"
    with pytest.raises(LoweringError) as caught:
        emit(made, TARGET, Dims(64, 64, "float16", kv_dtype="float8_e5m2"), ARRAYS)
    assert str(caught.value) == (
        "gradients need q, k and v of one dtype, not float16 and float8_e5m2; convert k and v before"
    )
