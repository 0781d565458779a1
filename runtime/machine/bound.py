"""An Expr with values for some or all of its parameters: equality, renaming, pickle.

>>> from frisket.dsl.sugar import k, q
>>> BoundExpr(q - k < ir.param("w"), {"w": 4})
BoundExpr('q - k < w', w=4)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from frisket.dsl import ir
from frisket.dsl.errors import ParameterError, Span
from frisket.dsl.hints import misnamed, nearest
from frisket.dsl.ir import Expr
from frisket.dsl.library import definitions
from frisket.dsl.notebook import table
from frisket.dsl.program import Declared, Parsed, check_names, read
from frisket.dsl.show import show
from frisket.dsl.types import INT

from .parameters import Array, Number, as_value, check_needs, check_order, digest, fitted, learns, names_of, summary

Self = TypeVar("Self", bound="BoundExpr")


@dataclass(frozen=True)
class Origin:
    """The source of an expression; no part of its value."""

    source: str | None = None
    sites: tuple[tuple[Span, Expr], ...] = ()  # sub-expressions of the text, outermost first
    declared: Mapping[str, Declared] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    captured: Mapping[str, Any] = field(default_factory=dict)  # a function's own arrays, by the names of their copies
    needs: Mapping[Expr, str] = field(default_factory=dict)  # conditions on parameters, each with an advice

    @property
    def names(self) -> Origin:
        """Facts known of the names, for an expression made of this one."""
        return Origin(declared=self.declared, captured=self.captured, needs=self.needs)


class BoundExpr:
    """An Expr and the values of some or all of its parameters. Immutable."""

    what = "expression"
    expr: Expr
    params: Mapping[str, Any]
    origin: Origin

    def __init__(self, expr: Expr, params: Mapping[str, Any] | None = None, origin: Origin | None = None) -> None:
        self.expr = expr
        self.origin = origin or Origin()
        if learned := {n: x for n, x in (params or {}).items() if learns(x)}:
            self.origin = replace(self.origin, captured={**self.origin.captured, **learned})
        wanted = names_of(expr)
        check_names(wanted)
        given = {n: as_value(n, v) for n, v in (params or {}).items()}
        if unused := [n for n in given if n not in wanted]:
            near = nearest(unused[0], [n for n in wanted if n not in given])
            hint = f"; did you mean `{near}`?" if near else ""
            raise ParameterError(f"`{unused[0]}` is given but not used by `{self._brief()}`{hint}")
        self.params = MappingProxyType({n: fitted(n, v, *wanted[n]) for n, v in sorted(given.items())})
        if self.params:
            check_order(expr, [n for n, x in self.origin.declared.items() if x.fact == "sorted"], self.params)
            check_needs(self.origin.needs, self.params)

    @property
    def source(self) -> str:
        """The text as it was written; for expressions made in Python, as it prints."""
        return self.origin.source if self.origin.source is not None else str(self)

    @property
    def sites(self) -> tuple[tuple[Span, Expr], ...]:
        """Sub-expressions, each with its place in the source text."""
        return self.origin.sites

    @property
    def tables(self) -> dict[str, Array]:
        """The parameters that are arrays."""
        return {n: v for n, v in self.params.items() if isinstance(v, np.ndarray)}

    @property
    def scalars(self) -> dict[str, Number]:
        """The parameters that are numbers."""
        return {n: v for n, v in self.params.items() if not isinstance(v, np.ndarray)}

    @cached_property
    def unbound(self) -> tuple[str, ...]:
        """The parameters that have no value yet."""
        return tuple(n for n in names_of(self.expr) if n not in self.params)

    def bind(self: Self, **params: Any) -> Self:
        """An expression with more parameters bound; a new value replaces an old one."""
        if not params:
            return self
        kept = {n: x for n, x in self.origin.captured.items() if n not in params}
        return type(self)(self.expr, {**self.params, **params}, replace(self.origin, captured=kept))

    def require_bound(self) -> None:
        """Raise `ParameterError` unless every parameter has a value."""
        if not self.unbound:
            return
        name = self.unbound[0]
        if name in self.origin.captured:
            raise ParameterError(
                f"`{name}` is traced by jax.jit or another transform, and this takes values; attention takes the array "
                "as it is: frisket.compile(...), or frisket.attention, of the function that captures it"
            )
        near = nearest(name, definitions())
        hint = f" (did you mean `{near}`?)" if near else ""
        if named := misnamed(name):
            hint = f" ({named})"
        example = "<array>" if names_of(self.expr)[name][0] != 0 else "..."
        raise ParameterError(f"`{name}` has no value{hint}; give it: {name}={example}")

    def _brief(self) -> str:
        text = show(self.expr)
        return text if len(text) <= 60 else text[:57] + "..."

    def __str__(self) -> str:
        return show(self.expr, self.params)

    def __repr__(self) -> str:
        values = "".join(f", {n}={summary(v)}" for n, v in self.params.items())
        return f"{type(self).__name__}({str(self)!r}{values})"

    def _repr_html_(self) -> str:
        return table([(self.what, str(self)), *((n, summary(v)) for n, v in self.params.items())])

    @cached_property
    def _identity(self) -> tuple[Any, ...]:
        return self.expr, tuple((n, digest(v)) for n, v in self.params.items())

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, BoundExpr)
        return self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __reduce__(self) -> tuple[Any, ...]:
        o = self.origin
        rows = _flattened((self.expr, *(e for _, e in o.sites), *o.needs))
        origin = (o.source, tuple(s for s, _ in o.sites), dict(o.declared), o.notes, tuple(o.needs.values()))
        learned = {n: x for n, x in o.captured.items() if learns(x)}  # a copy of a model reads its own
        return _restored, (type(self), rows, {**self.params, **learned}, origin)

    def _combined(self: Self, other: Self, join: Callable[[Expr, Expr], Expr]) -> Self:
        """One expression made of both, with different bindings of one name kept apart."""
        left, right = separated(self, other)
        origin = Origin(
            declared={**right.origin.declared, **left.origin.declared},
            captured={**right.origin.captured, **left.origin.captured},
            needs={**right.origin.needs, **left.origin.needs},
        )
        return type(self)(join(left.expr, right.expr), {**right.params, **left.params}, origin)

    def at(self: Self, **coordinates: Any) -> Self:
        """An expression read at other positions: `m.at(q="q // 2", k="k // 2")`. Further keywords bind names of those
        texts."""
        moved: dict[Expr, Expr] = {}
        params = {**self.params, **{n: v for n, v in coordinates.items() if n not in ir.COORDINATES}}
        for name in ir.COORDINATES:
            if name in coordinates:
                moved[ir.var(name)] = position(name, coordinates[name], params)
        if coordinates and not moved:
            raise ParameterError("at() takes coordinates: b, h, q or k, each a text or an int")
        return type(self)(ir.substitute(self.expr, moved), params, self.origin.names)


def separated(left: Self, right: Self) -> tuple[Self, Self]:
    """Two expressions whose names mean one thing: a name bound differently on the right gets a number."""
    mine, theirs = names_of(left.expr), names_of(right.expr)
    taken = {*mine, *theirs}
    for name in sorted(mine.keys() & theirs.keys()):
        a, b = left.params.get(name), right.params.get(name)
        if mine[name] == theirs[name] and (a is None) == (b is None) and digest(a) == digest(b):
            continue
        number = 2
        while f"{name}_{number}" in taken:
            number += 1
        taken.add(f"{name}_{number}")
        if b is not None:
            right = renamed(right, name, f"{name}_{number}")
        elif a is not None:  # the name without a value keeps it: it is still to be given
            left = renamed(left, name, f"{name}_{number}")
        else:
            raise ParameterError(f"`{name}` has two types here and no value yet; rename or bind one")
    return left, right


def renamed(one: Self, old: str, new: str) -> Self:
    params, declared, captured = (
        {new if n == old else n: x for n, x in values.items()}
        for values in (one.params, one.origin.declared, one.origin.captured)
    )
    needs = {ir.renamed(e, {old: new}): advice for e, advice in one.origin.needs.items()}
    origin = Origin(declared=declared, captured=captured, needs=needs)
    return type(one)(ir.renamed(one.expr, {old: new}), params, origin)


def position(name: str, value: Any, params: Mapping[str, Any]) -> Expr:
    """A coordinate as `at` takes it: a text, whose names may have values among `params`, or an int."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return ir.lit(int(value))
    if not isinstance(value, str):
        raise ParameterError(f"{name}= takes a text or an int, not {type(value).__name__}")
    used = names_of(_lone(read(value, name=name)))
    known = {n: v for n, v in params.items() if n in used}
    e = _lone(read(value, name=name, params=known))
    if e.type is not INT:
        raise ParameterError(f"{name}= takes an Int, `{value}` is a {e.type}; use `//`, `floor` or `int`")
    return e


