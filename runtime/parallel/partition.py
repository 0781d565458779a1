"""Partition of the sequence's tiles over ranks: as few bytes as possible among the partitions that are balanced.

A partition is an int array [ranks, tiles per rank] of tile numbers, ascending in a row. The work is on tiles and runs
of tiles: O(ranks * tiles) for each partition that is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BALANCED = 1.05  # the most that a rank may have to do, as a share of the mean
_AIM = 1.04  # where mending stops: between the bound and what is worth more bytes
_ABOUT = 1.02
_LAYERS = (1, 2, 3, 4, 6, 8, 16)


@dataclass(frozen=True)
class TileCosts:
    """Costs and reads of the tiles of queries: `cost` [tiles], runs of key tiles `start`..`stop` of tile `row`. Tiles
    beyond the length cost nothing and read nothing."""

    ranks: int
    cost: Array
    row: Array
    start: Array
    stop: Array

    @property
    def per_rank(self) -> int:
        return len(self.cost) // self.ranks

    @cached_property
    def mean(self) -> float:
        return float(self.cost.sum()) / self.ranks

    def imbalance(self, partition: Array) -> float:
        return float(self.cost[partition].sum(axis=1).max()) / self.mean if self.mean else 1.0

    def reads(self, partition: Array) -> NDArray[np.bool_]:
        """bool [reader, holder, place]: the tiles that queries of a rank may see, by the rank that holds them."""
        owner = np.empty(len(self.cost), np.int64)
        owner[partition] = np.arange(self.ranks)[:, None]
        wide = len(self.cost) + 1
        steps = np.zeros(self.ranks * wide, np.int64)
        line = owner[self.row] * wide
        np.add.at(steps, line + self.start, 1)
        np.add.at(steps, line + self.stop, -1)
        return np.asarray(np.cumsum(steps.reshape(self.ranks, wide), axis=1)[:, partition] > 0)

    def needs(self, partition: Array) -> Array:
        """int64 [ranks, ranks, 2]: of the tiles that rank s holds, the places that rank r reads lie in a range."""
        read = self.reads(partition)
        hi = self.per_rank - read[..., ::-1].argmax(axis=2)
        return np.asarray(np.stack([read.argmax(axis=2), hi], axis=-1) * np.any(read, axis=2, keepdims=True))

    def sent(self, partition: Array) -> int:
        """Tiles of keys that ranks send."""
        needs = self.needs(partition)
        size = needs[..., 1] - needs[..., 0]
        return int(size.sum() - np.trace(size))


def best(work: TileCosts) -> Array:
    """The balanced partition that sends least; of several that send about as little, the most even one. Where none is
    balanced, the most even of all. Ranks are in the order of their first tiles."""
    found: list[tuple[float, int, Array]] = []
    for partition in _candidates(work):
        found.append((work.imbalance(partition), work.sent(partition), partition))
        if found[-1][0] >= BALANCED:
            mended = _mended(work, partition)
            found.append((work.imbalance(mended), work.sent(mended), mended))
        elif len(found) == 1 and 2 * found[0][1] <= len(work.cost):
            break  # contiguous, balanced, and a rank is sent less than half of what it holds
    balanced = [x for x in found if x[0] < BALANCED]
    if balanced:
        least = min(sent for _, sent, _ in balanced)
        partition = min((x for x in balanced if x[1] <= _ABOUT * least), key=lambda x: x[:2])[2]
    else:
        partition = min(found, key=lambda x: x[:2])[2]
    return partition[np.argsort(partition[:, 0])]


def contiguous(work: TileCosts) -> Array:
    return np.arange(len(work.cost)).reshape(work.ranks, work.per_rank)


def zigzag(work: TileCosts) -> Array:
    """Rank r has chunks r and 2 * ranks - 1 - r of 2 * ranks chunks."""
    half = -(-work.per_rank // 2)
    front, back = np.split(np.arange(len(work.cost)), [half * work.ranks])
    return np.concatenate([front.reshape(work.ranks, -1), back.reshape(work.ranks, -1)[::-1]], axis=1)


def folded(work: TileCosts) -> Array:
    """Every rank has one stretch from the front of what is left and one from its back, as long as balance asks for:
    zig-zag where costs rise evenly."""
    n, sums = work.per_rank, np.concatenate([[0], np.cumsum(work.cost)])
    front, back, parts = 0, len(work.cost), []
    for left in range(work.ranks, 0, -1):
        take = np.arange(n + 1)  # tiles from the front
        cost = sums[front + take] - sums[front] + sums[back] - sums[back - n + take]
        x = int(np.abs(cost - (sums[back] - sums[front]) / left).argmin())
        parts.append(np.r_[front : front + x, back - n + x : back])
        front, back = front + x, back - n + x
    return np.stack(parts)


def layered(work: TileCosts, layers: int) -> Array:
    """The sequence in `layers` stretches of one chunk for every rank: who has most to do gets the lightest chunk."""
    cuts = np.linspace(0, work.per_rank, layers + 1).astype(np.int64)
    load, parts = np.zeros(work.ranks), []
    for a, b in pairwise(cuts):
        chunks = np.arange(a * work.ranks, b * work.ranks).reshape(work.ranks, b - a)
        cost = work.cost[chunks].sum(axis=1)
        at = np.empty(work.ranks, np.int64)
        at[np.argsort(-load, kind="stable")] = np.argsort(cost, kind="stable")
        load += cost[at]
        parts.append(chunks[at])
    return np.concatenate(parts, axis=1)


def _candidates(work: TileCosts) -> Iterator[Array]:
    yield contiguous(work)
    yield zigzag(work)
    yield folded(work)
    for n in _LAYERS:
        if 1 < n <= work.per_rank:
            yield layered(work, n)


def _mended(work: TileCosts, partition: Array) -> Array:
    """`partition` after exchanges of equal stretches between the rank with most to do and the rank with least, each the
    shortest stretch that brings one of them to the mean."""
    partition = partition.copy()
    load = work.cost[partition].sum(axis=1).astype(np.float64)
    for _ in range(8 * work.ranks):
        a, b = int(load.argmax()), int(load.argmin())
        if load[a] <= _AIM * work.mean:
            break
        wanted = min(load[a] - work.mean, work.mean - load[b])
        swap = _exchange(work.cost[partition[a]], work.cost[partition[b]], wanted, load[a] - load[b])
        if swap is None:
            break
        n, i, j, gain = swap
        mine, theirs = partition[a, i : i + n].copy(), partition[b, j : j + n].copy()
        partition[a, i : i + n], partition[b, j : j + n] = theirs, mine
        partition[a].sort()
        partition[b].sort()
        load[a] -= gain
        load[b] += gain
    return partition


def _exchange(a: Array, b: Array, wanted: float, most: float) -> tuple[int, int, int, float] | None:
    """(length, place in a, place in b, cost that moves): the shortest stretches that move `wanted`, or what comes
    nearest to it; None where no exchange would help."""
    found: tuple[int, int, int, float] | None = None
    sums = [np.concatenate([[0], np.cumsum(x)]) for x in (a, b)]
    n = 1
    while n <= len(a):
        mine, theirs = (s[n:] - s[:-n] for s in sums)
        j = int(theirs.argmin())
        gains = mine - theirs[j]
        gains = np.where((gains > 0) & (gains < most), gains, -np.inf)
        i = int(np.abs(gains - wanted).argmin())
        if gains[i] > 0 and (found is None or abs(gains[i] - wanted) < abs(found[3] - wanted)):
            found = n, i, j, float(gains[i])
        if gains.max() >= wanted:
            break
        n *= 2
    return found
