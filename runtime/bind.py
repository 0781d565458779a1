"""From masks, score mods and parameters to what kernels take: a plan, spans, slots and tables."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import MaskSyntaxError, ParameterError, ShapeError
from frisket.dsl.ir import TRUE, Expr
from frisket.dsl.program import nearest, read
from frisket.dsl.types import FLOAT
from frisket.lowering.analysis.driver import bind as written_out
from frisket.lowering.analysis.facts import sees_itself
from frisket.lowering.plan import RATE, SEED, LoopPlan, Origin, Sizes, Spans, make_plan, whole
from frisket.lowering.simplify import prepare
from frisket.lowering.simplify.hoist import finite

from .bound_expr import separated
from .layout import Layout, make_layout
from .layout_checks import check_lengths, check_reach, place_of
from .mask import Mask, MaskLike, Program, ScoreLike, ScoreMod, mask, score
from .parameters import as_value, names_of, with_learned

Array = NDArray[Any]
CACHED = 256  # compilations kept
UNDRAWN = {SEED: 0, RATE: 0.0}  # every call has its own


@dataclass(frozen=True)
class Subject:
    """A mask and a score mod whose names mean one thing, with the values bound so far."""

    mask: Mask | None
    score: ScoreMod | None

    @property
    def parts(self) -> list[Mask | ScoreMod]:
        return [p for p in (self.mask, self.score) if p is not None]

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(n for p in self.parts for n in names_of(p.expr))

    @property
    def exprs(self) -> tuple[Expr | None, Expr | None]:
        return None if self.mask is None else self.mask.expr, None if self.score is None else self.score.expr

    @property
    def scalars(self) -> dict[str, Any]:
        return {n: x for p in self.parts for n, x in p.scalars.items()}

    @property
    def tables(self) -> dict[str, Array]:
        return {n: x for p in self.parts for n, x in p.tables.items()}

    @property
    def captured(self) -> dict[str, Any]:
        """The tensors and arrays themselves that functions captured, by the names of their copies."""
        return {n: x for p in self.parts for n, x in p.origin.captured.items()}

    @cached_property
    def learnable(self) -> frozenset[str]:
        """Float parameters that only the score mod reads: gradients flow to them."""
        if self.score is None:
            return frozenset()
        seen = set() if self.mask is None else names_of(self.mask.expr).keys()
        return frozenset(n for n, (_, kind) in names_of(self.score.expr).items() if kind is FLOAT and n not in seen)

    def bind(self, params: Mapping[str, Any]) -> Subject:
        """The same with more parameters bound; a name nobody uses is an error."""
        if not params:
            return self
        _check_used(params, self.names)
        values = with_learned({n: as_value(n, x) for n, x in params.items()}, params)
        bound = (
            None if p is None else p.bind(**{n: values[n] for n in values if _mentions(p, n)})
            for p in (self.mask, self.score)
        )
        return Subject(*bound)  # type: ignore[arg-type]

    def without(self, names: Iterable[str]) -> Subject:
        """The same with the values of `names` taken off."""
        off = set(names)
        parts = (
            p if p is None or not off & p.params.keys()
            else type(p)(p.expr, {n: x for n, x in p.params.items() if n not in off}, p.origin)
            for p in (self.mask, self.score)
        )  # fmt: skip
        return Subject(*parts)  # type: ignore[arg-type]

    def require_bound(self) -> None:
        for p in self.parts:
            p.require_bound()

    def __str__(self) -> str:
        lines = [] if self.mask is None else [f"mask = {self.mask}"]
        return "\n".join(lines if self.score is None else [*lines, f"score = {self.score}"])


def subject(what: MaskLike | Program | None, mod: ScoreLike | None, params: Mapping[str, Any]) -> Subject:
    """The mask and score mod of a call; each parameter goes where its name occurs."""
    if isinstance(what, Program):
        if mod is not None:
            raise ParameterError("a Program has its score mod already; give score= or the Program, not both")
        return joined(what.mask, what.score).bind(params)
    values = {n: as_value(n, x) for n, x in params.items()}
    mine, theirs = (_wanted(w, kind, values) for w, kind in ((what, "mask"), (mod, "score")))
    _check_used(params, {*mine, *theirs})
    return joined(
        None if what is None else mask(what, **with_learned(mine, params)),
        None if mod is None else score(mod, **with_learned(theirs, params)),
    )  # fmt: skip


def joined(m: Mask | None, s: ScoreMod | None) -> Subject:
    if m is not None and s is not None:
        m, s = separated(m, s)  # type: ignore[assignment]
    return Subject(m, s)


def _wanted(what: Any, kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those values whose names occur in a mask or score mod."""
    if what is None or not values:
        return {}
    if isinstance(what, str):
        try:
            found = read(what, kind=kind)
        except MaskSyntaxError:  # types may need the values: say what is wrong with all of them in hand
            return dict(values)
        e = found.mask if kind == "mask" else found.score
        e = e if e is not None else found.expr
        names = set(names_of(e)) if e is not None else set()
    else:
        one = mask(what) if kind == "mask" else score(what)
        names = set(names_of(one.expr))
    return {n: x for n, x in values.items() if n in names}


def _mentions(part: Mask | ScoreMod, name: str) -> bool:
    return name in names_of(part.expr)


