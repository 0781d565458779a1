"""Masks and score mods as values: an Expr with its parameters bound, an algebra, equality, pickle.

>>> m = mask("causal & window(w)", w=256)
>>> str(m), dict(m.params)
('causal & window(w)', {'w': 256})
>>> mask("causal") & ~mask("sinks(4)")
Mask('causal & ~sinks(4)')
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from frisket.dsl import ir
from frisket.dsl.errors import MaskSyntaxError, ParameterError
from frisket.dsl.from_python.closure import paths_to
from frisket.dsl.ir import Expr, names_of
from frisket.dsl.program import Parsed, check_names, read
from frisket.dsl.types import BOOL
from frisket.lowering.analysis.tiling import check_reach
from frisket.lowering.dense import check_room, coordinates, visible
from frisket.lowering.plan import Problem, Sizes
from frisket.lowering.simplify import ProgramExprs, prepare
from frisket.runtime.machine import parameters
from frisket.runtime.machine.caller import counting, warn_once

from . import layout
from .layout import Answer, Layout, make_layout

if TYPE_CHECKING:
    from frisket.lowering.analysis.decide import Lookup

Params = Mapping[str, Any] | None
MaskLike: TypeAlias = "str | Mask | Expr | Callable[..., Any]"
ScoreLike: TypeAlias = "str | ScoreMod | Expr | Callable[..., Any]"
WeightLike: TypeAlias = "str | Weight | Program | Expr | Callable[..., Any]"


class Mask(parameters.BoundExpr):
    """A mask: which keys a query may see, as an expression of positions, and its parameters. Made by `frisket.mask`.

    >>> m = mask("causal & window(w)", w=256) | "k < 4"
    >>> m
    Mask('causal & window(w) | k < 4', w=256)
    >>> m == mask(str(m), w=256), m.bind(w=64).params["w"], m.unbound
    (True, 64, ())
    >>> m.at(q="q + 8")  # of a block of queries that begins at position 8
    Mask('causal(q = q + 8) & window(w, q = q + 8) | k < 4', w=256)
    >>> m.require_bound(), m.check_tables(512, 512)  # nothing is raised: every parameter has a value
    (None, None)

    Masks, texts and functions are joined with `&`, `|`, `^` and `-`, and negated with `~`. A mask is immutable; it
    compares by its expression and values, hashes and pickles. `where` of a question is any of `batch`, `heads`,
    `origin` (b, h, q, k) and `sizes` (B, H, Q_LEN, KV_LEN), as for `layout`, and `budget`, the most steps before
    `Undecided` is raised. Lengths are in tokens.
    """

    what = "mask"

    def __init__(self, expr: Expr, params: Params = None, origin: parameters.Origin | None = None) -> None:
        if isinstance(expr, str):
            raise ParameterError(f"Mask takes an expression; write frisket.mask({expr!r}) for a text")
        if expr.type is not BOOL:
            raise ParameterError(f"a mask is a Bool, `{expr!r}` is {expr.type.with_article}")
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
        return self._as_shown(ir.build("not", self.shown), self.params, self.origin.names)

    def __bool__(self) -> bool:
        raise ParameterError("a mask has no truth value; write `&`, `|`, `~` for `and`, `or`, `not`")

    if not TYPE_CHECKING:  # type checkers know the methods that exist

        def __getattr__(self, name: str) -> Any:
            of_layout = f"; a layout has it: write mask.layout(q_len, kv_len).{name}" if hasattr(Layout, name) else ""
            raise AttributeError(f"a mask has no `{name}`{of_layout}", name=name, obj=self)

    @counting
    def dense(self, q_len: int, kv_len: int, batch: int = 1, heads: int = 1) -> NDArray[np.bool_]:
        """The whole mask, bool [batch, heads, q_len, kv_len], by the interpreter, to look at or to check others with.

        >>> mask("causal & window(2)").dense(3, 3)[0, 0].astype(int)
        array([[1, 0, 0],
               [1, 1, 0],
               [0, 1, 1]])

        Raises `ParameterError` for a parameter without a value, or a table read past its end where the rest is true,
        and `ShapeError` where the array exceeds the machine's memory.
        """
        problem = Problem.of(q_len, kv_len, batch, heads)
        self._check_tables(problem)
        check_room(problem.lengths, 1)
        env = {**coordinates(problem), **self.scalars}
        with parameters.locating(self):
            shown = visible(self.expr, env, self.tables, problem.lengths)
            return shown.copy()  # what is broadcast cannot be written to

    @counting
    def layout(
        self,
        q_len: int,
        kv_len: int,
        batch: int = 1,
        heads: int = 1,
        block: tuple[int, int] = (128, 128),
        origin: tuple[Any, Any, Any, Any] = (0, 0, 0, 0),
        sizes: Sizes | None = None,
        exact: bool = True,
        budget: int | None = None,
    ) -> Layout:
        """Lay out the tiles that hold visible positions: `frisket.Layout`.

        >>> mask("causal & window(256)").layout(1024, 1024).counts
        Counts(empty=43, partial=14, full=7)

        `block` is (queries, keys) of a tile, in tokens, or one number for both. `origin` (b, h, q, k) is where the
        layout begins in a problem of `sizes` (B, H, Q_LEN, KV_LEN), those of the layout unless given. With
        `exact=False`, tiles that only their elements could decide are partial. `budget` is how many steps the analysis
        may take, one operator at one position each (default 2**32, a second or two); past it tiles stay partial and
        `.exact` is False. Raises `ShapeError` for lengths, tiles or origins that are out of range, `ParameterError` for
        a parameter without a value.
        """
        with parameters.locating(self):
            return make_layout(self, Problem.of(q_len, kv_len, batch, heads, origin, sizes), block, exact, budget)

    @counting
    def visible_pairs(self, q_len: int, kv_len: int, **where: Any) -> int:
        """The exact number of visible (query, key) pairs of all batch entries and heads; a layout has it too. Raises
        `BudgetError` where counting would take too many steps.

        >>> mask("causal & window(256)").visible_pairs(1_000_000, 1_000_000)
        255967360
        """
        return layout.visible_pairs(self, _problem(q_len, kv_len, **where))

    @counting
    def implies(self, other: MaskLike, q_len: int, kv_len: int, **where: Any) -> Answer:
        """Whether `other` shows every position this mask shows; else `.witness` is one (b, h, q, k) it hides.

        >>> print(mask("causal").implies("window(256)", 4096, 4096))
        no: query 256 sees key 0 under the first mask and not under the second (b 0, h 0)

        Raises `Undecided` where that would take more looking than the `budget`.
        """
        return layout.implies(self, mask(other), *_asked(q_len, kv_len, **where))

    @counting
    def equivalent(self, other: MaskLike, q_len: int, kv_len: int, **where: Any) -> Answer:
        """Whether both show the same positions; else `.witness` is one (b, h, q, k) where they differ.

        >>> bool(mask("causal & window(256)").equivalent("sliding(255, 0)", 4096, 4096))
        True

        Raises `Undecided` where that would take more looking than the `budget`.
        """
        return layout.equivalent(self, mask(other), *_asked(q_len, kv_len, **where))

    @counting
    def is_empty(self, q_len: int, kv_len: int, **where: Any) -> Answer:
        """Whether nothing is visible; else `.witness` is a visible (b, h, q, k).

        >>> mask("q - k > 4096").is_empty(4096, 4096).holds
        True
        """
        return layout.is_empty(self, *_asked(q_len, kv_len, **where))

    @counting
    def empty_rows(self, q_len: int, kv_len: int, **where: Any) -> Answer:
        """Whether some query sees no key: truthy when there is one, `.witness` its (b, h, q, None).

        >>> mask("causal & k >= 3").empty_rows(4096, 4096).witness
        (0, 0, 0, None)
        """
        return layout.empty_rows(self, *_asked(q_len, kv_len, **where))

    def __add__(self, other: Any) -> Mask:
        raise ParameterError("masks are joined with `&`, `|`, `^` and `-`, and turned round with `~`; they do not add")

    @counting
    def check_tables(self, q_len: int, kv_len: int, batch: int = 1, heads: int = 1, sizes: Sizes | None = None) -> None:
        """Raise unless everything is bound, lengths are positive, and no visible position reads past the end of
        a table. `sizes` are B, H, Q_LEN, KV_LEN where positions end earlier."""
        self._check_tables(Problem.of(q_len, kv_len, batch, heads, sizes=sizes))

    def _check_tables(self, problem: Problem) -> None:
        self.require_bound()
        check_reach(self.expr, [self.expr], self.scalars, self.tables, problem)


def _asked(q_len: int, kv_len: int, budget: int = layout.BUDGET, **where: Any) -> tuple[Problem, int]:
    """The problem that a question is about, and the steps that its answer may take."""
    return _problem(q_len, kv_len, **where), budget


def _problem(q_len: int, kv_len: int, **where: Any) -> Problem:
    if other := where.keys() - {"batch", "heads", "origin", "sizes"}:
        text = f"`{min(other)}` is no keyword of a question about a mask: batch, heads, origin and sizes are\n"
        raise ParameterError(f"{text}  give the values of names to the mask: mask(..., {min(other)}=...)")
    return Problem.of(q_len, kv_len, **where)


class ScoreMod(parameters.BoundExpr):
    """How scores change before the softmax: a Float made of `score`, the scaled product of query and key, and of
    positions. Made by `frisket.score`.

    >>> s = score("score + bias[h, q - k] then softcap(c)", c=50.0)
    >>> s.unbound, dict(s.params)
    (('bias',), {'c': 50.0})
    >>> s.at(q="q + 8").bind(c=30.0)
    ScoreMod('score + bias[h, q + 8 - k] then softcap(c)', c=30.0)
    >>> s.require_bound()
    Traceback (most recent call last):
    frisket.dsl.errors.ParameterError: ...

    Score mods are composed, not added. A -inf branch hides: `where(q >= k, score, -inf)` is the mask `q >= k`.
    Immutable; it compares by its expression and values, hashes and pickles.
    """

    what = "score mod"

    def __init__(self, expr: Expr, params: Params = None, origin: parameters.Origin | None = None) -> None:
        if expr.type is BOOL:
            raise ParameterError(f"a score mod is a number, `{expr!r}` is a Bool")
        super().__init__(ir.to_float(expr), params, origin)
        self.shown = ir.to_float(self.shown)

    def then(self, other: ScoreLike) -> ScoreMod:
        """Give the result of this score mod to the next one as `score`.

        >>> score("score + slope * (k - q)", slope=0.5).then("softcap(50)")
        ScoreMod('score + slope * (k - q) then softcap(50)', slope=0.5)
        """
        second = score(other)
        if "score" not in ir.uses(second.expr):
            raise ParameterError(f"`{second._brief()}` does not use `score`, so nothing can be fed to it")
        return self._combined(second, ir.then)

    @counting
    def lookups(self, q_len: int, kv_len: int, mask: MaskLike | None = None, **where: Any) -> tuple[Lookup, ...]:
        """Every table lookup, and whether it stays inside its table wherever `mask` is true; `where` as for `Mask`.

        >>> print(score("score + t[q - k]", t=[0.0] * 64).lookups(256, 256, mask="causal & window(64)")[0])
        t[q - k] stays within 64 entries
        """
        return layout.score_lookups(self, _mask_or_none(mask), *_asked(q_len, kv_len, **where))

    def _no_arithmetic(self, other: Any) -> Any:
        text = "score mods compose with `then`: s.then(t) feeds the result of s to t as `score`; "
        raise ParameterError(f"{text}to add biases write one text, for example `score + a[h] + c[q, k]`")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_arithmetic


class _Number(parameters.BoundExpr):
    """A part of a program that is a number: a weight, or a divisor."""

    def __init__(self, expr: Expr, params: Params = None, origin: parameters.Origin | None = None) -> None:
        if expr.type is BOOL:
            raise ParameterError(f"a {self.what} is a number, `{expr!r}` is a Bool")
        super().__init__(ir.to_float(expr), params, origin)
        if self.shown.op == "float":  # a text is a number of any type: `count`
            (self.shown,) = self.shown.args


class Divide(_Number):
    """The divisor of rows: a Float of `total`, `count`, b, h, q, sizes and parameters."""

    what = "divide"


class Weight(_Number):
    """The weight of a visible pair, in place of the softmax: a Float of `score`, positions and parameters.

    `frisket.weight` makes a program of it and of its divisor.

    >>> w = weight("sigmoid(score + bias)").weight
    >>> w.unbound, w.bind(bias=-2.0)
    (('bias',), Weight('sigmoid(score + bias)', bias=-2.0))
    >>> weight("score * 0.9 ** (q - k)").weight.at(q="q + 8")
    Weight('score * 0.9 ** (q + 8 - k)')
    >>> w.require_bound()
    Traceback (most recent call last):
    frisket.dsl.errors.ParameterError: ...
    """

    what = "weight"


@dataclass(frozen=True)
class Program:
    """A mask, a score mod, and a weight with a divisor, as a `.frisket` file holds them; `compile` and `attention` take
    one in place of a mask.

    >>> import frisket as fk
    >>> fk.compile(fk.Program(mask=fk.mask("causal"), score=fk.score("softcap(50)")))
    Attention(mask = causal; score = softcap(50))
    """

    mask: Mask | None = None
    score: ScoreMod | None = None
    name: str = "program"
    weight: Weight | None = None
    divide: Divide | None = None

    @property
    def by_name(self) -> dict[str, Any]:
        """The parts of the program, by their names in a text."""
        parts = {"mask": self.mask, "score": self.score, "weight": self.weight, "divide": self.divide}
        return {n: p for n, p in parts.items() if p is not None}

    @property
    def exprs(self) -> ProgramExprs:
        """The expressions of the parts."""
        return ProgramExprs(**{n: p.expr for n, p in self.by_name.items()})

    def __str__(self) -> str:
        return "\n".join(f"{n} = {p}" for n, p in self.by_name.items())

    @property
    def hidden_by_score(self) -> Mask | None:
        """The mask that the score mod's -inf branches stand for; None where it hides nothing.

        >>> program("score = where(q - k < 4, score, -inf)").hidden_by_score
        Mask('q - k <= 3')
        """
        if self.score is None:
            return None
        # -inf in a table hides, too
        finite = {n: bool(np.isfinite(x).all()) for n, x in self.score.tables.items() if x.dtype.kind == "f"}
        hidden = prepare(ProgramExprs(score=self.score.expr), finite).mask
        return None if hidden is None else Mask(hidden, only(self.score.params, hidden))

    @property
    def visible(self) -> Mask | None:
        r"""The mask that attention reads: the mask, and what the score mod hides. None where both hide nothing.

        >>> program("mask = causal\nscore = where(q - k < 4, score, -inf)").visible
        Mask('causal & q - k <= 3')
        """
        hidden = self.hidden_by_score
        if hidden is None or self.mask is None:
            return hidden if self.mask is None else self.mask
        both = self.mask & hidden
        # only the mask has places in a text: a part of the score mod is shown without one
        both.origin = replace(both.origin, source=self.mask.origin.source, sites=self.mask.origin.sites)
        return both


# -- making them ------------------------------------------------------------------------------------


def mask(what: MaskLike, /, **params: Any) -> Mask:
    """A mask from text, a function, an Expr, or a mask to bind more of.

    >>> mask("causal & window(w)", w=256)
    Mask('causal & window(w)', w=256)
    >>> mask(lambda q, k: (q >= k) & (abs(q - k) < 256)) == mask("causal & window(256)")
    True

    A function takes b, h, q and k in this order, or some of them by these names in any order; a `mask_mod` of torch, a
    function of `jax.numpy`. `params` are numbers and arrays, of numpy, torch or JAX, for the names that the text does
    not define. Raises `MaskSyntaxError` with every problem of a text, `TraceError` with the line of a function,
    `ParameterError` for a value that does not fit its name.
    """
    return _built(Mask, what, params)  # type: ignore[no-any-return]


def _built(kind: Any, what: Any, params: Mapping[str, Any], again: bool = True) -> Any:
    """A part of a program from anything that stands for one. `again`: see `_from_python`."""
    name = NAMES[kind]
    if isinstance(what, kind):
        return what.bind(**params)
    kinds: Any = tuple(NAMES)
    if isinstance(what, kinds):
        hint = "; a mask is given as mask=..." if isinstance(what, Mask) else ""
        raise ParameterError(f"this is a {what.what}, not a {kind.what}{hint}")
    if isinstance(what, Expr):
        return kind(what, params)
    if isinstance(what, str):
        parts = _program(what, name, name, params).by_name
        if name not in parts:
            other = next(iter(parts.values())).what
            raise ParameterError(f"this text has a {other} and no {kind.what}; use frisket.{other.split()[0]}")
        return parts[name]
    return kind(*_from_python(what, name, params, again))


def _mask_or_none(what: MaskLike | None) -> Mask | None:
    return None if what is None else mask(what)


def score(what: ScoreLike, /, **params: Any) -> ScoreMod:
    """A score mod from text, a function with `score`, an Expr, or a score mod to bind more of.

    >>> score("softcap(c)", c=50.0)
    ScoreMod('softcap(c)', c=50.0)
    >>> score(lambda score, q, k: score + 0.5 * (k - q))
    ScoreMod('score + 0.5 * (k - q)')

    Tables and numbers that require a gradient are learned: `params`, or what a function captures. Raises as `mask`.
    """
    return _built(ScoreMod, what, params)  # type: ignore[no-any-return]


def weight(source: WeightLike, /, divide: str | Divide | Expr | None = None, **params: Any) -> Program:
    """A weight of pairs in place of the softmax, and a divisor of rows, as one program.

    >>> print(weight("sigmoid(score + bias)", bias=-3.0))
    weight = sigmoid(score + bias)
    >>> import frisket as fk
    >>> fk.compile("causal", weight=weight("relu2", divide="count"))
    Attention(mask = causal; weight = relu2; divide = count)

    Row i of the result is the sum of `weight * v[j]` over the keys j that it sees, divided by `divide` where that is
    not None. Rows that see no key, or whose divisor is 0, are 0.

    - `source`: a text, a function with `score`, an Expr, or a program with a weight. `score` is the score after the
      score mod. Positions and parameters are as in a score mod.
    - `divide`: a text of `total`, the sum of the row's weights before dropout; `count`, the number of keys that the row
      sees; b, h, q, sizes and parameters. It may be a line of the first text, `divide = ...`.
    - `params`: numbers and arrays for the names in both.

    `weight("exp(score)", divide="total")` is the softmax, and runs its kernels. Raises as `mask`.
    """
    for name, x, kinds in (("weight", source, Program | Weight | Expr | str), ("divide", divide, Divide | Expr | str)):
        if not isinstance(x, kinds) and not (callable(x) if name == "weight" else x is None):
            kind = "a text or a function" if name == "weight" else "a text"
            text = f"{name} is {kind}, not {type(x).__name__}; a parameter has another name, for example `{name}_`"
            if isinstance(x, int | float) or callable(x):
                text += f"\n  write what to compute: {name}=" + ('"count"' if callable(x) else f'"{x}"')
            raise ParameterError(text)
    if isinstance(source, Program):
        parts: dict[str, Any] = dict(source.by_name)
    elif isinstance(source, str):
        parts = _program(source, "weight", "weight", values_read(source, "weight", params)).by_name
    else:
        parts = {"weight": _built(Weight, source, values_read(source, "weight", params))}
    if divide is not None:
        parts["divide"] = _built(Divide, divide, values_read(divide, "divide", params))
    if "weight" not in parts:
        raise ParameterError("there is no weight here; write `weight = ...`")
    parts = {n: parts[n] for n in ("weight", "divide") if n in parts}  # as `mask` takes the mask of such a text
    if unread := [n for n in params if not any(n in names_of(p.expr) for p in parts.values())]:
        raise ParameterError(f"`{unread[0]}` is given, and neither weight nor divide uses it; remove it")
    return Program(name="weight", **{n: p.bind(**only(params, p.expr)) for n, p in parts.items()})


def values_read(source: Any, kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values whose names occur in a part of a program, in anything that stands for one."""
    if source is None or not values:
        return {}
    if isinstance(source, str):
        try:
            parsed = read(source, kind=kind)
        except MaskSyntaxError:  # types may need the values: parse again with all of them, for the error
            return dict(values)
        parts = [parsed.mask, parsed.score, parsed.weight, parsed.divide]
        exprs = [e for e in parts if e is not None] or [e for e in (parsed.expr,) if e is not None]
    elif isinstance(source, Program):
        exprs = [p.expr for p in source.by_name.values()]
    else:
        exprs = [_built(next(k for k, n in NAMES.items() if n == kind), source, {}).expr]
    return {n: x for e in exprs for n, x in only(values, e).items()}


