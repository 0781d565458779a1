"""Prefixes that rows of a paged cache share, such as a system prompt: which rows begin with the same pages.

A cascade reads such a prefix once for all of its rows. The queries of these rows are packed into one row of queries
over the pages of the prefix. Every row reads the tokens behind it separately. The two results are merged by their lse.
(J. Juravsky and others, Hydragen, arXiv 2402.05099; FlashInfer calls it cascade attention.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Group = tuple[list[int], int]  # rows, and how many of their first pages are the same


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Groups of rows with a common prefix, as arrays. A row is in one group at most."""

    rows: NDArray[np.int64]  # [groups, members]: the rows of each group; 0 past the last one
    real: NDArray[np.bool_]  # [groups, members]: whether there is such a member
    pages: NDArray[np.int32]  # [groups, width]: the pages of each prefix; 0 past the last one
    stops: NDArray[np.int32]  # [groups]: the tokens of each prefix
    tokens: NDArray[np.int32]  # [batch, 1]: tokens of the row's prefix, 0 without one
    slots: NDArray[np.int64]  # [batch]: the place of the row in `rows`, counted through; -1 without one

    @classmethod
    def of(
        cls, table: NDArray[np.int32], counts: NDArray[Any], page: int, most: int | None = None
    ) -> SharedPrefixes | None:
        """The prefixes in a table of pages int32 [batch, width], of which the first `counts` of each row are used;
        None where no rows share any. Groups of more than `most` rows are cut into groups of about the same size.

        >>> table = np.array([[7, 8, 1], [7, 8, 2], [7, 3, 0], [5, 0, 0]], np.int32)
        >>> shared = SharedPrefixes.of(table, np.array([3, 3, 2, 1]), 16)
        >>> shared.rows.tolist(), shared.pages.tolist(), shared.tokens.tolist(), shared.slots.tolist()
        ([[0, 1]], [[7, 8]], [[32], [32], [0], [0]], [0, 1, -1, -1])
        """
        lists = [row[:n].tolist() for row, n in zip(table, counts, strict=True)]
        groups = sorted(_Prefixes(lists).best(list(range(len(lists)))).groups)
        if not groups:
            return None
        if most is not None:
            groups = [(part.tolist(), n) for its, n in groups for part in np.array_split(its, -(-len(its) // most))]
        members, width = max(len(rows) for rows, _ in groups), max(n for _, n in groups)
        rows = np.zeros((len(groups), members), np.int64)
        real, pages = np.zeros(rows.shape, np.bool_), np.zeros((len(groups), width), np.int32)
        tokens, slots = np.zeros((len(lists), 1), np.int32), np.full(len(lists), -1, np.int64)
        stops = np.array([n * page for _, n in groups], np.int32)
        for g, (its, n) in enumerate(groups):
            rows[g, : len(its)], real[g, : len(its)] = its, True
            pages[g, :n] = lists[its[0]][:n]
            tokens[its], slots[its] = n * page, g * members + np.arange(len(its))
        return cls(rows, real, pages, stops, tokens, slots)

    def equals(self, other: SharedPrefixes) -> bool:
        """Whether the same rows share the same pages."""
        return all(map(np.array_equal, vars(self).values(), vars(other).values()))

    @property
    def neighbours(self) -> slice | None:
        """The rows of the batch that all members are, where they are in this order and no group is shorter."""
        first, count = int(self.rows[0, 0]), self.rows.size
        in_order = self.real.all() and np.array_equal(self.rows.reshape(-1), np.arange(first, first + count))
        return slice(first, first + count) if in_order else None

    @property
    def saved(self) -> int:
        """How many tokens are read less often."""
        return int(((self.real.sum(1) - 1) * self.stops).sum())


@dataclass(frozen=True)
class Choice:
    """Groups among some rows, the rows in none, and the pages that this saves."""

    saved: int
    groups: list[Group]
    rest: list[int]


class _Prefixes:
    """The best groups among rows with these lists of pages. They form a tree: rows with a longer common prefix are a
    part of those with a shorter one."""

    def __init__(self, lists: list[list[int]]) -> None:
        self.lists = lists
        self.known: dict[tuple[int, int, int], Choice] = {}

    def best(self, rows: list[int], depth: int = 0, worth: int = 0) -> Choice:
        """The groups among rows with `depth` common pages that save most pages, where a row in none saves `worth`: it
        joins a group with a shorter prefix."""
        if len(rows) == 1:
            return Choice(worth, [], rows)
        if (rows[0], depth, worth) not in self.known:
            self.known[rows[0], depth, worth] = self._best(rows, depth, worth)
        return self.known[rows[0], depth, worth]

    def _best(self, rows: list[int], depth: int, worth: int) -> Choice:
        lists = [self.lists[row] for row in rows]
        most = min(map(len, lists))
        differ = np.nonzero((np.array([x[:most] for x in lists]) != lists[0][:most]).any(0))[0]
        common = int(differ[0]) if len(differ) else most
        ended, longer = [row for row in rows if len(self.lists[row]) == common], dict[int, list[int]]()
        for row in rows:
            if len(self.lists[row]) > common:
                longer.setdefault(self.lists[row][common], []).append(row)
        separate, joined = (
            [*(self.best(its, common + 1, n) for its in longer.values()), *(Choice(n, [], [row]) for row in ended)]
            for n in (worth, common)
        )
        joined_saves = sum(x.saved for x in joined) - common  # the prefix of a group is read once
        groups, rest = [g for x in joined for g in x.groups], [row for x in joined for row in x.rest]
        if common and len(rest) > 1 and joined_saves > sum(x.saved for x in separate):
            return Choice(joined_saves, [*groups, (sorted(rest), common)], [])
        of_separate = [g for x in separate for g in x.groups], [row for x in separate for row in x.rest]
        return Choice(sum(x.saved for x in separate), *of_separate)
