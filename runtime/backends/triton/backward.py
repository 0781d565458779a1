"""Runs the Triton backward kernels on torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frisket.lowering.aten.captured import folded
from frisket.lowering.derive import Gradient, backward_of
from frisket.lowering.kernels.triton.backward import DELTA, bare, emit
from frisket.lowering.kernels.triton.cotangents import square, sums
from frisket.lowering.kernels.triton.forward import describable
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource, Target

from . import decode as triton_decode
from .arguments import Access, Bound, Launch, Values, blocks, bound, emitted_kernels, far, near
from .captured import captured
from .grids import LaunchStep, backward_plan, of_backward
from .rows import RowLaunches, RowParts, of_call, walking_queries
from .tiles import of_kernel

Tensor = Any
LETTERS = {"Q": "q", "K": "k", "V": "v", "Out": "o", "DOut": "g"}  # of strides
TENSORS = (*LETTERS, "Lse", "Low", "DLse", "Stats", "DQ", "DK", "DV")


def backward(
    plan: LoopPlan, spans: SpanSource | None, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, dout: Tensor | None, dlse: Tensor | None, slots: Mapping[str, Any], tables: Mapping[str, Tensor],
    target: Target, *, grad_names: frozenset[str], sinks: Tensor | None = None, deterministic: bool = True,
    softmax_stats: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients of sum(dout * out) + sum(dlse * lse) by name, for the names in `grad_names`: "q", "k", "v" in the shape
    and dtype of the array, contiguous; tables and slots of the plan ("t0", "s1") in float32.

    q, k, v, out and dout have any strides. `out` and `lse` are the forward's: where there were `sinks`, lse includes
    them, and that is all of them needed here; their own gradient is the caller's. `softmax_stats` is the
    rounding error of lse, as the forward says. Equal calls give equal bits;
    without `deterministic`, gradients of tables that are read by position may be added up in any order.
    """
    import torch

    g, arrays = geometry, {"q": q, "k": k, "v": v}
    grads = {n: torch.empty(x.shape, dtype=x.dtype, device=x.device) for n, x in arrays.items() if n in grad_names}
    values = grad_names - arrays.keys()
    if 0 in (g.batch, g.q_len, g.kv_len):
        return {n: x.zero_() for n, x in grads.items()} | _zeros(values, tables, lse)
    dout = out.new_zeros(()).expand(out.shape) if dout is None else dout
    if far(q, k, v, out, dout):
        tiles = (DELTA, target.dq or target, target.dkv or target, target.dv or target, square(target))
        rows = max(side for t in tiles for side in (t.block_q, t.block_k))
        q, k, v, out, dout = (near(x, rows) for x in (q, k, v, out, dout))
    context = bound(plan, spans, g, target, q, k)
    read = context.values(slots, tables)
    described = _described(context, q, k, v, dout)
    kind = "backward", read.device_slots, grad_names, dlse is not None, described
    stats = torch.empty((*lse.shape, 4), dtype=torch.float32, device=q.device)
    lse_residual = torch.zeros_like(lse) if softmax_stats is None else lse_residual_of(softmax_stats)
    operands = {
        "Q": q, "K": k, "V": v, "Out": out, "DOut": dout, "Lse": lse.contiguous(), "Low": lse_residual.contiguous(),
        "Stats": stats, "DLse": None if dlse is None else dlse.to(torch.float32).contiguous().resolve_neg(),
        **{f"D{n.upper()}": x for n, x in grads.items()},
    }  # fmt: skip
    buffers = context.run(kind, lambda: _Launches(context, spans, q, k, *kind[1:]), read, operands)
    if not values:
        return grads
    more = [x for x in backward_of(plan).gradients if x.source in grad_names and x.over in ("diagonal", "scatter")]
    if more:
        common = plan, spans, g, q, k, v, dout, stats, slots, tables, target
        buffers |= dict(zip(more, captured(*common, more, deterministic=deterministic), strict=True))
    folds = folded(list(buffers), list(buffers.values()), context.placed, slots, tables)
    return grads | folds | _zeros(values - folds.keys(), tables, lse)


def _described(context: Bound, *arrays: Tensor) -> bool:
    """Whether some kernel wants q, k, v and dout as tensor descriptors, and they can be read so."""
    target = context.target
    descriptors = any((t or target).descriptors for t in (target.dq, target.dkv, target.dv or target.dkv))
    return descriptors and all(x.data_ptr() & 15 == 0 for x in arrays) and context.describes(*arrays)


