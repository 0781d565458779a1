"""The Gluon kernels on torch tensors: their forward, tiles and stages, and what they take of a GPU.

TMA descriptors are made on the host. Resources that kernels take of a GPU come from compiling them ahead of time: no
device is needed.

On Hopper a tile has 128 queries, 64 of each warp group. Of the 240 registers of a thread the sums of a head take 64 at
head dim 128, scores of 128 keys 64 more, and their weights, which the product with values still reads, 32: what is left
carries formulas, but no rows of a table and no dice. So masks and score mods that read tables by key, dropout, and
windows have tiles of 64 keys. Heads of 256 have 128 registers of sums: 64 keys, or 32 where a formula is evaluated for
every query and key.

On Blackwell a warp group has 128 queries, a row of scores in each thread: 128 registers for 128 keys, and none for the
sums, which are in tensor memory. Tiles have 64 keys beside any score mod too, and under masks that hold a whole number
for every position, such as `q - k` in two comparisons. Heads of 256 have 64, or 32 beside tables by key and dropout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from frisket.dsl.errors import BackendError
from frisket.dsl.ir import TRUE, Expr, uses, walk
from frisket.dsl.types import BOOL, INT
from frisket.lowering.analysis.solve import ends_of
from frisket.lowering.architectures import GPUS, H100, WRITTEN, architecture_of
from frisket.lowering.dtypes import DTYPES, HALVES
from frisket.lowering.kernels.expr import COLUMN, POSITION, levels
from frisket.lowering.kernels.gluon.forward import INSTEAD, emit, groups_of
from frisket.lowering.kernels.triton.forward import OptionalArrays
from frisket.lowering.kernels.triton.module import Dims, padded
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Geometry, KernelInputs, LoopPlan, Spans, SpanSource
from frisket.runtime.backends.triton import launch as triton_launch
from frisket.runtime.backends.triton import tiles as triton_tiles
from frisket.runtime.backends.triton import torch as triton_torch
from frisket.runtime.backends.triton.grids import ForwardKind, forward_plan, of_forward, row_parts
from frisket.runtime.backends.triton.kernels import KernelReport, Reports, check_compiles, dims_of, resources, signature
from frisket.runtime.calls.options import AS_CHOSEN, Tuning
from frisket.runtime.machine.modules import load_from_file
from frisket.runtime.plans.device import CallPlan

Tensor = Any
backward = triton_torch.backward
SHARED = 232_448 - 2048  # bytes of a block, less barriers and what partitions hand to each other
STAGES = 4  # at most: more of them wait for nothing
SHORTEST = 1024  # queries of a call
LONG = 16_384  # keys where no formula says how many a query sees
MMA = {"wgmma": r"\bHGMMA\.", "tcgen05": r"\bUTCHMMA\b"}  # of 16 bits, by the kind of products


def text(
    plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, learned: Collection[str] = (), *_: Any
) -> tuple[str, Target]:
    """The forward's text and the target it runs with; gradients are Triton's kernels."""
    dims = dims_of(plan, g, dtype, learned)
    return emit(forward_plan(plan, g), target, dims, OptionalArrays(sinks=sinks)), target


def forward(
    inputs: KernelInputs, q: Tensor, k: Tensor, v: Tensor, *, top: bool = False, softmax_stats: bool = False
) -> triton_torch.Results:
    """(out, lse, largest scores or None), with `softmax_stats` also the rounding error of lse, as Triton's forward has
    them. Tensors that TMA cannot address are copied."""
    q, k, v = (addressable(x) for x in (q, k, v))
    context = triton_launch.bound(inputs.plan, inputs.spans, inputs.geometry, inputs.target, q, k)
    values = context.values(inputs.slots, inputs.tables)
    kind = ForwardKind(values.device_slots, inputs.sinks is not None, top, softmax_stats)
    make = partial(_program, context, inputs.spans, kind)
    return triton_torch.launched(context, kind, make, values, (q, k, v), inputs.sinks)


def addressable(x: Tensor) -> Tensor:
    """A tensor whose rows begin at multiples of 16 bytes and are contiguous, and whose other axes step by multiples of
    16 bytes: itself, or a copy."""
    import torch

    x = x.resolve_neg()
    fine = triton_launch.describable(x) and x.data_ptr() % 16 == 0
    # `contiguous` would return a contiguous tensor as it is, wherever its memory begins
    return x if fine else x.clone(memory_format=torch.contiguous_format)


def _program(
    context: triton_launch.LaunchContext, spans: SpanSource | None, kind: ForwardKind
) -> triton_launch.LaunchSequence:
    g, target, dims = context.geometry, context.target, context.dims(kind.device_slots)
    module = triton_launch.emitted_kernels(emit, forward_plan(context.plan, g), target, dims, kind.optional)
    numbers = {"STAGES": target.num_stages}
    step = triton_launch.LaunchStep("attention_forward", target, of_forward(g, target), "rows", numbers=numbers)
    return triton_launch.LaunchSequence([GluonLaunch(context, module, step, spans)])


class GluonLaunch(triton_launch.Launch):
    """A launch whose tensor descriptors say how blocks lie in shared memory."""

    def blocks_of(self, g: Geometry, target: Target) -> dict[str, triton_launch.Block]:
        return blocks_of(target, g)

    def described(self, x: Tensor, block: triton_launch.Block) -> Any:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-untyped]

        plain = super().described(x, block)
        in_shared = layout(block, str(x.dtype).removeprefix("torch."))
        return TensorDescriptor(x, plain.shape, plain.strides, list(block), in_shared)


def compile_reports(source: str, plan: LoopPlan, target: Target, dims: Dims, arch: str = H100.name) -> Reports:
    """Compile the forward kernel of a module and say which resources of a GPU it takes.

    `compile_reports(emit(plan, target, dims), plan, target, dims)`. Registers are those of a thread before warp groups
    give theirs to each other. Raises BackendError for an architecture other than the target's."""
    check_compiles(arch)
    if arch != target.arch:
        raise BackendError(f"the text is written for {target.arch}, not {arch}; {INSTEAD}")
    compiled = compiled_for(vars(load_from_file(source))["attention_forward"], plan, target, dims)
    registers, spills, mma = resources(compiled, MMA[GPUS[arch].products])
    shared, warps = int(compiled.metadata.shared), int(compiled.metadata.num_warps)
    block = target.block_q, target.block_k, warps, target.num_stages
    yield KernelReport("attention_forward", arch, *block, registers, spills, shared, GPUS[arch].shared, mma)


