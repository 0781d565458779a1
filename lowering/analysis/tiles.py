"""Coarse to fine: classify rectangles of tiles, keep what is certain whole, split the rest, settle single tiles.

Work follows the border of the mask, not its area. What the Exprs of `questions` leave open on a single tile is
settled by witnesses (a true and a false point prove PARTIAL), then by looking at every element, up to a budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import EvaluationError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import Expr, make, uses
from frisket.dsl.types import BOOL

from ..simplify import simplify
from ..simplify.rules_boolean import negate
from .questions import always, mixed, never, some
from .seams import pieces, seams
from .table import Table

Array = NDArray[Any]
EMPTY, PARTIAL, FULL = 0, 1, 2
_BATCH = 1 << 20  # elements looked at in one go
_CHUNK = 1 << 15  # boxes classified in one go
_POINTS = 1 << 18  # witnesses looked at in one go
_BOXES = 1 << 22  # boxes classified before the rest is called PARTIAL as it is


@dataclass(frozen=True)
class Grid:
    """Tiles of a crop: `q_len` x `kv_len` tokens from global position (q, k), in tiles of `block`; one slice per
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
    """The tiles of each row that reach outside the lengths, where everything counts as hidden: [rows, 2]."""
    bq, bk = grid.block
    out = np.zeros((len(grid.b), grid.rows, 2), np.int64)
    if grid.kv_len % bk:
        out[..., 0], out[..., 1] = grid.columns - 1, grid.columns
    if grid.q_len % bq:
        out[:, -1, 0], out[:, -1, 1] = 0, grid.columns
    return out.reshape(-1, 2)


@dataclass
class Scope:
    """Values of sizes, parameters and tables during one analysis."""

    env: Mapping[str, Any]
    tables: Mapping[str, Table]
    work: int = 1 << 28  # elements that may be looked at
    looked_at: int = 0
    settled: int = 0  # tiles decided element by element
    boxes: int = 0  # classified
    undecided: int = 0  # tiles left PARTIAL because the budget was spent
    arrays: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arrays = {n: t.array for n, t in self.tables.items()}

    def value(self, e: Expr, env: Mapping[str, Any]) -> Array:
        return evaluate(e, {**self.env, **env}, self.arrays, self.hooks())

    def values(self, parts: Sequence[Expr], env: Mapping[str, Any]) -> list[Array]:
        """Several Exprs at once, sharing what they share."""
        out: list[Array] = []

        def keep(node: Expr, *args: Array) -> Array:
            out.extend(args)
            return args[0]

        root = make("answers", tuple(parts))
        evaluate(root, {**self.env, **env}, self.arrays, {**self.hooks(), "answers": keep})
        return out

    def hooks(self) -> dict[str, Any]:
        def ranging(kind: str) -> Any:
            def run(node: Expr, *args: Array) -> Array:
                half = len(args) // 2
                found = self.tables[node.name].extreme(kind, args[:half], args[half:])
                return found.astype(np.bool_ if node.type is BOOL else found.dtype)

            return run

        def standing(how: str, end: str) -> Any:
            return lambda node, *args: getattr(self.tables[node.name], how)(end, args if how == "run" else args[0])

        found = {f"{how}_{end}": standing(how, end) for how in ("run", "segment", "rank") for end in ("first", "last")}
        facts = {
            "is_sorted": lambda node: np.asarray(self.tables[node.name].sorted),
            "has_runs": lambda node: np.asarray(self._has_runs(node.name)),
        }
        return {"range_min": ranging("min"), "range_max": ranging("max"), **found, **facts}

    def _has_runs(self, name: Any) -> bool:
        """Whether equal entries of a table stand together, of those where a condition on the query holds."""
        if isinstance(name, str):
            return self.tables[name].has_runs
        table, asked = self.tables[name[0]], name[1]
        if table.has_runs:
            return True
        if {"b", "h"} & uses(asked):
            return False
        kept = np.broadcast_to(self.value(asked, {"q": np.arange(table.array.size)}), table.array.shape)
        starts = table.starts[np.logical_or.reduceat(kept, table.starts)]
        values = table.array[starts]
        return len(np.unique(values)) == len(values)


@dataclass(frozen=True)
class Boxes:
    """Disjoint boxes of tiles: slice, rows [r0, r1), columns [c0, c1), kind PARTIAL or FULL. Integers [n] each."""

    slice: Array
    r0: Array
    r1: Array
    c0: Array
    c1: Array
    kind: Array


