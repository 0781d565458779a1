"""The ends of ranges, and what is said of them, each by its text; what the questions about masks leave undecided."""

from __future__ import annotations

import re
from functools import reduce

import numpy as np
import pytest

from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import FALSE, Expr, build, lit, param
from frisket.dsl.program import parse_expression
from frisket.dsl.show import show
from frisket.dsl.sugar import eq, k, q
from frisket.dsl.types import BOOL
from frisket.lowering.analysis.intervals import ends
from frisket.lowering.analysis.questions import always, mixed, never, some
from frisket.lowering.analysis.solve import DEEP, LARGE, MAX_DISJUNCTS, beyond, disjuncts
from frisket.lowering.analysis.table import Table
from frisket.lowering.analysis.tiles import Scope
from frisket.lowering.simplify import simplify

TABLES = {
    "doc": np.array([0, 0, 1, 1, 2, 4, 4, -3]), "map": np.arange(30).reshape(5, 6)[::-1] % 7 - 3,
    "f": np.array([0.5, np.nan, -1.0, 1.0, 2.0, 1.0, 0.0, np.inf]), "seen": np.arange(8) % 3 == 1,
    "off": np.array([0, 2, 3, 7]), "sees": np.arange(40).reshape(5, 8) % 7 < 2,
}  # fmt: skip
VALUES = {"x": 1, "u": 0.5, "flag": True} | TABLES
RANGES = """
q -> q0 .. q1, attained, dense
k -> k0 .. k1, attained, dense
x -> x .. x, attained, dense
7 -> 7 .. 7, attained, dense
2.5 -> 2.5 .. 2.5, attained, dense
u -> u .. u, attained, dense, nan if u != u
q - k -> q0 - k1 .. q1 - k0, attained, dense
2 * q - 3 -> 2 * q0 - 3 .. 2 * q1 - 3, attained
q - 3 * k + x -> q0 + x - 3 * k1 .. q1 + x - 3 * k0, attained
q - q // 2 -> q0 - q1 // 2 .. q1 - q0 // 2
q + doc[q] -> q0 + min(doc[q0..q1]) .. q1 + max(doc[q0..q1])
q + map[q, k] -> q0 + min(map[q0..q1, k0..k1]) .. q1 + max(map[q0..q1, k0..k1])
-q -> -q1 .. -q0, attained, dense
-float(q) -> -float(q1) .. -float(q0), attained
float(q) + float(k) -> float(q0) + k0 .. float(q1) + k1, nan if ~isfinite(float(q0) + k0) | ~isfinite(float(q1) + k1)
float(q) - float(k) -> float(q0) - k1 .. float(q1) - k0, nan if ~isfinite(float(q0) - k1) | ~isfinite(float(q1) - k0)
float(q) * 2.0 -> min(2.0 * q0, 2.0 * q1) .. max(2.0 * q0, 2.0 * q1), nan if ~isfinite(min(2.0 * q0, 2.0 * q1))
    | ~isfinite(max(2.0 * q0, 2.0 * q1))
(q - 5) * (k - 5) -> min(min(min((q0 - 5) * (k0 - 5), (q0 - 5) * (k1 - 5)), (q1 - 5) * (k0 - 5)), (q1 - 5) * (k1
    - 5)) .. max(max(max((q0 - 5) * (k0 - 5), (q0 - 5) * (k1 - 5)), (q1 - 5) * (k0 - 5)), (q1 - 5) * (k1 - 5)),
    attained
q * q -> min(min(q0 * q0, q0 * q1), q1 * q1) .. max(max(q0 * q0, q0 * q1), q1 * q1)
float(q) / 2.0 -> q0 / 2.0 .. q1 / 2.0, nan if ~isfinite(q0 / 2.0) | ~isfinite(q1 / 2.0)
float(q) / -2.0 -> q1 / -2.0 .. q0 / -2.0, nan if ~isfinite(q0 / -2.0) | ~isfinite(q1 / -2.0)
float(q) / 0.0 -> ? .. ?, nan if true
float(q) / float(k) -> ? .. ?, nan if true
sin(float(q)) + float(k) -> ? .. ?, nan if true
sin(float(q)) - float(k) -> ? .. ?, nan if true
float(k) - sin(float(q)) -> ? .. ?, nan if true
sin(float(q)) * float(k) -> ? .. ?, nan if true
sin(float(q)) / 2.0 -> ? .. ?, nan if true
sin(float(q)) -> ? .. ?, nan if true
q // 4 -> q0 // 4 .. q1 // 4, attained, dense
q // -4 -> min(-((q0 + 3) // 4), -((q1 + 3) // 4)) .. max(-((q0 + 3) // 4), -((q1 + 3) // 4))
q // 0 -> min(-max(q1, -q0), -1) .. max(max(q1, -q0), 0)
q // x -> where(x == 0, min(-max(q1, -q0), -1), min(q0 // x, q1 // x)) .. where(x == 0, max(max(q1, -q0), 0),
    max(q0 // x, q1 // x))
q // k -> where(k0 >= 1 | k1 <= -1, min(min(min(q0 // k0, q0 // k1), q1 // k0), q1 // k1), min(-max(q1, -q0),
    -1)) .. where(k0 >= 1 | k1 <= -1, max(max(max(q0 // k0, q0 // k1), q1 // k0), q1 // k1), max(max(q1, -q0), 0))
(q - 5) // k -> where(k0 >= 1 | k1 <= -1, min(min(min((q0 - 5) // k0, (q0 - 5) // k1), (q1 - 5) // k0), (q1 - 5)
    // k1), min(-max(-q0 + 5, q1 - 5), -1)) .. where(k0 >= 1 | k1 <= -1, max(max(max((q0 - 5) // k0, (q0 - 5) //
    k1), (q1 - 5) // k0), (q1 - 5) // k1), max(max(-q0 + 5, q1 - 5), 0))
x // (k + 1) -> where(k0 >= 0 | k1 <= -2, min(x // (k0 + 1), x // (k1 + 1)), min(-abs(x), -1)) .. where(k0 >= 0
    | k1 <= -2, max(x // (k0 + 1), x // (k1 + 1)), abs(x))
q // int(sin(float(k))) -> min(-max(q1, -q0), -1) .. max(max(q1, -q0), 0)
q % 4 -> where(q0 // 4 == q1 // 4, q0 % 4, 0) .. where(q0 // 4 == q1 // 4, q1 % 4, 3), attained
q % x -> where(x >= 1 & q0 // x == q1 // x, q0 % x, min(x + 1, 0)) .. where(x >= 1 & q0 // x == q1 // x, q1 % x,
    max(x - 1, 0))
q % (k + 1) -> min(k0 + 2, 0) .. max(k1, 0)
(q - k) % 4 -> where((q0 - k1) // 4 == (q1 - k0) // 4, (q0 - k1) % 4, 0) .. where((q0 - k1) // 4 == (q1 - k0) //
    4, (q1 - k0) % 4, 3), attained
(q + k) % 4 -> where((q0 + k0) // 4 == (q1 + k1) // 4, (q0 + k0) % 4, 0) .. where((q0 + k0) // 4 == (q1 + k1) //
    4, (q1 + k1) % 4, 3), attained
(2 * q) % 4 -> where(q0 // 2 == q1 // 2, 2 * (q0 % 2), 0) .. where(q0 // 2 == q1 // 2, 2 * (q1 % 2), 3)
q % -4 -> -3 .. 0
int(sin(float(q))) % 4 -> 0 .. 3
q % int(sin(float(k))) -> ? .. ?, nan if true
abs(q - k) -> max(max(q0 - k1, k0 - q1), 0) .. max(k1 - q0, q1 - k0), attained, dense
abs(float(q) - 2.5) -> max(max(q0 - 2.5, -(q1 - 2.5)), 0.0) .. max(-(q0 - 2.5), q1 - 2.5), nan if ~isfinite(q0 -
    2.5) | ~isfinite(q1 - 2.5)
abs(sin(float(q))) -> 0.0 .. ?, nan if true
abs(int(sin(float(q)))) -> 0 .. ?
abs(2 * q - 5) -> max(max(2 * q0 - 5, -2 * q1 + 5), 0) .. max(-2 * q0 + 5, 2 * q1 - 5)
sign(q - k) -> sign(q0 - k1) .. sign(q1 - k0), attained, dense
sign(float(q)) -> ? .. ?, nan if true
sign(int(sin(float(q)))) -> -1 .. 1
sign(2 * q - 5) -> sign(2 * q0 - 5) .. sign(2 * q1 - 5), attained
min(q, k) -> min(q0, k0) .. min(q1, k1), attained, dense
max(q, k) -> max(q0, k0) .. max(q1, k1), attained, dense
min(q, q - 5) -> q0 - 5 .. q1 - 5, dense
abs(min(q, q - 5)) -> max(max(q0 - 5, -q1 + 5), 0) .. max(-q0 + 5, q1 - 5), dense
doc[min(q, q - 5)] -> min(doc[q0 - 5..q1 - 5]) .. max(doc[q0 - 5..q1 - 5])
min(q, 5) -> min(q0, 5) .. min(q1, 5), attained, dense
max(2 * q, k) -> max(k0, 2 * q0) .. max(k1, 2 * q1), attained
min(float(q), 2.5) -> min(q0, 2.5) .. min(q1, 2.5)
max(float(q), 2.5) -> max(q0, 2.5) .. max(q1, 2.5)
min(sin(float(q)), 2.5) -> ? .. 2.5, nan if true
min(int(sin(float(q))), k) -> ? .. k1
max(int(sin(float(q))), k) -> k0 .. ?
min(k, int(sin(float(q)))) -> ? .. k1
max(k, int(sin(float(q)))) -> k0 .. ?
where(q >= k, q, k) -> where(q0 >= k1, q0, where(q1 < k0, k0, min(q0, k0))) .. where(q0 >= k1, q1, where(q1 <
    k0, k1, max(q1, k1)))
where(q > 5, 3, 8) -> where(q0 >= 6, 3, where(q1 <= 5, 8, 3)) .. where(q0 >= 6, 3, 8)
where(q > 5, int(sin(float(q))), 8) -> ? .. ?
where(q > 5, sin(float(q)), 8.0) -> ? .. ?, nan if true
where(q > 5, f[k], 8.0) -> where(q0 >= 6, min(f[k0..k1]), where(q1 <= 5, 8.0, min(min(f[k0..k1]), 8.0))) ..
    where(q0 >= 6, max(f[k0..k1]), where(q1 <= 5, 8.0, max(max(f[k0..k1]), 8.0))), nan if max(f[k0..k1]) !=
    max(f[k0..k1]) | min(f[k0..k1]) != min(f[k0..k1])
int(q >= k) -> int(q0 >= k1) .. int(q1 >= k0), dense
int(float(q) / 2.0) -> where(~isfinite(q0 / 2.0) | ~isfinite(q1 / 2.0), -4611686018427387904, int(q0 / 2.0)) ..
    where(~isfinite(q0 / 2.0) | ~isfinite(q1 / 2.0), 4611686018427387904, int(q1 / 2.0))
int(f[q]) -> where(max(f[q0..q1]) != max(f[q0..q1]) | min(f[q0..q1]) != min(f[q0..q1]), -4611686018427387904,
    int(min(f[q0..q1]))) .. where(max(f[q0..q1]) != max(f[q0..q1]) | min(f[q0..q1]) != min(f[q0..q1]),
    4611686018427387904, int(max(f[q0..q1])))
floor(float(q) / 2.0) -> where(~isfinite(q0 / 2.0) | ~isfinite(q1 / 2.0), -4611686018427387904, q0 // 2) ..
    where(~isfinite(q0 / 2.0) | ~isfinite(q1 / 2.0), 4611686018427387904, q1 // 2)
floor(f[k]) -> where(max(f[k0..k1]) != max(f[k0..k1]) | min(f[k0..k1]) != min(f[k0..k1]), -4611686018427387904,
    floor(min(f[k0..k1]))) .. where(max(f[k0..k1]) != max(f[k0..k1]) | min(f[k0..k1]) != min(f[k0..k1]),
    4611686018427387904, floor(max(f[k0..k1])))
floor(sin(float(q))) -> ? .. ?
exp(float(q)) -> exp(q0) .. exp(q1), nan if exp(q0) != exp(q0) | exp(q1) != exp(q1)
log(float(q - 3)) -> log(q0 - 3) .. log(q1 - 3), nan if log(q0 - 3) != log(q0 - 3) | log(q1 - 3) != log(q1 - 3)
sqrt(sin(float(q))) -> ? .. ?, nan if true
tanh(float(q)) -> tanh(q0) .. tanh(q1), nan if tanh(q0) != tanh(q0) | tanh(q1) != tanh(q1)
float(q) -> float(q0) .. float(q1), attained
float(int(sin(float(q)))) -> ? .. ?
doc[q] -> min(doc[q0..q1]) .. max(doc[q0..q1]), attained
doc[k + 1] -> min(doc[k0 + 1..k1 + 1]) .. max(doc[k0 + 1..k1 + 1]), attained
doc[2 * q] -> min(doc[2 * q0..2 * q1]) .. max(doc[2 * q0..2 * q1])
doc[5] -> doc[5] .. doc[5], attained, dense
map[q, k] -> min(map[q0..q1, k0..k1]) .. max(map[q0..q1, k0..k1])
map[5, k] -> min(map[5..5, k0..k1]) .. max(map[5..5, k0..k1]), attained
map[q, int(sin(float(k)))] -> min(map[q0..q1, 0..4611686018427387904]) .. max(map[q0..q1, 0..4611686018427387904])
f[q] -> min(f[q0..q1]) .. max(f[q0..q1]), nan if max(f[q0..q1]) != max(f[q0..q1]) | min(f[q0..q1]) != min(f[q0..q1])
doc[int(sin(float(q)))] -> min(doc[0..4611686018427387904]) .. max(doc[0..4611686018427387904])
q & 7 -> 0 .. 7
q & k -> ? .. ?, nan if true
(q - 5) & 7 -> 0 .. 7
(q - 5) & (k - 5) -> ? .. ?, nan if true
int(sin(float(q))) & 7 -> 0 .. 7
int(sin(float(q))) & k -> ? .. ?, nan if true
q << 2 -> 4 * q0 .. 4 * q1, attained
q << x -> ? .. ?, nan if true
q >> 2 -> q0 // 4 .. q1 // 4, attained, dense
q << 61 -> min(2305843009213693952 * q0, 2305843009213693952 * q1) .. max(2305843009213693952 * q0,
    2305843009213693952 * q1), attained
q << -1 -> ? .. ?, nan if true
q | 3 -> ? .. ?, nan if true
q ^ k -> ? .. ?, nan if true
float(k) + abs(sin(float(q))) -> ? .. ?, nan if true
abs(sin(float(q))) + float(k) -> ? .. ?, nan if true
float(k) - abs(sin(float(q))) -> ? .. ?, nan if true
abs(sin(float(q))) - float(k) -> ? .. ?, nan if true
float(k) - -abs(sin(float(q))) -> ? .. ?, nan if true
-abs(sin(float(q))) + float(k) -> ? .. ?, nan if true
float(k) + -abs(sin(float(q))) -> ? .. ?, nan if true
abs(sin(float(q))) * 2.0 -> ? .. ?, nan if true
abs(sin(float(q))) / 2.0 -> ? .. ?, nan if true
abs(sin(float(q))) / -2.0 -> ? .. ?, nan if true
-abs(sin(float(q))) -> ? .. -0.0, nan if true
exp(abs(sin(float(q)))) -> ? .. ?, nan if true
floor(abs(sin(float(q)))) -> -4611686018427387904 .. ?
abs(abs(sin(float(q)))) -> 0.0 .. ?, nan if true
abs(-abs(sin(float(q)))) -> 0.0 .. ?, nan if true
min(abs(sin(float(q))), u) -> min(u, 0.0) .. u, nan if true
max(sin(float(q)), 2.5) -> 2.5 .. ?, nan if true
max(abs(sin(float(q))), u) -> max(u, 0.0) .. ?, nan if true
where(q > 5, abs(sin(float(q))), u) -> where(q0 >= 6, 0.0, where(q1 <= 5, u, min(u, 0.0))) .. ?, nan if true
where(q > 5, u, abs(sin(float(q)))) -> where(q0 >= 6, u, where(q1 <= 5, 0.0, min(u, 0.0))) .. ?, nan if true
-abs(int(sin(float(q)))) -> ? .. 0
abs(int(sin(float(q)))) // 4 -> 0 .. ?
-abs(int(sin(float(q)))) // 4 -> ? .. 0
abs(int(sin(float(q)))) // -4 -> ? .. ?, nan if true
abs(int(sin(float(q)))) // k -> ? .. ?, nan if true
-abs(int(sin(float(q)))) // k -> ? .. ?, nan if true
q // abs(int(sin(float(q)))) -> min(-max(q1, -q0), -1) .. max(max(q1, -q0), 0)
q // -abs(int(sin(float(q)))) -> min(-max(q1, -q0), -1) .. max(max(q1, -q0), 0)
q % abs(int(sin(float(q)))) -> ? .. ?, nan if true
q % -abs(int(sin(float(q)))) -> ? .. ?, nan if true
abs(int(sin(float(q)))) % 4 -> 0 .. 3
-abs(int(sin(float(q)))) % 4 -> 0 .. 3
min(abs(int(sin(float(q)))), q) -> min(q0, 0) .. q1
max(abs(int(sin(float(q)))), q) -> max(q0, 0) .. ?
min(q, abs(int(sin(float(q))))) -> min(q0, 0) .. q1
max(q, abs(int(sin(float(q))))) -> max(q0, 0) .. ?
min(-abs(int(sin(float(q)))), q) -> ? .. min(q1, 0)
max(-abs(int(sin(float(q)))), q) -> q0 .. max(q1, 0)
max(q, -abs(int(sin(float(q))))) -> q0 .. max(q1, 0)
sign(abs(int(sin(float(q))))) -> 0 .. 1
sign(-abs(int(sin(float(q))))) -> -1 .. 0
where(q > 5, abs(int(sin(float(q)))), q) -> where(q0 >= 6, 0, where(q1 <= 5, q0, min(q0, 0))) .. ?
where(q > 5, q, abs(int(sin(float(q))))) -> where(q0 >= 6, q0, where(q1 <= 5, 0, min(q0, 0))) .. ?
where(q > 5, -abs(int(sin(float(q)))), q) -> ? .. where(q0 >= 6, 0, where(q1 <= 5, q1, max(q1, 0)))
doc[abs(int(sin(float(q))))] -> min(doc[0..4611686018427387904]) .. max(doc[0..4611686018427387904])
doc[-abs(int(sin(float(q))))] -> min(doc[0..0]) .. max(doc[0..0])
doc[9 - abs(int(sin(float(q))))] -> min(doc[0..9]) .. max(doc[0..9])
float(abs(int(sin(float(q))))) -> 0.0 .. ?
float(-abs(int(sin(float(q))))) -> ? .. 0.0
abs(int(sin(float(q)))) << 2 -> 0 .. ?
abs(int(sin(float(q)))) & 7 -> 0 .. 7
abs(int(sin(float(q)))) & k -> 0 .. ?
-abs(int(sin(float(q)))) & 7 -> 0 .. 7
q & abs(int(sin(float(q)))) -> 0 .. ?
7 & 12 & q -> ? .. ?, nan if true
(q & 7) & k -> 0 .. 7
abs(abs(int(sin(float(q))))) -> 0 .. ?
abs(-abs(int(sin(float(q))))) -> 0 .. ?
q - abs(int(sin(float(q)))) -> ? .. q1
q + abs(int(sin(float(q)))) -> q0 .. ?
q * abs(int(sin(float(q)))) -> ? .. ?, nan if true
abs(int(sin(float(q)))) * k -> ? .. ?, nan if true
segment(off, q) -> segment(off, q0) .. segment(off, q1), attained
segment(off, q - k) -> segment(off, q0 - k1) .. segment(off, q1 - k0), attained
segment(off, abs(int(sin(float(q))))) -> 0 .. ?
segment(off, -abs(int(sin(float(q))))) -> 0 .. ?
segment(off, q // 2) -> segment(off, q0 // 2) .. segment(off, q1 // 2), attained
seen[q] -> all(seen[q0..q1]) .. any(seen[q0..q1])
map[q, q] -> min(map[q0..q1, q0..q1]) .. max(map[q0..q1, q0..q1])
map[k, k + 1] -> min(map[k0..k1, k0 + 1..k1 + 1]) .. max(map[k0..k1, k0 + 1..k1 + 1])
(q * q) % 4 -> where(max(max(q0 * q0, q0 * q1), q1 * q1) // 4 == min(min(q0 * q0, q0 * q1), q1 * q1) // 4,
    min(min(q0 * q0, q0 * q1), q1 * q1) % 4, 0) .. where(max(max(q0 * q0, q0 * q1), q1 * q1) // 4 == min(min(q0 *
    q0, q0 * q1), q1 * q1) // 4, max(max(q0 * q0, q0 * q1), q1 * q1) % 4, 3)
(q // 2 * 2) % 4 -> where(q0 // 4 == q1 // 4, 2 * (q0 // 2 % 2), 0) .. where(q0 // 4 == q1 // 4, 2 * (q1 // 2 % 2), 3)
(q // 2) % 4 -> where(q0 // 8 == q1 // 8, q0 // 2 % 4, 0) .. where(q0 // 8 == q1 // 8, q1 // 2 % 4, 3), attained
(q % 4) % 3 -> where(where(q0 // 4 == q1 // 4, q0 % 4, 0) // 3 == where(q0 // 4 == q1 // 4, q1 % 4, 3) // 3,
    where(q0 // 4 == q1 // 4, q0 % 4, 0) % 3, 0) .. where(where(q0 // 4 == q1 // 4, q0 % 4, 0) // 3 == where(q0 // 4
    == q1 // 4, q1 % 4, 3) // 3, where(q0 // 4 == q1 // 4, q1 % 4, 3) % 3, 2)
q % 4 - k % 4 -> where(q0 // 4 == q1 // 4, q0 % 4, 0) - where(k0 // 4 == k1 // 4, k1 % 4, 3) .. where(q0 // 4 ==
    q1 // 4, q1 % 4, 3) - where(k0 // 4 == k1 // 4, k0 % 4, 0), attained
q % 4 + k -> k0 + where(q0 // 4 == q1 // 4, q0 % 4, 0) .. k1 + where(q0 // 4 == q1 // 4, q1 % 4, 3), attained
(q + k) // 2 - k -> (q0 + k0) // 2 - k1 .. (q1 + k1) // 2 - k0
3 * (q // 4) - k -> 3 * (q0 // 4) - k1 .. 3 * (q1 // 4) - k0, attained
min(q, k) - k -> min(q0, k0) - k1 .. min(q1, k1) - k0
min(2 * q, 3 * k) -> min(2 * q0, 3 * k0) .. min(2 * q1, 3 * k1), attained
max(2 * q, q) -> max(q0, 2 * q0) .. max(q1, 2 * q1)
q * 3 * k -> min(min(min(3 * (q0 * k0), 3 * (q0 * k1)), 3 * (q1 * k0)), 3 * (q1 * k1)) .. max(max(max(3 * (q0 *
    k0), 3 * (q0 * k1)), 3 * (q1 * k0)), 3 * (q1 * k1)), attained
doc[min(q, k)] -> min(doc[min(q0, k0)..min(q1, k1)]) .. max(doc[min(q0, k0)..min(q1, k1)]), attained
doc[q // 4] -> min(doc[q0 // 4..q1 // 4]) .. max(doc[q0 // 4..q1 // 4]), attained
doc[q % 4] -> min(doc[where(q0 // 4 == q1 // 4, q0 % 4, 0)..where(q0 // 4 == q1 // 4, q1 % 4, 3)]) ..
    max(doc[where(q0 // 4 == q1 // 4, q0 % 4, 0)..where(q0 // 4 == q1 // 4, q1 % 4, 3)])
abs(q - 5) - k -> max(max(q0 - 5, -q1 + 5), 0) - k1 .. max(-q0 + 5, q1 - 5) - k0, attained, dense
abs(q + k) -> max(max(q0 + k0, -q1 - k1), 0) .. max(-q0 - k0, q1 + k1), attained, dense
abs(q // 2) -> max(max(q0 // 2, -(q1 // 2)), 0) .. max(-(q0 // 2), q1 // 2), attained, dense
sign(q // 2) -> sign(q0 // 2) .. sign(q1 // 2), attained, dense
float(q // 2) -> float(q0 // 2) .. float(q1 // 2), attained
int(float(q)) -> q0 .. q1
int(doc[q] == 3) -> int(min(doc[q0..q1]) >= 3 & max(doc[q0..q1]) <= 3) .. int(max(doc[q0..q1]) >= 3 &
    min(doc[q0..q1]) <= 3), dense
int(~(q >= k)) -> int(q1 < k0) .. int(q0 < k1), dense
-abs(sin(float(q))) * 2.0 -> ? .. ?, nan if true
u * -abs(sin(float(q))) -> ? .. ?, nan if true
(q - abs(int(sin(float(q))))) * k -> ? .. ?, nan if true
k * (q - abs(int(sin(float(q))))) -> ? .. ?, nan if true
(q - abs(int(sin(float(q))))) // k -> ? .. ?, nan if true
k // (q - abs(int(sin(float(q))))) -> min(-max(k1, -k0), -1) .. max(max(k1, -k0), 0)
(q - abs(int(sin(float(q))))) % 4 -> 0 .. 3
k % (q - abs(int(sin(float(q))))) -> ? .. ?, nan if true
min(q - abs(int(sin(float(q)))), k) -> ? .. min(q1, k1)
max(k, q - abs(int(sin(float(q))))) -> k0 .. max(q1, k1)
-abs(sin(float(q))) / 2.0 -> ? .. ?, nan if true
"""


