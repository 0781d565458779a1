"""Native kernels that find the rows of an order by themselves, against dense attention of arrays that are put in order:
permutations without any structure, so that a wrong row shows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.native.compiler import needs_compiler

import frisket as fk
from frisket.grammar import memo
from frisket.runtime.attention import ordered
from frisket.runtime.attention.attention import Attention
from frisket.runtime.backends.cpp import torch as native_torch
from frisket.runtime.calls.arrays import TokenPermutation
from frisket.runtime.machine import cpp_build
from frisket.runtime.machine.cpp_build import VARIANTS, lacking

draws = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _native(monkeypatch):
    monkeypatch.delenv("FRISKET_BACKEND")


SIZES = {  # queries, keys, dim, v_dim; q_heads, kv_heads: ragged tiles, few queries, sizes that are no whole vectors
    "ragged": (203, 331, 16, 16, 4, 2),
    "few queries": (3, 500, 16, 16, 4, 2),
    "one query": (1, 77, 16, 16, 2, 2),
    "odd sizes": (130, 97, 40, 24, 2, 1),
}
MASK = "q >= k & q % 3 != 1"  # rows without a key, and of the ragged size keys that no query sees
CASES = [
    *[(MASK, size, torch.float32) for size in SIZES],
    *[(MASK, "odd sizes", dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)],
    ("q >= k", "ragged", torch.float32),
]
OFTEN = [(MASK, "ragged", torch.float32), (MASK, "few queries", torch.float32), (MASK, "one query", torch.float32),
         (MASK, "odd sizes", torch.bfloat16)]  # fmt: skip
CLOSE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (5e-6, 5e-5),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (4e-3, 4e-3),
}


def permuted(length):
    return draws.permutation(length).astype(np.int32)


def moved(mask, score, queries, keys, **options):
    """The attention of arrays as they come, whose queries and keys the plan has in the order of permutations."""
    at = {"q": "pq[q]", "k": "pk[k]", "pq": queries, "pk": keys}
    made = fk.compile(mask, score, **options).at(**at)
    return Attention(made.program, replace(made.options, rows=TokenPermutation(queries, keys)))


def drawn(size, dtype=torch.float32, layout="bhsd"):
    q_len, kv_len, dim, v_dim, heads, kv_heads = SIZES[size]
    shapes = (2, heads, q_len, dim), (2, kv_heads, kv_len, dim), (2, kv_heads, kv_len, v_dim)
    arrays = [torch.randn(s, dtype=torch.float64) for s in shapes]
    if layout == "bshd":
        arrays = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in arrays]
    return [x.to(dtype).requires_grad_() for x in arrays]


def gradients(results, arrays):
    make = torch.Generator().manual_seed(1)
    along = [torch.randn(x.shape, generator=make, dtype=torch.float64).to(x.dtype) for x in results]
    return torch.autograd.grad(results, arrays, along)


def held(got, want, dtype, scale=1.0):
    atol, rtol = CLOSE[dtype]
    torch.testing.assert_close(got.to(want.dtype), want, atol=scale * atol, rtol=scale * rtol)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("seen", "size", "dtype"),
    [pytest.param(*x, marks=() if x in OFTEN else pytest.mark.exhaustive) for x in CASES],
)
def test_native_row_tables_equal_dense_of_permuted_arrays(seen, size, dtype):
    q, k, v = drawn(size, dtype)
    att = moved(seen, None, permuted(q.shape[2]), permuted(k.shape[2]))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = fk.compile(seen, backend="aten")(*exact, return_lse=True)
    got = att(q, k, v, return_lse=True, return_max=True)
    assert torch.equal(got[2] == -torch.inf, wanted[1] == -torch.inf)
    for x, y in zip(got, wanted, strict=False):
        held(x, y, dtype)
    see = torch.isfinite(wanted[1])[..., None]  # the cotangent of lse where there is none
    got, wanted = ((o * see.to(o.dtype), torch.where(see[..., 0], lse, 0)) for o, lse in (got[:2], wanted))
    for x, y in zip(gradients(got, (q, k, v)), gradients(wanted, exact), strict=True):
        held(x, y, dtype, 4 * max(1.0, float(y.abs().max())))


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", ["avx512", "avx2", "scalar"])
def test_native_row_tables_work_on_every_instruction_set(variant, monkeypatch, tmp_path):
    if lacking(variant):
        pytest.skip(lacking(variant))
    monkeypatch.setitem(VARIANTS, "native", VARIANTS[variant])
    monkeypatch.setenv("FRISKET_CACHE_DIR", str(tmp_path))  # not the library that another test has loaded
    memo.clear()  # nor the calls that hold it
    test_native_row_tables_equal_dense_of_permuted_arrays(MASK, "odd sizes", torch.float32)
    memo.clear()
    # forward and backward: the pool of threads and the trial of the compiler are short
    assert sum(source.stat().st_size > 100_000 for source in tmp_path.glob("native/*.cpp")) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_strides_score_mods_sinks_and_dropout(layout):
    """Gradients of tables by query, by key, by distance and by entry; a tile's rows lie apart."""
    q, k, v = drawn("ragged", layout=layout)
    q, k, v = (x[..., ::1] for x in (q, k, v))
    n, m = q.shape[2], k.shape[2]
    queries, keys = permuted(n), permuted(m)
    score = "score + by_query[q] + by_key[k] + by_distance[q - k + 330] + by_entry[h, q // 7]"
    tables = {
        "by_query": torch.randn(n), "by_key": torch.randn(m), "by_distance": torch.randn(n + m),
        "by_entry": torch.randn(4, 60),
    }  # fmt: skip
    tables = {name: x.requires_grad_() for name, x in tables.items()}
    sinks = torch.randn(4, requires_grad=True)
    found = []
    for att in (
        moved("q >= k", score, queries, keys, dropout=0.3),
        fk.compile("q >= k", score, dropout=0.3, backend="aten"),
    ):
        out, lse = att(q, k, v, seed=7, sinks=sinks, return_lse=True, **tables)
        found.append((out, lse, *gradients((out, lse), (q, k, v, sinks, *tables.values()))))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, atol=2e-4, rtol=2e-4)


