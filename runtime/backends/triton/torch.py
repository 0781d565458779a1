"""Runs the Triton kernels on torch tensors: the forward, the backward, and the gradients of what is captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from frisket.dsl.errors import BackendError
from frisket.dsl.ir import walk
from frisket.grammar.memo import remember
from frisket.lowering.aten.captured import amounts, folded, units
from frisket.lowering.derive import Gradient, backward_of
from frisket.lowering.kernels.triton import backward as triton_backward
from frisket.lowering.kernels.triton import cotangents as triton_cotangents
from frisket.lowering.kernels.triton import forward as triton_forward
from frisket.lowering.kernels.triton.writer import Dims
from frisket.lowering.plan import Cotangents, ForwardResults, KernelInputs, SpanSource
from frisket.runtime.plans.device import Values

from . import grids
from .grids import NO_FLAGS, CapturedResult, Grid
from .launch import (
    KEPT,
    Access,
    KernelArgs,
    KernelModule,
    Launch,
    LaunchConfig,
    LaunchContext,
    TooLargeError,
    blocks,
    bound,
    emitted_kernels,
    far,
    near,
)
from .tiles import of_kernel

Tensor = Any
LETTERS = {"Q": "q", "K": "k", "V": "v", "Out": "o", "DOut": "g"}  # of strides
TENSORS = (*LETTERS, "Lse", "Low", "DLse", "Stats", "DQ", "DK", "DV")
CAPTURED_ARRAYS = {"Q": "q", "K": "k", "V": "v", "DOut": "g", "Stats": ""}


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
    """(out [batch, heads, q_len, v_dim], lse float32 [batch, heads, q_len], largest scores or None), with
    `softmax_stats` also the rounding error of lse, for torch tensors of any strides, q [batch, heads, q_len, head_dim]
    and k, v [batch, kv_heads, kv_len, dim], or where the plan has pages [pages, kv_heads, tokens of a page, dim].

    Spans may be None where the plan has closed-form bounds. Runs on CUDA and ROCm devices, and on the CPU in
    Triton's interpreter; BackendError where neither is possible.
    """
    spans, target, sinks = inputs.spans, inputs.target, inputs.sinks
    if far(q, k, v):
        q, k, v = (near(x, max(target.block_q, target.block_k)) for x in (q, k, v))
    context = bound(inputs.plan, spans, inputs.geometry, target, q, k)
    values = context.values(inputs.slots, inputs.tables)
    aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0
    described = target.descriptors and aligned and context.describes(q, k, v)
    kind = grids.ForwardKind(values.device_slots, sinks is not None, top, softmax_stats, described)
    return launched(context, kind, lambda: _launch(context, spans, kind), values, (q, k, v), sinks)


def launched(
    context: LaunchContext, kind: grids.ForwardKind, make: Make, values: KernelArgs, qkv: tuple[Tensor, ...], sinks: Any
) -> Results:
    """The results of a forward whose launches `make` lays out for calls of one kind."""
    import torch

    g, q = context.geometry, qkv[0]
    out = torch.empty((g.batch, g.heads, g.q_len, g.v_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((g.batch, g.heads, g.q_len), dtype=torch.float32, device=q.device)
    largest, lse_residual = (torch.empty_like(lse) if use else None for use in (kind.row_max, kind.lse_residual))
    more = [x for x in (largest, lse_residual) if x is not None]
    if sinks is not None:
        more.append(sinks.contiguous().resolve_neg())
    context.run(kind, make, values, *qkv, out, lse, *more)
    return (out, lse, largest, lse_residual) if kind.lse_residual else (out, lse, largest)


def _launch(context: LaunchContext, spans: SpanSource | None, kind: grids.ForwardKind) -> Launch | grids.DividedLaunch:
    g, plan = context.geometry, grids.forward_plan(context.plan, context.geometry)
    dims = context.dims(kind.device_slots)
    described = kind.described and triton_forward.describable(plan, dims)
    target = replace(context.target, descriptors=described)
    check_keys(dims, context.device)
    processors = grids.processors(context.device)
    chosen = grids.shares(plan, spans, g, target, dims, processors)
    if chosen is not None:
        return grids.Parts(context, plan, spans, chosen, kind)
    inputs: dict[str, Access] = {"Q": "q", "K": "k", "V": "v"}
    if described:
        inputs |= {n: block for n, block in blocks(g, target).items() if n in inputs}
    parts = grids.of_call(plan, spans, g, target, processors)
    kernels = emitted_kernels(triton_forward.emit, plan, target, dims, kind.optional, listed=parts is not None)
    if spans is not None and parts is not None:
        sums: dict[str, tuple[int, ...]] = {"Acc": (g.v_dim,), "Tops": (), "Totals": ()}
        names, slots = ("attention_forward", "attention_combine"), kind.device_slots
        return grids.RowLaunches(context, kernels, names, target, parts, spans.rows, inputs, sums, kind.tensors, slots)
    grid, tensors = grids.of_forward(g, target), inputs | kind.tensors
    config = LaunchConfig(kernels, "attention_forward", grid, target, tensors, kind.device_slots)
    return context.launch(config, records=None if spans is None else spans.rows)


def check_keys(dims: Dims, device: Any) -> None:
    """Raise where a GPU of NVIDIA is too old to convert keys of 8 bits."""
    import torch

    if dims.kv_dtype.startswith("float8") and device.type == "cuda" and not torch.version.hip:
        have = torch.cuda.get_device_capability(device)
        if have < (8, 9):
            raise BackendError(
                f"keys and values of {dims.kv_dtype} need compute capability 8.9, this GPU has {have[0]}.{have[1]}\n"
                "  convert them to the dtype of the queries"
            )


# -- the backward ------------------------------------------------------------------------------------


def backward(
    inputs: KernelInputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: ForwardResults,
    cotangents: Cotangents,
    *,
    grad_names: frozenset[str],
) -> dict[str, Tensor]:
    """Gradients of sum(dout * out) + sum(dlse * lse) by name, for the names in `grad_names`: "q", "k", "v" in the shape
    and dtype of the array, contiguous; tables and slots of the plan ("t0", "s1") in float32.

    q, k, v, out and dout have any strides. Where there were sinks, lse includes them, and that is all of them needed
    here; their own gradient is the caller's. A share of the weights is not read: it is in lse and its rounding error.
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
    if far(q, k, v, out, dout):
        backward_tiles = target.dq, target.dkv, target.dv, triton_backward.DELTA, triton_cotangents.square(target)
        rows = max(side for t in backward_tiles for side in ((t or target).block_q, (t or target).block_k))
        q, k, v, out, dout = (near(x, rows) for x in (q, k, v, out, dout))
    context = bound(inputs.plan, inputs.spans, g, target, q, k)
    read = context.values(slots, tables)
    kind = BackwardKind(read.device_slots, grad_names, dlse is not None, _described(context, q, k, v, dout))
    stats = torch.empty((*lse.shape, 4), dtype=torch.float32, device=q.device)
    lse_residual = torch.zeros_like(lse) if results.lse_residual is None else lse_residual_of(results.lse_residual)
    operands = {"Q": q, "K": k, "V": v, "Out": out, "DOut": dout, **{f"D{n.upper()}": x for n, x in grads.items()}}
    operands |= {"Lse": lse.contiguous(), "Low": lse_residual.contiguous(), "Stats": stats}
    operands["DLse"] = None if dlse is None else dlse.to(torch.float32).contiguous().resolve_neg()
    make = partial(_BackwardLaunches, context, inputs.spans, q, k, kind)
    buffers = context.run(("backward", kind), make, read, operands)
    if not values:
        return grads
    every = backward_of(inputs.plan).gradients
    more = [x for x in every if x.source in grad_names and x.over in ("diagonal", "scatter")]
    if more:
        buffers |= dict(zip(more, captured(inputs, q, k, v, dout, stats, more), strict=True))
    folds = folded(list(buffers), list(buffers.values()), context.placed, slots, tables)
    return grads | folds | _zeros(values - folds.keys(), tables, lse)