def expr(text: str) -> Expr:
    return parse_expression(text, {n: v for n, v in VALUES.items() if re.search(rf"\b{n}\b", text)})


def told(e: Expr | None) -> str:
    return "?" if e is None else show(simplify(e)).rpartition("\n")[2]


@pytest.mark.parametrize("row", RANGES.replace("\n    ", " ").strip().split("\n"))
def test_range_of_a_text_has_the_listed_ends(row):
    text, _, range = row.partition(" -> ")
    r = ends(expr(text))
    flags = [name for name, is_so in (("attained", r.attained), ("dense", r.dense)) if is_so]
    nan = [f"nan if {told(r.nan)}"] if told(r.nan) != "false" else []
    assert ", ".join([f"{told(r.lo)} .. {told(r.hi)}", *flags, *nan]) == range


N = 8
SIDES = np.array([(a, b) for a in range(N) for b in range(a, N)])
Q0, K0 = (x.ravel() for x in np.meshgrid(SIDES[:, 0], SIDES[:, 0], indexing="ij"))
Q1, K1 = (x.ravel() for x in np.meshgrid(SIDES[:, 1], SIDES[:, 1], indexing="ij"))
# of all rectangles in 8 queries and keys, those where a mask holds everywhere, nowhere, somewhere, not everywhere but
# somewhere, and the question does not say so; then those where every tile of 4 keys is known to hold a pair
UNDECIDED = """
q >= k -> 0 0 0 0 330
q > k -> 0 0 0 0 210
q == k -> 0 0 0 0 8
q != k -> 0 0 0 0 420
q - k < 9 -> 0 0 0 0 1296
q >= k & q - k < 9 -> 0 0 0 0 330
q >= k | k < 4 -> 0 0 0 0 475
q >= k & k < 4 -> 0 0 0 0 215
q >= 3 & q <= 5 -> 0 0 0 0 216
q >= 3 & q >= 5 -> 0 0 0 0 216
k >= 3 & k <= 5 -> 0 0 0 0 216
q - k == 3 -> 0 0 0 0 5
q - k <= 5 & q >= 7 & k <= 1 -> 0 0 0 0 0
q - k >= 5 & q <= 7 & k >= 1 -> 0 0 0 0 5
q - k >= 5 & q - k <= x -> 0 0 0 0 0
q >= x -> 0 0 0 0 540
x >= 3 -> 0 0 0 0 1296
flag & q >= k -> 0 0 0 0 330
flag | q >= k -> 0 0 0 0 1296
2 * q >= k -> 0 0 0 0 640
q + k >= 9 -> 0 0 0 0 126
q // 4 == k // 4 -> 0 0 0 0 200
q // 4 >= k -> 0 0 0 0 56
q % 4 == 0 -> 0 0 0 0 72
q % 4 == 5 -> 0 0 0 0 0
k % 4 == 1 -> 0 0 0 0 1296
(q - k) % 4 == 1 -> 0 0 0 0 1296
(q + k) % 4 == 2 -> 0 0 0 0 1296
(2 * q) % 4 == 1 -> 0 0 0 0 0
q % 4 >= 2 -> 0 0 0 0 216
q % 4 != 2 -> 0 0 0 0 288
q % x == 0 -> 0 0 936 936 108
q % 4 + k == 3 -> 0 5 543 543 8
q % 4 == k % 4 -> 0 0 0 0 1296
3 - q % 4 == 2 -> 0 0 0 0 72
k // 2 % 3 < 1 -> 0 0 0 0 216
doc[q] == doc[k] -> 0 92 603 603 29
doc[q] != doc[k] -> 92 0 0 603 260
doc[q] >= 3 -> 0 0 0 0 108
doc[k] == 3 -> 0 612 0 0 0
doc[k] != 3 -> 612 0 0 0 684
seen[k] -> 0 0 0 0 108
doc[2 * k] == 3 -> 0 684 0 0 0
map[q, k] == 3 -> 0 165 466 466 4
map[3, k] == 3 -> 0 0 0 0 36
sees[3, k] -> 0 0 0 0 108
~sees[x, k] -> 0 0 0 0 468
sees[q, 6] -> 0 0 0 0 108
sees[q, k] -> 16 122 955 939 36
q >= k & doc[q] == doc[k] -> 0 46 781 781 17
q >= k & doc[k] >= 3 -> 0 165 299 299 12
q >= 3 & doc[k] >= 3 -> 0 0 0 0 45
q >= 3 & doc[q] == 0 & doc[k] == 0 -> 0 300 0 0 0
~(f[q] < 1.0) -> 36 0 936 900 252
f[q] < 1.0 -> 0 36 900 900 108
f[q] <= 1.0 -> 0 36 936 936 252
f[q] > 1.0 -> 0 216 756 756 72
f[q] >= 1.0 -> 0 144 792 792 252
f[q] == 1.0 -> 0 180 864 864 72
f[q] != 1.0 -> 180 0 1044 864 180
~(f[q] <= 1.0) -> 36 0 972 936 72
~(f[q] > 1.0) -> 216 0 972 756 252
~(f[q] >= 1.0) -> 144 0 936 792 108
sin(f[q]) < 1.0 -> 576 72 1224 648 0
~(sin(f[q]) < 1.0) -> 72 576 720 648 0
sin(f[q]) == 1.0 -> 0 1296 0 0 0
sin(f[q]) != 1.0 -> 1296 0 1296 0 0
f[q] == f[k] -> 0 291 900 900 9
isfinite(f[q]) -> 0 72 648 648 576
~isfinite(f[q]) -> 72 0 720 648 0
q >= k ^ k < 4 -> 0 0 0 0 50
~(q >= k ^ k < 4) -> 0 0 0 0 370
f[q] < 1.0 ^ flag -> 36 0 936 900 252
~(f[q] < 1.0 ^ f[k] < 2.0) -> 10 10 1196 1186 35
where(q > 5, q >= k, k < 4) -> 0 0 0 0 302
abs(q - k) < 9 -> 0 0 0 0 1296
abs(q - k) == 3 -> 0 0 0 0 10
min(q, k) == 3 -> 29 0 0 195 0
max(q - 3, 0) >= k -> 0 0 0 0 91
q * k >= 9 -> 0 0 0 0 297
(q & 7) == 3 -> 0 0 0 0 36
int(sin(f[q])) >= 3 -> 0 1296 0 0 0
int(sin(f[q])) == 3 -> 0 1296 0 0 0
int(sin(f[q])) != 3 -> 1296 0 1296 0 0
int(sin(f[q])) % 4 == 1 -> 0 1296 0 0 0
(k + q) % 3 < 1 -> 0 0 0 0 1296
(k - q) % 4 >= 2 -> 0 0 0 0 1296
k % 3 == q % 3 -> 0 0 0 0 1296
k % 2 * (q % 3) >= 1 -> 0 0 0 0 28
min(k % 3, k % 2) == 0 -> 108 0 792 900 180
abs(k % 3 - 1) == 0 -> 0 0 0 0 1296
k % 4 // 2 == 1 -> 0 0 0 0 1296
k % 4 == 1 & k % 3 == 1 -> 0 360 468 468 144
k + q % 2 >= 3 -> 0 0 0 0 564
~seen[k] -> 0 0 0 0 252
seen[q] -> 0 0 0 0 108
seen[2 * k] -> 0 36 756 756 396
~seen[2 * k] -> 36 0 792 756 108
seen[q] & q >= k -> 0 74 564 564 54
~seen[k] & q - k < 4 -> 0 8 378 378 188
seen[k] ^ q >= k -> 5 4 632 627 138
float(q) < 3.5 ^ seen[k] -> 0 0 0 0 100
float(q) / 2.0 < 1.75 -> 0 0 576 576 360
float(q) / 2.0 > 1.75 -> 0 0 576 576 360
float(q) / 2.0 == 1.5 -> 0 0 684 684 36
float(q) / 2.0 != 1.5 -> 0 0 684 684 576
~(float(q) / 2.0 <= 1.5) -> 0 0 576 576 360
float(q) * float(k) < 7.5 -> 0 0 711 711 240
isfinite(float(q) / 2.0) -> 0 0 0 0 1296
isfinite(log(float(q) - 3.0)) -> 0 360 576 576 360
sqrt(float(q)) < 1.5 -> 0 0 540 540 216
log(float(q) - 3.0) >= 0.0 -> 0 216 576 576 360
f[q] < 1.5 & q >= k -> 0 45 791 791 93
abs(int(sin(f[q]))) % 4 == 1 -> 0 1296 0 0 0
(q - abs(int(sin(f[q])))) % 4 == 1 -> 72 360 936 864 0
q - abs(int(sin(f[q]))) != 3 -> 360 36 1260 684 0
q + abs(int(sin(f[q]))) != 3 -> 216 36 1260 684 0
q - abs(int(sin(f[q]))) == 3 -> 36 360 720 684 0
q + abs(int(sin(f[q]))) == -3 -> 0 0 0 0 0
q - abs(int(sin(f[q]))) >= 9 -> 0 1296 0 0 0
q + abs(int(sin(f[q]))) >= 0 -> 1296 0 1296 0 0
q + abs(int(sin(f[q]))) <= -1 -> 0 1296 0 0 0
min(f[k], 2.0) < 3.0 -> 0 36 468 468 792
max(sin(f[q]), float(k)) >= 3.0 -> 240 276 1020 780 0
min(sin(f[q]), float(k)) < 3.0 -> 576 72 1224 648 0
doc[k] == 3 & q >= k & k < 5 -> 0 480 0 0 0
q >= k & k % 2 == 0 -> 0 40 632 632 330
k % 2 == 0 & q % 2 == 0 -> 0 0 784 784 144
doc[q] == 4 & k >= 2 -> 0 0 0 0 63
doc[q] == 4 & k % 2 == 1 -> 0 0 476 476 108
~flag -> 0 0 0 0 0
flag & x >= 2 -> 0 0 0 0 1296
q % 2 == 0 ^ k % 2 == 0 -> 0 0 784 784 288
q >= 2 & doc[2] == doc[k] -> 0 99 330 330 63
isfinite(min(sin(f[q]), 2.0)) -> 576 72 1224 648 0
isfinite(abs(sin(f[q]))) -> 576 72 1224 648 0
~isfinite(min(sin(f[q]), 2.0)) -> 72 576 720 648 0
float(k) == abs(sin(f[q])) -> 1 1184 112 111 0
float(k) == -abs(sin(f[q])) -> 1 176 112 111 0
float(k) != -abs(sin(f[q])) -> 176 1 287 111 1008
float(k) != abs(sin(f[q])) -> 1184 1 1295 111 0
"""