def compiled_for(kernel: Any, plan: LoopPlan, target: Target, dims: Dims) -> Any:
    """Triton's compilation of the kernel, called as on contiguous arrays."""
    import triton  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.experimental.gluon._runtime import GluonASTSource  # type: ignore[import-untyped]

    types, constants = signature(kernel, plan, target, dims, STAGES=target.num_stages)
    short, blocks = DTYPES[dims.dtype].triton, blocks_of(target, dims)
    types |= {n: f"tensordesc<{short}{list(x)},{layout(x, dims.dtype)!r}>" for n, x in blocks.items()}
    hints = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(types.values()) if type[0] == "*"}
    gpu = GPUTarget(*architecture_of(target.arch).compiler)
    options = {"num_warps": target.num_warps, "enable_fp_fusion": True}
    return triton.compile(GluonASTSource(kernel, types, constants, hints), target=gpu, options=options)


def blocks_of(target: Target, dims: Dims | Geometry) -> dict[str, triton_launch.Block]:
    """The blocks of the kernel's descriptors: a warp group reads and writes its part of a tile's queries."""
    _, queries = groups_of(target.arch, dims.head_dim, dims.v_dim)
    blocks = triton_launch.blocks(dims, replace(target, block_q=queries))
    return {**{n: blocks[n] for n in "QKV"}, "Out": blocks["DOut"]}


def layout(block: triton_launch.Block, dtype: str) -> Any:
    """The layout in shared memory of such blocks."""
    from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]

    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, dtype))


# -- tiles and stages --------------------------------------------------------------------------------


def call_target(
    plan: CallPlan | None,
    g: Geometry,
    dtype: str,
    tile: tuple[int, int] | None = None,
    tuning: Tuning = AS_CHOSEN,
    device: Any = None,
    arch: str | None = None,
) -> Target:
    """The target of a call, whose backward is Triton's. `tile` is the user's, of the forward alone."""
    theirs = triton_tiles.target(plan, g, dtype, None, tuning, device, arch)
    if arch and arch not in WRITTEN:
        raise BackendError(f"the Gluon kernels are written for {' and '.join(WRITTEN)}, not {arch}; {INSTEAD}")
    gpu = arch or triton_tiles.architecture(device)
    gpu = gpu if gpu in WRITTEN else WRITTEN[0]  # whose source can be printed anywhere
    groups, rows = groups_of(gpu, g.head_dim, g.v_dim)
    block = tile or (groups * rows, keys_of(plan, g, gpu))
    forward = Target("gluon", *block, num_warps=4, num_stages=stages(g, *block), arch=gpu)
    more = {n: getattr(theirs, n) for n in ("order", "dq", "dkv", "dv", "precision", "tanh")}
    return replace(forward, **more)


