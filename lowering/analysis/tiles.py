"""The coarse-to-fine layout: classifies rectangles of tiles, keeps certain ones, splits the rest, settles single tiles.

Work follows the border of the mask, not its area. What the Exprs of `questions` leave open on a single tile is
settled by witnesses (a true and a false point prove PARTIAL), then by looking at every element.

All of it is paid from one budget, in steps (`dsl.work`): one operator at one position or rectangle. Past it, what is
open is PARTIAL. Steps depend on the mask and the grid alone, so every machine finds the same layout.

Tiles are cut at periods of `// n` and `% n`. Inside a piece, rows, columns and frames of an image are plain numbers,
so ranges are exact that over the whole tile would be unbounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import EvaluationError
from frisket.dsl.evaluate import DTYPES, evaluate
from frisket.dsl.ir import TRUE, Expr, make, uses, var, walk
from frisket.dsl.work import steps
from frisket.grammar.memo import memo
from frisket.lowering.simplify import simplify
from frisket.lowering.simplify.affine import linear, write
from frisket.lowering.simplify.rules_boolean import negate

from .questions import always, mixed, never, some
from .solve import beyond, depends
from .table import Table, common_ids

Array = NDArray[Any]
EMPTY, PARTIAL, FULL = 0, 1, 2
WORK = 1 << 32  # steps of one analysis: a second or two
_BATCH = 1 << 18  # elements looked at in one go
_CHUNK = 1 << 15  # boxes classified in one go
_POINTS = 1 << 18  # witnesses looked at in one go
_FIRST = 64  # tiles whose points are looked at before those of others
_BOX = 250  # steps for a box itself: its corners, its parts, its place among the runs
_RUN = 500  # steps for adjacent tiles in one row, which boxes fall into
_COARSE = 4  # boxes of more than one tile may take one step in so many
_WORTH = 16  # steps that decide boxes and tiles count for one in so many: borders and images are not given up


@dataclass(frozen=True)
class Grid:
    """The tiles of a crop: `q_len` x `kv_len` tokens from global position (q, k), in tiles of `block`. One slice per
    (batch, head) that matters, with its own b, h, q and k origin."""

    q_len: int
    kv_len: int
    block: tuple[int, int]
    b: Array  # [slices] each
    h: Array
    q: Array
    k: Array

    @property
    def rows(self) -> int:
        return -(-self.q_len // self.block[0])

    @property
    def columns(self) -> int:
        return -(-self.kv_len // self.block[1])


def outside(grid: Grid) -> Array:
    """The tiles of each row that reach outside the lengths, where all positions are hidden: [rows, 2]."""
    bq, bk = grid.block
    out = np.zeros((len(grid.b), grid.rows, 2), np.int64)
    if grid.kv_len % bk:
        out[..., 0], out[..., 1] = grid.columns - 1, grid.columns
    if grid.q_len % bq:
        out[:, -1, 0], out[:, -1, 1] = 0, grid.columns
    return out.reshape(-1, 2)


class Spent(Exception):  # noqa: N818 (never leaves the package)
    """The budget of an analysis is spent and the answer is open."""


@dataclass
class Scope:
    """The values of sizes, parameters and tables during one analysis."""

    env: Mapping[str, Any]
    tables: Mapping[str, Table]
    work: int = WORK  # steps that may be taken
    spent: int = 0  # steps that were
    looked_at: int = 0  # elements
    settled: int = 0  # tiles decided element by element
    undecided: int = 0  # tiles left PARTIAL because the budget was spent
    arrays: dict[str, Array] = field(default_factory=dict)
    counters: dict[Expr, Array] = field(default_factory=dict)  # the values of variables of reductions

    def __post_init__(self) -> None:
        self.arrays = {n: t.array for n, t in self.tables.items()}

    def afford(self, cost: int) -> bool:
        """Take `cost` steps of the budget if so many are left; the result says whether they were."""
        if self.spent + cost > self.work:
            return False
        self.spent += cost
        return True

    def spend(self, cost: int) -> None:
        if not self.afford(cost):
            raise Spent

    def value(self, e: Expr, env: Mapping[str, Any]) -> Array:
        return evaluate(e, {**self.env, **env}, self.arrays, self.hooks())

    def values(self, parts: Sequence[Expr], env: Mapping[str, Any]) -> list[Array]:
        """The values of several Exprs at once, with shared parts computed once."""
        out: list[Array] = []

        def keep(node: Expr, *args: Array) -> Array:
            out.extend(args)
            return args[0]

        evaluate(make("answers", tuple(parts)), {**self.env, **env}, self.arrays, {**self.hooks(), "answers": keep})
        return out

    def hooks(self) -> dict[str, Any]:
        def ranging(kind: str) -> Any:
            def run(node: Expr, *args: Array) -> Array:
                half = len(args) // 2
                bound = self.tables[node.name].extreme(kind, args[:half], args[half:])
                return bound.astype(DTYPES[node.type], copy=False)  # as of the entries, which narrower ones would wrap

            return run

        def standing(how: str, end: str) -> Any:
            return lambda node, *args: getattr(self.tables[node.name], how)(end, args if how == "run" else args[0])

        ends = {f"{how}_{end}": standing(how, end) for how in ("run", "segment", "rank") for end in ("first", "last")}
        facts = {
            "is_sorted": lambda node: np.asarray(self.tables[node.name].sorted),
            "has_runs": lambda node: np.asarray(self._has_runs(node.name)),
        }
        return {"range_min": ranging("min"), "range_max": ranging("max"), **ends, **facts}

    def _has_runs(self, name: Any) -> bool:
        """Whether equal entries of a table are adjacent, those of any query that meets a condition."""
        if isinstance(name, str):
            return self.tables[name].has_runs
        table, condition = self.tables[name[0]], name[1]
        if table.has_runs:
            return True
        if {"b", "h"} & uses(condition) or not self.afford(table.array.size * steps(condition)):
            return False
        holds = np.broadcast_to(self.value(condition, {"q": np.arange(table.array.size)}), table.array.shape)
        values, runs = np.unique(table.array[table.starts], return_counts=True)
        met = table.array[table.starts[np.logical_or.reduceat(holds, table.starts)]]
        # keys need not meet the condition: a query sees every run of its entry
        return bool((runs[np.searchsorted(values, met)] == 1).all())


@dataclass(frozen=True)
class Boxes:
    """Disjoint boxes of tiles: slice, rows [r0, r1), columns [c0, c1), kind PARTIAL or FULL. Integers [n] each."""

    slice: Array
    r0: Array
    r1: Array
    c0: Array
    c1: Array
    kind: Array


def classify(mask: Expr, grid: Grid, scope: Scope, look: bool = True) -> Boxes:
    """The boxes of `mask` over `grid`; tiles not covered are EMPTY. `look=False`: no element of a tile is looked at."""
    n = len(grid.b)
    zero = np.zeros(n, np.int64)
    refined = _Refined(mask, grid, scope, look)
    refined.refine(np.stack([np.arange(n), zero, zero + grid.rows, zero, zero + grid.columns]), scope.work // _COARSE)
    return Boxes(*np.concatenate(refined.done, axis=1))


class _Refined:
    """The refinement of boxes of tiles until each is decided or the budget is spent; `done` has the decided ones."""

    def __init__(self, mask: Expr, grid: Grid, scope: Scope, look: bool) -> None:
        self.mask, self.grid, self.scope, self.look = mask, grid, scope, look
        self.questions = (always(mask), never(mask), mixed(mask))
        self.each = _BOX + steps(make("answers", self.questions))
        self.common = [
            (clause, TRUE if clause.rest is None else never(clause.rest))
            for clause in common_ids(mask, scope.arrays, grid, self._evaluate)
        ]
        self.done: list[Array] = [np.zeros((6, 0), np.int32)]

    def refine(self, boxes: Array, allowance: int) -> int:
        """Decide boxes, level by level while they are few. Many are decided part by part, each with its share of the
        steps, so that memory follows the answer and no part of the grid goes without. Gives the steps taken."""
        steps_taken = 0
        while n := boxes.shape[1]:
            if n > _CHUNK:
                parts = np.array_split(boxes, -(-n // _CHUNK), axis=1)
                for i, part in enumerate(parts):
                    steps_taken += self.refine(part, (allowance - steps_taken) // (len(parts) - i))
                break
            cost = n * self.each
            if steps_taken > allowance or not self.scope.afford(cost // _WORTH):
                self._leave(boxes)
                break
            rest = self._classified(boxes)
            used = cost * rest.shape[1] // n  # what decides boxes is worth its steps, and ends by itself
            self.scope.spent += used
            steps_taken += used + cost // _WORTH
            if 2 * used > cost and 2 * used > allowance - steps_taken:
                self._leave(rest)  # a part of what they would be split into could not be asked about
                break
            boxes = _split(rest)
        return steps_taken

    def _evaluate(self, condition: Expr, env: Mapping[str, Array]) -> Array | None:
        """The values of a condition, if the budget has room for them."""
        cost = math.prod(np.broadcast_shapes(*(x.shape for x in env.values()))) * steps(condition)
        try:
            return self.scope.value(condition, env) if self.scope.afford(cost) else None
        except EvaluationError:
            return None

    def _leave(self, boxes: Array) -> None:
        _, r0, r1, c0, c1 = boxes
        self.scope.undecided += int(((r1 - r0) * (c1 - c0)).sum())
        self._add(_joined(boxes), PARTIAL)

    def _add(self, boxes: Array, kind: int) -> None:
        self.scope.spent += _RUN * int((boxes[2] - boxes[1]).sum())
        # tiles and kinds fit 32 bits: half the memory of the answer
        self.done.append(np.concatenate([boxes, np.full((1, boxes.shape[1]), kind)]).astype(np.int32))

    def _classified(self, boxes: Array) -> Array:
        """Add the boxes that are certain and the single tiles to `done`, and return the boxes that are still open."""
        for clause, nothing_else in self.common:
            self.scope.spent += boxes.shape[1] * (clause.words + steps(nothing_else))
            empty = ~clause.shared(boxes)
            if nothing_else is not TRUE:
                empty &= _answers([nothing_else], _corners(self.grid, boxes), self.scope, boxes.shape[1])[0]
            boxes = boxes[:, ~empty]
        s, r0, r1, c0, c1 = boxes
        single = (r1 - r0 == 1) & (c1 - c0 == 1)
        yes, no, both = _answers(self.questions, {**_corners(self.grid, boxes), "single": single}, self.scope, len(s))
        # outside the lengths is False: a box with a cut tile is not FULL, and its cut tiles are narrower
        cut = cut_off(self.grid, boxes)
        full, partial = yes & ~cut & ~no, (both | (yes & cut & single)) & ~no
        self._add(boxes[:, full], FULL)
        self._add(boxes[:, partial], PARTIAL)
        open_ = ~(full | partial | no)
        if (single & open_).any():
            tiles = boxes[:, single & open_]
            self.done.append(_settle(self.mask, self.grid, tiles, self.scope, self.look).astype(np.int32))
        return boxes[:, open_ & ~single]


def cut_off(grid: Grid, boxes: Array) -> Array:
    """The boxes that hold tiles reaching outside the lengths."""
    _, _, r1, _, c1 = boxes
    last_row, last_column = (r1 == grid.rows), (c1 == grid.columns)
    return np.asarray((last_row & bool(grid.q_len % grid.block[0])) | (last_column & bool(grid.kv_len % grid.block[1])))


def _corners(grid: Grid, boxes: Array) -> dict[str, Array]:
    s, r0, r1, c0, c1 = boxes
    bq, bk = grid.block
    q_last, k_last = np.minimum(r1 * bq, grid.q_len) - 1, np.minimum(c1 * bk, grid.kv_len) - 1
    narrow = np.where(c1 == grid.columns, grid.kv_len - (grid.columns - 1) * bk, bk)
    b, h, q, k = (x[s] for x in (grid.b, grid.h, grid.q, grid.k))
    return {"b": b, "h": h, "q0": q + r0 * bq, "q1": q + q_last, "k0": k + c0 * bk, "k1": k + k_last, "tk": narrow}


def _answers(questions: Sequence[Expr], env: Mapping[str, Any], scope: Scope, n: int) -> list[Array]:
    try:
        return [np.broadcast_to(a, (n,)) for a in scope.values(questions, env)]
    except EvaluationError:
        # an end of some range leaves 64 bits, which the values themselves need not: nothing is known here
        return [np.zeros(n, bool)] * len(questions)


def _split(boxes: Array) -> Array:
    """Halve every box of more than one tile, along both axes where both are long; the parts of a box stay together."""
    for lo, hi in ((1, 2), (3, 4)):
        wide = boxes[hi] - boxes[lo] > 1
        owner = np.repeat(np.arange(boxes.shape[1]), 1 + wide)
        boxes = boxes[:, owner]
        second = np.append(False, owner[1:] == owner[:-1])
        first = np.append(second[1:], False)
        middle = boxes[lo] + (boxes[hi] - boxes[lo] + 1) // 2
        boxes[hi] = np.where(first, middle, boxes[hi])
        boxes[lo] = np.where(second, middle, boxes[lo])
    return boxes


def _joined(boxes: Array) -> Array:
    """The boxes after neighbours over the same rows are joined into one."""
    s, r0, r1, c0, c1 = boxes = boxes[:, np.lexsort((boxes[3], boxes[1], boxes[0]))]
    new = np.ones(boxes.shape[1], bool)
    new[1:] = (s[1:] != s[:-1]) | (r0[1:] != r0[:-1]) | (r1[1:] != r1[:-1]) | (c0[1:] != c1[:-1])
    heads = np.flatnonzero(new)
    return np.stack([s[heads], r0[heads], r1[heads], c0[heads], c1[np.append(heads[1:], len(s)) - 1]])


def _settle(mask: Expr, grid: Grid, tiles: Array, scope: Scope, look: bool) -> Array:
    """The kinds of single tiles, by witnesses and then by their elements."""
    kind = np.full(tiles.shape[1], -1)
    env = _corners(grid, tiles)
    bq, bk = grid.block
    each = steps(mask)
    _ask_points(mask, env, kind, _witnesses, 14, scope)
    if bq * bk > 1024:  # the points of a smaller tile would cost nearly as much as all of it
        _ask_points(mask, env, kind, _lattice, 256, scope)
        _ask_points(mask, env, kind, _lines, 5 * bk, scope)
    _ask_pieces(mask, env, kind, cut_off(grid, tiles), scope)
    open_ = np.flatnonzero(kind < 0)
    step = max(1, _BATCH // (bq * bk))
    for start in range(0, len(open_), step):
        mine = open_[start : start + step]
        if not look or not scope.afford(len(mine) * bq * bk * each):
            scope.undecided += len(open_) - start
            kind[open_[start:]] = PARTIAL
            break
        scope.looked_at += len(mine) * bq * bk
        scope.settled += len(mine)
        kind[mine] = _look(mask, grid, {n: v[mine] for n, v in env.items()}, scope)
    return np.concatenate([tiles, kind[None]])[:, kind != EMPTY]


def _ask_points(mask: Expr, env: Mapping[str, Array], kind: Array, points: Any, many: int, scope: Scope) -> None:
    """Mark tiles PARTIAL in which some of `many` points are visible and others hidden."""
    open_ = np.flatnonzero(kind < 0)
    first, step = _FIRST, max(1, _POINTS // many)
    for few in (open_[:first], *(open_[i : i + step] for i in range(first, len(open_), step))):
        if not len(few):
            break
        cost = len(few) * many * steps(mask)
        if cost > scope.work - scope.spent or not scope.afford(cost // _WORTH):
            break
        q, k = points(*(env[n][few] for n in ("q0", "q1", "k0", "k1")))
        b, h = (env[n][few].reshape(-1, *(1,) * (k.ndim - 1)) for n in "bh")
        seen = scope.value(mask, {"b": b, "h": h, "q": q, "k": k})
        seen = np.broadcast_to(seen, (len(few), *seen.shape[1:])).reshape(len(few), -1)
        both = seen.any(axis=1) & ~seen.all(axis=1)
        kind[few[both]] = PARTIAL
        scope.spent += cost * int(np.count_nonzero(~both)) // len(few)
        if len(few) == first and not both.any() and (points is _lattice or cuts(mask)):
            break  # tiles are alike: others will not be decided by these points, either


def _ask_pieces(mask: Expr, env: Mapping[str, Array], kind: Array, cut: Array, scope: Scope) -> None:
    """Settle tiles from certain answers for their pieces, between the period cuts of `//` and `%`."""
    open_ = np.flatnonzero(kind < 0)
    if not len(open_) or beyond(mask) or not cuts(mask):
        return
    questions = (always(mask), never(mask), some(mask), some(simplify(negate(mask))))
    each = steps(make("answers", questions))
    for mine in np.array_split(open_, -(-len(open_) // (_CHUNK >> 4))):
        owner, corners = pieces(mask, {n: v[mine] for n, v in env.items()}, scope.value)
        if not scope.afford(len(owner) * each // _WORTH):
            break
        fixed = {n: env[n][mine][owner] for n in ("b", "h")}
        # a piece may be narrower than its tile, and then holds fewer phases
        at = {**corners, **fixed, "tk": corners["k1"] - corners["k0"] + 1, "single": np.ones(len(owner), bool)}
        yes, no, seen, hidden = _answers(questions, at, scope, len(owner))
        heads = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
        full, empty = (np.logical_and.reduceat(x, heads) for x in (yes, no))
        both = np.logical_or.reduceat(seen | yes, heads) & (np.logical_or.reduceat(hidden | no, heads) | cut[mine])
        kind[mine] = np.where(empty, EMPTY, np.where(both, PARTIAL, np.where(full, FULL, -1)))
        scope.spent += len(owner) * each * int(np.count_nonzero(kind[mine] < 0)) // len(mine)


def _witnesses(*corners: Array) -> tuple[Array, Array]:
    """Sample points of each tile: corners, the diagonal's ends and a few strided points: [tiles, points]."""
    q0, q1, k0, k1 = (x[:, None] for x in corners)
    f = np.array([0.0, 0.0, 1.0, 1.0, 0.5, 0.38, 0.71, 0.13, 0.9, 0.62, 0.25, 0.81])
    g = np.array([0.0, 1.0, 0.0, 1.0, 0.5, 0.62, 0.25, 0.84, 0.4, 0.07, 0.93, 0.55])
    q = q0 + np.floor((q1 - q0) * f).astype(np.int64)
    k = k0 + np.floor((k1 - k0) * g).astype(np.int64)
    on = np.concatenate([np.maximum(q0, k0), np.minimum(q1, k1)], axis=1)
    return np.concatenate([q, np.clip(on, q0, q1)], axis=1), np.concatenate([k, np.clip(on, k0, k1)], axis=1)


