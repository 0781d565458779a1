"""Orders of positions that are permutations of the digits of a position.

A position of an image of 256 columns has the digits (column, row): `p % 256` and `p // 256`. Cut each in two, and it
has four: the place in a tile of 8 x 8 and the tile's own. An order that lists the same digits in another sequence
visits tile after tile; one that lists the remainder by 4 last visits the positions of each remainder together. So
strides, dilations and tiles of any number of axes are one thing, and each has a closed form in `//`, `%`, `*` and `+`.

>>> from frisket.dsl.sugar import q
>>> by_remainder = (OrderDigit(4, 4), OrderDigit(1, 4))  # of 16 positions: p // 4 runs fastest, p % 4 slowest
>>> places(by_remainder, 16).tolist()
[0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15]
>>> position(by_remainder, q)
q % 4 * 4 + q // 4
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.ir import Expr, lit


@dataclass(frozen=True)
class OrderDigit:
    """A digit of a coordinate of positions: `radix` values, each worth `step` of an axis of `size`, whose own steps are
    worth `place` positions. It is `p // place % size // step % radix`; without a size the axis ends with the digit."""

    place: int
    radix: int
    step: int = 1
    size: int = 0

    @property
    def end(self) -> int:
        """The size of the axis."""
        return self.size or self.step * self.radix

    def of(self, p: NDArray[np.int64]) -> NDArray[np.int64]:
        return p // self.place % self.end // self.step % self.radix


def merged(digits: Iterable[OrderDigit]) -> tuple[OrderDigit, ...]:
    """The fewest digits of an equal order: where one goes on where the one before ends, both are one."""
    found: list[OrderDigit] = []
    for d in digits:
        if d.radix == 1:
            continue
        found.append(d)
        while len(found) > 1 and (both := _joined(*found[-2:])):
            found[-2:] = [both]
    return tuple(found)


def _joined(low: OrderDigit, high: OrderDigit) -> OrderDigit | None:
    """Two digits as one; None where they do not follow one another."""
    if (low.place, low.end) == (high.place, high.end) and low.step * low.radix == high.step:
        return OrderDigit(low.place, min(low.radix * high.radix, -(-low.end // low.step)), low.step, low.end)
    if _whole(low) and _whole(high) and low.place * low.end == high.place:
        return OrderDigit(low.place, low.radix * high.radix)
    return None


def _whole(d: OrderDigit) -> bool:
    """Whether a digit is all of its axis."""
    return d.step == 1 and d.radix == d.end


def in_order(digits: Sequence[OrderDigit]) -> bool:
    """Whether an order leaves every position where it is."""
    return len(digits) <= 1


def places(digits: Sequence[OrderDigit], length: int) -> NDArray[np.int64]:
    """The position at every place of the order, the fastest digit first, int64 [length]. Digits may count further than
    the length: an image's last row of tiles may be cut."""
    return np.argsort(rank(digits, np.arange(length)), kind="stable")


def rank(digits: Sequence[OrderDigit], p: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers that rise as the order goes on, of positions: their places, where the order is `closed`."""
    found, stride = np.zeros(p.shape, np.int64), 1
    for d in digits:
        found += d.of(p) * stride
        stride *= d.radix
    return found


def of_rank(digits: Sequence[OrderDigit], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """The positions that have such a `rank`; numbers that no position has are left out."""
    found: NDArray[np.int64] = np.zeros(numbers.shape, np.int64)
    left = numbers
    for d in digits:
        found, left = found + left % d.radix * (d.place * d.step), left // d.radix
    known: NDArray[np.int64] = found[rank(digits, found) == numbers]
    return known


def closed(digits: Sequence[OrderDigit], length: int) -> bool:
    """Whether `position` holds for every place: tiles divide their axes, and digits count up to the length."""
    return prod(d.radix for d in digits) == length and all(d.end % (d.step * d.radix) == 0 for d in digits)


def position(digits: Sequence[OrderDigit], place: Any) -> Expr:
    """The position at a place of the order, where it is `closed`."""
    found: Any = None
    stride, count = 1, prod(d.radix for d in digits)
    for d in digits:
        x = place // stride if stride > 1 else place
        x = x % d.radix if stride * d.radix < count else x
        x = x * (d.place * d.step) if d.place * d.step > 1 else x
        found = x if found is None else found + x
        stride *= d.radix
    return lit(0) if found is None else found