def _lone(found: Parsed) -> Expr:
    if found.expr is None:
        raise ParameterError("a coordinate is one expression, not a program")
    return found.expr


# -- pickle: nodes in a flat list, so that depth is no matter ----------------------------------------------


def _flattened(roots: tuple[Expr, ...]) -> tuple[list[tuple[Any, ...]], list[int]]:
    place: dict[Expr, int] = {}
    rows: list[tuple[Any, ...]] = []
    for node in ir.walk(*roots):
        place[node] = len(rows)
        rows.append((node.op, tuple(place[a] for a in node.args), node.name, node.type))
    return rows, [place[r] for r in roots]


def _restored(kind: type[BoundExpr], rows: Any, params: dict[str, Any], origin: tuple[Any, ...]) -> BoundExpr:
    nodes: list[Expr] = []
    for op, args, name, type_ in rows[0]:
        nodes.append(ir.make(op, tuple(nodes[i] for i in args), name, type_))
    root, *more = (nodes[i] for i in rows[1])
    source, spans, declared, notes, *advice = origin  # pickles of frisket 0.2 have no conditions
    sites, needs = more[: len(spans)], more[len(spans) :]
    conditions = dict(zip(needs, *advice, strict=True)) if advice else {}
    where = tuple(zip(spans, sites, strict=True))
    return kind(root, params, Origin(source, where, declared, notes, needs=conditions))
