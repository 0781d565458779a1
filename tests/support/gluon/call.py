"""Calls of the Gluon forward in the interpreter of this folder, and their reference."""

from types import SimpleNamespace

import numpy as np
import torch
from support import attention_cases as cases
from support.gluon import language

from frisket.dsl.ir import COORDINATES, SIZES
from frisket.lowering import dense
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import RATE, SEED, KernelInputs, ProgramFacts, make_plan, survives
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.gluon import torch as gluon_launch
from frisket.runtime.backends.triton import launch as triton_launch

DROPPED = {SEED: 11, RATE: 0.3}
EMITTED = triton_launch.emitted_kernels.__wrapped__


def install(monkeypatch, change=str, seed=0, late=True):
    """Texts are executed by the interpreter from here on, `change`d before; their schedules are drawn from `seed`."""
    monkeypatch.setattr(language, "SEED", seed)
    monkeypatch.setattr(language, "LATE", late)
    monkeypatch.setattr(triton_launch, "emitted_kernels", EMITTED)
    monkeypatch.setattr(triton_launch, "loaded_kernels", lambda text: SimpleNamespace(**language.kernels(change(text))))


def tensors(case, layout="bhsd"):
    """q, k and v with NaN behind every axis: copies that go too far are seen."""
    made = []
    for x in cases.arrays(case):
        source = torch.as_tensor(np.array(x, np.float32)).to(getattr(torch, case.dtype))
        axes = ["bshd".index(c) for c in layout]
        source = source.permute(axes)
        whole = torch.full([n + 8 for n in source.shape], float("nan"), dtype=source.dtype)
        inner = whole[tuple(slice(0, n) for n in source.shape)]
        inner.copy_(source)
        made.append(inner.permute([layout.index(c) for c in "bhsd"]))
    return made


def run(
    case, made=None, layout="bhsd", sinks=None, spans=None, stages=2, arch="sm_90", order="longest-first", **results
):
    made = made or cases.plan(case)
    tables = {n: torch.as_tensor(np.array(a)) for n, a in made.table_values(case.tables).items()}
    target = Target("gluon", *case.block, 4, stages, order=order, arch=arch)
    sinks = None if sinks is None else torch.as_tensor(sinks)
    values = made.slot_values({**case.slots, **DROPPED}), tables, sinks
    inputs = KernelInputs(made, spans or cases.Source(case), cases.geometry(case), target, *values)
    return gluon_launch.forward(inputs, *tensors(case, layout), **results)


def check(case, out, lse, *_):
    want, want_lse = cases.reference(case)
    error = np.abs(out.double().numpy().transpose(0, 2, 1, 3) - want)
    assert error.max() <= cases.allowed(case)  # and so no NaN
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=2e-6, atol=3e-6)  # products are exact, sums are float32
    assert out.dtype == getattr(torch, case.dtype)


def with_everything(case, **more):
    """Sinks (one of them without weight), the largest scores and dropout, against the reference in float64."""
    sinks = np.linspace(-1, 2, case.heads).astype(np.float32)
    sinks[-1] = -np.inf
    limits = dict.fromkeys((*COORDINATES, *SIZES, *case.slots, *case.tables), 2.0**14)
    made = make_plan(ProgramExprs(case.mask, case.score), facts=ProgramFacts(limits=limits), keep_mask=survives())
    out, lse, top, lse_residual = run(case, made, sinks=sinks, top=True, softmax_stats=True, **more)
    q, k, v = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in cases.arrays(case))
    options = {
        "scale": case.dim**-0.5,
        "params": {**case.slots, **DROPPED},
        "tables": case.tables,
        "problem": case.problem,
        "sinks": sinks,
    }
    want, want_lse = dense.attention(
        q,
        k,
        v,
        dense.DenseCall(ProgramExprs(case.mask, case.score), keep_mask=survives(), rate=DROPPED[RATE], **options),
    )
    assert np.abs(out.double().numpy() - want).max() <= 2 * cases.allowed(case)  # weights are 1 / 0.7 of these
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=2e-6, atol=3e-6)
    want_top = dense.top(q, k, dense.DenseCall(ProgramExprs(case.mask, case.score), **options))
    np.testing.assert_allclose(top.numpy(), want_top, rtol=2e-6, atol=3e-6)
    exact = np.where(np.isfinite(want_lse), want_lse, 0.0)
    rounded = np.where(np.isfinite(lse.numpy()), lse.double().numpy(), 0.0)
    assert np.abs(rounded + lse_residual.numpy() - exact).max() < 3e-6
