"""Calls of FlashAttention 4 as data, and its tiles and heads: flags where they are the whole mask, else code.

The engine's meanings, from its source (4.0.0b36, `flash_attn/cute/interface.py`): scores are scaled, modified, then
masked. A row without a visible key, or whose scores are all -inf, has output 0 and lse -inf. With a sink its lse is the
sink; lse is a natural logarithm and holds the sink. With n queries and m keys, windows are counted from query i at key
i + m - n, both ends inclusive. Keys past `seqused_k` move that corner too, so a prefix of keys comes without a window.
Of pages that are no tile of keys, rows past `seqused_k` are not read; a page that is one is read whole.

The engine walks a row's partial tiles and then its full ones, each from the last to the first. It looks at the ends of
the sequences in the first tile of each walk only: lists ascend, and a last tile that is ragged is partial.

Tiles and heads are those that the engine's own configuration asks block-sparse tensors for. A key tile of the lists is
one of the kernel's. On Hopper a query tile is as well; on Blackwell the forward has two in flight. Backward lists have
the backward's own tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from typing import Any

import numpy as np

from frisket.dsl.errors import BackendError, LoweringError
from frisket.dsl.ir import COORDINATES, SIZES, free_names
from frisket.dsl.types import FLOAT
from frisket.grammar.memo import memo
from frisket.lowering.architectures import FLASH_CHECKED, architecture_of
from frisket.lowering.engines.flags import Flags, flags_of
from frisket.lowering.engines.forms import EngineForm, form_of
from frisket.lowering.kernels.cute.mods import Mods, emit
from frisket.lowering.kernels.features import FLASH, missing
from frisket.lowering.plan import Geometry, KernelInputs, LoopPlan, Spans, Target
from frisket.lowering.planner.planner import DeviceSpans
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.base import Block
from frisket.runtime.backends.engines.proof import EngineCall
from frisket.runtime.backends.triton.tiles import architecture
from frisket.runtime.calls.options import AS_CHOSEN, Tuning
from frisket.runtime.export.tile_lists import BlockSparseTensors
from frisket.runtime.plans.device import CallPlan, Values

Tensor = Any
READ = "4.0.0b36"  # the version whose source and compiled kernels the calls are held against
SMALLEST_TILE = 64  # keys of a tile, whatever the heads
INSTEAD = "take backend='triton'"


@dataclass(frozen=True, eq=False)
class FlashCall:
    """Arguments of one direction of a call, besides the arrays. Either `mods` holds the mask and `tiles` says where it
    is asked, or `left`, `right`, `used` and `documents` are the mask."""

    scale: float
    mods: Mods
    tables: tuple[Tensor, ...] = ()  # of `mods`, int32 or float32
    scalars: tuple[int | float, ...] = ()
    tiles: BlockSparseTensors | None = None
    order: tuple[Tensor, Tensor] | None = None  # of sums of gradients, for each list of `tiles`
    left: int | None = None
    right: int | None = None
    used: Tensor | None = None  # keys of each batch entry, int32 [batch]
    documents: Tensor | None = None  # cu_seqlens of queries and keys, int32 [2, documents + 1]
    longest: tuple[int, int] = (0, 0)  # queries and keys of a document
    pages: Tensor | None = None  # of each sequence, in order, int32 [batch, pages]
    proof: str = ""  # why flags are the mask; "" with tiles

    def __str__(self) -> str:
        lines = [f"softmax_scale = {self.scale:g}"]
        lines += [f"window_size_{n} = {x}" for n in ("left", "right") if (x := getattr(self, n)) is not None]
        lines += [f"seqused_k {_shown(self.used)}"] if self.used is not None else []
        lines += [f"page_table {_shown(self.pages)}"] if self.pages is not None else []
        if self.documents is not None:
            lines.append(f"cu_seqlens_q, cu_seqlens_k {_shown(self.documents[0])}, longest {self.longest}")
        lines += [f"{n} by code" for n in self.mods.functions]
        lines += [f"aux_tensors[{i}] = {n} {_shown(x)}" for i, (n, x) in enumerate(zip(self.mods.tables, self.tables))]
        lines += [f"aux_scalars[{i}] = {n} = {x}" for i, (n, x) in enumerate(zip(self.mods.scalars, self.scalars))]
        if self.tiles is not None:
            block = " x ".join(map(str, self.tiles.block_size))
            lines.append(f"block_sparse_tensors of tiles of {block}: {_shown(self.tiles.mask_block_idx)}")
        lines += [] if self.order is None else [f"deterministic, by turns {_shown(self.order[0])}"]
        return "\n".join(lines)


def _shown(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def call_of(inputs: KernelInputs, device: Any, *, gradients: bool = False) -> FlashCall:
    """The call of the forward, or with `gradients` the backward. BackendError for what the engine does not do."""
    plan, spans, g, target, tables = inputs.plan, inputs.spans, inputs.geometry, inputs.target, inputs.tables
    slots = {n: x.item() if hasattr(x, "item") else x for n, x in inputs.slots.items()}
    flags = flags_for(plan, spans, g, slots)
    if plan.pages is not None and (why := unpaged(plan, flags)):
        raise BackendError(f"FlashAttention 4 {why}\n  {INSTEAD}")
    if isinstance(flags, Flags):
        bare = replace(plan, mask=None, pages=None, unwritten=plan.unwritten and plan.pages is None)
        call = _by_flags(bare, flags, g, slots, tables, device)
        return call if plan.pages is None else replace(call, pages=tables[plan.pages])
    refuse_tiles(g, target, gradients, inputs.deterministic)
    block = (target.dq or target) if gradients else target
    shape = block.block_q, block.block_k
    records = (spans.columns if gradients else spans.rows)(shape)
    rows, columns = (-(-n // size) for n, size in zip((g.q_len, g.kv_len), shape, strict=True))
    tiles = tensors_of(records, rows if gradients else columns, shape, device)
    order = write_order(tiles, rows) if gradients and inputs.deterministic else None
    return replace(_coded(plan, g, slots, tables, device), tiles=tiles, order=order)


def check(g: Geometry) -> None:
    """Raise where the engine does not take a call; `features.CUTE` says what functions of positions cannot say."""
    needed = ["origins by batch entry"] * any(type(x) is not int for x in g.origin)
    needed += ["8-bit caches"] * bool(g.kv_dtype)
    if why := missing(FLASH, needed=needed):
        raise BackendError(f"{why}\n  {INSTEAD}")
    if g.heads % g.kv_heads:
        raise BackendError(f"FlashAttention 4 takes whole groups of query heads, not {g.heads} of {g.kv_heads}")


def refuse_tiles(g: Geometry, target: Target, gradients: bool, deterministic: bool) -> None:
    """Raise where the engine has no gradients of a mask that is given as code and tiles."""
    if not gradients:
        return
    if not blackwell(target.arch) and deterministic:
        raise BackendError(
            "FlashAttention 4 adds up gradients of queries in any order on Hopper where the mask is tiles\n"
            f"  give deterministic=False, or {INSTEAD}"
        )
    if blackwell(target.arch) and g.head_dim == 256:
        raise BackendError(
            f"FlashAttention 4 has no gradients of heads of 256 on Blackwell where the mask is tiles\n  {INSTEAD}"
        )


def text(plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, *_: Any) -> tuple[str, Target]:
    """The functions of mask and score mod, and their target. Where flags say the whole mask, it has no function."""
    placed = frozenset(n for n, x in zip("bhqk", g.origin, strict=True) if type(x) is not int or x)
    return mods_of(plan, placed).text, target


# -- flags ------------------------------------------------------------------------------------------


def flags_for(plan: LoopPlan, spans: Any, g: Geometry, slots: Values) -> Flags | str:
    """The mask as the engine's flags, or the reason why it is code and tiles."""
    form = form_of(ProgramExprs(plan.mask))
    if not isinstance(form, EngineForm):
        return str(form)
    known = host_tables(plan, spans)
    if known is None:
        return "documents are read from tables on the device"
    flags = flags_of(form, g, slots, known)
    return flags if isinstance(flags, str) else _unless(flags, plan)


