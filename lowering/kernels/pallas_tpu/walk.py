"""The walk of Pallas TPU kernels over the spans of a mask: tables in scalar memory, and the text that reads them.

The grid is (batch, programs, steps), and a program is a query head, some heads of a group, or a key head. The rows of
tiles of a slice follow one another in one sequence of steps, each with as many steps as it visits tiles. So the
pipeline fetches the first tiles of a row while the last of the row before are computed. A row that sees nothing has
one step, which visits nothing. `steps`, the longest sequence of any slice, is a run-time number, as everything is that
depends on the spans' values: other values of one shape do not recompile.

`TpuWalk` has a word for each step: row, head and tile, and what to do there. Where a grid may have more steps
than scalar memory has room for, `TpuSearch` has tables that grow with the rows alone, and every step looks its tile up:

    step       -> row        anchor[step >> shift] is the row of step >> shift << shift; `first` leads on from there
    step, row  -> position   step - first[row]: which of the row's visits this is
    position   -> tile       by the last record that begins at or before it

A record is (begin, tile - position, full from, full to), in positions; begin is NONE where there is no record. Rows are
tiles of queries and tiles are of keys (`spans.rows`: forward, dq), or the other way round (`spans.columns`: dk and dv).

A program of the forward or of dq has `parts` query heads of one slice. Each visits a tile before any goes on to the
next one, so that they share the keys and values that are fetched. A program of dk and dv is a key head, and the query
heads of its group follow one another within a row of keys. Heads that share a slice visit the positions of a row one
after the other (`fold` times). Heads that do not have their records one after the other in one row.

Rows come in their order. A core runs its steps one after another, so nothing is gained by running long rows first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import LoweringError
from frisket.lowering.kernels.text import filled, parts
from frisket.lowering.plan import Spans
from frisket.lowering.planner.planner import DeviceSpans

ANCHORS = 16 * 1024  # entries of `anchor`, of all slices together
NONE = np.iinfo(np.int32).max
LONG = 4096  # entries of `slice_of`, from where on a repetition is looked for
SCALAR_BYTES = 512 * 1024  # scalar memory that a walk may take: half of what a core has
VISITS, FULL, STARTS, ENDS = 1, 2, 4, 8  # what a step does, in the lowest FLAGS bits of its word
FLAGS = 4


class TpuWalk(NamedTuple):
    """The table of the walk, int32. `steps` is a number; `slice_of` [batch * programs], or where that is long as few of
    its first entries as it repeats. `words` [slices, room for steps] are row, part, tile and flags, from the highest
    bits to the lowest."""

    steps: Any
    slice_of: Any
    words: Any


class TpuSearch(NamedTuple):
    """The tables of a walk that has no room for its steps, int32. `steps` is a number. The others are vectors:
    `slice_of` as of `TpuWalk`, `shift` [1], `anchor` [slices * entries], `first` [slices * (rows + 1)], `records`
    [slices * rows * records * 4]."""

    steps: Any
    slice_of: Any
    shift: Any
    anchor: Any
    first: Any
    records: Any


@dataclass(frozen=True)
class TpuOptions:
    """The facts of a device and of a walk that the text of a kernel depends on."""

    strided: bool = True  # TPUs from v5 on roll each row by another number
    program_heads: int = 1  # query heads of a group that are one program
    search: bool = False  # the walk is a `TpuSearch`


class WalkHeads(NamedTuple):
    """The query heads of a program: `group` of a key head, of which `fold` repeat one walk, or `parts` of one slice."""

    group: int
    fold: int
    parts: int


def names(search: bool) -> tuple[str, ...]:
    """The vectors of a walk, as kernels call them."""
    return (TpuSearch if search else TpuWalk)._fields[1:]


def folded(slice_of: NDArray[np.int32], group: int) -> int:
    """The number of query heads of a key head that repeat one walk: all of the group, or one."""
    heads = slice_of.reshape(-1, group)
    return group if (heads == heads[:, :1]).all() else 1


def walk(spans: Spans | DeviceSpans, columns: int, group: int = 1, parts: int = 1) -> TpuWalk | TpuSearch:
    """The walk of `spans`, whose rows have `columns` tiles, in arrays of the same framework: numpy's or JAX's, traced
    or not. With `group` for programs of key heads, with `parts` for programs of so many query heads; raises where the
    tables take more scalar memory than there is.

    >>> bounds = np.array([[[[0, 0, 1, 2]], [[0, 0, 0, 0]]]], np.int32)
    >>> made = walk(Spans(bounds, np.array([[1, 0]], np.int32), np.array([[0]], np.int32)), 2)
    >>> int(made.steps), [f"{word:06b}" for word in made.words[0]]  # row, tile, ends, starts, full, visits
    (3, ['000111', '011001', '101100', '100000'])
    """
    xp: Any = np
    if not isinstance(spans.bounds, np.ndarray):
        import jax.numpy as xp
    fold = folded(spans.slice_of, group)
    bounds, meant, slice_of = _of_groups(xp, spans, group // fold)
    length = xp.where(meant, bounds[..., 3] - bounds[..., 0], 0)
    programs = _repeated(slice_of[:, :: fold * parts])
    slices, rows = length.shape[:2]
    most, words = rows * columns * max(group, parts), SCALAR_BYTES // 4 - programs.size
    room = most
    if slices * room > words:
        room = _steps_at_most(length, fold * parts)
    bits = [(n - 1).bit_length() for n in (rows, max(group, parts), columns)]
    if room and slices * room <= words and sum(bits) + FLAGS < 32:
        return _listed(xp, bounds, length, programs, WalkHeads(group, fold, parts), room, bits)
    return _search(xp, bounds, length, _repeated(slice_of[:, ::fold]), most // parts, fold)


def _steps_at_most(length: Any, times: int) -> int:
    """A power of two from the steps of any slice on, so that other values seldom are another shape; 0 where they are
    JAX's."""
    if not isinstance(length, np.ndarray):
        return 0
    return 1 << (int(np.maximum(length.sum(-1), 1).sum(-1).max()) * times - 1).bit_length()


