"""The walk of Pallas TPU kernels over the spans of a mask: tables in scalar memory, and the text that reads them.

The grid is (batch, heads, steps). The rows of tiles of a slice follow one another in one sequence of steps, each with
as many steps as it visits tiles, so that the pipeline fetches the first tiles of a row while the last of the row before
are computed. A row that sees nothing has one step, which visits nothing. `steps`, the longest sequence of any slice, is
a number of run time, like all that depends on the spans' values: other values of one shape compile nothing.

    step       -> row        anchor[step >> shift] is the row of step >> shift << shift; `first` leads on from there
    step, row  -> position   step - first[row]: which of the row's visits this is
    position   -> tile       by the last record that begins at or before it

A record is (begin, tile - position, full from, full to), in positions; begin is NONE where there is no record. Rows are
tiles of queries and tiles are of keys (`spans.rows`: forward, dq), or the other way round (`spans.columns`: dk and dv).

There the grid is (batch, key heads, steps), and the query heads of a group follow one another within a row. Where they
share a slice the row's positions are gone through once for each of them (`fold` times); where they do not, their
records stand one after another in one row: `parts` heads. Either `fold` or `parts` is the group, the other 1.

Rows come in their order. A core runs its steps one after another, so nothing is gained by running long rows first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import LoweringError
from frisket.lowering.kernels.text import filled
from frisket.lowering.plan import Spans
from frisket.lowering.planner.planner import DeviceSpans

NAMES = ("slice_of", "shift", "anchor", "first", "records")
ANCHORS = 16 * 1024  # entries of `anchor`, of all slices together
NONE = np.iinfo(np.int32).max
LONG = 4096  # entries of `slice_of`, from where on it is looked at whether they repeat
SCALAR_BYTES = 512 * 1024  # scalar memory that a walk may take: half of what a core has


class TpuWalk(NamedTuple):
    """The tables of the walk, int32. `steps` is a number, the others vectors: `slice_of` [batch * heads], or where that
    is long as few of its first entries as it repeats, `shift` [1], `anchor` [slices * entries], `first` [slices * (rows
    + 1)], `records` [slices * rows * records * 4]."""

    steps: Any
    slice_of: Any
    shift: Any
    anchor: Any
    first: Any
    records: Any


def folded(slice_of: NDArray[np.int32], group: int) -> int:
    """The number of query heads of a key head that repeat one walk: all of the group, or one."""
    heads = slice_of.reshape(-1, group)
    return group if (heads == heads[:, :1]).all() else 1


def walk(spans: Spans | DeviceSpans, columns: int, group: int = 1) -> TpuWalk:
    """The walk of `spans`, whose rows have `columns` tiles, in arrays of the same framework: numpy's or JAX's, traced
    or not. With `group` for a grid of key heads.

    >>> bounds = np.array([[[[0, 0, 1, 2]], [[0, 0, 0, 0]]]], np.int32)
    >>> made = walk(Spans(bounds, np.array([[1, 0]], np.int32), np.array([[0]], np.int32)), 2)
    >>> int(made.steps), made.first.tolist(), made.records.tolist()
    (3, [0, 2, 3], [0, 0, 0, 1, 2147483647, 0, 0, 0])
    """
    host = isinstance(spans.bounds, np.ndarray)
    xp: Any = np
    if not host:
        import jax.numpy as xp
    fold = folded(spans.slice_of, group)
    bounds, meant, slice_of = _of_groups(xp, spans, group // fold)
    slice_of = _repeated(slice_of[:, ::fold] if fold > 1 else slice_of)
    slices, rows, number, _ = bounds.shape
    entries = min(1 << (rows * columns * fold - 1).bit_length(), max(1, ANCHORS // slices))
    _check(slice_of.size + slices * (entries + rows + 1 + 4 * rows * number), rows * columns * fold)
    lo, full_lo, full_hi, hi = (bounds[..., i] for i in range(4))
    length = xp.where(meant, hi - lo, 0)
    begin = xp.cumsum(length, -1) - length
    fields = xp.stack([xp.where(length > 0, begin, NONE), lo - begin, begin + full_lo - lo, begin + full_hi - lo], -1)
    records = xp.where((length > 0)[..., None], fields, xp.asarray([NONE, 0, 0, 0]))
    steps = xp.maximum(fold * length.sum(-1), 1)
    first = xp.concatenate([xp.zeros_like(steps[:, :1]), xp.cumsum(steps, -1)], -1)
    most = first[:, -1].max()
    shift = ((most - 1) >> xp.arange(31) >= entries).sum()  # the least that is enough
    anchor = _anchors(xp, first[:, 1:], shift, entries)
    flat = [xp.asarray(x.reshape(-1), np.int32) for x in (slice_of, shift, anchor, first, records)]
    return TpuWalk(xp.asarray(most, np.int32), *flat)


def _repeated(slice_of: NDArray[np.int32]) -> NDArray[np.int32]:
    """The first part of a long vector that repeats, because all of it would be a lot of scalar memory. Short vectors
    stay as they are: whether they repeat depends on values, and other values should not be another shape."""
    parts = (slice_of[:1, :1], slice_of[:1], slice_of) if slice_of.size > LONG else (slice_of,)
    return next(part for part in parts if (slice_of == part).all()).reshape(-1)


def _of_groups(xp: Any, spans: Spans | DeviceSpans, parts: int) -> tuple[Any, Any, NDArray[np.int32]]:
    """The walk of groups, (bounds, whether a record is meant, slice_of), with the records of `parts` heads one after
    another; as many records as a power of two, so that other values seldom are another shape."""
    bounds, slice_of = spans.bounds, spans.slice_of
    number = bounds.shape[2]
    room = 1 << (number - 1).bit_length()
    meant = xp.arange(room) < spans.count[..., None]
    bounds = xp.pad(bounds, ((0, 0), (0, 0), (0, room - number), (0, 0)))
    if parts > 1:
        groups, slices = np.unique(slice_of.reshape(-1, parts), axis=0, return_inverse=True)
        slice_of = slices.reshape(len(slice_of), -1).astype(np.int32)
        rows = bounds.shape[1]
        bounds = xp.moveaxis(bounds[groups], 1, 2).reshape(len(groups), rows, parts * room, 4)
        meant = xp.moveaxis(meant[groups], 1, 2).reshape(len(groups), rows, parts * room)
    return bounds, meant, slice_of


def _anchors(xp: Any, ends: Any, shift: Any, entries: int) -> Any:
    """The number of rows that end at or before each 2**shift-th step: [slices, entries]."""
    slices = len(ends)
    at = -(-ends >> shift)  # the first anchor that is past the row
    at = xp.minimum(at, entries) + (entries + 1) * xp.arange(slices)[:, None]
    size = slices * (entries + 1)
    past = np.bincount(at.reshape(-1), minlength=size) if xp is np else xp.bincount(at.reshape(-1), length=size)
    rows = past.reshape(slices, entries + 1)[:, :entries].cumsum(-1)
    return xp.minimum(rows, ends.shape[1] - 1)


def _check(words: int, steps: int) -> None:
    if 4 * words > SCALAR_BYTES:
        raise LoweringError(
            f"the spans of this mask take {-(-4 * words // 1024)} KiB of a TPU's scalar memory, at most "
            f'{SCALAR_BYTES // 1024}; use larger tiles, or backend="xla"'
        )
    if steps > NONE:
        raise LoweringError(
            f'a head may have {steps} tiles and a TPU\'s grid counts with 32 bits; use larger tiles, or backend="xla"'
        )


# -- the text that reads them -----------------------------------------------------------------------

_LOCATE = '''
def locate(b, h, step, slice_of, shift, anchor, first, records, $static):
    """$what of a step; whether it visits that tile, the tile is FULL, the row starts, the row ends."""
    at = slice_of[lax.rem(b * heads + h, Int(slice_of.shape[0]))]
    start, slices = at * (rows + 1), first.shape[0] // (rows + 1)
    here = jnp.minimum(step, first[start + rows] - 1)  # a shorter sequence stays at its last tile

    def next_row(found):
        row, _, end = found
        return row + 1, end, first[start + row + 2]

    row = anchor[at * (anchor.shape[0] // slices) + (here >> shift[0])]
    begin, end = first[start + row], first[start + row + 1]
    row, begin, end = lax.while_loop(lambda found: found[2] <= here, next_row, (row, begin, end))
    position = here - begin
    $turn
    number = records.shape[0] // (4 * slices * rows)
    base = 4 * number * (at * rows + row)

    def later(i, found):
        return jnp.where(records[base + 4 * i] <= position, i, found)

    found = lax.fori_loop(Int(1), Int(number), later, Int(0)) if number > 1 else Int(0)
    record = base + 4 * found
    sees = records[record] <= position
    full = (records[record + 2] <= position) & (position < records[record + 3])
    $part
    tile = jnp.where(sees, position + records[record + 1], 0)
    return ($result), (sees & (step < end), full, step == begin, step + 1 == end)
'''

_TURN = """
each = jnp.maximum(lax.div(end - begin, Int(fold)), 1)
turn = lax.div(position, each)
position = position - turn * each
""".strip().splitlines()


def locate(grouped: bool) -> str:
    """The text of the function `locate`. It gives ((row, tile), (visits, full, starts, ends)) of a step of (batch,
    head), and with `grouped` ((row, head of the group, tile), ...) of a step of (batch, key head). The five vectors
    come from scalar memory; `heads` of the grid, `rows`, `fold` and `parts` are static."""
    if not grouped:
        return filled(_LOCATE, static="heads, rows", what="(row, tile)", turn=[], part=[], result="row, tile")
    part = ["part = turn + lax.div(found, Int(number // parts))  # the head of the group"]
    static, what = "heads, rows, fold, parts", "(row, part, tile)"
    return filled(_LOCATE, static=static, what=what, turn=_TURN, part=part, result="row, part, tile")