def host_tables(plan: LoopPlan, spans: Any) -> dict[str, Any] | None:
    """The tables of the mask where their values are on the host; None where they are not."""
    read = {} if plan.mask is None else free_names(plan.mask)[1]
    if not read:
        return {}
    if getattr(spans, "on_device", True):
        return None
    tables = spans.work((128, 128)).tables
    return {n: np.asarray(tables[n]) for n in read if n in tables}


def _unless(flags: Flags, plan: LoopPlan) -> Flags | str:
    """The flags, or why the engine lacks these."""
    sides = [x for x in (flags.left, flags.right) if x is not None]
    if not all(isinstance(x, int) and x >= 0 for x in sides):
        return "windows are of one width, and hold the diagonal"
    if flags.queries is not None:
        return "queries past a length are no flag"
    if flags.documents is not None and (plan.score is not None or flags.keys is not None):
        return "positions of packed documents start again, which a score mod and a prefix of keys do not know"
    if flags.keys is not None and (sides or np.any(np.asarray(flags.keys[0]))):
        return "valid keys begin at 0 and stand without a window"
    return flags


def unpaged(plan: LoopPlan, flags: Flags | str) -> str:
    """A reason why the engine does not find a plan's pages; "" where it does. A hidden entry may be NaN, and the engine
    adds 0 times what it loads: every key that it loads is seen by the last query."""
    if isinstance(flags, str):
        return f"reads pages where flags are the whole mask: {flags}"
    if plan.score is not None or plan.value_scale is not None:
        return "reads pages without score mods and scales"
    if flags.left is not None or flags.documents is not None:
        return "loads whole tiles of keys: those before a window or of other documents may be recycled pages, with NaN"
    if flags.keys is not None and plan.page >= SMALLEST_TILE:
        return f"loads pages of {plan.page} keys whole: those past a sequence's last key may be NaN"
    return ""


