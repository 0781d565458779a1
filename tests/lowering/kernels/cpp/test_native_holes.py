"""The native kernels where a few rows see keys with holes between them: products leave out what is hidden."""

import numpy as np
import pytest
import torch
from support.torch.dense import dense

import frisket as fk
from frisket.lowering.kernels.cpp import forward as cpp
from frisket.lowering.plan import Target, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.machine import cpp_build as native_build
from frisket.runtime.masks.mask import mask as as_mask

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())
Q_LEN, KV_LEN = 203, 333
R = np.random.default_rng(5)
BLOCKS = R.random((4, -(-Q_LEN // 16), -(-KV_LEN // 16))) < 0.2
MASKS = {
    "blocks": ("blocks[q // 16, k // 16]", {"blocks": BLOCKS[0]}),
    "blocks by head": ("blocks[h, q // 16, k // 16]", {"blocks": BLOCKS}),
    "blocks with holes": ("blocks[q // 16, k // 16] & k % 5 != 2", {"blocks": BLOCKS[1]}),
    "ids in any order": ("row[q] == column[k]", {"row": R.integers(0, 9, Q_LEN), "column": R.integers(0, 9, KV_LEN)}),
    "a grid": ("abs(q // 20 - k // 20) <= 1 & abs(q % 20 - k % 20) <= 2", {}),
    "one key of each row": ("k == 7 * q % 333", {}),
    "the last key": ("blocks[q // 16, k // 16] | k == 332", {"blocks": BLOCKS[2]}),
}
OFTEN = {"blocks with holes": "float32", "the last key": "bfloat16"}
FIRST = ("blocks with holes", "float32")  # the one whose gradients every run takes
LIMIT = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2e-2, "float16": 3e-3}


def arrays(dtype, q_len=Q_LEN, seed=0):
    torch.manual_seed(seed)
    sizes = ((4, q_len), (2, KV_LEN), (2, KV_LEN), (4, q_len))
    return [torch.randn(1, heads, n, 24, dtype=torch.float64).to(getattr(torch, dtype)) for heads, n in sizes]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(n, d, marks=() if (n, d) == FIRST else pytest.mark.exhaustive) for n in MASKS for d in LIMIT],
)
def test_forward_and_backward(name, dtype):
    mask, tables = MASKS[name]
    *qkv, dout = arrays(dtype)
    qkv = [x.requires_grad_() for x in qkv]
    found = fk.compile(mask, backend="native", **tables)(*qkv)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    want, *_ = dense(*exact, torch.from_numpy(fk.mask(mask, **tables).dense(Q_LEN, KV_LEN, heads=4)))
    torch.testing.assert_close(found.double(), want, atol=LIMIT[dtype], rtol=LIMIT[dtype])
    got = torch.autograd.grad(found, qkv, dout)
    for x, y in zip(got, torch.autograd.grad(want, exact, dout.double()), strict=True):
        torch.testing.assert_close(x.double(), y, atol=4 * LIMIT[dtype], rtol=4 * LIMIT[dtype])


@pytest.mark.parametrize("q_len", [1, 3, Q_LEN])
@pytest.mark.parametrize(
    ("name", "dtype"), [*OFTEN.items(), pytest.param("blocks", "float32", marks=pytest.mark.exhaustive)]
)
def test_hidden_keys_and_values_may_be_anything(name, dtype, q_len):
    mask, tables = MASKS[name]
    att = fk.compile(mask, backend="native", **tables)
    q, k, v, _ = arrays(dtype, q_len)
    want = att(q, k, v)
    hidden = ~fk.mask(mask, **tables).dense(q_len, KV_LEN).any((0, 1, 2))
    assert hidden.any()
    k[:, :, torch.from_numpy(hidden)] = float("inf")
    v[:, :, torch.from_numpy(hidden)] = float("nan")
    torch.testing.assert_close(att(q, k, v), want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("mask", "repeated"),
    [("blocks[q // 16, k // 16]", True), ("doc[q] == doc[k]", True), ("(q // 4) % 3 == k % 3", True),
     ("causal & doc[q] == doc[k]", False), ("q % 16 == k // 16", False), ("blocks[q // 16, k // 16] & k <= q", False)],
)  # fmt: skip
def test_rows_are_compared_where_neighbours_may_see_the_same(mask, repeated):
    plan = make_plan(ProgramExprs(as_mask(mask).expr))
    text = cpp.CppKernel(plan, Target("cpp", 96, 64), cpp.CppArrays(64, 64, "float32")).expressions()
    assert f"const bool REPEATED = {'true' if repeated else 'false'};" in text
