"""Writes the Pallas forward kernel for TPU (Mosaic) of a LoopPlan, as the text of a module.

The walk over the tiles is `pallas_walk`, what expressions read is `pallas_inputs`; both serve the backward too.
"""

from __future__ import annotations

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import Expr
from frisket.dsl.types import FLOAT

from ..plan import Geometry, LoopPlan, Target
from . import pallas_inputs, pallas_walk
from .pallas_tpu_text import HEAD, SINK, SKELETON
from .text import filled

LANES = 128
DTYPES = ("float32", "bfloat16", "float16")
CAST = [
    "dtype = query.dtype  # float16, which TPUs neither compute nor write",
    "query, key, value = (x.astype(Float) for x in (query, key, value))",
]


def roots(plan: LoopPlan) -> list[Expr]:
    """The expressions that a forward kernel computes."""
    return [e for e in (plan.mask, plan.score, plan.kept) if e is not None]


def refused(plan: LoopPlan, dtype: str) -> str:
    """Why no TPU kernel computes this, or nothing."""
    if dtype not in DTYPES:
        return f'TPUs have no {dtype}; use float32 or bfloat16, or backend="xla" on CPU'
    if plan.int64:
        return (
            "an index of this mask may leave 32 bits and TPU kernels have no 64-bit integers; "
            'shrink the numbers in the mask, or use backend="xla"'
        )
    return ""


def check(plan: LoopPlan, target: Target, dtype: str) -> None:
    """Raise where there is no kernel of these tiles."""
    if why := refused(plan, dtype):
        raise LoweringError(why)
    if target.block_q % LANES or target.block_k % LANES:
        raise LoweringError(
            f"TPU tiles are multiples of {LANES}, not {target.block_q} x {target.block_k}; "
            f"pass tile=({LANES}, {LANES}) or a multiple"
        )


def head(title: str, plan: LoopPlan, target: Target, geometry: Geometry, dtype: str, needs_math: bool) -> str:
    """The beginning of a module: what it computes, imports, constants."""
    return filled(
        HEAD,
        title=title,
        text=[f"#     {line}".rstrip() for line in (plan.text or "every key").splitlines()],
        math=["import math"] if needs_math else [],
        block_q=target.block_q,
        block_k=target.block_k,
        group=geometry.heads // geometry.kv_heads,
        scale=repr(float(geometry.scale)),
        exact="DEFAULT" if dtype == "bfloat16" else "HIGHEST",
    )


def emit(
    plan: LoopPlan, target: Target, geometry: Geometry, dtype: str, sinks: bool = False, strided: bool = True
) -> str:
    """The module's source. Its `attention_forward(query, key, value, walk, origin, sizes, slots, tables, sinks)` takes
    JAX arrays [batch, length, heads, dim], a `pallas_walk.Walk`, and numbers and tables in the order of the plan; it
    gives (out, lse, top). With `sinks` it has them; `strided` is as of `Inputs`."""
    check(plan, target, dtype)
    inputs = pallas_inputs.place(roots(plan), strided=strided)
    numbers = [*pallas_walk.NAMES, "ints", "q_origin", "k_origin", *pallas_inputs.floats(plan), *["sinks"] * sinks]
    blocks = inputs.blocks
    shapes = [f"{n}_shape" for n in inputs.picked]
    return head("Attention forward", plan, target, geometry, dtype, inputs.needs_math) + filled(
        SKELETON,
        definitions=pallas_inputs.definitions(inputs),
        locate=pallas_walk.locate(grouped=False).splitlines(),
        refs=", ".join([*numbers, *(f"{n}_ref" for n in (*inputs.scalars, "q", "k", "v", *blocks))]),
        kept="".join(f"{n}, " for n in inputs.kept.values()),
        static=", ".join(["at", "kv_len", *shapes]),
        turned=pallas_inputs.turned(inputs),
        here=pallas_inputs.here(plan, inputs),
        score=_assigned(plan.score, inputs, "y", "s = jnp.broadcast_to({}, s.shape)"),
        seen=_assigned(plan.mask, inputs, "x", "s = jnp.where({}, s, -jnp.inf)"),
        drop=_assigned(plan.kept, inputs, "z", "p = jnp.where({}, p, 0.0)"),
        sink=SINK if sinks else [],
        out=_out(plan, sinks),
        cast=CAST if dtype == "float16" else [],
        narrowed=".astype(dtype)" if dtype == "float16" else "",
        before=[*pallas_inputs.before(plan, inputs), *["sinks = jnp.asarray(sinks, Float)"] * sinks],
        passed=", ".join([*numbers, *(inputs.picked.get(n, n) for n in inputs.scalars)]),
        number=len(numbers) + len(inputs.scalars),
        given=", ".join(["kv_len=kv_len", *(f"{n}_shape={n}.shape" for n in inputs.picked)]),
        specs=pallas_inputs.specs(inputs),
        scratch=pallas_inputs.scratch(inputs),
        operands=", ".join(["*scalars", "query", "key", "value", *blocks]),
    )  # fmt: skip


def _assigned(root: Expr | None, inputs: pallas_inputs.Inputs, temporary: str, form: str) -> list[str]:
    if root is None:
        return []
    lines, value = pallas_inputs.in_kernel(root, inputs, temporary)
    return [*lines, form.format(value)]


def _out(plan: LoopPlan, sinks: bool) -> str:
    out = "acc[...] * shrink" if sinks else "acc[...]"
    if plan.rate is None:
        return out
    return f"{out} / (1.0 - {_rate(plan)})"


def _rate(plan: LoopPlan) -> str:
    """Where the kernel finds the rate of dropout."""
    floating = [s.name for s in plan.slots if s.type is FLOAT]
    return f"floats[{floating.index(plan.rate or '')}]"
