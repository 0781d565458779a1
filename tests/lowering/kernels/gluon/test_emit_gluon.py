"""The text of the Gluon kernels: golden files, operators, refusals. Nothing here imports triton."""

import ast

import pytest
from support.attention_cases import CASES, plan, plan_of_text
from support.kernel_names import unreserved
from support.tiers import thinned

from frisket.dsl import ir
from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import param, var
from frisket.dsl.sugar import b, eq, h, k, q
from frisket.dsl.types import FLOAT
from frisket.lowering.kernels.gluon.forward import emit
from frisket.lowering.kernels.triton.forward import NO_ARRAYS, OptionalArrays
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Bounds, Pages, ProgramFacts, make_plan, survives
from frisket.lowering.simplify import ProgramExprs

TARGET = Target("gluon", 128, 128, 4, 3)
BLACKWELL = Target("gluon", 256, 128, 4, 2, arch="sm_100")
causal = q >= k
documents = eq(ir.lookup("doc", (b, q)), ir.lookup("doc", (b, k)))
closed = Bounds(var("q0") - param("w") + 1, var("q1") - param("w") + 1, var("q0"), var("q1"))
GOLDEN = {
    "window.py": (
        make_plan(
            ProgramExprs(causal & (q - k < param("w"))),
            "causal & window(w)",
            facts=ProgramFacts(bounds=closed, rows_nonempty=True),
        ),
        Dims(128, 128, "bfloat16", 8),
        NO_ARRAYS,
    ),
    "everything.py": (
        plan_of_text("causal & same_by_batch(doc)", "softcap(50) + slope[h] * (k - q)", keep_mask=survives()),
        Dims(80, 64, "float16"),
        OptionalArrays(sinks=True, row_max=True, lse_residual=True),
    ),
}


GOLDEN |= {f"blackwell_{name}": of for name, of in GOLDEN.items()}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_gluon_forward_of_hopper_and_blackwell(name, golden):
    made, dims, optional = GOLDEN[name]
    target = BLACKWELL if "blackwell" in name else TARGET
    text = emit(made, target, dims, optional)
    golden(name, text)
    assert text == emit(made, target, dims, optional)
    ast.parse(text)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", [TARGET, BLACKWELL], ids=lambda target: target.arch)
@pytest.mark.parametrize("name", thinned(CASES))
def test_gluon_text_of_each_case_parses_and_fits_lines(name, target):
    text = emit(plan(CASES[name]), target, Dims(32, 32, "bfloat16", 2), OptionalArrays(lse_residual=True))
    ast.parse(text)
    assert "tl." not in text.replace("gl.", "").replace("tl.PropagateNan", "")
    assert ("from triton import language as tl" in text) == ("tl.PropagateNan" in text)
    assert not unreserved(text, plan(CASES[name]))
    assert ("inside = " in text) == ("inside[" in text)  # written where it is read
    assert max(map(len, text.splitlines())) <= 180


def test_names_of_the_kernel_are_not_the_users():
    mask = eq(ir.lookup("keys", (q,)), ir.lookup("turns", (k,))) & (q < param("slot") + ir.lookup("half", (h,)))
    text = emit(make_plan(ProgramExprs(mask)), TARGET, Dims(64, 64, "bfloat16"))
    assert "gl.load(keys_ + " in text
    assert "gl.load(turns_ + " in text
    assert "gl.load(half_ + " in text


def refused(words, made=None, dims=None, target=TARGET):
    with pytest.raises(LoweringError, match=words):
        emit(make_plan(ProgramExprs(causal)) if made is None else made, target, dims or Dims(64, 64, "bfloat16"))


def test_gluon_kernel_refuses_unsupported_calls():
    refused("^the Gluon kernel takes float16 and bfloat16: .*\n  take backend='triton'$", dims=Dims(64, 64, "float32"))
    refused("takes keys and values in the dtype of the queries", dims=Dims(64, 64, "bfloat16", 1, "int8"))
    refused("takes keys and values in the dtype", make_plan(ProgramExprs(causal), weight=ir.lookup("w", (k,), FLOAT)))
    refused("takes keys and values in arrays, not in pages", make_plan(ProgramExprs(causal), pages=Pages("pages", 16)))
    refused("takes keys that are all written", make_plan(ProgramExprs(causal), unwritten=True))
    refused("takes head dims up to 256, whose sums fit", dims=Dims(320, 64, "bfloat16"))
    refused("takes head dims that are multiples of 8", dims=Dims(64, 20, "bfloat16"))
    refused("tiles 128 queries and 32, 64 or 128 keys, not 64 x 64", target=Target("gluon", 64, 64))
    refused("tiles 256 queries and 32, 64 or 128 keys, not 128 x", target=Target("gluon", 128, 64, arch="sm_100"))
