"""CallProgram: the mask and the score mod of one attention, and their values; the same at other positions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import combinations, count
from operator import or_
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import CALLED, ParameterError, keyword
from frisket.dsl.ir import COORDINATES, SCORE, TOTAL, Expr, build, names_of, param, renamed, substitute, uses, var, walk
from frisket.dsl.operators import LEAVES
from frisket.dsl.program import ROOTS, check_names
from frisket.dsl.types import FLOAT
from frisket.grammar.memo import own_state
from frisket.lowering.analysis.layout import bind as written_out
from frisket.lowering.plan import Geometry, survives
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.machine import parameters
from frisket.runtime.machine.caller import warn_once
from frisket.runtime.masks.layout import Layout
from frisket.runtime.masks.mask import (
    Divide,
    Mask,
    MaskLike,
    Program,
    ScoreLike,
    ScoreMod,
    Weight,
    WeightLike,
    for_one_call,
    mask,
    only,
    score,
    values_read,
)
from frisket.runtime.masks.mask import program as program_text
from frisket.runtime.masks.mask import weight as weight_program

from .arrays import LAYOUTS, Arrays, Stored

Array = NDArray[Any]
SOFTMAX = build("exp", SCORE)  # a weight, divided by its total
PART = re.compile(rf"^\s*({'|'.join(ROOTS)})\s*=(?!=)", re.M)


@dataclass(frozen=True)
class CallProgram:
    """A mask and a score mod whose names mean one thing, with the values bound so far."""

    mask: Mask | None
    score: ScoreMod | None
    # positions in the problem of the arrays' q and k, or b, h, q and k: mask and score mod read these positions
    # already, and dropout draws at them
    places: tuple[parameters.BoundExpr, ...] | None = None
    stored: Stored | None = None  # how keys and values are stored
    unwritten: bool = False  # keys that no query sees may hold anything, see `LoopPlan`
    weight: Weight | None = None  # None: rows are softmaxes
    divide: Divide | None = None
    double: bool = False  # of calls in float64, in which smaller factors of a weight count
    layout_type: ClassVar[type[Layout]] = Layout  # layouts of plans have pictures and exports
    # what every call reads of the fields above: made once, as the fields never change.
    # the mask, the score mod, the weight and the divisor, None for those that are not there
    every_part: tuple[Any, Any, Any, Any] = field(init=False, repr=False, compare=False)
    parts: tuple[parameters.BoundExpr, ...] = field(init=False, repr=False, compare=False)
    exprs: ProgramExprs = field(init=False, repr=False, compare=False)  # as written, without calls of the library
    scalars: Mapping[str, Any] = field(init=False, repr=False, compare=False)
    tables: Mapping[str, Array] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        every_part = self.mask, self.score, self.weight, self.divide
        parts = tuple(p for p in (*every_part, *(self.places or ())) if p is not None)
        exprs = ProgramExprs(*(None if p is None else p.expr for p in every_part))
        values = {n: x for p in parts for n, x in p.params.items()}
        tables = {n: x for n, x in values.items() if isinstance(x, np.ndarray)}
        scalars = {n: x for n, x in values.items() if n not in tables}
        vars(self).update(every_part=every_part, parts=parts, exprs=exprs, scalars=scalars, tables=tables)

    def __getstate__(self) -> dict[str, Any]:
        return own_state(self)  # what cached properties hold is large, and computed again

    @property
    def reading(self) -> list[Expr]:
        """The expressions that read tables, as written."""
        return [p.expr for p in self.parts]

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(n for p in self.parts for n in names_of(p.expr))

    @property
    def positions(self) -> tuple[Expr, ...] | None:
        """The problem's positions at the arrays' q and k, or b, h, q and k; None where both are equal."""
        return None if self.places is None else tuple(p.expr for p in self.places)

    @property
    def origin(self) -> parameters.Origin:
        """Facts known of the names of all parts."""
        return reduce(or_, (p.origin for p in self.parts), parameters.Origin())

    @property
    def captured(self) -> dict[str, Any]:
        """The tensors and arrays themselves that functions captured, by the names of their copies."""
        return {n: x for p in self.parts for n, x in p.origin.captured.items()}

    @property
    def rereads(self) -> bool:
        """Whether functions captured arrays that are read again at every call."""
        return any(p.origin.paths or p.origin.inside for p in self.parts)

    def fixed(self) -> CallProgram:
        """A program over the captured arrays as they are now, which are not read again."""
        if not self.rereads:
            return self
        now = self.changed(lambda p: p.now())
        return now.changed(lambda p: type(p)(p.expr, p.params, replace(p.origin, paths={}, inside=())))

    @cached_property
    def learnable(self) -> frozenset[str]:
        """Float parameters that the mask does not read: gradients flow to them."""
        seen = set() if self.mask is None else names_of(self.mask.expr).keys()  # a mask has no gradient
        read = [(n, kind) for p in self.every_part[1:] if p is not None for n, (_, kind) in names_of(p.expr).items()]
        return frozenset(n for n, kind in read if kind is FLOAT and n not in seen)

    @cached_property
    def offsets(self) -> dict[str, str]:
        """The tables that hold offsets of segments, as `offsets_of` tells them."""
        return {n: of for p in self.parts for n, of in parameters.offsets_of(p.expr).items()}

    def bind(self, params: Mapping[str, Any]) -> CallProgram:
        """A program with more parameters bound; an unused name is an error."""
        if not params:
            return self
        check_used(params, self.names)
        values = parameters.with_learned({n: parameters.as_value(n, x) for n, x in params.items()}, params)
        return self.changed(lambda p: p.bind(**only(values, p.expr)))  # a part refuses names that it does not read

    def without(self, names: Iterable[str]) -> CallProgram:
        """A program with the values of `names` taken off."""
        off = set(names)

        def bare(p: parameters.BoundExpr) -> parameters.BoundExpr:
            values = {n: x for n, x in p.params.items() if n not in off}
            # a part without these names is the same object: its cached properties stay
            return p if len(values) == len(p.params) else type(p)(p.expr, values, p.origin)

        return self.changed(bare)

    def without_captures(self) -> CallProgram:
        """A program that does not hold the arrays that functions captured: memos and plans outlive a call."""
        if not any(p.origin.captured or p.origin.inside for p in self.parts):
            return self
        return self.changed(lambda p: type(p)(p.expr, p.params, replace(p.origin, captured={}, paths={}, inside=())))

    def scaled(self, scale: Any = None) -> tuple[CallProgram, str]:
        """A program whose score mod multiplies `score` first, and the name of the factor: a traced or learned scalar,
        or None for one that calls give."""
        name = next(n for i in count(1) if (n := f"softmax_scale_{i}") not in self.names)
        params = {} if scale is None else {name: scale}
        origin = parameters.Origin(captured=params)  # a tracer has no value to bind
        first = ScoreMod(SCORE * param(name, FLOAT), params if parameters.learns(scale) else None, origin)
        # a score mod that reads no score, such as a bias alone, has no factor to take
        reads = self.score is not None and "score" in uses(self.score.expr)
        return replace(self, score=first.then(self.score) if reads and self.score else self.score or first), name

    def changed(self, change: Callable[[Any], Any]) -> CallProgram:
        """A program with every part changed."""
        mask, score, weight, divide = (None if p is None else change(p) for p in self.every_part)
        places = None if self.places is None else tuple(change(p) for p in self.places)
        return replace(self, mask=mask, score=score, places=places, weight=weight, divide=divide)

    def stored_as(self, how: Stored | None) -> CallProgram:
        """A program for keys and values stored in another way."""
        return self if how == self.stored else replace(self, stored=how)

    def scored(self, exprs: ProgramExprs) -> ProgramExprs:
        """The expressions with the score mod as kernels compute it."""
        return replace(exprs, score=self.stored.scored(exprs.score)) if self.stored else exprs

    def plan_arguments(self, tables: Mapping[str, Any], dropout: bool) -> dict[str, Any]:
        """The arguments of `make_plan` besides expressions and facts."""
        at = None if self.places is None else tuple(written_out(p.expr, tables) for p in self.places)
        stored = {"value_scale": self.stored.value_scale, "pages": self.stored.pages} if self.stored else {}
        return {"keep_mask": survives(at) if dropout else None, "unwritten": self.unwritten, **stored}

    def require_bound(self) -> None:
        for p in self.parts:
            if p.unbound:
                p.require_bound()  # raises

    def __str__(self) -> str:
        return str(self.named)

    @property
    def named(self) -> Program:
        return Program(self.mask, self.score, weight=self.weight, divide=self.divide)

    @property
    def expanded(self) -> str:
        """The text in which calls of the library are written out: equal programs have one text."""
        return "\n".join(f"{p.what.split()[0]} = {p.expanded}" for p in self.every_part if p is not None)


def program_of(
    source: MaskLike | Program | None,
    mod: ScoreLike | None,
    params: Mapping[str, Any],
    called: Sequence[str] = CALLED,
    once: bool = False,
    weight: WeightLike | None = None,
    divide: Any = None,
) -> CallProgram:
    """The program of a call; each parameter goes where its name occurs. `called` are the keywords of the call, to
    suggest one for a name that occurs nowhere. With `once` functions are traced for one call alone."""
    if isinstance(source, Program):
        have = {"score", *source.by_name}
        twice = ("score", mod), ("weight", weight), ("divide", divide)
        if name := next((n for n, x in twice if x is not None and n in have), ""):
            what = "score mod" if name == "score" else name
            raise ParameterError(f"a Program has its {what} already; give {name}= or the Program, not both")
        weights = source.weight or weight, source.divide or divide
        return joined(source.mask, source.score, *_weights(*weights, {})).bind(params)
    values = {n: parameters.as_value(n, x) for n, x in params.items()}
    for text, parts in ((mod, ("score",)), (weight, ("weight", "divide")), (divide, ("divide",))):
        lines = PART.findall(text) if isinstance(text, str) and "=" in text else []
        if others := [n for n in lines if n not in parts]:
            message = f"the text of the {'score mod' if text is mod else parts[0]} has a line `{others[0]} = ...`\n"
            raise ParameterError(f"{message}  give the whole text in place of the mask")
    if isinstance(source, str) and PART.search(source):
        whole = program_text(source, **parameters.with_learned(values_read(source, "mask", values), params))
        if whole.by_name.keys() - {"mask"}:
            return program_of(whole, mod, params, called, once, weight, divide)

    def part(what: Any, kind: Any) -> Any:
        if what is None:
            return None
        read_by = parameters.with_learned(values_read(what, kind, values), params)
        return for_one_call(what, kind, read_by) if once else {"mask": mask, "score": score}[kind](what, **read_by)

    read_by = values_read(weight, "weight", values) | values_read(divide, "divide", values)
    weights = _weights(weight, divide, parameters.with_learned(read_by, params))
    program = joined(part(source, "mask"), part(mod, "score"), *weights)
    check_used(params, program.names, called)
    return program


def _weights(weight: Any, divide: Any, params: Mapping[str, Any]) -> tuple[Weight | None, Divide | None]:
    """The weight and the divisor of a call."""
    if weight is None:
        if divide is not None:
            raise ParameterError('there is a `divide` and no weight; give weight=, such as weight="exp(score)"')
        return None, None
    program = weight_program(weight, divide, **params)
    return program.weight, program.divide


def joined(
    m: Mask | None, s: ScoreMod | None, weight: Weight | None = None, divide: Divide | None = None
) -> CallProgram:
    """A program of these parts. A name that means different values in two of them becomes two names."""
    if weight is not None and weight.expr is SOFTMAX and divide is not None and divide.expr is TOTAL:
        weight = divide = None
    parts: list[Any] = [m, s, weight, divide]
    for i, j in combinations(range(len(parts)), 2):
        if parts[i] is not None and parts[j] is not None:
            parts[i], parts[j] = parameters.separated(parts[i], parts[j])
    m, s, weight, divide = parts
    return CallProgram(m, s, weight=weight, divide=divide)


def check_used(params: Iterable[str], names: Any, called: Sequence[str] = CALLED) -> None:
    """Raise `ParameterError` for a keyword that is none of `called` and that nothing reads."""
    if unused := [n for n in params if n not in names]:
        check_names([n for n in unused if n in LEAVES])  # reserved names: the error says so
        hint = keyword(unused[0], list(names), called) or "the parameters are " + (", ".join(sorted(names)) or "none")
        raise ParameterError(f"`{unused[0]}` is given and no mask, score mod or weight uses it; {hint}")


def remap_positions(program: CallProgram, coordinates: Mapping[str, Any]) -> CallProgram:
    """A program read at other positions: texts or numbers for some of b, h, q and k, and values of names in the texts.
    A name without a value there is that of the mask or the score mod."""
    texts = {n: x for n, x in coordinates.items() if n in COORDINATES}
    if coordinates and not texts:
        raise ParameterError("at() takes coordinates: b, h, q or k, each a text or an int")
    defaults, used = {**program.scalars, **program.tables}, set(program.names)

    bindings = {n: parameters.as_value(n, x) for n, x in coordinates.items() if n not in texts}
    positions = {n: parameters.position(n, x, {**defaults, **bindings}) for n, x in texts.items()}
    if unused := [n for n in bindings if not any(n in names_of(e) for e in positions.values())]:
        raise ParameterError(f"`{unused[0]}` is given and no coordinate uses it")
    others: dict[str, str] = {}  # names that mean something else already
    for n in bindings:
        if n in used and (n not in defaults or parameters.digest(defaults[n]) != parameters.digest(bindings[n])):
            others[n] = next(new for i in count(2) if (new := f"{n}_{i}") not in used | bindings.keys())
            used.add(others[n])
    values = {**defaults, **{others.get(n, n): x for n, x in bindings.items()}}
    change = {var(n): renamed(e, others) for n, e in positions.items()}
    origin = program.origin

    def put(p: Any) -> Any:
        e = substitute(p.expr, change)
        names = names_of(e)
        # positions may bring tables of another part, with their facts
        known = replace(origin.renamed({n: n for n in names}), shown=substitute(p.shown, change))
        return type(p)(e, {n: x for n, x in values.items() if n in names}, known)

    places = program.places or ()
    # dropout draws at all four
    places = (*(parameters.BoundExpr(var(n)) for n in COORDINATES[: 4 - len(places)]), *places)
    return replace(program, places=places).changed(put)


MOST_HEADS = 128  # of keys: models with more are not known
GROUPED = 64  # this many heads that share nothing, with fewer keys than queries, are a length rather


def check_order(arrays: Arrays, g: Geometry, program: CallProgram, params: Mapping[str, Any]) -> None:
    """Warn where shapes, or the lengths of tables, say that the axes of heads and of length are exchanged."""
    # symbols of jax.export cannot be compared
    if arrays.pages or not all(type(n) is int for n in (g.batch, g.heads, g.q_len, g.kv_len)):
        return
    if g.q_len % g.kv_len or g.q_len >= g.kv_heads:  # they would not divide, or there are more heads than tokens
        return
    if not (why := _by_shape(g) or _by_tables(g, program, params)):
        return
    have = arrays.layout
    other = "bhsd" if have == "bshd" else "bshd"
    shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in zip("qkv", arrays.qkv, strict=True))
    warn_once(
        f"{shapes} are read as {LAYOUTS[have]}: {g.q_len} tokens of {g.heads} heads, and {why}\n"
        f'  if they are {LAYOUTS[other]} give axes="{other}"; if not, axes="{have}" says so',
        about=(have, g.q_len, g.kv_len),  # the heads, if they are exchanged: another length is not another warning
    )


def _by_shape(g: Geometry) -> str:
    if g.kv_heads > MOST_HEADS >= g.q_len:
        return f"{g.kv_heads} heads of keys are more than models have"
    if g.q_len > g.kv_len and g.heads == g.kv_heads >= max(GROUPED, 2 * g.q_len):
        q, k = g.q_len, g.kv_len
        return f"{q} queries of {k} keys look like {q} query heads that share {k} heads of keys"
    return ""


def _by_tables(g: Geometry, program: CallProgram, params: Mapping[str, Any]) -> str:
    """Tables that are read at bare positions and heads: all have the lengths of the other order, and some not these."""
    shapes = {n: tuple(x.shape) for n, x in {**program.tables, **params}.items() if hasattr(x, "shape")}
    sizes, there = {"q": g.q_len, "k": g.kv_len, "h": g.heads}, {"q": g.heads, "k": g.kv_heads, "h": g.q_len}
    read = {
        (n.name, i, a.name)
        for part in program.parts
        for n in walk(part.expr)
        if n.op == "lookup" and n.name in shapes
        for i, a in enumerate(n.args)
        if a.op == "var" and a.name in sizes and i < len(shapes[n.name])
    }
    entries = sorted((name, axis, coordinate, shapes[name][axis]) for name, axis, coordinate in read)
    if not all(have == there[coordinate] for _, _, coordinate, have in entries):
        return ""
    for name, _, coordinate, have in entries:
        if have != sizes[coordinate] and (have >= 8 or coordinate == "h"):  # of too few heads: an error comes
            return f"`{name}`, read at `{coordinate}`, has {have} entries"
    return ""
