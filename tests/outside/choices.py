"""Choices of blocks by scores, computed in loops over rows: what `frisket.select` is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Count = Callable[[Any, Sequence[int], Any], int]  # of (weights of a row, its blocks best first, forced ones)


def row_weights(scores: Any, seen: Any) -> Any:
    """The softmax of each row over the blocks that it sees."""
    out = np.zeros(scores.shape)
    for at in np.ndindex(scores.shape[:-1]):
        if seen[at].any():
            shift = scores[at][seen[at]].max()
            out[at] = np.where(seen[at], np.exp(np.where(seen[at], scores[at] - shift, 0)), 0)
            out[at] /= out[at].sum()
    return out


def chosen(scores: Any, seen: Any, forced: Any, rule: Count, kv_heads: int | None = None, share: str = "group") -> Any:
    """The choice, row by row: `rule(weights, seen)` says how many, or which weights."""
    scores = np.asarray(scores, np.float64)
    batch, heads, rows, _columns = scores.shape
    seen, forced = (np.broadcast_to(x, scores.shape) for x in (seen, forced))
    weights = row_weights(scores, seen)
    size = heads // (kv_heads or heads) if share == "group" else 1
    out = np.zeros(scores.shape, bool)
    for b in range(batch):
        for h in range(heads):
            group = slice(h // size * size, h // size * size + size)
            for i in range(rows):
                see, force = seen[b, group, i].any(0), forced[b, group, i].any(0)
                w = weights[b, group, i].mean(0)
                order = sorted(np.flatnonzero(see), key=lambda j: (not force[j], -w[j], j))
                out[b, h, i, order[: rule(w, order, force)]] = True
                out[b, h, i] |= force
    return out


def keep(n: Any) -> Count:
    return lambda w, order, force: n(len(order)) if callable(n) else n


def mass(p: float) -> Count:
    def count(w: Any, order: Sequence[int], force: Any) -> int:
        total, n = 0.0, 0
        for j in order:
            if not force[j] and total >= p:
                break
            total, n = total + w[j], n + 1
        return n

    return count


def threshold(t: float) -> Count:
    return lambda w, order, force: sum(bool(force[j]) or w[j] >= t for j in order)
