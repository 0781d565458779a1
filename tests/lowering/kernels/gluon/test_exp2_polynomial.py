"""Exponentials of the forward on Blackwell that are a polynomial: coefficients, error, and which tiles take it."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.attention_cases import Case, causal
from support.gluon import language
from support.gluon.call import check, install, run, tensors
from support.gluon.numbers import F32, Tensor

from frisket.dsl import ir
from frisket.dsl.ir import param
from frisket.dsl.sugar import function, h, k, q, score, where
from frisket.dsl.types import FLOAT
from frisket.lowering.architectures import architecture_of
from frisket.lowering.kernels.gluon.forward import EXP2, by_polynomial, emit
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import make_plan, survives
from frisket.lowering.simplify import ProgramExprs

BOUND = 2.5e-7  # relative; rounding to bfloat16 is up to 2**-9, or 2e-3, and to float16 5e-4
ON = Target("gluon", 256, 64, 4, 2, arch="sm_100")


@pytest.fixture(scope="module")
def exp2():
    """The function of a kernel's text, on float32."""
    made = language.kernels(emit(make_plan(ProgramExprs(causal)), ON, Dims(64, 64, "bfloat16")))["exp2_polynomial"]

    def found(x):
        with np.errstate(all="ignore"):
            return made(Tensor(np.asarray(x, np.float32), F32)).data

    return found


def least_error(degree):
    """The coefficients of the polynomial with the least relative error to 2**x for -0.5 <= x <= 0.5, and that error: by
    the exchange of Remez, whose errors at `degree + 2` points are equal and of alternating signs."""
    grid = np.linspace(-0.5, 0.5, 100_001)
    at = -0.5 * np.cos(np.pi * np.arange(degree + 2) / (degree + 1))
    for _ in range(8):
        signs = (-1.0) ** np.arange(degree + 2)
        rows = np.column_stack([np.vander(at, degree + 1, increasing=True) / np.exp2(at)[:, None], signs])
        *found, _ = np.linalg.solve(rows, np.ones(degree + 2))
        error = np.polynomial.polynomial.polyval(grid, found) / np.exp2(grid) - 1
        parts = np.split(np.arange(grid.size), np.flatnonzero(np.diff(np.sign(error))) + 1)
        at = np.array([grid[p[np.abs(error[p]).argmax()]] for p in parts])
    return np.array(found), np.abs(error).max()


def test_coefficients_are_those_of_the_least_error():
    found, error = least_error(len(EXP2) - 1)
    assert 7.4e-8 < error < 7.6e-8
    np.testing.assert_allclose(EXP2, found / found[0], rtol=6e-8)  # to float32
    assert least_error(len(EXP2) - 2)[1] > 2**-20  # a degree less would be seen in lse


def test_error_over_the_range(exp2):
    x = np.linspace(-126, 9, 2_000_001).astype(np.float32)  # scores may exceed the maximum so far by 8
    exact = np.exp2(x.astype(np.float64))
    assert np.abs(exp2(x) / exact - 1).max() < BOUND
    # with products and sums rounded at once, as the compiler joins them
    rest = (x - np.round(x)).astype(np.float64)
    made = np.full(x.shape, EXP2[-1], np.float32)
    for c in EXP2[-2::-1]:
        made = (made * rest + np.float32(c)).astype(np.float32)
    assert np.abs(made * np.exp2(np.round(x).astype(np.float64)) / exact - 1).max() < BOUND


def test_ends_of_the_range(exp2):
    assert (exp2([-np.inf, -3.4e38, -1e6, -200.0, -127.0, -126.51]) == 0).all()
    assert (exp2(np.arange(-126.0, 128.0)) == np.exp2(np.arange(-126.0, 128.0))).all()
    assert np.isnan(exp2([np.nan, np.inf - np.inf])).all()
    x = np.linspace(-130, -126, 1001)
    assert np.abs(exp2(x) - np.exp2(x)).max() <= 2**-126.5


SOFTCAP = 50 * function("tanh", score / 50)
ALIBI = score + ir.lookup("slope", (h,), FLOAT) * ir.to_float(k - q)
SHARES = [
    ([], 10),
    ([score + param("c", FLOAT)], 8),
    ([SOFTCAP], 16),
    ([ALIBI], 0),
    ([score + ir.lookup("bias", (h, q - k), FLOAT)], 0),
    ([survives()], 0),
]


@pytest.mark.parametrize(("roots", "share"), SHARES)
def test_columns_that_are_polynomials(roots, share):
    assert by_polynomial(roots) == share


def test_a_unit_of_twice_the_rate_needs_fewer_polynomials():
    """An exp2 takes MUFU of a B300 as long as its other instructions take issue. A tanh has no other rate there."""
    twice = architecture_of("sm_103").exp2
    assert 2 * twice == architecture_of("sm_100").exp2
    assert [by_polynomial(roots, 0, twice) for roots, _ in SHARES] == [0, 0, 16, 0, 0, 0]
    text = emit(make_plan(ProgramExprs(causal)), replace(ON, arch="sm_103"), Dims(64, 64, "bfloat16"))
    assert "exp2_polynomial" not in text


# Plans, and the columns of 32 in a border tile and in a full one.
WINDOW = causal & (q - k < param("w"))
TILES = {
    "causal": (make_plan(ProgramExprs(causal)), 4, 10),
    "causal, soft cap": (make_plan(ProgramExprs(causal, SOFTCAP)), 16, 16),
    "window": (make_plan(ProgramExprs(WINDOW)), 0, 10),
    "remainder": (make_plan(ProgramExprs(causal & (k % 7 > 0))), 0, 10),
    "alibi": (make_plan(ProgramExprs(causal, ALIBI)), 0, 0),
    "dropout": (make_plan(ProgramExprs(causal), keep_mask=survives()), 0, 0),
}


@pytest.mark.parametrize("name", TILES)
def test_border_tiles_have_fewer(name):
    plan, *shares = TILES[name]
    text = emit(plan, ON, Dims(64, 64, "bfloat16"))
    found = [re.findall(r"% 32 < (\d+), exp2_polynomial", part) for part in text.split("# Full tiles")]
    assert found == [[str(share)] * (share > 0) for share in shares]
    assert ("def exp2_polynomial" in text) == (shares[1] > 0)


ALL = Case(None, q_len=70, kv_len=320, heads=1, kv_heads=1, sizes=(1, 1, 320, 320), dtype="bfloat16", block=(256, 64))
MODS = {
    "none": None,
    "softcap": SOFTCAP,
    "shifted": score + 3.0,
    "rows that see nothing": where(q < 40, ir.NEG_INF, score),
    "scores that rise": score + 0.2 * ir.to_float(k),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MODS)
def test_polynomial_exponentials_on_full_tiles_are_accurate(monkeypatch, name, dtype):
    install(monkeypatch)
    case = ALL.but(score=MODS[name], dtype=dtype)
    check(case, *run(case, arch="sm_100"))


@pytest.mark.parametrize("column", [3, 20])
def test_nan_of_a_key_reaches_those_that_see_it(monkeypatch, column):
    """By the polynomial and by the instruction alike."""
    install(monkeypatch)
    made = tensors(ALL)
    made[1][0, 0, 64 + column] = float("nan")
    monkeypatch.setattr("support.gluon.call.tensors", lambda *_: made)
    out, *_ = run(ALL, arch="sm_100")
    assert torch.isnan(out).all()
