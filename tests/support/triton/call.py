"""Calls of the Triton forward in Triton's interpreter, on tensors in poisoned memory, and their reference."""

import numpy as np
import torch
from support import attention_cases as cases
from support.triton import bf16 as triton_bf16

from frisket.lowering import dense
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import RATE, SEED, KernelInputs, ProgramFacts, make_plan, survives
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton import torch as triton_torch

triton_bf16.install()
DROPPED = {SEED: 11, RATE: 0.3}


def poisoned(array, dtype, layout="bhsd", by=1):
    """The array as a torch tensor of odd strides, or of multiples of `by`, with NaN (or nonsense) all around it."""
    axes = [("bhsd" if array.ndim == 4 else "bhsd"[: array.ndim]).index(c) for c in layout]
    source = torch.as_tensor(np.array(array)).to(dtype).permute(axes)
    bad = float("nan") if dtype.is_floating_point else 1 if dtype is torch.bool else min(2**30, torch.iinfo(dtype).max)
    first, more = (3, 8) if by == 1 else (by, 2 * by)
    whole = torch.full([-(-n // by) * by + more for n in source.shape], bad, dtype=dtype)
    inner = whole[tuple(slice(first, first + n) for n in source.shape)]
    inner.copy_(source)
    return inner.permute([axes.index(i) for i in range(source.dim())])


def tensors(case, layout="bhsd", keys=None, by=1):
    """q, k, v [batch, heads, length, dim]; `keys` is the dtype of k and v, `by` what divides their strides."""
    own = getattr(torch, case.dtype)
    dtypes = own, keys or own, keys or own
    given = (np.asarray(x.astype("float32")).transpose(0, 2, 1, 3) for x in cases.arrays(case))
    return [poisoned(x, dtype, layout, by) for x, dtype in zip(given, dtypes, strict=True)]


def run(
    case, made=None, layout="bhsd", spans=None, keys=None, sinks=None, top=False, scale=None, by=1, stats=False,
    **target,
):  # fmt: skip
    made = made or cases.plan(case)
    tables = {
        n: poisoned(a, torch.as_tensor(np.asarray(a)).dtype, "bhsd"[: np.ndim(a)])
        for n, a in made.table_values(case.tables).items()
    }
    sinks = None if sinks is None else poisoned(sinks, torch.float32, "b")
    values = made.slot_values({**case.slots, **DROPPED}), tables, sinks
    target = Target("triton", *case.block, **target)
    inputs = KernelInputs(made, spans or cases.Source(case), cases.geometry(case), target, *values)
    return triton_torch.forward(inputs, *tensors(case, layout, keys, by), top=top, softmax_stats=stats)


def check(case, out, lse, top=None):
    want, want_lse = cases.reference(case)
    error = np.abs(out.double().numpy().transpose(0, 2, 1, 3) - want)
    assert error.max() <= cases.allowed(case)  # and so no NaN
    loose = 2e-6 if case.dtype == "float32" else 2e-2
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=loose, atol=loose)
    assert out.dtype == getattr(torch, case.dtype)
    assert lse.dtype == torch.float32


def with_everything(case, **target):
    """Sinks (one of them without weight), the largest scores and dropout, against the reference in float64."""
    sinks = np.linspace(-1, 2, case.heads).astype(np.float32)
    sinks[-1] = -np.inf
    limits = dict.fromkeys((*case.slots, *case.tables), 2.0**14)
    made = make_plan(ProgramExprs(case.mask, case.score), facts=ProgramFacts(limits=limits), keep_mask=survives())
    out, lse, top = run(case, made, sinks=sinks, top=True, **target)
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
    near, loose = (5e-6, 2e-6) if case.dtype == "float32" else (cases.allowed(case), 2e-2)
    np.testing.assert_allclose(out.numpy(), want, rtol=0, atol=near)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=loose, atol=loose)
    want_top = dense.top(q, k, dense.DenseCall(ProgramExprs(case.mask, case.score), **options))
    np.testing.assert_allclose(top.numpy(), want_top, rtol=loose, atol=loose)