def pays(plan: CallPlan, g: Geometry, dtype: str) -> bool:
    """Whether the forward is faster than Triton's. On an H100 (benchmarks/results/gpu.json) Triton's takes 1.15 to 1.33
    times as long at head dim 128 where queries see more than MEDIUM keys or most of those before them, 1.07 times with
    12 documents in 32,768 tokens, and less time under shorter windows, with shorter documents, and at head dim 64. At
    head dim 256 it takes 1.36 to 1.66 times as long where tiles have 64 keys, and at 192 1.25 to 1.3 times; with tiles
    of 32 keys 0.97 to 1.14 times. Score mods with tables by key have not been measured, nor has it run on Blackwell."""
    import torch

    if torch.cuda.get_device_capability() != (9, 0) or dtype not in HALVES or plan.dropout:
        return False
    sizes = {padded(g.head_dim), padded(g.v_dim)}
    if sizes not in ({128}, {256}) or g.head_dim % 8 or g.v_dim % 8 or g.q_len < SHORTEST:
        return False
    program = plan.host_program
    if g.kv_dtype or program.stored is not None or program.unwritten:
        return False
    mask, score = plan.simplified.mask, plan.simplified.score
    if reads_by_key(score) or keys_of(plan, g, H100.name) < 64:
        return False
    if mask is None:
        return True
    keys, closed = triton_tiles.keys_seen(mask, tuple(sorted(plan.scalars.items())))
    if closed or triton_tiles.grows(mask, keys):
        return keys > triton_tiles.MEDIUM
    if g.kv_len < LONG:
        return False
    rows = plan.rows((128, keys_of(plan, g, H100.name)))  # long ones among them Triton's forward divides
    return not (isinstance(rows, Spans) and row_parts(rows, torch.cuda.get_device_properties(0).multi_processor_count))


def keys_of(plan: CallPlan | None, g: Geometry, arch: str) -> int:
    """The keys of a tile."""
    mask, score = (None, None) if plan is None else (plan.simplified.mask, plan.simplified.score)
    hopper = architecture_of(arch).products == "wgmma"
    more = reads_by_key(mask, score) or (plan is not None and plan.dropout)
    if max(padded(g.head_dim), padded(g.v_dim)) > 128:
        return 32 if more or (hopper and by_pair(mask, score)) else 64
    more = more or (not hopper and (score is not None or holds_positions(mask)))
    if more or mask is None or plan is None:
        return 64 if more else 128
    seen, _ = triton_tiles.keys_seen(mask, tuple(sorted(plan.scalars.items())))
    return 64 if seen <= triton_tiles.SHORT else 128


def reads_by_key(*roots: Expr | None) -> bool:
    """Whether a table is read with an index that depends on the key."""
    by_node = levels(*(e for e in roots if e is not None))
    return any(n.op in ("lookup", "segment") and at & COLUMN for n, at in by_node.items())


def by_pair(mask: Expr | None, score: Expr | None) -> bool:
    """Whether a border tile evaluates a formula for every query and key: what ends of rows leave of a mask, or a score
    mod that reads a position.

    >>> from frisket.dsl.sugar import k, q
    >>> by_pair((q >= k) & (q - k < 9), None), by_pair((q >= k) & ((q - k) % 3 > 0), None)
    (False, True)
    """
    ends = None if mask is None else ends_of(mask)
    hidden = mask is not None and (ends is None or ends.rest is not TRUE)
    return hidden or (score is not None and not uses(score).isdisjoint("qk"))


def holds_positions(mask: Expr | None) -> bool:
    """Whether border tiles hold an Int for every position, because two comparisons read it; where rows have ends, these
    are computed before the loops.

    >>> from frisket.dsl.sugar import k, q
    >>> holds_positions((q - k >= 5) & (q - k <= 9)), holds_positions((q - k >= 5) | (q - k <= -5))
    (False, True)
    """
    if mask is None or ends_of(mask) is not None:
        return False
    at = levels(mask)
    read = Counter(a for n in walk(mask) if n.type is BOOL for a in n.args if a.type is INT and at[a] == POSITION)
    return max(read.values(), default=0) > 1


def stages(g: Geometry, queries: int, keys: int) -> int:
    """The tiles of keys and of values that shared memory holds beside the queries."""
    head, v = padded(g.head_dim), padded(g.v_dim)
    fixed = queries * (head if head == v else head + v) * 2
    return max(1, min(STAGES, (SHARED - fixed) // (keys * (head + v) * 2)))
