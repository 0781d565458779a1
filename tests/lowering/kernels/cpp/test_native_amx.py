"""Native kernels on a CPU's matrix unit: where there is one, and what it does in software."""

from __future__ import annotations

import ctypes
import mmap
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.native import call as native_call
from support.native.compiler import needs_compiler

import frisket as fk
from frisket.dsl.sugar import b, k
from frisket.lowering.dtypes import OPERANDS
from frisket.lowering.plan import PAGES, Geometry
from frisket.runtime.backends.cpp import torch as native_torch
from frisket.runtime.calls.options import AS_CHOSEN, Tuning
from frisket.runtime.machine import cpp_build
from lowering.kernels.cpp import test_cpp_backward, test_cpp_forward, test_native_stored, test_native_variants

SOFTWARE = "the matrix unit in software"
UNIT = Path(native_call.__file__).with_name("matrix_unit.hpp")
HERE = [v for v in ("amx", SOFTWARE) if not cpp_build.lacking("avx512bf16" if v == SOFTWARE else v)]
# the first of them in every run, and software on a processor with the unit in the exhaustive tier
VARIANTS = [v if v == HERE[0] else pytest.param(v, marks=pytest.mark.exhaustive) for v in HERE]
pytestmark = [needs_compiler, pytest.mark.skipif(not HERE, reason="left out: this CPU has no bfloat16 instructions")]


@pytest.fixture(autouse=True)
def software(monkeypatch, quick):
    """No user has kernels with this unit: the default tests compile them with fewer optimizations, in half the time."""
    flags, wanted = cpp_build.VARIANTS["avx512bf16"]
    less = ("-O1", "-fexpensive-optimizations") if quick else ()
    monkeypatch.setitem(cpp_build.VARIANTS, SOFTWARE, ((*flags, *less, "-include", str(UNIT)), wanted))


def of(dtype, cases, *usual):
    """The cases of a dtype: some in every run, others are exhaustive."""
    names = [n for n, case in cases.items() if case.dtype == dtype]
    return [n if n in usual else pytest.param(n, marks=pytest.mark.exhaustive) for n in names]


def six(case):
    """The case with products of float32 as six of bfloat16."""
    return case.but(precision="bf16x6") if case.dtype == "float32" else case


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "name",
    [*of("bfloat16", test_cpp_forward.CASES, "bfloat16-odd-sizes"),
     *of("float32", test_cpp_forward.CASES, "window", "many-query-heads")],
)  # fmt: skip
def test_matrix_unit_forward_equals_the_reference(name, variant):
    made = test_cpp_forward.problem(six(test_cpp_forward.CASES[name]))
    test_cpp_forward.check(made, made.run(variant=variant))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "name",
    [*of("bfloat16", test_cpp_backward.CASES, "bfloat16-odd-sizes"), *of("float32", test_cpp_backward.CASES, "window")],
)
def test_matrix_unit_backward_equals_the_reference(name, variant):
    case = six(test_cpp_backward.CASES[name])
    made = test_cpp_backward.problem(case)
    test_cpp_backward.check(case, made, native_call.backward(*made.args, **made.options, variant=variant))


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", of("bfloat16", test_native_stored.CASES, "prefill-bfloat16-holes"))
def test_matrix_unit_reads_stored_keys_and_values(name, variant):
    made = test_native_stored.Problem(test_native_stored.CASES[name])
    made.check(made.run(variant=variant))


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("tile", [(32, 16), (40, 48), (96, 128), (192, 64)])
@pytest.mark.parametrize("dim", [16, 40, 64, 96, 256])
def test_matrix_unit_takes_odd_sizes_and_full_tiles(dim, tile, variant):
    """Odd numbers of vectors, of groups and of steps, and tiles that are visible throughout."""
    shape = {"dim": dim, "v_dim": 272 - dim, "dtype": "bfloat16", "tile": tile}
    for q_len in (205, 12):
        for mask in (None, "causal & window(300)", "causal & k % 5 == 0"):
            made = test_cpp_forward.problem(test_cpp_forward.Case(mask, q_len=q_len, kv_len=401, **shape))
            test_cpp_forward.check(made, made.run(variant=variant))


