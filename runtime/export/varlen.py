"""Arguments of variable-length FlashAttention: documents one after another, a causal flag and a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ExportError
from frisket.lowering.engines.packing import packing
from frisket.runtime.layouts.tiling import Tiling

from .visible import ANY, VisibleRuns, lines, listed, why

Array = NDArray[Any]


@dataclass(frozen=True)
class Varlen:
    """Arguments of `flash_attn_varlen_func`, int32 arrays and ints, lengths in tokens.

    Document i has queries `cu_seqlens_q[i] .. cu_seqlens_q[i + 1]` and keys `cu_seqlens_k[i] .. cu_seqlens_k[i + 1]`.
    With n queries and m keys, its query u stands at e = u + m - n (the last query at the last key, "bottom right")
    and sees keys e - left .. e + right of the document; -1 is no bound. `causal` bounds right by 0.
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
    nothing is a document without keys, a key that nobody sees one without queries. Every query is compared with what
    the flags say. Raises `ExportError` at the first query that cannot be had so. Source: the documentation of
    `flash_attn_varlen_func`.
    """

    def too_many(b: int, h: int, q: int, runs: list[tuple[int, int]]) -> ExportError:
        return ExportError(
            f"varlen attention shows a query one run of keys, and query {q} of the layout sees {len(runs)}: "
            f"{listed(runs)}\n  {why(layout, b, h, q, runs[0][1])}\n  to_slices(), {ANY}"
        )

    seen = lines(layout, most=1, too_many=too_many)
    one_mask(layout, seen, "varlen attention")
    q, first, stop = packed(layout, seen)
    made = packing(q, first, stop)
    k0, k1, left, right = made.k0, made.k1, made.left, made.right
    for i in np.flatnonzero(k0[1:] < k1[:-1])[:1]:
        said = "a later query sees keys before the end of these, so they are not documents one after another"
        raise _misfit(layout, int(made.r1[i]) - 1, (int(first[made.doc == i][-1]), int(k1[i])), None, said)
    low, high = made.shown
    for i in np.flatnonzero((low != first) | (high != stop))[:1]:
        said = f"a window of {left} to the left and {right} to the right shows it"
        raise _misfit(layout, int(q[i]), (int(first[i]), int(stop[i])), (int(low[i]), int(high[i])), said)
    cu = made.cumulative(layout.batch * layout.q_len, layout.batch * layout.kv_len)
    longest_q, longest_k = np.diff(cu, axis=1).max(axis=1).tolist()
    causal = right == 0
    window = (left, right) if left >= 0 or not causal else (-1, -1)
    return Varlen(cu[0], cu[1], longest_q, longest_k, causal, window)


def one_mask(layout: Tiling, seen: VisibleRuns, name: str) -> None:
    """Refuse masks that differ from head to head."""
    of = seen.slice_of
    if (of == of[:, :1]).all():
        return
    b, h = (int(x[0]) for x in np.nonzero(of != of[:, :1]))
    q, k = _difference(seen, int(of[b, 0]), int(of[b, h]))
    raise ExportError(
        f"{name} has one mask for all heads, and heads 0 and {h} of the layout differ\n"
        f"  {why(layout, b, 0, q, k)}\n  {why(layout, b, h, q, k)}\n  lay heads out one by one, or: {ANY}"
    )


def _difference(seen: VisibleRuns, s: int, t: int) -> tuple[int, int]:
    """The first position that is visible in one of two slices only."""
    (ptr, *mine), (other, *theirs) = seen.of(s), seen.of(t)
    unlike = np.append(np.flatnonzero(np.diff(ptr) != np.diff(other)), seen.length)[0]  # in how many runs
    runs = slice(0, int(ptr[unlike]))
    moved = np.flatnonzero((mine[0][runs] != theirs[0][runs]) | (mine[1][runs] != theirs[1][runs]))
    q = int(np.searchsorted(ptr, moved[0], side="right")) - 1 if moved.size else int(unlike)
    edge = np.zeros((2, seen.width + 1), np.int64)
    for row, at, (start, stop) in zip(edge, (ptr, other), (mine, theirs), strict=True):
        row[start[at[q] : at[q + 1]]] += 1
        row[stop[at[q] : at[q + 1]]] -= 1
    return q, int(np.flatnonzero(np.cumsum(edge[0] - edge[1]))[0])


def packed(layout: Tiling, seen: VisibleRuns) -> tuple[Array, Array, Array]:
    """(query, first key, stop) of every run of every batch entry, one entry after another."""
    parts = []
    for b, s in enumerate(seen.slice_of[:, 0].tolist()):
        ptr, start, stop = seen.of(s)
        query = np.repeat(np.arange(seen.length), np.diff(ptr))
        parts.append(np.stack([query + b * layout.q_len, start + b * layout.kv_len, stop + b * layout.kv_len]))
    q, first, stop = np.concatenate(parts, axis=1)
    return q, first, stop


def _misfit(layout: Tiling, q: int, has: tuple[int, int], flags: tuple[int, int] | None, said: str) -> ExportError:
    """Query `q` of the packed sequence sees keys `has`, and the best flags would show it `flags`."""
    b, q = divmod(q, layout.q_len)
    offset = b * layout.kv_len
    (a, z), (low, high) = ((x - offset, y - offset) for x, y in (has, flags or has))
    odd = [k for k in sorted({a, z - 1, low, high - 1}) if (a <= k < z) != (low <= k < high)]
    k = min(max(odd[0], 0), layout.kv_len - 1) if odd else a
    shown = f" {listed([(low, high)])}" if flags else ""
    return ExportError(
        f"query {q} of the layout sees keys {listed([(a, z)])}, and {said}{shown}\n"
        f"  {why(layout, b, 0, q, k)}\n  to_slices() has more kinds of rectangle; {ANY}"
    )