@pytest.mark.parametrize("row", UNDECIDED.strip().split("\n"))
def test_undecided_rectangles_of_questions_have_the_listed_count(row):
    text, _, counts = row.partition(" -> ")
    assert undecided(simplify(expr(text))) == list(map(int, counts.split()))


def undecided(mask: Expr) -> list[int]:
    assert mask.type is BOOL
    scope = Scope({}, {n: Table(t) for n, t in TABLES.items()})
    at = np.arange(N)
    inside = (Q0[:, None] <= at) & (at <= Q1[:, None]), (K0[:, None] <= at) & (at <= K1[:, None])
    inside = inside[0][:, :, None] & inside[1][:, None, :]
    value = np.broadcast_to(evaluate(mask, {"q": at[:, None], "k": at[None, :], "x": 3, "flag": True}, TABLES), (N, N))
    holds = (value | ~inside).all((1, 2)), (~value | ~inside).all((1, 2)), (value & inside).any((1, 2))
    env = {"q0": Q0, "q1": Q1, "k0": K0, "k1": K1, "x": 3, "flag": True, "tk": K1 - K0 + 1}

    def said(question: Expr, single: bool, tk: object) -> np.ndarray:
        return np.broadcast_to(scope.value(question, env | {"single": np.array(single), "tk": tk}), len(Q0))

    holds = *holds, holds[2] & ~holds[0]
    found = [said(ask(mask), True, env["tk"]) for ask in (always, never, some, mixed)]
    assert not any((a & ~t).any() for a, t in zip(found, holds, strict=True))
    wide = said(some(mask), False, np.array(4))
    return [*(int((t & ~a).sum()) for a, t in zip(found, holds, strict=True)), int(wide.sum())]


