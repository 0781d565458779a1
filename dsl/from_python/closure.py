"""Finds what a function reads, by closure, globals, defaults, attributes and calls, and the path to each value.

>>> from types import SimpleNamespace
>>> def score_mod(layer):
...     return lambda score, q: score + layer.bias[q]
>>> layer = SimpleNamespace(bias=[1.0, 2.0])
>>> (path,) = paths_to(score_mod(layer), [layer.bias])[id(layer.bias)]
>>> layer.bias = [3.0, 4.0]
>>> path.read(), str(path)
([3.0, 4.0], 'layer.bias')
"""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from frisket.dsl.errors import ParameterError
from frisket.grammar.memo import memo

# How far to look: values, elements of one container, and objects inside objects (a module's settings, no more). A path
# to an array may be longer: a layer of a model, a module of the layer, and its parameter.
MOST, LONGEST, DEEPEST, DEEPEST_PATH = 5000, 256, 2, 8
MODULE_PARTS = ("_parameters", "_buffers", "_modules")  # where a torch.nn.Module keeps its attributes
RAW = "_raw_value"  # where a variable of flax keeps its array
CALLED = ("__call__", "forward")  # methods that a call of an object runs, and the code does not name
FRAMEWORKS = frozenset({"numpy", "jax", "jaxlib", "frisket"})  # whose objects hold nothing that a user's code reads
LIBRARIES = frozenset({"torch", *FRAMEWORKS, *sys.stdlib_module_names}) - {"__main__"}


@dataclass(frozen=True, eq=False)
class Path:
    """The way from an object to an array that it holds. A step is (whether its name is an attribute's, the attribute's
    name or the key of an entry). `text` is the path as a reader of the function would write it."""

    root: Any = field(repr=False)
    steps: tuple[tuple[bool, Any], ...] = field(default=(), repr=False)
    text: str = ""

    def to(self, attribute: bool, name: Any) -> Path:
        """The path to an attribute or an entry of what this path leads to."""
        more = "" if name == RAW else f".{name}" if attribute else f"[{name!r}]"
        return Path(self.root, (*self.steps, (attribute, name)), self.text + more)

    def read(self) -> Any:
        """Follow the path again. Dynamo reads this code too, and guards what it reads."""
        if (x := self.root) is None:
            raise ParameterError(
                f"`{self.text}` is read from the module that was copied, not from its copy: nnx.jit, nnx.clone, "
                "copy.deepcopy, jax.tree.map and pickle make a copy, and do not say of what\n  give the array to the "
                f"call: att(q, k, v, ...={self.text}{'[...]' * (self.steps[-1] == (True, RAW))})"
            )
        for attribute, name in self.steps:
            if name == RAW and not x._trace_state.is_valid():
                raise ParameterError(
                    f"`{self.text}` is a flax variable of another trace: jax.jit, jax.grad and other transforms take "
                    f"its value for a constant\n  give the array to the call: att(q, k, v, ...={self.text}[...])"
                )
            x = getattr(x, name) if attribute else x[name]
        return x

    def from_object(self) -> Path:
        """The path from the first object that is neither a closure's cell nor the dict of a module's globals."""
        root, steps = self.root, self.steps
        if isinstance(root, CellType) or (type(root) is dict and "__builtins__" in root):
            root, steps = Path(root, steps[:1]).read(), steps[1:]
        return Path(root, steps, self.text)

    @property
    def begins_in_module(self) -> bool:
        """Whether the path begins at what JAX and flax take apart and build again, such as a module."""
        root, jax = self.from_object().root, sys.modules.get("jax")
        is_leaf = jax is None or type(root) in (dict, list, tuple) or jax.tree_util.all_leaves([root])
        return self.steps[-1:] == ((True, RAW),) or not is_leaf

    def in_copy(self) -> Path:
        """The path in a copy of what it begins at. JAX and flax do not say what they copy: reading it is an error."""
        return Path(None, self.steps, self.text) if self.begins_in_module else self

    def __str__(self) -> str:
        return self.text


def read_again(name: str, paths: tuple[Path, ...]) -> Any:
    """The array that all paths to it lead to now."""
    x = paths[0].read()
    for path in paths[1:]:
        if path.read() is not x:
            raise ParameterError(
                f"`{paths[0]}` and `{path}` were one array, `{name}`, when their function was traced, and are two now\n"
                "  make the mask, score mod or attention again"
            )
    return x


def paths_to(fn: Any, arrays: Iterable[Any]) -> dict[int, tuple[Path, ...]]:
    """The paths to arrays, by their ids: those by names that the code reads, else the first one by any names. An array
    that cannot be reached is missing."""
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)  # torch.compile wraps a function
    ids = {id(x) for x in arrays}
    paths: dict[int, list[Path]] = {}
    for called in ((), CALLED) if ids else ():  # modules that the code calls read more names; one that it reads may not
        names: set[str] = set(called)
        count = -1
        while count < len(names):  # until no function adds a name
            count, paths = len(names), {}
            for _, value, path in reached(fn, DEEPEST_PATH, names):
                if isinstance(value, FunctionType):
                    names |= names_read(value.__code__)
                elif id(value) in ids:
                    paths.setdefault(id(value), []).append(path)
        if not ids - paths.keys():
            break
    if missing := ids - paths.keys():
        for _, value, path in reached(fn, DEEPEST_PATH):
            if id(value) in missing:
                paths.setdefault(id(value), []).append(path)
    return {i: tuple(ways) for i, ways in paths.items()}