def _by_flags(plan: LoopPlan, flags: Flags, g: Geometry, slots: Values, tables: Values, device: Any) -> FlashCall:
    used = documents = None
    longest = (0, 0)
    if flags.keys is not None:
        used = on_device(np.broadcast_to(flags.keys[1], g.batch).astype(np.int32), device)
    if flags.documents is not None:
        documents, longest = on_device(flags.documents, device), flags.longest
    assert flags.left is None or isinstance(flags.left, int)
    assert flags.right is None or isinstance(flags.right, int)
    mask: dict[str, Any] = {"left": flags.left, "right": flags.right, "used": used, "documents": documents}
    return replace(_coded(plan, g, slots, tables, device), **mask, longest=longest, proof=str(flags))


# -- code -------------------------------------------------------------------------------------------


def _coded(plan: LoopPlan, g: Geometry, slots: Values, tables: Values, device: Any) -> FlashCall:
    """The call of a plan's functions, without tiles."""
    import torch

    mods = mods_of(plan, frozenset(n for n, x in zip(COORDINATES, g.origin, strict=True) if x))
    kinds = {s.name: float if s.type is FLOAT else int for s in plan.slots}
    known = {n: kinds[n](x) for n, x in slots.items() if n in kinds} | dict(zip(SIZES, g.full, strict=True))
    known |= {f"first {n}": int(x) for n, x in zip(COORDINATES, g.origin, strict=True)}
    floats = {t.name for t in plan.tables if t.type is FLOAT}
    read = tuple(tables[n].to(device, torch.float32 if n in floats else torch.int32).contiguous() for n in mods.tables)
    return FlashCall(g.scale, mods, read, tuple(known[n] for n in mods.scalars))


@memo(group="sources")
def mods_of(plan: LoopPlan, placed: frozenset[str]) -> Mods:
    return emit(plan, placed=placed)


