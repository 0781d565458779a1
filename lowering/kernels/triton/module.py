"""The Triton kernels of an attention as one module, to read: the forward and its backward."""

from __future__ import annotations

from collections.abc import Collection

from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import LoopPlan

from . import backward as triton_backward
from . import cotangents as triton_captured
from . import forward as triton_forward
from .writer import Dims, module

ARRAYS = frozenset("qkv")


def emit(
    plan: LoopPlan,
    target: Target,
    dims: Dims,
    *,
    grad_names: Collection[str] = ARRAYS,
    sinks: bool = False,
    listed: Collection[str] = (),
) -> str:
    """The text of forward and backward: `emit(plan, target, Dims(128, 128, "bfloat16"))` has the forward kernel, and
    the kernels of the gradients of the arrays, tables and slots in `grad_names`. A table lists the programs of the
    kernels that are `listed`, and behind each stands the one that combines parts of rows. Executors print the forward
    and the backward as modules of their own, when each is first called; the kernels are these. Of stored keys and
    values there is the forward alone."""
    optional = triton_forward.OptionalArrays(sinks=sinks)
    kernels = triton_forward.kernels(plan, target, dims, optional, listed="attention_forward" in listed)
    if not dims.kv_dtype and plan.weight is None and plan.pages is None:
        kernels += triton_backward.kernels(plan, target, dims, grad_names, dlse=False, listed=listed)
        kernels += triton_captured.kernels(plan, triton_captured.square(target), dims, grad_names)
    return module("Attention", plan, dims, kernels)
