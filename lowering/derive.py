"""Symbolic derivatives of a plan's score mod, and how each captured gradient is summed.

With s the scaled dot product, m(s) the modified score, p = exp(m(s) - lse), and cotangents `dout`, `dlse`:

    delta = rowsum(dout * out) - dlse
    dm    = p * (kept / (1 - rate) * (dout @ v.T) - delta)      the cotangent of m(s), 0 where masked
    ds    = dm * slope;   dq = scale * ds @ k;   dk = scale * ds.T @ q;   dv = (kept / (1 - rate) * p).T @ dout
    a captured value x read at index i(b, h, q, k):   dx[i] += dm * weight

(Dao, FlashAttention-2, arXiv 2307.08691, for the plain score; the sink of a row is one more logit without a value:
its gradient is -exp(sink - lse) * delta, summed over rows.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from frisket.dsl.ir import Expr

Over = Literal["head", "row", "column", "diagonal", "scatter"]


@dataclass(frozen=True)
class Gradient:
    """The gradient of one lookup site of a Float table (`source` is its name in the plan), or of a Float slot.

    `over` says on which coordinates `index` depends, and so how `dm * weight` is summed before anything is scattered
    (sums run in a fixed order, so results repeat bit for bit):
    "head": on b and h at most, buffer [batch, heads]; "row": b, h, q, buffer [batch, heads, q_len];
    "column": b, h, k, buffer [batch, heads, kv_len]; "diagonal": b, h and q - k, buffer
    [batch, heads, q_len + kv_len - 1], entry q - k + kv_len - 1 in local positions; "scatter": anything else, added
    to the table's own shape at once."""

    source: str
    index: tuple[Expr, ...]  # of a table; empty for a slot
    weight: Expr  # d m(s) / d x, in b h q k score, sizes, slots and tables; simplified
    over: Over


@dataclass(frozen=True)
class Backward:
    """What a backward kernel needs beside the plan."""

    slope: Expr | None  # d m(s) / d s in b h q k score, sizes, slots, tables; None: 1
    gradients: tuple[Gradient, ...]