def tensors_of(spans: Spans | DeviceSpans, columns: int, block: tuple[int, int], device: Any) -> BlockSparseTensors:
    """The lists of partial and full tiles in each row, of `columns` tiles at most; B or H is 1 where all batch entries
    or heads have the same. Records that live on the device are never looked at from here."""
    import torch

    bounds, count = (on_device(x, device) for x in (spans.bounds, spans.count))
    used = torch.arange(bounds.shape[2], device=device) < count.unsqueeze(-1)
    lo, full_lo, full_hi, hi = (torch.where(used, x, 0) for x in bounds.long().unbind(-1))
    partial = _inside([(lo, full_lo), (full_hi, hi)], columns)
    full = _inside([(full_lo, full_hi)], columns)
    pick = on_device(told_apart(spans.slice_of).astype(np.int64), device)
    every = [x for kind in (partial, full) for x in _listed(kind)]
    lists = [x.index_select(0, pick.flatten()).view(*pick.shape, *x.shape[1:]) for x in every]
    return BlockSparseTensors(lists[0], lists[1], lists[2], lists[3], block)


def on_device(x: Any, device: Any) -> Tensor:
    """A tensor of an array of the host, or of a tensor."""
    import torch

    return (torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x).to(device)


def told_apart(slice_of: Any) -> Any:
    """The slices of batch entries and heads, [B, H]: 1 where all are equal."""
    slices = np.asarray(slice_of)
    slices = slices[:1] if (slices == slices[:1]).all() else slices
    return slices[:, :1] if (slices == slices[:, :1]).all() else slices


def _inside(runs: list[tuple[Tensor, Tensor]], columns: int) -> Tensor:
    """Whether a tile is in one of the runs [start, stop): bool [slices, rows, columns]."""
    import torch

    first = runs[0][0]
    steps = torch.zeros((*first.shape[:2], columns + 1), dtype=torch.int32, device=first.device)
    for start, stop in runs:
        one = (stop > start).int()
        steps.scatter_add_(-1, start.clamp(max=columns), one)
        steps.scatter_add_(-1, stop.clamp(max=columns), -one)
    return steps.cumsum(-1).narrow(-1, 0, columns) > 0


def _listed(kind: Tensor) -> tuple[Tensor, Tensor]:
    """(how many tiles each row has, which ones, ascending, then 0)."""
    import torch

    count = kind.int().sum(-1).int()
    index = kind.int().sort(dim=-1, descending=True, stable=True).indices.int()
    listed = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
    return count, torch.where(listed, index, 0)


def write_order(tensors: BlockSparseTensors, columns: int) -> tuple[Tensor, Tensor]:
    """The turn of each listed tile of a backward list among those that add to the same queries: those of earlier keys
    come first, so sums have one order. For the partial and the full lists."""
    import torch

    mask = _marked(tensors.mask_block_cnt, tensors.mask_block_idx, columns)
    full = _marked(tensors.full_block_cnt, tensors.full_block_idx, columns)
    either = (mask | full).int()
    turn = (either.cumsum(-2) - either).int()  # of [B, H, key tiles, query tiles]
    first, second = (torch.gather(turn, -1, i.long()) for i in (tensors.mask_block_idx, tensors.full_block_idx))
    return first, second


def _marked(count: Tensor, index: Tensor, columns: int) -> Tensor:
    """Whether a row lists a tile: bool [B, H, rows, columns]."""
    import torch

    listed = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
    marks = torch.zeros((*index.shape[:-1], columns + 1), dtype=torch.bool, device=index.device)
    return marks.scatter_(-1, torch.where(listed, index.long(), columns), True).narrow(-1, 0, columns)


def version() -> str:
    """The version of flash-attn-4 that is installed; "" where no package says."""
    try:
        return package_version("flash-attn-4")
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class FlashArguments:
    """The facts of a call before its executors make it from a plan (`FlashCall`)."""

    gradients: bool  # whether the engine makes them, or generated kernels do


