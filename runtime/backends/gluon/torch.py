"""The Gluon kernels on torch tensors: their forward, tiles and stages, and what they take of a GPU.

TMA descriptors are made on the host. Resources that kernels take of a GPU come from compiling them ahead of time: no
device is needed.

On Hopper a tile has 128 queries, 64 of each warp group. Of the 240 registers of a thread the sums of a head take 64 at
head dim 128, and scores of 128 keys 64 more. Their weights, which the product with values still reads, take 32. What is
left carries formulas, but no rows of a table and no dice. So masks and score mods that read tables by key, dropout,
and windows take tiles of 64 keys. Heads of 256 have 128 registers of sums: 64 keys, or 32 where a formula is evaluated
for every query and key. Heads of 192 are in two parts and have 96: 64 keys with score mods too. They have 32 with
dropout, tables by key, and masks of which a formula is evaluated for every query and key. Values of 128 under queries
and keys of 192 have the tiles of a head of 128, but 64 keys where a formula is evaluated for every query and key.
Partial tiles over keys that may never have been written set values to 0. Heads past 128 have half the keys there, as do
masks of which a formula is evaluated for every query and key.

On Blackwell a warp group has 128 queries, a row of scores in each thread: 128 registers for 128 keys, and none for the
sums, which are in tensor memory. Tiles have 64 keys with any score mod too, and under masks that hold a whole number
for every position, such as `q - k` in two comparisons. Heads of 256 have 64, or 32 with tables by key and dropout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from frisket.dsl.errors import BackendError
from frisket.dsl.ir import SCORE, TRUE, Expr, lit, substitute, uses, walk
from frisket.dsl.types import BOOL, INT
from frisket.grammar.memo import cached_on
from frisket.lowering.analysis.solve import ends_of
from frisket.lowering.architectures import GPUS, H100, WRITTEN, architecture_of
from frisket.lowering.dtypes import DTYPES, FP8, HALVES, OPERANDS, result_of
from frisket.lowering.kernels.expr import COLUMN, POSITION, levels
from frisket.lowering.kernels.gluon import backward as gluon_backward
from frisket.lowering.kernels.gluon.backward import refused
from frisket.lowering.kernels.gluon.forward import (
    INSTEAD,
    ORDER,
    added,
    emit,
    groups_of,
    once_a_tile,
    tokens_of,
    widths_of,
)
from frisket.lowering.kernels.triton.backward import DELTA
from frisket.lowering.kernels.triton.forward import OptionalArrays
from frisket.lowering.kernels.triton.module import Dims, padded
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import (
    KV_INPUTS,
    Cotangents,
    ForwardResults,
    Geometry,
    KernelInputs,
    LoopPlan,
    Names,
    Spans,
    SpanSource,
)
from frisket.lowering.planner.planner import DeviceSpans
from frisket.lowering.simplify import simplify
from frisket.runtime.backends.triton import launch as triton_launch
from frisket.runtime.backends.triton import tiles as triton_tiles
from frisket.runtime.backends.triton import torch as triton_torch
from frisket.runtime.backends.triton.grids import (
    ForwardKind,
    backward_plan,
    forward_plan,
    grid_of,
    of_forward,
    row_parts,
)
from frisket.runtime.backends.triton.kernels import KernelReport, Reports, check_compiles, dims_of, resources, signature
from frisket.runtime.calls.arrays import uploaded
from frisket.runtime.calls.options import AS_CHOSEN, Tuning
from frisket.runtime.machine.modules import load_from_file
from frisket.runtime.plans.device import CallPlan

Tensor = Any
compiles = triton_torch.compiles
SHARED = 232_448 - 2048  # bytes of a block, less barriers and what partitions hand to each other
STAGES = 4  # at most: more of them wait for nothing
SHORTEST = 1024  # queries of a call
LONG = 16_384  # keys where no formula says how many a query sees
OF_FLOAT32 = ("Stats", "Acc")  # arrays of the fused backward
FUSED_STAGES = 2  # of the fused backward: tiles of queries and of cotangents
MOST_TURNS = 1 << 25  # entries of a table of turns, 128 MiB
MMA = {"wgmma": r"\b[HQ]GMMA\.", "tcgen05": r"\bUTCHMMA\b"}  # of 16 and of 8 bits, by the kind of products


def text(
    plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, learned: Collection[str] = (), *_: Any
) -> tuple[str, Target]:
    """The text of the forward, and the target that it runs with. The text of the fused backward follows where the
    target has its tile and the plan is in its class; Triton's kernels compute other gradients."""
    dims = dims_of(plan, g, dtype, learned)
    source = emit(plan_of(plan, g), target, dims, OptionalArrays(sinks=sinks))
    if target.fused is None or learned or dtype == FP8 or refused(plan, dims, target.arch):
        return source, target
    return f"{source}\n\n{gluon_backward.emit(backward_plan(plan, g), target, dims, dlse=False)}", target


