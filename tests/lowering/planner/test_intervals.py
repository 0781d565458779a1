"""The intervals of keys of a row of queries, by their texts: seen by some query, and not seen by some."""

from __future__ import annotations

import re

import numpy as np
import pytest

from frisket.dsl.ir import Expr
from frisket.dsl.program import parse_expression
from frisket.dsl.show import show
from frisket.lowering.planner.planner import intervals
from frisket.lowering.simplify import simplify

VALUES = {
    "x": 1, "flag": True, "doc": np.zeros(4, np.int64), "other": np.zeros(4, np.int64), "map": np.zeros((4, 4), int),
    "seen": np.zeros(4, bool), "off": np.zeros(4, np.int64),
}  # fmt: skip
SORTED = frozenset({"doc"})
INTERVALS = """
q >= k -> k0 .. min(q1, k1) / max(k0, q0 + 1) .. k1
q > k -> k0 .. min(k1, q1 - 1) / max(q0, k0) .. k1
q - k < 9 -> max(k0, q0 - 8) .. k1 / k0 .. min(k1, q1 - 9)
q >= k & q - k < 9 -> max(k0, q0 - 8) .. min(q1, k1) / max(k0, q0 + 1) .. k1, k0 .. min(k1, q1 - 9)
q >= k | k < 4 -> k0 .. min(q1, k1), k0 .. min(k1, 3) / max(max(k0, q0 + 1), 4) .. k1
q >= 3 & q <= 5 -> k0 .. where(q0 >= 6 | q1 <= 2, k0 - 1, k1) / k0 .. where(q1 <= 5, k0 - 1, k1), k0 .. where(q0
    >= 3, k0 - 1, k1)
q >= 3 -> k0 .. where(q1 <= 2, k0 - 1, k1) / k0 .. where(q0 >= 3, k0 - 1, k1)
q >= x & q - k >= 2 -> k0 .. where(q1 < x, k0 - 1, min(k1, q1 - 2)) / max(k0, q0 - 1) .. k1, k0 .. where(q0 >=
    x, k0 - 1, k1)
q - k >= 5 & q - k <= x -> max(k0, q0 - x) .. where(x <= 4, k0 - 1, min(k1, q1 - 5)) / k0 .. min(k1, q1 - x -
    1), max(k0, q0 - 4) .. k1
q - k >= 2 & q <= 9 -> k0 .. where(q0 >= 10, k0 - 1, min(k1, min(q1, 9) - 2)) / max(k0, q0 - 1) .. k1, k0 ..
    where(q1 <= 9, k0 - 1, k1)
flag -> k0 .. where(flag, k1, k0 - 1) / k0 .. where(flag, k0 - 1, k1)
flag & q >= k -> k0 .. where(flag, min(q1, k1), k0 - 1) / max(k0, q0 + 1) .. k1, k0 .. where(flag, k0 - 1, k1)
flag | q >= k -> k0 .. where(flag, k1, k0 - 1), k0 .. min(q1, k1) / max(k0, q0 + 1) .. where(flag, k0 - 1, k1)
k >= x -> max(k0, x) .. k1 / k0 .. min(k1, x - 1)
k == 3 -> max(k0, 3) .. min(k1, 3) / k0 .. min(k1, 2), max(k0, 4) .. k1
k != 3 -> k0 .. min(k1, 2), max(k0, 4) .. k1 / max(k0, 3) .. min(k1, 3)
q == k -> max(q0, k0) .. min(q1, k1) / max(k0, q0 + 1) .. k1, k0 .. min(k1, q1 - 1)
q // 4 == k // 4 -> max(k0, 4 * (q0 // 4)) .. min(k1, 4 * (q1 // 4) + 3) / max(k0, 4 * (q0 // 4) + 4) .. k1, k0
    .. min(k1, 4 * (q1 // 4) - 1)
q // 4 > k // 4 -> k0 .. min(k1, 4 * (q1 // 4) - 1) / max(k0, 4 * (q0 // 4)) .. k1
k // x >= 3 -> questions
k // 4 >= x -> max(k0, 4 * x) .. k1 / k0 .. min(k1, 4 * x - 1)
2 * k >= q -> questions
q + k >= 9 -> max(k0, -q1 + 9) .. k1 / k0 .. min(k1, -q0 + 8)
k % 4 == 0 -> questions
q % 4 == 0 -> k0 .. where(q0 > 4 * (q1 // 4) | q0 % 4 >= 1 & q0 // 4 == q1 // 4, k0 - 1, k1) / k0 .. where(q0 //
    4 == q1 // 4 & q1 == 4 * (q0 // 4), k0 - 1, k1)
q % 4 >= 2 & q >= k -> k0 .. where(q0 // 4 == q1 // 4 & q1 - 4 * (q0 // 4) <= 1, k0 - 1, min(q1, k1)) / max(k0,
    q0 + 1) .. k1, k0 .. where(q0 % 4 >= 2 & q0 // 4 == q1 // 4, k0 - 1, k1)
doc[q] == doc[k] -> max(k0, at_least(doc[q0])) .. min(k1, at_most(doc[q1])) / max(k0, above(doc[q0])) .. k1, k0
    .. min(k1, under(doc[q1]))
doc[q] != doc[k] -> max(k0, above(doc[q0])) .. k1, k0 .. min(k1, under(doc[q1])) / max(k0, at_least(doc[q0])) ..
    min(k1, at_most(doc[q1]))
doc[q] > doc[k] -> k0 .. min(k1, under(doc[q1])) / max(k0, at_least(doc[q0])) .. k1
doc[q] >= doc[k] -> k0 .. min(k1, at_most(doc[q1])) / max(k0, above(doc[q0])) .. k1
doc[q] <= doc[k] + 1 -> max(k0, at_least(doc[q0] - 1)) .. k1 / k0 .. min(k1, at_most(doc[q1] - 2))
doc[k] + 1 >= doc[q] -> max(k0, at_least(doc[q0] - 1)) .. k1 / k0 .. min(k1, at_most(doc[q1] - 2))
doc[k] - 2 >= doc[q] -> max(k0, at_least(doc[q0] + 2)) .. k1 / k0 .. min(k1, at_most(doc[q1] + 1))
doc[k] == 3 -> max(k0, at_least(3)) .. min(k1, at_most(3)) / k0 .. min(k1, at_most(2)), max(k0, at_least(4)) .. k1
doc[k + 1] == 3 -> questions
2 * doc[k] >= 3 -> max(k0, at_least(2)) .. k1 / k0 .. min(k1, at_most(1))
other[q] == other[k] -> questions
other[q] == doc[k] -> max(k0, at_least(min(other[q0..q1]))) .. min(k1, at_most(max(other[q0..q1]))) / max(k0,
    above(min(other[q0..q1]))) .. k1, k0 .. min(k1, under(max(other[q0..q1])))
other[q] >= k -> k0 .. min(k1, max(other[q0..q1])) / max(k0, min(other[q0..q1]) + 1) .. k1
map[q, 2] >= k -> k0 .. min(k1, max(map[q0..q1, 2..2])) / max(k0, min(map[q0..q1, 2..2]) + 1) .. k1
map[q, k] == 3 -> questions
map[2, k] == 3 -> questions
seen[k] -> questions
seen[q] -> k0 .. where(any(seen[q0..q1]), k1, k0 - 1) / k0 .. where(all(seen[q0..q1]), k0 - 1, k1)
seen[q] & q >= k -> k0 .. where(any(seen[q0..q1]), min(q1, k1), k0 - 1) / max(k0, q0 + 1) .. k1, k0 ..
    where(all(seen[q0..q1]), k0 - 1, k1)
doc[q] == doc[k] & q >= k -> max(k0, at_least(doc[q0])) .. min(min(q1, k1), at_most(doc[q1])) / max(k0, q0 + 1)
    .. k1, max(k0, above(doc[q0])) .. k1, k0 .. min(k1, under(doc[q1]))
doc[q] == doc[k] & doc[q] >= 3 -> max(k0, at_least(doc[q0])) .. where(doc[q1] <= 2, k0 - 1, min(k1,
    at_most(doc[q1]))) / max(k0, above(doc[q0])) .. k1, k0 .. min(k1, under(doc[q1])), k0 .. where(doc[q0] >= 3, k0
    - 1, k1)
segment(off, q) == segment(off, k) -> max(k0, where(segment(off, q0) <= 0, k0, where(segment(off, q0) >=
    extent(off, 0) - 1, 1073741824, off[segment(off, q0)]))) .. min(k1, where(segment(off, q1) >= extent(off, 0) -
    2, 1073741824, off[segment(off, q1) + 1] - 1)) / max(k0, where(segment(off, q0) >= extent(off, 0) - 2,
    1073741824, off[segment(off, q0) + 1])) .. k1, k0 .. min(k1, where(segment(off, q1) <= 0, -1, where(segment(off,
    q1) >= extent(off, 0) - 1, 1073741824, off[segment(off, q1)] - 1)))
segment(off, k) >= 2 -> max(k0, where(extent(off, 0) <= 3, 1073741824, off[2])) .. k1 / k0 .. min(k1,
    where(extent(off, 0) <= 3, 1073741824, off[2] - 1))
segment(off, k) <= 2 -> k0 .. min(k1, where(extent(off, 0) <= 4, 1073741824, off[3] - 1)) / max(k0,
    where(extent(off, 0) <= 4, 1073741824, off[3])) .. k1
segment(off, k) == x -> max(k0, where(x <= 0, k0, where(x - extent(off, 0) >= -1, 1073741824, off[x]))) ..
    min(k1, where(x <= -1, -1, where(x - extent(off, 0) >= -2, 1073741824, off[x + 1] - 1))) / k0 .. min(k1, where(x
    <= 0, -1, where(x - extent(off, 0) >= -1, 1073741824, off[x] - 1))), max(k0, where(x <= -1, k0, where(x -
    extent(off, 0) >= -2, 1073741824, off[x + 1]))) .. k1
segment(off, k + 1) == 2 -> questions
abs(q - k) < 9 -> max(k0, q0 - 8) .. min(k1, q1 + 8) / k0 .. min(k1, q1 - 9), max(k0, q0 + 9) .. k1
abs(q - k) > 9 -> k0 .. min(k1, q1 - 10), max(k0, q0 + 10) .. k1 / max(k0, q0 - 9) .. min(k1, q1 + 9)
min(k, q) >= 3 -> max(k0, 3) .. where(q1 <= 2, k0 - 1, k1) / k0 .. where(q0 >= 3, k0 - 1, k1), k0 .. min(k1, 2)
max(q - 3, 0) >= k -> k0 .. min(k1, q1 - 3), k0 .. min(k1, 0) / max(max(k0, q0 - 2), 1) .. k1
where(q > 5, q >= k, k < 4) -> k0 .. where(q1 <= 5, k0 - 1, min(q1, k1)), k0 .. where(q0 >= 6, k0 - 1, min(k1,
    3)) / max(k0, max(q0, 6) + 1) .. where(q1 <= 5, k0 - 1, k1), max(k0, 4) .. where(q0 >= 6, k0 - 1, k1)
q >= k ^ k < 4 -> max(k0, 4) .. min(q1, k1), max(k0, q0 + 1) .. min(k1, 3) / k0 .. min(min(q1, k1), 3),
    max(max(k0, q0 + 1), 4) .. k1
k == 1 | k == 3 | k == 5 | k == 7 -> questions
h - k >= 2 -> k0 .. min(k1, h - 2) / max(k0, h - 1) .. k1
q - k >= h -> k0 .. min(k1, q1 - h) / max(k0, q0 - h + 1) .. k1
q - k <= doc[q] -> max(k0, q0 - doc[q1]) .. k1 / k0 .. min(k1, q1 - doc[q0] - 1)
k - doc[other[q]] >= 0 -> max(k0, doc[min(other[q0..q1])]) .. k1 / k0 .. min(k1, doc[max(other[q0..q1])] - 1)
doc[q] >= x & q >= k -> k0 .. where(doc[q1] < x, k0 - 1, min(q1, k1)) / max(k0, q0 + 1) .. k1, k0 ..
    where(doc[q0] >= x, k0 - 1, k1)
-q + k >= doc[q] -> max(k0, q0 + doc[q0]) .. k1 / k0 .. min(k1, q1 + doc[q1] - 1)
k // 4 - q // 4 <= 1 -> k0 .. min(k1, 4 * (q1 // 4) + 7) / max(k0, 4 * (q0 // 4) + 8) .. k1
q // 4 - k // 4 <= 1 -> max(k0, 4 * (q0 // 4) - 4) .. k1 / k0 .. min(k1, 4 * (q1 // 4) - 5)
"""


def told(e: Expr) -> str:
    return show(e).rpartition("\n")[2]


def written(text: str) -> str:
    values = {n: v for n, v in VALUES.items() if re.search(rf"\b{n}\b", text)}
    found = intervals(simplify(parse_expression(text, values)), SORTED)
    if found is None:
        return "questions"
    return " / ".join(", ".join(f"{told(lo)} .. {told(hi)}" for lo, hi in side) for side in found)


@pytest.mark.parametrize("row", INTERVALS.replace("\n    ", " ").strip().split("\n"))
def test_interval_of_a_mask_is_the_listed_one(row):
    text, _, wanted = row.partition(" -> ")
    assert written(text) == wanted
