"""FlashMask's start and end rows: for every key, the queries that do not see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ExportError, MismatchError
from frisket.runtime.layouts.tiling import Tiling

from .visible import ANY, VisibleRuns, lines, listed, reader, why

Array = NDArray[Any]


@dataclass(frozen=True)
class FlashMask:
    """Arguments of `flashmask_attention`: `startend_row_indices` int32 [batch, heads or 1, kv_len, 1, 2 or 4], in
    query positions from the first of the crop, and `causal`.

    | columns | causal | key j is hidden from queries |
    |---|---|---|
    | 1 | yes | below j, and `[c0, q_len)` |
    | 2 | yes | below j, and `[c0, c1)` |
    | 2 | no | `[c0, q_len)` and `[0, c1)` |
    | 4 | no | `[c0, c1)` and `[c2, c3)` |
    """

    startend_row_indices: NDArray[np.int32]
    causal: bool


def to_flashmask(layout: Tiling) -> FlashMask:
    """FlashMask indices with as few columns as hold the mask.

    >>> import frisket as fk
    >>> found = fk.mask("causal & window(256)").layout(1024, 1024).to_flashmask()
    >>> found.startend_row_indices.shape, found.startend_row_indices[0, 0, :3, 0].tolist(), found.causal
    ((1, 1, 1024, 1), [256, 257, 258], True)

    The head axis is 1 unless heads differ; then FlashMask wants one entry per key head. `causal` is used where there
    are as many queries as keys, which leaves no doubt where its diagonal lies. Raises `ExportError` where a key is
    hidden from three runs of queries or more. Source: the FlashMask paper (arXiv 2410.01359) and the reference
    documentation of Paddle's `flashmask_attention`.
    """

    def too_many(b: int, h: int, key: int, runs: list[tuple[int, int]]) -> ExportError:
        hidden = [r for r in zip([0, *(x for _, x in runs)], [*(x for x, _ in runs), layout.q_len]) if r[0] < r[1]]
        return ExportError(
            f"FlashMask hides at most two runs of queries from a key, and key {key} of the layout is hidden from "
            f"{len(hidden)}: {listed(hidden)}\n  {why(layout, b, h, hidden[1][0], key)}\n  {ANY}"
        )

    seen = lines(layout, most=3, too_many=too_many, transposed=True)
    found = [_hidden(seen, s) for s in range(int(seen.slice_of.max()) + 1)]
    for s, (count, _, _) in enumerate(found):
        if count.max(initial=0) > 2:
            key = int(np.argmax(count > 2))
            ptr, start, stop = (x.tolist() for x in seen.of(s))
            at = slice(ptr[key], ptr[key + 1])
            raise too_many(*reader(seen.slice_of, s), key, list(zip(start[at], stop[at], strict=True)))
    start, stop = (np.stack([f[i] for f in found]) for i in (1, 2))
    columns, causal = _columns(start, stop, layout.q_len)
    _verify(columns, causal, seen)
    heads = 1 if (seen.slice_of == seen.slice_of[:, :1]).all() else layout.heads
    return FlashMask(columns.astype(np.int32)[seen.slice_of[:, :heads]], causal)


def _hidden(seen: VisibleRuns, s: int) -> tuple[Array, Array, Array]:
    """How many runs of queries each key is hidden from, and the first two, [keys, 2], empty at the end if missing."""
    ptr, start, stop = seen.of(s)
    owner = np.repeat(np.arange(seen.length), np.diff(ptr) + 1)
    opens, closes = np.insert(stop, ptr[:-1], 0), np.insert(start, ptr[1:], seen.width)
    keep = closes > opens
    owner, opens, closes = owner[keep], opens[keep], closes[keep]
    count = np.bincount(owner, minlength=seen.length)
    at = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    ends = np.full((2, seen.length, 2), seen.width)
    few = at < 2
    ends[:, owner[few], at[few]] = opens[few], closes[few]
    return count, ends[0], ends[1]


def _columns(start: Array, stop: Array, q_len: int) -> tuple[Array, bool]:
    """The fewest columns, [slices, keys, 1, 2 or 4], and `causal`."""
    keys = start.shape[1]
    key = np.arange(keys)
    top = start[..., 0] == 0  # the first hidden run begins at query 0
    if q_len == keys and bool((((stop[..., 0] >= key) & top) | (key == 0)).all()):
        below = np.where(top, key, start[..., 0])  # what `causal` leaves of the first run
        more = stop[..., 0] > below
        if not (more & (start[..., 1] < q_len)).any():
            c0, c1 = np.where(more, below, start[..., 1]), np.where(more, stop[..., 0], stop[..., 1])
            one = bool((c1 == q_len).all())
            return np.stack([c0] if one else [c0, c1], axis=-1), True
    prefix = np.where(top, stop[..., 0], 0)
    rest = [np.where(top, x[..., 1], x[..., 0]) for x in (start, stop)]
    other = np.where(top, q_len, start[..., 1])
    if bool((rest[1] == q_len).all()) and bool((other == q_len).all()):
        return np.stack([rest[0], prefix], axis=-1), False
    # the upper run first where there are two, and where the one begins at query 0
    upper = top | (start[..., 1] < q_len)
    lower = [np.where(upper, x[..., 1], x[..., 0]) for x in (start, stop)]
    above = [np.where(upper, x[..., 0], 0) for x in (start, stop)]
    return np.stack([*lower, *above], axis=-1), False


def _verify(columns: Array, causal: bool, seen: VisibleRuns) -> None:
    """Read the columns back, as the format's table says, and compare every key with the mask."""
    n, end = columns.shape[-1], seen.width
    c = [columns[..., i] for i in range(n)]
    zero = np.zeros_like(c[0])
    hidden = {
        (1, True): [(c[0], zero + end)], (2, True): [(c[0], c[-1])],
        (2, False): [(c[0], zero + end), (zero, c[-1])], (4, False): [(c[0], c[1 % n]), (c[2 % n], c[-1])],
    }[n, causal]  # fmt: skip
    if causal:
        hidden.append((zero, zero + np.arange(seen.length)))
    starts, stops = (np.stack([pair[i] for pair in hidden], axis=-1).reshape(-1, len(hidden)) for i in (0, 1))
    order = np.argsort(starts, axis=1, kind="stable")
    starts, stops = np.take_along_axis(starts, order, 1), np.take_along_axis(stops, order, 1)
    reach = np.pad(np.maximum.accumulate(stops, axis=1), ((0, 0), (1, 0)))
    until = np.pad(starts, ((0, 0), (0, 1)), constant_values=end)
    shown = until > reach
    same = np.array_equal(shown.sum(axis=1), np.diff(seen.ptr))
    if not (same and np.array_equal(reach[shown], seen.start) and np.array_equal(until[shown], seen.stop)):
        raise MismatchError("FlashMask columns differ from the mask: this is a bug of frisket, please report the mask")