@pytest.mark.exhaustive
@pytest.mark.parametrize("tile", [(40, 48), (192, 64)])
@pytest.mark.parametrize("dim", [40, 200])
def test_sizes_of_float32(dim, tile):
    shape = {"dim": dim, "v_dim": 272 - dim, "tile": tile, "precision": "bf16x6"}
    for q_len in (205, 23):
        for mask in (None, "causal & k % 5 == 0"):
            made = test_cpp_forward.problem(test_cpp_forward.Case(mask, q_len=q_len, kv_len=401, **shape))
            test_cpp_forward.check(made, made.run(variant=HERE[0]))
    case = test_cpp_backward.Case("causal", q_len=205, kv_len=301, **shape)
    made = test_cpp_backward.problem(case)
    test_cpp_backward.check(case, made, native_call.backward(*made.args, **made.options, variant=HERE[0]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("q_len", [205, pytest.param(12, marks=pytest.mark.exhaustive)])
def test_matrix_unit_ignores_values_past_a_tile(q_len, variant):
    """A tile of 48 keys fills one and a half squares: behind its values are zeros, and no values of hidden keys."""

    def change(q, k, v):
        v[:, :, 96:] = np.nan
        return q, k, v

    case = test_cpp_forward.Case("k < 96", q_len=q_len, kv_len=205, dtype="bfloat16", tile=(32, 48))
    made = test_cpp_forward.problem(case, change)
    made.want = test_cpp_forward.problem(case).want
    test_cpp_forward.check(made, made.run(variant=variant))


FEW = test_cpp_forward.Case("k < n[b]", None, {"n": np.array([192])}, heads=12, kv_heads=1, q_len=1, kv_len=200, dim=40,
                            v_dim=40, dtype="bfloat16", tile=(96, 128))  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("heads", "q_len"), [(2, 80), (12, 1)])
def test_hidden_values_beside_visible_ones(heads, q_len, variant):
    """80 keys are seen, all of their vectors: products go on to the end of a square, at 96."""

    def change(q, k, v):
        k[:, :, 80:], v[:, :, 80:] = np.nan, np.inf
        return q, k, v

    case = FEW.but(heads=heads, q_len=q_len, kv_len=128, params={"n": np.array([80])})
    made = test_cpp_forward.problem(case, change)
    made.want = test_cpp_forward.problem(case).want
    test_cpp_forward.check(made, made.run(variant=variant))


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dim", [pytest.param(64, marks=pytest.mark.exhaustive), 40])
@pytest.mark.parametrize("tile", [pytest.param((12, 48), marks=pytest.mark.exhaustive), (96, 128)])
def test_a_step_of_decoding_has_the_scores_of_packed_keys(tile, dim, variant):
    """12 heads of a key head multiply keys where they are, 13 rows and more of other items packed ones: equal bits, by
    which the backward computes weights of either."""
    case = FEW.but(dim=dim, v_dim=dim, scale=300.0, tile=tile)
    few, many = test_cpp_forward.problem(case), test_cpp_forward.problem(case.but(heads=1, q_len=36))
    many.arrays = (np.tile(np.swapaxes(few.arrays[0], 1, 2), (1, 1, 3, 1)), *few.arrays[1:])
    one, other = few.run(variant=variant), many.run(variant=variant)
    assert np.array_equal(one[2][:, :, 0], other[2][:, 0, :12])
    np.testing.assert_allclose(one[1][:, :, 0], other[1][:, 0, :12], rtol=1e-6)
    test_cpp_forward.check(few, one)


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS)
def test_matrix_unit_gives_the_least_scores_no_weight(variant):
    """Scores of the least float32 weigh nothing beside those of later tiles, as biases of finfo.min have them."""
    low = np.where(np.arange(150) < 128, np.finfo(np.float32).min, 0).astype(np.float32)
    case = test_cpp_forward.Case(None, "score + low[k]", {"low": low}, dtype="bfloat16")
    made = test_cpp_forward.problem(case)
    test_cpp_forward.check(made, made.run(variant=variant))


# rows see 201 to 300 keys, from the first on
SIX = test_cpp_forward.WINDOW.but(precision="bf16x6", params={"w": 400}, heads=2, kv_heads=1, q_len=100, kv_len=333,
                                  origin=(0, 0, 200, 0), scale=0.1)  # fmt: skip
