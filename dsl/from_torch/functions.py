"""torch's functions and tensor methods by name: single elements, arrays, and attributes of a symbol."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from frisket.dsl.from_python.symbol import Symbol, context, handles
from frisket.dsl.from_python.user_line import fail
from frisket.dsl.types import FLOAT

from .arrays import ARRAYS
from .scalars import SCALARS, Function

FUNCTIONS: dict[str, Function] = {**SCALARS, **ARRAYS}

# -- methods and attributes of a symbol -------------------------------------------------------------


def _size(x: Symbol, dim: int | None = None) -> Any:
    return x.shape if dim is None else x.shape[dim]


METHODS: dict[str, Function] = {
    "size": _size,
    "dim": lambda x: x.ndim,
    "ndimension": lambda x: x.ndim,
    "numel": lambda x: math.prod(x.shape),
    "nelement": lambda x: math.prod(x.shape),
    "is_floating_point": lambda x: x.expr.type is FLOAT,
    "is_contiguous": lambda x: True,
    "item": lambda x: x._number("`.item()` of a position: it has no value while the function is traced"),
    "tolist": lambda x: x._number("`.tolist()` of a position: it has no value while the function is traced"),
}
ATTRIBUTES = frozenset({"T", "mT"})


def called(name: str, function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of `function`, with an error for arguments it does not take."""
    try:
        return function(*args, **{n: v for n, v in kwargs.items() if v is not None})
    except TypeError as error:
        fail(f"`{name}`: {str(error).replace('<lambda>', name)}")


@handles("__getattr__")
def attribute(x: Symbol, name: str) -> Any:
    """The attribute `x.name` that Symbol itself does not have."""
    if name in ATTRIBUTES:
        return FUNCTIONS[name](x)
    if name in METHODS or name in FUNCTIONS:
        function = METHODS.get(name) or FUNCTIONS[name]
        return lambda *args, **kwargs: called(name, function, (x, *args), kwargs)
    if context.front is not None and not name.startswith("__"):
        return context.front.attribute(x, name)
    raise AttributeError(f"a position has no `{name}`")
