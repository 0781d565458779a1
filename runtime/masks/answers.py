"""Questions about masks, answered exactly or not at all.

>>> from frisket.runtime.masks.mask import mask
>>> print(mask("causal & window(256)").implies("window(512)", 4096, 4096))
yes: every position the first mask shows, the second shows
>>> print(mask("causal").implies("window(256)", 4096, 4096))
no: query 256 sees key 0 under the first mask and not under the second (b 0, h 0)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from frisket.dsl.errors import MismatchError, Undecided
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import TRUE, make
from frisket.dsl.notebook import sentence
from frisket.lowering.analysis.count import literal
from frisket.lowering.analysis.decide import Lookup, first_empty_row, first_visible, lookups, pair_counts
from frisket.lowering.analysis.groups import Beyond
from frisket.lowering.analysis.layout import bind_in_part, grid_of
from frisket.lowering.analysis.table import Table
from frisket.lowering.analysis.tiles import Grid, Scope, Spent
from frisket.lowering.plan import Problem, Runs
from frisket.lowering.simplify import simplify
from frisket.runtime.layouts.tiling import check_reach
from frisket.runtime.machine.parameters import BoundExpr, separated

from .layout import make_layout

if TYPE_CHECKING:
    from .mask import Mask

BUDGET = 1 << 30  # steps: one operator at one position or rectangle
Witness = tuple[int, int, int, int | None]
Ask = Callable[[Any, Grid, Scope], Witness | None]


@dataclass(frozen=True, repr=False)
class Answer:
    """An answer to a question about a mask, truthy or falsy.

    >>> from frisket.runtime.masks.mask import mask
    >>> found = mask("causal").is_empty(8, 8)
    >>> bool(found), found.witness, str(found)
    (False, (0, 0, 0, 0), 'no: query 0 sees key 0 (b 0, h 0)')

    `witness` is the (b, h, q, k) that shows why, in global positions; None where no one
    position can. `because` says it in words, and `str(answer)` with yes or no before it."""

    holds: bool
    witness: Witness | None = None
    because: str = ""

    def __bool__(self) -> bool:
        return self.holds

    def __str__(self) -> str:
        return f"{'yes' if self.holds else 'no'}: {self.because}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return sentence("yes" if self.holds else "no", self.because, good=self.holds)


def implies(first: Mask, second: Mask, problem: Problem, budget: int = BUDGET) -> Answer:
    """Whether `second` shows every position `first` shows."""
    at = _visible("implies", (first, second), first - second, problem, budget)
    if at is None:
        return Answer(True, None, "every position the first mask shows, the second shows")
    return Answer(False, at, f"{_sees(at)} under the first mask and not under the second {_slice(at)}")


def equivalent(first: Mask, second: Mask, problem: Problem, budget: int = BUDGET) -> Answer:
    """Whether both show the same positions."""
    at = _difference(first, second, problem, budget)
    if at is None:
        return Answer(True, None, "both show the same positions")
    one, other = ("first", "second") if _shows(first, at, problem) else ("second", "first")
    return Answer(False, at, f"{_sees(at)} under the {one} mask and not under the {other} {_slice(at)}")


def _difference(first: Mask, second: Mask, problem: Problem, budget: int) -> Witness | None:
    both = (first, second)
    try:  # each difference by itself is solved by row more often than both at once
        sides = (first - second, second - first)
        # a part of the budget: the rest is for both at once
        witnesses = [_visible("equivalent", both, d, problem, budget >> 8) for d in sides]
    except Undecided:
        return _visible("equivalent", both, first ^ second, problem, budget)
    # both sides may have one: the first of the two
    return min((at for at in witnesses if at is not None), default=None)


def is_empty(mask: Mask, problem: Problem, budget: int = BUDGET) -> Answer:
    """Whether nothing is visible."""
    at = _visible("is_empty", (mask,), mask, problem, budget)
    return Answer(True, None, "no query sees a key") if at is None else Answer(False, at, f"{_sees(at)} {_slice(at)}")


def empty_rows(mask: Mask, problem: Problem, budget: int = BUDGET) -> Answer:
    """Whether some query sees no key."""

    def ask(e: Any, grid: Grid, scope: Scope) -> Witness | None:
        place = first_empty_row(e, grid, scope)
        return None if place is None else (int(grid.b[place[0]]), int(grid.h[place[0]]), place[1], None)

    at = _answered("empty_rows", (mask,), mask, ask, problem, budget)
    if at is None:
        return Answer(False, None, "every query sees a key")
    return Answer(True, at, f"query {at[2]:,} sees no key {_slice(at)}")


def score_lookups(score: BoundExpr, shown: Mask | None, problem: Problem, budget: int = BUDGET) -> tuple[Lookup, ...]:
    """Every table lookup of a score mod, and whether it stays inside its table wherever `shown` shows a position; for a
    mask alone, wherever the rest of the mask does not decide."""
    score.require_bound()
    left: BoundExpr = score
    values, visible = dict(left.params), TRUE
    if shown is not None:
        shown.require_bound()
        left, right = separated(score, shown)  # a name may stand for another table in each
        values = {**left.params, **right.params}
        visible = bind_in_part(right.expr, right.tables)
    e = bind_in_part(left.expr, left.tables)
    # a grid that tells apart what either of them reads
    grid, _ = grid_of(make("both", (e, visible)), problem)
    tables = {n: Table(v) for n, v in values.items() if isinstance(v, np.ndarray)}
    env = {**problem.named_sizes, **{n: v for n, v in values.items() if n not in tables}}
    return lookups(e, visible, grid, Scope(env, tables, budget))


def visible_pairs(mask: Mask, problem: Problem) -> int:
    """Visible pairs over every batch entry and head; a layout is made only where they cannot be counted by row."""

    def runs() -> Runs:
        raise Beyond  # there is no layout: only counting by row

    _check((mask,), problem)
    e = simplify(bind_in_part(mask.expr, mask.tables))
    grid, slice_of = grid_of(e, problem)
    scope = Scope({**problem.named_sizes, **mask.scalars}, {n: Table(t) for n, t in mask.tables.items()})
    try:
        return int(pair_counts(e, grid, scope, runs)[slice_of].sum())
    except Beyond:
        # a layout has the runs that counting needs
        return make_layout(mask, problem).visible_pairs


# -- asking -----------------------------------------------------------------------------------------


def _visible(question: str, masks: tuple[Mask, ...], joint: Mask, problem: Problem, budget: int) -> Witness | None:
    """A position `joint` shows, checked by the interpreter."""

    def ask(e: Any, grid: Grid, scope: Scope) -> Witness | None:
        place = first_visible(e, grid, scope)
        return None if place is None else (int(grid.b[place[0]]), int(grid.h[place[0]]), place[1], place[2])

    at = _answered(question, masks, joint, ask, problem, budget)
    if at is not None and not _shows(joint, at, problem):
        raise MismatchError(f"the analysis and the interpreter differ at {at}\n  please report this with the mask")
    return at


def _answered(
    question: str, masks: tuple[Mask, ...], joint: Mask, ask: Ask, problem: Problem, budget: int
) -> Witness | None:
    _check(masks, problem)
    env = {**problem.named_sizes, **joint.scalars}
    e = literal(simplify(bind_in_part(joint.expr, joint.tables)), env)
    grid, _ = grid_of(e, problem)
    scope = Scope(env, {n: Table(t) for n, t in joint.tables.items()}, budget)
    try:
        return ask(e, grid, scope)
    except Spent:
        text = f"{question} is not decided within a budget of {budget:,} steps\n  ask about a part (shorter lengths, "
        raise Undecided(f"{text}`origin`, `sizes`), or allow more: budget={4 * max(budget, 1 << 26)}") from None


def _check(masks: tuple[Mask, ...], problem: Problem) -> None:
    """Raise for what cannot be asked."""
    for one in masks:
        one.require_bound()
        check_reach(one.expr, [one.expr], one.scalars, one.tables, problem)


def _shows(mask: Mask, at: Witness, problem: Problem) -> bool:
    env = {**problem.named_sizes, **mask.scalars, **dict(zip("bhqk", at, strict=True))}
    return bool(np.asarray(evaluate(mask.expr, env, mask.tables)))


def _sees(at: Witness) -> str:
    return f"query {at[2]:,} sees key {at[3]:,}"


def _slice(at: Witness) -> str:
    return f"(b {at[0]}, h {at[1]})"
