"""Why a position is visible or hidden: the clause that decides, with its values.

>>> from frisket.dsl.sugar import k, q
>>> found = explain((q >= k) & (q - k < 4), {"q": 9, "k": 2})
>>> found.visible, found.because
(False, 'q - k < 4 is false: q - k = 7')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .evaluate import evaluate
from .ir import COMPARISONS, Expr
from .show import show


@dataclass(frozen=True)
class Explanation:
    """`clauses` are the sub-expressions of the mask as written that decide; `because` says so in words."""

    visible: bool
    because: str
    clauses: tuple[Expr, ...]

    def __str__(self) -> str:
        return f"{'visible' if self.visible else 'hidden'}: {self.because}"


def explain(mask: Expr, env: Mapping[str, Any], tables: Mapping[str, Any] | None = None) -> Explanation:
    """Explain `mask` at one position: `env` holds b, h, q, k, sizes and parameters."""

    def value(e: Expr) -> Any:
        return evaluate(e, env, tables).item()

    visible = bool(value(mask))
    clauses = tuple(_deciding(mask, visible, value))
    return Explanation(visible, "; ".join(_said(c, value) for c in clauses), clauses)


def _deciding(e: Expr, truth: bool, value: Any) -> list[Expr]:
    """The smallest parts of `e` that make it what it is."""
    if e.op == "not":
        return _deciding(e.args[0], not truth, value)
    if e.op == "where":
        return _deciding(e.args[0], bool(value(e.args[0])), value) + _deciding(
            e.args[1] if value(e.args[0]) else e.args[2], truth, value
        )
    if e.op in ("and", "or"):
        if truth == (e.op == "or"):  # one part is enough: the first that decides
            return _deciding(next(a for a in e.args if bool(value(a)) == truth), truth, value)
        return [c for a in e.args for c in _deciding(a, truth, value)]
    return [e]


def _said(e: Expr, value: Any) -> str:
    truth = str(bool(value(e))).lower()
    text, shown = wording(e)
    if text is None:
        return f"the mask is {truth}"
    return f"{text} is {truth}" + (": " + ", ".join(f"{t} = {value(a)}" for t, a in shown) if shown else "")


def wording(e: Expr) -> tuple[str | None, list[tuple[str, Expr]]]:
    """The text of a clause (None: it is a constant), and those of its parts whose values say why."""
    if e.op == "lit":
        return None, []
    parts: tuple[Expr, ...] = ()
    if e.op in COMPARISONS:
        parts = tuple(a for a in e.args if a.op != "lit")
    elif e.op == "lookup":
        parts = tuple(a for a in e.args if a.op not in ("lit", "var"))
    return show(e), list({show(a): a for a in parts}.items())
