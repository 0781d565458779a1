"""The state that a Python function depends on, computed quickly: whether an earlier trace of it still holds.

A score mod may be the same function object while a number it captured has changed, or a new object of the same code
at every call, over new tensors. `state_of` says what decides the trace as one hashable value, tensors apart.
"""

from __future__ import annotations

import functools
from abc import ABC
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Generic, Protocol

import torch

from frisket.dsl.from_python.closure import MODULE_PARTS, is_foreign, names_read

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
