"""Automatic sharding of attention: batch entries and heads go over the devices of a mesh, without a gather.

Heads as far as groups that share keys stay whole; lengths, sizes of heads, tables and numbers are on every device.
Scales of stored keys go with the keys; of a pool of pages every device of a batch has all pages, of its own heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from frisket.runtime.sharding.mesh import fitting, names_of

from .call import SHARD
from .task import AXES, NOWHERE, Task

WHOLE = ("s", "t", "d", "e", "g", "p", "c", "r")  # factors that are not split: lengths, sizes of heads, the heads of
# one group, pages, what is known of a row


_split: Any = custom_partitioning  # JAX leaves some of its functions untyped, and types others too narrowly
_spec: Any = PartitionSpec
_psum: Any = jax.lax.psum
_sharding_rule: Any = SdyShardingRule


def partitioned(task: Task, primitive: Any) -> Callable[..., Any]:
    """`task` on many devices, each of which binds `primitive`."""

    def run(*operands: Any) -> Any:
        return tuple(primitive.bind(*operands, task=task))

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        return _partition(task, primitive, mesh, operands, results)

    split = _split(run)
    split.def_partition(
        partition,
        sharding_rule=lambda mesh, operands, results: _rule(task, operands, results),
        infer_sharding_from_operands=lambda mesh, operands, results: _partition(
            task, primitive, mesh, operands, results
        )[2],
    )
    return split  # type: ignore[no-any-return]


def _rule(task: Task, operands: Any, results: Any) -> SdyShardingRule:
    """The axes that operands and results share: batch, kv heads, and mapped ones, by names."""
    g = task.call.geometry
    group = g.heads // g.kv_heads
    heads: Any = "n" if group == 1 else "g" if g.kv_heads == 1 else ("n", "g")
    alone: list[str] = []

    def axes(name: str, front: list[str], rank: int) -> tuple[Any, ...]:
        own = [heads if a == "h" else a for a in task.axes(name)]
        for _ in range(rank - len(front) - len(own)):
            alone.append(f"x{len(alone)}")
            own.append(alone[-1])
        return (*front, *own)

    mapped = [f"l{i}" for i in range(len(task.levels))]
    fronts = [[m for m, (_, moved) in zip(mapped, task.levels) if moved[i]] for i in range(len(task.names))]
    taken = tuple(axes(n, front, len(x.shape)) for n, front, x in zip(task.names, fronts, operands, strict=True))
    given = tuple(axes(n, mapped, len(x.shape)) for n, x in zip(task.results, results, strict=True))
    met = [f for array in (*taken, *given) for a in array for f in ([a] if isinstance(a, str) else a)]
    fixed = tuple(f for f in dict.fromkeys(met) if f in WHOLE or f in alone)  # in the order they are met in
    sizes = {"g": group} if heads == ("n", "g") else {}
    made: SdyShardingRule = _sharding_rule(taken, given, need_replication_factors=fixed, **sizes)
    return made


def _partition(task: Task, primitive: Any, mesh: Any, operands: Any, results: Any) -> Any:
    """(mesh, what a device does, shardings of results, of operands)."""
    g, depth = task.call.geometry, task.depth("q")
    spec = (*operands[0].sharding.spec, *[None] * len(operands[0].shape))
    batch = fitting(mesh.shape, spec[depth], g.batch)
    heads = fitting(mesh.shape, spec[depth + 2], g.kv_heads)
    where = {"b": batch, "h": heads, "n": heads}
    instances = [_instances(mesh, task, i, operands) for i in range(len(task.levels))]

    def sharding(name: str, front: list[Any], rank: int) -> NamedSharding:
        own = [where.get(a) for a in task.axes(name)]
        return NamedSharding(mesh, _spec(*front, *own, *[None] * (rank - len(front) - len(own))))

    fronts = [[x for x, (_, moved) in zip(instances, task.levels) if moved[i]] for i in range(len(task.names))]
    taken = tuple(sharding(n, f, len(x.shape)) for n, f, x in zip(task.names, fronts, operands, strict=True))
    given = tuple(sharding(n, instances, len(x.shape)) for n, x in zip(task.results, results, strict=True))
    parts = _parts(mesh, batch), _parts(mesh, heads)
    levels = tuple(
        (n // _parts(mesh, x), (*moved, False, False)) for x, (n, moved) in zip(instances, task.levels, strict=True)
    )
    mine = replace(task, call=task.call.shard(*parts), names=(*task.names, *SHARD), levels=levels)

    def run(*operands: Any) -> tuple[Any, ...]:
        at = (_index(axes) for axes in (batch, heads))
        found = primitive.bind(*operands, *at, task=mine)
        summed = (*names_of(batch), *names_of(heads))
        return tuple(
            _psum(x, summed) if summed and n not in AXES else x for n, x in zip(task.results, found, strict=True)
        )

    def alone(*operands: Any) -> tuple[Any, ...]:
        with jax.sharding.use_abstract_mesh(NOWHERE):  # a device knows nothing of explicit axes
            return run(*operands)

    return mesh, alone, given, taken


def _parts(mesh: Any, axes: Any) -> int:
    return math.prod(mesh.shape[a] for a in names_of(axes))


def _instances(mesh: Any, task: Task, level: int, operands: Any) -> Any:
    """How a mapped axis is split: as that of the first operand that has it."""
    n, moved = task.levels[level]
    first = moved.index(True)
    at = sum(m[first] for _, m in task.levels[:level])
    spec = (*operands[first].sharding.spec, *[None] * len(operands[first].shape))
    return fitting(mesh.shape, spec[at], n)


def _index(axes: Any) -> Any:
    return jax.numpy.int32(0) if axes is None else jax.lax.axis_index(names_of(axes)).astype("int32")