def classify(mask: Expr, grid: Grid, scope: Scope) -> Boxes:
    """The boxes of `mask` over `grid`; every tile not covered is EMPTY."""
    questions = (always(mask), never(mask), mixed(mask))
    n = len(grid.b)
    zero = np.zeros(n, np.int64)
    waiting = [np.stack([np.arange(n), zero, zero + grid.rows, zero, zero + grid.columns])]
    done: list[Array] = []
    while waiting:
        live = waiting.pop()
        s, r0, r1, c0, c1 = live
        if live.shape[1] > _CHUNK:  # depth first, so that memory follows the answer
            waiting += np.array_split(live, -(-live.shape[1] // _CHUNK), axis=1)
            continue
        if scope.boxes + live.shape[1] > _BOXES:
            scope.undecided += int(((r1 - r0) * (c1 - c0)).sum())
            done.append(_kinds(live, PARTIAL))
            continue
        scope.boxes += live.shape[1]
        env = _corners(grid, live)
        single = (r1 - r0 == 1) & (c1 - c0 == 1)
        yes, no, both = _answers(questions, {**env, "single": single}, scope, len(s))
        # outside the lengths is False: a box with a cut tile is not FULL, and its cut tiles are narrower
        cut = cut_off(grid, live)
        full, partial = yes & ~cut & ~no, (both | (yes & cut & single)) & ~no
        done.append(_kinds(live[:, full], FULL))
        done.append(_kinds(live[:, partial], PARTIAL))
        rest = live[:, ~(full | partial | no)]
        single = (rest[2] - rest[1] == 1) & (rest[4] - rest[3] == 1)
        if single.any():
            done.append(_settle(mask, grid, rest[:, single], scope))
        if not single.all():
            waiting.append(_split(rest[:, ~single]))
    return Boxes(*np.concatenate(done, axis=1))


def cut_off(grid: Grid, live: Array) -> Array:
    """Which boxes hold tiles that reach outside the lengths."""
    _, _, r1, _, c1 = live
    last_row, last_column = (r1 == grid.rows), (c1 == grid.columns)
    return np.asarray((last_row & bool(grid.q_len % grid.block[0])) | (last_column & bool(grid.kv_len % grid.block[1])))


def _corners(grid: Grid, live: Array) -> dict[str, Array]:
    s, r0, r1, c0, c1 = live
    bq, bk = grid.block
    q_last, k_last = np.minimum(r1 * bq, grid.q_len) - 1, np.minimum(c1 * bk, grid.kv_len) - 1
    narrow = np.where(c1 == grid.columns, grid.kv_len - (grid.columns - 1) * bk, bk)
    return {
        "b": grid.b[s], "h": grid.h[s],
        "q0": grid.q[s] + r0 * bq, "q1": grid.q[s] + q_last,
        "k0": grid.k[s] + c0 * bk, "k1": grid.k[s] + k_last, "tk": narrow,
    }  # fmt: skip


def _answers(questions: Sequence[Expr], env: Mapping[str, Any], scope: Scope, n: int) -> list[Array]:
    try:
        return [np.broadcast_to(a, (n,)) for a in scope.values(questions, env)]
    except EvaluationError:
        # an end of some range leaves 64 bits, which the values themselves need not: nothing is known here
        return [np.zeros(n, bool)] * len(questions)


def _kinds(live: Array, kind: int) -> Array:
    return np.concatenate([live, np.full((1, live.shape[1]), kind)])


def _split(live: Array) -> Array:
    """Halve every box that has more than one tile, along both axes where both are long."""
    for lo, hi in ((1, 2), (3, 4)):
        width = live[hi] - live[lo]
        wide = width > 1
        middle = live[lo] + (width + 1) // 2
        left, right = live.copy(), live[:, wide].copy()
        left[hi] = np.where(wide, middle, live[hi])
        right[lo] = middle[wide]
        live = np.concatenate([left, right], axis=1)
    return live


def _settle(mask: Expr, grid: Grid, tiles: Array, scope: Scope) -> Array:
    """Kinds of single tiles, by witnesses and then by their elements."""
    kind = np.full(tiles.shape[1], -1)
    env = _corners(grid, tiles)
    bq, bk = grid.block
    for points, many in ((_witnesses, 14), (_lattice, 256), (_lines, 5 * bk)):
        open_ = np.flatnonzero(kind < 0)
        step = max(1, _POINTS // many)
        for few in (open_[i : i + step] for i in range(0, len(open_), step)):
            seen = scope.value(mask, points({n: v[few] for n, v in env.items()}))
            seen = np.broadcast_to(seen, (len(few), *seen.shape[1:])).reshape(len(few), -1)
            kind[few[seen.any(axis=1) & ~seen.all(axis=1)]] = PARTIAL
        if bq * bk <= 1024:
            break
    _ask_pieces(mask, env, kind, cut_off(grid, tiles), scope)
    open_ = np.flatnonzero(kind < 0)
    step = max(1, _BATCH // (bq * bk))
    for start in range(0, len(open_), step):
        mine = open_[start : start + step]
        if scope.looked_at + len(mine) * bq * bk > scope.work:
            scope.undecided += len(open_) - start
            kind[open_[start:]] = PARTIAL
            break
        scope.looked_at += len(mine) * bq * bk
        scope.settled += len(mine)
        kind[mine] = _look(mask, grid, {n: v[mine] for n, v in env.items()}, scope)
    return np.concatenate([tiles, kind[None]])[:, kind != EMPTY]


def _ask_pieces(mask: Expr, env: Mapping[str, Array], kind: Array, cut: Array, scope: Scope) -> None:
    """Settle tiles from what is certain of their pieces, between the seams of `//` and `%`."""
    questions = (always(mask), never(mask), some(mask), some(simplify(negate(mask))))
    open_ = np.flatnonzero(kind < 0)
    if not len(open_) or not seams(mask):
        return
    for mine in np.array_split(open_, -(-len(open_) // (_CHUNK >> 4))):
        owner, corners = pieces(mask, {n: v[mine] for n, v in env.items()}, scope.value)
        fixed = {n: env[n][mine][owner] for n in ("b", "h")}
        # a piece may be narrower than its tile, and then holds fewer phases
        at = {**corners, **fixed, "tk": corners["k1"] - corners["k0"] + 1, "single": np.ones(len(owner), bool)}
        yes, no, seen, hidden = _answers(questions, at, scope, len(owner))
        heads = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
        full, empty = (np.logical_and.reduceat(x, heads) for x in (yes, no))
        both = np.logical_or.reduceat(seen | yes, heads) & (np.logical_or.reduceat(hidden | no, heads) | cut[mine])
        kind[mine] = np.where(empty, EMPTY, np.where(both, PARTIAL, np.where(full, FULL, -1)))


def _witnesses(env: Mapping[str, Array]) -> dict[str, Array]:
    """Corners, the diagonal's ends and a few strided points of each tile: [tiles, points]."""
    q0, q1, k0, k1 = (env[n][:, None] for n in ("q0", "q1", "k0", "k1"))
    f = np.array([0.0, 0.0, 1.0, 1.0, 0.5, 0.38, 0.71, 0.13, 0.9, 0.62, 0.25, 0.81])
    g = np.array([0.0, 1.0, 0.0, 1.0, 0.5, 0.62, 0.25, 0.84, 0.4, 0.07, 0.93, 0.55])
    q = q0 + np.floor((q1 - q0) * f).astype(np.int64)
    k = k0 + np.floor((k1 - k0) * g).astype(np.int64)
    on = np.concatenate([np.maximum(q0, k0), np.minimum(q1, k1)], axis=1)
    q = np.concatenate([q, np.clip(on, q0, q1)], axis=1)
    k = np.concatenate([k, np.clip(on, k0, k1)], axis=1)
    return {"b": env["b"][:, None], "h": env["h"][:, None], "q": q, "k": k}


def _lattice(env: Mapping[str, Array]) -> dict[str, Array]:
    """16 x 16 points over each tile, every row of them shifted: [tiles, 16, 16]."""
    i, j = np.arange(16)[:, None], np.arange(16)[None, :]
    q0, q1, k0, k1 = (env[n][:, None, None] for n in ("q0", "q1", "k0", "k1"))
    q = q0 + (q1 - q0) * i // 15
    k = k0 + ((k1 - k0) * j // 15 + 5 * i) % (k1 - k0 + 1)
    return {"b": env["b"][:, None, None], "h": env["h"][:, None, None], "q": q, "k": k}


def _lines(env: Mapping[str, Array]) -> dict[str, Array]:
    """Every key of five queries of each tile, for visible points that lie thin: [tiles, 5, keys]."""
    q0, q1, k0, k1 = (env[n][:, None, None] for n in ("q0", "q1", "k0", "k1"))
    q = q0 + (q1 - q0) * np.array([0, 27, 50, 76, 100])[:, None] // 100
    k = np.minimum(k0 + np.arange(int((env["k1"] - env["k0"]).max()) + 1), k1)
    return {"b": env["b"][:, None, None], "h": env["h"][:, None, None], "q": q, "k": k}


def _look(mask: Expr, grid: Grid, env: Mapping[str, Array], scope: Scope) -> Array:
    bq, bk = grid.block
    q = env["q0"][:, None, None] + np.arange(bq)[:, None]
    k = env["k0"][:, None, None] + np.arange(bk)
    last_q, last_k = env["q1"][:, None, None], env["k1"][:, None, None]
    inside = (q <= last_q) & (k <= last_k)
    points = {
        "b": env["b"][:, None, None], "h": env["h"][:, None, None],
        "q": np.minimum(q, last_q), "k": np.minimum(k, last_k),
    }  # fmt: skip
    seen = scope.value(mask, points) & inside
    return np.where(seen.all(axis=(1, 2)), FULL, np.where(seen.any(axis=(1, 2)), PARTIAL, EMPTY))