def _listed(
    xp: Any, bounds: Any, length: Any, slice_of: NDArray[np.int32], heads: WalkHeads, room: int, bits: list[int]
) -> TpuWalk:
    group, fold, parts = heads
    bounds, length = xp.tile(bounds, (1, 1, fold, 1)), xp.tile(length, (1, 1, fold))
    slices, _, number = length.shape
    seen = length.sum(-1) > 0
    length = xp.where(seen[..., None], length, xp.arange(number) == 0) * parts  # a row that sees nothing has a step
    ends = xp.cumsum(length.reshape(slices, -1), -1)
    begins, total = ends - length.reshape(slices, -1), ends[:, -1:]
    steps = xp.minimum(xp.arange(room), total - 1)  # a shorter sequence stays at its last tile

    def of(values: Any, at: Any) -> Any:
        return xp.take_along_axis(values, at, 1)

    record = of(_counted(xp, begins, room).cumsum(-1) - 1, steps)  # the last that begins at or before a step
    row, lo = record // number, of(bounds[..., 0].reshape(slices, -1), record)
    part = (steps - of(begins, record)) % parts + record % number // (number // group)
    sees = of(seen, row)
    tile = xp.where(sees, lo + (steps - of(begins, record)) // parts, 0)
    full = sees & (tile >= of(bounds[..., 1].reshape(slices, -1), record))
    full &= tile < of(bounds[..., 2].reshape(slices, -1), record)
    starts = steps - of(begins[:, ::number], row) < parts
    finish = of(ends[:, number - 1 :: number], row) - steps <= parts
    flags = xp.where(xp.arange(room) < total, VISITS * sees + FULL * full + STARTS * starts + ENDS * finish, 0)
    words = (((row << bits[1]) + part << bits[2]) + tile << FLAGS) + flags
    return TpuWalk(*(xp.asarray(x, np.int32) for x in (total.max(), slice_of, words)))


def _counted(xp: Any, places: Any, room: int) -> Any:
    """The number of `places` [slices, ..] at each of the first `room`."""
    slices = len(places)
    # places past the room count in one more bin, which is cut off
    at = (xp.minimum(places, room) + (room + 1) * xp.arange(slices)[:, None]).reshape(-1)
    size = slices * (room + 1)
    counts = np.bincount(at, minlength=size) if xp is np else xp.bincount(at, length=size)
    return counts.reshape(slices, room + 1)[:, :room]


def _search(xp: Any, bounds: Any, length: Any, slice_of: NDArray[np.int32], most: int, fold: int) -> TpuSearch:
    slices, rows, number = length.shape
    entries = min(1 << (most - 1).bit_length(), max(1, ANCHORS // slices))
    _check(slice_of.size + slices * (entries + rows + 1 + 4 * rows * number), most)
    lo, full_lo, full_hi = (bounds[..., i] for i in range(3))
    begin = xp.cumsum(length, -1) - length
    fields = xp.stack([xp.where(length > 0, begin, NONE), lo - begin, begin + full_lo - lo, begin + full_hi - lo], -1)
    records = xp.where((length > 0)[..., None], fields, xp.asarray([NONE, 0, 0, 0]))
    steps = xp.maximum(fold * length.sum(-1), 1)
    first = xp.concatenate([xp.zeros_like(steps[:, :1]), xp.cumsum(steps, -1)], -1)
    longest = first[:, -1].max()
    shift = ((longest - 1) >> xp.arange(31) >= entries).sum()  # the least that is enough
    past = _counted(xp, -(-first[:, 1:] >> shift), entries).cumsum(-1)  # rows that end at or before an anchor
    flat = [xp.asarray(x.reshape(-1), np.int32) for x in (slice_of, shift, xp.minimum(past, rows - 1), first, records)]
    return TpuSearch(xp.asarray(longest, np.int32), *flat)


def _repeated(slice_of: NDArray[np.int32]) -> NDArray[np.int32]:
    """The first part of a long vector that repeats, because all of it would be a lot of scalar memory. Short vectors
    stay as they are: whether they repeat depends on values, and other values should not be another shape."""
    parts = (slice_of[:1, :1], slice_of[:1], slice_of) if slice_of.size > LONG else (slice_of,)
    return next(part for part in parts if (slice_of == part).all()).reshape(-1)


def _of_groups(xp: Any, spans: Spans | DeviceSpans, parts: int) -> tuple[Any, Any, NDArray[np.int32]]:
    """The walk of groups, (bounds, whether a record is meant, slice_of), with the records of `parts` heads one after
    another. The number of records is a power of two, so that other values seldom are another shape."""
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

TEXT = parts(__package__, "walk")


def locate(search: bool, heads: int, grouped: bool) -> str:
    """The text of the function `locate`: ((row, head of the program, tile), (visits, full, starts, ends)) for a step of
    (batch, program). A program that takes one head of `heads` has no number for it. The vectors come from scalar
    memory, the arguments of `static` are static. `grouped` programs are key heads."""
    result = "row, part, tile" if heads > 1 else "row, tile"
    shared = {"what": f"({result})", "result": result, "static": ", ".join(_static(search, grouped))}
    if search:
        part = ["part = turn + lax.div(found, Int(number // parts))  # the head of the group"] if heads > 1 else []
        return filled(TEXT["search"], **shared, turn=TEXT["turn"].strip().splitlines() if heads > 1 else [], part=part)
    bits = (heads - 1).bit_length()
    part = [f"part, row = row & {(1 << bits) - 1}, row >> {bits}"] if bits else []
    done = ", ".join(f"word & {flag} != 0" for flag in (VISITS, FULL, STARTS, ENDS))
    return filled(TEXT["locate"], **shared, flags=FLAGS, part=part, done=f"({done})")


def program_holes(heads: int, group: int, keys: bool) -> dict[str, Any]:
    """The holes of a skeleton that differ by program. A program is one of `heads` query heads of a group of so many,
    which owns rows of query tiles. With `keys` it is one of a key head and all of its group, which owns rows of key
    tiles."""
    one, part = heads == 1, "part" if heads > 1 else ""
    tiles = ["k_tile", "q_tile"] if keys else ["q_tile", "k_tile"]
    size = "GROUP" if keys else "HEADS"
    named = ("kv_head", "kv_heads") if keys else ("head", "heads") if one else ("program", "heads // HEADS")
    divided = f"lax.div(h, Int({'GROUP' if one else 'GROUP // HEADS'}))"
    side_by_side = not one and not keys  # a key head's queries come one after another
    shared = f"HEADS = {heads}  # query heads of a program, which share what is fetched of keys and values"
    return {
        "sharing": [shared] * side_by_side,
        "program": named[0],
        "programs": named[1],
        "head": [f"head = {named[0]} * {size} + part"] if part else ["head = kv_head"] * keys,
        "located": ", ".join(filter(None, [tiles[0], part, tiles[1]])),
        "placed": f"b, {'h' if one else f'h * {size} + part'}, q_tile, k_tile",
        "kv_head": "h" if keys or heads == group else divided,
        "query": "head" if keys else "_",
        "of_query": "head" if keys else "h",
        "together": "HEADS" if side_by_side else "1",
        "own": "part" if side_by_side else "...",
        "part": "part" if side_by_side else "0",
        "of_group": part or "0",
        "shape": "shape[1:]" if side_by_side else "shape",
        "shared": "HEADS, " if side_by_side else "",
    }


def _static(search: bool, grouped: bool) -> list[str]:
    if not search:
        return ["programs", "room", "tile_bits"]
    return ["programs", "rows", *["fold", "parts"] * grouped]


def static_arguments(search: bool, grouped: bool, programs: str, rows: str, columns: str) -> str:
    """The text of the static arguments of `locate`."""
    values = {"programs": programs, "rows": rows, "fold": "fold", "parts": "GROUP // fold"}
    values |= {"room": "words.shape[1]", "tile_bits": f"({columns} - 1).bit_length()"}
    return ", ".join(f"{name}={values[name]}" for name in _static(search, grouped))


def passed(search: bool) -> list[str]:
    """The text of the vectors as a call passes them."""
    return ["words.reshape(-1)" if name == "words" else name for name in names(search)]
