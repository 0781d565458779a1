"""Layouts and spans by looking at every element: what the analysis is checked against."""

from __future__ import annotations

import numpy as np

from frisket.lowering.dense import coordinates, visible
from frisket.lowering.plan import Problem, Spans


def dense(
    mask, q_len, kv_len, *, batch=1, heads=1, block=None, origin=(0, 0, 0, 0), sizes=None, params=None, tables=None
):
    """The mask at every position, bool [batch, heads, q_len, kv_len]."""
    shape = (batch, heads, q_len, kv_len)
    env = {**coordinates(Problem(*shape[2:], *shape[:2], origin, sizes)), **(params or {})}
    return visible(mask, env, tables or {}, shape)


def kinds(mask, q_len, kv_len, *, block=(128, 128), **options):
    """uint8 [batch, heads, q_tiles, k_tiles]: 0 empty, 1 partial, 2 full; outside the lengths is False."""
    seen = dense(mask, q_len, kv_len, **options)
    batch, heads = seen.shape[:2]
    bq, bk = block
    nq, nk = -(-q_len // bq), -(-kv_len // bk)
    padded = np.zeros((batch, heads, nq * bq, nk * bk), bool)
    padded[:, :, :q_len, :kv_len] = seen
    count = padded.reshape(batch, heads, nq, bq, nk, bk).sum((3, 5))
    return np.where(count == 0, 0, np.where(count == bq * bk, 2, 1)).astype(np.uint8)


def spans(mask, q_len, kv_len, *, transposed=False, **options) -> Spans:
    """Spans straight from `kinds`, one slice per (batch, head)."""
    grid = kinds(mask, q_len, kv_len, **options)
    grid = grid.swapaxes(2, 3) if transposed else grid
    batch, heads, rows, _ = grid.shape
    records = [[_row(grid[b, h, r]) for r in range(rows)] for b in range(batch) for h in range(heads)]
    most = max((len(r) for s in records for r in s), default=0) or 1
    bounds = np.zeros((batch * heads, rows, most, 4), np.int32)
    count = np.zeros((batch * heads, rows), np.int32)
    for s, rowlist in enumerate(records):
        for r, found in enumerate(rowlist):
            count[s, r] = len(found)
            for i, record in enumerate(found):
                bounds[s, r, i] = record
    return Spans(bounds, count, np.arange(batch * heads, dtype=np.int32).reshape(batch, heads))


def _row(kinds_of_row):
    out, n, i = [], len(kinds_of_row), 0

    def while_(kind, i):
        while i < n and kinds_of_row[i] == kind:
            i += 1
        return i

    while i < n:
        if kinds_of_row[i] == 0:
            i += 1
            continue
        lo = i
        full_lo = i = while_(1, i)
        full_hi = i = while_(2, i)
        hi = i = while_(1, i) if full_hi > full_lo else i
        out.append((lo, full_lo, full_hi, hi))
    return out
