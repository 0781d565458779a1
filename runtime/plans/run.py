"""Runs the text of a flat planner on arrays of JAX or torch, and makes tables ready for kernels there.

A planner in C++ reads tables of the host. Triton kernels plan from tables of the device, in a handful of launches, and
nothing is read back.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import BackendError, ParameterError
from frisket.dsl.program import entries_of
from frisket.dsl.types import BOOL, FLOAT, INT, Type
from frisket.grammar.memo import memo
from frisket.lowering.analysis.table import RUN_LIMIT, derived_table
from frisket.lowering.plan import KV_INPUTS, LoopPlan, Problem
from frisket.lowering.planner import arrays as text
from frisket.lowering.planner import cpp as planner_cpp
from frisket.lowering.planner import triton as planner_triton
from frisket.lowering.planner.planner import Planner
from frisket.lowering.planner.triton import FINE, GRAIN
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.calls.arrays import uploaded
from frisket.runtime.machine import cpp_build
from frisket.runtime.machine.cpp_build import BuildError, deferring, fall_back
from frisket.runtime.machine.modules import load_from_file as load_module
from frisket.runtime.machine.modules import load_source
from frisket.runtime.machine.parameters import is_tensor, traced, unsorted
from frisket.runtime.machine.settings import Settings, choices

Tensor = Any


def kernel_spans(plan: Planner, place: SpanRequest, values: Mapping[str, Any]) -> SpanArrays:
    """(bounds, count, overflow by row, order) of a planner, as of `spans`. No value is looked at, so that a
    captured graph plans again when it is replayed."""
    tables = {n: _readable(on_device("torch", values[n], place.device, n, place.copies)) for n in plan.tables}
    # a kernel would read the memory without its sign
    scalars = [x.resolve_neg() for n in plan.scalars if hasattr(x := values[n], "data_ptr")]
    # an id suffices: the template that has `copies` refers to the plan
    key = id(plan), place.block, place.device, *[(t.dtype, t.shape, t.stride()) for t in (*tables.values(), *scalars)]
    step: PlannerStep | None = place.copies.get(key)
    if step is None:
        step = place.copies[key] = PlannerStep(plan, place, tables, values)
    import torch

    if place.device.type == "cuda" and torch.cuda.current_device() != place.device.index:
        with torch.cuda.device(place.device):  # Triton launches on the current device
            return step(tables, scalars, place.ranges)
    return step(tables, scalars, place.ranges)


def runs(device: Any) -> bool:
    """Whether Triton kernels run on tensors of this device: a GPU's, or any where Triton is an interpreter."""
    try:
        import triton  # type: ignore[import-untyped]
    except ImportError:
        return False
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


