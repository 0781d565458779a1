"""The part of a device plan that lengths and shapes decide, computed once for any contents of the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import LoweringError
from frisket.dsl.evaluate import decided
from frisket.dsl.ir import FALSE, TRUE, Expr, var, walk
from frisket.dsl.sugar import eq
from frisket.grammar.memo import memo
from frisket.lowering.analysis.facts import sees_itself
from frisket.lowering.analysis.layout import bind as written_out
from frisket.lowering.analysis.layout import grid_of, swap
from frisket.lowering.analysis.table import Table
from frisket.lowering.plan import LoopPlan, Origin, Sizes, make_plan, whole
from frisket.lowering.planner.planner import Planner, planner
from frisket.lowering.simplify import prepare, simplify
from frisket.lowering.simplify.ends import facts_of
from frisket.lowering.simplify.hoist import finite
from frisket.lowering.xla.tiles import int64_enabled
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.layouts.checks import check_reach
from frisket.runtime.machine.parameters import names_of
from frisket.runtime.masks.layout import Layout, make_layout
from frisket.runtime.masks.mask import Mask

from .compiled import holds, limits_of

Values = Mapping[str, Any]


@dataclass(frozen=True)
class PlanKey:
    """The key of a `FlatPlan`: everything that decides it but the contents of the device's tables."""

    program: CallProgram  # with the host's values
    given: tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape, dtype of the device's tables
    facts: frozenset[str]  # tables that are known to ascend along their last axis
    framework: str
    q_len: int
    kv_len: int
    batch: int
    heads: int
    origin: Origin  # vectors as tuples
    sizes: Sizes | None
    dropout: bool
    most: tuple[tuple[str, int], ...] = ()  # known magnitudes of the device's tables


@dataclass(frozen=True)
class StaticPlan:
    """The part of a `FlatPlan` that is the same for all contents of the device's tables: the `LoopPlan`, and the
    planner that makes the spans from the tables. `planner` is None where no table of the device decides the spans."""

    parts: tuple[Expr | None, Expr | None]  # mask and score mod, simplified
    rules: Counter[str]
    plan: LoopPlan
    planner: Planner | None
    transposed_planner: Callable[[], Planner]  # plans the rows of key tiles
    host: Mask  # the mask with the host's values, for a layout of the host
    at: tuple[NDArray[Any], ...]  # b, h, q, k where each slice begins
    slice_of: NDArray[Any]  # the slice of each batch entry and head
    full: Sizes  # of the whole problem
    held: dict[Any, Any] = field(default_factory=dict, compare=False)  # the host's arrays, copied to devices
    ready: dict[Any, Any] = field(default_factory=dict, compare=False)  # key of a call -> its `Ready`, for any step


def origin_of(key: PlanKey) -> Origin:
    b, h, q, k = (np.asarray(x) if isinstance(x, tuple) else x for x in key.origin)
    return b, h, q, k


@memo(16)  # the keys hold tables of the host
def static_plan(key: PlanKey) -> StaticPlan:
    """The `StaticPlan` of a key, from shapes and the host's values."""
    program, rules = key.program, Counter[str]()
    shapes = {n: np.broadcast_to(np.empty((), bool), shape) for n, shape, _ in key.given}
    known = {**program.tables, **shapes}
    both = (None if p is None else written_out(p.expr, known) for p in (program.mask, program.score))
    parts = [e if e is None else decided(e, program.scalars) for e in both]
    sane = {n: bool(np.isfinite(t).all()) for n, t in program.tables.items() if t.dtype.kind == "f"}
    origin = origin_of(key)
    _check_lengths_of_tables(key, parts, known, origin)
    seen, mod = prepare(parts[0], program.scored(parts[1]), sane, rules)
    full = key.sizes or whole(origin, (key.batch, key.heads, key.q_len, key.kv_len))
    host = Mask(TRUE if seen is None else seen)
    grid, slice_of = grid_of(host.expr, key.q_len, key.kv_len, key.batch, key.heads, (1, 1), origin)
    limits = limits_of(full, program.scalars, program.tables) | dict(key.most)
    q, k = (np.asarray(x) for x in origin[2:])
    own = bool(np.all(q >= k) and np.all(q + key.q_len <= k + key.kv_len))
    given = {n for n, *_ in key.given}
    tables = {n: Table(t) for n, t in program.tables.items()}
    facts = frozenset(
        (fact, name) for fact, name in facts_of(host.expr)
        if (fact == "segment" or name in key.facts if name in given else holds(tables, fact, name))
    )  # fmt: skip
    plan = make_plan(
        seen, mod, str(program), limits=limits, score_finite=mod is None or finite(mod, sane),
        rows_nonempty=seen is None or (own and sees_itself(seen)), dropout=key.dropout, facts=facts,
        **program.beside(known),
    )  # fmt: skip
    _check_segments((seen, mod), given)
    free = given & names_of(host.expr).keys()
    mine = {
        n: x for n, x in {**program.scalars, **program.tables}.items() if n in names_of(host.expr) and n not in free
    }

    def planned(mask: Expr) -> Planner:
        sorted_ = key.facts | {n for n, t in tables.items() if t.sorted}
        beyond = {n: 2.0 ** (31 + (dtype == "uint32")) - 1 for n, _, dtype in key.given if "int" in dtype}
        wide = key.framework == "torch" or int64_enabled()
        return planner(mask, frozenset(sorted_), {**beyond, **limits}, wide)

    made = planned(host.expr) if free else None
    columns = memo(1)(lambda: planned(simplify(swap(host.expr))))
    at = (grid.b, grid.h, grid.q, grid.k)
    return StaticPlan((seen, mod), rules, plan, made, columns, host.bind(**mine), at, slice_of.astype(np.int32), full)


def _check_lengths_of_tables(key: PlanKey, parts: list[Expr | None], known: Values, origin: Origin) -> None:
    """Check table lengths like `check_reach` on the host, where that can be known: a mask that reads a device's tables
    may show anything, but for the diagonal where it does whatever they hold."""
    mask = TRUE if parts[0] is None else parts[0]
    if names_of(mask).keys() & {n for n, *_ in key.given}:
        mask = eq(var("q"), var("k")) if sees_itself(mask) else FALSE
    lengths = key.batch, key.heads, key.q_len, key.kv_len
    real, shapes = key.program.tables, {n: known[n] for n, *_ in key.given}
    readers = [p for p in parts if p is not None]
    check_reach(mask, readers, key.program.scalars, real, lengths, origin, key.sizes, shapes)


@memo(16)
def host_layout(key: PlanKey, block: tuple[int, int]) -> Layout:
    """The layout that no table of a device decides."""
    host = static_plan(key).host
    return make_layout(host, key.q_len, key.kv_len, key.batch, key.heads, block, origin_of(key), key.sizes)


def _check_segments(parts: tuple[Expr | None, ...], given: set[str]) -> None:
    """Segments become a table as long as the positions, so they are known of positions alone."""
    for e in (p for p in parts if p is not None):
        for n in walk(e):
            if n.op == "segment" and n.name in given and n.args[0].op != "var":
                raise LoweringError(
                    f"`{n!r}` asks a traced table of offsets for something other than a position\n"
                    "  give the offsets as values of the host, or the segment of every position as a table"
                )
