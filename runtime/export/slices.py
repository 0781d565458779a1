"""MagiAttention's slices: query range, key range, kind. Together they cover the mask, each position once.

Also arguments of variable-length FlashAttention: documents one after another, a causal flag and a window.
FlashMask's start and end rows: for every key, the queries that do not see it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ExportError, MismatchError
from frisket.lowering.analysis.tiling import Array, Tiling
from frisket.lowering.engines.flags import packing

from .tile_lists import ANY, VisibleRuns, lines, listed, reader, why


@dataclass(frozen=True)
class Varlen:
    """Arguments of `flash_attn_varlen_func`, int32 arrays and ints, lengths in tokens.

    Document i has queries `cu_seqlens_q[i] .. cu_seqlens_q[i + 1]` and keys `cu_seqlens_k[i] .. cu_seqlens_k[i + 1]`.
    With n queries and m keys, its query u is at e = u + m - n (the last query at the last key, "bottom right").
    It sees keys e - left .. e + right of the document; -1 is no bound. `causal` bounds right by 0.
    """

    cu_seqlens_q: NDArray[np.int32]
    cu_seqlens_k: NDArray[np.int32]
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    window_size: tuple[int, int]


def to_varlen(layout: Tiling) -> Varlen:
    """`cu_seqlens` and flags for a mask that is documents on the diagonal, causal, windowed or full.

    >>> import frisket as fk
    >>> doc = [0, 0, 0, 1, 1, 2, 2, 2]
    >>> found = fk.mask("causal & same(doc)", doc=doc).layout(8, 8).to_varlen()
    >>> found.cu_seqlens_q.tolist(), found.causal, found.window_size
    ([0, 3, 5, 8], True, (-1, -1))

    Batch entries follow one another, as packed tensors [batch * q_len, heads, head_dim] hold them. A query that sees
    nothing is a document without keys, a key that no query sees one without queries. Every query is compared with what
    the flags say. Raises `ExportError` at the first query that cannot be had so. Source: the documentation of
    `flash_attn_varlen_func`.
    """

    def too_many(b: int, h: int, q: int, runs: list[tuple[int, int]]) -> ExportError:
        text = f"varlen attention shows a query one run of keys, and query {q} of the layout sees {len(runs)}: "
        return ExportError(f"{text}{listed(runs)}\n  {why(layout, b, h, q, runs[0][1])}\n  to_slices(), {ANY}")

    seen = lines(layout, most=1, too_many=too_many)
    one_mask(layout, seen, "varlen attention")
    q, first, stop = packed(layout, seen)
    documents = packing(q, first, stop)
    k0, k1, left, right = documents.k0, documents.k1, documents.left, documents.right
    for i in np.flatnonzero(k0[1:] < k1[:-1])[:1]:
        reason = "a later query sees keys before the end of these, so they are not documents one after another"
        raise _misfit(layout, int(documents.r1[i]) - 1, (int(first[documents.doc == i][-1]), int(k1[i])), None, reason)
    low, high = documents.shown
    for i in np.flatnonzero((low != first) | (high != stop))[:1]:
        reason = f"a window of {left} to the left and {right} to the right shows it"
        raise _misfit(layout, int(q[i]), (int(first[i]), int(stop[i])), (int(low[i]), int(high[i])), reason)
    cu = documents.cumulative(layout.batch * layout.q_len, layout.batch * layout.kv_len)
    longest_q, longest_k = np.diff(cu, axis=1).max(axis=1).tolist()
    causal = right == 0
    # (-1, 0) says no more than `causal`
    window = (left, right) if left >= 0 or not causal else (-1, -1)
    return Varlen(cu[0], cu[1], longest_q, longest_k, causal, window)


def one_mask(layout: Tiling, seen: VisibleRuns, name: str) -> None:
    """Refuse masks that differ from head to head."""
    of = seen.slice_of
    if (of == of[:, :1]).all():
        return
    b, h = (int(x[0]) for x in np.nonzero(of != of[:, :1]))
    q, k = _difference(seen, int(of[b, 0]), int(of[b, h]))
    text = f"{name} has one mask for all heads, and heads 0 and {h} of the layout differ\n"
    text += f"  {why(layout, b, 0, q, k)}\n  {why(layout, b, h, q, k)}\n  lay heads out one by one, or: {ANY}"
    raise ExportError(text)


def _difference(seen: VisibleRuns, s: int, t: int) -> tuple[int, int]:
    """The first position that is visible in one of two slices only."""
    (ptr, *mine), (other, *theirs) = seen.of(s), seen.of(t)
    unlike = np.append(np.flatnonzero(np.diff(ptr) != np.diff(other)), seen.length)[0]  # in how many runs
    runs = slice(0, int(ptr[unlike]))
    changes = np.flatnonzero((mine[0][runs] != theirs[0][runs]) | (mine[1][runs] != theirs[1][runs]))
    q = int(np.searchsorted(ptr, changes[0], side="right")) - 1 if changes.size else int(unlike)
    edge = np.zeros((2, seen.width + 1), np.int64)
    for row, at, (start, stop) in zip(edge, (ptr, other), (mine, theirs), strict=True):
        row[start[at[q] : at[q + 1]]] += 1
        row[stop[at[q] : at[q + 1]]] -= 1
    return q, int(np.flatnonzero(np.cumsum(edge[0] - edge[1]))[0])


def packed(layout: Tiling, seen: VisibleRuns) -> tuple[Array, Array, Array]:
    """(query, first key, stop) of every run of every batch entry, one entry after another."""
    parts = []
    for b, s in enumerate(seen.slice_of[:, 0].tolist()):  # heads are alike, by `one_mask`
        ptr, start, stop = seen.of(s)
        query = np.repeat(np.arange(seen.length), np.diff(ptr))
        parts.append(np.stack([query + b * layout.q_len, start + b * layout.kv_len, stop + b * layout.kv_len]))
    q, first, stop = np.concatenate(parts, axis=1)
    return q, first, stop


def _misfit(layout: Tiling, q: int, has: tuple[int, int], flags: tuple[int, int] | None, reason: str) -> ExportError:
    """Query `q` of the packed sequence sees keys `has`, and the best flags would show it `flags`."""
    b, q = divmod(q, layout.q_len)
    offset = b * layout.kv_len
    (a, z), (low, high) = ((x - offset, y - offset) for x, y in (has, flags or has))
    odd = [k for k in sorted({a, z - 1, low, high - 1}) if (a <= k < z) != (low <= k < high)]
    k = min(max(odd[0], 0), layout.kv_len - 1) if odd else a
    shown = f" {listed([(low, high)])}" if flags else ""
    text = f"query {q} of the layout sees keys {listed([(a, z)])}, and {reason}{shown}\n"
    return ExportError(f"{text}  {why(layout, b, 0, q, k)}\n  to_slices() has more kinds of rectangle; {ANY}")


MOST = 64  # runs of keys a query may have
FULL, CAUSAL, INVCAUSAL, BICAUSAL = 0, 1, 2, 3


@dataclass(frozen=True)
class Slices:
    """Arguments of `flex_flash_attn_func`: `q_ranges` and `k_ranges` int32 [n, 2], half-open, in packed tokens
    (batch entry b begins at b * q_len and b * kv_len), and `attn_type_map` int32 [n].

    Of n queries and m keys, query u sees key v under 0 FULL always, under 1 CAUSAL where v <= u + m - n. Under
    2 INVCAUSAL it does where v >= u, under 3 BICAUSAL where both hold.
    """

    q_ranges: NDArray[np.int32]
    k_ranges: NDArray[np.int32]
    attn_type_map: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.attn_type_map)


def to_slices(layout: Tiling) -> Slices:
    """Few slices that show exactly what the mask shows, none overlapping another.

    >>> import frisket as fk
    >>> found = fk.mask("causal & window(256)").layout(1024, 1024).to_slices()
    >>> found.q_ranges.tolist(), found.k_ranges.tolist(), found.attn_type_map.tolist()
    ([[0, 256], [256, 1024]], [[0, 256], [1, 1024]], [1, 3])

    The keys of neighbouring queries are followed while both ends stand still or move by one, which is as long as a
    slice can be. Raises `ExportError` for a mask that falls into more slices than it has queries, as patterns that pick
    single elements do, and for heads that differ. Source: MagiAttention's documentation of `AttnMaskType`.
    """

    def too_many(b: int, h: int, q: int, runs: list[tuple[int, int]]) -> ExportError:
        text = f"slices are long trapezoids, and query {q} of the layout alone sees {len(runs)} runs of keys: "
        return ExportError(f"{text}{listed(runs)}\n  {why(layout, b, h, q, runs[0][1])}\n  {ANY}")

    seen = lines(layout, most=MOST, too_many=too_many)
    one_mask(layout, seen, "a list of slices")
    q, first, stop = packed(layout, seen)
    order, heads, move = _tracks(q, first, stop, layout.batch * layout.kv_len)
    q, first, stop = q[order], first[order], stop[order]
    at, end = _stretches(heads, move, layout.batch * layout.q_len)
    if at is None or end is None:
        runs = np.bincount(q)
        b, worst = divmod(int(runs.argmax()), layout.q_len)
        ptr, start, stop = (x.tolist() for x in seen.of(int(seen.slice_of[b, 0])))
        mine = list(zip(start[ptr[worst] : ptr[worst + 1]], stop[ptr[worst] : ptr[worst + 1]], strict=True))
        gap = mine[0][1] if len(mine) > 1 else max(mine[0][0] - 1, 0)
        text = "slices are long trapezoids, and this mask falls into more of them than its "
        text += f"{layout.batch * layout.q_len:,} queries; query {worst} of the layout sees {len(mine)} runs of keys: "
        raise ExportError(f"{text}{listed(mine)}\n  {why(layout, b, 0, worst, min(gap, layout.kv_len - 1))}\n  {ANY}")
    kind = np.where(end > at, move[np.minimum(at + 1, end)], FULL)  # a slice of one query is a rectangle
    ranges = np.stack([q[at], q[end] + 1]), np.stack([first[at], stop[end]])
    _verify(*ranges, kind, q, first, stop)
    place = np.lexsort((ranges[1][0], ranges[0][0]))
    arrays = [x[..., place].T.astype(np.int32).copy() for x in (*ranges, kind)]  # rows in memory, not a transposed view
    return Slices(arrays[0], arrays[1], arrays[2])


def _tracks(q: Array, first: Array, stop: Array, width: int) -> tuple[Array, Array, Array]:
    """Chains of runs, each the continuation of the one before it on the next query. Returns their order, chain by
    chain, where a chain begins, and how each run has moved (the kind of slice that moves so)."""
    key = q * (width + 1) + first
    above = np.searchsorted(key, (q - 1) * (width + 1) + first, side="right") - 1  # the last that starts no later
    near = np.maximum(above, 0)
    left, right = first - first[near], stop - stop[near]
    linked = (above >= 0) & (q[near] == q - 1) & (left >= 0) & (left <= 1) & (right >= 0) & (right <= 1)
    root = np.where(linked, near, np.arange(len(q)))
    while (root != root[root]).any():  # pointers double: log steps for the longest chain
        root = root[root]
    order = np.lexsort((q, root))
    linked, disjoint = linked[order], (linked & (first >= stop[near]))[order]
    # two runs without a common key belong together on a diagonal, not where one document follows another
    linked &= ~disjoint | np.append(False, disjoint[:-1])[: len(q)] | np.append(disjoint[1:], False)[: len(q)]
    return order, ~linked, np.where(linked, (2 * left + right)[order], -1)


def _stretches(heads: Array, move: Array, most: int) -> tuple[Array, Array] | tuple[None, None]:
    """First and last run of each slice; None where there are more than `most`. Taking each as long as it can be is
    best, since a part of a slice is a slice."""
    n = len(heads)
    turns = np.flatnonzero(np.append(heads[1:] | (move[1:] != move[:-1]), True)[:n])  # the last of its movement
    last = turns[np.searchsorted(turns, np.arange(n))] if n else turns
    at: list[int] = []
    end: list[int] = []
    i = 0
    while i < n:
        if len(at) == most:
            return None, None
        j = int(last[i + 1]) if i + 1 < n and not heads[i + 1] else i
        at.append(i)
        end.append(j)
        i = j + 1
    return np.array(at, np.int64), np.array(end, np.int64)


def _verify(rows: Array, keys: Array, kind: Array, q: Array, first: Array, stop: Array) -> None:
    """Read the slices back, query by query, and compare with the runs of the mask."""
    n, m = rows[1] - rows[0], keys[1] - keys[0]
    of = np.repeat(np.arange(len(n)), n)
    u = np.arange(len(of)) - np.repeat(np.cumsum(n) - n, n)
    low = np.where(kind[of] >= INVCAUSAL, u, 0)
    high = np.where(kind[of] % 2 == CAUSAL, u + (m - n)[of] + 1, m[of])
    got = np.stack([rows[0][of] + u, keys[0][of] + low, keys[0][of] + high])
    want = np.stack([q, first, stop])
    got, want = (x[:, np.lexsort((x[1], x[0]))] for x in (got, want))
    if not np.array_equal(got, want):
        raise MismatchError("slices differ from the mask: this is a bug of frisket, please report the mask")


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
        text = f"FlashMask hides at most two runs of queries from a key, and key {key} of the layout is hidden from "
        return ExportError(f"{text}{len(hidden)}: {listed(hidden)}\n  {why(layout, b, h, hidden[1][0], key)}\n  {ANY}")

    seen = lines(layout, most=3, too_many=too_many, transposed=True)  # two hidden runs leave three visible ones
    hidden_runs = [_hidden(seen, s) for s in range(int(seen.slice_of.max()) + 1)]
    for s, (count, _, _) in enumerate(hidden_runs):
        if count.max(initial=0) > 2:
            key = int(np.argmax(count > 2))
            ptr, start, stop = (x.tolist() for x in seen.of(s))
            at = slice(ptr[key], ptr[key + 1])
            raise too_many(*reader(seen.slice_of, s), key, list(zip(start[at], stop[at], strict=True)))
    start, stop = (np.stack([f[i] for f in hidden_runs]) for i in (1, 2))
    columns, causal = _columns(start, stop, layout.q_len)
    _verify_rows(columns, causal, seen)
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


def _verify_rows(columns: Array, causal: bool, seen: VisibleRuns) -> None:
    """Read the columns back, as the format's table says, and compare every key with the mask."""
    n, end = columns.shape[-1], seen.width
    c = [columns[..., i] for i in range(n)]
    zero = np.zeros_like(c[0])
    forms = {
        (1, True): [(c[0], zero + end)],
        (2, True): [(c[0], c[-1])],
        (2, False): [(c[0], zero + end), (zero, c[-1])],
    }
    hidden = (forms | {(4, False): [(c[0], c[1 % n]), (c[2 % n], c[-1])]})[n, causal]
    if causal:
        hidden.append((zero, zero + np.arange(seen.length)))
    starts, stops = (np.stack([pair[i] for pair in hidden], axis=-1).reshape(-1, len(hidden)) for i in (0, 1))
    order = np.argsort(starts, axis=1, kind="stable")
    starts, stops = np.take_along_axis(starts, order, 1), np.take_along_axis(stops, order, 1)
    reach = np.pad(np.maximum.accumulate(stops, axis=1), ((0, 0), (1, 0)))  # hidden runs may overlap
    until = np.pad(starts, ((0, 0), (0, 1)), constant_values=end)
    shown = until > reach
    same = np.array_equal(shown.sum(axis=1), np.diff(seen.ptr))
    if not (same and np.array_equal(reach[shown], seen.start) and np.array_equal(until[shown], seen.stop)):
        raise MismatchError("FlashMask columns differ from the mask: this is a bug of frisket, please report the mask")
