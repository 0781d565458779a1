"""The steps of a ring in one program: at step s, rank r sends rank r + s the keys that it needs, all at one length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .deal import Deal


@dataclass(frozen=True)
class Step:
    """A step of the ring, in which rank r gets keys of rank r - `shift`.

    >>> import frisket as fk
    >>> step = steps(fk.parallel.deal("causal & window(100)", 1024, ranks=4))[1]
    >>> step.shift, step.length, step.pairs, step.reads
    (1, 128, ((0, 1), (1, 2), (2, 3)), (False, True, True, True))
    """

    shift: int
    length: int  # tokens that a rank sends
    pairs: tuple[tuple[int, int], ...]  # (from, to) of the ranks that send
    start: tuple[int, ...]  # the first token that each rank sends, by its index in the shard
    reads: tuple[bool, ...]  # whether each rank sees some of the keys it gets


def steps(deal: Deal) -> tuple[Step, ...]:
    """The steps in which a rank sees something, a rank's own keys first.

    >>> import frisket as fk
    >>> [s.shift for s in steps(fk.parallel.deal("causal & window(100)", 1024, ranks=4))]  # the last two send nothing
    [0, 1]
    """
    made = []
    rank = np.arange(deal.ranks)
    for shift in range(deal.ranks):
        need = deal.needs[(rank + shift) % deal.ranks, rank]  # [from]
        size = need[:, 1] - need[:, 0]
        length = int(size.max()) if shift else deal.shard
        if not size.any():
            continue
        pairs = tuple((int(r), int((r + shift) % deal.ranks)) for r in rank if shift and size[r])
        start = np.where(size > 0, np.minimum(need[:, 0], deal.shard - length), 0)
        reads = size[(rank - shift) % deal.ranks] > 0
        made.append(Step(shift, length, pairs, tuple(map(int, start)), tuple(map(bool, reads))))
    return tuple(made)
