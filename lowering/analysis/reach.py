"""Decides whether every table lookup stays inside its table, or finds the position where one does not. The segment of
a position is looked up in offsets: inside is from the first offset to before the last.

A lookup counts where its answer does: under `a & b` a lookup of b counts where a is true, under `a | b` where a is
false, in a branch where the branch is taken. A neighbour guards a lookup only if its own lookups are proved, so
that no answer rests on a clamped one. Outside, frisket clamps; numpy and PyTorch wrap negative indices, JAX wraps
and clamps: a mask that relies on any of that means different things in different places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from frisket.dsl.errors import EvaluationError
from frisket.dsl.ir import FALSE, TRUE, Expr, conj, disj, free_names, uses, walk
from frisket.dsl.show import show
from frisket.lowering.simplify import simplify
from frisket.lowering.simplify.rules_boolean import negate

from .count import literal
from .decide import first_visible
from .intervals import ends
from .tiles import Grid, Scope, Spent

_READS = ("lookup", "segment")


@dataclass(frozen=True)
class Lookup:
    """One axis of one lookup: `text` is the lookup, `index` the Expr of the index. `lo..hi` are bounds of the index
    over all positions (None: not known), `size` the entries of the axis. `proved`: the index stays in `0..size - 1`
    wherever it counts; else `witness` is a (b, h, q, k) where it does not, and `value` the index there, or None."""

    table: str
    axis: int
    text: str
    index: str
    lo: int | None
    hi: int | None
    size: int
    proved: bool
    witness: tuple[int, int, int, int] | None = None
    value: int | None = None
    offsets: tuple[int, int] | None = None  # of `segment`: the first and the last entry, between which the index stays

    def __str__(self) -> str:
        if self.offsets:
            entries = f"the offsets {self.offsets[0]:,}..{self.offsets[1]:,}"
        else:
            on = f" on axis {self.axis}" if self.axis else ""
            entries = f"{self.size:,} entr{'y' if self.size == 1 else 'ies'}{on}"
        if self.proved:
            return f"{self.text} stays within {entries}"
        if self.witness is None or self.value is None:
            return f"{self.text} is not proved to stay within {entries}"
        b, h, q, k = self.witness
        end = "first" if self.value < (self.offsets or (0,))[0] else "last"
        return (
            f"{self.text} leaves {entries}: {self.index} = {self.value} at query {q:,}, key {k:,} (b {b}, h {h}), "
            f"where it reads the {end}"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def lookups(e: Expr, visible: Expr, grid: Grid, scope: Scope) -> tuple[Lookup, ...]:
    """Every lookup of a mask, or of a score mod at the positions `visible` shows, in the order of the text."""
    nodes = [n for n in walk(e) if n.op in _READS]
    found: dict[tuple[Expr, int], Lookup] = {}
    proved: set[Expr] = set()
    while True:
        context = _contexts(e, proved)
        for node in nodes:
            for axis in range(len(node.args)):
                if (node, axis) not in found or not found[node, axis].proved:
                    found[node, axis] = _checked(node, axis, conj(visible, context[node]), grid, scope)
        now = {n for n in nodes if all(found[n, i].proved for i in range(len(n.args)))}
        if now == proved or now == set(nodes):
            return tuple(found.values())
        proved = now  # more neighbours may guard: ask again


def _contexts(root: Expr, proved: set[Expr]) -> Mapping[Expr, Expr]:
    """The condition, for every node, under which its value counts."""

    def sound(e: Expr) -> bool:
        return "score" not in uses(e) and all(n in proved for n in walk(e) if n.op in _READS)

    found = {root: TRUE}
    for node in reversed(list(walk(root))):
        here = found.get(node, FALSE)
        for i, a in enumerate(node.args):
            others = [x for j, x in enumerate(node.args) if j != i and sound(x)]
            guard = TRUE
            if node.op == "and":
                guard = conj(*others)
            elif node.op == "or":
                guard = conj(*(negate(x) for x in others))
            elif node.op == "where" and i and sound(node.args[0]):
                guard = node.args[0] if i == 1 else negate(node.args[0])
            found[a] = disj(found.get(a, FALSE), conj(here, guard))
    return found


def _checked(node: Expr, axis: int, where: Expr, grid: Grid, scope: Scope) -> Lookup:
    index, table = node.args[axis], scope.arrays[node.name]
    lo, hi = _range(index, grid, scope)
    start, stop = (int(table[0]), int(table[-1])) if node.op == "segment" else (0, table.shape[axis])
    offsets = (start, stop) if node.op == "segment" else None
    made = Lookup(node.name, axis, _text(node), _text(index), lo, hi, table.shape[axis], True, offsets=offsets)
    if lo is not None and hi is not None and lo >= start and hi < stop:
        return made
    outside = conj(where, disj(index < start, index >= stop))
    try:
        at = first_visible(simplify(literal(outside, scope.env)), grid, scope)
    except (Spent, EvaluationError):
        return Lookup(**{**made.as_dict(), "proved": False})
    if at is None:
        return made
    slice, q, k = at
    witness = (int(grid.b[slice]), int(grid.h[slice]), q, k)
    value = int(scope.value(index, dict(zip("bhqk", witness, strict=True))))
    return Lookup(**{**made.as_dict(), "proved": False, "witness": witness, "value": value})


def _range(index: Expr, grid: Grid, scope: Scope) -> tuple[int | None, int | None]:
    """The bounds of an index over the whole crop."""
    env = {
        "b": grid.b, "h": grid.h, "q0": grid.q, "q1": grid.q + grid.q_len - 1, "k0": grid.k,
        "k1": grid.k + grid.kv_len - 1,
    }  # fmt: skip
    r = ends(simplify(literal(index, scope.env)))
    try:
        lo = None if r.lo is None else int(np.min(scope.value(r.lo, env)))
        hi = None if r.hi is None else int(np.max(scope.value(r.hi, env)))
    except EvaluationError:
        return None, None
    return lo, hi


def _text(e: Expr) -> str:
    scalars, tables = free_names(e)
    return show(e, {*scalars, *tables})