def lse_residual_of(softmax_stats: Tensor) -> Tensor:
    """[batch, heads, q_len], of what a graph knows of rows, [batch, heads, q_len, 2], too."""
    return softmax_stats if softmax_stats.ndim == 3 else softmax_stats[..., 0]


def _zeros(names: frozenset[str], tables: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    """Gradients of values without influence."""
    import torch

    shapes = {n: tables[n].shape if n in tables else () for n in names}
    return {n: torch.zeros(shape, dtype=torch.float32, device=like.device) for n, shape in shapes.items()}


class _Launches:
    """The kernels of calls of one kind."""

    def __init__(
        self, context: Bound, spans: SpanSource | None, q: Tensor, k: Tensor, device_slots: tuple[str, ...],
        grad_names: frozenset[str], dlse: bool, described: bool,
    ) -> None:  # fmt: skip
        g, target, dims = context.geometry, context.target, context.dims(device_slots)
        plan = backward_plan(context.plan, g)
        target = target if described and describable(plan, dims) else target.everywhere(descriptors=False)
        self.geometry = g
        processors = triton_decode.processors(context.device)
        parts = {
            "attention_dq": of_call(plan, spans, g, target.dq or target, processors),
        }
        for n in walking_queries(target):
            parts[n] = of_call(plan, spans, g, of_kernel(n, target), processors, walked=True)
        listed = frozenset(n for n, x in parts.items() if x is not None)
        self.module = emitted_kernels(emit, plan, target, dims, grad_names, dlse=dlse, listed=listed)
        self.sums = sums(plan, grad_names)
        plain = Bound(bare(plan), g, target, q, k)  # attention_delta reads no slots and no tables
        self.nothing = plain.values({}, {})
        self.steps = []
        for step in of_backward(g, target, self.module.kernels):
            if step.side:
                records = spans and getattr(spans, step.side)
                self.steps.append(
                    self._step(context, step, parts=parts[step.name], records=records, device_slots=device_slots)
                )
            else:
                self.steps.append(self._step(plain, step))

    def _step(
        self, context: Bound, step: LaunchStep, parts: RowParts | None = None, **more: Any
    ) -> tuple[Launch | RowLaunches, list[str]]:
        """A launch, and the tensors it takes."""
        letters = {**dict.fromkeys((*TENSORS, *(s.buffer for s in self.sums)), ""), **LETTERS}
        names = [n for n in self.module.kernels[step.name].arg_names if n in letters]
        tensors: dict[str, Access] = {n: letters[n] for n in names}
        if step.tile.descriptors:
            tensors |= {n: block for n, block in blocks(self.geometry, step.tile).items() if n in names}
        if parts is None:
            return context.launch(self.module, step.name, step.grid, step.tile, tensors, **more), names
        both, g = (step.name, f"{step.name}_sums"), self.geometry
        written = [n for n in self.module.kernels[both[1]].arg_names if n in tensors]
        read = [n for n in names if n not in written]
        inputs, results = ({n: tensors[n] for n in some} for some in (read, written))
        widths = {"DQ": g.head_dim, "DK": g.head_dim, "DV": g.v_dim}
        totals = g.heads // g.kv_heads if step.side == "columns" else 1  # of other gradients, one for each head
        sums: dict[str, tuple[int, ...]] = {"Acc": (sum(widths.get(n, totals) for n in written),)}
        run = RowLaunches(
            context, self.module, both, step.tile, parts, inputs=inputs, sums=sums, results=results, **more
        )
        return run, [*read, *written]

    def __call__(self, read: Values, operands: dict[str, Tensor]) -> dict[Gradient, Tensor]:
        """Run them all; the sums of captured gradients, shaped as `derive.Gradient` says."""
        import torch

        g, like = self.geometry, operands["Stats"]
        for s in self.sums:
            length = g.q_len if s.along == "q" else g.kv_len
            operands[s.buffer] = torch.empty((g.batch, g.heads, length), dtype=torch.float32, device=like.device)
        for run, names in self.steps:
            run(self.nothing if run is self.steps[0][0] else read, *(operands[n] for n in names))
        whole = {s.gradient: operands[s.buffer] for s in self.sums}
        return {x: t.sum(-1, dtype=torch.float64).float() if x.over == "head" else t for x, t in whole.items()}