def engine_of_plans(call: EngineCall) -> tuple[Flags | str, FlashArguments, tuple[str, ...]] | str:
    """The mask as flags, or in words where it is code and tiles; its clauses; and why the engine has neither. The code
    is printed, as the kernel that is built of it needs it."""
    g, have = call.geometry, version()
    if have != READ:  # its functions are private, and may mean another thing
        return f"flash-attn-4 {have or 'of no version'} is installed, and calls are held against {READ}"
    try:
        chosen = call_target(call.plan, g, call.dtype)
        check(g)
        work = call.plan.work((chosen.block_q, chosen.block_k), proofs=True)
        flags = flags_for(work.plan, call.plan, g, work.slots)
        by_flags = isinstance(flags, Flags)
        placed = frozenset(n for n, x in zip(COORDINATES, g.origin, strict=True) if x)
        mods_of(replace(work.plan, mask=None) if by_flags else work.plan, placed)
    except (BackendError, LoweringError) as error:
        return str(error).partition("\n")[0]
    arguments = FlashArguments(not no_gradients(g, chosen, call.deterministic, by_flags))
    if isinstance(flags, Flags):
        form = form_of(ProgramExprs(work.plan.mask))
        return flags, arguments, form.proofs if isinstance(form, EngineForm) else ()
    return f"code and tiles of {chosen.block_q} x {chosen.block_k}", arguments, ("code",)


def no_gradients(g: Geometry, chosen: Target, deterministic: bool, by_flags: bool) -> str:
    """A reason why the engine has not every gradient of a call; "" where it has."""
    if blackwell(chosen.arch) and g.head_dim == 256:
        return "heads of 256 on Blackwell have no gradient of lse"
    try:
        if not by_flags:
            refuse_tiles(g, chosen, True, deterministic)
    except BackendError as error:
        return str(error)
    return ""


# -- tiles and heads ---------------------------------------------------------------------------------


def call_target(
    plan: CallPlan | None,
    g: Geometry,
    dtype: str,
    tile: Block | None = None,
    tuning: Tuning = AS_CHOSEN,
    device: Any = None,
    arch: str | None = None,
) -> Target:
    """The target of a call; `dq` has the tiles of the backward. The engine chooses its tiles: a `tile` must be that."""
    if arch and arch not in FLASH_CHECKED:
        raise BackendError(f"FlashAttention 4 is checked on {' and '.join(FLASH_CHECKED)}, not {arch}; {INSTEAD}")
    gpu = arch or architecture(device)
    gpu = gpu if gpu in FLASH_CHECKED else FLASH_CHECKED[0]  # whose source can be printed anywhere
    if why := refused_heads(g, gpu):
        raise BackendError(f"{why}\n  {INSTEAD}")
    block = forward_block(g, gpu)
    if tile is not None and tuple(tile) != block:
        raise BackendError(f"FlashAttention 4 takes tiles of {block[0]} x {block[1]} for this head, leave out `tile`")
    back = Target("flash", *backward_block(g, gpu), num_warps=12, arch=gpu)
    return Target("flash", *block, num_warps=12, arch=gpu, dq=back)


def blackwell(arch: str) -> bool:
    """Whether the engine has its kernels for Blackwell there, and not those for Hopper."""
    return architecture_of(arch).products == "tcgen05"


def forward_block(g: Geometry, arch: str) -> Block:
    """The queries and keys of a tile of the forward's lists."""
    if blackwell(arch):
        return 256, 128
    if g.head_dim <= 96:
        return 192, 128
    if g.head_dim <= 128:
        return 128, 128
    return (128, 128 if g.v_dim <= 128 else 112) if g.head_dim <= 192 else (128, 80)


def backward_block(g: Geometry, arch: str) -> Block:
    """The queries and keys of a tile of the backward's lists."""
    if blackwell(arch):  # heads of 192 have two blocks of threads for 256 keys
        return 128, 256 if g.head_dim == 192 else 128
    if g.head_dim <= 64:
        return 128, 128
    if g.head_dim <= 128:
        return 64, 128
    return 64, 96 if g.head_dim <= 192 else 64


def refused_heads(g: Geometry, arch: str) -> str:
    """A reason why the engine does not take heads of these sizes; "" where it does."""
    d, v = g.head_dim, g.v_dim
    if not blackwell(arch) or d % 8 or v % 8:
        return missing(FLASH, arrays=g)
    known = (min(d, v) >= 8 and max(d, v) <= 128) or (d, v) in ((192, 128), (256, 256))
    which = "from 8 to 128, 192 with values of 128, and 256"
    return "" if known else f"FlashAttention 4 takes head sizes {which} on Blackwell, not {d} and {v}"
