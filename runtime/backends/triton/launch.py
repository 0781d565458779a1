"""Launches of Triton kernels: the part that calls of one kind share is bound once, and a call brings its tensors.

`bound` gives the shared part, a `Launch` lays out a kernel's arguments beforehand, and a `LaunchSequence` is called
with the tensors: `run(context.values(slots, tables), {"Q": q, "K": k, "V": v, "Out": out, "Lse": lse})`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import BackendError, ParameterError, ShapeError
from frisket.dsl.ir import SIZES
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.grammar.memo import Memo, cached_on, memo, remember
from frisket.lowering.kernels.triton.module import Argument, Dims, arguments, padded, rows_of_tables
from frisket.lowering.kernels.triton.module import near as near_rows
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Geometry, LoopPlan, Spans, SpanSource, TableUse
from frisket.lowering.planner.planner import DeviceSpans
from frisket.runtime.calls.arrays import capturing, keep_for_graphs, uploaded
from frisket.runtime.machine.modules import load_from_file
from frisket.runtime.plans.device import Values

from .tiles import smaller

Tensor = Any
Block = tuple[int, int, int, int]  # of a tensor descriptor
Grid = tuple[int, int, int]
Shaped = Mapping[str, tuple[tuple[int, ...], Any]]  # (shape, dtype) by the kernels' names
LETTERS = {"Q": "q", "K": "k", "V": "v", "Out": "o", "DOut": "g"}  # of strides
MAX_NARROW_STRIDE = 1 << 20  # strides up to this keep the offsets of any tile in 32 bits
GRID = 65_535  # the most programs that axes 1 and 2 of a grid have
STEP = 16  # entries, a stride of a tensor descriptor
KEPT = 64  # kinds of calls of one plan, and strides of one kernel
_smaller = Memo("smaller tiles", 256)  # targets by plan, target and arrays: those that a GPU has room for


class TooLargeError(BackendError):
    """A kernel that takes more of a resource than a GPU has. `share` is the GPU's part, `fixed` that of Target."""

    kernel, share, fixed = "", 1.0, False


class CompileJob(NamedTuple):
    """A kernel that a launch needs: a function of Triton, and `compile`, which compiles it for the launch's arguments
    or finds it."""

    function: Any
    compile: Callable[[], Any]


@dataclass(frozen=True, eq=False)
class DryRun:
    """A run of calls on tensors without memory, as on a device of torch or on a GPU of `arch` that is not here.
    Launches run nothing, and add to `jobs`."""

    device: Any = None
    arch: str = ""
    jobs: list[CompileJob] = field(default_factory=list)


dry_run: ContextVar[DryRun | None] = ContextVar("dry run", default=None)  # see `ahead`

# equal texts are one kernel: what Triton compiled for one serves all
loaded_kernels = memo(group="kernels")(load_from_file)


@dataclass(frozen=True)
class KernelModule:
    """Kernels and what their parameters are called (another plan of the same shape may name its tables otherwise)."""

    kernels: Mapping[str, Any]
    arguments: Mapping[str, Argument]
    device_slots: tuple[str, ...]  # whose values they read on the device


@dataclass(frozen=True, eq=False)  # `numbers` may be arrays
class LaunchStep:
    """One launch of a kernel. `side` is the method of a SpanSource that its records come from; a kernel without records
    reads no slots and no tables. The records are of tiles of `block`, or of the tile where that is None. `numbers` are
    values of parameters that are the launch's own, and `leaves` the (shape, dtype) of arrays that it writes for the
    next launch, by the kernel's names."""

    name: str
    tile: Target
    grid: Grid
    side: Literal["", "rows", "columns"]
    block: tuple[int, int] | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)
    leaves: Shaped = field(default_factory=dict)

    @property
    def records(self) -> tuple[int, int]:
        return self.block or (self.tile.block_q, self.tile.block_k)


@memo(group="kernels")
def emitted_kernels(
    emit: Callable[..., str], plan: LoopPlan, target: Target, dims: Dims, *parts: Any, **flags: Any
) -> KernelModule:
    """The kernels of the text that `emit` writes of a plan, by their names."""
    source = emit(plan, target, dims, *parts, **flags)
    kernels = {n: x for n, x in vars(loaded_kernels(source)).items() if n.startswith("attention_")}
    return KernelModule(kernels, arguments(plan), dims.device_slots)