def forward(
    inputs: KernelInputs, q: Tensor, k: Tensor, v: Tensor, *, top: bool = False, softmax_stats: bool = False
) -> triton_torch.Results:
    """(out, lse, largest scores or None), with `softmax_stats` also the rounding error of lse, as Triton's forward has
    them. Tensors that TMA cannot address are copied."""
    v = along_keys(v) if q.itemsize == 1 else v
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


def plan_of(plan: LoopPlan, g: Geometry) -> LoopPlan:
    """The plan that the forward is printed for. Scales of 8 bits are applied score by score where the scale of all is 0
    or less, as `forward_plan` says."""
    if _is_8_bits(g) and not g.scale > 0 and plan.score is not None:
        return replace(plan, score=plan.score + 0.0)
    return forward_plan(plan, g)


def along_keys(v: Tensor) -> Tensor:
    """A copy [batch, heads, dim, keys] of values of 8 bits, with each 16 keys in the kernel's order, and zeros behind
    the last."""
    import torch

    batch, heads, length, dim = v.shape
    groups, (shape, axes) = -(-length // 16), ORDER
    copy = torch.empty((batch, heads, dim, groups, 16), dtype=v.dtype, device=v.device)
    if length % 16:
        copy[..., -1, :] = 0  # what follows the last key has no weight, and NaN times 0 is NaN
    places = torch.arange(16).reshape(shape).permute(axes).reshape(16).tolist()
    for place, key in enumerate(places):
        some = v[:, :, key::16].mT
        copy[..., : some.shape[3], place] = some
    return copy.flatten(3)


def _program(
    context: triton_launch.LaunchContext, spans: SpanSource | None, kind: ForwardKind
) -> triton_launch.LaunchSequence:
    g, target, dims = context.geometry, context.target, context.dims(kind.device_slots)
    module = triton_launch.emitted_kernels(emit, plan_of(context.plan, g), target, dims, kind.optional)
    numbers = {"STAGES": target.num_stages}
    step = triton_launch.LaunchStep("attention_forward", target, of_forward(g, target), "rows", numbers=numbers)
    return triton_launch.LaunchSequence([GluonLaunch(context, module, step, spans)])


# -- the fused backward ------------------------------------------------------------------------------


def backward(
    inputs: KernelInputs, q: Any, k: Any, v: Any, results: ForwardResults, cotangents: Cotangents, *, grad_names: Names
) -> dict[str, Tensor]:
    """Gradients by name, as Triton's backward has them. The fused kernel computes those of q, k and v where the target
    has its tile and `unfused` no reason; Triton's kernels compute all others. Equal calls give equal bits where the
    inputs are `deterministic`."""
    if inputs.target.fused is None or unfused(inputs, q, k, grad_names):
        return triton_torch.backward(inputs, q, k, v, results, cotangents, grad_names=grad_names)
    import torch

    g, target, out, lse, dlse = inputs.geometry, inputs.target, results.out, results.lse, cotangents.dlse
    dout = out.new_zeros(out.shape) if cotangents.dout is None else cotangents.dout
    ordered = is_ordered(inputs)
    grads = {n: torch.empty(x.shape, dtype=x.dtype, device=x.device) for n, x in zip("qkv", (q, k, v))}
    q, k, v, dout = (addressable(x) for x in (q, k, v, dout))
    if triton_launch.far(out):
        out = triton_launch.near(out, DELTA.block_q)
    context = triton_launch.bound(inputs.plan, inputs.spans, g, target, q, k)
    values = context.values(inputs.slots, inputs.tables)
    kind = FusedKind(values.device_slots, dlse is not None, ordered)
    of_rows = {"dtype": torch.float32, "device": q.device}
    residual = results.lse_residual
    low = torch.zeros_like(lse) if residual is None else triton_torch.lse_residual_of(residual)
    tensors = {"Q": q, "K": k, "V": v, "Out": out, "DOut": dout, "Lse": lse.contiguous(), "Low": low.contiguous()}
    tensors |= {f"D{n.upper()}": x for n, x in grads.items()}
    tensors["Stats"] = torch.empty((3, g.batch, g.heads, numbers_of(g)), **of_rows)
    tensors["Acc"] = torch.zeros((g.batch, g.heads, g.q_len, g.head_dim), **of_rows)
    if dlse is not None:
        tensors["DLse"] = dlse.to(torch.float32).contiguous().resolve_neg()
    if ordered:
        tiles = -(-g.q_len // target.fused.block_q)
        tensors["Added"] = torch.zeros(1 + g.batch * g.heads * tiles, dtype=torch.int32, device=q.device)
        if backward_plan(inputs.plan, g).mask is not None:
            tensors["Turns"] = turns_of(inputs, q.device)
    context.run(("fused", kind), partial(_fused_program, context, inputs.spans, kind), values, tensors)
    return grads


class FusedKind(NamedTuple):
    """The facts of a fused backward that its launches depend on, besides its plan, shapes and target."""

    device_slots: tuple[str, ...]
    dlse: bool
    ordered: bool


def is_ordered(inputs: KernelInputs) -> bool:
    """Whether equal calls have equal gradients, bit for bit."""
    import torch

    return inputs.deterministic or torch.are_deterministic_algorithms_enabled()


def unfused(inputs: KernelInputs, q: Tensor, k: Tensor, grad_names: Names) -> str:
    """A reason why gradients are those of Triton's kernels, or ""."""
    g, tile = inputs.geometry, inputs.target.fused
    if grad_names != {"q", "k", "v"}:
        return "the fused Gluon backward computes gradients of q, k and v together, and no others"
    if 0 in (g.batch, g.q_len, g.kv_len):
        return "there is no query and key"
    dims = dims_of(inputs.plan, g, str(q.dtype).removeprefix("torch."))
    plan = backward_plan(inputs.plan, g)
    if why := refused(plan, dims, tile.arch):
        return why
    if plan.mask is None or not is_ordered(inputs):
        return ""
    assert inputs.spans is not None
    slices, rows = inputs.spans.columns((tile.block_q, tile.block_k)).bounds.shape[:2]
    few = slices * rows * -(-g.q_len // tile.block_q) <= MOST_TURNS
    return "" if few else "the turns of programs that add to dq in order are too many"


def numbers_of(g: Geometry) -> int:
    """The entries of a head in one plane of `Stats`: TMA steps by multiples of 16 bytes."""
    return -(-g.q_len // 4) * 4


def _fused_program(
    context: triton_launch.LaunchContext, spans: SpanSource | None, kind: FusedKind
) -> triton_launch.LaunchSequence:
    g, target, tile = context.geometry, context.target, context.target.fused
    assert tile is not None
    plan = backward_plan(context.plan, g)
    flags = {"dlse": kind.dlse, "ordered": kind.ordered}
    module = triton_launch.emitted_kernels(gluon_backward.emit, plan, target, context.dims(kind.device_slots), **flags)
    by_rows = -(-g.q_len // DELTA.block_q), g.heads, g.batch
    grid = grid_of(-(-g.kv_len // tile.block_k), g.kv_heads, g.batch, tile)
    steps = [
        triton_launch.LaunchStep("attention_delta", DELTA, by_rows, "", numbers={"length": numbers_of(g)}),
        triton_launch.LaunchStep("attention_backward", tile, grid, "columns", numbers={"STAGES": tile.num_stages}),
        triton_launch.LaunchStep("attention_convert", gluon_backward.CONVERT, by_rows, ""),
    ]
    kinds = triton_launch.Launch, FusedLaunch, triton_launch.Launch
    return triton_launch.LaunchSequence([of(context, module, step, spans) for of, step in zip(kinds, steps)])


def turns_of(inputs: KernelInputs, device: Any) -> Tensor:
    """`turns` on the device. Those of spans of the host are uploaded once; where the spans of every call are made on
    the device, so are the turns."""
    import torch

    tile = inputs.target.fused
    assert inputs.spans is not None
    records = inputs.spans.columns((tile.block_q, tile.block_k))
    tiles = -(-inputs.geometry.q_len // tile.block_q)
    if isinstance(records, Spans):
        at = np.arange(tiles, dtype=np.int32)
        return cached_on(records, ("turns", device), lambda: uploaded(turns(records, at).astype(np.int32), device))
    return turns(records, torch.arange(tiles, dtype=torch.int32, device=device)).to(torch.int32).contiguous()


def turns(records: Spans | DeviceSpans, tiles: Any) -> Any:
    """[slices, rows, tiles]: how many rows of smaller number see a tile, of those that the records list."""
    bounds, count = records.bounds, records.count
    seen: Any = 0
    for i in range(bounds.shape[2]):
        lo, hi = bounds[:, :, i, 0, None], bounds[:, :, i, 3, None]
        # ranges of a row have no tile in common
        seen = seen + ((tiles >= lo) & (tiles < hi) & (i < count[..., None]))
    return seen.cumsum(1) - seen


class GluonLaunch(triton_launch.Launch):
    """A launch whose tensor descriptors say how blocks lie in shared memory. Parts of a head have their own descriptors
    of the same tensors."""

    def __init__(self, context: triton_launch.LaunchContext, *of_launch: Any) -> None:
        self.page = context.plan.page
        super().__init__(context, *of_launch)
        described = {self.names[i] for i, *_ in self.blocks}
        self.names = [n.rstrip("01") if n in described else n for n in self.names]

    def blocks_of(self, g: Geometry, target: Target) -> dict[str, triton_launch.Block]:
        return blocks_of(target, g, self.page)

    def described(self, x: Tensor, block: triton_launch.Block) -> Any:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-untyped]

        plain = super().described(x, block)
        in_shared = layout(block, str(x.dtype).removeprefix("torch."))
        return TensorDescriptor(x, plain.shape, plain.strides, list(block), in_shared)


class FusedLaunch(GluonLaunch):
    """A launch of the fused backward."""

    def blocks_of(self, g: Geometry, target: Target) -> dict[str, triton_launch.Block]:
        return fused_blocks(target, g)


def fused_blocks(tile: Target, dims: Dims | Geometry) -> dict[str, triton_launch.Block]:
    """The blocks of the fused backward's descriptors: a warp group works on half the keys, and on a part of dq."""
    blocks = triton_launch.blocks(dims, replace(tile, block_k=tile.block_k // 2))
    part = gluon_backward.part_of(tile, dims.head_dim)
    return {**blocks, "Stats": (1, 1, 1, tile.block_q), "Acc": (1, 1, *part)}


def compile_reports(source: str, plan: LoopPlan, target: Target, dims: Dims, arch: str = H100.name) -> Reports:
    """Compile the forward kernel of a module, and its fused backward if it has one, and say which resources of a GPU
    they take.

    `compile_reports(emit(plan, target, dims), plan, target, dims)`. Registers are those of a thread before warp groups
    give theirs to each other. Raises BackendError for an architecture other than the target's."""
    check_compiles(arch)
    if arch != target.arch:
        raise BackendError(f"the text is written for {target.arch}, not {arch}; {INSTEAD}")
    kernels = vars(load_from_file(source))
    tiles: list[Any] = [("attention_forward", target, compiled_for)]
    tiles += [("attention_backward", target.fused, fused_compiled)] * ("attention_backward" in kernels)
    for name, tile, compile_one in tiles:
        compiled = compile_one(kernels[name], plan, tile, dims)
        registers, spills, mma = resources(compiled, MMA[GPUS[arch].products])
        shared, warps = int(compiled.metadata.shared), int(compiled.metadata.num_warps)
        block = tile.block_q, tile.block_k, warps, tile.num_stages
        yield KernelReport(name, arch, *block, registers, spills, shared, GPUS[arch].shared, mma)


def compiled_for(kernel: Any, plan: LoopPlan, target: Target, dims: Dims) -> Any:
    """Triton's compilation of the forward, called as on contiguous arrays."""
    of_call, blocks = (
        signature(kernel, plan, target, dims, STAGES=target.num_stages),
        partial(blocks_of, page=plan.page),
    )
    return _compiled(kernel, of_call, blocks, target, dims)


def fused_compiled(kernel: Any, plan: LoopPlan, tile: Target, dims: Dims) -> Any:
    """Triton's compilation of the fused backward, called as on contiguous arrays."""
    types, constants = signature(kernel, plan, tile, dims, STAGES=tile.num_stages)
    types |= {n: "*i32" for n in ("Added", "Turns") if n in types}
    return _compiled(kernel, (types, constants), fused_blocks, tile, dims)


def _compiled(
    kernel: Any, of_call: tuple[dict[str, str], dict[str, Any]], blocks: Any, target: Target, dims: Dims
) -> Any:
    import triton  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.experimental.gluon._runtime import GluonASTSource  # type: ignore[import-untyped]

    types, constants = of_call
    for name, block in blocks(target, dims).items():
        dtype = "float32" if name in OF_FLOAT32 else result_of(dims.dtype) if name[:3] == "Out" else dims.dtype
        types[name] = f"tensordesc<{DTYPES[dtype].triton}{list(block)},{layout(block, dtype)!r}>"
    hints = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(types.values()) if type[0] == "*"}
    gpu = GPUTarget(*architecture_of(target.arch).compiler)
    options = {"num_warps": target.num_warps, "enable_fp_fusion": True}
    return triton.compile(GluonASTSource(kernel, types, constants, hints), target=gpu, options=options)


def blocks_of(target: Target, dims: Dims | Geometry, page: int = 0) -> dict[str, triton_launch.Block]:
    """The blocks of the kernel's descriptors, one for each part of a head: a warp group reads and writes its part of a
    tile's queries. Keys in pages of so many tokens are loaded in pieces that lie in one page."""
    _, queries = groups_of(target.arch, dims.head_dim, dims.v_dim)
    head, values = (widths_of(target.arch, d) for d in (dims.head_dim, dims.v_dim))
    keys = tokens_of(target.block_k, page)
    of = {"Q": (queries, head), "K": (keys, head), "V": (keys, values), "Out": (queries, values)}
    turned = "V" if _is_8_bits(dims) else ""
    return {
        f"{n}{i}" if len(widths) > 1 else n: (1, 1, *((width, rows) if n == turned else (rows, width)))
        for n, (rows, widths) in of.items()
        for i, width in enumerate(widths)
    }


def _is_8_bits(dims: Dims | Geometry) -> bool:
    """Whether queries, keys and values have 8 bits."""
    return (dims.dtype if isinstance(dims, Dims) else dims.q.dtype) == FP8


def layout(block: triton_launch.Block, dtype: str) -> Any:
    """The layout in shared memory of such blocks."""
    from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]

    if block[-2] == 1:  # numbers of queries, which threads read
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, "float8e4nv" if dtype == FP8 else dtype))


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
    """The target of a call, with the tiles of Triton's backward, and of the fused one where it is written for the GPU
    and the head size. `tile` is the user's, of the forward alone."""
    # queries of 8 bits have no backward
    theirs = triton_tiles.target(plan, g, result_of(dtype), None, tuning, device, arch)
    if arch and arch not in WRITTEN:
        known = f"{', '.join(WRITTEN[:-1])} and {WRITTEN[-1]}"
        raise BackendError(f"the Gluon kernels are written for {known}, not {arch}; {INSTEAD}")
    gpu = arch or triton_tiles.architecture(device)
    gpu = gpu if gpu in WRITTEN else WRITTEN[0]  # whose source can be printed anywhere
    groups, rows = groups_of(gpu, g.head_dim, g.v_dim)
    if dtype == FP8:  # of shapes alone, too
        g = replace(g, q=OPERANDS[FP8], k=OPERANDS[FP8], v=OPERANDS[FP8])
    block = tile or (groups * rows, keys_of(plan, g, gpu))
    forward = Target("gluon", *block, num_warps=4, num_stages=stages(gpu, g, *block), arch=gpu)
    more = {n: getattr(theirs, n) for n in ("order", "dq", "dkv", "dv", "precision", "tanh")}
    return replace(forward, **more, fused=fused_tile(g, dtype, gpu, theirs.order))


def fused_tile(g: Geometry, dtype: str, arch: str, order: Any) -> Target | None:
    """The tile of the fused backward, or None where it is not written for such arrays."""
    if dtype not in HALVES or gluon_backward.refused_sizes(g.head_dim, g.v_dim, arch):
        return None
    queries = gluon_backward.queries_of(g.head_dim)
    return Target("gluon", queries, gluon_backward.KEYS, num_warps=4, num_stages=FUSED_STAGES, order=order, arch=arch)


def pays(plan: CallPlan, g: Geometry, dtype: str, arch: str = "") -> bool:
    """Whether the forward is faster than Triton's on torch's GPU, or on one of `arch`, which need not be here. On an
    H100 (benchmarks/results/gpu.json) Triton's takes 1.15 to 1.33 times as long at head dim 128 where queries see more
    than MEDIUM keys or most of those before them. It takes 1.07 times with 12 documents in 32,768 tokens, and less time
    under shorter windows, with shorter documents, and at head dim 64. At head dim 256 it takes 1.36 to 1.66 times as
    long where tiles have 64 keys, with tiles of 32 keys 0.97 to 1.14 times. At 192 it took 1.25 to 1.3 times as long
    before heads had parts. By the model of benchmarks/gpu_sim it takes 1.57 times as long, and 1.51 times with values
    of 128. Score mods with tables by key have not been measured, nor has it run on Blackwell.

    Over keys in pages, or keys that may never have been written, it has run on no GPU. By the model Triton's takes 1.54
    times as long over pages of 128 tokens at head dim 128, and 1.63 times over pages of 16. So it is taken where the
    kernel without pages was measured: at head dim 128."""
    import torch

    hopper = arch == H100.name if arch else torch.cuda.get_device_capability() == (9, 0)
    if not hopper or dtype not in HALVES or plan.dropout or plan.simplified.weight is not None:
        return False
    sizes = padded(g.head_dim), padded(g.v_dim)
    latent = sizes == (256, 128) and g.head_dim <= 192  # as the prefill of latent attention (MLA) has them
    if not (latent or sizes in ((128, 128), (256, 256))) or g.head_dim % 8 or g.v_dim % 8 or g.q_len < SHORTEST:
        return False
    stored = plan.host_program.stored
    if g.kv_dtype or (stored is not None and (stored.k_scale or stored.v_scale)):
        return False
    mask, score = plan.simplified.mask, plan.simplified.score
    if reads_by_key(score) or keys_of(plan, g, H100.name) < 64:
        return False
    # most tiles of a formula for every pair are partial, and those take longer over such keys
    if unwritten(plan) and (sizes != (128, 128) or by_pair(mask, None)):
        return False
    if mask is None:
        return True
    keys, closed = triton_tiles.keys_seen(mask, tuple(sorted(plan.scalars.items())))
    if closed or triton_tiles.grows(mask, keys):
        return keys > triton_tiles.MEDIUM
    if g.kv_len < LONG:
        return False
    rows = plan.rows((128, keys_of(plan, g, H100.name)))  # long ones among them Triton's forward divides
    processors = H100.processors if arch else torch.cuda.get_device_properties(0).multi_processor_count
    return not (isinstance(rows, Spans) and row_parts(rows, processors))


def keys_of(plan: CallPlan | None, g: Geometry, arch: str) -> int:
    """The keys of a tile."""
    mask, score = (None, None) if plan is None else (plan.simplified.mask, plan.simplified.score)
    if _is_8_bits(g) and score is not None:
        score = without_scales(score)
    hopper = architecture_of(arch).products == "wgmma"
    more = reads_by_key(mask, score) or (plan is not None and plan.dropout)
    head, values = (sum(widths_of(arch, d)) for d in (g.head_dim, g.v_dim))
    cleans = plan is not None and unwritten(plan)
    more = more or (cleans and (max(head, values) > 128 or by_pair(mask, score)))
    if max(head, values) > 192:
        return 32 if more or (hopper and by_pair(mask, score)) else 64
    if values > 128:
        return 32 if more or by_pair(mask, None) else 64
    # weights of 8 bits are float32 until their product: a register each
    more = more or ((head > 128 or (_is_8_bits(g) and values > 64)) and by_pair(mask, score))
    more = more or (not hopper and (score is not None or holds_positions(mask)))
    if more or mask is None or plan is None:
        return 64 if more else 128
    seen, _ = triton_tiles.keys_seen(mask, tuple(sorted(plan.scalars.items())))
    return 64 if seen <= triton_tiles.SHORT else 128


def unwritten(plan: CallPlan) -> bool:
    """Whether keys that no query sees may hold anything: the kernel then sets their values to 0."""
    program = plan.host_program
    return program.unwritten or (program.stored is not None and program.stored.page > 0)


def without_scales(score: Expr) -> Expr | None:
    """A score mod without the scales that are one number in a tile of 128 keys; None where nothing is left."""
    scales = (n for n in walk(score) if n.op == "lookup" and n.name in KV_INPUTS)
    once = {n: lit(1.0) for n in scales if once_a_tile(n, 128)}
    rest = simplify(substitute(score, once))
    return None if rest is SCORE else rest


def reads_by_key(*roots: Expr | None) -> bool:
    """Whether a table is read with an index that depends on the key."""
    by_node = levels(*(e for e in roots if e is not None))
    return any(n.op in ("lookup", "segment") and at & COLUMN for n, at in by_node.items())


def by_pair(mask: Expr | None, score: Expr | None) -> bool:
    """Whether a partial tile evaluates a formula for every query and key: what ends of rows leave of a mask, or a score
    mod that reads a position.

    >>> from frisket.dsl.sugar import k, q
    >>> by_pair((q >= k) & (q - k < 9), None), by_pair((q >= k) & ((q - k) % 3 > 0), None)
    (False, True)
    """
    ends = None if mask is None else ends_of(mask)
    hidden = mask is not None and (ends is None or ends.rest is not TRUE)
    return hidden or (score is not None and not uses(score).isdisjoint("qk"))


def holds_positions(mask: Expr | None) -> bool:
    """Whether partial tiles hold an Int for every position, because two comparisons read it; where rows have ends,
    these are computed before the loops.

    >>> from frisket.dsl.sugar import k, q
    >>> holds_positions((q - k >= 5) & (q - k <= 9)), holds_positions((q - k >= 5) | (q - k <= -5))
    (False, True)
    """
    if mask is None or ends_of(mask) is not None:
        return False
    at = levels(mask)
    read = Counter(a for n in walk(mask) if n.type is BOOL for a in n.args if a.type is INT and at[a] == POSITION)
    return max(read.values(), default=0) > 1


def stages(arch: str, g: Geometry, queries: int, keys: int) -> int:
    """The tiles of keys, and as many of values, that shared memory holds in addition to the queries. On Blackwell the
    tiles of keys and of values in all, because they take the slots of one ring."""
    head, values = (widths_of(arch, d) for d in (g.head_dim, g.v_dim))
    if _is_8_bits(g):
        fixed = queries * (sum(head) + 2 * sum(values))  # results have 16 bits, and separate memory
        return max(1, min(STAGES, (SHARED - fixed) // (keys * sum([*head, *values]))))
    fixed = queries * sum([*head, *added(head, values)]) * 2
    if architecture_of(arch).products == "tcgen05":
        return min(2 * STAGES, (SHARED - fixed) // (keys * max(*head, *values) * 2))
    return max(1, min(STAGES, (SHARED - fixed) // (keys * sum([*head, *values]) * 2)))
