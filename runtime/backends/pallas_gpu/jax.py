"""The Pallas kernels for Hopper on JAX arrays, traced or not: on a GPU, elsewhere in Mosaic GPU's interpreter.

The interpreter is slow, and for checking only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from frisket.dsl.errors import LoweringError
from frisket.grammar.memo import memo
from frisket.lowering.derive import Gradient, captured
from frisket.lowering.kernels.pallas_gpu import backward as kernels
from frisket.lowering.kernels.pallas_gpu import forward as pallas_gpu
from frisket.lowering.kernels.pallas_gpu.kernel import dims
from frisket.lowering.plan import Cotangents, ForwardResults, Geometry, KernelInputs, LoopPlan, Names, Target
from frisket.lowering.xla.captured import folded_in_fixed_point
from frisket.runtime.backends.base import Block, Shapes
from frisket.runtime.backends.pallas_tpu.jax import kernel, of_text
from frisket.runtime.machine.modules import load_source

if TYPE_CHECKING:
    import jax

BACKEND = "pallas-mosaic-gpu"
KEYS = {64: 128, 128: 128, 192: 64, 256: 64}  # of a tile, by dims: what benchmarks/gpu_model.py finds fastest
Array = Any  # a jax.Array, traced or not
LOG2E = 1.4426950408889634


def target(plan: LoopPlan, geometry: Geometry, dtype: str, tile: Block | None = None, narrow: bool = False) -> Target:
    """The tiles a Hopper starts from, 64 queries for each warpgroup. Where rows see few keys they are no smaller: what
    a program takes besides its tiles is more than what smaller ones leave out. tanh is the machine's own unless
    `jax_default_matmul_precision` is "highest", as in Triton's kernels."""
    import jax

    dim, v_dim = dims(geometry.head_dim), dims(geometry.v_dim)
    block_q, block_k = tile or (128, KEYS.get(max(dim, v_dim), 64))
    ahead = max(2, pallas_gpu.stages(block_q, block_k, dim, v_dim))
    precision = getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009 - mypy knows it not
    return Target(BACKEND, block_q, block_k, 4, ahead, tanh="exact" if precision == "highest" else "approximate")


def refuses(plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Shapes) -> str:
    """A reason why the forward kernel cannot run a call, or an empty text. `shapes` are those of the plan's tables."""
    return pallas_gpu.refused(plan, geometry, dtype, shapes)


def forward(
    inputs: KernelInputs, q: jax.Array, k: jax.Array, v: jax.Array, *, lse_residual: bool = False
) -> tuple[jax.Array, ...]:
    """(out [batch, q_len, heads, v_dim], lse, top [batch, heads, q_len]) of q [batch, q_len, heads, dim], k, v
    [batch, kv_len, kv_heads, dim] and sinks [heads]. With `lse_residual` the rounding error of lse too. Raises
    LoweringError with the words of `refuses`."""
    plan, g, target, sinks, dtype = inputs.plan, inputs.geometry, inputs.target, inputs.sinks, str(q.dtype)
    if why := refuses(plan, g, dtype, inputs.table_shapes):
        raise LoweringError(why)
    on_device = inputs.platform == "cuda"
    if 0 in (g.batch, g.q_len, g.kv_len):
        return _nothing(g, dtype, sinks)[: 3 + lse_residual]
    run = kernel(pallas_gpu.emit, plan, target, g, dtype, sinks is not None, not on_device, lse_residual)
    options = {} if sinks is None else {"sinks": sinks}
    if not on_device:
        options["interpret"] = simulator()
    walk = pallas_gpu.walked(inputs.spans.rows((target.block_q, target.block_k))).in_order()
    return run(q, k, v, *walk, *inputs.operands, **options)  # type: ignore[no-any-return]


def text(plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, *_: Any) -> tuple[str, Target]:
    """The forward kernel's text, and its target."""
    return pallas_gpu.emit(plan, target, g, dtype, sinks), target


def simulator(**more: Any) -> Any:
    """Parameters of Mosaic GPU's interpreter."""
    from jax.experimental.pallas import mosaic_gpu

    module: Any = mosaic_gpu
    if not hasattr(module, "InterpretGPUParams"):  # JAX 0.10
        from jax._src.pallas.mosaic_gpu.interpret import params as module
    return module.InterpretGPUParams(**more)


def _nothing(g: Geometry, dtype: str, sinks: jax.Array | None) -> tuple[jax.Array, ...]:
    """Without queries or keys."""
    import jax.numpy as jnp

    top = jnp.full((g.batch, g.heads, g.q_len), -jnp.inf, jnp.float32)
    lse = top if sinks is None else jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], top.shape)
    return jnp.zeros((g.batch, g.q_len, g.heads, g.v_dim), dtype), lse, top, jnp.zeros_like(top)


