"""An Expr with values for some or all of its parameters: equality, renaming, pickle.

>>> from frisket.dsl.sugar import k, q
>>> BoundExpr(q - k < ir.param("w"), {"w": 4})
BoundExpr('q - k < w', w=4)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from frisket.dsl import ir
from frisket.dsl.errors import ParameterError, Span
from frisket.dsl.from_python.closure import Path, read_again
from frisket.dsl.hints import misnamed, nearest
from frisket.dsl.ir import Expr
from frisket.dsl.library import definitions
from frisket.dsl.notebook import table
from frisket.dsl.program import Declared, Parsed, check_names, read
from frisket.dsl.show import show
from frisket.dsl.types import INT

from .parameters import Array, Number, as_value, digest, fitted, learns, names_of, summary, traced, unsorted

Self = TypeVar("Self", bound="BoundExpr")


@dataclass(frozen=True)
class Origin:
    """The source of an expression; no part of its value."""

    source: str | None = None
    sites: tuple[tuple[Span, Expr], ...] = ()  # sub-expressions of the text, outermost first
    declared: Mapping[str, Declared] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    captured: Mapping[str, Any] = field(default_factory=dict)  # a function's own arrays, by the names of their copies
    paths: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)  # to those arrays; none to one out of reach
    inside: tuple[tuple[Any, tuple[Path, ...]], ...] = ()  # arrays whose values are in the expression

    @property
    def names(self) -> Origin:
        """Facts known of the names, for an expression made of this one."""
        return replace(self, source=None, sites=(), notes=())

    def renamed(self, names: Mapping[str, str]) -> Origin:
        """Facts known of those names that are keys, under their new names."""
        declared, captured, paths = (
            {names[n]: x for n, x in facts.items() if n in names}
            for facts in (self.declared, self.captured, self.paths)
        )
        return replace(self.names, declared=declared, captured=captured, paths=paths)

    def paths_in_copies(self, memo: Mapping[int, Any]) -> dict[str, tuple[Path, ...]]:
        """The paths from objects that are copied already, and those from modules of torch to learned tensors. A copy of
        a mask copies no other object of the user's; it has its own copies of arrays."""
        ways = {n: tuple(path.from_object() for path in paths) for n, paths in self.paths.items()}
        of_module = {n for n, x in self.captured.items() if learns(x)}
        return {
            n: paths for n, paths in ways.items()
            if all(id(path.root) in memo or (n in of_module and hasattr(path.root, "_parameters")) for path in paths)
        }  # fmt: skip

    def __or__(self, other: Origin) -> Origin:
        """The facts of both, for an expression made of two."""
        paths: dict[str, dict[Any, Path]] = {}
        for name, ways in (*self.paths.items(), *other.paths.items()):
            paths.setdefault(name, {}).update({(id(path.root), path.steps): path for path in ways})
        return Origin(
            declared={**self.declared, **other.declared}, captured={**self.captured, **other.captured},
            paths={n: tuple(ways.values()) for n, ways in paths.items()}, inside=self.inside + other.inside,
        )  # fmt: skip


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
        for n, declared in self.origin.declared.items():
            if declared.fact == "sorted" and n in self.params:
                x = self.params[n]
                if (x[..., 1:] < x[..., :-1]).any():  # a difference of unsigned Ints is never below 0
                    raise ParameterError(unsorted(n))

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
        rest = self.origin.renamed({n: n for n in self.origin.captured if n not in params})
        origin = replace(self.origin, captured=rest.captured, paths=rest.paths)
        return type(self)(self.expr, {**self.params, **params}, origin)

    def now(self: Self, but: Collection[str] = ()) -> Self:
        """An expression over the arrays that its function would read now: this one, unless an array was replaced.
        Arrays in `but` stay.

        >>> import torch, frisket as fk
        >>> def same(layer):
        ...     return lambda q, k: layer.doc[q] == layer.doc[k]
        >>> layer = torch.nn.Module()
        >>> layer.doc = torch.tensor([0, 0, 1])
        >>> mask = fk.mask(same(layer))
        >>> layer.doc = torch.tensor([0, 1, 1])
        >>> mask.dense(1, 3).astype(int), mask.now().dense(1, 3).astype(int)
        (array([[[[1, 1, 0]]]]), array([[[[1, 0, 0]]]]))
        """
        o = self.origin
        read = {n: read_again(n, paths) for n, paths in o.paths.items() if paths and n not in but}
        new = {n: x for n, x in read.items() if x is not o.captured[n]}
        inside = tuple((read_again("it", paths), paths) for _, paths in o.inside)
        for (old, paths), (x, _) in zip(o.inside, inside, strict=True):
            if x is not old and digest(as_value("it", x)) != digest(as_value("it", old)):
                raise ParameterError(part_of_expression(paths[0]))
        if not new and all(x is old for (x, _), (old, _) in zip(inside, o.inside, strict=True)):
            return self
        values = {n: x for n, x in {**self.params, **new}.items() if not traced(x)}
        return type(self)(self.expr, values, replace(o, captured={**o.captured, **new}, inside=inside))

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
        """Pickles hold copies of arrays. Learned tensors stay the ones of their module, and are read from it again."""
        o = self.origin
        rows = _flattened((self.expr, *(e for _, e in o.sites)))
        learned = {n: x for n, x in o.captured.items() if learns(x)}
        origin = (o.source, tuple(s for s, _ in o.sites), dict(o.declared), o.notes, o.paths_in_copies({}))
        return blank, (type(self),), (rows, {**self.params, **learned}, origin)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        rows, params, (source, spans, declared, notes, ways) = state
        root, *sites = _unflattened(rows)
        origin = Origin(source, tuple(zip(spans, sites, strict=True)), declared, notes, paths=ways)
        BoundExpr.__init__(self, root, params, origin)

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        o = self.origin
        paths = o.paths_in_copies(memo)
        captured = {n: x for n, x in o.captured.items() if n in paths or learns(x)}
        inside = [(x, ways) for x, ways in o.inside if all(id(path.from_object().root) in memo for path in ways)]
        arrays, paths, inside = deepcopy((captured, paths, inside), memo)
        origin = replace(o, captured=arrays, paths=paths, inside=tuple(inside))
        return type(self)(self.expr, {**self.params, **{n: x for n, x in arrays.items() if learns(x)}}, origin)

    def _combined(self: Self, other: Self, join: Callable[[Expr, Expr], Expr]) -> Self:
        """One expression made of both, with different bindings of one name kept apart."""
        left, right = separated(self, other)
        return type(self)(join(left.expr, right.expr), {**right.params, **left.params}, right.origin | left.origin)

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