# a clause, and how wide a tile is that holds a pair of it, whatever the query is; 0 where none is
PERIODS = """
k % 12 == 3 -> 12
k % 12 == 12 -> 0
k // 3 % 2 == 0 -> 6
(2 * k) % 6 == 0 -> 3
(2 * k) % 6 == 1 -> 0
(4 * k) % 6 == 2 -> 3
(3 * k + 1) % 7 == 0 -> 7
k % 4 >= 3 -> 4
min(k % 4, 2) == 1 -> 4
max(k % 4, 1) == 3 -> 4
abs(k % 5 - 2) == 1 -> 5
k % 4 * (k % 6) == 3 -> 12
where(k % 2 == 0, k % 3, 1) == 0 -> 3
k % 4 + q % 3 == 2 -> 4
k % 4 + q % 3 == 5 -> 0
k % 4 + q % 3 >= 3 -> 4
(k + 2 * q) % 5 == 1 -> 5
(k - q) % 6 == 2 -> 6
(q - k) % 6 >= 4 -> 6
(q - k) // 2 % 3 == 1 -> 6
(q + k) % 6 == 2 -> 6
k % 0 == 0 -> 0
k // -2 % 3 == 0 -> 6
k % -3 == 0 -> 3
k % 70000 == 1 -> 0
k % 65536 == 1 -> 65536
k % 65537 == 1 -> 0
k % 300 == q % 301 -> 0
k % 256 + q % 256 == 0 -> 0
k % 200 - q % 3 == 100 -> 200
k % 200 >= q % 3 -> 200
k % x == 0 -> 0
k % 4 == x -> 0
doc[k] == 3 -> 0
doc[k % 4] == 3 -> 0
k % 4 == q -> 0
k % 4 + k * k == 5 -> 0
q % 4 + k * k == 5 -> 0
min(k % 4, k) == 1 -> 0
k - k % 4 == 4 -> 0
k % 6 - k % 3 == 0 -> 6
k % 6 - k // 3 % 2 == 0 -> 6
k * k % 4 == 1 -> 0
k // 4 - k // 8 * 2 == 1 -> 8
k % 4 == 1 & flag -> 4
2 * (k % 3) - 3 * (k % 2) == 1 -> 6
q % 5 == 1 -> 0
k % 2 == 0 & q % 2 == 0 -> 2
k % 6 == 2 | k % 6 == 4 -> 6
sign(k % 3) == 1 -> 3
(k & 3) == 2 -> 4
(k >> 1) % 4 == 2 -> 8
-k % 7 == 3 -> 7
k % 9 // 3 == 2 -> 9
k % 12 // 4 % 2 == 1 -> 12
int(k % 3 == 1) == 1 -> 3
(q - k) % 300 == 1 -> 300
"""


