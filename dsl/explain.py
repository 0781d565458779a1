"""Explains why a position is visible or hidden, or a tile empty, partial or full: the deciding clause and its values.

>>> from frisket.dsl.sugar import k, q
>>> answer = explain((q >= k) & (q - k < 4), {"q": 9, "k": 2})
>>> answer.visible, answer.because
(False, 'q - k < 4 is false: q - k = 7')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import BudgetError
from .evaluate import evaluate
from .ir import COMPARISONS, Expr, Named, expanded, find, free_names, make
from .notebook import sentence
from .show import places, show


@dataclass(frozen=True, repr=False)
class Explanation:
    """The reason for a position: the deciding `clauses` of the mask as written, and `because`, the same in words.

    >>> import frisket as fk
    >>> fk.mask("causal & window(64)").layout(256, 256).explain(q=200, k=17).because
    'in window(64), abs(q - k) < 64 is false: abs(q - k) = 183'
    """

    visible: bool
    because: str
    clauses: tuple[Expr, ...]

    def __str__(self) -> str:
        return f"{'visible' if self.visible else 'hidden'}: {self.because}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return sentence("visible" if self.visible else "hidden", self.because, good=self.visible)


def explain(
    mask: Expr, env: Mapping[str, Any], tables: Mapping[str, Any] | None = None, shown: Expr | None = None
) -> Explanation:
    """Explain `mask` at one position: `env` holds b, h, q, k, sizes and parameters. `shown` is the same mask with
    calls of the library: a clause is named together with the call that holds it."""

    def value(e: Expr) -> Any:
        return np.asarray(evaluate(e, env, tables))

    visible = bool(value(mask))
    clauses, wording = tuple(_deciding(mask, visible, value)), Wording(mask if shown is None else shown)
    return Explanation(visible, "; ".join(_reason(c, value, wording) for c in clauses), clauses)


@dataclass(frozen=True, repr=False)
class TileExplanation:
    """The reason why a tile is "empty", "partial" or "full". `visible_at` and `hidden_at` are the global (b, h, q, k)
    of a visible and of a hidden position, None where the tile has none. `clauses` decide the whole tile, if any do."""

    kind: str
    because: str
    visible_at: tuple[int, int, int, int] | None
    hidden_at: tuple[int, int, int, int] | None
    clauses: tuple[Expr, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {self.because}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return sentence(self.kind, self.because, good=self.kind != "empty")


def explain_tile(
    mask: Expr, env: Named, tables: Named | None = None, shown: Expr | None = None, *, cut: bool = False
) -> TileExplanation:
    """Explain `mask` over a tile: `q` and `k` of `env` are ranges of positions inside the lengths; `cut` says that the
    tile reaches beyond them, where everything counts as hidden."""
    q, k = np.asarray(env["q"]), np.asarray(env["k"])
    # broadcast: a clause of q alone is evaluated once a query
    grid = {**env, "q": q[:, None], "k": k[None, :]}

    def value(e: Expr) -> Any:
        # a clause may be constant along an axis, and the first place is found in the whole tile
        return np.broadcast_to(evaluate(e, grid, tables), (len(q), len(k)))

    def first(where: Any) -> tuple[int, int, int, int] | None:
        at = int(np.argmax(where))  # 0 where no entry holds, too: the entry itself tells
        i, j = divmod(at, len(k))
        return (int(env["b"]), int(env["h"]), int(q[i]), int(k[j])) if where[i, j] else None

    seen = value(mask)
    visible_at, hidden_at = first(seen), first(~seen)
    if visible_at and hidden_at:
        parts = []
        for at, verb in ((visible_at, "sees"), (hidden_at, "does not see")):
            why = explain(mask, {**env, **dict(zip("bhqk", at, strict=True))}, tables, shown).because
            parts.append(f"query {at[2]:,} {verb} key {at[3]:,}, as {why}")
        return TileExplanation("partial", "\n".join(parts), visible_at, hidden_at, ())
    clauses, wording = tuple(_deciding(mask, visible_at is not None, value)), Wording(mask if shown is None else shown)
    because = "; ".join(_reason(c, value, wording, " throughout") for c in clauses)
    kind = "empty" if visible_at is None else "partial" if cut else "full"
    if kind == "partial":
        # what lies outside counts as hidden, so that the tile is not full
        because = f"it reaches past the last query or key; before that, {because}"
    return TileExplanation(kind, because, visible_at, hidden_at, clauses)


def _deciding(e: Expr, truth: bool, value: Any) -> list[Expr]:
    """The smallest parts of `e` that make `e` equal to `truth` at every position of `value`."""
    if e.op == "not":
        return _deciding(e.args[0], not truth, value)
    if e.op in ("and", "or"):
        parts = list(e.args)
        if truth == (e.op == "and"):  # each part has to equal `truth`: all of them are the reason
            return [c for a in parts for c in _deciding(a, truth, value)]
        holds = {a: value(a) == truth for a in parts}
        for a in parts:
            if holds[a].all():
                return _deciding(a, truth, value)
        for a in e.args:  # none alone: those without which it would not hold
            if np.logical_or.reduce([holds[x] for x in parts if x is not a]).all():
                parts.remove(a)
        return [make(e.op, tuple(parts), None, e.type)]
    if e.op == "where":
        c, x, y = e.args
        condition = value(c)
        # otherwise the branch differs between positions: neither is the reason
        if condition.all() or not condition.any():
            chosen = x if condition.all() else y
            return _deciding(c, bool(condition.all()), value) + _deciding(chosen, truth, value)
    return [e]


def _reason(e: Expr, value: Any, wording: Wording, extent: str = "") -> str:
    truth = f"{bool(value(e).flat[0])}".lower()
    if e.op in ("and", "or"):
        texts = ", ".join(show(x := wording.calls.get(a, a), _known(x)) for a in e.args)
        return f"{texts} are never {'false' if truth == 'true' else 'true'} together here"
    text, shown = wording(e)
    if text is None:
        return f"the constant is {truth}"
    values = ", ".join(f"{t} = {_span(value(a))}" for t, a in shown)
    return f"{text} is {truth}{extent}" + (f": {values}" if shown else "")


def _span(values: Any) -> str:
    least, most = values.min(), values.max()
    return f"{least}" if values.size == 1 or least == most else f"{least}..{most}"


def _known(e: Expr) -> set[str]:
    return {name for names in free_names(e) for name in names}  # which have values: nothing is declared


# operators whose arguments give a reason, and the arguments that say nothing
PLAIN = {**dict.fromkeys(COMPARISONS, ("lit",)), "lookup": ("lit", "var")}


class Wording:
    """The texts of a mask's clauses, each with the call of the library that holds it."""

    def __init__(self, shown: Expr) -> None:
        self.calls = {expanded(n): n for n in find(shown, "call")}
        try:
            text, spans = places(shown, _known(shown)) if self.calls else ("", [])
        except BudgetError:  # the mask has no text: clauses stand for themselves
            text, spans = "", []
        self.places = {e: text[span.start : span.stop] for span, e in spans}

    def __call__(self, e: Expr) -> tuple[str | None, list[tuple[str, Expr]]]:
        """The text of a clause (None: a constant), and the texts of the parts whose values give the reason."""
        if e.op == "lit":
            return None, []
        plain = PLAIN.get(e.op)
        parts = () if plain is None else tuple(a for a in e.args if a.op not in plain)
        text = show(e, known := _known(e))
        around = self.places.get(e, text)
        return text if around == text else f"in {around}, {text}", list({show(a, known): a for a in parts}.items())