def for_one_call(source: Any, kind: Any, params: Mapping[str, Any]) -> Any:
    """A part of a program for one call: the arrays of a function are not read again, because each call traces it."""
    return _built({n: k for k, n in NAMES.items()}[kind], source, params, again=False)


NAMES: dict[Any, str] = {Mask: "mask", ScoreMod: "score", Weight: "weight", Divide: "divide"}  # in a text


def _from_python(
    fn: Callable[..., Any], kind: Any, params: Mapping[str, Any], again: bool = True
) -> tuple[Expr, dict[str, Any], parameters.Origin]:
    """The Expr of a function, values for its parameters, and the arrays it captured. Those that JAX traces have no
    values: every call of the attention takes them as they are. Without `again`, no call reads the arrays once more."""
    from frisket.dsl.from_python.trace import trace  # a text needs nothing of it

    traced = trace(fn, "mask" if kind == "mask" else "score")  # a weight takes what a score mod takes
    captured = {n: x for n, x in traced.tables.items() if n not in params}
    values = {n: x for n, x in captured.items() if not parameters.traced(x)}
    if not again:
        return traced.expr, {**values, **params}, parameters.Origin(captured=captured, notes=traced.notes)
    at = paths_to(fn, [x for x in (*captured.values(), *traced.read) if not isinstance(x, np.ndarray)])
    paths = {n: at.get(id(x), ()) for n, x in captured.items() if id(x) in at or parameters.learns(x)}
    inside = tuple((x, at[id(x)]) for x in traced.read if id(x) in at)
    origin = parameters.Origin(captured=captured, notes=traced.notes, paths=paths, inside=inside)
    return traced.expr, {**values, **params}, origin