# -- what calls have in common ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class KernelArgs:
    """Slots and tables of a call as kernels read them, in the order of the plan. `tensors` are the tables, then the
    `device_slots`, whose values are on the device; `key` is all of them that a compiled kernel depends on. `spans`
    refers to the source of the call's spans, where every call may have another, `span_tensors` holds what it gave.

    The fields never change. The class is not frozen, because it would take five times as long to make, and every call
    with a learned table makes one."""

    sources: tuple[Mapping[str, Any], Mapping[str, Tensor]]
    numbers: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    device_slots: tuple[str, ...]
    key: tuple[Any, ...]
    spans: Any = None
    span_tensors: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict)


NO_VALUES = KernelArgs(({}, {}), (), (), (), ())


class LaunchContext:
    """A plan bound to shapes, dtypes and a device. `launches` is where executors keep what they made of it; plans that
    differ in the tables of a device alone share it, and their `spans` are asked at every launch."""

    def __init__(
        self, plan: LoopPlan, g: Geometry, target: Target, q: Tensor, k: Tensor, spans: Any, launches: dict[Any, Any]
    ) -> None:
        self.plan, self.geometry, self.device = plan, g, q.device
        self.dtypes = [str(x.dtype).removeprefix("torch.") for x in (q, k)]
        self._arrays = plan, target, g.head_dim, g.v_dim, *self.dtypes, q.device
        fitting: tuple[Target, frozenset[str]] = _smaller.get(self._arrays) or (target, frozenset())
        self.target, self.shrunk = fitting
        self.spans, self.launches = spans, launches
        self._cached: KernelArgs | None = None
        self._span_tensors: dict[Any, tuple[Tensor, ...]] = {}
        self._described: dict[Any, bool] = {}
        self.planes: dict[Any, str | None] = {}  # of captured gradients: which of "b" and "h" share a table's places

    def run(self, kind: Any, make: Callable[[], Any], *arguments: Any) -> Any:
        """Launch what `make` lays out for calls of one kind, in smaller tiles where the first ones do not fit."""
        launch = self.launches.get(kind)
        if launch is None:
            launch = self.launches[kind] = make()
        try:
            return launch(*arguments)
        except TooLargeError as error:
            self.shrink(error)
        # again by the same way: another kernel of the call may not fit either
        return self.run(kind, make, *arguments)

    def shrink(self, error: TooLargeError) -> None:
        """Take the next smaller tile for a kernel that does not fit into a GPU, from now on for all such calls. Raise
        the error where the user gave the tile, or the kernel's tile is the smaller one already."""
        less = None if error.fixed or error.kernel in self.shrunk else smaller(self.target, error.kernel, error.share)
        if less is None:
            raise error
        self.target, self.shrunk = less, self.shrunk | {error.kernel}
        _smaller.put(self._arrays, (self.target, self.shrunk))
        self.launches.clear()  # all are laid out for the larger tile

    @cached_property
    def placed(self) -> Geometry:
        """The geometry with vectors of the origin on the device: copied once, no call waits for them."""
        g, at = self.geometry, origin(self.geometry, self.device)
        return replace(g, origin=tuple([at[f"{n}_origin"] for n in "bhqk"]), sizes=g.full)

    def dims(self, device_slots: tuple[str, ...] = ()) -> Dims:
        """The part of such calls that the kernels' texts depend on."""
        g, (dtype, keys) = self.geometry, self.dtypes
        return Dims(g.head_dim, g.v_dim, dtype, g.heads // g.kv_heads, "" if keys == dtype else keys, device_slots)

    def describes(self, *tensors: Tensor) -> bool:
        """Whether tensor descriptors can have the strides of these; asked once for each."""
        steps = tuple([x.stride() for x in tensors])
        fits = self._described.get(steps)
        if fits is None:
            remember(self._described, steps, fits := describable(*tensors), KEPT)
        return fits

    def values(self, slots: Values, tables: Values) -> KernelArgs:
        """The values that kernels read. Of read-only mappings, which are those of many calls, they are made once.
        What is one call's own is not held, for its tensors may hold the graph of a step."""
        cached = self._cached
        if cached is not None and cached.sources[0] is slots and cached.sources[1] is tables:
            return cached
        values = _values(self.plan, slots, tables, self.spans, self._span_tensors)
        if type(slots) is type(tables) is MappingProxyType:
            self._cached = values
        return values


def bound(plan: LoopPlan, spans: Any, geometry: Geometry, target: Target, q: Tensor, k: Tensor) -> LaunchContext:
    """The part that calls of one plan and geometry share, kept by `spans`, or by the plan where it needs none. Plan,
    geometry and target count by identity, so it keeps them."""
    of: dict[Any, LaunchContext] = vars(plan if spans is None else spans).setdefault("bound", {})
    key = id(plan), id(geometry), id(target), q.dtype, k.dtype, q.device
    context = of.get(key)
    if context is None:
        common = getattr(spans, "common", None)
        more = (None, {}) if common is None else (ref(spans), bound(plan, common, geometry, target, q, k).launches)
        remember(of, key, context := LaunchContext(plan, geometry, target, q, k, *more), KEPT)
    return context


def shared(g: Geometry, device: Any) -> dict[str, Any]:
    """Values of parameters by which kernels know their place."""
    sizes = dict(zip(SIZES, g.full, strict=True))
    return {"scale": g.scale, "heads": g.heads, "q_len": g.q_len, "kv_len": g.kv_len, **sizes, **origin(g, device)}


def runs_here(kernel: Any, device: Any) -> None:
    """Raise where a kernel cannot run on tensors of `device`."""
    interpreted = type(kernel).__name__ == "InterpretedFunction"
    if device.type == "cpu" and not interpreted:
        raise BackendError(
            "Triton kernels need a GPU: on the CPU take backend='aten', or set TRITON_INTERPRET=1 before "
            "Python starts to run them in Triton's interpreter"
        )
    if device.type not in ("cpu", "cuda"):
        raise BackendError(f"no Triton kernel runs on {device.type} tensors; move them to 'cuda' or 'cpu'")


def origin(g: Geometry, device: Any) -> dict[str, Any]:
    """`b_origin` ... `k_origin`; q and k are int32 [batch] together as soon as one of them is a vector."""
    b, h, *starts = g.origin
    per_batch = any(np.ndim(s) for s in starts)
    if per_batch:
        starts = [uploaded(np.broadcast_to(s, g.batch).astype(np.int32), device) for s in starts]
    else:
        starts = [int(s) for s in starts]
    return {f"{n}_origin": x for n, x in zip("bhqk", (int(b), int(h), *starts))} | {"ORIGIN_PER_BATCH": per_batch}


def shares_values(k: Tensor, v: Tensor) -> bool:
    """Whether values are the first numbers of keys, in the same memory: `v` is `k[..., : v.shape[3]]`."""
    return bool(k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and k.shape[3] >= v.shape[3])


def far(*tensors: Tensor) -> bool:
    """Whether the offsets within some tile of these could leave 32 bits, or a view is negated: then `near`
    looks closer."""
    strides = [stride for x in tensors for stride in x.stride()[2:]]
    return bool(max(strides) > MAX_NARROW_STRIDE) or True in [x.is_neg() for x in tensors]


def near(x: Tensor, rows: int) -> Tensor:
    """The tensor with its signs in memory, copied where the offsets within a tile of so many rows leave 32 bits."""
    x = x.resolve_neg()
    along, across = x.stride()[2:]
    return x if rows * along + x.shape[3] * across < 1 << 31 else x.contiguous()


# -- slots and tables -------------------------------------------------------------------------------------------------

_CONVERT: Mapping[Any, Any] = {INT: int, BOOL: bool, FLOAT: float}


def _values(plan: LoopPlan, slots: Values, tables: Values, spans: Any, span_tensors: dict[Any, Any]) -> KernelArgs:
    device_slots = tuple(s.name for s in plan.slots if hasattr(slots[s.name], "data_ptr"))
    numbers = tuple(_CONVERT[s.type](slots[s.name]) for s in plan.slots if s.name not in device_slots)
    arrays = [_readable(use, tables[use.name]) for use in plan.every_table]
    wide = [not -(1 << 31) <= x < 1 << 31 for x in numbers if type(x) is int]  # Triton's type of such an argument
    key = (*wide, *[(x.dtype, x.shape, x.stride()) for x in arrays], *[slots[n].dtype for n in device_slots])
    tensors = (*arrays, *[_signs_in_memory(slots[n]) for n in device_slots])
    return KernelArgs((slots, tables), numbers, tensors, device_slots, key, spans, span_tensors)


def refused_shape(use: TableUse, shape: Sequence[int]) -> str:
    """A reason why kernels do not read a table of this shape; "" where they do."""
    fits = len(shape) == use.rank and 0 not in shape
    return "" if fits else f"table `{use.source}` has {use.rank} axes of at least one entry, not shape {list(shape)}"


def _signs_in_memory(x: Tensor) -> Tensor:
    return x.resolve_neg() if x.is_neg() else x  # to ask takes a tenth of the time of a copy that is none


def _readable(use: TableUse, table: Tensor) -> Tensor:
    """The table as the kernel reads it: Bool as bytes, narrow integers as int32, the last axis below 2**31, signs in
    memory."""
    import torch

    table = _signs_in_memory(table)
    if why := refused_shape(use, table.shape):
        raise ParameterError(why)
    if use.type is BOOL:
        table = table.to(torch.bool).view(torch.int8)
    elif use.type is INT and table.dtype not in (torch.int32, torch.int64):
        table = table.to(torch.int32)
    if table.shape[-1] * table.stride(-1) >= 2**31:
        table = table.contiguous()
    return table


# -- launching --------------------------------------------------------------------------------------------------------


class Launch:
    """A kernel with all of its arguments but those a call brings: tensors, and the values of slots and tables.

    At every launch Triton asks again which of its compiled kernels the arguments want. It goes by their types, by
    whether pointers and strides are divisible by 16 and by which strides are 1. All of that is decided by the types and
    strides of a call's tensors and by how their pointers are aligned. Where those were seen before, the kernel is
    known and is run at once.
    """

    def __init__(
        self, context: LaunchContext, module: KernelModule, step: LaunchStep, spans: SpanSource | None
    ) -> None:
        """The launch of a kernel of the module. `spans` are asked if it reads a table of them."""
        kernel, plan, device, target = module.kernels[step.name], context.plan, context.device, step.tile
        if dry_run.get() is None:
            runs_here(kernel, device)
        self.step, self.kernel, self.grid = step, kernel, (*step.grid, 1, 1)[:3]
        _check_grid(self.grid)
        self.tile, self.fixed = (target.block_q, target.block_k), target.fixed
        self.options = target.options
        self.device: Any = device if device.type == "cuda" else None
        self.narrow = _narrow() if self.device else None
        at = {n: i for i, n in enumerate(kernel.arg_names)}
        fixed = {**shared(context.geometry, device), "BLOCK_Q": target.block_q, "BLOCK_K": target.block_k}
        fixed |= {n: uploaded(x, device) if isinstance(x, np.ndarray) else x for n, x in step.numbers.items()}
        moving: tuple[str, ...] = ()
        if "Spans" in at:
            if spans is None:
                raise BackendError("this plan has no closed-form bounds: pass the spans of its layout")
            records = getattr(spans, step.side)(step.records)
            fixed |= span_tables(records, device)
            if context.spans is not None and isinstance(records, DeviceSpans):
                moving = tuple(n for n in MOVING if n in at)
        self.moving = len(moving)
        self.span_key = (step.side, step.records, moving) if moving else None  # what the spans of every call are asked
        slots, uses, device_slots = (plan.slots, plan.every_table, module.device_slots) if step.side else ((), (), ())
        tables, of_rows = [module.arguments[t.name] for t in uses], rows_of_tables(plan)
        numbers = [module.arguments[s.name].name for s in slots if s.name not in device_slots]
        read = [*[t.name for t in tables], *[module.arguments[n].name for n in device_slots]]
        extents = [(*t.sizes, *t.strides) for t in tables]
        known = {"NEAR", "pool", *read, *numbers, *fixed}.union(*extents)
        # what is nowhere known is a tensor of the call
        self.names = [n for n in at if n not in known and not n.startswith("stride_")]
        letters = [x if f"stride_{x}b" in at else "" for x in (LETTERS.get(n, "") for n in self.names)]
        self.strides = [[at[f"stride_{x}{axis}"] for axis in "bhsd"] if x else [] for x in letters]
        described = self.blocks_of(context.geometry, target)
        described = {n: described[n] for n, x in zip(self.names, letters) if n in described and not x}
        self.blocks = [(self.names.index(n), at[n], block) for n, block in described.items()]
        self.extents = [[at[n] for n in names] for names in extents]
        self.pointers = [at[n] for n in (*self.names, *read, *moving)]
        self.near = at.get("NEAR")
        self.rows = [(i, axis) for i, t in enumerate(uses) if (axis := of_rows.get(t.name)) is not None]
        of_keys = (i for i, n in enumerate(self.names) if n in ("K", "K0"))
        self.pool = (at["pool"], next(of_keys)) if "pool" in at else None  # its pages are counted at every call
        self.numbers = [at[n] for n in numbers]
        filled = {*self.pointers, *self.numbers, *(self.pool or ())[:1], self.near}.union(*self.strides, *self.extents)
        self.blank: list[Any] = [None if i in filled else fixed[n] for n, i in at.items()]
        self.spills = 0  # registers of a thread, by Triton, of the kernels that were launched
        self.known: dict[Any, tuple[Any, list[Any], list[tuple[int, int, list[int], list[int]]]]] = {}

    def __call__(self, values: KernelArgs, *tensors: Tensor) -> None:
        if self.device is None:
            return self._run(values, tensors)
        from torch import cuda

        if cuda.current_device() == self.device.index:  # entering a device takes longer than to compare
            return self._run(values, tensors)
        with cuda.device(self.device):
            return self._run(values, tensors)

    def _run(self, values: KernelArgs, tensors: tuple[Tensor, ...]) -> None:
        operands = (*tensors, *values.tensors)
        if capturing(self.device):
            keep_for_graphs(self)
        if self.span_key is not None:
            span_tensors = values.span_tensors.get(self.span_key)
            if span_tensors is None:
                side, block, names = self.span_key
                spans = getattr(values.spans(), side)(block)
                span_tensors = values.span_tensors[self.span_key] = tuple([MOVING[n](spans) for n in names])
            operands += span_tensors
        places = [x.data_ptr() for x in operands]
        low = 0
        for place in places:
            low |= place
        kinds = [(x.dtype, x.stride()) for x in tensors]
        # nearly always all pointers are aligned: one test of them together saves a flag for each
        key: tuple[Any, ...] = (values.key, *kinds, tuple([p & 15 == 0 for p in places]) if low & 15 else None)
        if self.narrow is not None:
            key += tuple(map(self.narrow, operands))
        if self.pool is not None:
            key += (tensors[self.pool[1]].shape[0],)
        entry = self.known.get(key)
        if entry is None:
            self._first(key, values, operands)
            return
        run, arguments, described = entry
        arguments = arguments.copy()
        for i, place in zip(self.pointers, places):
            arguments[i] = place
        for i, at, shape, strides in described:
            arguments[at] = WarmDescriptor(shape, strides, places[i])
        for i, x in zip(self.numbers, values.numbers):
            arguments[i] = x
        run(*arguments)

    def _first(self, key: Any, values: KernelArgs, operands: tuple[Tensor, ...]) -> None:
        """Launch by Triton's own way, which compiles what is not compiled yet; an interpreted kernel has no other."""
        arguments = self.blank.copy()
        first_table = len(operands) - len(values.tensors) - self.moving
        for places, x in zip(self.strides, operands):
            for i, stride in zip(places, x.stride()):
                arguments[i] = stride
        for places, x in zip(self.extents, operands[first_table:]):
            for i, extent in zip(places, (*x.shape, *x.stride()), strict=True):
                arguments[i] = extent
        if self.pool is not None:
            arguments[self.pool[0]] = operands[self.pool[1]].shape[0]
        if self.near is not None:
            rows = [(operands[first_table + i], axis) for i, axis in self.rows]
            arguments[self.near] = all(near_rows(x.shape, x.stride(), axis, self.tile[0]) for x, axis in rows)
        for i, number in zip(self.numbers, values.numbers, strict=True):
            arguments[i] = number
        for i, x in zip(self.pointers, operands, strict=True):
            arguments[i] = x
        for i, at, block in self.blocks:
            arguments[at] = self.described(operands[i], block)
        if (dry := dry_run.get()) is not None:
            compile = partial(self.kernel.warmup, *arguments, grid=self.grid, **self.options)
            dry.jobs.append(CompileJob(self.kernel, compile))
            return
        from triton import OutOfResources, TritonError  # type: ignore[import-untyped]
        from triton.runtime.errors import InterpreterError  # type: ignore[import-untyped]

        try:
            compiled = self.kernel[self.grid](*arguments, **self.options)
        except OutOfResources as error:
            refused = TooLargeError(self._too_large(error))
            refused.kernel, refused.fixed = self.kernel.__name__, self.fixed
            refused.share = error.limit / error.required
            raise refused from error
        except (TritonError, RuntimeError) as error:
            compiles = isinstance(error, TritonError) or "PassManager" in str(error)  # others are the driver's
            if not compiles or isinstance(error, InterpreterError):
                raise
            raise BackendError(self._not_compiled(error)) from error
        if compiled is None:  # the interpreter has no compiled kernel to run again
            return
        warm = [x.data_ptr() if hasattr(x, "data_ptr") else x for x in arguments]
        shapes = [(i, at, arguments[at].shape, arguments[at].strides) for i, at, _ in self.blocks]
        for _, at, _ in self.blocks:
            warm[at] = None  # the descriptor holds a tensor
        self.spills = max(self.spills, int(getattr(compiled, "n_spills", None) or 0))
        remember(self.known, key, (compiled[self.grid], warm, shapes), KEPT)

    def blocks_of(self, g: Geometry, target: Target) -> dict[str, Block]:
        """The blocks of tensor descriptors that kernels may have, by the parameters' names."""
        return blocks(g, target)

    def described(self, x: Tensor, block: Block) -> Any:
        """The tensor descriptor of an array, in the kernel's language."""
        return descriptor(x, block)

    def _not_compiled(self, error: Exception) -> str:
        queries, keys = self.tile
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return (
            f"Triton cannot compile {self.kernel.__name__} in tiles of {queries} queries x {keys} keys: {lines[-1]}\n"
            "  give another tile, tile=(64, 32), or take backend='aten'; please report the mask and the shapes"
        )

    def _too_large(self, error: Any) -> str:
        (queries, keys), unit = self.tile, "bytes of " if error.name == "shared memory" else ""
        warps, stages = self.options["num_warps"], self.options["num_stages"]
        advice = "leave out `tile` and `kernel_options`, or give smaller ones" if self.fixed else "give a smaller tile"
        return (
            f"{self.kernel.__name__} takes {error.required} {unit}{error.name} in tiles of {queries} queries x {keys} "
            f"keys, {warps} warps and {stages} stages; this GPU has {error.limit}\n"
            f"  {advice}: tile=(64, 32)"
        )


@dataclass(frozen=True, eq=False)
class LaunchSequence:
    """The launches of calls of one kind in their order, over tensors by the names of the kernels' parameters."""

    launches: list[Launch]

    def __call__(self, values: KernelArgs, tensors: dict[str, Tensor]) -> None:
        """Run them. What a launch leaves for the next one is added to the tensors."""
        import torch

        for launch in self.launches:
            for name, (shape, dtype) in launch.step.leaves.items():
                tensors.pop(name, None)  # the memory that an earlier launch left is free again
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype.__name__), device=tensors["Q"].device)
            launch(values if launch.step.side else NO_VALUES, *[tensors[n] for n in launch.names])