def _lattice(*corners: Array) -> tuple[Array, Array]:
    """Sample points of each tile: 16 x 16, every row shifted: [tiles, 16, 16]."""
    i, j = np.arange(16)[:, None], np.arange(16)[None, :]
    q0, q1, k0, k1 = (x[:, None, None] for x in corners)
    # rows are shifted, or a stripe could pass between all points
    return q0 + (q1 - q0) * i // 15, k0 + ((k1 - k0) * j // 15 + 5 * i) % (k1 - k0 + 1)


def _lines(*corners: Array) -> tuple[Array, Array]:
    """Sample points of each tile: every key of five queries, for visible points that lie thin: [tiles, 5, keys]."""
    q0, q1, k0, k1 = (x[:, None, None] for x in corners)
    q = q0 + (q1 - q0) * np.array([0, 27, 50, 76, 100])[:, None] // 100
    return q, np.minimum(k0 + np.arange(int((k1 - k0).max()) + 1), k1)


def _look(mask: Expr, grid: Grid, env: Mapping[str, Array], scope: Scope) -> Array:
    bq, bk = grid.block
    q = env["q0"][:, None, None] + np.arange(bq)[:, None]
    k = env["k0"][:, None, None] + np.arange(bk)
    b, h, last_q, last_k = (env[n][:, None, None] for n in ("b", "h", "q1", "k1"))
    inside = (q <= last_q) & (k <= last_k)
    # positions past the lengths may leave 64 bits where those inside do not: the last one stands for them
    points = {"b": b, "h": h, "q": np.minimum(q, last_q), "k": np.minimum(k, last_k)}
    seen = scope.value(mask, points) & inside
    return np.where(seen.all(axis=(1, 2)), FULL, np.where(seen.any(axis=(1, 2)), PARTIAL, EMPTY))


