"""Runs the Gluon forward on torch tensors. Their TMA descriptors are made on the host.

Resources that kernels take of a GPU come from compiling them ahead of time: no device is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from frisket.dsl.errors import BackendError
from frisket.lowering.kernels.gluon.forward import INSTEAD, emit, groups_of
from frisket.lowering.kernels.triton.writer import Dims
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource, Target
from frisket.runtime.backends.triton import arguments as triton_launch
from frisket.runtime.backends.triton.forward import launched
from frisket.runtime.backends.triton.grids import forward_plan, of_forward
from frisket.runtime.backends.triton.report import KernelReport, check_compiles, resources, signature
from frisket.runtime.backends.triton.source import load
from frisket.runtime.backends.triton.text import dims_of
from frisket.runtime.backends.triton.tiles import SHARED

Tensor = Any


def text(
    plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, learned: Collection[str] = (),
    spans: SpanSource | None = None,
) -> tuple[str, Target]:  # fmt: skip
    """The forward's text and the target it runs with; gradients are Triton's kernels."""
    return emit(forward_plan(plan, g), target, dims_of(plan, g, dtype, learned), sinks=sinks), target


def forward(
    plan: LoopPlan, spans: SpanSource | None, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor,
    slots: Mapping[str, Any], tables: Mapping[str, Tensor], target: Target, *, sinks: Tensor | None = None,
    top: bool = False, softmax_stats: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None] | tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(out, lse, largest scores or None), with `softmax_stats` also the rounding error of lse, as Triton's forward has
    them. Tensors that TMA cannot address are copied."""
    q, k, v = (addressable(x) for x in (q, k, v))
    context = triton_launch.bound(plan, spans, geometry, target, q, k)
    values = context.values(slots, tables)
    kind = "gluon", values.device_slots, sinks is not None, top, softmax_stats
    return launched(
        context, kind, lambda: _launch(context, spans, *kind[1:]), values, (q, k, v), sinks, top, softmax_stats
    )


def addressable(x: Tensor) -> Tensor:
    """A tensor whose rows begin at multiples of 16 bytes and are contiguous, and whose other axes step by multiples of
    16 bytes: itself, or a copy."""
    import torch

    x = x.resolve_neg()
    fine = triton_launch.describable(x) and x.data_ptr() % 16 == 0
    return x if fine else x.clone(memory_format=torch.contiguous_format)


def _launch(
    context: triton_launch.Bound,
    spans: SpanSource | None,
    device_slots: tuple[str, ...],
    sinks: bool,
    top: bool,
    lse_residual: bool,
) -> triton_launch.Launch:
    g, target = context.geometry, context.target
    plan, dims = forward_plan(context.plan, g), context.dims(device_slots)
    rows = ["Lse", *["Top"] * top, *["Low"] * lse_residual, *["Sinks"] * sinks]
    kernels = triton_launch.emitted_kernels(emit, plan, target, dims, sinks=sinks, top=top, low=lse_residual)
    return context.launch(
        kernels, "attention_forward", of_forward(g, target), target,
        {**blocks_of(target, g), **dict.fromkeys(rows, "")},
        records=None if spans is None else spans.rows, device_slots=device_slots, launcher=GluonLaunch,
        STAGES=target.num_stages,
    )  # fmt: skip


class GluonLaunch(triton_launch.Launch):
    """A launch whose tensor descriptors say how blocks lie in shared memory."""

    def described(self, x: Tensor, block: triton_launch.Block) -> Any:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-untyped]

        plain = super().described(x, block)
        in_shared = layout(block, str(x.dtype).removeprefix("torch."))
        return TensorDescriptor(x, plain.shape, plain.strides, list(block), in_shared)


MMA = {"sm_90": r"\bHGMMA\.", "sm_100": r"\bUTCHMMA\b"}
SHORT = {"float16": "fp16", "bfloat16": "bf16"}


def compile_reports(
    source: str, plan: LoopPlan, target: Target, dims: Dims, arch: str = "sm_90"
) -> Iterator[KernelReport]:
    """Compile the forward kernel of a module and say which resources of a GPU it takes.

    `compile_reports(emit(plan, target, dims), plan, target, dims)`. Registers are those of a thread before warp groups
    give theirs to each other. Raises BackendError for an architecture other than the target's."""
    check_compiles(arch)
    if arch != target.arch:
        raise BackendError(f"the text is written for {target.arch}, not {arch}; {INSTEAD}")
    compiled = compiled_for(vars(load(source))["attention_forward"], plan, target, dims)
    registers, spills, mma = resources(compiled, MMA[arch])
    shared, warps = int(compiled.metadata.shared), int(compiled.metadata.num_warps)
    block = target.block_q, target.block_k, warps, target.num_stages
    yield KernelReport("attention_forward", arch, *block, registers, spills, shared, SHARED[arch], mma)


def compiled_for(kernel: Any, plan: LoopPlan, target: Target, dims: Dims) -> Any:
    """Triton's compilation of the kernel, called as on contiguous arrays."""
    import triton  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.experimental.gluon._runtime import GluonASTSource  # type: ignore[import-untyped]

    types, constants = signature(kernel, plan, target, dims, STAGES=target.num_stages)
    types |= {
        n: f"tensordesc<{SHORT[dims.dtype]}{list(block)},{layout(block, dims.dtype)!r}>"
        for n, block in blocks_of(target, dims).items()
    }
    hints = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(types.values()) if type[0] == "*"}
    return triton.compile(
        GluonASTSource(kernel, types, constants, hints), target=GPUTarget("cuda", int(target.arch[3:]), 32),
        options={"num_warps": target.num_warps, "enable_fp_fusion": True},
    )  # fmt: skip


def blocks_of(target: Target, dims: Dims | Geometry) -> dict[str, triton_launch.Block]:
    """The blocks of the kernel's descriptors: a warp group reads and writes its part of a tile's queries."""
    _, queries = groups_of(target.arch, dims.head_dim, dims.v_dim)
    blocks = triton_launch.blocks(dims, replace(target, block_q=queries))
    return {**{n: blocks[n] for n in "QKV"}, "Out": blocks["DOut"]}


def layout(block: triton_launch.Block, dtype: str) -> Any:
    """The layout in shared memory of such blocks."""
    from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]

    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, dtype))