# -- gradients ---------------------------------------------------------------------------------------


def refuses_gradients(plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Shapes, names: frozenset[str]) -> str:
    """A reason why the backward kernels cannot find the gradients of `names`, or an empty text."""
    return kernels.refused(plan, geometry, dtype, shapes, names)


def backward(
    inputs: KernelInputs, q: Any, k: Any, v: Any, results: ForwardResults, cotangents: Cotangents, *, grad_names: Names
) -> dict[str, Array]:
    """Gradients of sum(dout * out) + sum(dlse * lse) by name, for the names in `grad_names`: "q", "k", "v" in the shape
    and dtype of the array. Tables and slots of the plan ("t0", "s1") in float32.

    `out` and `lse` are the forward's: where there were sinks, lse includes them, and that is all of them needed
    here; their own gradient is the caller's. Equal calls give equal bits.
    Raises LoweringError with the words of `refuses_gradients`."""
    import jax.numpy as jnp

    plan, g, spans, tables, target = inputs.plan, inputs.geometry, inputs.spans, inputs.tables, inputs.target
    if why := refuses_gradients(plan, g, str(q.dtype), inputs.table_shapes, grad_names):
        raise LoweringError(why)
    arrays = {"q": q, "k": k, "v": v}
    if 0 in (g.batch, g.q_len, g.kv_len):
        zeros = {n: jnp.zeros(tables[n].shape if n in tables else (), jnp.float32) for n in grad_names - arrays.keys()}
        return zeros | {n: jnp.zeros_like(x) for n, x in arrays.items() if n in grad_names}
    dout, lse = cotangents.dout.astype(q.dtype), results.lse
    delta = jnp.einsum("bqhd,bqhd->bhq", results.out.astype(jnp.float32), dout.astype(jnp.float32))
    if cotangents.dlse is not None:
        delta = delta - cotangents.dlse
    # a row without keys has no gradient: p = exp2(s - inf) is 0
    lse2 = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)
    residual2 = jnp.zeros_like(lse2) if results.lse_residual is None else results.lse_residual * LOG2E
    interpret = None if inputs.platform == "cuda" else simulator()
    operands = q, k, v, dout, lse2, residual2, delta
    grads: dict[str, Array] = {}
    origin, sizes, slots, arrays_of_plan = inputs.operands
    common = origin, sizes, [jnp.asarray(x) for x in slots], arrays_of_plan
    of_dq, of_dkv = (Target(target.backend, *tile, tanh=target.tanh) for tile in kernels.tiles(g))
    dq, dkv = target.dq or of_dq, target.dkv or of_dkv
    buffers: dict[Gradient, Array] = {}
    rows = grad_names - {"k", "v"}
    if rows:
        run = _loaded(plan, dq, of_text(g), rows, interpret is not None)["attention_dq"]
        walk = _operands(pallas_gpu.walked(spans.rows((dq.block_q, dq.block_k))).in_order())
        outputs = list(run(*operands, *walk, *common, interpret=interpret))
        if "q" in grad_names:
            grads["q"] = outputs.pop(0)
        for (_, gradient), x in zip(captured(plan, rows), outputs, strict=True):
            x = x[..., : g.q_len]
            buffers[gradient] = x.sum(-1) if gradient.over == "head" else x
    for part in kernels.parts(g, grad_names):
        run = _loaded(plan, dkv, of_text(g), part, interpret is not None)["attention_dkv"]
        walk = _operands(pallas_gpu.walked(spans.columns((dkv.block_q, dkv.block_k))))
        outputs = run(*operands, *walk, *common, interpret=interpret)
        grads |= dict(zip(sorted(part, reverse=True), outputs, strict=True))
    grads |= folded_in_fixed_point(inputs, buffers)
    without = grad_names - grads.keys()  # influence
    return grads | {n: jnp.zeros(tables[n].shape if n in tables else (), jnp.float32) for n in without}


@memo(group="kernels")
def _loaded(plan: LoopPlan, target: Target, g: Geometry, names: frozenset[str], interpretable: bool) -> dict[str, Any]:
    return load_source(kernels.emit(plan, target, g, names, interpretable=interpretable))


def _operands(walk: pallas_gpu.GpuWalk) -> list[Array]:
    import jax.numpy as jnp

    return [jnp.asarray(x, jnp.int32) for x in walk]
