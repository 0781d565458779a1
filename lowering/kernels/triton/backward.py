"""Writes the Triton backward kernels of a LoopPlan, by the formulas of `lowering.derive`.

`attention_delta` computes three numbers per query; `attention_dq` owns a tile of queries and walks tiles of keys,
`attention_dkv` owns a tile of keys of one key head and walks tiles of queries; where registers do not hold the sums of
both, it has dk alone, and `attention_dv` the rest. All compute the scores again: seven products, or eight, instead of
five, but no two programs add to one entry, and results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from frisket.dsl.errors import LoweringError
from frisket.lowering.kernels.language import Text
from frisket.lowering.kernels.text import fields, filled, skeleton
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import LoopPlan

from . import writer
from .cotangents import GradientKernel, sums
from .forward import describable

DELTA_KERNEL, DQ, DKV = (skeleton(__package__, name) for name in ("delta", "dq", "dkv"))
WARP = 32  # threads
DELTA = Target("triton", 32, 32, 4, 1)  # of attention_delta, which reads whole rows and waits for memory


def emit(
    plan: LoopPlan,
    target: Target,
    dims: writer.Dims,
    grad_names: Collection[str],
    *,
    dlse: bool = True,
    listed: Collection[str] = (),
) -> str:
    """The text of the backward's module: `emit(plan, target, Dims(128, 128, "bfloat16"), {"q", "k", "v"})`. The kernels
    compute the gradients of the arrays, tables and slots in `grad_names` (plan names), with or without a cotangent of
    lse; the same input gives the same text. A table lists the programs of the kernels that are `listed`, of which
    several share a long row of tiles; `attention_dq_sums` and `attention_dkv_sums` add up what these write."""
    return writer.module(
        "Attention backward", plan, dims, kernels(plan, target, dims, grad_names, dlse=dlse, listed=listed)
    )


def kernels(
    plan: LoopPlan,
    target: Target,
    dims: writer.Dims,
    grad_names: Collection[str],
    *,
    dlse: bool = True,
    listed: Collection[str] = (),
) -> list[writer.TritonKernel]:
    """The kernels that these gradients take. Of `target` their text depends on the order of rows, the precision, tensor
    descriptors and on whether each thread of dkv has a load of two numbers of a query."""
    if dims.kv_dtype:
        raise LoweringError(
            f"gradients need q, k and v of one dtype, not {dims.dtype} and {dims.kv_dtype}; convert k and v before"
        )
    along = {s.along for s in sums(plan, grad_names)}
    emitted = [delta_kernel(plan, dims, dlse)]
    if "q" in grad_names or "q" in along:
        emitted += _DqKernel(plan, target.dq or target, dims, grad_names, "attention_dq" in listed).kernels()
    dv_target = target.dv if {"k", "v"} <= set(grad_names) else None
    if {"k", "v"} & set(grad_names) or "k" in along:
        both = set(grad_names) - {"v"} if dv_target else grad_names
        emitted += _DkvKernel(plan, target.dkv or target, dims, both, "attention_dkv" in listed).kernels()
    if dv_target:
        emitted += _DkvKernel(plan, dv_target, dims, {"v"}, "attention_dv" in listed, "attention_dv").kernels()
    return emitted


def bare(plan: LoopPlan) -> LoopPlan:
    """The plan of `attention_delta`: rows without mask, score mod or weights."""
    none: dict[str, Any] = dict.fromkeys(("mask", "score", "bounds", "keep_mask", "by_query", "by_key"))
    return replace(plan, slots=(), tables=(), run_tables=(), **none)


def delta_kernel(plan: LoopPlan, dims: writer.Dims, dlse: bool) -> writer.TritonKernel:
    e, dim, length = ("d", "DIM", "HEAD_DIM") if dims.v_dim == dims.head_dim else ("e", "DIM_V", "V_DIM")
    pad = "" if writer.padded(dims.v_dim) == dims.v_dim else f"{e}[None, :] < {length}"
    mask = writer.masked("present[:, None]", pad)
    text = filled(DELTA_KERNEL, writer.wrapped, e=e, dim=dim, mask=mask, dlse=dlse, guard=plan.guard)
    launch = (
        f"attention_delta: grid (query tiles, heads, batch), tiles of {DELTA.block_q} queries, "
        f"num_warps={DELTA.num_warps}."
    )
    return writer.TritonKernel("attention_delta", text, launch)


class _DqKernel(GradientKernel):
    """The kernel of dq, and of sums of captured gradients over keys."""

    longest = writer.LINE + 1

    def __init__(
        self, plan: LoopPlan, target: Target, dims: writer.Dims, grad_names: Collection[str], listed: bool = False
    ) -> None:
        self.dq = "q" in grad_names
        summed = [s for s in sums(plan, grad_names) if s.along == "q"]
        traits = writer.KernelTraits(listed=listed, parted=listed)
        super().__init__(plan, target, dims, traits, "q" * self.dq, summed)
        self.described = target.descriptors and describable(plan, dims)

    def kernels(self) -> list[writer.TritonKernel]:
        kernel = writer.launched("attention_dq", self.filled(DQ), self.grid_of("query tiles", "heads"), self.target)
        return [kernel, *[self.part.kernel("attention_dq_sums", "q_len", self.buffers())] * self.traits.listed]

    def holes(self) -> dict[str, Any]:
        return {
            **super().holes(),
            **fields(self, "dq described"),
            "dim_e": "DIM" if self.e == "d" else "DIM_V",
            **self.before_loops(),
        }


class _DkvKernel(GradientKernel):
    """The kernel of dk and dv, or of one of them, and of sums of captured gradients over queries."""

    def __init__(
        self,
        plan: LoopPlan,
        target: Target,
        dims: writer.Dims,
        grad_names: Collection[str],
        listed: bool = False,
        name: str = "attention_dkv",
    ) -> None:
        self.name = name
        self.dk, self.dv = "k" in grad_names, "v" in grad_names
        known = writer.arguments(plan)
        self.rows_of_tables = {known[n].name: axis for n, axis in writer.rows_of_tables(plan).items()}
        self.by_pairs = 2 * target.block_q >= WARP * target.num_warps
        summed = [s for s in sums(plan, grad_names) if s.along == "k"]
        written = [n for n in "kv" if n in grad_names]
        traits = writer.KernelTraits(swapped=True, listed=listed, parted=listed)
        super().__init__(plan, target, dims, traits, written, summed)
        self.described = target.descriptors and describable(plan, dims)

    def address(self, table: writer.Argument, args: Sequence[Text]) -> str:
        """The address of an entry. Rows of a table are counted from the first of a tile: with 64 bits for each a thread
        has no registers left."""
        axis = self.rows_of_tables.get(table.name)
        if axis is None:
            return super().address(table, args)
        self.near, first = True, f"(q_origin + tile * BLOCK_Q){self.wide}" if self.wide else "q_origin + tile * BLOCK_Q"
        row_step = f"step_from(q, {first}, {table.sizes[axis]}, {table.strides[axis]}, NEAR)"
        *outer, (index, size, stride) = zip(args, table.sizes, table.strides, strict=True)
        steps = [self.step(Text(first) if i == axis else x, n, by) for i, (x, n, by) in enumerate(outer)]
        return f"{' + '.join([table.name, *steps])} + ({row_step} + {self.clamped(index, size)} * {stride})"

    def kernels(self) -> list[writer.TritonKernel]:
        grid, text = self.grid_of("key tiles", "key heads"), self.filled(DKV)
        kernel = writer.launched(self.name, text, grid, self.target, swapped=True)
        return [kernel, *[self.part.kernel(f"{self.name}_sums", "kv_len", self.buffers())] * self.traits.listed]

    def holes(self) -> dict[str, Any]:
        return {
            **super().holes(),
            **fields(self, "name dk dv described by_pairs"),
            "dout": self.dv or self.inner,
            "arrays": "Q, K, V, DOut" if self.inner else "Q, K, DOut",
            # With fewer entries than threads the compiler loads what each thread uses, past shared memory.
            "numbers_a_load": 2 if self.by_pairs else 4,
            "results": ", ".join(n for n, use in (("DK", self.dk), ("DV", self.dv)) if use),
            "dim_e": "DIM" if self.e == "d" else "DIM_V",
            "v_dim": self.v,
            **self.before_loops(),
        }
