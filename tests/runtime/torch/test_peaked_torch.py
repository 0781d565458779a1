"""Gradients of torch tensors of 16 bits where the softmax is peaked: as close to float64 as dense attention's."""

from __future__ import annotations

import pytest
from support import peaked

import frisket as fk
from frisket.runtime.machine import cpp_build as native_build

torch = pytest.importorskip("torch")
CPP = pytest.param("cpp", marks=pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason()))
HALVES = ["bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)]


def gradients(att, dtype):
    def run(*x):
        given = [torch.tensor(y).to(getattr(torch, dtype)).requires_grad_() for y in x]
        return [g.float().numpy() for g in torch.autograd.grad(att(*given), given, torch.ones_like(given[2]))]

    return run


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("backend", [CPP, "aten"])
def test_torch_gradients_of_peaked_rows_are_as_good_as_dense(backend, dtype):
    peaked.require(gradients(fk.compile("causal", backend=backend), dtype), dtype)


def test_flash_kernels_of_torch_run_where_no_row_is_peaked():
    """Blocks of 512 queries and more: torch's flash kernel takes delta from the out it gets, in float32 or rounded."""
    run = gradients(fk.compile("causal", backend="aten"), "bfloat16")
    peaked.require(run, scales=(1, 3), length=600, seeds=1)


@pytest.mark.parametrize("backend", [CPP])
def test_torch_func_gradients_of_peaked_rows_are_as_good(backend):
    att = fk.compile("causal", backend=backend)

    def run(*x):
        out, back = torch.func.vjp(att, *(torch.tensor(y).bfloat16() for y in x))
        return [g.float().numpy() for g in back(torch.ones_like(out))]

    peaked.require(run, scales=(3, 10))


@pytest.mark.parametrize("backend", [CPP])
@pytest.mark.parametrize("dtype", HALVES)
def test_check_fails_where_delta_comes_from_a_rounded_out(monkeypatch, backend, dtype):
    """As kernels did that noted two entries of each row, and nothing of what rounding left out of out."""
    q, k, v = (torch.tensor(x).to(getattr(torch, dtype)) for x in peaked.arrays(dtype, 10, 0))
    assert fk.compile("causal", backend=backend).check(q, k, v).good
    monkeypatch.setattr("frisket.runtime.backends.cpp.torch.norm_width", lambda *given: 2)
    with pytest.raises(fk.MismatchError, match="norm of dq"):
        fk.compile("causal", backend=backend).check(q, k, v)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", [CPP])
def test_sinks_dropout_and_odd_heads_of_peaked_rows_pass_check(backend):
    """Heads of an odd size, whose last number is alone in a pair; rows whose sink takes most of the weight."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = ((torch.randn(1, 2, 70, 15, generator=draw) * 10).bfloat16() for _ in range(3))
    att = fk.compile("causal", "score * slope[h]", backend=backend, dropout=0.1, slope=torch.tensor([0.7, 1.2]))
    att.check(q, k, v, seed=3, sinks=torch.tensor([40.0, -3.0])).require()