class WarmDescriptor:
    """A tensor descriptor as Triton's launcher reads it, for a compiled kernel: shape, strides and, by the methods of a
    tensor, the address. It holds no tensor."""

    __slots__ = ("place", "shape", "strides")
    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, shape: list[int], strides: list[int], place: int) -> None:
        self.shape, self.strides, self.place = shape, strides, place

    @property
    def base(self) -> WarmDescriptor:
        return self

    def data_ptr(self) -> int:
        return self.place


def descriptor(x: Tensor, block: Block) -> Any:
    """The tensor descriptor of an array [batch, heads, length, dim]. The stride of an axis of one entry may be
    anything: there it is one that descriptors may have."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

    # torch says nothing of the stride of such an axis, and TMA refuses one that is no multiple of 16 bytes
    strides = [stride if size > 1 else STEP for size, stride in zip(x.shape[:3], x.stride())]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], list(block))


def blocks(dims: Geometry | Dims, target: Target) -> dict[str, Block]:
    """The blocks of the tensor descriptors of a target's kernel, by the parameters' names."""
    dim, dim_v = padded(dims.head_dim), padded(dims.v_dim)
    queries, keys = target.block_q, target.block_k
    return {"Q": (1, 1, queries, dim), "K": (1, 1, keys, dim), "V": (1, 1, keys, dim_v), "DOut": (1, 1, queries, dim_v)}


def describable(*tensors: Tensor) -> bool:
    """Whether tensor descriptors can have the strides of these arrays [batch, heads, length, dim]. They are 1 along the
    head dimension, else multiples of 16 bytes, where there is more than one entry."""
    steps = [s * x.itemsize for x in tensors for n, s in zip(x.shape[:3], x.stride()) if n != 1]
    return all(x.stride(3) == 1 for x in tensors) and all(s > 0 and s % 16 == 0 for s in steps)


def _check_grid(grid: tuple[int, ...]) -> None:
    """Raise where a call has more heads or batch entries than these axes of a GPU's grid have programs."""
    for what, count in (("heads", grid[1]), ("batch entries", grid[2])):
        if count > GRID:
            raise ShapeError(
                f"a call of Triton's kernels has at most {GRID} {what}, this one {count}\n"
                f"  give it in parts: q.split(32768), k.split(32768) and v.split(32768) along the {what}, with origin= "
                "and sizes= where the mask or score mod reads b or h"
            )


