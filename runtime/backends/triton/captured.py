"""Runs the Triton kernels of captured gradients that no row or column of tiles can sum: "diagonal" and "scatter"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from frisket.dsl.ir import walk
from frisket.grammar.memo import remember
from frisket.lowering.aten.captured import amounts, units
from frisket.lowering.derive import Gradient
from frisket.lowering.kernels.triton import cotangents as emit
from frisket.lowering.kernels.triton.cotangents import weights
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource, Target

from . import grids as triton_grids
from .arguments import KEPT, Bound, Launch, Made, TooLargeError, Values, bound, emitted_kernels

Tensor = Any
ARRAYS = {"Q": "q", "K": "k", "V": "v", "DOut": "g", "Stats": ""}


def captured(
    plan: LoopPlan, spans: SpanSource | None, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, dout: Tensor,
    stats: Tensor, slots: Mapping[str, Any], tables: Mapping[str, Tensor], target: Target,
    gradients: Sequence[Gradient], *, deterministic: bool = True,
) -> list[Tensor]:  # fmt: skip
    """One buffer for each of `gradients`, in their order, float32 and of the shape `derive.Gradient` describes.

    `stats` is float32 [batch, heads, q_len, 4], contiguous, as `attention_delta` writes it: of every row lse in log2
    units, the factor of its weights, and delta. q, k, v and dout have any strides, and one dtype.

    Equal calls give equal bits, unless `deterministic` is False: then tables that are read at any places are added to
    with atomics in float32, in one pass instead of two in fixed point (how exact that is: lowering/aten/captured.py).
    """
    import torch

    deterministic |= torch.are_deterministic_algorithms_enabled()
    context = bound(plan, spans, geometry, emit.square(target), q, k)
    run = _Run(context, spans, context.values(slots, tables), (q, k, v, dout, stats), slots, tables)
    buffers: dict[int, Tensor] = {}
    try:
        if by_distance := [g for g in gradients if g.over == "diagonal"]:
            buffers |= {id(g): x for g, x in zip(by_distance, run.diagonals(tuple(by_distance)), strict=True)}
        for g in gradients:
            if g.over == "scatter":
                buffers[id(g)] = run.scattered(g, deterministic)
    except TooLargeError as error:
        context.shrink(error)
        return captured(
            plan, spans, geometry, q, k, v, dout, stats, slots, tables, target, gradients, deterministic=deterministic
        )  # fmt: skip
    return [buffers[id(g)] for g in gradients]


class _Run:
    """The launches of one call."""

    def __init__(
        self, context: Bound, spans: SpanSource | None, values: Values, arrays: tuple[Tensor, ...],
        slots: Mapping[str, Any], tables: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        self.context, self.spans, self.values, self.arrays, self.slots, self.tables = (
            context, spans, values, arrays, slots, tables,
        )  # fmt: skip
        g, side = context.geometry, context.target.block_q
        self.geometry, self.side = g, side
        self.rows, self.columns = triton_grids.tiles(g, side)

    def diagonals(self, gradients: tuple[Gradient, ...]) -> list[Tensor]:
        import torch
        from torch.nn.functional import pad

        g, side = self.geometry, self.side
        sums = weights(gradients)
        grid = triton_grids.of_diagonals(g, side, len(sums))
        partial = self.new((g.batch, g.heads, len(sums), grid.parts, 2, grid.across, side), torch.float32)
        launch = self.launch(
            ("diagonal", gradients), "attention_diagonal", (grid.across * grid.parts, g.heads, g.batch), ("Sums",),
            lambda dims: emitted_kernels(emit.diagonal, self.context.plan, self.context.target, dims, gradients),
            share=grid.share,
        )  # fmt: skip
        launch(self.values, *self.arrays, partial)
        low, high = partial.sum(3).unbind(3)  # diagonals c of a tile, and c - side: those of the next one up
        whole = (pad(low, (0, 0, 1, 0)) + pad(high, (0, 0, 0, 1))).flatten(3)
        first = self.columns * side - g.kv_len + 1
        whole = whole[..., first : first + g.q_len + g.kv_len - 1]
        return [whole[:, :, sums.index(x.weight)] for x in gradients]

    def scattered(self, gradient: Gradient, deterministic: bool) -> Tensor:
        import torch

        g, context = self.geometry, self.context
        shape = self.tables[gradient.source].shape
        shared = self.plane(gradient)
        if shared is not None:
            into = self.new(shape, torch.float32).zero_()
            launch = self.launch(
                ("plane", gradient, shared), "attention_plane", triton_grids.of_plane(g, self.side, shared), ("Into",),
                lambda dims: emitted_kernels(emit.plane, context.plan, context.target, dims, gradient, shared),
                batches=g.batch,
            )  # fmt: skip
            launch(self.values, *self.arrays, into)
            return into

        def module(dims: Any) -> Made:
            return emitted_kernels(emit.scatter, context.plan, context.target, dims, gradient, fixed=deterministic)

        grid, name = (self.rows, g.heads, g.batch), "attention_scatter"
        if not deterministic:
            into = self.new(shape, torch.float32).zero_()
            self.launch(("atomic", gradient), name, grid, ("Into",), module)(self.values, *self.arrays, into)
            return into
        total = self.new((g.batch, g.heads, self.rows), torch.float32)
        self.launch(("total", gradient), "attention_total", grid, ("Total",), module)(self.values, *self.arrays, total)
        per = units(total.sum(dtype=torch.float64))
        counted = self.new(shape, torch.int64).zero_()
        launch = self.launch(("fixed", gradient), name, grid, ("Counted", "PerUnit"), module)
        launch(self.values, *self.arrays, counted, per)
        return amounts(counted, per).float()

    def new(self, shape: Sequence[int], dtype: Any) -> Tensor:
        import torch

        return torch.empty(tuple(shape), dtype=dtype, device=self.arrays[0].device)

    def launch(
        self, key: tuple[Any, ...], kernel: str, grid: tuple[int, ...], results: Sequence[str],
        module: Callable[[Any], Made], **more: Any,
    ) -> Launch:  # fmt: skip
        """A launch kept for such calls; `results` are pointers beside the arrays."""
        device_slots = self.values.device_slots
        launch = self.context.launches.get((key, device_slots))
        if launch is None:
            launch = self.context.launches[key, device_slots] = self.context.launch(
                module(self.context.dims(device_slots)), kernel, grid, self.context.target,
                {**ARRAYS, **dict.fromkeys(results, "")}, records=None if self.spans is None else self.spans.rows,
                device_slots=device_slots, **more,
            )  # fmt: skip
        return launch

    def plane(self, gradient: Gradient) -> str | None:
        """The axes "b" and "h" that share a place of the table, where every query and key, and what of the two is left,
        has a place of its own; None where that is not so or not known."""
        shape = self.tables[gradient.source].shape
        read = {e.name for e in walk(*gradient.index) if e.op == "param"}  # not a seed, which is another in every step
        key = gradient, shape, *[(n, x) for n, x in self.slots.items() if n in read and not hasattr(x, "data_ptr")]
        known = self.context.planes
        if key not in known:
            remember(known, key, triton_grids.plane(gradient, shape, self.geometry, self.slots), KEPT)
        return known[key]
