"""Runs the Pallas backward kernels for Hopper on JAX arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frisket.dsl.errors import LoweringError
from frisket.grammar.memo import memo
from frisket.lowering.derive import Gradient
from frisket.lowering.kernels.pallas_gpu import backward as kernels
from frisket.lowering.kernels.pallas_gpu.forward import GpuWalk, walked
from frisket.lowering.kernels.triton.cotangents import sums
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource, Target
from frisket.runtime.backends.triton.jax import (
    folded,  # in fixed point: XLA's scatter on a GPU adds in any order
)
from frisket.runtime.machine.generated import load

from .forward import simulator

Array = Any  # a jax.Array, traced or not
LOG2E = 1.4426950408889634


def reason(
    plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Mapping[str, tuple[int, ...]], grad_names: frozenset[str]
) -> str:
    """A reason why the backward kernels cannot find the gradients of `grad_names`, or an empty text."""
    return kernels.refused(plan, geometry, dtype, shapes, grad_names)


def backward(
    plan: LoopPlan, spans: SpanSource, geometry: Geometry, q: Array, k: Array, v: Array, out: Array, lse: Array,
    dout: Array, dlse: Array | None, slots: Mapping[str, Any], tables: Mapping[str, Array], target: Target, *,
    grad_names: frozenset[str], sinks: Array | None = None, platform: str = "cpu",
    lse_residual: Array | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of sum(dout * out) + sum(dlse * lse) by name, for the names in `grad_names`: "q", "k", "v" in the shape
    and dtype of the array; tables and slots of the plan ("t0", "s1") in float32.

    `out` and `lse` are the forward's: where there were `sinks`, lse includes them, and that is all of them needed
    here; their own gradient is the caller's. `lse_residual` is the rounding error of lse. Equal calls give equal bits.
    Raises LoweringError with the words of `reason`."""
    import jax.numpy as jnp

    g = geometry
    if why := reason(plan, g, str(q.dtype), {n: tuple(x.shape) for n, x in tables.items()}, grad_names):
        raise LoweringError(why)
    arrays = {"q": q, "k": k, "v": v}
    if 0 in (g.batch, g.q_len, g.kv_len):
        zeros = {n: jnp.zeros(tables[n].shape if n in tables else (), jnp.float32) for n in grad_names - arrays.keys()}
        return zeros | {n: jnp.zeros_like(x) for n, x in arrays.items() if n in grad_names}
    dout = dout.astype(q.dtype)
    delta = jnp.einsum("bqhd,bqhd->bhq", out.astype(jnp.float32), dout.astype(jnp.float32))
    if dlse is not None:
        delta = delta - dlse
    # a row without keys has no gradient: p = exp2(s - inf) is 0
    lse2 = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)
    low2 = jnp.zeros_like(lse2) if lse_residual is None else lse_residual * LOG2E
    interpret = None if platform == "cuda" else simulator()
    numbers = [jnp.asarray(slots[s.name]) for s in plan.slots]
    operands = q, k, v, dout, lse2, low2, delta
    grads: dict[str, Array] = {}
    common = g.origin, g.full, numbers, [tables[t.name] for t in plan.tables]
    plain = Geometry(1, g.heads // g.kv_heads, 1, 1, 1, g.head_dim, g.v_dim, g.scale)  # what the text depends on
    of_dq, of_dkv = (Target(target.backend, *tile, tanh=target.tanh) for tile in kernels.tiles(g))
    dq, dkv = target.dq or of_dq, target.dkv or of_dkv
    buffers: dict[Gradient, Array] = {}
    rows = grad_names - {"k", "v"}
    if rows:
        run = _loaded(plan, dq, plain, rows, interpret is not None)["attention_dq"]
        walk = _walked(walked(spans.rows((dq.block_q, dq.block_k))).in_order())
        results = list(run(*operands, *walk, *common, interpret=interpret))
        if "q" in grad_names:
            grads["q"] = results.pop(0)
        for s, x in zip(sums(plan, rows), results, strict=True):
            x = x[..., : g.q_len]
            buffers[s.gradient] = x.sum(-1) if s.gradient.over == "head" else x
    for part in kernels.parts(g, grad_names):
        run = _loaded(plan, dkv, plain, part, interpret is not None)["attention_dkv"]
        walk = _walked(walked(spans.columns((dkv.block_q, dkv.block_k))))
        results = run(*operands, *walk, *common, interpret=interpret)
        grads |= dict(zip(sorted(part, reverse=True), results, strict=True))
    grads |= folded(buffers, g, slots, tables, plan.int64)
    without = grad_names - grads.keys()  # influence
    return grads | {n: jnp.zeros(tables[n].shape if n in tables else (), jnp.float32) for n in without}


@memo(group="kernels")
def _loaded(
    plan: LoopPlan, target: Target, geometry: Geometry, grad_names: frozenset[str], interpretable: bool
) -> dict[str, Any]:
    return load(kernels.emit(plan, target, geometry, grad_names, interpretable=interpretable))


def _walked(walk: GpuWalk) -> list[Array]:
    import jax.numpy as jnp

    return [jnp.asarray(x, jnp.int32) for x in walk]