RANGES = {
    "large scores": lambda q, k, v: (q * np.float32(1e15), k * np.float32(1e15), v),
    "large keys": lambda q, k, v: (q * np.float32(1e-15), k * np.float32(1e15), v),
    "small queries": lambda q, k, v: (q * np.float32(1e-33), k * np.float32(1e30), v),
    "large values": lambda q, k, v: (q, k, v * np.float32(1e30)),
    "small values": lambda q, k, v: (q, k, v * np.float32(1e-33)),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "changes",
    [{},
     *(pytest.param({"mask": mask, "params": {}, "tile": (96, 64)}, marks=pytest.mark.exhaustive)
       for mask in (None, "k % 3 < 2 & k <= q"))],
    ids=["window", "everything", "holes"],
)  # fmt: skip
@pytest.mark.parametrize("name", RANGES)
def test_float32_that_terms_do_not_hold(name, changes, variant):
    """Numbers out of the range of terms give what vectors give."""
    made = test_cpp_forward.problem(SIX.but(**changes), RANGES[name])
    out, lse, top = (np.asarray(x, np.float64) for x in made.run(variant=variant))
    size = np.abs(made.want[0]).max()
    np.testing.assert_allclose(out / size, made.want[0] / size, atol=4e-6)
    np.testing.assert_allclose(lse, made.want[1], rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(top, made.want[2], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("hidden", [True, False])
def test_infinity_in_float32(hidden, variant):
    """Infinity stays infinity where a row sees it, and NaN that no row sees changes nothing."""

    def seen(q, k, v):
        v[:, :, 7, 3], v[:, :, 9, 4] = -np.inf, np.nan
        return q, k, v

    def all_of_them(q, k, v):
        k[:, :, 300:], v[:, :, 300:] = np.nan, np.inf
        return seen(q, k, v)

    made = test_cpp_forward.problem(SIX, all_of_them if hidden else seen)
    found, want = made.run(variant=variant), test_cpp_forward.problem(SIX, seen).want
    assert (found[0][..., 3] == -np.inf).all()
    assert np.isnan(found[0][..., 4]).all()
    for got, x in zip(found, want, strict=True):
        np.testing.assert_allclose(got, x, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dim", [64, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_six_products_are_as_near_as_vectors(dim, variant):
    def off(precision, variant):
        case = SIX.but(precision=precision, q_len=128, kv_len=512, origin=(0, 0, 384, 0), dim=dim, v_dim=dim)
        made = test_cpp_forward.problem(case)
        return [np.sqrt(np.mean((np.asarray(x, np.float64) - y) ** 2)) for x, y in
                zip(made.run(variant=variant), made.want, strict=True)]  # fmt: skip

    for six, vectors in zip(off("bf16x6", variant), off("ieee", "native"), strict=True):
        assert six <= 1.1 * vectors


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mask", [pytest.param("causal", marks=pytest.mark.exhaustive), None])
@pytest.mark.parametrize("changed", [("q", "k"), ("v",), ("dout",), ("k",)])
@pytest.mark.parametrize("factor", [2.0**45, 2.0**-105])
def test_gradients_of_float32_that_terms_do_not_hold(factor, changed, mask, variant):
    found = []
    for precision in ("bf16x6", "ieee"):
        case = test_cpp_backward.Case(mask, precision=precision, q_len=130, kv_len=200, with_dlse=False)
        made = test_cpp_backward.problem(case)
        args = list(made.args)
        for name in changed:
            at = {"q": 3, "k": 4, "v": 5, "dout": 8}[name]
            args[at] = args[at] * np.float32(factor)
        norm = np.zeros((1, 2, 130, 2), np.float32)
        args[6:8] = native_call.forward(*args[:6], *args[10:], variant=variant, norm=norm)[:2]
        found.append(native_call.backward(*args, **made.options, variant=variant, norm=norm))
    for name in "qkv":
        got, want = (np.asarray(x[name], np.float64) for x in found)
        assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS)
def test_infinity_in_a_cotangent(variant):
    """An infinite dO stays infinite in dV, where every row sees every key."""
    case = test_cpp_backward.WINDOW.but(heads=2, q_len=150, kv_len=150, origin=(0, 0, 150, 0), params={"w": 400})
    made = test_cpp_backward.problem(case.but(precision="bf16x6", with_dlse=False))
    args = list(made.args)
    args[8] = args[8].copy()
    args[8][0, 0, 5, 3] = np.inf
    found = native_call.backward(*args, **made.options, variant=variant)
    assert (found["v"][0, 0, :, 3] == np.inf).all()
    np.testing.assert_allclose(found["v"][0, 1], made.want["v"][0, 1], rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS)
def test_few_rows_read_no_page_before_the_first(variant):
    """The last key is that of the first page of a pool, and a page ends before it. A vector of keys that are not there
    is worked on beside the last ones."""
    case = test_native_stored.Case(q_len=105, kv_len=1040, q0=935, page=16, stored="", scales=False, tile=(96, 64))
    made = test_native_stored.Problem(case.but(precision="bf16x6"))
    table = made.tables[PAGES]
    last = table[0, -1]
    order = np.arange(len(made.k))
    order[[0, last]] = last, 0
    made.k, made.v, made.tables[PAGES] = made.k[order], made.v[order], np.where(table == 0, last, table)
    made.tables[PAGES][0, -1] = 0
    made.k, made.v = map(behind_a_page, (made.k, made.v))
    made.check(made.run(variant=variant))


def behind_a_page(x):
    """A copy that begins where a page ends that nobody may read, and whose axes are not in the order of memory."""
    room = mmap.mmap(-1, mmap.PAGESIZE + x.nbytes)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    pages, heads, tokens, dim = x.shape
    made = np.frombuffer(room, x.dtype, x.size, mmap.PAGESIZE).reshape(pages, tokens, heads, dim).swapaxes(1, 2)
    made[...] = x
    return made


EIGHTS = test_native_stored.Case(batch=2, kv_len=336)
OF_BYTES = {
    "one row": EIGHTS.but(heads=2),
    "four rows, bfloat16": EIGHTS.but(heads=4, kv_heads=1, dtype="bfloat16", tile=(1, 128), dim=128, v_dim=128),
    "eight rows": EIGHTS.but(heads=8, kv_heads=1, dim=128, v_dim=64),
    "sixteen rows": EIGHTS.but(heads=16, kv_heads=1, dim=200, v_dim=136, tile=(1, 32)),
    "sixteen rows, float16": EIGHTS.but(heads=16, kv_heads=1, dtype="float16", page=16),
    "odd sizes": EIGHTS.but(heads=7, kv_heads=1, dim=40, v_dim=24, kv_len=333, tile=(1, 48)),
    "odd sizes, bfloat16": EIGHTS.but(heads=11, kv_heads=1, dim=72, v_dim=80, kv_len=333, dtype="bfloat16"),
    # one batch entry has holes
    "odd sizes and holes, bfloat16": EIGHTS.but(
        mask=test_native_stored.causal & ((k % 3 > 0) | (b > 0)), heads=11, kv_heads=1, dim=1016, v_dim=72, kv_len=333,
        dtype="bfloat16", tile=(1, 256),
    ),
    "several queries": EIGHTS.but(q_len=5, q0=290, dim=80, v_dim=272, tile=(5, 256)),
    "holes": EIGHTS.but(mask=test_native_stored.causal & (k % 3 > 0), q_len=3, heads=8),
    "one key in a tile": EIGHTS.but(mask=test_native_stored.causal & (k % 64 > 62), q0=200, page=48),
    "first keys of each row": EIGHTS.but(mask=k < 20 + 100 * b, heads=6, kv_heads=1),
    "dropout": EIGHTS.but(rate=0.3, heads=8),
}  # fmt: skip


OFTEN = {"float32": "eight rows", "bfloat16": "odd sizes and holes, bfloat16"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "name",
    [n if n in OFTEN.values() else pytest.param(n, marks=pytest.mark.exhaustive) for n in OF_BYTES],
)
def test_few_rows_beside_int8(name, variant):
    """Keys and values of int8 are multiplied as bytes."""
    made = test_native_stored.Problem(OF_BYTES[name])
    made.check(made.run(variant=variant))


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_are_as_near_as_vectors(variant):
    """Also where one channel is much larger than the others, as models have."""
    made = test_native_stored.Problem(OF_BYTES["eight rows"].but(batch=8))
    made.q[..., 3] *= 200
    want = made.reference()

    def off(variant):
        return [np.sqrt(np.mean((np.asarray(x, np.float64) - y) ** 2)) for x, y in zip(made.run(variant=variant), want)]

    for one, other in zip(off(variant), off("avx512"), strict=True):
        assert one <= 1.2 * other


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_weights_beside_a_large_one_whose_value_is_zero(dtype, variant):
    """As that of a first token that takes nearly all weight: the result is that of the others."""
    made = test_native_stored.Problem(OF_BYTES[OFTEN[dtype]])
    made.tables[test_native_stored.V_SCALE][:, :, 1] *= 2**15
    made.v[:, :, 1] = made.known[1][:, :, 1] = 0
    made.check(made.run(variant=variant))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("factor", [0, 2.0**-120, 2.0**-100, 2.0**40, np.nan])
@pytest.mark.parametrize("of", ["q", "v_scale"])
def test_queries_and_weights_that_bytes_do_not_hold(of, factor, variant):
    """They are multiplied by vectors, a whole tile or all rows of a key head, and give what vectors give."""
    made = test_native_stored.Problem(OF_BYTES["eight rows"])
    if of == "q":
        made.q[0, 2] *= np.float32(factor)
    else:
        made.tables[test_native_stored.V_SCALE][0, 0, 100] *= np.float32(factor)
    for got, want in zip(made.run(variant=variant), made.run(variant="avx512"), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6 * min(1, factor if factor > 1 else 1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_matrix_unit_sums_of_the_largest_bytes_do_not_overflow(variant):
    """-128 beside the largest query and weight, 1,016 times: no sum overflows."""
    made = test_native_stored.Problem(OF_BYTES[OFTEN["bfloat16"]])
    made.q[:], made.k[:], made.v[:] = native_call.bfloat16(np.float32(1 / 32)), -128, -128
    for scale in (test_native_stored.K_SCALE, test_native_stored.V_SCALE):
        made.tables[scale][:] = 1
    out, lse, _ = made.run(variant=variant)
    assert (native_call.from_bfloat16(out) == -128).all()
    seen = np.array([200, 301])[:, None, None]  # of 301 keys, every third is hidden in the first batch entry
    np.testing.assert_allclose(lse, np.broadcast_to(np.log(seen) - 4 * 1016**0.5, lse.shape), rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitizer", ["address", pytest.param("undefined", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", [pytest.param("bfloat16", marks=pytest.mark.exhaustive), "six products"])
def test_matrix_unit_kernels_pass_sanitizers(name, sanitizer, tmp_path):
    flags = ("-O1", "-g1", *cpp_build.flags_of(SOFTWARE), *test_native_variants.SANITIZERS[sanitizer])
    run = test_native_variants.program(tmp_path, cpp_build.compiler(), flags, threads=2)
    test_native_variants.check(name, run)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitizer", ["address", "undefined"])
@pytest.mark.parametrize("name", ["sixteen rows", "odd sizes", "odd sizes, bfloat16"])
def test_sanitizers_of_bytes(name, sanitizer, tmp_path):
    flags = ("-O1", "-g1", *cpp_build.flags_of(SOFTWARE), *test_native_variants.SANITIZERS[sanitizer])
    made = test_native_stored.Problem(OF_BYTES[name])
    run = test_native_variants.program(tmp_path, cpp_build.compiler(), flags, threads=2)
    found = test_native_stored.Watched(made).run(run, backward=False)
    made.check([found[n] for n in ("out", "lse", "top")])


@pytest.mark.exhaustive
@pytest.mark.skipif(len(HERE) < 2, reason="left out: this CPU has no matrix unit")
@pytest.mark.parametrize("name", ["bfloat16", "eight rows"])
def test_software_has_the_bits_of_the_unit(name):
    if name in OF_BYTES:
        made = test_native_stored.Problem(OF_BYTES[name])
    else:
        made = test_cpp_forward.problem(test_cpp_forward.CASES[name])
    for one, other in zip(made.run(variant="amx"), made.run(variant=SOFTWARE), strict=True):
        assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("objdump"), reason="left out: no objdump here")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("bfloat16", "forward"),
     *[pytest.param(*x, marks=pytest.mark.exhaustive) for x in (
         ("plain", "forward"), ("six products", "backward"), ("bfloat16", "backward"),
         ("plain", "backward"), ("six products", "forward"))]],
)  # fmt: skip
def test_matrix_unit_instructions_are_in_the_machine_code(name, kind, tmp_path):
    """bfloat16 is multiplied there, and float32 where the target says so."""
    text, made = tmp_path / "kernel.cpp", tmp_path / "kernel.so"
    text.write_text(test_native_variants.problem(name).source(kind))
    command = [*cpp_build.compiler(), *cpp_build.FLAGS, "-O1", *cpp_build.flags_of("amx"), "-o", made, text]
    subprocess.run(command, check=True, capture_output=True)
    found = subprocess.run(["objdump", "-d", made], capture_output=True, text=True, check=True).stdout
    assert bool(re.search("tdpbf16ps", found)) == (name != "plain")


def test_large_float32_calls_take_six_products_of_bfloat16(monkeypatch):
    def precision(tuning=AS_CHOSEN, lacks="", narrow=False, dtype="float32", tile=None, **sizes):
        monkeypatch.setattr(native_torch, "lacking", lambda variant: lacks)
        shape = {"batch": 1, "heads": 8, "kv_heads": 8, "q_len": 1024, "kv_len": 1024, "head_dim": 64, "v_dim": 64}
        g = Geometry(**shape | {"scale": 0.1} | sizes)
        asked = (
            native_torch.call_target(None, g, dtype, tile, tuning, None, None),
            native_torch.target(None, g, dtype, tile, narrow),
        )
        return [t.precision for t in asked]

    assert precision() == precision(tile=(64, 64)) == precision(q_len=64) == ["bf16x6"] * 2
    for changed in (
        {"q_len": 63},
        {"kv_len": 1023},
        {"v_dim": 63},
        {"dtype": "float16"},
        {"k": OPERANDS["int8"], "v": OPERANDS["int8"]},
        {"lacks": "no unit"},
    ):
        assert precision(**changed) == ["ieee"] * 2
    assert precision(narrow=True)[1] == precision(Tuning(precision="ieee"))[0] == "ieee"


@pytest.mark.parametrize(
    ("mask", "there"),
    [("True", True), ("causal", True), ("causal & k < lens[b]", True), ("causal & seen[b, k]", True),
     ("causal | k < n", True), ("causal & q - k <= 1024 & (q - k) % 4 == 0", True), ("q + KV_LEN - Q_LEN >= k", True),
     ("causal & doc[q] == doc[k]", False), ("causal & k % 4 == 0", False), ("q // 128 == k // 128", False),
     ("natten2d(32, 64, 13, 13)", False), ("causal & window(64) & k < n", False),
     ("causal & (q - k < 9 | k < n)", False), ("causal | k == n", False), ("blocks[q // 16, k // 16]", False)],
)  # fmt: skip
def test_masks_that_take_six_products(mask, there, monkeypatch):
    """Masks under which rows see long runs of keys, on plans with tables and without, of torch and of JAX."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(native_torch, "lacking", lambda variant: "")
    tables = {
        "lens": np.array([9]), "seen": np.ones((1, 2048), bool), "n": 9, "doc": np.arange(2048) // 256,
        "blocks": np.ones((128, 128), bool),
    }  # fmt: skip
    given = {n: x for n, x in tables.items() if re.search(rf"\b{n}\b", mask)}
    g = Geometry(1, 2, 2, 2048, 2048, 64, 64, 0.125)
    for flat in (False, True):
        values = {n: torch.as_tensor(x) if flat and n != "n" else x for n, x in given.items()}
        plan = fk.compile(mask).plan(2048, 2048, 1, 2, flat=flat, **values)
        assert plan.on_device == (flat and values.keys() - {"n"} != set())
        kernel = plan.static.plan if plan.on_device else plan.work((128, 128)).plan
        of_torch = native_torch.call_target(plan, g, "float32", None, AS_CHOSEN, None, None)
        of_jax = native_torch.target(kernel, g, "float32", None, plan.narrow)
        assert [x.precision == "bf16x6" for x in (of_torch, of_jax)] == [there] * 2


def test_a_system_that_refuses(monkeypatch):
    """The unit is there, but no program may use it."""
    monkeypatch.setattr(cpp_build, "this_cpu", lambda: ("", cpp_build.VARIANTS["amx"][1]))
    monkeypatch.setattr(cpp_build, "_allowed", lambda: True)
    assert (cpp_build.best_variant(), cpp_build.flags_of("native")[1:]) == ("amx", ("-DFRISKET_AMX",))
    monkeypatch.setattr(cpp_build, "_allowed", lambda: False)
    assert cpp_build.lacking("amx") == "the system lets no program use this CPU's matrix unit"
    assert (cpp_build.best_variant(), cpp_build.flags_of("native")) == ("avx512bf16", ("-march=native",))


@pytest.mark.skipif("amx" not in HERE, reason="left out: this CPU has no matrix unit")
def test_matrix_unit_configuration_is_restored_after_a_call():
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