_MOST = 64  # pieces a tile may be cut into
_EDGES = {"q": ("q0", "q1"), "k": ("k0", "k1")}


@memo(group="expressions")
def cuts(mask: Expr) -> tuple[tuple[str, Expr, Expr], ...]:
    """The (axis, shift, period) of cuts, where `(x + shift) // period` steps, for `//` and `%` of one coordinate."""
    periods: dict[tuple[str, Expr, Expr], None] = {}
    for node in walk(mask):
        if node.op in ("floordiv", "mod") and len(depends(node)) == 1 and not depends(node.args[1]):
            inner, period = node.args
            while inner.op == "floordiv" and not depends(inner.args[1]):
                inner, period = inner.args[0], inner.args[1] * period
            (axis,) = depends(node)
            form = linear(inner)
            if form.coefficient(var(axis)) == 1 and not depends(rest := write(form.without(var(axis)))):
                periods[axis, rest, period] = None
    return tuple(periods)


def pieces(mask: Expr, env: Mapping[str, Array], value: Callable[..., Array]) -> tuple[Array, dict[str, Array]]:
    """The pieces that tiles are cut into, as many as allowed: the tile of each piece, sorted, and the corners."""
    n = len(env["q0"])
    owner = np.arange(n)
    box = {name: env[name].copy() for name in ("q0", "q1", "k0", "k1")}
    fixed = {name: env[name] for name in ("b", "h")}
    for axis, shift, period in cuts(mask):
        lo, hi = _EDGES[axis]
        c, p = (np.broadcast_to(value(e, fixed), (n,)) for e in (shift, period))
        while True:
            room = np.bincount(owner, minlength=n)[owner] < _MOST
            # a period that is not positive cuts nothing, and may not divide
            mine, by = c[owner], np.maximum(p[owner], 1)
            at = ((box[lo] + mine) // by + 1) * by - mine  # the first position past lo where a new stretch begins
            split = np.flatnonzero((p[owner] > 1) & (at <= box[hi]) & room)
            if not len(split):
                break
            new = {name: x[split] for name, x in box.items()}
            new[lo] = at[split]
            box[hi][split] = at[split] - 1
            box = {name: np.concatenate([x, new[name]]) for name, x in box.items()}
            owner = np.concatenate([owner, owner[split]])
    order = np.argsort(owner, kind="stable")
    return owner[order], {name: x[order] for name, x in box.items()}
