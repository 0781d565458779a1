"""Searches for a visible position, a row without one, a lookup outside its table; counts of visible pairs and rows.

Masks of clauses that can be solved by row are asked row by row, or piece by piece (`count`). All others are
searched coarse to fine: rectangles that `never` hold a visible position are dropped, one that `always` does ends
the search, small ones are looked at. The search is depth first, in order of query and key, so that memory stays
small and the position found is an early one.

A lookup is inside its table, the segment of a position from the first offset to before the last one. A lookup counts
where its answer does. Under `a & b` a lookup of b counts where a is true, under `a | b` where a is
false, in a branch where the branch is taken. A neighbour guards a lookup only if its own lookups are proved, so
that no answer rests on a clamped one. Outside, frisket clamps; numpy and PyTorch wrap negative indices, JAX wraps
and clamps: a mask that relies on any of that means different things in different places.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import BudgetError, EvaluationError, MismatchError
from frisket.dsl.ir import (
    COORDINATES,
    FALSE,
    SCORE,
    TRUE,
    Expr,
    conj,
    disj,
    find,
    fold,
    free_names,
    lit,
    make,
    param,
    substitute,
    walk,
)
from frisket.dsl.show import show
from frisket.dsl.work import steps
from frisket.grammar.memo import memo
from frisket.lowering.simplify import simplify
from frisket.lowering.simplify.rules_boolean import negate

from .count import Rowwise, literal
from .groups import Beyond
from .intervals import ends
from .questions import always, never
from .runs import Runs
from .solve import K, Q
from .tiles import FULL, Grid, Scope, Spent

Array = NDArray[Any]
SMALL = 256  # positions of a rectangle that are looked at one by one
_AT_ONCE = 1 << 12  # rectangles asked together
_SAMPLES = 64  # keys tried in a row before it is searched
_FEW = 1 << 22  # steps of positions that are looked at without asking
_KEYS = 1 << 16  # keys of one row looked at together
_CALL = 1 << 10  # steps that an operator takes however few the positions
_EACH = 40  # steps for a rectangle and a position themselves
_READS = ("lookup", "segment")


# -- a visible position ---------------------------------------------------------------------------


def first_visible(mask: Expr, grid: Grid, scope: Scope) -> tuple[int, int, int, int] | None:
    """The global (b, h, q, k) of a visible position or None; the first of its slice where rows can be solved."""
    if mask is FALSE:
        return None
    env = _corners(grid)
    hidden = np.zeros(len(grid.b), bool)
    if grid.q_len * grid.kv_len * steps(mask) > _FEW and not any(n.op == "lookup" for n in walk(mask)):
        hidden = _known(never(mask), env, scope, len(grid.b))  # of tables, rows tell more for less
    for s in np.flatnonzero(~hidden):
        try:
            position = _first_by_row(mask, grid, scope, int(s))
        except (Beyond, EvaluationError):  # an end of a row may leave 64 bits where the mask itself does not
            position = _search(mask, {n: int(x[s]) for n, x in env.items()}, scope)
        if position is not None:
            return int(grid.b[s]), int(grid.h[s]), *position
    return None


def _first_by_row(mask: Expr, grid: Grid, scope: Scope, s: int) -> tuple[int, int] | None:
    rows = Rowwise(mask, grid, scope, s)
    query = _first_query(rows, scope, sees=True)
    return None if query is None else (query, _first_key(mask, rows, scope, query))


def _first_query(rows: Rowwise, scope: Scope, *, sees: bool) -> int | None:
    """The first query that sees a key, or the first that sees none."""
    for q in rows.telling():
        scope.spend(len(q) * rows.each)
        hits = rows.sees_a_key(q) == sees
        if hits.any():
            return int(q[np.argmax(hits)])
    return None


def _first_key(mask: Expr, rows: Rowwise, scope: Scope, q: int) -> int:
    for start in range(rows.k0, rows.k1 + 1, _KEYS):
        k = np.arange(start, min(start + _KEYS, rows.k1 + 1))
        scope.spend(len(k) * steps(mask))
        seen = np.broadcast_to(scope.value(mask, {**rows.at, "q": q, "k": k}), k.shape)
        if seen.any():
            return int(k[np.argmax(seen)])
    raise MismatchError(f"row {q} was counted to have a key and has none\n  please report this with the mask")


def _known(question: Expr, env: dict[str, Any], scope: Scope, n: int) -> Array:
    """The certain answers for n rectangles; none where an end of a range leaves 64 bits."""
    scope.spend(max(n, _CALL) * (steps(question) + _EACH))
    try:
        return np.broadcast_to(scope.value(question, env), (n,))
    except EvaluationError:
        return np.zeros(n, bool)


def _search(mask: Expr, whole: dict[str, int], scope: Scope) -> tuple[int, int] | None:
    """Depth-first search over rectangles q0 q1 k0 k1 (columns), the earliest on top of the stack."""
    at = {"b": whole["b"], "h": whole["h"]}
    if (whole["q1"] - whole["q0"] + 1) * (whole["k1"] - whole["k0"] + 1) * steps(mask) <= _FEW:
        return _read(mask, whole, scope)
    stack = [np.array([[whole[n]] for n in ("q0", "q1", "k0", "k1")])]
    width = SMALL // 4  # few rectangles at first: an early visible position ends the search
    while stack:
        box = stack.pop()
        if box.shape[1] > width:
            stack.append(box[:, width:])
            box = box[:, :width]
        width = min(2 * width, _AT_ONCE)
        env = {**at, **dict(zip(("q0", "q1", "k0", "k1"), box, strict=True))}
        box = box[:, ~_known(never(mask), env, scope, box.shape[1])]
        small = (box[1] - box[0] + 1) * (box[3] - box[2] + 1) <= SMALL
        seen = _look(mask, at, box[:, small], scope)
        if seen is not None:
            return seen
        if (~small).any():
            stack.append(_halved(box[:, ~small]))
    return None


def _read(mask: Expr, whole: dict[str, int], scope: Scope) -> tuple[int, int] | None:
    """The first visible position of a rectangle, found by evaluating all of it, some rows at a time."""
    k = np.arange(whole["k0"], whole["k1"] + 1)
    step = max(1, _AT_ONCE // len(k))  # some rows at a time: memory stays bounded
    for start in range(whole["q0"], whole["q1"] + 1, step):
        q = np.arange(start, min(start + step, whole["q1"] + 1))
        scope.spend(len(q) * len(k) * steps(mask))
        env = {"b": whole["b"], "h": whole["h"], "q": q[:, None], "k": k}
        seen = np.broadcast_to(scope.value(mask, env), (len(q), len(k)))
        if seen.any():
            i, j = divmod(int(np.argmax(seen)), len(k))
            return int(q[i]), int(k[j])
    return None


def _halved(box: Array) -> Array:
    """The parts of rectangles whose longer side is cut in two, twice; in order."""
    for _ in range(2):
        tall = box[1] - box[0] >= box[3] - box[2]
        one, other = box.copy(), box.copy()
        for lo, hi, cut in ((0, 1, tall), (2, 3, ~tall)):
            middle = (box[lo] + box[hi]) // 2
            one[hi] = np.where(cut, middle, box[hi])
            other[lo] = np.where(cut, middle + 1, box[lo])
        box = np.stack([one, other], axis=2).reshape(4, -1)
        box = box[:, (box[0] <= box[1]) & (box[2] <= box[3])]
    return box[:, np.lexsort((box[2], box[0]))]


def _look(mask: Expr, at: dict[str, int], box: Array, scope: Scope) -> tuple[int, int] | None:
    """The first visible position of small rectangles, found position by position."""
    if not box.shape[1]:
        return None
    high, wide = box[1] - box[0] + 1, box[3] - box[2] + 1
    area = high * wide
    scope.spend(max(int(area.sum()), _CALL) * (steps(mask) + _EACH))
    owner = np.repeat(np.arange(len(area)), area)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(area) - area, area)
    q, k = box[0][owner] + place // wide[owner], box[2][owner] + place % wide[owner]
    seen = np.broadcast_to(scope.value(mask, {**at, "q": q, "k": k}), q.shape)
    if not seen.any():
        return None
    q, k = q[seen], k[seen]
    first = np.lexsort((k, q))[0]
    return int(q[first]), int(k[first])


def _corners(grid: Grid) -> dict[str, Any]:
    q1, k1 = grid.q + grid.q_len - 1, grid.k + grid.kv_len - 1
    return {"b": grid.b, "h": grid.h, "q0": grid.q, "q1": q1, "k0": grid.k, "k1": k1}


# -- a row without one ----------------------------------------------------------------------------


def first_empty_row(mask: Expr, grid: Grid, scope: Scope) -> tuple[int, int, int] | None:
    """The global (b, h, q) of a query that sees no key, None if every query sees one."""
    for s in range(len(grid.b)):
        one = replace(grid, b=grid.b[s : s + 1], h=grid.h[s : s + 1], q=grid.q[s : s + 1], k=grid.k[s : s + 1])
        try:
            row = _first_query(Rowwise(mask, one, scope, 0), scope, sees=False)
        except (Beyond, EvaluationError):
            row = _search_rows(mask, one, scope)
        if row is not None:
            return int(grid.b[s]), int(grid.h[s]), row
    return None


def _search_rows(mask: Expr, one: Grid, scope: Scope) -> int | None:
    """Search blocks of rows: one without keys ends the search, one whose queries all see a likely key is dropped."""
    at = {"b": int(one.b[0]), "h": int(one.h[0])}
    q0, k0 = int(one.q[0]), int(one.k[0])
    keys = (k0, k0 + one.kv_len - 1)
    if one.q_len * one.kv_len * steps(mask) <= _FEW:
        return _rows_without(mask, at, np.arange(q0, q0 + one.q_len), keys, scope)
    # under most masks every query sees one of these: the key at its position, the first, the last, the one before
    likely = [_at_key(mask, e, keys) for e in (Q, lit(keys[0]), lit(keys[1]), Q - 1)]
    stack = [(q0, q0 + one.q_len - 1)]
    while stack:
        first, last = stack.pop()
        env = {**at, "q0": first, "q1": last, "k0": keys[0], "k1": keys[1]}
        if _known(never(mask), env, scope, 1)[0]:
            return first
        if any(_known(always(e), env, scope, 1)[0] for e in likely):
            continue
        if last - first < _AT_ONCE:
            q = np.arange(first, last + 1)
            for e in likely:
                scope.spend(max(len(q), _CALL) * steps(e))
                q = q[~np.broadcast_to(scope.value(e, {**at, "q": q}), q.shape)]
            row = _rows_without(mask, at, q, keys, scope)
            if row is not None:
                return row
        else:
            middle = (first + last) // 2
            stack += [(middle + 1, last), (first, middle)]  # the earlier half is looked at first
    return None


def _at_key(mask: Expr, k: Expr, keys: tuple[int, int]) -> Expr:
    inside = conj(k >= keys[0], k <= keys[1]) if k.op != "lit" else TRUE
    return simplify(conj(inside, substitute(mask, {K: k})))


def _rows_without(mask: Expr, at: dict[str, int], q: Array, keys: tuple[int, int], scope: Scope) -> int | None:
    """The first of these queries that sees no key."""
    some = np.unique(np.linspace(*keys, _SAMPLES).astype(np.int64))
    scope.spend(max(len(q) * len(some), _CALL) * (steps(mask) + _EACH))
    seen = np.broadcast_to(scope.value(mask, {**at, "q": q[:, None], "k": some}), (len(q), len(some)))
    for row in q[~seen.any(axis=1)]:
        if _search(mask, {**at, "q0": int(row), "q1": int(row), "k0": keys[0], "k1": keys[1]}, scope) is None:
            return int(row)
    return None


_BATCH = 1 << 18
_TILE = 64  # steps for a tile itself


@memo(group="expressions")
def sees_itself(mask: Expr) -> bool:
    """Whether every query provably sees the key at its own position, as under most causal masks: no row is empty, then,
    where that key is part of the call.

    >>> from frisket.dsl.sugar import q, k
    >>> sees_itself((q >= k) & (q - k < 256))
    True
    """
    return simplify(substitute(mask, {K: Q})) is TRUE


def row_counts(mask: Expr, grid: Grid, scope: Scope, runs: Callable[[], Runs]) -> Array:
    """The number of keys each query sees, int64 [slices, q_len].

    Masks made of clauses that can be solved by row are counted without looking at pairs; others from their runs,
    looking only at PARTIAL tiles. Raises `BudgetError` when that takes more than `scope.work` steps.
    """
    try:
        return np.stack([r.counts() for r in _by_row(mask, grid, scope)])
    except (Beyond, EvaluationError, Spent):  # an end of a row may leave 64 bits where the mask itself does not
        return _from_runs(mask, grid, scope, runs())


def pair_counts(mask: Expr, grid: Grid, scope: Scope, runs: Callable[[], Runs]) -> Array:
    """The number of visible pairs of each slice, int64 [slices]: sums of `row_counts`, if possible in closed form."""
    try:
        return np.array([r.total() for r in _by_row(mask, grid, scope)], np.int64)
    except (Beyond, EvaluationError, Spent):
        return np.asarray(_from_runs(mask, grid, scope, runs()).sum(axis=1))


def _by_row(mask: Expr, grid: Grid, scope: Scope) -> Iterator[Rowwise]:
    for s in range(len(grid.b)):  # one at a time: what is kept of a slice is O(queries + keys)
        yield Rowwise(mask, grid, scope, s)


def no_row_empty(mask: Expr, grid: Grid, scope: Scope) -> bool | None:
    """Whether every query sees a key; None where the answer takes more work than `scope.work`."""
    try:
        return first_empty_row(mask, grid, scope) is None
    except Spent:
        return None


def _from_runs(mask: Expr, grid: Grid, scope: Scope, runs: Runs) -> Array:
    bq, bk = grid.block
    out = np.zeros((len(grid.b), grid.rows, bq), np.int64)
    full = runs.kind == FULL
    np.add.at(out, (runs.slice[full], runs.row[full]), ((runs.stop - runs.start)[full] * bk)[:, None])
    width = np.where(full, 0, runs.stop - runs.start)
    tiles = int(width.sum())
    if tiles * (bq * bk * steps(mask) + _TILE) > scope.work:
        raise BudgetError(
            f"counting the visible pairs would look at {tiles * bq * bk:,} elements of {tiles:,} partial tiles\n"
            "  ask for a smaller crop, or for the tile counts, which are exact without it"
        )
    index = np.repeat(np.arange(len(width)), width)
    column = runs.start[index] + np.arange(tiles) - np.repeat(np.cumsum(width) - width, width)
    step = max(1, _BATCH // (bq * bk))
    for at in range(0, tiles, step):
        s, r, c = (x[at : at + step] for x in (runs.slice[index], runs.row[index], column))
        q, k = r[:, None, None] * bq + np.arange(bq)[:, None], c[:, None, None] * bk + np.arange(bk)
        inside = (q < grid.q_len) & (k < grid.kv_len)
        b, h, q0, k0 = (x[s][:, None, None] for x in (grid.b, grid.h, grid.q, grid.k))
        env = {"b": b, "h": h, "q": q + q0, "k": k + k0}
        seen = np.broadcast_to(scope.value(mask, env), inside.shape) & inside
        np.add.at(out, (s, r), seen.sum(axis=2))
    return out.reshape(len(grid.b), -1)[:, : grid.q_len]


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
    node: Expr | None = field(default=None, repr=False, compare=False)

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
        return {name: x for name, x in asdict(self).items() if name != "node"}


def lookups(e: Expr, visible: Expr, grid: Grid, scope: Scope) -> tuple[Lookup, ...]:
    """Every lookup of a mask, or of a score mod at the positions `visible` shows, in the order of the text."""
    nodes = [n for n in walk(e) if n.op in _READS]
    scope.counters = _counters(e, scope)
    checked: dict[tuple[Expr, int], Lookup] = {}
    proved: set[Expr] = set()
    while True:
        context = contexts(e, proved)
        for node in nodes:
            for axis in range(len(node.args)):
                if (node, axis) not in checked or not checked[node, axis].proved:
                    checked[node, axis] = _checked(node, axis, conj(visible, context[node]), grid, scope)
        now = {n for n in nodes if all(checked[n, i].proved for i in range(len(n.args)))}
        if now == proved or now == set(nodes):
            return tuple(checked.values())
        proved = now  # more neighbours may guard: ask again


# what another operand of `and` and `or` says where an operand counts
_WHERE_COUNTS: dict[str, Callable[[Expr], Expr]] = {"and": lambda x: x, "or": negate}


def contexts(root: Expr, proved: Collection[Expr]) -> Mapping[Expr, Expr]:
    """The condition, for every node, under which its value counts: of operands whose lookups are all in `proved`."""

    def unknown(n: Expr, args: list[frozenset[Expr]]) -> frozenset[Expr]:
        inside = frozenset[Expr]().union(*args)
        if n.op == "reduce":
            return frozenset(x for x in inside if (x.op, x.name) != ("bound", n.name[1]))
        # the variable of an outer reduction has no value here, and no mask knows a score
        return inside | {n} if n.op == "bound" or n is SCORE or (n.op in _READS and n not in proved) else inside

    free = fold(root, unknown)
    conditions = {root: TRUE}
    for node in reversed(list(walk(root))):
        condition = conditions.get(node, FALSE)
        for i, a in enumerate(node.args):
            others = [x for j, x in enumerate(node.args) if j != i and not free[x]]
            guard = TRUE
            if node.op in _WHERE_COUNTS:
                guard = conj(*map(_WHERE_COUNTS[node.op], others))
            elif node.op == "where" and i and not free[node.args[0]]:
                guard = node.args[0] if i == 1 else negate(node.args[0])
            conditions[a] = disj(conditions.get(a, FALSE), conj(condition, guard))
    return conditions


def guards(e: Expr, short: Collection[Expr], unknown: Collection[str], grid: Grid, scope: Scope) -> Mapping[Expr, Expr]:
    """The `contexts` of an expression. A lookup guards others if it stays inside its table by its bounds and is not in
    `short`. It reads bare coordinates, or no `unknown` table."""

    scope.counters = _counters(e, scope)

    def inside(n: Expr) -> bool:
        bare = all(a.op == "var" and a.name in COORDINATES for a in n.args)
        known = not any(name in unknown for kind in free_names(n) for name in kind)
        return bare or (known and all(_reach(n, i, grid, scope)[-1] for i in range(len(n.args))))

    return contexts(e, {n for n in walk(e) if n.op in _READS and n not in short and inside(n)})


def _reach(node: Expr, axis: int, grid: Grid, scope: Scope) -> tuple[int | None, int | None, int, int, bool]:
    """The bounds of an index, the entries `[start, stop)` of its axis, and whether the bounds are inside."""
    table = scope.arrays[node.name]
    lo, hi = _range(node.args[axis], grid, scope)
    start, stop = (int(table[0]), int(table[-1])) if node.op == "segment" else (0, table.shape[axis])
    return lo, hi, start, stop, lo is not None and hi is not None and lo >= start and hi < stop


def _checked(node: Expr, axis: int, where: Expr, grid: Grid, scope: Scope) -> Lookup:
    index, size = node.args[axis], scope.arrays[node.name].shape[axis]
    lo, hi, start, stop, inside = _reach(node, axis, grid, scope)
    offsets = (start, stop) if node.op == "segment" else None
    lookup = Lookup(node.name, axis, _text(node), _text(index), lo, hi, size, True, offsets=offsets, node=node)
    if inside:
        return lookup
    if _opened(index, scope) is not index:  # a variable of a reduction is at no position
        return replace(lookup, proved=False)
    outside = conj(where, disj(index < start, index >= stop))
    try:
        # with numbers written in, more clauses can be solved
        witness = first_visible(simplify(literal(outside, scope.env)), grid, scope)
    except (Spent, EvaluationError):
        return replace(lookup, proved=False)
    if witness is None:
        return lookup
    value = int(scope.value(index, dict(zip("bhqk", witness, strict=True))))
    return replace(lookup, proved=False, witness=witness, value=value)


def _counters(e: Expr, scope: Scope) -> dict[Expr, Array]:
    """The values of the variables of reductions, each on a separate axis before those of batch and head. Where two
    reductions share a variable, those of both."""
    counters: dict[Expr, Array] = {}
    for node in find(e, "reduce"):
        values = np.arange(*(int(scope.value(a, {})) for a in node.args[:2]))
        variable = make("bound", (), node.name[1])
        counters[variable] = np.union1d(counters.get(variable, values), values).reshape(-1, *[1] * (4 + node.name[1]))
    return counters


def _opened(index: Expr, scope: Scope) -> Expr:
    """An index with parameters in place of the variables of reductions around it; those inside it stay."""
    return substitute(index, {n: param(f"bound {n.name}") for n in scope.counters})


def _range(index: Expr, grid: Grid, scope: Scope) -> tuple[int | None, int | None]:
    """The bounds of an index over the whole crop."""
    env = _corners(grid) | {f"bound {n.name}": values for n, values in scope.counters.items()}
    r = ends(simplify(literal(_opened(index, scope), scope.env)))
    try:
        lo = None if r.lo is None else int(np.min(scope.value(r.lo, env)))
        hi = None if r.hi is None else int(np.max(scope.value(r.hi, env)))
    except EvaluationError:
        return None, None
    return lo, hi


def _text(e: Expr) -> str:
    return show(e, {name for names in free_names(e) for name in names})
