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
from frisket.lowering.kernels.gluon import backward
from frisket.lowering.kernels.gluon.forward import emit
from frisket.lowering.kernels.triton.forward import NO_ARRAYS, OptionalArrays
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import K_SCALE, Q_SCALE, V_SCALE, Bounds, Pages, ProgramFacts, make_plan, survives
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.calls.arrays import Stored

TARGET = Target("gluon", 128, 128, 4, 3)
OF_PARTS = Target("gluon", 128, 64, 4, 3)
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
GOLDEN["two_parts.py"] = (
    make_plan(ProgramExprs(causal & documents), "causal & same_by_batch(doc)"),
    Dims(192, 160, "bfloat16", 4),
    OptionalArrays(sinks=True),
)

cached = (k <= q + ir.lookup("start", (b,))) & (k < ir.lookup("end", (b,)))
GOLDEN["pages.py"] = (
    make_plan(ProgramExprs(cached), "causal, in a cache of pages", pages=Pages("pages", 64)),
    Dims(128, 128, "bfloat16", 8),
    NO_ARRAYS,
)
eight = Stored(False, False, 0, "bhsd", 4, (0, 0, 0), ((Q_SCALE, 64), (K_SCALE, 128), (V_SCALE, 0)))
GOLDEN["eight_bits.py"] = (
    make_plan(
        ProgramExprs(causal, eight.scored(None)),
        "causal",
        facts=ProgramFacts(bounds=Bounds(var("k0"), var("k0"), var("q0"), var("q1"))),
        value_scale=eight.value_scale,
    ),
    Dims(128, 128, "float8_e4m3fn", 4),
    OptionalArrays(row_max=True),
)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_gluon_forward_of_hopper_and_blackwell(name, golden):
    made, dims, optional = GOLDEN[name]
    target = BLACKWELL if "blackwell" in name else TARGET if dims.head_dim <= 128 else OF_PARTS
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


@pytest.mark.parametrize("dims", [(192, 192), (160, 160), (192, 128), (96, 192)])
def test_names_of_heads_in_two_parts_are_reserved(dims):
    made = plan(CASES["documents"])
    text = emit(made, TARGET, Dims(*dims, "bfloat16", 2), OptionalArrays(sinks=True, row_max=True, lse_residual=True))
    ast.parse(text)
    assert not unreserved(text, made)
    assert max(map(len, text.splitlines())) <= 180


FUSED = Target("gluon", 64, 128, 4, 2)
BACKWARD = {
    "backward_causal.py": (make_plan(ProgramExprs(causal), "causal"), Dims(128, 128, "bfloat16"), False),
    "backward_everything.py": (
        plan_of_text("causal & same_by_batch(doc)", "softcap(50) + slope[h] * (k - q)"),
        Dims(80, 80, "float16", 4),
        True,
    ),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_golden_gluon_backward_of_hopper(name, golden):
    made, dims, ordered = BACKWARD[name]
    text = backward.emit(made, FUSED, dims, ordered=ordered)
    golden(name, text)
    assert text == backward.emit(made, FUSED, dims, ordered=ordered)
    ast.parse(text)


@pytest.mark.parametrize("name", thinned(CASES))
def test_gluon_backward_of_each_case_parses_and_fits_lines(name):
    made = plan(CASES[name])
    text = backward.emit(made, FUSED, Dims(128, 128, "bfloat16", 2))
    ast.parse(text)
    own, _, of_triton = text.partition("def attention_delta")
    assert "tl." not in own.replace("gl.", "").replace("tl.PropagateNan", "").replace("language as tl", "")
    assert "gl." not in of_triton
    assert not unreserved(text, made)
    assert ("inside = " in own) == ("inside[" in own)
    assert max(map(len, text.splitlines())) <= 200


def test_fused_gluon_backward_refuses_unsupported_calls():
    def refused(words, made=None, dims=None, target=FUSED):
        of_call = made or make_plan(ProgramExprs(causal)), target, dims or Dims(128, 128, "bfloat16")
        with pytest.raises(LoweringError, match=words):
            backward.emit(*of_call)

    refused("drops no weights\n  take backend='triton'$", make_plan(ProgramExprs(causal), keep_mask=survives()))
    refused("takes float16 and bfloat16", dims=Dims(64, 64, "float32"))
    refused("keys and values of one head size", dims=Dims(64, 128, "bfloat16"))
    refused("takes head dims of 33 to 128, not 192", dims=Dims(192, 192, "bfloat16"))
    refused("takes head dims that are multiples of 8", dims=Dims(60, 60, "bfloat16"))
    refused("is written for sm_90, not sm_100", target=Target("gluon", 64, 128, arch="sm_100"))
    refused("tiles 64 queries and 128 keys, not 128 x 64", target=Target("gluon", 128, 64))


@pytest.mark.parametrize(("dims", "keys", "page"), [((128, 128), 128, 16), ((192, 160), 32, 64), ((64, 64), 128, 0)])
def test_names_of_kernels_over_pages_are_reserved(dims, keys, page):
    made = make_plan(ProgramExprs(cached), pages=Pages("pages", page) if page else None, unwritten=True)
    text = emit(made, Target("gluon", 128, keys, 4, 2), Dims(*dims, "bfloat16", 2))
    assert not unreserved(text, made)
    assert ("slice(piece * 16, 16, dim=2)" in text) == (page == 16)


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
    refused(
        "takes keys and values in the dtype", make_plan(ProgramExprs(causal), value_scale=ir.lookup("w", (k,), FLOAT))
    )
    pages = {"pages": Pages("pages", 16)}, {"unwritten": True}
    for more in pages:  # on Blackwell alone
        made = make_plan(ProgramExprs(causal), **more)
        refused("reads pages, and keys that may never have been written, on Hopper alone", made, target=BLACKWELL)
        emit(made, TARGET, Dims(64, 64, "bfloat16"))
    refused("takes head dims up to 256, whose sums fit", dims=Dims(320, 64, "bfloat16"))
    refused("takes head dims that are multiples of 8", dims=Dims(64, 20, "bfloat16"))
    refused("tiles 128 queries and 32, 64 or 128 keys, not 64 x 64", target=Target("gluon", 64, 64))
    refused("tiles 256 queries and 32, 64 or 128 keys, not 128 x", target=Target("gluon", 128, 64, arch="sm_100"))
    one = Target("gluon", 256, 64, 4, 1, arch="sm_103")
    refused("^the Gluon kernel for sm_103 holds two tiles or more in its ring, not one$", target=one)