def test_native_row_tables_ignore_hidden_nan():
    q, k, v = drawn("ragged")
    n, m = q.shape[2], k.shape[2]
    with torch.no_grad():
        k[:, :, n:], v[:, :, n:] = torch.inf, torch.nan
    att = moved(MASK, None, permuted(n), permuted(m))
    got = att(q, k, v)
    want = fk.compile(MASK, backend="aten")(q, k[:, :, :n], v[:, :, :n])
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)
    for x, y in zip(gradients((got,), (q, k, v)), gradients((want,), (q, k, v)), strict=True):
        torch.testing.assert_close(torch.nan_to_num(x), torch.nan_to_num(y), atol=2e-5, rtol=2e-4)


@needs_compiler
@pytest.mark.parametrize(("size", "dtype"), [("ragged", torch.float32), ("odd sizes", torch.bfloat16)])
def test_equal_bits_on_reruns_and_with_any_number_of_threads(size, dtype):
    q, k, v = drawn(size, dtype)
    att = moved(MASK, None, permuted(q.shape[2]), permuted(k.shape[2]))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            out, lse = att(q, k, v, return_lse=True)
            found.append((threads, (out, lse), gradients((out, lse), (q, k, v))))
    finally:
        torch.set_num_threads(before)
    for _, results, _ in found[1:]:
        assert all(map(torch.equal, results, found[0][1]))
    assert all(map(torch.equal, found[1][2], found[3][2]))
    for _, _, grads in found[1:]:  # parts of a key head are by threads, and so are the last bits
        for x, y in zip(grads, found[0][2], strict=True):
            torch.testing.assert_close(x, y, atol=1e-5 if dtype == torch.float32 else 3e-2, rtol=2e-2)


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*no compiler today")
@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_library_calls_stand_in_where_nothing_is_built(fails, monkeypatch):
    """Around them arrays are put in order, and results back."""
    built, asked = cpp_build.library, []

    def refused(text, *more):
        if "frisket_backward(const" in text or fails == "forward":
            asked.append(text)
            raise cpp_build.BuildError("no compiler today")
        return built(text, *more)

    monkeypatch.setattr(native_torch, "library", refused)
    native_torch._kernel.memo.clear()  # other tests have these kernels
    q, k, v = drawn("ragged")
    att = moved(MASK, None, permuted(q.shape[2]), permuted(k.shape[2]))
    got = att(q, k, v, return_lse=True)
    found = gradients((got[0],), (q, k, v))
    assert asked
    want = fk.compile(MASK, backend="aten")(q, k, v, return_lse=True)
    for x, y in zip((*got, *found), (*want, *gradients((want[0],), (q, k, v))), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


@needs_compiler
def test_calls_of_the_cpu_read_rows_and_others_move_them(monkeypatch):
    """A call that is checked and library calls have no such kernels."""
    moves = []
    monkeypatch.setattr(ordered.Order, "_permuted", lambda self, x, *given, **more: moves.append(1) or x)
    order = fk.reorder("causal & k % 4 == 0", 192, block=(16, 16), moving=0)
    q, k, v = torch.randn(3, 1, 2, 192, 16)
    fk.compile("causal & k % 4 == 0", reorder=order)(q, k, v)
    assert not moves
    fk.compile("causal & k % 4 == 0", reorder=order, backend="aten")(q, k, v)
    assert len(moves) == 4
    monkeypatch.undo()
    monkeypatch.setenv("FRISKET_CHECK", "1")
    fk.compile("causal & k % 4 == 0", reorder=order, backend="cpp")(q, k, v)


def test_small_tiles_where_borders_are_many():
    tile = {}
    for text, length in (("natten2d(64, 64, 7, 7)", 4096), ("causal & k % 4 == 0", 4096)):
        order = fk.reorder(text, length, block=(64, 32), moving=0)
        tile[text] = ordered._tile(order)
    assert tile == {"natten2d(64, 64, 7, 7)": (48, 64), "causal & k % 4 == 0": None}
