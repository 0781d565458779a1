"""Runs a flat planner as Triton kernels, on tables of the device: a handful of launches, and nothing read back."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.ir import SIZES
from frisket.dsl.types import FLOAT, Type
from frisket.grammar.memo import memo
from frisket.lowering.plan import Sizes
from frisket.lowering.planner import triton as text
from frisket.lowering.planner.planner import ROOM, Planner
from frisket.lowering.planner.triton import FINE, GRAIN
from frisket.runtime.backends.triton.source import load
from frisket.runtime.calls.arrays import uploaded

Tensor = Any


def spans(plan: Planner, place: SpanRequest, values: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(bounds, count, overflow by row, order) of a planner, as of `run.spans`. No value is looked at, so that a
    captured graph plans again when it is replayed."""
    tables = {n: _readable(on_device("torch", values[n], place.device, n, place.held)) for n in plan.tables}
    scalars = [x.resolve_neg() for n in plan.scalars if hasattr(x := values[n], "data_ptr")]
    key = id(plan), place.block, place.device, *[(t.dtype, t.shape, t.stride()) for t in (*tables.values(), *scalars)]
    step = place.held.get(key)
    if step is None:
        step = place.held[key] = PlannerStep(plan, place, tables, values)
    found: tuple[Tensor, Tensor, Tensor, Tensor]
    if place.device.type == "cuda":
        import torch

        if torch.cuda.current_device() != place.device.index:
            with torch.cuda.device(place.device):
                found = step(tables, scalars, place.ranges)
            return found
    found = step(tables, scalars, place.ranges)
    return found


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
    ) -> None:  # fmt: skip
        made, module = text.emit(plan), _module(plan)
        rows, slices, records = -(-place.q_len // place.block[0]), len(place.at[0]), place.most(plan)
        self.made, self.device = made, place.device
        self.shape = slices, rows, records
        self.starts = on_device("torch", np.stack(place.at, 1).astype(np.int64), place.device, "starts", {})
        self.ranges = {(r.source, r.axes): _ready(module, r, tables[r.source]) for r in made.ranges}
        self.order: list[Any] = [(r.source, r.axes) for r in made.ranges]
        whole = dict(zip(SIZES, place.sizes, strict=True))
        given: list[Any] = [None] * 4  # bounds, count, overflow, work
        given += [self.starts, slices * rows, rows, place.q_len, place.kv_len, *place.block, place.room, records]
        given += [whole[n] for n in made.sizes] + [_number(values[n], kind) for n, kind in made.scalars]
        for entry in made.entries:
            given += [None, *tables[entry.source].shape, *tables[entry.source].stride()]
        for r in made.ranges:
            ready = self.ranges[r.source, r.axes]
            given += [None, None, ready.rows, *ready.sizes]
        pieces = 1 << (max(made.pieces or place.room, records) - 1).bit_length()
        at_once = _at_once(module, max(1, 32 // pieces))
        grid = (-(-slices * rows // at_once),)
        warps = 1 if pieces < 256 else 4
        self.plan = PlannerLaunch(module.plan_spans, grid, given, warps, ROWS=at_once, PIECES=pieces)
        self.longest = PlannerLaunch(module.longest_first, (slices, -(-rows // 64)), [None, None, rows], 4, BLOCK=64)

    def __call__(
        self, tables: Mapping[str, Tensor], scalars: Sequence[Tensor], made: dict[Any, Any]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`made` keeps what is made of tables, for other spans of the same."""
        import torch

        slices, rows, records = self.shape
        bounds = torch.empty((slices, rows, records, 4), dtype=torch.int32, device=self.device)
        count, work, order = (torch.empty((slices, rows), dtype=torch.int32, device=self.device) for _ in range(3))
        left = torch.empty((slices, rows), dtype=torch.bool, device=self.device)
        pointers = [bounds, count, left, work, *scalars, *[tables[e.source] for e in self.made.entries]]
        for key in self.order:
            if key not in made:
                made[key] = self.ranges[key](tables[key[0]])
            pointers += made[key]
        self.plan(*pointers)
        self.longest(work, order)
        return bounds, count, left, order


class PlannerLaunch:
    """A kernel with its grid and arguments; where those are None, each launch brings a tensor."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: list[Any], warps: int, **constants: Any) -> None:
        self.kernel, self.grid, self.arguments = kernel, (*grid, 1, 1)[:3], arguments
        self.options = {**constants, "num_warps": warps, "enable_fp_fusion": False}
        self.brought = [i for i, x in enumerate(arguments) if x is None]
        self.run: Any = None

    def __call__(self, *tensors: Tensor) -> None:
        arguments = self.arguments.copy()
        if self.run is not None:
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
    return load(text.emit(plan).text)


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
    return struct.unpack("q", struct.pack("d", x))[0] if kind is FLOAT else int(x)


# -- tables made ready for ranges -------------------------------------------------------------------------------------


def _ready(module: ModuleType, ranged: text.Ranged, table: Tensor) -> TableLines | Halves:
    return (TableLines if len(ranged.axes) == 1 else Halves)(module, ranged.axes, table)


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
        grain = 1 if size <= FINE else GRAIN
        count = -(-size // grain)
        self.length = rows * (2 * count * grain + count.bit_length() * count)
        blocks = 512 if grain == 1 else _at_once(module, 32)
        self.lines = PlannerLaunch(
            module.lines, (rows, -(-count // blocks)), [None, None, None, rows, size, *self.strides], 4,
            GRAIN_=grain, BLOCKS=blocks,
        )  # fmt: skip
        block = _at_once(module, 64)
        self.windows = [
            PlannerLaunch(
                module.windows, (rows, 2, -(-count // block)), [None, None, rows, count, count * grain, level], 4,
                BLOCK=block,
            )
            for level in range(0, count.bit_length() - 1, 5)  # no launch reads what it writes
        ]  # fmt: skip

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
        of = torch.empty_strided((self.rows, *self.sizes), self.strides, device="meta")
        self.steps: list[tuple[tuple[int, int, int], int, list[list[PlannerLaunch]]]] = []
        for axis in range(len(shape) - 1, 0, -1):
            outer, size, inner = int(np.prod(shape[:axis])), shape[axis], int(np.prod(shape[axis + 1 :]))
            room, of = 2 << (size - 1).bit_length(), of.reshape(outer, size, inner)
            given, programs = [None, None, outer, size, inner, *of.stride()], -(-outer * inner // block)
            launches = [
                [
                    PlannerLaunch(
                        module.halves, (programs, ((size - 1) >> level) // 32 + 1), [*given, level, room], 4,
                        BLOCK=block, MOST=most,
                    )
                    for level in range(0, max(1, (size - 1).bit_length()), 5)  # no launch reads what it writes
                ]
                for most in (False, True)
            ]  # fmt: skip
            self.steps.append(((outer, size, inner), room, launches))
            shape[axis], of = room, torch.empty((outer, room, inner), device="meta")

    def __call__(self, table: Tensor) -> Sequence[Tensor]:
        return [self._joined(self.turned(table), most) for most in (False, True)]

    def _joined(self, table: Tensor, most: bool) -> Tensor:
        import torch

        for shape, room, launches in self.steps:
            table = table.reshape(shape)
            made = torch.empty((shape[0], room, shape[2]), dtype=table.dtype, device=table.device)
            for launch in launches[most]:
                launch(table, made)
            table = made
        return table


@dataclass(frozen=True)
class SpanRequest:
    """The arguments of a planner beside the tables: lengths, tiles, and where each slice begins."""

    at: tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]  # b, h, q, k of [slices] where a slice begins
    q_len: int
    kv_len: int
    block: tuple[int, int]  # tokens of a tile: queries, keys
    sizes: Sizes  # of the whole problem
    device: Any = None
    held: dict[Any, Any] = field(default_factory=dict)  # the host's arrays, copied to devices
    ranges: dict[Any, Any] = field(default_factory=dict)  # arrays that planners in Triton have made of the tables
    room: int = ROOM  # pieces of a row of tiles that are held at once
    records: int = 0  # of a row; 0: as many as the mask says, or RECORDS

    @property
    def transposed(self) -> SpanRequest:
        (b, h, q, k), (bq, bk) = self.at, self.block
        return replace(self, at=(b, h, k, q), q_len=self.kv_len, kv_len=self.q_len, block=(bk, bq))

    def most(self, plan: Planner) -> int:
        """Records of a row."""
        return self.records or plan.records(-(-self.kv_len // self.block[1]))


def on_device(framework: str, x: Any, device: Any, name: Any, copies: dict[Any, Any]) -> Any:
    """An array of the framework; the host's are copied to a GPU once, which a captured graph could not do."""
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)
    import torch

    if not isinstance(x, np.ndarray):  # torch compares no unsigned numbers but bytes
        return x.long() if str(x.dtype).startswith(("torch.uint16", "torch.uint32", "torch.uint64")) else x
    if device is None or device.type == "cpu":
        return torch.from_numpy(np.array(x))
    key = name, x.dtype, device
    if key not in copies:
        copies[key] = uploaded(x, device)
    return copies[key]
