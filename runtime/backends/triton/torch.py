"""Runs the Triton kernels on torch tensors: the forward, the backward, and the gradients of what is captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from frisket.dsl.errors import BackendError
from frisket.dsl.ir import walk
from frisket.grammar.memo import memo, remember
from frisket.lowering.aten.captured import amounts, folded, units
from frisket.lowering.derive import Gradient
from frisket.lowering.kernels.triton import backward as triton_backward
from frisket.lowering.kernels.triton import captured as triton_captured
from frisket.lowering.kernels.triton import forward as triton_forward
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.plan import Cotangents, ForwardResults, KernelInputs, Names, SpanSource
from frisket.runtime.plans.device import Values

from . import ahead, grids
from . import launch as launches
from .grids import EMPTY, CapturedLaunch

Tensor = Any
compiles = ahead.compile_together
sums_of = memo(group="kernels")(triton_backward.sums)  # asked at every call
Make = Callable[[], Any]  # lays out the launches of calls of one kind
Results = tuple[Tensor, Tensor, Tensor | None] | tuple[Tensor, Tensor, Tensor | None, Tensor]  # of a forward


class BackwardKind(NamedTuple):
    """The facts of a backward that its launches depend on, besides its plan, shapes and target."""

    device_slots: tuple[str, ...]
    grad_names: frozenset[str]
    dlse: bool
    described: bool


def forward(
    inputs: KernelInputs, q: Tensor, k: Tensor, v: Tensor, *, top: bool = False, softmax_stats: bool = False
) -> Results:
    """(out [batch, heads, q_len, v_dim], lse float32 [batch, heads, q_len], largest scores or None). With
    `softmax_stats` also the rounding error of lse. It takes torch tensors of any strides, q [batch, heads, q_len,
    head_dim] and k, v [batch, kv_heads, kv_len, dim]. Where the plan has pages k and v are [pages, kv_heads, tokens,
    dim].

    Spans may be None where the plan has closed-form bounds. Runs on CUDA and ROCm devices, and on the CPU in
    Triton's interpreter; BackendError where neither is possible.
    """
    spans, target, sinks = inputs.spans, inputs.target, inputs.sinks
    if launches.far(q, k, v):
        q, k, v = (launches.near(x, max(target.block_q, target.block_k)) for x in (q, k, v))
    context = launches.bound(inputs.plan, spans, inputs.geometry, target, q, k)
    values = context.values(inputs.slots, inputs.tables)
    aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0
    described = target.descriptors and aligned and context.describes(q, k, v)
    shared = launches.shares_values(k, v)
    kind = grids.ForwardKind(values.device_slots, sinks is not None, top, softmax_stats, described, shared)
    return launched(context, kind, partial(_forward_program, context, spans, kind), values, (q, k, v), sinks)


def launched(
    context: launches.LaunchContext,
    kind: grids.ForwardKind,
    make: Make,
    values: launches.KernelArgs,
    qkv: tuple[Tensor, ...],
    sinks: Any,
) -> Results:
    """The results of a forward whose launches `make` lays out for calls of one kind."""
    import torch

    g, (q, k, v) = context.geometry, qkv
    dtype = torch.bfloat16 if q.itemsize == 1 else q.dtype
    out = torch.empty((g.batch, g.heads, g.q_len, g.v_dim), dtype=dtype, device=q.device)
    lse = torch.empty((g.batch, g.heads, g.q_len), dtype=torch.float32, device=q.device)
    tensors = {"Q": q, "K": k, "V": v, "Out": out, "Lse": lse}
    if kind.row_max:
        tensors["Top"] = torch.empty_like(lse)
    if kind.lse_residual:
        tensors["Low"] = torch.empty_like(lse)
    if sinks is not None:
        tensors["Sinks"] = sinks.contiguous().resolve_neg()
    context.run(kind, make, values, tensors)
    results = out, lse, tensors.get("Top")
    return (*results, tensors["Low"]) if kind.lse_residual else results


def _forward_program(
    context: launches.LaunchContext, spans: SpanSource | None, kind: grids.ForwardKind
) -> launches.LaunchSequence:
    g, plan = context.geometry, grids.forward_plan(context.plan, context.geometry, context.target.invariant)
    dims, processors = context.dims(kind.device_slots), grids.processors(context.device)
    check_keys(dims, context.device)
    target = replace(context.target, descriptors=kind.described and triton_forward.describable(plan, dims))
    program = kind.program(plan, spans, g, target, dims, processors)
    module = launches.emitted_kernels(program.emit, plan, *program.parts, **program.flags)
    return launches.LaunchSequence([launches.Launch(context, module, step, spans) for step in program.steps])


def check_keys(dims: Dims, device: Any) -> None:
    """Raise where a GPU of NVIDIA is too old to convert keys of 8 bits."""
    import torch

    if dims.fp8 and device.type == "cuda" and not torch.version.hip:
        have = torch.cuda.get_device_capability(device)
        if have < (8, 9):
            raise BackendError(
                f"keys and values of {dims.kv_dtype} need compute capability 8.9, this GPU has {have[0]}.{have[1]}\n"
                "  convert them to the dtype of the queries"
            )


# -- the backward ------------------------------------------------------------------------------------


def backward(
    inputs: KernelInputs, q: Any, k: Any, v: Any, results: ForwardResults, cotangents: Cotangents, *, grad_names: Names
) -> dict[str, Tensor]:
    """Gradients of sum(dout * out) + sum(dlse * lse) by name, for the names in `grad_names`: "q", "k", "v" in the shape
    and dtype of the array, contiguous. Tables and slots of the plan ("t0", "s1") in float32.

    q, k, v, out and dout have any strides. Where there were sinks, lse includes them, and that is all of them needed
    here; their own gradient is the caller's. A share of the weights is not read: it is in lse and its rounding error.
    Of weighted rows out and lse are not read: dout is that of the rows before their division, and dlse the cotangent of
    the sums of weights.
    Equal calls give equal bits; unless the inputs are `deterministic`, gradients of tables that are read by position
    may be added up in any order.
    """
    import torch

    g, target, slots, tables = inputs.geometry, inputs.target, inputs.slots, inputs.tables
    out, lse, dout, dlse = results.out, results.lse, cotangents.dout, cotangents.dlse
    arrays = {"q": q, "k": k, "v": v}
    grads = {n: torch.empty(x.shape, dtype=x.dtype, device=x.device) for n, x in arrays.items() if n in grad_names}
    values = grad_names - arrays.keys()
    if 0 in (g.batch, g.q_len, g.kv_len):
        return {n: x.zero_() for n, x in grads.items()} | _zeros(values, tables, lse)
    # strides of 0: zeros of the shape without its memory
    dout = out.new_zeros(()).expand(out.shape) if dout is None else dout
    if dlse is None and dout.stride(3) == 0:
        dout = dout.contiguous()  # the gradient of a sum: the kernels for dense cotangents serve it
    if launches.far(q, k, v, out, dout):
        backward_tiles = target.dq, target.dkv, target.dv, triton_backward.DELTA, triton_captured.square(target)
        rows = max(side for t in backward_tiles for side in ((t or target).block_q, (t or target).block_k))
        q, k, v, out, dout = (launches.near(x, rows) for x in (q, k, v, out, dout))
    context = launches.bound(inputs.plan, inputs.spans, g, target, q, k)
    read = context.values(slots, tables)
    kind = BackwardKind(read.device_slots, grad_names, dlse is not None, _described(context, q, k, v, dout))
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous().resolve_neg()
    if inputs.plan.weighted:
        stats = torch.zeros(lse.shape, dtype=torch.float32, device=q.device) if dlse is None else dlse
    else:
        stats = torch.empty((*lse.shape, 4), dtype=torch.float32, device=q.device)
    lse_residual = torch.zeros_like(lse) if results.lse_residual is None else lse_residual_of(results.lse_residual)
    tensors = {"Q": q, "K": k, "V": v, "Out": out, "DOut": dout, **{f"D{n.upper()}": x for n, x in grads.items()}}
    tensors |= {"Lse": lse.contiguous(), "Low": lse_residual.contiguous(), "Stats": stats}
    if dlse is not None:
        tensors["DLse"] = dlse
    totals = sums_of(grids.backward_plan(inputs.plan, g), grad_names) if values else []
    shapes = grids.shapes_of(totals, g)
    tensors |= {n: torch.empty(x, dtype=torch.float32, device=q.device) for n, x in shapes.items()}
    context.run(("backward", kind), partial(_backward_program, context, inputs.spans, kind), read, tensors)
    if not values:
        return grads
    buffers = {s.gradient: tensors[s.buffer] for s in totals}
    # one number from all rows of a head: in float32 the sum would round once a row
    buffers |= {x: t.sum(-1, dtype=torch.float64).float() for x, t in buffers.items() if x.over == "head"}
    if more := grids.by_position(inputs.plan, grad_names):
        buffers |= dict(zip(more, captured(inputs, q, k, v, dout, stats, more), strict=True))
    folds = folded(list(buffers), list(buffers.values()), context.placed, slots, tables)
    return grads | folds | _zeros(values - folds.keys(), tables, lse)


def _described(context: launches.LaunchContext, *arrays: Tensor) -> bool:
    """Whether some kernel wants q, k, v and dout as tensor descriptors, and they can be read so."""
    target = context.target
    descriptors = any((t or target).descriptors for t in (target.dq, target.dkv, target.dv or target.dkv))
    return descriptors and all(x.data_ptr() & 15 == 0 for x in arrays) and context.describes(*arrays)


def lse_residual_of(residual: Tensor) -> Tensor:
    """[batch, heads, q_len], of what a graph knows of rows, [batch, heads, q_len, 2], too."""
    return residual if residual.ndim == 3 else residual[..., 0]


def _zeros(names: frozenset[str], tables: Values, like: Tensor) -> dict[str, Tensor]:
    """Gradients of values without influence."""
    import torch

    shapes = {n: tables[n].shape if n in tables else () for n in names}
    return {n: torch.zeros(shape, dtype=torch.float32, device=like.device) for n, shape in shapes.items()}


def _backward_program(
    context: launches.LaunchContext, spans: SpanSource | None, kind: BackwardKind
) -> launches.LaunchSequence:
    g, target, dims = context.geometry, context.target, context.dims(kind.device_slots)
    plan = grids.backward_plan(context.plan, g)
    if not (kind.described and triton_forward.describable(plan, dims)):
        target = target.everywhere(descriptors=False)
    parts = grids.of_kernels(grids.OF_GRADIENTS, plan, spans, g, target, grids.processors(context.device))
    flags: dict[str, Any] = {"dlse": kind.dlse, "listed": frozenset(parts)}
    module = launches.emitted_kernels(triton_backward.emit, plan, target, dims, kind.grad_names, **flags)
    parameters = {n: x.arg_names for n, x in module.kernels.items()}
    steps = grids.of_backward(g, target, parameters, sums_of(plan, kind.grad_names), parts)
    return launches.LaunchSequence([launches.Launch(context, module, step, spans) for step in steps])


# -- captured gradients that no row or column of tiles can sum: "diagonal" and "scatter" ---------------


def captured(
    inputs: KernelInputs, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, stats: Tensor, gradients: Sequence[Gradient]
) -> list[Tensor]:
    """One buffer for each of `gradients`, in their order, float32 and of the shape `derive.Gradient` describes.

    `stats` is float32 [batch, heads, q_len, 4], contiguous, as `attention_delta` writes it: of every row lse in log2
    units, the factor of its weights, and delta. Of weighted rows [batch, heads, q_len], the cotangent of the sum of
    weights. q, k, v and dout have any strides, and one dtype.

    Equal calls give equal bits where the inputs are `deterministic`. Elsewhere tables that are read at any places are
    added to with atomics in float32, in one pass instead of two in fixed point (how exact that is:
    lowering/aten/captured.py).
    """
    import torch

    deterministic = inputs.deterministic or torch.are_deterministic_algorithms_enabled()
    context = launches.bound(inputs.plan, inputs.spans, inputs.geometry, triton_captured.square(inputs.target), q, k)
    run = _CapturedRun(context, inputs, {"Q": q, "K": k, "V": v, "DOut": dout, "Stats": stats})
    try:
        buffers = run.buffers(gradients, deterministic)
    except launches.TooLargeError as error:
        context.shrink(error)
        return captured(inputs, q, k, v, dout, stats, gradients)
    return [buffers[g] for g in gradients]


class _CapturedRun(grids.CapturedKernels):
    """The launches of one call; `tensors` go by the kernels' names."""

    def __init__(self, context: launches.LaunchContext, inputs: KernelInputs, tensors: dict[str, Tensor]) -> None:
        self.context, self.spans, self.tensors = context, inputs.spans, tensors
        self.plan, self.geometry, self.tile = context.plan, context.geometry, context.target
        self.slots, self.tables = inputs.slots, inputs.tables
        self.values = context.values(inputs.slots, inputs.tables)

    def run(self, launch: CapturedLaunch, operands: Values = EMPTY) -> Tensor:
        import torch

        context, device_slots = self.context, self.values.device_slots
        key = launch.step.name, launch.parts, device_slots
        program = context.launches.get(key)
        if program is None:
            module = launches.emitted_kernels(
                launch.emit, self.plan, self.tile, context.dims(device_slots), *launch.parts
            )
            program = context.launches[key] = launches.LaunchSequence(
                [launches.Launch(context, module, launch.step, self.spans)]
            )
        dtype = torch.int64 if launch.result == "Counted" else torch.float32
        result = (torch.zeros if launch.zeroed else torch.empty)(launch.shape, dtype=dtype, device=context.device)
        program(self.values, {**self.tensors, launch.result: result, **operands})
        return result

    def padded(self, x: Tensor, before: int, behind: int) -> Tensor:
        from torch.nn.functional import pad

        return pad(x, (0, 0, before, behind))

    def in_fixed_point(self, total: Tensor, count: CapturedLaunch) -> Tensor:
        import torch

        per = units(total.sum(dtype=torch.float64))
        return amounts(self.run(count, {"PerUnit": per}), per).float()

    def plane(self, gradient: Gradient) -> str | None:
        read = {e.name for e in walk(*gradient.index) if e.op == "param"}  # not a seed, which is another in every step
        shape = self.tables[gradient.source].shape
        key = gradient, shape, *[(n, x) for n, x in self.slots.items() if n in read and not hasattr(x, "data_ptr")]
        known = self.context.planes
        if key not in known:
            remember(known, key, super().plane(gradient), launches.KEPT)
        return known[key]
