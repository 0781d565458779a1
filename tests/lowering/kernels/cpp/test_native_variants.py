"""The native kernels built for other processors, by other compilers and under sanitizers: one matrix of cases."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache

import numpy as np
import pytest
from support.attention_cases import CASES, Case, causal
from support.native.image import Problem, flags_of, here, program
from support.tiers import default_only

from frisket.dsl.ir import lookup
from frisket.dsl.sugar import eq, k, q
from frisket.lowering.kernels.cpp import forward as cpp
from frisket.lowering.plan import Target
from frisket.runtime.machine import cpp_build as native_build
from lowering.kernels.cpp import test_cpp_forward

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())

IDS = np.random.default_rng(3).permutation(16) % 4
BLOCKED = eq(lookup("ids", (q // 16,)), lookup("ids", (k // 16,)))
MORE = {
    "plain": (Case(causal, heads=4, kv_heads=2), {"sinks": True, "dropout": 0.25}),
    "bfloat16": (Case(causal, dtype="bfloat16", dim=64, v_dim=64), {}),
    "six products": (Case(causal, dim=72, v_dim=40, q_len=77, kv_len=91), {"precision": "bf16x6"}),
    "float16": (Case(causal, dtype="float16", dim=64, v_dim=40), {}),
    "float64": (CASES["softcap"].but(dtype="float64"), {"sinks": True, "dropout": 0.5}),
    "odd sizes": (Case(causal, dim=72, v_dim=24, q_len=77, kv_len=91), {}),
    "wide": (Case(causal, dim=256, v_dim=256, q_len=70, kv_len=130), {}),
    "blocks": (Case(BLOCKED, tables={"ids": IDS}, q_len=250, kv_len=230), {}),
    "many threads": (Case(causal, heads=8, kv_heads=1, q_len=260, kv_len=260), {"sinks": True}),
}
MATRIX = {name: (case, {}) for name, case in CASES.items()} | MORE
SLICE = ("relative-bias", "plain", "bfloat16")  # of every run; all of them in the slow tier
HERE = [v for v in native_build.VARIANTS if not native_build.lacking(v) and v != "native"]


@cache
def problem(name):
    case, more = MATRIX[name]
    return Problem(case, **more)


def check(name, runner):
    found = problem(name).run(runner)
    problem(name).check(found)
    for array in found.values():  # the parts the reference has no name for are finite at least
        assert not np.isnan(array.astype(np.float64)).any()


def both(names, more=()):
    """A slice in every run, `more` in the exhaustive tier, the rest when asked."""
    marks = dict.fromkeys(names, ()) | dict.fromkeys(more, pytest.mark.exhaustive)
    return [pytest.param(n, marks=marks.get(n, pytest.mark.slow)) for n in MATRIX]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", both(SLICE[:1]))
@pytest.mark.parametrize("variant", default_only(HERE, *[v for v in ("avx2",) if v in HERE]))
def test_native_kernels_run_on_every_instruction_set(variant, name):
    check(name, here(variant))


@pytest.mark.exhaustive
def test_half_precision_without_its_instructions():
    for variant, name in (("avx512", "bfloat16"), ("avx2", "bfloat16"), ("scalar", "float16")):
        if variant in HERE:
            problem(name).check(problem(name).run(here(variant), backward=False))


def missing(*programs):
    absent = [p for p in programs if not shutil.which(p)]
    return pytest.mark.skipif(bool(absent), reason=f"left out: no {', '.join(absent)} here")


ARM = ("aarch64-linux-gnu-g++",)


@pytest.mark.exhaustive
@missing(*ARM, "qemu-aarch64-static")
@pytest.mark.parametrize("name", both(SLICE[:1], SLICE[1:]))
def test_native_kernels_run_on_neon_in_an_emulator(name, tmp_path):
    check(name, program(tmp_path, ARM, ("-O3", "-static", *flags_of("neon")), ("qemu-aarch64-static",)))


@missing("clang++")
@pytest.mark.parametrize("name", both((), ("relative-bias",)))
def test_native_kernels_run_when_built_by_clang(name, tmp_path):
    check(name, program(tmp_path, ("clang++",), ("-O3", "-march=native")))


SANITIZERS = {
    "address": ("-fsanitize=address",),
    "undefined": ("-fsanitize=undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the programs that sanitizers watch: each is built once."""
    return tmp_path_factory.mktemp("sanitizers")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sanitizer", "name"),
    [
        pytest.param(s, n, marks=pytest.mark.slow if n != "plain" else () if s == "address" else pytest.mark.exhaustive)
        for s in SANITIZERS
        for n in MATRIX
    ],
)
def test_native_kernels_pass_sanitizers(sanitizer, name, folder):
    check(name, program(folder, native_build.compiler(), watched(sanitizer), threads=4))