@pytest.mark.parametrize("row", PERIODS.strip().split("\n"))
def test_period_of_a_clause_is_the_listed_one(row):
    text, _, period = row.partition(" -> ")
    found = re.findall(r"tk >= (\d+)", told(some(simplify(expr(text)))))
    assert max(map(int, found), default=0) == int(period)


def test_deep_expressions_and_large_ones_are_not_reasoned_about():
    deep = q
    for i in range(DEEP - 1):
        deep = build("mod", deep, lit(200 + i))
    assert not beyond(deep)
    assert beyond(deep % 7 % 5)
    assert never(deep % 7 % 5 > 9) is FALSE
    parts = [q * i % (i + 7) for i in range(2, 2 + LARGE // 4)]
    while len(parts) > 1:
        parts = [build("min", *parts[i : i + 2]) if parts[i + 1 :] else parts[i] for i in range(0, len(parts), 2)]
    assert not beyond(parts[0].args[0])
    assert beyond(parts[0])
    assert parts[0].depth < DEEP
    assert never(parts[0] < -1) is FALSE
    large, env = parts[0] < -1, {"q0": 3, "q1": 5, "k0": 0, "k1": 2, "single": True, "tk": 3}
    for found, wanted in (
        (never(build("and", q >= 6, large)), True), (never(build("and", q >= 5, large)), False),
        (never(build("or", q >= 6, large)), False), (always(build("or", q >= 3, large)), True),
        (always(build("or", q >= 4, large)), False), (always(build("and", q >= 3, large)), False),
    ):  # fmt: skip
        assert bool(Scope({}, {}).value(found, env)) == wanted  # one part of the mask decides


@pytest.mark.parametrize("x", range(-1, 6))
def test_a_remainder_equals_a_number_of_the_call(x):
    """The number may be none that a remainder can be."""
    scope = Scope({"x": x}, {})
    mask = build("eq", k % 4, param("x"))
    env = {"q0": 0, "q1": 0, "k0": 3, "k1": 12, "single": True, "tk": 10}
    assert bool(scope.value(never(mask), env)) == (x not in range(4))
    assert bool(scope.value(some(mask), env)) == (x in range(4))


def test_a_mask_has_no_more_than_so_many_conjunctions():
    def either(of, many):
        return reduce(lambda x, y: x | y, [eq(of % (i + 2), i) for i in range(many)])

    assert len(disjuncts(either(q, 4) & either(k, MAX_DISJUNCTS // 4))) == MAX_DISJUNCTS
    assert disjuncts(either(q, 5) & either(k, MAX_DISJUNCTS // 4)) is None
    assert len(disjuncts(either(q, MAX_DISJUNCTS))) == MAX_DISJUNCTS
    assert disjuncts(either(q, MAX_DISJUNCTS + 1)) is None
