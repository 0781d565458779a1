"""Runs a flat planner as Triton kernels, on tables of the device: a handful of launches, and nothing read back."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from frisket.dsl.ir import SIZES
from frisket.dsl.types import BOOL, FLOAT, Type
from frisket.lowering.emit import planner_triton as text
from frisket.lowering.flat import Planner

from .flat_run import Place, on_device
from .triton_source import load

Tensor = Any
FINE, GRAIN = 4096, 32  # as in `emit.planner_triton_text`


def spans(plan: Planner, place: Place, values: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(bounds, count, overflow by row, order) of a planner, as `flat_run.spans`. No value is looked at, so that a
    captured graph plans anew when it is replayed."""
    import torch

    made, module, device, block = text.emit(plan), _module(plan), place.device, place.block
    tables = {n: _readable(on_device("torch", values[n], device, n, place.held)) for n in plan.tables}
    rows, slices, records = -(-place.q_len // block[0]), len(place.at[0]), place.most(plan)
    bounds = torch.empty((slices, rows, records, 4), dtype=torch.int32, device=device)
    count, work, order = torch.empty((3, slices, rows), dtype=torch.int32, device=device)
    left = torch.empty((slices, rows), dtype=torch.bool, device=device)
    whole = dict(zip(SIZES, place.sizes, strict=True))
    given: list[Any] = [bounds, count, left, work, _starts(place), slices * rows, rows, place.q_len, place.kv_len]
    given += [*block, place.room, records]
    given += [whole[n] for n in made.sizes] + [_number(values[n], kind) for n, kind in made.scalars]
    for entry in made.entries:
        given += [tables[entry.source], *tables[entry.source].shape, *tables[entry.source].stride()]
    for ranged in made.ranges:
        key = ranged.source, ranged.axes
        if key not in place.ranges:
            place.ranges[key] = _made_ready(module, ranged, tables[ranged.source])
        given += place.ranges[key]
    pieces = 1 << (max(made.pieces or place.room, records) - 1).bit_length()
    at_once = _at_once(module, max(1, 32 // pieces))
    with _on(device):
        grid = (-(-slices * rows // at_once),)
        module.plan_spans[grid](
            *given, ROWS=at_once, PIECES=pieces, num_warps=1 if pieces < 256 else 4, enable_fp_fusion=False
        )
        module.longest_first[slices, -(-rows // 64)](work, order, rows, BLOCK=64, num_warps=4)
    return bounds, count, left, order


def runs(device: Any) -> bool:
    """Whether Triton kernels run on tensors of this device: a GPU's, or any where Triton is an interpreter."""
    try:
        import triton
    except ImportError:
        return False
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


@lru_cache(maxsize=256)
def _module(plan: Planner) -> ModuleType:
    return load(text.emit(plan).text)


def _at_once(module: ModuleType, wish: int) -> int:
    """How many rows a program takes: in the interpreter the more, the faster."""
    return 64 * wish if type(module.plan_spans).__name__ == "InterpretedFunction" else wish


def _on(device: Any) -> Any:
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()


def _starts(place: Place) -> Tensor:
    """Where slices begin, int64 [slices, 4]."""
    import torch

    key = ("starts", *map(id, place.at), place.device)
    if key not in place.held:
        place.held[key] = torch.from_numpy(np.stack(place.at, 1).astype(np.int64)).to(place.device)
    return place.held[key]


def _readable(table: Tensor) -> Tensor:
    """Bool as bytes, and Floats of at least 32 bits."""
    import torch

    table = table.detach()
    if table.dtype == torch.bool:
        return table.view(torch.int8)
    return table.float() if table.is_floating_point() and table.dtype.itemsize < 4 else table


def _number(x: Any, kind: Type) -> Any:
    """A scalar as `number` reads it."""
    if not isinstance(x, (bool, int, float, np.generic)):
        return x
    return struct.unpack("q", struct.pack("d", x))[0] if kind is FLOAT else int(x)


def _made_ready(module: ModuleType, ranged: text.Ranged, table: Tensor) -> list[Any]:
    """[least, most, rows, sizes of the ranged axes] of a table."""
    import torch

    last = tuple(range(-len(ranged.axes), 0))
    table = torch.movedim(table, ranged.axes, last)
    shape = tuple(table.shape[last[0] :])
    table = table.reshape(-1, *shape)
    kind = torch.float64 if ranged.type is FLOAT else torch.int8 if ranged.type is BOOL else torch.int64
    both = (_lines if len(shape) == 1 else _halves)(module, table, kind)
    return [*both, table.shape[0], *shape]


def _lines(module: ModuleType, table: Tensor, kind: Any) -> Tensor:
    """What `over` reads of a table [rows, size]."""
    import torch
    import triton.language as tl

    rows, size = table.shape
    grain = 1 if size <= FINE else GRAIN
    count = -(-size // grain)
    levels = count.bit_length()
    both = torch.empty((2, rows * (2 * count * grain + levels * count)), dtype=kind, device=table.device)
    blocks = 512 if grain == 1 else _at_once(module, 32)
    with _on(table.device):
        module.lines[rows, -(-count // blocks)](
            table, *both, rows, size, *table.stride(), GRAIN_=grain, BLOCKS=blocks, KIND=getattr(tl, _names()[kind]),
        )  # fmt: skip
        module.windows[(rows,)](*both, rows, count, count * grain, MOST_BLOCKS=1024, num_warps=8)
    return both


def _halves(module: ModuleType, table: Tensor, kind: Any) -> list[Tensor]:
    """What `within` reads of a table [rows, sizes...]: along the last axis first."""
    made = []
    for most in (False, True):
        held = table
        for axis in range(table.dim() - 1, 0, -1):
            held = _halved(module, held, axis, most, kind)
        made.append(held)
    return made


def _halved(module: ModuleType, table: Tensor, axis: int, most: bool, kind: Any) -> Tensor:
    import torch
    import triton.language as tl

    before, size, after = table.shape[:axis], table.shape[axis], table.shape[axis + 1 :]
    outer, inner, room = before.numel(), after.numel(), 2 << (size - 1).bit_length()
    table = table.reshape(outer, size, inner)
    target = torch.empty((outer, room, inner), dtype=kind, device=table.device)
    block = _at_once(module, 32)
    with _on(table.device):
        for level in range(0, max(1, (size - 1).bit_length()), 5):
            grid = -(-outer * inner // block), ((size - 1) >> level) // 32 + 1
            module.halves[grid](
                table, target, outer, size, inner, *table.stride(), level, room, BLOCK=block, MOST=most,
                KIND=getattr(tl, _names()[kind]),
            )  # fmt: skip
    return target.reshape(*before, room, *after)


@lru_cache(maxsize=1)
def _names() -> dict[Any, str]:
    import torch

    return {torch.int64: "int64", torch.float64: "float64", torch.int8: "int8"}
