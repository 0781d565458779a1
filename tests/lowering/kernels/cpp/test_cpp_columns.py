"""The native kernel of column sums, compared with dense weights in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.native.compiler import needs_compiler
from support.tiers import default_only

import frisket as fk
from frisket.dsl.ir import SCORE
from frisket.lowering.kernels.cpp.backward import KERNELS
from frisket.lowering.kernels.cpp.forward import CppArrays
from frisket.lowering.plan import Target, make_plan
from frisket.lowering.simplify import ProgramExprs

torch = pytest.importorskip("torch")
forward_ad = pytest.importorskip("torch.autograd.forward_ad")
dense = pytest.importorskip("support.torch.dense").dense
placed = pytest.importorskip("support.native.call").placed
native = pytest.importorskip("frisket.runtime.backends.cpp.torch")
statistics = pytest.importorskip("frisket.runtime.torch.statistics")

BATCH, HEADS, KV_GROUP, DIM, LENGTH = 2, 4, 2, 24, 150
CASES = {
    "everything": (None, None, {}),
    "causal": ("causal", None, {}),
    "window": ("causal & window(9)", "alibi", {}),
    "documents": ("causal & same(doc)", "softcap(2)", {"doc": torch.arange(400) // 40}),
    "turns": ("turn[q] == turn[k]", None, {"turn": torch.arange(LENGTH) % 2}),
    "empty rows": ("k > q + 3", None, {}),
    "heads": ("causal & (h % 2 == b)", None, {}),
}
DTYPES = {"float32": 2e-6, "bfloat16": 2e-6, "float16": 2e-6, "float64": 1e-13}


@pytest.fixture(autouse=True)
def no_forward(monkeypatch):
    """With an lse the forward is not run, and a call compiles it ahead."""
    monkeypatch.setattr("frisket.runtime.backends.cpp.torch.build", lambda *_: None)


def ended(x):
    """A copy of a tensor that ends where no kernel may read on."""
    return torch.from_numpy(placed(x.contiguous().view(torch.uint8).numpy())).view(x.dtype)


def check(name, dtype, scale=1.0, q_len=LENGTH, kv_len=LENGTH, batch=BATCH, heads=HEADS):
    mask, score, params = CASES[name]
    draw, kind, kv_heads = torch.Generator().manual_seed(0), getattr(torch, dtype), heads // KV_GROUP
    shapes = (heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)
    q, k, v = (torch.randn(batch, *x, DIM, generator=draw, dtype=torch.float64) for x in shapes)
    q, k, v = (ended(x.to(kind)) for x in (q * scale, k / scale, v))
    sinks = torch.tensor([0.5, -1.0, 2.0, -torch.inf])[:heads]
    seen = fk.mask("true" if mask is None else mask, **params).dense(q_len, kv_len, batch=batch, heads=heads)
    at = (torch.arange(q_len)[:, None] - torch.arange(kv_len)).double()
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1).double() / heads)[:, None, None]
    mods = {None: None, "alibi": lambda s: s - slopes * at.abs(), "softcap(2)": lambda s: 2 * torch.tanh(s / 2)}
    eye = torch.eye(kv_len, dtype=torch.float64).expand(batch, kv_heads, -1, -1)
    seen = torch.from_numpy(np.broadcast_to(seen, (batch, heads, q_len, kv_len)).copy())
    weights, lse, _ = dense(q.double(), k.double(), eye, seen, mods[score], sinks.double())
    asked = {"columns": True, "per": "query", "sinks": sinks, "lse": lse}
    found, want = fk.compile(mask, score, backend="cpp").statistics(q, k, v, **asked, **params), weights.sum(2)
    np.testing.assert_allclose(found.columns, want, atol=DTYPES[dtype] * max(1, want.max().item()))


@needs_compiler
@pytest.mark.parametrize("name", default_only(CASES, "documents"))
def test_columns_of_the_kernel_equal_dense_sums(name):
    check(name, "float32")


@needs_compiler
def test_columns_of_few_heads_are_sums_of_parts():
    """Rows of tiles are dealt out to the threads, where heads are fewer."""
    check("documents", "float32", q_len=400, kv_len=400, batch=1, heads=2)


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_len", [1, 31, 200])
def test_columns_of_each_dtype_and_length_equal_dense_sums(dtype, kv_len):
    check("heads", dtype, kv_len=kv_len)


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("scale", [1e-20, 1e12])
def test_columns_of_numbers_of_any_size_equal_dense_sums(scale):
    """Products of terms lack numbers that are not tame, which vectors multiply."""
    check("causal", "float32", scale)


def test_columns_kernel_is_of_a_softmax_over_plain_keys():
    plan = make_plan(ProgramExprs(fk.mask("causal").expr))
    plain, stored = CppArrays(64, 64, "float32"), CppArrays(64, 64, "float32", "int8")
    for changes, arrays in (
        ({"value_scale": SCORE}, plain), ({"pages": "pages"}, plain), ({"weighted": True}, plain), ({}, stored),
    ):  # fmt: skip
        with pytest.raises(fk.FrisketError, match="takes a softmax over plain keys"):
            KERNELS["columns"](replace(plan, **changes), Target("cpp", 64, 64), arrays)


@needs_compiler
@pytest.mark.parametrize("way", ["forward_ad", "a graph as well"])
def test_columns_of_tensors_with_tangents_have_tangents(way):
    """The kernel has none, and took such calls."""
    draw = torch.Generator().manual_seed(0)
    q, along, k, v = torch.randn(4, 1, 2, LENGTH, DIM, generator=draw)
    att, q = fk.compile("causal", backend="cpp"), q.requires_grad_(way != "forward_ad")
    lse = fk.attention(q, k, v, "causal", backend="aten", return_lse=True)[1].detach()

    def columns(q):
        scores = (q @ k.mT / DIM**0.5).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
        return (scores - lse[..., None]).exp().sum(2)

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, along)
        found, want = att.statistics(dual, k, v, columns=True, lse=lse).columns, columns(dual)
        for x, y in zip(forward_ad.unpack_dual(found), forward_ad.unpack_dual(want)):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_text_of_the_columns_kernel_has_no_values():
    plan = make_plan(ProgramExprs(fk.mask("causal").expr))
    text = KERNELS["columns"](plan, Target("cpp", 64, 64), CppArrays(64, 64, "float32")).source()
    assert 'extern "C" int64_t frisket_columns(const Call *call)' in text
    assert "accumulate<" not in text


@needs_compiler
def test_columns_take_the_kernel_without_gradients_alone(monkeypatch):
    calls = []
    sums = torch.zeros(1, 2, 9)
    monkeypatch.setattr(statistics, "_columns_of_kernel", lambda kernel, ready, q, *more: calls.append(q) or sums)
    q, k, v = torch.ones(3, 1, 2, 9, 8)
    att = fk.compile("causal", backend="cpp")
    lse = torch.zeros(1, 2, 9)
    att.statistics(q, k, v, columns=True, lse=lse)
    att.statistics(q, k, v, entropy=True)
    att.statistics(q.requires_grad_(), k, v, columns=True, lse=lse)
    assert len(calls) == 1