def _described(context: LaunchContext, *arrays: Tensor) -> bool:
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


class _BackwardLaunches:
    """The kernels of calls of one kind."""

    def __init__(
        self, context: LaunchContext, spans: SpanSource | None, q: Tensor, k: Tensor, kind: BackwardKind
    ) -> None:
        device_slots, grad_names, dlse, _ = kind
        g, target, dims = context.geometry, context.target, context.dims(device_slots)
        plan = grids.backward_plan(context.plan, g)
        described = kind.described and triton_forward.describable(plan, dims)
        target = target if described else target.everywhere(descriptors=False)
        self.geometry = g
        processors = grids.processors(context.device)
        parts = {"attention_dq": grids.of_call(plan, spans, g, target.dq or target, processors)}
        for n in grids.walking_queries(target):
            parts[n] = grids.of_call(plan, spans, g, of_kernel(n, target), processors, walked=True)
        listed = frozenset(n for n, x in parts.items() if x is not None)
        self.module = emitted_kernels(triton_backward.emit, plan, target, dims, grad_names, dlse=dlse, listed=listed)
        self.sums = triton_cotangents.sums(plan, grad_names)
        plain = LaunchContext(triton_backward.bare(plan), g, target, q, k)  # attention_delta reads no slots, no tables
        self.nothing = plain.values({}, {})
        self.steps = []
        for step in grids.of_backward(g, target, self.module.kernels):
            if not step.side:
                self.steps.append(self._step(plain, step))
                continue
            records = spans and getattr(spans, step.side)
            self.steps.append(self._step(context, step, parts[step.name], records=records, device_slots=device_slots))

    def _step(
        self,
        context: LaunchContext,
        step: grids.LaunchStep,
        parts: grids.RowParts | None = None,
        records: Any = None,
        device_slots: tuple[str, ...] = (),
    ) -> tuple[Launch | grids.RowLaunches, list[str]]:
        """A launch, and the tensors it takes."""
        letters = {**dict.fromkeys((*TENSORS, *(s.buffer for s in self.sums)), ""), **LETTERS}
        names = [n for n in self.module.kernels[step.name].arg_names if n in letters]
        tensors: dict[str, Access] = {n: letters[n] for n in names}
        if step.tile.descriptors:
            tensors |= {n: block for n, block in blocks(self.geometry, step.tile).items() if n in names}
        if parts is None:
            config = LaunchConfig(self.module, step.name, step.grid, step.tile, tensors, device_slots)
            return context.launch(config, records=records), names
        both, g = (step.name, f"{step.name}_sums"), self.geometry
        written = [n for n in self.module.kernels[both[1]].arg_names if n in tensors]
        read = [n for n in names if n not in written]
        inputs, results = ({n: tensors[n] for n in some} for some in (read, written))
        widths = {"DQ": g.head_dim, "DK": g.head_dim, "DV": g.v_dim}
        totals = g.heads // g.kv_heads if step.side == "columns" else 1  # of other gradients, one for each head
        sums: dict[str, tuple[int, ...]] = {"Acc": (sum(widths.get(n, totals) for n in written),)}
        run = grids.RowLaunches(
            context, self.module, both, step.tile, parts, records, inputs, sums, results, device_slots
        )
        return run, [*read, *written]

    def __call__(self, read: KernelArgs, operands: dict[str, Tensor]) -> dict[Gradient, Tensor]:
        """Run them all; the sums of captured gradients, shaped as `derive.Gradient` says."""
        import torch

        g, like = self.geometry, operands["Stats"]
        for s in self.sums:
            length = g.q_len if s.along == "q" else g.kv_len
            operands[s.buffer] = torch.empty((g.batch, g.heads, length), dtype=torch.float32, device=like.device)
        for run, names in self.steps:
            run(self.nothing if run is self.steps[0][0] else read, *(operands[n] for n in names))
        whole = {s.gradient: operands[s.buffer] for s in self.sums}
        # one number from all rows of a head: in float32 the sum would round once a row
        return {x: t.sum(-1, dtype=torch.float64).float() if x.over == "head" else t for x, t in whole.items()}