def part_of_expression(path: Path) -> str:
    """The message for an array that was replaced and whose values a trace looked at."""
    return (
        f"`{path}` has been replaced since its function was traced, and its values are part of the traced expression\n"
        "  make the mask, score mod or attention again; lookups, `x[q]`, are read at every call"
    )


def separated(left: Self, right: Self) -> tuple[Self, Self]:
    """Two expressions whose names mean one thing: a name bound differently on the right gets a number."""
    mine, theirs = names_of(left.expr), names_of(right.expr)
    taken = {*mine, *theirs}
    for name in sorted(mine.keys() & theirs.keys()):
        a, b = left.params.get(name), right.params.get(name)
        x, y = left.origin.captured.get(name), right.origin.captured.get(name)
        apart = x is not y and any(learns(z) for z in (x, y))  # equal values now, others after a step of training
        apart = apart or (x is not y and name in left.origin.paths and name in right.origin.paths)
        if mine[name] == theirs[name] and (a is None) == (b is None) and digest(a) == digest(b) and not apart:
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
    names = {n: new if n == old else n for n in (*names_of(one.expr), *one.origin.declared)}
    params = {names[n]: x for n, x in one.params.items()}
    return type(one)(ir.renamed(one.expr, {old: new}), params, one.origin.renamed(names))


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


def _unflattened(rows: tuple[list[tuple[Any, ...]], list[int]]) -> list[Expr]:
    nodes: list[Expr] = []
    for op, args, name, type_ in rows[0]:
        nodes.append(ir.make(op, tuple(nodes[i] for i in args), name, type_))
    return [nodes[i] for i in rows[1]]


def blank(kind: type[Any]) -> Any:
    """An object whose state follows: a module that it reads may hold it, and is pickled between the two."""
    return object.__new__(kind)
