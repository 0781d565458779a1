"""Report: a result beside the float64 interpreter and beside dense attention in the same dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import MismatchError
from frisket.dsl.evaluate import evaluate
from frisket.lowering.dense import attention, coordinates, visible
from frisket.lowering.plan import Geometry

from .bind import Subject
from .frameworks import Arrays, rounding, to_numpy, turn

Array = NDArray[Any]
FLOOR = 1e-6


@dataclass(frozen=True)
class Report:
    """Largest absolute errors against the float64 interpreter: of the result, and of dense attention done in the
    dtype of the arrays. NaN counts as infinitely wrong, except where the interpreter has NaN too."""

    out: float
    lse: float
    dense_out: float
    dense_lse: float
    dtype: str

    @property
    def good(self) -> bool:
        return self.out <= 2 * self.dense_out + FLOOR and self.lse <= 2 * self.dense_lse + FLOOR

    def __str__(self) -> str:
        return (
            f"{self.dtype}: out {self.out:.1e} (dense {self.dense_out:.1e}), "
            f"lse {self.lse:.1e} (dense {self.dense_lse:.1e}), against the float64 interpreter"
        )

    def require(self) -> None:
        """Raise `MismatchError` unless the result is good."""
        if not self.good:
            raise MismatchError(
                f"{self}\n  the error may be twice that of dense attention plus {FLOOR:g}; this is a bug of frisket: "
                "please report the mask and the shapes"
            )


def compared(given: Arrays, g: Geometry, what: Subject, out: Array, lse: Array) -> Report:
    """The report of a result `out` [batch, heads, q_len, v_dim], `lse`, for the arrays it came from."""
    q, k, v = (turn(to_numpy(x), given.layout, "bhsd") for x in (given.q, given.k, given.v))
    mask, score = (None if p is None else p.expr for p in (what.mask, what.score))
    names = {"params": what.scalars, "tables": what.tables, "origin": g.origin, "sizes": g.full}
    want, want_lse = attention(q, k, v, mask, score, scale=g.scale, **names)  # type: ignore[arg-type]
    plain, plain_lse = _rounded(given, g, what, q, k, v)
    return Report(
        _error(out, want), _error(lse, want_lse), _error(plain, want), _error(plain_lse, want_lse), given.dtype
    )


def _rounded(given: Arrays, g: Geometry, what: Subject, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Dense attention whose scores, probabilities and output are rounded to the dtype of the arrays."""
    half = rounding(given.q)
    work: Any = np.float64 if given.dtype == "float64" else np.float32
    q, k, v = (x.astype(work) for x in (q, k, v))
    group = g.heads // g.kv_heads
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    shape = (g.batch, g.heads, g.q_len, g.kv_len)
    env = {**coordinates(*shape, origin=g.origin, sizes=g.full), **what.scalars}
    with np.errstate(all="ignore"):
        s = half((q @ k.swapaxes(-1, -2)) * work(g.scale)).astype(work)
        if what.score is not None:
            s = half(np.broadcast_to(evaluate(what.score.expr, {**env, "score": s}, what.tables), shape)).astype(work)
        if what.mask is not None:
            s = np.where(visible(what.mask.expr, env, what.tables, shape), s, work(-np.inf))
        top = s.max(-1, keepdims=True)
        p = np.exp(s - np.where(np.isneginf(top), work(0), top))
        total = p.sum(-1, keepdims=True)
        weights = half(p / np.where(total == 0, work(1), total)).astype(work)
        return half(weights @ v), ((np.log(total) + top)[..., 0]).astype(np.float64)


def _error(got: Array, want: Array) -> float:
    with np.errstate(all="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        off = np.where(same, 0.0, np.abs(got - want))
    return float(np.where(np.isnan(off), np.inf, off).max())
