"""The caller's side of a call: values that stand for an int, functions outside graphs, warnings at the caller's line.

`as_int` converts all that stands for an int: ints of Python, numpy and torch, and arrays without axes.

>>> import numpy as np
>>> as_int(np.int64(4)), as_int(np.array(4)), as_int(4.0), as_int(True)
(4, 4, 4.0, True)
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from frisket.grammar.memo import memo

F = TypeVar("F", bound=Callable[..., Any])
COUNTS = frozenset("q_len kv_len batch heads kv_heads head_dim v_dim block origin sizes budget".split())


def as_int(x: Any) -> Any:
    """The int that a value stands for; any other value as it is, for the checks that follow to refuse."""
    # index() would take True for 1
    if x is None or type(x) is int or isinstance(x, bool | float | str):
        return x
    if getattr(x, "ndim", 0) or "bool" in str(getattr(x, "dtype", "")):  # one entry with an axis is no number
        return x
    try:
        return operator.index(x)
    except Exception:  # a Float, or something without a value: every library raises another error
        return x


def counting(method: F) -> F:
    """Decorate a method that no graph of torch holds, whose lengths may be anything that stands for an int:
    `lengths.sum()`, a numpy int."""
    method = cast(F, outside(method))

    @wraps(method)
    def run(self: Any, *args: Any, **keywords: Any) -> Any:
        named = {n: _count(x) if n in COUNTS else x for n, x in keywords.items()}
        return method(self, *map(_count, args), **named)

    return cast(F, run)


def _count(x: Any) -> Any:
    """The int that a value stands for, or a tuple of those of a tuple or list; anything else as it is."""
    return tuple(map(as_int, x)) if isinstance(x, tuple | list) else as_int(x)


P = ParamSpec("P")
R = TypeVar("R")


@memo(group="once")
def _disabled(fn: Callable[..., Any]) -> Any:
    return sys.modules["torch"].compiler.disable(fn)


def leave(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `fn(*args)` outside of graphs; Dynamo compiles no frame below it either."""
    return _disabled(fn)(*args, **kwargs)


leave._torchdynamo_disable = True  # type: ignore[attr-defined]  # Dynamo does not read it
leave._torchdynamo_disable_msg = (  # type: ignore[attr-defined]  # what it says where it may not leave the graph
    "it runs between two graphs: call it outside of the compiled function, or leave out fullgraph=True"
)


def outside(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that no graph holds: Dynamo breaks the graph for its call, and compiles no frame below it."""

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # before its import nothing is traced; `disable` would import it, which takes long
        if "torch._dynamo" in sys.modules:
            return leave(fn, *args, **kwargs)  # type: ignore[no-any-return]
        return fn(*args, **kwargs)

    return run


INSIDE = frozenset({"frisket", "jax", "jaxlib", "torch", "contextlib", "functools"})
SAID: set[Hashable] = set()


def warn_once(text: str, about: Hashable = None) -> None:
    """Warn at the caller outside of frisket and what calls it back, the first time for each text, or each `about`."""
    key = text if about is None else about
    if key in SAID:
        return
    SAID.add(key)  # before the warning, which may be an error
    # `skip_file_prefixes` is of Python 3.12
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
