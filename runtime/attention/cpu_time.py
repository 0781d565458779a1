"""The time that native CPU kernels take for a mask, from counts of their work and measured times of each kind."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.evaluate import evaluate
from frisket.lowering.kernels.cpp.tiles import tiles
from frisket.lowering.plan import Geometry
from frisket.runtime.layouts.tiling import Tiling
from frisket.runtime.machine.cpp_cpu import best
from frisket.runtime.masks.mask import Mask

DIM, GROUP = 64, 6  # of a head; queries that a kernel takes at once
KEYS = 128  # of a tile when `TIMES` were measured; tiles have 64 now, which changes a time by 0.88 to 1.02
SAMPLE = 64  # partial tiles that are looked at
LANES = {"avx2": 8, "neon": 4, "scalar": 1}  # others have 16
# Nanoseconds of each kind of `work`, and of a row of q, k, v or the result that moves; forward, D64, float32, one
# thread: `python benchmarks/reorder.py costs` measures them.
KINDS = ("pairs of full tiles", "partial tiles", "scores of partial tiles", "values of partial tiles", "rows moved")
TIMES = {"avx512": (2.58, 5932.7, 1.25, 1.31, 15.3), "avx2": (2.78, 7064.59, 1.97, 0.62, 18.12)}


def time_of(mask: Mask, q_len: int, kv_len: int, moves: int = 0) -> float:
    """Nanoseconds of the forward of one head of size 64, `moves` rows reordered; CPUs without AVX-512 as AVX2."""
    variant = best()
    times = TIMES["avx2" if variant in LANES else "avx512"]
    return float(work(mask, q_len, kv_len, LANES.get(variant, 16)) @ times[:-1] + moves * times[-1])


def work(mask: Mask, q_len: int, kv_len: int, lanes: int = 16) -> NDArray[np.float64]:
    """How much of each kind in `KINDS` but the last a call does, by a sample of its partial tiles."""
    block = tiles(Geometry(1, 1, 1, q_len, kv_len, DIM, DIM, 1.0), "float32", False)[0], KEYS
    found: Tiling = mask.layout(q_len, kv_len, block=block, exact=False)
    counts, pairs = found.counts, block[0] * block[1]
    share, seen = np.zeros(2), _seen(found, block)
    if len(seen):
        seen = np.logical_or.reduceat(seen, range(0, block[0], GROUP), axis=1)
        share = np.array([seen.reshape(*seen.shape[:2], -1, lanes).any(-1).mean(), seen.mean()])
    return np.array([counts.full * pairs, counts.partial, *(counts.partial * pairs * share)])


def _seen(found: Tiling, block: tuple[int, int]) -> NDArray[np.bool_]:
    """The visible pairs of some partial tiles, bool [tiles, queries, keys]."""
    runs = found.runs
    width = np.where(runs.kind == 1, runs.stop - runs.start, 0)
    ends = np.cumsum(width)
    total = int(width.sum())
    pick = np.linspace(0, total - 1, min(SAMPLE, total)).astype(np.int64)
    run = np.searchsorted(ends, pick, side="right")
    row = np.searchsorted(runs.row_ptr, run, side="right") - 1
    column = runs.stop[run] - (ends[run] - pick)
    q = row[:, None, None] * block[0] + np.arange(block[0])[:, None]
    k = column[:, None, None] * block[1] + np.arange(block[1])
    where: dict[str, Any] = {"b": 0, "h": 0, "q": np.minimum(q, found.q_len - 1), "k": np.minimum(k, found.kv_len - 1)}
    seen = evaluate(found.mask, {**found.scope().env, **where}, {n: t.array for n, t in found.tables.items()})
    return np.asarray(seen & (q < found.q_len) & (k < found.kv_len), bool)