def _narrow() -> Callable[[Tensor], bool] | None:
    """A test that ROCm's compiler needs of a pointer: whether 31 bits reach every byte behind it."""
    from torch import version

    return (lambda x: x.untyped_storage().nbytes() < 1 << 31) if version.hip else None


# -- span tables ------------------------------------------------------------------------------------------------------


def _order(spans: DeviceSpans) -> Tensor:
    """The order of rows by the planner; where it has none it is made once."""
    bounds = spans.bounds
    return cached_on(bounds, "order", lambda: _longest(bounds)) if spans.order is None else spans.order


# parameters that differ at every call where spans are made on a device
MOVING: Mapping[str, Callable[[DeviceSpans], Tensor]] = {
    "Spans": lambda spans: spans.bounds.contiguous(),
    "Count": lambda spans: spans.count.contiguous(),
    "Order": _order,
}


def span_tables(spans: Spans | DeviceSpans, device: Any) -> dict[str, Any]:
    """The span table on the device, uploaded once and kept as long as `spans` lives."""
    if isinstance(spans, DeviceSpans):
        slice_of = cached_on(spans.slice_of, device, lambda: uploaded(spans.slice_of, device))  # that of all steps
        moving = {n: read(spans) for n, read in MOVING.items()}
        return {**moving, "SliceOf": slice_of, "records": spans.bounds.shape[2]}
    uploads = {"records": spans.bounds.shape[2]}
    return cached_on(spans, device, lambda: uploads | {n: uploaded(a, device) for n, a in span_arrays(spans).items()})


def span_arrays(spans: Spans) -> dict[str, NDArray[np.int32]]:
    """The span arrays that kernels read, by the names of their parameters. `Order` lists the rows of each slice, those
    with the most tiles first."""
    work = (spans.bounds[..., 3] - spans.bounds[..., 0]).sum(-1)
    order = np.argsort(-work, axis=-1, kind="stable").astype(np.int32)
    return {"Spans": spans.bounds, "Count": spans.count, "SliceOf": spans.slice_of, "Order": order}


def _longest(bounds: Tensor) -> Tensor:
    """Rows of each slice, those with the most tiles first."""
    import torch

    width = (bounds[..., 3] - bounds[..., 0]).sum(-1)  # from the first to the last tile: full and partial ones
    return torch.argsort(width, dim=-1, descending=True, stable=True).to(torch.int32)