# -- captured gradients that no row or column of tiles can sum: "diagonal" and "scatter" ---------------


def captured(
    inputs: KernelInputs, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, stats: Tensor, gradients: Sequence[Gradient]
) -> list[Tensor]:
    """One buffer for each of `gradients`, in their order, float32 and of the shape `derive.Gradient` describes.

    `stats` is float32 [batch, heads, q_len, 4], contiguous, as `attention_delta` writes it: of every row lse in log2
    units, the factor of its weights, and delta. q, k, v and dout have any strides, and one dtype.

    Equal calls give equal bits where the inputs are `deterministic`. Elsewhere tables that are read at any places are
    added to with atomics in float32, in one pass instead of two in fixed point (how exact that is:
    lowering/aten/captured.py).
    """
    import torch

    deterministic = inputs.deterministic or torch.are_deterministic_algorithms_enabled()
    context = bound(inputs.plan, inputs.spans, inputs.geometry, triton_cotangents.square(inputs.target), q, k)
    run = _CapturedRun(context, inputs, (q, k, v, dout, stats))
    try:
        buffers = run.buffers(gradients, deterministic)
    except TooLargeError as error:
        context.shrink(error)
        return captured(inputs, q, k, v, dout, stats, gradients)
    return [buffers[g] for g in gradients]


