"""Runs the Pallas forward kernel for Hopper on JAX arrays, traced or not: on a GPU, elsewhere in Mosaic GPU's
interpreter, slow and for checking only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from frisket.dsl.errors import LoweringError
from frisket.lowering.kernels.pallas_gpu import forward as pallas_gpu
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource, Target
from frisket.runtime.backends.pallas_tpu.forward import kernel

if TYPE_CHECKING:
    import jax

BACKEND = "pallas-mosaic-gpu"
KEYS = {64: 128, 128: 128, 192: 64, 256: 64}  # of a tile, by dims: what benchmarks/gpu_model.py finds fastest


def target(
    plan: LoopPlan, geometry: Geometry, dtype: str, tile: tuple[int, int] | None = None, narrow: bool = False
) -> Target:
    """The tiles a Hopper starts from, 64 queries for each warpgroup. Where rows see few keys they are no smaller: what
    a program takes beside its tiles is more than what smaller ones leave out. tanh is the machine's own unless
    `jax_default_matmul_precision` is "highest", as in Triton's kernels."""
    import jax

    dim, v_dim = pallas_gpu.dims(geometry.head_dim), pallas_gpu.dims(geometry.v_dim)
    block_q, block_k = tile or (128, KEYS.get(max(dim, v_dim), 64))
    ahead = max(2, pallas_gpu.stages(block_q, block_k, dim, v_dim))
    precision = getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009 - mypy knows it not
    return Target(BACKEND, block_q, block_k, 4, ahead, tanh="exact" if precision == "highest" else "approximate")


def reason(plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A reason why the forward kernel cannot run a call, or an empty text. `shapes` are those of the plan's tables."""
    return pallas_gpu.refused(plan, geometry, dtype, shapes)


def forward(
    plan: LoopPlan, spans: SpanSource, geometry: Geometry, q: jax.Array, k: jax.Array, v: jax.Array,
    slots: Mapping[str, Any], tables: Mapping[str, Any], target: Target, *, sinks: jax.Array | None = None,
    platform: str = "cpu", lse_residual: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """(out [batch, q_len, heads, v_dim], lse, top [batch, heads, q_len]) of q [batch, q_len, heads, dim], k, v
    [batch, kv_len, kv_heads, dim] and sinks [heads]; with `lse_residual` the rounding error of lse too. Raises
    LoweringError with the words of `reason`."""
    dtype = str(q.dtype)
    if why := reason(plan, geometry, dtype, {name: tuple(x.shape) for name, x in tables.items()}):
        raise LoweringError(why)
    g, on_device = geometry, platform == "cuda"
    if 0 in (g.batch, g.q_len, g.kv_len):
        return _nothing(g, dtype, sinks)[: 3 + lse_residual]
    run = kernel(pallas_gpu.emit, plan, target, geometry, dtype, sinks is not None, not on_device, lse_residual)
    numbers = [slots[s.name] for s in plan.slots], [tables[t.name] for t in plan.tables]
    options = {} if sinks is None else {"sinks": sinks}
    if not on_device:
        options["interpret"] = simulator()
    walk = pallas_gpu.walked(spans.rows((target.block_q, target.block_k))).in_order()
    return run(q, k, v, *walk, geometry.origin, geometry.full, *numbers, **options)  # type: ignore[no-any-return]


def text(
    plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, learned: Collection[str] = (),
    spans: SpanSource | None = None,
) -> tuple[str, Target]:  # fmt: skip
    """The forward kernel's text, and its target."""
    return pallas_gpu.emit(plan, target, g, dtype, sinks), target


def simulator(**more: Any) -> Any:
    """Parameters of Mosaic GPU's interpreter."""
    module = import_module("jax.experimental.pallas.mosaic_gpu")
    if not hasattr(module, "InterpretGPUParams"):  # JAX 0.10
        module = import_module("jax._src.pallas.mosaic_gpu.interpret.params")
    return module.InterpretGPUParams(**more)


def _nothing(g: Geometry, dtype: str, sinks: jax.Array | None) -> tuple[jax.Array, ...]:
    """Without queries or keys."""
    import jax.numpy as jnp

    top = jnp.full((g.batch, g.heads, g.q_len), -jnp.inf, jnp.float32)
    lse = top if sinks is None else jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], top.shape)
    return jnp.zeros((g.batch, g.q_len, g.heads, g.v_dim), dtype), lse, top, jnp.zeros_like(top)
