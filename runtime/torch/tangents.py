"""Forward mode of attention on torch tensors: by kernels where a backend has them, else by torch's operators.

A tangent kernel computes out, lse and their tangents together, given tangents of q, k and v. It runs at the innermost
transform of torch.func, or under `forward_ad`, where all transforms around that are vmap. Autograd may record it: then
gradients of out and lse are a backward kernel's, and those of tangents are by `differentiable`, as all else is.
Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

from frisket.runtime.backends.base import RECORDS
from frisket.runtime.machine.cpp_build import BuildError, deferring, fall_back

from .autograd import gradients, mapped, recorded_gradients, refuse_changed, versions
from .differentiable import DifferentiableCall, below, dual
from .differentiable import attend as attend_recorded

if TYPE_CHECKING:
    from .ready import PreparedCall


def attend(ready: PreparedCall, seed: Any, largest: bool, *arrays: Any) -> tuple[Any, ...]:
    """(out, lse, top), with tangents, of q, k, v, sinks and the values of `ready.kv_inputs`, some of which have
    tangents; `largest` says whether top is asked for."""
    results = _by_kernel(ready, seed, largest, arrays)
    return attend_recorded(DifferentiableCall.of(ready, seed), *arrays) if results is None else results


def _by_kernel(ready: PreparedCall, seed: Any, largest: bool, arrays: Sequence[Any]) -> tuple[Any, ...] | None:
    """`attend` by a kernel; None where none can run it."""
    functorch: Any = torch._C._functorch
    pairs = [(None, None) if x is None else dual(x) for x in arrays]
    tangent = RECORDS[ready.inputs.target.backend].executors["torch"].tangent
    if tangent is None or ready.inputs.plan.weighted or any(t is not None for _, t in pairs[3:]):
        return None
    operands = [x for x, _ in pairs] + [None if t is None or t._is_zerotensor() else t for _, t in pairs[:3]]
    run = partial(_computed, tangent, ready, seed, largest)
    interpreters = retrieve_all_functorch_interpreters()
    # that of torch.func.jvp, or of forward_ad
    interpreter = interpreters.pop() if interpreters and interpreters[-1].key() == TransformType.Jvp else None
    if interpreter is not None:
        operands = [None if x is None else below(x, interpreter.level()) for x in operands]
    if any(i.key() != TransformType.Vmap for i in interpreters) or not all(map(_plain, operands)):
        return None
    # a backward under forward_ad has other tangents, which a Function would not see
    if interpreter is None and _learns(operands):
        return None
    try:
        with deferring(ready.falls_back), nullcontext() if interpreter is None else interpreter.lower():
            results = mapped(run, *operands)
    except BuildError as error:
        if not ready.falls_back:
            raise
        fall_back(error)
        return None
    if interpreter is not None:
        results = [functorch._wrap_for_grad(x, interpreter.level()) for x in results]
    out, lse, dout, dlse, *top = results
    make: Any = torch._VF._make_dual
    return make(out, dout, level=0), make(lse, dlse, level=0), *(top or [None])


def _plain(x: Any) -> bool:
    """Whether a kernel can read a tensor, below axes that vmap adds, and no outer tangent is lost."""
    functorch: Any = torch._C._functorch
    while x is not None and functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    if x is None:
        return True
    if functorch.is_legacy_batchedtensor(x):
        return False
    modes = torch._C._len_torch_dispatch_stack()
    known = not modes and type(x) in (Tensor, torch.nn.Parameter) and x.is_cpu and x.layout is torch.strided
    return bool(known and x.numel() and dual(x)[1] is None)


def _learns(operands: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)


def _computed(tangent: Any, ready: PreparedCall, seed: Any, largest: bool, *operands: Any) -> list[Tensor]:
    """out, lse, their tangents, and top where it is asked for, of the arrays of a call and the tangents of q, k and
    v."""
    if _learns(operands):
        results = Tangents.apply(tangent, ready, seed, largest, *operands)  # type: ignore[no-untyped-call]
    else:
        results = _run(tangent, ready, seed, operands, top=largest)[:5]
    return [x for x in results if x is not None]


def _run(tangent: Any, ready: PreparedCall, seed: Any, operands: Sequence[Any], **results: bool) -> Any:
    q, k, v, sinks, *values = operands[:-3]
    return tangent(ready.inputs_of(q.device, seed, sinks, values), q, k, v, operands[-3:], **results)


class Tangents(torch.autograd.Function):
    """(out, lse, dout, dlse, top) of (tangent, ready, seed, largest, *arrays, *tangents of q, k and v)."""

    @staticmethod
    def forward(ctx: Any, tangent: Any, ready: PreparedCall, seed: Any, largest: bool, *operands: Any) -> Any:
        results = _run(tangent, ready, seed, operands, top=largest, softmax_stats=True)
        out, lse, dout, dlse, top, softmax_stats = results
        ctx.ready, ctx.seed, ctx.versions = ready, seed, versions(ready)
        ctx.save_for_backward(out, lse, softmax_stats, *operands)
        ctx.set_materialize_grads(False)
        if top is not None:
            ctx.mark_non_differentiable(top)
        return out, lse, dout, dlse, top

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        refuse_changed(ctx)
        results, operands = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        arrays, needed = operands[:-3], ctx.needs_input_grad[4:]
        of_out, of_tangents = cotangents[:2], cotangents[2:4]
        if any(c is not None for c in of_tangents):
            grads = _through_form(DifferentiableCall.of(ctx.ready, ctx.seed), operands, cotangents[:4], needed)
            return None, None, None, None, *grads
        saved = *arrays[:4], *results, *arrays[4:]
        if not any(c is not None for c in of_out):
            return (None,) * len(ctx.needs_input_grad)
        run = partial(gradients, ctx.ready, ctx.seed, saved, needed=needed[:-3])
        grads = recorded_gradients(run, ctx.ready, ctx.seed, arrays, *of_out)
        return None, None, None, None, *grads, None, None, None


def _through_form(
    call: DifferentiableCall, operands: Sequence[Any], cotangents: Sequence[Any], needed: Sequence[bool]
) -> list[Any]:
    """The gradients of arrays and tangents, given the cotangents of out, lse, dout and dlse."""
    func: Any = torch.func

    def of_some(*some: Any) -> tuple[Any, ...]:
        rest = iter(some)
        whole = [next(rest) if need else x for x, need in zip(operands, needed, strict=True)]
        arrays, tangents = whole[:-3], whole[-3:]
        places = [i for i, t in enumerate(tangents) if t is not None]

        def of_varying(*varying: Any) -> tuple[Any, ...]:
            both = list(arrays)
            for i, x in zip(places, varying, strict=True):
                both[i] = x
            return attend_recorded(call, *both)[:2]

        primals = tuple(arrays[i] for i in places)
        results = func.jvp(of_varying, primals, tuple(tangents[i] for i in places))
        flat = (*results[0], *results[1])
        return tuple(x for x, c in zip(flat, cotangents, strict=True) if c is not None)

    pull = func.vjp(of_some, *(x for x, need in zip(operands, needed, strict=True) if need))[1]
    grads = iter(pull(tuple(c for c in cotangents if c is not None)))
    return [next(grads) if need else None for need in needed]
