"""The text of the Triton kernels of captured gradients by distance and by position. Nothing here imports triton."""

import ast

import pytest
from support.attention_cases import causal
from support.kernel_names import unreserved

from frisket.dsl.ir import lookup, param, var
from frisket.dsl.sugar import b, eq, function, h, k, minimum, q, score
from frisket.dsl.types import FLOAT, INT
from frisket.lowering.derive import alone, backward_of
from frisket.lowering.kernels.triton.captured import diagonal, emit_all, plane, scatter, square
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Bounds, ProgramFacts, make_plan, survives
from frisket.lowering.simplify import ProgramExprs

TARGET, DIMS = square(Target("triton", 128, 64, 8, 3)), Dims(64, 64, "bfloat16", group=4)


def bias(*index):
    return lookup("bias", index, FLOAT)


def documents(*index):
    return eq(lookup("doc", (b, q)), lookup("doc", (b, k)))


WINDOW = make_plan(
    ProgramExprs(causal & (q - k < param("w")), score + bias(h, minimum(q - k, 31))),
    "window(w)\nscore + bias[h, min(q - k, 31)]",
    ProgramFacts(
        bounds=Bounds(var("q0") - param("w") + 1, var("q1") - param("w") + 1, var("q0"), var("q1")), rows_nonempty=True
    ),
)
CAPPED = make_plan(
    ProgramExprs(causal & documents(), 30 * function("tanh", score * bias(k - q) / 30)),
    "softcap of score * bias[k - q]",
    keep_mask=survives(),
)
SHARED = make_plan(
    ProgramExprs(causal & documents(), score + bias(h, q, k + 3)), "causal & same(doc)\nscore + bias[h, q, k + 3]"
)
BUCKETS = make_plan(
    ProgramExprs(causal, score + bias(lookup("bucket", (q, k), INT), h)), "causal\nscore + bias[bucket[q, k], h]"
)


def text(name):
    made, way, more = {
        "distance.py": (WINDOW, diagonal, {}),
        "dropout.py": (CAPPED, diagonal, {}),
        "plane.py": (SHARED, plane, {"shared": "b"}),
        "buckets.py": (BUCKETS, scatter, {"fixed": True}),
        "atomics": (BUCKETS, scatter, {"fixed": False}),
    }[name]
    gradients = backward_of(made).gradients
    return made, way(made, TARGET, DIMS, gradients if way is diagonal else gradients[0], **more)


GOLDEN = ["distance.py", "dropout.py", "plane.py",
          "buckets.py"]  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_triton_captured_gradients(name, golden):
    golden(name, text(name)[1])


@pytest.mark.parametrize("name", [*GOLDEN, "atomics"])
def test_triton_captured_gradient_names_are_reserved(name):
    made, source = text(name)
    assert source == text(name)[1]
    assert not unreserved(source, made)


def test_atomics_only_where_programs_meet():
    assert {n: text(n)[1].count("atomic") for n in [*GOLDEN, "atomics"]} == {
        **dict.fromkeys(GOLDEN[:3], 0), "buckets.py": 1, "atomics": 1,
    }  # fmt: skip
    assert "Counted,  # int64" in text("buckets.py")[1]
    assert "Into,  # float32" in text("atomics")[1]


def test_gradients_of_one_weight_are_one_sum():
    made = make_plan(ProgramExprs(causal, score + bias(q - k) + lookup("other", (h, q - k), FLOAT)))
    assert "weights, parts" in (source := diagonal(made, TARGET, DIMS, backward_of(made).gradients))
    assert "sum0" in source
    assert "sum1" not in source


@pytest.mark.parametrize(
    ("target", "side"),
    [
        ((128, 64), 64),
        ((128, 32), 64),
        ((64, 32), 64),
        ((64, 16), 64),
        ((32, 64), 32),
        ((32, 32), 32),
        ((32, 16), 16),
        ((16, 16), 16),
        ((128, 128), 64),
    ],
)
def test_tiles_are_square(target, side):
    for whole in (Target("triton", *target), Target("triton", 128, 128, dq=Target("triton", *target))):
        made = square(whole)
        assert (made.block_q, made.block_k, made.num_warps, made.num_stages) == (side, side, 8, 1)


def test_a_coordinate_alone():
    s, other = param("s0"), lookup("n", (q,), INT)
    for entry, name in ((q, "q"), (q + s, "q"), (3 - s + k, "k"), (h, "h"), (b - 1, "b"), (k + q - q, "k")):
        assert alone(entry) == name
    for entry in (q - k, 2 * k, -k, h // 2, k + other, q * s, s, q + b):
        assert alone(entry) is None


def test_kernels_to_read():
    def names(*mods):
        made = make_plan(ProgramExprs(causal, sum(mods, score)))
        wanted = {t.name for t in made.tables}
        source = emit_all(made, Target("triton", 128, 64), DIMS, grad_names=wanted | {"q", "k", "v"})
        found = [n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
        assert source == emit_all(made, Target("triton", 128, 64), DIMS, grad_names=wanted | {"q", "k", "v"})
        assert "attention_diagonal" not in emit_all(made, Target("triton", 128, 64), DIMS)
        return [n.removeprefix("attention_") for n in found if n.startswith("attention_")]

    first = ["forward", "delta", "dq", "dkv"]
    assert names(bias(q)) == first
    assert names(bias(q - k), lookup("other", (q, k), FLOAT)) == [*first, "diagonal", "plane"]
    assert names(bias(q + k), lookup("u", (h // 2, q, k), FLOAT)) == [*first, "total", "scatter"]
