"""Counts keys by functions of the key: residues by arithmetic, sorted values as ranges, equal values as groups.

>>> steps = KeyFunction(np.array([0, 0, 3, 3, 7]), 10)  # of keys 10..14
>>> steps.range(np.array([1, 3]), np.array([3, 9]))
(array([12, 12]), array([13, 14]))
>>> Groups([np.array([5, 9, 5, 5])]).count([np.array([5])], np.array([1]), np.array([3]))
array([2])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .clauses import Digit

Array = NDArray[Any]
_NARROW = 4  # a range of values this many times the number of keys is indexed, not sorted


class Beyond(Exception):  # noqa: N818 (never leaves the analysis)
    """The clauses of a mask cannot be counted by row."""


# -- residues -------------------------------------------------------------------------------------


def chain(digits: Mapping[Digit, object]) -> list[Digit]:
    """The digits of a key in order, finest first."""
    return sorted(digits, key=lambda d: d.step)


def chained(digits: Mapping[Digit, object]) -> bool:
    """Whether digits are digits of one number: the period of each divides the step of the next."""
    # only then are digits independent, and their counts multiply
    return not any(y.step % (x.step * x.base) for x, y in pairwise(chain(digits)))


def below(x: Array, order: Sequence[Digit], digits: Mapping[Digit, tuple[Array, Array]]) -> Array:
    """The count of 0 .. x - 1 whose digits are all between their ends."""
    if not order:
        return x
    top, finer = order[-1], order[:-1]
    least, greatest = digits[top]
    width = np.maximum(greatest - least + 1, 0)
    each = below(np.asarray(top.step), finer, digits)
    whole, rest = np.divmod(x, top.step * top.base)
    value, inner = np.divmod(rest, top.step)
    cut = np.where((least <= value) & (value <= greatest), below(inner, finer, digits), 0)
    return np.asarray((whole * width + np.clip(value - least, 0, width)) * each + cut)


# -- sorted values --------------------------------------------------------------------------------


class KeyFunction:
    """An Int of the key at keys `k0 ..`; `direction` is 1 where it never decreases, -1 where it never increases."""

    def __init__(self, values: Array, k0: int) -> None:
        self.k0 = k0
        one, other = values[:-1], values[1:]
        self.direction = 1 if not (other < one).any() else -1 if not (other > one).any() else 0
        self.values = ~values if self.direction < 0 else values  # ~x, where -x may leave 64 bits
        self.least, self.most = int(self.values[0]), int(self.values[-1])
        # most + 2 has to fit 64 bits
        narrow = self.direction and self.most - self.least <= _NARROW * len(values) and self.most < 2**62
        self.starts = np.searchsorted(self.values, np.arange(self.least, self.most + 2)) if narrow else None

    def range(self, low: Array | None, high: Array | None) -> tuple[Array, Array]:
        """First and last key whose value is at least `low` and at most `high`."""
        if not self.direction:
            raise Beyond
        if self.direction < 0:
            low, high = (None if x is None else ~x for x in (high, low))
        first = np.asarray(0) if low is None else self._below(low)
        stop = np.asarray(len(self.values)) if high is None else self._at_most(high)
        return first + self.k0, stop - 1 + self.k0

    def _below(self, x: Array) -> Array:
        """The number of values below x."""
        if self.starts is None:
            return np.asarray(np.searchsorted(self.values, x))
        return np.asarray(self.starts[np.clip(x, self.least, self.most + 1) - self.least])

    def _at_most(self, x: Array) -> Array:
        """The number of values at most x, which may be the largest Int."""
        if self.starts is None:
            return np.asarray(np.searchsorted(self.values, x, side="right"))
        return np.where(x < self.least, 0, self.starts[np.clip(x, self.least, self.most) - self.least + 1])


# -- equal values ---------------------------------------------------------------------------------


class ValueNumbers:
    """Small numbers for the values of a function; -1 for unknown values."""

    def __init__(self, values: Array) -> None:
        self.least, top = int(values.min()), int(values.max())
        self.known = np.unique(values) if top - self.least > _NARROW * len(values) else None
        self.size = top - self.least + 1 if self.known is None else len(self.known)

    def __call__(self, x: Array) -> Array:
        if self.known is None:
            name = x - self.least
            return np.asarray(np.where((name >= 0) & (name < self.size), name, -1))
        at = np.minimum(np.searchsorted(self.known, x), self.size - 1)
        return np.asarray(np.where(self.known[at] == x, at, -1))


class Groups:
    """Keys that agree in some functions, each group in order of position; `counted` are the keys that count."""

    def __init__(self, functions: Sequence[Array], counted: Array | None = None) -> None:
        self.names = [ValueNumbers(f) for f in functions]
        joint = self._joint([name(f) for name, f in zip(self.names, functions, strict=True)])
        self.rename = ValueNumbers(joint)  # joint numbers of several functions leave gaps
        self.group = self.rename(joint)
        self.start = np.zeros(self.rename.size + 1, np.int64)
        np.cumsum(np.bincount(self.group, minlength=self.rename.size), out=self.start[1:])
        self._counted = counted

    @cached_property
    def order(self) -> Array:
        """The keys sorted by group, then position."""
        small = self.group.astype(np.uint16) if self.rename.size <= 1 << 16 else self.group  # sorted by radix
        return np.argsort(small, kind="stable")

    @cached_property
    def rank(self) -> Array:
        """The place of each key in the order by group and position."""
        out = np.empty(len(self.group), np.int64)
        out[self.order] = np.arange(len(self.group))
        return out

    @cached_property
    def member(self) -> Array:
        """The group and position of each key in one number, in order."""
        return np.asarray(self.group[self.order] * len(self.group) + self.order)

    @cached_property
    def counts(self) -> Array | None:
        """The number of counted keys among the first keys in that order."""
        return None if self._counted is None else np.concatenate([[0], np.cumsum(self._counted[self.order])])

    def _joint(self, names: Sequence[Array]) -> Array:
        out, unknown = names[0], names[0] < 0
        for one, name in zip(self.names[1:], names[1:], strict=True):
            out, unknown = out * one.size + name, unknown | (name < 0)
        return np.asarray(np.where(unknown, -1, out))

    def count(self, values: Sequence[Array], lo: Array, hi: Array) -> Array:
        """The number of keys at positions `lo..hi` with these values, positions from 0; hi may be lo - 1."""
        joint = self._joint([name(v) for name, v in zip(self.names, values, strict=True)])
        group = np.where(joint < 0, -1, self.rename(joint))
        group, lo, stop = np.broadcast_arrays(group, lo, hi + 1)
        known = np.maximum(group, 0)
        first, last = self._before(known, lo), self._before(known, stop)
        members = last - first if self.counts is None else self.counts[last] - self.counts[first]
        return np.asarray(np.where(group < 0, 0, members))

    def _before(self, group: Array, at: Array) -> Array:
        """The place, among all keys by group, where the keys of `group` at positions from `at` on begin."""
        n = len(self.group)
        if np.all(at <= 0):  # all keys of a group: no search
            return np.asarray(self.start[group])
        if np.all(at >= n):
            return np.asarray(self.start[group + 1])
        last = np.maximum(at - 1, 0)
        out = np.where(self.group[last] == group, self.rank[last] + 1, -1)  # the key before is in the group itself
        out = np.where(at <= 0, self.start[group], np.where(at >= n, self.start[group + 1], out))
        if len(rest := np.flatnonzero(out < 0)):
            out[rest] = np.searchsorted(self.member, group[rest] * n + at[rest])
        return np.asarray(out)
