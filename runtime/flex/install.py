"""frisket in the place of torch's flex_attention, also in modules that have imported it.

>>> import types, sys
>>> from torch.nn.attention import flex_attention as torch_flex
>>> library = sys.modules["library"] = types.ModuleType("library")
>>> library.attend = torch_flex.flex_attention  # as `from torch.nn.attention.flex_attention import ...` does
>>> with install() as installed:
...     "library.attend" in installed.changed, library.attend.__module__
(True, 'frisket.runtime.flex.attention')
>>> library.attend.__module__
'torch.nn.attention.flex_attention'
>>> del sys.modules["library"]
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, FunctionType, ModuleType
from typing import Any

from torch.nn.attention import flex_attention as theirs
from torch.utils._pytree import SUPPORTED_NODES

from . import create
from .attention import flex_attention
from .block_mask import BlockMask

CREATE = (
    "create_block_mask", "create_nested_block_mask", "create_mask", "and_masks", "or_masks",
    "_create_sparse_block_from_block_mask", "_create_empty_block_mask",
)  # fmt: skip
# what differs from torch's; the other names of frisket.flex are torch's own objects
OURS: dict[str, Any] = {
    "flex_attention": flex_attention, "BlockMask": BlockMask, **{name: getattr(create, name) for name in CREATE}
}  # fmt: skip
OWN_ATTRIBUTES: Any = object.__getattribute__  # lazy objects have another, which imports
TORCH: dict[str, Any] = {name: getattr(theirs, name) for name in OURS if hasattr(theirs, name)}


@dataclass
class Installed:
    """The places that `install` changed; `undo`, or the end of a `with` block, puts torch's functions back.

    >>> import frisket.flex
    >>> with frisket.flex.install() as installed:
    ...     "torch.nn.attention.flex_attention.flex_attention" in installed.changed
    True

    `changed` has the places that held torch's functions and hold frisket's, such as `library.layers.attend`, and the
    names of these functions. `left` are places that still hold torch's.
    """

    changed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    _assigned: list[tuple[Callable[[Any], Any], str]] = field(default_factory=list, repr=False)
    _node: Any = field(default=None, repr=False)

    def undo(self) -> None:
        """Put torch's functions back. Modules that were imported in the meantime keep frisket's.

        >>> import frisket.flex
        >>> installed = frisket.flex.install()
        >>> installed.undo()
        """
        while self._assigned:
            assign, name = self._assigned.pop()
            assign(TORCH[name])
        if self._node is not None:
            SUPPORTED_NODES[BlockMask], self._node = self._node, None

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [f"frisket.flex is in {len(self.changed)} places that held torch's flex_attention:", *self.changed]
        return "\n  ".join(lines) + "".join(f"\ntorch's is still in {place}" for place in self.left)


def install() -> Installed:
    """`frisket.flex.install()`: libraries that import torch's flex_attention get frisket's, already imported ones too.

    >>> from frisket.flex import install
    >>> import torch.nn.attention.flex_attention as torch_flex
    >>> with install():
    ...     torch_flex.create_block_mask("causal", None, None, 512, 512, "cpu").sparsity()
    37.5

    Assigns the names of `torch.nn.attention.flex_attention` that differ from torch's. Then it replaces the old objects
    in all imported modules: in attributes of modules, classes and their objects, in dicts and lists. It looks into
    `functools.partial` and functions with closures, such as `torch.compile(create_block_mask)`. The order of imports
    does not matter. Masks made before are of torch's class, and no instances of frisket's `BlockMask`: call it first.

    While it is installed, a mask is one leaf of torch's pytrees, as torch's own is, and no input of `torch.export`.

    Returns an `Installed`, which says what changed and undoes it. A UserWarning names what still holds a function of
    torch and cannot be changed, such as an `lru_cache` or a default argument.
    """
    done, seen = Installed(), set[int]()
    names = {id(x): name for name, x in TORCH.items()}

    def replace(place: str, holder: Any) -> None:
        seen.add(id(holder))
        is_module, is_class = (issubclass(type(holder), x) for x in (ModuleType, type))
        for at, key, value, put in _slots(holder):
            kind = type(value)  # isinstance would have lazy objects import what they stand for
            if (name := names.get(id(value))) is not None:
                put(key, OURS[name])
                done.changed[place + at.format(key)] = name
                done._assigned.append((partial(put, key), name))
            elif id(value) in seen:
                continue
            elif kind in (FunctionType, partial, staticmethod, classmethod):
                replace(place + at.format(key), value)
            elif is_module or is_class:  # dicts, lists and objects are searched where modules and classes have them
                owner = value if issubclass(kind, type) else kind
                if kind in (dict, list) or owner.__module__ == (holder.__name__ if is_module else holder.__module__):
                    replace(place + at.format(key), value)

    done._node = SUPPORTED_NODES.pop(BlockMask, None)
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] != "frisket":
            replace(name, module)
    done.left = _left()
    if done.left:
        warnings.warn(
            f"torch's flex_attention is still in {', '.join(done.left)}\n"
            "  call frisket.flex.install() before these are made", stacklevel=2
        )  # fmt: skip
    return done


def _slots(holder: Any) -> Iterator[tuple[str, Any, Any, Callable[[Any, Any], Any]]]:
    """The places inside an object: how each is written, its key, its value, and a function that assigns another."""
    kind = type(holder)
    if issubclass(kind, ModuleType | type):
        put = partial(setattr, holder)
        yield from ((".{}", key, x, put) for key, x in list(vars(holder).items()))
    elif kind in (dict, list):
        items = holder.items() if kind is dict else enumerate(holder)
        yield from (("[{!r}]", key, x, holder.__setitem__) for key, x in list(items))
    elif kind in (staticmethod, classmethod):
        yield "", None, holder.__func__, lambda _, x: holder.__init__(x)  # the object stays, other modules hold it
    elif kind is partial:
        yield "", None, holder.func, lambda _, x: holder.__setstate__((x, holder.args, holder.keywords, vars(holder)))
        yield from _slots(holder.keywords)
    elif kind is FunctionType:
        for cell in holder.__closure__ or ():
            try:
                yield "", "cell_contents", cell.cell_contents, partial(setattr, cell)
            except ValueError:  # a variable without a value yet
                continue
        for names in (vars(holder), holder.__kwdefaults__ or {}):
            yield from (("", *rest) for _, *rest in _slots(names))
    elif kind.__getattribute__ is OWN_ATTRIBUTES and hasattr(holder, "__dict__"):
        yield from _slots(vars(holder))


def _left() -> list[str]:
    """Places outside of frisket that still refer to a function of torch, and objects of torch's class."""
    functions = tuple([x for x in TORCH.values() if isinstance(x, FunctionType)])  # a tuple is not copied by a call
    mask = TORCH["BlockMask"]
    left = {_place(x, functions) for x in gc.get_referrers(*functions) if x is not TORCH and x is not functions}
    left |= {f"{x.__module__}.{x.__qualname__}" for x in mask.__subclasses__()}
    left = {x for x in left if x and not x.startswith("frisket.")}
    masks = sum(type(x) is mask for x in gc.get_referrers(mask))
    return sorted(left) + ([f"{masks} masks of torch's class"] if masks else [])


def _place(x: Any, of: tuple[Any, ...]) -> str:
    """The module, class, function or object that leads to an object which refers to one of these; "" for a frame."""
    level, below = (x,), of
    for _ in range(4):
        for one in level:
            if isinstance(one, FrameType):
                return ""
            if isinstance(one, dict) and "__spec__" in one:
                return next((f"{one['__name__']}.{key}" for key, y in one.items() if any(y is z for z in below)), "")
            kind = one if isinstance(one, FunctionType | type) else type(one)
            if kind.__module__ not in ("builtins", "functools", theirs.__name__):  # wrappers have torch's name
                return f"{kind.__module__}.{kind.__qualname__}"
        if len(level) > 4:  # each of them is looked for in every object of the program
            break
        level, below = tuple([y for y in gc.get_referrers(*level) if y is not level and y is not below]), level
    return f"a {type(x).__name__}"
