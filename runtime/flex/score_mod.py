"""Score mods of torch: traced once, kept, and known again when they come with other tensors.

A score mod may be the same function object while a number it captured has changed, or a new object of the same code
at every call, over new tensors. `state_of` says what decides the trace as one hashable value, tensors apart.
"""

from __future__ import annotations

import functools
from abc import ABC
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Generic, Protocol
from weakref import ref

import torch
from torch import Tensor

from frisket.dsl import ir
from frisket.dsl.errors import TraceError
from frisket.dsl.from_python.closure import MODULE_PARTS, is_foreign, names_read
from frisket.dsl.from_python.trace import trace
from frisket.dsl.types import FLOAT
from frisket.grammar.memo import Memo
from frisket.runtime.calls.arrays import version_of
from frisket.runtime.machine.parameters import names_of
from frisket.runtime.masks.mask import ScoreMod
from frisket.runtime.masks.mask import score as written

from .errors import ScoreModError
from .live_mask import LiveMask, fresh, of_bound

CONSTANTS = (bool, int, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type(...))
REFLECTION = """getattr setattr vars globals locals eval exec __dict__ __getattribute__ open next environ getenv
is_grad_enabled is_inference_mode_enabled is_autocast_enabled get_default_dtype get_num_threads""".split()
STATELESS = (object, ModuleType, SimpleNamespace, Generic, Protocol, ABC)  # foreign, with all they hold in `__dict__`
UNNAMED = frozenset({"__call__", "forward", "_forward_hooks", "_forward_pre_hooks"})  # read by a call of an object
QUIET = ("__repr__", "__str__", "__setattr__", "__delattr__")  # special methods that read nothing for a score
Names = frozenset[str]


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
        library = is_foreign(fn)
        if (library and not fn.__closure__) or (fn, names) in self.seen:
            return fn
        self.seen.add((fn, names))
        names = names | (mine := names_read(fn.__code__))
        if not mine.isdisjoint(REFLECTION) or not names.isdisjoint(vars(fn)):
            raise UnknownState
        said: list[Any] = [fn.__code__, *(self.value(c.cell_contents, names) for c in fn.__closure__ or ())]
        said.append(self.each((*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()), names))
        if not library:
            scope = fn.__globals__
            said += [self.value(scope[n], names) for n in sorted(mine) if n in scope]
        return tuple(said)

    def members(self, x: Any, held: Mapping[str, Any] | None, names: Names) -> Any:
        """An object, class or module by the attributes and methods that the code reads."""
        cls = x if isinstance(x, type) else type(x)
        library = any(is_foreign(c) for c in cls.__mro__ if c not in STATELESS and c is not torch.nn.Module)
        strange = not is_foreign(type(x)) if cls is x else library and not isinstance(x, torch.nn.Module)
        own = [vars(c) for c in cls.__mro__ if not is_foreign(c)]
        if held is None or strange or any({"__getattr__", "__getattribute__"} & of.keys() for of in (*own, held)):
            raise UnknownState
        special = {n for of in own for n, m in of.items() if n[:2] == "__" and callable(m) and n not in QUIET}
        names, methods = _reached(own, names | (special if cls is x else special - {"__init__", "__new__"}))
        if (id(x), names) in self.seen:
            return id(x)
        self.seen.add((id(x), names))
        parts = [held, *(held[p] for p in MODULE_PARTS if p in held and isinstance(x, torch.nn.Module))]
        read = names.union(*parts[1:], (n for n in held if n[0] != "_")) if library else names  # by code of its own
        said = [(n, self.value(part[n], names)) for part in parts for n in sorted(read & part.keys())]
        return tuple(said), tuple([self.value(m, names) for m in methods])


def _reached(own: Sequence[Mapping[str, Any]], names: Names) -> tuple[Names, tuple[Any, ...]]:
    """The names that are read once the methods and properties among `names` run, and what the classes have of them."""
    found: dict[str, list[Any]] = {}
    while True:
        for name in names - found.keys():  # in every class: `super()` reaches those behind the first
            ones = [x for of in own if (x := of.get(name)) is not None]
            found[name] = [x.fget if isinstance(x, property) else getattr(x, "__func__", x) for x in ones]
        methods = tuple(x for n in sorted(found) for x in found[n])
        if any(hasattr(type(x), "__get__") and not isinstance(x, FunctionType) for x in methods):
            raise UnknownState
        more = names.union(
            *(names_read(x.__code__) for x in methods if isinstance(x, FunctionType) and not is_foreign(x))
        )
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
    """A score mod, traced. `places` say which of the function's tensors a name is; `live` has the values of the other
    names. `read` are tensors whose values the trace looked at, or whose place is not known."""

    live: LiveMask
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
    found = None if state is None else _scored.get(state)
    if found is None or not found.holds(tensors):
        found = _traced_over(score_mod, tensors)
        if state is not None:
            _scored.put(state, found)
    return found, {**found.live.tensors, **{n: tensors[i] for n, i in found.places.items()}}


def _traced_over(score_mod: Any, tensors: list[Tensor]) -> Scored:
    live, read = traced(score_mod)
    place = {id(x): i for i, x in enumerate(tensors)}
    places = {n: place[id(x)] for n, x in live.tensors.items() if id(x) in place}
    others = LiveMask(live.expr, {n: x for n, x in live.values.items() if n not in places})
    looked = {id(x): x for x in (*read, *others.tensors.values())}
    watched = tuple((place.get(i), Watched(x)) for i, x in looked.items())
    return Scored(others, places, watched, score_mod if isinstance(score_mod, ScoreMod | ir.Expr) else None)


def traced(score_mod: Any, valueless: bool = False) -> tuple[LiveMask, tuple[Tensor, ...]]:
    """A score mod as an expression over its own tensors, and the tensors whose values went into it."""
    if isinstance(score_mod, str | ScoreMod | ir.Expr):
        return of_bound(written(score_mod)), ()
    try:
        found = trace(score_mod, "score", valueless=valueless, by_place=True)
    except TraceError as error:
        raise ScoreModError(str(error)) from error
    if found.result is not FLOAT:
        raise ScoreModError(
            "score_mod returns an Int\n  it returns a Float: the score, or what was made of it; `x.float()` is one too"
        )
    if not found.scored:
        raise ScoreModError(
            "score_mod takes no score\n  it is score_mod(score, b, h, q_idx, kv_idx); a function of four that hides "
            "positions is a mask_mod, for create_block_mask"
        )
    return LiveMask(found.expr, found.tables), found.read


def apart(mod: LiveMask, visible: LiveMask | None) -> tuple[LiveMask, dict[str, str]]:
    """The score mod with names that the mask does not have, and which were changed to what."""
    names: dict[str, str] = {}
    mine, theirs = set(names_of(mod.expr)), set() if visible is None else set(visible.values)
    taken = mine | theirs
    for name in sorted(mine & theirs):
        names[name] = fresh(name, taken)
        taken.add(names[name])
    if not names:
        return mod, names
    return LiveMask(ir.renamed(mod.expr, names), {names.get(n, n): x for n, x in mod.values.items()}), names
