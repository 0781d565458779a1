"""The steps of a rank: from which ranks it gets keys, to which it sends keys, and the positions of these keys."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .deal import Deal, Variant

Message = tuple[int, int, int]  # (rank, start, stop): a rank, and a range of the sender's places


@dataclass(frozen=True)
class RankStep:
    """One call of a kernel, and the messages for it."""

    come: tuple[Message, ...]  # the keys to get from each rank; this rank's own need no message
    go: tuple[Message, ...]  # this rank's keys to send, with the rank that gets them
    parts: tuple[tuple[int, int, int], ...]  # the kernel's keys, (index in `come`, start, stop), by ascending position
    keys: NDArray[np.int32]  # the positions of the kernel's keys


def steps(deal: Deal, rank: int, variant: Variant) -> tuple[RankStep, ...]:
    """ "ring": the rank's own keys, then those of the rank one before, two before, ... as far as they are needed;
    "all-gather": all of them at once. Steps without a message stay: two ranks send keys one way and gradients the
    other, and both do so in one order only where steps have the same numbers."""
    needs = deal.needs.tolist()
    ways = [((rank - i) % deal.ranks, (rank + i) % deal.ranks) for i in range(deal.ranks)]
    rounds = [[way] for way in ways] if variant == "ring" else [ways]
    out = []
    for round in rounds:
        come = tuple((s, a, b) for s, _ in round for a, b in [needs[rank][s]] if b)
        go = tuple((t, a, b) for _, t in round for a, b in [needs[t][rank]] if b and t != rank)
        out.append(RankStep(come, go, *_in_order(deal, come)))
    return tuple(out)


def _in_order(deal: Deal, come: tuple[Message, ...]) -> tuple[Any, Any]:
    found = []
    for i, (rank, lo, hi) in enumerate(come):
        at = deal.positions(rank)[lo:hi]
        if len(come) == 1:
            return ((0, 0, hi - lo),), at
        cuts = [0, *(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), hi - lo]
        found += [(int(at[a]), i, a, b) for a, b in pairwise(cuts)]
    found.sort()
    keys = [deal.positions(come[i][0])[come[i][1] + a : come[i][1] + b] for _, i, a, b in found]
    return tuple(part for _, *part in found), np.concatenate(keys) if keys else np.zeros(0, np.int32)


def start(positions: NDArray[np.int32]) -> int | None:
    """The first of some positions, if each is one more than the one before."""
    return int(positions[0]) if int(positions[-1]) - int(positions[0]) == len(positions) - 1 else None
