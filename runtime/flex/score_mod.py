"""Score mods of torch: traced once, kept, and known again with other tensors; their attention with a mask.

A score mod may be the same function object while a number it captured has changed, or a new object of the same code
at every call, over new tensors. `state_of` says what decides the trace as one hashable value, tensors apart.
"""

from __future__ import annotations

import functools
from abc import ABC
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Generic, Protocol
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from frisket.dsl import ir
from frisket.dsl.errors import ShapeError, TraceError
from frisket.dsl.from_python.closure import MODULE_PARTS, is_foreign, names_read
from frisket.dsl.from_python.trace import trace
from frisket.dsl.ir import TRUE, B, Expr, conj, lit, names_of
from frisket.dsl.types import FLOAT
from frisket.grammar.memo import Memo, cached_on, remember
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.entry import attention_for
from frisket.runtime.calls.arrays import version_of
from frisket.runtime.calls.options import CallArgs, Options
from frisket.runtime.calls.program import joined
from frisket.runtime.machine.parameters import as_value
from frisket.runtime.masks.mask import Mask, ScoreMod, only
from frisket.runtime.masks.mask import score as written
from frisket.runtime.torch import op as torch_op
from frisket.runtime.torch.jagged import JaggedTables, Ragged, names_for, ragged_of

from .checks import KernelRequests, ScoreModError, check_lookups, check_promises
from .tensor_mask import TensorMask, fresh, of_bound, only_read

CONSTANTS = (bool, int, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type(...))
REFLECTION = """getattr setattr vars globals locals eval exec __dict__ __getattribute__ open next environ getenv
is_grad_enabled is_inference_mode_enabled is_autocast_enabled get_default_dtype get_num_threads""".split()
STATELESS = (object, ModuleType, SimpleNamespace, Generic, Protocol, ABC)  # foreign, with all they hold in `__dict__`
UNNAMED = frozenset({"__call__", "forward", "_forward_hooks", "_forward_pre_hooks"})  # read by a call of an object
QUIET = ("__repr__", "__str__", "__setattr__", "__delattr__")  # special methods that read nothing for a score
Names = frozenset[str]
Tensors = Mapping[str, Tensor]  # those that a score mod reads, by the names of its tables


class UnknownState(Exception):  # noqa: N818 (never leaves this file)
    """The function reaches something that may change unseen."""


def state_of(fn: Any) -> tuple[Any, list[torch.Tensor]] | None:
    """(state, tensors). Functions of equal states trace to one expression, as far as the trace looked at no tensor's
    values. None where something is reached that may change unseen, so that every use needs another trace."""
    reader = _StateReader()
    try:
        return reader.value(fn, UNNAMED), reader.tensors
    except (UnknownState, RuntimeError, ValueError):  # a tensor without memory, an empty cell
        return None


