"""Arguments of variable-length FlashAttention: documents one after another, a causal flag and a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ExportError

from ..layout import Layout
from .visible import ANY, Lines, lines, listed, why

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


def to_varlen(layout: Layout) -> Varlen:
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
    opens = np.ones(len(q), bool)
    opens[1:] = (q[1:] > q[:-1] + 1) | (first[1:] >= stop[:-1]) | (stop[1:] <= first[:-1])  # documents share no key
    doc = np.cumsum(opens) - 1
    at, end = np.flatnonzero(opens), np.append(np.flatnonzero(opens)[1:], len(q))[: doc[-1] + 1 if len(q) else 0] - 1
    r0, r1, k0, k1 = q[at], q[end] + 1, first[at], stop[end]
    stands = k1[doc] - r1[doc] + q  # the key where each query stands
    left = _width(stands - first, first == k0[doc])
    right = _width(stop - 1 - stands, stop == k1[doc])
    low = k0[doc] if left < 0 else np.maximum(k0[doc], stands - left)
    high = k1[doc] if right < 0 else np.minimum(k1[doc], stands + right + 1)
    back = np.concatenate([k0[1:] < k1[:-1], np.zeros(min(1, len(k0)), bool)])  # overtakes the next document
    wrong = np.flatnonzero((low != first) | (high != stop) | np.append(opens[1:] & back[doc[:-1]], False)[: len(q)])
    if wrong.size:
        i = int(wrong[0])
        raise _misfit(layout, int(q[i]), (int(first[i]), int(stop[i])), (int(low[i]), int(high[i])), left, right)
    corners = np.concatenate([
        np.zeros((1, 2), np.int64),
        np.stack([r0, np.append(0, k1)[: len(k1)], r0, k0, r1, k1], axis=1).reshape(-1, 2),
        [(layout.batch * layout.q_len, k1[-1] if len(k1) else 0)],
        [(layout.batch * layout.q_len, layout.batch * layout.kv_len)],
    ])  # fmt: skip
    corners = corners[np.append(True, (np.diff(corners, axis=0) > 0).any(axis=1))]
    longest_q, longest_k = np.diff(corners, axis=0).max(axis=0).tolist()
    cu = corners.astype(np.int32)
    causal = right == 0
    window = (left, right) if left >= 0 or not causal else (-1, -1)
    return Varlen(cu[:, 0].copy(), cu[:, 1].copy(), longest_q, longest_k, causal, window)


def one_mask(layout: Layout, seen: Lines, name: str) -> None:
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


def _difference(seen: Lines, s: int, t: int) -> tuple[int, int]:
    """A position that is visible in one of two slices only."""
    (p, a, b), (r, c, d) = seen.of(s), seen.of(t)
    for q in range(seen.length):
        mine = np.zeros((2, seen.width + 1), np.int64)
        for i, (x, y) in enumerate(
            ((a[p[q] : p[q + 1]], b[p[q] : p[q + 1]]), (c[r[q] : r[q + 1]], d[r[q] : r[q + 1]]))
        ):
            mine[i, x] += 1
            mine[i, y] -= 1
        if (differ := np.flatnonzero(np.cumsum(mine[0] - mine[1]))).size:
            return q, int(differ[0])
    raise AssertionError("two slices are told apart and show the same")


def packed(layout: Layout, seen: Lines) -> tuple[Array, Array, Array]:
    """(query, first key, stop) of every run of every batch entry, one entry after another."""
    parts = []
    for b, s in enumerate(seen.slice_of[:, 0].tolist()):
        ptr, start, stop = seen.of(s)
        query = np.repeat(np.arange(seen.length), np.diff(ptr))
        parts.append(np.stack([query + b * layout.q_len, start + b * layout.kv_len, stop + b * layout.kv_len]))
    q, first, stop = np.concatenate(parts, axis=1)
    return q, first, stop


def _width(distance: Array, free: Array) -> int:
    """How far a query sees to one side, -1 where its document alone bounds it."""
    return -1 if free.all() else max(-1, int(distance.max()))


def _misfit(
    layout: Layout, q: int, has: tuple[int, int], flags: tuple[int, int], left: int, right: int
) -> ExportError:  # fmt: skip
    b, q = divmod(q, layout.q_len)
    offset = b * layout.kv_len
    (a, z), (low, high) = ((x - offset, y - offset) for x, y in (has, flags))
    ends = {a, z - 1, low, high - 1}
    odd = [k for k in sorted(ends) if (a <= k < z) != (low <= k < high)]
    if odd:
        said = f"a window of {left} to the left and {right} to the right shows it {listed([(low, high)])}"
        k = min(max(odd[0], 0), layout.kv_len - 1)
    else:
        said, k = "a later query sees keys before the end of these, so they are not documents one after another", a
    return ExportError(
        f"query {q} of the layout sees keys {listed([(a, z)])}, and {said}\n"
        f"  {why(layout, b, 0, q, k)}\n  to_slices() has more kinds of rectangle; {ANY}"
    )
