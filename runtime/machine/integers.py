"""Conversion to int of all that stands for one: ints of Python, numpy and torch, and arrays without axes.

>>> import numpy as np
>>> as_int(np.int64(4)), as_int(np.array(4)), as_int(4.0), as_int(True)
(4, 4, 4.0, True)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from .leave import outside

F = TypeVar("F", bound=Callable[..., Any])
COUNTS = frozenset("q_len kv_len batch heads kv_heads head_dim v_dim block origin sizes budget".split())


def as_int(x: Any) -> Any:
    """The int that a value stands for; any other value as it is, for the checks that follow to refuse."""
    if x is None or type(x) is int or isinstance(x, bool | float | str):
        return x
    if getattr(x, "ndim", 0) or "bool" in str(getattr(x, "dtype", "")):  # one entry with an axis is no number
        return x
    try:
        return operator.index(x)
    except Exception:  # a Float, or something without a value: every library raises its own
        return x


def as_ints(x: Any) -> Any:
    """A tuple or list as a tuple of ints; anything else as it is."""
    return tuple(map(as_int, x)) if isinstance(x, tuple | list) else x


def counting(method: F) -> F:
    """Decorate a method that no graph of torch holds, whose lengths may be anything that stands for an int:
    `lengths.sum()`, a numpy int."""
    method = cast(F, outside(method))

    @wraps(method)
    def run(self: Any, *args: Any, **given: Any) -> Any:
        named = {n: _count(x) if n in COUNTS else x for n, x in given.items()}
        return method(self, *map(_count, args), **named)

    return cast(F, run)


def _count(x: Any) -> Any:
    return as_ints(as_int(x))