class _StateReader:
    """`names` are those that the function's code reads: it can see these attributes of an object alone."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.tables: dict[Any, int] = {}
        self.seen: set[Any] = set()

    def value(self, x: Any, names: Names) -> Any:
        if isinstance(x, torch.Tensor):
            self.tensors.append(x)
            key = x.data_ptr(), x.shape, x.stride(), x.dtype, x.requires_grad, x.is_neg()  # a trace takes these for one
            return x.shape, x.dtype, x.requires_grad, x.device, self.tables.setdefault(key, len(self.tables))
        kind = type(x)
        if kind is float:
            return kind, x.hex()  # 0.0 and -0.0 differ
        if kind in CONSTANTS:
            return kind, x
        if kind is FunctionType:
            return self.function(x, names)
        if isinstance(x, type | ModuleType) and is_foreign(x):
            return x
        if isinstance(x, BuiltinFunctionType | Enum):  # of an object, as `held.get` is
            return x, self.each((x._value_, kind) if isinstance(x, Enum) else (x.__self__,), names)
        if kind in (list, tuple, slice):  # slices have no hash before Python 3.12
            return kind, self.each((x.start, x.stop, x.step) if kind is slice else x, names)
        if kind in (dict, OrderedDict):
            return kind, tuple(x), self.each(x.values(), names)
        if kind is functools.partial:
            return kind, self.value(x.func, names), tuple(x.keywords), self.each((*x.args, *x.keywords.values()), names)
        if kind is MethodType:
            mine = names | (names_read(x.__func__.__code__) if type(x.__func__) is FunctionType else names)
            return self.value(x.__func__, names), self.value(x.__self__, mine)
        if isinstance(x, type | ModuleType):
            return x, self.members(x, {} if isinstance(x, type) else vars(x), names)
        return kind, self.members(x, getattr(x, "__dict__", None), names)

    def each(self, values: Iterable[Any], names: Names) -> tuple[Any, ...]:
        return tuple([self.value(x, names) for x in values])

    def function(self, fn: FunctionType, names: Names) -> Any:
        library = is_foreign(fn)  # a library's code stays as it is, but its closure may hold the user's
        if (library and not fn.__closure__) or (fn, names) in self.seen:  # recursion, or read before
            return fn
        self.seen.add((fn, names))
        names = names | (mine := names_read(fn.__code__))
        # reads what its code does not name, or attributes of the function, which are no part of the state
        if not mine.isdisjoint(REFLECTION) or not names.isdisjoint(vars(fn)):
            raise UnknownState
        state: list[Any] = [fn.__code__, *(self.value(c.cell_contents, names) for c in fn.__closure__ or ())]
        state.append(self.each((*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()), names))
        if not library:
            scope = fn.__globals__
            # sorted: equal sets may differ in their order
            state += [self.value(scope[n], names) for n in sorted(mine) if n in scope]
        return tuple(state)

    def members(self, x: Any, fields: Mapping[str, Any] | None, names: Names) -> Any:
        """An object, class or module by the attributes and methods that the code reads."""
        cls = x if isinstance(x, type) else type(x)
        library = any(is_foreign(c) for c in cls.__mro__ if c not in STATELESS and c is not torch.nn.Module)
        strange = not is_foreign(type(x)) if cls is x else library and not isinstance(x, torch.nn.Module)
        namespaces = [vars(c) for c in cls.__mro__ if not is_foreign(c)]
        lookups = {"__getattr__", "__getattribute__"}
        # such methods compute attributes, out of anything
        if fields is None or strange or any(lookups & of.keys() for of in (*namespaces, fields)):
            raise UnknownState
        # operators call special methods, which no name in the code shows
        special = {n for of in namespaces for n, m in of.items() if n[:2] == "__" and callable(m) and n not in QUIET}
        names, methods = _reached(namespaces, names | (special if cls is x else special - {"__init__", "__new__"}))
        if (id(x), names) in self.seen:
            return id(x)
        self.seen.add((id(x), names))
        # torch keeps parameters, buffers and submodules in dicts of a module
        parts = [fields, *(fields[p] for p in MODULE_PARTS if p in fields and isinstance(x, torch.nn.Module))]
        read = names.union(*parts[1:], (n for n in fields if n[0] != "_")) if library else names  # as a library does
        values = [(n, self.value(part[n], names)) for part in parts for n in sorted(read & part.keys())]
        return tuple(values), tuple([self.value(m, names) for m in methods])


def _reached(namespaces: Sequence[Mapping[str, Any]], names: Names) -> tuple[Names, tuple[Any, ...]]:
    """The names that are read once the methods and properties among `names` run, and what the classes hold under
    them."""
    members: dict[str, list[Any]] = {}
    while True:
        for name in names - members.keys():  # in every class: `super()` reaches those behind the first
            ones = [x for of in namespaces if (x := of.get(name)) is not None]
            members[name] = [x.fget if isinstance(x, property) else getattr(x, "__func__", x) for x in ones]
        methods = tuple(x for n in sorted(members) for x in members[n])
        # other descriptors compute what they return
        if any(hasattr(type(x), "__get__") and not isinstance(x, FunctionType) for x in methods):
            raise UnknownState
        functions = (x for x in methods if isinstance(x, FunctionType) and not is_foreign(x))
        more = names.union(*(names_read(x.__code__) for x in functions))
        if more == names:
            return names, methods
        names = more


KEPT = 128  # score mods, and what there is of one


class Watched:
    """A tensor as it was: whether another is the same one, unwritten. It is not kept alive."""

    def __init__(self, x: Tensor) -> None:
        self.ref, self.version = ref(x), version_of(x)

    def is_still(self, x: Tensor | None) -> bool:
        return x is not None and self.ref() is x and version_of(x) == self.version


@dataclass(frozen=True, eq=False)
class Scored:
    """A score mod, traced. `places` say which of the function's tensors a name is; `score` has the values of the other
    names. `read` are tensors whose values the trace looked at, or whose place is not known."""

    score: TensorMask
    places: Mapping[str, int]
    read: tuple[tuple[int | None, Watched], ...]
    source: Any  # of the user's, which a key may name by its id

    def holds(self, tensors: list[Tensor]) -> bool:
        return all(x.is_still(x.ref() if at is None else tensors[at]) for at, x in self.read)


_scored = Memo("runtime.flex.score_mod.scored", KEPT)


def scored(score_mod: Any) -> tuple[Scored, Mapping[str, Tensor]]:
    """The score mod as it was traced before, if that still holds, and its tensors as they are now."""
    state: Any
    tensors: list[Tensor]
    if isinstance(score_mod, str | ScoreMod | ir.Expr):
        state, tensors = (score_mod if isinstance(score_mod, str) else id(score_mod)), []
    else:
        state, tensors = state_of(score_mod) or (None, [])
    mod = None if state is None else _scored.get(state)
    if mod is None or not mod.holds(tensors):
        mod = _traced_over(score_mod, tensors)
        if state is not None:
            _scored.put(state, mod)
    return mod, {**mod.score.tensors, **{n: tensors[i] for n, i in mod.places.items()}}


def _traced_over(score_mod: Any, tensors: list[Tensor]) -> Scored:
    score, read = traced(score_mod)
    place = {id(x): i for i, x in enumerate(tensors)}
    places = {n: place[id(x)] for n, x in score.tensors.items() if id(x) in place}
    others = TensorMask(score.expr, {n: x for n, x in score.values.items() if n not in places})
    looked = {id(x): x for x in (*read, *others.tensors.values())}
    watched = tuple((place.get(i), Watched(x)) for i, x in looked.items())
    return Scored(others, places, watched, score_mod if isinstance(score_mod, ScoreMod | ir.Expr) else None)


def traced(score_mod: Any, valueless: bool = False) -> tuple[TensorMask, tuple[Tensor, ...]]:
    """A score mod as an expression over its own tensors, and the tensors whose values went into it."""
    if isinstance(score_mod, str | ScoreMod | ir.Expr):
        return of_bound(written(score_mod)), ()
    try:
        function = trace(score_mod, "score", valueless=valueless, by_place=True)
    except TraceError as error:
        raise ScoreModError(str(error)) from error
    if function.result is not FLOAT:
        text = "score_mod returns an Int\n  it returns a Float: the score, or what was made of it; "
        raise ScoreModError(f"{text}`x.float()` is one too")
    if not function.scored:
        text = "score_mod takes no score\n  it is score_mod(score, b, h, q_idx, kv_idx); a function of four that hides "
        raise ScoreModError(f"{text}positions is a mask_mod, for create_block_mask")
    return TensorMask(function.expr, function.tables), function.read


def without_clashes(mod: TensorMask, visible: TensorMask | None) -> tuple[TensorMask, dict[str, str]]:
    """The score mod with names that the mask does not have, and which were changed to what."""
    names: dict[str, str] = {}
    mine, theirs = set(names_of(mod.expr)), set() if visible is None else set(visible.values)
    used = mine | theirs
    for name in sorted(mine & theirs):  # sorted: the new names are part of the program
        names[name] = fresh(name, used)
        used.add(names[name])
    if not names:
        return mod, names
    return TensorMask(ir.renamed(mod.expr, names), {names.get(n, n): x for n, x in mod.values.items()}), names


def packed(mod: TensorMask, q_nt: Tensor, kv_nt: Tensor) -> TensorMask:
    """The mask in packed positions."""
    ragged = ragged_of(q_nt, kv_nt)
    names = names_in(mod, ragged)
    inner = mod.at(names.places(False), values_of(names, ragged))
    outer = own_sequence(names, ragged)
    mask = TensorMask(conj(outer.expr, inner.expr), {**inner.values, **outer.values}, mod.read)
    cached_on(mask, "words", lambda: partial(in_sequences, names, ragged))
    return mask


def in_sequences(names: JaggedTables, ragged: Ragged, node: Expr, at: tuple[int, ...]) -> tuple[Expr, str]:
    """A lookup of packed positions as the user wrote it, inside a sequence, and the position (b, h, q, k) in words."""
    places = [x for visible in (True, False) for x in names.places(visible).items() if x[0] is not B]
    offsets = ragged.q_offsets.numpy(), ragged.kv_offsets.numpy()
    # right: behind empty sequences that begin at the same token
    s = int(np.searchsorted(offsets[0], at[2], "right")) - 1
    q, k = (x - of[s] for x, of in zip(at[2:], offsets, strict=True))
    return ir.substitute(node, {e: name for name, e in places}), f"query {q:,}, key {k:,} of sequence {s} (h {at[1]})"


def names_in(mod: TensorMask, ragged: Ragged, used: Mapping[str, Any] | None = None) -> JaggedTables:
    """Names for tables of positions, unlike all names in a mask or score mod; `B` in `mod` becomes a literal."""
    # without `B` the number would make another expression of every batch size
    number = lit(ragged.sequences) if B in ir.walk(mod.expr) else lit(0)
    return names_for(ragged.pattern, {*mod.values, *(used or {}), *names_of(mod.expr)}, number)


def values_of(names: JaggedTables, ragged: Ragged) -> dict[str, Tensor]:
    return {n: x for n, x in zip(names.tables, ragged.tensors, strict=True) if n is not None and x is not None}


def own_sequence(names: JaggedTables, ragged: Ragged) -> TensorMask:
    """The mask that shows a query the keys of its sequence."""
    return only_read(names.own_sequence(), values_of(names, ragged))


NAMES = ("query", "key", "value")
_EVERYTHING = TensorMask(TRUE, {})


def visible_inside(visible: TensorMask | None, ragged: Ragged) -> TensorMask:
    """A mask of packed positions inside sequences, as `confined` makes it; kept with the mask."""
    visible = visible or _EVERYTHING
    masks: dict[Any, TensorMask] = cached_on(visible, "inside sequences", dict)
    key = tuple(map(id, ragged.tensors))
    if key not in masks:  # it holds these tensors, so that no other one has their id
        remember(masks, key, confined(visible, ragged), 8)
    return masks[key]


def confined(visible: TensorMask, ragged: Ragged) -> TensorMask:
    """A mask of packed positions, and no keys of other sequences."""
    same_sequence = own_sequence(names_in(_EVERYTHING, ragged), ragged)
    return same_sequence if visible.expr is TRUE else visible.join("and", same_sequence)


def local(mod: Scored, ragged: Ragged) -> tuple[Scored, JaggedTables]:
    """A score mod that gets positions inside the sequence, and the names of its tables; kept with the score mod."""
    mods: dict[Any, tuple[Scored, JaggedTables]] = cached_on(mod, "inside sequences", dict)
    key = ragged.pattern, ragged.sequences
    if key not in mods:
        names = names_in(mod.score, ragged)
        score = replace(mod.score, expr=ir.substitute(mod.score.expr, names.places(True)))
        remember(mods, key, (replace(mod, score=score), names), 8)
    return mods[key]


def local_in_graph(mod: TensorMask, ragged: Ragged) -> TensorMask:
    """A score mod in a graph that gets positions inside the sequence."""
    names = names_in(mod, ragged)
    return mod.at(names.places(True), values_of(names, ragged))


def check_total(block_mask: Any, q: Tensor, k: Tensor) -> None:
    """Refuse a mask that is not one of the packed tokens."""
    lengths = tuple(getattr(block_mask, "shape", ())[-2:])
    if lengths and lengths != (q.shape[2], k.shape[2]):
        text = f"block_mask is for {lengths[0]} queries and {lengths[1]} keys, the nested tensors hold {q.shape[2]} "
        text += f"and {k.shape[2]} tokens\n  make it for them: create_nested_block_mask(mask_mod, 1, 1, query, key)"
        raise ShapeError(text)


LARGE = 1 << 20  # bytes of tables: an attention over more lives as long as its mask, not for who may come again


def on_device(x: Tensor) -> bool:
    return x.device.type != "cpu"


class FlexPair:
    """The attention of a score mod and a mask, as long as the tables that it copied stay as they are. Float tensors
    of the score mod are not copied: every call brings them."""

    def __init__(self, mod: Scored | None, visible: TensorMask | None, options: Options, tensors: Tensors) -> None:
        score, names = (None, {}) if mod is None else without_clashes(mod.score, visible)
        self.renamed = names
        kinds = {} if score is None else names_of(score.expr)
        back = {new: old for old, new in names.items()}
        score_tensors = {n: tensors[back.get(n, n)] for n in kinds if back.get(n, n) in tensors}
        self.floats = {n: back.get(n, n) for n, x in score_tensors.items() if kinds[n][1] is FLOAT}
        tables = {n: x for n, x in score_tensors.items() if n not in self.floats}
        self.watched: list[tuple[str | None, Watched]] = [(back.get(n, n), Watched(x)) for n, x in tables.items()]
        if visible is not None:
            self.watched += [(None, Watched(x)) for x in visible.tensors.values()]
            tables.update(visible.tensors)
        self.placed = {n: x for n, x in tables.items() if x.ndim and on_device(x)}  # planned where they are
        values = {n: as_value(n, x) for n, x in tables.items() if n not in self.placed}
        m = None if visible is None else Mask(visible.expr, visible.numbers | only(values, visible.expr))
        s = None if score is None else ScoreMod(score.expr, score.numbers | only(values, score.expr))
        large = sum(x.nbytes for x in values.values() if isinstance(x, np.ndarray)) > LARGE
        self.att: Attention = Attention(joined(m, s), options) if large else attention_for(m, s, options, {})
        self.plans: dict[Any, Any] = {}
        self.checked: set[Any] = set()

    def holds(self, tensors: Tensors) -> bool:
        return all(x.is_still(x.ref() if n is None else tensors[n]) for n, x in self.watched)

    def check(self, q: Tensor, k: Tensor, tensors: Tensors, requests: KernelRequests, mask: Any, words: Any) -> None:
        """Check once for these lengths, where nothing is on a device. `words` are those of `check_lookups`."""
        place = q.shape[:3], k.shape[2], requests.promises
        if place in self.checked or 0 in q.shape or 0 in k.shape:  # without queries or keys no table is read
            return
        if not self.placed:
            if self.att.score is not None and any(n.op == "lookup" for n in ir.walk(self.att.score.expr)):
                shapes = {n: _shape(n, tensors[source], self.att.score.expr) for n, source in self.floats.items()}
                score = self.att.score.bind(**shapes)
                lookups = score.lookups(q.shape[2], k.shape[2], self.att.mask, batch=q.shape[0], heads=q.shape[1])
                check_lookups(lookups, self.renamed, words)
            check_promises(requests.promises, self.att, mask, q, k)
        self.checked.add(place)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, tensors: Tensors, top: bool) -> Any:
        params = {n: tensors[source] for n, source in self.floats.items()}
        plan = None
        if self.placed and not params:
            place = query.shape[2], key.shape[2], query.shape[0], query.shape[1]
            if 0 in place:  # no plan, and nothing to plan
                params |= self.placed
            elif place not in self.plans:
                remember(self.plans, place, self.att.plan(*place, flat=True, **self.placed), KEPT)  # type: ignore[arg-type]
            plan = self.plans.get(place)
        elif self.placed:
            params |= self.placed
        return torch_op.attend(self.att, CallArgs(query, key, value, plan, top=top, layout="bhsd", params=params))


_PLAIN = Scored(TensorMask(ir.SCORE, {}), {}, (), None)  # neither


def pair_of(mod: Scored | None, visible: TensorMask | None, options: Options, tensors: Tensors) -> FlexPair:
    """The attention of both, kept as long as the mask is, or the score mod where there is none."""
    if visible is not None and visible.read:
        _ = visible.versions  # says so where a value that the trace looked at has changed
    pairs: dict[Any, FlexPair] = cached_on(visible or mod or _PLAIN, "pairs", dict)
    key = mod, options
    pair = pairs.get(key)
    if pair is None or not pair.holds(tensors):
        pair = FlexPair(mod, visible, options, tensors)
        remember(pairs, key, pair, KEPT)
    return pair


def _shape(name: str, x: Tensor, e: ir.Expr) -> Any:
    """A table of zeros of this shape where only the shape matters; the table itself where an index reads it."""
    inside = {n.name for one in ir.walk(e) if one.op == "lookup" for a in one.args for n in ir.walk(a)}
    return x.detach() if name in inside else np.broadcast_to(np.zeros((), np.float32), tuple(x.shape))
