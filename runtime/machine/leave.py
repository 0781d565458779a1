"""Calls that Dynamo does not trace: they run between two graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from frisket.grammar.memo import memo

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
        if "torch._dynamo" in sys.modules:
            return leave(fn, *args, **kwargs)  # type: ignore[no-any-return]
        return fn(*args, **kwargs)

    return run
