"""`jax.vmap` of attention: instances beside one another in one call where the mask cannot tell, otherwise in turn.

`jax.vmap` of the executors themselves would run every row as often as the longest and gather every slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from frisket.lowering.plan import FIRST, K_SCALE, PAGES, V_SCALE

if TYPE_CHECKING:
    from .task import Task

# where instances beside one another go: in the batch, or among the heads
FOLDS = (
    {"q": 0, "k": 0, "v": 0, "out": 0, "lse": 0, "low": 0, "norm": 0, "top": 0, "dout": 0, "dlse": 0, K_SCALE: 0,
     V_SCALE: 0},
    {"q": 2, "k": 2, "v": 2, "out": 2, "lse": 1, "low": 1, "norm": 1, "top": 1, "dout": 2, "dlse": 1, K_SCALE: 2,
     V_SCALE: 2},
)  # fmt: skip


def mapped(primitive: Any, axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, task: Task) -> Any:
    """The batching rule of a primitive."""
    where = {n: d for n, d in zip(task.names, dims, strict=True) if isinstance(d, int)}
    n = axis.size
    if n and (fold := _fold(task, where)) is not None:
        return _beside(primitive, fold, n, operands, where, task)
    front = [jnp.moveaxis(x, where[name], 0) if name in where else x for name, x in zip(task.names, operands)]
    level = n, tuple(name in where for name in task.names)
    found = primitive.bind(*front, task=replace(task, levels=(level, *task.levels)))
    return found, [0] * len(found)


def _fold(task: Task, where: dict[str, int]) -> int | None:
    """The place of mapped instances: 0, the batch; 1, the heads; None: they run one after another."""
    call, names = task.call, set(task.names)
    if (
        task.levels
        or {PAGES, FIRST} & names
        or not where.keys() <= FOLDS[0].keys()
        or not set(task.wanted) <= {"q", "k", "v"}
    ):
        return None
    whole = {"q", "k", "v"} <= where.keys()
    near = all(where[n] in (2, 3) for n in ("q", "k", "v") if n in where)  # no array is turned round
    shared = not task.wanted and call.geometry.kv_heads == 1 and where.keys() == {"q"}  # heads of one group more
    if (whole or shared) and near and call.alike(1) and "sinks" not in names:
        return 1
    return 0 if whole and call.alike(0) else None


def _beside(
    primitive: Any, axis: int, n: int, operands: Sequence[Any], where: dict[str, int], task: Task
) -> tuple[list[Any], list[int]]:
    """One call with the mapped axis in another one; arrays that are not mapped are repeated, but for shared keys."""
    places, shared = FOLDS[axis], not {"k", "v"} & where.keys()

    def joined(name: str, x: Any) -> Any:
        if name not in places or (shared and name in ("k", "v", K_SCALE, V_SCALE)):
            return x
        at = places[name]
        if name in where:
            x = jnp.moveaxis(x, where[name], at)
        else:
            x = jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], n, *x.shape[at:]))
        return x.reshape(*x.shape[:at], n * x.shape[at + 1], *x.shape[at + 2 :])

    call = task.call.repeated(n, axis, shared)
    found = primitive.bind(*map(joined, task.names, operands), task=replace(task, call=call))
    back = [places[name] for name in task.results]
    return [x.reshape(*x.shape[:at], n, -1, *x.shape[at + 1 :]) for x, at in zip(found, back, strict=True)], back
