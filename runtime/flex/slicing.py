"""Slices of a BlockMask: what `block_mask[batch, head, rows]` picks, and where that is in the whole mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frisket.dsl import ir
from frisket.dsl.ir import Expr, lit, var

from .errors import PickError
from .live_mask import LiveMask, Value, fresh

AXES = ("batch entry", "head", "row of tiles")


@dataclass(frozen=True)
class Pick:
    """Entries of one axis: `start .. start + count`, or the `count` entries `at`. `whole` is all of them in order."""

    start: int
    count: int
    of: int
    at: Tensor | None = None

    @property
    def whole(self) -> bool:
        return self.at is None and self.count == self.of

    def select(self, x: Tensor, axis: int) -> Tensor:
        if self.at is None:
            return x.narrow(axis, self.start, self.count)
        return x.index_select(axis, self.at.to(x.device))


def picks(index: Any, sizes: Sequence[int]) -> list[Pick]:
    """One pick for every axis: `sizes` are batch entries, heads (as far as there are any) and rows of tiles."""
    given = index if isinstance(index, tuple) else (index,)
    dots = [i for i, x in enumerate(given) if x is Ellipsis]
    if len(given) - len(dots) > len(sizes) or len(dots) > 1:
        axes = ", ".join(AXES[-len(sizes) :])
        raise PickError(f"block_mask[...] with {len(given)} indices\n  there are {len(sizes)}: [{axes}]")
    missing = [slice(None)] * (len(sizes) - len(given) + len(dots))
    at = dots[0] if dots else len(given)
    given = (*given[:at], *missing, *given[at + 1 :])
    if sum(isinstance(x, Tensor | list) for x in given) > 1:
        raise PickError(
            "block_mask[...] with two tensors\n  torch would pair them up, which is no mask of [batch, head, rows] any "
            "more: pick along one axis at a time, block_mask[first][:, second]"
        )
    return [_pick(x, n, name) for x, n, name in zip(given, sizes, AXES[-len(sizes) :], strict=True)]


def _pick(index: Any, n: int, name: str) -> Pick:
    if isinstance(index, list):
        index = torch.tensor(index)
    if isinstance(index, Tensor) and index.ndim == 0 and index.dtype is not torch.bool:
        index = index.reshape(1) if torch.compiler.is_dynamo_compiling() else int(index)
    if isinstance(index, int) and not isinstance(index, bool):
        if not -n <= index < n:
            raise PickError(f"{name} {index}\n  there are {n}: {-n}..{n - 1}")
        return Pick(index % n, 1, n)
    if isinstance(index, slice):
        found = range(n)[index]
        if not found:
            raise PickError(f"{name} {_text(index)} picks nothing of {n}")
        return Pick(found[0], len(found), n, None if found.step == 1 or len(found) == 1 else torch.tensor(found))
    if isinstance(index, Tensor) and index.ndim == 1 and not index.is_floating_point():
        return _entries(index, n, name)
    what = f"a tensor of {index.dtype} {list(index.shape)}" if isinstance(index, Tensor) else repr(index)
    raise PickError(f"{name} {what}\n  an index is an int, a slice, or a tensor of one axis of ints or bools")


def _entries(at: Tensor, n: int, name: str) -> Pick:
    if at.dtype is torch.bool:
        if len(at) != n:
            raise PickError(f"{name}s by {len(at)} bools\n  there are {n}")
        at = at.nonzero()[:, 0]
    if not len(at):
        raise PickError(f"{name} [] picks nothing of {n}")
    if not torch.compiler.is_dynamo_compiling() and at.is_cpu and bool(((at < -n) | (at >= n)).any()):
        raise PickError(f"{name} {at.tolist()}\n  there are {n}: {-n}..{n - 1}")
    return Pick(0, len(at), n, torch.where(at < 0, at + n, at).long())


def _text(index: slice) -> str:
    return ":".join("" if x is None else str(x) for x in (index.start, index.stop))


def moved(mod: LiveMask, picks: Sequence[Pick], q_len: int, block: int) -> tuple[LiveMask, int, bool]:
    """The mask in positions of what was picked, its queries, and whether some before the last are past the end."""
    places: dict[Expr, Expr] = {}
    values: dict[str, Value] = {}

    def table(name: str, at: Tensor, index: Expr) -> Expr:
        name = fresh(name, {*mod.values, *values})
        values[name] = at
        return ir.lookup(name, (index,))

    *batch, rows = picks
    for name, pick in zip("bh"[2 - len(batch) :], batch, strict=True):
        if pick.whole:
            continue
        if pick.at is not None:
            places[var(name)] = table(f"{name}_of", pick.at, ir.ZERO if pick.count == 1 else var(name))
        else:
            places[var(name)] = lit(pick.start) if pick.count == 1 else var(name) + pick.start
    if rows.whole:
        return mod.at(places, values), q_len, False
    q, size = var("q"), lit(block)
    if rows.at is None:
        places[q] = q + rows.start * block if rows.start else q
        return mod.at(places, values), min(rows.count * block, q_len - rows.start * block), False
    places[q] = table("row_of", rows.at, ir.build("floordiv", q, size)) * block + ir.build("mod", q, size)
    made, length, cut = mod.at(places, values), rows.count * block, rows.of * block - q_len
    if not cut:
        return made, length, False
    short = (rows.at == rows.of - 1).tolist()
    if short[-1]:
        length -= cut
    if not any(short[:-1]):
        return made, length, False
    inside = LiveMask(places[q] < q_len, {n: x for n, x in values.items() if n.startswith("row_of")})
    return made.join("and", inside), length, True
