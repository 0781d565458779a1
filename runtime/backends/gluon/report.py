"""Resources that Gluon kernels take of a GPU, from compiling them ahead of time: no device is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from frisket.dsl.errors import BackendError
from frisket.lowering.kernels.gluon.forward import INSTEAD, groups_of
from frisket.lowering.kernels.triton.writer import Dims
from frisket.lowering.plan import Geometry, LoopPlan, Target
from frisket.runtime.backends.triton.arguments import Block, blocks
from frisket.runtime.backends.triton.report import KernelReport, check_compiles, resources, signature
from frisket.runtime.backends.triton.source import load
from frisket.runtime.backends.triton.tiles import SHARED

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


def blocks_of(target: Target, dims: Dims | Geometry) -> dict[str, Block]:
    """The blocks of the kernel's descriptors: a warp group reads and writes its part of a tile's queries."""
    _, queries = groups_of(target.arch, dims.head_dim, dims.v_dim)
    found = blocks(dims, replace(target, block_q=queries))
    return {**{n: found[n] for n in "QKV"}, "Out": found["DOut"]}


def layout(block: Block, dtype: str) -> Any:
    """The layout in shared memory of such blocks."""
    from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]

    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, dtype))
