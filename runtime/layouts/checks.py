"""Checks of a layout's inputs: lengths, origins and tiles that make sense, and tables as long as they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.dsl.ir import SIZES, TRUE, Expr, conj, make, var
from frisket.lowering.analysis.layout import analyse, bind_in_part, grid_of
from frisket.lowering.analysis.reach import lookups
from frisket.lowering.analysis.table import Table
from frisket.lowering.analysis.tiles import Scope
from frisket.lowering.plan import Origin, Sizes, whole
from frisket.lowering.simplify import simplify
from frisket.runtime.machine.parameters import looks_like_lengths, names_of, segments_of_coordinates, short_tables

Array = NDArray[Any]
_LONGEST = 1 << 48  # tokens
_STEPS = 1 << 27  # to find a position outside of offsets


def check_reach(
    mask: Expr, readers: Sequence[Expr], scalars: Mapping[str, Any], tables: Mapping[str, Array], lengths: Sizes,
    origin: Origin = (0, 0, 0, 0), sizes: Sizes | None = None, shapes: Mapping[str, Array] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Refuse a table that a bare coordinate of `readers` runs past the end of at some position `mask` shows. Refuse
    offsets that do not hold a bare coordinate whose segment counts. Hidden positions may lie beyond: lookups clamp.
    `lengths` are batch, heads, q_len and kv_len of the call. `shapes` stand for tables whose values are not known."""
    ends = whole(origin, lengths)
    stops = dict(zip("bhqk", ends, strict=True))
    batch, heads, q_len, kv_len = lengths
    known = {**tables, **shapes}
    for coordinate, name, axis, have in (found for e in readers for found in short_tables(e, known, stops)):
        beyond = simplify(conj(bind_in_part(mask, known), var(coordinate) >= have))
        found = analyse(
            beyond, q_len=q_len, kv_len=kv_len, batch=batch, heads=heads, origin=origin, sizes=sizes, params=scalars,
            tables=known,
        )  # fmt: skip
        if found.exact and found.spans.count.any():
            need = stops[coordinate]
            raise ParameterError(
                f"table `{name}` has {have} entries on axis {axis} and is read at `{coordinate}` = 0..{need - 1}; "
                f"give {need}, or hide what lies beyond: `{coordinate} < {have} & ...`"
            )
    for e in readers:
        outside = {
            name: stops[c] for c, name, first, last in segments_of_coordinates(e, tables)
            if np.min(origin["bhqk".index(c)]) < first or stops[c] > last
        }  # fmt: skip
        if not outside or names_of(e).keys() & shapes.keys():
            continue
        reader, visible = bind_in_part(e, tables), TRUE if e is mask else bind_in_part(mask, known)
        grid, _ = grid_of(make("both", (reader, visible)), q_len, kv_len, batch, heads, (1, 1), origin)
        env = {**dict(zip(SIZES, sizes or ends, strict=True)), **scalars}
        scope = Scope(env, {n: Table(t) for n, t in known.items()}, _STEPS)
        for one in lookups(reader, visible, grid, scope):
            if one.offsets and one.witness and one.table in outside:
                advice = _advice(one.table, tables[one.table], outside[one.table])
                raise ParameterError(f"{one}\n  {advice}")


def _advice(name: str, offsets: Array, stop: int) -> str:
    """The remedy for offsets that do not hold all positions below `stop`."""
    lengths = looks_like_lengths(name)
    if offsets[0] <= 0:
        return (
            f"`{name}[{len(offsets) - 1}]` = {offsets[-1]} is where the last segment ends: give the end, "
            f"[*{name}, {stop}], or hide what lies beyond"
        )
    if offsets.sum() == stop:
        return lengths
    start = f"offsets begin with 0: [0, *{name}]"
    return start if offsets[-1] == stop else f"{start}; or {lengths}"


def _positive(n: Any) -> bool:
    if type(n) is int:
        return n > 0
    return np.ndim(n) == 0 and np.asarray(n).dtype.kind in "iu" and n > 0


def placed(x: Any) -> bool:
    """Whether x can be a start: an integer, or one per batch entry, none negative."""
    if type(x) is int:
        return x >= 0
    at = np.asarray(x)
    return at.dtype.kind in "iu" and bool((at >= 0).all())


def place_of(origin: Origin) -> tuple[Any, ...]:
    """An origin as it can be a key: ints, and tuples of them."""
    return tuple(x if type(x) is int or not np.ndim(x) else tuple(np.asarray(x).tolist()) for x in origin)


def check_lengths(
    q_len: int, kv_len: int, batch: int, heads: int, block: tuple[int, ...], origin: Origin, sizes: Sizes | None
) -> None:
    """Refuse what cannot be laid out."""
    for name, n in (("q_len", q_len), ("kv_len", kv_len), ("batch", batch), ("heads", heads)):
        may = name in ("q_len", "kv_len")
        if not _positive(n) and not (may and type(n) is int and n == 0):
            what = "lengths are integers, 0 or more, in tokens" if may else "counts are positive integers"
            raise ShapeError(f"{name} is {n}\n  {what}")
        if n >= _LONGEST:
            raise ShapeError(f"{name} is {n:,}, {_LONGEST:,} or more\n  positions are computed in 64 bits")
    if len(block) != 2 or not all(map(_positive, block)):
        raise ShapeError(f"block is {block}\n  tile sizes are two positive integers (queries, keys), in tokens")
    for length, tile in ((q_len, block[0]), (kv_len, block[1])):
        if block != (1, 1) and (tiles := int(length) // int(tile)) >= 1 << 31:
            raise ShapeError(f"{length:,} tokens in tiles of {tile} are {tiles:,} tiles\n  take larger tiles")
    if not np.iterable(origin) or len(origin) != 4 or not all(map(placed, origin)):
        raise ShapeError(f"origin is {origin}\n  it is (b, h, q, k), none negative, in global positions")
    for x in origin[2:]:
        if type(x) is not int and np.ndim(x) and np.shape(x) != (batch,):
            raise ShapeError(
                f"origin has {np.size(x)} entries for {batch} batch entries\n  give one int, or one per batch entry"
            )
    if sizes is None:
        return
    if not np.iterable(sizes) or len(sizes) != 4 or not all(map(_positive, sizes)):
        raise ShapeError(f"sizes is {sizes}\n  it is (B, H, Q_LEN, KV_LEN), the lengths of the whole problem")
    far = whole(origin, (batch, heads, q_len, kv_len))
    for name, stop, size in zip(SIZES, far, sizes, strict=True):
        if stop > size:
            raise ShapeError(
                f"the crop ends at {stop} but {name} is {size}\n"
                "  `sizes` are the lengths of the whole problem: (B, H, Q_LEN, KV_LEN)"
            )
