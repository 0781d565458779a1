"""Masks and score mods as values: an Expr with its parameters bound, an algebra, equality, pickle.

>>> m = mask("causal & window(w)", w=256)
>>> str(m), dict(m.params)
('q >= k & abs(q - k) < w', {'w': 256})
>>> mask("causal") & ~mask("sinks(4)")
Mask('q >= k & ~(k < 4)')
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from frisket.dsl import ir
from frisket.dsl.errors import ParameterError, ShapeError, Span
from frisket.dsl.ir import Expr
from frisket.dsl.program import Declared, Parsed, check_names, nearest, read, type_of
from frisket.dsl.show import show
from frisket.dsl.trace import trace
from frisket.dsl.types import BOOL, FLOAT, INT, Type

if TYPE_CHECKING:
    from .layout import Layout

Array = NDArray[Any]
Number = bool | int | float
Self = TypeVar("Self", bound="Bound")
MaskLike: TypeAlias = "str | Mask | Expr | Callable[..., Any]"
ScoreLike: TypeAlias = "str | ScoreMod | Expr | Callable[..., Any]"


@dataclass(frozen=True)
class Origin:
    """Where an expression came from; no part of its value."""

    source: str | None = None
    sites: tuple[tuple[Span, Expr], ...] = ()  # sub-expressions of the text, outermost first
    declared: Mapping[str, Declared] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Bound:
    """An Expr and the values of some or all of its parameters. Immutable."""

    what = "expression"
    expr: Expr
    params: Mapping[str, Any]
    origin: Origin

    def __init__(self, expr: Expr, params: Mapping[str, Any] | None = None, origin: Origin | None = None) -> None:
        self.expr = expr
        self.origin = origin or Origin()
        scalars, tables = names_of(expr)
        wanted: dict[str, tuple[int | None, Type]] = {n: (0, t) for n, t in scalars.items()} | dict(tables)
        check_names(dict.fromkeys(wanted))
        given = {n: as_value(n, v) for n, v in (params or {}).items()}
        if unused := [n for n in given if n not in wanted]:
            near = nearest(unused[0], [n for n in wanted if n not in given])
            hint = f"; did you mean `{near}`?" if near else ""
            raise ParameterError(f"`{unused[0]}` is given but not used by `{self._brief()}`{hint}")
        self.params = MappingProxyType({n: _fitted(n, v, *wanted[n]) for n, v in sorted(given.items())})

    @property
    def source(self) -> str:
        """The text as it was written; for expressions made in Python, as it prints."""
        return self.origin.source if self.origin.source is not None else str(self)

    @property
    def sites(self) -> tuple[tuple[Span, Expr], ...]:
        return self.origin.sites

    @property
    def tables(self) -> dict[str, Array]:
        return {n: v for n, v in self.params.items() if isinstance(v, np.ndarray)}

    @property
    def scalars(self) -> dict[str, Number]:
        return {n: v for n, v in self.params.items() if not isinstance(v, np.ndarray)}

    @cached_property
    def unbound(self) -> tuple[str, ...]:
        """The parameters that have no value yet."""
        scalars, tables = names_of(self.expr)
        return tuple(n for n in (*scalars, *tables) if n not in self.params)

    def bind(self: Self, **params: Any) -> Self:
        """The same with more parameters bound; a new value replaces an old one."""
        return type(self)(self.expr, {**self.params, **params}, self.origin) if params else self

    def require_bound(self) -> None:
        """Raise `ParameterError` unless every parameter has a value."""
        if not self.unbound:
            return
        from frisket.dsl.library import definitions

        name = self.unbound[0]
        near = nearest(name, definitions())
        hint = f" (did you mean `{near}`?)" if near else ""
        example = "..." if name in names_of(self.expr)[0] else "<array>"
        raise ParameterError(f"`{name}` has no value{hint}; give it: {name}={example}")

    def _brief(self) -> str:
        text = show(self.expr)
        return text if len(text) <= 60 else text[:57] + "..."

    def __str__(self) -> str:
        return show(self.expr, self.params)

    def __repr__(self) -> str:
        values = "".join(f", {n}={_summary(v)}" for n, v in self.params.items())
        return f"{type(self).__name__}({str(self)!r}{values})"

    @cached_property
    def _identity(self) -> tuple[Any, ...]:
        return self.expr, tuple((n, _digest(v)) for n, v in self.params.items())

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, Bound)
        return self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __reduce__(self) -> tuple[Any, ...]:
        o = self.origin
        rows = _flattened((self.expr, *(e for _, e in o.sites)))
        origin = (o.source, tuple(s for s, _ in o.sites), dict(o.declared), o.notes)
        return _restored, (type(self), rows, dict(self.params), origin)

    def _combined(self: Self, other: Self, join: Callable[[Expr, Expr], Expr]) -> Self:
        """Both expressions in one, with different bindings of one name kept apart."""
        left, right = separated(self, other)
        declared = {**right.origin.declared, **left.origin.declared}
        return type(self)(join(left.expr, right.expr), {**right.params, **left.params}, Origin(declared=declared))

    def at(self: Self, **coordinates: Any) -> Self:
        """The same read elsewhere: `m.at(q="q // 2", k="k // 2")`. Further keywords bind names of those texts."""
        moved: dict[Expr, Expr] = {}
        params = {**self.params, **{n: v for n, v in coordinates.items() if n not in ir.COORDINATES}}
        for name in ir.COORDINATES:
            if name in coordinates:
                moved[ir.var(name)] = _position(name, coordinates[name], params)
        if not moved:
            raise ParameterError("at() takes coordinates: b, h, q or k, each a text or an int")
        return type(self)(ir.substitute(self.expr, moved), params, Origin(declared=self.origin.declared))


class Mask(Bound):
    """Which keys a query may see. Made by `frisket.mask`; combine with `& | ^ ~ -`."""

    what = "mask"

    def __init__(self, expr: Expr, params: Mapping[str, Any] | None = None, origin: Origin | None = None) -> None:
        if expr.type is not BOOL:
            raise ParameterError(f"a mask is a Bool, `{expr!r}` is {'an' if expr.type is INT else 'a'} {expr.type}")
        if "score" in ir.uses(expr):
            raise ParameterError("a mask does not know `score`; use it in a score mod")
        super().__init__(expr, params, origin)

    # fmt: off
    def __and__(self, other: MaskLike) -> Mask: return self._combined(mask(other), lambda x, y: ir.build("and", x, y))
    def __or__(self, other: MaskLike) -> Mask: return self._combined(mask(other), lambda x, y: ir.build("or", x, y))
    def __xor__(self, other: MaskLike) -> Mask: return self._combined(mask(other), lambda x, y: ir.build("xor", x, y))
    def __sub__(self, other: MaskLike) -> Mask: return self & ~mask(other)
    def __rand__(self, other: MaskLike) -> Mask: return mask(other) & self
    def __ror__(self, other: MaskLike) -> Mask: return mask(other) | self
    def __rxor__(self, other: MaskLike) -> Mask: return mask(other) ^ self
    def __rsub__(self, other: MaskLike) -> Mask: return mask(other) - self
    # fmt: on

    def __invert__(self) -> Mask:
        return Mask(ir.build("not", self.expr), self.params, Origin(declared=self.origin.declared))

    def __bool__(self) -> bool:
        raise ParameterError("a mask has no truth value; write `&`, `|`, `~` for `and`, `or`, `not`")

    def dense(self, q_len: int, kv_len: int, batch: int = 1, heads: int = 1) -> NDArray[np.bool_]:
        """The whole mask, bool [batch, heads, q_len, kv_len]: for looking at, and for checking."""
        from frisket.lowering.dense import coordinates, visible

        self.check_tables(q_len, kv_len, batch, heads)
        shape = (batch, heads, q_len, kv_len)
        env = {**coordinates(*shape), **self.scalars}
        return visible(self.expr, env, self.tables, shape).copy()

    def layout(
        self,
        q_len: int,
        kv_len: int,
        batch: int = 1,
        heads: int = 1,
        block: tuple[int, int] = (128, 128),
        origin: tuple[Any, Any, Any, Any] = (0, 0, 0, 0),
        sizes: tuple[int, int, int, int] | None = None,
        exact: bool = True,
    ) -> Layout:
        """Which tiles hold visible positions: `frisket.Layout`."""
        from .layout import make_layout

        return make_layout(self, q_len, kv_len, batch, heads, block, origin, sizes, exact)

    def check_tables(
        self,
        q_len: int,
        kv_len: int,
        batch: int = 1,
        heads: int = 1,
        sizes: tuple[int, int, int, int] | None = None,
    ) -> None:
        """Raise unless everything is bound, lengths are positive, and no visible position at the far end of
        an axis reads past the end of a table. `sizes` are B, H, Q_LEN, KV_LEN where positions end earlier."""
        from frisket.lowering.dense import coordinates, visible

        self.require_bound()
        stops = {"b": batch, "h": heads, "q": q_len, "k": kv_len}
        for what, n in zip(("batch", "heads", "q_len", "kv_len"), stops.values(), strict=True):
            if isinstance(n, bool) or not isinstance(n, int | np.integer) or n <= 0:
                raise ShapeError(f"{what} is {n!r}; it must be a positive int")
        for coordinate, name, axis, have in short_tables(self.expr, self.tables, stops):
            crop = {**stops, coordinate: 1}
            first = dict.fromkeys(stops, 0) | {coordinate: stops[coordinate] - 1}
            shape = (crop["b"], crop["h"], crop["q"], crop["k"])
            start = (first["b"], first["h"], first["q"], first["k"])
            whole = sizes or (batch, heads, q_len, kv_len)
            env = {**coordinates(*shape, origin=start, sizes=whole), **self.scalars}
            if visible(self.expr, env, self.tables, shape).any():
                need = stops[coordinate]
                raise ParameterError(
                    f"table `{name}` has {have} entries on axis {axis} and is read at `{coordinate}` = 0..{need - 1}; "
                    f"give {need}, or hide what lies beyond: `{coordinate} < {have} & ...`"
                )


class ScoreMod(Bound):
    """How scores change before the softmax. Made by `frisket.score`; compose with `then`."""

    what = "score mod"

    def __init__(self, expr: Expr, params: Mapping[str, Any] | None = None, origin: Origin | None = None) -> None:
        if expr.type is BOOL:
            raise ParameterError(f"a score mod is a number, `{expr!r}` is a Bool")
        super().__init__(ir.to_float(expr), params, origin)

    def then(self, other: ScoreLike) -> ScoreMod:
        """Feed this one's result to the next as `score`: `alibi.then("softcap(50)")`."""
        second = score(other)
        if "score" not in ir.uses(second.expr):
            raise ParameterError(f"`{second._brief()}` does not use `score`, so nothing can be fed to it")
        return self._combined(second, lambda x, y: ir.substitute(y, {ir.SCORE: x}))

    def _no_arithmetic(self, other: Any) -> Any:
        raise ParameterError(
            "score mods compose with `then`: s.then(t) feeds the result of s to t as `score`; "
            "to add biases write one text, for example `score + a[h] + c[q, k]`"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_arithmetic


@dataclass(frozen=True)
class Program:
    """A mask and a score mod that belong together, as a `.frisket` file holds them."""

    mask: Mask | None = None
    score: ScoreMod | None = None
    name: str = "program"

    def __str__(self) -> str:
        lines = [] if self.mask is None else [f"mask = {self.mask}"]
        return "\n".join(lines if self.score is None else [*lines, f"score = {self.score}"])


# -- making them ------------------------------------------------------------------------------------


def mask(what: MaskLike, /, **params: Any) -> Mask:
    """`mask("causal & window(w)", w=256)`: from text, a Python function, an Expr, or a mask to bind more of."""
    if isinstance(what, Mask):
        return what.bind(**params)
    if isinstance(what, ScoreMod):
        raise ParameterError("this is a score mod, not a mask")
    if isinstance(what, Expr):
        return Mask(what, params)
    if isinstance(what, str):
        made = _program(what, "mask", "mask", params).mask
        if made is None:
            raise ParameterError("this text has a score mod and no mask; use frisket.score")
        return made
    traced = trace(what, "mask")
    return Mask(traced.expr, {**traced.tables, **params})


def score(what: ScoreLike, /, **params: Any) -> ScoreMod:
    """`score("softcap(c)", c=50.0)`: from text, a Python function with `score`, an Expr, or a score mod."""
    if isinstance(what, ScoreMod):
        return what.bind(**params)
    if isinstance(what, Mask):
        raise ParameterError("this is a mask, not a score mod; a mask is given as mask=...")
    if isinstance(what, Expr):
        return ScoreMod(what, params)
    if isinstance(what, str):
        made = _program(what, "score", "score", params).score
        if made is None:
            raise ParameterError("this text has a mask and no score mod; use frisket.mask")
        return made
    traced = trace(what, "score")
    return ScoreMod(traced.expr, {**traced.tables, **params})


def load(path: str | Path, **params: Any) -> Program:
    """The program in a `.frisket` file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"cannot read {path}: {error}") from None
    return program(text, name=path.stem, **params)


def program(text: str, /, name: str = "program", **params: Any) -> Program:
    """The program in a text: definitions, `mask = ...`, `score = ...`."""
    return _program(text, None, name, params)


def _program(text: str, kind: Any, name: str, params: Mapping[str, Any]) -> Program:
    check_names(params)
    values = {n: as_value(n, v) for n, v in params.items()}
    found = read(text, kind=kind, params=values, name=name)
    lone = found.expr  # a program of one expression: its type says what it is
    m = found.mask if lone is None or lone.type is not BOOL else lone
    s = found.score if lone is None or lone.type is BOOL else lone
    return Program(
        None if m is None else Mask(m, _used(m, found, values), _origin(found)),
        None if s is None else ScoreMod(s, _used(s, found, values), _origin(found)),
        name,
    )


def _used(e: Expr, found: Parsed, values: Mapping[str, Any]) -> dict[str, Any]:
    scalars, tables = names_of(e)
    return {n: v for n, v in {**found.defaults, **values}.items() if n in scalars or n in tables}


def _origin(found: Parsed) -> Origin:
    return Origin(found.source, tuple(found.sites), found.declared, tuple(found.notes))


# -- parameters -------------------------------------------------------------------------------------


def names_of(e: Expr) -> tuple[dict[str, Type], dict[str, tuple[int | None, Type]]]:
    """(scalars, tables) of an Expr; the rank is None where only the size of a table is used."""
    scalars, tables = ir.free_names(e)
    sizes: dict[str, tuple[int | None, Type]] = {n.name[0]: (None, INT) for n in ir.walk(e) if n.op == "extent"}
    return scalars, sizes | tables


def as_value(name: str, value: Any) -> Any:
    """A Python number or a read-only numpy array of our own, from numbers, lists, numpy, torch or JAX arrays."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
    elif not isinstance(value, np.ndarray) and (hasattr(value, "__array__") or isinstance(value, list | tuple)):
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise ParameterError(f"`{name}` is not an array: {error}") from None
    if isinstance(value, np.ndarray):
        if value.dtype.name == "bfloat16":
            value = value.astype(np.float32)
        if value.ndim and value.flags.writeable:
            value = value.copy()
            value.flags.writeable = False
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    rank, _ = type_of(name, value)
    if rank and value.size == 0:
        raise ParameterError(f"table `{name}` is empty")
    return value


def _fitted(name: str, value: Any, rank: int | None, type: Type) -> Any:
    """The value as the type its name has; an Int does for a Float, nothing else changes type."""
    have, kind = type_of(name, value)
    if rank is not None and have != rank:
        raise ParameterError(f"`{name}` is {_rank(rank)} in the text, the value is {_rank(have)}")
    if kind is type or rank is None:
        return value
    if (kind, type) != (INT, FLOAT):
        raise ParameterError(
            f"`{name}` is {type} in the text, the value is {kind}; declare it: "
            f"`param {name}: {kind.value.lower()}{'[' + ', '.join('_' * have) + ']' if have else ''}`"
        )
    if not have:
        return float(value)
    value = value.astype(np.float32)
    value.flags.writeable = False
    return value


def _rank(rank: int) -> str:
    return "a number" if rank == 0 else f"a table with {rank} {'axis' if rank == 1 else 'axes'}"


def separated(left: Self, right: Self) -> tuple[Self, Self]:
    """Both with names that mean one thing: a name bound differently on the right gets a number."""
    taken = {*_all_names(left), *_all_names(right)}
    for name in sorted(_all_names(left) & _all_names(right)):
        a, b = left.params.get(name), right.params.get(name)
        if _kind(left, name) == _kind(right, name) and (a is None) == (b is None) and _digest(a) == _digest(b):
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
    def change(e: Expr) -> Expr:
        if e.op in ("param", "lookup", "segment") and e.name == old:
            return ir.make(e.op, e.args, new, e.type)
        return ir.extent(new, e.name[1]) if e.op == "extent" and e.name[0] == old else e

    params = {new if n == old else n: v for n, v in one.params.items()}
    declared = {new if n == old else n: d for n, d in one.origin.declared.items()}
    return type(one)(ir.transform(one.expr, change), params, Origin(declared=declared))


def _all_names(one: Bound) -> set[str]:
    scalars, tables = names_of(one.expr)
    return {*scalars, *tables}


def _kind(one: Bound, name: str) -> Any:
    scalars, tables = names_of(one.expr)
    return scalars.get(name, tables.get(name))


def _position(name: str, value: Any, params: Mapping[str, Any]) -> Expr:
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return ir.lit(int(value))
    if not isinstance(value, str):
        raise ParameterError(f"{name}= takes a text or an int, not {type(value).__name__}")
    used = names_of(_lone(read(value, name=name)))
    known = {n: v for n, v in params.items() if n in used[0] or n in used[1]}
    e = _lone(read(value, name=name, params=known))
    if e.type is not INT:
        raise ParameterError(f"{name}= takes an Int, `{value}` is a {e.type}; use `//`, `floor` or `int`")
    return e


def _lone(found: Parsed) -> Expr:
    if found.expr is None:
        raise ParameterError("a coordinate is one expression, not a program")
    return found.expr


def short_tables(e: Expr, tables: Mapping[str, Array], sizes: Mapping[str, int]) -> list[tuple[str, str, int, int]]:
    """(coordinate, table, axis, its length) wherever a bare coordinate runs past the end of a table."""
    found = []
    for node in ir.walk(e):
        if node.op == "lookup":
            for axis, index in enumerate(node.args):
                have = tables[node.name].shape[axis]
                if index.op == "var" and sizes.get(index.name, 0) > have:
                    found.append((index.name, node.name, axis, have))
    return found


def _digest(value: Any) -> Any:
    """Something hashable that is equal for equal values; 1, 1.0 and True differ."""
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value).tobytes()
        return value.dtype.str, value.shape, hashlib.blake2b(data, digest_size=16).digest()
    return type(value), repr(value)


def _summary(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)


# -- pickle: nodes in a flat list, so that depth is no matter ----------------------------------------------


def _flattened(roots: tuple[Expr, ...]) -> tuple[list[tuple[Any, ...]], list[int]]:
    place: dict[Expr, int] = {}
    rows: list[tuple[Any, ...]] = []
    for node in ir.walk(*roots):
        place[node] = len(rows)
        rows.append((node.op, tuple(place[a] for a in node.args), node.name, node.type))
    return rows, [place[r] for r in roots]


def _restored(kind: type[Bound], rows: Any, params: dict[str, Any], origin: tuple[Any, ...]) -> Bound:
    nodes: list[Expr] = []
    for op, args, name, type_ in rows[0]:
        nodes.append(ir.make(op, tuple(nodes[i] for i in args), name, type_))
    root, *sites = (nodes[i] for i in rows[1])
    source, spans, declared, notes = origin
    return kind(root, params, Origin(source, tuple(zip(spans, sites, strict=True)), declared, notes))
