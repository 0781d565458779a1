"""A mask over tensors that are the user's own: read when they are needed, as they are then.

torch calls a mask_mod again at every use; its tensors may change in place between two calls. A TensorMask
keeps the expression and the tensors themselves, copies nothing, and says when one of them has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from frisket.dsl import ir
from frisket.dsl.errors import ParameterError, TraceError
from frisket.dsl.from_python.trace import Kind, trace
from frisket.dsl.ir import Expr
from frisket.grammar.memo import memo
from frisket.lowering.analysis.layout import bind
from frisket.lowering.analysis.tiles import FULL, PARTIAL
from frisket.lowering.plan import Sizes
from frisket.lowering.simplify import simplify
from frisket.runtime.calls.arrays import version_of
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.export.tile_lists import written
from frisket.runtime.machine.parameters import BoundExpr, as_value, kind_of
from frisket.runtime.masks.mask import Mask, MaskLike, mask, only
from frisket.runtime.torch.spec import text_of

from .checks import MaskModError

Value = bool | int | float | torch.Tensor


@dataclass(frozen=True, eq=False)
class TensorMask:
    """`values` hold a tensor for every table and captured scalar of `expr`, numbers for the other parameters. `read`
    are tensors whose values went into `expr` when it was traced, with the versions they had."""

    expr: Expr
    values: Mapping[str, Value]
    read: tuple[tuple[torch.Tensor, Any], ...] = ()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {n: x for n, x in self.values.items() if isinstance(x, torch.Tensor)}

    @property
    def numbers(self) -> dict[str, bool | int | float]:
        return {n: x for n, x in self.values.items() if not isinstance(x, torch.Tensor)}

    @property
    def versions(self) -> tuple[Any, ...]:
        """A key that changes with the tensors: equal as long as nothing was written to them."""
        for x, version in self.read:
            if version_of(x, wait=True) != version:
                raise ParameterError(
                    f"a tensor of {x.dtype} {list(x.shape)} has changed since the mask was traced, and its values are "
                    "part of the traced expression\n  make the mask again; lookups, `x[q_idx]`, are read at every use"
                )
        return tuple(map(version_of, self.tensors.values()))

    @property
    def text(self) -> str:
        """The mask as a program without its tensors: what a graph of torch holds, and guards."""
        return _text(self.expr, tuple((n, kind_of(x), x) for n, x in self.numbers.items()))

    @cached_property
    def formula(self) -> Mask:
        """The mask with its tensors left open: nothing is read, nothing copied."""
        return Mask(self.expr, self.numbers)

    def mask(self) -> Mask:
        """The mask with its values as they are now, copied to the host."""
        return Mask(self.expr, {**self.numbers, **{n: as_value(n, x) for n, x in self.tensors.items()}})

    def to(self, device: torch.device) -> TensorMask:
        return replace(self, values={**self.numbers, **{n: x.to(device) for n, x in self.tensors.items()}})

    def at(self, places: Mapping[Expr, Expr], values: Mapping[str, Value] | None = None) -> TensorMask:
        """A mask with other expressions for its variables; expressions may read `values`."""
        return only_read(ir.substitute(self.expr, places), {**self.values, **(values or {})}, self.read)

    def sized(self, sizes: Sizes) -> TensorMask:
        """A mask with the lengths of the whole problem written in."""
        return self.at({ir.var(n): ir.lit(int(s)) for n, s in zip(ir.SIZES, sizes, strict=True)})

    def within(self, kinds: torch.Tensor, batch: tuple[int, ...], block: tuple[int, int]) -> TensorMask:
        """The positions visible by lists of tiles: all of a full one, and what the mask shows of a partial one. `kinds`
        [*batch, rows, columns] are 0 empty, 1 partial, 2 full."""
        name = fresh("tiles", {*self.values})
        at = [ir.ZERO if n == 1 else ir.var(x) for x, n in zip("bh"[2 - len(batch) :], batch, strict=True)]
        q, k = (ir.build("floordiv", ir.var(x), ir.lit(size)) for x, size in zip("qk", block, strict=True))
        kind = ir.lookup(name, (*at, q, k))
        full, partial = (ir.build("eq", kind, ir.lit(n)) for n in (FULL, PARTIAL))
        expr = ir.disj(full, ir.conj(partial, self.expr))
        return replace(self, expr=expr, values={**self.values, name: kinds})

    def plainly_inside(self, sizes: Sizes) -> bool:
        """Whether every lookup is at bare coordinates that its table reaches: no value is needed to say so."""
        reach = dict(zip("bhqk", sizes, strict=True))
        for node in ir.walk(self.expr):
            if node.op != "lookup":
                continue
            table = self.values[node.name]
            assert isinstance(table, torch.Tensor)
            for index, size in zip(node.args, table.shape, strict=True):
                if index.op != "var" or reach.get(index.name, size + 1) > size:
                    return False
        return True

    def join(self, op: str, other: TensorMask) -> TensorMask:
        """One mask made of two; a name that stands for two things is numbered on the right."""
        names: dict[str, str] = {}
        used = {*self.values, *other.values}
        for name in sorted(self.values.keys() & other.values.keys()):
            if not _same(self.values[name], other.values[name]):
                names[name] = fresh(name, used)
                used.add(names[name])
        right = {names.get(n, n): x for n, x in other.values.items()}
        expr = ir.build(op, self.expr, ir.renamed(other.expr, names))
        return TensorMask(expr, {**self.values, **right}, self.read + other.read)

    def callable(self, reach: Mapping[str, int], sizes: Sizes, title: str, device: Any) -> Callable[..., Any]:
        """`mask_mod(b, h, q_idx, kv_idx)`, which looks into the tensors themselves where torch can."""
        places: dict[Expr, Expr] = {}
        for name, type in ir.free_names(self.expr)[0].items():
            x = self.values[name]  # a captured scalar is read as a table of one entry
            number = ir.lookup(name, (ir.ZERO,), type) if isinstance(x, torch.Tensor) else ir.lit(x)
            places[ir.param(name, type)] = number
        tensors = {n: x.detach() if x.ndim else x.detach().reshape(1) for n, x in self.tensors.items()}
        tables = {n: as_value(n, x) for n, x in tensors.items()}
        e = simplify(bind(ir.substitute(self.sized(sizes).expr, places), tables))
        return written(e, tables, reach, sizes, title, device, tensors)


@memo(group="sources")
def _text(e: Expr, numbers: tuple[tuple[str, Any, Any], ...]) -> str:
    return text_of(CallProgram(Mask(e, {n: x for n, _, x in numbers}), None), ())


def only_read(expr: Expr, values: Mapping[str, Value], read: tuple[tuple[torch.Tensor, Any], ...] = ()) -> TensorMask:
    """A mask with those of the values that it reads."""
    return TensorMask(expr, only(values, expr), read)


def fresh(name: str, used: set[str]) -> str:
    """The name, or the same with a number where it is taken."""
    candidate, number = name, 1
    while candidate in used:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _same(x: Value, y: Value) -> bool:
    if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
        return x is y
    return type(x) is type(y) and x == y


def tensor_mask_of(source: MaskLike | TensorMask) -> TensorMask:
    """A mask from a mask_mod, which is traced, a text, an Expr or a `frisket.Mask`, whose arrays become tensors."""
    if isinstance(source, TensorMask):
        return source
    if isinstance(attached := getattr(source, "tensor_mask", None), TensorMask):  # of `and_masks`, or a BlockMask
        return attached
    if callable(source):
        return of_function(source, "mask")
    if not isinstance(source, str | Expr | Mask):
        raise MaskModError(
            f"mask_mod is {type(source).__name__}\n  it is a function `mask_mod(b, h, q_idx, kv_idx)`, a text as "
            '"causal & window(256)", or a frisket.Mask'
        )
    return of_bound(mask(source))


def of_bound(bound: BoundExpr) -> TensorMask:
    """A mask from one of frisket's own; a captured tensor stays, other arrays become tensors."""
    bound.require_bound()
    captured = {n: x for n, x in bound.origin.captured.items() if isinstance(x, torch.Tensor)}
    return TensorMask(bound.expr, {**bound.scalars, **{n: _tensor(x) for n, x in bound.tables.items()}, **captured})


def of_function(fn: Callable[..., Any], kind: Kind | None) -> TensorMask:
    """A mask from a function of torch; `MaskModError` where it is none. With no `kind`, a score mod's score, too."""
    recorded = torch.compiler.is_compiling()  # by an export that runs Python: tensors have no values there
    try:
        traced = trace(fn, kind, valueless=recorded, by_place=True)
    except TraceError as error:
        raise MaskModError(str(error)) from error
    values = {n: _tensor(x) for n, x in traced.tables.items()}
    return only_read(traced.expr, values, tuple((x, version_of(x, wait=True)) for x in traced.read))


def _tensor(x: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    x = as_value("table", x)
    if not isinstance(x, np.ndarray):
        return torch.tensor(x)
    try:
        return torch.from_numpy(x.copy())
    except TypeError:
        raise ParameterError(f"torch has no tensors of {x.dtype}; give the table as int64, float32 or bool") from None