def watched(sanitizer):
    return "-O1", "-g1", "-march=native", *SANITIZERS[sanitizer]


@pytest.mark.exhaustive
def test_a_sanitizer_sees_a_wrong_kernel(folder):
    case, more = MATRIX["plain"]
    wrong = Problem(case, **more)
    wrong.spans.count[:] += 1  # a record that is not there
    wrong.spans.bounds[..., 3] += 1  # and a tile of keys behind the last
    with pytest.raises(AssertionError, match=r"AddressSanitizer: heap-buffer-overflow"):
        wrong.run(program(folder, native_build.compiler(), watched("address")), backward=False)


# -- what was built ---------------------------------------------------------------------------------

KINDS = ["forward", pytest.param("backward", marks=pytest.mark.slow)]
WANTED = {
    "avx512bf16": (("vfmadd\\d*ps .*%zmm",), ()),
    "avx512": (("vfmadd\\d*ps .*%zmm",), ("vdpbf16ps",)),
    "avx2": (("vfmadd\\d*ps .*%ymm",), ("%zmm",)),
    "scalar": (("mulss ",), ("vfn?madd\\d*p[sd]", "mulp[sd]", "%[yz]mm")),
}


def disassembled(library, objdump="objdump"):
    return subprocess.run([objdump, "-d", library], capture_output=True, text=True, check=True).stdout


@pytest.mark.sampled(2)
@missing("objdump")
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("variant", default_only([v for v in WANTED if v in HERE], *{"avx2"} & {*HERE}))
def test_native_machine_code_has_the_vector_instructions(variant, kind):
    text = disassembled(native_build.library(problem("relative-bias").source(kind), variant)._name)
    there, absent = WANTED[variant]
    assert all(re.search(x, text) for x in there)
    assert not any(re.search(x, text) for x in absent)


@missing("objdump")
@pytest.mark.parametrize("best", [v for v in WANTED if v in HERE][:1])
def test_machine_code_for_this_processor_has_its_vectors(best):
    made = test_cpp_forward.problem(test_cpp_forward.WINDOW)  # a kernel of the tests there
    kernel = cpp.CppKernel(made.plan, Target("cpp", *made.case.tile), cpp.CppArrays(64, 64, "float32"), named=False)
    text = disassembled(native_build.library(kernel.source())._name)
    assert all(re.search(x, text) for x in WANTED[best][0])


@pytest.mark.exhaustive
@missing("objdump")
@pytest.mark.skipif("avx512bf16" not in HERE, reason="left out: this CPU has no bfloat16 instructions")
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_uses_its_instructions(kind):
    text = disassembled(native_build.library(problem("bfloat16").source(kind), "avx512bf16")._name)
    assert re.search("vdpbf16ps .*%zmm", text)


@pytest.mark.exhaustive
@missing(*ARM, "aarch64-linux-gnu-objdump")
@pytest.mark.parametrize("kind", KINDS)
def test_native_machine_code_for_arm_has_neon_instructions(kind, tmp_path):
    source, made = tmp_path / "kernel.cpp", tmp_path / "kernel.o"
    source.write_text(problem("relative-bias").source(kind))
    subprocess.run([*ARM, *native_build.FLAGS, *flags_of("neon"), "-c", "-o", made, source], check=True)
    assert re.search(r"fmla\tv\d+\.4s", disassembled(made, "aarch64-linux-gnu-objdump"))
