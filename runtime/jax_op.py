"""Runs a plan on JAX arrays: the one door from `attention.py` to the JAX backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from frisket.dsl.errors import BackendError, BackwardError, LoweringError, ParameterError
from frisket.dsl.types import FLOAT
from frisket.lowering import xla
from frisket.lowering.emit import pallas_tpu
from frisket.lowering.flat import DeviceSpans
from frisket.lowering.plan import Geometry, LoopPlan, Spans, Target

from .modules import load

if TYPE_CHECKING:
    import jax

BACKENDS = ("xla", "pallas-tpu")
TILES = {"xla": (256, 128), "pallas-tpu": (512, 512)}


def default_target(backend: str, geometry: Geometry) -> Target:
    """The tiles a backend starts from, no larger than the problem needs."""
    block_q, block_k = TILES[backend]
    if backend == "pallas-tpu":
        lanes = pallas_tpu.LANES
        block_q, block_k = (
            min(block, -(-length // lanes) * lanes)
            for block, length in ((block_q, geometry.q_len), (block_k, geometry.kv_len))
        )
    return Target(backend, block_q, block_k)


def forward(
    plan: LoopPlan,
    spans: Spans | DeviceSpans,
    geometry: Geometry,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: Mapping[str, Any],
    tables: Mapping[str, Any],
    target: Target,
    backend: str,
    *,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(out [batch, q_len, heads, v_dim], lse, top [batch, heads, q_len]) of q [batch, q_len, heads, dim], k, v
    [batch, kv_len, kv_heads, dim] and sinks [heads]. `top` is None of a backend that has no max scores. `target` is
    the one the spans were made for. Without a TPU `pallas-tpu` runs in Pallas' interpreter: slow, and for checking
    only."""
    if backend not in BACKENDS:
        raise BackendError(f"no JAX backend {backend!r}; there are {', '.join(BACKENDS)}")
    tables = {t.name: _narrow(t.source, t.type is FLOAT, tables[t.name], plan.int64) for t in plan.tables}
    given = slots, tables, target
    if backend == "xla":
        attend = _forward_only(lambda q, k, v: xla.forward(plan, spans, geometry, q, k, v, *given, sinks=sinks))
    else:
        attend = _forward_only(lambda q, k, v: (*_run_pallas(plan, spans, geometry, q, k, v, *given), None))
    result: tuple[jax.Array, jax.Array, jax.Array | None] = attend(q, k, v)
    return result


def _forward_only(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with a gradient that says there is none, where JAX would differentiate loops it happens to be able to."""
    import jax

    def refuse(*arrays: Any) -> Any:
        raise BackwardError(
            "a gradient of attention is asked for; the backward comes with the native kernels, in a later version\n"
            "  for the forward alone wrap q, k and v in jax.lax.stop_gradient"
        )

    guarded = jax.custom_vjp(run)
    guarded.defvjp(refuse, refuse)
    return guarded


def _run_pallas(
    plan: LoopPlan, spans: Spans | DeviceSpans, geometry: Geometry, q: jax.Array, k: jax.Array, v: jax.Array,
    slots: Mapping[str, Any], tables: Mapping[str, Any], target: Target,
) -> Any:  # fmt: skip
    import jax

    if isinstance(spans, DeviceSpans):
        raise LoweringError(
            "the pallas-tpu kernel walks a grid as long as its runs of tiles, which traced tables do not tell; take "
            "backend='xla', or make the plan outside jax.jit from values"
        )

    pallas_tpu.check_tables(plan, {name: tuple(table.shape) for name, table in tables.items()})
    steps, *walk = pallas_tpu.walk_of(spans)
    run = _pallas(plan, target, replace(geometry, origin=(0, 0, 0, 0), sizes=None), str(q.dtype))
    return run(
        q, k, v, steps, *walk, geometry.origin, geometry.full,
        [slots[s.name] for s in plan.slots], [tables[t.name] for t in plan.tables],
        interpret=jax.default_backend() != "tpu",
    )  # fmt: skip


def _narrow(source: str, floating: bool, table: Any, int64: bool) -> Any:
    """A table in the integers JAX has; numbers that do not fit are an error, not other numbers."""
    import jax.numpy as jnp

    whole = isinstance(table, np.ndarray) and table.dtype.kind in "iu" and table.size
    wide = np.iinfo(np.int32)
    if whole and not floating and not int64 and (table.max() > wide.max or table.min() < wide.min):
        raise ParameterError(
            f"table `{source}` holds numbers beyond 32 bits, the kernel has 32-bit integers; renumber it"
        )
    return jnp.asarray(table)


@lru_cache(maxsize=64)
def _pallas(plan: LoopPlan, target: Target, geometry: Geometry, dtype: str) -> Callable[..., Any]:
    import jax

    source = pallas_tpu.emit(plan, target, geometry, dtype)
    module = load(source)
    return jax.jit(module["attention_forward"], static_argnames=("steps", "interpret"))