def _check_used(params: Mapping[str, Any], names: Any) -> None:
    if unused := [n for n in params if n not in names]:
        near = nearest(unused[0], names)
        hint = f"; did you mean `{near}`?" if near else "; the parameters are " + (", ".join(sorted(names)) or "none")
        raise ParameterError(f"`{unused[0]}` is given and neither the mask nor the score mod uses it{hint}")


# -- compilation --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A subject laid out for one shape and tile size: what every backend runs."""

    subject: Subject
    simplified: tuple[Expr | None, Expr | None]
    layout: Layout
    plan: LoopPlan
    slots: Mapping[str, Any]
    tables: Mapping[str, Array]
    rules: Counter[str]

    @property
    def spans(self) -> Spans:
        return self.layout.spans


_works: OrderedDict[tuple[Any, ...], Work] = OrderedDict()


def work(
    what: Subject, q_len: int, kv_len: int, batch: int, heads: int, block: tuple[int, int],
    origin: Origin = (0, 0, 0, 0), sizes: Sizes | None = None, *, proofs: bool = False, dropout: bool = False,
) -> Work:  # fmt: skip
    """The compilation, kept by value: the mask and the contents of its tables, lengths,
    tiles, origin. `proofs` counts rows to drop the checks for empty ones, which pays in kernels only."""
    sizes = None if sizes is None else tuple(sizes)  # type: ignore[assignment]
    key = (what.mask, what.score, q_len, kv_len, batch, heads, block, place_of(origin), sizes, proofs, dropout)
    if key in _works:
        _works.move_to_end(key)
        return _works[key]
    check_lengths(q_len, kv_len, batch, heads, block, origin, sizes)
    what.require_bound()
    seen = TRUE if what.mask is None else what.mask.expr
    readers = [p.expr for p in what.parts]
    check_reach(seen, readers, what.scalars, what.tables, (batch, heads, q_len, kv_len), origin, sizes)
    made = _works[key] = _compiled(what, q_len, kv_len, batch, heads, block, origin, sizes, proofs, dropout)
    while len(_works) > CACHED:
        _works.popitem(last=False)
    return made


def _compiled(
    what: Subject, q_len: int, kv_len: int, batch: int, heads: int, block: tuple[int, int],
    origin: Origin, sizes: Sizes | None, proofs: bool, dropout: bool,
) -> Work:  # fmt: skip
    tables, scalars = what.tables, what.scalars
    sane = {n: bool(np.isfinite(t).all()) for n, t in tables.items() if t.dtype.kind == "f"}
    parts = [None if p is None else written_out(p.expr, tables) for p in (what.mask, what.score)]
    seen, mod, rules = _simplified(parts[0], parts[1], tuple(sane.items()))
    known = {**scalars, **tables}
    inside = Mask(TRUE if seen is None else seen)
    inside = inside.bind(**{n: known[n] for n in inside.unbound})
    layout = make_layout(inside, q_len, kv_len, batch, heads, block, origin, sizes)
    full = sizes or whole(origin, (batch, heads, q_len, kv_len))
    plan = make_plan(
        seen, mod, str(what), bounds=layout.analysis.bounds, score_finite=mod is None or finite(mod, sane),
        rows_nonempty=_no_empty_row(seen, layout, proofs),
        limits=limits_of(full, scalars, tables), dropout=dropout,
    )  # fmt: skip
    arrays = {n: np.asarray(t) for n, t in plan.table_values(tables).items()}
    return Work(what, (seen, mod), layout, plan, plan.slot_values({**scalars, **UNDRAWN}), arrays, rules)


@lru_cache(maxsize=256)  # a decoding loop asks at every position
def _simplified(
    seen: Expr | None, mod: Expr | None, sane: tuple[tuple[str, bool], ...]
) -> tuple[Expr | None, Expr | None, Counter[str]]:
    rules: Counter[str] = Counter()
    return *prepare(seen, mod, dict(sane), rules), rules


def _no_empty_row(seen: Expr | None, layout: Layout, count: bool) -> bool:
    if seen is None:
        return True
    q, k = (np.asarray(x) for x in layout.origin[2:])
    own = bool(np.all(q >= k) and np.all(q + layout.q_len <= k + layout.kv_len))  # keys at the queries' positions
    return (own and sees_itself(seen)) or bool(count and layout.facts.rows_nonempty)


def limits_of(full: Sizes, scalars: Mapping[str, Any], tables: Mapping[str, Array]) -> dict[str, float]:
    """The largest magnitude of every name, for the width of integers."""
    b, h, q, k = full
    limits: dict[str, float] = {"b": b, "h": h, "q": q, "k": k, "q0": q, "q1": q, "k0": k, "k1": k}
    limits |= {"B": b, "H": h, "Q_LEN": q, "KV_LEN": k}
    limits |= {n: abs(float(x)) for n, x in scalars.items()}
    limits |= {n: max(abs(int(t.max())), abs(int(t.min()))) for n, t in tables.items() if t.dtype.kind in "iu"}
    return limits


def check_tile(tile: Any) -> tuple[int, int] | None:
    """(queries, keys) of a tile, or `ShapeError`."""
    if tile is None:
        return None
    pair = (tile, tile) if isinstance(tile, int) else tuple(tile)
    if len(pair) != 2 or any(int(n) != n or n <= 0 for n in pair):
        raise ShapeError(f"tile is {tile}; tile sizes are two positive integers (queries, keys), in tokens")
    return int(pair[0]), int(pair[1])