class PlannerStep:
    """The launches that plan from tables of these shapes; all but the tables' pointers is laid out once."""

    def __init__(
        self, plan: Planner, place: SpanRequest, tables: Mapping[str, Tensor], values: Mapping[str, Any]
    ) -> None:
        emitted, module = planner_triton.emit(plan), _module(plan)
        rows, slices, records = -(-place.problem.q_len // place.block[0]), len(place.at[0]), place.most(plan)
        self.emitted, self.device = emitted, place.device
        self.shape = slices, rows, records
        self.starts = on_device("torch", np.stack(place.at, 1).astype(np.int64), place.device, "starts", {})
        kinds = {r: TableLines if len(r.axes) == 1 else Halves for r in emitted.ranges}
        self.ranges = {(r.source, r.axes): kind(module, r.axes, tables[r.source]) for r, kind in kinds.items()}
        sizes, lengths = place.problem.named_sizes, (place.problem.q_len, place.problem.kv_len)
        arguments: list[Any] = [None] * 4  # bounds, count, overflow, work
        arguments += [self.starts, slices * rows, rows, *lengths, *place.block, place.pieces(plan), records]
        arguments += [sizes[n] for n in emitted.sizes] + [_number(values[n], kind) for n, kind in emitted.scalars]
        for entry in emitted.entries:
            arguments += [None, *tables[entry.source].shape, *tables[entry.source].stride()]
        for ready in self.ranges.values():
            arguments += [None, None, ready.rows, *ready.sizes]
        pieces = max(emitted.pieces or place.pieces(plan), records)
        pieces = 1 << (pieces - 1).bit_length()  # Triton's blocks are powers of 2
        at_once = _at_once(module, max(1, 32 // pieces))
        grid = (-(-slices * rows // at_once),)
        warps = 1 if pieces < 256 else 4
        self.plan = PlannerLaunch(module.plan_spans, grid, arguments, warps, ROWS=at_once, PIECES=pieces)
        self.longest = PlannerLaunch(module.longest_first, (slices, -(-rows // 64)), [None, None, rows], 4, BLOCK=64)
        # the order of one row, as steps of decoding have it, needs no launch
        first = np.zeros((slices, 1), np.int32)
        self.only_row = on_device("torch", first, place.device, "order", {}) if rows == 1 else None

    def __call__(self, tables: Mapping[str, Tensor], scalars: Sequence[Tensor], ranges: dict[Any, Any]) -> SpanArrays:
        """`ranges` keeps what is made of tables, for other spans of the same."""
        import torch

        slices, rows, records = self.shape
        bounds = torch.empty((slices, rows, records, 4), dtype=torch.int32, device=self.device)
        count, work = (torch.empty((slices, rows), dtype=torch.int32, device=self.device) for _ in range(2))
        left = torch.empty((slices, rows), dtype=torch.bool, device=self.device)
        pointers = [bounds, count, left, work, *scalars, *[tables[e.source] for e in self.emitted.entries]]
        for key, ready in self.ranges.items():
            if key not in ranges:
                ranges[key] = ready(tables[key[0]])
            pointers += ranges[key]
        self.plan(*pointers)
        if self.only_row is not None:
            return bounds, count, left, self.only_row
        order = torch.empty_like(count)
        self.longest(work, order)
        return bounds, count, left, order


class PlannerLaunch:
    """A kernel with its grid and arguments; where those are None, each launch brings a tensor."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: list[Any], warps: int, **constants: Any) -> None:
        self.kernel, self.grid, self.arguments = kernel, (*grid, 1, 1)[:3], arguments
        # bounds of Floats as the host rounds them
        self.options = {**constants, "num_warps": warps, "enable_fp_fusion": False}
        self.brought = [i for i, x in enumerate(arguments) if x is None]
        self.run: Any = None

    def __call__(self, *tensors: Tensor) -> None:
        arguments = self.arguments.copy()
        if self.run is not None:  # a launch through Triton takes long
            for i, x in zip(self.brought, tensors):
                arguments[i] = x.data_ptr()
            self.run(*arguments)
            return
        for i, x in zip(self.brought, tensors, strict=True):
            arguments[i] = x
        compiled = self.kernel[self.grid](*arguments, **self.options)
        if compiled is not None:  # from now on without Triton's choice among compilations: there is one
            self.run = compiled[self.grid]
            constants = [self.options[n] for n in self.kernel.arg_names[len(arguments) :]]
            self.arguments = [x.data_ptr() if hasattr(x, "data_ptr") else x for x in (*self.arguments, *constants)]


@memo(group="kernels")
def _module(plan: Planner) -> ModuleType:
    return load_module(planner_triton.emit(plan).text)


def _at_once(module: ModuleType, wish: int) -> int:
    """How many rows a program takes: in the interpreter the more, the faster."""
    return 64 * wish if type(module.plan_spans).__name__ == "InterpretedFunction" else wish


def _readable(table: Tensor) -> Tensor:
    """A table as the planner reads it: Bool as bytes, Floats of at least 32 bits, negated views resolved."""
    import torch

    table = table.detach().resolve_neg()
    if table.dtype == torch.bool:
        return table.view(torch.int8)
    return table.float() if table.is_floating_point() and table.dtype.itemsize < 4 else table


def _number(x: Any, kind: Type) -> Any:
    """A scalar as `number` reads it; None for a tensor, which every launch brings."""
    if not isinstance(x, (bool, int, float, np.generic)):
        return None
    # all words are of 64 bits, by their bits
    return struct.unpack("q", struct.pack("d", x))[0] if kind is FLOAT else int(x)


# -- tables made ready for ranges -------------------------------------------------------------------------------------


class TableRanges:
    """The least and greatest entries of a table over ranges of `axes`, as planners read them."""

    def __init__(self, module: ModuleType, axes: tuple[int, ...], table: Tensor) -> None:
        self.module, self.axes = module, axes
        table = self.turned(table)
        self.rows, self.sizes, self.strides = table.shape[0], tuple(table.shape[1:]), table.stride()

    def turned(self, table: Tensor) -> Tensor:
        """[rows, sizes...]: the ranged axes last."""
        import torch

        if len(self.axes) == table.dim():
            return table[None]
        table = torch.movedim(table, self.axes, tuple(range(-len(self.axes), 0)))
        return table.reshape(-1, *table.shape[-len(self.axes) :])


class TableLines(TableRanges):
    """The ranges of a table that `over` reads."""

    def __init__(self, module: ModuleType, axes: tuple[int, ...], table: Tensor) -> None:
        super().__init__(module, axes, table)
        (size,), rows = self.sizes, self.rows
        # windows of each entry of a long table would be its length times its levels
        grain = 1 if size <= FINE else GRAIN
        count = -(-size // grain)
        self.length = rows * (2 * count * grain + count.bit_length() * count)
        blocks = 512 if grain == 1 else _at_once(module, 32)
        grid, arguments = (rows, -(-count // blocks)), [*[None] * 3, rows, size, *self.strides]
        self.lines = PlannerLaunch(module.lines, grid, arguments, 4, GRAIN_=grain, BLOCKS=blocks)
        block = _at_once(module, 64)
        counts, programs = (rows, count, count * grain), (rows, 2, -(-count // block))
        self.windows = [
            PlannerLaunch(module.windows, programs, [None, None, *counts, level], 4, BLOCK=block)
            for level in range(0, count.bit_length() - 1, 5)  # no launch reads what it writes
        ]

    def __call__(self, table: Tensor) -> Sequence[Tensor]:
        import torch

        least, most = torch.empty((2, self.length), dtype=table.dtype, device=table.device).unbind()
        self.lines(self.turned(table), least, most)
        for windows in self.windows:
            windows(least, most)
        return least, most


class Halves(TableRanges):
    """The ranges of a table that `within` reads: along the last axis first."""

    def __init__(self, module: ModuleType, axes: tuple[int, ...], table: Tensor) -> None:
        import torch

        super().__init__(module, axes, table)
        shape, block = [self.rows, *self.sizes], _at_once(module, 32)
        # strides alone, without memory: those of a table that is turned, then those of each step
        of = torch.empty_strided((self.rows, *self.sizes), self.strides, device="meta")
        self.steps: list[tuple[tuple[int, int, int], int, list[list[PlannerLaunch]]]] = []
        for axis in range(len(shape) - 1, 0, -1):
            outer, size, inner = int(np.prod(shape[:axis])), shape[axis], int(np.prod(shape[axis + 1 :]))
            room, of = 2 << (size - 1).bit_length(), of.reshape(outer, size, inner)
            arguments, programs = [None, None, outer, size, inner, *of.stride()], -(-outer * inner // block)
            levels = range(0, max(1, (size - 1).bit_length()), 5)  # no launch reads what it writes
            parts = [((programs, ((size - 1) >> level) // 32 + 1), [*arguments, level, room]) for level in levels]
            launches = [
                [PlannerLaunch(module.halves, grid, [*numbers], 4, BLOCK=block, MOST=most) for grid, numbers in parts]
                for most in (False, True)
            ]
            self.steps.append(((outer, size, inner), room, launches))
            shape[axis], of = room, torch.empty((outer, room, inner), device="meta")

    def __call__(self, table: Tensor) -> Sequence[Tensor]:
        return [self._joined(self.turned(table), most) for most in (False, True)]

    def _joined(self, table: Tensor, most: bool) -> Tensor:
        import torch

        for shape, room, launches in self.steps:
            table = table.reshape(shape)
            joined = torch.empty((shape[0], room, shape[2]), dtype=table.dtype, device=table.device)
            for launch in launches[most]:
                launch(table, joined)
            table = joined
        return table


@dataclass(frozen=True)
class SpanRequest:
    """The arguments of a planner besides the tables: lengths, tiles, and where each slice begins."""

    at: tuple[NDArray[Any], ...]  # b, h, q, k of [slices] where a slice begins
    problem: Problem
    block: tuple[int, int]  # tokens of a tile: queries, keys
    device: Any = None
    copies: dict[Any, Any] = field(default_factory=dict)  # the host's arrays, copied to devices
    ranges: dict[Any, Any] = field(default_factory=dict)  # arrays that planners in Triton made from the tables
    room: int = 0  # pieces of a row of tiles that are held at once; 0: as the mask asks for
    records: int = 0  # of a row; 0: as many as the mask says, or RECORDS

    @property
    def transposed(self) -> SpanRequest:
        (b, h, q, k), (bq, bk), problem = self.at, self.block, self.problem
        turned = replace(problem, q_len=problem.kv_len, kv_len=problem.q_len, sizes=problem.full)
        return replace(self, at=(b, h, k, q), problem=turned, block=(bk, bq))

    def pieces(self, plan: Planner) -> int:
        """Pieces of a row that are held at once."""
        return self.room or plan.room

    def most(self, plan: Planner) -> int:
        """Tile ranges in a row."""
        return self.records or plan.records(-(-self.problem.kv_len // self.block[1]))


def on_device(framework: str, x: Any, device: Any, name: Any, copies: dict[Any, Any]) -> Any:
    """An array of the framework; the host's are copied to a GPU once, which a captured graph could not do."""
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)  # JAX puts it where the call runs
    import torch

    if not isinstance(x, np.ndarray):  # torch compares no unsigned numbers but bytes
        return x.long() if str(x.dtype).startswith(("torch.uint16", "torch.uint32", "torch.uint64")) else x
    if device is None or device.type == "cpu":
        return torch.from_numpy(np.array(x))
    key = name, x.dtype, device
    if key not in copies:
        copies[key] = uploaded(x, device)
    return copies[key]


DTYPES: dict[Any, Any] = {INT: np.int64, FLOAT: np.float64, BOOL: np.bool_}


def function(plan: Planner) -> Any:
    """The planner, compiled."""
    run = cpp_build.library(planner_cpp.emit(plan)).frisket_plan
    run.restype, run.argtypes = ctypes.c_int64, [ctypes.c_void_p]  # ctypes would take an int of 32 bits
    return run


def called(run: Any, plan: Planner, place: SpanRequest, values: Mapping[str, Any]) -> tuple[Array, Array, bool]:
    """(bounds int32 [slices, rows, R, 4], count int32 [slices, rows], overflow), as of `spans`; `values` are
    arrays of the host and numbers by the planner's names."""
    prepared = Prepared(run, plan, place, values)
    return prepared.bounds, prepared.count, prepared({})


class Prepared:
    """A planner and what it reads: called with the addresses of other tables, of the same shapes, it plans again.

    `bounds` int32 [slices, rows, R, 4] and `count` int32 [slices, rows] hold what it wrote last."""

    def __init__(self, run: Any, plan: Planner, place: SpanRequest, values: Mapping[str, Any]) -> None:
        q_len, (bq, bk), records = place.problem.q_len, place.block, place.most(plan)
        at = [np.ascontiguousarray(x, np.int64).reshape(-1) for x in place.at]
        self.bounds = np.zeros((len(at[0]), -(-q_len // bq), records, 4), np.int32)
        self.count = np.zeros(self.bounds.shape[:2], np.int32)
        self.run, self.where, self.types = run, planner_cpp.words(plan), planner_cpp.table_types(plan)
        word = self.word = np.zeros(self.where[""], np.int64)
        tables = {n: np.ascontiguousarray(entries_of(values[n]), DTYPES[self.types[n]]) for n in plan.tables}
        self.alive = at, tables  # the words have their addresses
        numbers = (len(at[0]), q_len, place.problem.kv_len, bq, bk, place.pieces(plan), records)
        word[: len(planner_cpp.HEAD)] = [*numbers, *(_address(x) for x in (*at, self.bounds, self.count))]
        for name, size in place.problem.named_sizes.items():
            word[self.where[name]] = size
        for name, type in plan.scalars.items():
            value = np.asarray(values[name], np.float64 if type is FLOAT else np.int64)
            word[self.where[f"scalar {name}"]] = value.view(np.int64)
        for name, table in tables.items():
            start = self.where[f"table {name}"]
            word[start] = _address(table)
            word[start + 1 : start + 1 + table.ndim] = table.shape
        self.address = _address(word)

    def __call__(self, tables: Mapping[str, int]) -> bool:
        """Plan for other tables. Returns whether some row has more runs than there is room for."""
        for name, address in tables.items():
            self.word[self.where[f"table {name}"]] = address
        self.bounds.fill(0)  # records past `count` are those of an earlier call
        code = self.run(self.address)
        if code == 2:
            raise BackendError("the planner of this mask ran out of memory; free some, or give it shorter tables")
        return bool(code)


def _address(x: Any) -> int:
    return int(x.ctypes.data)


Array = Any
SpanArrays = tuple[Array, Array, Array, Array | None]  # bounds, count, overflow, order


def spans(plan: Planner, framework: str, place: SpanRequest, values: Mapping[str, Any]) -> SpanArrays:
    """(bounds int32 [slices, rows, R, 4], count int32 [slices, rows], overflow, order) of a planner, on the tables'
    device, as `DeviceSpans` has them; `values` by the planner's names."""
    inputs = [values[n] for n in (*plan.tables, *plan.scalars)]
    if framework == "torch" and _kernels(inputs, place.device):
        return kernel_spans(plan, place, values)
    if _reachable(framework, inputs, place.device):
        try:
            with deferring(not Settings.read().backend):
                return _native(plan, framework, place, values)
        except BuildError as error:
            if Settings.read().backend:  # a name is meant: no library calls in its place
                raise
            fall_back(error)
    tables = {n: on_device(framework, values[n], place.device, n, place.copies) for n in plan.tables}
    scalars = {n: values[n] for n in plan.scalars}
    ints = np.int64 if framework == "torch" or plan.int64 else np.int32  # JAX has no int64 by default
    at = [on_device(framework, x.astype(ints).reshape(-1, 1, 1), place.device, id(x), place.copies) for x in place.at]
    options: dict[str, Any] = {"q_len": place.problem.q_len, "kv_len": place.problem.kv_len, "block": place.block}
    options |= {"room": place.pieces(plan), "records": place.most(plan)}
    bounds, count, overflow = _function(plan, framework)(*at, place.problem.full, scalars, tables, **options)
    if framework == "jax":
        return bounds.astype(np.int32), count.astype(np.int32), overflow, None
    import torch

    return bounds.to(torch.int32), count.to(torch.int32), overflow, None


def _kernels(values: list[Any], device: Any) -> bool:
    """Whether Triton plans: tables of a GPU, or of the host where its kernels are interpreted and asked for."""
    import torch

    plain = all(_plain(x, device.type) for x in values if isinstance(x, torch.Tensor))
    return plain and (device.type != "cpu" or _asked("device", False)) and runs(device)


def _reachable(framework: str, values: list[Any], device: Any) -> bool:
    """Whether C++ may read these values: arrays of the host with numbers in them, and a compiler is there."""
    if framework == "torch":
        import torch

        # addresses are no part of a graph
        if torch.compiler.is_compiling() or not (device is None or device.type == "cpu"):
            return False
    readable = all(on_host(x) for x in values if hasattr(x, "dtype"))
    return readable and _asked("host", True) and not cpp_build.reason()


def _asked(where: str, otherwise: bool) -> bool:
    """Whether the backend of FRISKET_BACKEND plans `where`, on the "host" or "device"; `otherwise` without a name."""
    name = Settings.read().backend
    return otherwise if name is None else name in choices[where]()


def on_host(x: Any) -> bool:
    """Whether an array of numpy, torch or JAX has numbers in memory of the host."""
    if is_tensor(x):
        return _plain(x, "cpu")
    return not traced(x) and all(d.platform == "cpu" for d in getattr(x, "devices", set)())


def _plain(x: Any, device: str) -> bool:
    """Whether a tensor is memory of such a device: no subclass, such as fake ones, and nothing that wraps another."""
    import torch

    wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == device and not wrapped(x)


def _native(plan: Planner, framework: str, place: SpanRequest, values: Mapping[str, Any]) -> SpanArrays:
    bounds, count, overflow = called(function(plan), plan, place, values)
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(bounds), jnp.asarray(count), jnp.asarray(overflow), None
    import torch

    return torch.from_numpy(bounds), torch.from_numpy(count), torch.tensor(overflow, device="cpu"), None


def source(plan: Planner, framework: str, device: Any = None) -> str:
    """The text that plans there."""
    if framework == "torch" and device is not None and device.type == "cuda" and runs(device):
        return planner_triton.emit(plan).text
    return text.emit(plan, text.JNP if framework == "jax" else text.TORCH, plan.int64)


@memo(group="kernels")
def _function(plan: Planner, framework: str) -> Callable[..., Any]:
    run: Callable[..., Any] = load_source(source(plan, framework))["plan_spans"]
    if framework == "torch":
        return run
    import jax

    def plan_spans(*arrays: Any, **options: Any) -> Any:
        with usual_promotion():
            return _automatic(partial(run, **options), *arrays)

    # lengths and tiles are shapes of its arrays
    return jax.jit(plan_spans, static_argnames=("q_len", "kv_len", "block", "room", "records"))


def _automatic(run: Callable[..., Any], *arrays: Any) -> Any:
    """`run(*arrays)` with axes of a mesh that are explicit made automatic: along explicit ones JAX looks nothing up.
    Results are whole on every device, but mapped axes stay split."""
    import jax

    sharding: Any = jax.sharding
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
    mesh = next((m for m in meshes if sharding.AxisType.Explicit in m.axis_types), None)
    whole = mesh and sharding.NamedSharding(mesh, sharding.PartitionSpec())
    return (sharding.auto_axes(run, out_sharding=whole) if mesh else run)(*arrays)


def kernel_tables(
    plan: LoopPlan, framework: str, values: Mapping[str, Any], length: int, device: Any, copies: Any = None
) -> dict[str, Array]:
    """An array for every table of the kernel. `length` is how many positions there are."""
    tables, copies = {}, {} if copies is None else copies
    for use in plan.every_table:
        if use.source in KV_INPUTS:  # they come with each call
            continue
        table, derived = values[use.source], use.derived
        if isinstance(table, np.ndarray) and use in plan.run_tables:
            ends = derived_table(table, derived)
            tables[use.name] = on_device(framework, ends, device, (use.source, derived), copies)
            continue
        if derived or framework == "torch":
            table = on_device(framework, table, device, use.source, copies)  # JAX's kernels take arrays of numpy
        tables[use.name] = _derived(framework, table, derived, length) if derived else table
    return tables


def _derived(framework: str, table: Array, derived: str, length: int) -> Array:
    """The segment of every position, the ends of these segments, or the ends of the runs of a sorted table."""
    if framework == "jax":
        import jax.numpy as jnp

        with usual_promotion():
            if table.dtype.itemsize < 4:
                table = table.astype(jnp.int32)  # positions may go on where the table's dtype does not
            return _automatic(lambda t: _searched(jnp, t, derived, jnp.arange(length)).astype(jnp.int32), table)
    import torch

    return _searched(torch, table.long(), derived, torch.arange(length, device=table.device)).to(torch.int32)


def _searched(xp: Any, table: Array, derived: str, positions: Array) -> Array:
    """The segments or ends by binary search, equal to those of `derived_table`."""
    if derived == "segment":
        return xp.clip(xp.searchsorted(table, positions, side="right") - 1, 0, max(table.shape[0] - 2, 0))
    how, end = derived.split("_")
    if how == "segment":
        # positions before the first offset and behind the last belong to the segments at the ends
        inner, count = table[1:-1], max(table.shape[0] - 2, 0)
        place = xp.searchsorted(inner, positions, side="right")
        if end == "first":
            return xp.where(place == 0, -RUN_LIMIT, table[xp.clip(place, 0, count)])
        return xp.where(place == count, RUN_LIMIT, table[xp.clip(place + 1, 0, count)] - 1)
    if end == "first":
        indices = xp.searchsorted(table, table, side="left")
        return xp.where(indices == 0, -RUN_LIMIT, indices)
    indices = xp.searchsorted(table, table, side="right") - 1
    return xp.where(indices == table.shape[0] - 1, RUN_LIMIT, indices)


def check_sorted(framework: str, tables: Mapping[str, Array], offsets: Collection[str]) -> None:
    """Tables declared sorted, and `offsets`, ascend, tested where they live; the error comes when the device gets
    there."""
    for name, table in tables.items():
        good, text = (table[1:] >= table[:-1]).all(), unsorted(name, offsets=name in offsets)
        if framework == "jax":
            import jax

            jax.debug.callback(_refuse, good, text=text)
        else:
            import torch

            torch._assert_async(good, text)  # waits for nothing


def _refuse(good: Any, text: str) -> None:
    if not good:
        raise ParameterError(text)