def reached(fn: Any, deepest: int = DEEPEST, names: Collection[str] | None = None) -> Iterator[tuple[str, Any, Path]]:
    """(name, value, path) of what a function reaches, nearest first. With `names` only attributes of these names are
    read, and an array comes once for each path. Past DEEPEST objects, modules of torch are entered too: they may hold
    thousands of tensors."""
    seen: dict[int, Any] = {}
    waiting = deque([("", fn, Path(fn), 0)])
    while waiting and len(seen) < MOST:
        name, value, path, depth = waiting.popleft()
        is_array = hasattr(type(value), "dtype")  # of the type: asking the object may run its `__getattr__`
        if id(value) in seen:
            if is_array and names is not None:
                yield name, value, path
            continue
        seen[id(value)] = value
        yield name, value, path
        if isinstance(value, list | tuple | dict):
            if len(value) <= LONGEST:
                named = isinstance(value, dict)
                items = value.items() if isinstance(value, dict) else enumerate(value)
                waiting.extend((str(n) if named else name, x, path.to(False, n), depth) for n, x in items)
        elif isinstance(value, FunctionType | MethodType | partial) or hasattr(value, "__wrapped__"):
            waiting.extend((n or name, x, at, depth) for n, x, at in _called_by(value))
        elif depth < deepest and not is_array:
            read = names if depth or names is None else {*names, *CALLED}
            waiting.extend((n or name, x, at, depth + 1) for n, x, at in _attributes(value, path, deepest, read))


def _called_by(fn: Any) -> Iterator[tuple[str, Any, Path]]:
    """The objects a function reads, and the function it wraps."""
    if isinstance(fn, partial):
        yield "", fn.func, Path(fn.func)
        for n, x in (*zip(_argument_names(fn.func), fn.args), *fn.keywords.items()):
            yield n, x, Path(x, (), n)
    elif isinstance(fn, MethodType):
        yield "", fn.__func__, Path(fn.__func__)
        yield "", fn.__self__, Path(fn.__self__, (), "self")
    elif isinstance(fn, FunctionType):
        yield from _read_by(fn)
    else:  # jax.jit(f)
        yield "", fn.__wrapped__, Path(fn.__wrapped__)


def _attributes(value: Any, path: Path, deepest: int, names: Collection[str] | None) -> Iterator[tuple[str, Any, Path]]:
    """The attributes of an object, and its methods that the code calls."""
    classes = type(value).__mro__
    near, is_code = deepest == DEEPEST, isinstance(value, ModuleType | type)
    of_torch = any(c.__module__.startswith("torch.") for c in classes)
    of_library = classes[0].__module__.split(".")[0] in FRAMEWORKS
    if (of_torch if near else of_library) or (is_code and (names is None or is_foreign(value))):
        return
    attributes = dict(vars(value)) if isinstance(getattr(value, "__dict__", None), Mapping) else {}
    if not near:
        parts = [attributes.pop(p) for p in MODULE_PARTS if of_torch and p in attributes]
        attributes |= {n: getattr(value, n) for c in classes for n in _slots(c) if hasattr(value, n)}
        attributes |= {n: x for part in parts for n, x in part.items()}
    for n, x in attributes.items():
        if n != RAW and (n in names if names is not None else not n.startswith("__")):
            yield n, x, path.to(True, n)
    if any(RAW in _slots(c) for c in classes):
        yield "", getattr(value, RAW), path.to(True, RAW)
    for n in tuple(names or CALLED[:1]):
        x = next((vars(c)[n] for c in classes if n in vars(c)), None)
        x = x.fget if isinstance(x, property) else getattr(x, "__func__", x)
        if isinstance(x, FunctionType):
            yield "", x, Path(x)
        elif x is not None and names is not None and n not in attributes:
            yield n, x, path.to(True, n)


def _slots(cls: type) -> tuple[str, ...]:
    names = vars(cls).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def is_foreign(x: Any) -> bool:
    """Whether a function, class or module belongs to a library: those do not change between calls."""
    name = x.__name__ if isinstance(x, ModuleType) else x.__module__
    return (name or "").partition(".")[0] in LIBRARIES


def _read_by(fn: FunctionType) -> Iterator[tuple[str, Any, Path]]:
    for n, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
        path = Path(cell, ((True, "cell_contents"),), n)
        try:
            yield n, path.read(), path
        except ValueError:  # an empty cell
            continue
    if is_foreign(fn):
        return
    scope, defaults = fn.__globals__, fn.__defaults__ or ()
    yield from ((n, scope[n], Path(scope, ((False, n),), n)) for n in _global_names(fn.__code__) if n in scope)
    count = fn.__code__.co_argcount
    fixed = (*zip(fn.__code__.co_varnames[count - len(defaults) : count], defaults), *(fn.__kwdefaults__ or {}).items())
    yield from ((n, x, Path(x, (), n)) for n, x in fixed)


@memo(4096)
def _global_names(code: CodeType) -> tuple[str, ...]:
    outer = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [n for c in code.co_consts if isinstance(c, CodeType) for n in _global_names(c)]
    return tuple(dict.fromkeys([*outer, *inner]))


@memo(4096)
def names_read(code: CodeType) -> frozenset[str]:
    """Every name that the code, and functions written inside it, read from objects and modules."""
    return frozenset(code.co_names).union(*(names_read(c) for c in code.co_consts if isinstance(c, CodeType)))


def _argument_names(fn: Any) -> tuple[str, ...]:
    code = getattr(fn, "__code__", None)
    return code.co_varnames[: code.co_argcount] if isinstance(code, CodeType) else ()
