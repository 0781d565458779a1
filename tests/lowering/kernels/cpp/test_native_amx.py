"""Native kernels on a CPU's matrix unit: where there is one, and what it does in software."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.native import native_call

from frisket.runtime.machine import cpp_build, cpp_cpu
from lowering.kernels.cpp import test_cpp_backward, test_cpp_forward, test_native_stored, test_native_variants

SOFTWARE = "the matrix unit in software"
UNIT = Path(native_call.__file__).with_name("matrix_unit.hpp")
HERE = [v for v in ("amx", SOFTWARE) if not cpp_cpu.lacking("avx512bf16" if v == SOFTWARE else v)]
pytestmark = pytest.mark.skipif(not HERE, reason="left out: this CPU has no bfloat16 instructions")


@pytest.fixture(autouse=True)
def software(monkeypatch):
    flags, wanted = cpp_cpu.VARIANTS["avx512bf16"]
    monkeypatch.setitem(cpp_cpu.VARIANTS, SOFTWARE, ((*flags, "-include", str(UNIT)), wanted))


def halves(cases, *usual):
    """The cases of bfloat16: some in every run, others in the matrix."""
    names = [n for n, case in cases.items() if case.dtype == "bfloat16"]
    return [n if n in usual else pytest.param(n, marks=pytest.mark.matrix) for n in names]


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("name", halves(test_cpp_forward.CASES, "bfloat16", "bfloat16-odd-sizes"))
def test_forward(name, variant):
    made = test_cpp_forward.problem(test_cpp_forward.CASES[name])
    test_cpp_forward.check(made, made.run(variant=variant))


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("name", halves(test_cpp_backward.CASES, "bfloat16-odd-sizes"))
def test_backward(name, variant):
    case = test_cpp_backward.CASES[name]
    made = test_cpp_backward.problem(case)
    test_cpp_backward.check(case, made, native_call.backward(*made.args, **made.options, variant=variant))


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("name", halves(test_native_stored.CASES, "prefill-bfloat16-holes"))
def test_stored(name, variant):
    made = test_native_stored.Problem(test_native_stored.CASES[name])
    made.check(made.run(variant=variant))


@pytest.mark.matrix
@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("tile", [(32, 16), (40, 48), (96, 128), (192, 64)])
@pytest.mark.parametrize("dim", [16, 40, 64, 96, 256])
def test_sizes(dim, tile, variant):
    """Odd numbers of vectors, of groups and of steps, and tiles that are visible throughout."""
    shape = {"dim": dim, "v_dim": 272 - dim, "dtype": "bfloat16", "tile": tile}
    for q_len in (205, 12):
        for mask in (None, "causal & window(300)", "causal & k % 5 == 0"):
            made = test_cpp_forward.problem(test_cpp_forward.Case(mask, q_len=q_len, kv_len=401, **shape))
            test_cpp_forward.check(made, made.run(variant=variant))


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("q_len", [205, 12])
def test_the_next_tile_does_not_matter(q_len, variant):
    """A tile of 48 keys fills one and a half squares: behind its values are zeros, and no values of hidden keys."""

    def change(q, k, v):
        v[:, :, 96:] = np.nan
        return q, k, v

    case = test_cpp_forward.Case("k < 96", q_len=q_len, kv_len=205, dtype="bfloat16", tile=(32, 48))
    made = test_cpp_forward.problem(case, change)
    made.want = test_cpp_forward.problem(case).want
    test_cpp_forward.check(made, made.run(variant=variant))


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize(("heads", "q_len"), [(2, 80), (12, 1)])
def test_hidden_values_beside_visible_ones(heads, q_len, variant):
    """80 keys are seen, all of their vectors: products go on to the end of a square, at 96."""

    def change(q, k, v):
        k[:, :, 80:], v[:, :, 80:] = np.nan, np.inf
        return q, k, v

    origin = (0, 0, 80 - q_len, 0)
    case = test_cpp_forward.Case(heads=heads, kv_heads=1, q_len=q_len, kv_len=128, dtype="bfloat16", tile=(96, 128),
                                 origin=origin)  # fmt: skip
    made = test_cpp_forward.problem(case, change)
    made.want = test_cpp_forward.problem(case).want
    test_cpp_forward.check(made, made.run(variant=variant))


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("dim", [64, 40])
def test_a_step_of_decoding_has_the_scores_of_packed_keys(dim, variant):
    """12 heads of a key head multiply keys where they are, 13 rows and more of other items packed ones: equal bits, by
    which the backward computes weights of either."""
    shape = {"kv_len": 192, "dim": dim, "scale": 300.0, "dtype": "bfloat16", "tile": (12, 48)}
    few = test_cpp_forward.problem(test_cpp_forward.Case(None, heads=12, kv_heads=1, q_len=1, **shape))
    many = test_cpp_forward.problem(test_cpp_forward.Case(None, heads=1, kv_heads=1, q_len=36, **shape))
    many.arrays = (np.tile(np.swapaxes(few.arrays[0], 1, 2), (1, 1, 3, 1)), *few.arrays[1:])
    one, other = few.run(variant=variant), many.run(variant=variant)
    assert np.array_equal(one[2][:, :, 0], other[2][:, 0, :12])
    np.testing.assert_allclose(one[1][:, :, 0], other[1][:, 0, :12], rtol=1e-6)
    test_cpp_forward.check(few, one)


@pytest.mark.parametrize("variant", HERE)
def test_the_least_scores_before_others(variant):
    """Scores of the least float32 weigh nothing beside those of later tiles, as biases of finfo.min have them."""
    low = np.where(np.arange(150) < 128, np.finfo(np.float32).min, 0).astype(np.float32)
    case = test_cpp_forward.Case(None, "score + low[k]", {"low": low}, dtype="bfloat16")
    made = test_cpp_forward.problem(case)
    test_cpp_forward.check(made, made.run(variant=variant))


@pytest.mark.parametrize("sanitizer", ["address", pytest.param("undefined", marks=pytest.mark.matrix)])
def test_sanitizers(sanitizer, tmp_path):
    flags = ("-O1", "-g1", *cpp_cpu.flags_of(SOFTWARE), *test_native_variants.SANITIZERS[sanitizer])
    run = test_native_variants.program(tmp_path, cpp_build.compiler(), flags, threads=2)
    test_native_variants.check("bfloat16", run)


@pytest.mark.skipif(len(HERE) < 2, reason="left out: this CPU has no matrix unit")
def test_software_has_the_bits_of_the_unit():
    made = test_cpp_forward.problem(test_cpp_forward.CASES["bfloat16"])
    for one, other in zip(made.run(variant="amx"), made.run(variant=SOFTWARE), strict=True):
        assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


@pytest.mark.skipif(not shutil.which("objdump"), reason="left out: no objdump here")
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("name", ["bfloat16", "plain"])
def test_the_instructions(name, kind, tmp_path):
    """bfloat16 alone is multiplied there."""
    text, made = tmp_path / "kernel.cpp", tmp_path / "kernel.so"
    text.write_text(test_native_variants.problem(name).source(kind))
    command = [*cpp_build.compiler(), *cpp_build.FLAGS, *cpp_cpu.flags_of("amx"), "-o", made, text]
    subprocess.run(command, check=True, capture_output=True)
    found = subprocess.run(["objdump", "-d", made], capture_output=True, text=True, check=True).stdout
    assert bool(re.search("tdpbf16ps", found)) == (name == "bfloat16")


def test_a_system_that_refuses(monkeypatch):
    """The unit is there, but no program may use it."""
    monkeypatch.setattr(cpp_cpu, "features", lambda: cpp_cpu.VARIANTS["amx"][1])
    monkeypatch.setattr(cpp_cpu, "_allowed", lambda: True)
    assert (cpp_cpu.best(), cpp_cpu.flags_of("native")[1:]) == ("amx", ("-DFRISKET_AMX",))
    monkeypatch.setattr(cpp_cpu, "_allowed", lambda: False)
    assert cpp_cpu.lacking("amx") == "the system lets no program use this CPU's matrix unit"
    assert (cpp_cpu.best(), cpp_cpu.flags_of("native")) == ("avx512bf16", ("-march=native",))


@pytest.mark.skipif("amx" not in HERE, reason="left out: this CPU has no matrix unit")
def test_the_unit_is_left_as_it_was_found():
    """torch's products use it too, in the same thread."""
    torch = pytest.importorskip("torch")
    import frisket as fk

    torch.manual_seed(0)
    a, x = torch.randn(64, 96).bfloat16(), torch.randn(1, 2, 130, 64).bfloat16()
    before = a @ a.T
    attend = fk.compile("causal", backend="native")
    for _ in range(3):
        attend(x, x, x)
        assert torch.equal(a @ a.T, before)
