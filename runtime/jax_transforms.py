"""JAX's transforms of an executor: mapped by hand, differentiated once.

`jax.vmap` of a loop whose trip counts are mapped would run every row as often as the longest and gather every slice;
second derivatives would go through the loops of the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from frisket.dsl.ir import uses

if TYPE_CHECKING:
    from frisket.lowering.plan import LoopPlan

    from .jax_op import Arrays, _Call

IN_BATCH = frozenset({"q", "k", "v", "out", "lse", "dout", "dlse"})  # arrays with a batch axis, the first one


def refuse(run: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """`run` of arrays, whose derivative raises `error`."""
    import jax

    def refused(*_: Any) -> Any:
        raise error

    guarded = jax.custom_jvp(run)
    guarded.defjvp(refused)
    return guarded


def sealed(call: _Call, what: str, error: Exception, wanted: frozenset[str] = frozenset()) -> Callable[..., Any]:
    """`call.forward(learned, fixed)` or `call.backward(wanted, learned, fixed, rows)` that maps by hand and whose
    derivative raises `error`."""
    import jax
    from jax.custom_batching import custom_vmap

    def executor(call: _Call) -> Callable[..., Any]:
        return call.forward if what == "forward" else partial(call.backward, wanted)

    def mapped(call: _Call) -> Any:
        run = custom_vmap(executor(call))

        @run.def_vmap
        def rule(n: int, moves: Any, *groups: Arrays) -> Any:
            names = {name for move in moves for name, m in move.items() if m}
            axes = tuple({name: 0 if m else None for name, m in move.items()} for move in moves)
            if {"q", "k", "v"} <= names <= IN_BATCH and wanted <= {"q", "k", "v"} and _any_batch(call):
                found = _beside(mapped(call.of_batch(n)), n, moves, groups)
            elif call.target.backend == "cpp":  # runtime/native_bridge.cpp maps its calls
                found = jax.vmap(executor(call), in_axes=axes)(*groups)
            else:
                found = _in_turn(run, moves, groups)
            return found, jax.tree.map(lambda _: True, found)

        return run

    return refuse(mapped(call), error)


def _any_batch(call: _Call) -> bool:
    """Whether one batch entry is like another: no mask, score mod or origin knows which it is."""
    plan: LoopPlan = call.plan
    parts = [e for e in (plan.mask, plan.score, plan.kept) if e is not None]
    own = (call.slice_of == call.slice_of[:1]).all()
    origin = call.tree.unflatten(call.leaves)["origin"][2:]
    return bool(own) and all("b" not in uses(e) for e in parts) and all(isinstance(x, int) for x in origin)


def _beside(run: Callable[..., Any], n: int, moves: Any, groups: Any) -> Any:
    """One call with the mapped axis in the batch axis; arrays that are not mapped are repeated."""
    import jax
    import jax.numpy as jnp

    def joined(name: str, x: Any, moved: bool) -> Any:
        if name not in IN_BATCH or x is None:
            return x
        x = x if moved else jnp.broadcast_to(x, (n, *x.shape))
        return x.reshape(n * x.shape[1], *x.shape[2:])

    found = run(*({k: joined(k, x, move[k]) for k, x in g.items()} for g, move in zip(groups, moves, strict=True)))
    return jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), found)


def _in_turn(run: Callable[..., Any], moves: Any, groups: Any) -> Any:
    """One call after another."""
    from jax import lax

    mapped = [{k: x for k, x in g.items() if move[k]} for g, move in zip(groups, moves, strict=True)]
    return lax.map(lambda some: run(*({**g, **part} for g, part in zip(groups, some, strict=True))), mapped)
