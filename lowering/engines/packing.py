"""Packing: documents in a row, as variable-length attention takes them, fitted to the keys that queries see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Packing:
    """Documents and one window for all of them. Document i has queries `r0[i] .. r1[i]` and keys `k0[i] .. k1[i]` of
    the packed sequences; with n queries and m keys, its query u stands at m - n + u and sees keys from `left` before to
    `right` after that place, -1 is no bound. It is fitted to queries `q` that see keys `first .. stop`, and `doc` is
    the document of each of these; whether the flags show each of them just that, `fits` says."""

    q: Array
    first: Array
    stop: Array
    doc: Array
    r0: Array
    r1: Array
    k0: Array
    k1: Array
    left: int
    right: int

    @property
    def ordered(self) -> bool:
        """Whether the keys of a document end before those of the next."""
        return not (self.k0[1:] < self.k1[:-1]).any()

    @property
    def shown(self) -> tuple[Array, Array]:
        """The keys `[low, high)` that the flags show each query."""
        low, high = self.k0[self.doc], self.k1[self.doc]
        stands = (self.k1 - self.r1)[self.doc] + self.q
        low = low if self.left < 0 else np.maximum(low, stands - self.left)
        return low, high if self.right < 0 else np.minimum(high, stands + (self.right + 1))

    @property
    def fits(self) -> bool:
        low, high = self.shown
        return self.ordered and bool((low == self.first).all() and (high == self.stop).all())

    def cumulative(self, total_q: int, total_k: int) -> NDArray[np.int32]:
        """cu_seqlens of queries and of keys, int32 [2, documents + 1]. Queries between two documents are one without
        keys, keys between them one without queries."""
        queries = np.stack([self.r0, self.r0, self.r1], axis=1).reshape(-1)
        keys = np.stack([np.append(0, self.k1)[: len(self.k1)], self.k0, self.k1], axis=1).reshape(-1)
        rest = keys[-1] if len(keys) else 0
        corners = np.array([[0, *queries, total_q, total_q], [0, *keys, rest, total_k]], np.int32)
        moves = (np.diff(corners, axis=1) > 0).any(axis=0)
        return np.ascontiguousarray(corners[:, np.append(True, moves)])


def packing(q: Array, first: Array, stop: Array) -> Packing:
    """Documents fitted to queries `q` of the packed sequence, in order, that see keys `[first, stop)`, none of them
    empty. Neighbouring queries without a common key are of two documents."""
    opens = np.ones(len(q), bool)
    opens[1:] = (q[1:] > q[:-1] + 1) | (first[1:] >= stop[:-1]) | (stop[1:] <= first[:-1])
    at = np.flatnonzero(opens)
    end = np.append(at[1:], len(q))[: len(at)] - 1
    doc, r1, k0, k1 = np.cumsum(opens) - 1, q[end] + 1, first[at], stop[end]
    stands = (k1 - r1)[doc] + q  # the key where each query stands
    left = _width(stands - first, first == k0[doc])
    right = _width(stop - 1 - stands, stop == k1[doc])
    return Packing(q, first, stop, doc, q[at], r1, k0, k1, left, right)


def _width(distance: Array, free: Array) -> int:
    """How far a query sees to one side, -1 where its document alone bounds it."""
    return -1 if free.all() else max(-1, int(distance.max()))