class _CapturedRun(grids.CapturedKernels):
    """The launches of one call."""

    def __init__(self, context: LaunchContext, inputs: KernelInputs, arrays: tuple[Tensor, ...]) -> None:
        self.context, self.spans, self.arrays = context, inputs.spans, arrays
        self.plan, self.geometry, self.tile = context.plan, context.geometry, context.target
        self.slots, self.tables = inputs.slots, inputs.tables
        self.values = context.values(inputs.slots, inputs.tables)

    def run(
        self,
        emit: Callable[..., str],
        parts: tuple[Any, ...],
        kernel: str,
        grid: Grid,
        result: CapturedResult,
        *,
        flags: Mapping[str, bool] = NO_FLAGS,
        more: Values = NO_FLAGS,
        zeroed: bool = False,
        **numbers: Any,
    ) -> Tensor:
        import torch

        (name, shape), context, device_slots = result, self.context, self.values.device_slots
        key = kernel, parts, tuple(flags.items()), device_slots
        launch = context.launches.get(key)
        if launch is None:
            kernels = emitted_kernels(emit, self.plan, self.tile, context.dims(device_slots), *parts, **flags)
            launch = context.launches[key] = self.launch(kernels, kernel, grid, (name, *more), numbers)
        dtype = torch.int64 if name == "Counted" else torch.float32
        into = (torch.zeros if zeroed else torch.empty)(tuple(shape), dtype=dtype, device=self.arrays[0].device)
        launch(self.values, *self.arrays, into, *more.values())
        return into

    def launch(
        self, kernels: KernelModule, kernel: str, grid: Grid, pointers: Sequence[str], numbers: Values
    ) -> Launch:
        """A launch that is kept for such calls; `pointers` come after the arrays."""
        arrays: dict[str, Access] = {**CAPTURED_ARRAYS, **dict.fromkeys(pointers, "")}
        config = LaunchConfig(kernels, kernel, grid, self.tile, arrays, self.values.device_slots)
        return self.context.launch(config, records=None if self.spans is None else self.spans.rows, **numbers)

    def padded(self, x: Tensor, before: int, behind: int) -> Tensor:
        from torch.nn.functional import pad

        return pad(x, (0, 0, before, behind))

    def in_fixed_point(self, total: Tensor, shape: tuple[int, ...], count: Callable[..., Tensor]) -> Tensor:
        import torch

        per = units(total.sum(dtype=torch.float64))
        return amounts(count(("Counted", shape), per), per).float()

    def plane(self, gradient: Gradient) -> str | None:
        read = {e.name for e in walk(*gradient.index) if e.op == "param"}  # not a seed, which is another in every step
        shape = self.tables[gradient.source].shape
        key = gradient, shape, *[(n, x) for n, x in self.slots.items() if n in read and not hasattr(x, "data_ptr")]
        known = self.context.planes
        if key not in known:
            remember(known, key, super().plane(gradient), KEPT)
        return known[key]
