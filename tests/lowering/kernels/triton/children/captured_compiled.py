"""Run by test_triton_captured.py without TRITON_INTERPRET: what is emitted compiles, for machines that are not here."""

import pytest
import triton
from lowering.kernels.triton.spills import TABULATED, listed

from frisket.dsl.ir import lookup, param, var
from frisket.dsl.sugar import eq, h, k, q, score
from frisket.dsl.types import FLOAT, INT
from frisket.lowering.derive import backward_of
from frisket.lowering.kernels.triton.captured import diagonal, plane, scatter, square
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.plan import Bounds, Geometry, ProgramFacts, make_plan, survives
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton.kernels import compile_reports
from frisket.runtime.backends.triton.tiles import default_target

causal = q >= k
documents = eq(lookup("doc", (q,)), lookup("doc", (k,)))
window = Bounds(var("q0") - param("w") + 1, var("q1") - param("w") + 1, var("q0"), var("q1"))


def bias(*index):
    return lookup("bias", index, FLOAT)


SPILLED = listed()
WAYS = {
    "distance": (
        diagonal,
        make_plan(
            ProgramExprs(causal & (q - k < param("w")), score + bias(h, q - k)), facts=ProgramFacts(bounds=window)
        ),
        {},
    ),
    "distance, dropout": (
        diagonal,
        make_plan(ProgramExprs(causal & documents, score * bias(h, q - k)), keep_mask=survives()),
        {},
    ),
    "plane": (plane, make_plan(ProgramExprs(causal, score + bias(h, q, k))), {"shared": "b"}),
    "buckets": (
        scatter,
        make_plan(ProgramExprs(causal & documents, score + bias(lookup("n", (q, k), INT), h))),
        {"fixed": True},
    ),
    "atomics": (
        scatter,
        make_plan(ProgramExprs(causal & documents, score + bias(lookup("n", (q, k), INT), h))),
        {"fixed": False},
    ),
}


def reports(name, dim, dtype, arch):
    way, plan, more = WAYS[name]
    whole = default_target(Geometry(1, 8, 8, 4096, 4096, dim, dim, 0.1), dtype, arch=arch)
    dims, gradients = Dims(dim, dim, dtype), backward_of(plan).gradients
    source = way(plan, square(whole), dims, gradients if way is diagonal else gradients[0], **more)
    return list(compile_reports(source, plan, whole, dims, arch))


def check_hopper(name, dim, dtype):
    for found in reports(name, dim, dtype, "sm_90"):
        assert found.spills == SPILLED.get((triton.__version__[:3], "sm_90", dim, "captured", found.kernel[10:]), 0)
        assert found.fits
        assert found.block_q == found.block_k
        assert (found.mma > 0) == (dtype != "float32")


@pytest.mark.parametrize("name", ["distance, dropout", "plane", "buckets"])
def test_captured_gradient_kernels_do_not_spill_on_hopper(name):
    check_hopper(name, 128, "bfloat16")


@pytest.mark.parametrize(("dim", "dtype"), [(64, "bfloat16"), (128, "float16"), (64, "float32")])
@pytest.mark.parametrize("name", WAYS)
def test_slow_nothing_spills_on_hopper(name, dim, dtype):
    check_hopper(name, dim, dtype)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("arch", TABULATED)
def test_slow_every_machine(arch, name, dim):
    for dtype in ("bfloat16", "float32"):
        for found in reports(name, dim, dtype, arch):
            assert found.fits
            most = SPILLED.get((triton.__version__[:3], arch, dim, "captured", found.kernel[10:]), 0)
            assert dtype == "float32" or found.spills <= most, found
