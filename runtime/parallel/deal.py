"""Deal: which tokens every rank holds, and what the ranks need of one another, under one mask; the steps of a ring.

>>> import frisket as fk
>>> d = fk.parallel.deal("causal", 1024, ranks=4)
>>> d.owned
(((0, 128), (896, 1024)), ((128, 256), (768, 896)), ((256, 384), (640, 768)), ((384, 640),))
>>> d.imbalance
1.0

Tiles are divided over ranks with as few bytes as possible among the partitions that are balanced. A partition is an int
array [ranks, tiles per rank] of tile numbers, ascending in a row. The work is on tiles and tile ranges: O(ranks *
tiles) for each partition that is tried.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import BudgetError, ParameterError, ShapeError
from frisket.grammar.memo import own_state
from frisket.lowering.analysis.tiles import FULL
from frisket.runtime.calls.arrays import framework_of, take
from frisket.runtime.export.tile_lists import elements
from frisket.runtime.machine.parameters import digest, traced
from frisket.runtime.masks.mask import Mask, MaskLike
from frisket.runtime.masks.mask import mask as as_mask

if TYPE_CHECKING:
    from frisket.runtime.masks.layout import Layout


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
        wide = len(self.cost) + 1  # a run may stop one past the last tile
        steps = np.zeros(self.ranks * wide, np.int64)
        line = owner[self.row] * wide
        np.add.at(steps, line + self.start, 1)  # `+=` would count a repeated index once
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
        return int(size.sum() - np.trace(size))  # a rank sends nothing to itself


def best(work: TileCosts) -> Array:
    """The balanced partition that sends least; of several that send about as little, the most even one. Where none is
    balanced, the most even of all. Ranks are in the order of their first tiles."""
    trials: list[tuple[float, int, Array]] = []
    for partition in _candidates(work):
        trials.append((work.imbalance(partition), work.sent(partition), partition))
        if trials[-1][0] >= BALANCED:
            mended = _mended(work, partition)
            trials.append((work.imbalance(mended), work.sent(mended), mended))
        elif len(trials) == 1 and 2 * trials[0][1] <= len(work.cost):
            break  # contiguous, balanced, and a rank is sent less than half of what it holds
    balanced = [x for x in trials if x[0] < BALANCED]
    if balanced:
        least = min(sent for _, sent, _ in balanced)
        partition = min((x for x in balanced if x[1] <= _ABOUT * least), key=lambda x: x[:2])[2]
    else:
        partition = min(trials, key=lambda x: x[:2])[2]
    return partition[np.argsort(partition[:, 0])]


def contiguous(work: TileCosts) -> Array:
    return np.arange(len(work.cost)).reshape(work.ranks, work.per_rank)


def zigzag(work: TileCosts) -> Array:
    """Rank r has chunks r and 2 * ranks - 1 - r of 2 * ranks chunks."""
    front, back = np.split(np.arange(len(work.cost)), [-(-work.per_rank // 2) * work.ranks])
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
        # stable: ranks on other CPUs have to make the same deal
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
        target = min(load[a] - work.mean, work.mean - load[b])
        swap = _exchange(work.cost[partition[a]], work.cost[partition[b]], target, load[a] - load[b])
        if swap is None:
            break
        n, i, j, gain = swap
        mine, theirs = partition[a, i : i + n].copy(), partition[b, j : j + n].copy()
        partition[a, i : i + n], partition[b, j : j + n] = theirs, mine
        partition[a].sort()  # a row of a partition ascends
        partition[b].sort()
        load[a] -= gain
        load[b] += gain
    return partition


def _exchange(a: Array, b: Array, target: float, most: float) -> tuple[int, int, int, float] | None:
    """(length, place in a, place in b, cost that moves): the shortest stretches that move `target`, or what comes
    nearest to it; None where no exchange would help."""
    swap: tuple[int, int, int, float] | None = None
    sums = [np.concatenate([[0], np.cumsum(x)]) for x in (a, b)]
    n = 1
    while n <= len(a):
        mine, theirs = (s[n:] - s[:-n] for s in sums)
        j = int(theirs.argmin())
        gains = mine - theirs[j]
        gains = np.where((gains > 0) & (gains < most), gains, -np.inf)  # more would turn the two ranks round
        i = int(np.abs(gains - target).argmin())
        if gains[i] > 0 and (swap is None or abs(gains[i] - target) < abs(swap[3] - target)):
            swap = n, i, j, float(gains[i])
        if gains.max() >= target:
            break
        n *= 2  # powers of 2: each length is a pass over both rows
    return swap


Variant = Literal["ring", "all-gather"]
_ELEMENTS = 1 << 21  # positions looked at in one go
_TILES = 1 << 20  # partial tiles that `pairs` looks at


def deal(
    mask: MaskLike, length: int, ranks: int, *, tile: int = 128, batch: int = 1, heads: int = 1, **params: Any
) -> Deal:
    """`deal("causal & same(doc)", 65536, ranks=8, doc=doc)`: the tokens of a sequence over ranks.

    Every rank holds the same number of tiles of `tile` tokens; queries, keys and values of a token are on one rank. Of
    the deals whose busiest rank has less than 1.05 times the mean of visible pairs, over `batch` entries and `heads`
    heads, the result sends least. Without such a deal it is the most even one; `.imbalance` says how even. Work is
    O(ranks * tiles + length), never pairs.

    >>> deal("causal & same(doc)", 1024, ranks=2, doc=np.arange(1024) // 300).imbalance < 1.05
    True

    `length` is in tokens, for queries and keys alike. Raises `ShapeError` for lengths, tiles or ranks that are out of
    range, `ParameterError` for a parameter of the mask without a value.
    """
    for name, n in (("ranks", ranks), ("tile", tile), ("length", length)):
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
            raise ShapeError(f"{name} is {n!r}\n  it is a positive integer: deal(mask, length, ranks, tile=128)")
    length, ranks, tile = int(length), int(ranks), int(tile)
    what = _known_mask(mask, params)
    layout = what.layout(length, length, batch, heads, (tile, tile))
    return Deal(length, tile, ranks, batch, heads, best(_work(layout, ranks)), what, layout)


def _known_mask(mask: MaskLike, params: dict[str, Any]) -> Mask:
    """The mask of a deal, which the host reads. Raises `ParameterError` for traced values."""
    for name in (n for n, x in params.items() if traced(x)):  # in `as_mask` the error would tell of calls
        text = f"`{name}` is traced by jax.jit or another transform, and a deal is made on the host\n"
        raise ParameterError(
            f'{text}  make it outside; or deal of a wider mask without `{name}`, such as "causal", for all its values'
        )
    return as_mask(mask, **params)


def _work(layout: Layout, ranks: int) -> TileCosts:
    tiles = ranks * -(-layout.rows // ranks)  # ranks have as many tiles each: those past the length cost nothing
    runs = layout.runs
    row = np.repeat(np.arange(len(runs.row_ptr) - 1) % layout.rows, np.diff(runs.row_ptr))
    cost = np.zeros(tiles, np.int64)
    try:
        cost[: layout.rows] = layout.row_pairs
    except BudgetError:  # past the budget, all positions of the tiles are counted
        np.add.at(cost, row, (runs.stop - runs.start).astype(np.int64) * layout.block[0] * layout.block[1])
    return TileCosts(ranks, cost, row, runs.start.astype(np.int64), runs.stop.astype(np.int64))


@dataclass(frozen=True, eq=False)
class Deal:
    """Tokens over ranks: `fk.parallel.deal(mask, length, ranks)`.

    >>> d = deal("causal", 1000, ranks=2)
    >>> d.shard, d.owned  # tokens of a rank, padding included; positions of every rank
    (512, (((0, 128), (256, 384), (768, 1000)), ((128, 256), (384, 768))))
    >>> tokens = d.permute(np.arange(1000), axis=0)  # rank r holds tokens[r * d.shard : (r + 1) * d.shard]
    >>> d.positions(1)[:2], d.labels(np.arange(1000))[:2]  # for RoPE; the token that follows each
    (array([128, 129], dtype=int32), array([1, 2]))
    >>> np.array_equal(d.unpermute(tokens, axis=0), np.arange(1000))
    True
    >>> int(d.bytes(kv_heads=2, head_dim=64, v_dim=64, itemsize=2).sum())  # sent by all ranks in a forward
    393216
    >>> d.under("causal & window(64)").needs[1, 0]  # rank 1 needs these places of rank 0 under a window
    array([  0, 256])

    A *place* is the index of a token in the order of the deal: rank r holds places r * shard .. (r + 1) * shard. Places
    beyond the length are padding: they hold positions >= length, come last on their rank, see nothing and are not seen.
    Ranges are half-open, in tokens.
    """

    length: int  # tokens of the sequence
    tile: int  # tokens
    ranks: int
    batch: int  # batch entries and heads that costs are counted over
    heads: int
    tiles: NDArray[np.int64] = field(repr=False)  # [ranks, tiles per rank], rising on a rank
    mask: Mask
    layout: Layout = field(repr=False)  # of the mask, with tiles of `tile` x `tile`

    def under(self, mask: MaskLike, **params: Any) -> Deal:
        """A deal with the same tokens on each rank, and the needs and costs of another mask: that of another layer, or
        of other documents."""
        what = _known_mask(mask, params)
        layout = what.layout(self.length, self.length, self.batch, self.heads, (self.tile, self.tile))
        return Deal(self.length, self.tile, self.ranks, self.batch, self.heads, self.tiles, what, layout)

    def __getstate__(self) -> dict[str, Any]:
        return own_state(self)

    # -- tokens -----------------------------------------------------------------------------------

    @property
    def shard(self) -> int:
        """Tokens that a rank holds, with padding."""
        return int(self.tiles.shape[1]) * self.tile

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """The position of every place, int64 [ranks * shard]."""
        return (self.tiles.reshape(-1, 1) * self.tile + np.arange(self.tile)).reshape(-1)

    @cached_property
    def _place(self) -> NDArray[np.int64]:
        """The place of every position below the length."""
        place = np.empty(len(self.order), np.int64)
        place[self.order] = np.arange(len(place))
        return place[: self.length]

    @cached_property
    def held(self) -> NDArray[np.int64]:
        """How many tokens every rank holds, without padding, int64 [ranks]."""
        return np.asarray((self.order.reshape(self.ranks, -1) < self.length).sum(axis=1))

    @cached_property
    def owned(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The rising ranges (start, stop) of positions of every rank, without padding."""
        return tuple(self._ranges(r) for r in range(self.ranks))

    def _ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        at = self.positions(rank)[: self.held[rank]]
        cuts = np.flatnonzero(np.diff(at) != 1) + 1
        return tuple((int(p[0]), int(p[-1]) + 1) for p in np.split(at, cuts) if len(p))

    def positions(self, rank: int | None = None) -> NDArray[np.int32]:
        """The positions a rank holds, int32 [shard], for RoPE and as tables of `at`; of all ranks [ranks, shard]."""
        every = self.order.reshape(self.ranks, self.shard).astype(np.int32)
        return every if rank is None else every[rank]

    def permute(self, x: Any, axis: int, fill: float = 0) -> Any:
        """`x`, an array of numpy, torch or JAX, in the deal's order along `axis`: length becomes ranks * shard, padding
        places hold `fill`. Split into equal parts, part r is that of rank r."""
        axis = self._axis(x, axis, self.length, "permute takes whole sequences")
        # padding reads any token, and is filled below
        gathered = take(x, np.minimum(self.order, self.length - 1), axis)
        return _filled(gathered, self.order >= self.length, axis, fill)

    def unpermute(self, x: Any, axis: int) -> Any:
        """Permuted arrays in the order of the sequence, padding cut off: the inverse of `permute`."""
        axis = self._axis(x, axis, len(self.order), "unpermute takes what permute gives, the shards of all ranks")
        return take(x, self._place, axis)

    def labels(self, x: Any, axis: int = -1, shift: int = 1, fill: int = -100) -> Any:
        """Labels of permuted tokens: the token `shift` positions later, and `fill` at the end of the sequence and on
        padding. The next token may be on another rank, so labels are not shifted permuted tokens."""
        axis = self._axis(x, axis, self.length, "labels takes whole sequences")
        if not 0 <= shift <= self.length:
            raise ParameterError(f"shift is {shift}; it is how many tokens a label is ahead, 0..{self.length}")
        ahead = np.arange(self.length) + shift
        shifted = take(x, np.minimum(ahead, self.length - 1), axis)
        return self.permute(_filled(shifted, ahead >= self.length, axis, fill), axis, fill)

    def _axis(self, x: Any, axis: int, size: int, what: str) -> int:
        if not -len(x.shape) <= axis < len(x.shape) or x.shape[axis] != size:
            text = f"the array is {tuple(x.shape)}, and axis {axis} is to have {size:,} places\n  {what}: "
            raise ShapeError(f"{text}this deal is of {self.length:,} tokens over {self.ranks} ranks of {self.shard:,}")
        return axis % len(x.shape)

    # -- what it costs ----------------------------------------------------------------------------

    @cached_property
    def _work(self) -> TileCosts:
        return _work(self.layout, self.ranks)

    @cached_property
    def cost(self) -> NDArray[np.int64]:
        """Visible pairs of the queries of every rank, int64 [ranks]; where counting takes too many steps, the positions
        in tiles that are not empty."""
        return np.asarray(self._work.cost[self.tiles].sum(axis=1))

    @property
    def imbalance(self) -> float:
        """The largest cost of a rank as a share of the mean."""
        return self._work.imbalance(self.tiles)

    @cached_property
    def needs(self) -> NDArray[np.int64]:
        """int64 [ranks, ranks, 2]: `needs[r, s]` is the range of places on rank s, counted from 0 and rounded to tiles,
        that queries of rank r may see. (0, 0) where they see none."""
        places = self._work.needs(self.tiles) * self.tile
        # rounded to tiles, a range may reach into padding
        return np.asarray(np.minimum(places, self.held[None, :, None]))

    def bytes(
        self,
        kv_heads: int,
        head_dim: int,
        v_dim: int,
        itemsize: int,
        variant: Variant = "ring",
        backward: bool = False,
        padded: bool = False,
    ) -> NDArray[np.int64]:
        """int64 [ranks, ranks]: at [s, r], the bytes that rank s sends to rank r, for `batch` entries.

        The forward sends the keys and values that are needed. The `backward` sends them again, and their gradients
        back, in the same item size. `padded` counts one program for all ranks, whose shapes are fixed: with "ring",
        every step sends its longest need, between ranks that need anything; with "all-gather", whole shards to all.
        """
        check_variant(variant)
        size = self.needs[..., 1] - self.needs[..., 0]
        if padded and variant == "all-gather":
            size = np.full_like(size, self.shard)
        elif padded:
            rank = np.arange(self.ranks)
            for step in range(1, self.ranks):
                at = rank, (rank - step) % self.ranks
                size[at] = np.where(size[at] > 0, size[at].max(), 0)
        np.fill_diagonal(size, 0)
        sent = size.T + size if backward else size.T
        return np.asarray(sent * self.batch * kv_heads * (head_dim + v_dim) * itemsize)

    @cached_property
    def pairs(self) -> NDArray[np.int64]:
        """int64 [ranks, ranks]: visible pairs of queries of rank r and keys of rank s, over batch and heads. Evaluates
        the positions of partial tiles; `BudgetError` for more than a million of them."""
        return _pairs(self)

    @cached_property
    def digest(self) -> str:
        """Equal for equal deals under equal masks, in any process."""
        values = [(n, digest(x)) for n, x in sorted(self.mask.params.items())]
        text = f"{self.length} {self.tile} {self.ranks} {self.batch} {self.heads} {self.mask} {values}".encode()
        # of one byte order: machines may differ
        return hashlib.sha256(text + self.tiles.astype("<i8").tobytes()).hexdigest()


def check_variant(variant: Any) -> None:
    if variant not in get_args(Variant):
        raise ParameterError(f'variant is {variant!r}; it is "ring" or "all-gather"')


def _filled(x: Any, where: NDArray[np.bool_], axis: int, fill: float) -> Any:
    """`x` with `fill` at the places `where` of an axis."""
    if not where.any():
        return x
    where = where.reshape(-1, *[1] * (len(x.shape) - axis - 1))
    if framework_of(x) == "torch":
        import torch

        return x.masked_fill(torch.as_tensor(where, device=x.device), fill)
    if framework_of(x) == "jax":
        import jax.numpy as jnp

        return jnp.where(where, jnp.asarray(fill, x.dtype), x)
    return np.where(where, np.asarray(fill, x.dtype), x)


def _pairs(d: Deal) -> NDArray[np.int64]:
    """FULL tiles are counted by their number, partial tiles looked at."""
    grid, slice_of = d.layout._grid
    uses = np.bincount(slice_of.reshape(-1), minlength=len(grid.b))
    runs = d.layout._spread()
    whole, partial = np.flatnonzero(runs.kind == FULL), np.flatnonzero(runs.kind != FULL)
    width = (runs.stop - runs.start)[partial]
    if int(width.sum()) > _TILES:
        raise BudgetError(f"pairs would look at {int(width.sum()):,} partial tiles\n  `needs` says who sees whom")
    owner = np.empty(d.tiles.size, np.int64)
    owner[d.tiles] = np.arange(d.ranks)[:, None]
    steps = np.zeros((d.ranks, d.tiles.size + 1), np.int64)
    np.add.at(steps, (owner[runs.row[whole]], runs.start[whole]), uses[runs.slice[whole]])
    np.add.at(steps, (owner[runs.row[whole]], runs.stop[whole]), -uses[runs.slice[whole]])
    full = np.asarray(np.cumsum(steps, axis=1)[:, d.tiles].sum(axis=2) * d.tile**2)
    index = np.repeat(partial, width)
    column = runs.start[index] + np.arange(len(index)) - np.repeat(np.cumsum(width) - width, width)
    row, s = runs.row[index], runs.slice[index]
    np.add.at(full, (owner[row], owner[column]), _looked_at(d.layout, grid, s, row, column) * uses[s])
    return full


def _looked_at(layout: Layout, grid: Any, s: Array, row: Array, column: Array) -> Array:
    """Visible pairs of tiles, int64 [tiles]."""
    scope, out = layout.scope(), np.zeros(len(row), np.int64)
    step = max(1, _ELEMENTS // layout.block[0] ** 2)
    for at in range(0, len(row), step):
        i = slice(at, at + step)
        out[i] = elements(layout.mask, grid, scope, s[i], row[i], column[i]).sum(axis=(1, 2))
    return out


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
    ring_steps = []
    rank = np.arange(deal.ranks)
    for shift in range(deal.ranks):
        need = deal.needs[(rank + shift) % deal.ranks, rank]  # [from]
        size = need[:, 1] - need[:, 0]
        length = int(size.max()) if shift else deal.shard  # at shift 0 nothing is sent: the whole shard
        if not size.any():
            continue
        pairs = tuple((int(r), int((r + shift) % deal.ranks)) for r in rank if shift and size[r])
        # all ranks send as many tokens, so that a slice may have to begin earlier to end inside the shard
        start = np.where(size > 0, np.minimum(need[:, 0], deal.shard - length), 0)
        reads = size[(rank - shift) % deal.ranks] > 0
        ring_steps.append(Step(shift, length, pairs, tuple(map(int, start)), tuple(map(bool, reads))))
    return tuple(ring_steps)