def load(path: str | Path, **params: Any) -> Program:
    """The program in a `.frisket` file: `load("gemma.frisket", w=4096)` has `.mask` and `.score`.

    >>> import pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp(), "local.frisket")
    >>> file.write_text("param w: int = 64\\nmask = causal & window(w)\\n") and load(file, w=256).mask
    Mask('causal & window(w)', w=256)

    `params` are values of its parameters, where those have no default or another is wanted. Raises
    `MaskSyntaxError` with every problem of the file, `ParameterError` where it cannot be read.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin with a byte order mark
    except (OSError, ValueError) as error:  # bytes that are no text, a NUL in the name
        raise ParameterError(f"cannot read {path}: {error}") from None
    return program(text, name=path.stem, **params)


def program(text: str, /, name: str = "program", **params: Any) -> Program:
    """The program in a text: definitions, `mask = ...`, `score = ...`, `weight = ...`, `divide = ...`."""
    return _program(text, None, name, params)


def _program(text: str, kind: Any, name: str, params: Mapping[str, Any]) -> Program:
    check_names(params)
    values = {n: parameters.as_value(n, v) for n, v in params.items()}
    parsed = read(text, kind=kind, params=values, name=name)  # values type the names of the text
    values = {**parsed.defaults, **values}  # a value replaces a default
    for text in parsed.changed:
        warn_once(text)
    lone = parsed.expr  # a program of one expression: its type says what it is
    m = parsed.mask if lone is None or lone.type is not BOOL else lone
    s = parsed.score if lone is None or lone.type is BOOL else lone

    def part(kind: Any, e: Expr | None, what: str) -> Any:
        if e is not None:
            return kind(e, parameters.with_learned(only(values, e), params), _origin(parsed, what))
        return None

    weight, divide = part(Weight, parsed.weight, "weight"), part(Divide, parsed.divide, "divide")
    return Program(part(Mask, m, "mask"), part(ScoreMod, s, "score"), name, weight, divide)


def only(values: Mapping[str, Any], e: Expr) -> dict[str, Any]:
    """Values that an Expr reads, by name."""
    names = names_of(e)
    return {n: x for n, x in values.items() if n in names}


def _origin(parsed: Parsed, kind: str) -> parameters.Origin:
    shown = parsed.shown.get(kind, parsed.shown.get("expr"))
    notes, sites = tuple(parsed.notes), tuple(parsed.sites)
    return parameters.Origin(parsed.source, sites, parsed.declared, notes, needs=parsed.needs, shown=shown)
